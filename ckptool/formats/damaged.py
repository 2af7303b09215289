"""The checkpoint in a damaged file: the tree, with the tensors that are whole and stand-ins for the others.

Of a zip, what the records' checksums prove (`zip/salvage`); of a safetensors file, which has none, what its header
says. Where the pickle of a zip is lost, nobody can tell which bytes are which tensor: the records are given as bytes,
by name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Computed, FileRange, Note, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.files import Input, Readable, Source
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.tree import Path, address, storages, stored_parts, walk
from ckptool.commands import FILE, OUT, command
from ckptool.errors import CkptoolError, Corrupt, FileProblem, Truncated, UsageError, counted, form
from ckptool.facts import Bytes
from ckptool.formats import marks, safetensors, torch_zip
from ckptool.formats.checksums import Progress, checksums
from ckptool.formats.zip import directory
from ckptool.formats.zip.directory import Archive
from ckptool.formats.zip.record import DESCRIPTOR, DESCRIPTOR64, LOCAL, Record
from ckptool.formats.zip.salvage import (
    BUDGET,
    DAMAGED,
    FREE,
    HEADER,
    NO_NAME,
    NO_SUM,
    SMALL,
    TWICE,
    Remnant,
    Sizes,
    Walk,
    is_pickle,
    record_of,
    sizes_in,
)

QUICK = 16 << 20  # bytes searched for a count
COUNTED = 100_000  # records looked at for it
MISSING = "it is not in the file"
UNDONE = "undid an in-place edit that was not finished"
BY_HEADERS = "found the records by their own headers: the directory is missing or damaged"


@dataclass(frozen=True, slots=True)
class LostRecord:
    """A lost record, or a lost tensor of a file without records: its place (None: unknown), and why it is lost."""

    name: str
    offset: int | None
    nbytes: Bytes
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class LostTensor:
    """A tensor or storage whose data is lost, and its place. storage: the one that is lost.  record: which it was."""

    path: Path
    node: TensorEntry | Composite | StorageRef
    storage: Storage
    record: LostRecord

    @property
    def address(self) -> str:
        return address(self.path)


@dataclass(slots=True, eq=False)
class Salvaged:
    """The contents of a damaged file.

    checkpoint: the tree, with lost storages in it.  lost: why, by the id of a storage's data.  records, whole: how many
    there were, and are.  proven: by checksums.  raw: records by name, as the pickle is lost.  how: what was done.
    prefix: so many bytes of the file are a whole archive as they are (None: they are not).
    """

    checkpoint: Checkpoint
    records: int
    whole: int
    lost_records: tuple[LostRecord, ...]
    proven: bool
    raw: bool = False
    how: str = ""
    prefix: int | None = None
    lost: dict[int, LostRecord] = field(default_factory=dict)

    def lost_of(self, storage: Storage) -> LostRecord | None:
        """Why a storage's data is lost; None if it is there."""
        return next((self.lost[id(part.data)] for part in storage.below() if id(part.data) in self.lost), None)

    def lost_tensors(self) -> list[LostTensor]:
        """Everything in the tree that cannot be read, in order; a tensor in two places comes twice."""
        lost = []
        for path, node in walk(self.checkpoint.tree):
            records = ((part.storage, self.lost_of(part.storage)) for part in stored_parts(node))
            gone = next(((storage, record) for storage, record in records if record is not None), None)
            lost += [LostTensor(path, node, *gone)] if gone is not None else []
        return lost


def salvage(source: Input, error: CkptoolError | None = None, progress: Progress | None = None) -> Salvaged:
    """The contents of `source`, which was found damaged (`error`: how).

    Raises `error` where nothing can be told of it, `FileProblem`, or `UsageError` for a folder or another container.
    """
    if not isinstance(source, Source):
        what = f"{source} is a folder"
        raise UsageError(
            what, "Files are recovered one by one.", f"Name the damaged file: {command('recover', FILE, out=OUT)}"
        )
    head = source.read(0, min(16, source.size))
    with no_collection():
        if head[:2] == b"PK":
            return _salvaged_zip(source, error, progress)
        if safetensors.detect(head, source):
            return _salvaged_safetensors(source)
    raise error or UsageError(
        f"ckptool cannot recover {source}",
        "It recovers torch zips and safetensors files.",
        "Copy or download it again.",
    )


def with_whole_count(error: Truncated) -> Truncated:
    """The error for a zip that was cut off, with the number of its storages that look whole, and what saves them."""
    found = whole_records(error.cut_archive) if error.cut_archive is not None else None
    if found is None:
        return error
    whole, count = found
    save = command("recover", error.cut_archive.path, out=OUT)
    why = f"{error.why} {whole:,} of its {counted(count, 'storage')} {form(whole, 'looks', 'look')} whole."
    return Truncated(error.what, why, f"Save what is whole: {save}; or download or copy it again.")


