"""`torch-zip`: what `torch.save` writes since 1.6, a zip of a pickle and one stored record for each storage.

Source: torch/serialization.py (`_save`, `_load`) and caffe2/serialize/inline_container.cc, torch 1.6 to 2.13. A new file has the
root folder `archive`; a copied one keeps its own. Records are copied whole, headers included, wherever they move by a multiple
of the alignment, so that a rename is one new pickle and one long range of the old file.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import (
    Checkpoint,
    Computed,
    Crc,
    Data,
    FileRange,
    Late,
    Literal,
    Note,
    Plan,
    Segment,
    Storage,
    StorageRef,
    Summed,
)
from ckptool.dtypes import DType
from ckptool.errors import Ambiguous, Conflict, Corrupt, NotACheckpoint, Unsupported, printable
from ckptool.files import Input, Source
from ckptool.formats import zip_archive, zip_parts
from ckptool.formats.zip_archive import Archive, Record
from ckptool.nodes import Global
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
from ckptool.pickles.torch_objects import BUILDERS, storage_class
from ckptool.tree import refuse_unknown_calls

NAME = "torch-zip"
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pt2", ".tar", ".pkl", ".model", ".th")
ALIGNMENT = 64
MAX_SMALL = 1 << 16
_SMALL = ("byteorder", ".storage_alignment", ".format_version", "version")


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What a torch zip remembers of its file: the directory, its root folder, and how its data is aligned."""

    archive: Archive
    root: str
    alignment: int

    def record_of(self) -> dict[int, Record]:
        """The record that a storage's data is, by the id of the data."""
        return {id(record.data): record for record in self.archive.records.values() if record.is_used}


def detect(head: bytes, source: Input) -> bool:
    return head[:4] in (b"PK\x03\x04", b"PK\x05\x06")


def read(source: Source) -> Checkpoint:
    """The checkpoint in a torch zip. Reads the directory and the pickle, no tensor data.

    Raises `NotACheckpoint` for another kind of zip, `Unsupported` for TorchScript, and what `read_archive` and `decode` raise.
    """
    archive = zip_archive.read_archive(source)
    pickle = _find_pickle(archive)
    root = pickle.name.removesuffix("data.pkl")
    _refuse_other_kinds(archive, root)
    small = {name: _small_record(archive, root + name) for name in _SMALL}
    if small["byteorder"] not in (None, "little", "big"):
        raise Corrupt(f"{source}: its byteorder record says {printable(str(small['byteorder']))!r}")
    limit = min(max(4 << 20, 16 * pickle.stored), zip_archive.MAX_INFLATED)
    storages = _Storages(archive, root, big_endian=small["byteorder"] == "big")
    data = pickle.contents(limit)
    decoded = decode(data, storages.load, BUILDERS, name=f"{source}: data.pkl", file_bytes=source.size)
    if decoded.end != len(data):
        raise Ambiguous(
            f"{source}: data.pkl has {len(data) - decoded.end:,} bytes after its end",
            "Another pickle may be hidden there.",
        )
    alignment = _alignment(source, small[".storage_alignment"])
    # Of a big-endian file nothing can be copied as it is: it is written as if it came from elsewhere.
    origin = None if storages.big_endian else Origin(archive, root, alignment)
    notes = (*archive.notes, *_notes(archive, root, storages))
    metadata = {name: text for name, text in small.items() if text is not None}
    return Checkpoint(decoded.root, NAME, metadata, source, origin, notes, decoded.discarded)


def _find_pickle(archive: Archive) -> Record:
    pickles = [
        record for name, record in archive.records.items() if name.endswith("/data.pkl") and name.count("/") == 1
    ]
    if len(pickles) > 1:
        names = " and ".join(str(record) for record in pickles)
        raise Ambiguous(
            f"{archive.source} holds two checkpoints ({names})", "Readers would disagree which of them it is."
        )
    if not pickles:
        if "model.json" in {name.rpartition("/")[2] for name in archive.records}:
            raise Unsupported(
                f"{archive.source} is a model of torch 1.0's first script format (model.json)",
                "It holds no pickle to read.",
            )
        raise NotACheckpoint(
            f"{archive.source} is a zip archive, but not a PyTorch checkpoint",
            "A checkpoint has a data.pkl in its one folder.",
            f"See what is in it: unzip -l {archive.source}",
        )
    return pickles[0]


