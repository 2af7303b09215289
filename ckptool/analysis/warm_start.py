"""The effect of loading a checkpoint into a model, name by name: what fits, what does not, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptool.analysis.targets import BUFFER
from ckptool.analysis.words import grouped
from ckptool.checkpoint import Note
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.paths import matcher
from ckptool.commands import arg, several
from ckptool.errors import PlanRefused, UsageError, counted, escaped, form, listed
from ckptool.facts import Bytes, Report, Table, Told, bold, cyan, dataclass, dim, green, red, short, size

Shape = tuple[int, ...] | None
AS_IT_IS, RESIZED, SKIPPED, REFUSED = "as it is", "resized", "skipped", "refused"
SHOWN = 16  # lines of one kind on a terminal; elsewhere, all


class Typed(NamedTuple):
    """The dtype and shape of a tensor: `f32 [10, 4]`."""

    dtype: DType | None
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype.name if self.dtype else '?'} {'[?]' if self.shape is None else list(self.shape)}"


class Tied(NamedTuple):
    """A name of the target that is loaded through another name of the same tensor."""

    target: str
    through: str


class NewFile(NamedTuple):
    """The file that was written, or would be.  details: the files that were carried along, in lines."""

    output: str
    container: str
    file_bytes: Bytes
    details: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A tensor that is loaded. elements: of the target's that it fills.  how: `as it is` or `resized`."""

    source: str
    target: str
    kind: str
    elements: int
    how: str = AS_IT_IS


