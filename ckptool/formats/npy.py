"""`npy`: one numpy array, read as one tensor, and the arrays inside an `.npz`.

Source: numpy/lib/format.py (the header, versions 1.0 to 3.0).
"""

from __future__ import annotations

import ast
import math
import re
import zlib
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy
from numpy.lib.format import descr_to_dtype

from ckptool.checkpoint import Checkpoint, Data, FileRange, Note, TensorEntry
from ckptool.checkpoint.arrays import resolved
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.nodes import Global, Object
from ckptool.checkpoint.numpy_arrays import ArrayType, LongValue, array_type, code_of, over_bytes
from ckptool.checkpoint.strided import numpy_bytes, subrange
from ckptool.errors import Ambiguous, BadTensor, CkptoolError, Corrupt, LimitExceeded, Truncated, Unsupported
from ckptool.formats.checksums import crc_combine
from ckptool.pickles.plain import summary

NAME = "npy"


def read(source: Source) -> Checkpoint:
    """The tensor in a file of `numpy.save`. Reads the header only.

    An array of texts or dates is an inert object, as in a pickle. Raises `Truncated`, `Corrupt`, `Unsupported` or
    `Ambiguous`.
    """
    tree = read_array(FileRange(source, 0, source.size), str(source))
    if tree is None:
        fix = "If you trust it: torch.save(numpy.load(FILE, allow_pickle=True).tolist(), OUT)"
        raise Unsupported(f"{source} is an array of Python objects, a pickle", fix=fix)
    is_other = not isinstance(tree, TensorEntry)
    notes = (Note("other-arrays", f"it is not a tensor: {summary(tree)}"),) if is_other else ()
    return Checkpoint(tree, NAME, {}, source, notes=notes, tensors_only=True)


MAGIC = b"\x93NUMPY"
MAX_HEADER = 1 << 16  # bytes; numpy itself reads no more than 10,000 without being told to
MAX_RANK = 64  # numpy's
ALIGNMENT = 64
_FIRST = 256  # read at once: nearly every header is 128 bytes
_DAMAGED = "The file was damaged, or numpy did not write it."


class ArrayHeader(NamedTuple):
    """The header of an array. type: None for Python objects.  fortran: the first axis runs fastest.  raw: its bytes."""

    kind: numpy.dtype[Any]
    type: ArrayType | None
    fortran: bool
    shape: tuple[int, ...]
    raw: bytes


def read_array(data: Data, name: str, crc: int | None = None) -> Any:
    """The tree of an array that fills `data`: a tensor, or the inert object that a pickle of another array would give;
    None for one of Python objects, which is a pickle.

    crc: the CRC-32 of all of `data`, where it is known. Reads no numbers. Raises `Truncated`, `Corrupt`, `Unsupported`,
    `Ambiguous` or `LimitExceeded`, which begin with `name`.
    """
    try:
        head = data.read(0, min(_FIRST, data.length))
        if len(head) < 10:
            raise Truncated(f"a numpy array ends after {len(head)} bytes, inside its header")
        major, minor = head[6], head[7]
        if head[:6] != MAGIC or (major, minor) not in ((1, 0), (2, 0), (3, 0)):
            what = f"version {major}.{minor} of numpy's file format" if head[:6] == MAGIC else "no numpy array"
            raise (Unsupported if head[:6] == MAGIC else Corrupt)(what, "ckptool reads versions 1.0, 2.0 and 3.0.")
        begin = 10 if major == 1 else 12
        size = int.from_bytes(head[8:begin], "little")
        if size > MAX_HEADER:
            raise LimitExceeded(f"a numpy header of {size:,} bytes", f"ckptool reads at most {MAX_HEADER:,}.")
        if begin + size > data.length:
            raise Truncated(f"a numpy array ends inside its header, which has {size:,} bytes")
        is_long, begin = begin + size > len(head), begin + size
        header = _header_of(data.read(0, begin)) if is_long else _usual_header(head[:begin])
        if header.type is None:
            return None
        size = math.prod(header.shape) * header.type.itemsize
        if (available := data.length - begin) < size:
            what = f"an array of {size:,} bytes; the file has {available:,} of them"
            raise Truncated(what, fix="Copy or download it again.")
        if available > size:
            fix = "If they are arrays, write all to one file with names: numpy.savez(OUT, first=..., second=...)"
            raise Ambiguous(f"{available - size:,} bytes after the end of the array", "numpy reads only that.", fix)
        content = subrange(data, begin, size)
        content_crc = crc_combine(zlib.crc32(header.raw), crc, size) if crc is not None else None
        entry = over_bytes(header.type, header.shape, header.fortran, content, content_crc)
    except CkptoolError as error:
        raise error.within(name) from None
    if entry is not None:
        return entry
    node = Object(_RECONSTRUCT, (_NDARRAY, (0,), b"b"))  # as numpy would pickle it
    node.state = (1, header.shape, _type_node(header.kind), header.fortran, LongValue(content, crc=content_crc))
    return node


