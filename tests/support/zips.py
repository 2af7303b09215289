"""Zip archives taken apart and put together otherwise than torch does, and what several readers make of them."""

import io
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptool.checkpoint import Checkpoint
from ckptool.formats import read
from ckptool.formats.zip.directory import CENTRAL, END, END64, LOCAL, LOCATOR
from tests.support.files import load, torch_bytes


def rezipped(path: Path, out: Path, compression: int, replaced: dict[str, bytes] | None = None) -> Path:
    """The same records as another program zips them, some with other contents."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w", compression) as again:
        for info in archive.infolist():
            again.writestr(info.filename, (replaced or {}).get(info.filename, archive.read(info)))
    return out


def with_record(path: Path, out: Path, name: str, contents: bytes | None) -> Path:
    """The same records with one more, or another, or (None) without it."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w") as again:
        for info in archive.infolist():
            if info.filename != name:
                again.writestr(info.filename, archive.read(info))
        if contents is not None:
            again.writestr(name, contents)
    return out


def record_starts(path: Path) -> dict[str, int]:
    """Where the data of each record begins, by its own header."""
    starts = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            name, extra = struct.unpack("<2H", file.read(4))
            starts[info.filename] = info.header_offset + 30 + name + extra
    return starts


def damaged(path: Path, *records: str | int) -> Path:
    """The file with a flipped bit in the data of these records, or storages."""
    starts, data = record_starts(path), bytearray(path.read_bytes())
    for record in records:
        data[starts[record if isinstance(record, str) else f"archive/data/{record}"]] ^= 1
    path.write_bytes(data)
    return path


# Hostile ones -------------------------------------------------------------------------------------------------------

TENSORS = {"w": torch.arange(1.0, 4.0), "v": torch.tensor([7.0, 8.0])}
FILE = torch_bytes(TENSORS)  # as torch writes it: streamed, with descriptors and zip64 end records
END_AT = len(FILE) - END.size
END64_AT = END_AT - LOCATOR.size - END64.size
DIRECTORY = struct.unpack_from("<Q", FILE, END64_AT + 48)[0]
W = bytes(TENSORS["w"].numpy())
EXPECTED = {name: bytes(tensor.numpy()) for name, tensor in TENSORS.items()}


def bytes_by_name(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: entry.bytes() for name, entry in checkpoint.tree.items()}


def accepted(path: Path, *codes: str) -> Checkpoint:
    """The checkpoint, which has the right values and these notes."""
    checkpoint = read(path)
    assert bytes_by_name(checkpoint) == EXPECTED
    assert {note.code for note in checkpoint.notes} == set(codes)
    return checkpoint


def python_sees(data: bytes, name: str) -> bytes:
    """What Python's zipfile reads."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(name)


def torch_sees(path: Path) -> dict[str, bytes]:
    return {name: bytes(tensor.numpy()) for name, tensor in load(path).items()}


def at(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


def block_state() -> dict[str, Any]:
    """Tensors of one size, as a transformer's blocks have: where one record can pass for another."""
    torch.manual_seed(0)
    return {f"l{i}.w": torch.randn(4, 3) for i in range(12)} | {"big": torch.randn(40)}


PLAIN = torch_bytes({"model": block_state(), "epoch": 3})


# Layouts --------------------------------------------------------------------------------------------------------------
# Zip archives laid out field by field, honest and not.
# `build` writes what it is told, lies included. `any_layout` draws records in any order, with gaps, duplicates,
# overlaps, sizes that lie, comments, prefixes and odd flags; most are nearly right, as hostile files are.


Put = Callable[..., Path]  # the fixture `put`


