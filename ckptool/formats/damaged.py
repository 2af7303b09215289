"""The checkpoint in a damaged file: the tree, with the tensors that are whole and stand-ins for the others.

Of a safetensors file, which has no checksums, what its header says. Of a zip, what checksums prove. Where the directory
can be read, it says where the records are, whatever became of their own headers. Of a file that lost it, the records
are walked one after the other from the first: each has its header before its data and, in what torch writes, its size
and checksum behind it. The pickle says which storages there are and how large each is, so that the walk jumps from
header to header and reads no data; where no header follows, it ends. Nothing is believed but what is proven: the data
by its checksum, the name (which no checksum covers) by header and directory together, or by the order in which torch
writes records. Where the pickle is lost, nobody can tell which bytes are which tensor: records are given as bytes, by
name.

Work is bounded: every byte is summed once, and searching ends after `BUDGET` times the size of the file.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Computed, FileRange, Note, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.files import Input, Source
from ckptool.checkpoint.graph import no_collection
from ckptool.checkpoint.tree import Path, address, storages, stored_parts, walk
from ckptool.commands import FILE, OUT, command
from ckptool.errors import CkptoolError, Corrupt, FileProblem, Truncated, UsageError, counted, form
from ckptool.facts import Bytes
from ckptool.formats import marks, safetensors, torch_zip
from ckptool.formats.checksums import checksums
from ckptool.formats.nested_streams import BUILDERS
from ckptool.formats.zip import directory
from ckptool.formats.zip.directory import Archive
from ckptool.formats.zip.record import DESCRIPTOR, DESCRIPTOR64, END, FULL, LOCAL, Record, extra_fields, zip64_values
from ckptool.pickles.decode import decode

BUDGET = 4
FREE = 1 << 20
_FEW, _CHUNK = 4 << 10, 1 << 20  # bytes that are read, or searched, at once
_OVERLAP = 1 << 9  # of what is searched: a signature is shorter
_STEP = 256  # what one step of a search costs, in bytes of reading
_MAX_NAME = 4_096
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
    with suppress(CkptoolError), no_collection():
        found = _HeaderWalk(source, min(QUICK, BUDGET * source.size + FREE), COUNTED)
        if found.sizes:
            whole = len({record.name for record in found.records if record not in found.why} & found.sizes.keys())
            count = f"{whole:,} of its {counted(len(found.sizes), 'storage')} {form(whole, 'looks', 'look')} whole."
            why = f"{error.why} {count} Copy or download it again if you can."
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


def _salvaged_zip(source: Source, error: CkptoolError | None) -> Salvaged:
    """By the directory if it can be read, or by that of the state before an edit, else by the records' own headers."""
    state, how, root, why = None, "", "", dict[Record, str]()
    try:
        state = directory.read_archive(source, confirm=False)
        how = UNDONE if any(note.code == "interrupted-edit" for note in state.notes) else ""
    except FileProblem:
        raise
    except CkptoolError as problem:
        found = _HeaderWalk(source, BUDGET * source.size + FREE)
        if (state := found.complete()) is None:
            archive, records, root, why, how = found.archive, found.records, found.root, found.why, BY_HEADERS
        elif any(
            record.header >= state.end and (record.name not in state.records) == _is_pickle(record.name)
            for record in found.records
        ):
            raise error or problem from None  # another archive was added
        else:
            how = UNDONE
    is_consistent = state is not None
    if state is not None:
        archive, records = state, state.by_offset()
        try:
            for record in records:
                record.confirm()
        except CkptoolError:
            is_consistent = False
            _settle_names(state, why)
        pickle = next((record for record in records if _is_pickle(record.name)), None)
        root = pickle.name.removesuffix("data.pkl") if pickle is not None else root
        for record in records:
            record.is_confirmed = True  # its header is not compared any more
    # What the checksums say.
    times = Counter(record.name for record in records if record not in why)
    why |= {record: TWICE for record in records if times[record.name] > 1}
    proven = archive.has_checksums = any(record.crc for record in records)
    whole = [record for record in records if record not in why]
    for record, total in zip(whole, checksums([record.data for record in whole]), strict=True):
        if isinstance(total, CkptoolError):
            why[record] = total.what
        elif proven and total != record.crc and not _is_in_descriptor(record, total):
            why[record] = DAMAGED
        else:
            record.crc = total
    archive.records = {r.name: r for r in records if r not in why and r.name.startswith(root)}
    if not archive.records:
        raise error or Corrupt(f"{source}: no record of it is whole", "Nothing can be recovered.")
    lost = [LostRecord(r.name, r.header, r.size, why[r]) for r in records if r in why and r.name not in archive.records]
    opened = _opened(archive, root, lost)
    names = {record.name for record in records} | {record.name for record in opened.lost_records}
    is_npz = not opened.raw and opened.checkpoint.container == "npz"
    # Where headers, directory and checksums all say the same, the bytes are good as they are.
    prefix = state.end if state is not None and is_consistent and not opened.lost_records else None
    return replace(
        opened, records=len(names), whole=len(archive.records), proven=proven, how=how, prefix=prefix,
        unlisted=is_npz and state is None,
    )  # fmt: skip


