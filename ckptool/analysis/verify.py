"""Checks that a file is as it was written: checksums, headers, structure, values that are no numbers."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import closing, suppress
from functools import partial
from operator import itemgetter
from typing import Annotated, Any

from ckptool import formats
from ckptool.analysis.digests import Compared, Digests, readable_bytes
from ckptool.analysis.findings import Chain, runnable
from ckptool.analysis.inspect import use_notes
from ckptool.analysis.words import shape_text
from ckptool.checkpoint import Checkpoint, Composite, Computed, FileRange, Note, PartKind, PartOf, Storage, TensorEntry
from ckptool.checkpoint.arrays import fold
from ckptool.checkpoint.blocks import mismatch
from ckptool.checkpoint.dtypes import Array, has_numbers, numbers, part_type
from ckptool.checkpoint.files import Folder, Input, Source, folder_at, unchanged
from ckptool.checkpoint.jobs import Jobs, checked_jobs
from ckptool.checkpoint.numpy_arrays import tensors_and_arrays
from ckptool.checkpoint.progress import over
from ckptool.checkpoint.strided import in_storage_order
from ckptool.checkpoint.tree import address, is_meta, storages, stored_parts, tensors, walk
from ckptool.checkpoint.workers import in_turn
from ckptool.commands import FILE, OUT, command, input_of, option
from ckptool.conventions.state_dicts import find_state_dicts, is_unset
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, Truncated, counted, form, listed, quoted
from ckptool.facts import (
    MORE,
    WHOLE,
    Bytes,
    Report,
    Table,
    Told,
    bold,
    cyan,
    dataclass,
    dim,
    green,
    red,
    replace,
    short,
    size,
    yellow,
)
from ckptool.formats import marks, members, part_of, sharded
from ckptool.formats.checksums import checksums
from ckptool.formats.folder import CODE, MEMBERS
from ckptool.formats.unwritten import HALF_WAY, zero_notes
from ckptool.formats.zip.directory import LOCAL, Archive, Record, read_archive, record_of

ALL, SOME, NONE = "all", "some", "none"
# Bits of the exponent, in an integer of as many bytes: all set, it is infinite or no number.
_EXPONENTS = {"f64": ("u8", 0x7FF << 52), "f32": ("u4", 0xFF << 23), "f16": ("u2", 31 << 10), "bf16": ("u2", 255 << 7)}

BLOCK = 4 << 20  # bytes that are read at once
SHOWN = 20  # of a kind
# The errors by which opening a file shows damage; any other means that it cannot be read at all.
_DAMAGE = (Truncated, Corrupt, Ambiguous)
_WORDS = {"recovered-file": "recovered, not intact", "part": "incomplete"}  # of the only kind of problem
# Notes on whether a file is whole.
_SAID = (
    *("link-elsewhere", "interrupted-edit", "unused-record", "stale-shards", "total-size", CODE, MEMBERS),
    *("unused-files", "not-joined"),  # files that were not looked at, or not together
    *("side-car-ignored", "copies-not-shown", *marks.CHOSEN),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong.
    what, why: in words.  record: of a zip.  offset: in the file, in bytes.  tensors: addresses of those concerned."""

    code: str
    what: str
    why: str = ""
    record: str = ""
    offset: int | None = None
    tensors: tuple[str, ...] = ()