@dataclass(frozen=True, slots=True)
class Absent:
    """A name that only one side has. name: what it is called after renaming, where that is another."""

    source: str
    name: str
    kind: str
    dtype: DType | None
    shape: Shape


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A name of both sides that does not fit. about: `shape`, `dtype` or `kind`.  done: the outcome.
    how: the way in which it is resized."""

    source: str
    target: str
    kind: str
    about: str
    have: Typed
    want: Typed
    done: str
    how: str = ""


@dataclass(frozen=True, slots=True)
class DtypeChange:
    """A tensor that gets another type. exact: every value stays what it is; None where that was not read.

    changed, overflowed: how many values are rounded, and how many become infinite or NaN; None where it was not read.
    """

    source: str
    target: str
    old: DType
    new: DType
    exact: bool | None
    changed: int | None = None
    overflowed: int | None = None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Rules that belong together, in the order in which they have to be given; `why`, the evidence for them.
    agree: how many keys get a name of the target with the same shape.  total: how many keys the rules take.
    rules: empty where no renaming can help."""

    rules: tuple[str, ...]
    agree: int
    total: int
    why: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason against a plan, and what to type to have it otherwise."""

    code: str
    what: str
    fix: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fix", escaped(self.fix))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LoadReport(Report):
    """What loading `source` into `target` does, name by name.

    root: the address of the weights.  loaded: what is loaded, each tensor once.
    missing: names of the target that are not loaded.  unexpected: names that only the checkpoint has.
    excluded: names left out by `only` and `exclude`.  elements, total: of the target's values, each tensor once.
    share: of the target's values that are loaded.
    normalised: what was changed about names and shapes without being asked.
    suggestions: rules that would make more of it fit.  refused: why the plan is not accepted; empty where it is.
    taken: names whose values come from the target, where a file was written.  output: that file.
    rules_file: where the suggestions were written to.  applied: it was done.
    supplied: names that an older torch did not save; torch fills them in.
    """

    schema = "warm_start/2"
    verdict = "accepted"

    source: str
    target: str
    target_kind: str
    root: str
    loaded: tuple[Loaded, ...]
    tied: tuple[Tied, ...]
    missing: tuple[Absent, ...]
    unexpected: tuple[Absent, ...]
    mismatched: tuple[Mismatch, ...]
    dtype_changes: tuple[DtypeChange, ...]
    excluded: tuple[str, ...]
    elements: int
    total: int
    normalised: tuple[Note, ...]
    suggestions: tuple[Suggestion, ...]
    refused: tuple[Refusal, ...]
    taken: tuple[str, ...] = ()
    output: NewFile | None = None
    rules_file: str = ""
    applied: bool = False
    supplied: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """True if there is no reason against the plan."""
        return not self.refused

    @property
    def share(self) -> float:
        """The share of the target's values that are loaded, 0 to 1."""
        return self.elements / self.total if self.total else float(bool(self.loaded))

    def require(self, min_loaded: float | None = None, missing: str | Sequence[str] | None = None) -> LoadReport:
        """Raises `PlanRefused` unless this share (0 to 1) is loaded, and only names that match `missing` are not.

        Returns the report itself.  missing: patterns as in `--only`; None for whatever is missing.
        """
        if reasons := unmet(self, min_loaded, missing):
            raise refusal(self, reasons)
        return self

    def told(self) -> Told:
        fits = {*(fact.target for fact in self.loaded), *(name for name, _ in self.tied)}
        others = {*(fact.name for fact in self.missing), *(fact.target for fact in self.mismatched), *self.excluded}
        share = f"{percent(self.share)} of {counted(self.total, 'value', shown=short)}"
        names = f"{len(self.loaded) + len(self.tied):,} of {counted(len(fits | others), 'name')}"
        source = bold(f"{self.source}#{self.root}" if self.root else self.source)
        yield source, " into ", bold(self.target), ": ", (green if self.accepted else red)(share), f", {names}"
        yield self._name_tables
        yield from ((dim(note.code), f": {note.message}") for note in self.normalised)
        if self.suggestions:
            yield bold("perhaps")
        for hint in self.suggestions:
            yield from (("  ", cyan("--rename '" + rule.replace("'", "'\\''") + "'")) for rule in hint.rules)
            agree = f"{hint.agree:,} of {counted(hint.total, 'shape')} {form(hint.agree, 'agrees', 'agree')}"
            texts = [agree] if hint.rules else []
            texts += [hint.why] if hint.why else []
            yield ("    " if hint.rules else "  ") + "; ".join(texts)
        if self.rules_file:
            yield f"rules written to {self.rules_file}"
        for reason in self.refused:
            yield red("refused"), f": {reason.what}"
            if reason.fix:
                yield "  ", cyan(reason.fix)
        if self.output is not None:
            path, container, nbytes, details = self.output
            yield f"{'wrote' if self.applied else 'would write'} {path} ({container}, {size(nbytes)})"
            yield from (f"  {line}" for line in details)

    def _name_tables(self, width: int | None) -> Iterator[Table]:
        """The names of each kind, grouped exactly; on a terminal so many lines of each."""
        unchanged = [fact for fact in self.loaded if fact.how == AS_IT_IS]
        casts: dict[str, list[str]] = {}  # each pair of types, and what that does to values
        for cast in self.dtype_changes:
            loss = "values overflow" if cast.overflowed else "values are rounded"
            loss = "values may be rounded (too many to check)" if cast.exact is None else loss
            loss = "no value changes" if cast.exact else loss
            casts.setdefault(f"{cast.old.name} → {cast.new.name}, {loss}", []).append(cast.target)
        # A line for each group of names that differ in the same way, with their sources where these have other names.
        by_difference, misfits = dict[str, dict[str, str]](), list[str]()
        for fact in self.mismatched:
            outcome = f"{fact.done} by {fact.how}" if fact.how else fact.done
            by_difference.setdefault(f"{fact.have} against {fact.want}, {outcome}", {})[fact.target] = fact.source
        for difference, sources in by_difference.items():
            for group in grouped(sources):
                source_names = [sources[key] for key in group.keys]
                names = ", ".join(source_group.text for source_group in grouped(source_names))
                origin = f" (from {names})" if source_names != [*group.keys] else ""
                misfits.append(f"{group.text}: {difference}{origin}{_count_suffix(len(group.keys))}")
        cast_lines = [f"{how}: {', '.join(_groups(names)[1])}" for how, names in casts.items()]
        kinds: list[tuple[str, int, list[str]]] = [
            ("loaded", *_groups(fact.target for fact in unchanged if fact.kind != BUFFER)),
            ("loaded buffers", *_groups(fact.target for fact in unchanged if fact.kind == BUFFER)),
            ("tied", len(self.tied), [f"{name} is {through}" for name, through in self.tied]),
            ("missing", *_groups(fact.name for fact in self.missing if fact.kind != BUFFER)),
            ("missing buffers", *_groups(fact.name for fact in self.missing if fact.kind == BUFFER)),
            ("unexpected", *_groups(fact.source for fact in self.unexpected)),
            ("do not fit", len(self.mismatched), misfits),
            ("other type", len(self.dtype_changes), cast_lines),
            ("left out", *_groups(self.excluded)),
            ("from the target", *_groups(self.taken)),
        ]
        for what, count, lines in kinds:
            limit = None if width is None else SHOWN
            yield Table([(line,) for line in lines], title=f"{what} {count:,}", limit=limit, more="  … {} more lines")


