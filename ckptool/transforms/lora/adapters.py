"""An adapter of any naming scheme in one representation: for each module its factors, scale, magnitude and bias.

    LoRA   B @ A · scale             A [rank, in, …], B [out, rank, …]; mid [rank, rank, …]: kernels between the two
    LoHa   (w1_a @ w1_b) ∘ (w2_a @ w2_b) · scale
    LoKr   kron(w1, w2) · scale      each of them whole, or wX_a @ wX_b
    scale  alpha / rank, rsLoRA: alpha / √rank; 1 where no alpha is stored (kohya, diffusers)

Sources: peft/tuners/{lora,loha,lokr}, kohya-ss/sd-scripts networks/lora.py, lycoris/functional.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ckptool.checkpoint import Note, TensorEntry
from ckptool.checkpoint.adapter_keys import (
    DIFF,
    LOHA,
    LOKR,
    LORA,
    PEFT,
    AdapterKey,
    adapter_keys,
    is_factor,
    method_of,
)
from ckptool.checkpoint.numeric import has_numbers
from ckptool.errors import Conflict, LimitExceeded, NoMatch, Unsupported, UsageError, listed, printable
from ckptool.transforms.blockwise import TensorValues

MAX_RANK = 1 << 16
DIFFUSERS_CONFIG = "lora_adapter_metadata"  # in the header of a safetensors file

# Fields of PEFT's configuration by which an adapter is more than a change of weights.
_REFUSED = {
    "layer_replication": "layer replication",
    "alora_invocation_tokens": "aLoRA",
    "arrow_config": "Arrow",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "trainable_token_indices": "trainable tokens",
}
_INITIALISED = ("pissa", "olora", "loftq", "corda", "lora_ga")  # which changed the base before training
_TYPES = {"LORA": LORA, "LOHA": LOHA, "LOKR": LOKR}
_W1 = [{"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"}]
_W2 = [{"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"}, {"lokr_t2", "lokr_w2_a", "lokr_w2_b"}]
_HADA = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}
# The roles that together are a change, for each method.
_COMPLETE: dict[str, list[set[str]]] = {
    LORA: [{"A", "B"}, {"A", "B", "mid"}],
    LOHA: [_HADA, _HADA | {"hada_t1", "hada_t2"}],
    LOKR: [first | second for first in _W1 for second in _W2],
    DIFF: [{"diff"}, {"w_norm"}, set()],
}
_BIASES = ("B.bias", "diff_b", "b_norm")
_RANKED = {LORA: ("A",), LOHA: ("hada_w1_b",), LOKR: ("lokr_w2_b", "lokr_w1_b"), DIFF: ()}


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The change to one module.

    component: of several models, the one that is meant (`unet.`, `lora_te1_`); `base_model.model.` and the empty text
    say nothing.  module: its name, for kohya with underscores for dots.
    factors: by role: `A` and `B` (or `mid`), `hada_w1_a`, `lokr_w1`, …, `diff`.  rank: 0 where there is none.
    alpha: as it was stored; None: the scale is 1.  scale: what the product is multiplied with.
    embedding: A is [rank, vocabulary], B [dim, rank].  depth: see `AdapterKey`.  twice: it is added twice, as PEFT does
    with MultiheadAttention's out_proj, in training and in merging.
    magnitude: DoRA's, of any shape.  bias: what is added to the bias.
    bias_scale: what that is multiplied with.  keys: those of the adapter that it is made of.
    """

    component: str
    module: str
    method: str
    factors: dict[str, TensorEntry]
    rank: int
    alpha: float | None
    scale: float
    embedding: bool = False
    depth: int = 0
    magnitude: TensorEntry | None = None
    bias: TensorEntry | None = None
    bias_scale: float = 1.0
    keys: tuple[str, ...] = ()
    twice: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A tensor that takes the place of the base's: of `modules_to_save`, or a trained bias."""

    component: str
    name: str
    entry: TensorEntry
    key: str


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter: its changes in the order of its keys. config: PEFT's, empty where there is none."""

    scheme: str
    deltas: tuple[Delta, ...]
    whole: tuple[Whole, ...]
    config: Mapping[str, Any]
    notes: tuple[Note, ...] = ()

    @property
    def base_model(self) -> str:
        """The name of the model that it was trained on, if it says."""
        return str(self.config.get("base_model_name_or_path") or "")

    def names(self, field: str) -> list[str]:
        """A list of names in the configuration; empty where there is none, or a pattern in its place."""
        listed = self.config.get(field)
        return [name for name in listed if isinstance(name, str) and name] if isinstance(listed, list) else []


