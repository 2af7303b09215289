"""The checkpoint in a damaged file: the tree, with the tensors that are whole and stand-ins for the others.

Of a safetensors file, which has no checksums, what its header says. Of a zip, what checksums prove. A record's own
header stands before its data and, in what torch writes, its size and checksum behind it; so the records of a file that
lost its directory can be walked one after the other. The pickle is the first of them: it says which storages there are
and how large each is, and with that the walk jumps from header to header and reads no data. Where no header follows it
goes on at the next place that the directory names, if its lines are still there, and else ends. Nothing is believed but
what is proven: the data by its checksum, the name by the directory or by the place in the order in which torch writes
records (no checksum covers a name). A zip inside of a tensor is never mistaken for the file itself. Where the pickle is
lost, nobody can tell which bytes are which tensor: records are given as bytes, by name.

Work is bounded: every byte is summed once, and searching ends after `BUDGET` times the size of the file.
"""

from __future__ import annotations

import re
import struct
import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import field, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Computed, FileRange, Note, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.files import Input, Readable, Source
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.tree import Path, address, storages, stored_parts, walk
from ckptool.commands import FILE, OUT, command
from ckptool.errors import CkptoolError, Corrupt, FileProblem, Truncated, UsageError, counted, form
from ckptool.facts import Bytes, dataclass
from ckptool.formats import marks, safetensors, torch_zip
from ckptool.formats.checksums import checksums
from ckptool.formats.nested_streams import BUILDERS
from ckptool.formats.zip import directory
from ckptool.formats.zip.directory import Archive
from ckptool.formats.zip.record import (
    CENTRAL,
    DESCRIPTOR,
    DESCRIPTOR64,
    END,
    END64,
    FULL,
    LOCAL,
    LOCATOR,
    Record,
    extra_fields,
    zip64_values,
)
from ckptool.pickles.decode import decode

