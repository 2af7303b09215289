"""The checkpoint in a damaged file: the tree, with the tensors that are whole and stand-ins for the others.

A safetensors file has no checksums: its header is taken at its word. In a zip, the records are those that its directory
lists, if it can be read; else those found by walking from header to header, from the first one to the end of a cut file
or to a damaged header. torch writes a record's size and checksum behind its data; the pickle, which comes first, says
how large each storage is, so the walk jumps from header to header and reads no data. Only what is proven is believed:
the data by its checksum; the name, which no checksum covers, where directory and header agree, or by its place in the
order in which torch writes records. A zip inside a tensor is never mistaken for the file itself. Where the pickle is
lost, nobody can tell which bytes are which tensor, and nothing is recovered. Every byte is searched once and summed
once.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Annotated, Any

from ckptool.checkpoint import Checkpoint, Composite, Computed, FileRange, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.files import Input, Source, unchanged
from ckptool.checkpoint.graph import no_collection, visit
from ckptool.checkpoint.nodes import Set, same_kind
from ckptool.checkpoint.tree import address, rebuild, storages, stored_parts, walk
from ckptool.commands import OUT, OUT_PT, command, other_program
from ckptool.conventions.state_dicts import optimizers
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, FileProblem, Unsupported, UsageError, counted
from ckptool.facts import LIVE, Bytes, dataclass, replace
from ckptool.formats import DEFAULT, for_output, marks, safetensors, torch_zip
from ckptool.formats.checksums import checksums
from ckptool.formats.nested_streams import BUILDERS
from ckptool.formats.zip import directory
from ckptool.formats.zip.directory import CENTRAL, DESCRIPTOR, DESCRIPTOR64, FULL, LOCAL, Archive, Headers, Record
from ckptool.pickles.decode import decode

_FEW, _CHUNK = 4 << 10, 1 << 20  # bytes searched at a time: at first, and from then on
MOST_PICKLES = 8  # inflated at most: a small file may have thousands
QUICK = 16 << 20  # bytes searched to count the records
COUNTED = 100_000  # records looked at in doing so
CUT = "the file ends before it does"
DAMAGED = "its data does not match its checksum"
HEADER = "its header is damaged"
NO_SUM = "its checksum is damaged or cut off"
NO_NAME = "its name cannot be proven: its header or the directory is damaged"
TWICE = "two different records have its name"
MISSING = "it is not in the file"
UNDONE = "left out what follows the archive: an in-place edit that is not whole, or something else"
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
    """A tensor or storage that is lost. record, offset: of its data (offset None: unknown).  nbytes: of its values.
    node: what stands in its place.  cause: the lost record."""

    address: str
    record: str
    offset: int | None
    nbytes: Bytes
    why: str
    node: Annotated[TensorEntry | Composite | StorageRef, LIVE]
    cause: Annotated[LostRecord, LIVE]


@dataclass(slots=True, eq=False)
class Salvaged:
    """The contents of a damaged file.

    checkpoint: the tree, with lost storages in it.  records, whole: how many there were, and are.  proven: by
    checksums.  how: what was done.  prefix: how many bytes at its beginning are a whole archive as they are (None: none
    are).
    """

    checkpoint: Checkpoint
    records: int
    whole: int
    lost_records: tuple[LostRecord, ...]
    proven: bool
    how: str = ""
    prefix: int | None = None

    def lost_tensors(self) -> list[LostTensor]:
        """Everything in the tree that cannot be read, in order; a tensor in two places comes twice."""
        lost = []
        for path, node in walk(self.checkpoint.tree):
            losses = ((stored.storage, lost_of(stored.storage)) for stored in stored_parts(node))
            loss = next(((storage, record) for storage, record in losses if record is not None), None)
            if loss is not None:
                storage, record = loss
                nbytes = (storage if isinstance(node, StorageRef) else node).nbytes
                lost.append(LostTensor(address(path), record.name, record.offset, nbytes, record.why, node, record))
        return lost

    def restored(self) -> tuple[Checkpoint, list[LostTensor], list[str]]:
        """The checkpoint without what is lost, marked if anything is; what that is; and the addresses of an optimizer's
        states that had to go along with it."""
        checkpoint, lost = self.checkpoint, self.lost_tensors()
        if not lost:
            return replace(checkpoint, origin=None), lost, []
        tree, dropped = _without_nodes(checkpoint.tree, {id(tensor.node) for tensor in lost})
        earlier = str(checkpoint.metadata.get(marks.RECOVERED, ""))
        mark = marks.recovered_mark([tensor.address for tensor in lost], earlier)
        metadata = {**checkpoint.metadata, marks.RECOVERED: mark}
        return replace(checkpoint, tree=tree, metadata=metadata, origin=None), lost, dropped


def _without_nodes(tree: Any, ids: set[int]) -> tuple[Any, list[str]]:
    """The tree without the nodes of these ids, and the addresses of an optimizer's states that had to go along.

    An entry of a dictionary is left out; in a list or tuple, where the others would move up, None stands in its place.
    The state that an optimizer keeps for a parameter goes as a whole: half of it is worse than none.
    """
    slots, names = set(), []
    for path, optimizer in optimizers(tree):
        state = optimizer["state"]
        for key, slot in state.items():
            if isinstance(slot, dict) and any(id(value) in ids for value in slot.values()):
                slots.add((id(state), key))
                names.append(address((*path, "state", key)))
    replaced: dict[int, Any] = {}
    for node in visit(tree):  # inside of objects too
        if isinstance(node, dict):
            items = {key: value for key, value in node.items() if id(value) not in ids and (id(node), key) not in slots}
            if len(items) < len(node):
                replaced[id(node)] = same_kind(node, items)
        elif isinstance(node, Set) and any(id(item) in ids for item in node.items):
            replaced[id(node)] = Set([item for item in node.items if id(item) not in ids], node.frozen)
        elif isinstance(node, (list, tuple)) and any(id(item) in ids for item in node):
            replaced[id(node)] = type(node)(None if id(item) in ids else item for item in node)
    return rebuild(tree, lambda node: None if id(node) in ids else node, replaced), names


@dataclass(frozen=True, slots=True)
class NotThere:
    """Reads data that is lost: raises `Corrupt`."""

    record: LostRecord

    def __call__(self, offset: int, length: int) -> bytes:
        raise Corrupt("the data of this tensor is lost", "It was not in the damaged file, or not whole.")


def lost_of(storage: Storage) -> LostRecord | None:
    """Why a storage's data is lost; None if it is there."""
    return next((read.record for leaf in storage.below() if isinstance(read := leaf.data.read, NotThere)), None)