def problem_of(error: CkptoolError, *place: Any) -> Problem:
    """The problem that an error states.  place: the record, the offset, the tensors."""
    return Problem(error.code, error.what, error.why, *place)


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A tensor that holds NaN or infinite values, and how many of how many.
    unset: a single infinite number beside the weights, as a best loss is before there is one; nothing is wrong then."""

    address: str
    nans: int
    infs: int
    count: int
    unset: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Verification(Report):
    """Every problem of a file with its place; offsets and sizes in bytes.

    part: of what it is only a part; intact is not complete.  files: that the checkpoint is read from, all of which were
    looked at.  tensors: one for each name, as everywhere.
    checksums: of `all` data, of `some`, or `none`.  checked: stretches of data that were compared with theirs.
    checked_bytes: their bytes.
    non_finite: null where nobody asked.  unsearched: tensors that could not be searched for NaN.  fixes: commands, as
    argv.
    digest: if asked for.  written: the file that it was saved to.  against: how it differs from one that was kept.
    """

    schema = "verification/2"
    verdict = "fine"

    file: str
    container: str = ""
    part: PartOf | None = None
    bytes: Bytes = 0
    files: int = 1
    tensors: int = 0
    storages: int = 0
    checksums: str = NONE
    checked: int = 0
    checked_bytes: Bytes = 0
    problems: tuple[Problem, ...] = ()
    non_finite: tuple[NonFinite, ...] | None = None
    unsearched: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    fixes: tuple[tuple[str, ...], ...] = ()
    digest: Digests | None = None
    written: str = ""
    against: Compared | None = None

    @property
    def fine(self) -> bool:
        """True if nothing is wrong with what was checked, and no zeros look like a broken download."""
        is_finite = all(row.unset for row in self.non_finite or ())
        is_filled = all(note.code != HALF_WAY for note in self.notes)
        return not self.problems and is_finite and is_filled and (self.against is None or self.against.same)

    def told(
        self,
        *,
        digest: bool = False,
        quiet: Annotated[bool, option("-q --quiet", "Print only the names of files that are not fine.")] = False,
    ) -> Told:
        """The verdict in one line; below it what is wrong, with the tensors concerned; then the command that helps."""
        if quiet:
            yield from [] if self.fine else [self.file]
            return
        facts = [counted(self.tensors, "tensor"), size(self.bytes)]
        facts += [counted(self.files, "file")] if self.files > 1 else []
        if self.checked:
            sums = form(self.checked, "its checksum", "their checksums")
            sums += " (not all data has one)" if self.checksums != ALL else ""
            facts.append(f"{counted(self.checked, 'record')} checked against {sums}")
        if self.problems:
            codes = {problem.code for problem in self.problems}
            word = red(_WORDS.get(codes.pop() if len(codes) == 1 else "", "damaged"))
            verdict: tuple[str, ...] = (word, f", {counted(len(self.problems), 'problem')}")
        elif not self.fine:
            verdict = (yellow("intact, but see below" if self.part else "whole, but see below"),)
        else:
            only = "fine" if self.part and self.part.is_complete else "fine, but only part of a checkpoint"
            verdict = (green(f"{only}: {self.part.label}" if self.part and self.part.label else "fine"),)
        yield bold(self.file or "in memory"), ": ", *verdict, f" ({', '.join(facts)})"
        if self.checksums == NONE and self.container:
            yield "  no checksums stored: damage to the data cannot be detected, only what is missing or misplaced"
        yield from problem_lines(self.problems)
        unset = [row.address for row in self.non_finite or () if row.unset]
        rows = [
            (row.address or WHOLE, f"{short(row.nans)} NaN", f"{short(row.infs)} Inf", f"of {short(row.count)}")
            for row in self.non_finite or ()
            if not row.unset
        ]
        if rows:
            title = f"not finite ({len(rows):,} of {counted(max(self.tensors, len(rows)), 'tensor')})"  # and arrays
            yield Table(rows, title=title, right=(1, 2, 3), limit=SHOWN)
        elif self.non_finite is not None and not self.unsearched:
            but = f", but for what has no value yet: {listed(unset, 3)}" if unset else ""
            yield f"  all tensors have finite values{but}"
        elif self.non_finite is None and self.fine:
            yield "  not searched for NaN and Inf (--finite)"
        yield f"  not searched for NaN: {listed(self.unsearched, 5)}" if self.unsearched else None
        yield f"  {self.digest.remark}" if self.digest is not None and self.digest.remark else None
        yield f"  digests kept in {self.written}" if self.written else None
        if self.against is not None and self.digest is not None and self.against.same:
            yield f"  same as {self.against.file}: {counted(len(self.digest.tensors), 'tensor')}, by their digests"
        elif self.against is not None:
            yield bold(f"different from {self.against.file}")
            changed = [f"differs: {name} ({how})" for name, how in self.against.differing]
            missing = [f"missing: {name}" for name in self.against.missing]
            for names in (changed, missing, [f"new: {name}" for name in self.against.new]):
                yield Table([(name,) for name in names], limit=SHOWN, more="  … {} more")
        if digest and self.digest is not None:
            yield bold(f"{self.digest.root}  {self.digest.at or WHOLE}")
            rows = [(row.sha256, row.dtype, shape_text(row.shape), row.name()) for row in self.digest.tensors]
            yield Table(rows, indent=0)
        yield from (("  ", cyan(" ".join(map(quoted, fix)))) for fix in self.fixes)
        yield from self.notes


def problem_lines(problems: Iterable[Problem]) -> Told:
    """What is wrong, with the tensors concerned: the first of a kind, and how many others there are."""
    groups: dict[tuple[str, str] | int, list[Problem]] = {}
    for number, problem in enumerate(problems):  # a truncated file loses hundreds of records for one reason
        groups.setdefault((problem.code, problem.why) if problem.code == "lost" else number, []).append(problem)
    for group in list(groups.values())[:SHOWN]:
        first = group[0]
        at = f", at byte {first.offset:,}" if first.offset is not None else ""
        more = f", and {counted(len(group) - 1, 'other record')}" if len(group) > 1 else ""
        yield "  ", yellow(first.code), f": {first.what}{at}{more}"
        places = [name or WHOLE for problem in group for name in problem.tensors]
        yield f"    {listed(places, 5)}" if places else None
        yield ("    ", dim(first.why)) if first.why else None
    yield MORE.format(f"{len(groups) - SHOWN:,}") if len(groups) > SHOWN else None


# What is checked ------------------------------------------------------------------------------------------------------


def verified(
    input: Input | Checkpoint, at: str | None = None, *, finite: bool = False, jobs: Jobs = 1
) -> tuple[Verification, Checkpoint | None]:
    """All that is wrong with a file, a folder or an open checkpoint; and the checkpoint, if it could be opened.
    at, finite, jobs: see the verb."""
    jobs = checked_jobs(jobs)
    try:
        checkpoint = input if isinstance(input, Checkpoint) else formats.read_source(input)
    except _DAMAGE as error:
        if isinstance(input, Checkpoint) or (isinstance(input, Folder) and len(sharded.checkpoints_in(input)) > 1):
            raise  # none of them was read, so none is called damaged
        return _damaged_report(input, error), None
    source = checkpoint.source if isinstance(input, Checkpoint) else input
    part = checkpoint if at is None else part_of(checkpoint, at)
    with unchanged(source):
        report = _verify_data(source, part, jobs)
    if isinstance(source, Folder) and not part.base:
        notes = (*use_notes(checkpoint), *checkpoint.notes)
        said = (note for note in notes if note.code in ("unsafe-global", "not-judged", "not-read"))
        report = replace(report, notes=(*report.notes, *said))
    if finite:
        values, unsearched = non_finite(part, damaged=bool(report.problems))
        report = replace(report, non_finite=tuple(values), unsearched=tuple(unsearched))
    return report, checkpoint


def _verify_data(source: Input | None, checkpoint: Checkpoint, jobs: Jobs = 1) -> Verification:
    """The verification of a file, or of a folder with its members, each of which is read as a file of its own."""
    folder = source if isinstance(source, Folder) and not checkpoint.base else None
    layout = members.members_of(checkpoint, folder) if folder is not None else None
    names = layout.names if layout is not None else ()
    problems, extent, checked, nbytes = _data_problems(checkpoint, {name.partition("/")[0] for name in names})
    # A file that was recovered is not what was once written, whatever its checksums say.
    for note in marks.recovered_notes(checkpoint.metadata):
        why, lost = "It is not the file that the digest describes.", marks.lost_by(checkpoint.metadata[marks.RECOVERED])
        problems.append(Problem(note.code, note.message, why, tensors=tuple(lost)))
    count = sum(1 for _ in storages(checkpoint.tree))
    extents = {extent} if count else set()
    files = len(checkpoint.source.files) if isinstance(checkpoint.source, Folder) else 1
    if folder is not None:
        top_names = {name.partition("/")[0] for name in folder.files}
        with closing(in_turn(partial(_verify_member, folder), names, jobs)) as tasks:
            for name, task in zip(names, tasks, strict=True):
                try:
                    member = task()
                except CkptoolError as error:
                    member = Verification(os.path.join(folder.path, name), problems=(problem_of(error),))
                for problem in member.problems:
                    problems.append(replace(problem, record=f"{name}: {problem.record}" if problem.record else name))
                checked, nbytes = checked + member.checked, nbytes + member.checked_bytes
                if member.storages:
                    extents.add(member.checksums)
                files += 0 if name.partition("/")[0] in top_names else member.files
    part = checkpoint.part
    if folder is not None and not problems and part and part.kind is PartKind.MEMBERS and not part.is_complete:
        what = f"{folder} has {part.label}: {part.meaning}"
        problems.append(Problem(CODE, what, "Only all of its members, saved together, are the checkpoint."))
    path = source.path if source is not None else ""
    notes = [note for note in checkpoint.notes if note.code in _SAID]
    notes += zero_notes(source, checkpoint.tree) if extent != ALL else []
    if checkpoint.untied:
        no_step = "no step was read" if source is not None and source.far else "no step is recorded"
        what = f"{no_step} in {listed(checkpoint.untied, 3)}"
        notes.append(Note("not-provable", f"nothing shows whether all files come from the same step: {what}"))
    return Verification(
        file=f"{path}#{address(checkpoint.base)}" if checkpoint.base else path,
        container=checkpoint.container,
        part=part,
        bytes=source.size if source else sum(storage.nbytes for storage in storages(checkpoint.tree)),
        files=files,
        tensors=sum(1 for _ in tensors(checkpoint.tree)),
        storages=count,
        checksums=SOME if len(extents) > 1 else extents.pop() if extents else extent,
        checked=checked,
        checked_bytes=nbytes,
        problems=tuple(problems),
        notes=runnable(notes, path, checkpoint.container),
        fixes=_fixes(source, checkpoint.container, problems),
    )


def _data_problems(checkpoint: Checkpoint, excluded: Set[str]) -> tuple[list[Problem], str, int, int]:
    """What is wrong with the data of a checkpoint, except in the files and folders of these names; how much of it has
    checksums; and how many stretches were compared with theirs, and their bytes."""
    problems, seen = list[Problem](), set[int]()
    for place, storage in _storages_by_address(checkpoint.tree):
        data = storage.data
        if isinstance(data, Computed) and data.checks and id(data) not in seen:
            seen.add(id(data))
            try:  # what only reading shows: parts that several ranks saved, streams that are inflated
                # A stream is inflated to its end before its first byte is returned.
                for offset in range(0, data.length if data.inputs else 1, BLOCK):
                    data.read(offset, BLOCK if data.inputs else 1)
            except CkptoolError as error:
                problems.append(problem_of(error, "", None, (place,)))
    main = archive_of(checkpoint)
    archives = [main] if main is not None else []
    files = checkpoint.source.files if isinstance(checkpoint.source, Folder) else {}
    covered = [file for name, file in files.items() if name.partition("/")[0] in excluded]
    for name, file in files.items() if main is None and not checkpoint.base else ():
        if name.partition("/")[0] not in excluded and file.read(0, min(2, file.size)) == b"PK":
            with suppress(CkptoolError):  # .distcp files are many, end to end
                archives.append(read_archive(file, case_matters=True))
    checked = nbytes = unchecked = 0
    for archive in archives:
        covered.append(archive.source.file)
        prefix = "" if main is not None else f"{os.path.basename(archive.source.file.path)}: "
        wrong = check_archive(archive, checkpoint.tree)
        problems += [replace(problem, record=f"{prefix}{problem.record}") for problem in wrong]
        sizes = [record.size for record in archive.records.values() if record.sum is not None]
        checked, unchecked = checked + len(sizes), unchecked + len(archive.records) - len(sizes)
        nbytes += sum(sizes)
    if main is not None:
        return problems, NONE if not checked else SOME if unchecked else ALL, checked, nbytes
    wrong, extent, count, summed = check_storages(checkpoint.tree, covered)
    return problems + wrong, extent, checked + count, nbytes + summed


def _verify_member(folder: Folder, name: str) -> Verification:
    path = os.path.join(folder.path, name)
    if name.endswith(".json"):
        members.open_member(folder, name)
        return Verification(path, "json")
    if folder_at(path):
        return _verify_data(Folder(path), members.open_member(folder, name))
    source = Source(path)
    source.share_descriptors()  # there may be thousands of ranks
    try:
        return _verify_data(source, formats.read_alone(source))
    except _DAMAGE as error:
        return _damaged_report(source, error)


def _fixes(source: Input | None, container: str, problems: Sequence[Problem]) -> tuple[tuple[str, ...], ...]:
    is_alone = isinstance(source, Source) and formats.named(container).recoverable
    if source is None or not is_alone or all(problem.code == "recovered-file" for problem in problems):
        return ()
    return (Chain(source.path, container=container).fill(command("recover", FILE, out=OUT)),)


def _damaged_report(source: Input, error: CkptoolError) -> Verification:
    """The problems of a file that cannot be opened: why not, and every record that is lost, with its tensors."""
    from ckptool.formats.damaged import LostRecord, salvage

    problem = problem_of(error)
    try:
        saved = salvage(source, error)
    except CkptoolError:
        return Verification(source.path, bytes=source.size, problems=(problem,))
    names: dict[LostRecord, list[str]] = {record: [] for record in saved.lost_records}
    for tensor in saved.lost_tensors():
        names.setdefault(tensor.cause, []).append(tensor.address)
    lost = []
    for record, addresses in names.items():
        what = f"{f'the record {record.name}' if record.name else 'a tensor'} is lost"
        lost.append(Problem("lost", what, f"{record.why}.", record.name, record.offset, tuple(addresses)))
    tree = saved.checkpoint.tree
    return Verification(
        source.path,
        saved.checkpoint.container,
        bytes=source.size,
        tensors=sum(1 for _ in tensors(tree)),
        storages=sum(1 for _ in storages(tree)),
        checksums=ALL if saved.proven else NONE,
        checked=saved.whole if saved.proven else 0,
        problems=(problem, *lost),
        fixes=_fixes(source, saved.checkpoint.container, [problem]),
    )


# Checksums ------------------------------------------------------------------------------------------------------------


def archive_of(checkpoint: Checkpoint) -> Archive | None:
    """The zip archive of a checkpoint's file, with the records of the tree; None for a part of it."""
    source = checkpoint.source
    if checkpoint.base or not isinstance(source, Source) or source.read(0, min(2, source.size)) != b"PK":
        return None
    archive = getattr(checkpoint.origin, "archive", None)
    return archive if isinstance(archive, Archive) else read_archive(source, case_matters=True)


