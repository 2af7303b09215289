"""`prove -- COMMAND`: a program that is killed anywhere and started again ends with the same checkpoints.

Nothing of the program is changed. It runs twice unbroken, in a fresh folder of the same name; then it is killed, now at
any moment, now at a file-system event (`watch`), and started again, until it ends by itself. `tracer` tells its steps.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptool.analysis.diff import Diff
from ckptool.analysis.scan import GOOD, MEMBER, PART, Scan, ScannedFile
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.tree import address
from ckptool.commands import arg
from ckptool.errors import CkptoolError, RunFailed, TextLines, UsageError, counted, printable
from ckptool.training.prove.trace import NOT_RESTORED, Divergence, Trace, TracedStep, divergence, place_of
from ckptool.training.prove.watch import APPEARED, GONE, GREW, Polled, sizes, watcher
from ckptool.training.reports import ANY, POLLING, PRELOAD, CommandKill, CommandProof

RUN = "{run}"
# Kinds of events in the order in which kills come at them.
PLAN = (ANY, "half of a write", "rename", ANY, "unlink", "open", ANY, "fsync", "write", ANY, "truncate", "mkdir")
POLLED_PLAN = (ANY, GREW, APPEARED, ANY, GONE)
PAUSE = 0.002  # seconds between two looks
SOON = 5.0  # seconds within which an event must come, or the kill comes without it
SOONER = 0.6  # of the time that a run took which ended before its kill came: where the next one ends, for kills by time
TAIL = 1500  # characters of the program's own words

Say = Callable[[str], Any]
Look = Callable[[str], Scan]
Compare = Callable[[str, str], Diff]


def prove_command(
    command: Sequence[str],
    look: Look,
    compare: Compare,
    *,
    kills: int = 5,
    seed: int = 0,
    timeout: float = 600.0,
    say: Say = lambda text: None,
) -> CommandProof:
    """Proves a command, of which `{run}` becomes a fresh folder; what it wrote is deleted unless the proof fails.

    look: the checkpoints of a folder.  compare: the differences of two files.  kills: how often it is killed.  seed:
    where.  timeout: seconds for one process.  Raises `UsageError` for a command without `{run}`, and `RunFailed` where
    it fails unbroken or leaves no checkpoint.
    """
    if not any(RUN in word for word in command):
        raise UsageError("the command does not name {run}", "It stands for the folder that the command writes to.")
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0]}", "", "Give the command as you would type it.")
    folder = os.path.realpath(tempfile.mkdtemp(prefix="ckptool-prove-"))
    tools = os.path.join(folder, "tools")
    os.mkdir(tools)
    here = Path(__file__).parent
    shutil.copy(here / "tracer.py", os.path.join(tools, "sitecustomize.py"))
    shutil.copy(here.parent / "moving.py", tools)
    runs = CommandRuns(command, folder, random.Random(seed), timeout, look, compare, say)
    runs.watch = watcher(runs.run, tools)
    proof = CommandProof(tuple(command), runs.watch.name)
    try:
        runs.fill(proof, kills)
        if proof.unstable or proof.exit() == 1:
            proof.kept = folder
    finally:
        if not proof.kept:
            shutil.rmtree(folder, ignore_errors=True)
    return proof


class EndDifference(NamedTuple):
    """Something that differs at the end."""

    place: str
    is_tensor: bool


@dataclass(slots=True)
class Life:
    """A process of the command.

    start: the steps that the reference had done when it had the same weights; None where it never had them.
    code: its exit code; None where it was killed, at `place`.  late: it was, since it took too long.
    """

    trace: Trace
    code: int | None = None
    place: str = ANY
    late: bool = False
    start: int | None = None
    placed: bool = False
    seconds: float = 0.0

    @property
    def steps(self) -> list[TracedStep]:
        return self.trace.steps


@dataclass(slots=True)
class CommandRuns:
    """Runs of a command in a folder. rng: where kills come.  limit: seconds for one process.

    seen: pattern of a path -> the steps after which the reference had such a file.  saved: those after which it had a
    checkpoint.  chance: what differs in two unbroken runs.  seconds: that a whole run takes, at least.
    """

    command: Sequence[str]
    folder: str
    rng: random.Random
    limit: float
    look: Look
    compare: Compare
    say: Say
    watch: Polled = field(init=False)
    reference: list[TracedStep] = field(default_factory=list)
    again: list[TracedStep] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    saved: int = 0
    chance: set[EndDifference] = field(default_factory=set)
    seconds: float = 0.0
    lives: int = 0

    @property
    def run(self) -> str:
        return os.path.join(self.folder, "run")

    def fill(self, proof: CommandProof, kills: int) -> None:
        self.unbroken(proof, "reference")
        self.unbroken(proof, "again")
        if self.unstable(proof):
            return
        for number in range(1, kills + 4):  # one, unless it ends before all kills have come, or tells no steps
            if len(proof.kills) < kills and not (proof.findings or proof.differs):
                self.broken(proof, kills - len(proof.kills) if self.reference else 1, number)

    # Unbroken runs --------------------------------------------------------------------------------------------------

    def unbroken(self, proof: CommandProof, name: str) -> None:
        """A run to its end, which is put away under a name."""
        self.say(f"unbroken run: {name}")
        os.mkdir(self.run)
        life = self.live(None)
        if life.code != 0:
            if life.late:
                what = f"the command took more than {self.limit:.0f} s before anything was killed"
                raise RunFailed(what, self.tail(), f"Give it longer: {arg(timeout=3600)}")
            raise RunFailed(f"the command ended with exit code {life.code} before anything was killed", self.tail())
        if name == "reference":
            self.reference, self.seconds = life.steps, life.seconds
            self.describe(proof)
        else:
            self.again, self.seconds = life.steps, min(self.seconds, life.seconds)
        os.rename(self.run, os.path.join(self.folder, name))

    def describe(self, proof: CommandProof) -> None:
        """Facts about the reference, and what of it is not judged. Raises `RunFailed` without a checkpoint."""
        proof.events = dict(self.watch.counts())
        if self.watch.name == PRELOAD and not proof.events:  # a program that is linked statically
            self.watch = Polled(self.run)
        proof.watched, proof.steps, proof.seconds = self.watch.name, len(self.reference), self.seconds
        proof.compared = tuple(self.checkpoints())
        if not proof.compared:
            said = TextLines("There is nothing to compare.", *self.tail().split("\n"))
            raise RunFailed("the command left no checkpoint in {run}", said)
        names = {_pattern(name) for name in proof.compared}
        ours = (steps for path, steps in self.seen.items() if any(path == n or path.startswith(f"{n}/") for n in names))
        self.saved = min(ours, default=0)
        if others := self.look(self.run).other_files:
            proof.remarks.append(f"{counted(others, 'other file')} in the folder: not compared")
        if not self.reference:
            proof.remarks.append("no optimizer step of torch was seen: kills come by time, and no cause is named")
        for path in sorted(set(self.watch.outside())):
            with suppress(CkptoolError):
                if not path.startswith(self.folder) and os.path.isfile(path) and self.look(path).files[0].is_good:
                    proof.remarks.append(f"it also writes {printable(path)}: shared by all runs, and not compared")

    def unstable(self, proof: CommandProof) -> bool:
        """Compares the unbroken runs; values beside the tensors may differ, and are left out of what follows."""
        found = self.differences("reference", "again")
        if not any(each.is_tensor for each in found):
            self.chance = set(found)
            proof.remarks += [f"{each.place} differs in two unbroken runs: not compared" for each in found[:3]]
            return False
        proof.unstable.append(f"at the end: {found[0].place}")
        start = place_of(self.again[0], self.reference) if self.again and self.reference else None
        apart = divergence(self.reference, [], self.again, 0) if start == 0 else None
        if apart:
            proof.unstable += [f"from step {apart.step} on", *apart.causes]
        elif self.again and start != 0:
            proof.unstable.append("the weights differ before the first step: the model is built without a seed")
        return True

    # Killed runs ----------------------------------------------------------------------------------------------------

    def broken(self, proof: CommandProof, kills: int, number: int) -> None:
        """A run that is killed and started again until it ends by itself; then it is compared."""
        os.mkdir(self.run)
        lives: list[Life] = []
        for target, place in [*self.plan(proof, kills), (None, "")]:
            whole = [name for name, row in self.checkpoints().items() if row.state in (GOOD, MEMBER, PART)]
            reached = (lives[-1].start or 0) + len(lives[-1].steps) if lives else 0
            self.say(f"{place} at {max(target, reached):.0f}" if target is not None else "to the end")
            life = self.live(target if target is None or not self.reference else max(target, reached + 1), place)
            lives.append(life)
            self.judge_life(proof, lives, whole)
            if life.code is not None or life.late:
                if target is not None and not self.reference:  # this time it was quicker than its kill
                    self.seconds = SOONER * min(self.seconds, life.seconds)
                break
            reached = (life.start or 0) + len(life.steps)
            proof.kills.append(CommandKill(reached if self.reference else None, life.place, None))
            self.judge_files(proof)
        self.judge_end(proof, lives)
        os.rename(self.run, os.path.join(self.folder, f"killed-{number}"))

    def plan(self, proof: CommandProof, kills: int) -> list[tuple[float | None, str]]:
        """Where kills come, in order: after so many steps, or seconds where no steps are seen; and at what."""
        plan = POLLED_PLAN if self.watch.name == POLLING else PLAN
        places = [place for place in plan if place == ANY or place in proof.events]
        last = len(self.reference)
        if last:
            low = min(max(1, self.saved), last - 1)
            at: list[float] = sorted(float(self.rng.randrange(low, max(last, low + 1))) for _ in range(kills))
        else:
            at = [self.rng.uniform(0.3, 0.95) * self.seconds for _ in range(kills)]
        return [(when, places[(len(proof.kills) + number) % len(places)]) for number, when in enumerate(at)]

    def judge_life(self, proof: CommandProof, lives: list[Life], whole: list[str]) -> None:
        """Notes what a start after a kill resumed from, and how it ended unless it was killed."""
        life, after = lives[-1], ""
        if len(lives) > 1:
            kill = proof.kills[-1] = replace(proof.kills[-1], resumed=life.start)
            after = f"after the kill {_where(kill)}"
            before = max((each.start or 0 for each in lives[:-1]), default=0)
            if life.start == 0 and whole and self.saved:
                proof.findings.append(f"{after} it began again at step 0, although {printable(whole[-1])} was whole")
            elif life.start is not None and life.start < before:
                proof.findings.append(f"{after} it went back to step {life.start}, from before step {before}")
        if life.late:
            proof.findings.append(f"{after} it did not end within {self.limit:.0f} s".strip())
        elif life.code:
            last = self.tail().splitlines()[-1:] or ["it printed nothing"]
            proof.findings.append(f"{after} it ended with exit code {life.code}: {last[0][:300]}".strip())

    def judge_files(self, proof: CommandProof) -> None:
        """Notes files that a kill left torn under the names that checkpoints have in the end."""
        names = {_pattern(name) for name in proof.compared}
        for name, row in self.checkpoints().items():
            torn = row.state not in (GOOD, MEMBER, PART) and _pattern(name) in names
            if torn and not any(name in finding for finding in proof.findings):
                why = f"the kill {_where(proof.kills[-1])} left it torn: it is written in place"
                problem = row.problem.replace(f"{self.run}{os.sep}", "")
                proof.findings.append(f"{name}: {why} ({problem})")

    def judge_end(self, proof: CommandProof, lives: list[Life]) -> None:
        """Compares the end with that of the unbroken run, and finds the cause of a difference."""
        ended, words = lives[-1].code == 0, []
        found = [each for each in self.differences("reference", "run") if each not in self.chance] if ended else []
        if ended and not found:
            return
        if ended and len(lives) > 1 and self.reference and not lives[-1].steps:
            proof.findings.append("started again after a kill, it ended with exit code 0 without training on")
        if (apart := self.apart(lives, ended)) is not None:
            words, proof.causes = [f"the first step that differs is {apart.step}"], apart.causes
        if found:
            words.append(f"the first tensor at the end is {min(found, key=lambda each: not each.is_tensor).place}")
        proof.differs = "; ".join(words)

    def apart(self, lives: list[Life], ended: bool) -> Divergence | None:
        """The first start that went another way than the reference, and why."""
        for life in lives:
            if life.steps and life.start is None:
                step = next((each.start or 0 for each in reversed(lives[: lives.index(life)])), 0) + 1
                return Divergence(step, [NOT_RESTORED])
            if life.steps and (found := divergence(self.reference, self.again, life.steps, life.start or 0)):
                return found
        last = next((life for life in reversed(lives) if life.steps), None)
        if last is None or not ended:
            return None
        return divergence(self.reference, self.again, last.steps, last.start or 0, ended=True)

    # A process ------------------------------------------------------------------------------------------------------

    def live(self, target: float | None, place: str = "") -> Life:
        """Starts the command, and ends it at a step, or at the next event of a kind after it."""
        self.lives += 1
        traces = os.path.join(self.folder, f"trace-{self.lives}")
        os.mkdir(traces)
        env = {**os.environ, "CKPTOOL_PROVE_TRACE": traces}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (os.path.join(self.folder, "tools"), env.get("PYTHONPATH"))))
        words = self.watch.begin([word.replace(RUN, self.run) for word in self.command], env)
        life, begun = Life(Trace(traces)), time.monotonic()
        with open(os.path.join(self.folder, "output"), "wb") as log:
            process = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            killed = self.follow(process, life, target, place)
        finally:
            _end(process, traces)
            life.trace.close()
        life.seconds = time.monotonic() - begun
        life.code = None if killed else process.returncode
        self.locate(life)
        return life

    def follow(self, process: subprocess.Popen[bytes], life: Life, target: float | None, place: str) -> bool:
        """Waits for the end; True where it is brought about."""
        begun, armed = time.monotonic(), 0.0
        pace = self.seconds / len(self.reference) if self.reference else 0.0
        delay = self.rng.uniform(0, pace) if place == ANY else SOON
        while process.poll() is None:
            now, steps = time.monotonic(), life.trace.read()
            if not self.reference:
                for path in sizes(self.run):
                    self.seen.setdefault(_pattern(os.path.relpath(path, self.run)), steps)
            self.locate(life)
            done = (life.start or 0) + steps if self.reference else now - begun
            if target is not None and not armed and done >= target and (steps or not self.reference):
                armed = now
                self.watch.arm(place)
            if self.watch.due():
                life.place = place
            if life.place != ANY or (armed and now - armed >= delay):
                return True
            if now - begun > self.limit:
                life.late = True
                return True
            time.sleep(PAUSE)
        life.place = place
        return self.watch.due() and process.returncode == -signal.SIGKILL

    def locate(self, life: Life) -> None:
        """Finds where in the reference a start began."""
        if life.steps and self.reference and not life.placed:
            life.start, life.placed = place_of(life.steps[0], self.reference), True

    def tail(self) -> TextLines:
        """The end of what the program wrote."""
        text = Path(self.folder, "output").read_text(encoding="utf-8", errors="replace")
        return TextLines(*text[-TAIL:].strip().splitlines())

    # The checkpoints ------------------------------------------------------------------------------------------------

    def checkpoints(self, name: str = "run") -> dict[str, ScannedFile]:
        """The checkpoints of a run, by their paths in it."""
        folder = os.path.join(self.folder, name)
        return {os.path.relpath(row.path, folder): row for row in self.look(folder).files}

    def differences(self, one: str, other: str) -> list[EndDifference]:
        """What of the checkpoints of one run is missing or another in the second."""
        here, there = self.checkpoints(one), self.checkpoints(other)
        found: list[EndDifference] = []
        for name in here:
            if name not in there:
                found.append(EndDifference(f"{name}, which is missing", True))
                continue
            try:
                report = self.compare(*(os.path.join(self.folder, run, name) for run in (one, other)))
            except CkptoolError as error:
                found.append(EndDifference(f"{name}, which cannot be compared: {error.what}", True))
                continue
            pairs = [(each.path, each.left) for each in report.changed] + [*report.only_left, *report.only_right]
            found += [
                EndDifference(f"{address(path)} in {name}", isinstance(node, TensorEntry)) for path, node in pairs
            ]
        return found


def _pattern(name: str) -> str:
    """The name without its numbers: the step, the rank."""
    return re.sub(r"\d+", "#", name)


def _where(kill: CommandKill) -> str:
    step = "" if kill.step is None else f" at step {kill.step}"
    return step.strip() if kill.place == ANY else f"in {kill.place}{step}"


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ends the process, its group, and what it started in sessions of its own, as torchrun does."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() + b"\0" in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)
