"""`verify`: is a checkpoint what it was when it was written?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptool import formats
from ckptool.checkpoint import Checkpoint, InlineBytes, Note
from ckptool.checkpoint.commands import FILE, OUT, command
from ckptool.checkpoint.files import Folder, Input, Source, open_input
from ckptool.checkpoint.plan import Plan
from ckptool.checkpoint.state_dicts import StateDict, one_state_dict
from ckptool.checkpoint.tree import address, storages, tensors
from ckptool.errors import (
    Ambiguous,
    CkptoolError,
    Corrupt,
    LimitExceeded,
    Truncated,
    printable,
)
from ckptool.formats import marks, members, named, parts, sharded
from ckptool.formats.opening import PathLike, counting_whole, part_of, split
from ckptool.output import check_target, replace_file
from ckptool.reports.digests import MAX_FILE, Digests, compare_digests, digests_file, read_digests, root_digests
from ckptool.reports.fixes import Chain, runnable
from ckptool.reports.verify import (
    ALL,
    NONE,
    SOME,
    Problem,
    Progress,
    Verification,
    archive_of,
    check_archive,
    check_storages,
    check_views,
    non_finite,
)

if TYPE_CHECKING:
    from ckptool.formats.damaged import LostRecord, Salvaged

# What the damage of a file looks like when it is opened; anything else is a file that cannot be read at all.
_DAMAGE = (Truncated, Corrupt, Ambiguous)


def verify(
    file: PathLike,
    *,
    at: str | None = None,
    finite: bool = False,
    digest: bool = False,
    write_digest: PathLike | None = None,
    against: PathLike | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Reads all of a checkpoint and reports everything that is wrong with it: checksums, headers, missing data.

    Where a container stores no checksums the report says so. at: only the data of that part.  finite: look for NaN and
    Inf. digest: the digests of the tensors of one set of weights (the only one, the model beside its EMA, or the part
    `at`). write_digest: keep them in this file.  against: compare with those in this file.  progress: told bytes as
    they are read. Raises what opening raises for a file that is no checkpoint or cannot be read, and `UsageError` where
    several sets of weights could be meant.
    """
    path, place = split(file)
    named = at if at is not None else place
    source = open_input(path)
    kept = _kept(against) if against is not None else None
    if write_digest is not None:
        check_target(write_digest, overwrite=overwrite)
    try:
        with counting_whole():
            checkpoint = formats.read_source(source)
    except _DAMAGE as error:
        if isinstance(source, Folder) and len(sharded.checkpoints_in(source)) > 1:
            raise  # none of them was looked at, so none is called damaged
        return _damaged(path, source, error)
    part = checkpoint if named is None else part_of(checkpoint, named)
    found = _checked(path, source, part, progress)
    if isinstance(source, Folder) and named is None:
        found = _with_members(found, source, checkpoint, progress)
    if finite:
        values, unsearched = non_finite(part.tree)
        found = replace(found, non_finite=tuple(values), unsearched=tuple(unsearched))
    wants_digests = digest or write_digest is not None or kept is not None
    if not wants_digests or found.problems:  # digests of damaged values would only be believed
        return found
    found = _with_digests(found, *_root(checkpoint, named))
    if write_digest is not None and found.digests is not None:
        plan = Plan({"": [InlineBytes(digests_file(found.digests))]})
        notes = replace_file(plan, write_digest, overwrite=overwrite, inputs=[source])
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


def _checked(path: str, source: Input, checkpoint: Checkpoint, progress: Progress | None) -> Verification:
    problems = list(check_views(checkpoint))
    archive = archive_of(checkpoint)
    everything = list(storages(checkpoint.tree))
    if archive is not None:
        problems += check_archive(archive, checkpoint.tree, progress)
        checked = len(archive.records) if archive.has_checksums else 0
        nbytes = sum(record.size for record in archive.records.values()) if checked else 0
        extent = ALL if checked else NONE
    else:
        more, checked, nbytes = check_storages(checkpoint.tree, progress, checkpoint.unshown)
        problems += more
        extent = NONE if not checked else ALL if nbytes >= sum(storage.nbytes for storage in everything) else SOME
    problems += _not_intact(checkpoint)
    return Verification(
        f"{path}#{address(checkpoint.base)}" if checkpoint.base else path,
        checkpoint.container,
        source.size,
        sum(1 for _ in tensors(checkpoint.tree)),
        len(everything),
        extent,
        checked,
        nbytes,
        tuple(problems),
        notes=runnable(_worth_saying(checkpoint), path),
        fixes=_fixes(path, source, problems),
        part=checkpoint.part,
    )


def _with_members(
    found: Verification, folder: Folder, checkpoint: Checkpoint, progress: Progress | None
) -> Verification:
    """The same with what is wrong with the members of a folder, each of which is read as a file of its own."""
    joined = named(checkpoint.container).joined
    layout = members.layout_of(folder, beside=joined)
    if layout is None:
        return found
    problems = list(found.problems) if joined else []
    for name in layout.names:
        problems += [
            replace(problem, record=f"{name}: {problem.record}" if problem.record else name)
            for problem in _of_member(folder, name, progress)
        ]
    return replace(found, problems=tuple(problems), fixes=() if problems else found.fixes)


def _of_member(folder: Folder, name: str, progress: Progress | None) -> tuple[Problem, ...]:
    path = os.path.join(folder.path, name)
    try:
        if name.endswith(".json"):
            members.read_json(folder, name)
            return ()
        if os.path.isdir(path):
            inner, member = Folder(path), members.open_member(folder, name)  # which holds no further folders
            return _with_members(_checked(path, inner, member, progress), inner, member, progress).problems
        return verify(path, progress=progress).problems
    except CkptoolError as error:
        return (Problem(error.code, error.what, error.why),)


def _worth_saying(checkpoint: Checkpoint) -> Iterator[Note]:
    """The notes that say something about whether the file is whole."""
    for note in checkpoint.notes:
        if note.code in ("interrupted-edit", "unused-record", parts.CODE, parts.MEMBERS):
            yield note


def _not_intact(checkpoint: Checkpoint) -> Iterator[Problem]:
    """A file that was recovered is not what was once written, whatever its checksums say."""
    said = marks.recovered_facts(str(checkpoint.metadata.get(marks.RECOVERED, "")))
    for note in marks.recovered_notes(checkpoint.metadata):
        names = (*said["filled"], *said["lost"])
        yield Problem(note.code, note.message, "It is not the file that was written.", tensors=tuple(names))


def _fixes(path: str, source: Input, problems: list[Problem]) -> tuple[tuple[str, ...], ...]:
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
        0 if done.raw else sum(1 for _ in tensors(tree)),
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
