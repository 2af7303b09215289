"""The quantized weights of a state dict, identified by the names of their parts and by the configuration beside them;
their formats, and the sizes that the parts have to have.

What cannot be identified is reported by name, never guessed: a scale without its weight, codes without their scale.
`FORMATS` has a line for each format. Its function checks the parts of a weight and turns them to the weight's own
orientation, [out, in], as strided views: codes by rows, and tables [rows, groups] of scales and zero points. Nothing is
computed here, and only tensors that a shape is stored in are read. What does not fit raises `Unsupported`.

Sources: transformers/integrations (finegrained_fp8.py, mxfp4.py), compressed_tensors/compressors,
bitsandbytes/functional.py (`QuantState`), AutoGPTQ, AutoAWQ (`WQLinear_GEMM`), and of torchao's files
torchao/prototype/safetensors/safetensors_support.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckptool.checkpoint import Composite, TensorEntry
from ckptool.checkpoint.dtypes import DType, by_name
from ckptool.errors import CkptoolError, Unsupported, counted, listed
from ckptool.facts import dataclass, field, replace

MAX_WIDTH = 1 << 20  # elements of a row
MAX_STATE = 1 << 16  # bytes of bitsandbytes' JSON
EXPONENTS = by_name("f8_e8m0fnu")  # the powers of two that scales of bytes are
_CODES = ("i8", "u8", "i16", "i32", "u32")


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight that is stored as several tensors.

    name: what the weight itself is called.  parts: by role.  keys: those of all parts in the state dict, the codes'
    first.  codes: how the codes are packed (see `transforms.dequantize`).  kind: of the format, for people.
    grid, block: how many scales there are along each dimension, and the size of what shares one.
    facts: what else the arithmetic needs.
    """

    name: str
    parts: Mapping[str, TensorEntry]
    keys: tuple[str, ...]
    codes: str = ""
    kind: str = ""
    shape: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    bits: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The format, for people: `fp8 in 128 × 128 blocks`."""
        *rows, columns = self.block or (0,)
        if not rows:
            return self.kind
        if self.block == self.shape:
            return f"{self.kind} with a scale for each tensor"
        if any(size != 1 for size in rows):
            return f"{self.kind} in {rows[-1]} × {columns} blocks"
        is_per_channel = columns == self.shape[-1]
        return f"{self.kind} with a scale for each channel" if is_per_channel else f"{self.kind} in groups of {columns}"


# The configuration ---------------------------------------------------------------------------------------------------

_CT = "compressed-tensors"
_KNOWN = {
    _CT: "dense float-quantized int-quantized naive-quantized pack-quantized mixed-precision nvfp4-pack-quantized "
    "mxfp4-pack-quantized mxfp8-quantized".split(),
    "gptq": ["gptq", "gptq_v2"],
    "awq": ["gemm"],
}
# The fields of configurations that are read here, or do not affect the values: how these were found and are computed
# with. Any other that is not empty, such as a rotation, may be a step that is not known here; so may a text other than
# those listed after a field.
_FIELDS = {
    name: texts.split("|") if texts else []
    for name, _, texts in (
        word.partition("=")
        for word in """
        _load_in_4bit _load_in_8bit act_group_aware activation_scale_ub activation_scheme
        actorder=weight|static|group|dynamic backend batch_size bits block_name_to_quantize block_structure
        bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type=nf4|fp4 bnb_4bit_use_double_quant
        cache_block_outputs checkpoint_format config_groups damp_auto_increment damp_percent dataset dequantize desc_act
        disable_exllama do_fuse dynamic exllama_config expert_dtype fmt=e4m3|e4m3fn|e5m2 format fuse_max_seq_len
        global_compression_ratio group_size ignore ignored_layers include_input_output_embeddings input_activations
        is_checkpoint_fp8_serialized kv_cache_scheme llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
        llm_int8_skip_modules llm_int8_threshold lm_head load_in_4bit load_in_8bit max_input_length meta
        model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
        modules_in_block_to_quantize modules_to_convert modules_to_fuse modules_to_not_convert mse num_bits observer
        observer_kwargs output_activations pack_dtype pad_token_id quant_method quant_type quantization_status quantizer
        run_compressed scale_dtype scale_fmt=float|ue8m0 static_groups strategy=tensor|channel|group|block|tensor_group
        sym symmetric targets tokenizer true_sequential type=int|float untie_embedding_weights use_cuda_fp16 use_exllama
        use_optimized_inference version weight_block_size weights zero_point zp_dtype
        """.split()
    )
}
_TYPES = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float"}  # of the values, by format


@dataclass(frozen=True, slots=True)
class Scheme:
    """The facts of a configuration that shapes may leave open; empty where it does not give them.

    blocks: (rows, columns) that share a scale, where 0 is all of them.  symmetric: None where it does not say.
    reordered: columns are not in the order of their groups.  forms: names of the file's format.  unknown: why the
    configuration is not known.
    """

    method: str = ""
    bits: frozenset[int] = frozenset()
    blocks: frozenset[tuple[int, int]] = frozenset()
    symmetric: bool | None = None
    reordered: bool = False
    forms: tuple[str, ...] = ()
    unknown: str = ""


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """The facts of a `quantization_config`."""
    method = _text(config.get("quant_method"))
    groups = config.get("config_groups")  # of compressed-tensors
    divided = [part for part in (groups.values() if isinstance(groups, dict) else ()) if isinstance(part, dict)]
    nodes = [part for part in (config, *divided) if isinstance(part, dict)]
    names = ["checkpoint_format", "format", *(["version"] if method == "awq" else [])]
    forms = tuple(text.lower() for node in nodes for name in names if (text := _text(node.get(name))))
    weights = [node["weights"] for node in nodes if isinstance(node.get("weights"), dict)]
    unknown = next(_unknown(method, forms, config, divided, weights), "")
    nodes = [] if config.get("dynamic") else [*nodes, *weights]  # GPTQModel: other facts by module
    bits = (node.get(name) for node in nodes for name in ("num_bits", "bits"))
    blocks = set[tuple[int, int]]()
    for node in nodes:
        sizes, group = node.get("weight_block_size") or node.get("block_structure"), node.get("group_size")
        if isinstance(sizes, list) and len(sizes) == 2 and are_sizes(sizes):
            blocks.add((sizes[0], sizes[1]))
        elif type(group) is int and group < 1 << 40:
            blocks.add((1, max(group, 0)))
        elif (strategy := node.get("strategy")) in ("tensor", "channel"):
            blocks.add((int(strategy == "channel"), 0))
    signs = {sign for node in nodes for name in ("symmetric", "sym") if type(sign := node.get(name)) is bool}
    return Scheme(
        method,
        frozenset(number for number in bits if type(number) is int),
        frozenset(blocks),
        signs.pop() if len(signs) == 1 else None,
        any(node.get("desc_act") is True or node.get("actorder") in ("group", "dynamic") for node in nodes),
        forms,
        unknown,
    )


def _unknown(method: str, forms: Sequence[str], config: Any, divided: list[Any], weights: list[Any]) -> Iterator[str]:
    """What is not known in a configuration: its method, its format, its fields. divided: its groups."""
    if method and not any(method in format_.methods for format_ in (*FORMATS, TORCHAO)):
        yield f"the quantization method {method!r} is not known"
    for form in forms:
        if form not in _KNOWN.get(method, forms):
            yield f"the format {form!r} of {method} is not known"
    unknown_field = "the field {!r} of its quantization configuration is not known"
    for key, value in (item for node in (config, *divided, *weights) for item in node.items()):
        if key not in _FIELDS and value and value != {"format": "dense"}:
            yield unknown_field.format(key[:60])
        elif isinstance(value, str) and _FIELDS.get(key) and value.lower() not in _FIELDS[key]:
            yield unknown_field.format(f"{key}={value[:60]}")
    for node in (group for group in divided if group.get("weights") in weights):
        form, kind = str(node.get("format") or config.get("format")), node["weights"].get("type")
        if kind in ("int", "float") and _TYPES.get(form, kind) != kind:
            yield unknown_field.format(f"type={kind}")


def _text(value: Any) -> str:
    return value[:60] if isinstance(value, str) else ""


def are_sizes(values: Any) -> bool:
    return all(type(size) is int and 0 < size < 1 << 40 for size in values)


def parsed(text: Any, kind: type) -> Any:
    """The JSON value in a text, if it is of this type; else an empty one."""
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        value = None
    return value if isinstance(value, kind) else kind()


# Sizes ---------------------------------------------------------------------------------------------------------------


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Unsupported(what)


def is_f8(dtype: DType) -> bool:
    """True for the float8 types that codes have."""
    return dtype.is_float and dtype.itemsize == 1 and dtype is not EXPONENTS


def ceil_div(size: int, by: int) -> int:
    return -(-size // by)


def _shaped(*entries: TensorEntry) -> str:
    return ", ".join(f"{entry.dtype}{list(entry.shape)}" for entry in entries)


def _gridded(weight: QuantizedWeight, scheme: Scheme, *, even: bool = False) -> QuantizedWeight:
    """The weight with the sizes of its blocks, which follow from its scale: one number, one for each row, or a grid.

    even: shapes alone tell blocks that are a power of two and divide a row.
    """
    shape, scale = weight.shape, weight.parts["scale"]
    scale = replace(scale, dtype=EXPONENTS) if scale.dtype.name == "u8" else scale
    mismatch = f"scales {_shaped(scale)} for a weight {list(shape)[:8]}"
    require(len(shape) >= 2 and are_sizes(shape) and shape[-1] <= MAX_WIDTH and scale.dtype.is_float, mismatch)
    grid = (*scale.shape, *(1,) * (len(shape) - 1)) if scale.shape == shape[:1] else scale.shape
    grid = (1,) * len(shape) if scale.numel == 1 else grid
    require(len(grid) == len(shape) and all(0 < n <= size for n, size in zip(grid, shape, strict=True)), mismatch)
    require(all(n in (1, size) for n, size in zip(grid[:-2], shape, strict=False)), mismatch)
    blocks = scheme.blocks or {(_block_size(shape[-2], grid[-2], False), _block_size(shape[-1], grid[-1], even))}
    blocks = {(rows or shape[-2], columns or shape[-1]) for rows, columns in blocks}
    fitting = [pair for pair in blocks if tuple(map(ceil_div, shape[-2:], pair)) == grid[-2:]]
    open_axes = [axis for axis in (-2, -1) if grid[axis] not in (1, shape[axis])]  # told by the configuration alone
    is_unique = len({tuple(pair[axis] for axis in open_axes) for pair in fitting}) == 1
    require(is_unique, f"{mismatch}, not in blocks of {listed([f'{r} × {c}' for r, c in sorted(blocks)])}")
    block = list(map(ceil_div, shape, grid))
    for axis in open_axes:
        block[axis] = fitting[0][axis]
    parts = dict(weight.parts) | {"scale": scale.reshape((prod(grid[:-1]), grid[-1]))}
    if (zeros := parts.get("zeros")) is not None and weight.codes == "plain":
        fits = zeros.shape == scale.shape and zeros.dtype.kind in ("int", "float")
        require(fits, f"zero points {_shaped(zeros)}, {mismatch}")
        parts["zeros"] = zeros.reshape(parts["scale"].shape)
    index = parts.get("g_idx")
    require(index is None or (index.shape == shape[-1:] and index.dtype.kind == "int"), f"{mismatch}, a wrong g_idx")
    missing = scheme.reordered and index is None and weight.codes == "bits" and grid[-1] > 1
    require(not missing, "no g_idx, though the configuration says that columns were reordered")
    missing = scheme.symmetric is False and "zeros" not in parts and weight.kind.startswith("int")
    require(not missing, "no zero points, though the configuration says that codes are not symmetric")
    return replace(weight, parts=parts, grid=grid, block=tuple(block))


def _block_size(size: int, count: int, even: bool) -> int:
    """The size of `count` blocks along a dimension, the last may be cut. even: a power of two that fits is taken."""
    low, high = ceil_div(size, count), size if count == 1 else ceil_div(size, count - 1) - 1
    fits = count in (1, size) or low == high or (even and size % count == 0 and not low & (low - 1))
    require(fits, f"{count} scales for {size}, blocks of {low} to {high}: config.json says which (weight_block_size)")
    return low


# The formats ---------------------------------------------------------------------------------------------------------


def scaled(weight: QuantizedWeight, scheme: Scheme) -> QuantizedWeight:
    """Float8 or int8 codes in the weight's place, with a scale for all, for each row, group or block."""
    codes, scale = weight.parts["codes"], weight.parts["scale"]
    fits = is_f8(codes.dtype) or (codes.dtype.name == "i8" and not weight.keys[1].endswith("_inv"))
    require(fits, f"codes of type {codes.dtype}")
    is_explained = bool(is_f8(codes.dtype) or scheme.method or scheme.blocks)
    which = "only a quantization_config in config.json can say which"
    require(is_explained, f"int8 codes, each of which may hold one number or two: {which}")
    if scale.dtype.name == "u8" and not scheme.blocks:
        scheme = replace(scheme, blocks=frozenset({(1, 32)}))  # the microscaling formats'
    kind = "int8" if codes.dtype.name == "i8" else "fp8"
    return _gridded(replace(weight, codes="plain", kind=kind, shape=codes.shape), scheme)


