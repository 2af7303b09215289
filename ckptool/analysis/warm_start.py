"""The effect of loading a checkpoint into a model, name by name: what fits, what does not, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.patterns import matcher
from ckptool.checkpoint.registry import Report
from ckptool.commands import arg
from ckptool.errors import PlanRefused, UsageError, counted, escaped, listed, printable

Shape = tuple[int, ...] | None
AS_IT_IS, SLICED, PADDED, RESIZED, SKIPPED, REFUSED = "as it is", "sliced", "padded", "resized", "skipped", "refused"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A tensor that is loaded. `elements`: of the target's that it fills.

    how: `as it is`, `sliced`, `padded` or `resized`.
    """

    source: str
    target: str
    kind: str
    elements: int
    how: str = AS_IT_IS


@dataclass(frozen=True, slots=True)
class Absent:
    """A name that only one side has. `name`: what it is called after renaming, where that is another."""

    source: str
    name: str
    kind: str
    dtype: DType | None
    shape: Shape


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A name of both sides that does not fit. `about`: `shape`, `dtype` or `kind`.  done: the outcome.

    how: the way in which it is resized.
    """

    source: str
    target: str
    kind: str
    about: str
    have: tuple[DType | None, Shape]
    want: tuple[DType | None, Shape]
    done: str
    how: str = ""


@dataclass(frozen=True, slots=True)
class DtypeChange:
    """A tensor that gets another type. `exact`: every value stays what it is; None where that was not read.

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
class OptimizerReport:
    """Optimizer state that goes along. `known_by`: whether `names`, `order` or `shapes` match slots and parameters.

    carried: names of the target with state.  fresh: those that start without.  left_out: slots that do not go along,
    and why.
    """

    address: str
    known_by: str
    carried: tuple[str, ...]
    fresh: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Rules that belong together, in the order in which they have to be given; `why`, the evidence for them.

    agree: how many keys get a name of the target with the same shape.  total: how many keys the rules take.
    unambiguous: False where something else would fit as well: to be looked at before it is used.
    rules: empty where no renaming can help.
    """

    rules: tuple[str, ...]
    agree: int
    total: int
    unambiguous: bool
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
    """All that loading `source` into `target` does. Printed, it is a table.

    loaded: what is loaded, each tensor once.  tied: names that are loaded through another name of the same tensor, as
    (name, that one).
    missing: names of the target that are not loaded.  unexpected: names that only the checkpoint has.
    supplied: names that an older torch did not save, and that torch gives a value of its own.
    excluded: names of the target that were not to be loaded.  elements, total: of the target's values, each tensor
    once.
    normalised: what was done to names and shapes unasked.
    suggestions: rules that would make more of it fit.  refused: why the plan is not accepted; empty where it is.
    taken: names whose values come from the target, where a file was written.  output: that file
    (`verbs._written.Written`).
    """

    verdict = "accepted"

    source: str
    target: str
    target_kind: str
    root: str
    loaded: tuple[Loaded, ...]
    tied: tuple[tuple[str, str], ...]
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
    optimizer: OptimizerReport | None = None
    taken: tuple[str, ...] = ()
    output: Any = None
    rules_file: str = ""
    applied: bool = field(default=False)
    supplied: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """True if nothing stands against the plan."""
        return not self.refused

    @property
    def share(self) -> float:
        """The share of the target's values that are loaded, 0 to 1."""
        return self.elements / self.total if self.total else float(bool(self.loaded))

    def require(self, min_loaded: float | None = None, missing: str | Sequence[str] | None = None) -> LoadReport:
        """Raises `PlanRefused` unless this share (0 to 1) is loaded, and only names that match `missing` are not.

        Returns the report itself.  missing: patterns as in `--only`; None for whatever is missing.
        """
        if found := unmet(self, min_loaded, missing):
            raise refusal(self, found)
        return self


def refusal(report: LoadReport, found: Sequence[Refusal] | None = None) -> PlanRefused:
    """The error that says why a plan is not carried out."""
    reasons = list(report.refused if found is None else found)
    done = "was loaded" if report.applied else "was not loaded"
    after = "It was done already; nothing was undone." if report.applied else "Nothing was changed."
    error = PlanRefused(
        f"{report.source} {done} into {report.target}{', but' if report.applied else ':'} {reasons[0].what}",
        " ".join([after, *(f"Also: {reason.what}." for reason in reasons[1:])]),
        reasons[0].fix,
    )
    error.report = report
    return error


def checked_share(min_loaded: float | None) -> float | None:
    """The share that was asked for; raises `UsageError` unless it is one."""
    if min_loaded is not None and not 0 <= min_loaded <= 1:
        raise UsageError(
            f"{min_loaded} is not a share of the values",
            "It is between 0 and 1.",
            f"For example: {arg(min_loaded=0.95)}",
        )
    return min_loaded


def percent(share: float) -> str:
    """A share for people, never rounded up: `99.99 %` is not all."""
    return f"{int(share * 10_000) / 100:g} %"


def described(side: tuple[DType | None, Shape]) -> str:
    """The dtype and shape of one side of a mismatch: `f32 [10, 4]`."""
    dtype, shape = side
    return f"{dtype.name if dtype else '?'} {'[?]' if shape is None else list(shape)}"


def unmet(report: LoadReport, min_loaded: float | None, missing: str | Sequence[str] | None = None) -> list[Refusal]:
    """The demands that a report does not meet."""
    found = []
    least = checked_share(min_loaded)
    if least is not None and report.share < least:
        what = f"{percent(report.share)} of the target's values are loaded, and {percent(least)} were asked for"
        found.append(Refusal("min-loaded", what))
    if missing is not None:
        allowed = [matcher(pattern) for pattern in ([missing] if isinstance(missing, str) else missing)]
        names = not_loaded(report)
        if other := [printable(name) for name in names if not any(matches(name) for matches in allowed)]:
            found.append(
                Refusal("missing", f"{counted(len(other), 'name is', 'names are')} not loaded: {listed(other)}")
            )
    return found


def little(report: LoadReport, wanted: int, fix: str) -> list[Refusal]:
    """The refusal of what loads less than half of the `wanted` values, or less than its own suggestion would."""
    better = any(each.unambiguous and each.agree and each.rules for each in report.suggestions)
    if not better and 2 * report.elements >= wanted:
        return []
    share = f"only {percent(report.elements / max(1, wanted))} of the values asked for are loaded"
    what = f"{share}{', and the rules suggested would load more' if better else ''}"
    least = int(report.share * 10_000) / 10_000 or 0
    return [Refusal("min-loaded", what, f"{fix}; accept it as it is: {arg(min_loaded=least)}")]


def not_loaded(report: LoadReport) -> list[str]:
    """The names of the target that keep its own values."""
    left = [mismatch.target for mismatch in report.mismatched if mismatch.done in (SKIPPED, REFUSED)]
    return [*(absent.name for absent in report.missing), *left, *report.excluded]
