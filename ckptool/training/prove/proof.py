"""`prove`: a run killed anywhere, any number of times, ends with the same bytes as one that was never killed.

A reference run is trained to its end. Another of the same configuration is killed at chosen steps, inside saves and
inside prunes, and resumed, again and again. Its last file must be byte for byte the same, and the steps that it resumes
from must never fall. Resetting a part of the state must make the end differ, or that part is not needed, or not used.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ckptool.commands import arg, command
from ckptool.errors import FileProblem, RunFailed, TextLines, UsageError, counted, printable
from ckptool.training import CHECKPOINTS, CONFIG, HISTORY, METRICS, configfile
from ckptool.training.config import Config
from ckptool.training.prove.fork_server import ForkServer
from ckptool.training.reports import Kill, Proof
from ckptool.training.store import Lines, Store, digest_of_files, name_of

ABLATIONS = ("optimizer", "scheduler", "scaler", "ema")  # parts of the state, by the beginning of their keys
SAVES = 20  # in a run, so that there is something to resume from wherever it is killed
EVENTS_OF = {"save": 24, "prune": 2}  # how far into a save, or a prune, a kill may come
SWEPT_STEPS, SWEPT_EVERY = 4, 2  # the run that is killed at every file-system event, and how often it saves
MAX_EVENTS = 5_000
PAUSE = 0.0005  # seconds between two looks at how far a run is

Say = Callable[[str], Any]


def prove(
    config: Config,
    *,
    steps: int = 300,
    kills: int = 5,
    seed: int = 0,
    exhaustive: bool = False,
    processes: int | None = None,
    say: Say = lambda text: None,
) -> Proof:
    """Proves a configuration in a folder of its own, which is deleted unless the proof fails.

    steps: the length of the run.  kills: how many times it is killed.  seed: where.  exhaustive: kill a short run at
    every file-system event, too.  processes: how many train together (default: 2, or one for each GPU).
    say: called with what is being done.  Raises `RunFailed` where a training process fails by itself.
    """
    proof = Proof(steps, processes_of(config, processes))
    folder = tempfile.mkdtemp(prefix="ckptool-prove-")
    try:
        with ForkServer(os.path.join(folder, "stderr"), proof.processes) as server:
            run = ProofRun(configured(config, steps), steps, folder, random.Random(seed), server, say)
            run.fill(proof, kills, exhaustive)
    finally:
        if proof.result and not proof.proved:
            proof.kept = folder
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return proof


def processes_of(config: Config, wanted: int | None) -> int:
    """The number of processes that train together. Raises `UsageError` where only one can, or under torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "prove was started in several processes by torchrun",
            "prove starts its training processes itself.",
            f"Without torchrun: {command('prove', 'run.yaml', processes=int(os.environ['WORLD_SIZE']))}",
        )
    if config.strategy not in ("ddp", "fsdp"):
        if wanted not in (None, 1):
            raise UsageError(
                f"{wanted} processes cannot train together, since strategy is {config.strategy}",
                "",
                f"Set it: {arg(set='strategy=ddp')}",
            )
        return 1
    if wanted is not None:
        return wanted
    import torch

    from ckptool.training.parallel import device_of

    return max(1, torch.cuda.device_count()) if device_of(config.device).type == "cuda" else 2


