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
DIFFUSERS_CONFIG = "lora_adapter_metadata"  # in the header of a safetensors file
LORA, LOHA, LOKR, DIFF, BIAS, WHOLE = "LoRA", "LoHa", "LoKr", "difference", "bias", "whole tensor"
TOKENS = "trainable tokens"

_COMPONENTS = (
    (PEFT, re.compile(r"(?:[^.]+\.)*?base_model\.model\.")),
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
# What PEFT saves of a model, and beside it: VeRA's shared matrices and the like.
_OTHER = re.compile(r"base_model\.(?:model\.|\w*(?:lora|vera)_|frod_|shadow_)|(?:prompt_embeddings|prefix_task_\w+)$")
_HALVES = {"down": "A", "up": "B", "mid": "mid"}
_WHOLE = re.compile(r"\.modules_to_save(?:\.default)?(?=\.)")
RANKED = ("A", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")  # the factors whose first dimension is the rank
_METHODS = {"": WHOLE, "A": LORA, "B": LORA, "mid": LORA, "tokens": TOKENS} | dict.fromkeys(
    ("B.bias", "diff_b", "b_norm"), BIAS
)


class AdapterKey(NamedTuple):
    """A key of an adapter, taken apart.

    component: the prefix that says which model it is for (`base_model.model.`, `lora_unet_`), empty for none.
    module: the one it changes; for kohya with underscores for dots.  role: `A`, `B`, `mid`, `alpha`, `magnitude`,
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
    naming, component = scheme or PEFT, ""
    for name, prefix in _COMPONENTS:
        if scheme in (None, name) and (match := prefix.match(key)):
            naming, component = name, match[0]
            break
    name = key[len(component) :]
    match = _ROLE.fullmatch(name)
    if match is None or (naming == PEFT and (match["other"] or "").startswith(("diff", "w_", "b_"))):
        tensor_name = _WHOLE.sub("", name).replace(".token_adapter.base_layer.", ".").replace(".base_layer.", ".")
        return AdapterKey(naming, component, tensor_name, "")
    module = match["module"]
    if ".processor." in module and key.endswith(("_lora.down.weight", "_lora.up.weight")):
        module = re.sub(r"\.to_out$", ".to_out.0", module.replace(".processor.", "."))
    inner = re.sub(r"(?:\.base_layer)+$", "", module)
    depth = (len(module) - len(inner)) // len(".base_layer")
    role = match["side"] or match["embedding"] or _HALVES.get(match["half"]) or match["tokens"] or match["other"]
    role = role or "magnitude"
    role += ".bias" if match["of"] == "bias" else ""
    return AdapterKey(naming, component, inner.replace(".base_layer.", "."), role, bool(match["embedding"]), depth)


_PEFT_ENDS = {"A": "lora_A.weight", "B": "lora_B.weight", "B.bias": "lora_B.bias", "magnitude": "lora_magnitude_vector"}
_ENDS = {
    PEFT: _PEFT_ENDS,
    DIFFUSERS: _PEFT_ENDS,
    KOHYA: {"A": "lora_down.weight", "B": "lora_up.weight", "alpha": "alpha"},
}


def written_key(scheme: str, component: str, module: str, role: str, embedding: bool = False) -> str:
    """The key of a part of a change: what `adapter_key` takes apart."""
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
    """kohya's name of a module with its dots restored, for diffusers' UNets and CLIP; empty for other modules."""
    words = [match[1] for match in _WORD.finditer(module)]
    return ".".join(words) if "_".join(words) == module else ""


def method_of(role: str) -> str:
    """The method that a tensor belongs to."""
    return LOHA if role.startswith("hada_") else LOKR if role.startswith("lokr_") else _METHODS.get(role, DIFF)


def is_factor(role: str) -> bool:
    """True for a tensor that a change is computed from; other checkpoints have none."""
    return method_of(role) in (LORA, LOHA, LOKR)


def adapter_detail(node: Mapping[Any, Any]) -> str:
    """An adapter's state dict in words: `LoRA adapter, PEFT names, rank 8, of 24 modules (q_proj, v_proj)`.

    Empty if it is none: at least a quarter of the keys of an adapter are factors, or all have PEFT's prefix and none is
    a wrapped layer of the base (IA3, prompts, trained layers). With such layers it is a whole model of PEFT, and no
    adapter: `model with LoRA adapter inside, PEFT names, …`.
    """
    texts = [key for key in node if type(key) is str]
    factors = {key: of for key in texts if is_factor((of := adapter_key(key)).role)}
    is_whole = any(key.endswith(".base_layer.weight") and ".token_adapter." not in key for key in texts)
    if not factors or (4 * len(factors) < len(texts) and not is_whole):
        is_other = all(_OTHER.match(key) and ".base_layer." not in key for key in texts)
        return "PEFT adapter (not LoRA, LoHa or LoKr)" if is_other else ""
    shapes = [getattr(node[key], "shape", None) for key, of in factors.items() if of.role in RANKED]
    keys = factors.values()
    methods, schemes = sorted({method_of(factor.role) for factor in keys}), sorted({factor.scheme for factor in keys})
    modules = {(factor.component, factor.module, factor.depth) for factor in keys}
    leaves = sorted({factor.module.rpartition(".")[2] for factor in keys})
    names = "" if next(iter(keys)).scheme == KOHYA else f" ({printable(listed(leaves, 6))})"
    ranks = sorted({shape[0] for shape in shapes if shape and len(shape) > 1})
    rank = f", rank {listed(ranks, 4)}" if ranks else ""
    kind = f"{' and '.join(methods)} adapter"
    kind = f"model with {kind} inside" if is_whole else kind
    return f"{kind}, {' and '.join(schemes)} names{rank}, of {counted(len(modules), 'module')}{names}"


# Places in a base -----------------------------------------------------------------------------------------------------

_CANDIDATES = 100  # of a name: among more, none can be chosen anyway
_SAMPLES = 3  # of an adapter's names, from which the prefixes are taken that all of them are then tried with
Spellings = Sequence[str]
"""The names that a tensor may have, of which the first that exists counts."""


def _moved(name: str, removed: str, added: str) -> str:
    return added + name.removeprefix(removed) if name.startswith(removed) else ""


class Places:
    """The names of a base; and for each component of an adapter, the prefix to remove and the one to add that make its
    names those of the base.

    underscored: as kohya spells modules, `a.b_c.weight` as `a_b_c.weight`.
    """

    def __init__(self, names: Iterable[str], *, underscored: bool = False) -> None:
        self.separator = "_" if underscored else "."
        self.prefixes: dict[str, tuple[str, str]] = {}
        self.names: dict[str, list[str]] = {}
        for name in names:
            module, dot, leaf = name.rpartition(".")
            self.names.setdefault(module.replace(".", self.separator) + dot + leaf, []).append(name)

    def settle(self, component: str, names: Sequence[Spellings]) -> None:
        """Chooses the prefixes with which most of the names are found in the base. Raises `Conflict` where two find
        equally many."""
        hits = {("", ""): self._hits(names)}
        samples = names[:: max(1, len(names) // _SAMPLES)] if hits["", ""] < len(names) else ()
        for prefixes in (pair for spellings in samples for pair in self._candidates(spellings)):
            if prefixes not in hits:
                hits[prefixes] = self._hits(names, *prefixes)
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
        """The prefixes that differ, in words."""
        moves, texts = [(c + old, new) for c, (old, new) in self.prefixes.items() if (old, new) != ("", "")], []
        for old, new in moves:  # the base's with its dots
            dotted = next(names[0][: len(new)] for spelled, names in self.names.items() if spelled.startswith(new))
            shown = (repr(text) if text else "no prefix" for text in (old, dotted))
            texts.append("the adapter's names begin with {}, the base's with {}".format(*shown))
        return texts

    def in_base(self, component: str, name: str) -> str:
        """An adapter's name as the base has it; empty for one that does not begin with the component's prefix."""
        return _moved(name, *self.prefixes.get(component, ("", "")))

    def key(self, component: str, names: Spellings) -> str | None:
        """The base's name for the first of an adapter's that it has, or None. Raises `Conflict` where there are two."""
        for name in names:
            matches = self.names.get(self.in_base(component, name), [])
            if len(matches) > 1:
                what = f"{name} is {listed(matches)}"
                raise Conflict(what, "Without their dots these names are equal. Nothing was written.")
            if matches:
                return matches[0]
        return None

    def _hits(self, names: Sequence[Spellings], removed: str = "", added: str = "") -> int:
        return sum(any(_moved(name, removed, added) in self.names for name in spellings) for spellings in names)

    def _candidates(self, spellings: Spellings) -> Iterator[tuple[str, str]]:
        """The pairs of prefixes, to remove and to add, that give names of the base with the longest end in common."""
        for name in spellings:
            module = name.rpartition(".")[0]
            cuts = [place + 1 for place, letter in enumerate(module) if letter == self.separator == "."]
            for cut in [0, *cuts[:8]]:
                ends = (name[cut:], self.separator + name[cut:])
                matches = [key for key in self.names if key == ends[0] or key.endswith(ends[1])]
                yield from [(name[:cut], key.removesuffix(ends[0])) for key in matches[:_CANDIDATES]]
                if matches:
                    break


def is_linear(module: str, shapes: Mapping[Any, Sequence[int] | None]) -> bool:
    """True where the weight of a module is known to be a matrix or kernels that the input is multiplied with, not a
    table of embeddings: by the last part of its name, its dimensions, its bias, or being in one of several blocks.

    shapes: of all tensors of the model.
    """
    *blocks, leaf = module.split(".")
    if words := re.findall(r"[a-z]+|\d+", re.sub(r"([a-z])([A-Z])", r"\1_\2", leaf).lower()):
        last_word = words[-2] if words[-1].isdigit() and len(words) > 1 else words[-1]
        if last_word in _LINEAR or len(shapes[f"{module}.weight"] or ()) > 2:
            return True
        if not _TABLES.isdisjoint(words) or any("embed" in word for word in words):
            return False
    is_bias = shapes.get(f"{module}.bias") is not None
    return is_bias or (not leaf.isdigit() and any(block.isdigit() for block in blocks))


_LINEAR = set("proj projection fc linear dense conv query key value q k v o w wq wk wv wo qkv out head".split())
EMBEDDING = re.compile(r"(.*\.)?(wte|wpe|shared|\w*embed(ding)?s?(_tokens|_positions|_in|_table)?)\.weight")
_TABLES = set("emb embs tok token tokens wte wpe pos position positions vocab shared codebook table lookup".split())


def orientation(base: Mapping[Any, Any]) -> Callable[[str], frozenset[bool]]:
    """A function that tells whether a weight is [in, out], as transformers' Conv1D has them: {True} or {False}, both
    where matrices around it are of both kinds, and neither where nothing tells.

    A matrix tells it by its bias, which each Conv1D has; a square one with a bias is as those whose names end alike, or
    else as those of the smallest block around it that has any.
    """
    transposed: dict[str, bool] = {}
    for key, weight in base.items():
        if type(key) is str and key.endswith(".weight") and isinstance(weight, TensorEntry):
            bias = base.get(f"{key.removesuffix('weight')}bias")
            if len({*weight.shape}) == len(weight.shape) == 2 and isinstance(bias, TensorEntry):
                transposed[key] = bool(bias.shape == weight.shape[1:])

    @cache
    def votes(block: str, name: str = "") -> frozenset[bool]:
        """What the matrices in a block tell: those of modules of this name, or all."""
        keys = (key for key in transposed if key.startswith(block) and name in ("", _module_name(key)))
        return frozenset(transposed[key] for key in keys)

    def turns(key: str) -> frozenset[bool]:
        shape = base[key].shape
        if len(shape) != 2 or shape[0] != shape[1]:
            return frozenset({transposed.get(key, False)})
        if f"{key.removesuffix('weight')}bias" not in base:
            return frozenset({False})
        tally, block = votes("", _module_name(key)), key[:1000]  # a name may be long
        if len(tally) != 1:
            tally = frozenset()
        while not tally and block:
            block = block[: block.rfind(".", 0, -1) + 1]
            tally = votes(block)
        return tally

    return turns


def _module_name(key: str) -> str:
    """The last part of the name of a weight's module: `c_attn` of `h.0.attn.c_attn.weight`."""
    return key.rpartition(".")[0].rpartition(".")[2]
