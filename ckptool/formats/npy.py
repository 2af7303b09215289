"""`npy`: one numpy array, read as one tensor, and the arrays inside an `.npz`.

Source: numpy/lib/format.py (the header, versions 1.0 to 3.0).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Data, FileRange, InlineBytes, Note, TensorEntry
from ckptool.checkpoint.files import Input, Source
from ckptool.checkpoint.nodes import Global, Object
from ckptool.checkpoint.numpy_arrays import Array, LazyBytes, array, array_type, code_of, over_bytes
from ckptool.checkpoint.strided import resolved, subrange
from ckptool.errors import Ambiguous, BadTensor, CkptoolError, Corrupt, LimitExceeded, Truncated, Unsupported
from ckptool.formats.checksums import crc_of_rest
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.decode import Decoded
from ckptool.pickles.plain.text import summary
from ckptool.pickles.skeleton import decode_lazily, skeleton

NAME = "npy"


def detect(head: bytes, source: Input) -> bool:
    return head.startswith(MAGIC)


def read(source: Source) -> Checkpoint:
    """The tensor in a file of `numpy.save`. Reads the header only.

    An array of texts, dates or objects is an inert object, as in a pickle. Raises `Truncated`, `Corrupt`, `Unsupported`
    or `Ambiguous`.
    """
    tree, discarded = read_array(FileRange(source, 0, source.size), str(source), PickleBudget(source.size))
    other = not isinstance(tree, TensorEntry)
    notes = (Note("other-arrays", f"it is not a tensor: {summary(tree)}"),) if other else ()
    return Checkpoint(tree, NAME, {}, source, notes=notes, discarded=discarded, tensors_only=True)


MAGIC = b"\x93NUMPY"
MAX_HEADER = 1 << 16  # bytes; numpy itself reads no more than 10,000 without being told to
MAX_RANK = 64  # numpy's
MAX_NESTING = 16
ALIGNMENT = 64
FREE_PICKLES = 1 << 20  # bytes; a larger file may hold as many as it has itself
_FIRST = 256  # read at once: nearly every header is 128 bytes
_DAMAGED = "The file was damaged, or numpy did not write it."


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """The header of an array. descr: numpy's text (or list of fields) for its type.  at: where the data begins."""

    descr: Any
    fortran: bool
    shape: tuple[int, ...]
    at: int
    raw: bytes


class PickleBudget:
    """The bytes of pickles that may still be read from a file of `size` bytes, which may be compressed."""

    __slots__ = ("left",)

    def __init__(self, size: int) -> None:
        self.left = max(FREE_PICKLES, size)

    def take(self, size: int) -> None:
        """Raises `LimitExceeded` when that is too much."""
        self.left -= size
        if self.left < 0:
            raise LimitExceeded(
                f"an array of Python objects with a pickle of {size:,} bytes",
                "A file of this size should not hold so much; it is probably malicious.",
                "If you trust it, let numpy save it without compression: "
                "numpy.savez(NEW, **numpy.load(FILE, allow_pickle=True))",
            )


def read_array(data: Data, name: str, budget: PickleBudget, crc: int | None = None) -> tuple[Any, tuple[Any, ...]]:
    """The tree of an array that fills `data`: a tensor, or the inert object that a pickle of another array would give.

    crc: the CRC-32 of all of `data`, where it is known. Also gives what a pickle in it makes and throws away. Reads no
    numbers. Raises `Truncated`, `Corrupt`, `Unsupported`, `Ambiguous` or `LimitExceeded`, which begin with `name`.
    """
    try:
        return _read_array(data, name, budget, crc)
    except CkptoolError as error:
        raise error.within(name) from None


def _read_array(data: Data, name: str, budget: PickleBudget, crc: int | None) -> tuple[Any, tuple[Any, ...]]:
    header = read_header(data)
    if _has_objects(header.descr):
        budget.take(data.length)
        decoded = _pickled(data, header, name)
        return decoded.root, decoded.discarded
    node = _type_node(header.descr)
    kind = array_type(node)
    size = math.prod(header.shape) * kind.itemsize
    _check_size(data, header, size)
    content = subrange(data, header.at, size)
    own = crc_of_rest(crc, zlib.crc32(header.raw), size) if crc is not None else None
    entry = over_bytes(kind, header.shape, header.fortran, content, own)
    return (_array_node(node, header, LazyBytes(content, crc=own)) if entry is None else entry), ()