def header_damage(checkpoint: Checkpoint) -> tuple[CkptoolError, bool] | None:
    """The first header beside the data that contradicts the tables, and whether torch minds. Reads no data.
    Of a record's own header torch takes the signature and the lengths that lead to the data, and believes the directory
    for the rest (miniz, `mz_zip_reader_extract_to_mem_no_alloc1`)."""
    if checkpoint.source is not None and checkpoint.source.far:
        return None  # every header would be a request
    archive, wrong = archive_of(checkpoint), list[tuple[CkptoolError, bool]]()
    for record in archive.by_offset() if archive is not None else ():
        try:
            record.confirm()
        except (Corrupt, Ambiguous) as error:
            signature, *_, name, extra = LOCAL.unpack(record.headers.source.read(record.header, LOCAL.size))
            leads_there = record.header + LOCAL.size + name + extra == record.data_at
            wrong.append((error, signature != b"PK\3\4" or not leads_there))
    return max(wrong, key=itemgetter(1), default=None)


def refuse_damaged(checkpoint: Checkpoint) -> None:
    """Raises `Corrupt`, naming the tensors, where a file does not match the checksums that are stored in it."""
    with unchanged(checkpoint.source):
        archive = archive_of(checkpoint)
        problems = check_archive(archive, checkpoint.tree) if archive else check_storages(checkpoint.tree)[0]
    if not problems:
        return
    first, names = problems[0], [name for problem in problems for name in problem.tensors]
    detail = f", the data of {listed(names, 3)}" if names else ""
    what = f"{checkpoint.source or 'the checkpoint'} is damaged: {first.what}{detail}"
    why = "Its bytes changed after they were written; anything made from them would be damaged, too."
    raise Corrupt(what, why, f"See all damage: {command('verify', input_of(checkpoint.source))}")