# The header ----------------------------------------------------------------------------------------------------------


def _header_of(raw: bytes) -> ArrayHeader:
    """The header in these bytes. Raises `Corrupt`, `BadTensor` or `Unsupported`."""
    fields: Any = None
    try:
        text = raw[10 if raw[6] == 1 else 12 :].decode("utf-8" if raw[6] == 3 else "latin-1")
        if "\\" not in text:  # nothing that numpy writes is escaped; Python 2 wrote sizes as longs
            body = ast.parse(re.sub(r"(?<=[( ])(\d+)L(?=[,)])", r"\1", text.strip(" \n")), mode="eval").body
            fields = ast.literal_eval(body) if isinstance(body, ast.Dict) and len(body.keys) == 3 else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise Corrupt("a numpy header that does not say descr, fortran_order and shape, each once", _DAMAGED)
    descr, shape, fortran = fields["descr"], fields["shape"], fields["fortran_order"]
    if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape) or len(shape) > MAX_RANK:
        raise BadTensor(f"a numpy array of shape {repr(shape)[:60]}", _DAMAGED)
    if type(fortran) is not bool:
        raise Corrupt("a numpy header whose fortran_order is neither True nor False", _DAMAGED)
    try:
        kind = descr_to_dtype(descr)
    except (ValueError, SyntaxError, TypeError, LookupError, AttributeError, OverflowError, MemoryError):
        what = f"a numpy array of the type {repr(descr)[:60]}"
        raise Unsupported(what, "Only numbers, booleans, strings, dates, bytes and records of them are read.") from None
    if numpy_bytes(shape, kind.itemsize) >= 1 << 63:
        raise BadTensor(f"a numpy array of shape {repr(shape)[:60]}", "numpy cannot address so many elements.")
    return ArrayHeader(kind, None if kind.hasobject else array_type(_type_node(kind)), fortran, shape, raw)


_usual_header = lru_cache(1 << 12)(_header_of)  # an archive may hold thousands of arrays of one type and shape


def _type_node(kind: numpy.dtype[Any]) -> Object:
    """The object by which a pickle names the type; `numpy_arrays.array_type` refuses those that are not read."""
    reduced: Any = kind.__reduce__()
    _, args, state = reduced
    node = Object(Global("numpy", "dtype"), args)
    version, order, inside, names, fields, *rest = state
    inside = inside and (_type_node(inside[0]), *inside[1:])
    fields = fields and {name: (_type_node(field[0]), *field[1:]) for name, field in fields.items()}
    node.state = (version, order, inside, names, fields, *rest)
    return node


_RECONSTRUCT, _NDARRAY = Global("numpy.core.multiarray", "_reconstruct"), Global("numpy", "ndarray")


# Writing -------------------------------------------------------------------------------------------------------------


def spelled(entry: TensorEntry) -> tuple[bytes, Data, int | None] | None:
    """The header and the data of a tensor as numpy would write it; None for what numpy cannot spell.

    With the checksum of the data, where the input has it for that very data. A tensor whose first axis runs fastest
    stays one: numpy has a word for that.
    """
    code = code_of(entry.dtype)
    if code is None or numpy_bytes(entry.shape, entry.dtype.itemsize) >= 1 << 63:
        return None
    entry = resolved(entry)
    transposed = replace(entry, shape=entry.shape[::-1], stride=entry.stride[::-1])
    fortran = not entry.is_contiguous and transposed.is_contiguous
    order = "|" if entry.dtype.itemsize == 1 else "<"
    data = (transposed if fortran else entry).row_major()
    text = f"{{'descr': '{order}{code}', 'fortran_order': {fortran}, 'shape': {entry.shape}, }}".encode()
    size = -(-(len(text) + 11) // ALIGNMENT) * ALIGNMENT - 10  # padded so that the data is aligned
    header = MAGIC + b"\1\0" + size.to_bytes(2, "little") + text.ljust(size - 1) + b"\n"
    return header, data, entry.storage.crc if data is entry.storage.data else None
