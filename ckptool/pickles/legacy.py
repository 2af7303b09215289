"""Torch's stream of pickles, as `torch.save` wrote it from 0.1.10 to 1.5 and still does inside of other pickles.

Five pickles (magic number, version, what the machine was like, the value, the keys of its storages), then for each key the number of
elements as an int64 and the elements. It is the whole of a legacy file, and what `torch.storage._load_from_bytes` is given.
Storages are ranges of what the stream is in: nothing is loaded.

The elements are little-endian on every machine: torch writes them so and reads them so since 0.1.10, and what `little_endian` says
is looked at by none (torch/csrc/serialization.cpp, pytorch#26383). Only where the numbers of elements are big-endian too was the
whole written as it lay in memory; then the elements are turned.

Source: torch/serialization.py (`_legacy_save`, `_legacy_load`), torch 0.1.12 to 2.13; torch/storage.py (`_load_from_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from ckptool.checkpoint import Computed, Data, Note, Storage, StorageRef
from ckptool.checkpoint import InlineBytes as InMemory
from ckptool.checkpoint.commands import FILE, OUT, command
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.nodes import Global
from ckptool.checkpoint.strided import subrange, swapped
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
    listed,
    printable,
)
from ckptool.pickles.builders import PerPickle
from ckptool.pickles.calls import uses
from ckptool.pickles.decode import Decoded, decode, protocol_notes
from ckptool.pickles.skeleton import decode_lazily, leaves, skeleton
from ckptool.pickles.strings import StubbedValue, whole
from ckptool.pickles.torch_objects import BUILDERS, LOAD_FROM_BYTES, StorageView, storage_class

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
MAX_NESTING = 2  # streams within streams
_WINDOW = 512  # bytes: nearly all of the pickles around the value are shorter
_SPELLED = (MAGIC.to_bytes(10, "little"), b"%dL\n." % MAGIC)  # in binary, and as text in protocols 0 and 1
# The three pickles in front of the value as torch writes them nearly everywhere (in Python 3, at its protocol 2).
_USUAL = (
    b"\x80\x02\x8a\n"
    + MAGIC.to_bytes(10, "little")
    + b".\x80\x02M\xe9\x03.\x80\x02}q\0(X\x10\0\0\0protocol_versionq\1M\xe9\x03"
    b"X\r\0\0\0little_endianq\2\x88X\n\0\0\0type_sizesq\3}q\4(X\5\0\0\0shortq\5K\2X\3\0\0\0intq\6K\4X\4\0\0\0longq\7K\4uu."
)
_SMALLEST = 512  # bytes that a stream in bytes counts at least, when it is counted what all of them take
_TYPE_SIZES = {"short": (2,), "int": (4,), "long": (4, 8)}
COMPACT = command("convert", FILE, out=OUT)


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """What a stream holds. `end`: the byte after its last storage.  sources: class -> (file, text), of pickled modules."""

    root: Any
    end: int
    notes: list[Note]
    discarded: tuple[Any, ...]
    metadata: dict[str, Any]


def begins_stream(head: bytes) -> bool:
    """True if these first bytes (a few hundred) are those of a stream, or of one whose magic number is wrong or computed."""
    return any(spelled in head[:64] for spelled in _SPELLED) or _goes_on_as_stream(head)


def _goes_on_as_stream(head: bytes) -> bool:
    """True if the second pickle is the version: whatever the first is, no other file has that."""
    if b"\xe9\x03." not in head and b"1001\n." not in head:
        return False
    try:
        data = InMemory(head)
        return bool(small_pickle(data, skeleton(data, name="").end, "").root == VERSION)
    except CkptoolError:
        return False


def read_stream(data: Data, *, name: str, depth: int = 0) -> Stream:
    """The stream that is the whole of `data`. name: what to call it in errors.  depth: in how many other streams it is.

    Raises `NotACheckpoint` (another magic number), `UnsafeObject` (a computed one), `Corrupt`, `BadTensor`, `Truncated`,
    `LimitExceeded` or `Unsupported`.
    """
    head = _head(data, name)
    little_endian = head.root
    made = skeleton(data, head.end, name=name)
    tables = _Tables(little_endian)

    def run(blobs: Sequence[Any]) -> Decoded:
        tables.clear()
        return decode(
            made.data, tables.load, builders_at(depth), name=name, file_bytes=data.length, blobs=blobs, place=made.place
        )

    decoded = decode_lazily(made, run)
    for everything in (False, True):
        left = {view.key for view in leaves((decoded.root, decoded.discarded), StorageView)}
        if not left:
            break
        # They cannot be parts of other storages: see `_view`.
        tables.alone |= tables.views.keys() if everything else left
        decoded = decode_lazily(made, run)
    keys = small_pickle(data, made.end, name)
    try:
        end = tables.place(data, keys.root, keys.end)
    except CkptoolError as error:
        raise error.within(name) from None
    calls = (*head.discarded, *decoded.discarded, *keys.aside())
    metadata: dict[str, Any] = {"protocol_version": str(VERSION), "byteorder": "little" if little_endian else "big"}
    if tables.sources:
        metadata["sources"] = dict(tables.sources)
    notes = [
        *decoded.notes,
        *protocol_notes(decoded.protocol),
        *source_notes(tables.sources),
        *_notes(little_endian, data.length - end, tables),
    ]
    return Stream(decoded.root, end, notes, calls, metadata)


def _head(data: Data, name: str) -> Decoded:
    """The three pickles in front of the value; as their `root`, whether the machine was little-endian."""
    if data.read(0, min(len(_USUAL), data.length)) == _USUAL:
        return Decoded(True, (), 2, len(_USUAL))
    magic = small_pickle(data, 0, name)
    _check_magic(magic, name)
    version = small_pickle(data, magic.end, name)
    if version.root != VERSION or type(version.root) is not int:
        raise Corrupt(f"{name}: its version is {shown(version.root)} instead of {VERSION}", "No torch writes another.")
    info = small_pickle(data, version.end, name)
    little_endian = machine_order(info.root, VERSION, name)
    return Decoded(little_endian, (*magic.discarded, *version.discarded, *info.aside()), info.protocol, info.end)


def small_pickle(data: Data, at: int, name: str) -> Decoded:
    """One of the pickles around the value: no call in it means anything, and no storage is in it. Its `end` counts as `at` does."""
    window = data.read(at, min(_WINDOW, data.length - at))
    try:
        found = decode(window, _no_storage, {}, name=name)
        return replace(found, end=at + found.end)
    except CkptoolError:  # longer than the window, or wrong: then this says where
        made = skeleton(data, at, name=name)

    def run(blobs: Sequence[Any]) -> Decoded:
        return decode(made.data, _no_storage, {}, name=name, file_bytes=data.length, blobs=blobs, place=made.place)

    return replace(decode_lazily(made, run), end=made.end)


def _no_storage(_: Any) -> Any:
    raise Corrupt("a persistent id beside the value", "torch writes them in the value's pickle only.")


def _check_magic(magic: Decoded, name: str) -> None:
    if run := next(uses(magic.aside()), None):
        raise UnsafeObject(
            f"{name}: its magic number is computed, by {printable(run.name)}",
            "torch writes a number there; this file runs a program as soon as it is looked at.",
            "Do not load it with torch.load(weights_only=False).",
        )
    if magic.root != MAGIC or type(magic.root) is not int:
        raise NotACheckpoint(
            f"{name} is laid out as torch's legacy files, but its magic number is {shown(magic.root)}",
            f"It should be {MAGIC:#x}.",
        )


def machine_order(info: Any, version: int, name: str) -> bool:
    """What a file says about the machine that wrote it: whether that was little-endian. Raises `Corrupt` where it makes no sense."""
    fields = info if type(info) is dict else {}
    little_endian, sizes = fields.get("little_endian"), fields.get("type_sizes")
    if (
        fields.get("protocol_version") != version
        or type(little_endian) is not bool
        or type(sizes) is not dict
        or any(type(size := sizes.get(kind)) is not int or size not in known for kind, known in _TYPE_SIZES.items())
    ):
        raise Corrupt(
            f"{name}: what it says about the machine that wrote it makes no sense ({shown(info)})",
            "torch writes the version, the byte order and the sizes of three types.",
        )
    return little_endian


def shown(value: Any) -> str:
    """The beginning of a value that stands where another should, for a message."""
    return printable(repr(value)[:80])


def _notes(little_endian: bool, left: int, tables: _Tables) -> list[Note]:
    notes = [Note("no-checksums", "the format has no checksums: damage to its data cannot be noticed", COMPACT)]
    if not little_endian:
        how = "turned" if tables.order == "big" else "little-endian as torch writes them everywhere, and read so"
        notes.append(Note("big-endian", f"written on a big-endian machine; its elements are {how}", COMPACT))
    if left:
        notes.append(Note("trailing-bytes", f"{left:,} bytes after the last storage are used by nothing", COMPACT))
    if tables.alone:
        alone = counted(
            len(tables.alone), "view of a storage stands by itself", "views of storages stand by themselves"
        )
        what = f"{alone}; each is read as a storage of its own"
        notes.append(Note("views-apart", what))
    return notes


def source_notes(sources: dict[str, dict[str, str | None]]) -> list[Note]:
    """What to say about the source text of classes in a file."""
    if not sources:
        return []
    what = "the source text of {} is in the file: shown by inspect --json, never run, and not kept in what is written"
    count = counted(len(sources), "class", "classes") if len(sources) > 1 else "a class"
    return [Note("class-source", what.format(count))]


# Storages ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Root:
    """A storage with data of its own. `ref` is how it was first seen, `numel` its number of elements."""

    ref: StorageRef
    numel: int


class _Tables:
    """Gives the storages for persistent ids, and their data when the keys are known that say where it is."""

    def __init__(self, little_endian: bool) -> None:
        self.little_endian = little_endian
        self.order: Literal["", "little", "big"] = ""  # of the data, once that is known
        self.alone: set[str] = set()  # views that no tensor is made of
        self.clear()

    def clear(self) -> None:
        self.by_class: dict[Global, dict[str, _Root]] = {}
        self.roots: dict[str, _Root] = {}
        self.views: dict[str, tuple[Any, StorageView]] = {}
        self.sources: dict[str, dict[str, str | None]] = {}

    def load(self, pid: Any) -> Any:
        """What `("storage", class, key, location, elements, view)` or `("module", class, file, source)` stands for."""
        try:
            tag, cls, key, location, numel, view = pid
            root = self.by_class[cls][key]
        except (KeyError, TypeError, ValueError):
            return self._slowly(pid)
        if tag != "storage" or view is not None or type(numel) is not int:
            return self._slowly(pid)
        if location != root.ref.storage.location or numel != root.numel:
            raise _contradiction(key)
        return root.ref

    def _slowly(self, pid: Any) -> Any:
        parts = pid if type(pid) is tuple and pid else (None,)
        tag = as_text(parts[0])
        if len(parts) == 4 and tag == "module":
            return self._module(parts[1:])
        if len(parts) != 6 or tag != "storage":
            raise Corrupt(
                "a persistent id that names no storage", "torch writes them for storages and for modules' classes."
            )
        cls, numel, view = parts[1], parts[4], parts[5]
        key, location = as_text(parts[2]), as_text(parts[3])
        if type(cls) is not Global or type(key) is not str or type(location) is not str or type(numel) is not int:
            raise Corrupt("a persistent id of a storage that is not as torch writes it", "The pickle was damaged.")
        root = self._root(cls, key, location, numel)
        return root.ref if view is None else self._view(root, view)

    def _module(self, parts: tuple[Any, ...]) -> Global:
        cls, source = module_source(parts)
        if source is not None:
            self.sources[str(cls)] = source
        return cls

    def _root(self, cls: Global, key: str, location: str, numel: int) -> _Root:
        known, dtype = storage_class(cls)
        if not known:
            raise Unsupported(
                f"the storage {printable(key)} has the unknown type {cls}", "Its elements cannot be told."
            )
        if numel < 0:
            raise BadTensor(f"the storage {printable(key)} has {numel} elements", _NO_TENSOR)
        if key in self.views:
            raise _entangled(key)
        size = numel * (dtype.itemsize if dtype else 1)
        first = self.roots.get(key)
        if first is None:
            first = self.roots[key] = _Root(StorageRef(Storage(_unplaced(size), location), dtype), numel)
        elif first.ref.dtype is not dtype:
            alike = not size or all(t is None or t.name == "u8" for t in (dtype, first.ref.dtype))
            if size != first.ref.storage.nbytes or not alike:
                raise _contradiction(key)
            first = _Root(StorageRef(first.ref.storage, dtype), numel)
        if location != first.ref.storage.location or numel != first.numel:
            raise _contradiction(key)
        self.by_class.setdefault(cls, {})[key] = first
        return first

    def _view(self, root: _Root, view: Any) -> Any:
        key, offset, size = view if type(view) is tuple and len(view) == 3 else (None, None, None)
        key = as_text(key)
        if type(key) is not str or type(offset) is not int or type(size) is not int:
            raise BadTensor("a view of a storage that is not as torch writes it", _NO_TENSOR)
        if offset < 0 or size < 0 or offset + size > root.numel:
            raise BadTensor(
                f"the view {printable(key)} is of the elements {offset:,} to {offset + size:,} of a storage that has {root.numel:,}",
                _NO_TENSOR,
            )
        if key in self.roots:
            raise _entangled(key)
        found = self.views.get(key)
        facts = (root.ref.storage, root.ref.dtype, offset, size)
        if found is None:
            storage, dtype = root.ref.storage, root.ref.dtype
            width = dtype.itemsize if dtype else 1
            window = Storage(_unplaced(size * width), storage.location)
            found = self.views[key] = facts, StorageView(key, storage, dtype, offset, window)
        elif found[0] != facts:
            raise _contradiction(key)
        return StorageRef(found[1].window, root.ref.dtype) if key in self.alone else found[1]

    # Their data --------------------------------------------------------------------------------------------------

    def place(self, data: Data, keys: Any, at: int) -> int:
        """Gives each storage its part of `data`, in the order of the keys, from byte `at`; the byte after the last."""
        keys = [as_text(key) for key in keys] if type(keys) is list else [None]
        self._check_keys(keys)
        for key in keys:
            at = self._place(data, self.roots[key], key, at)
        for (storage, dtype, offset, _), view in self.views.values():
            if view.key in self.alone:
                begin = offset * (dtype.itemsize if dtype else 1)
                view.window.data = subrange(storage.data, begin, view.window.data.length)
        return at

    def _check_keys(self, keys: list[Any]) -> None:
        if not all(type(key) is str for key in keys):
            raise Corrupt("the list of storages is not a list of keys", _MENDED)
        if len(set(keys)) != len(keys):
            twice = sorted({key for key in keys if keys.count(key) > 1}) if len(keys) < 1000 else ["some"]
            raise Corrupt(f"the list of storages names {printable(twice[0][:80])} twice", _MENDED)
        if unknown := [key for key in keys if key not in self.roots]:
            raise Corrupt(f"the list of storages names {_named(unknown)}, which no tensor uses", _MENDED)
        if missing := self.roots.keys() - set(keys):
            raise Corrupt(f"the list of storages does not name {_named(sorted(missing))}", _MENDED)

    def _place(self, data: Data, root: _Root, key: str, at: int) -> int:
        storage, size = root.ref.storage, root.ref.storage.nbytes
        if at + 8 > data.length:
            raise self._cut(key, at, 8 + size, data.length)
        self._check_count(data.read(at, 8), root, key)
        at += 8
        if at + size > data.length:
            raise self._cut(key, at, size, data.length)
        storage.data = subrange(data, at, size) if size else InMemory(b"")
        if self.order == "big":
            storage.data = turned(storage, self._dtype(key))
        return at + size

    def _check_count(self, header: bytes, root: _Root, key: str) -> None:
        """Checks the number of elements in front of the data; its byte order is that of the file."""
        orders = [order for order in _ORDERS if int.from_bytes(header, order) == root.numel]
        if len(orders) == 1 and not self.order:
            self.order = orders[0]
        if not orders or (self.order and self.order not in orders) or (self.order == "big" and self.little_endian):
            raise Corrupt(
                f"the storage {printable(key[:80])} should have {counted(root.numel, 'element')}; "
                f"the data says {int.from_bytes(header, self.order or 'little', signed=True):,}",
                "Two programs wrote to the file, or it was damaged.",
            )

    def _dtype(self, key: str) -> DType | None:
        """The element type of a storage, as far as any of the ways in which it is seen tells it."""
        kinds = [refs[key].ref.dtype for refs in self.by_class.values() if key in refs]
        return next((kind for kind in kinds if kind is not None), None)

    @staticmethod
    def _cut(key: str, at: int, size: int, end: int) -> Truncated:
        return Truncated(
            f"the storage {printable(key)} needs {size:,} bytes from byte {at:,}; {end - at:,} are there",
            "The file was cut off.",
            "Copy or download it again.",
        )


_ORDERS: tuple[Literal["little", "big"], ...] = ("little", "big")
_NO_TENSOR = "The file was damaged, or made to mislead."
_MENDED = "The file was damaged, or put together from two."


def _named(keys: list[str]) -> str:
    return listed([printable(key[:80]) for key in keys], 3)


def _unplaced(size: int) -> Computed:
    """What stands for the data of a storage until it is known where it is."""

    def read(offset: int, length: int) -> bytes:
        raise AssertionError(f"{length} bytes at {offset} of a storage that is not placed yet")

    return Computed(size, read)


def turned(storage: Storage, dtype: DType | None) -> Data:
    """The data of a storage of which the elements are big-endian, in this machine's order."""
    if dtype is None:
        what = "an untyped storage in a big-endian file"
        raise Unsupported(what, "How wide its elements are, and so how to turn them, is not recorded.")
    return storage.data if dtype.itemsize == 1 else swapped(Storage(storage.data, storage.location), dtype)


