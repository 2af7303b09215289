"""The names of tensors in adapters: LoRA, LoHa and LoKr as PEFT, kohya, LyCORIS, diffusers and ai-toolkit write them;
and where their changes go: the names of a base, also under another prefix, and kohya's without their dots.

    PEFT        base_model.model.MODULE.lora_A.weight, .lora_embedding_A, .lora_magnitude_vector, .lora_B.bias,
                .token_adapter.trainable_tokens_delta (whole rows)
    kohya       lora_unet_MODULE.lora_down.weight, .lora_up.weight, .lora_mid.weight, .alpha, .dora_scale (MODULE with
                underscores for dots); LyCORIS: .hada_w1_a, .lokr_w1, .diff
    diffusers   unet.MODULE.lora_A.weight; older: .lora.down.weight, .processor.to_q_lora.down.weight
    ai-toolkit  diffusion_model.MODULE.lora_A.weight

Sources: peft/utils/save_and_load.py, kohya-ss/sd-scripts networks/lora.py, lycoris/modules, diffusers
loaders/lora_conversion_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from ckptool.checkpoint import TensorEntry
from ckptool.errors import Conflict, counted, listed, printable

PEFT, KOHYA, DIFFUSERS, AI_TOOLKIT = "PEFT", "kohya", "diffusers", "ai-toolkit"
LORA, LOHA, LOKR, DIFF, BIAS, WHOLE = "LoRA", "LoHa", "LoKr", "difference", "bias", "whole tensor"
TOKENS = "trainable tokens"

_COMPONENTS = (
    (PEFT, re.compile(r"base_model\.model\.")),
    (AI_TOOLKIT, re.compile(r"diffusion_model\.")),
    (KOHYA, re.compile(r"(?:lora_(?:unet|te\d?|transformer|prior_unet|prior_te|controlnet)|lycoris)_(?=[^.]+\.)")),
    (DIFFUSERS, re.compile(r"(?:unet|text_encoder(?:_\d)?|transformer(?:_\d)?|prior|controlnet)\.")),
)
_ROLE = re.compile(
    r"(?P<module>.+?)(?:"
    r"\.lora_(?P<side>[AB])(?:\.[^.]+)??\.(?P<of>weight|bias)"
    r"|\.lora_embedding_(?P<embedding>[AB])(?:\.[^.]+)?"
    r"|\.(?P<magnitude>lora_magnitude_vector|dora_scale)(?:\.[^.]+){0,2}"
    r"|(?:\.lora_|\.lora\.|\.lora_linear_layer\.|_lora\.)(?P<half>down|up|mid)\.weight"
    r"|(?:\.token_adapter)?\.trainable_(?P<tokens>tokens)_delta(?:\.[^.]+)?"
    r"|\.(?P<other>alpha|hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2|diff|diff_b|w_norm|b_norm)"
    r")"
)
_HALVES = {"down": "A", "up": "B", "mid": "mid"}
_WHOLE = re.compile(r"\.modules_to_save(?:\.default)?(?=\.)")
RANKED = ("A", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")  # the factors whose first dimension is the rank
_METHODS = {"": WHOLE, "A": LORA, "B": LORA, "mid": LORA, "tokens": TOKENS} | dict.fromkeys(
    ("B.bias", "diff_b", "b_norm"), BIAS
)


class AdapterKey(NamedTuple):
    """A key of an adapter, taken apart.

    component: the prefix that says which model it is for (`base_model.model.`, `lora_unet_`), empty for none.
    module: that it changes; for kohya with underscores for dots.  role: `A`, `B`, `mid`, `alpha`, `magnitude`,
    `B.bias`, `tokens`, `hada_w1_a`, …; empty for a whole tensor, whose name `module` is then.
    embedding: A and B are those of an embedding.  depth: wrappers of PEFT around the module, one for each further
    parameter of it that is changed.
    """

    scheme: str
    component: str
    module: str
    role: str
    embedding: bool = False
    depth: int = 0


def adapter_key(key: str, scheme: str | None = None) -> AdapterKey:
    """A key taken apart. scheme: that of the file, where it is known; else recognized by how the key begins."""
    found, component = scheme or PEFT, ""
    for name, prefix in _COMPONENTS:
        if scheme in (None, name) and (match := prefix.match(key)):
            found, component = name, match[0]
            break
    name = key[len(component) :]
    match = _ROLE.fullmatch(name)
    if match is None or (found == PEFT and (match["other"] or "").startswith(("diff", "w_", "b_"))):
        whole = _WHOLE.sub("", name).replace(".token_adapter.base_layer.", ".").replace(".base_layer.", ".")
        return AdapterKey(found, component, whole, "")
    module = match["module"]
    if ".processor." in module and key.endswith(("_lora.down.weight", "_lora.up.weight")):
        module = re.sub(r"\.to_out$", ".to_out.0", module.replace(".processor.", "."))
    inner = re.sub(r"(?:\.base_layer)+$", "", module)
    depth = (len(module) - len(inner)) // len(".base_layer")
    role = match["side"] or match["embedding"] or _HALVES.get(match["half"]) or match["tokens"] or match["other"]
    role = role or "magnitude"
    role += ".bias" if match["of"] == "bias" else ""
    return AdapterKey(found, component, inner.replace(".base_layer.", "."), role, bool(match["embedding"]), depth)


_PEFT_ENDS = {"A": "lora_A.weight", "B": "lora_B.weight", "B.bias": "lora_B.bias", "magnitude": "lora_magnitude_vector"}
_ENDS = {
    PEFT: _PEFT_ENDS,
    DIFFUSERS: _PEFT_ENDS,
    KOHYA: {"A": "lora_down.weight", "B": "lora_up.weight", "alpha": "alpha"},
}


def written_key(scheme: str, component: str, module: str, role: str, embedding: bool = False) -> str:
    """The key of a part of a change, as `adapter_key` takes it apart."""
    return f"{component}{module}." + (f"lora_embedding_{role}" if embedding and role in "AB" else _ENDS[scheme][role])


# Names with underscores in the modules of diffusers' UNets and of CLIP; all others in there have none.
_WORDS = (
    "down_blocks up_blocks mid_block transformer_blocks to_q to_k to_v to_out proj_in proj_out time_emb_proj conv_in "
    "conv_out conv_shortcut time_embedding linear_1 linear_2 add_embedding text_model self_attn q_proj k_proj v_proj "
    "out_proj text_projection"
).split()
_PLAIN = (
    "attentions resnets attn1 attn2 ff net proj conv1 conv2 downsamplers upsamplers conv encoder layers mlp fc1 fc2"
)
_WORD = re.compile(rf"({'|'.join([*_WORDS, *sorted(_PLAIN.split(), key=len, reverse=True)])}|\d+)(?:_(?!$)|$)")


def split_words(module: str) -> str:
    """kohya's name of a module with its dots, for modules of diffusers' UNets and of CLIP; empty for others."""
    words = [match[1] for match in _WORD.finditer(module)]
    return ".".join(words) if "_".join(words) == module else ""


def method_of(role: str) -> str:
    """The method that a tensor belongs to."""
    return LOHA if role.startswith("hada_") else LOKR if role.startswith("lokr_") else _METHODS.get(role, DIFF)


def is_factor(role: str) -> bool:
    """True for one of the tensors that a change is computed from, as no other checkpoint has."""
    return method_of(role) in (LORA, LOHA, LOKR)


def adapter_detail(node: Mapping[Any, Any]) -> str:
    """An adapter's state dict in words: `LoRA adapter, PEFT names, rank 8, of 24 modules (q_proj, v_proj)`.

    Empty for what is none: at least a quarter of the keys of an adapter are factors.
    """
    texts = [key for key in node if type(key) is str]
    factors = {key: of for key in texts if is_factor((of := adapter_key(key)).role)}
    if not factors or 4 * len(factors) < len(texts):
        return ""
    shapes = [getattr(node[key], "shape", None) for key, of in factors.items() if of.role in RANKED]
    found = factors.values()
    methods, schemes = sorted({method_of(each.role) for each in found}), sorted({each.scheme for each in found})
    modules = {(each.component, each.module, each.depth) for each in found}
    leaves = sorted({each.module.rpartition(".")[2] for each in found})
    names = "" if next(iter(found)).scheme == KOHYA else f" ({printable(listed(leaves, 6))})"
    ranks = sorted({shape[0] for shape in shapes if shape and len(shape) > 1})
    rank = f", rank {listed(ranks, 4)}" if ranks else ""
    kind = f"{' and '.join(methods)} adapter, {' and '.join(schemes)} names"
    return f"{kind}{rank}, of {counted(len(modules), 'module')}{names}"


# Places in a base -----------------------------------------------------------------------------------------------------

_CANDIDATES = 100  # of a name: with more there is no telling anyway
_SAMPLES = 3  # of an adapter's names, from which the prefixes are taken that all of them are then tried with
Spellings = Sequence[str]
"""The names that a tensor may have, the first that there is."""


def _moved(name: str, removed: str, added: str) -> str:
    return added + name.removeprefix(removed) if name.startswith(removed) else ""


class Places:
    """The names of a base, and with which prefix in the place of which those of each of an adapter's components become
    them.

    underscored: as kohya spells modules, `a.b_c.weight` as `a_b_c.weight`.
    """

    def __init__(self, names: Iterable[str], *, underscored: bool = False) -> None:
        self.separator = "_" if underscored else "."
        self.prefixes: dict[str, tuple[str, str]] = {}
        self.names: dict[str, list[str]] = {}
        for name in names:
            module, dot, leaf = name.rpartition(".")
            self.names.setdefault(module.replace(".", self.separator) + dot + leaf, []).append(name)

    def settle(self, component: str, wanted: Sequence[Spellings]) -> None:
        """Finds the prefixes by which most of the wanted names are found. Raises `Conflict` where two find equally
        many."""
        hits = {("", ""): self._hits(wanted)}
        samples = wanted[:: max(1, len(wanted) // _SAMPLES)] if hits["", ""] < len(wanted) else ()
        for prefixes in (each for spellings in samples for each in self._candidates(spellings)):
            if prefixes not in hits:
                hits[prefixes] = self._hits(wanted, *prefixes)
        best = [prefixes for prefixes, count in hits.items() if count == max(hits.values())]
        if best[0] != ("", ""):
            shortest = min(len(removed) for removed, _ in best)  # `a.b` for `b` says no more than `a` for nothing
            best = [(removed, added) for removed, added in best if len(removed) == shortest]
            if len(best) > 1:
                places = listed([added for _, added in best])
                what = f"the base has the adapter's names {counted(len(best), 'time')}: under {places}"
                raise Conflict(what, "The adapter fits each of them.", "Name the part: BASE#ADDRESS")
        self.prefixes[component] = best[0]

    def moved(self) -> list[str]:
        """Which prefixes are others, in words."""
        shown = ([repr(one) if one else "no prefix" for one in both] for both in self.prefixes.values() if any(both))
        return list(dict.fromkeys(f"the adapter's names begin with {a}, the base's with {b}" for a, b in shown))

    def in_base(self, component: str, name: str) -> str:
        """An adapter's name as the base has it; empty for one that does not begin as its prefix."""
        return _moved(name, *self.prefixes.get(component, ("", "")))

    def key(self, component: str, names: Spellings) -> str | None:
        """The base's name for the first of an adapter's that it has, or None. Raises `Conflict` where there are two."""
        for name in names:
            found = self.names.get(self.in_base(component, name), [])
            if len(found) > 1:
                what = f"{name} is {listed(found)}"
                raise Conflict(what, "Without their dots these names are equal. Nothing was written.")
            if found:
                return found[0]
        return None

    def _hits(self, wanted: Sequence[Spellings], removed: str = "", added: str = "") -> int:
        return sum(any(_moved(name, removed, added) in self.names for name in spellings) for spellings in wanted)

    def _candidates(self, spellings: Spellings) -> Iterator[tuple[str, str]]:
        """The prefixes to remove and to add by which names of the base have the longest end that any has."""
        for name in spellings:
            module = name.rpartition(".")[0]
            cuts = [place + 1 for place, letter in enumerate(module) if letter == self.separator == "."]
            for cut in [0, *cuts[:8]]:
                ends = (name[cut:], self.separator + name[cut:])
                same = [each for each in self.names if each == ends[0] or each.endswith(ends[1])]
                yield from [(name[:cut], each.removesuffix(ends[0])) for each in same[:_CANDIDATES]]
                if same:
                    break