def whole_records(source: Readable) -> tuple[int, int] | None:
    """Counts the storages of a damaged zip that look whole, and all of them, unread; None where it cannot be known."""
    try:
        with no_collection():
            walk = Walk(source, min(QUICK, BUDGET * source.size + FREE), COUNTED).run()
    except CkptoolError:
        return None
    sizes = walk.sizes.of
    found = {piece.name for piece in walk.pieces if piece.name in sizes and not piece.why and piece.named}
    return (len(found), len(sizes)) if sizes else None


def _salvaged_safetensors(source: Source) -> Salvaged:
    """The tensors whose ranges are inside the file; nobody can say whether their bytes are the right ones."""
    checkpoint = safetensors.read(source, cut=True)
    parts = [part.data for storage in reversed([*storages(checkpoint.tree)]) for part in storage.below()]
    ranges = [data for data in parts if isinstance(data, FileRange)]
    cut = [data for data in ranges if data.offset + data.length > source.size]
    lost = {id(data): LostRecord("", data.offset, data.length, "the file ends before it does") for data in cut}
    every, gone = {data.offset for data in ranges}, {data.offset for data in cut}
    return Salvaged(checkpoint, len(every), len(every - gone), tuple(lost.values()), False, lost=lost)


# The records of a zip ------------------------------------------------------------------------------------------------


def _salvaged_zip(source: Source, error: CkptoolError | None, progress: Progress | None) -> Salvaged:
    pieces, root, how, state, mentions = _pieces(source, error)
    proven = _prove(source, pieces, progress)
    _drop_copies(pieces, mentions)
    archive = Archive(source, 0, 0, b"", has_checksums=proven)
    for piece in pieces:
        if not piece.why and piece.name.startswith(root):
            archive.records[piece.name] = record_of(archive, piece)
    lost = [LostRecord(p.name, p.header, p.size, p.why) for p in pieces if p.why and p.name not in archive.records]
    if not archive.records:
        raise error or Corrupt(f"{source}: no record of it is whole", "Nothing can be recovered.")
    found = _opened(archive, root, lost)
    names = {piece.name for piece in pieces} | {record.name for record in found.lost_records}
    prefix = state.end if state is not None and not found.lost_records and _agrees(state, pieces) else None
    return replace(found, records=len(names), whole=len(archive.records), proven=proven, how=how, prefix=prefix)


def _agrees(state: Archive, pieces: list[Remnant]) -> bool:
    """True if the headers and checksums of an archive all say the same: then its bytes are good as they are."""
    try:
        for record in state.records.values():
            record.confirm()
    except CkptoolError:
        return False
    return not state.has_checksums or all(state.records[piece.name].crc == piece.crc for piece in pieces)


# Records, their root folder, what was done, the directory that they are from, the headers that any directory names.
_Pieces = tuple[list[Remnant], str, str, Archive | None, Collection[int]]


def _pieces(source: Source, error: CkptoolError | None) -> _Pieces:
    """Every record that is there or was, from the directory if it can be read, else from the records' own headers."""
    try:
        archive = directory.read_archive(source)
    except FileProblem:
        raise
    except CkptoolError as problem:
        walk = Walk(source, BUDGET * source.size + FREE).run()
        if walk.states:
            state = _earlier_state(source, walk, error or problem)
            return *_listed(state), UNDONE, state, ()
        walk = _again(walk)
        _settle_names(walk)
        return walk.pieces, walk.sizes.root, BY_HEADERS, None, walk.mentions.keys()
    undone = any(note.code == "interrupted-edit" for note in archive.notes)
    return *_listed(archive), UNDONE if undone else "", archive, ()


def _earlier_state(source: Source, walk: Walk, error: CkptoolError) -> Archive:
    """The last complete archive in a file to which something was added; raises `error` if that is another archive."""
    end = walk.states[-1]
    archive = directory.read_archive(source.part(0, end))
    for piece in walk.pieces:
        if piece.header >= end and (piece.name not in archive.records) == piece.name.endswith("/data.pkl"):
            raise error
    return archive


