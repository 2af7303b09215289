"""Small runs for the tests of the harness: configurations, trainers without a folder, and their state compared bit for
bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ckptool.reports.training import Outcome
from ckptool.training import configfile
from ckptool.training.config import Config
from ckptool.training.hooks import Hooks
from ckptool.training.loop import one_step
from ckptool.training.parallel import World
from ckptool.training.start import first_difference, start
from ckptool.training.trainer import Trainer, build, gathered, restored

MLP: dict[str, Any] = {
    "run": "unused",
    "seed": 3,
    "device": "cpu",
    "data": {"name": "blobs", "args": {"samples": 60, "inputs": 4}, "batch": 8, "val_fraction": 0.2},
    "models": {"main": {"name": "mlp", "args": {"hidden": [6], "dropout": 0.2}}},
    "optim": {"main": {"name": "adamw", "lr": 0.01}},
    "train": {"steps": 20},
    "eval": {"every": 5},
    "save": {"every": 5},
}
CONV = {"name": "conv", "args": {"channels": [4, 4], "dropout": 0.1}}
IMAGES = {"name": "images", "args": {"samples": 60, "size": 6}, "batch": 8}
GAN: dict[str, Any] = {
    "task": "gan",
    "data": {"name": "ring", "args": {"samples": 60}, "batch": 8},
    "models": {"generator": {"name": "generator"}, "discriminator": {"name": "discriminator"}},
    "optim": {"generator": {"name": "adam"}, "discriminator": {"name": "adam"}},
}


def config(*changes: str, run: Path | str = "unused", **sections: Any) -> Config:
    """The small run with other sections, and `KEY=VALUE` changes of single keys."""
    return configfile.changed({**MLP, "run": str(run), **sections}, changes)


def trainer(*changes: str, world: World | None = None, **sections: Any) -> Trainer:
    """A trainer at step 0."""
    return build(config(*changes, **sections), world or World())


def take(made: Trainer, steps: int, hooks: Hooks | None = None) -> list[float]:
    """Takes steps without a run's folder; returns their losses."""
    losses = []
    batches = made.data.stream(made)
    for _ in range(steps):
        one_step(made, next(batches), hooks or Hooks([]))
        assert made.loss is not None
        losses.append(made.loss)
    batches.close()
    return losses


def same(one: Trainer, other: Trainer) -> None:
    """Asserts that two trainers have the very same state."""
    assert first_difference(gathered(one), gathered(other)) == ""


def again(made: Trainer, path: Path) -> Trainer:
    """A new trainer with the state of another, through a file."""
    torch.save(gathered(made), path)
    new = build(made.config, made.world)
    restored(new, torch.load(path, map_location="cpu", mmap=True, weights_only=True), str(path))
    return new


def resumes(path: Path, *changes: str, middle: int = 5, steps: int = 9, **sections: Any) -> Trainer:
    """Asserts that a run which is saved and loaded in the middle ends with the same state; returns the trainer at its
    end."""
    whole = trainer(*changes, **sections)
    take(whole, steps)
    first = trainer(*changes, **sections)
    take(first, middle)
    second = again(first, path / "state.pt")
    take(second, steps - middle)
    same(whole, second)
    return whole


def run_to_end(path: Path, *changes: str, **sections: Any) -> Outcome:
    """A run in a folder, to its end."""
    return start(config(*changes, run=path / "run", **sections), resume="auto")


def last(path: Path) -> bytes:
    """The bytes of a run's newest checkpoint."""
    return max((path / "run" / "checkpoints").glob("step-*.pt")).read_bytes()


@contextmanager
def module(path: Path, text: str) -> Iterator[str]:
    """A module of the user's own; its path."""
    path.write_text(text)
    yield str(path)
