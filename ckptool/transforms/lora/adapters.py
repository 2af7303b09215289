"""An adapter of any naming scheme in one representation: changes, each to one tensor, with the keys it is made from.

    LoRA   B @ A · scale             A [rank, in, …], B [out, rank, …]; mid [rank, rank, …]: kernels between the two
    LoHa   (w1_a @ w1_b) ∘ (w2_a @ w2_b) · scale
    LoKr   kron(w1, w2) · scale      each of them a matrix, or wX_a @ wX_b
    scale  alpha / rank, rsLoRA: alpha / √rank; 1 where no alpha is stored (kohya, diffusers)

Each naming scheme stores the scale

    PEFT        in adapter_config.json: r and lora_alpha, with patterns for modules that differ
    kohya       in a tensor `alpha` for each module
    diffusers   in the metadata of the safetensors file, as JSON with PEFT's fields (since 0.34)

Sources: peft/tuners/{lora,loha,lokr}, kohya-ss/sd-scripts networks/lora.py, lycoris/functional.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ckptool.checkpoint import InlineBytes, Note, Storage, TensorEntry
from ckptool.checkpoint.arrays import TensorValues
from ckptool.checkpoint.dtypes import DType, by_name, has_numbers, in_type
from ckptool.checkpoint.paths import match_within_limit
from ckptool.commands import FILE, OUT, PATTERN, Slot, arg, command
from ckptool.conventions.adapter_keys import (
    BIAS,
    DIFF,
    DIFFUSERS,
    DIFFUSERS_CONFIG,
    KOHYA,
    LOHA,
    LORA,
    PEFT,
    RANKED,
    TOKENS,
    WHOLE,
    AdapterKey,
    Places,
    adapter_key,
    is_factor,
    method_of,
    split_words,
    written_key,
)
from ckptool.conventions.quantized import parsed
from ckptool.conventions.state_dicts import without_wrappers
from ckptool.errors import Conflict, LimitExceeded, NoMatch, Unsupported, UsageError, counted, listed
from ckptool.facts import dataclass, field, replace

Config: TypeAlias = Mapping[str, Any] | None  # of PEFT
MAX_RANK = 1 << 16

# Fields of PEFT's configuration that make an adapter more than a change of weights.
_REFUSED = {
    "layer_replication": "layer replication",
    "alora_invocation_tokens": "aLoRA",
    "arrow_config": "Arrow",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
_INITIALISED = ("pissa", "olora", "loftq", "corda", "lora_ga")  # which changed the base before training
_TYPES = ("LORA", "LOHA", "LOKR", "TRAINABLE_TOKENS")
# The sets of roles that together are a complete change of a weight, sorted.
_COMPLETE = re.compile(
    "|A B( mid)?|tokens|(hada_t1 hada_t2 )?hada_w1_a hada_w1_b hada_w2_a hada_w2_b|diff|w_norm"
    "|lokr_w1(_a lokr_w1_b)? lokr_w2(_a lokr_w2_b)?|lokr_t2 lokr_w1(_a lokr_w1_b)? lokr_w2_a lokr_w2_b"
)


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The change to one tensor: to the weight of a module, to its bias, or a whole tensor in place of the base's.

    component: which of several models it is for (`unet.`, `lora_te1_`); `base_model.model.` and the empty text name
    none.  module: its name, in kohya with underscores for dots; for a whole tensor, the tensor's.
    factors: by role: `A` and `B` (or `mid`), `hada_w1_a`, `lokr_w1`, …, `diff`; `B.bias`; `tokens`; the empty role for
    a whole tensor.  keys: the adapter's keys that it is made from, by role.  rank: 0 where there is none.
    alpha: as stored; None: the scale is 1.  scale: the factor of the product.
    embedding: A is [rank, vocabulary], B [dim, rank].  depth: see `AdapterKey`.  magnitude: DoRA's, of any shape.
    """

    component: str
    module: str
    factors: dict[str, TensorEntry]
    keys: Mapping[str, str]
    rank: int = 0
    alpha: float | None = None
    scale: float = 1.0
    embedding: bool = False
    depth: int = 0
    magnitude: TensorEntry | None = None

    @property
    def method(self) -> str:
        """One of LORA, LOHA, LOKR, DIFF, BIAS, TOKENS and WHOLE."""
        return method_of(next(iter(self.factors)))


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter: its changes in the order of its keys. config: PEFT's, empty where there is none.

    name, tree, metadata: those of the file that it was read from.
    """

    scheme: str
    deltas: tuple[Delta, ...]
    config: Mapping[str, Any]
    name: str = ""
    tree: Mapping[Any, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    @property
    def products(self) -> tuple[Delta, ...]:
        """The changes that are computed, except those of biases."""
        return tuple(delta for delta in self.deltas if delta.method not in (BIAS, WHOLE))

    def tokens(self, module: str) -> list[int]:
        """The rows of a table that are trained: those of the first name with which the module's ends, as in PEFT."""
        indices = self.config.get("trainable_token_indices") or self.config.get("token_indices")
        if isinstance(indices, dict):
            indices = next((rows for name, rows in indices.items() if module.endswith(name)), None)
        return [row for row in indices if type(row) is int] if isinstance(indices, list) else []

    def names(self, field: str) -> list[str]:
        """A list of names in the configuration; empty where it has none, or a pattern instead."""
        listed = self.config.get(field)
        return [name for name in listed if isinstance(name, str) and name] if isinstance(listed, list) else []