def check_archive(archive: Archive, tree: Any) -> list[Problem]:
    """Every record of a zip: its own header and descriptor against the directory, its data against its checksum."""
    records, file, start = archive.by_offset(), archive.source.file, archive.source.start
    unconfirmed: dict[int, CkptoolError] = {}

    def check(record: Record) -> None:
        try:
            record.confirm()
        except CkptoolError as error:
            unconfirmed[id(record)] = error

    # Data is where the directory has it, whatever its header says.
    stretches = [
        record.data if record.method else FileRange(file, start + record.data_at, record.stored, partial(check, record))
        for record in records
    ]
    sums = checksums(stretches) if archive.headers.has_checksums else [record.crc for record in records]
    sums = [
        record.crc if record.sum is None and type(total) is int else total
        for record, total in zip(records, sums, strict=True)
    ]
    for record in records:
        check(record)
    is_intact = not unconfirmed and all(total == record.crc for record, total in zip(records, sums, strict=True))
    owners: dict[int, list[str]] = defaultdict(list)  # the addresses of the tensors in each record, by its id
    starts = [start + record.data_at for record in records]
    for place, storage in _storages_by_address(tree) if not is_intact else ():  # it walks past every name
        data = storage.data
        owner = record_of(data)  # or that of an archive inside of one of these
        is_ours = owner is not None and archive.records.get(owner.name) is owner
        if not is_ours and isinstance(data, FileRange) and data.file is file:
            index = bisect_right(starts, data.offset) - 1
            owner = records[index] if index >= 0 else None
        if owner is not None:
            owners[id(owner)].append(place)
    problems: list[Problem] = []
    for record, total in zip(records, sums, strict=True):
        location = (record.name, start + record.data_at, tuple(owners.get(id(record), ())))
        if id(record) in unconfirmed:
            problems.append(problem_of(unconfirmed[id(record)], *location))
        problems += _sum_problem(total, record.crc, f"the record {record}", location)
    return problems