def records_of(data: bytes) -> dict[str, bytes]:
    """The records of an honest archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


RECORDS = records_of(FILE)


@dataclass(frozen=True)
class Entry:
    """One record as it is written. What is None is what is true; `*_local` is what its own header says instead.

    descriptor: `none`, `signed`, `bare` (without signature), `wide` (64-bit) or `wide-bare`.  at: the header's offset
    in the directory.
    """

    name: bytes
    content: bytes
    method: int = 0
    flags: int = 0x0800
    descriptor: str = "none"
    crc: int | None = None
    stored: int | None = None
    size: int | None = None
    at: int | None = None
    name_local: bytes | None = None
    method_local: int | None = None
    flags_local: int | None = None
    crc_local: int | None = None
    stored_local: int | None = None
    size_local: int | None = None
    crc_descriptor: int | None = None
    extra_local: bytes = b""
    extra: bytes = b""
    note: bytes = b""
    needed: int = 20
    made: int = 20
    disk: int = 0
    attributes: int = 0
    before: bytes = b""
    listed: int = 1  # times in the directory
    packed: bool = False  # the content is deflated already

    @property
    def raw(self) -> bytes:
        if self.method != 8 or self.packed:
            return self.content
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        return packer.compress(self.content) + packer.flush()


@dataclass(frozen=True)
class Layout:
    """An archive: records in the order of the file, the directory's order (by index), and what stands around them."""

    entries: tuple[Entry, ...]
    order: tuple[int, ...] | None = None
    prefix: bytes = b""
    shift: int = 0  # added to every offset
    gap: bytes = b""  # before the directory
    gap_end: bytes = b""  # behind it
    comment: bytes = b""
    trailing: bytes = b""
    zip64: bool = False
    count: int | None = None
    directory_size: int | None = None
    directory_at: int | None = None
    disk: int = 0

    def build(self) -> bytes:
        body, places = bytearray(self.prefix), []
        for entry in self.entries:
            body += entry.before
            places.append(len(body) + self.shift)
            body += _record(entry)
        body += self.gap
        at = len(body)
        order = self.order if self.order is not None else tuple(range(len(self.entries)))
        directory = b"".join(_entry(self.entries[i], places[i]) * self.entries[i].listed for i in order)
        count = sum(self.entries[i].listed for i in order) if self.count is None else self.count
        size = len(directory) if self.directory_size is None else self.directory_size
        offset = at + self.shift if self.directory_at is None else self.directory_at
        body += directory + self.gap_end
        if self.zip64:
            place = len(body) + self.shift
            body += END64.pack(b"PK\x06\x06", END64.size - 12, 45, 45, self.disk, self.disk, count, count, size, offset)
            body += LOCATOR.pack(b"PK\x06\x07", self.disk, place, 1 + self.disk)
        narrow = (min(count, 0xFFFF), min(size, 0xFFFFFFFF), min(offset, 0xFFFFFFFF))
        body += END.pack(
            b"PK\x05\x06", self.disk, self.disk, narrow[0], narrow[0], narrow[1], narrow[2], len(self.comment)
        )
        return bytes(body) + self.comment + self.trailing


def _record(entry: Entry) -> bytes:
    raw = entry.raw
    crc, stored, size = zlib.crc32(entry.content), len(raw), len(entry.content)
    streamed = entry.descriptor != "none"
    name = entry.name if entry.name_local is None else entry.name_local
    flags = (entry.flags | 8 if streamed else entry.flags) if entry.flags_local is None else entry.flags_local
    own = [0, 0, 0] if streamed else [crc, stored, size]
    for i, value in enumerate((entry.crc_local, entry.stored_local, entry.size_local)):
        own[i] = own[i] if value is None else value
    method = entry.method if entry.method_local is None else entry.method_local
    head = LOCAL.pack(b"PK\x03\x04", entry.needed, flags, method, 0, 0, *own, len(name), len(entry.extra_local))
    tail = b""
    if streamed:
        said = crc if entry.crc_descriptor is None else entry.crc_descriptor
        tail = struct.pack("<I2Q" if "wide" in entry.descriptor else "<3I", said, stored, size)
        tail = tail if "bare" in entry.descriptor else b"PK\x07\x08" + tail
    return head + name + entry.extra_local + raw + tail


