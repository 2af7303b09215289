"""What can be said of runs: how one ended, what a rehearsal and a proof showed, the checkpoints in its folder, and the
numbers that it logged over its steps, with what happened to it on the way.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any

from ckptool.analysis.curves import Curve, CurveBuilder, braille, column, summary
from ckptool.checkpoint.paths import matcher
from ckptool.commands import arg, command
from ckptool.errors import NoMatch, counted, listed, printable
from ckptool.facts import (
    LIVE,
    Bytes,
    Report,
    Seconds,
    Table,
    Told,
    age,
    bar,
    bold,
    cyan,
    green,
    number,
    red,
    short,
    size,
    yellow,
)
from ckptool.training import HISTORY, METRICS

GOOD = "good"
MEASURES = 3  # that have a column in the table of a run
# How kills come: at calls that a preloaded library sees, or by time alone.
PRELOAD, TIME = "preload", "time"
ANY = "any moment"  # the place of a kill that waits for no event


@dataclass(frozen=True, slots=True, repr=False)
class Outcome(Report):
    """How a run ended. status: `done`, `stopped`, or by `stop.patience` `stopped-early`, which `why` explains.

    exit_code: 0, or 128 plus the signal that stopped it.
    """

    schema = "train/2"
    verdict = "status"

    status: str
    step: int
    exit_code: int
    path: str
    why: str = ""

    def exit(self) -> int:
        return self.exit_code

    def told(self) -> Told:
        steps = counted(self.step, "step")
        if self.status == "done":
            yield green("done"), f": {steps} → {self.path}"
        elif self.why:
            longer = command("resume", self.path, set="stop.patience=null")
            yield green("stopped early"), f": {steps} → {self.path}"
            yield f"  {self.why}; continue anyway: ", cyan(str(longer))
        else:
            where = f" after {steps}, saved → {self.path}" if self.step else f" before the first step: {self.path}"
            yield yellow("stopped"), where
            yield "  ", cyan(str(command("resume", self.path)))


def line_of(fact: Mapping[str, Any], rate: float, *, drawn: bool = False) -> str:
    """A logged line of a run, as its progress is shown. drawn: with a bar and the time left. rate: the mean of steps a
    second since it was started or resumed."""
    step, steps = fact["step"], fact.get("steps", 0)
    numbers = "  ".join(f"{printable(key)} {value:.5g}" for key, value in fact.items() if isinstance(value, float))
    if not drawn:
        return f"step {step:,}  {numbers}  {rate:.1f} steps/s"
    begin = f"{bar(step, steps, 16):16} step {step:,}" if steps else f"step {step:,}"
    if not rate:
        return f"{begin}  {numbers}"
    remaining = timedelta(seconds=round(max(0, steps - step) / rate))
    speed = f"{rate:.1f} steps/s" if rate >= 1 else f"{1 / rate:.1f} s/step"
    return f"{begin}  {speed}{f', {remaining} left' if remaining else ''}  {numbers}"


@dataclass(frozen=True, slots=True, repr=False)
class Evaluated(Report):
    """The metrics of a checkpoint of a run.

    chosen: why it is this one, "" where its step was named.  on: `val` or `test` data.  ema: of the average of its
    weights.
    """

    schema = "eval/2"

    run: str
    step: int
    chosen: str
    on: str
    ema: bool
    metrics: dict[str, float]

    def told(self) -> Told:
        which = f" ({self.chosen})" if self.chosen else ""
        data = "test data" if self.on == "test" else "validation data"
        average = ", the average of its weights" if self.ema else ""
        yield bold(self.run), f": step {self.step:,}{which} on {data}{average}"
        yield Table([(name, f"{value:.5g}") for name, value in self.metrics.items()])


@dataclass(frozen=True, slots=True, repr=False)
class Rehearsal(Report):
    """What a rehearsal of a run showed; bytes and seconds."""

    schema = "dry_run/2"

    parameters: dict[str, int]
    train_samples: int
    val_samples: int
    steps: int
    loss: float
    step_seconds: float
    save_seconds: float
    checkpoint_bytes: int
    device: str

    def told(self) -> Told:
        models = (f"{name} {counted(count, 'parameter', shown=short)}" for name, count in self.parameters.items())
        samples, steps = counted(self.train_samples, "sample"), counted(self.steps, "step")
        yield green("it runs"), ": one step, saved and reloaded, bit for bit the same; nothing was left behind"
        yield f"  models        {', '.join(models)}, on {self.device}"
        yield f"  data          {samples} to train on, {self.val_samples:,} held out; {steps}"
        yield f"  step          {self.step_seconds:.3f} s (the first, with all set-up), loss {self.loss:.5g}"
        yield f"  checkpoint    {size(self.checkpoint_bytes)} in {self.save_seconds:.3f} s"


# The folder of a run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A checkpoint of a run.

    state: `good`, or the code of what is wrong with it, with its sentence in `problem`.  metrics: of the evaluation at
    its step.
    kept: the rules of retention that want it; `damaged` ones stay, and are for a person to look at.
    """

    step: int
    path: str
    state: str
    problem: str
    epoch: int | None
    loss: float | None
    metrics: dict[str, float]
    bytes: Bytes
    kept: tuple[str, ...]


