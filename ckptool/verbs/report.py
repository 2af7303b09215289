"""`report`: a page about a checkpoint, two of them, or a run, for people to look at."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Annotated

from ckptool.analysis.diff import Diff, diff_of_parts
from ckptool.analysis.findings import Diagnosis
from ckptool.analysis.health import Health, health
from ckptool.analysis.inspect import Listing, listing, with_statistics
from ckptool.analysis.norms import NormsOverTime, Weights, norms_over_time, weights_of
from ckptool.analysis.statistics import MOST_THUMBNAILS, TensorPicture, Values, detail, values_of
from ckptool.checkpoint import Checkpoint, Composite, Note, TensorEntry
from ckptool.checkpoint.files import unchanged
from ckptool.checkpoint.progress import over
from ckptool.commands import arg, argument, command, option, verb
from ckptool.errors import CkptoolError, Conflict, FileProblem, MissingExtra, UsageError, counted
from ckptool.facts import LIVE, Bytes, Report, Told, green, size, yellow
from ckptool.formats.opening import CheckpointLike, Opened, PathLike, open_file, shown, split
from ckptool.output import check_target, replace_file
from ckptool.training import is_run
from ckptool.training.history import RunHistory, history_of
from ckptool.training.reports import GOOD, RunReport
from ckptool.verbs._options import AGAINST, Out, Overwrite

MOST_STEPS, MOST_NAMES = 50, 50_000  # checkpoints of a run that are read, and tensors of all of them
_DOCTYPE = b"<!DOCTYPE html>"


@dataclass(frozen=True, slots=True, eq=False)
class FileReport:
    """One checkpoint: what `inspect --stats` and `doctor` say of it, and its values in pictures, by address.

    inspection: None for a file that could not be opened; then the diagnosis says why, and everything else is empty.
    """

    inspection: Listing | None
    diagnosis: Diagnosis
    pictures: dict[str, TensorPicture]
    health: Health


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CheckpointReport(Report):
    """A page about one checkpoint or two. diff: of the two.  fit: of the first, against the model that was named.

    run: the run's checkpoints; history: its curves and events; norms: its layers over time.
    out: where the page was written, with its size in bytes; empty where it was not.
    notes: on the page as a file.  compared: the parts of the two that `diff` is about.
    """

    schema = "report/2"

    files: tuple[FileReport, ...]
    diff: Diff | None = None
    fit: Diagnosis | None = None
    run: RunReport | None = None
    history: RunHistory | None = None
    norms: NormsOverTime | None = None
    out: str = ""
    bytes: Bytes = 0
    notes: tuple[Note, ...] = ()
    compared: Annotated[tuple[Checkpoint, ...], LIVE] = ()

    def told(self) -> Told:
        read, total = (sum(getattr(file.health, name) for file in self.files) for name in ("read", "tensors"))
        tensors = counted(total, "tensor") if read == total else f"{read:,} of {counted(total, 'tensor')}"
        files = f"{counted(len(self.files), 'file')}, " if len(self.files) > 1 else ""
        problems = yellow(counted(self.problems, "problem")) if self.problems else green("no problems")
        where = f" → {self.out} ({size(self.bytes)})" if self.out else f"; no page was written: {arg(out='OUT.html')}"
        yield f"report: {files}{tensors} read, ", problems, where
        yield from self.notes

    @property
    def problems(self) -> int:
        """What keeps a checkpoint from loading, and what is conspicuous in the values, of all files."""
        diagnoses = [*(file.diagnosis for file in self.files), *([self.fit] if self.fit is not None else [])]
        blocking = sum(finding.blocks for diagnosis in diagnoses for finding in diagnosis.findings)
        return blocking + sum(len(file.health.findings) for file in self.files)

    def html(self) -> str:
        """The page: one file without requests. Raises `MissingExtra` where jinja2 is not installed."""
        try:
            import jinja2  # noqa: F401
        except ImportError as error:
            what = "a report page needs jinja2, which is not installed"
            raise MissingExtra(what, "", "pip install 'ckptool[report]'") from error
        from ckptool.render.page import page

        return page(self)


@verb(
    ("ckptool report model.pt -o page.html", "its contents, values and health"),
    ("ckptool report model.pt other.pt -o changes.html", "what changed between the two"),
)
def report(
    file: Annotated[
        CheckpointLike, argument("FILE", "A checkpoint, or FILE#ADDRESS for a part of one; or the folder of a run.")
    ],
    other: Annotated[CheckpointLike | None, argument("[OTHER]", "Another, which is compared with the first.")] = None,
    *,
    run: Annotated[PathLike | None, option("--run RUN", "Show the checkpoints and curves of this run too.")] = None,
    against: Annotated[CheckpointLike | None, AGAINST] = None,
    out: Out = None,
    overwrite: Overwrite = False,
) -> CheckpointReport:
    """The contents, values and health of a checkpoint as a page: `.html()`, written to `out` where that is given.

    Two are compared as `diff` does; the folder of a run stands for its newest good checkpoint.
    A file that cannot be opened gives a page with its diagnosis. Raises `FileProblem` where one cannot be read at all,
    `Conflict` where `out` is one of the inputs, `MissingExtra` where jinja2 is not installed.
    """
    from ckptool.training.run_folder import inspect_run
    from ckptool.verbs._diagnosis import of_opened  # what only the work needs, and not the help
    from ckptool.verbs._target import find_target

    given = file
    if run is None and isinstance(file, (str, os.PathLike)) and is_run(file):
        run = file
    about = inspect_run(run) if run is not None else None
    if about is not None and file is run:
        newest = next((one.path for one in about.checkpoints if one.step == about.resumes), None)
        if newest is None:
            what = f"{about.path} has no checkpoint that is whole"
            raise UsageError(what, "A run is shown with its newest one.", f"Look: {command('inspect', about.path)}")
        file = newest
    target = find_target(against).as_it_loads if against is not None else None
    if out is not None:
        _check_output(os.fspath(out), (given, other, run, against), overwrite)
    files = [_opened(each) for each in ([file] if other is None else [file, other])]
    opened = [each for each in files if isinstance(each, Opened)]
    with unchanged(*(each.checkpoint.source for each in opened)):
        diff, compared = _changes(opened, (file, other)) if len(opened) == 2 else (None, ())
        found = CheckpointReport(
            tuple(each if isinstance(each, FileReport) else _file_report(each, len(files)) for each in files),
            diff,
            of_opened(files[0], target) if target is not None and isinstance(files[0], Opened) else None,
            about,
            history_of(about.path) if about is not None else None,
            _norms(about) if about is not None else None,
            compared=compared,
        )
    if out is None:
        return found
    content = found.html().encode("utf-8", "backslashreplace")
    notes = replace_file(content, os.fspath(out), overwrite=overwrite)
    return replace(found, out=os.fspath(out), bytes=len(content), notes=notes)


def _check_output(out: str, inputs: Iterable[object], overwrite: bool) -> None:
    """Raises where the page cannot be written, before anything is read: it never replaces what it is about."""
    for given in inputs:
        path = split(given)[0] if isinstance(given, (str, os.PathLike)) else ""
        for place in (path, path.rpartition(":")[0]):  # a model's code is file.py:factory
            if place and os.path.exists(place) and os.path.exists(out) and os.path.samefile(place, out):
                what = f"{out} is an input of the report"
                raise Conflict(what, "No page replaces a checkpoint. It was left as it is.", "Choose another name.")
    if overwrite and os.path.isfile(out) and not os.path.realpath(out).lower().endswith((".html", ".htm")):
        begun = b""
        with suppress(OSError), open(out, "rb") as file:
            begun = file.read(len(_DOCTYPE))
        if begun != _DOCTYPE:  # a shard of an index, a rank beside another, …
            what = f"{out} is not a page"
            raise Conflict(what, "A page replaces only pages (.html). It was left as it is.", "Choose another name.")
    check_target(out, overwrite=overwrite)


# Files ----------------------------------------------------------------------------------------------------------------


def _opened(file: CheckpointLike) -> Opened | FileReport:
    """A file, opened; the diagnosis of one that cannot be."""
    try:
        opened = open_file(file)
    except UsageError:
        raise
    except CkptoolError as problem:
        from ckptool.verbs._diagnosis import of_unopened

        path = shown(file) if isinstance(file, (str, os.PathLike)) else ""
        return FileReport(None, of_unopened(problem, path), {}, Health(0, 0, {}, (), ()))
    _ = opened.taken  # nothing may be at the address
    return opened


def _file_report(opened: Opened, files: int) -> FileReport:
    """What is in a file. Reads every tensor once; those that are one view of the data together.

    files: on the page; the pictures of all of them have to fit.
    """
    from ckptool.verbs._diagnosis import of_opened

    found = listing(opened.checkpoint, opened.at or "")
    values: dict[str, Values] = {}
    skipped: dict[str, str] = {}
    views: dict[tuple[object, ...], tuple[TensorEntry, list[str]]] = {}
    for row in found.tensors:
        entry = row.tensor
        if isinstance(entry, Composite):
            skipped[row.address] = entry.kind
        elif entry.dtype.kind == "bits":
            skipped[row.address] = f"{entry.dtype.name} is packed"
        elif not entry.nbytes:
            skipped[row.address] = "empty"
        else:
            views.setdefault((*entry.view, entry.flags), (entry, []))[1].append(row.address)
    side, sample = detail(len(views) * files)
    largest = nlargest(MOST_THUMBNAILS, (entry.numel for entry, _ in views.values()))
    room = len(largest)
    for entry, places in over(views.values(), lambda pair: pair[0].nbytes):
        shown = room > 0 and entry.numel >= largest[-1]
        room -= shown
        try:
            values |= dict.fromkeys(places, values_of(entry, side if shown else 0, sample))
        except FileProblem:
            raise
        except CkptoolError as problem:
            skipped |= dict.fromkeys(places, problem.what)
    numbers = {place: one.numbers for place, one in values.items()}
    pictures = {place: one.picture for place, one in values.items()}
    inspection = with_statistics(found, numbers, opened.path)
    return FileReport(inspection, of_opened(opened, None, found), pictures, health(found, values, skipped))


def _changes(opened: Sequence[Opened], files: Sequence[CheckpointLike | None]) -> tuple[Diff, tuple[Checkpoint, ...]]:
    """The differences of two files, and what was compared; a part by the name that it was given, as that depends on it.
    Without a wrapper's prefix, where names differ by nothing else."""
    left, right = (one.checkpoint if one.at is None else file for one, file in zip(opened, files, strict=True))
    assert left is not None and right is not None
    found = diff_of_parts(left, right)
    try:
        return diff_of_parts(left, right, ignore="prefix") if found[0].differs_by_prefix() else found
    except Conflict:  # a name is there with the prefix and without it
        return found


# A run ----------------------------------------------------------------------------------------------------------------


def _norms(about: RunReport) -> NormsOverTime:
    """The layers of a run at its checkpoints, of which some are left out where there are very many."""
    unread = {one.step: one.problem for one in about.checkpoints if one.state != GOOD}
    good = [one for one in about.checkpoints if one.state == GOOD]
    files: dict[int, Weights] = {}
    most = MOST_STEPS
    for number, one in enumerate(good):
        last = min(most, len(good)) - 1
        if number not in {count * (len(good) - 1) // (last or 1) for count in range(last + 1)}:
            unread[one.step] = f"left out: {last + 1:,} of {len(good):,} are read"
            continue
        try:
            weights = weights_of(open_file(one.path).checkpoint)
        except CkptoolError as problem:
            unread[one.step] = problem.what
            continue
        first = next(iter(files.values()), weights)
        files[one.step] = {key: entry for key, entry in weights.items() if key in first}
        most = min(most, max(2, MOST_NAMES // max(len(first), 1)))
    return norms_over_time(files, unread)
