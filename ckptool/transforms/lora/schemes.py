"""Adapters written in a naming scheme: the keys that `adapter_keys` parses, and where the scale is stored.

PEFT        adapter_config.json: r and lora_alpha, with patterns for modules that have others
kohya       a tensor `alpha` for each module
diffusers   the same fields as PEFT's, as JSON in the metadata of the safetensors file (since 0.34); for older
            readers, which take every scale for 1, multiplied into B (`fold`)
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckptool.checkpoint import InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.arrays import TensorValues, computed_rows, in_type
from ckptool.checkpoint.dtypes import DType, by_name
from ckptool.checkpoint.numeric import Array
from ckptool.commands import FILE, OUT, PATTERN, arg, command
from ckptool.conventions.adapter_keys import BIAS, DIFFUSERS, KOHYA, LORA, PEFT, WHOLE, split_words, written_key
from ckptool.conventions.state_dicts import without_wrappers
from ckptool.errors import Conflict, NoMatch, Unsupported, counted, listed
from ckptool.transforms.lora.adapters import DIFFUSERS_CONFIG, Adapter, Delta
from ckptool.transforms.lora.places import Places

MODEL = "base_model.model."
SCHEMES = {"peft": PEFT, "kohya": KOHYA, "diffusers": DIFFUSERS}
# The models that adapters are for: the prefixes of diffusers and kohya.
COMPONENTS = {
    "unet": ("unet.", "lora_unet_"),
    "te": ("text_encoder.", "lora_te_"),
    "te1": ("text_encoder.", "lora_te1_"),
    "te2": ("text_encoder_2.", "lora_te2_"),
    "te3": ("text_encoder_3.", "lora_te3_"),
    "transformer": ("transformer.", "lora_transformer_"),
    "prior": ("prior.", "lora_prior_unet_"),
    "controlnet": ("controlnet.", "lora_controlnet_"),
}
# Facts of an adapter that some schemes have no place for.
_HOLDS = {PEFT: {"DoRA", "biases", "embeddings"}, DIFFUSERS: {"DoRA", "biases"}, KOHYA: set[str]()}


class AdapterFile(NamedTuple):
    """An adapter in a scheme: its tensors, PEFT's configuration (None for others), and the metadata of its file."""

    tree: dict[str, TensorEntry]
    config: dict[str, Any] | None
    metadata: dict[str, str]


def stored(adapter: Adapter, scheme: str, other_modules: Iterable[str] = ()) -> AdapterFile:
    """The adapter with the keys of a scheme, or those that it has already.

    other_modules: of the base, that the adapter is not for.
    """
    tree: dict[str, TensorEntry] = {}
    for delta in adapter.deltas:
        parts = delta.factors | ({} if delta.magnitude is None else {"magnitude": delta.magnitude})
        if scheme == KOHYA:
            parts["alpha"] = alpha_tensor(alpha_of(delta), delta.factors["A"].dtype)
        for role, entry in parts.items():
            key = delta.keys.get(role) or written_key(scheme, delta.component, delta.module, role, delta.embedding)
            if key in tree:
                raise Conflict(f"two tensors would be called {key}", "Nothing was written.")
            tree[key] = entry
    if scheme == PEFT:
        return AdapterFile(tree, {**adapter.config, **peft_config(adapter, other_modules)}, {})
    if scheme == KOHYA or all(delta.scale == 1 for delta in adapter.deltas):
        return AdapterFile(tree, None, {})
    text = json.dumps(diffusers_metadata(adapter), indent=2, sort_keys=True)
    return AdapterFile(tree, None, {DIFFUSERS_CONFIG: text})


def diffusers_metadata(adapter: Adapter) -> dict[str, Any]:
    """The fields of each component's `LoraConfig`, as diffusers stores them."""
    kept = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "use_dora", "lora_bias")
    fields: dict[str, Any] = {}
    for component in dict.fromkeys(delta.component for delta in adapter.products):
        deltas = tuple(delta for delta in adapter.deltas if delta.component == component)
        config = peft_config(replace(adapter, deltas=deltas))
        fields |= {f"{component}{name}": config[name] for name in kept}
    return fields


def alpha_of(delta: Delta, rs: bool = False) -> float:
    """The alpha that gives a module's scale: that stored, where it does.  rs: by rsLoRA's formula."""
    divisor = math.sqrt(delta.rank) if rs else delta.rank
    if delta.alpha is not None and delta.alpha / divisor == delta.scale:
        return delta.alpha
    return delta.scale * divisor