def _sum_problem(
    total: int | CkptoolError, stored: int, name: str, location: tuple[str, int | None, tuple[str, ...]]
) -> Iterator[Problem]:
    """The problem of data that could not be read, or whose CRC-32 is not the stored one."""
    if isinstance(total, CkptoolError):
        yield problem_of(total, *location)
    elif total != stored:
        why = "Its bytes or its checksum changed after they were written: bad disk, memory or copy."
        yield Problem("checksum", mismatch(name, stored, total), why, *location)


def _storages_by_address(tree: Any) -> Iterator[tuple[str, Storage]]:
    """Every storage of every tensor, and those that it is computed from, with the tensor's address."""
    for path, node in walk(tree):
        for part in stored_parts(node):
            for storage in _source_storages(part.storage):
                yield address(path), storage


def _source_storages(storage: Storage) -> Iterator[Storage]:
    """A storage, those that it is computed from, and other ranks' copies of the same values."""
    for part in storage.below():
        yield part
        for replica in part.replicas:
            yield from replica.below()


def check_storages(tree: Any, covered: Iterable[Source] = ()) -> tuple[list[Problem], str, int, int]:
    """The storages of a tree with checksums of their own: problems, whether all, some or none of the data in files has
    one (not what is made of other data), how many storages, their bytes. covered: files that are checked otherwise."""
    covered_ids, summed, has_sum = {id(file) for file in covered}, dict[int, Storage](), set[bool]()
    for part in (part for storage in storages(tree) for part in _source_storages(storage)):
        if part.nbytes and not (isinstance(part.data, Computed) and part.crc is None and part.data.inputs):
            has_sum.add(part.crc is not None)
        if part.crc is not None and not (isinstance(part.data, FileRange) and id(part.data.file) in covered_ids):
            summed[id(part)] = part
    extent = SOME if len(has_sum) == 2 else ALL if True in has_sum else NONE
    sums = checksums([part.data for part in summed.values()])
    names: dict[int, list[str]] = defaultdict(list)
    if any(total != part.crc for total, part in zip(sums, summed.values(), strict=True)):
        for place, storage in _storages_by_address(tree):
            names[id(storage)].append(place)
    problems: list[Problem] = []
    for total, part in zip(sums, summed.values(), strict=True):
        file, offset = (str(part.data.file), part.data.offset) if isinstance(part.data, FileRange) else ("", None)
        location = (file, offset, tuple(names[id(part)]))
        problems += _sum_problem(total, part.crc or 0, f"a stretch of {part.nbytes:,} bytes", location)
    return problems, extent, len(summed), sum(part.nbytes for part in summed.values())