def _listed(archive: Archive) -> tuple[list[Remnant], str]:
    """The records of a directory, with the names that their own headers or the pickle confirm; their root."""
    pieces = []
    for record in archive.by_offset():
        piece = Remnant(
            record.name, record.header, record.data_at, record.stored, record.size, record.method, record.end
        )
        piece.claims = (record.crc, *_descriptor_crc(archive, record)) if archive.has_checksums else ()
        own = _own_name(archive, piece)
        piece.named = own == piece.name
        if not piece.named and own is not None and is_pickle(own):
            piece.name, piece.named = own, True
        pieces.append(piece)
    sizes = Sizes()
    pickle = next((piece for piece in pieces if is_pickle(piece.name)), None)
    if pickle is not None:
        root = pickle.name.removesuffix("data.pkl")
        if pickle.size <= torch_zip.inflated_limit(pickle.stored):
            sizes.learn(root, sizes_in(record_of(archive, pickle).data, f"{root}data/", archive.source))
        pickle.named = pickle.named or bool(sizes.of)
    _take_sensible_names(archive, pieces, sizes)
    return pieces, sizes.root


def _take_sensible_names(archive: Archive, pieces: list[Remnant], sizes: Sizes) -> None:
    """Settles the name where a record's header and the directory differ: the one that alone makes sense."""
    taken = {piece.name for piece in pieces if piece.named}
    known = set(sizes.of) | {sizes.root + name for name in SMALL}
    for piece in pieces:
        if not piece.named:
            names = {piece.name, _own_name(archive, piece)} & known - taken
            fitting = [name for name in names if name is not None and sizes.of.get(name, piece.size) == piece.size]
            if len(fitting) == 1:
                piece.name, piece.named = fitting[0], True


def _own_name(archive: Archive, piece: Remnant) -> str | None:
    """The name in a record's own header; None where there is no header, or none that leads to the data."""
    head = archive.source.read(piece.header, LOCAL.size)
    name_size, extra_size = LOCAL.unpack(head)[-2:]
    if head[:4] != b"PK\x03\x04" or piece.header + LOCAL.size + name_size + extra_size != piece.data_at:
        return None
    return archive.source.read(piece.header + LOCAL.size, name_size).decode("utf-8", "replace")


def _descriptor_crc(archive: Archive, record: Record) -> tuple[int, ...]:
    """The checksum in a data descriptor with the same sizes: the directory's own may be what is damaged."""
    for layout in (DESCRIPTOR, DESCRIPTOR64):
        if record.descriptor_size == layout.size:
            raw = archive.source.read(record.data_at + record.stored, layout.size)
            signature, crc, stored, size = layout.unpack(raw)
            return (crc,) if (signature, stored, size) == (b"PK\x07\x08", record.stored, record.size) else ()
    return ()


def _again(walk: Walk) -> Walk:
    """The walk with the pickle known from the start, if it is behind the storages and only the directory proves it."""
    named = [piece for piece in walk.pieces if walk.mentions.get(piece.header, ("",))[0] == piece.name]
    pickles = [piece for piece in named if is_pickle(piece.name) and not piece.why]
    if walk.sizes.root or len(pickles) != 1:
        return walk
    second = Walk(walk.source, BUDGET * walk.source.size + FREE)
    second.learn(pickles[0])
    return second.run()


def _settle_names(walk: Walk) -> None:
    """Believes names that the order does not prove if a directory says the same."""
    for piece in walk.pieces:
        name, crc, size = walk.mentions.get(piece.header, ("", 0, -1))
        if size == piece.size and piece.end and (piece.claims or not piece.method):
            # Otherwise the checksum is of other data that was here: bytes are missing.
            agrees = crc in piece.claims or not piece.claims
            piece.claims = (*piece.claims, crc)
            piece.why = "" if piece.why == NO_SUM else piece.why
            piece.named = piece.named or (agrees and name == piece.name)


def _prove(source: Readable, pieces: list[Remnant], progress: Progress | None = None) -> bool:
    """Checks the checksum of every piece not known to be lost; `why` says which are. False if none is stored."""
    checked = any(claim for piece in pieces for claim in piece.claims)
    archive = Archive(source, 0, 0, b"")
    whole = [piece for piece in pieces if not piece.why]
    stored = [
        record_of(archive, piece).data
        if piece.method
        else FileRange(source.file, source.start + piece.data_at, piece.stored)
        for piece in whole
    ]
    sums = checksums(stored, progress)
    for piece, total in zip(whole, sums, strict=True):
        if isinstance(total, CkptoolError):
            piece.why = total.what
        elif checked and total not in piece.claims:
            piece.why = DAMAGED if piece.claims else NO_SUM
        elif not piece.named:
            piece.why = NO_NAME
        else:
            piece.crc = total
    return checked


