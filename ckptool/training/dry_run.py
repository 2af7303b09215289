"""A rehearsal: everything built, one step taken, saved, loaded again and compared; nothing is left behind."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ckptool.errors import Corrupt
from ckptool.training import configfile
from ckptool.training.activation import kept_bytes
from ckptool.training.blame import blamed
from ckptool.training.config import Config
from ckptool.training.hooks import Hooks
from ckptool.training.loop import one_step
from ckptool.training.parallel import world_of
from ckptool.training.runs import create
from ckptool.training.start import switches_given_back
from ckptool.training.state import gathered, restored
from ckptool.training.trainer import Trainer, build


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What one step showed. Bytes; seconds.

    activations: kept for the backward pass of one step.  without: the same without activation checkpointing, None where it is off.
    """

    parameters: dict[str, int]
    train_samples: int
    val_samples: int
    steps: int
    loss: float
    step_seconds: float
    save_seconds: float
    checkpoint_bytes: int
    activations: int
    without: int | None
    device: str


def rehearse(config: Config) -> Rehearsal:
    """Runs one step, saves, reloads and compares. Raises whatever would stop a run, `Corrupt` where the reload differs."""
    with tempfile.TemporaryDirectory(prefix="ckptool-dry-run-") as folder, blamed(), switches_given_back(config):
        config = configfile.checked({**config.dumped(), "run": os.path.join(folder, "run")}, "run.yaml")
        with world_of(config) as world:
            trainer = build(config, world)
            activations, seconds = _step(trainer)
            run = create(config)
            began = time.perf_counter()
            saved = run.store.commit(trainer.step, gathered(trainer), {})
            took = time.perf_counter() - began
            _compare(config, trainer, saved.path)
            size = os.path.getsize(saved.path)
            if run.lock is not None:
                run.lock.release()
            return Rehearsal(
                {name: sum(p.numel() for p in model.parameters()) for name, model in trainer.models.items()},
                trainer.data.train_count,
                len(trainer.data.held),
                trainer.total_steps,
                trainer.loss or 0.0,
                seconds,
                took,
                size,
                activations,
                _without(config, world),
                str(world.device),
            )


def _step(trainer: Trainer) -> tuple[int, float]:
    began = time.perf_counter()
    with kept_bytes() as kept:
        one_step(trainer, next(trainer.data.stream(trainer)), Hooks([]))
    return kept.bytes, time.perf_counter() - began


def _without(config: Config, world: Any) -> int | None:
    """What a step keeps when nothing is computed again."""
    if config.train.activation_checkpoint is None:
        return None
    values = config.dumped()
    values["train"]["activation_checkpoint"] = None
    return _step(build(configfile.checked(values, "run.yaml"), world))[0]


def _compare(config: Config, trainer: Trainer, path: str) -> None:
    """A new trainer, given the saved state, has to gather the very same one."""
    again = build(config, trainer.world)
    restored(again, torch.load(path, map_location="cpu", mmap=True, weights_only=True), path)
    if differing := first_difference(gathered(trainer), gathered(again)):
        raise Corrupt(f"the reloaded state differs in {differing}", "A run would not go on as it stopped.")


def first_difference(one: Any, other: Any, place: str = "") -> str:
    """Where two trees of plain values and tensors differ first, bit for bit; the empty text where they do not."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return "" if same and _bits(one) == _bits(other) else place or "the top"
    if isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        return next((found for key in one if (found := first_difference(one[key], other[key], f"{place}/{key}"))), "")
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next((found for i, (a, b) in pairs if (found := first_difference(a, b, f"{place}/{i}"))), "")
    return "" if type(one) is type(other) and (one == other or one != one) else place or "the top"


def first_different_tensor(one: Any, other: Any) -> str:
    """The address of the first tensor, in the order of the first tree, that the second has not bit for bit; else the empty text."""
    there = dict(_tensors(other))
    return next((place for place, tensor in _tensors(one) if first_difference(tensor, there.get(place))), "")


def _tensors(tree: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield place, tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, value in items:
        yield from _tensors(value, f"{place}/{key}" if place else str(key))


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