def _refuse_other_kinds(archive: Archive, root: str) -> None:
    """Says by name what else torch writes into zips with a data.pkl."""
    if outside := [name for name in archive.records if not name.startswith(root)]:
        raise Ambiguous(
            f"{archive.source} has records outside its folder {root}: {printable(outside[0])}",
            "A checkpoint has one folder.",
        )
    if root + "constants.pkl" in archive.records or any(name.startswith(root + "code/") for name in archive.records):
        raise Unsupported(
            f"{archive.source} is a TorchScript archive, whatever its name says",
            "It holds a program beside its tensors; this version reads plain checkpoints.",
            "With torch: torch.save(torch.jit.load(FILE, map_location='cpu').state_dict(), 'weights.pt')",
        )
    if any(name.startswith(root + ".data/extern") for name in archive.records):
        raise Unsupported(f"{archive.source} is a torch.package archive", "It holds source code beside its tensors.")


def _small_record(archive: Archive, name: str) -> str | None:
    record = archive.records.get(name)
    return record.contents(MAX_SMALL).decode("utf-8", "replace").strip() if record is not None else None


def _alignment(source: Source, text: str | None) -> int:
    if text is None:
        return ALIGNMENT
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1 << 15:
        raise Corrupt(f"{source}: its .storage_alignment record says {printable(text[:40])!r}")
    return int(text)


class _Storages:
    """Gives the storage for a persistent id: one `Storage` for each record, whatever the number of tensors that share it."""

    def __init__(self, archive: Archive, root: str, big_endian: bool) -> None:
        self.archive, self.prefix, self.big_endian = archive, root + "data/", big_endian
        self.by_class: dict[Global, dict[str, StorageRef]] = {}

    def load(self, pid: Any) -> StorageRef:
        """The storage that `("storage", class, key, location, number of elements)` names."""
        try:
            tag, cls, key, location, numel = pid
            ref = self.by_class[cls].get(key)
        except (KeyError, TypeError, ValueError):
            tag, cls, key, location, numel = self._checked(pid)
            ref = None
        if ref is None or tag != "storage":
            return self._first(*self._checked(pid)[1:])
        if location != ref.storage.location or numel * _width(ref.dtype) != ref.storage.data.length:
            raise self._contradiction(key)
        return ref

    @staticmethod
    def _checked(pid: Any) -> tuple[Any, ...]:
        if type(pid) is tuple and len(pid) == 5:
            tag, cls, key, location, numel = pid
            texts = type(key) is str and type(location) is str
            if tag == "storage" and type(cls) is Global and texts and type(numel) is int:
                return pid
        raise Corrupt("a persistent id that names no storage", "torch writes one for each storage, for nothing else.")

    def _first(self, cls: Global, key: str, location: str, numel: int) -> StorageRef:
        known, dtype = storage_class(cls)
        if not known:
            raise Unsupported(
                f"the storage {printable(key)} has the unknown type {cls}", "Its elements cannot be told."
            )
        record = self.archive.records.get(self.prefix + key)
        if record is None:
            what = f"the storage {printable(key)} has no record {printable(self.prefix + key)} in the archive"
            raise Corrupt(what, "Its data is not in the file.")
        if numel < 0 or numel * _width(dtype) != record.size:
            what = f"the storage {printable(key)} should have {numel} elements; its record {record} has {record.size:,} bytes"
            raise Corrupt(what, "The file was cut and mended, or its pickle is of another file.")
        storage = self._known(key, location, dtype) if record.is_used else None
        if storage is None:
            crc = record.crc if self.archive.has_checksums else None
            storage = Storage(record.data, location, crc)
            if self.big_endian:
                storage = _turned(storage, dtype)
        ref = self.by_class.setdefault(cls, {})[key] = StorageRef(storage, dtype)
        return ref

    def _known(self, key: str, location: str, dtype: DType | None) -> Storage | None:
        """The storage that another storage class was given for the same record: uint8 and float8 views of one storage do that."""
        for refs in self.by_class.values():
            ref = refs.get(key)
            if ref is not None:
                bytes_only = all(kind is None or kind.name == "u8" for kind in (ref.dtype, dtype))
                if ref.storage.location != location or not bytes_only:
                    raise self._contradiction(key)
                return ref.storage
        return None

    @staticmethod
    def _contradiction(key: str) -> Corrupt:
        return Corrupt(
            f"the storage {printable(key)} is described in two ways", "Readers would disagree which is right."
        )


def _turned(storage: Storage, dtype: DType | None) -> Storage:
    """A storage of a big-endian file with its elements in this machine's order."""
    if dtype is None:
        what = "an untyped storage in a big-endian file"
        raise Unsupported(what, "How wide its elements are, and so how to turn them, is not recorded.")
    return storage if dtype.itemsize == 1 else Storage(swapped(storage, dtype), storage.location)