BUDGET = 4
FREE = 1 << 20
_FEW, _CHUNK = 4 << 10, 1 << 20  # bytes that are read, or searched, at once
_STEP = 256  # what one step of a search costs, in bytes of reading
_MAX_NAME = 4_096
_PADDING = 0x4246  # "FB"
# Extra fields: padding, 64-bit sizes, and the times, owners and names that Info-ZIP writes.
_EXTRAS = frozenset((_PADDING, 0x0001, 0x000A, 0x5455, 0x5855, 0x7075, 0x7855, 0x7875))
_SMALL = ("data.pkl", ".format_version", ".storage_alignment", "byteorder", "version", ".data/serialization_id")
QUICK = 16 << 20  # bytes searched for a count
COUNTED = 100_000  # records looked at for it
CUT = "the file ends before it does"
DAMAGED = "its data does not match its checksum"
HEADER = "its header is damaged"
NO_SUM = "its checksum is damaged or cut off"
NO_NAME = "its name cannot be proven: its header or the directory is damaged"
TWICE = "two different records have its name"
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
    prefix: so many bytes of the file are a whole archive as they are (None: they are not).  unlisted: nothing says
    which records there were.
    """

    checkpoint: Checkpoint
    records: int
    whole: int
    lost_records: tuple[LostRecord, ...]
    proven: bool
    raw: bool = False
    unlisted: bool = False
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
            if gone is not None:
                lost.append(LostTensor(path, node, *gone))
        return lost


def salvage(source: Input, error: CkptoolError | None = None) -> Salvaged:
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
            return _salvaged_zip(source, error)
        if safetensors.detect(head, source):
            return _salvaged_safetensors(source)
    raise error or UsageError(
        f"ckptool cannot recover {source}",
        "It recovers torch zips, .npz and safetensors files.",
        "Copy or download it again.",
    )


def with_whole_count(error: Truncated) -> Truncated:
    """The error for a zip that was cut off, with the number of its storages that look whole, unread, and what saves
    them; the same where that cannot be known."""
    if (source := error.cut_archive) is None:
        return error
    walk = _HeaderWalk(source, min(QUICK, BUDGET * source.size + FREE), COUNTED)
    with suppress(CkptoolError), no_collection():
        walk.run()
        whole = {piece.name for piece in walk.pieces if piece.name in walk.sizes and not piece.why and piece.named}
        if walk.sizes:
            storages = counted(len(walk.sizes), "storage")
            found = f"{len(whole):,} of its {storages} {form(len(whole), 'looks', 'look')} whole."
            why = f"{error.why} {found} Copy or download it again if you can."
            save = command("recover", source.path, out=OUT)
            return Truncated(error.what, why, f"Save what is whole: {save}")
    return error


def _salvaged_safetensors(source: Source) -> Salvaged:
    """The tensors whose ranges are inside the file; nobody can say whether their bytes are the right ones."""
    checkpoint = safetensors.read(source, cut=True)
    parts = [part.data for storage in reversed([*storages(checkpoint.tree)]) for part in storage.below()]
    ranges = [data for data in parts if isinstance(data, FileRange)]
    cut = [data for data in ranges if data.offset + data.length > source.size]
    lost = {id(data): LostRecord("", data.offset, data.length, CUT) for data in cut}
    every, gone = {data.offset for data in ranges}, {data.offset for data in cut}
    return Salvaged(checkpoint, len(every), len(every - gone), tuple(lost.values()), False, lost=lost)


# The records of a zip ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Remnant:
    """A record, or the rest of one. Places and sizes in bytes.

    claims: what its header, descriptor or directory say is its CRC-32.  named: its name is proven.
    why: what is wrong with it, if anything.
    """

    name: str
    header: int
    data_at: int
    stored: int
    size: int
    method: int
    end: int = 0
    claims: tuple[int, ...] = ()
    named: bool = False
    why: str = ""
    crc: int = 0

    @property
    def is_pickle(self) -> bool:
        return self.name.endswith("/data.pkl") and self.name.count("/") == 1

    def record(self, archive: Archive) -> Record:
        """Itself, taken as it is: its header and the directory are not compared any more."""
        return Record(
            archive, self.name, b"", 0, self.method, self.crc, self.stored, self.size, self.header,
            data_at=self.data_at, end=self.end, is_confirmed=True,
        )  # fmt: skip

    def sizes(self, source: Readable) -> dict[str, int] | None:
        """The records that it names as a pickle, with their sizes in bytes; None where its bytes are damaged, and none
        where they cannot be read."""
        lossy, data = _Lossy(Archive(source, 0, 0, b"", has_checksums=False), ()), b""
        with suppress(CkptoolError):
            data = self.record(lossy.archive).contents(torch_zip.inflated_limit(self.stored))
        if any(self.claims) and zlib.crc32(data) not in self.claims:
            return None
        prefix = f"{self.name.removesuffix('data.pkl')}data/"
        try:
            load = torch_zip.RecordStorages(lossy.archive, prefix, False, lossy.find).load
            decode(data, load, BUILDERS, file_bytes=source.size)
        except CkptoolError:
            return {}
        return {name: record.size for name, record in lossy.archive.records.items()}


def _salvaged_zip(source: Source, error: CkptoolError | None) -> Salvaged:
    """From the directory if it can be read, or that of the state before an edit, else from the records' own headers."""
    state, how, mentions = None, "", dict[int, tuple[str, int, int]]()
    try:
        state = directory.read_archive(source)
        how = UNDONE if any(note.code == "interrupted-edit" for note in state.notes) else ""
    except FileProblem:
        raise
    except CkptoolError as problem:
        walk = _HeaderWalk(source, BUDGET * source.size + FREE).run()
        if walk.states:
            how, end = UNDONE, walk.states[-1]
            state = directory.read_archive(source.part(0, end))
            for piece in walk.pieces:
                if piece.header >= end and (piece.name not in state.records) == piece.name.endswith("/data.pkl"):
                    raise error or problem from None  # another archive was added
    if state is not None:
        pieces, root = _listed(state)
    else:
        how = BY_HEADERS
        named = [piece for piece in walk.pieces if walk.mentions.get(piece.header, ("",))[0] == piece.name]
        pickles = [piece for piece in named if piece.is_pickle and not piece.why]
        if not walk.root and len(pickles) == 1:  # behind the storages: only the directory proves it
            walk = _HeaderWalk(source, BUDGET * source.size + FREE).run(pickles[0])
        pieces, root, mentions = walk.pieces, walk.root, walk.mentions
        _compare(pieces, mentions)
    proven = _prove(source, pieces)
    _drop_copies(pieces, mentions)
    archive = Archive(source, 0, 0, b"", has_checksums=proven)
    for piece in pieces:
        if not piece.why and piece.name.startswith(root):
            archive.records[piece.name] = piece.record(archive)
    lost = [LostRecord(p.name, p.header, p.size, p.why) for p in pieces if p.why and p.name not in archive.records]
    known = archive.records.keys() | {record.name for record in lost}
    placed = {record.header: record.crc for record in archive.records.values()}
    for header, (name, crc, size) in mentions.items():
        is_there = placed.get(header) == crc  # whatever the line calls it
        if not is_there and name not in known and name.startswith(root):
            lost.append(LostRecord(name, None, size, MISSING))
    if not archive.records:
        raise error or Corrupt(f"{source}: no record of it is whole", "Nothing can be recovered.")
    found = _opened(archive, root, lost)
    names = {piece.name for piece in pieces} | {record.name for record in found.lost_records}
    prefix = None
    if state is not None and not found.lost_records:
        # Where its headers and checksums all say the same, its bytes are good as they are.
        with suppress(CkptoolError):
            for record in state.records.values():
                record.confirm()
            if not state.has_checksums or all(state.records[piece.name].crc == piece.crc for piece in pieces):
                prefix = state.end
    is_npz = not found.raw and found.checkpoint.container == "npz"
    found.unlisted = is_npz and state is None and (not mentions or walk.is_broken)
    return replace(found, records=len(names), whole=len(archive.records), proven=proven, how=how, prefix=prefix)