def read_adapter(
    node: Mapping[Any, Any], name: str, config: Config = None, metadata: Mapping[str, Any] | None = None
) -> Adapter:
    """The adapter in a state dict. Reads no values but stored alphas.

    name: of its file.  config: `adapter_config.json`.  metadata: of its safetensors file.
    Raises `NoMatch` for a factor without its other half, `UsageError` where there are no factors or no alpha,
    `Unsupported` for kinds that are more than a change of weights, `Conflict` for factors that do not fit each other.
    """
    fields = config or {}
    kind = str(fields.get("peft_type", "LORA"))
    if kind not in _TYPES:
        fix = "PEFT itself merges most of them: model.merge_and_unload().save_pretrained(DIR)"
        raise Unsupported(f"{name} is an adapter of type {kind[:60]}", f"ckptool reads {listed(_TYPES)}.", fix)
    if refused := [words for field, words in _REFUSED.items() if fields.get(field)]:
        why = "It changes more of a model than its weights, so no merged weights can do the same."
        raise Unsupported(f"{name} uses {listed(refused)}", why)
    notes = []
    initialised = fields.get("init_lora_weights")
    if isinstance(initialised, str) and initialised.lower().startswith(_INITIALISED):
        changed = f"{initialised[:60]} changed the base before training"
        notes.append(Note("changed-base", f"{changed}: it is for that base, not for the original"))
    groups: dict[Any, tuple[AdapterKey, dict[str, str]]] = {}  # a whole tensor is a group of its own
    copies = []
    for key, value in node.items():
        if type(key) is not str or not isinstance(value, TensorEntry) or not has_numbers(value.dtype):
            raise Unsupported(f"{name}: {key!s} is not a tensor of plain numbers", "An adapter has nothing else.")
        if ".original_module." in key and fields.get("modules_to_save"):
            copies.append(key)
            continue
        label = adapter_key(key, PEFT if "peft_type" in fields else None)
        place = label.component, label.module, label.depth, "" if label.role else key
        _, parts = groups.setdefault(place, (label, {}))
        if label.role in parts:
            what = f"{name} has {label.module} twice: {parts[label.role]} and {key}"
            raise Conflict(what, "Several adapters in one file cannot be distinguished.", _drop_others(name))
        parts[label.role] = key
    if copies:
        message = f"{listed(copies, 3)}: PEFT's copy of what modules_to_save replaced, not used"
        notes.append(Note("original-module", message))
    schemes = list(dict.fromkeys(label.scheme for label, parts in groups.values() if "" not in parts))
    if not any(role not in ("", "alpha") for _, parts in groups.values() for role in parts):
        fix = f"The base comes first: {command('lora merge', Slot('BASE'), Slot('ADAPTER'), out=OUT)}"
        raise UsageError(f"{name} has no LoRA, LoHa or LoKr factors", "It is not a known adapter.", fix)
    if len(schemes) > 1:
        raise Conflict(f"{name} mixes the names of {listed(schemes)}", "Each scheme has its own way of scaling.")
    models = {label.component for label, _ in groups.values() if label.component}
    if len(models) > 1 and schemes == [PEFT]:
        raise Unsupported(
            f"{name} is for {listed(sorted(models))}", "A PEFT adapter is for one model.", _drop_others(name)
        )
    configs: dict[str, dict[str, Any]] = {}  # stored in the file by diffusers: by component, with PEFT's fields
    for key, value in parsed((metadata or {}).get(DIFFUSERS_CONFIG), dict).items():
        component, _, field = key.partition(".")
        configs.setdefault(f"{component}.", {})[field] = value
    adapter = Adapter(schemes[0], (), fields, name, node, metadata or {}, tuple(notes))
    changes = (_deltas(adapter, configs.get(label.component, config), label, parts) for label, parts in groups.values())
    return replace(adapter, deltas=tuple(delta for deltas in changes for delta in deltas))