def is_linear(module: str, shapes: Mapping[Any, Sequence[int] | None]) -> bool:
    """True where the weight of a module is known to be a matrix or kernels that the input is multiplied with, not a
    table of embeddings: by the last part of its name, its dimensions, its bias, or as it is of one of several blocks.

    shapes: of all tensors of the model.
    """
    *blocks, leaf = module.split(".")
    if words := re.findall(r"[a-z]+|\d+", re.sub(r"([a-z])([A-Z])", r"\1_\2", leaf).lower()):
        last = words[-2] if words[-1].isdigit() and len(words) > 1 else words[-1]
        if last in _LINEAR or len(shapes[f"{module}.weight"] or ()) > 2:
            return True
        if not _TABLES.isdisjoint(words) or any("embed" in word for word in words):
            return False
    is_bias = shapes.get(f"{module}.bias") is not None
    return is_bias or (not leaf.isdigit() and any(each.isdigit() for each in blocks))


_LINEAR = set("proj projection fc linear dense conv query key value q k v o w wq wk wv wo qkv out head".split())
EMBEDDING = re.compile(r"(.*\.)?(wte|wpe|shared|\w*embed(ding)?s?(_tokens|_positions|_in|_table)?)\.weight")
_TABLES = set("emb embs tok token tokens wte wpe pos position positions vocab shared codebook table lookup".split())