def _is_in_descriptor(record: Record, total: int) -> bool:
    """True for a sum that stands behind the data, where a byte of that in the directory was damaged. Where more of it
    differs, data and descriptor may be those of an older file, whole."""
    layout = {DESCRIPTOR.size: DESCRIPTOR, DESCRIPTOR64.size: DESCRIPTOR64}.get(record.descriptor_size)
    pairs = zip(total.to_bytes(4, "big"), record.crc.to_bytes(4, "big"), strict=True)
    if layout is None or sum(a != b for a, b in pairs) > 1:
        return False
    found = layout.unpack(record.archive.source.read(record.data_at + record.stored, layout.size))
    return found == (b"PK\x07\x08", total, record.stored, record.size)


def _is_pickle(name: str) -> bool:
    return name.endswith("/data.pkl") and name.count("/") == 1


def _settle_names(archive: Archive, why: dict[Record, str]) -> None:
    """Gives each record the one of two names that the pickle knows, where its own header has another than the
    directory; `why` gets those of which that cannot be told."""
    owns: dict[Record, str] = {}
    for record in archive.by_offset():
        head = archive.source.read(record.header, LOCAL.size + len(record.name.encode()))
        owns[record] = head[LOCAL.size :].decode("utf-8", "replace")
    root, known = "", dict[str, int]()
    pickle = next((record for record, own in owns.items() if _is_pickle(record.name) or _is_pickle(own)), None)
    if pickle is not None:
        names = [name for name in (pickle.name, owns[pickle]) if _is_pickle(name)]
        roots = Counter(name.partition("/")[0] for name in archive.records)
        pickle.name = owns[pickle] = max(names, key=lambda name: roots[name.partition("/")[0]])
        root, known = pickle.name.removesuffix("data.pkl"), _sizes(pickle) or {}
    free = {*known, *(root + name for name in _SMALL)} - {own for record, own in owns.items() if own == record.name}
    for record, own in owns.items():
        if own != record.name:
            fitting = [name for name in {own, record.name} & free if known.get(name, record.size) == record.size]
            if len(fitting) == 1:
                record.name = fitting[0]
            else:
                why[record] = NO_NAME


def _sizes(pickle: Record) -> dict[str, int] | None:
    """The records that a pickle names, with their sizes in bytes; None where its bytes are damaged, and none where they
    cannot be read."""
    source, data = pickle.archive.source, b""
    lossy = _Lossy(Archive(source, 0, 0, b"", has_checksums=False), ())
    pickle.is_confirmed = True
    with suppress(CkptoolError):
        data = pickle.data.read(0, pickle.size) if pickle.size <= torch_zip.inflated_limit(pickle.stored) else b""
    if pickle.crc and zlib.crc32(data) != pickle.crc:
        return None
    load = torch_zip.RecordStorages(lossy.archive, f"{pickle.name.removesuffix('data.pkl')}data/", False, lossy.find)
    try:
        decode(data, load.load, BUILDERS, file_bytes=source.size)
    except CkptoolError:
        return {}
    return {name: record.size for name, record in lossy.archive.records.items()}