_EVENTS = {
    "stop": "stopped",
    "early-stop": "stopped early",
    "start": "started",
    "save": "saved",
    "resume": "resumed",
    "prune": "pruned",
    "skip-damaged": "skipped",
    "": "nothing has happened yet",
}


@dataclass(frozen=True, slots=True, repr=False)
class RunReport(Report):
    """The folder of a run, and its checkpoints.

    metric, mode: the measure of its best.  resumes: the step that it would go on from, or None.
    event, step: the last thing that happened to it, and when.  epochs: its length, where that is said in epochs.
    seconds: that it was trained for, in all its starts.  damaged: the number of its checkpoints that are not whole.
    script: the program whose loop it is, for a run of `ckptool.Run`; it resumes by itself.
    """

    schema = "run/2"

    path: str
    id: str
    metric: str
    mode: str
    event: str
    step: int | None
    resumes: int | None
    checkpoints: tuple[RunCheckpoint, ...]
    epochs: int | None = None
    seconds: Seconds | None = None
    script: str = ""

    @property
    def damaged(self) -> int:
        return sum(1 for checkpoint in self.checkpoints if checkpoint.state != GOOD)

    def exit(self) -> int:
        """1 where one is damaged."""
        return int(bool(self.damaged))

    def told(self, *, quiet: bool = False) -> Told:
        """The state of a run, where it resumes, and one line for each checkpoint. quiet: only the paths of these."""
        if quiet:
            yield from (checkpoint.path for checkpoint in self.checkpoints)
            return
        total = size(sum(checkpoint.bytes for checkpoint in self.checkpoints))
        yield (
            bold(self.path),
            f": a run, {counted(len(self.checkpoints), 'checkpoint')}, {total}",
            *((", ", red(f"{self.damaged:,} damaged")) if self.damaged else ()),
            f", {age(self.seconds)} of training" if self.seconds else "",
        )
        when = f" at step {self.step:,}" if self.step is not None else ""
        yield f"  {_EVENTS.get(self.event, self.event)}{when}{self._way_on() if self.checkpoints else ''}"
        yield ""
        names = dict.fromkeys([self.metric, *(name for checkpoint in self.checkpoints for name in checkpoint.metrics)])
        metrics = [*names][:MEASURES]
        heads = ("step", "epoch", "loss", *metrics, "size", "kept")
        rows = []
        for checkpoint in self.checkpoints:
            cells = (
                f"{checkpoint.step:,}",
                "" if checkpoint.epoch is None else f"{checkpoint.epoch:,}",
                "" if checkpoint.loss is None else f"{checkpoint.loss:.5g}",
                *(f"{checkpoint.metrics[name]:.5g}" if name in checkpoint.metrics else "" for name in metrics),
                size(checkpoint.bytes),
                checkpoint.problem or ", ".join(checkpoint.kept) or "not: prune would delete it",
            )
            rows.append(tuple(map(red, cells)) if checkpoint.problem else cells)
        yield Table(rows, heads=heads, right=range(4 + len(metrics)))

    def _way_on(self) -> str:
        if self.resumes is None:
            return "; none of them is whole, so it cannot resume"
        is_done = self.event == "done" and self.resumes == self.step
        if self.script and is_done:
            return f"; to train on, give the loop in {self.script} more steps or epochs, and run it again"
        if self.script:
            return f"; resumes from step {self.resumes:,}: run {self.script} again"
        if is_done and self.step:
            longer = f"train.epochs={2 * self.epochs}" if self.epochs else f"train.steps={2 * self.step}"
            return f"; make it longer: {command('resume', self.path, set=longer)}"
        if self.event == "early-stop":
            return f"; continue anyway: {command('resume', self.path, set='stop.patience=null')}"
        return f"; resumes from step {self.resumes:,}: {command('resume', self.path)}"


