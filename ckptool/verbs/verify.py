"""`verify`: is a checkpoint what it was when it was written?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from ckptool import formats
from ckptool.analysis.digests import MAX_FILE, Digests, compare_digests, digests_file, read_digests, root_digests
from ckptool.analysis.fixes import Chain, runnable
from ckptool.analysis.inspect import use_notes
from ckptool.analysis.verify import (
    ALL,
    NONE,
    SOME,
    Problem,
    Progress,
    Verification,
    archive_of,
    check_archive,
    check_by_reading,
    check_storages,
    check_views,
    extent_of,
    non_finite,
)
from ckptool.checkpoint import Checkpoint, InlineBytes, Note, PartKind
from ckptool.checkpoint.files import Folder, Input, Source
from ckptool.checkpoint.plan import Plan
from ckptool.checkpoint.state_dicts import StateDict, one_state_dict
from ckptool.checkpoint.tree import address, storages, tensors
from ckptool.checkpoint.workers import Task, checked_jobs, in_turn
from ckptool.commands import FILE, OUT, command
from ckptool.errors import (
    Ambiguous,
    CkptoolError,
    Corrupt,
    LimitExceeded,
    Truncated,
    UsageError,
    counted,
    listed,
    printable,
)
from ckptool.formats import marks, members, parts, sharded
from ckptool.formats.boxes import DIFFERENT, NOT_COMPARED
from ckptool.formats.opening import PathLike, counting_whole, in_memory, open_file, open_source, part_of
from ckptool.formats.zip.directory import Archive, read_archive
from ckptool.options import option, verb
from ckptool.output import check_target, replace_file
from ckptool.verbs._options import At, Files, Jobs, Overwrite

if TYPE_CHECKING:
    from ckptool.formats.damaged import LostRecord, Salvaged

WORTH_A_PROCESS = 256 << 20  # bytes of members, below which starting another process costs more than it saves
# What the damage of a file looks like when it is opened; anything else is a file that cannot be read at all.
_DAMAGE = (Truncated, Corrupt, Ambiguous)
# Notes on whether a file is whole.
_SAID = (
    "link-elsewhere",
    *("interrupted-edit", "unused-record", "stale-shards", parts.CODE, parts.MEMBERS, DIFFERENT, NOT_COMPARED),
    *("unused-files", "other-tags", "not-joined"),  # files that were not looked at, or not together
    *("no-optimizer-files", "no-buffers", "sizes-from-pieces", "side-car-ignored"),  # what may have been there
    *("ranks-differ", "common-collides", "copies-not-shown", "steps-differ"),
)


def _words(file: Sequence[str], write_digest: str | None = None) -> dict[str, Any]:
    if write_digest is not None and len(file) > 1:
        raise UsageError(
            f"the digests of {counted(len(file), 'file')} cannot be saved to one file",
            "A file of digests describes one set of weights.",
            "Verify them one by one.",
        )
    return {}


@verb(
    ("ckptool verify model.pt --finite", "every checksum, NaN and Inf"),
    ("ckptool verify model.pt --write-digest model.digests", "for a later verify --against model.digests"),
    words=_words,
)
def verify(
    file: Files,
    *,
    at: At = None,
    finite: Annotated[bool, option("--finite", "Look for NaN and Inf as well.")] = False,
    digest: Annotated[
        bool, option("--digest", "Print a digest of every tensor of the weights, and one of all of them.")
    ] = False,
    write_digest: Annotated[PathLike | None, option("--write-digest DIGESTS", "Save the digests to this file.")] = None,
    against: Annotated[
        PathLike | None, option("--against DIGESTS", "Compare with saved digests, whatever the container.")
    ] = None,
    overwrite: Overwrite = False,
    jobs: Jobs = 1,
    progress: Progress | None = None,
) -> Verification:
    """Reads all of a checkpoint and reports everything that is wrong with it: checksums, headers, missing data.

    Where a container stores no checksums the report says so. at: only the data of that part.  finite: look for NaN and
    Inf. digest: the digests of the tensors of one set of weights (the only one, the model beside its EMA, or the part
    `at`). write_digest: keep them in this file.  against: compare with those in this file.  jobs: how many
    members of a folder are read at a time, each in a process of its own.  progress: told bytes as they are read, with
    more jobs not those of members. Raises what opening raises for a file that is no checkpoint or cannot be read, and
    `UsageError` where several sets of weights could be meant.
    """
    opened = open_file(file) if in_memory(file) else None
    source: Any
    source, place = (opened.checkpoint.source, None) if opened else open_source(file)
    path = source.path if source is not None else ""
    named = at if at is not None else place
    kept = _kept(against) if against is not None else None
    if write_digest is not None:
        check_target(write_digest, overwrite=overwrite)
    try:
        with counting_whole():
            checkpoint = opened.checkpoint if opened else formats.read_source(source)
    except _DAMAGE as error:
        if isinstance(source, Folder) and len(sharded.checkpoints_in(source)) > 1:
            raise  # none of them was looked at, so none is called damaged
        return _damaged(path, source, error)
    part = checkpoint if named is None else part_of(checkpoint, named)
    found = _checked(path, source, part, progress)
    if isinstance(source, Folder) and named is None:
        found = _with_members(found, source, checkpoint, progress, checked_jobs(jobs))
        unsafe = (note for note in use_notes(checkpoint) if note.code in ("unsafe-global", "not-judged"))
        found = replace(found, notes=(*found.notes, *unsafe))
    if finite:
        values, unsearched = non_finite(part.tree, damaged=bool(found.problems))
        found = replace(found, non_finite=tuple(values), unsearched=tuple(unsearched))
    wants_digests = digest or write_digest is not None or kept is not None
    if not wants_digests or found.problems:  # digests of damaged values would only be believed
        return found
    found = _with_digests(found, *_root(checkpoint, named))
    if write_digest is not None and found.digests is not None:
        plan = Plan({"": [InlineBytes(digests_file(found.digests))]})
        notes = replace_file(plan, write_digest, overwrite=overwrite, inputs=[source] if source else [])
        found = replace(found, notes=found.notes + notes, written=os.fspath(write_digest))
    if kept is not None and against is not None and found.digests is not None:
        found = replace(found, compared=compare_digests(kept, found.digests), against=os.fspath(against))
    return found


def _with_digests(found: Verification, root: StateDict, remark: str) -> Verification:
    if root.arrays is not None:
        remark = (
            f"{remark}; " * bool(remark) + f"{root.detail}, whose digests are those of tensors with the same values"
        )
    return replace(found, root=root.address, remark=remark, digests=root_digests(root.node))


def _kept(against: PathLike) -> Digests:
    source = Source(against)
    if source.size > MAX_FILE:
        raise LimitExceeded(f"{source}: {source.size:,} bytes of digests", f"At most {MAX_FILE:,} are read.")
    return read_digests(source.read(0, source.size), str(source))


def _root(checkpoint: Checkpoint, at: str | None) -> tuple[StateDict, str]:
    if at is None and checkpoint.tensors_only and isinstance(checkpoint.tree, dict):
        return StateDict((), checkpoint.tree, "model weights"), ""
    return one_state_dict(checkpoint, at)


# What is checked ------------------------------------------------------------------------------------------------------


def _checked(path: str, source: Input | None, checkpoint: Checkpoint, progress: Progress | None) -> Verification:
    """A file, or a folder without its members, which are read as files of their own."""
    problems = [*check_views(checkpoint), *check_by_reading(checkpoint.tree)]
    archive = archive_of(checkpoint)
    elsewhere = _files_of_members(source, checkpoint)
    checked = nbytes = 0
    for each in [archive] if archive is not None else _archives_in(checkpoint, elsewhere):
        elsewhere.append(each.source.file)
        file = "" if archive is not None else f"{printable(os.path.basename(each.source.file.path))}: "
        found = check_archive(each, checkpoint.tree, progress)
        problems += [replace(problem, record=f"{file}{problem.record}") for problem in found]
        if each.has_checksums:
            checked += len(each.records)
            nbytes += sum(record.size for record in each.records.values())
    extent = ALL if archive is not None and checked else NONE
    if archive is None:
        more, count, size = check_storages(checkpoint.tree, progress, elsewhere)
        problems, checked, nbytes = problems + more, checked + count, nbytes + size
        extent = extent_of(checkpoint.tree)
    problems += _not_intact(checkpoint)
    return Verification(
        f"{path}#{address(checkpoint.base)}" if checkpoint.base else path,
        checkpoint.container,
        source.size if source else sum(storage.nbytes for storage in storages(checkpoint.tree)),
        _count(checkpoint.tree),
        sum(1 for _ in storages(checkpoint.tree)),
        extent,
        checked,
        nbytes,
        tuple(problems),
        notes=runnable(_worth_saying(checkpoint), path),
        fixes=_fixes(path, source, problems),
        part=checkpoint.part,
        files=len(checkpoint.source.files) if isinstance(checkpoint.source, Folder) else 1,
    )


def _count(tree: Any) -> int:
    """How many tensors there are, each once, under however many names."""
    return len({id(tensor) for _, tensor in tensors(tree)})


def _archives_in(checkpoint: Checkpoint, elsewhere: list[Source]) -> Iterator[Archive]:
    """The zips among the files of a folder, but those that are read elsewhere; .distcp files are many, end to end."""
    others = {id(file) for file in elsewhere}
    own = checkpoint.source.files if isinstance(checkpoint.source, Folder) and not checkpoint.base else {}
    for file in own.values():
        if id(file) not in others and file.read(0, min(2, file.size)) == b"PK":
            try:
                archive = read_archive(file, case_matters=True)
            except CkptoolError:
                continue
            yield archive


def _members(source: Input | None, checkpoint: Checkpoint) -> tuple[str, ...]:
    layout = members.members_of(checkpoint, source) if isinstance(source, Folder) and not checkpoint.base else None
    return layout.names if layout is not None else ()


def _files_of_members(source: Input | None, checkpoint: Checkpoint) -> list[Source]:
    """The files in the tree that are read as members, each by itself."""
    folders = {name.partition("/")[0] for name in _members(source, checkpoint)}
    files = checkpoint.source.files if isinstance(checkpoint.source, Folder) else {}
    return [file for name, file in files.items() if name.partition("/")[0] in folders]


def _with_members(
    found: Verification, folder: Folder, checkpoint: Checkpoint, progress: Progress | None, jobs: int = 1
) -> Verification:
    """The same with what is wrong with the members of a folder, each of which is read as a file of its own."""
    names = _members(folder, checkpoint)
    counted = {name.partition("/")[0] for name in folder.files}
    paths = [os.path.join(folder.path, name) for name in names] if jobs > 1 else []
    jobs = min(jobs, 1 + sum(os.path.getsize(path) for path in paths if os.path.isfile(path)) // WORTH_A_PROCESS)
    with closing(in_turn(partial(_of_member, folder, progress if jobs == 1 else None), names, jobs)) as tasks:
        for name, task in zip(names, tasks, strict=True):
            one = _or_problem(os.path.join(folder.path, name), task)
            problems = [
                replace(problem, record=f"{name}: {problem.record}" if problem.record else name)
                for problem in one.problems
            ]
            found = replace(
                found,
                problems=(*found.problems, *problems),
                checked=found.checked + one.checked,
                checked_bytes=found.checked_bytes + one.checked_bytes,
                checksums=_both(found, one),
                files=found.files + (0 if name.partition("/")[0] in counted else one.files),
            )
    part = checkpoint.part
    if not found.problems and part is not None and part.kind is PartKind.MEMBERS and not part.is_complete:
        lacks = Problem(parts.CODE, f"{folder} has {part.label}: {part.meaning}", "Its own list of files names more.")
        found = replace(found, problems=(lacks,))
    return replace(found, fixes=() if found.problems else found.fixes)


def _both(found: Verification, one: Verification) -> str:
    """Whether all, some or none of the data of two have checksums."""
    extents = {each.checksums for each in (found, one) if each.storages}
    return extents.pop() if len(extents) == 1 else SOME if extents else found.checksums


def _or_problem(path: str, task: Task[Verification]) -> Verification:
    try:
        return task(None)
    except CkptoolError as error:
        return Verification(path, "", 0, 0, 0, NONE, 0, 0, (Problem(error.code, error.what, error.why),))


def _of_member(folder: Folder, progress: Progress | None, name: str, _: object) -> Verification:
    path = os.path.join(folder.path, name)
    if name.endswith(".json"):
        members.open_member(folder, name)
        return Verification(path, "json", 0, 0, 0, NONE, 0, 0, ())
    if os.path.isdir(path):
        inner, member = Folder(path), members.open_member(folder, name)  # which holds no further folders
        return _with_members(_checked(path, inner, member, progress), inner, member, progress)
    source = Source(path)
    source.share_descriptors()  # there may be thousands of ranks
    try:
        with counting_whole():
            return _checked(path, source, formats.read_alone(source), progress)
    except _DAMAGE as error:
        return _damaged(path, source, error)


def _worth_saying(checkpoint: Checkpoint) -> Iterator[Note]:
    """The notes that say something about whether the file is whole."""
    for note in checkpoint.notes:
        if note.code in _SAID:
            yield note
    if checkpoint.untied:
        shown = listed(checkpoint.untied, 3)
        yield Note("not-provable", f"nothing shows whether all files are of one step: no step is recorded in {shown}")


def _not_intact(checkpoint: Checkpoint) -> Iterator[Problem]:
    """A file that was recovered is not what was once written, whatever its checksums say."""
    said = marks.recovered_facts(str(checkpoint.metadata.get(marks.RECOVERED, "")))
    for note in marks.recovered_notes(checkpoint.metadata):
        names = (*said["filled"], *said["lost"])
        yield Problem(note.code, note.message, "It is not the file that was written.", tensors=tuple(names))


def _fixes(path: str, source: Input | None, problems: list[Problem]) -> tuple[tuple[str, ...], ...]:
    if not isinstance(source, Source) or all(problem.code == "recovered-file" for problem in problems):
        return ()
    return (Chain(path).fill(command("recover", FILE, out=OUT)),)


def _damaged(path: str, source: Input, error: CkptoolError) -> Verification:
    """The problems of a file that cannot be opened: why not, and what of it is lost."""
    from ckptool.formats.damaged import salvage

    problem = Problem(error.code, error.what, error.why)
    try:
        done = salvage(source, error)
    except CkptoolError:
        return Verification(path, "", source.size, 0, 0, NONE, 0, 0, (problem,))
    tree = done.checkpoint.tree
    return Verification(
        path,
        done.checkpoint.container,
        source.size,
        0 if done.raw else _count(tree),
        sum(1 for _ in storages(tree)),
        ALL if done.proven else NONE,
        done.whole if done.proven else 0,
        0,
        (problem, *_losses(done)),
        fixes=_fixes(path, source, [problem]),
    )


def _losses(done: Salvaged) -> Iterator[Problem]:
    """Every record that is lost, with the tensors whose data it was."""
    from ckptool.transforms.recover import lost_tensors

    names: dict[LostRecord, list[str]] = {}
    for item in lost_tensors(done.checkpoint.tree, lambda storage: done.lost_of(storage) is not None):
        record = done.lost_of(item.storage)
        if record is not None:
            names.setdefault(record, []).append(item.address)
    for record in dict.fromkeys((*done.lost_records, *names)):
        what = f"{f'the record {printable(record.name)}' if record.name else 'a tensor'} is lost"
        yield Problem("lost", what, f"{record.why}.", record.name, record.offset, tuple(names.get(record, ())))
