"""Numpy arrays as tensors: what `.npz` files hold, and what people pickle instead of tensors.

An array of numbers or booleans is a strided tensor over the bytes that it was stored as, which are not read for that.
Arrays of texts, dates, records and (in pickles) Python objects are no tensors and stay what they are.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from itertools import pairwise
from typing import Any

from ckptool.checkpoint import MAX_RANK, Composite, Data, InlineBytes, Storage, Tensor, TensorEntry, row_major_strides
from ckptool.checkpoint.blocks import Crc
from ckptool.checkpoint.dtypes import DTYPES, DType
from ckptool.checkpoint.nodes import MISSING, Object, brief, canonical
from ckptool.checkpoint.tree import Path, walk
from ckptool.commands import FILE, OUT_SAFETENSORS, command
from ckptool.errors import CkptoolError, Corrupt, Unsupported, counted
from ckptool.facts import dataclass

# Tensors' types by numpy's codes for them, without a byte order.
_CODES: dict[str, DType] = {
    f"{'b' if kind.kind == 'bool' else kind.kind[0]}{kind.itemsize}": kind
    for kind in DTYPES
    if kind.numpy and not kind.ml and kind.kind in ("bool", "int", "uint", "float", "complex")
}


def code_of(dtype: DType) -> str | None:
    """numpy's code for a tensor's type, without its byte order: `f4`; None where numpy has none."""
    return next((code for code, kind in _CODES.items() if kind is dtype), None)


def over_bytes(
    kind: ArrayType, shape: tuple[int, ...], fortran: bool, data: Data, crc: int | None = None
) -> TensorEntry | None:
    """The tensor over the bytes of an array; None where no tensor has such elements.

    fortran: the first axis runs fastest.  crc: the CRC-32 of `data`, where it is known.
    """
    dtype = None if kind.fields or kind.unit else _CODES.get(kind.code)
    if dtype is None or len(shape) > MAX_RANK:
        return None
    storage = Storage(data, crc=crc)
    if kind.order == ">" and dtype.itemsize > 1:
        from ckptool.checkpoint.arrays import swapped

        storage = Storage(swapped(storage, dtype))
    stride = tuple(reversed(row_major_strides(shape[::-1]))) if fortran else row_major_strides(shape)
    return TensorEntry(storage, dtype, shape, stride)


def array_entry(node: Any) -> TensorEntry | None:
    """The tensor that a pickled numpy array stands for; None for any other value."""
    if not isinstance(node, Object) or node.name.endswith(".scalar"):
        return None
    try:
        numpy_array = array(node)
    except (CkptoolError, TypeError, ValueError, LookupError):
        return None  # numpy would not have written it: it stays an object, shown by name
    return array_tensor(numpy_array) if isinstance(numpy_array, Array) else None


def array_tensor(numpy_array: Array) -> TensorEntry | None:
    """The same array as a tensor over its own bytes; None where no tensor has such elements."""
    data = numpy_array.data.data if isinstance(numpy_array.data, LongValue) else InlineBytes(numpy_array.data)
    return over_bytes(numpy_array.type, numpy_array.shape, numpy_array.fortran, data)


def with_tensors(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The dictionary with tensors in place of numpy arrays; one array under two names is one tensor."""
    replaced: dict[int, Any] = {}
    for value in values.values():
        if id(value) not in replaced:
            entry = array_entry(value)
            replaced[id(value)] = value if entry is None else entry
    return {key: replaced[id(value)] for key, value in values.items()}