def _int8(weight: QuantizedWeight, scheme: Scheme) -> QuantizedWeight:
    codes, scale, layout = weight.parts["codes"], weight.parts["scale"], weight.parts.get("layout")
    fits = codes.dtype.name == "i8" and len(codes.shape) == 2 and scale.shape == codes.shape[:1]
    fits = fits and (layout is None or (layout.numel == 1 and not any(layout.bytes())))  # 0: by rows
    require(fits, f"codes, SCB and weight_format {_shaped(*weight.parts.values())}")
    checked = scaled(replace(weight, parts={"codes": codes, "scale": scale}), Scheme("bitsandbytes"))
    return replace(checked, codes="int8", kind="bitsandbytes int8")


def _packed(weight: QuantizedWeight, scheme: Scheme) -> QuantizedWeight:
    """compressed-tensors: int32 words of any number of bits, or bytes of two e2m1 floats."""
    parts, codes = dict(weight.parts), weight.parts["codes"]
    sizes = parts.pop("shape", None)
    if codes.dtype.name == "u8":
        return _fp4(replace(weight, parts=parts))
    require(sizes is not None and sizes.dtype.kind == "int" and 2 <= sizes.numel <= 8, "no weight_shape")
    assert sizes is not None
    shape = tuple(int(size) for size in sizes.numpy().reshape(-1))
    fits = codes.dtype.name == "i32" and are_sizes(shape) and codes.shape[:-1] == shape[:-1]
    fitting = {b for b in range(1, 9) if fits and ceil_div(shape[-1] * b, 32) == codes.shape[-1]}
    fitting = fitting & scheme.bits if scheme.bits else fitting
    require(len(fitting) == 1 and "global" not in parts, f"words {_shaped(codes)} for a weight {list(shape)[:8]}")
    bits = fitting.pop()
    checked = replace(weight, parts=parts, codes="bits", bits=bits, kind=f"int{bits}", shape=shape)
    checked = _gridded(checked, scheme, even=True)
    rows, groups = checked.parts["scale"].shape
    zeros = parts.get("zeros")
    fits = zeros is None or (
        zeros.dtype.name == "i32" and zeros.shape == (ceil_div(rows * bits, 32), groups) and len(shape) == 2
    )
    require(fits and all(size == 1 for size in checked.block[:-1] if rows > 1), f"parts {_shaped(*parts.values())}")
    return checked