# Proofs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill. step: how many optimizer steps were done (None: not known).  place: `ANY`, or a kind of event.

    resumed: the step that the restart went on from; None where that is not known.
    """

    step: int | None
    place: str
    resumed: int | None

    def __str__(self) -> str:
        step = "" if self.step is None else f"after step {self.step}, "
        resumed = "" if self.resumed is None else f"; resumed from {self.resumed}"
        return f"{step}{'at any moment' if self.place == ANY else f'at: {self.place}'}{resumed}"


_WAYS = {
    PRELOAD: "calls, by a preloaded library; each kill comes before one, or half way through a write",
    TIME: "nothing (calls cannot be seen here): each kill comes at any moment",
}
_USUAL = "an unseeded generator, PYTHONHASHSEED and the order of sets, the clock, the number of threads"


@dataclass(slots=True, repr=False)
class Proof(Report):
    """Kills, events, findings and causes of a command that was to be proved.

    watched: `preload`, all calls, or `time`, none.  steps: of the unbroken run; 0 where no optimizer was seen.
    events: kind of event -> how many the unbroken run had.  compared: the checkpoints that its folder held at the end.
    unstable: what differed between two unbroken runs; then nothing was killed.  findings: what is wrong.  differs: the
    first step and tensor.  causes: what is probably not restored, with the evidence.  confirmed: those of them that
    led to the end of the unbroken run once they were put back.  starts: how often the command was started.  remarks:
    what was not judged.  kept: where the runs are, if it was not proved.
    """

    schema = "prove/2"
    verdict = "proved"

    command: tuple[str, ...]
    watched: str
    steps: int = 0
    seconds: Seconds = 0.0
    events: dict[str, int] = field(default_factory=dict)
    compared: tuple[str, ...] = ()
    kills: list[Kill] = field(default_factory=list)
    unstable: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    differs: str = ""
    causes: list[str] = field(default_factory=list)
    confirmed: list[str] = field(default_factory=list)
    starts: int = 0
    remarks: list[str] = field(default_factory=list)
    kept: str = ""

    @property
    def proved(self) -> bool:
        has_resumed = any(kill.resumed != 0 for kill in self.kills)
        return has_resumed and not (self.unstable or self.findings or self.differs)

    def exit(self) -> int:
        """0: proved.  1: disproved.  2: it could not be tried."""
        return 0 if self.proved else 1 if self.findings or self.differs else 2

    def told(self) -> Told:
        """The unbroken runs, the kills and what they covered, what is wrong and why; then the verdict."""
        length = counted(self.steps, "optimizer step") if self.steps else f"{self.seconds:.1f} s"
        facts = [("unbroken", f"{length}, {counted(len(self.compared), 'checkpoint')} at the end")]
        if not self.unstable:
            kills_at = Counter(kill.place for kill in self.kills)
            kinds = ", ".join(f"{kind} {kills_at[kind]} of {count:,}" for kind, count in self.events.items())
            kills = [*map(str, self.kills)] or ["never: it ended before a kill came"]
            facts += [("watched", _WAYS[self.watched]), *(("killed", kill) for kill in kills)]
            facts.append(("kinds of events", kinds or "none was seen"))
        facts += [("note", remark) for remark in self.remarks]
        facts += [("found", text) for text in self.findings]
        facts += [("differs", self.differs)] if self.differs else []
        facts += [("confirmed" if cause in self.confirmed else "likely", cause) for cause in self.causes]
        yield from (f"{name:<20}{fact}" for name, fact in facts)
        if self.proved:
            count = counted(len(self.kills), "kill")
            yield green(f"proved for {count}: the final checkpoints equal those of a run never killed.")
            yield "  Other moments, other machines and power failures were not tried."
        elif self.unstable:
            yield yellow("not tried: two unbroken runs end differently, so nothing can be compared with them.")
            yield from (f"  {text}" for text in self.unstable)
            yield f"  Such differences usually come from {_USUAL}."
        elif self.exit() == 1:
            yield red("disproved: killed and restarted, it does not end like a run that was never killed.")
        elif self.kills:
            yield yellow("not tried: every restart began at step 0, as there was no checkpoint yet.")
            yield "  Save more often, or let it run for longer."
        else:
            yield yellow("not tried: it ended before it could be killed.")
        if self.kept:
            yield f"  its runs are kept in {self.kept}"


# Curves ---------------------------------------------------------------------------------------------------------------

MOST_CURVES = 100  # of one run
WIDTH, HEIGHT = 80, 6  # of a curve, in characters
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
        rows = []
        for letter, (word, steps) in meanings.items():
            rows += [(letter, f"{word} at {listed([f'{step:,}' for step in steps], 4)}")] if steps else []
        yield Table(rows)
        if self.left_out:
            yield f"  not drawn: {counted(self.left_out, 'more curve')}"

    def _events(self) -> dict[str, tuple[str, Sequence[int]]]:
        """What happened on the way: the letter on the axis, its meaning, and the steps."""
        return {
            "s": ("saved", self.saves),
            "r": ("resumed", [step for step in self.resumes if step not in self.kills]),
            "k": ("killed, then restarted", self.kills),
            "x": ("stopped or failed", self.stops),
            "d": ("done", self.done),
        }

    def _drawn(self, columns: int | None) -> Told:
        """Each curve above an axis with what happened on the way."""
        (first, last), events = self.span, self._events()
        labels = {name: [number(end) for end in curve.ends or (None, None)] for name, curve in self.curves.items()}
        margin = max(len(label) for ends in labels.values() for label in ends) + 2
        width = max((columns or WIDTH) - margin - 2, 10)
        for name, curve in self.curves.items():
            yield from ("", (bold(name), f"  {summary(curve)}"))
            low, high = labels[name]
            is_flat = curve.ends is None or curve.ends[0] == curve.ends[1]
            rows = braille(curve, first, last, width, 1 if is_flat else HEIGHT)
            for row, label in zip(rows, [low] if is_flat else [high, *[""] * (HEIGHT - 2), low], strict=True):
                yield f"{label:>{margin}} {'┤' if label else '│'}", cyan(row.rstrip())
            axis = ["─"] * width
            for letter, steps in (*((letter, events[letter][1]) for letter in "sxdrk"), ("!", curve.odd_steps)):
                for step in steps:
                    axis[column(step, first, last, width)] = letter
            yield f"{'':{margin}} └{''.join(axis)}"
        yield f"{'':{margin + 2}}{first:,}{last:>{width - len(f'{first:,}')},}"


def history_of(folder: str, only: Sequence[str] = ()) -> RunHistory:
    """The curves of a run up to its last whole line; only: names, or patterns for them; without, all but the epoch.

    Raises `NoMatch` for a name that was never logged.
    """
    from ckptool.training.store import Lines  # with all that writes a run

    patterns = {pattern: matcher(pattern) for pattern in only}
    history = (fact for fact in Lines(os.path.join(folder, HISTORY)).read() if _is_step(fact.get("step")))
    events = [fact for fact in history if fact.get("event") in ("start", "resume", "save", *_ENDS)]
    names: dict[str, bool] = {}  # what was logged, in this order, and whether it is wanted
    curves: dict[str, CurveBuilder] = {}

    def add(fact: Mapping[str, Any], step: Any) -> None:
        for name, value in fact.items() if _is_step(step) else ():
            if name == "step" or not (type(value) is float or value in _NOT_FINITE or _is_step(value)):
                continue
            if name not in names and len(names) < 100 * MOST_CURVES:
                matching = any(name == pattern or matches(name) for pattern, matches in patterns.items())
                names[name] = matching if patterns else name != "epoch"
                if names[name] and len(curves) < MOST_CURVES:
                    curves[name] = CurveBuilder()
            if name in curves:
                curves[name].add(step, float(value))

    for fact in Lines(os.path.join(folder, METRICS)).read():
        add(fact, fact.get("step"))
    logged = {*names}
    for fact in events:  # metrics of your own loop are recorded with its checkpoints
        if fact["event"] == "save" and isinstance(metrics := fact.get("metrics"), dict):
            add({name: value for name, value in metrics.items() if name not in logged}, fact["step"])
    for pattern, matches in patterns.items():
        if pattern not in names and not any(map(matches, names)):
            why = f"It logged {listed(list(names), 20)}." if names else "It has logged nothing."
            raise NoMatch(f"the run has no curve {pattern!r}", why, f"Draw all of them: omit {arg('only')}")
    steps: dict[str, set[int]] = defaultdict(set)
    event, step = "", None
    for fact in events:
        is_running = event not in ("", *_ENDS)
        event, step = fact["event"], fact["step"]
        steps["stops" if event in _ENDS and event != "done" else f"{event}s"].add(step)
        if is_running and event in ("start", "resume"):
            steps["kills"].add(step)
    marks = {name: tuple(sorted(steps[name])) for name in ("saves", "resumes", "kills", "stops")}
    drawn = {name: builder.curve() for name, builder in curves.items()}
    return RunHistory(folder, drawn, **marks, event=event, step=step, left_out=sum(names.values()) - len(drawn))


def _is_step(value: Any) -> bool:
    return type(value) is int and -_MOST < value < _MOST
