"""`torch-legacy`: what `torch.save` wrote from 0.1.10 to 1.5, and writes with `_use_new_zipfile_serialization=False`.

Five pickles (magic number, version, what the machine was like, the value, the keys of its storages), then for each key
the number of elements as an int64 and the elements. Storages are ranges of the file: nothing is loaded. The same
stream lies inside of other pickles, as what `torch.storage._load_from_bytes` is given. It is read, not written: zips
are what every torch since 1.4 opens, and can be mapped.

The elements are little-endian on every machine: torch writes them so and reads them so since 0.1.10, and what
`little_endian` says is looked at by none (torch/csrc/serialization.cpp, pytorch#26383). Only where the numbers of
elements are big-endian too was the whole written as it lay in memory; then the elements are turned.

Source: torch/serialization.py (`_legacy_save`, `_legacy_load`), torch 0.1.12 to 2.13; torch/storage.py
(`_load_from_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Data, FileRange, Note
from ckptool.checkpoint import InlineBytes as InMemory
from ckptool.checkpoint.files import Input, Source
from ckptool.commands import FILE, OUT, command
from ckptool.errors import (
    CkptoolError,
    Corrupt,
    LimitExceeded,
    NotACheckpoint,
    UnsafeObject,
    counted,
)
from ckptool.formats.legacy_storages import LegacyStorages
from ckptool.formats.nested_streams import MAX_NESTING, builders_at
from ckptool.pickles.calls import uses
from ckptool.pickles.decode import Decoded, decode, protocol_notes
from ckptool.pickles.skeleton import decode_lazily, leaves, skeleton
from ckptool.pickles.strings import StubbedValue
from ckptool.pickles.torch_objects import StorageView

NAME = "torch-legacy"
MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
_WINDOW = 512  # bytes: nearly all of the pickles around the value are shorter
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


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The contents of a stream. end: the byte after its last storage.  metadata: also the sources of classes."""

    root: Any
    end: int
    notes: list[Note]
    discarded: tuple[Any, ...]
    metadata: dict[str, Any]


def begins_stream(head: bytes) -> bool:
    """True for the first bytes of a stream, also of one whose magic number is wrong or computed."""
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

    Raises `NotACheckpoint` (another magic number), `UnsafeObject` (a computed one), `Corrupt`, `BadTensor`,
    `Truncated`, `LimitExceeded` or `Unsupported`.
    """
    head = _head(data, name)
    little_endian = head.root
    made = skeleton(data, head.end, name=name)
    tables = LegacyStorages(little_endian)

    def run() -> Decoded:
        return decode_lazily(
            made, tables.load, builders_at(depth), name=name, file_bytes=data.length, begin=tables.clear
        )

    decoded = run()
    for everything in (False, True):
        left = {view.key for view in leaves((decoded.root, decoded.discarded), StorageView)}
        if not left:
            break
        # They cannot be parts of other storages: see `_view`.
        tables.alone |= tables.views.keys() if everything else left
        decoded = run()
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
    """One of the pickles around the value, without storages; no call in it is understood. Its `end` counts as `at`."""
    window = data.read(at, min(_WINDOW, data.length - at))
    try:
        found = decode(window, _no_storage, {}, name=name)
        return replace(found, end=at + found.end)
    except CkptoolError:  # longer than the window, or wrong: then this says where
        made = skeleton(data, at, name=name)
    return replace(decode_lazily(made, _no_storage, {}, name=name, file_bytes=data.length), end=made.end)


def _no_storage(_: Any) -> Any:
    raise Corrupt("a persistent id beside the value", "torch writes them in the value's pickle only.")


def _check_magic(magic: Decoded, name: str) -> None:
    if run := next(uses(magic.aside()), None):
        what = f"{name}: its magic number is computed, by {run.name}"
        why = "torch writes a number there; this file runs a program as soon as it is loaded."
        raise UnsafeObject(what, why, "Do not load it with torch.load(weights_only=False).")
    if magic.root != MAGIC or type(magic.root) is not int:
        raise NotACheckpoint(
            f"{name} is laid out as torch's legacy files, but its magic number is {shown(magic.root)}",
            f"It should be {MAGIC:#x}.",
        )


def machine_order(info: Any, version: int, name: str) -> bool:
    """True if the machine that wrote the file was little-endian; raises `Corrupt` for facts that make no sense."""
    fields = info if type(info) is dict else {}
    little_endian, sizes = fields.get("little_endian"), fields.get("type_sizes")
    if (
        fields.get("protocol_version") != version
        or type(little_endian) is not bool
        or type(sizes) is not dict
        or any(type(size := sizes.get(kind)) is not int or size not in known for kind, known in _TYPE_SIZES.items())
    ):
        raise Corrupt(
            f"{name}: its description of the machine that wrote it is invalid ({shown(info)})",
            "torch writes the version, the byte order and the sizes of three types.",
        )
    return little_endian


def shown(value: Any) -> str:
    """The beginning of a value that stands where another should, for a message."""
    return repr(value)[:80]


def _notes(little_endian: bool, left: int, tables: LegacyStorages) -> list[Note]:
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
    """A note on the source text of classes in a file."""
    if not sources:
        return []
    what = "the source text of {} is in the file: shown by inspect --json, never run, and not kept in what is written"
    count = counted(len(sources), "class", "classes") if len(sources) > 1 else "a class"
    return [Note("class-source", what.format(count))]


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Source) and begins_stream(head)


def read(source: Source) -> Checkpoint:
    """The checkpoint in a legacy file. Reads its pickles and a number for each storage, no tensor data.

    Raises what `read_stream` does.
    """
    stream = read_stream(FileRange(source, 0, source.size), name=f"{source}")
    return Checkpoint(stream.root, NAME, stream.metadata, source, notes=tuple(stream.notes), discarded=stream.discarded)


# Streams in bytes ----------------------------------------------------------------------------------------------------


def load_from_bytes(content: bytes | StubbedValue, depth: int = 1) -> Any:
    """The value of `torch.storage._load_from_bytes(content)`; `NotImplemented` where the bytes are no stream.

    depth: how many levels of such bytes this one is on. Storages of a stub stay where they are, in its file.
    Raises what `read_stream` does, and `LimitExceeded` below the second level.
    """
    data = content.data if isinstance(content, StubbedValue) else InMemory(content)
    if not begins_stream(data.read(0, min(512, data.length))):
        return NotImplemented
    if depth > MAX_NESTING:
        what = f"streams nested in bytes more than {MAX_NESTING} deep"
        raise LimitExceeded(what, "torch writes one; the file is probably malicious.")
    stream = read_stream(data, name="bytes for torch.storage._load_from_bytes", depth=depth)
    if stream.end != data.length:
        raise Corrupt(f"a stream in bytes has {data.length - stream.end:,} bytes after its end", "Nothing reads them.")
    # What it calls and throws away would not be seen from outside: the whole stays a call then, and is named.
    return NotImplemented if stream.discarded else stream.root