def module_source(parts: tuple[Any, ...]) -> tuple[Global, dict[str, str | None] | None]:
    """What `(class, file, source text)` in a persistent id says: the class as a name, and where it was and how it read, as text."""
    texts = [whole(part) for part in parts[1:]]
    if (
        len(parts) != 3
        or type(parts[0]) is not Global
        or not all(t is None or isinstance(t, (str, bytes)) for t in texts)
    ):
        raise Corrupt("a persistent id of a module that is not as torch writes it", "The pickle was damaged.")
    file, source = (text.decode("latin-1") if isinstance(text, bytes) else text for text in texts)
    return parts[0], (None if file is None and source is None else {"file": file, "source": source})


def as_text(value: Any) -> Any:
    """Texts of a persistent id, which Python 2 and `encoding="bytes"` may have made bytes."""
    value = whole(value)
    return value.decode("ascii", "backslashreplace") if isinstance(value, bytes) else value


def _contradiction(key: str) -> Corrupt:
    return Corrupt(
        f"the storage {printable(key[:80])} is described in two ways", "Readers would disagree which is right."
    )


def _entangled(key: str) -> BadTensor:
    return BadTensor(
        f"the storage {printable(key[:80])} is a view, and has views", "torch writes views of whole storages."
    )


# Streams in bytes ----------------------------------------------------------------------------------------------------


