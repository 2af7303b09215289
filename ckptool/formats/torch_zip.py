"""`torch-zip`: what `torch.save` writes since 1.6, a zip of a pickle and one stored record for each storage.

Source: torch/serialization.py (`_save`, `_load`) and caffe2/serialize/inline_container.cc, torch 1.6 to 2.13. A new
file has the root folder `archive`; a copied one keeps its own. Records are copied whole, headers included, wherever
they move by a multiple of the alignment, so that a rename is one new pickle and one long range of the old file.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Checkpoint, Data, FileRange, InlineBytes, Note, Storage, StorageRef
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.files import Input, Readable
from ckptool.checkpoint.nodes import Global
from ckptool.checkpoint.plan import Plan
from ckptool.checkpoint.strided import swapped
from ckptool.commands import FILE, OUT, command
from ckptool.errors import Ambiguous, CkptoolError, Conflict, Corrupt, Unsupported, counted, form
from ckptool.formats import marks
from ckptool.formats.nested_streams import BUILDERS
from ckptool.formats.zip import directory
from ckptool.formats.zip.directory import Archive, guard
from ckptool.formats.zip.record import Record
from ckptool.pickles.builders import Builder
from ckptool.pickles.calls import refuse_unknown
from ckptool.pickles.decode import Decoded, decode, protocol_notes
from ckptool.pickles.torch_objects import storage_class

NAME = "torch-zip"
ALIGNMENT = 64
MAX_SMALL = 1 << 16
MAX_VERSION = 99  # torch 2.13 reads up to 10
_SMALL = ("byteorder", ".storage_alignment", ".format_version", "version")


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The file that a torch zip was read from: its directory, its root folder, the alignment of its data."""

    archive: Archive
    root: str
    alignment: int

    def record_of(self) -> dict[int, Record]:
        """The record that a storage's data is, by the id of the data."""
        return {id(record.data): record for record in self.archive.records.values() if record.is_used}


def detect(head: bytes, source: Input) -> bool:
    return head[:4] in (b"PK\x03\x04", b"PK\x05\x06")


def read(source: Readable) -> Checkpoint:
    """The checkpoint in a torch zip. Reads the directory and the pickle, no tensor data.

    Raises `NotACheckpoint` for another kind of zip, `Unsupported` for TorchScript, and what `read_archive` and `decode`
    raise.
    """
    archive = directory.read_archive(source)
    pickle = find_pickle(archive)
    root = pickle.name.removesuffix("data.pkl")
    # A checkpoint with the records of a program: `torch.load` sees one thing, `torch.jit.load` the other.
    if root + "constants.pkl" in archive.records or any(name.startswith(root + "code/") for name in archive.records):
        what = f"{archive.source} is a checkpoint that has records of a TorchScript program as well"
        raise Ambiguous(what, "torch.load and torch.jit.load would see two different things in it.")
    small = small_records(archive, root)
    storages = RecordStorages(archive, root + "data/", big_endian=small["byteorder"] == "big")
    decoded = decoded_record(pickle, storages)
    confirm_the_rest(archive)
    alignment = _alignment(source, small[".storage_alignment"])
    # Of a big-endian file nothing can be copied as it is: it is written as if it came from elsewhere.
    origin = None if storages.big_endian else Origin(archive, root, alignment)
    odd = (*archive.notes, *record_notes(archive, root, storages))
    notes = (*odd, *decoded.notes, *protocol_notes(decoded.protocol))
    metadata = {name: text for name, text in small.items() if text is not None}
    if (mark := _mark_in(archive, root)) is not None:
        metadata[marks.RECOVERED] = mark
        notes += marks.recovered_notes(metadata)
    tree = decoded.root
    if (shared := archive.records.get(root + marks.DEDUPLICATED_RECORD)) is not None:
        tree, told = marks.separated(tree, shared.contents(marks.MAX_DEDUPLICATED))
        notes += tuple(told)
    return Checkpoint(tree, NAME, metadata, source.file, origin, notes, decoded.discarded)


