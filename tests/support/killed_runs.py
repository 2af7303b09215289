"""Runs that are killed and go on, compared with one that was not."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from ckptool.training.prove.fork_server import ForkServer
from ckptool.training.prove.proof import ProofRun, configured, resumes
from ckptool.training.store import Lines
from tests.support.small_runs import config

STEPS = 40


def lab(path: Path, server: ForkServer, seed: int = 0, every: int = 0, **sections: Any) -> ProofRun:
    return ProofRun(configured(config(**sections), STEPS, every), STEPS, str(path), random.Random(seed), server, str)


def ends_the_same(made: ProofRun, kills: list[tuple[int, str, tuple[str, ...]]]) -> None:
    """Kills a run at steps and resumes it, with changes of its configuration for each process; compares the ends."""
    made.train("reference")
    done = [made.killed(at, how, *changes) for at, how, changes in kills]
    made.train("killed")
    assert None not in done, "it ended before it was killed"
    steps, lost = resumes(made.run_of("killed"))
    assert len(steps) == len(kills)
    assert not lost
    assert Path(made.last("killed")).read_bytes() == Path(made.last("reference")).read_bytes()
    history = [fact["event"] for fact in Lines(os.path.join(made.run_of("killed"), "history.jsonl")).read()]
    assert "skip-damaged" not in history