def tensors_and_arrays(tree: Any) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor with its path, and what each pickled numpy array stands for."""
    for path, node in walk(tree):
        entry = node if isinstance(node, (TensorEntry, Composite)) else array_entry(node)
        if entry is not None:
            yield path, entry


MAX_LONG_BYTES = 32 << 20


@dataclass(slots=True, eq=False, repr=False)
class LongValue:
    """A long value of a pickle, left in its file: in a tree always the data of a numpy array; builders meet others.

    kind: what the pickle makes of its bytes: `bytes`, `bytearray`, `string` (of Python 2) or `text` (in UTF-8).
    of: the value that it was made from, if any.  crc: of the bytes, where the container has it; checked when all of it
    is read.
    """

    data: Data
    kind: str = "bytes"
    of: LongValue | None = None
    crc: int | None = None

    def __len__(self) -> int:
        return self.data.length

    def __bytes__(self) -> bytes:
        data = self.data.read(0, self.data.length)
        if self.crc is not None:
            crc = Crc(expected=self.crc, name="a numpy array")
            crc.update(data)
            crc.check()
        return data

    def whole(self) -> bytes:
        """All of it, for a pickle or a header; raises `Unsupported` where it is too long for one."""
        if len(self) > MAX_LONG_BYTES:
            what = f"a numpy array of {len(self):,} bytes cannot be pickled again"
            why = f"At most {MAX_LONG_BYTES:,} are: a pickle is read into memory as a whole."
            fix = f"Write the arrays as tensors: {command('convert', FILE, out=OUT_SAFETENSORS)} (or OUT.npz)"
            raise Unsupported(what, why, fix)
        return bytes(self)

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.data.length:,} bytes in the file>"


_LETTERS = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d", "c8": "ff", "c16": "dd",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArrayType:
    """A numpy element type without numpy. code: kind and size, `f8` or `U3`.  order: `<`, `>` or `|` (irrelevant).

    fields: of a record, its (name, type, offset). unit: of a date or duration, (unit, count).
    """

    code: str
    order: str
    itemsize: int
    fields: tuple[tuple[str, ArrayType, int], ...] = ()
    unit: tuple[str, int] | None = None

    def __str__(self) -> str:
        if self.fields:
            return f"record of {counted(len(self.fields), 'field')}"
        unit = f"[{self.unit[1] if self.unit[1] != 1 else ''}{self.unit[0]}]" if self.unit else ""
        name = _CODES.get(self.code) or {"M8": "datetime64", "m8": "timedelta64"}.get(self.code, self.code)
        return f"{'>' if self.order == '>' and self.itemsize > 1 else ''}{name}{unit}"


@dataclass(frozen=True, slots=True, repr=False)
class Array:
    """A numpy array of a pickle: its element type, shape, and bytes in row-major order (column-major where `fortran`).

    data: the bytes; for a large array that a format left in its file, where they are.
    """

    type: ArrayType
    shape: tuple[int, ...]
    data: bytes | LongValue
    fortran: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def values(self, limit: int | None = None) -> list[Any] | None:
        """The elements in the order of their bytes, the first `limit`; None for types without a value in Python."""
        kind, order, letters = self.type.code[0], ">" if self.type.order == ">" else "<", _LETTERS.get(self.type.code)
        if self.type.fields or not (letters or kind in "US"):
            return None
        width, count = self.type.itemsize, self.size if limit is None else min(limit, self.size)
        if isinstance(self.data, LongValue) and count < self.size:
            data = self.data.data.read(0, count * width)
        else:
            data = bytes(self.data)[: count * width]
        if letters:
            numbers = struct.iter_unpack(order + letters, data)
            return [complex(*parts) if len(parts) == 2 else parts[0] for parts in numbers]
        texts = (data[i * width : (i + 1) * width] for i in range(count))
        if kind == "S":
            return [text.rstrip(b"\0") for text in texts]
        return [text.decode(f"utf-32-{'be' if order == '>' else 'le'}", "replace").rstrip("\0") for text in texts]

    def __repr__(self) -> str:
        return f"<numpy array {self.type}{list(self.shape)}>"


# The sizes in bytes (for U: characters) that may follow a type's kind, as numpy writes it in a pickle.
_SIZES = dict.fromkeys("iufcSUV", "[0-9]{1,9}") | {"?": "", "b": "1", "m": "8", "M": "8", "O": "[48]?"}
_CODE = re.compile("|".join(f"{re.escape(kind)}{sizes}" for kind, sizes in _SIZES.items()))
# The flags of a type, numpy/ndarraytypes.h: its items are reference-counted, listed in pickles, pointers, empty at
# first, used by Python alone. Those of types with Python objects (NPY_FROM_FIELDS), and those no other type has.
_COUNTED, _LISTED, _POINTER, _EMPTY, _PYTHON = 1, 2, 4, 8, 16
_OF_OBJECTS, _OF_NO_OTHERS = _COUNTED | _LISTED | _EMPTY | _PYTHON, _COUNTED | _LISTED | _POINTER
_ALIGNMENTS = (1, 2, 4, 8, 16, 32)


def _element(node: Any) -> tuple[str, int, bool]:
    """What a pickled `numpy.dtype` says of its elements: their kind, their size, whether they hold Python objects."""
    if not isinstance(node, Object) or canonical(node.fn) != "numpy.dtype" or not _CODE.fullmatch(node.args[0]):
        raise TypeError("no numpy type")
    kind, digits = node.args[0][0], node.args[0][1:]
    size = 8 if kind == "O" else int(digits or 1) * (4 if kind == "U" else 1)
    has_objects = kind == "O" or (type(node.state) is tuple and bool(node.state[7] & _COUNTED))
    return kind, size, has_objects


def _guarded(read: Callable[[Object], Any]) -> Callable[[Object], Any]:
    """The same function of objects, giving None for whatever numpy would not write."""

    @wraps(read)
    def guarded(node: Object) -> Any:
        try:
            return read(node)
        except (CkptoolError, TypeError, ValueError, LookupError, AttributeError, OverflowError):
            return None

    return guarded


@_guarded
def is_type(node: Object) -> bool:
    """Whether a pickled `numpy.dtype` is consistent; the types inside it are judged separately.

    numpy trusts most of a state (PyArray_DescrType's `__setstate__`), and then reads and writes where it says.
    """
    kind, size, _ = _element(node)
    align, copy = node.args[1:] or (False, True)
    if type(align) not in (bool, int) or type(copy) not in (bool, int):
        return False
    if node.state is MISSING:
        return True
    version, order, subarray, names, fields, itemsize, alignment, flags, *metadata = node.state
    parts: list[tuple[int, int, bool]] = []  # where each part begins and ends, and whether it has objects
    if subarray is not None:
        part, shape = subarray
        _, width, objects = _element(part)
        if not _is_shape(shape) or width * math.prod(shape) != size:
            return False
        parts.append((0, size, objects))
    if names is not None:
        titles = {field[2] for field in fields.values() if len(field) == 3}
        if (
            len(names) > len(fields)
            or not set(names) <= fields.keys() <= {*names, *titles}
            or len({*names}) != len(names)
        ):
            return False
        for name in names:
            part, offset = fields[name][:2]
            _, width, objects = _element(part)
            parts.append((offset, offset + width, objects))
    elif fields is not None:
        return False
    parts.sort()
    of_objects = any(objects for *_, objects in parts)
    if type(node.state) is not tuple or type(version) is not int or version != 3 + len(metadata):
        return False
    if order not in ("<", ">", "|", "=") or any(type(number) is not int for number in (itemsize, alignment, flags)):
        return False
    if parts and (kind != "V" or (subarray is not None and names is not None)):  # of one array, or of fields
        return False
    if not all(type(begin) is int and 0 <= begin <= end <= size for begin, end, _ in parts):
        return False
    if of_objects and any(end > begin for (_, end, _), (begin, _, _) in pairwise(parts)):
        return False
    is_of_the_table = kind not in "SUV" and itemsize == alignment == -1  # built in: numpy knows its size
    if not is_of_the_table and (itemsize != size or alignment not in _ALIGNMENTS):
        return False
    if flags & _OF_OBJECTS != _OF_OBJECTS if of_objects or kind == "O" else flags & _OF_NO_OTHERS:
        return False
    return kind not in "mM" or _unit(node.state) is not None


def _is_shape(shape: Any) -> bool:
    return (
        type(shape) is tuple and len(shape) <= 64 and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
    )


@_guarded
def _parts(node: Object) -> Any:
    """The type, shape, whether in Fortran order, and data of a pickled array or number; `()` for one never filled."""
    if canonical(node.fn).endswith(".scalar"):
        return (node.args[0], (), False, *node.args[1:])
    if canonical(node.fn).endswith("._frombuffer"):
        data, kind, shape, order = node.args
        return kind, shape, ("C", "F", "A", "K").index(order) == 1, data
    if node.args[1] != (0,) or node.args[2] not in (b"b", "b"):
        return None
    if node.state is MISSING:
        return ()
    *version, shape, kind, fortran, data = node.state
    is_valid = type(node.state) is tuple and version in ([], [0], [1]) and type(fortran) in (bool, int)
    return (kind, shape, bool(fortran), data) if is_valid else None


@_guarded
def is_array(node: Object) -> bool:
    """Whether a pickled array or number has the bytes, or the list of objects, that its type and shape take.

    An array may have no state: numpy makes it like that.
    """
    parts = _parts(node)
    if not parts:
        return parts is not None
    kind, shape, _, data = parts
    _, width, has_objects = _element(kind)
    count = math.prod(shape) if _is_shape(shape) else -1
    if has_objects:
        return node.state is not MISSING and type(data) is list and len(data) == count
    data = _python2_bytes(data)
    return isinstance(data, (bytes, bytearray, LongValue)) and len(data) == width * count


def array_type(node: Any, depth: int = 0, seen: dict[int, ArrayType] | None = None) -> ArrayType:
    """The element type that a pickled `numpy.dtype` names. Raises `Unsupported` for objects and unusual types."""
    seen = {} if seen is None else seen  # by the `id` of their nodes: a record may use a type many times
    if id(node) in seen:
        return seen[id(node)]
    text: Any = node.args[0] if isinstance(node, Object) and type(node.args) is tuple and node.args else None
    is_dtype = depth <= 8 and isinstance(text, str) and canonical(node.fn) == "numpy.dtype"
    if not is_dtype or text[:1] == "O" or not _CODE.fullmatch(text):
        kind = "Python objects" if is_dtype and text[:1] == "O" else f"the unknown type {brief(text)}"
        why = "Only numbers, strings, dates, bytes and records of them are read."
        raise Unsupported(f"a numpy array of {kind}", why)
    if not is_type(node):
        raise Unsupported("a numpy type whose parts disagree, or lie outside of it", "numpy does not write this.")
    kind, size, _ = _element(node)
    code, state = "b1" if kind == "?" else text, node.state
    if kind in "biufc" and code not in _LETTERS:
        raise Unsupported(f"a numpy type {code!r}", "It differs from machine to machine.")
    if state is MISSING:
        return ArrayType(code, "|" if size == 1 or kind in "SV" else "<", size)
    if state[2] is not None:
        raise Unsupported("a numpy type of nested arrays", "Only numbers, strings, dates, bytes and records are read.")
    names, fields = state[3] or (), state[4]
    parts = tuple((name, array_type(fields[name][0], depth + 1, seen), fields[name][1]) for name in names)
    element = ArrayType(code, "<" if state[1] == "=" else state[1], size, parts, _unit(state) if kind in "mM" else None)
    return seen.setdefault(id(node), element)


def _unit(state: tuple[Any, ...]) -> tuple[str, int]:
    unit, count, *_ = state[8][-1] if len(state) > 8 else (b"generic", 1)
    unit = unit.decode("ascii") if isinstance(unit, bytes) else unit
    if unit not in "Y M W D h m s ms us ns ps fs as generic".split() or type(count) is not int:
        raise Corrupt("a numpy date of an unknown unit")
    return unit, count


def array(node: Object) -> Any:
    """The `Array` that an object stands for (for a number, one without dimensions); else `NotImplemented`.

    Raises `Unsupported` where numpy would not have written it like that, and for Python objects.
    """
    called = canonical(node.fn)
    is_plain = called == "numpy.core.multiarray._reconstruct" and canonical((*node.args, None)[0]) == "numpy.ndarray"
    if not is_plain and called not in ("numpy.core.numeric._frombuffer", "numpy.core.multiarray.scalar"):
        return NotImplemented
    parts = _parts(node)
    if parts == ():
        return NotImplemented
    kind = array_type(parts[0]) if parts else None
    if kind is None or not is_array(node):
        raise Unsupported("a numpy array with other data than its type and shape take", "numpy does not write this.")
    _, shape, fortran, data = parts
    return Array(kind, shape, data if isinstance(data, LongValue) else bytes(_python2_bytes(data)), fortran)


def _python2_bytes(data: Any) -> Any:
    """The bytes of a Python 2 string, which was read as text where it happened to be UTF-8."""
    return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