def find_pickle(archive: Archive) -> Record:
    """The one `data.pkl` of an archive; raises `Ambiguous` for two, and says what else a zip without one is."""
    pickles = [
        record for name, record in archive.records.items() if name.endswith("/data.pkl") and name.count("/") == 1
    ]
    if len(pickles) > 1:
        names = " and ".join(str(record) for record in pickles)
        raise Ambiguous(
            f"{archive.source} holds two checkpoints ({names})", "Readers would disagree about which of them it is."
        )
    if not pickles:
        if other := next((name for name in archive.records if name.lower().endswith("/data.pkl")), None):
            what = f"{archive.source} has no data.pkl, but {other}"
            raise Ambiguous(what, "torch takes it for one, other readers do not.")
        raise _other_zip(archive)
    root = pickles[0].name.removesuffix("data.pkl")
    if f"{root}.data/extern_modules" in archive.records:
        raise _other_zip(archive)
    if outside := [name for name in archive.records if not name.startswith(root)]:
        raise Ambiguous(
            f"{archive.source} has records outside its folder {root}: {outside[0]}",
            "A checkpoint has one folder; torch refuses what has more, other readers do not.",
        )
    return pickles[0]


def _other_zip(archive: Archive) -> CkptoolError:
    from ckptool.formats.unrecognized import other_zip

    return other_zip(archive.source, archive.records)


def confirm_the_rest(archive: Archive) -> None:
    """Looks at the headers of the records that nothing has asked for: another reader may be asked for them."""
    for record in archive.records.values():
        if not record.is_used:
            record.confirm()


def small_records(archive: Archive, root: str) -> dict[str, str | None]:
    """The short records on how an archive was written; raises `Corrupt` for an unknown byte order or version."""
    for record in archive.records.values():
        if record.name.count("/") == 1:
            record.confirm()  # under another name in its own header, it would say something to one reader alone
    small = {name: _small_record(archive, root + name) for name in _SMALL}
    version, other = small["version"], _small_record(archive, root + ".data/version")
    if None not in (version, other) and version != other:
        what = f"{archive.source} has two version records that disagree"
        raise Ambiguous(what, "Some versions of torch read the one, some the other.")
    version = version or other
    if version is None:
        raise Corrupt(f"{archive.source}: it has no record {root}version", "torch refuses such a file.")
    if not version.isascii() or not version.isdigit() or not 1 <= int(version[:9]) <= MAX_VERSION:
        raise Corrupt(f"{archive.source}: its version record says {version[:40]!r}")
    order = archive.records.get(f"{root}byteorder")
    if order is not None and order.contents(MAX_SMALL) not in (b"little", b"big"):  # torch compares the bytes
        said = order.contents(MAX_SMALL).decode("utf-8", "replace")
        raise Corrupt(f"{archive.source}: its byteorder record says {said!r}", "torch refuses such a file.")
    return small


def _small_record(archive: Archive, name: str) -> str | None:
    record = archive.records.get(name)
    return record.contents(MAX_SMALL).decode("utf-8", "replace").strip() if record is not None else None


def inflated_limit(stored: int) -> int:
    """The most bytes that a pickle or program of so many stored ones may have when it is inflated."""
    return min(max(4 << 20, 16 * stored), directory.MAX_INFLATED)


def decoded_record(record: Record, storages: RecordStorages, builders: Mapping[Global, Builder] = BUILDERS) -> Decoded:
    """The pickle in a record; raises `Ambiguous` for bytes after its end, and what `decode` raises."""
    source, name = record.archive.source, record.name.partition("/")[2]
    data = record.contents(inflated_limit(record.stored))
    decoded = decode(data, storages.load, builders, name=f"{source}: {name}", file_bytes=source.size)
    if decoded.end != len(data):
        what = f"{source}: {name} has {len(data) - decoded.end:,} bytes after its end"
        raise Ambiguous(what, "Another pickle may be hidden there.")
    return decoded


