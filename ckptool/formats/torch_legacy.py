"""`torch-legacy`: what `torch.save` wrote from 0.1.10 to 1.5, and writes with `_use_new_zipfile_serialization=False`.

Five pickles (magic number, version, what the machine was like, the value, the keys of its storages), then for each key
the number of elements as an int64 and the elements. Storages are ranges of the file: nothing is loaded. The same
stream lies inside of other pickles, as what `torch.storage._load_from_bytes` is given. It is read, not written: zips
are what every torch since 1.4 opens, and can be mapped.

The numbers and elements are little-endian on every machine: torch writes them so and reads them so since 0.1.10, and
nobody looks at what `little_endian` says (torch/csrc/serialization.cpp, pytorch#26383).

Source: torch/serialization.py (`_legacy_save`, `_legacy_load`), torch 0.1.12 to 2.13; torch/storage.py
(`_load_from_bytes`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Computed, Data, FileRange, Note, Storage, StorageRef
from ckptool.checkpoint import InlineBytes as InMemory
from ckptool.checkpoint.files import Input, Source
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.nodes import Global, brief
from ckptool.checkpoint.numpy_arrays import LongValue
from ckptool.checkpoint.strided import subrange
from ckptool.commands import FILE, OUT, command
from ckptool.errors import (
    BadTensor,
    CkptoolError,
    Corrupt,
    LimitExceeded,
    NotACheckpoint,
    Truncated,
    UnsafeObject,
    Unsupported,
    counted,
)
from ckptool.formats.nested_streams import MAX_NESTING, builders_at
from ckptool.pickles.calls import uses
from ckptool.pickles.decode import Decoded, decode, decode_lazily, no_storage, protocol_notes, skeleton
from ckptool.pickles.strings import unstub
from ckptool.pickles.torch_objects import StorageView, storage_class

NAME = "torch-legacy"
MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
_WINDOW = 512  # bytes: nearly all of the pickles around the value are shorter
_AHEAD = 256  # storages whose counts are asked for together, where every read is a request
_SPELLED = (MAGIC.to_bytes(10, "little"), b"%dL\n." % MAGIC)  # in binary, and as text in protocols 0 and 1
# The three pickles in front of the value as torch writes them nearly everywhere (in Python 3, at its protocol 2).
_USUAL = (
    b"\x80\x02\x8a\n"
    + MAGIC.to_bytes(10, "little")
    + b".\x80\x02M\xe9\x03.\x80\x02}q\0(X\x10\0\0\0protocol_versionq\1M\xe9\x03"
    b"X\r\0\0\0little_endianq\2\x88X\n\0\0\0type_sizesq\3}q\4("
    b"X\5\0\0\0shortq\5K\2X\3\0\0\0intq\6K\4X\4\0\0\0longq\7K\4uu."
)
_TYPE_SIZES = {"short": (2,), "int": (4,), "long": (4, 8)}
COMPACT = command("convert", FILE, out=OUT)


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Source) and begins_stream(head)


def read(source: Source) -> Checkpoint:
    """The checkpoint in a legacy file. Reads its pickles and a number for each storage, no tensor data.

    Raises what `read_stream` does.
    """
    return replace(read_stream(FileRange(source, 0, source.size), name=f"{source}")[0], source=source)


def begins_stream(head: bytes) -> bool:
    """True for the first bytes of a stream, also of one whose magic number is wrong or computed: if the second pickle
    is the version, whatever the first is, it is no other file."""
    if any(spelled in head[:64] for spelled in _SPELLED):
        return True
    if b"\xe9\x03." not in head and b"1001\n." not in head:
        return False
    try:
        data = InMemory(head)
        return bool(small_pickle(data, skeleton(data, name="").end, "").root == VERSION)
    except CkptoolError:
        return False


def read_stream(data: Data, *, name: str, depth: int = 0) -> tuple[Checkpoint, int]:
    """The checkpoint of the stream with which `data` begins, and the byte after its last storage.

    name: what to call it in errors.  depth: in how many other streams it is.
    Raises `NotACheckpoint` (another magic number), `UnsafeObject` (a computed one), `Corrupt`, `BadTensor`,
    `Truncated`, `LimitExceeded` or `Unsupported`.
    """
    # The three pickles in front of the value.
    if data.read(0, min(len(_USUAL), data.length)) == _USUAL:
        little_endian, begin, aside = True, len(_USUAL), list[Any]()
    else:
        magic = small_pickle(data, 0, name)
        if run := next(uses(magic.aside()), None):
            what = f"{name}: its magic number is computed, by {run.name}"
            why = "torch writes a plain number there; this file runs code as soon as it is loaded."
            raise UnsafeObject(what, why, "Do not load it with torch.load(weights_only=False).")
        if magic.root != MAGIC or type(magic.root) is not int:
            what = f"{name} is laid out like torch's legacy files, but its magic number is {brief(magic.root, 80)}"
            raise NotACheckpoint(what, f"It should be {MAGIC:#x}.")
        version = small_pickle(data, magic.end, name)
        if version.root != VERSION or type(version.root) is not int:
            raise Corrupt(f"{name}: its version is {brief(version.root, 80)} instead of {VERSION}")
        info = small_pickle(data, version.end, name)
        little_endian, begin = machine_order(info.root, VERSION, name), info.end
        aside = [*magic.discarded, *version.discarded, *info.aside()]
    opcodes, tables = skeleton(data, begin, name=name), LegacyStorages()
    decoded = decode_lazily(opcodes, tables.load, builders_at(depth), name=name, file_bytes=data.length)
    nodes = visit((decoded.root, decoded.discarded))
    kinds = {node.kind if isinstance(node, Composite) else type(node) for node in nodes}
    if StorageView in kinds:
        raise Unsupported(f"{name}: a storage view outside of a tensor", "torch keeps such views only in tensors.")
    keys = small_pickle(data, opcodes.end, name)
    try:
        end = tables.place(data, keys.root, keys.end)
    except CkptoolError as error:
        raise error.within(name) from None
    metadata: dict[str, Any] = {"protocol_version": str(VERSION), "byteorder": "little" if little_endian else "big"}
    notes = [*decoded.notes, *protocol_notes(decoded)]
    notes.append(Note("no-checksums", "the format has no checksums: damage to its data cannot be detected", COMPACT))
    if tables.untyped or "nested" in kinds:  # of these it uses the sizes before it has read them
        what = "torch saves nested tensors, and types such as float8 and uint16, in this format but cannot load them"
        notes.append(Note("legacy-types", what, COMPACT))
    if rest := data.length - end:
        notes.append(Note("trailing-bytes", f"{rest:,} bytes after the last storage are used by nothing", COMPACT))
    calls = (*aside, *decoded.discarded, *keys.aside())
    return Checkpoint(decoded.root, NAME, metadata, notes=tuple(notes), discarded=calls), end


def small_pickle(data: Data, at: int, name: str) -> Decoded:
    """One of the pickles around the value, without storages; no call in it is understood. `end`: a place in `data`."""
    window = data.read(at, min(_WINDOW, data.length - at))
    try:
        decoded = decode(window, no_storage, {}, name=name)
        return replace(decoded, end=at + decoded.end)
    except CkptoolError:  # longer than the window, or wrong: then this says where
        opcodes = skeleton(data, at, name=name)
    return replace(decode_lazily(opcodes, no_storage, {}, name=name, file_bytes=data.length), end=opcodes.end)


def machine_order(info: Any, version: int, name: str) -> bool:
    """True if the machine that wrote the file was little-endian; raises `Corrupt` for facts that make no sense."""
    fields = info if type(info) is dict else {}
    little_endian, sizes = fields.get("little_endian"), fields.get("type_sizes")
    if (
        fields.get("protocol_version") != version
        or type(little_endian) is not bool
        or type(sizes) is not dict
        or any(type(size := sizes.get(kind)) is not int or size not in valid for kind, valid in _TYPE_SIZES.items())
    ):
        raise Corrupt(f"{name}: its description of the machine that wrote it is invalid ({brief(info, 80)})")
    return little_endian


# Its storages --------------------------------------------------------------------------------------------------------

_NO_TENSOR = "The file is damaged or malicious."
_MENDED = "The file was damaged, or put together from two."
_DAMAGED = "The pickle was damaged."


class LegacyStorages:
    """Gives the storages for persistent ids, and their data once the list of keys says where it is.

    roots: those with data of their own.  views: of them, by keys of their own.  untyped: one of them has no type.
    """

    def __init__(self) -> None:
        self.roots: dict[str, StorageRef] = {}
        self.views: dict[str, StorageView] = {}
        self.untyped = False

    def load(self, pid: Any) -> Any:
        """The value of `("storage", class, key, location, elements, view)` or `("module", class, file, source)`."""
        parts = tuple(map(as_text, pid)) if type(pid) is tuple else (None,)
        if len(parts) == 4 and parts[0] == "module":
            return class_of(parts[1:])
        if len(parts) != 6 or parts[0] != "storage":
            raise Corrupt("a persistent id that names no storage")
        _, cls, key, location, numel, view = parts
        if [*map(type, parts[1:5])] != [Global, str, str, int]:
            raise Corrupt("a storage's persistent id that torch would not write", _DAMAGED)
        is_known, dtype = storage_class(cls)
        if not is_known:
            raise Unsupported(f"the storage {key} has the unknown type {cls}", "The size of its elements is unknown.")
        if numel < 0:
            raise BadTensor(f"the storage {key} has {numel} elements", _NO_TENSOR)
        itemsize = dtype.itemsize if dtype else 1
        self.untyped |= dtype is None
        size = numel * itemsize
        if (first := self.roots.get(key)) is None:
            first = self.roots[key] = StorageRef(Storage(Computed(size, _unplaced), location), dtype)
        storage, is_bytes = first.storage, all(kind is None or kind.name == "u8" for kind in (dtype, first.dtype))
        fits = dtype is first.dtype or is_bytes or not size
        if key in self.views or not fits or (location, size) != (storage.location, storage.nbytes):
            raise _contradiction(key, BadTensor if key in self.views else Corrupt)
        if view is None:
            return first if dtype is first.dtype else StorageRef(storage, dtype)
        name, offset, count = map(as_text, view) if type(view) is tuple and len(view) == 3 else (None, None, None)
        if type(name) is not str or type(offset) is not int or type(count) is not int:
            raise BadTensor("a storage view that torch would not write", _NO_TENSOR)
        if offset < 0 or count < 0 or offset + count > numel:
            extent = f"of a storage that has {numel:,}"
            raise BadTensor(f"the view {name} is of the elements {offset:,} to {offset + count:,} {extent}", _NO_TENSOR)
        storage_view = StorageView(storage, dtype, offset, count * itemsize)
        if name in self.roots or self.views.setdefault(name, storage_view) != storage_view:
            raise _contradiction(name, BadTensor if name in self.roots else Corrupt)
        return storage_view

    def place(self, data: Data, keys: Any, at: int) -> int:
        """Gives each storage its part of `data`, in the order of the keys, from byte `at`; the byte after the last."""
        keys = [as_text(key) for key in keys] if type(keys) is list else [None]
        if not all(type(key) is str for key in keys):
            raise Corrupt("the list of storages is not a list of keys", _MENDED)
        if sorted(keys) != sorted(self.roots):
            raise Corrupt("the list of storages does not have each used key exactly once", _MENDED)
        for number, key in enumerate(keys):
            if number % _AHEAD == 0 and isinstance(data, FileRange):
                sizes = (8 + self.roots[key].storage.nbytes for key in keys[number : number + _AHEAD])
                starts = accumulate(sizes, initial=data.offset + at)
                data.file.expect((start, start + 8) for start in starts)
            storage, dtype = self.roots[key].storage, self.roots[key].dtype
            size, numel = storage.nbytes, storage.nbytes // (dtype.itemsize if dtype else 1)
            if at + 8 <= data.length and (said := int.from_bytes(data.read(at, 8), "little", signed=True)) != numel:
                raise Corrupt(f"the storage {key[:80]} should have {counted(numel, 'element')}; the data says {said:,}")
            if at + 8 + size > data.length:
                begin, needed = (at + 8, size) if at + 8 <= data.length else (at, 8 + size)
                extent = f"{needed:,} bytes from byte {begin:,}; {data.length - begin:,} are there"
                raise Truncated(f"the storage {key} needs {extent}", fix="Copy or download it again.")
            storage.data = subrange(data, at + 8, size) if size else InMemory(b"")
            at += 8 + size
        return at


def _unplaced(offset: int, length: int) -> bytes:
    raise AssertionError(f"{length} bytes at {offset} of a storage that is not placed yet")


def _contradiction(key: str, kind: type[Corrupt]) -> Corrupt:
    return kind(f"the storage {key[:80]} is described in two ways", "Readers would disagree about which counts.")


def class_of(parts: tuple[Any, ...]) -> Global:
    """The class that `(class, file, source text)` in a persistent id names; nobody looks at the text."""
    if len(parts) != 3 or type(parts[0]) is not Global:
        raise Corrupt("a module's persistent id that torch would not write", _DAMAGED)
    return parts[0]


def as_text(value: Any) -> Any:
    """Texts of a persistent id, which Python 2 and `encoding="bytes"` may have made bytes."""
    value = unstub(value)
    return value.decode("ascii", "backslashreplace") if isinstance(value, bytes) else value


# Streams in bytes ----------------------------------------------------------------------------------------------------


def load_from_bytes(content: bytes | LongValue, depth: int = 1) -> Any:
    """The value of `torch.storage._load_from_bytes(content)`; `NotImplemented` where the bytes are no stream.

    depth: how many levels of such bytes this one is on. Storages of a stub stay where they are, in its file.
    Raises what `read_stream` does, and `LimitExceeded` below the second level.
    """
    data = content.data if isinstance(content, LongValue) else InMemory(content)
    if not begins_stream(data.read(0, min(512, data.length))):
        return NotImplemented
    if depth > MAX_NESTING:
        raise LimitExceeded(f"streams nested in bytes more than {MAX_NESTING} deep")
    checkpoint, end = read_stream(data, name="bytes for torch.storage._load_from_bytes", depth=depth)
    if end != data.length:
        raise Corrupt(f"a stream in bytes has {data.length - end:,} bytes after its end", "Nothing reads them.")
    # Calls whose results it throws away would not be seen from outside: then all of it stays a call, which is named.
    return NotImplemented if checkpoint.discarded else checkpoint.tree
