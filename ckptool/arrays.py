"""Numpy arrays as tensors: what `.npz` files hold, and what people pickle instead of tensors.

An array of numbers or truths is a strided tensor over the bytes that it was stored as; nothing is read for it. Arrays of texts, dates,
records and Python objects are no tensors and stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptool.checkpoint import Blob, Composite, Data, Literal, LongBytes, Storage, TensorEntry, row_major_strides
from ckptool.dtypes import DTYPES, DType
from ckptool.errors import CkptoolError
from ckptool.gather import swapped
from ckptool.nodes import Object, structural_parts
from ckptool.pickles.decode import Decoded
from ckptool.pickles.torch_objects import MAX_RANK
from ckptool.plain import Array, ArrayType, array, canonical

_CODES: dict[str, DType] = {
    f"{'b' if kind.kind == 'bool' else kind.kind[0]}{kind.itemsize}": kind
    for kind in DTYPES
    if kind.numpy and not kind.ml and kind.kind in ("bool", "int", "uint", "float", "complex")
}


def element_type(kind: ArrayType) -> DType | None:
    """The tensors' type with the elements of a numpy type; None for texts, dates and records."""
    return None if kind.fields or kind.unit else _CODES.get(kind.code)


def code_of(dtype: DType) -> str | None:
    """What numpy calls a tensors' type in files, without its byte order: `f4`; None where numpy has none of its own."""
    return next((code for code, kind in _CODES.items() if kind is dtype), None)


def strided(
    kind: ArrayType, shape: tuple[int, ...], fortran: bool, data: Data, crc: int | None = None
) -> TensorEntry | None:
    """The tensor over the bytes of an array; None where its elements are no tensor's. Big-endian elements are turned when read.

    fortran: the first axis runs fastest.  crc: the CRC-32 of `data`, where it is known.
    """
    dtype = element_type(kind)
    if dtype is None or len(shape) > MAX_RANK:
        return None
    storage = Storage(data, crc=crc)
    if kind.order == ">" and dtype.itemsize > 1:
        storage = Storage(swapped(storage, dtype))
    stride = tuple(reversed(row_major_strides(shape[::-1]))) if fortran else row_major_strides(shape)
    return TensorEntry(storage, dtype, shape, stride)


def array_entry(node: Any) -> TensorEntry | None:
    """The tensor that a pickled numpy array stands for; None for any other value, and for arrays that are no tensors."""
    if not isinstance(node, Object):
        return None
    try:
        found = array(node)
    except (CkptoolError, TypeError, ValueError, LookupError):
        return None  # not what numpy would have written: it stays an object, shown by name
    return array_tensor(found) if isinstance(found, Array) else None


def array_tensor(found: Array) -> TensorEntry | None:
    """The same array as a tensor over its own bytes; None where its elements are no tensor's."""
    data = found.data.data if isinstance(found.data, LongBytes) else Literal(found.data)
    return strided(found.type, found.shape, found.fortran, data)


def left_in_file(decoded: Decoded) -> Decoded:
    """What was decoded, with the data of large arrays as `LongBytes` instead of the blobs that a skeleton has for them."""
    seen: set[int] = set()
    stack: list[Any] = [decoded.root, decoded.discarded]
    while stack:
        node = stack.pop()
        if isinstance(node, (str, bytes, int)) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Object):
            _leave_data(node)
        stack.extend((node.made,) if isinstance(node, Composite) else structural_parts(node))
    return decoded


def _leave_data(node: Object) -> None:
    called, state, args = canonical(node.fn), node.state, node.args
    if (
        called == "numpy.core.multiarray._reconstruct"
        and type(state) is tuple
        and state
        and isinstance(state[-1], Blob)
    ):
        node.state = (*state[:-1], _long(state[-1]))
    elif called == "numpy.core.numeric._frombuffer" and type(args) is tuple and args and isinstance(args[0], Blob):
        node.args = (_long(args[0]), *args[1:])


def _long(blob: Blob) -> Blob | LongBytes:
    """A text is no array's data, and stays what it is."""
    return blob if blob.kind == "text" else LongBytes(blob.data, blob.kind == "bytearray")


def with_tensors(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """A dictionary in which tensors stand for the numpy arrays; one array under two names is one tensor."""
    made: dict[int, Any] = {}
    for value in values.values():
        if id(value) not in made:
            entry = array_entry(value)
            made[id(value)] = value if entry is None else entry
    return {key: made[id(value)] for key, value in values.items()}
