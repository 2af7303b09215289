"""Checks that a file is as it was written: checksums, headers, structure, values that are no numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.analysis.digests import Compared, Digests, readable_bytes
from ckptool.checkpoint import (
    Checkpoint,
    Composite,
    Computed,
    Data,
    FileRange,
    Note,
    PartOf,
    Storage,
    StorageRef,
    TensorEntry,
)
from ckptool.checkpoint.blocks import chunks, mismatch
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.numeric import Array, has_numbers, numbers
from ckptool.checkpoint.registry import Report
from ckptool.checkpoint.strided import any_order
from ckptool.checkpoint.tree import Path, address, storages, stored_parts, tensors, walk
from ckptool.commands import Advice, command, input_of
from ckptool.errors import CkptoolError, Corrupt, listed
from ckptool.formats.checksums import checksums
from ckptool.formats.zip.directory import Archive, read_archive
from ckptool.formats.zip.record import Record

ALL, SOME, NONE = "all", "some", "none"
# Bits of the exponent: all set, it is infinite or no number.
_EXPONENTS = {"f64": 0x7FF0 << 48, "f32": 0x7F80 << 16, "f16": 0x7C00, "bf16": 0x7F80}
_PARTS = {"c128": "f64", "c64": "f32", "c32": "f16"}

BLOCK = 4 << 20  # bytes that are read at once

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong.

    what, why: in words.  record: of a zip.  offset: in the file, in bytes.  tensors: addresses of those concerned.
    """

    code: str
    what: str
    why: str = ""
    record: str = ""
    offset: int | None = None
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A tensor that holds NaN or infinite values, and how many of how many."""

    address: str
    nans: int
    infs: int
    count: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Verification(Report):
    """The checks and their results.

    checksums: of `all` data, of `some`, or `none`.  checked: stretches of data that were compared with theirs;
    checked_bytes: their bytes.
    tensors: each once, under however many names.
    files: that the checkpoint is read from, all of which were looked at.
    non_finite: None where nobody asked.  unsearched: tensors that could not be searched for NaN.  fixes: commands, as
    argv.
    digests: of `root`, if asked for; compared: with those that were kept.  part: of what it is only a part; intact is
    not complete.
    """

    verdict = "fine"

    file: str
    container: str
    bytes: int
    tensors: int
    storages: int
    checksums: str
    checked: int
    checked_bytes: int
    problems: tuple[Problem, ...]
    non_finite: tuple[NonFinite, ...] | None = None
    unsearched: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    fixes: tuple[tuple[str, ...], ...] = ()
    root: str = ""
    remark: str = ""
    digests: Digests | None = None
    compared: Compared | None = None
    against: str = ""
    written: str = ""
    part: PartOf | None = None
    files: int = 1

    @property
    def fine(self) -> bool:
        """True if nothing is wrong with what was checked."""
        return not (self.problems or self.non_finite or (self.compared is not None and not self.compared.same))


# Checksums ------------------------------------------------------------------------------------------------------------


def archive_of(checkpoint: Checkpoint) -> Archive | None:
    """The zip that a checkpoint's file is, with the records of the tree; None for a part of it."""
    source = checkpoint.source
    if checkpoint.base or not isinstance(source, Source) or source.read(0, min(2, source.size)) != b"PK":
        return None
    known = getattr(checkpoint.origin, "archive", None)
    return known if isinstance(known, Archive) else read_archive(source, case_matters=True)


def refuse_damaged(checkpoint: Checkpoint) -> None:
    """Raises `Corrupt`, naming the tensors, where a file does not match the checksums that are stored in it."""
    archive = archive_of(checkpoint)
    problems = list(check_archive(archive, checkpoint.tree)) if archive else check_storages(checkpoint.tree)[0]
    if not problems:
        return
    first, names = problems[0], [name for problem in problems for name in problem.tensors]
    about = f", the data of {listed(names, 3)}" if names else ""
    raise Corrupt(
        f"{checkpoint.source or 'the checkpoint'} is damaged: {first.what}{about}",
        "Its bytes changed after they were written, and anything made from them would be damaged too.",
        Advice("See all of it: ", command("verify", input_of(checkpoint.source))),
    )