def _check_size(data: Data, header: ArrayHeader, size: int) -> None:
    there = data.length - header.at
    if there < size:
        raise Truncated(
            f"an array of {size:,} bytes, of which the file holds {there:,}",
            "It was cut off.",
            "Copy or download it again.",
        )
    if there > size:
        several = data.read(header.at + size, min(len(MAGIC), there - size)) == MAGIC
        raise Ambiguous(
            f"{there - size:,} bytes after the end of the array",
            "It holds several arrays, one after the other; numpy reads the first."
            if several
            else "They belong to no array.",
            "Write them to one file with names: numpy.savez(OUT, first=..., second=...)" if several else "",
        )


# The header ----------------------------------------------------------------------------------------------------------


def read_header(data: Data) -> ArrayHeader:
    """The header at the start of `data`. Raises `Truncated`, `Corrupt`, `Unsupported` or `LimitExceeded`."""
    head = data.read(0, min(_FIRST, data.length))
    if len(head) < 10:
        raise Truncated(f"a numpy array ends after {len(head)} bytes, inside its header", "It was cut off.")
    major, minor = head[6], head[7]
    if head[:6] != MAGIC or (major, minor) not in ((1, 0), (2, 0), (3, 0)):
        what = f"version {major}.{minor} of numpy's file format" if head[:6] == MAGIC else "no numpy array"
        raise (Unsupported if head[:6] == MAGIC else Corrupt)(what, "Versions 1.0, 2.0 and 3.0 are read.")
    begin = 10 if major == 1 else 12
    size = int.from_bytes(head[8:begin], "little")
    if size > MAX_HEADER:
        raise LimitExceeded(f"a numpy header of {size:,} bytes", f"At most {MAX_HEADER:,} are read.")
    if begin + size > data.length:
        raise Truncated(f"a numpy array ends inside its header, which has {size:,} bytes", "It was cut off.")
    raw = head[: begin + size] if begin + size <= len(head) else data.read(0, begin + size)
    try:
        text = raw[begin:].decode("utf-8" if major == 3 else "latin-1")
    except UnicodeDecodeError:
        raise Corrupt("a numpy header that is not UTF-8", _DAMAGED) from None
    return _checked(literal(text), begin + size, raw)


def _checked(fields: Any, at: int, raw: bytes) -> ArrayHeader:
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise Corrupt("a numpy header whose keys are not descr, fortran_order and shape", _DAMAGED)
    shape, fortran = fields["shape"], fields["fortran_order"]
    if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape) or len(shape) > MAX_RANK:
        raise BadTensor(f"a numpy array of shape {repr(shape)[:60]}", _DAMAGED)
    if type(fortran) is not bool:
        raise Corrupt("a numpy header whose fortran_order is neither True nor False", _DAMAGED)
    return ArrayHeader(fields["descr"], fortran, shape, at, raw)


_TOKEN = re.compile(r"""[ \t\n]*(?:('[^'\\\n]*'|"[^"\\\n]*")|(-?\d{1,20})L?\b|(True|False|None)\b|([\[\](){},:])|\Z)""")
_WORDS = {"True": True, "False": False, "None": None}


def literal(text: str) -> Any:
    """The value of a Python literal of the kinds that numpy's headers hold. Raises `Corrupt` for anything else."""
    tokens = _tokens(text)
    value = _value(tokens, next(tokens), 0)
    if next(tokens) != "":
        raise Corrupt("a numpy header with more than one value", _DAMAGED)
    return value


class _Mark(str):
    """A bracket, a comma or a colon, as opposed to a text; the empty one is the end."""


def _tokens(text: str) -> Iterator[Any]:
    at = 0
    while True:
        found = _TOKEN.match(text, at)
        if found is None:
            raise Corrupt(f"a numpy header with {text[at : at + 20]!r} in it", _DAMAGED)
        at = found.end()
        quoted, number, word, mark = found.groups()
        if quoted is not None:
            yield quoted[1:-1]
        elif number is not None:
            yield int(number)
        elif word is not None:
            yield _WORDS[word]
        else:
            yield _Mark(mark or "")
            if mark is None:
                return