def _entry(entry: Entry, place: int) -> bytes:
    crc = zlib.crc32(entry.content) if entry.crc is None else entry.crc
    stored = len(entry.raw) if entry.stored is None else entry.stored
    size = len(entry.content) if entry.size is None else entry.size
    flags = entry.flags | 8 if entry.descriptor != "none" else entry.flags
    at = place if entry.at is None else entry.at
    return (
        CENTRAL.pack(
            b"PK\x01\x02", entry.made, entry.needed, flags, entry.method, 0, 0, crc, stored, size, len(entry.name),
            len(entry.extra), len(entry.note), entry.disk, 0, entry.attributes, at,
        )
        + entry.name + entry.extra + entry.note
    )  # fmt: skip


def honest(**changes: object) -> Layout:
    """The small checkpoint, as another program zips it."""
    return replace(Layout(tuple(Entry(name.encode(), data) for name, data in RECORDS.items())), **changes)  # type: ignore[arg-type]


def with_entry(record: str, /, **changes: object) -> Layout:
    """The small checkpoint, with one record changed (`data.pkl`, `data/0`)."""
    return changed(honest(), "archive/" + record, **changes)


def changed(layout: Layout, record: str, /, **changes: object) -> Layout:
    entries = [
        replace(entry, **changes) if entry.name == record.encode() else entry  # type: ignore[arg-type]
        for entry in layout.entries
    ]
    assert entries != list(layout.entries), record
    return replace(layout, entries=tuple(entries))


def with_more(*more: Entry) -> Layout:
    layout = honest()
    return replace(layout, entries=(*layout.entries, *more))


# Any layout ----------------------------------------------------------------------------------------------------------

_BYTES = (b"", b"\0" * 4, b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"PK\x01\x02", b"0123456789abcdef")
_SMALL = (0, 1, 4, 8, 12, 13, 30, 46, 64, 4096, 0xFFFF, 0xFFFFFFFE, 0xFFFFFFFF)
_NAMES = (
    *map(str.encode, RECORDS), b"archive/DATA.PKL", b"archive/data/00", b"archive/data/0\0.txt", b"archive/data.pkl\0",
    b"archive\\data.pkl", b"./archive/data.pkl", b"archive//data.pkl", b"other/data.pkl", b"archive/data.pkl/", b"",
    b"../x", b"archive/", b"C:\\x", b"archive/\xff\xfe", b"archive/constants.pkl", b"archive/code/x.py",
    "archive/däta.pkl".encode(), b"archive/.data/version", b"archive/data/0/", b"a" * 300,
)  # fmt: skip
_FIELDS = tuple(
    struct.pack("<2H", kind, len(raw)) + raw
    for kind, raw in (
        *((0x4246, raw) for raw in _BYTES),
        *((1, struct.pack("<3Q", *sizes)[:size]) for sizes in ((12,) * 3, (0, 1, 1 << 33)) for size in (8, 16, 20, 24)),
        *((0x7075, struct.pack("<BI", 1, zlib.crc32(b"archive/data/0")) + name) for name in (b"archive/data/1", b"x")),
    )
)
_METHODS, _FLAGS = (0, 8, 12, 99), (0, 8, 0x0800, 0x0801, 0x0808, 0x0820, 0x0840, 0x2800, 0x0806)
_TWISTS: dict[str, tuple[object, ...]] = {
    "content": _BYTES,
    "method": _METHODS,
    "flags": _FLAGS,
    "descriptor": ("none", "signed", "bare", "wide", "wide-bare"),
    **dict.fromkeys(
        ("crc", "stored", "size", "at", "crc_local", "stored_local", "size_local", "crc_descriptor"), _SMALL
    ),
    "name": _NAMES,
    "name_local": _NAMES,
    "method_local": _METHODS,
    "flags_local": _FLAGS,
    "extra_local": (*_FIELDS, b"x"),
    "extra": (*_FIELDS, b"x"),
    "note": _BYTES,
    "needed": (0, 10, 20, 45, 63),
    "made": (0, 0x0314, 0x031E),
    "disk": (0, 0, 1, 0xFFFF),
    "attributes": (0, 0o120777 << 16, 0x10),
    "before": _BYTES,
    "listed": (0, 1, 2),
}
_AROUND: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("prefix", "gap", "gap_end", "comment", "trailing"), _BYTES), "shift": (0, 4, 16, 22),
    "count": (*range(11), *_SMALL), "directory_size": _SMALL, "directory_at": _SMALL, "disk": (0, 1),
}  # fmt: skip


