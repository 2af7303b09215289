"""The numbers that a run logged, over its steps, and what happened to it on the way."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from ckptool.analysis.curves import Curve, CurveBuilder, column
from ckptool.checkpoint.paths import matcher
from ckptool.commands import arg
from ckptool.errors import NoMatch, counted, listed
from ckptool.facts import LIVE, Report, Table, Told, bold, cyan, number
from ckptool.training import HISTORY, METRICS
from ckptool.training.store import Lines

MOST_CURVES = 100  # of one run
WIDTH, HEIGHT = 80, 6  # of a curve, in characters
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # of a braille character, from below
_ENDS = ("stop", "early-stop", "failed", "done")
_NOT_FINITE = ("nan", "inf", "-inf")  # as texts: JSON has no such numbers
_MOST = 1 << 62

Steps = tuple[int, ...]


@dataclass(frozen=True, slots=True, repr=False)
class RunHistory(Report):
    """The curves of a run by name, and the steps at which things happened to it.

    saves: checkpoints.  resumes: where it went on.  kills: where it began again though no end was noted.  stops: where
    it was stopped or failed.  event, step: the last of these.  left_out: curves for which there was no room.
    """

    schema = "plot/2"

    path: str
    curves: dict[str, Curve]
    saves: Steps = ()
    resumes: Steps = ()
    kills: Steps = ()
    stops: Steps = ()
    event: str = ""
    step: int | None = None
    left_out: int = 0

    @property
    def series(self) -> Annotated[dict[str, tuple[Steps, tuple[float, ...]]], LIVE]:
        """The steps and values of each curve."""
        return {name: (curve.steps, curve.values) for name, curve in self.curves.items()}

    @property
    def done(self) -> Annotated[Steps, LIVE]:
        """The step at which it was done, where that is the last that happened to it."""
        return (self.step,) if self.event == "done" and self.step is not None else ()

    @property
    def span(self) -> Annotated[tuple[int, int], LIVE]:
        """The first and the last step of all curves and events: the axis."""
        steps = [step for curve in self.curves.values() for step in (curve.steps[0], curve.steps[-1])]
        steps += [*self.saves, *self.resumes, *self.kills, *self.stops, *self.done]
        return min(steps, default=0), max(steps, default=0)

    def told(self) -> Told:
        at = "" if self.step is None else f" at step {self.step:,}"
        yield bold(self.path), ": ", f"{self.event}{at}" or "nothing recorded yet"
        if not self.curves:
            yield from ("", "  nothing was logged yet")
            return
        yield self._drawn
        yield ""
        odd = sorted({step for curve in self.curves.values() for step in curve.odd_steps})
        meanings = self._events() | {"!": ("NaN or infinite", odd)}
        yield Table([(letter, f"{word} at {_first(steps)}") for letter, (word, steps) in meanings.items() if steps])
        if self.left_out:
            yield f"  not drawn: {counted(self.left_out, 'more curve')}"

    def _events(self) -> dict[str, tuple[str, Sequence[int]]]:
        """What happened on the way: the letter on the axis, its meaning, and the steps."""
        resumed = [step for step in self.resumes if step not in self.kills]
        ended = {"x": ("stopped or failed", self.stops), "d": ("done", self.done)}
        return {
            "s": ("saved", self.saves),
            "r": ("resumed", resumed),
            "k": ("killed, then restarted", self.kills),
            **ended,
        }

    def _drawn(self, columns: int | None) -> Told:
        """Each curve above an axis with what happened on the way."""
        (first, last), events = self.span, self._events()
        labels = {name: [number(end) for end in curve.ends or (None, None)] for name, curve in self.curves.items()}
        margin = max(len(label) for ends in labels.values() for label in ends) + 2
        width = max((columns or WIDTH) - margin - 2, 10)
        for name, curve in self.curves.items():
            yield from ("", (bold(name), f"  {_facts(curve)}"))
            low, high = labels[name]
            is_flat = curve.ends is None or curve.ends[0] == curve.ends[1]
            rows = _braille(curve, first, last, width, 1 if is_flat else HEIGHT)
            for row, label in zip(rows, [low] if is_flat else [high, *[""] * (HEIGHT - 2), low], strict=True):
                yield f"{label:>{margin}} {'┤' if label else '│'}", cyan(row.rstrip())
            axis = ["─"] * width
            for letter, steps in (*((letter, events[letter][1]) for letter in "sxdrk"), ("!", curve.odd_steps)):
                for step in steps:
                    axis[column(step, first, last, width)] = letter
            yield f"{'':{margin}} └{''.join(axis)}"
        yield f"{'':{margin + 2}}{first:,}{last:>{width - len(f'{first:,}')},}"


def _first(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - 1:,} more, up to {steps[-1]:,}" if len(steps) > 1 else ""
    return f"{steps[0]:,}{more}"


def _facts(curve: Curve) -> str:
    facts = [f"last {number(curve.values[-1])}"]
    if curve.ends is not None and curve.ends[0] < curve.ends[1]:
        where = {value: step for step, value in reversed(curve.finite)}
        facts += [
            f"{name} {number(end)} at {where[end]:,}" for name, end in zip(("min", "max"), curve.ends, strict=True)
        ]
    facts += [counted(curve.points, "point")]
    if curve.not_finite:
        facts += [f"{curve.not_finite:,} of them NaN or infinite, the first at {curve.odd_steps[0]:,}"]
    return ", ".join(facts)


def _braille(curve: Curve, first: int, last: int, width: int, lines: int) -> list[str]:
    """The lines of a curve, from the top: two dots a character wide, four high."""
    cells = [[0x2800] * width for _ in range(lines)]
    for piece in curve.pieces(first, last, 2 * width):
        dots = [(at, round(height * (4 * lines - 1))) for at, height in piece]
        for (x, y), (to_x, to_y) in zip(dots, dots[1:] or dots, strict=False):
            count = max(abs(to_x - x), abs(to_y - y), 1)
            for i in range(count + 1):
                at, height = x + (to_x - x) * i // count, y + (to_y - y) * i // count
                cells[lines - 1 - height // 4][at // 2] |= _DOTS[at % 2][height % 4]
    return ["".join(map(chr, row)).replace("\u2800", " ") for row in cells]


def history_of(folder: str, only: Sequence[str] = ()) -> RunHistory:
    """The curves of a run up to its last whole line; only: names, or patterns for them; without, all but the epoch.

    Raises `NoMatch` for a name that was never logged.
    """
    patterns = {pattern: matcher(pattern) for pattern in only}
    history = Lines(os.path.join(folder, HISTORY)).read()
    events = [
        fact
        for fact in history
        if fact.get("event") in ("start", "resume", "save", *_ENDS) and _is_step(fact.get("step"))
    ]
    names: dict[str, set[str]] = {}  # what was logged, in this order, and the patterns that match it
    curves: dict[str, CurveBuilder] = {}
    wanted = 0

    def add(fact: Mapping[str, Any], step: Any) -> None:
        nonlocal wanted
        for name, value in fact.items() if _is_step(step) else ():
            if name == "step" or not (type(value) is float or value in _NOT_FINITE or _is_step(value)):
                continue
            if name not in names and len(names) < 100 * MOST_CURVES:
                names[name] = {pattern for pattern, matches in patterns.items() if name == pattern or matches(name)}
                is_wanted = bool(names[name]) if patterns else name != "epoch"
                wanted += is_wanted
                if is_wanted and len(curves) < MOST_CURVES:
                    curves[name] = CurveBuilder()
            if name in curves:
                curves[name].add(step, float(value))

    for fact in Lines(os.path.join(folder, METRICS)).read():
        add(fact, fact.get("step"))
    logged = {*names}
    for fact in events:  # metrics of your own loop are recorded with its checkpoints
        if fact["event"] == "save" and isinstance(found := fact.get("metrics"), dict):
            add({name: value for name, value in found.items() if name not in logged}, fact["step"])
    for pattern in patterns:
        if not any(pattern in found for found in names.values()):
            why = f"It logged {listed(list(names), 20)}." if names else "It has logged nothing."
            raise NoMatch(f"the run has no curve {pattern!r}", why, f"Draw all of them: omit {arg('only')}")
    drawn = {name: builder.curve() for name, builder in curves.items()}
    steps: dict[str, set[int]] = defaultdict(set)
    event, step = "", None
    for fact in events:
        is_running = event not in ("", *_ENDS)
        event, step = fact["event"], fact["step"]
        steps["stops" if event in _ENDS and event != "done" else f"{event}s"].add(step)
        if is_running and event in ("start", "resume"):
            steps["kills"].add(step)
    marks = {name: tuple(sorted(steps[name])) for name in ("saves", "resumes", "kills", "stops")}
    return RunHistory(folder, drawn, **marks, event=event, step=step, left_out=wanted - len(drawn))


def _is_step(value: Any) -> bool:
    return type(value) is int and -_MOST < value < _MOST
