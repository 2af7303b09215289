"""The quantized weights of a state dict, identified by the names of their parts and by the configuration beside them.

What cannot be identified is reported by name, never guessed: a scale without its weight, codes without their scale.
torchao's file format: torchao/prototype/safetensors/safetensors_support.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.checkpoint import Composite, TensorEntry
from ckptool.conventions.quantized_formats import (
    FORMATS,
    TORCHAO,
    QuantizedFormat,
    QuantizedWeight,
    Scheme,
    are_sizes,
    is_f8,
    parsed,
    scheme_of,
)
from ckptool.errors import CkptoolError, counted

_MARKERS = tuple(each.marker for each in FORMATS)
_TORCHAO = {"Float8Tensor": 2, "Int8Tensor": 2, "IntxUnpackedToInt8Tensor": 3}  # and their parts
_ACTIVATION = re.compile(
    r"(?:^|[._])(?:input|output|activation|[qkv]|[qkv]_proj|prob|kv_cache)_"
    r"(?:scale|zero_point|global_scale|scale_ub|scale_inv|g_idx)$"
)
_PART = re.compile(
    r"(?:^|\.)(?:weight_(?:scale\w*|zero_point|packed|shape|g_idx|global_scale|format)|scale_weight|scaled_fp8|qweight"
    r"|qzeros|scales|g_idx|SCB|(?:nested_)?(?:absmax|quant_map)|quant_state\.\w+|_\w+_(?:qdata|scale|zero_point))$"
    r"|_(?:scale_inv|blocks|scales|packed)$"
)
_SCALE = re.compile(r"weight.*scale|scale.*weight|^_?scale|^w_scale")
_FAR = re.compile(r"(?:^|\.)(?:weight_(?:\w*scale\w*|packed)|scale_weight|scaled_fp8|_scale)$|_proj_scale_inv$")


@dataclass(slots=True)
class Quantized:
    """The quantized weights of a state dict.

    left_out: keys that weights do not need: scales of activations.  problems: a line for each part that is not known.
    """

    weights: list[QuantizedWeight] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.weights or self.problems)

    def lines(self) -> list[str]:
        """The formats, for people: `fp8 in 128 × 128 blocks, 62 weights`."""
        formats = Counter(weight.words for weight in self.weights)
        return [f"{words}, {counted(count, 'weight')}" for words, count in formats.items()]


def find_quantized(
    tree: Mapping[Any, Any],
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
    block: tuple[int, int] | None = None,
) -> Quantized:
    """The quantized weights of a state dict. Reads `weight_shape` and bitsandbytes' states alone.

    config: the `quantization_config` beside it.  metadata: of its container.  block: rows and columns that share a
    scale, in place of what the configuration says.
    """
    scheme = scheme_of(config)
    scheme = replace(scheme, blocks=frozenset({block})) if block else scheme
    found, taken = Quantized(), dict[str, str]()
    if scheme.unknown and any(map(_are_codes, tree.values())):
        found.problems.append(scheme.unknown)
    for name, format_, keys, own in _named(tree, metadata, found.problems, taken):
        problem = ""
        if twice := [key for key in keys.values() if taken.setdefault(key, name) != name]:
            problem = f"{twice[0]} belongs to two weights"
        elif name in tree and name not in keys.values():
            problem = f"{name} is there as well as {keys['codes']}"
        elif scheme.method and scheme.method not in format_.methods:
            problem = f"{name} is not quantized as {scheme.method} does it"
        elif any(tree[key].nbytes > tree[key].storage.nbytes for key in keys.values()):
            problem = f"{name} is made of views that repeat their values"
        else:
            parts = {role: tree[key] for role, key in keys.items()}
            try:
                found.weights.append(format_.read(QuantizedWeight(name, parts, tuple(keys.values())), own or scheme))
            except CkptoolError as error:
                problem = f"{name}: {error.what}"
        found.problems += [problem] if problem else []
    if found or scheme.method or _is_scaled(tree):
        _add_leftovers(tree, taken, found)
    return found


def may_be_quantized(tree: Mapping[Any, Any]) -> bool:
    """False for what has no key and no type of a quantized weight, without a look at anything else."""
    return any(type(key) is str and (key.endswith(_MARKERS) or _is_f8(value)) for key, value in tree.items())


def _is_f8(value: Any) -> bool:
    return isinstance(value, TensorEntry) and is_f8(value.dtype)


def _are_codes(value: Any) -> bool:
    return isinstance(value, TensorEntry) and (value.dtype.name in ("i8", "u8", "i32") or is_f8(value.dtype))


Named = tuple[str, QuantizedFormat, dict[str, str], Scheme | None]
"""The name of a weight, its format, its keys by role, and facts of its own in place of the configuration's."""