def _is_close(one: int, other: int) -> bool:
    """True for checksums of which one may be the other, damaged: at most one byte differs.

    Where they have nothing in common, what stands there may be another record, or one of an older file, whole.
    """
    return sum(a != b for a, b in zip(one.to_bytes(4, "big"), other.to_bytes(4, "big"), strict=True)) <= 1


def _compare(pieces: list[_Remnant], mentions: dict[int, tuple[str, int, int]]) -> None:
    """Takes names and checksums from the lines of the directory, by the place of each record."""
    are_arrays = _are_arrays(piece.name for piece in pieces)
    for piece in pieces:
        name, crc, size = mentions.get(piece.header, ("", 0, -1))
        if size != piece.size or not piece.end or (piece.method and not piece.claims):
            continue  # the checksum is of other data that was here: bytes are missing
        if name == piece.name:
            piece.named = piece.named or crc in piece.claims or not piece.claims
        elif are_arrays:
            piece.named = False  # no pickle proves the one or the other
        is_other = name == piece.name and piece.claims and not any(_is_close(crc, each) for each in piece.claims)
        piece.claims = (crc,) if is_other else (*piece.claims, crc)
        piece.why = "" if piece.why == NO_SUM else piece.why


def _are_arrays(names: Iterable[str]) -> bool:
    return all(name.endswith(".npy") or name == marks.RECOVERED_RECORD for name in names)


def _listed(archive: Archive) -> tuple[list[_Remnant], str]:
    """The records of a directory, and their root; with the names that their own headers confirm, or the pickle.

    Where the header and the directory differ, it is the name that alone makes sense.
    """
    pieces, owns, source = [], [], archive.source
    for record in archive.by_offset():
        piece = _Remnant(
            record.name, record.header, record.data_at, record.stored, record.size, record.method, record.end
        )
        layout = {DESCRIPTOR.size: DESCRIPTOR, DESCRIPTOR64.size: DESCRIPTOR64}.get(record.descriptor_size)
        piece.claims = (record.crc,) if archive.has_checksums else ()
        if archive.has_checksums and layout is not None:  # the directory's own may be what is damaged
            signature, crc, *sizes = layout.unpack(source.read(record.data_at + record.stored, layout.size))
            is_whole = (signature, *sizes) == (b"PK\x07\x08", record.stored, record.size)
            piece.claims += (crc,) if is_whole and _is_close(crc, record.crc) else ()
        head, own = source.read(record.header, LOCAL.size), ""
        name_size, extra_size = LOCAL.unpack(head)[-2:]
        if head[:4] == b"PK\x03\x04" and record.header + LOCAL.size + name_size + extra_size == record.data_at:
            own = source.read(record.header + LOCAL.size, name_size).decode("utf-8", "replace")
        piece.named = own == piece.name
        if not piece.named and (other := replace(piece, name=own, named=True)).is_pickle:
            piece = other
        pieces.append(piece)
        owns.append(own)
    pickle = next((piece for piece in pieces if piece.is_pickle), None)
    root, known = "", dict[str, int]()
    if pickle is not None:
        root, known = pickle.name.removesuffix("data.pkl"), pickle.sizes(source) or {}
        pickle.named = pickle.named or bool(known)
    free = {*known, *(root + name for name in _SMALL)} - {piece.name for piece in pieces if piece.named}
    for piece, own in zip(pieces, owns, strict=True):
        fitting = [name for name in {piece.name, own} & free if known.get(name, piece.size) == piece.size]
        if not piece.named and len(fitting) == 1:
            piece.name, piece.named = fitting[0], True
    return pieces, root


