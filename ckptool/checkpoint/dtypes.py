"""The one table of element types: our name, size, and what torch, safetensors and numpy call them; and stored elements
as numbers: bits of any type as an array that numpy computes with, without losing a bit of value.

Sources: torch/csrc/api (scalar types), `torch.storage._dtype_to_storage_type_map`, and the dtype list of the
safetensors specification (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import sys
import threading
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptool.errors import Unsupported, UsageError
from ckptool.facts import dataclass

if TYPE_CHECKING:
    import numpy
    import numpy as np

    from ckptool.checkpoint import Flags

    Array = numpy.ndarray[Any, Any]
else:
    Array = Any  # numpy is imported where it computes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DType:
    """An element type; there is one instance of each, in `DTYPES`. It equals what names it: `torch.float32`, `"f32"`.

    name: ours, as printed (`f32`).  torch: the attribute of the torch module (`float32`).
    itemsize: bytes per element.  kind: `float`, `complex`, `int`, `uint`, `bool`, `quantized` or `bits`.
    storage: torch's typed storage class (`FloatStorage`), or None where torch pickles an `UntypedStorage`.
    safetensors: its name there, or None.  numpy: the name of the numpy or ml_dtypes type, or None.
    """

    name: str
    torch: str
    itemsize: int
    kind: str
    storage: str | None = None
    safetensors: str | None = None
    numpy: str | None = None
    ml: bool = False

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DType):
            return self is other
        try:
            return dtype_of(other) is self
        except UsageError:
            return NotImplemented

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[object, tuple[str]]:  # copies and workers keep the identity
        return by_name, (self.name,)

    @property
    def is_float(self) -> bool:
        """A real floating type, one that `cast` converts."""
        return self.kind == "float"

    def to_numpy(self) -> np.dtype[np.generic]:
        """The numpy type with the same bits; raises `KeyError` where numpy and ml_dtypes have none."""
        import numpy

        if self.numpy is None:
            raise KeyError(self.name)
        if self.ml:
            import ml_dtypes

            ml: np.dtype[np.generic] = numpy.dtype(getattr(ml_dtypes, self.numpy))
            return ml
        return numpy.dtype(self.numpy)


DTYPES: tuple[DType, ...] = (
    DType("f64", "float64", 8, "float", "DoubleStorage", "F64", "float64"),
    DType("f32", "float32", 4, "float", "FloatStorage", "F32", "float32"),
    DType("f16", "float16", 2, "float", "HalfStorage", "F16", "float16"),
    DType("bf16", "bfloat16", 2, "float", "BFloat16Storage", "BF16", "bfloat16", ml=True),
    DType("f8_e4m3fn", "float8_e4m3fn", 1, "float", None, "F8_E4M3", "float8_e4m3fn", ml=True),
    DType("f8_e5m2", "float8_e5m2", 1, "float", None, "F8_E5M2", "float8_e5m2", ml=True),
    DType("f8_e4m3fnuz", "float8_e4m3fnuz", 1, "float", None, "F8_E4M3FNUZ", "float8_e4m3fnuz", ml=True),
    DType("f8_e5m2fnuz", "float8_e5m2fnuz", 1, "float", None, "F8_E5M2FNUZ", "float8_e5m2fnuz", ml=True),
    DType("f8_e8m0fnu", "float8_e8m0fnu", 1, "float", None, "F8_E8M0", "float8_e8m0fnu", ml=True),
    DType("f4_e2m1fn_x2", "float4_e2m1fn_x2", 1, "bits", None, "F4"),
    DType("i64", "int64", 8, "int", "LongStorage", "I64", "int64"),
    DType("i32", "int32", 4, "int", "IntStorage", "I32", "int32"),
    DType("i16", "int16", 2, "int", "ShortStorage", "I16", "int16"),
    DType("i8", "int8", 1, "int", "CharStorage", "I8", "int8"),
    DType("u64", "uint64", 8, "uint", None, "U64", "uint64"),
    DType("u32", "uint32", 4, "uint", None, "U32", "uint32"),
    DType("u16", "uint16", 2, "uint", None, "U16", "uint16"),
    DType("u8", "uint8", 1, "uint", "ByteStorage", "U8", "uint8"),
    DType("bool", "bool", 1, "bool", "BoolStorage", "BOOL", "bool"),
    DType("c128", "complex128", 16, "complex", "ComplexDoubleStorage", None, "complex128"),
    DType("c64", "complex64", 8, "complex", "ComplexFloatStorage", "C64", "complex64"),
    DType("c32", "complex32", 4, "complex"),
    DType("bc32", "bcomplex32", 4, "complex"),  # since torch 2.14
    DType("qi8", "qint8", 1, "quantized", "QInt8Storage", None, "int8"),
    DType("qu8", "quint8", 1, "quantized", "QUInt8Storage", None, "uint8"),
    DType("qi32", "qint32", 4, "quantized", "QInt32Storage", None, "int32"),
    DType("qu4x2", "quint4x2", 1, "quantized", "QUInt4x2Storage"),
    DType("qu2x4", "quint2x4", 1, "quantized", "QUInt2x4Storage"),
    *(
        DType(f"bits{n}", f"bits{n}", size, "bits")
        for n, size in (("1x8", 1), ("2x4", 1), ("4x2", 1), ("8", 1), ("16", 2))
    ),
    *(DType(f"i{n}", f"int{n}", 1, "bits") for n in range(1, 8)),
    *(DType(f"u{n}", f"uint{n}", 1, "bits") for n in range(1, 8)),
)

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
BY_TORCH = {dtype.torch: dtype for dtype in DTYPES}
BY_STORAGE = {dtype.storage: dtype for dtype in DTYPES if dtype.storage}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES if dtype.safetensors}

# Other spellings that people type.
_ALIASES = {
    "half": "f16",
    "float": "f32",
    "double": "f64",
    "fp16": "f16",
    "fp32": "f32",
    "fp64": "f64",
    "fp8": "f8_e4m3fn",
}


def by_name(name: str) -> DType:
    """The type called `name` by us (`bf16`), torch (`torch.bfloat16`) or habit (`half`); raises `KeyError`."""
    name = name.removeprefix("torch.")
    return _BY_NAME.get(name) or BY_TORCH.get(name) or _BY_NAME[_ALIASES[name.lower()]]


def dtype_of(dtype: object) -> DType:
    """The type that is meant: by a name, a dtype of ours, of torch or numpy (ml_dtypes' too), or a numpy class.

    Imports neither library. Raises `UsageError` for anything else, Python's `float` included: that is 32 bits to
    torch and 64 to numpy.
    """
    if isinstance(dtype, DType):
        return dtype
    name, numpy = dtype if isinstance(dtype, str) else "", sys.modules.get("numpy")
    if (type(dtype).__module__, type(dtype).__name__) == ("torch", "dtype"):
        name = str(dtype)
    elif numpy and (isinstance(dtype, numpy.dtype) or (isinstance(dtype, type) and issubclass(dtype, numpy.generic))):
        name = numpy.dtype(dtype).name
    try:
        return by_name(name)
    except KeyError:
        why, write = "", "For example: 'bf16', torch.bfloat16, numpy.float32"
        if dtype is float or dtype is int:
            why, name = "Its size differs between torch and numpy.", dtype.__name__
            write = f"Write torch.{name}32 or torch.{name}64."
        raise UsageError(f"{dtype!r} is not a dtype", why, write) from None


# Numbers: chunks of a few hundred kilobytes; the caller decides how much is in memory ---------------------------------

CHUNK = 1 << 16  # elements at a time: the working arrays of one chunk stay in the second-level cache
_BLOCK = 1024
_PARTS = {"c128": "f64", "c64": "f32", "c32": "f16", "bc32": "bf16"}  # of a complex type
# The types for which computed values were too large, and became infinite, since a writer set it.
TOO_LARGE: ContextVar[set[str]] = ContextVar("TOO_LARGE", default=set())  # noqa: B039, nobody reads that

_local = threading.local()


def scratch(name: str, dtype: str, length: int = CHUNK) -> Array:
    """An uninitialised array: the same memory for each call with this name, as a rule CHUNK elements of 16 bytes.

    A fresh array of this size costs more in page faults than most arithmetic on it. One set for each thread.
    """
    buffers = vars(_local)
    buffer: Array | None = buffers.get(name)
    if buffer is None or len(buffer) < length:
        buffer = buffers[name] = aligned(max(CHUNK * 16, length))
    return buffer.view(dtype)[:length]


def aligned(length: int) -> Array:
    """Memory that begins at a cache line: the kernel copies a third slower into numpy's own, which does not."""
    import numpy

    memory = numpy.empty(length + 64, numpy.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + length]


def part_type(dtype: DType) -> DType:
    """The type of the two parts of a complex type; any other type itself."""
    return by_name(_PARTS.get(dtype.name, dtype.name))


def has_numbers(dtype: DType) -> bool:
    """True if `numbers` can read the type; packed types (4-bit and smaller) are opaque."""
    return part_type(dtype).numpy is not None


def numbers(raw: Array, dtype: DType, work: str = "") -> Array:
    """The elements that the bytes `raw` (uint8) encode, in a type that holds each of them exactly.

    f16, bf16 and float8 become f32 (in the scratch array called `work`, where given); pairs of halves become complex64;
    bool stays bool; quantized types are their integers; the rest is a view of `raw`.
    Raises `Unsupported` for packed types.
    """
    import numpy

    if dtype.kind == "complex" and dtype.numpy is None:
        return numbers(raw, part_type(dtype), work).view(numpy.complex64)
    if not has_numbers(dtype):
        raise packed(dtype)
    if dtype.kind == "bool":
        return numpy.not_equal(raw, 0)
    if dtype.kind != "float" or dtype.itemsize >= 4:
        return raw.view(dtype.to_numpy())
    count = len(raw) // dtype.itemsize
    out = scratch(work, "f4", count) if work else numpy.empty(count, numpy.float32)
    if dtype.name == "bf16":
        numpy.copyto(out, raw.view(dtype.to_numpy()))
        return out
    # A table is twice as quick as numpy's own f16 and four times as quick as ml_dtypes' float8.
    return _f32_table(dtype).take(raw.view(f"u{dtype.itemsize}"), out=out, mode="clip")


@cache
def _f32_table(dtype: DType) -> Array:
    """The f32 value of every bit pattern of an 8- or 16-bit float."""
    import numpy

    patterns = numpy.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    with numpy.errstate(invalid="ignore"):  # signalling NaN
        return patterns.view(dtype.to_numpy()).astype(numpy.float32)


def rounded(values: Array, target: DType) -> Array:
    """`values` (f32 or f64) in a floating type, the way torch rounds; in a scratch array."""
    import numpy

    if target.name != "f64" and values.dtype != numpy.float32:
        numpy.copyto(single := scratch("cast single", "f4", len(values)), values, casting="same_kind")
        values = single
    out = scratch("cast after", f"u{target.itemsize}", len(values))
    if target.itemsize > 1:
        numpy.copyto(out.view(target.to_numpy()), values, casting="unsafe")
    else:
        _f8_table(target).take(_upper_half(values.view(numpy.uint32)), out=out, mode="clip")
    return out.view(target.to_numpy())


def in_type(values: Array, dtype: DType) -> bytes:
    """The bytes of numbers in a type, rounded as torch rounds where it is another float type."""
    import numpy

    flat = numpy.ascontiguousarray(values).reshape(-1)
    if not dtype.is_float or flat.dtype == dtype.to_numpy():
        return flat.tobytes()
    with numpy.errstate(all="ignore", over="call", call=lambda *_: TOO_LARGE.get().add(dtype.name)):
        return b"".join([rounded(flat[at : at + CHUNK], dtype).tobytes() for at in range(0, len(flat), CHUNK)])


def _upper_half(patterns: Array) -> Array:
    """The upper 16 bits of f32 patterns, the lowest of them set if any bit below was.

    Seven bits of mantissa and one that says "and a little more" round to a float8 exactly as all of them would.
    """
    import numpy

    upper = numpy.bitwise_and(patterns, 0xFFFF, out=scratch("cast upper", "u4", len(patterns)))
    numpy.add(upper, 0xFFFF, out=upper)
    numpy.bitwise_or(upper, patterns, out=upper)
    return numpy.right_shift(upper, 16, out=upper)


@cache
def _f8_table(target: DType) -> Array:
    """The float8 pattern for every upper half of an f32 pattern."""
    import numpy

    upper = numpy.arange(1 << 16, dtype=numpy.uint32) << 16
    if target.name == "f8_e8m0fnu":
        return _power_of_two(upper)
    values = upper.view(numpy.float32)
    if target.name == "f8_e4m3fn":  # torch saturates, ml_dtypes makes NaN
        values = numpy.clip(values, -448, 448)
    with numpy.errstate(all="ignore"):
        return values.astype(target.to_numpy()).view(numpy.uint8)


def _power_of_two(patterns: Array) -> Array:
    """The exponent byte of f32 patterns, rounded to nearest; a half goes up, but down below the smallest normal number.

    As in torch/headeronly/util/Float8_e8m0fnu.h: infinities and NaN give 0xFF, and so does rounding up from 2**127.
    """
    import numpy

    exponent = (patterns >> 23) & 0xFF
    mantissa = patterns & 0x7FFFFF
    up = numpy.where(exponent > 0, mantissa >= 0x400000, mantissa > 0x400000) & (exponent < 0xFF)
    return (exponent + up).astype(numpy.uint8)


def resolve(raw: Array, dtype: DType, flags: Flags) -> Array:
    """Applies lazy conjugation and negation to the elements that the bytes `raw` encode, in place; returns `raw`.

    torch has no conjugate of real numbers and no negative bool: such a flag in a file is ignored.
    """
    import numpy

    if flags.conj or flags.neg:
        values = raw.view(part_type(dtype).to_numpy())
        if flags.conj and dtype.kind == "complex":
            numpy.negative(values[1::2], out=values[1::2])
        if flags.neg and dtype.kind != "bool":
            numpy.negative(values, out=values)
    return raw


def dot(x: Array, y: Array) -> float:
    """The dot product of two f32 or two f64 arrays: blocks in their own type, the blocks' sum in f64.

    A block is short enough to lose no digit that matters in f32, and to keep BLAS from waking its threads.
    """
    import numpy

    cut = len(x) - len(x) % _BLOCK
    blocks = numpy.vecdot(x[:cut].reshape(-1, _BLOCK), y[:cut].reshape(-1, _BLOCK))
    total = float(numpy.add.reduce(blocks, dtype=numpy.float64))
    return total if cut == len(x) else total + float(numpy.vecdot(x[cut:], y[cut:]))


def total(x: Array) -> float:
    """The sum of at most CHUNK f32 or f64 values, as `dot` adds."""
    return dot(x, _ones(x.dtype)[: len(x)])


@cache
def _ones(dtype: numpy.dtype[Any]) -> Array:
    import numpy

    return numpy.ones(CHUNK, dtype)


def through(values: Array, dtype: DType) -> Array:
    """f32 numbers rounded in place to a type of fewer bits; for one of as many bits or more they stay as they are."""
    import numpy

    if dtype.itemsize < values.dtype.itemsize and dtype.name != "f32":
        flat = values.reshape(-1)
        for at in range(0, len(flat), CHUNK):
            piece = flat[at : at + CHUNK]
            numpy.copyto(piece, numbers(rounded(piece, dtype).view("u1"), dtype, "through"))
    return values


def packed(dtype: DType) -> Unsupported:
    """The refusal to compute with a type that numpy has no numbers for."""
    what = f"{dtype.torch} has no numpy type"
    why = "Its values are packed, or a type that only torch has, so numpy cannot compute with them."
    return Unsupported(what, why, "Use the entry's .torch() (pip install 'ckptool[torch]') or its raw .bytes().")