def check_archive(archive: Archive, tree: Any, progress: Progress | None = None) -> Iterator[Problem]:
    """Every record of a zip: its own header and descriptor against the directory, its data against its checksum."""
    records = archive.by_offset()
    unconfirmed = {id(record): problem for record in records if (problem := _unconfirmed(record)) is not None}
    stretches = [_stretch(record) for record in records]
    sums = checksums(stretches, progress) if archive.has_checksums else [record.crc for record in records]
    whole = not unconfirmed and all(found == record.crc for record, found in zip(records, sums, strict=True))
    owners = {} if whole else _owners(records, archive, tree)  # a walk past every name
    for record, found in zip(records, sums, strict=True):
        about = (record.name, archive.source.start + record.data_at, tuple(owners.get(id(record), ())))
        if (problem := unconfirmed.get(id(record))) is not None:
            yield Problem(problem.code, problem.what, problem.why, *about)
        yield from _of_sum(found, record.crc, f"the record {record}", about)


def _of_sum(
    found: int | CkptoolError, stored: int, name: str, about: tuple[str, int | None, tuple[str, ...]]
) -> Iterator[Problem]:
    """The problem of data that could not be read, or whose CRC-32 is not the stored one."""
    if isinstance(found, CkptoolError):
        yield Problem(found.code, found.what, found.why, *about)
    elif found != stored:
        why = "Its bytes changed after they were written, or its checksum did: a bad disk, memory or copy."
        yield Problem("checksum", mismatch(name, stored, found), why, *about)


def _unconfirmed(record: Record) -> CkptoolError | None:
    try:
        record.confirm()
    except CkptoolError as error:
        return error
    return None


def _stretch(record: Record) -> Data:
    """A record's data, wherever the directory has it: headers are looked at separately."""
    source = record.archive.source
    return record.data if record.method else FileRange(source.file, source.start + record.data_at, record.stored)


def _owners(records: Sequence[Record], archive: Archive, tree: Any) -> dict[int, list[str]]:
    """The addresses of the tensors whose data is in each record, by the record's id."""
    by_data = {id(record.data): id(record) for record in records if record.is_used}
    starts = [archive.source.start + record.data_at for record in records]
    owners: dict[int, list[str]] = defaultdict(list)
    for place, storage in _storages_by_address(tree):
        data = storage.data
        owner = by_data.get(id(data))
        if owner is None and isinstance(data, FileRange) and data.file is archive.source.file:
            at = bisect_right(starts, data.offset) - 1
            owner = id(records[at]) if at >= 0 else None
        if owner is not None:
            owners[owner].append(place)
    return owners


def _storages_by_address(tree: Any) -> Iterator[tuple[str, Storage]]:
    """Every storage of every tensor, and those that it is computed from, with the tensor's address."""
    for path, node in walk(tree):
        for part in stored_parts(node):
            for storage in _below(part.storage):
                yield address(path), storage


def _below(storage: Storage) -> Iterator[Storage]:
    """A storage, those that it is computed from, and those with the same values by other ranks."""
    for each in storage.below():
        yield each
        for replica in each.replicas:
            yield from replica.below()


def check_storages(
    tree: Any, progress: Progress | None = None, but: Iterable[Source] = ()
) -> tuple[list[Problem], int, int]:
    """The storages of a tree with checksums of their own: problems, how many storages, their bytes. but: files that are
    checked otherwise."""
    others = {id(file) for file in but}
    found = {
        id(part): part
        for storage in storages(tree)
        for part in _below(storage)
        if part.crc is not None and not (isinstance(part.data, FileRange) and id(part.data.file) in others)
    }
    sums = checksums([part.data for part in found.values()], progress)
    names: dict[int, list[str]] = defaultdict(list)
    if any(total != part.crc for total, part in zip(sums, found.values(), strict=True)):
        for place, storage in _storages_by_address(tree):
            names[id(storage)].append(place)
    problems: list[Problem] = []
    for total, part in zip(sums, found.values(), strict=True):
        file, offset = (str(part.data.file), part.data.offset) if isinstance(part.data, FileRange) else ("", None)
        about = (file, offset, tuple(names[id(part)]))
        problems += _of_sum(total, part.crc or 0, f"a stretch of {part.nbytes:,} bytes", about)
    return problems, len(found), sum(part.nbytes for part in found.values())


def extent_of(tree: Any) -> str:
    """Whether all, some or none of the data in files have checksums."""
    found = {part.crc is not None for storage in storages(tree) for part in _below(storage) if not _is_made(part)}
    return SOME if len(found) == 2 else ALL if True in found else NONE