def swapped(storage: Storage, dtype: DType) -> Computed:
    """The same elements in the other byte order."""
    data, width = storage.data, dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize

    def read(offset: int, length: int) -> bytes:
        begin, end = offset - offset % width, min(-(-(offset + length) // width) * width, data.length)
        raw = data.read(begin, end - begin)
        turned = bytearray(len(raw))
        for i in range(width):
            turned[i::width] = raw[width - 1 - i :: width]
        return bytes(turned[offset - begin : offset - begin + length])

    return Computed(data.length, read, (storage,))


def _width(dtype: DType | None) -> int:
    return dtype.itemsize if dtype is not None else 1


def _notes(archive: Archive, root: str, storages: _Storages) -> list[Note]:
    notes = []
    compact = ("ckptool", "convert", "{file}", "-o", "{out}")
    unused = [r for name, r in archive.records.items() if not r.is_used and name.startswith(root + "data/")]
    if unused:
        size = sum(record.stored for record in unused)
        notes.append(
            Note("unused-record", f"{len(unused):,} records with {size:,} bytes are used by no tensor", compact)
        )
    if any(record.method for record in archive.records.values()):
        notes.append(Note("deflated", "re-zipped with compression: torch cannot map it (mmap=True)", compact))
    if archive.records and not archive.has_checksums:
        notes.append(
            Note("no-checksums", "the archive stores no checksums: damage to its data cannot be noticed", compact)
        )
    if storages.big_endian:
        notes.append(Note("big-endian", "written on a big-endian machine", compact))
    return notes


# Writing -------------------------------------------------------------------------------------------------------------


def write(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
    """The plan of a torch zip with this tree. Records of the file that it was read from are copied as they are.

    Raises `UnsafeObject` for calls of unknown functions unless `keep_unknown`.
    """
    refuse_unknown_calls(checkpoint, keep_unknown)
    layout = _Layout(checkpoint.origin if isinstance(checkpoint.origin, Origin) else None)
    pickle = encode(checkpoint.tree, layout.key_of)
    layout.add("data.pkl", Literal(pickle))
    if layout.origin is None:
        _lay_out_new(layout, zlib.crc32(pickle))
    else:
        for record in layout.origin.archive.by_offset():
            layout.copy(record)
        layout.add_fresh()
    return layout.finish()


def _lay_out_new(layout: _Layout, pickle_crc: int) -> None:
    layout.add(".format_version", Literal(b"1"))
    layout.add(".storage_alignment", Literal(str(ALIGNMENT).encode()))
    layout.add("byteorder", Literal(b"little"))
    layout.add_fresh()
    layout.add("version", Literal(b"3\n"))
    # 40 digits that name the contents, as torch's do (another hash: it is compared with nothing).
    sums = b"".join((storage.crc or 0).to_bytes(4, "little") for _, storage in layout.fresh)
    layout.add(".data/serialization_id", Literal(f"{pickle_crc:020d}{zlib.crc32(sums):020d}".encode()))


def append(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan | None:
    """The plan of the same change made inside the file: a new pickle and directory behind the old ones.

    None where it cannot or should not be: the tree came from another container, or much of the data is new.
    """
    origin = checkpoint.origin
    if not isinstance(origin, Origin):
        return None
    refuse_unknown_calls(checkpoint, keep_unknown)
    archive = origin.archive
    if archive.edits >= zip_archive.MAX_EDITS:
        raise Conflict(
            f"{archive.source} was edited in place {archive.edits} times already",
            "Every edit leaves its old pickle and directory inside; it is time to write the file anew.",
            f"ckptool convert {archive.source} -o NEW.pt",
        )
    layout = _Layout(origin, begin=archive.end)
    layout.add("data.pkl", Literal(encode(checkpoint.tree, layout.key_of)))
    if 4 * sum(storage.nbytes for _, storage in layout.fresh) > archive.end:
        return None  # the old values would stay inside beside the new ones: a new file is the better place
    layout.add_fresh()
    for record in archive.by_offset():
        if record.name != f"{origin.root}data.pkl":
            layout.enter_moved(record, record.header)
    plan = layout.finish()
    return Plan(plan.files, keep=archive.end, guard=zip_archive.guard(archive.end_records), guard_every=GUARD_EVERY)


# torch looks for the end records in the last 69,562 bytes, Python's zipfile in the last 65,557.
GUARD_EVERY = 65_000


class _Layout:
    """Lays records out one after the other; knows each one's place, and so the directory, before a byte is written."""

    def __init__(self, origin: Origin | None, begin: int = 0) -> None:
        self.origin = origin
        self.records = origin.record_of() if origin else {}
        self.root = origin.root if origin else "archive/"
        self.alignment = origin.alignment if origin else ALIGNMENT
        # Appended to an archive without checksums, a record has none either: one alone would say that the zeros of the others count.
        self.checksums = not begin or origin is None or origin.archive.has_checksums
        self.at = begin
        self.segments: list[Segment | _NewRecord] = []
        self.entries: list[bytes | _NewRecord] = []  # of the directory
        self.directory_size = 0
        self.keys: dict[int, str] = {}  # id of a Storage -> its key
        self.fresh: list[tuple[str, Storage]] = []
        self.used: set[Record] = set()
        self.taken = {name.removeprefix(self.root + "data/") for name in origin.archive.records} if origin else set()
        self.numbers = itertools.count()

    def key_of(self, storage: Storage) -> str:
        """The key of a storage: its old record's, as long as no other storage claimed that (two that were made different stay so)."""
        key = self.keys.get(id(storage))
        if key is None:
            record = self.records.get(id(storage.data))
            if record is None or record in self.used:
                key = next(key for n in self.numbers if (key := str(n)) not in self.taken)
                self.fresh.append((key, storage))
            else:
                self.used.add(record)
                key = record.name.removeprefix(self.root + "data/")
            self.keys[id(storage)] = key
        return key

    def add(self, name: str, data: Data, crc: int | None = None) -> None:
        """A record of our own under the root, with the header and descriptor that torch would write. `crc`, if known, is checked."""
        name = self.root + name
        total = Crc(zlib.crc32(data.content)) if isinstance(data, Literal) else Crc(expected=crc, name=name)
        record = _NewRecord(self, name, data, self.at, total)
        self.segments.append(record)
        self.entries.append(record)
        self.directory_size += len(record.entry())
        self.at += sum(segment.length for segment in record.segments())

    def copy(self, record: Record) -> None:
        """A record of the old file, unless the tree no longer uses it: whole where it moves by a multiple of the alignment."""
        archive, name = record.archive, record.name.removeprefix(self.root)
        if name == "data.pkl" or (name.startswith("data/") and record not in self.used):
            return
        fits = record.wide or not zip_parts.needs_zip64(record.size, self.at)
        aligned = (self.at - record.header) % self.alignment == 0
        if fits and aligned and not record.method and archive.has_checksums:
            self.segments.append(FileRange(archive.source, record.header, record.end - record.header, record.confirm))
            self.enter_moved(record, self.at)
            self.at += record.end - record.header
        else:
            self.add(name, record.data, record.crc if archive.has_checksums else None)

    def enter_moved(self, record: Record, at: int) -> None:
        """The directory's line for a record of the old file, which is (or will be) at byte `at`."""
        entry = zip_parts.moved_entry(record, at)
        self.entries.append(entry)
        self.directory_size += len(entry)

    def add_fresh(self) -> None:
        """The storages that the old file does not have, in the order in which the tree mentions them."""
        for key, storage in self.fresh:
            self.add(f"data/{key}", storage.data, storage.crc)

    def finish(self) -> Plan:
        entries, size = self.entries, self.directory_size

        def directory() -> bytes:
            return b"".join(entry if isinstance(entry, bytes) else entry.entry() for entry in entries)

        self.segments.append(Late(size, directory))
        self.segments.append(Literal(zip_parts.end_records(len(entries), self.at, size)))
        return Plan({"": _Segments(self.segments)})


class _NewRecord:
    """A record of our own. What stands around its data is made when it is asked for: a layout may have 50,000 of them."""

    __slots__ = ("at", "data", "layout", "name", "total")

    def __init__(self, layout: _Layout, name: str, data: Data, at: int, total: Crc) -> None:
        self.layout, self.name, self.data, self.at, self.total = layout, name, data, at, total

    @property
    def crc(self) -> int:
        return self.total.value if self.layout.checksums else 0

    def segments(self) -> Iterator[Segment]:
        """Header, data and descriptor; the last can only be made when the data has passed."""
        size = self.data.length
        yield Literal(zip_parts.local_header(self.name, self.at, size, self.layout.alignment))
        if isinstance(self.data, Literal):
            yield self.data
            yield Literal(self.descriptor())
        else:
            yield Summed(self.data, self.total)
            yield Late(len(self.descriptor()), self.descriptor)

    def descriptor(self) -> bytes:
        return zip_parts.descriptor(self.crc, self.data.length, self.at)

    def entry(self) -> bytes:
        """Its line in the directory."""
        return zip_parts.central_entry(self.name, self.crc, self.data.length, self.at)


class _Segments:
    """The segments of a layout, those of new records made in passing."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Segment | _NewRecord]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Segment]:
        for part in self.parts:
            if isinstance(part, _NewRecord):
                yield from part.segments()
            else:
                yield part