def salvage(source: Input, error: CkptoolError | None = None) -> Salvaged:
    """The contents of `source`, which was found damaged (`error`: how).

    Raises `error` where nothing can be recovered, `FileProblem`, or `UsageError` for a folder or another container.
    """
    if not isinstance(source, Source):
        fix = f"See which is damaged: {command('scan', source.path, full=True)}"
        raise UsageError(f"{source} is a folder", "Files are recovered one by one.", fix)
    head = source.read(0, min(16, source.size))
    with no_collection(), unchanged(source):
        is_safetensors = safetensors.detect(head, source)
        if head[:2] == b"PK" or (not is_safetensors and directory.ends_as_zip(source)):
            return _salvaged_zip(source, error)
        if not is_safetensors:
            raise error or _not_recovered(source)
        # The tensors whose ranges are inside the file; nobody can say whether their bytes are the right ones.
        checkpoint, offsets, lost = safetensors.read(source, cut=True), set[int](), dict[int, LostRecord]()
        for storage in reversed([*storages(checkpoint.tree)]):
            for leaf in storage.below():
                if isinstance(data := leaf.data, FileRange):
                    offsets.add(data.offset)
                    if data.offset + data.length > source.size:
                        lost[data.offset] = LostRecord("", data.offset, data.length, CUT)
                        leaf.data = Computed(data.length, NotThere(lost[data.offset]))
        return Salvaged(checkpoint, len(offsets), len(offsets) - len(lost), tuple(lost.values()), False)


def _not_recovered(source: Source) -> UsageError:
    what, why = f"ckptool cannot recover {source}", "It recovers torch zips and safetensors files."
    return UsageError(what, why, "Copy or download it again.")


def with_whole_count(error: CkptoolError, source: Input) -> CkptoolError:
    """The error for a zip that is cut off or damaged, with how to save it, and how many of its storages look whole
    (unread) unless only its first bytes are damaged; the same error where that cannot be known."""
    if not isinstance(source, Source):
        return error
    is_misnamed = for_output(source.path, DEFAULT).tensors_only
    fix = f"Save what is whole: {command('recover', source.path, out=OUT_PT if is_misnamed else OUT)}"
    with suppress(CkptoolError), no_collection():
        if source.read(0, min(4, source.size)) != b"PK\x03\x04":  # its directory may be whole, and its pickle
            records = directory.read_archive(source, case_matters=True, confirm=False).records
            pickle = records.get(f"{(root := _root(records))}data.pkl")
            if pickle is not None and not _is_program(root, records):
                pickle.is_confirmed = True
                pickle.contents(torch_zip.inflated_limit(pickle.stored))
                return type(error)(error.what, error.why, fix)
        walk = _Walk(source, QUICK, COUNTED)
        intact = [record for record in walk.records if record.name in walk.sizes and record not in walk.why]
        if walk.sizes and not _is_program(walk.root, [record.name for record in walk.records]):
            storages = counted(len(walk.sizes), "storage")
            tally = counted(len(intact), f"of its {storages} looks whole", f"of its {storages} look whole")
            return type(error)(error.what, f"{error.why} {tally}. Copy or download it again if you can.", fix)
    return error