def _value(tokens: Iterator[Any], token: Any, depth: int) -> Any:
    if type(token) is not _Mark:
        return token
    if token == "{":
        pairs = _items(tokens, "}", depth)
        found = dict(pairs)
        if len(found) != len(pairs):
            raise Ambiguous("a numpy header that says the same thing twice", "Readers disagree about which one counts.")
        return found
    if token == "[":
        return _items(tokens, "]", depth)
    if token == "(":
        return tuple(_items(tokens, ")", depth))
    raise Corrupt(f"a numpy header with {token or 'its end'} where a value should be", _DAMAGED)


def _items(tokens: Iterator[Any], end: str, depth: int) -> list[Any]:
    """The values up to a closing bracket; in a dictionary, as pairs."""
    if depth == MAX_NESTING:
        raise LimitExceeded(f"a numpy header nested more than {MAX_NESTING} deep", "numpy writes none.")
    items: list[Any] = []
    while True:
        token = next(tokens)
        if type(token) is _Mark and token == end:
            return items
        value = _value(tokens, token, depth + 1)
        token = next(tokens)
        if end == "}":
            if type(value) is not str or type(token) is not _Mark or token != ":":
                raise Corrupt("a numpy header with a key that is not a string", _DAMAGED)
            value = value, _value(tokens, next(tokens), depth + 1)
            token = next(tokens)
        items.append(value)
        if type(token) is _Mark and token == end:
            if end == ")" and len(items) == 1:
                raise Corrupt("a numpy header with brackets around one value", _DAMAGED)
            return items
        if type(token) is not _Mark or token != ",":
            raise Corrupt("a numpy header with two values and nothing between them", _DAMAGED)


# Types ---------------------------------------------------------------------------------------------------------------

_DTYPE = Global("numpy", "dtype")
_NEEDS_INIT, _IS_RECORD = 0x08, 0x10  # flags of numpy's types
_NAMED = re.compile(r"([<>=|]?)([?biufcSUVO])(\d{0,9})\Z|([<>=])([mM])8(?:\[(\d{0,9})([A-Za-zµ]{1,7})\])?\Z")


def _has_objects(descr: Any) -> bool:
    """True where the data is a pickle: an array of Python objects, or of records with some."""
    if type(descr) is list:
        return any(type(field) is tuple and len(field) > 1 and _has_objects(field[1]) for field in descr)
    return type(descr) is str and descr.lstrip("|<>=")[:1] == "O"


def _type_node(descr: Any, depth: int = 0) -> Object:
    """The object by which a pickle would name the type; `numpy_arrays.array_type` refuses those that are not read."""
    if type(descr) is list and depth < MAX_NESTING:
        return _record_node(descr, depth)
    found = _NAMED.match(descr) if type(descr) is str else None
    if found is None:
        raise _unknown(descr)
    order, kind, size, date_order, date, count, unit = found.groups()
    if date is not None:
        metadata = (None, ((unit or "generic").encode(), int(count or 1), 1, 1))
        return _node(f"{date}8", (4, date_order.replace("=", "<"), None, None, None, -1, -1, 0, metadata))
    if (kind == "?") != (size == "") or (kind not in "SUV?" and int(size) == 0):
        raise _unknown(descr)
    code = "b1" if kind == "?" else f"{kind}{int(size)}"
    width = int(size or 1) * (4 if kind == "U" else 1)
    if kind in "SUV":
        about = (width, 4, _NEEDS_INIT) if kind == "U" else (width, 1, 0)
        return _node(code, (3, order or "|", None, None, None, *about))
    return _node(code, (3, "|" if width == 1 else order or "<", None, None, None, -1, -1, 0))