def _groups(names: Iterable[str]) -> tuple[int, list[str]]:
    """The number of names, and their groups, each with its size where that is more than one."""
    texts = list(names)
    return len(texts), [f"{group.text}{_count_suffix(len(group.keys))}" for group in grouped(texts)]


def _count_suffix(count: int) -> str:
    return f"  ({count:,})" if count > 1 else ""


def refusal(report: LoadReport, refusals: Sequence[Refusal] | None = None) -> PlanRefused:
    """The error with the reasons why a plan is not carried out."""
    reasons = list(report.refused if refusals is None else refusals)
    outcome = "was loaded" if report.applied else "was not loaded"
    after = "It was loaded all the same." if report.applied else "Nothing was changed."
    error = PlanRefused(
        f"{report.source} {outcome} into {report.target}{', but' if report.applied else ':'} {reasons[0].what}",
        " ".join([after, *(f"Also: {reason.what}." for reason in reasons[1:])]),
        reasons[0].fix,
    )
    error.report = report
    return error


def checked_share(min_loaded: float | None) -> float | None:
    """The share that was asked for; raises `UsageError` unless it is one."""
    if min_loaded is not None and not 0 <= min_loaded <= 1:
        example = f"For example: {arg(min_loaded=0.95)}"
        raise UsageError(f"{min_loaded} is not a share of the values", "It is between 0 and 1.", example)
    return min_loaded


def percent(share: float) -> str:
    """A share for people, never rounded up: `99.99%` is not all."""
    return f"{int(share * 10_000) / 100:g}%"


def unmet(report: LoadReport, min_loaded: float | None, missing: str | Sequence[str] | None = None) -> list[Refusal]:
    """The demands that a report does not meet."""
    refusals = []
    least = checked_share(min_loaded)
    if least is not None and report.share < least:
        what = f"{percent(report.share)} of the target's values are loaded, and {percent(least)} were required"
        refusals.append(Refusal("min-loaded", what))
    if missing is not None:
        allowed = [matcher(pattern) for pattern in several(missing)]
        if missed := [name for name in not_loaded(report) if not any(matches(name) for matches in allowed)]:
            what = f"{counted(len(missed), 'name is', 'names are')} not loaded: {listed(missed)}"
            refusals.append(Refusal("missing", what))
    return refusals


def little(report: LoadReport, expected: int, fix: str) -> list[Refusal]:
    """The refusal of a plan that loads less than half of the `expected` values, or less than its suggestion would."""
    better = any(hint.agree and hint.rules for hint in report.suggestions)
    if not better and 2 * report.elements >= expected:
        return []
    share = f"only {percent(report.elements / max(1, expected))} of the values asked for are loaded"
    what = f"{share}{', and the suggested rules would load more' if better else ''}"
    least = int(report.share * 10_000) / 10_000 or 0
    return [Refusal("min-loaded", what, f"{fix}; accept it as is: {arg(min_loaded=least)}")]


def not_loaded(report: LoadReport) -> list[str]:
    """The names of the target that keep its own values."""
    unfilled = [mismatch.target for mismatch in report.mismatched if mismatch.done in (SKIPPED, REFUSED)]
    return [*(absent.name for absent in report.missing), *unfilled, *report.excluded]