def orientation(base: Mapping[Any, Any]) -> Callable[[str], frozenset[bool]]:
    """A function that tells whether a weight is [in, out], as transformers' Conv1D has them: {True} or {False}, both
    where matrices around it are of both kinds, and neither where nothing tells.

    A matrix tells it by its bias; a square one as those do whose names end alike, or else those of the smallest block
    around it that has any.
    """
    told: dict[str, bool] = {}
    for key, weight in base.items():
        if type(key) is str and key.endswith(".weight") and isinstance(weight, TensorEntry):
            bias = base.get(f"{key.removesuffix('weight')}bias")
            if len({*weight.shape}) == len(weight.shape) == 2 and isinstance(bias, TensorEntry):
                told[key] = bool(bias.shape == weight.shape[1:])

    @cache
    def votes(block: str, name: str = "") -> frozenset[bool]:
        """What the matrices in a block tell, those of modules of this name or all."""
        own = (key for key in told if key.startswith(block) and name in ("", _module_name(key)))
        return frozenset(told[key] for key in own)

    def turns(key: str) -> frozenset[bool]:
        shape = base[key].shape
        if len(shape) != 2 or shape[0] != shape[1]:
            return frozenset({told.get(key, False)})
        found, block = votes("", _module_name(key)), key[:1000]  # a name may be long
        if len(found) != 1:
            found = frozenset()
        while not found and block:
            block = block[: block.rfind(".", 0, -1) + 1]
            found = votes(block)
        return found

    return turns


def _module_name(key: str) -> str:
    """The last part of the name of a weight's module: `c_attn` of `h.0.attn.c_attn.weight`."""
    return key.rpartition(".")[0].rpartition(".")[2]