# The records of a zip ------------------------------------------------------------------------------------------------


def _salvaged_zip(source: Source, error: CkptoolError | None) -> Salvaged:
    """From the directory if it can be read, else from the records' own headers.

    Raises `Corrupt` where the pickle is lost, or the record of the byte order, which may have said: big; `Unsupported`
    for a program of TorchScript.
    """
    state: Archive | None = None
    try:
        state = directory.read_archive(source, case_matters=True, confirm=False)
    except FileProblem:
        raise
    except CkptoolError as problem:
        error = error or problem
    walk, root = None, _root(state.records) if state is not None else ""
    if not root:  # a name in it may be what is damaged
        state, walk = None, _Walk(source, source.size)
        root = walk.root
        if not root:
            raise error or _not_recovered(source)
    # The record that begins the file may not be in the state any more; torch looks at its first bytes all the same.
    is_exact = source.read(0, 4) == b"PK\x03\x04" and state is not None and all(map(_agrees, state.records.values()))
    if state is not None:
        archive, records = state, state.by_offset()
        how = UNDONE if state.end < source.size else ""
        pickle = state.records.get(f"{root}data.pkl")  # which proves its own name
        why = {record: NO_NAME for record in records if record is not pickle and not _agrees(record, name_alone=True)}
    elif walk is not None:
        archive, records, how, why = walk.archive, walk.records, BY_HEADERS, walk.why
    archive.headers.has_checksums = any(record.crc for record in records)
    proven = all(record.sum is not None for record in records)
    for record in records:
        record.is_confirmed = True  # as far as it ever will be
    summed = [record for record in records if record not in why]
    for record, total in zip(summed, checksums([record.data for record in summed]), strict=True):
        if isinstance(total, CkptoolError):
            why[record] = total.what
        elif record.sum not in (None, total):
            why[record] = DAMAGED
    by_name: dict[str, Record] = {}
    for record in records:  # the same bytes are one record; of others nobody can tell which is meant
        first = by_name.setdefault(record.name, record) if record not in why else record
        if (first.crc, first.size) != (record.crc, record.size):
            why[first] = why[record] = TWICE
    archive.records = {record.name: record for record in records if record not in why and record.name.startswith(root)}
    lost = [
        LostRecord(record.name, record.header, record.size, why.get(record, NO_NAME))
        for record in records
        if record.name not in archive.records and (record in why or not record.name.startswith(root))
    ]
    # The tree, of the whole records alone.
    intact = dict(archive.records)
    unzip = f"Unpack it: {other_program('unzip -d', f'{source.path}.unpacked', source.path)}"
    if f"{root}data.pkl" not in intact:
        what = f"{source}: its pickle is lost, which says what the bytes of the other records are"
        raise Corrupt(what, "They cannot be put together again, only looked at.", unzip)
    if _is_program(root, intact):
        raise Unsupported(f"{source} is a program of TorchScript", "Without all of it, it does not run.", unzip)
    # The length alone tells "big" from "little"; torch wrote no byte order before 2.1.
    sizes = {record.name: record.size for record in intact.values()} | {loss.name: loss.nbytes for loss in lost}
    exempt = (f"{root}version", f"{root}data.pkl")
    short = any(size == len("big") for name, size in sizes.items() if name not in exempt and f"{root}data/" not in name)
    if short and f"{root}byteorder" not in intact:
        unknown = "Without it the byte order of its numbers is unknown; a wrong guess would give wrong values."
        raise Corrupt(f"{source}: its byteorder record is damaged", unknown)
    lossy = _Lossy(archive, lost)
    checkpoint = torch_zip.of_archive(archive, lossy.find)
    if any(loss.name == root + marks.RECOVERED_RECORD for loss in lost):
        checkpoint.metadata[marks.RECOVERED] = marks.recovered_mark([])  # what they were is lost, too
    losses = {loss.name: loss for loss in lost} | lossy.lost
    count = len({record.name for record in records} | losses.keys())
    # Where its headers and checksums all say the same, its bytes are good as they are.
    prefix = state.end if state is not None and is_exact and not losses else None
    return Salvaged(checkpoint, count, len(intact), tuple(losses.values()), proven, how, prefix)