def _drop_others(name: str) -> str:
    return f"Drop the keys of the others first: {command('edit', name, drop=PATTERN, out=OUT)}"


def _deltas(adapter: Adapter, config: Config, label: AdapterKey, keys: Mapping[str, str]) -> Iterator[Delta]:
    """The changes that a module's keys, by role, make: to its weight, and to its bias."""
    where = f"{adapter.name}: {label.module}"
    entries = {role: adapter.tree[key] for role, key in keys.items()}
    if "" in entries:
        yield Delta(label.component, label.module, entries, keys)
        return
    bias = next((role for role in entries if method_of(role) == BIAS), "")
    factors = {role: entry for role, entry in entries.items() if role not in ("alpha", "magnitude", bias)}
    if not _COMPLETE.fullmatch(" ".join(sorted(factors))) or not (factors or (bias and "magnitude" not in entries)):
        why = "That is not one complete change. Nothing was written."
        raise NoMatch(f"{where} has only {listed(list(keys.values()))}", why, "A key may be misspelt, or missing.")
    method = method_of(next(iter(factors), "diff"))
    for role, switch in (("magnitude", "use_dora"), ("B.bias", "lora_bias")) if method == LORA else ():
        if config is not None and (role in entries) != bool(config.get(switch)):
            what = f"{where} has {'a' if role in entries else 'no'} {role}, and {switch} is {role not in entries}"
            raise Conflict(what, "A key is missing, or the configuration belongs to a different adapter.")
    flat = [role for role, entry in factors.items() if is_factor(role) and len(entry.shape) < 2]
    if odd := [role for role, entry in factors.items() if role in flat or not entry.dtype.is_float]:
        what = f"{where}: {listed(odd)} is not a matrix of floats"
        raise Conflict(what, "It was saved without its values, or truncated.")
    rank = next((factors[role].shape[0] for role in RANKED if role in factors), 0)
    if rank == 0 and method in (LORA, LOHA):
        raise Conflict(f"{where} has rank 0", "It was saved without its values, as happens in sharded training.")
    if rank > MAX_RANK:
        raise LimitExceeded(f"{where} has rank {rank:,}", f"ckptool reads at most {MAX_RANK:,}.")
    experts = 0 if config and config.get("target_parameters") else 1
    alpha, scale = scale_of(adapter, config, label.module, keys, method, rank, experts)
    delta_keys = {role: key for role, key in keys.items() if role != bias}
    delta = Delta(label.component, label.module, factors, delta_keys, rank, alpha, scale, label.embedding, label.depth)
    if factors:
        yield replace(delta, magnitude=entries.get("magnitude"))
    if bias:
        scale = scale if bias == "B.bias" else 1.0
        delta_keys = {bias: keys[bias]} if factors else {**keys}
        yield replace(delta, factors={bias: entries[bias]}, keys=delta_keys, rank=0, scale=scale)