class _HeaderWalk:
    """Goes through a file from header to header, as far as they lead.

    records: in the order of the file.  why: what is wrong with some of them.  ends: of the archives in it, complete or
    not.  root, sizes: the folder of the pickle, and the storages that it names.  budget: bytes that may be searched.
    most: records.
    """

    def __init__(self, source: Source, budget: int, most: int = directory.MAX_ENTRIES) -> None:
        self.source, self.budget, self.archive = source, budget, Archive(source, 0, 0, b"")
        self.records: list[Record] = []
        self.why: dict[Record, str] = {}
        self.ends: list[int] = []
        self.root = ""
        self.sizes: dict[str, int] = {}
        self.window_at, self.window = 0, b""  # what was read last
        pickles: list[Record] = []
        at: int | None = 0
        begun = False
        while at is not None and at + LOCAL.size <= source.size and len(self.records) < most:
            record = self._header(at)
            if record is None:
                # Past a directory and its end records, if there is one; else no header leads on. Where an edit's pickle
                # stands further on, what leads to it was damaged.
                is_directory, name = self._peek(at, 4) == b"PK\x01\x02", re.escape(f"{self.root}data.pkl".encode())
                before = rb"PK\x05\x06|PK\x03\x04.{26}" if is_directory else rb"PK\x05\x06.{18}PK\x03\x04.{26}"
                end = next(self._find(before + name, at), None)
                if end is not None and not (is_directory and self._peek(end, 4) == b"PK\x05\x06"):
                    what = f"{source} was edited in place, and the directory of its state before that is damaged"
                    raise Corrupt(what, "Which of its records are of the old state cannot be told.")
                at = end + END.size if end is not None else None
                self.ends += [at] if at is not None else []
                continue
            at = self._measure(record)
            self.records.append(record)
            is_first = _is_pickle(record.name) and record not in self.why and not (self.root or begun)
            is_later = self.ends and record.name == f"{self.root}data.pkl"  # any other is one of a zip inside
            if (is_first or is_later) and (sizes := _sizes(record)) is not None:
                self.root, self.sizes = record.name.removesuffix("data.pkl"), self.sizes | sizes
                pickles.append(record)
            begun = begun or _is_pickle(record.name) or "/data/" in record.name
        ended = (pickle for pickle in reversed(pickles) if not self.ends or pickle.header < self.ends[-1])
        current = next(ended, None)  # the last of which the edit was finished
        self.records = [record for record in self.records if record is current or record not in pickles]
        self._believe_names()

    def complete(self) -> Archive | None:
        """The last archive inside the file that is one by itself."""
        for end in self.ends[: -directory.MAX_EDITS - 2 : -1]:
            with suppress(CkptoolError):
                return directory.read_archive(self.source.part(0, end), confirm=False)
        return None

    def _peek(self, at: int, length: int) -> bytes:
        """Up to `length` bytes, fewer at the end of the file."""
        begin = at - self.window_at
        if begin < 0 or begin + length > len(self.window):
            begin, self.window_at = 0, at
            most = min(max(length, _FEW), self.source.size - at)
            self.window = self.source.read(at, most) if most > 0 else b""
        return self.window[begin : begin + length]

    def _find(self, pattern: bytes, at: int) -> Iterator[int]:
        """The places of a pattern from byte `at` on, as long as the budget lasts."""
        size = _FEW  # most of what is searched is short
        while self.budget > 0:
            chunk = self._peek(at, size)
            for match in re.finditer(pattern, chunk, re.DOTALL):
                self.budget -= _STEP
                yield at + match.start()
            if len(chunk) < size:
                return
            self.budget -= len(chunk)
            at, size = at + len(chunk) - _OVERLAP, _CHUNK

    def _header(self, at: int) -> Record | None:
        """The record with its header at `at`, not measured yet; None where none is that can be read."""
        raw = self._peek(at, LOCAL.size)
        if raw[:4] != b"PK\x03\x04" or len(raw) < LOCAL.size:
            return None
        _, _, flags, method, _, _, crc, stored, size, name_size, extra_size = LOCAL.unpack(raw)
        if flags & 0x2061 or method not in (0, 8) or not 0 < name_size <= _MAX_NAME:
            return None
        tail = self._peek(at + LOCAL.size, name_size + extra_size)
        extra = tail[name_size:]
        try:
            name = tail[:name_size].decode()
        except UnicodeDecodeError:
            return None
        # A wrong length of the extra field would lead to another record's data.
        if "\0" in name or not len(extra) == extra_size == sum(4 + len(content) for _, content in extra_fields(extra)):
            return None
        if FULL in (stored, size):
            size, stored, _ = zip64_values(extra, size, stored, 0) or (size, stored, 0)
        data_at = at + LOCAL.size + name_size + extra_size
        return Record(self.archive, name, b"", flags, method, crc, stored, size, at, data_at=data_at, is_confirmed=True)

    def _measure(self, record: Record) -> int | None:
        """Finds out how long a record is, and takes its checksum from its descriptor; returns where the next one
        begins, None where that cannot be told."""
        streamed = record.flags & 8 and not (record.crc or record.stored)
        known = self.sizes.get(record.name)
        if streamed:
            places = self._find(rb"PK\x07\x08", record.data_at)  # of a descriptor that fits where it stands
            if known is None or record.method:
                known = next((end - record.data_at for end in places if self._descriptors(record, end)), -1)
            record.stored = record.size = known
        elif known not in (None, record.size) or (not record.method and record.stored != record.size):
            self.why[record] = HEADER
            return None
        record.end = end = record.data_at + record.stored
        if record.stored < 0 or end > self.source.size:
            record.size, self.why[record] = max(0, record.size), CUT
            return None
        if layouts := self._descriptors(record, end):
            # The descriptor of an empty record may fit both layouts.
            layout = next((each for each in layouts if self._peek(end + each.size, 2) == b"PK"), layouts[0])
            _, record.crc, _, record.size = layout.unpack(self._peek(end, layout.size))
            record.end = end + layout.size
        elif streamed or not (record.stored or self._peek(end, 2) in (b"PK", b"")):
            self.why[record] = NO_SUM
            return None
        return record.end

    def _descriptors(self, record: Record, at: int) -> list[struct.Struct]:
        """The layouts in which there is, at `at`, a descriptor of the data up to there."""
        found, raw = [], self._peek(at, DESCRIPTOR64.size)
        for layout in (DESCRIPTOR, DESCRIPTOR64):
            if len(raw) >= layout.size:
                signature, _, stored, size = layout.unpack_from(raw)
                if signature == b"PK\x07\x08" and stored == at - record.data_at and (record.method or size == stored):
                    found.append(layout)
        return found

    def _believe_names(self) -> None:
        """Believes the names of storages as long as they come in an order in which torch writes them.

        The orders are that of the pickle, or of the numbers, and up to torch 2.2 of the keys as texts; without a pickle
        that of the numbers alone. Where another comes, the one before is in doubt as well: bytes that are missing from
        the middle put the data of one record behind the header of another.
        """
        sizes, root = [*self.sizes], self.root
        orders = [sizes, sorted(sizes, key=lambda name: (len(name), name)), sorted(sizes)]
        if not root:
            root = next((record.name.partition("data/")[0] for record in self.records if "/data/" in record.name), "")
            orders = [[f"{root}data/{number}" for number in range(len(self.records))]]
        ours = [record for record in self.records if root and record.name.startswith(f"{root}data/")]
        names = [record.name for record in ours]
        good = max(
            next((n for n, name in enumerate(names) if order[n : n + 1] != [name]), len(names)) for order in orders
        )
        for record in ours[max(0, good - 1) :] if good < len(names) else ():
            self.why.setdefault(record, NO_NAME)


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
    if pickle is None and all(name.endswith(".npy") or name == marks.RECOVERED_RECORD for name in whole):
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
    order, sizes = metadata.get("byteorder"), {record.name: record.nbytes for record in lost}
    if order is None and sizes.get(f"{root}byteorder") == len("little"):
        order = "little"
    # torch wrote no byte order before 2.1, and neither of these.
    newer = any(f"{root}{name}" in (whole | sizes) for name in ("byteorder", ".format_version", ".storage_alignment"))
    if order not in ("little", "big") and newer and any(name.startswith(f"{root}data/") for name in whole):
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
