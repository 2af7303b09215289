"""`plot`: the numbers that a run logged, over its steps. Needs no torch."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from ckptool.analysis.plot import CurveBuilder, RunHistory
from ckptool.checkpoint.patterns import matcher
from ckptool.commands import several
from ckptool.errors import NoMatch, listed
from ckptool.formats.opening import refuse_address
from ckptool.options import option, verb
from ckptool.training import HISTORY, METRICS
from ckptool.training.inspect_run import folder_of
from ckptool.training.store import Lines
from ckptool.verbs._options import Texts
from ckptool.verbs._training import RunFolder

MOST_CURVES = 100  # of one run
_ENDS = ("stop", "early-stop", "failed", "done")
_NOT_FINITE = ("nan", "inf", "-inf")  # as texts: JSON has no such numbers
_MOST = 1 << 62

Steps = tuple[int, ...]


@verb(("ckptool plot runs/basic", "its curves"), ("ckptool plot runs/basic --only 'val_*'", "some of them"))
def plot(
    run: RunFolder,
    *,
    only: Annotated[
        Texts, option("--only NAME", "Draw only this curve, or those that match a pattern. Repeatable.", several=True)
    ] = (),
) -> RunHistory:
    """The loss, the learning rate and the metrics of a run over its steps, with its saves, resumes and stops.

    only: names of curves, or patterns for them; without, all but the epoch. A run that is being written is read up to
    its last whole line. Raises `UsageError` for a folder that is no run, `NoMatch` for a name that was never logged.
    """
    refuse_address("plot", run)
    folder = folder_of(run)
    curves, events = _Curves(several(only)), list(_events(folder))
    for fact in Lines(os.path.join(folder, METRICS)).read():
        curves.add(fact)
    logged = {*curves.wanted}
    for fact in events:  # metrics of your own loop are recorded with its checkpoints
        if fact["event"] == "save" and isinstance(found := fact.get("metrics"), dict):
            curves.add({**{name: value for name, value in found.items() if name not in logged}, "step": fact["step"]})
    curves.check()
    drawn = {name: builder.curve() for name, builder in curves.builders.items()}
    last = events[-1] if events else {}
    left_out = sum(curves.wanted.values()) - len(drawn)
    return RunHistory(folder, drawn, *_marks(events), last.get("event", ""), last.get("step"), left_out)


def _events(folder: str) -> Iterable[dict[str, Any]]:
    for fact in Lines(os.path.join(folder, HISTORY)).read():
        if fact.get("event") in ("start", "resume", "save", *_ENDS) and _is_step(fact.get("step")):
            yield fact


def _marks(events: Iterable[Mapping[str, Any]]) -> tuple[Steps, Steps, Steps, Steps]:
    """The steps of saves, resumes, kills and stops."""
    steps: dict[str, set[int]] = defaultdict(set)
    is_running = False
    for fact in events:
        event, step = fact["event"], fact["step"]
        steps["stop" if event in _ENDS and event != "done" else event].add(step)
        if is_running and event in ("start", "resume"):
            steps["kill"].add(step)
        is_running = event not in _ENDS
    saves, resumes, kills, stops = (tuple(sorted(steps[name])) for name in ("save", "resume", "kill", "stop"))
    return saves, resumes, kills, stops


class _Curves:
    """Curves by name, in the order in which they were first logged.

    wanted: the names that were logged, and whether each is to be drawn.
    """

    def __init__(self, only: Sequence[str]) -> None:
        self.only = {pattern: matcher(pattern) for pattern in only}
        self.wanted: dict[str, bool] = {}
        self.builders: dict[str, CurveBuilder] = {}

    def add(self, fact: Mapping[str, Any]) -> None:
        """Adds the numbers of a line to the curves, at its step."""
        step = fact.get("step")
        for name, value in fact.items() if _is_step(step) else ():
            if name == "step" or not (type(value) is float or value in _NOT_FINITE or _is_step(value)):
                continue
            if name not in self.wanted and len(self.wanted) < 100 * MOST_CURVES:
                self.wanted[name] = any(self._matches(name)) if self.only else name != "epoch"
                if self.wanted[name] and len(self.builders) < MOST_CURVES:
                    self.builders[name] = CurveBuilder()
            if name in self.builders:
                self.builders[name].add(step, float(value))  # type: ignore[arg-type]

    def _matches(self, name: str) -> list[bool]:
        return [name == pattern or matches(name) for pattern, matches in self.only.items()]

    def check(self) -> None:
        """Raises `NoMatch` naming a pattern that matches nothing that was logged."""
        rows = [self._matches(name) for name in self.wanted]
        for number, pattern in enumerate(self.only):
            if not any(row[number] for row in rows):
                why = f"It logged {listed(list(self.wanted), 20)}." if rows else "It has logged nothing."
                raise NoMatch(f"the run has no curve {pattern!r}", why, "Draw all of them: omit --only")


def _is_step(value: Any) -> bool:
    return type(value) is int and -_MOST < value < _MOST