def _alignment(source: Readable, text: str | None) -> int:
    if text is None:
        return ALIGNMENT
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= 1 << 15:
        raise Corrupt(f"{source}: its .storage_alignment record says {text[:40]!r}")
    return int(text)


class RecordStorages:
    """Gives the storage for a persistent id: one for each record, whatever the number of tensors that share it.

    prefix: the folder of the records (`archive/data/`).
    """

    def __init__(self, archive: Archive, prefix: str, big_endian: bool) -> None:
        self.archive, self.prefix, self.big_endian = archive, prefix, big_endian
        self.by_class: dict[Global, dict[str, StorageRef]] = {}

    def load(self, pid: Any) -> StorageRef:
        """The storage that `("storage", class, key, location, number of elements)` names.

        The C++ of torch 1.2 to 1.4 wrote view metadata behind, as legacy streams have them: always None.
        """
        try:
            tag, cls, key, location, numel = pid
            ref = self.by_class[cls].get(key)
        except (KeyError, TypeError, ValueError):
            tag, cls, key, location, numel = self._checked(pid)
            ref = self.by_class.get(cls, {}).get(key)
        if ref is None or tag != "storage" or type(numel) is not int:
            return self._first(*self._checked(pid)[1:])
        if location != ref.storage.location or numel * _width(ref.dtype) != ref.storage.data.length:
            raise self._contradiction(key)
        return ref

    @staticmethod
    def _checked(pid: Any) -> tuple[Any, ...]:
        if type(pid) is tuple and (len(pid) == 5 or (len(pid) == 6 and pid[5] is None)):
            tag, cls, key, location, numel = pid[:5]
            texts = type(key) is str and type(location) is str
            if tag == "storage" and type(cls) is Global and texts and type(numel) is int:
                return pid[:5]
        raise Corrupt("a persistent id that names no storage", "torch writes one for each storage, for nothing else.")

    def _first(self, cls: Global, key: str, location: str, numel: int) -> StorageRef:
        known, dtype = storage_class(cls)
        if not known:
            raise Unsupported(f"the storage {key} has the unknown type {cls}", "The size of its elements is unknown.")
        record = self.archive.records.get(self.prefix + key)
        if record is None:
            name = (self.prefix + key)[:200]
            what = f"the storage {key[:200]} has no record {name} in the archive"
            raise Corrupt(what, "Its data is not in the file.")
        if numel < 0 or numel * _width(dtype) != record.size:
            there = f"its record {record} has {record.size:,} bytes"
            what = f"the storage {key} should have {numel} elements; {there}"
            raise Corrupt(what, "The file was patched together, or its pickle belongs to another file.")
        storage = self._known(key, location, dtype) if record.is_used else None
        if storage is None:
            crc = record.crc if self.archive.has_checksums else None
            storage = Storage(record.data, location, crc)
            if self.big_endian:
                data = swapped(storage, dtype)
                storage = storage if data is storage.data else Storage(data, location)
        ref = self.by_class.setdefault(cls, {})[key] = StorageRef(storage, dtype)
        return ref

    def _known(self, key: str, location: str, dtype: DType | None) -> Storage | None:
        """The storage of the same record under another storage class, as uint8 and float8 views of one have it.

        So do views of one storage without bytes, of any types.
        """
        for refs in self.by_class.values():
            ref = refs.get(key)
            if ref is not None:
                bytes_only = all(kind is None or kind.name == "u8" for kind in (ref.dtype, dtype))
                if ref.storage.location != location or not (bytes_only or ref.storage.nbytes == 0):
                    raise self._contradiction(key)
                return ref.storage
        return None

    @staticmethod
    def _contradiction(key: str) -> Corrupt:
        return Corrupt(f"the storage {key} is described in two ways", "Readers would disagree about which is right.")


def _width(dtype: DType | None) -> int:
    return dtype.itemsize if dtype is not None else 1