def _is_pickle(name: str) -> bool:
    return name.endswith("/data.pkl") and name.count("/") == 1


def _is_program(root: str, names: Collection[str]) -> bool:
    return f"{root}constants.pkl" in names or any(name.startswith(f"{root}code/") for name in names)


def _root(names: Iterable[str]) -> str:
    """The folder that holds the records of a checkpoint; "" where they are not one's."""
    root = next((name.removesuffix("data.pkl") for name in names if _is_pickle(name)), "")
    return root if all(name.startswith(root) for name in names) else ""


def _agrees(record: Record, *, name_alone: bool = False) -> bool:
    """True if the record's own header says what the directory does."""
    try:
        record.confirm(name_alone=name_alone)
    except (Ambiguous, Corrupt):
        return False
    return True


class _Walk:
    """Goes through a file from header to header, as far as they lead.

    records, why: the records in order, and what is wrong with some of them.  root, sizes: the folder of the pickle, and
    the storages that it names.  listed: the names in a directory.  budget: bytes that may be searched.
    """

    def __init__(self, source: Source, budget: int, max_records: int = directory.MAX_ENTRIES) -> None:
        self.source, self.budget = source, budget
        self.archive = Archive(Headers(source, has_checksums=False), 0, 0, b"")
        self.records: list[Record] = []
        self.why: dict[Record, str] = {}
        self.root, self.sizes, self.listed = "", dict[str, int](), list[str]()
        self.pickles = 0  # that were tried
        at, previous = 0, -1
        while previous < at and len(self.records) < max_records:
            previous, at = at, self._add_record(at)
            if at == previous:
                at = self._past_directory(at)
        if sum(_is_pickle(record.name) for record in self.records) > 1:  # of an edited file; which counts, its end says
            self.root, self.sizes = "", {}
        self._prove_names()

    def _peek(self, at: int, length: int) -> bytes:
        """Up to `length` bytes, fewer at the end of the file."""
        at = min(at, self.source.size)
        return self.archive.headers.peek(at, min(length, self.source.size - at))

    def _add_record(self, at: int) -> int:
        """Adds the record whose header is at `at`, if a usual one is there; gives the byte at which to go on."""
        head = self._peek(at, LOCAL.size)
        if head[:4] != b"PK\x03\x04" or len(head) < LOCAL.size:
            return at
        _, _, flags, method, _, _, crc, stored, size, name_size, extra_size = LOCAL.unpack(head)
        tail = self._peek(at + LOCAL.size, name_size + extra_size)
        name, extra = tail[:name_size].decode("utf-8", "replace"), tail[name_size:]
        # A wrong length of the extra field would lead to another record's data.
        is_whole = len(tail) == name_size + sum(4 + len(content) for _, content in directory.extra_fields(extra))
        if not (name and is_whole and len(extra) == extra_size) or flags & 0x2061 or method not in (0, 8):
            return at
        if FULL in (stored, size):
            size, stored, _ = directory.zip64_values(extra, size, stored, 0) or (size, stored, 0)
        data_at = at + LOCAL.size + name_size + extra_size
        record = Record(self.archive.headers, name, b"", flags, method, crc, stored, size, at, data_at=data_at)
        record.is_confirmed = True
        self.records.append(record)
        if flags & 8 and not stored:
            known_size = self.sizes.get(name) if not method else None
            record.stored = self._search_length(record) if known_size is None else known_size
            record.size = max(0, record.stored)
        end: int = data_at + record.stored
        if record.stored < 0 or end > self.source.size:
            self.why[record] = CUT
            return self.source.size
        if flags & 8:
            layout = self._descriptor(record, end)
            if layout is None:
                self.why[record] = NO_SUM
                return end + (DESCRIPTOR64 if max(size, at) >= FULL else DESCRIPTOR).size
            _, record.crc, _, record.size = layout.unpack(self._peek(end, layout.size))
            end += layout.size
        elif (size != stored and not method) or (not stored and self._peek(end, 2) not in (b"PK", b"")):
            self.why[record] = HEADER  # nothing proves that it has no data
        if not self.root and _is_pickle(name) and self.pickles < MOST_PICKLES:
            self.pickles += 1
            # The storages and their sizes, of a pickle that its checksum proves.
            lossy = _Lossy(Archive(Headers(self.source, has_checksums=False), 0, 0, b""), ())
            with suppress(CkptoolError):
                data = record.contents(torch_zip.inflated_limit(record.stored))
                if record.crc in (0, zlib.crc32(data)):
                    self.root = name.removesuffix("data.pkl")
                    storages = torch_zip.RecordStorages(lossy.archive, f"{self.root}data/", False, lossy.find)
                    decode(data, storages.load, BUILDERS, file_bytes=self.source.size)
                    self.sizes = {name: record.size for name, record in lossy.archive.records.items()}
        return end

    def _search_length(self, record: Record) -> int:
        """The length of data whose length is stated nowhere: up to a descriptor that fits its place (-1: none)."""
        at, length = record.data_at, _FEW  # most such records are short
        while self.budget > 0 and len(chunk := self._peek(at, length)) >= DESCRIPTOR.size:
            for match in re.finditer(b"PK\x07\x08", chunk):
                place = at + match.start() - record.data_at
                says = int.from_bytes(chunk[match.start() + 8 : match.start() + 12], "little")
                if says == place & FULL and self._descriptor(record, record.data_at + place) is not None:
                    return place
            if len(chunk) < length:
                break
            self.budget -= len(chunk)
            at, length = at + len(chunk) - DESCRIPTOR.size + 1, _CHUNK
        return -1

    def _descriptor(self, record: Record, at: int) -> struct.Struct | None:
        """The layout of the descriptor at `at`, if there is one of the data up to there."""
        fits = []
        for layout in (DESCRIPTOR, DESCRIPTOR64):
            if len(raw := self._peek(at, layout.size)) == layout.size:
                signature, _, stored, size = layout.unpack(raw)
                if signature == b"PK\x07\x08" and stored == at - record.data_at and (record.method or size == stored):
                    fits.append(layout)
        # That of an empty record may fit both.
        return next((layout for layout in fits if self._peek(at + layout.size, 2) == b"PK"), fits[0] if fits else None)

    def _past_directory(self, at: int) -> int:
        """Where the directory at `at` and the end records behind it end, as far as they are good."""
        while (line := self._peek(at, CENTRAL.size))[:4] == b"PK\x01\x02" and len(line) == CENTRAL.size:
            sizes = CENTRAL.unpack(line)[10:13]
            self.listed.append(self._peek(at + CENTRAL.size, sizes[0]).decode("utf-8", "replace"))
            at += CENTRAL.size + sum(sizes)
        for signature, layout in directory.END_RECORDS:
            at += layout.size if self._peek(at, 4) == signature else 0
        return at

    def _prove_names(self) -> None:
        """Believes names on which directory and headers agree, else those of storages in an order that torch writes.

        That is the order of the pickle, or of the keys as numbers; up to torch 2.2, of the keys as texts. From a record
        out of order on, nothing is proven, nor is the storage before it: bytes that are missing from the middle put the
        data of one record behind the header of another.
        """
        if self.listed == [record.name for record in self.records]:
            return
        sizes = [*self.sizes]
        orders = [sizes, sorted(sizes, key=lambda name: (len(name), name)), sorted(sizes)]
        matched, last = 0, None
        for number, record in enumerate(self.records):
            if fitting := [order for order in orders if order[matched : matched + 1] == [record.name]]:
                orders, matched, last = fitting, matched + 1, record
            elif record.name in self.sizes or 0 < matched < len(sizes):
                unproven = [*self.records[number:], *([last] if last is not None else ())]
                self.why |= {record: NO_NAME for record in unproven if record not in self.why}
                return


# The tree ------------------------------------------------------------------------------------------------------------


class _Lossy:
    """The records of an archive, with stand-ins for those that are not whole. lost: these, by name."""

    def __init__(self, archive: Archive, lost: Collection[LostRecord]) -> None:
        self.archive = archive
        self.reasons = {record.name: record for record in lost}
        self.lost: dict[str, LostRecord] = {}

    def find(self, name: str, size: int) -> Record | None:
        record = self.archive.records.get(name)
        if size >= 0 and (record is None or (record.size != size and name not in self.lost)):
            why = self.reasons.get(name) or LostRecord(name, None, size, MISSING if record is None else HEADER)
            record = self.archive.records[name] = Record(self.archive.headers, name, b"", 0, 0, 0, size, size, 0)
            self.lost[name] = replace(why, nbytes=size)
            record.stand_in = Computed(size, NotThere(self.lost[name]))
        return record