def alpha_tensor(value: float, dtype: DType) -> TensorEntry:
    """A number as a tensor, of a factor's type as kohya saves alphas; in f32 where that does not hold it."""
    import numpy

    def of(dtype: DType) -> TensorEntry:
        values = numpy.array([value]).astype("d" if dtype.is_float else dtype.to_numpy())
        return TensorEntry(Storage(InlineBytes(in_type(values, dtype))), dtype, (), ())

    entry = of(dtype)
    return entry if float(TensorValues(entry).read(0, 1)[0]) == value else of(by_name("f32"))


def peft_config(adapter: Adapter, other_modules: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of `LoraConfig` that say what the adapter is."""
    rs = bool(adapter.config.get("use_rslora"))
    modules = [delta.module for delta in adapter.products]
    alphas = [alpha_of(delta, rs) for delta in adapter.products]
    ends = tuple(f".{module}" for module in modules)  # PEFT compares the ends of names, or an expression with all of it
    is_clear = not any(other.endswith(ends) for other in other_modules)
    targets = list(modules) if is_clear else "|".join(map(re.escape, modules))
    fields: dict[str, Any] = {"peft_type": "LORA", "target_modules": targets}
    for name, pattern, values in (
        ("r", "rank_pattern", [delta.rank for delta in adapter.products]),
        ("lora_alpha", "alpha_pattern", [int(alpha) if alpha == int(alpha) else alpha for alpha in alphas]),
    ):
        usual = Counter(values).most_common(1)[0][0]
        others = {f"^{re.escape(module)}": each for module, each in zip(modules, values, strict=True) if each != usual}
        fields |= {name: usual, pattern: others}
    fields["use_dora"] = any(delta.magnitude is not None for delta in adapter.deltas)
    fields["lora_bias"] = any(delta.method == BIAS for delta in adapter.deltas)
    return fields


# Converting ----------------------------------------------------------------------------------------------------------


def convert(
    adapter: Adapter, scheme: str, *, bases: Sequence[Mapping[Any, Any]] = (), fold: bool = False
) -> tuple[AdapterFile, list[str]]:
    """The adapter in another scheme, and remarks; its factors as they are, but for a folded scale.

    bases: state dicts of the models, whose names tell where kohya's underscores are dots.
    Raises `Unsupported` naming what the scheme cannot hold, `NoMatch` for modules that no base has, `Conflict` for
    names of two modules.
    """
    refuse_others(adapter)
    _refuse_unheld(adapter, scheme)
    name, details = adapter.name, list[str]()
    components = {delta.component for delta in adapter.deltas}
    names = {each: _component(each, components, scheme, adapter) for each in components}
    if len(set(names.values())) < len(components):
        what = f"{name} is for {listed(sorted(components))}"
        advice = f"Drop the keys of the others first: {command('edit', name, drop=PATTERN, out=OUT)}"
        raise Unsupported(what, "An adapter of PEFT is for one model.", advice)
    modules = _dotted_modules(adapter, bases) if adapter.scheme == KOHYA and scheme != KOHYA else {}
    deltas = []
    for delta in adapter.deltas:
        module = modules.get(delta.module, delta.module)
        module = module.replace(".", "_") if scheme == KOHYA else module
        made = replace(delta, component=names[delta.component], module=module, keys={})
        deltas.append(_folded(made) if fold else made)
    config = {"use_rslora": False} if scheme == PEFT else {}
    file = stored(replace(adapter, scheme=scheme, deltas=tuple(deltas), config=config), scheme, _modules_of(bases))
    if adapter.config.get("use_rslora"):
        details.append("alpha is alpha · √rank of before: rsLoRA divides by √rank, these names by the rank")
    if scheme != PEFT and (unsaid := [old for old in components if not any(old in row for row in COMPONENTS.values())]):
        details.append(f"its names do not say which model it is for: taken for {names[unsaid[0]]}")
    if fold and (scales := sorted({delta.scale for delta in adapter.deltas} - {1.0})):
        details.append(f"multiplied into B: {listed([f'{scale:g}' for scale in scales], 4)}")
    return file, details


def refuse_others(adapter: Adapter) -> None:
    """Raises `Unsupported` unless every change of a weight is a product of two factors."""
    name, why = adapter.name, "Only LoRA's two factors for each module are taken apart here. Nothing was written."
    if adapter.config.get("target_parameters"):
        raise Unsupported(f"{name} is for parameters of experts", why)
    if not adapter.products:
        raise Unsupported(f"{name} has no factors but biases", why)
    for delta in adapter.products:
        if delta.method != LORA or "mid" in delta.factors:
            kind = "LoRA with lora_mid" if delta.method == LORA else delta.method
            raise Unsupported(f"{name}: {delta.module} is {kind}", why)


def _refuse_unheld(adapter: Adapter, scheme: str) -> None:
    name, old = adapter.name, adapter.scheme
    if whole := [delta.keys[""] for delta in adapter.deltas if delta.method == WHOLE]:
        what = f"{name} has whole tensors (modules_to_save): {listed(whole)}"
        fix = f"Extract it without them: lora extract {arg(exclude=PATTERN)}"
        raise Unsupported(what, f"{scheme} would lose them.", fix)
    for delta in adapter.deltas:
        is_bias, dora = delta.method == BIAS, delta.magnitude is not None
        difference = is_bias and "B.bias" not in delta.factors
        facts = {"DoRA": dora, "differences of biases": difference, "biases": is_bias, "embeddings": delta.embedding}
        for fact, present in facts.items():
            if present and fact not in _HOLDS[scheme] & _HOLDS.get(old, _HOLDS[DIFFUSERS]):
                why = f"{old} and {scheme} have no common form for it."
                raise Unsupported(f"{name}: {delta.module} has {fact}", why)


def _component(old: str, components: set[str], scheme: str, adapter: Adapter) -> str:
    """The prefix of a component in a scheme. Names that do not say it are a text encoder's or a transformer's where
    one of its modules begins as in diffusers', else a UNet's, as with most that are written for these programs.
    """
    if scheme == PEFT:
        return MODEL
    side = (DIFFUSERS, KOHYA).index(scheme)
    if rows := [row for row in COMPONENTS.values() if old in row]:
        several = any(each in COMPONENTS["te2"] for each in components)  # of two text encoders, kohya counts the first
        return rows[-1 if several else 0][side]
    blocks = {delta.module.partition(".")[0] for delta in adapter.products if delta.component == old}
    kind = "te" if "text_model" in blocks else "transformer" if "transformer_blocks" in blocks else "unet"
    return COMPONENTS[kind][side]


def _dotted_modules(adapter: Adapter, bases: Sequence[Mapping[Any, Any]]) -> dict[str, str]:
    """kohya's modules with their dots: as the bases have them, else by the words of diffusers' and CLIP's modules."""
    places = Places(sorted({f"{module}.weight" for module in _modules_of(bases)}), underscored=True)
    found = {}
    for module in dict.fromkeys(delta.module for delta in adapter.deltas):
        name = places.key("", [f"{module}.weight"]) if bases else split_words(module)
        found[module] = (name or "").removesuffix(".weight")
    if lost := [module for module, name in found.items() if not name]:
        raise NoMatch(
            f"{adapter.name}: {counted(len(lost), 'module')} of {len(found):,} could not be told: {listed(lost)}",
            "No base has them. Nothing was written." if bases else "Underscores of kohya's names may be dots.",
            f"Name the models that it is for: {arg(base=FILE)} (repeatable)",
        )
    return found


def _modules_of(bases: Sequence[Mapping[Any, Any]]) -> Iterator[str]:
    for base in bases:
        for key in base:
            if type(key) is str and key.endswith(".weight"):
                yield without_wrappers(key).removesuffix(".weight")


def _folded(delta: Delta) -> Delta:
    """The same change with scale 1: B is multiplied with it; a bias of its own, too."""
    role = "B" if "B" in delta.factors else next(iter(delta.factors))
    b = delta.factors[role]
    if delta.scale == 1:
        return replace(delta, alpha=float(delta.rank))
    values, scale = TensorValues(b), delta.scale

    def rows(start: int, stop: int) -> Array:
        block: Array = values.rows(start, stop)
        block *= block.dtype.type(scale)
        return block

    scaled = computed_rows(b.dtype, b.shape, rows, (b,), b.location)
    return replace(delta, factors=delta.factors | {role: scaled}, alpha=float(delta.rank), scale=1.0)