def configured(config: Config, steps: int, every: int = 0) -> Config:
    """The configuration as it is proved: so many steps, with saves in between, and a line for every step."""
    values = config.dumped()
    values["train"] |= {"steps": steps, "epochs": None}
    values["save"] |= {"every": every or max(1, steps // SAVES), "seconds": None, "keep_last": 2, "keep_every": 0}
    values["log"] |= {"every": 1}
    values["stop"] |= {"after": None, "patience": None, "signals": ["TERM"]}
    return configfile.checked(values, "the configuration")


@dataclass(slots=True)
class ProofRun:
    """Runs of one configuration under names, in a folder. rng: chooses where kills come.  server: starts processes."""

    config: Config
    steps: int
    folder: str
    rng: random.Random
    server: ForkServer
    say: Say

    def fill(self, proof: Proof, kills: int, exhaustive: bool) -> None:
        self.say(f"reference: {counted(self.steps, 'step')}")
        self.train("reference")
        proof.reference = self.end("reference")
        found = [made for at, how in self.plan(kills) if (made := self.killed(at, how)) is not None]
        self.train("killed")
        resumed, lost = resumes(self.run_of("killed"))
        proof.kills = [Kill(at, how, step) for (at, how), step in zip(found, resumed, strict=True)]
        proof.result, proof.lost = self.end("killed"), lost
        if proof.result != proof.reference:
            proof.differs = self.first_difference()
            return
        if exhaustive:
            proof.events, lost = self.every_event()
            proof.lost |= lost
        proof.without = self.ablated(proof.reference)

    # Runs --------------------------------------------------------------------------------------------------------

    def run_of(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def words(self, name: str, *changes: str) -> list[str]:
        path = os.path.join(self.folder, CONFIG)
        if not os.path.exists(path):
            with open(path, "w", encoding="utf-8") as file:
                file.write(configfile.written(self.config))
        sets = [word for change in (f"run={self.run_of(name)}", *changes) for word in ("--set", change)]
        return ["train", path, "--resume", "auto", "--quiet", *sets]

    def train(self, name: str, *changes: str) -> None:
        """Trains a run to its end, from wherever it is."""
        if code := self.server.run(self.words(name, *changes)):
            raise self.failed(code)

    def failed(self, code: int) -> RunFailed:
        tail = TextLines(*self.server.stderr_tail().splitlines())
        return RunFailed(f"a training process ended with exit code {code}", tail)

    def end(self, name: str) -> str:
        """The sha256 of a run's last checkpoint."""
        return digest_of_files(self.last(name))

    def last(self, name: str) -> str:
        folder = os.path.join(self.run_of(name), CHECKPOINTS)
        path = os.path.join(folder, name_of(self.steps, ".dcp" if self.config.strategy == "fsdp" else ".pt"))
        if not os.path.exists(path):
            raise FileProblem(f"the run {name} has no {name_of(self.steps)}", "It did not finish.")
        return path

    # Kills -------------------------------------------------------------------------------------------------------

    def plan(self, kills: int) -> list[tuple[int, str]]:
        """The steps of the kills, in order, and how each comes; some come inside a save or a prune."""
        steps = sorted(self.rng.randrange(1, self.steps) for _ in range(kills))
        ways = ["KILL", "KILL in save", "TERM", "KILL", "KILL in prune"]
        return list(zip(steps, [ways[number % len(ways)] for number in range(kills)], strict=True))

    def killed(self, at: int, how: str, *changes: str) -> tuple[int, str] | None:
        """Goes on with the run and kills it at a step; where that was, and how. None where it ended before that."""
        part = how.partition(" in ")[2]
        at = max(at, self.logged("killed") + 1)
        self.say(f"{how} at {at}")
        if part:
            event = self.rng.randrange(EVENTS_OF[part])
            crash = {"folder": self.run_of("killed"), "part": part, "step": at, "at": event}
            self.server.start(self.words("killed", *changes), crash=crash)
        else:
            group = self.server.start(self.words("killed", *changes))
            while self.logged("killed") < at and not self.server.ended():
                time.sleep(PAUSE)
            if not self.server.ended():
                os.killpg(group, signal.Signals[f"SIG{how}"])
        code = self.server.wait()
        if code not in (0, -signal.SIGKILL, 128 + signal.SIGTERM):
            raise self.failed(code)
        return (self.logged("killed"), how) if code else None

    def logged(self, name: str) -> int:
        """The last step that a run has written a line for."""
        try:
            with open(os.path.join(self.run_of(name), METRICS), "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
                lines = file.read().split(b"\n")[-2:]
            return int(json.loads(lines[0])["step"]) if len(lines) == 2 else 0
        except (OSError, ValueError, KeyError):
            return 0

    # Ablations ---------------------------------------------------------------------------------------------------

    def ablated(self, reference: str) -> dict[str, bool | None]:
        """Resets each part of the state half way: True where the end then differs, None where there is no such part."""
        self.train("half", f"train.steps={max(1, self.steps // 2)}")
        found: dict[str, bool | None] = {}
        for part in ABLATIONS:
            self.say(f"without {part}")
            name = f"without-{part}"
            shutil.copytree(self.run_of("half"), self.run_of(name))
            code = self.server.run([], reset=[self.run_of(name), part], processes=1)
            if code not in (0, 1):
                raise self.failed(code)
            if not code:
                self.train(name)
            found[part] = None if code else self.end(name) != reference
        return found

    # When it is disproved ----------------------------------------------------------------------------------------

    def first_difference(self) -> str:
        """The first step whose line differs, and the first tensor of the last files that does."""
        from ckptool.training.saving import loaded
        from ckptool.training.start import first_different_tensor

        one, other = (
            {fact["step"]: fact for fact in Lines(os.path.join(self.run_of(name), METRICS)).read()}
            for name in ("reference", "killed")
        )
        step = next((step for step in sorted(one) if one[step] != other.get(step)), None)
        ends = (loaded(self.last(name)) for name in ("reference", "killed"))
        tensor = first_different_tensor(*ends)
        where = f"the first step that differs is {step}" if step is not None else "no logged step differs"
        return f"{where}; the first tensor, at the end, is {printable(tensor)}" if tensor else where

    # Every file-system event -------------------------------------------------------------------------------------

    def every_event(self, first: int = 0, stride: int = 1) -> tuple[int, bool]:
        """Kills a short run at every file-system event, and resumes it. How many there were; if any lost a checkpoint.

        Raises `RunFailed` where one of them ends with other bytes. first, stride: only some of the events.
        """
        config = configured(self.config, SWEPT_STEPS, SWEPT_EVERY)
        short = ProofRun(config, SWEPT_STEPS, os.path.join(self.folder, "events"), self.rng, self.server, self.say)
        os.makedirs(short.folder)
        short.train("reference")
        reference, before, lost, count = short.end("reference"), 0, False, 0
        for number in range(first, MAX_EVENTS, stride):
            name = f"event-{number}"
            self.say(f"killed at event {number}")
            code = self.server.run(short.words(name), crash={"folder": short.run_of(name), "at": number})
            if code == 0:
                break
            if code != -signal.SIGKILL:
                raise self.failed(code)
            short.train(name)
            steps, fell = resumes(short.run_of(name))
            resumed = (steps or [0])[-1] or 0
            if short.end(name) != reference:
                raise RunFailed(f"killed at event {number}, the run ended with other bytes")
            # With save.async the order of events is by chance: there only the run's own history tells.
            lost |= fell or (resumed < before and not config.save.async_)
            before, count = resumed, count + 1
            shutil.rmtree(short.run_of(name))
        return count, lost


def resumes(run: str) -> tuple[list[int | None], bool]:
    """The steps that a run was resumed from, in order (None: it began again), and whether it lost a checkpoint.

    It must never go on from before a checkpoint that it had finished, nor from before where it went on the last time.
    """
    steps: list[int | None] = []
    saved, lost, begun = 0, False, False
    for fact in Lines(os.path.join(run, HISTORY)).read():
        if fact.get("event") == "save":
            saved = fact["step"]
        elif fact.get("event") in ("start", "resume"):
            if begun:
                steps.append(fact["step"] or None)
                lost |= fact["step"] < saved
            begun = True
    return steps, lost or any((later or 0) < (earlier or 0) for earlier, later in pairwise(steps))


def reset_part(folder: str, part: str) -> bool:
    """Resets a part of the state in the newest checkpoint of a run, as if it had not been saved.

    part: `optimizer`, `scheduler`, `scaler` or `ema`; an average starts again from the weights. False if the run has no
    such part, or it is empty.
    """
    from ckptool.training.parallel import world_of
    from ckptool.training.runs import read_config
    from ckptool.training.saving import loaded
    from ckptool.training.start import first_difference
    from ckptool.training.trainer import build, gathered

    number, config = read_config(folder)
    store = Store(folder, number)
    newest = store.all()[-1]
    tree: dict[str, Any] = loaded(newest.path)
    keys = [key for key in tree if key.startswith(f"{part}_")]
    if not keys:
        return False
    alone = configfile.changed(config.dumped(), ["strategy=single"])  # whose tensors are whole
    with world_of(alone) as world:
        new = gathered(build(alone, world))
    fresh = {key: tree[key.replace(part, "model", 1)] if part == "ema" else new[key] for key in keys}
    if not first_difference({key: tree[key] for key in keys}, fresh):
        return False  # plain SGD remembers nothing
    facts = {
        k: value for k, value in (newest.sidecar or {}).items() if k not in ("run", "step", "bytes", "sha256", "files")
    }
    store.commit(newest.step, tree | fresh, facts)
    return True
