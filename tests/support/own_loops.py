"""A small model of a loop of one's own, whose training draws from every global generator; and a script of it."""

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from ckptool import Run


def seeded() -> None:
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)


def parts() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    return {"model": model, "optimizer": optimizer, "scheduler": schedule}


def train(batch: torch.Tensor, model: nn.Module, optimizer: Any, scheduler: Any = None) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch.reshape(-1, 4) + torch.randn(1) + random.random()).pow(2).mean()
    loss.backward()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return loss


class Holder:
    """An object with a state of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


class Killed(Exception):
    """Stands for the end of a process."""


def kill_at(run: Run, step: int | None) -> None:
    if run.step == step:
        run.close()
        raise Killed


def trained(folder: Path, steps: int, upto: int | None = None, loader: Any = None, **options: Any) -> Run:
    """A script that saves each step, and is killed after `upto`. loader: gives the batches, if they are not its own."""
    seeded()
    own = parts()
    run = Run(folder, **{"say": str, **own, **options})
    with suppress(Killed), run:
        pairs = ((step, torch.rand(4, 4)) for step in run.steps(steps))
        for step, batch in run.batches(loader, steps=steps) if loader is not None else pairs:
            run.log(step, loss=train(batch, **own))
            run.save(acc=1 / step)
            if step == upto:
                raise Killed
    return run


def end(folder: Path, steps: int) -> Any:
    return torch.load(folder / "checkpoints" / f"step-{steps:08d}.pt", weights_only=True)


def bytes_at(folder: Path, steps: int) -> bytes:
    return (folder / "checkpoints" / f"step-{steps:08d}.pt").read_bytes()
