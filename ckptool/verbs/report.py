"""`report`: one page about a checkpoint or several, for people to look at."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import nlargest
from typing import Annotated, NamedTuple

from ckptool.analysis.diff import Diff
from ckptool.analysis.distances import Unreadable, Weights, distances, norms_over_time, weights_of
from ckptool.analysis.health import health
from ckptool.analysis.inspect import Inspection, Listing, listing
from ckptool.analysis.pictures import MOST_THUMBNAILS, detail, pictured
from ckptool.analysis.report import CheckpointReport, Distances, FileReport, Health, NormsOverTime, TensorPicture
from ckptool.analysis.statistics import Statistics
from ckptool.analysis.train import GOOD, RunReport
from ckptool.checkpoint import Composite, InlineBytes, TensorEntry
from ckptool.checkpoint.files import unchanged
from ckptool.checkpoint.plan import Plan
from ckptool.commands import Advice, command
from ckptool.errors import CkptoolError, Conflict, FileProblem, UsageError
from ckptool.formats.opening import CheckpointLike, Opened, PathLike, open_file, split
from ckptool.options import argument, option, verb
from ckptool.output import check_target, replace_file
from ckptool.render.diff import differs_by_prefix
from ckptool.training import is_run
from ckptool.verbs._options import Out, Overwrite
from ckptool.verbs.inspect import inspection_notes

MOST_STEPS = 50  # checkpoints of a run that are read
MOST_NAMES = 50_000  # tensors of all of them
_DOCTYPE = b"<!DOCTYPE html>"


@verb(
    ("ckptool report model.pt -o page.html", "its contents, values and health"),
    ("ckptool report model.pt other.pt -o changes.html", "what changed between the two"),
)
def report(
    file: Annotated[
        CheckpointLike,
        argument(
            "FILE",
            "Checkpoints, or FILE#ADDRESS for a part of one; the folder of a run. Two are compared.",
            several=True,
        ),
    ],
    *others: CheckpointLike,
    run: Annotated[
        PathLike | None, option("--run RUN", "Show the checkpoints and curves of the run in this folder.")
    ] = None,
    against: Annotated[
        CheckpointLike | None,
        option("--against TARGET", "The model for the first file: a checkpoint, a spec, or file.py:factory."),
    ] = None,
    out: Out = None,
    overwrite: Overwrite = False,
) -> CheckpointReport:
    """The contents, values and health of checkpoints as a page: `.html()`, written to `out` where that is given.

    others: a second one is compared with the first, as `diff` does; of more, the distances are given, too.
    run: the folder of a run, whose checkpoints and curves are shown; as `file`, it stands for its newest good one.
    against: the model that `file` is for, as for `doctor`.  overwrite: replace an existing `out`.
    A file that cannot be opened gives a page with its diagnosis. Raises `FileProblem` where one cannot be read at all,
    `Conflict` where `out` is one of the inputs, `MissingExtra` where jinja2 is not installed.
    """
    given = file
    if run is None and isinstance(file, (str, os.PathLike)) and is_run(file):
        run = file
    about = _run(run) if run is not None else None
    if about is not None and file is run:
        file = _newest(about)
    from ckptool.verbs._diagnosis import of_opened, target_of  # what only the work needs, and not the help
    from ckptool.verbs.plot import plot

    target = target_of(against) if against is not None else None
    if out is not None:
        _check_output(out, (given, *others, run, against), overwrite)
    files = [_opened(each) for each in (file, *others)]
    opened = [each for each in files if isinstance(each, Opened)]
    with unchanged(*(each.checkpoint.source for each in opened)):
        found = CheckpointReport(
            tuple(each if isinstance(each, FileReport) else _file_report(each) for each in files),
            _changes(opened, (file, *others)) if len(opened) == len(files) == 2 else None,
            of_opened(files[0], target) if target is not None and isinstance(files[0], Opened) else None,
            about,
            plot(about.path) if about is not None else None,
            norms=_norms(about) if about is not None else None,
            distances=_distances(opened) if len(opened) > 2 else None,
        )
    return found if out is None else _written(found, os.fspath(out), overwrite)


def _opened(file: CheckpointLike) -> Opened | FileReport:
    """A file, opened; the diagnosis of one that cannot be."""
    try:
        opened = open_file(file)
    except UsageError:
        raise
    except CkptoolError as problem:
        path = os.fspath(file) if isinstance(file, (str, os.PathLike)) else ""
        from ckptool.verbs._diagnosis import of_unopened

        return FileReport(None, of_unopened(problem, path), {}, Health(0, 0, {}, (), ()))
    _ = opened.taken  # nothing may be at the address
    return opened


def _changes(opened: Sequence[Opened], files: Sequence[CheckpointLike]) -> Diff:
    """The differences of two files; a part by the name that it was given, as what is compared depends on it. Without
    a wrapper's prefix, where names differ by nothing else."""
    from ckptool.verbs.diff import diff

    left, right = (each.checkpoint if each.at is None else file for each, file in zip(opened, files, strict=True))
    found = diff(left, right)
    try:
        return diff(left, right, ignore="prefix") if differs_by_prefix(found) else found
    except Conflict:  # a name is there with the prefix and without it
        return found


def _distances(opened: Sequence[Opened]) -> Distances:
    files: dict[str, Weights] = {}
    for number, each in enumerate(opened, 1):
        name = f"{each.name}#{each.at}" if each.at else each.name
        files[f"{name} ({number})" if name in files else name] = weights_of(each.taken)
    try:
        return distances(files)
    except Unreadable as error:
        raise error.problem from None