def load_from_bytes(content: bytes | StubbedValue, depth: int = 1) -> Any:
    """What `torch.storage._load_from_bytes(content)` stands for; `NotImplemented` where the bytes are no stream.

    depth: how many levels of such bytes this one is on. Storages of a blob stay where they are, in its file.
    Raises what `read_stream` does, and `LimitExceeded` below the second level.
    """
    data = content.data if isinstance(content, StubbedValue) else InMemory(content)
    if not begins_stream(data.read(0, min(512, data.length))):
        return NotImplemented
    if depth > MAX_NESTING:
        raise LimitExceeded(
            f"streams nested in bytes more than {MAX_NESTING} deep",
            "torch writes one; more are built to exhaust a reader.",
        )
    stream = read_stream(data, name="bytes for torch.storage._load_from_bytes", depth=depth)
    if stream.end != data.length:
        raise Corrupt(f"a stream in bytes has {data.length - stream.end:,} bytes after its end", "Nothing reads them.")
    # What it calls and throws away would not be seen from outside: the whole stays a call then, and is named.
    return NotImplemented if stream.discarded else stream.root


def nested_streams(depth: int, spend: Callable[[int], None]) -> Callable[[tuple[Any, ...]], Any]:
    """The builder of `_load_from_bytes` calls for one pickle."""

    def build(args: tuple[Any, ...]) -> Any:
        if len(args) != 1 or not (
            type(args[0]) is bytes or (type(args[0]) is StubbedValue and args[0].kind == "bytes")
        ):
            return NotImplemented
        spend(max(_SMALLEST, args[0].data.length if isinstance(args[0], StubbedValue) else len(args[0])))
        return load_from_bytes(args[0], depth)

    return build


@cache
def builders_at(depth: int) -> dict[Global, Any]:
    """The builders for a pickle that is `depth` levels of bytes deep."""
    if not depth:
        return BUILDERS
    return {**BUILDERS, LOAD_FROM_BYTES: PerPickle(lambda spend: nested_streams(depth + 1, spend))}