class _HeaderWalk:
    """Goes through a file from header to header, as far as they or the directory lead. pieces: the records.

    states: the ends of complete archives inside it.  mentions: what directories say, by the place of a record's header.
    root, sizes: the folder of the pickle, and the storages that it names.  is_broken: neither headers one after the
    other nor a whole directory lead to all records.  budget: bytes that may be searched.  most: records.
    """

    def __init__(self, source: Source, budget: int, most: int = directory.MAX_ENTRIES) -> None:
        self.source, self.budget, self.most = source, budget, most
        self.pieces: list[_Remnant] = []
        self.states: list[int] = []
        self.mentions: dict[int, tuple[str, int, int]] = {}
        self.root = ""
        self.sizes: dict[str, int] = {}
        self.begin = 0  # the first of the pieces that stand behind the pickle
        self.is_broken = False
        self.tries = 0  # to read an archive inside the file
        self.listed: list[int] = []  # where the directory at the end of the file has records
        self.window_at, self.window = 0, b""  # what was read last

    def run(self, pickle: _Remnant | None = None) -> _HeaderWalk:
        """Goes to every record. pickle: that of the file, where it is known from the start."""
        if pickle is not None:
            self._learn(pickle)
        _, begin, found = directory.last_end_record(self.source, 1 << 16)
        size, place = directory.directory_by(self.source, begin + found) if found >= 0 else (0, 0)
        if size and place + size in (begin + found, begin + found - LOCATOR.size - END64.size):  # else of another file
            is_whole = self._lines(place) == place + size
            self.listed = sorted(self.mentions)
        else:
            is_whole = False
        at: int | None = 0
        begun = False
        while at is not None and at + LOCAL.size <= self.source.size and len(self.pieces) < self.most:
            piece = self._header(at)
            if piece is None:
                past = self._past_directory(at)
                at, is_whole = past or self._next_listed(at), is_whole or past is not None
                self.is_broken = self.is_broken or not is_whole
                continue
            after = self._measure(piece)
            self.is_broken = self.is_broken or (after is None and not is_whole)
            at = after or self._next_listed(at)
            self.pieces.append(piece)
            # An in-place edit puts a new one behind the directory; any other is of a zip in one of the records.
            if piece.is_pickle and not piece.why and (self.tries if self.root else not begun):
                self._learn(piece)
            begun = begun or piece.is_pickle or "/data/" in piece.name
        self._believe_names()
        return self

    def _learn(self, pickle: _Remnant) -> None:
        root, sizes = pickle.name.removesuffix("data.pkl"), pickle.sizes(self.source)
        if sizes is not None and (not self.sizes or root == self.root):
            self.begin = self.begin if self.root else len(self.pieces)
            self.root, self.sizes = root, self.sizes | sizes

    def _peek(self, at: int, length: int) -> bytes:
        """Up to `length` bytes, fewer at the end of the file."""
        begin = at - self.window_at
        if begin < 0 or begin + length > len(self.window):
            begin, self.window_at = 0, at
            most = min(max(length, _FEW), self.source.size - at)
            self.window = self.source.read(at, most) if most > 0 else b""
        return self.window[begin : begin + length]

    def _header(self, at: int) -> _Remnant | None:
        """The record with its header at `at`, not measured yet; None for a header that no usual writer makes."""
        raw = self._peek(at, LOCAL.size)
        if raw[:4] != b"PK\x03\x04" or len(raw) < LOCAL.size:
            return None
        _, _, flags, method, _, _, crc, stored, size, name_size, extra_size = LOCAL.unpack(raw)
        if flags & 0x2061 or method not in (0, 8) or not 0 < name_size <= _MAX_NAME:
            return None
        tail = self._peek(at + LOCAL.size, name_size + extra_size)
        fields = extra_fields(tail[name_size:])
        # A wrong length of the extra field would lead to another record's data.
        is_whole = len(tail) - name_size == extra_size == sum(4 + len(content) for _, content in fields)
        is_usual = all(kind in _EXTRAS and (kind != _PADDING or not each.strip(b"Z\0")) for kind, each in fields)
        try:
            name = tail[:name_size].decode()
        except UnicodeDecodeError:
            return None
        if "\0" in name or not is_whole or not is_usual:
            return None
        if FULL in (stored, size):
            size, stored, _ = zip64_values(tail[name_size:], size, stored, 0) or (size, stored, 0)
        claims = () if flags & 8 and not crc and not stored else (crc,)
        return _Remnant(name, at, at + LOCAL.size + name_size + extra_size, stored, size, method, claims=claims)

    def _measure(self, piece: _Remnant) -> int | None:
        """Finds out how long a record is, and takes its checksum from its descriptor; returns where the next one
        begins, None where that cannot be told."""
        known = self.sizes.get(piece.name)
        if piece.claims and (known not in (None, piece.size) or (not piece.method and piece.stored != piece.size)):
            piece.why = HEADER
            return None
        if not piece.claims:
            stored = known if known is not None and not piece.method else self._searched(piece)
            if stored is None:
                piece.why = CUT
                return None
            piece.stored = piece.size = stored
        end = piece.end = piece.data_at + piece.stored
        if end > self.source.size:
            piece.why = CUT
            return None
        if piece.claims and self._peek(end, 4) != b"PK\x07\x08":
            if piece.stored or self._peek(end, 2) in (b"PK", b""):
                return end
            piece.why = HEADER  # nothing proves that there is nothing
            return None
        found = self._descriptors(piece, end)
        if found:
            # The descriptor of an empty record may fit both layouts.
            layout = next((each for each in found if self._peek(end + each.size, 2) == b"PK"), found[0])
            _, crc, _, size = layout.unpack(self._peek(end, layout.size))
            piece.claims, piece.size, piece.end = (crc,), size, end + layout.size
        elif not piece.claims:
            piece.why = NO_SUM
            return end + (DESCRIPTOR64 if max(piece.stored, piece.header) >= FULL else DESCRIPTOR).size
        return piece.end

    def _searched(self, piece: _Remnant) -> int | None:
        """The length of data whose length nothing states: up to a descriptor that fits where it stands."""
        at = piece.data_at
        while at + DESCRIPTOR.size <= self.source.size and self.budget > 0:
            chunk = self._peek(at, _CHUNK if at > piece.data_at else _FEW)  # most such records are short
            for match in re.finditer(b"PK\x07\x08", chunk):
                if self._descriptors(piece, at + match.start()):
                    return at + match.start() - piece.data_at
                self.budget -= _STEP
                if self.budget <= 0:
                    return None
            self.budget -= len(chunk)
            at += len(chunk) - 3
        return None

    def _descriptors(self, piece: _Remnant, at: int) -> list[struct.Struct]:
        """The layouts in which there is, at `at`, a descriptor of the data up to there."""
        found, raw = [], self._peek(at, DESCRIPTOR64.size)
        for layout in (DESCRIPTOR, DESCRIPTOR64):
            if len(raw) >= layout.size:
                signature, _, stored, size = layout.unpack_from(raw)
                if signature == b"PK\x07\x08" and stored == at - piece.data_at and (piece.method or size == stored):
                    found.append(layout)
        return found

    def _next_listed(self, at: int) -> int | None:
        """Where the directory has the next record, where no header leads there."""
        place = bisect_right(self.listed, at)
        return self.listed[place] if place < len(self.listed) else None

    def _lines(self, at: int) -> int:
        """Reads the lines of the directory at `at`; where they end."""
        while (raw := self._peek(at, CENTRAL.size))[:4] == b"PK\x01\x02" and len(raw) == CENTRAL.size:
            *_, crc, _, size, n, m, k, _, _, _, header = CENTRAL.unpack(raw)
            extra = self._peek(at + CENTRAL.size, n + m)
            if len(extra) < n + m:
                break  # the file ends in it
            if FULL in (size, header):
                size, _, header = zip64_values(extra[n:], size, 0, header) or (size, 0, header)
            self.mentions[header] = (extra[:n].decode("utf-8", "replace"), crc, size)
            at += CENTRAL.size + n + m + k
        return at

    def _past_directory(self, at: int) -> int | None:
        """Reads the directory at `at` and the end records behind it, as far as they are good; None if there is none."""
        begin, at = at, self._lines(at)
        for signature, layout in ((b"PK\x06\x06", END64), (b"PK\x06\x07", LOCATOR), (b"PK\x05\x06", END)):
            if self._peek(at, 4) == signature:
                at += layout.size
                if layout is END and at <= self.source.size:
                    self.tries += 1
                    with suppress(CkptoolError):
                        if self.tries <= directory.MAX_EDITS:
                            directory.read_archive(self.source.part(0, at))
                            self.states.append(at)
        return min(at, self.source.size) if at > begin else None

    def _believe_names(self) -> None:
        """Believes the names of storages that come in an order in which torch writes them; no checksum covers a name.

        The orders are that of the pickle, or of the numbers, and up to torch 2.2 of the keys as texts; without a pickle
        that of the numbers alone. Where another comes, the one before is in doubt as well, unless the order goes on
        behind it: bytes that are missing from the middle put the data of one record behind the header of another.
        """
        sizes, root = [*self.sizes], self.root
        orders = [sizes, sorted(sizes, key=lambda name: (len(name), name))]
        if not any(piece.name == f"{root}.storage_alignment" for piece in self.pieces):
            orders.append(sorted(sizes))
        if not root:
            root = next((piece.name.partition("data/")[0] for piece in self.pieces if "/data/" in piece.name), "")
            orders = [[f"{root}data/{number}" for number in range(len(self.pieces))]]
        seen, begun, is_other_file = 0, False, False
        last: _Remnant | None = None  # the storage before
        doubted: _Remnant | None = None
        for number, piece in enumerate(self.pieces):
            inner = piece.name.removeprefix(root)
            if self.root:
                # No tensor is behind the other names, unless one that should come now is damaged.
                is_known = number < self.begin or inner[:1] == "." or inner in _SMALL or seen == len(sizes)
                is_storage = piece.name in self.sizes or not is_known
            else:
                is_other_file = is_other_file or (begun and piece.is_pickle and not piece.why)
                begun = begun or piece.is_pickle or "/data/" in piece.name
                is_storage = inner.startswith("data/")
            piece.named = not is_other_file
            if is_storage and piece.named:
                fitting = [order for order in orders if order[seen : seen + 1] == [piece.name]]
                if not fitting and doubted is not None:
                    doubted.named = False
                orders, doubted = (fitting, None) if fitting else (orders, last)
                seen, last, piece.named = seen + 1, piece if fitting else None, bool(fitting)
        if doubted is not None:
            doubted.named = False


