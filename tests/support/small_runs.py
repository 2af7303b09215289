"""Small runs for the tests of the harness: configurations, trainers without a folder, and their state compared bit for
bit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckptool.training import configfile, run_folder
from ckptool.training.config import Config
from ckptool.training.hooks import Hooks
from ckptool.training.loop import one_step
from ckptool.training.parallel import World
from ckptool.training.reports import Outcome
from ckptool.training.store import Lines, RunFolder
from ckptool.training.trainer import Trainer, build, gathered, restore, start
from tests.support.files import contents
from tests.support.same import first_difference

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = Path(__file__).parents[1] / "training/scripts/own.py"


def own(name: str) -> str:
    """Something of a user's own, right or wrong, from `tests/training/scripts/own.py`."""
    return f"{OWN}:{name}"


def toy(name: str) -> str:
    """A model or data set of the examples, `models.py:Conv`, as any configuration can name it."""
    return str(EXAMPLES / name)


MLP: dict[str, Any] = {
    "run": "unused", "seed": 3, "device": "cpu",
    "data": {"name": "blobs", "args": {"samples": 60, "inputs": 4}, "batch": 8, "val_fraction": 0.2},
    "models": {"main": {"name": "mlp", "args": {"hidden": [6], "dropout": 0.2}}},
    "optim": {"main": {"name": "adamw", "lr": 0.01}}, "train": {"steps": 20}, "eval": {"every": 5},
    "save": {"every": 5},
}  # fmt: skip
CONV = {"name": toy("models.py:Conv"), "args": {"channels": [4, 4], "dropout": 0.1}}
IMAGES = {"name": toy("data.py:images"), "args": {"samples": 60, "size": 6}, "batch": 8}
GAN: dict[str, Any] = {
    "task": "gan",
    "data": {"name": toy("data.py:ring"), "args": {"samples": 60}, "batch": 8},
    "models":
        {"generator": {"name": toy("models.py:Generator")}, "discriminator": {"name": toy("models.py:Discriminator")}},
    "optim": {"generator": {"name": "adam"}, "discriminator": {"name": "adam"}},
}  # fmt: skip
TEXT: dict[str, Any] = {
    "task": "lm",
    "data": {"name": toy("data.py:text"), "args": {"samples": 40, "length": 4}, "batch": 8},
    "models": {"main": {"name": toy("models.py:CharGPT"), "args": {"width": 8, "dropout": 0.1}}},
}
MUON = {"name": "muon", "model": "main", "match": "type:Linear.weight", "lr": 0.02}
HALVED = {"name": "StepLR", "args": {"step_size": 2, "gamma": 0.5}}
BOTH: dict[str, Any] = {**TEXT, "optim": {"muon": {**MUON, "schedule": HALVED}, "rest": {"model": "main"}}}


def split_at(*at: str, microbatches: int = 1) -> dict[str, Any]:
    """A model cut before these modules, all its parts on the CPU."""
    split = {"devices": ["cpu"] * (len(at) + 1), "at": list(at), "microbatches": microbatches}
    return {"strategy": "split", "split": split}


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


def assert_same_trainers(one: Trainer, other: Trainer) -> None:
    """Asserts that two trainers have the very same state."""
    assert first_difference(gathered(one), gathered(other)) == ""


def again(made: Trainer, path: Path) -> Trainer:
    """A new trainer with the state of another, through a file."""
    torch.save(gathered(made), path)
    new = build(made.config, made.world)
    restore(new, torch.load(path, map_location="cpu", mmap=True, weights_only=True), str(path))
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
    assert_same_trainers(whole, second)
    return whole


def create(made: Config) -> RunFolder:
    """The folder of a new run."""
    return run_folder.create(made.run, made.dumped(), configfile.retention_of(made))


def run_to_end(path: Path, *changes: str, **sections: Any) -> Outcome:
    """A run in a folder, to its end."""
    return start(config(*changes, run=path / "run", **sections), resume="auto")


def last(path: Path) -> bytes:
    """The bytes of a run's newest checkpoint."""
    return max((path / "run" / "checkpoints").glob("step-*.pt")).read_bytes()


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def killed_after(run: Path, step: int) -> None:
    """Leaves a run as a kill after this step would have."""
    for path in (run / "checkpoints").iterdir():
        if int(path.stem[5:]) > step:
            path.unlink()


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def forget_record(path: Path) -> None:
    path.with_suffix(".json").unlink()


ARGS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 3, "gamma": 0.5}, "MultiStepLR": {"milestones": [2, 2, 6]},
    "ConstantLR": {"factor": 0.5, "total_iters": 4}, "LinearLR": {"total_iters": 6},
    "ExponentialLR": {"gamma": 0.9}, "PolynomialLR": {"total_iters": 8, "power": 2},
    "CosineAnnealingLR": {"T_max": 6}, "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 3, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 20}, "ReduceLROnPlateau": {"patience": 0, "factor": 0.5},
    "warmup_cosine": {"warmup": 3, "total": 12, "floor": 0.1},
}  # fmt: skip


def scheduled(name: str, **more: Any) -> dict[str, Any]:
    return {"main": {"name": "adamw", "lr": 0.01, "schedule": {"name": name, "args": ARGS[name], **more}}}


def events(run: Path) -> list[dict[str, Any]]:
    return list(Lines(str(run / "history.jsonl")).read())


Typed = Callable[..., tuple[int, str, str]]


def train_typed(typed: Typed, *changes: str) -> tuple[int, str, str]:
    return typed("train", "run.yaml", *[word for change in changes for word in ("--set", change)])


def contents_but_lock(folder: str) -> dict[str, bytes]:
    return {name: data for name, data in contents(Path(folder)).items() if Path(name).name != "lock"}