def any_layout(rng: random.Random, layout: Layout | None = None) -> Layout:
    """A layout of the small checkpoint, or of other records, with at most four things that are odd or wrong."""
    layout = layout or honest()
    entries = list(layout.entries)
    if rng.random() < 0.3:
        rng.shuffle(entries)
    if rng.random() < 0.5:
        kind = rng.choice(("none", "signed", "bare", "wide", "wide-bare"))
        entries = [replace(entry, descriptor=kind) for entry in entries]
    for _ in range(rng.randrange(4)):
        place, what = rng.randrange(len(entries)), rng.choice([*_TWISTS, "again", "another"])
        if what == "again":
            entries.insert(rng.randrange(len(entries)), replace(entries[place], content=rng.choice(entries).content))
        elif what == "another":
            entries.insert(rng.randrange(len(entries)), Entry(rng.choice(_NAMES), rng.choice(_BYTES)))
        else:
            entries[place] = replace(entries[place], **{what: rng.choice(_TWISTS[what])})  # type: ignore[arg-type]
    order = tuple(rng.sample(range(len(entries)), len(entries))) if rng.random() < 0.2 else None
    layout = replace(layout, entries=tuple(entries), order=order, zip64=rng.random() < 0.5)
    if rng.randrange(4) == 0:
        what = rng.choice([*_AROUND])
        layout = replace(layout, **{what: rng.choice(_AROUND[what])})  # type: ignore[arg-type]
    return layout


# Arrays ---------------------------------------------------------------------------------------------------------------
# Archives of arrays and bare pickles, as numpy and Python write them, and what numpy reads.


SAVERS = {"stored": np.savez, "deflated": np.savez_compressed}


each_saver = pytest.mark.parametrize("how", SAVERS)


def sample_arrays() -> dict[str, Any]:
    return {
        "w": np.arange(12, dtype="f4").reshape(3, 4), "W": np.ones((2, 3), ">f8"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "scalar": np.float32(3),
        "empty": np.zeros((0, 3)), "truths": np.array([True, False]), "complex": np.array([1 + 2j], "c8"),
        "layer/0/kernel": np.arange(5, dtype="u2"), "ключ": np.arange(3, dtype="i8"),
        "large": np.arange(100_000, dtype="i8"),
    }  # fmt: skip


def numpy_file(path: Path, how: str = "stored", **contents: Any) -> Path:
    SAVERS[how](path, **contents)
    return path


def numpy_sees(path: Path, **options: Any) -> dict[str, Any]:
    """What numpy itself loads; a warning is an error."""
    with np.load(path, **options) as opened:
        return {name: opened[name] for name in opened.files}


def same_bits(found: Any, expected: Any) -> bool:
    expected = np.asarray(expected)
    native = expected.astype(expected.dtype.newbyteorder("="))
    return found.dtype == native.dtype and found.shape == native.shape and found.tobytes() == native.tobytes()


each = pytest.mark.parametrize("protocol", range(6))


def pickle_to(value: Any, path: Path, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def arrays_model() -> dict[str, np.ndarray[Any, Any]]:
    """Arrays below and above the size from which they stay in the file, of several kinds."""
    rng = np.random.default_rng(0)
    large = rng.integers(0, 256, 300_000, dtype="u1")
    return {
        "small.weight": rng.standard_normal((3, 4), dtype="f4"),
        "large.weight": rng.standard_normal((200, 300)),
        "fortran.weight": np.asfortranarray(rng.standard_normal((200, 300), dtype="f4")),
        "turned.weight": np.arange(50_000, dtype=">i4"),
        "bytes.weight": large,
        "tied.weight": large,
        "zeros.weight": np.zeros(100_000, "f2"),
        "scalar": np.array(1.5),
        "empty": np.zeros((0, 5), "i8"),
        "truths": np.array([True, False]),
        "complex": np.array([1 + 2j]),
    }