def scale_of(
    adapter: Adapter, config: Config, name: str, keys: Mapping[str, str], method: str, rank: int, experts: int = 1
) -> tuple[float | None, float]:
    """A module's or parameter's alpha and the resulting scale: stored, or by PEFT's configuration with its patterns.

    experts: how many share the rank; 0 where only a base can tell, as it does what the parameter is called.
    """
    where = f"{adapter.name}: {name}"
    is_whole = not rank and ("alpha" in keys or adapter.scheme != PEFT)  # a LoKr of two matrices that are not factored
    if method in (DIFF, TOKENS) or is_whole:
        return None, 1.0
    if "alpha" in keys:
        entry = adapter.tree[keys["alpha"]]
        if entry.numel != 1:
            what = f"{adapter.name}: {keys['alpha']} is of shape {list(entry.shape)}"
            raise Conflict(what, "An alpha is one number.")
        alpha = _checked_number(float(TensorValues(entry).read(0, 1)[0]), f"{where}: its scale")
        return alpha, alpha / rank
    if adapter.scheme != PEFT and (config is None or "lora_alpha" not in config):
        return None, 1.0
    if config is None:
        what = f"{adapter.name} does not say its alpha: that is in adapter_config.json, which is not beside it"
        raise UsageError(what, "Without it the scale is unknown.", f"Name it: {arg(config='adapter_config.json')}")
    default = config.get("lora_alpha" if method == LORA else "alpha", 8)
    alpha = _checked_number(_by_pattern(config, "alpha_pattern", name, default), f"{where}: alpha")
    config_rank = _checked_number(_by_pattern(config, "rank_pattern", name, config.get("r", rank)), f"{where}: r")
    if config_rank <= 0 or (method == LORA and experts and config_rank * experts != rank):
        what = f"{where} has rank {rank:,}, and {config_rank:g} by its configuration"
        raise Conflict(what, "The configuration belongs to a different adapter. Nothing was written.")
    return alpha, alpha / (math.sqrt(config_rank) if config.get("use_rslora") else config_rank)


def _checked_number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e30:
        raise Conflict(f"{what} is {repr(value)[:60]}, not a number", "The adapter is damaged. Nothing was written.")
    return float(value)


def _by_pattern(config: Mapping[str, Any], field: str, module: str, default: Any) -> Any:
    """The value for a module: that of the first pattern that matches the end of its name, as in PEFT."""
    patterns = config.get(field) or {}
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        if matches(field, rf"(.*\.)?({pattern})", module):
            return value
    return default


def matches(field: str, pattern: str, module: str) -> bool:
    """True if a configuration's regular expression matches a whole name. Raises `Conflict` for an invalid one."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise Conflict(f"{field}: {pattern[:100]} is not a regular expression: {error}", "") from None
    return match_within_limit(compiled, module)


# Writing --------------------------------------------------------------------------------------------------------------

MODEL = "base_model.model."
SCHEMES = {"peft": PEFT, "kohya": KOHYA, "diffusers": DIFFUSERS}
# The models that adapters are for, with the prefixes of diffusers and kohya.
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
    """The adapter with the keys that it has already, else those of a scheme.

    other_modules: modules of the base that the adapter is not for.
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
    names = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "use_dora", "lora_bias")
    fields: dict[str, Any] = {}
    for component in dict.fromkeys(delta.component for delta in adapter.products):
        deltas = tuple(delta for delta in adapter.deltas if delta.component == component)
        config = peft_config(replace(adapter, deltas=deltas))
        fields |= {f"{component}{name}": config[name] for name in names}
    return fields