def _prove(source: Source, pieces: list[_Remnant]) -> bool:
    """Checks the checksum of every piece not known to be lost; `why` says which are. False if none is stored."""
    checked = any(claim for piece in pieces for claim in piece.claims)
    archive, whole = Archive(source, 0, 0, b""), [piece for piece in pieces if not piece.why]
    stretches = [piece.record(archive).data for piece in whole]
    for piece, total in zip(whole, checksums(stretches), strict=True):
        if isinstance(total, CkptoolError):
            piece.why = total.what
        elif checked and total not in piece.claims:
            piece.why = DAMAGED if piece.claims else NO_SUM
        elif not piece.named:
            piece.why = NO_NAME
        else:
            piece.crc = total
    return checked


def _drop_copies(pieces: list[_Remnant], mentions: Collection[int]) -> None:
    """Two whole records of one name: the same bytes are one record; of others nobody can tell which is meant.

    Of several pickles, which in-place edits leave, the last counts that a directory names. mentions: the headers named.
    """
    pickles = [piece for piece in pieces if not piece.why and piece.is_pickle]
    chosen = [piece for piece in pickles if piece.header in mentions][-1:] or pickles[:1]
    dropped = set(map(id, pickles)) - set(map(id, chosen))
    pieces[:] = [piece for piece in pieces if id(piece) not in dropped]
    first: dict[str, _Remnant] = {}
    for piece in pieces:
        if not piece.why:
            other = first.setdefault(piece.name, piece)
            if other is not piece and (other.crc, other.size) != (piece.crc, piece.size):
                other.why = piece.why = TWICE