def _drop_copies(pieces: list[Remnant], mentions: Collection[int]) -> None:
    """Two whole records of one name: the same bytes are one record; of others nobody can tell which is meant.

    Of several pickles, which in-place edits leave, the last counts that a directory names. mentions: the headers named.
    """
    pickles = [piece for piece in pieces if not piece.why and is_pickle(piece.name)]
    chosen = [piece for piece in pickles if piece.header in mentions][-1:] or pickles[:1]
    pieces[:] = [piece for piece in pieces if piece in chosen or piece not in pickles]
    first: dict[str, Remnant] = {}
    for piece in pieces:
        if not piece.why:
            other = first.setdefault(piece.name, piece)
            if other is not piece and (other.crc, other.size) != (piece.crc, piece.size):
                other.why = piece.why = TWICE


# The tree ------------------------------------------------------------------------------------------------------------


class _Lossy:
    """The records of an archive, and stand-ins for those that are not whole. lost: by the id of their data."""

    def __init__(self, archive: Archive, lost: list[LostRecord]) -> None:
        self.archive = archive
        self.reasons = {record.name: record for record in lost}
        self.lost: dict[int, LostRecord] = {}

    def find(self, name: str, size: int) -> Record | None:
        record = self.archive.records.get(name)
        if size >= 0 and (record is None or (record.size != size and id(record.data) not in self.lost)):
            why = self.reasons.get(name) or LostRecord(name, None, size, MISSING if record is None else HEADER)
            record = self.archive.records[name] = Record(self.archive, name, b"", 0, 0, 0, size, size, 0)
            record._data, record.is_used = Computed(size, _gone), True
            self.lost[id(record.data)] = replace(why, nbytes=size)
        return record


def _gone(offset: int, length: int) -> bytes:
    raise Corrupt("the data of this tensor is lost", "It was not in the damaged file, or not whole.")


def _opened(archive: Archive, root: str, lost: list[LostRecord]) -> Salvaged:
    """The tree, or the records by themselves where there is no pickle to say what they are."""
    whole = dict(archive.records)
    pickle = whole.get(f"{root}data.pkl") if root else None
    script = any(name.startswith(f"{root}code/") or name == f"{root}constants.pkl" for name in whole)
    if pickle is None or script:
        return _records_as_bytes(archive, lost)
    order = _small(archive, root, "byteorder")
    _check_order(archive, root, order, lost)
    lossy = _Lossy(archive, lost)
    storages_ = torch_zip.RecordStorages(archive, root + "data/", order == "big", lossy.find)
    decoded = torch_zip.decoded_record(pickle, storages_)
    tree, notes = decoded.root, list[Note]()
    if (shared := whole.get(root + marks.DEDUPLICATED_RECORD)) is not None:
        tree, notes = marks.separated(tree, shared.contents(marks.MAX_DEDUPLICATED))
    metadata: dict[str, Any] = {"byteorder": order} if order else {}
    if before := _small(archive, root, marks.RECOVERED_RECORD, marks.MAX_RECORD):
        metadata[marks.RECOVERED] = before
    archive.records = whole
    checkpoint = Checkpoint(tree, torch_zip.NAME, metadata, archive.source.file, None, tuple(notes), decoded.discarded)
    every = {record.name: record for record in (*lost, *lossy.lost.values())}
    return Salvaged(checkpoint, 0, 0, tuple(every.values()), True, lost=lossy.lost)


def _small(archive: Archive, root: str, name: str, limit: int = torch_zip.MAX_SMALL) -> str:
    record = archive.records.get(root + name)
    return record.contents(limit).decode("utf-8", "replace").strip() if record is not None else ""


def _check_order(archive: Archive, root: str, order: str, lost: list[LostRecord]) -> None:
    """Raises `Corrupt` where the record of the byte order is lost, and may have said: big."""
    if order in ("little", "big") or not any(name.startswith(f"{root}data/") for name in archive.records):
        return
    gone = next((record for record in lost if record.name == f"{root}byteorder"), None)
    if gone is not None and gone.nbytes == len("little"):
        return
    newer = any(f"{root}{name}" in archive.records for name in (".format_version", ".storage_alignment"))
    if not order and gone is None and not newer:
        return  # torch wrote none before 2.1
    raise Corrupt(
        f"{archive.source}: its byteorder record is damaged",
        "Without it the byte order of its numbers is unknown; a wrong guess would give wrong values.",
    )


def _records_as_bytes(archive: Archive, lost: list[LostRecord]) -> Salvaged:
    u8, checked = by_name("u8"), archive.has_checksums
    tree = {
        record.name: TensorEntry(Storage(record.data, crc=record.crc if checked else None), u8, (record.size,), (1,))
        for record in archive.by_offset()
    }
    return Salvaged(Checkpoint(tree, torch_zip.NAME, {}, archive.source.file), 0, 0, tuple(lost), checked, raw=True)