def record_notes(archive: Archive, root: str, storages: RecordStorages) -> list[Note]:
    """Notes on the records of an archive, once its pickle was read."""
    notes = []
    compact = command("convert", FILE, out=OUT)
    unused = [
        record
        for name, record in archive.records.items()
        if not record.is_used and name.startswith(root + "data/") and not name.endswith("/")  # a folder's own entry
    ]
    if unused:
        size = sum(record.stored for record in unused)
        records = f"{counted(len(unused), 'record')} with {size:,} bytes {form(len(unused), 'is', 'are')}"
        notes.append(Note("unused-record", f"{records} used by no tensor", compact))
    if any(record.method for record in archive.records.values()):
        notes.append(Note("deflated", "re-zipped with compression: torch cannot map it (mmap=True)", compact))
    if archive.records and not archive.has_checksums:
        message = "the archive stores no checksums: damage to its data cannot be noticed"
        notes.append(Note("no-checksums", message, compact))
    if storages.big_endian:
        notes.append(Note("big-endian", "written on a big-endian machine", compact))
    return notes


# Writing -------------------------------------------------------------------------------------------------------------


def write(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
    """The plan of a torch zip with this tree. Records of the file that it was read from are copied as they are.

    Raises `UnsafeObject` for calls of unknown functions unless `keep_unknown`.
    """
    from ckptool.pickles.encode import encode

    refuse_unknown(checkpoint, keep_unknown)
    layout = _Layout(checkpoint.origin if isinstance(checkpoint.origin, Origin) else None)
    layout.add("data.pkl", InlineBytes(encode(checkpoint.tree, layout.key_of)))
    mark, before = checkpoint.metadata.get(marks.RECOVERED), None
    if layout.origin is None:
        _lay_out_new(layout)
    else:
        before = _mark_in(layout.origin.archive, layout.root)
        for record in layout.origin.archive.by_offset():
            if record.name != layout.root + marks.RECOVERED_RECORD or before == mark:
                layout.copy(record)
        layout.add_fresh()
    if mark and mark != before:
        layout.add(marks.RECOVERED_RECORD, InlineBytes(mark.encode()))
    if layout.deduplicated and (shared := marks.deduplicated_record(checkpoint.tree)):
        layout.add(marks.DEDUPLICATED_RECORD, InlineBytes(shared))
    return layout.zip.finish()


def _mark_in(archive: Archive, root: str) -> str | None:
    """The mark of a recovered archive; None for any other."""
    record = archive.records.get(root + marks.RECOVERED_RECORD)
    return record.contents(marks.MAX_RECORD).decode("utf-8", "replace") if record is not None else None


def _lay_out_new(layout: _Layout) -> None:
    layout.add(".format_version", InlineBytes(b"1"))
    layout.add(".storage_alignment", InlineBytes(str(ALIGNMENT).encode()))
    layout.add("byteorder", InlineBytes(b"little"))
    layout.add_fresh()
    layout.add("version", InlineBytes(b"3\n"))
    layout.zip.add_late(f"{layout.root}.data/serialization_id", _ID_DIGITS, _identity)


_ID_DIGITS = 40


def _identity(sums: Sequence[int]) -> bytes:
    """40 digits that name the contents, as torch's do (by another hash). sums: of all records, the pickle first.

    They are those of the bytes that were written, so that the same contents have the same name wherever they came from.
    """
    return f"{sums[0]:020d}{zlib.crc32(b''.join(value.to_bytes(4, 'little') for value in sums)):020d}".encode()


def append(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan | None:
    """The plan of the same change made inside the file: a new pickle and directory behind the old ones.

    None where it cannot or should not be: the tree came from another container, or much of the data is new.
    """
    from ckptool.pickles.encode import encode

    origin = checkpoint.origin
    if not isinstance(origin, Origin):
        return None
    refuse_unknown(checkpoint, keep_unknown)
    archive = origin.archive
    if archive.edits >= directory.MAX_EDITS:
        what = f"{archive.source} was edited in place {archive.edits} times already"
        why = "Every edit leaves its old pickle and directory inside; it is time to write a new file."
        raise Conflict(what, why, command("convert", archive.source.file.path, out=OUT))
    layout = _Layout(origin, begin=archive.end)
    layout.add("data.pkl", InlineBytes(encode(checkpoint.tree, layout.key_of)))
    if layout.deduplicated or origin.root + marks.DEDUPLICATED_RECORD in archive.records:
        return None  # which tensors share a record is written anew with every change
    if 4 * sum(storage.nbytes for _, storage in layout.fresh) > archive.end:
        return None  # the old values would stay inside beside the new ones: a new file is the better place
    layout.add_fresh()
    for record in archive.by_offset():
        if record.name != f"{origin.root}data.pkl":
            layout.zip.enter_moved(record, record.header)
    plan = layout.zip.finish()
    return Plan(plan.files, keep=archive.end, guard=guard(archive.end_records), guard_every=GUARD_EVERY)


# torch looks for the end records in the last 69,562 bytes, Python's zipfile in the last 65,557.
GUARD_EVERY = 65_000


class _Layout:
    """The records of a new archive: those of the old file that are still used, and those of its own."""

    def __init__(self, origin: Origin | None, begin: int = 0) -> None:
        from ckptool.formats.zip.writer import ZipLayout

        self.origin = origin
        self.records = origin.record_of() if origin else {}
        self.root = origin.root if origin else "archive/"
        self.alignment = origin.alignment if origin else ALIGNMENT
        # Appended to an archive without checksums, a record has none either: else the zeros of the others would count.
        checksums = not begin or origin is None or origin.archive.has_checksums
        self.zip = ZipLayout(self.alignment, begin, checksums)
        self.keys: dict[int, str] = {}  # id of a Storage -> its key
        self.deduplicated: dict[tuple[int, str], str] = {}  # the same by data and location
        self.fresh: list[tuple[str, Storage]] = []
        self.used: set[Record] = set()
        self.taken = {name.removeprefix(self.root + "data/") for name in origin.archive.records} if origin else set()
        self.numbers = itertools.count()

    def key_of(self, storage: Storage) -> str:
        """The key of a storage: its old record's, unless another storage has that (two that became different stay
        so)."""
        key = self.keys.get(id(storage))
        if key is not None:
            return key
        key = self.deduplicated.get((id(storage.data), storage.location)) if storage.deduplicated else None
        if key is None:
            record = self.records.get(id(storage.data))
            if record is None or record in self.used:
                key = next(key for n in self.numbers if (key := str(n)) not in self.taken)
                self.fresh.append((key, storage))
            else:
                self.used.add(record)
                key = record.name.removeprefix(self.root + "data/")
        self.keys[id(storage)] = key
        if storage.deduplicated:
            self.deduplicated[id(storage.data), storage.location] = key
        return key

    def add(self, name: str, data: Data, crc: int | None = None) -> None:
        """A record of our own under the root. `crc`, if known, is checked."""
        self.zip.add(self.root + name, data, crc)

    def copy(self, record: Record) -> None:
        """Adds a record of the old file that the tree uses: whole where it moves by a multiple of the alignment."""
        from ckptool.formats.zip.writer import needs_zip64

        archive, name = record.archive, record.name.removeprefix(self.root)
        if name in ("data.pkl", marks.DEDUPLICATED_RECORD) or (name.startswith("data/") and record not in self.used):
            return
        if not record.name.startswith(self.root):
            return  # its name leads out of the folder
        fits = record.zip64 or not needs_zip64(record.size, self.zip.at)
        aligned = (self.zip.at - record.header) % self.alignment == 0
        if fits and aligned and not record.method and archive.has_checksums and record.is_torch_like:
            place = archive.source.start + record.header
            whole = FileRange(archive.source.file, place, record.end - record.header, record.confirm)
            self.zip.add_copy(record, whole)
        else:
            self.add(name, record.data, record.crc if archive.has_checksums else None)

    def add_fresh(self) -> None:
        """The storages that the old file does not have, in the order in which the tree mentions them."""
        for key, storage in self.fresh:
            self.add(f"data/{key}", storage.data, storage.crc)