def read_adapter(
    node: Mapping[Any, Any],
    name: str,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Adapter:
    """The adapter in a state dict. Reads no values but stored alphas.

    name: of its file.  config: of `adapter_config.json`.  metadata: of its safetensors file.
    Raises `NoMatch` for a factor without its other half, `UsageError` where there are no factors or no alpha,
    `Unsupported` for kinds that are no change of weights, `Conflict` for factors that do not fit each other.
    """
    fields = config or {}
    notes = tuple(_checked(fields, name)) if config is not None else ()
    for key, value in node.items():
        if type(key) is not str or not isinstance(value, TensorEntry) or not has_numbers(value.dtype):
            raise Unsupported(
                f"{name}: {printable(str(key))} is no tensor of plain numbers", "An adapter has no others."
            )
    unused = [key for key in node if ".original_module." in key and fields.get("modules_to_save")]
    if unused:
        message = (
            f"{listed([printable(key) for key in unused], 3)}: PEFT's copy of what modules_to_save replaced, not used"
        )
        notes = (*notes, Note("original-module", message))
    keys = adapter_keys((key for key in node if key not in unused), PEFT if "peft_type" in fields else None)
    groups: dict[tuple[str, str, int], dict[str, str]] = {}
    for key, found in keys.items():
        parts = groups.setdefault((found.component, found.module, found.depth), {}) if found.role else {}
        if found.role in parts:
            what = f"{name} has {printable(found.module)} twice: {printable(parts[found.role])} and {printable(key)}"
            raise Conflict(what, "Several adapters in one file cannot be told apart.")
        parts[found.role] = key
    if not any(role != "alpha" for parts in groups.values() for role in parts):
        raise UsageError(f"{name} has no LoRA, LoHa or LoKr factors", "It is no adapter of a kind that is known here.")
    schemes = list(dict.fromkeys(found.scheme for found in keys.values() if found.role))
    if len(schemes) > 1:
        raise Conflict(f"{name} mixes the names of {listed(schemes)}", "How its numbers are scaled cannot be told.")
    reader = _Reader(node, name, keys, schemes[0], config, _of_components(metadata or {}))
    deltas = tuple(reader.delta(parts) for parts in groups.values())
    whole = tuple(Whole(k.component, k.module, node[key], key) for key, k in keys.items() if not k.role)
    return Adapter(schemes[0], deltas, whole, fields, notes)


def _checked(config: Mapping[str, Any], name: str) -> Iterator[Note]:
    """Notes on a configuration of PEFT. Raises `Unsupported` for what is no change of weights, or of another kind."""
    kind = str(config.get("peft_type", "LORA"))
    if kind not in _TYPES:
        raise Unsupported(
            f"{name} is an adapter of the type {printable(kind)[:60]}", f"Known are {listed(list(_TYPES))}."
        )
    if refused := [words for field, words in _REFUSED.items() if config.get(field)]:
        why = "It changes what a model does by more than its weights, so that no merged weights do the same."
        raise Unsupported(f"{name} uses {listed(refused)}", why)
    initialised = config.get("init_lora_weights")
    if isinstance(initialised, str) and initialised.lower().startswith(_INITIALISED):
        changed = f"{printable(initialised)[:60]} changed the base before the training"
        yield Note("changed-base", f"{changed}: it has to be merged into that base, not into the original")


def _of_components(metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The configurations that diffusers stores in the file: by component, with PEFT's fields."""
    text = metadata.get(DIFFUSERS_CONFIG)
    try:
        stored = json.loads(text) if isinstance(text, str) else {}
    except (ValueError, RecursionError):
        stored = {}
    found: dict[str, dict[str, Any]] = {}
    for key, value in stored.items() if isinstance(stored, dict) else ():
        component, _, field = key.partition(".")
        found.setdefault(f"{component}.", {})[field] = value
    return found


class _Reader:
    """Makes the changes of one file."""

    def __init__(
        self,
        node: Mapping[Any, Any],
        name: str,
        keys: Mapping[str, AdapterKey],
        scheme: str,
        config: Mapping[str, Any] | None,
        configs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.node, self.name, self.keys, self.scheme = node, name, keys, scheme
        self.config, self.configs = config, configs

    def delta(self, parts: Mapping[str, str]) -> Delta:
        """The change of the module that these keys are of, by role."""
        first = self.keys[next(iter(parts.values()))]
        where = f"{self.name}: {printable(first.module)}"
        found = {role: self.node[key] for role, key in parts.items()}
        bias = next((role for role in _BIASES if role in found), "")
        factors = {role: entry for role, entry in found.items() if role not in ("alpha", "magnitude", bias)}
        method = next((method_of(role) for role in factors if is_factor(role)), DIFF)
        if factors.keys() not in _COMPLETE[method] or not (factors or bias):
            raise NoMatch(
                f"{where} has {listed([printable(key) for key in parts.values()])} alone",
                "That is not all of a change, or more than one. Nothing was written.",
                "A key may be misspelt, or missing.",
            )
        rank = self._rank(method, factors, where)
        alpha, scale = self._scale(parts, first, method, rank, where)
        return Delta(
            first.component,
            first.module,
            method,
            factors,
            rank,
            alpha,
            scale,
            first.embedding,
            first.depth,
            found.get("magnitude"),
            found.get(bias),
            scale if bias == "B.bias" else 1.0,
            tuple(parts.values()),
            any(".base_layer.out_proj." in key for key in parts.values()),
        )

    def _rank(self, method: str, factors: Mapping[str, TensorEntry], where: str) -> int:
        if odd := [role for role, entry in factors.items() if not entry.dtype.is_float or not _is_matrix(role, entry)]:
            raise Conflict(f"{where}: {listed(odd)} is no matrix of floats", "It was saved without its values, or cut.")
        rank = next((factors[role].shape[0] for role in _RANKED[method] if role in factors), 0)
        if rank == 0 and method in (LORA, LOHA):
            raise Conflict(f"{where} has rank 0", "It was saved without its values, as sharded training does.")
        if rank > MAX_RANK:
            raise LimitExceeded(f"{where} has rank {rank:,}", f"At most {MAX_RANK:,} are read.")
        return rank

    def _scale(
        self, parts: Mapping[str, str], first: AdapterKey, method: str, rank: int, where: str
    ) -> tuple[float | None, float]:
        """The alpha of a module, and the scale that follows."""
        config = self.configs.get(first.component, self.config)
        if method == DIFF or (self.scheme != PEFT and not rank):  # a LoKr that has both matrices whole
            return None, 1.0
        if "alpha" in parts:
            alpha = self._stored(parts["alpha"])
            return alpha, _finite(alpha / rank, where)
        if config is None or (self.scheme != PEFT and "lora_alpha" not in config):
            if self.scheme == PEFT:
                what = f"{self.name} does not say its alpha: it is in adapter_config.json, which is not beside it"
                raise UsageError(what, "Without it the scale is not known.", "Name it: --config adapter_config.json")
            return None, 1.0
        return self._configured(config, first, method, rank, where)

    def _configured(
        self, config: Mapping[str, Any], first: AdapterKey, method: str, rank: int, where: str
    ) -> tuple[float, float]:
        """The same by PEFT's configuration, with the patterns for single modules."""
        given = config.get("lora_alpha" if method == LORA else "alpha", 8)
        alpha = _number(_by_pattern(config, "alpha_pattern", first.module, given), f"{where}: alpha")
        own = _number(_by_pattern(config, "rank_pattern", first.module, config.get("r", rank)), f"{where}: r")
        stacked = bool(config.get("target_parameters")) and own > 0 and rank % own == 0
        if own <= 0 or (method == LORA and own != rank and not stacked):
            what = f"{where} has rank {rank:,}, and {own:g} by its configuration"
            raise Conflict(what, "The configuration is of another adapter. Nothing was written.")
        return alpha, _finite(alpha / (math.sqrt(own) if config.get("use_rslora") else own), where)

    def _stored(self, key: str) -> float:
        entry = self.node[key]
        if entry.numel != 1:
            raise Conflict(f"{self.name}: {printable(key)} is of shape {list(entry.shape)}", "An alpha is one number.")
        return _finite(float(TensorValues(entry).read(0, 1)[0]), f"{self.name}: {printable(key)}")


def _is_matrix(role: str, entry: TensorEntry) -> bool:
    return len(entry.shape) > 1 or not is_factor(role)


def _finite(value: float, where: str) -> float:
    if not math.isfinite(value):
        raise Conflict(f"{where}: its scale is {value}", "The adapter is damaged. Nothing was written.")
    return value


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e30:
        raise Conflict(f"{what} is {printable(repr(value)[:60])}, not a number", "The configuration is damaged.")
    return _finite(float(value), what)


@lru_cache(1 << 12)
def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _by_pattern(config: Mapping[str, Any], field: str, module: str, default: Any) -> Any:
    """The value for a module: that of the first pattern that the end of its name matches, as PEFT looks for it.

    Raises `Unsupported` for a pattern whose search could take for ever.
    """
    patterns = config.get(field) or {}
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        if (
            len(pattern) > 500
            or len(module) > 500
            or len(re.findall(r"[*+?{]", pattern)) > 2
            or re.search(r"\)[*+?{]", pattern)
        ):
            raise Unsupported(f"{field}: {printable(pattern)[:100]} is a pattern that may take very long", "")
        try:
            if _pattern(pattern).match(module):
                return value
        except re.error as error:
            raise Conflict(f"{field}: {printable(pattern)} is no regular expression: {error}", "") from None
    return default