def alpha_of(delta: Delta, rs: bool = False) -> float:
    """The alpha that gives a module's scale: the stored one, if it does.  rs: by rsLoRA's formula."""
    divisor = math.sqrt(delta.rank) if rs else delta.rank
    if delta.alpha is not None and delta.alpha / divisor == delta.scale:
        return delta.alpha
    return delta.scale * divisor


def alpha_tensor(value: float, dtype: DType) -> TensorEntry:
    """A number as a tensor, in a factor's type as kohya saves alphas; in f32 if that type cannot hold it."""
    import numpy

    def of(dtype: DType) -> TensorEntry:
        values = numpy.array([value]).astype("d" if dtype.is_float else dtype.to_numpy())
        return TensorEntry(Storage(InlineBytes(in_type(values, dtype))), dtype, (), ())

    entry = of(dtype)
    return entry if float(TensorValues(entry).read(0, 1)[0]) == value else of(by_name("f32"))


def peft_config(adapter: Adapter, other_modules: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of `LoraConfig` that describe the adapter."""
    rs = bool(adapter.config.get("use_rslora"))
    modules = [delta.module for delta in adapter.products]
    alphas = [alpha_of(delta, rs) for delta in adapter.products]
    ends = tuple(f".{module}" for module in modules)  # PEFT compares ends of names, or an expression with whole ones
    is_clear = not any(other.endswith(ends) for other in other_modules)
    targets = list(modules) if is_clear else "|".join(map(re.escape, modules))
    fields: dict[str, Any] = {"peft_type": "LORA", "target_modules": targets}
    for name, pattern, values in (
        ("r", "rank_pattern", [delta.rank for delta in adapter.products]),
        ("lora_alpha", "alpha_pattern", [int(alpha) if alpha == int(alpha) else alpha for alpha in alphas]),
    ):
        usual = Counter(values).most_common(1)[0][0]
        exceptions = {f"^{re.escape(module)}": v for module, v in zip(modules, values, strict=True) if v != usual}
        fields |= {name: usual, pattern: exceptions}
    fields["use_dora"] = any(delta.magnitude is not None for delta in adapter.deltas)
    fields["lora_bias"] = any(delta.method == BIAS for delta in adapter.deltas)
    return fields


# Converting ----------------------------------------------------------------------------------------------------------


def convert(adapter: Adapter, scheme: str, *, bases: Sequence[Mapping[Any, Any]] = ()) -> tuple[AdapterFile, list[str]]:
    """The adapter in another scheme, and remarks; its factors as they are.

    bases: state dicts of the models, whose names tell where kohya's underscores are dots.
    Raises `Unsupported` naming what the scheme cannot hold, `NoMatch` for modules that no base has, `Conflict` where
    two modules get one name.
    """
    refuse_others(adapter)
    name, old, details = adapter.name, adapter.scheme, list[str]()
    if whole_keys := [delta.keys[""] for delta in adapter.deltas if delta.method == WHOLE]:
        what = f"{name} has whole tensors (modules_to_save): {listed(whole_keys)}"
        raise Unsupported(what, f"{scheme} would lose them.", f"Extract it without them: {arg(exclude=PATTERN)}")
    common = _HOLDS[scheme] & _HOLDS.get(old, _HOLDS[DIFFUSERS])
    for delta in adapter.deltas:
        is_bias, dora = delta.method == BIAS, delta.magnitude is not None
        difference = is_bias and "B.bias" not in delta.factors
        facts = {"DoRA": dora, "differences of biases": difference, "biases": is_bias, "embeddings": delta.embedding}
        facts["a module in another"] = any(".base_layer." in key for key in delta.keys.values())  # PEFT adds it twice
        if lost := [fact for fact, present in facts.items() if present and fact not in common]:
            why = f"{old} and {scheme} have no common form for it."
            raise Unsupported(f"{name}: {delta.module} has {lost[0]}", why)
    # The prefix of each component in the scheme. Names that do not say which are a text encoder's or a transformer's
    # if one of its modules begins as in diffusers, else a UNet's, like most adapters for these programs.
    components, names = {delta.component for delta in adapter.deltas}, dict[str, str]()
    several = any(component in COMPONENTS["te2"] for component in components)  # kohya numbers the first of two encoders
    for component in components:
        blocks = {delta.module.partition(".")[0] for delta in adapter.products if delta.component == component}
        kind = "te" if "text_model" in blocks else "transformer" if "transformer_blocks" in blocks else "unet"
        rows = [row for row in COMPONENTS.values() if component in row] or [COMPONENTS[kind]]
        of_diffusers, of_kohya = rows[-1 if several else 0]
        names[component] = {PEFT: MODEL, DIFFUSERS: of_diffusers, KOHYA: of_kohya}[scheme]
    if len(set(names.values())) < len(components):
        what = f"{name} is for {listed(sorted(components))}"
        raise Unsupported(what, "A PEFT adapter is for one model.", _drop_others(name))
    modules = dict[str, str]()  # kohya's with dots: as the bases have them, else by the words of known modules
    if old == KOHYA and scheme != KOHYA:
        places = Places(sorted({f"{module}.weight" for module in _base_modules(bases)}), underscored=True)
        for module in dict.fromkeys(delta.module for delta in adapter.deltas):
            dotted = places.key("", [f"{module}.weight"]) if bases else split_words(module)
            modules[module] = (dotted or "").removesuffix(".weight")
        if lost := [module for module, dotted in modules.items() if not dotted]:
            what = f"{name}: {counted(len(lost), 'module')} of {len(modules):,} cannot be resolved: {listed(lost)}"
            why = "No base has them. Nothing was written." if bases else "Underscores in kohya's names may be dots."
            raise NoMatch(what, why, f"Name the models that it is for: {arg(base=FILE)} (repeatable)")
    deltas = []
    for delta in adapter.deltas:
        module = modules.get(delta.module, delta.module)
        module = module.replace(".", "_") if scheme == KOHYA else module
        deltas.append(replace(delta, component=names[delta.component], module=module, keys={}))
    config = {"use_rslora": False} if scheme == PEFT else {}
    file = stored(replace(adapter, scheme=scheme, deltas=tuple(deltas), config=config), scheme, _base_modules(bases))
    if adapter.config.get("use_rslora"):
        details.append("alpha is now alpha · √rank: rsLoRA divides by √rank, these names by the rank")
    if scheme != PEFT and (
        unsaid := [component for component in components if not any(component in row for row in COMPONENTS.values())]
    ):
        details.append(f"its names do not say which model it is for: assumed {names[unsaid[0]]}")
    return file, details


def refuse_others(adapter: Adapter) -> None:
    """Raises `Unsupported` unless every change of a weight is a product of two factors."""
    name, why = adapter.name, "Only LoRA's two factors per module are supported here. Nothing was written."
    if adapter.config.get("target_parameters"):
        raise Unsupported(f"{name} is for parameters of experts", why)
    if not adapter.products:
        raise Unsupported(f"{name} has no factors but biases", why)
    for delta in adapter.products:
        if delta.method != LORA or "mid" in delta.factors:
            kind = "LoRA with lora_mid" if delta.method == LORA else delta.method
            raise Unsupported(f"{name}: {delta.module} is {kind}", why)


def _base_modules(bases: Sequence[Mapping[Any, Any]]) -> Iterator[str]:
    for base in bases:
        for key in base:
            if type(key) is str and key.endswith(".weight"):
                yield without_wrappers(key).removesuffix(".weight")