# A run ----------------------------------------------------------------------------------------------------------------


def _run(run: PathLike) -> RunReport:
    from ckptool.verbs.inspect_run import inspect_run

    return inspect_run(run)


def _newest(about: RunReport) -> str:
    """The checkpoint that stands for a run."""
    for one in about.checkpoints:
        if one.step == about.resumes:
            return one.path
    what = f"{about.path} has no checkpoint that is whole"
    raise UsageError(what, "A run is shown with its newest one.", Advice("Look: ", command("inspect", about.path)))


def _norms(about: RunReport) -> NormsOverTime:
    """The layers of a run at its checkpoints, of which some are left out where there are very many."""
    unread = {one.step: one.problem for one in about.checkpoints if one.state != GOOD}
    good = [one for one in about.checkpoints if one.state == GOOD]
    most, number = MOST_STEPS, 0
    files: list[tuple[int, Weights]] = []
    while number < len(good):
        chosen = _spread(len(good), most)
        one = good[number]
        if number not in chosen:
            unread[one.step] = f"left out: {len(chosen):,} of {len(good):,} are read"
        else:
            try:
                files.append((one.step, weights_of(open_file(one.path).checkpoint)))
            except CkptoolError as problem:
                unread[one.step] = problem.what
            else:
                most = min(most, max(2, MOST_NAMES // (len(files[-1][1]) or 1)))
        number += 1
    while True:
        try:
            return norms_over_time([step for step, _ in files], [each for _, each in files], unread)
        except Unreadable as error:
            unread[files[error.number][0]] = error.problem.what
            del files[error.number]


def _spread(count: int, most: int) -> set[int]:
    """At most so many of the numbers below `count`, evenly, the first and the last among them."""
    if count <= most:
        return set(range(count))
    return {number * (count - 1) // (most - 1) for number in range(most)}


# One file -------------------------------------------------------------------------------------------------------------


def _check_output(out: PathLike, inputs: Iterable[object], overwrite: bool) -> None:
    """Raises where the page cannot be written, before anything is read: it never replaces what it is about."""
    name = os.fspath(out)
    for given in inputs:
        path = split(given)[0] if isinstance(given, (str, os.PathLike)) else ""
        for place in (path, path.rpartition(":")[0]):  # a model's code is file.py:factory
            if place and os.path.exists(place) and os.path.exists(name) and os.path.samefile(place, name):
                what = f"{name} is an input of the report"
                raise Conflict(what, "No page replaces a checkpoint. It was left as it is.", "Choose another name.")
    if overwrite and os.path.isfile(name) and not _is_page(name):  # a shard of an index, a rank beside another, …
        what = f"{name} is not a page"
        raise Conflict(what, "A page replaces only pages (.html). It was left as it is.", "Choose another name.")
    check_target(out, overwrite=overwrite)


def _is_page(name: str) -> bool:
    if os.path.realpath(name).lower().endswith((".html", ".htm")):
        return True
    try:
        with open(name, "rb") as file:
            return file.read(len(_DOCTYPE)) == _DOCTYPE
    except OSError:
        return False


def _written(found: CheckpointReport, out: str, overwrite: bool) -> CheckpointReport:
    content = found.html().encode("utf-8", "backslashreplace")
    notes = replace_file(Plan({"": [InlineBytes(content)]}), out, overwrite=overwrite)
    return replace(found, out=out, bytes=len(content), notes=notes)


def _file_report(opened: Opened) -> FileReport:
    found = listing(opened.checkpoint, opened.at or "")
    values = _read(found)
    inspection = Inspection(found, values.numbers, inspection_notes(found, values.numbers, opened.path))
    judged = health(found, values.numbers, values.dead, values.skipped)
    from ckptool.verbs._diagnosis import of_opened

    return FileReport(inspection, of_opened(opened, None, found), values.pictures, judged)


class _Read(NamedTuple):
    """What one pass over the values gave, by address.  skipped: why others were not read."""

    numbers: dict[str, Statistics]
    pictures: dict[str, TensorPicture]
    dead: dict[str, int | None]
    skipped: dict[str, str]


def _read(found: Listing) -> _Read:
    """Reads every tensor once; those that are one view of the data together."""
    result = _Read({}, {}, {}, {})
    views: dict[tuple[object, ...], tuple[TensorEntry, list[str]]] = {}
    for row in found.tensors:
        entry = row.tensor
        if isinstance(entry, Composite) or _unreadable(entry):
            result.skipped[row.address] = _unreadable(entry)
        else:
            views.setdefault((*entry.view, entry.flags), (entry, []))[1].append(row.address)
    side, values = detail(len(views))
    largest = nlargest(MOST_THUMBNAILS, (entry.numel for entry, _ in views.values()))
    room = MOST_THUMBNAILS
    for entry, places in views.values():
        shown = room > 0 and entry.numel >= largest[-1]
        room -= shown
        try:
            numbers, picture, dead = pictured(entry, side if shown else 0, values)
        except FileProblem:
            raise
        except CkptoolError as problem:
            result.skipped.update(dict.fromkeys(places, problem.what))
            continue
        for place in places:
            result.numbers[place], result.pictures[place], result.dead[place] = numbers, picture, dead
    return result


def _unreadable(tensor: TensorEntry | Composite) -> str:
    """Why the values of a tensor are not read; empty where they are."""
    if isinstance(tensor, Composite):
        return tensor.kind
    if tensor.dtype.kind == "bits":
        return f"{tensor.dtype.name} is packed"
    return "" if tensor.nbytes else "empty"