def _is_made(storage: Storage) -> bool:
    """True for a storage whose bytes are those of others, or of no file."""
    data = storage.data
    return not storage.nbytes or (isinstance(data, Computed) and storage.crc is None and bool(data.inputs))


def check_by_reading(tree: Any) -> Iterator[Problem]:
    """Reads the data whose damage only reading shows: parts that several ranks saved, streams that are inflated."""
    seen: set[int] = set()
    for place, storage in _storages_by_address(tree):
        data = storage.data
        if isinstance(data, Computed) and data.checks and id(data) not in seen:
            seen.add(id(data))
            try:
                # A stream is inflated to its end before its first byte is given.
                for offset in range(0, data.length if data.inputs else 1, BLOCK):
                    data.read(offset, BLOCK if data.inputs else 1)
            except CkptoolError as error:
                yield Problem(error.code, error.what, error.why, tensors=(place,))


# Structure ------------------------------------------------------------------------------------------------------------


def check_views(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Tensors that reach outside of their storage, and storages that reach outside of their file."""
    fine: set[int] = set()  # one tensor may stand under very many names
    for path, tensor in tensors(checkpoint.tree):
        if id(tensor) not in fine:
            problems = [problem for part in stored_parts(tensor) for problem in _outside(part, path)]
            yield from problems
            if not problems:
                fine.add(id(tensor))


def _outside(part: TensorEntry | StorageRef, path: Path) -> Iterator[Problem]:
    storage = part.storage
    if isinstance(part, TensorEntry) and not 0 <= part.span()[0] <= part.span()[1] <= storage.nbytes:
        begin, end = part.span()
        what = f"a view of bytes {begin:,} to {end:,} of a storage of {storage.nbytes:,} bytes"
        yield Problem("bad-tensor", what, "It lies outside its storage.", tensors=(address(path),))
    data = storage.data
    if isinstance(data, FileRange) and data.offset + data.length > data.file.size:
        what = f"{data.file} ends at byte {data.file.size:,}, before the data"
        yield Problem("truncated", what, "The file was cut off.", "", data.offset, (address(path),))


# Values ---------------------------------------------------------------------------------------------------------------


def non_finite(tree: Any, *, damaged: bool = False) -> tuple[list[NonFinite], list[str]]:
    """The tensors with NaN or Inf, and those that could not be searched (packed types, views without end).

    damaged: it is known that some cannot be read, which are not searched then.
    """
    found, unsearched = [], []
    left = readable_bytes(tree)
    known: dict[Any, tuple[int, int]] = {}
    for path, tensor in tensors(tree):
        for entry in tensor.parts() if isinstance(tensor, Composite) else (tensor,):
            if not isinstance(entry, TensorEntry) or entry.dtype.kind not in ("float", "complex", "bits"):
                continue
            view = entry.view
            if view not in known:
                left -= entry.nbytes
                if left < 0 or not has_numbers(entry.dtype):
                    unsearched.append(address(path))
                    left += entry.nbytes if left < 0 else 0
                    continue
                try:
                    known[view] = _special(entry)
                except CkptoolError:
                    if not damaged:
                        raise
                    unsearched.append(address(path))
                    continue
            nans, infs = known[view]
            if nans or infs:
                found.append(NonFinite(address(path), nans, infs, entry.numel))
    return found, unsearched


def _special(entry: TensorEntry) -> tuple[int, int]:
    """The numbers of values of a tensor that are NaN (in either part, of complex ones) and infinite."""
    import numpy

    nans = infs = 0
    for raw in chunks(any_order(entry), entry.dtype.itemsize, "raw"):
        if _may_be_special(raw, entry.dtype):
            with numpy.errstate(all="ignore"):  # signalling NaN
                values = numbers(raw, entry.dtype, "wide")
            bad = numpy.isnan(values)
            nans += int(numpy.count_nonzero(bad))
            infs += int(numpy.count_nonzero(numpy.isinf(values) & ~bad))
    return nans, infs


def _may_be_special(raw: Array, dtype: DType) -> bool:
    """False if the exponents show that every value is finite: four times as quick as computing with them."""
    import numpy

    name = _PARTS.get(dtype.name, dtype.name)
    mask = _EXPONENTS.get(name)
    if mask is None:
        return True
    kind = {"f64": "u8", "f32": "u4"}.get(name, "u2")
    bits = raw.view(kind)
    wanted = numpy.array(mask, kind)
    return bool((numpy.bitwise_and(bits, wanted) == wanted).any())
