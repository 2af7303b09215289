"""Runs of the harness that are killed and go on, compared with one that was not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ckptool.errors import RunFailed, TextLines
from ckptool.training import CHECKPOINTS, CONFIG, HISTORY, METRICS, configfile, run_folder
from ckptool.training.config import Config
from ckptool.training.store import Lines, described, files_of, name_of
from tests.support.fork_server import ForkServer
from tests.support.small_runs import config

STEPS = 40
SAVES = 20  # in a run, so that there is something to resume from wherever it is killed
EVENTS_OF = {"save": 24, "prune": 2}  # how far into a save, or a prune, a kill may come
SWEPT_STEPS, SWEPT_EVERY = 4, 2  # the run that is killed at every file-system event, and how often it saves
PAUSE = 0.0005  # seconds between two looks at how far a run is

Kill = tuple[int, str, Sequence[str]]
"""A step, the signal with its place (`KILL in save`), and changes of the configuration from there on."""


def configured(made: Config, steps: int, every: int = 0) -> Config:
    """The configuration as it is killed: so many steps, with saves in between, and a line for every step."""
    values = made.dumped()
    values["train"] |= {"steps": steps, "epochs": None}
    values["save"] |= {"every": every or max(1, steps // SAVES), "seconds": None, "keep_last": 2, "keep_every": 0}
    values["log"] |= {"every": 1}
    values["stop"] |= {"after": None, "patience": None, "signals": ["TERM"]}
    return configfile.checked(values, "the configuration")


def lab(path: Path, server: ForkServer, seed: int = 0, every: int = 0, **sections: Any) -> KilledRun:
    return KilledRun(configured(config(**sections), STEPS, every), STEPS, str(path), random.Random(seed), server)


def ends_the_same(made: KilledRun, kills: Sequence[Kill]) -> None:
    """Kills a run at steps and resumes it, with changes of its configuration for each process; compares the ends."""
    made.train("reference")
    done = [made.killed(at, how, *changes) for at, how, changes in kills]
    made.train("killed")
    assert None not in done, "it ended before it was killed"
    steps, lost = resumed_steps(made.run_of("killed"))
    assert len(steps) == len(kills)
    assert not lost
    assert Path(made.last("killed")).read_bytes() == Path(made.last("reference")).read_bytes()
    history = [fact["event"] for fact in Lines(os.path.join(made.run_of("killed"), HISTORY)).read()]
    assert "skip-damaged" not in history


def resumed_steps(run: str) -> tuple[list[int | None], bool]:
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


@dataclass(slots=True)
class KilledRun:
    """Runs of one configuration under names, in a folder. rng: chooses where kills come.  server: starts processes."""

    config: Config
    steps: int
    folder: str
    rng: random.Random
    server: ForkServer

    def run_of(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def words(self, name: str, *changes: str) -> list[str]:
        path = os.path.join(self.folder, CONFIG)
        if not os.path.exists(path):
            Path(path).write_text(run_folder.dumped(self.config.dumped()), encoding="utf-8")
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
        """The files of a run's last checkpoint, with their sha256."""
        return str(described(files_of(self.last(name))))

    def last(self, name: str) -> str:
        suffix = ".dcp" if self.config.strategy == "fsdp" else ".pt"
        return os.path.join(self.run_of(name), CHECKPOINTS, name_of(self.steps, suffix))

    def killed(self, at: int, how: str, *changes: str) -> tuple[int, str] | None:
        """Goes on with the run and kills it at a step; where that was, and how. None where it ended before that."""
        part = how.partition(" in ")[2]
        at = max(at, self.logged("killed") + 1)
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

    def every_event(self, first: int = 0, stride: int = 1) -> tuple[int, bool]:
        """Kills a short run at every file-system event, and resumes it. How many there were; if any lost a checkpoint.

        Raises `RunFailed` where one of them ends with other bytes. first, stride: only some of the events.
        """
        made = configured(self.config, SWEPT_STEPS, SWEPT_EVERY)
        short = KilledRun(made, SWEPT_STEPS, os.path.join(self.folder, "events"), self.rng, self.server)
        os.makedirs(short.folder)
        short.train("reference")
        reference, before, lost, count = short.end("reference"), 0, False, 0
        for number in range(first, 5_000, stride):
            name = f"event-{number}"
            code = self.server.run(short.words(name), crash={"folder": short.run_of(name), "at": number})
            if code == 0:
                break
            if code != -signal.SIGKILL:
                raise self.failed(code)
            short.train(name)
            steps, fell = resumed_steps(short.run_of(name))
            resumed = (steps or [0])[-1] or 0
            if short.end(name) != reference:
                raise RunFailed(f"killed at event {number}, the run ended with other bytes")
            # With save.async the order of events is by chance: there only the run's own history tells.
            lost |= fell or (resumed < before and not made.save.async_)
            before, count = resumed, count + 1
            shutil.rmtree(short.run_of(name))
        return count, lost