def _fp4(weight: QuantizedWeight) -> QuantizedWeight:
    parts, codes, scale = weight.parts, weight.parts["codes"], weight.parts["scale"]
    mx = scale.dtype is EXPONENTS or scale.dtype.name == "u8"
    shape, size = (*codes.shape[:-1], 2 * (codes.shape or (0,))[-1]), 32 if mx else 16
    fits = (mx or is_f8(scale.dtype)) and scale.shape == (*shape[:-1], shape[-1] // size) and shape[-1] % size == 0
    fits = fits and parts.keys() == {"codes", "scale"} | (set() if mx else {"global"})
    fits = fits and (mx or (parts["global"].numel == 1 and parts["global"].dtype.is_float))
    require(fits, f"parts {_shaped(*parts.values())}")
    checked = replace(weight, codes="fp4", kind="mxfp4" if mx else "nvfp4", shape=shape)
    return _gridded(checked, Scheme(blocks=frozenset({(1, size)})))


def _mxfp4(weight: QuantizedWeight, scheme: Scheme) -> QuantizedWeight:
    """gpt-oss: bytes of two e2m1 floats [experts, rows, groups, 16]; the weight is [experts, 32 · groups, rows]."""
    codes, scale = weight.parts["codes"], weight.parts["scale"]
    fits = len(codes.shape) == 4 and codes.shape[3] == 16 and scale.shape == codes.shape[:3] and codes.numel > 0
    fits = fits and codes.dtype.name == scale.dtype.name == "u8" and codes.shape[1] * 32 <= MAX_WIDTH
    require(fits, f"blocks and scales {_shaped(codes, scale)}")
    experts, rows, groups, _ = codes.shape
    parts = {"codes": codes.permute((0, 2, 1, 3)), "scale": replace(scale, dtype=EXPONENTS).permute((0, 2, 1))}
    shape, kind = (experts, 32 * groups, rows), "mxfp4 in groups of 32"
    return replace(weight, codes="gpt-oss", kind=kind, shape=shape, parts=parts)


def _bitsandbytes(weight: QuantizedWeight, scheme: Scheme) -> QuantizedWeight:
    parts = dict(weight.parts)
    state, codes, absmax, table = parts.pop("state"), parts["codes"], parts["absmax"], parts["map"]
    require(state.dtype.name == "u8" and state.nbytes <= MAX_STATE, f"a state {_shaped(state)}")
    facts = parsed(state.bytes(), dict)
    shape, size, kind = facts.get("shape"), facts.get("blocksize"), facts.get("quant_type")
    readable = kind in ("nf4", "fp4") and isinstance(shape, list) and 0 < len(shape) <= 8 and are_sizes([*shape, size])
    require(readable, "a state that cannot be read")
    blocks, nested = ceil_div(prod(shape), size), "nested_absmax" in parts
    fits = codes.nbytes == ceil_div(prod(shape), 2) and absmax.numel == blocks and table.numel == 16
    fits = fits and table.dtype.is_float and (absmax.dtype.name == "u8" if nested else absmax.dtype.is_float)
    if nested:
        outer, offset = facts.get("nested_blocksize"), facts.get("nested_offset")
        fits = fits and "nested_map" in parts and type(offset) is float and are_sizes([outer])
        fits = fits and parts["nested_absmax"].numel == ceil_div(blocks, outer) and parts["nested_map"].numel == 256
    require(fits, f"parts {_shaped(*parts.values())} for a weight {shape} in blocks of {size}")
    words = f"bitsandbytes {kind} in blocks of {size}{', nested' if nested else ''}"
    return replace(weight, codes="bitsandbytes", kind=words, shape=tuple(shape), parts=parts, facts=facts)


def _gptq_or_awq(weight: QuantizedWeight, scheme: Scheme) -> QuantizedWeight:
    """Words of 32 bits: GPTQ's go down the rows of [in, out], AWQ's along them. The weight is [out, in]."""
    codes, zeros, scale = (weight.parts[role] for role in ("codes", "zeros", "scale"))
    mismatch = f"parts {_shaped(*weight.parts.values())}"
    fits = all(len(table.shape) == 2 and table.numel > 0 for table in (codes, zeros, scale))
    require(fits and codes.dtype.name == zeros.dtype.name == "i32" and zeros.shape[0] == scale.shape[0], mismatch)
    out, width = scale.shape[1], zeros.shape[1]
    awq = "g_idx" not in weight.parts and codes.shape[1] * 8 == width * 8 == out
    bits = 4 if awq else next((b for b in (2, 3, 4, 8) if b * out == width * 32 and codes.shape[1] == out), 0)
    columns = codes.shape[0] if awq or not bits else codes.shape[0] * 32 // bits
    require(bool(bits) and (awq or columns * bits == codes.shape[0] * 32), mismatch)
    method = "awq" if awq else "gptq"
    require(scheme.method in ("", method), f"{method.upper()} by its shapes, but not by the configuration")
    require(not scheme.bits or bits in scheme.bits, f"{bits} bits by its shapes, {sorted(scheme.bits)} as configured")
    parts = dict(weight.parts) | {"codes": codes.transpose(), "zeros": zeros.transpose(), "scale": scale.transpose()}
    facts = {"symmetric": scheme.symmetric, "forms": scheme.forms, "stored": "" if awq else "gptq"}
    checked = replace(weight, parts=parts, codes="awq" if awq else "bits", bits=bits, facts=facts, shape=(out, columns))
    return _gridded(replace(checked, kind=f"{method.upper()} {bits} bit"), scheme, even=True)


class QuantizedFormat(NamedTuple):
    """A way to name the parts of a weight. All their names begin alike; these are the ends, by role.

    marker: the end of the key that identifies it.  weight: the end of the weight's own name.  methods: those of
    configurations that use it.  weak: names of other things may end like this too, so the codes must be integers or
    float8, and all parts that are needed must be there.
    """

    marker: str
    weight: str
    needs: dict[str, str]
    may: dict[str, str]
    methods: tuple[str, ...]
    read: Callable[[QuantizedWeight, Scheme], QuantizedWeight]
    weak: bool = False


_STATE = ".quant_state.bitsandbytes__"
_BNB = {"codes": "", "absmax": ".absmax", "map": ".quant_map"}
_NESTED = {"nested_absmax": ".nested_absmax", "nested_map": ".nested_quant_map"}
_SCB = {"codes": ".weight", "scale": ".SCB"}
_GPTQ = {"codes": ".qweight", "zeros": ".qzeros", "scale": ".scales"}
_WORDS = {"shape": "_shape", "zeros": "_zero_point", "g_idx": "_g_idx", "global": "_global_scale"}
_ROWS = {"zeros": "_zero_point", "g_idx": "_g_idx"}

FORMATS: tuple[QuantizedFormat, ...] = (
    QuantizedFormat(f"{_STATE}nf4", "", _BNB | {"state": f"{_STATE}nf4"}, _NESTED, ("bitsandbytes",), _bitsandbytes),
    QuantizedFormat(f"{_STATE}fp4", "", _BNB | {"state": f"{_STATE}fp4"}, _NESTED, ("bitsandbytes",), _bitsandbytes),
    QuantizedFormat(".SCB", ".weight", _SCB, {"layout": ".weight_format"}, ("bitsandbytes",), _int8),
    QuantizedFormat(".qweight", ".weight", _GPTQ, {"g_idx": ".g_idx"}, ("gptq", "awq"), _gptq_or_awq),
    QuantizedFormat("_blocks", "", {"codes": "_blocks", "scale": "_scales"}, {}, ("mxfp4",), _mxfp4, weak=True),
    QuantizedFormat("_packed", "", {"codes": "_packed", "scale": "_scale"}, _WORDS, (_CT,), _packed, weak=True),
    QuantizedFormat("_scale_inv", "", {"codes": "", "scale": "_scale_inv"}, {}, ("fp8",), scaled, weak=True),
    QuantizedFormat(
        "_scale", "", {"codes": "", "scale": "_scale"}, _ROWS, (_CT, "fp8", "fbgemm_fp8"), scaled, weak=True
    ),
)
TORCHAO = QuantizedFormat("", "", {"codes": "qdata", "scale": "scale"}, {"zeros": "zero_point"}, ("torchao",), scaled)


# Weights by the names of their parts ---------------------------------------------------------------------------------

_MARKERS = tuple(format_.marker for format_ in FORMATS)
_TORCHAO = {"Float8Tensor": 2, "Int8Tensor": 2, "IntxUnpackedToInt8Tensor": 3}  # and how many parts they have
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
_WEIGHT = re.compile(r"weight$|_proj$")
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


def find_quantized(tree: Mapping[Any, Any], config: Mapping[str, Any], metadata: Mapping[str, Any]) -> Quantized:
    """The quantized weights of a state dict. Reads only `weight_shape` and bitsandbytes' states.

    config: the `quantization_config` beside it.  metadata: of its container.
    """
    scheme = scheme_of(config)
    result, owners = Quantized(), dict[str, str]()
    if scheme.unknown and any(map(_are_codes, tree.values())):
        result.problems.append(scheme.unknown)
    for name, format_, keys, facts in _named(tree, metadata, result.problems, owners):
        problem = ""
        if shared := [key for key in keys.values() if owners.setdefault(key, name) != name]:
            problem = f"{shared[0]} belongs to two weights"
        elif name in tree and name not in keys.values():
            problem = f"both {name} and {keys['codes']} are present"
        elif scheme.method and scheme.method not in format_.methods:
            problem = f"{name} is not quantized the way {scheme.method} does it"
        elif any(tree[key].nbytes > tree[key].storage.nbytes for key in keys.values()):
            problem = f"{name} is made of expanded views"
        else:
            parts = {role: tree[key] for role, key in keys.items()}
            try:
                result.weights.append(format_.read(QuantizedWeight(name, parts, tuple(keys.values())), facts or scheme))
            except CkptoolError as error:
                problem = f"{name}: {error.what}"
        result.problems += [problem] if problem else []
    codes = _certain_codes(tree)
    if not (codes or result or scheme.method):
        return result
    # Scales of activations; and the parts of weights, and codes, that belong to nothing that is known.
    names = {name for weight in result.weights for name in (weight.name, weight.keys[0])}
    modules = {name[: dot.start()] for name in names for dot in re.finditer("[.]", name[:1000])}
    for key, value in tree.items():
        if isinstance(value, Composite) and "quantized" in value.kind:
            result.problems.append(f"{key!s} is a {value.kind} tensor")
        if type(key) is not str or key in owners or not isinstance(value, TensorEntry):
            continue
        begins = (key[: end.start()] in names for end in re.finditer("[._]", key[:1000]))
        module = key.rpartition(".")[0]
        if _ACTIVATION.search(key) and module in modules and (value.numel == 1 or f"{module}.weight" in names):
            result.left_out.append(key)
        elif _PART.search(key) or (not key.endswith("bias") and (f"{module}.weight" in names or any(begins))):
            result.problems.append(f"{key} belongs to no weight in the file")
        elif is_f8(value.dtype) or key in codes:
            result.problems.append(f"{key} is of type {value.dtype}, and has no known scale")
    return result


def may_be_quantized(tree: Mapping[Any, Any]) -> bool:
    """False for a state dict with no key and no type of a quantized weight, without a look at anything else."""
    return any(type(key) is str and (key.endswith(_MARKERS) or _are_codes(value)) for key, value in tree.items())


def _are_codes(value: Any) -> bool:
    """True for what may be codes: float8, and integers in rows; a counter has no rows."""
    is_entry = isinstance(value, TensorEntry)
    return is_entry and (is_f8(value.dtype) or (value.dtype.name in _CODES and len(value.shape) > 1))


Named = tuple[str, QuantizedFormat, dict[str, str], Scheme | None]
"""The name of a weight, its format, its keys by role, and facts of its own in place of the configuration's."""


def _named(
    tree: Mapping[Any, Any], metadata: Mapping[str, Any], problems: list[str], owners: dict[str, str]
) -> Iterator[Named]:
    """The weights that names identify. owners: receives the keys of weights that lack a part."""
    for key in tree:
        if type(key) is not str or not key.endswith(_MARKERS):
            continue
        format_ = next(candidate for candidate in FORMATS if key.endswith(candidate.marker))
        base = key[: -len(format_.marker)]
        if format_.weak and not _are_codes(tree.get(base + format_.needs["codes"])):
            continue
        keys = _present(tree, {role: base + end for role, end in (format_.needs | format_.may).items()})
        if missing := [base + end for role, end in format_.needs.items() if role not in keys]:
            if format_.weak:
                continue  # of something else, unless there are quantized weights
            problems.append(f"{key} is present, {missing[0]} is missing")
            owners |= dict.fromkeys(keys.values(), "")
        else:
            yield base + format_.weight, format_, keys, None
    for name in parsed(metadata.get("tensor_names"), list):
        fields = parsed(metadata.get(name), dict) if type(name) is str else {}
        kind, data = fields.get("_type"), fields.get("_data")
        if kind in (None, "Tensor"):
            continue
        module, _, leaf = name.rpartition(".")
        ends = TORCHAO.needs | TORCHAO.may
        keys = _present(tree, {role: f"{module}._{leaf}_{end}" for role, end in ends.items()})
        sizes = data.get("block_size") if isinstance(data, dict) else None
        parts = fields.get("_tensor_data_names")  # all that the weight has
        count = len(parts) if isinstance(parts, list) else _TORCHAO.get(str(kind))
        fits = kind in _TORCHAO and {"codes", "scale"} <= keys.keys() and len(keys) == count
        if fits and isinstance(sizes, list) and len(sizes) == len(tree[keys["codes"]].shape) == 2 and are_sizes(sizes):
            yield name, TORCHAO, keys, Scheme(blocks=frozenset({(sizes[0], sizes[1])}))
        else:
            what = str(kind)[:60]
            problems.append(f"{name} is torchao's {what}, or parts of one, of an unknown layout")
            owners |= dict.fromkeys(keys.values(), "")


def _present(tree: Mapping[Any, Any], keys: dict[str, str]) -> dict[str, str]:
    return {role: key for role, key in keys.items() if isinstance(tree.get(key), TensorEntry)}


def _certain_codes(tree: Mapping[Any, Any]) -> set[str]:
    """The keys of codes that cannot be plain numbers: integers that are called a weight; integers and float8 with a
    weight scale beside them, under any name; float8 where a weight scale has a known name, wherever it is."""
    codes = {key for key, value in tree.items() if type(key) is str and _are_codes(value)}
    if not codes:
        return codes
    float8 = {key for key in codes if is_f8(tree[key].dtype)}
    others = [key for key in tree if type(key) is str and key not in float8]
    scaled_modules = {module for module, _, name in (key.rpartition(".") for key in others) if _SCALE.search(name)}
    certain = {key for key in codes if key.rpartition(".")[0] in scaled_modules}
    certain |= {key for key in codes - float8 if _WEIGHT.search(key)}
    return certain | float8 if any(map(_FAR.search, others)) else certain