# The tree ------------------------------------------------------------------------------------------------------------


class _Lossy:
    """The records of an archive, and stand-ins for those that are not whole. lost: by the id of their data."""

    def __init__(self, archive: Archive, lost: Collection[LostRecord]) -> None:
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
    """The tree, or the records by themselves where there is no pickle to say what they are.

    Raises `Corrupt` where the record of the byte order is lost, and may have said: big.
    """
    whole, checked, file = dict(archive.records), archive.has_checksums, archive.source.file
    pickle = whole.get(f"{root}data.pkl") if root else None
    if pickle is None and whole and _are_arrays(whole):
        return _arrays(archive, lost)
    if pickle is None or f"{root}constants.pkl" in whole or any(name.startswith(f"{root}code/") for name in whole):
        tree = {}
        for record in archive.by_offset():
            storage = Storage(record.data, crc=record.crc if checked else None)
            tree[record.name] = TensorEntry(storage, by_name("u8"), (record.size,), (1,))
        return Salvaged(Checkpoint(tree, torch_zip.NAME, {}, file), 0, 0, tuple(lost), checked, raw=True)
    metadata: dict[str, Any] = {}
    for key, name, limit in (
        ("byteorder", "byteorder", torch_zip.MAX_SMALL),
        (marks.RECOVERED, marks.RECOVERED_RECORD, marks.MAX_RECORD),
    ):
        said = whole[root + name].contents(limit) if root + name in whole else b""
        if said.strip():
            metadata[key] = said.decode("utf-8", "replace").strip()
    order = metadata.get("byteorder")
    gone = next((record.nbytes for record in lost if record.name == f"{root}byteorder"), None)
    # torch wrote no byte order before 2.1, and neither of these.
    newer = any(f"{root}{name}" in whole for name in (".format_version", ".storage_alignment"))
    is_known = order in ("little", "big") or gone == len("little") or (not order and gone is None and not newer)
    if not is_known and any(name.startswith(f"{root}data/") for name in whole):
        why = "Without it the byte order of its numbers is unknown; a wrong guess would give wrong values."
        raise Corrupt(f"{archive.source}: its byteorder record is damaged", why)
    lossy = _Lossy(archive, lost)
    found = torch_zip.RecordStorages(archive, root + "data/", order == "big", lossy.find)
    decoded = torch_zip.decoded_record(pickle, found)
    tree, notes = decoded.root, list[Note]()
    if (shared := whole.get(root + marks.DEDUPLICATED_RECORD)) is not None:
        tree, notes = marks.separated(tree, shared.contents(marks.MAX_DEDUPLICATED))
    archive.records = whole
    checkpoint = Checkpoint(tree, torch_zip.NAME, metadata, file, None, tuple(notes), decoded.discarded)
    every = {each.name: each for each in (*lost, *lossy.lost.values())}
    return Salvaged(checkpoint, 0, 0, tuple(every.values()), True, lost=lossy.lost)


def _arrays(archive: Archive, lost: list[LostRecord]) -> Salvaged:
    """The arrays of an `.npz`; in place of a lost one stands its record, of which neither type nor shape is proven."""
    from ckptool.formats.npz import ENDING, of_archive

    checkpoint, gone = of_archive(archive), dict[int, LostRecord]()
    for each in lost:
        name = each.name.removesuffix(ENDING)
        name = each.name if name in checkpoint.tree else name
        if each.name != marks.RECOVERED_RECORD and name not in checkpoint.tree:  # its ending may be what is damaged
            data = Computed(each.nbytes, _gone)
            gone[id(data)] = each
            checkpoint.tree[name] = TensorEntry(Storage(data), by_name("u8"), (each.nbytes,), (1,))
    return Salvaged(checkpoint, 0, 0, tuple(lost), archive.has_checksums, lost=gone)
