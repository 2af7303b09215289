"""The one table of element types: our name, size, and what torch, safetensors and numpy call them.

Sources: torch/csrc/api (scalar types), `torch.storage._dtype_to_storage_type_map`, and the dtype list of the
safetensors specification (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptool.errors import UsageError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
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


def dtype_of(given: object) -> DType:
    """The type that is meant: a name, or a dtype of ours, of torch or of numpy (ml_dtypes' too), or numpy's class.

    Neither is imported for it. Raises `UsageError` for anything else, Python's `float` included: that is 32 bits to
    torch and 64 to numpy.
    """
    if isinstance(given, DType):
        return given
    name, numpy = given if isinstance(given, str) else "", sys.modules.get("numpy")
    if (type(given).__module__, type(given).__name__) == ("torch", "dtype"):
        name = str(given)
    elif numpy and (isinstance(given, numpy.dtype) or (isinstance(given, type) and issubclass(given, numpy.generic))):
        name = numpy.dtype(given).name
    try:
        return by_name(name)
    except KeyError:
        example = "For example: 'bf16', torch.bfloat16, numpy.float32"
        raise UsageError(f"{given!r} is not a dtype", "", example) from None
