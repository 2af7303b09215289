"""`report`: a page about a checkpoint, two of them, or a run, for people to look at."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from heapq import nlargest
from math import sqrt
from typing import Annotated, Any

from ckptool.analysis.diff import Diff, diff_of_parts
from ckptool.analysis.findings import Diagnosis
from ckptool.analysis.inspect import Listing, listing, with_statistics
from ckptool.analysis.values import MOST_THUMBNAILS, TensorPicture, Values, detail, values_of
from ckptool.checkpoint import Checkpoint, Composite, Note, TensorEntry
from ckptool.checkpoint.arrays import fold
from ckptool.checkpoint.dtypes import Array, has_numbers, numbers
from ckptool.checkpoint.files import unchanged
from ckptool.checkpoint.progress import over
from ckptool.checkpoint.tree import tensors
from ckptool.commands import arg, argument, command, option, verb
from ckptool.conventions.state_dicts import find_state_dicts, without_wrappers
from ckptool.errors import CkptoolError, Conflict, FileProblem, MissingExtra, UsageError, counted
from ckptool.facts import LIVE, Bytes, Report, Told, dataclass, field, green, replace, size, yellow
from ckptool.formats import CheckpointLike, Opened, PathLike, open_file, shown, split
from ckptool.output import replace_file
from ckptool.training import is_run
from ckptool.training.reports import GOOD, RunHistory, RunReport, history_of
from ckptool.verbs._options import AGAINST, Out, Overwrite, check_text, find_target

MOST_STEPS, MOST_NAMES = 50, 50_000  # checkpoints of a run that are read, and tensors of all of them
SIBLINGS, DEVIATIONS, FACTOR = 4, 10, 3
_FLOATS = ("float", "complex")
_RULES = {
    "nan": "a value is NaN",
    "inf": "a value is infinite",
    "all-zero": "every value of a weight is 0 (a weight is a floating-point tensor of a model, with weight in its name "
    "and two or more dimensions larger than 1; except the half of a LoRA that starts at 0)",
    "constant": "all values of a weight are the same, and not 0",
    "dead-rows": "two or more rows of a weight, but not all, are all 0 (a single one may be an embedding's padding); "
    "a row is everything at one index of the first dimension",
    "norm": f"the norm of a weight is at least {FACTOR} times the median of its siblings or at most 1/{FACTOR} of it, "
    f"and at least {DEVIATIONS} median absolute deviations away; at least {SIBLINGS} siblings: weights of one shape "
    "whose names differ only in a number between dots",
}
Weights = dict[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """Tensors whose values are conspicuous. kind: `nan`, `inf`, `all-zero`, `constant`, `dead-rows`, `norm`.
    rule: the condition with its threshold, as a person reads it.  details: what was found, for each address."""

    kind: str
    rule: str
    details: dict[str, str]


@dataclass(frozen=True, slots=True)
class Health:
    """What the values show, judged by rules that are all named.
    rules: of every check, also of those that found nothing.
    read: tensors whose values were read, of `tensors`; why the others were not, by address, in `skipped`."""

    tensors: int
    read: int
    skipped: dict[str, str]
    rules: tuple[str, ...]
    findings: tuple[HealthFinding, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NormsOverTime:
    """The norm of each layer of a run's weights at each of its checkpoints that could be read, and its movement.
    steps: of the checkpoints.  norms: layer -> its norm at each step.  moved: layer -> the norm of its change since the
    checkpoint before, as a share of its norm there; one fewer.  unread: step -> why a checkpoint was left out."""

    steps: tuple[int, ...]
    norms: dict[str, tuple[float, ...]]
    moved: dict[str, tuple[float, ...]]
    unread: dict[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class FileReport:
    """One checkpoint: what `inspect --stats` and `doctor` say of it, and its values in pictures, by address.
    inspection: None for a file that could not be opened; then the diagnosis says why, and everything else is empty."""

    inspection: Listing | None
    diagnosis: Diagnosis
    pictures: dict[str, TensorPicture] = field(repr=False)
    health: Health


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CheckpointReport(Report):
    """A page about one checkpoint or two. diff: of the two.  fit: of the first, against the model that was named.
    run: the run's checkpoints; history: its curves and events; norms: its layers over time.
    out: where the page was written, with its size in bytes; empty where it was not.
    notes: on the page as a file.  compared: the parts of the two that `diff` is about."""

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
    file: Annotated[CheckpointLike, argument("FILE", "A checkpoint, FILE#ADDRESS for a part, or a run's folder.")],
    other: Annotated[CheckpointLike | None, argument("[OTHER]", "Another to compare it with.")] = None,
    *,
    run: Annotated[PathLike | None, option("--run RUN", "Show the checkpoints and curves of this run too.")] = None,
    against: Annotated[CheckpointLike | None, AGAINST] = None,
    out: Out = None,
    overwrite: Overwrite = False,
) -> CheckpointReport:
    """The contents, values and health of a checkpoint as a page: `.html()`, written to `out` where that is given.

    Two are compared as by `diff`; a run's folder means its newest good checkpoint.
    A file that cannot be opened gives a page with its diagnosis. Raises `FileProblem` where one cannot be read at all,
    `Conflict` where `out` is one of the inputs, `MissingExtra` where jinja2 is not installed.
    """
    from ckptool.verbs._diagnosis import of_opened, of_unopened  # what only the work needs, and not the help

    named_file = file
    if run is None and isinstance(file, (str, os.PathLike)) and is_run(file):
        run = file
    run_facts: RunReport | None = None
    if run is not None:
        from ckptool.training.run_folder import inspect_run

        run_facts = inspect_run(run)
    if run_facts is not None and file is run:
        newest = next((saved.path for saved in run_facts.checkpoints if saved.step == run_facts.resumes), None)
        if newest is None:
            what = f"{run_facts.path} has no intact checkpoint"
            raise UsageError(what, "A run's page shows its newest one.", f"Look: {command('inspect', run_facts.path)}")
        file = newest
    target = find_target(against).as_it_loads if against is not None else None
    if out is not None:
        page = os.fspath(out)
        for source in (named_file, other, run, against):  # a page never replaces what it is about
            path = split(source)[0] if isinstance(source, (str, os.PathLike)) else ""
            for place in (path, path.rpartition(":")[0]):  # a model's code is file.py:factory
                if place and os.path.exists(place) and os.path.exists(page) and os.path.samefile(place, page):
                    what = f"{page} is an input of the report"
                    raise Conflict(what, "A page never replaces a checkpoint.", "Choose another name.")
        if overwrite and os.path.isfile(page) and not os.path.realpath(page).lower().endswith((".html", ".htm")):
            what = f"{page} is not a page"  # but a shard of an index, a rank beside another, …
            raise Conflict(what, "A page replaces only pages (.html). It was left as it is.", "Choose another name.")
        check_text(page, overwrite=overwrite)
    files = list[Opened | FileReport]()  # opened files; or the report on one that cannot be opened
    for file_like in [file] if other is None else [file, other]:
        try:
            opening = open_file(file_like)
        except UsageError:
            raise
        except CkptoolError as problem:
            path = shown(file_like) if isinstance(file_like, (str, os.PathLike)) else ""
            files.append(FileReport(None, of_unopened(problem, path), {}, Health(0, 0, {}, (), ())))
            continue
        _ = opening.taken  # nothing may be at the address
        files.append(opening)
    opened = [entry for entry in files if isinstance(entry, Opened)]
    with unchanged(*(entry.checkpoint.source for entry in opened)):
        diff, compared = None, tuple[Checkpoint, ...]()
        if len(opened) == 2:  # a part is named as the user did, since the comparison depends on it
            pairs = zip(opened, (file, other), strict=True)
            sides: Any = [entry.checkpoint if entry.at is None else named for entry, named in pairs]
            diff, compared = diff_of_parts(*sides)
            with suppress(Conflict):  # a name is there with the prefix and without it
                if diff.differs_by_prefix():
                    diff, compared = diff_of_parts(*sides, ignore="prefix")
        result = CheckpointReport(
            tuple(entry if isinstance(entry, FileReport) else _file_report(entry, len(files)) for entry in files),
            diff,
            of_opened(files[0], target) if target is not None and isinstance(files[0], Opened) else None,
            run_facts,
            history_of(run_facts.path) if run_facts is not None else None,
            _norms_of_run(run_facts) if run_facts is not None else None,
            compared=compared,
        )
    if out is None:
        return result
    content = result.html().encode("utf-8", "backslashreplace")
    notes = replace_file(content, os.fspath(out), overwrite=overwrite)
    return replace(result, out=os.fspath(out), bytes=len(content), notes=notes)


# Files ----------------------------------------------------------------------------------------------------------------


def _file_report(opened: Opened, files: int) -> FileReport:
    """The report on one file. Reads every tensor once, and tensors that are the same view of data together.
    files: how many are on the page; the pictures of all of them have to fit."""
    from ckptool.verbs._diagnosis import of_opened

    contents = listing(opened.checkpoint, opened.at or "")
    values: dict[str, Values] = {}
    skipped: dict[str, str] = {}
    views: dict[tuple[object, ...], tuple[TensorEntry, list[str]]] = {}
    for row in contents.tensors:
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
        has_thumbnail = room > 0 and entry.numel >= largest[-1]
        room -= has_thumbnail
        try:
            values |= dict.fromkeys(places, values_of(entry, side if has_thumbnail else 0, sample))
        except FileProblem:
            raise
        except CkptoolError as problem:
            skipped |= dict.fromkeys(places, problem.what)
    inspection = with_statistics(contents, {place: value.numbers for place, value in values.items()}, opened.path)
    pictures = {place: value.picture for place, value in values.items()}
    return FileReport(inspection, of_opened(opened, None, contents), pictures, health(inspection, values, skipped))


def health(listing: Listing, values: Mapping[str, Values], skipped: dict[str, str]) -> Health:
    """Judges the values of a checkpoint, by address.  skipped: why others were not read."""
    from numpy import median

    details: dict[str, dict[str, str]] = {kind: {} for kind in _RULES}
    siblings: dict[object, dict[str, float]] = {}
    models = [root.path for root in listing.roots if root.is_model]
    for row in listing.tensors:
        place, tensor = row.address, row.tensor
        if place not in values:
            continue
        stats, zero_rows = values[place].numbers, values[place].zero_rows or 0
        is_odd = place in listing.non_finite
        texts = {kind: _count_text(n, stats.count) for kind, n in (("nan", stats.nans), ("inf", stats.infs)) if is_odd}
        is_matrix = sum(size > 1 for size in tensor.shape or ()) > 1 and tensor.dtype and tensor.dtype.kind in _FLOATS
        is_weight = row.path and "weight" in str(row.path[-1]).rpartition(".")[2]
        if is_matrix and is_weight and any(row.path[: len(path)] == path for path in models):
            rows = (tensor.shape or (0,))[0]
            if stats.zeros == stats.count:
                texts["all-zero"] = "" if re.search(r"lora_(B|up)\b", place) else _count_text(stats.zeros, stats.count)
            elif stats.min == stats.max and not (stats.nans or stats.infs):
                texts["constant"] = f"all values are {stats.min:.6g}"
            if 1 < zero_rows < rows:
                texts["dead-rows"] = _count_text(zero_rows, rows, "row")
            if stats.norm is not None:
                pattern = re.sub(r"(?<![^./])\d+(?![^./])", "#", place)
                siblings.setdefault((pattern, tensor.shape), {})[place] = stats.norm
        for kind, text in texts.items():
            details[kind] |= {place: text} if text else {}
    for norms in siblings.values():
        middle = median([*norms.values()])
        spread = median([abs(norm - middle) for norm in norms.values()])
        for place, norm in norms.items() if len(norms) >= SIBLINGS and middle else ():
            if abs(norm - middle) >= DEVIATIONS * spread and not middle / FACTOR < norm < middle * FACTOR:
                details["norm"][place] = f"norm {norm:.4g}; median of {counted(len(norms), 'sibling')} {middle:.4g}"
    rules = tuple(f"{kind}: {rule}" for kind, rule in _RULES.items())
    findings = tuple(HealthFinding(kind, rule, details[kind]) for kind, rule in _RULES.items() if details[kind])
    return Health(len(listing.tensors), len(values), skipped, rules, findings)


def _count_text(count: int, total: int, word: str = "value") -> str:
    return f"{count:,} of {counted(total, word)}" if count else ""


# A run ----------------------------------------------------------------------------------------------------------------


def _norms_of_run(run_facts: RunReport) -> NormsOverTime:
    """The norms of a run's layers at its checkpoints; where there are very many, some are left out."""
    unread = {saved.step: saved.problem for saved in run_facts.checkpoints if saved.state != GOOD}
    good = [saved for saved in run_facts.checkpoints if saved.state == GOOD]
    files: dict[int, Weights] = {}
    limit = MOST_STEPS
    for number, saved in enumerate(good):
        last = min(limit, len(good)) - 1
        if number not in {count * (len(good) - 1) // (last or 1) for count in range(last + 1)}:
            unread[saved.step] = f"left out: {last + 1:,} of {len(good):,} are read"
            continue
        try:
            weights = weights_of(open_file(saved.path).checkpoint)
        except CkptoolError as problem:
            unread[saved.step] = problem.what
            continue
        first = next(iter(files.values()), weights)
        files[saved.step] = {key: entry for key, entry in weights.items() if key in first}
        limit = min(limit, max(2, MOST_NAMES // max(len(first), 1)))
    return norms_over_time(files, unread)


def weights_of(checkpoint: Checkpoint) -> Weights:
    """The tensors of the models in a checkpoint, by names that depend neither on wrappers nor on where the only model
    is; all tensors where there is no model."""
    models = [root for root in find_state_dicts(checkpoint) if root.is_model]
    weights: Weights = {}
    for root in models:
        base = f"{root.address}/" if len(models) > 1 else ""
        for key, value in root.node.items():
            if isinstance(key, str) and isinstance(value, TensorEntry):
                weights.setdefault(base + without_wrappers(key), value)
    everything = () if models else tensors(checkpoint.tree)
    return weights | {"/".join(map(str, path)): value for path, value in everything if isinstance(value, TensorEntry)}


def norms_over_time(files: Mapping[int, Weights], unread: Mapping[int, str]) -> NormsOverTime:
    """The norms of the layers that all checkpoints have, by step. One that cannot be read is left out, with why."""
    import numpy

    squares: dict[str, Array] = {}
    moves: dict[str, Array] = {}
    weights = next(iter(files.values()), {})
    for key, first in over(weights.items(), lambda pair: pair[1].nbytes * len(files)):
        layer, _, name = key.rpartition(".")
        entries = [weights[key] for weights in files.values() if key in weights]
        comparable = [  # as values are read beside those of the first checkpoint: floats, in the same shape
            entry.shape == first.shape and has_numbers(entry.dtype) and 0 < entry.nbytes <= entry.storage.nbytes
            for entry in entries
            if entry.dtype.kind != "complex"
        ]
        if first.dtype.kind != "float" or name.startswith("running_") or sum(comparable) < len(files):
            continue
        totals = squares.setdefault(layer, numpy.zeros(len(files)))
        moved = moves.setdefault(layer, numpy.zeros(len(files) - 1))

        def add(_: int, *blocks: Array, entries: Any = entries, totals: Array = totals, moved: Array = moved) -> None:
            pairs = zip(blocks, entries, strict=True)
            values = numpy.stack([numbers(raw, entry.dtype) for raw, entry in pairs], dtype="d", casting="unsafe")
            numpy.nan_to_num(values, copy=False, nan=0, posinf=0, neginf=0)
            totals += numpy.einsum("ij,ij->i", values, values)
            deltas = numpy.diff(values, axis=0)
            moved += numpy.einsum("ij,ij->i", deltas, deltas)

        try:
            fold(add, *entries)
        except CkptoolError:
            for step, entry in zip(files, entries, strict=True):
                try:
                    fold(lambda *_: None, entry)
                except CkptoolError as problem:
                    remaining = {other: weights for other, weights in files.items() if other != step}
                    return norms_over_time(remaining, {**unread, step: problem.what})
            raise
    norms = {layer: tuple(map(sqrt, row.tolist())) for layer, row in squares.items()}
    shares = {
        layer: tuple(sqrt(move) / norm if norm else 0.0 for move, norm in zip(row.tolist(), norms[layer], strict=False))
        for layer, row in moves.items()
    }
    return NormsOverTime(tuple(files), norms, shares, dict(unread))