# Values ---------------------------------------------------------------------------------------------------------------


def non_finite(part: Checkpoint, *, damaged: bool = False) -> tuple[list[NonFinite], list[str]]:
    """The tensors and arrays with NaN (of complex ones in either part) or Inf, and those that could not be searched:
    packed types, views without end.

    damaged: some are known to be unreadable; those are not searched.
    """
    import numpy

    rows, unsearched, nans, infs = list[NonFinite](), list[str](), 0, 0

    def count(_: int, raw: Array) -> None:
        nonlocal nans, infs
        # The exponents show whether all are finite: four times as quick as computing with the values.
        if (numpy.bitwise_and(raw.view(kind), exponent) == exponent).any():
            with numpy.errstate(all="ignore"):  # signalling NaN
                values = numbers(raw, dtype, "wide")
            is_nan = numpy.isnan(values)
            nans += int(numpy.count_nonzero(is_nan))
            infs += int(numpy.count_nonzero(numpy.isinf(values) & ~is_nan))

    allowance, roots = readable_bytes(part.tree), find_state_dicts(part)
    by_view: dict[Any, tuple[int, int]] = {}
    for path, tensor in over(tensors_and_arrays(part.tree), lambda pair: pair[1].nbytes):
        unsearched += [address(path)] if is_meta(tensor) else []
        for entry in tensor.parts() if isinstance(tensor, Composite) else (tensor,):
            if not isinstance(entry, TensorEntry) or entry.dtype.kind not in ("float", "complex", "bits"):
                continue
            view = entry.view
            if view not in by_view:
                allowance -= entry.nbytes
                if allowance < 0 or not has_numbers(entry.dtype):
                    unsearched.append(address(path))
                    allowance += entry.nbytes if allowance < 0 else 0
                    continue
                dtype, (kind, mask) = entry.dtype, _EXPONENTS.get(part_type(entry.dtype).name, ("u1", 0))
                exponent, nans, infs = numpy.array(mask, kind), 0, 0
                try:
                    fold(count, in_storage_order(entry) or entry)
                    by_view[view] = nans, infs
                except CkptoolError:
                    if not damaged:
                        raise
                    unsearched.append(address(path))
                    continue
            nans, infs = by_view[view]
            if nans or infs:
                rows.append(NonFinite(address(path), nans, infs, entry.numel, is_unset(roots, path, entry.shape, nans)))
    return rows, unsearched
