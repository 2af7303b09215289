"""`report`: one page about a checkpoint or several, for people to look at."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from ckptool.checkpoint import Composite, InlineBytes, TensorEntry
from ckptool.checkpoint.files import unchanged
from ckptool.checkpoint.plan import Plan
from ckptool.errors import CkptoolError, Conflict, FileProblem, UsageError, printable
from ckptool.formats.opening import CheckpointLike, Opened, PathLike, open_file, split
from ckptool.output import check_target, replace_file
from ckptool.reports.fixes import runnable
from ckptool.reports.inspect import Inspection, Listing, listing
from ckptool.reports.report import CheckpointReport, FileReport, Health
from ckptool.reports.statistics import Statistics, statistics
from ckptool.training import is_run
from ckptool.verbs.diff import diff
from ckptool.verbs.doctor import doctor, of_opened, of_unopened
from ckptool.verbs.inspect_run import inspect_run


def report(
    file: CheckpointLike,
    *others: CheckpointLike,
    run: PathLike | None = None,
    against: CheckpointLike | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
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
    about = inspect_run(run) if run is not None else None
    if about is not None and file is run:
        newest = [one.path for one in about.checkpoints if one.step == about.resumes]
        if not newest:
            what = f"{printable(about.path)} has no checkpoint that is whole"
            raise UsageError(what, "A run is shown with its newest one.", "Name a checkpoint, and the run with --run.")
        file = newest[0]
    if out is not None:
        _check_output(out, (given, *others, run, against), overwrite)
    opened = [_opened(each) for each in (file, *others)]
    with unchanged(*(each.checkpoint.source for each in opened if isinstance(each, Opened))):
        found = CheckpointReport(
            tuple(_file_report(each) for each in opened),
            diff(file, others[0]) if len(others) == 1 else None,
            doctor(file, against=against) if against is not None else None,
            about,
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
        return FileReport(None, of_unopened(problem, path), {}, Health(0, 0, {}, (), ()))
    _ = opened.taken  # nothing may be at the address
    return opened


def _check_output(out: PathLike, inputs: Iterable[object], overwrite: bool) -> None:
    """Raises where the page cannot be written, before anything is read: it never replaces what it is about."""
    name = os.fspath(out)
    for given in inputs:
        path = split(given)[0] if isinstance(given, (str, os.PathLike)) else ""
        for place in (path, path.rpartition(":")[0]):  # a model's code is file.py:factory
            if place and os.path.exists(place) and os.path.exists(name) and _holds(place, name):
                what = f"{printable(name)} is an input of the report"
                raise Conflict(what, "No page replaces a checkpoint. It was left as it is.", "Choose another name.")
    check_target(out, overwrite=overwrite)


def _holds(place: str, name: str) -> bool:
    """True if it is that file, or one in that folder; older pages in it may be replaced."""
    folder = os.path.join(os.path.realpath(place), "")
    inside = os.path.realpath(name).startswith(folder) and not name.endswith(".html")
    return os.path.samefile(place, name) or inside


def _written(found: CheckpointReport, out: str, overwrite: bool) -> CheckpointReport:
    content = found.html().encode("utf-8", "backslashreplace")
    notes = replace_file(Plan({"": [InlineBytes(content)]}), out, overwrite=overwrite)
    return replace(found, out=out, bytes=len(content), notes=notes)


def _file_report(opened: Opened | FileReport) -> FileReport:
    if isinstance(opened, FileReport):
        return opened
    found = listing(opened.checkpoint, opened.at or "")
    numbers, skipped = _numbers(found)
    inspection = Inspection(found, numbers, runnable(found.notes, opened.path))
    health = Health(len(found.tensors), len(numbers), skipped, (), ())
    return FileReport(inspection, of_opened(opened), {}, health)


def _numbers(found: Listing) -> tuple[dict[str, Statistics], dict[str, str]]:
    """The statistics of each tensor by its address, and why others have none; one view of the data is read once."""
    numbers: dict[str, Statistics] = {}
    skipped: dict[str, str] = {}
    known: dict[tuple[object, ...], Statistics] = {}
    for row in found.tensors:
        entry = row.tensor
        if isinstance(entry, Composite) or _unreadable(entry):
            skipped[row.address] = _unreadable(entry)
            continue
        view = (*entry.view, entry.flags)
        try:
            if view not in known:
                known[view] = statistics(entry)
        except FileProblem:
            raise
        except CkptoolError as problem:
            skipped[row.address] = problem.what
        else:
            numbers[row.address] = known[view]
    return numbers, skipped


def _unreadable(tensor: TensorEntry | Composite) -> str:
    """Why the values of a tensor are not read; empty where they are."""
    if isinstance(tensor, Composite):
        return tensor.kind
    if tensor.dtype.kind == "bits":
        return f"{tensor.dtype.name} is packed"
    return "" if tensor.nbytes else "empty"
