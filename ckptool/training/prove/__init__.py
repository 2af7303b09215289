"""`prove -- COMMAND`: a program that is killed anywhere and started again ends with the same checkpoints.

Nothing in the program is changed. It runs twice unbroken, in a fresh folder of the same name; then it is killed, now at
any moment, now at a file-system event (`Watch`), and started again, until it ends by itself. `tracer` records its
steps. If the end differs, the first restart that began another way is repeated with what differed first put back: if
that leads to the end of the unbroken run, it is the cause.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from ckptool.analysis.diff import diff_files
from ckptool.analysis.scan import GOOD, MEMBER, PART, ScannedFile, scan
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.tree import address
from ckptool.commands import arg
from ckptool.errors import CkptoolError, RunFailed, TextLines, UsageError, counted, printable
from ckptool.training.prove.trace import NOT_RESTORED, Cause, Divergence, Life, Reference, sentences
from ckptool.training.reports import ANY, PRELOAD, TIME, Kill, Proof

HERE = Path(__file__).parent
RUN = "{run}"
HALF = "half of a write"
KINDS = ("open", "write", HALF, "rename", "unlink", "fsync", "truncate", "mkdir")  # as in shim.c
# Kinds of events, in the order of the kills at them.
PLAN = (HALF, ANY, "rename", ANY, "unlink", "open", ANY, "fsync", "write", ANY, "truncate", "mkdir")
PAUSE = 0.002  # seconds between two polls
SOON = 5.0  # seconds within which an event must come, or the kill comes without it
TAIL = 1500  # characters of the program's output that are shown
TRIES = 3  # causes to put back
_NUMBERS = [("total", "i8"), ("from", "i8"), *((name, "i4") for name in ("kind", "dead", "group", "noted", "size"))]
_PAGE = numpy.dtype([*_NUMBERS, ("folder", "S4096"), ("outside", "S8192"), ("log", "u1", 1 << 20)])  # as in shim.c

Say = Callable[[str], Any]


def prove_command(command: Sequence[str], *, kills: int, seed: int, timeout: float, say: Say) -> Proof:
    """Proves a command, of which `{run}` becomes a fresh folder; what it wrote is deleted unless the proof fails.

    kills: how often it is killed.  seed: where.  timeout: seconds for one process.  Raises `UsageError` for a command
    without `{run}`, and `RunFailed` where it fails unbroken or leaves no checkpoint.
    """
    if not any(RUN in word for word in command):
        what, why = "the command has no {run}", "It is replaced by the folder that the command writes to."
        raise UsageError(what, why, "For example: ckptool prove -- python train.py {run}")
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0]}", "", "Give the command as you would type it.")
    folder = os.path.realpath(tempfile.mkdtemp(prefix="ckptool-prove-"))
    is_kept = False
    try:
        runs = CommandRuns(command, folder, random.Random(seed), timeout, say)
        runs.prove(kills)
        is_kept = bool(runs.proof.unstable) or runs.proof.exit() == 1
        runs.proof.kept = folder if is_kept else ""
        return runs.proof
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


class CommandRuns:
    """Runs of a command in a folder, and what they prove. rng: of the moments of kills.  limit: seconds for a process.

    saves: the places in the reference at which it had just written a checkpoint.  chance: what differs in two unbroken
    runs.  suspect: the first restart that began another way, a copy of the folder before it, and the file of values
    that an earlier process stored at its place.
    """

    def __init__(self, command: Sequence[str], folder: str, rng: random.Random, limit: float, say: Say) -> None:
        self.command, self.folder, self.rng, self.limit, self.say = command, folder, rng, limit, say
        self.run, self.tools = os.path.join(folder, "run"), os.path.join(folder, "tools")
        os.mkdir(self.tools)
        shutil.copy(HERE / "tracer.py", os.path.join(self.tools, "sitecustomize.py"))
        for name in ("moving.py", "rng.py"):
            shutil.copy(HERE.parent / name, self.tools)
        self.watch = Watch(self.run, self.tools)
        self.proof = Proof(tuple(command), self.watch.name)
        self.reference = Reference([], [])
        self.saves: list[int] = []
        self.chance: set[str] = set()
        self.suspect: tuple[Life, str, str] | None = None

    @property
    def length(self) -> int:
        """The number of optimizer steps of the reference; 0 if none is seen."""
        return len(self.reference.steps)

    def prove(self, kills: int) -> None:
        """The unbroken runs, with remarks on what is not compared; then the killed ones."""
        proof, remarks, first = self.proof, self.proof.remarks, self.unbroken("reference")
        alone = self.reference = Reference(first.steps, first.steps)
        proof.seconds, proof.events = first.seconds, dict(self.watch.counts())
        if not proof.events:  # the program is linked statically
            self.watch.library = ""
        proof.watched, proof.steps, proof.compared = self.watch.name, self.length, tuple(self.checkpoints("reference"))
        if not proof.compared:
            words = TextLines("There is nothing to compare.", *self.tail().split("\n"))
            raise RunFailed("the command left no checkpoint in {run}", words)
        self.saves = [place for place, step in enumerate(self.reference.steps) if place and step.saved]
        if others := scan(os.path.join(self.folder, "reference")).other_files:
            remarks.append(f"{counted(others, 'other file')} in the folder: not compared")
        if not self.length:
            by = "events" if self.watch.name == PRELOAD else "time"
            remarks.append(f"no torch optimizer step was seen: kills come by {by}, and no cause can be named")
        for path in sorted(set(self.watch.outside())):
            with suppress(CkptoolError):
                if not path.startswith(self.folder) and os.path.isfile(path) and scan(path).files[0].is_good:
                    remarks.append(f"it also writes {printable(path)}: shared by all runs, and not compared")

        second = self.unbroken("again")
        self.reference, differing = Reference(first.steps, second.steps), self.differences("reference", "again")
        if any(differing.values()):
            proof.unstable.append(f"at the end: {next(iter(differing))}")
            is_same = second.steps and alone.place_of(second.steps[0]) == 0
            if is_same and (divergence := alone.divergence(second)):  # `alone` takes no difference for chance
                proof.unstable += [f"from step {divergence.step} on", *sentences(divergence.causes[:1])]
            elif second.steps and not is_same:
                proof.unstable.append("the weights differ before the first step: the model is built without a seed")
            return
        self.chance = {*differing}  # values beside the tensors, which are not compared from here on
        remarks += [f"{place} differs in two unbroken runs: not compared" for place in [*differing][:3]]

        starts_left = kills + 1  # the last start of a run is not killed
        while starts_left > 1 and not (proof.findings or proof.differs):
            before = proof.starts
            self.broken(min(kills - len(proof.kills), starts_left - 1))
            starts_left -= proof.starts - before

    # Unbroken runs --------------------------------------------------------------------------------------------------

    def unbroken(self, name: str) -> Life:
        """An unbroken run; its folder is renamed afterwards."""
        took = f" (the first took {self.proof.seconds:.1f} s)" if self.proof.seconds else ""
        self.say(f"unbroken run: {name}{took}")
        os.mkdir(self.run)
        life = self.live()
        if life.late:
            what = f"the command took more than {self.limit:.0f} s before anything was killed"
            raise RunFailed(what, self.tail(), f"Give it more time: {arg(timeout=3600)}")
        if life.code != 0:
            raise RunFailed(f"the command ended with exit code {life.code} before anything was killed", self.tail())
        os.rename(self.run, os.path.join(self.folder, name))
        return life

    # Killed runs ----------------------------------------------------------------------------------------------------

    def broken(self, kills: int) -> None:
        """A run that is killed and started again until it ends by itself, and then compared."""
        os.mkdir(self.run)
        lives: list[Life] = []
        for target, place in [*self.plan(kills), (None, "")]:
            if target is not None and self.divergence(lives, ended=False):
                continue  # without more kills, to see how it ends
            intact = [name for name, row in self.checkpoints().items() if row.state in (GOOD, MEMBER, PART)]
            if target is not None and self.length and lives:
                target = max(target, lives[-1].reached + 1)
            step = f", after step {target:,.0f} of {self.length:,}" if target is not None and self.length else ""
            self.say(f"a run that is killed: {place}{step}" if target is not None else "started again, to its end")
            copy = os.path.join(self.folder, f"before-{self.proof.starts + 1}")
            if lives:
                shutil.copytree(self.run, copy, symlinks=True)
            life = self.live(target, place)
            start = life.start
            if self.suspect or start is None or not self.reference.differing(start, life.steps[0]):
                shutil.rmtree(copy, ignore_errors=True)
            else:
                paths = (os.path.join(earlier.traces, f"values-{start - (earlier.start or 0)}") for earlier in lives)
                self.suspect = life, copy, next(filter(os.path.exists, paths), "")
            lives.append(life)
            self.judge_start(lives, intact)
            if life.code is not None or life.late:
                break
            kill = Kill(life.reached if self.length else None, life.place, None)
            self.proof.kills.append(kill)
            # Torn files under the names that checkpoints have at the end.
            findings, names = self.proof.findings, {_pattern(name) for name in self.proof.compared}
            for name, row in self.checkpoints().items():
                torn = row.state not in (GOOD, MEMBER, PART) and _pattern(name) in names
                if torn and not any(name in finding for finding in findings):
                    problem = row.problem.replace(f"{self.run}{os.sep}", "")
                    why = f"the program was {_killed(kill)}, and writes it in place ({problem})"
                    findings.append(f"{name} is torn: {why}")
        self.judge_end(lives)

    def plan(self, kills: int) -> list[tuple[float | None, str]]:
        """The kills, in order: after how many steps (if none are seen, events, else seconds), and at which event."""
        places = [place for place in PLAN if place == ANY or place in self.proof.events]
        if self.length:
            first = min([*self.saves, self.length - 1, self.length])
            moments: list[float] = sorted(self.rng.randrange(first, max(first + 1, self.length)) for _ in range(kills))
            moments[0] = min(moments[0], (first + self.length) // 2)  # early enough for its effects to show
        else:
            parts = sorted(self.rng.uniform(0.2, 0.9) for _ in range(kills))
            total = sum(self.proof.events.values()) or self.proof.seconds
            moments = [(end - before) * total for before, end in zip([0.0, *parts], parts, strict=False)]
        return [(when, places[(len(self.proof.kills) + number) % len(places)]) for number, when in enumerate(moments)]

    def judge_start(self, lives: list[Life], intact: list[str]) -> None:
        """Notes from where a start after a kill resumed, and how the process ended, unless it was killed."""
        findings, kills, life, after = self.proof.findings, self.proof.kills, lives[-1], ""
        if len(lives) > 1:
            kills[-1] = replace(kills[-1], resumed=life.start)
            after = f"{_killed(kills[-1])}, "
            before = max((earlier.start or 0 for earlier in lives[:-1]), default=0)
            is_placed = all(earlier.start is not None for earlier in lives if earlier.steps)  # not from other weights
            if life.start == 0 and intact and self.saves and is_placed:
                findings.append(f"{after}it began again at step 0, although {printable(intact[-1])} was whole")
            elif life.start is not None and life.start < before:
                findings.append(f"{after}it went back to step {life.start}, from before step {before}")
        if life.late:
            findings.append(f"{after}it did not end within {self.limit:.0f} s")
        elif life.code:
            last = self.tail().splitlines()[-1:] or ["it printed nothing"]
            findings.append(f"{after}it ended with exit code {life.code}: {last[0][:300]}")

    def judge_end(self, lives: list[Life]) -> None:
        """Compares the end with that of the unbroken run, and finds the cause of a difference."""
        proof, ended, words, causes = self.proof, lives[-1].code == 0, [], list[Cause]()
        differing = self.differences("reference", "run") if ended else {}
        is_short = any(life.reached < self.length for life in lives[-2:-1])  # else the last kill came at the end
        if ended and differing and is_short and not lives[-1].steps:
            proof.findings.append("started again after a kill, it ended with exit code 0 without further training")
        if ended and not differing and (causes := self.reference.unsaved_averages(lives[-1])):
            proof.findings += [f"{text}, and no checkpoint has them" for text in sentences(causes)]
        elif (differing or not ended) and (divergence := self.divergence(lives, ended)) is not None:
            words, causes = [f"the first step that differs is {divergence.step}"], divergence.causes
        if differing:
            words.append(f"the first tensor at the end is {min(differing, key=lambda place: not differing[place])}")
        proof.differs, proof.causes = "; ".join(words), sentences(causes)
        os.rename(self.run, os.path.join(self.folder, f"killed-{len(proof.kills)}"))
        if ended and self.suspect and self.suspect[-1]:
            life, folder, values = self.suspect
            self.confirm([cause for cause in causes if cause.keys], folder, values, is_wrong=life is lives[-1])

    def divergence(self, lives: list[Life], ended: bool) -> Divergence | None:
        """The first start that diverged from the reference, and why."""
        lives = [life for life in lives if life.steps]
        for number, life in enumerate(lives):
            if life.start is None:
                step = next((earlier.start or 0 for earlier in reversed(lives[:number])), 0) + 1
                return Divergence(step, [Cause([NOT_RESTORED], [])])
            if divergence := self.reference.divergence(life, ended=life.reached > self.length):
                return divergence
        return self.reference.divergence(lives[-1], ended=True) if lives and ended else None

    def confirm(self, causes: list[Cause], folder: str, values: str, *, is_wrong: bool) -> None:
        """Repeats the restart with the first cause put back, then with the next, alone and with those before it, until
        the end is right. With nothing put back it has to be wrong; is_wrong: it was, as that start was not killed."""

        def ends_right(candidates: list[Cause]) -> bool:
            self.say(f"put back: {sentences(candidates[-1:])[0] if candidates else 'nothing'}")
            shutil.copytree(folder, self.run, symlinks=True)
            life = self.live(put=[":".join(key) for cause in candidates for key in cause.keys], values=values)
            wrong = life.code or self.differences("reference", "run") or self.reference.unsaved_averages(life)
            shutil.rmtree(self.run)
            return not wrong

        counts = range(1, min(len(causes), TRIES) + 1)
        tries = [causes[first:count] for count in counts for first in dict.fromkeys((count - 1, 0))]
        if (enough := next(filter(ends_right, tries), None)) and (is_wrong or not ends_right([])):
            self.proof.causes = self.proof.confirmed = sentences(enough)

    # A process ------------------------------------------------------------------------------------------------------

    def live(self, target: float | None = None, place: str = "", **changes: Any) -> Life:
        """Starts the command, and kills it after a step, or at the next event of a kind there. changes: to the plan."""
        self.proof.starts += 1
        life = Life(os.path.join(self.folder, f"trace-{self.proof.starts}"))
        os.mkdir(life.traces)
        plan = {"run": self.run, "hold": None if target is None else 1, "keep": [], "put": [], "values": "", **changes}
        _write_plan(life, plan)
        env = {**os.environ, "CKPTOOL_PROVE_TRACE": life.traces}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (self.tools, env.get("PYTHONPATH"))))
        self.watch.begin(env)
        if target is not None and not self.length:
            self.watch.arm(place, int(target))
        steps = self.reference.steps
        pace = (steps[-1].time - steps[0].time) / len(steps) if steps else 0.0  # seconds between two steps
        delay = self.rng.uniform(0, pace) if place == ANY else SOON
        start, armed, killed = time.monotonic(), 0.0, False
        words = [word.replace(RUN, self.run) for word in self.command]
        with open(os.path.join(self.folder, "output"), "wb") as log:
            process = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            while process.poll() is None:
                now = time.monotonic()
                life.read(self.reference)
                if self.length:
                    is_there = target is not None and bool(life.steps) and life.reached >= target
                else:
                    progress = self.watch.total() if self.watch.name == PRELOAD else now - start
                    is_there = target is not None and progress >= target
                if is_there and not armed:
                    armed = now
                    if place != ANY and self.length:
                        self.watch.arm(place)
                    if place != ANY or pace > 5 * PAUSE:  # else it could end before the kill
                        _write_plan(life, {**plan, "hold": None})
                elif target is not None and not armed and len(life.steps) == plan["hold"] == 1:
                    # It waits in its first step, by which its place in the reference is known.
                    last = int(target) - (life.start or 0)
                    saves = [save - (life.start or 0) for save in self.saves]
                    plan |= {"hold": max(2, last), "keep": [*(save for save in saves if save <= last)][-2:]}
                    _write_plan(life, plan)
                life.place = place if self.watch.due() else ANY
                life.late = now - start > self.limit
                if killed := life.place != ANY or life.late or (armed > 0 and now - armed >= delay):
                    break
                time.sleep(PAUSE)
            else:
                life.place, killed = place, self.watch.due() and process.returncode == -signal.SIGKILL
        finally:
            _end(process, life.traces)
            life.read(self.reference)
        life.seconds, life.code = time.monotonic() - start, None if killed else process.returncode
        return life

    def tail(self) -> TextLines:
        """The end of what the program wrote."""
        text = Path(self.folder, "output").read_text(encoding="utf-8", errors="replace")
        return TextLines(*text[-TAIL:].strip().splitlines())

    # The checkpoints ------------------------------------------------------------------------------------------------

    def checkpoints(self, name: str = "run") -> dict[str, ScannedFile]:
        """The checkpoints of a run, by their paths in it."""
        folder = os.path.join(self.folder, name)
        return {os.path.relpath(row.path, folder): row for row in scan(folder).files}

    def differences(self, one: str, other: str) -> dict[str, bool]:
        """What in the checkpoints of one run is missing or different in another, not by chance; True for a tensor."""
        others, differing = self.checkpoints(other), dict[str, bool]()
        for name in self.checkpoints(one):
            if name not in others:
                differing[f"{name}, which is missing"] = True
                continue
            try:
                pair = (os.path.join(self.folder, run, name) for run in (one, other))
                report = diff_files(*pair, ignore=("order",), statistics=False)
            except CkptoolError as error:
                differing[f"{name}, which cannot be compared: {error.what}"] = True
                continue
            pairs = [(change.path, change.left) for change in report.changed] + [*report.only_left, *report.only_right]
            differing |= {f"{address(path)} in {name}": isinstance(node, TensorEntry) for path, node in pairs}
        return {place: is_tensor for place, is_tensor in differing.items() if place not in self.chance}


def _pattern(name: str) -> str:
    """The name without its numbers: the step, the rank."""
    return re.sub(r"\d+", "#", name)


def _killed(kill: Kill) -> str:
    step = [] if kill.step is None else [f" after step {kill.step}"]
    moment = "half way through a write" if kill.place == HALF else f"before a call of {kill.place}"
    return "killed" + ",".join([*step, *([] if kill.place == ANY else [f" {moment}"])])


def _write_plan(life: Life, plan: dict[str, Any]) -> None:
    """Replaces the plan that `tracer` reads, atomically."""
    path = os.path.join(life.traces, "plan.json")
    Path(f"{path}.tmp").write_text(json.dumps(plan), encoding="utf-8")
    os.replace(f"{path}.tmp", path)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ends the process, its group, and what it started in sessions of its own, as torchrun does."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() + b"\0" in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)


# Events ---------------------------------------------------------------------------------------------------------------


class Watch:
    """A program's events in its folder, counted by `shim.c`, which kills it before an event or half through a write.

    library: the compiled shim; "" if there is none, and no event is seen.
    """

    def __init__(self, run: str, tools: str) -> None:
        self.run, self.path, self.library = run, os.path.join(tools, "events"), compiled(tools)
        Path(self.path).write_bytes(bytes(_PAGE.itemsize))  # on a disk that is full, mapping what is not there kills
        self.page: Any = numpy.memmap(self.path, _PAGE, "r+", shape=())
        self.min_size = 0  # log2 of the bytes of a write that counts: one of a checkpoint, not of a log

    @property
    def name(self) -> str:
        return PRELOAD if self.library else TIME

    def begin(self, env: dict[str, str]) -> None:
        """Prepares `env` for a process that is started next."""
        if self.library:
            self.page[...] = numpy.zeros((), _PAGE)
            self.page["from"], self.page["size"] = -1, self.min_size
            self.page["folder"] = os.fsencode(os.path.realpath(self.run))
            env["LD_PRELOAD"] = ":".join(filter(None, (self.library, env.get("LD_PRELOAD"))))
            env["CKPTOOL_PROVE_EVENTS"] = self.path

    def arm(self, kind: str, after: int = 0) -> None:
        """Asks for a kill at the next event of a kind (of any, if it is not in `KINDS`), after so many events."""
        self.page["kind"] = KINDS.index(kind) if kind in KINDS else -1
        self.page["from"] = after

    def due(self) -> bool:
        """True once the kill that was asked for has come."""
        return bool(self.page["dead"])

    def total(self) -> int:
        """The number of events of the process so far."""
        return int(self.page["total"])

    def counts(self) -> Counter[str]:
        """Kind -> the number of the process's events of it."""
        entries = self.page["log"][: self.total()].tolist()
        self.min_size = max((entry >> 3 for entry in entries), default=2) - 2
        return Counter(KINDS[entry & 7] for entry in entries)

    def outside(self) -> list[str]:
        """Files that were opened for writing elsewhere."""
        return [os.fsdecode(path) for path in self.page["outside"].item().split(b"\n")[:-1]]


def compiled(tools: str) -> str:
    """The path of the shim, compiled into a folder; "" if there is no compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or sys.platform != "linux":
        return ""
    library, source = os.path.join(tools, "shim.so"), str(HERE / "shim.c")
    words = [compiler, "-shared", "-fPIC", "-O1", "-w", "-U_FORTIFY_SOURCE", "-o", library, source, "-ldl"]
    return "" if subprocess.run(words, capture_output=True, check=False).returncode else library