def _record_node(descr: list[Any], depth: int) -> Object:
    fields: dict[str, tuple[Object, int]] = {}
    at = 0
    for field in descr:
        if type(field) is not tuple or len(field) != 2 or type(field[0]) is not str:
            raise Unsupported(
                f"a numpy type with the field {repr(field)[:60]}", "Only fields of plain values are read."
            )
        name, kind = field[0], _type_node(field[1], depth + 1)
        if name and name in fields:
            raise Ambiguous(f"a numpy type with two fields {name}", "Readers disagree about which one counts.")
        if name:  # without a name, it is the room between two fields
            fields[name] = kind, at
        at += array_type(kind).itemsize
    flags = _IS_RECORD
    for kind, _ in fields.values():
        flags |= max(0, kind.state[7]) & _NEEDS_INIT
    return _node(f"V{at}", (3, "|", None, tuple(fields), fields, at, 1, flags))


def _node(code: str, state: tuple[Any, ...]) -> Object:
    node = Object(_DTYPE, (code, False, True))
    node.state = state
    return node


def _unknown(descr: Any) -> Unsupported:
    what = f"a numpy array of the type {repr(descr)[:60]}"
    return Unsupported(what, "Only numbers, booleans, strings, dates, bytes and records of them are read.")


# Arrays that are no tensors ------------------------------------------------------------------------------------------

_RECONSTRUCT, _NDARRAY = Global("numpy.core.multiarray", "_reconstruct"), Global("numpy", "ndarray")


def _array_node(kind: Object, header: ArrayHeader, data: Any) -> Object:
    """The array as numpy would pickle it."""
    node = Object(_RECONSTRUCT, (_NDARRAY, (0,), b"b"))
    node.state = (1, header.shape, kind, header.fortran, data)
    return node


def _pickled(data: Data, header: ArrayHeader, name: str) -> Decoded:
    """The objects of an array that numpy could only pickle, inert."""

    def refuse(_: Any) -> Any:
        raise Unsupported("a persistent id in a numpy array", "numpy writes none.")

    made = skeleton(data, header.at, name=name)
    if made.end != data.length:
        raise Ambiguous(f"{data.length - made.end:,} bytes after the end of its pickle", "Another may be hidden there.")
    return decode_lazily(made, refuse, BUILDERS, name=name, file_bytes=data.length)


# Writing -------------------------------------------------------------------------------------------------------------


def spelled(value: Any) -> tuple[bytes, Data, int | None] | None:
    """The header and the data of a tensor or a pickled array as numpy would write it; None for what numpy cannot spell.

    With the checksum of the data, where the input has it for that very data.
    """
    if isinstance(value, TensorEntry):
        return _spelled_tensor(value)
    try:
        found = array(value) if isinstance(value, Object) else None
    except CkptoolError:
        return None
    if not isinstance(found, Array) or found.type.fields:
        return None
    data, crc = (
        (found.data.data, found.data.crc) if isinstance(found.data, LazyBytes) else (InlineBytes(found.data), None)
    )
    unit = f"[{found.type.unit[1] if found.type.unit[1] != 1 else ''}{found.type.unit[0]}]" if found.type.unit else ""
    if unit == "[generic]":
        unit = ""
    return _header(f"{found.type.order}{found.type.code}{unit}", found.fortran, found.shape), data, crc


def _spelled_tensor(entry: TensorEntry) -> tuple[bytes, Data, int | None] | None:
    """A tensor whose first axis runs fastest stays one: numpy has a word for that."""
    code = code_of(entry.dtype)
    if code is None:
        return None
    entry = resolved(entry)
    turned = replace(entry, shape=entry.shape[::-1], stride=entry.stride[::-1])
    fortran = not entry.is_contiguous and turned.is_contiguous
    order = "|" if entry.dtype.itemsize == 1 else "<"
    data = (turned if fortran else entry).row_major()
    return _header(order + code, fortran, entry.shape), data, entry.storage.crc if data is entry.storage.data else None


def _header(descr: str, fortran: bool, shape: tuple[int, ...]) -> bytes:
    """The header as numpy writes it, padded so that the data is aligned."""
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    size = -(-(len(text) + 11) // ALIGNMENT) * ALIGNMENT - 10
    return MAGIC + b"\1\0" + size.to_bytes(2, "little") + text.ljust(size - 1) + b"\n"