def _named(
    tree: Mapping[Any, Any], metadata: Mapping[str, Any], problems: list[str], taken: dict[str, str]
) -> Iterator[Named]:
    """The weights that names tell. taken: gets the keys of what lacks a part."""
    for key in tree:
        if type(key) is not str or not key.endswith(_MARKERS):
            continue
        format_ = next(each for each in FORMATS if key.endswith(each.marker))
        base = key[: -len(format_.marker)]
        if format_.weak and not _are_codes(tree.get(base + format_.needs["codes"])):
            continue
        keys = _there(tree, {role: base + end for role, end in (format_.needs | format_.may).items()})
        if missing := [base + end for role, end in format_.needs.items() if role not in keys]:
            if format_.weak:
                continue  # of something else, unless there are quantized weights
            problems.append(f"{key} is there, {missing[0]} is not")
            taken |= dict.fromkeys(keys.values(), "")
        else:
            yield base + format_.weight, format_, keys, None
    for name in parsed(metadata.get("tensor_names"), list):
        fields = parsed(metadata.get(name), dict) if type(name) is str else {}
        kind, data = fields.get("_type"), fields.get("_data")
        if kind in (None, "Tensor"):
            continue
        module, _, last = name.rpartition(".")
        ends = TORCHAO.needs | TORCHAO.may
        keys = _there(tree, {role: f"{module}._{last}_{end}" for role, end in ends.items()})
        sizes = data.get("block_size") if isinstance(data, dict) else None
        parts = fields.get("_tensor_data_names")  # all that the weight has
        count = len(parts) if isinstance(parts, list) else _TORCHAO.get(str(kind))
        known = kind in _TORCHAO and {"codes", "scale"} <= keys.keys() and len(keys) == count
        if known and isinstance(sizes, list) and len(sizes) == len(tree[keys["codes"]].shape) == 2 and are_sizes(sizes):
            yield name, TORCHAO, keys, Scheme(blocks=frozenset({(sizes[0], sizes[1])}))
        else:
            what = str(kind)[:60]
            problems.append(f"{name} is torchao's {what}, or parts of one, of a layout that is not known")
            taken |= dict.fromkeys(keys.values(), "")


def _there(tree: Mapping[Any, Any], keys: dict[str, str]) -> dict[str, str]:
    return {role: key for role, key in keys.items() if isinstance(tree.get(key), TensorEntry)}


def _is_scaled(tree: Mapping[Any, Any]) -> bool:
    """True where a float8 tensor has a weight scale beside it, under any name, or of a known name anywhere."""
    modules = {key.rpartition(".")[0] for key, value in tree.items() if type(key) is str and _is_f8(value)}
    return any(
        _FAR.search(key) or (key.rpartition(".")[0] in modules and _SCALE.search(key.rpartition(".")[2]))
        for key, value in (tree.items() if modules else ())
        if type(key) is str and not _is_f8(value)
    )


def _add_leftovers(tree: Mapping[Any, Any], taken: Mapping[str, str], found: Quantized) -> None:
    """Adds scales of activations; and the parts of weights, and codes, that belong to nothing that is known."""
    names = {name for weight in found.weights for name in (weight.name, weight.keys[0])}
    modules = {name[: dot.start()] for name in names for dot in re.finditer("[.]", name[:1000])}
    for key, value in tree.items():
        if isinstance(value, Composite) and "quantized" in value.kind:
            found.problems.append(f"{key!s} is a {value.kind} tensor")
        if type(key) is not str or key in taken or not isinstance(value, TensorEntry):
            continue
        begins = (key[: end.start()] in names for end in re.finditer("[._]", key[:1000]))
        module = key.rpartition(".")[0]
        if _ACTIVATION.search(key) and module in modules and (value.numel == 1 or f"{module}.weight" in names):
            found.left_out.append(key)
        elif _PART.search(key) or (not key.endswith("bias") and any(begins)):
            found.problems.append(f"{key} belongs to no weight that is there")
        elif is_f8(value.dtype) or (_are_codes(value) and re.search(r"(?:^|\.)weight$|_proj$", key)):
            found.problems.append(f"{key} is of type {value.dtype}, and has no scale that is known")
