"""`torch-zip`: what `torch.save` writes since 1.6, a zip of a pickle and one stored record for each storage.

Source: torch/serialization.py (`_save`, `_load`) and caffe2/serialize/inline_container.cc, torch 1.6 to 2.13. A new
file has the root folder `archive`; a copied one keeps its own. Records are copied whole, headers included, wherever
they move by a multiple of the alignment, so that a rename is one new pickle and one long range of the old file.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from ckptool.checkpoint import Checkpoint, InlineBytes, Note, Storage, StorageRef
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.files import Readable, Source
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.nodes import Global
from ckptool.commands import FILE, OUT, command
from ckptool.errors import Ambiguous, Conflict, Corrupt, Unsupported, counted, form
from ckptool.facts import dataclass, field
from ckptool.formats import marks
from ckptool.formats.nested_streams import BUILDERS
from ckptool.formats.zip import directory
from ckptool.formats.zip.directory import DESCRIPTOR, DESCRIPTOR64, FULL, ZIP64_VERSION, Archive, Record, guard
from ckptool.pickles.calls import refuse_unknown
from ckptool.pickles.decode import Decoded, decode_all, protocol_notes
from ckptool.pickles.torch_objects import Builder, storage_class

if TYPE_CHECKING:
    from ckptool.checkpoint.blocks import Plan

NAME = "torch-zip"
ALIGNMENT = 64
MAX_ALIGNMENT, MAX_PADDING = 1 << 16, 1 << 15  # torch fails to read more
MAX_SMALL = 1 << 16
# Records of programs, and the formats that read them; packages may hold programs of TorchScript.
_PROGRAMS = {"/.data/extern_modules": "torch_package", "/constants.pkl": "torchscript"}
_PROGRAMS |= {"/archive_format": "torch_export", "serialized_exported_program.json": "torch_export"}
_MARKS = tuple(_PROGRAMS)
_SMALL = ("byteorder", ".storage_alignment", ".format_version", "version")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Origin:
    """The file that a torch zip was read from: its directory, its root folder, the alignment of its data, its mark."""

    archive: Archive
    root: str
    alignment: int
    recovered: str | None


def read(source: Readable) -> Checkpoint:
    """The checkpoint in a torch zip. Reads the directory and the pickle, no tensor data.

    A file with the records of a program is read by the format of those, as by torch. Raises `NotACheckpoint` for
    another kind of zip, and what `read_archive` and `decode` raise.
    """
    archive = directory.read_archive(source)
    names = [name for name in archive.records if name.endswith(_MARKS)] if isinstance(source, Source) else []
    for mark, module in _PROGRAMS.items() if names else ():
        if any(name.endswith(mark) for name in names):
            return cast(Checkpoint, import_module(f"ckptool.formats.{module}").read(archive))
    return of_archive(archive)


def of_archive(archive: Archive, find: Find | None = None) -> Checkpoint:
    """The checkpoint that the records of an archive make up, as `read` gives it. find: see `RecordStorages`; with it,
    other records may be missing, too."""
    source = archive.source
    root, small, storages, decoded = read_pickled(archive, find=find)
    alignment = small.get(".storage_alignment", str(ALIGNMENT))
    if not alignment.isascii() or not alignment.isdigit() or not 1 <= int(alignment[:9]) <= MAX_ALIGNMENT:
        raise Corrupt(f"{source}: its .storage_alignment record says {alignment[:40]!r}")
    notes = (*archive.notes, *record_notes(archive, root, storages), *decoded.notes, *protocol_notes(decoded))
    metadata, mark = dict(small), archive.records.get(root + marks.RECOVERED_RECORD)
    if mark is not None:
        metadata[marks.RECOVERED] = mark.contents(marks.MAX_RECORD).decode("utf-8", "replace")
        notes += marks.recovered_notes(metadata)
    tree = decoded.root
    if (deduplicated := archive.records.get(root + marks.DEDUPLICATED_RECORD)) is not None:
        tree, tie_notes = marks.separated(tree, deduplicated.contents(marks.MAX_DEDUPLICATED))
        notes += tuple(tie_notes)
    # Of a big-endian file nothing can be copied as it is: it is written as if it came from elsewhere. So is one with
    # more padding than a header's extra field is sure to hold.
    is_foreign = storages.big_endian or int(alignment) > MAX_PADDING
    origin = None if is_foreign else Origin(archive, root, int(alignment), metadata.get(marks.RECOVERED))
    return Checkpoint(tree, NAME, metadata, source.file, origin, notes, decoded.discarded)


Find = Callable[[str, int], "Record | None"]


def read_pickled(
    archive: Archive, builders: Mapping[Global, Builder] = BUILDERS, *, script: bool = False, find: Find | None = None
) -> tuple[str, dict[str, str], RecordStorages, Decoded]:
    """The root folder of an archive, the texts of its short records by name, its storages and its pickle.

    script: it may hold a program.  find: see `of_archive`.

    Raises `Ambiguous` and `Corrupt` for what readers would see in two ways, or not at all; `NotACheckpoint` for another
    kind of zip; and what `decode` raises.
    """
    source, records = archive.source, archive.records
    pickles = [record for name, record in records.items() if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) > 1:
        raise Ambiguous(f"{source} holds two checkpoints ({' and '.join(map(str, pickles))})")
    if not pickles:
        from ckptool.formats.unrecognized import other_zip

        if other := [name for name in records if name.count("/") == 1 and name.lower().endswith("/data.pkl")]:
            raise Ambiguous(f"{source} has no data.pkl, but {other[0]}", "torch reads it as one, other readers do not.")
        raise other_zip(source, records)
    root = pickles[0].name.removesuffix("data.pkl")
    if outside := [name for name in records if not name.startswith(root)]:
        raise Ambiguous(f"{source} has records outside its folder {root}: {outside[0]}")
    # A checkpoint with the records of a program: `torch.load` sees one thing, `torch.jit.load` the other.
    if not script and (root + "constants.pkl" in records or any(name.startswith(root + "code/") for name in records)):
        raise Ambiguous(f"{source} is a checkpoint that also has records of a TorchScript program")
    for record in records.values():
        if record.name.count("/") == 1:
            record.confirm()  # under another name in its own header, it would say something to one reader alone
    contents = {name: records[root + name].contents(MAX_SMALL) for name in _SMALL if root + name in records}
    small = {name: content.decode("utf-8", "replace").strip() for name, content in contents.items()}
    version = small.get("version")
    if (hidden := records.get(root + ".data/version")) is not None:
        hidden_version = hidden.contents(MAX_SMALL).decode("utf-8", "replace").strip()
        if version not in (None, hidden_version):
            raise Ambiguous(f"{source} has two version records that disagree")
        version = version or hidden_version
    if version is None and find is None:
        raise Corrupt(f"{source}: it has no record {root}version", "torch refuses such a file.")
    if version is not None and not re.fullmatch("0{0,7}[1-9][0-9]?", version):  # torch 2.13 reads up to 10
        raise Corrupt(f"{source}: its version record says {version[:40]!r}")
    order = contents.get("byteorder", b"little")
    if order not in (b"little", b"big"):  # torch compares the bytes
        what = f"{source}: its byteorder record says {order.decode('utf-8', 'replace')!r}"
        raise Corrupt(what, "torch refuses such a file.")
    storages = RecordStorages(archive, root + "data/", order == b"big", find)
    decoded = decoded_record(pickles[0], storages.load, builders)
    for record in records.values():
        if not (record.is_used or source.file.far):  # another reader may be asked for it; elsewhere each is a request
            record.confirm()
    return root, small, storages, decoded


def inflated_limit(stored: int) -> int:
    """The most bytes to which a pickle or program of `stored` bytes may inflate."""
    return min(max(4 << 20, 16 * stored), directory.MAX_INFLATED)


def decoded_record(
    record: Record, persistent: Callable[[Any], Any], builders: Mapping[Global, Builder] = BUILDERS
) -> Decoded:
    """The pickle in a record; persistent as for `decode`. Raises as `decode_all`."""
    source, name = record.headers.source, record.name.partition("/")[2]
    data = record.contents(inflated_limit(record.stored))
    return decode_all(data, persistent, builders, name=f"{source}: {name}", file_bytes=source.size)


@dataclass(slots=True, eq=False, repr=False)
class RecordStorages:
    """Gives the storage for a persistent id: one for each record, however many tensors share it.

    prefix: the folder of the records (`archive/data/`).  find: gives the record for a name and the size it should have.
    """

    archive: Archive
    prefix: str
    big_endian: bool
    find: Find | None = None
    refs: dict[str, StorageRef] = field(default_factory=dict)  # by key, with the first class used for it
    typed: dict[tuple[str, DType | None], StorageRef] = field(default_factory=dict)  # of other element types

    def load(self, pid: Any) -> StorageRef:
        """The storage that `("storage", class, key, location, number of elements)` names.

        The C++ of torch 1.2 to 1.4 added view metadata, as legacy streams have: always None.
        """
        word, cls, key, location, numel, *views = pid if type(pid) is tuple and len(pid) in (5, 6) else (None,) * 5
        is_named = word == "storage" and type(key) is type(location) is str
        if not is_named or type(cls) is not Global or type(numel) is not int or (views and views != [None]):
            raise Corrupt("a persistent id that names no storage")
        is_known, dtype = storage_class(cls)
        if not is_known:
            raise Unsupported(f"the storage {key} has the unknown type {cls}", "The size of its elements is unknown.")
        size = numel * (dtype.itemsize if dtype is not None else 1)
        if (first := self.refs.get(key)) is None:
            name = self.prefix + key
            record = self.find(name, size) if self.find is not None else self.archive.records.get(name)
            if record is None:
                raise Corrupt(f"the storage {key[:200]} has no record {name[:200]} in the archive")
            if numel < 0 or size != record.size:
                actual = f"its record {record} has {record.size:,} bytes"
                raise Corrupt(f"the storage {key} should have {numel} elements; {actual}")
            storage = Storage(record.data, location, record.sum)
            if self.big_endian:
                from ckptool.checkpoint.arrays import swapped

                data = swapped(storage, dtype)
                storage = storage if data is storage.data else Storage(data, location)
            return self.refs.setdefault(key, StorageRef(storage, dtype))
        # Only storages of bytes, under uint8 and float8 views, and empty ones may have several types.
        mixed = dtype is not first.dtype and not all(kind is None or kind.name == "u8" for kind in (first.dtype, dtype))
        if (location, size) != (first.storage.location, first.storage.nbytes) or (mixed and size):
            raise Corrupt(f"the storage {key} is described in two ways")
        return first if dtype is first.dtype else self.typed.setdefault((key, dtype), StorageRef(first.storage, dtype))


def record_notes(archive: Archive, root: str, storages: RecordStorages) -> list[Note]:
    """Notes on the records of an archive, once its pickle was read."""
    messages = {}
    unused = [
        record
        for name, record in archive.records.items()
        if not record.is_used and name.startswith(root + "data/") and not name.endswith("/")  # a folder's own entry
    ]
    if unused:
        size = sum(record.stored for record in unused)
        records = f"{counted(len(unused), 'record')} with {size:,} bytes {form(len(unused), 'is', 'are')}"
        messages["unused-record"] = f"{records} used by no tensor"
    if any(record.method for record in archive.records.values()):
        messages["deflated"] = "re-zipped with compression: torch cannot map it (mmap=True)"
    if archive.records and not archive.headers.has_checksums:
        messages["no-checksums"] = "the archive stores no checksums: damage to its data cannot be detected"
    elif not archive.headers.has_data_sums and any(r.size and r.sum is None for r in archive.records.values()):
        what = "saved by torch's skip_data: the tensors have no checksums, and are zeros where nobody filled them in"
        messages["no-checksums"] = what
    if storages.big_endian:
        messages["big-endian"] = "written on a big-endian machine"
    return [Note(code, message, command("convert", FILE, out=OUT)) for code, message in messages.items()]


# Writing -------------------------------------------------------------------------------------------------------------


@no_collection()
def write(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
    """The plan of a torch zip with this tree. Records of the file that it was read from are copied as they are.

    Raises `UnsafeObject` for calls of unknown functions unless `keep_unknown`.
    """
    from ckptool.checkpoint.blocks import Deferred, Plan
    from ckptool.formats.zip.writer import ZipLayout
    from ckptool.pickles.encode import encode

    refuse_unknown(checkpoint, keep_unknown)
    origin = checkpoint.origin if isinstance(checkpoint.origin, Origin) else None
    keys, layout = _Keys(origin), ZipLayout(origin.alignment if origin else ALIGNMENT)
    root, mark = keys.root, checkpoint.metadata.get(marks.RECOVERED)
    layout.add(root + "data.pkl", InlineBytes(encode(checkpoint.tree, keys.key_of)))
    if origin is None:
        for name, text in ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")):
            layout.add(root + name, InlineBytes(text))
    else:
        rewritten = {root + "data.pkl", root + marks.DEDUPLICATED_RECORD}
        if mark != origin.recovered:
            rewritten.add(root + marks.RECOVERED_RECORD)
        archive = origin.archive
        for record in archive.by_offset():
            if record.name in rewritten or (record.name.startswith(root + "data/") and record not in keys.used):
                continue
            # A reader that knows only the record's directory entry has to know how large its descriptor is.
            is_usual = record.descriptor_size in (DESCRIPTOR.size, DESCRIPTOR64.size)
            is_usual = not record.descriptor_size or (is_usual and record.central[6] < ZIP64_VERSION)
            is_aligned = (layout.at - record.header) % origin.alignment == 0
            fits = record.zip64 or max(record.size, layout.at) < FULL
            if fits and is_aligned and is_usual and not record.method and record.sum is not None:
                layout.add_old(record, copied=True)
            else:
                layout.add(record.name, record.data, record.sum)
    for key, storage in keys.fresh:
        layout.add(f"{root}data/{key}", storage.data, storage.crc)
    if origin is None:
        layout.add(root + "version", InlineBytes(b"3\n"))
        # 40 digits that name the contents, as torch's do (by another hash), from the sums of all records before, the
        # pickle's first: those of the bytes that were written, so that the same contents have the same name wherever
        # they came from.
        sums = [*layout.sums]

        def identity() -> bytes:
            joined = b"".join(total.value.to_bytes(4, "little") for total in sums)
            return f"{sums[0].value:020d}{zlib.crc32(joined):020d}".encode()

        layout.add(f"{root}.data/serialization_id", Deferred(40, identity))
    if mark and (origin is None or mark != origin.recovered):
        layout.add(root + marks.RECOVERED_RECORD, InlineBytes(mark.encode()))
    return Plan({"": layout})


# torch looks for the end records in the last 69,562 bytes, Python's zipfile in the last 65,557.
GUARD_EVERY = 65_000


@no_collection()
def append(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan | None:
    """The plan of the same change made inside the file: a new pickle and directory behind the old ones.

    None where it cannot or should not be: the tree came from another container, or much of the data is new.
    """
    from ckptool.checkpoint.blocks import Plan
    from ckptool.formats.zip.writer import ZipLayout
    from ckptool.pickles.encode import encode

    origin = checkpoint.origin
    if not isinstance(origin, Origin):
        return None
    refuse_unknown(checkpoint, keep_unknown)
    archive, root, keys = origin.archive, origin.root, _Keys(origin)
    if archive.edits >= directory.MAX_EDITS:
        what = f"{archive.source} was edited in place {archive.edits} times already; write a new file instead"
        raise Conflict(what, fix=command("convert", archive.source.file.path, out=OUT))
    # In an archive without checksums, a new record has none either: else the zeros of the others would count.
    layout = ZipLayout(origin.alignment, archive.end, archive.headers.has_checksums)
    layout.add(root + "data.pkl", InlineBytes(encode(checkpoint.tree, keys.key_of)))
    if root + marks.DEDUPLICATED_RECORD in archive.records:
        return None  # what 0.1.0 stored once for several is stored for each
    if keys.fresh and not archive.headers.has_data_sums:
        return None  # one with a checksum, and the zeros of the others would count
    if 4 * sum(storage.nbytes for _, storage in keys.fresh) > archive.end:
        return None  # the old values would stay inside beside the new ones: a new file is the better place
    for key, storage in keys.fresh:
        layout.add(f"{root}data/{key}", storage.data, storage.crc)
    for record in archive.by_offset():
        if record.name != root + "data.pkl":
            layout.add_old(record, copied=False)
    return Plan({"": layout}, keep=archive.end, guard=guard(archive.end_records), guard_every=GUARD_EVERY)


class _Keys:
    """The keys of storages in a new archive; `used`: the old records among them, `fresh`: the new ones."""

    def __init__(self, origin: Origin | None) -> None:
        self.records = records = origin.archive.records if origin else {}
        self.root = root = origin.root if origin else "archive/"
        self.keys: dict[int, str] = {}  # id of a Storage -> its key
        self.fresh: list[tuple[str, Storage]] = []
        self.used: set[Record] = set()
        self.free = (key for n in itertools.count() if f"{root}data/{(key := str(n))}" not in records)

    def key_of(self, storage: Storage) -> str:
        """The key of a storage: its old record's, unless another storage has that already (two that became different
        stay two)."""
        key = self.keys.get(id(storage))
        if key is None:
            record = directory.record_of(storage.data)
            if record is None or record in self.used or record is not self.records.get(record.name):
                key = next(self.free)
                self.fresh.append((key, storage))
            else:
                self.used.add(record)
                key = record.name.removeprefix(self.root + "data/")
            self.keys[id(storage)] = key
        return key
