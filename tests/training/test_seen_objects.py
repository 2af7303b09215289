"""What lies in the objects of a script, in lists of them and in the functions that called the loop, is seen, too."""

from __future__ import annotations

import copy
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckptool import Run
from tests.support.own_loops import seeded

TRAIN = "optimizer.zero_grad(); model(x).pow(2).mean().backward(); optimizer.step()"
# Loops over `loader`, and a part of each note that follows the first one.
LEFT = {
    "optimizers and models in a list of objects": (
        (
            "class Client:\n    def __init__(self):\n        self.model = copy.deepcopy(model)\n"
            "        self.inner = torch.optim.SGD(self.model.parameters(), 0.1, 0.9)\n"
            "clients = [Client(), Client()]\nfor step, x in run.batches(loader, steps=4):\n    for client in clients:\n"
            "        client.inner.zero_grad(); client.model(x).sum().backward(); client.inner.step()\n"
            "    run.save()"
        ),
        ["saved: clients (SGD)"],
    ),
    "an average in an object": (
        (
            "class Ema:\n    def __init__(self): self.ema = copy.deepcopy(model).eval().requires_grad_(False)\n"
            "ema = Ema()\nfor step, x in run.batches(loader, steps=4):\n"
            f"    {TRAIN}\n    for a, b in zip(ema.ema.parameters(), model.parameters()): a.lerp_(b, 0.1)\n"
            "    run.save()"
        ),
        ["is not saved; if a later step needs them, give them: ckptool.Run(…, ema=ema.ema)"],
    ),
    "what does not change in an object, and what the given ones hold": (
        (
            "class Loss:\n    def __init__(self):\n        self.net, self.model = copy.deepcopy(model), model\n"
            "        self.lazy, self.meta = torch.nn.LazyLinear(2), torch.nn.Linear(2, 2, device='meta')\n"
            "loss = Loss()\nfor step, x in run.batches(loader, steps=4):\n"
            f"    {TRAIN}; schedule.step(); run.save()"
        ),
        [],
    ),
    "a memory of a class": (
        (
            "class Pool:\n    def __init__(self): self.kept = []\nclass Settings: rate = 1.0\n"
            "pool = Pool()\nfor step, x in run.batches(loader, steps=4):\n    pool.kept.append(x)\n"
            "    Settings.rate /= 2\n    run.save()"
        ),
        ["pool.kept"],
    ),
    "of the function that called the loop": (
        (
            "def train(run, loader):\n    for step, x in run.batches(loader, steps=4): run.save()\n"
            "def main():\n    ema = copy.deepcopy(model)\n    train(run, loader)\nmain()"
        ),
        ["saved: ema (Linear)"],
    ),
}


def noted(tmp_path: Path, loop: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The notes of a loop, without the first one, on what is in the checkpoint."""
    seeded()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    loader = DataLoader(torch.rand(12, 4), batch_size=3)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with Run(tmp_path / "run", **objects, say=print) as run:
        names: dict[str, Any] = {"torch": torch, "numpy": numpy, "copy": copy, "loader": loader, "__name__": "loop"}
        with suppress(SystemExit):
            exec(loop, {**names, **objects, "constant": parts[0], "run": run, "signal": signal})
    return [line for line in capsys.readouterr().out.splitlines()[1:] if not line.startswith("stopped")]


@pytest.mark.parametrize("name", LEFT)
def test_what_the_objects_of_a_script_hold_is_named(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, wanted = LEFT[name]
    lines = noted(tmp_path, loop, capsys)
    assert len(lines) == len(wanted) and all(part in line for part, line in zip(wanted, lines, strict=True)), lines


# What an epoch changes, and what is named of it.
INSIDE = {
    # The first save inside an epoch looks at what is in use there, though it is the third, as that of a signal may be.
    "total": "for epoch in run.epochs(4):\n    total = 0.0\n    for step, x in run.batches(loader):\n"
    "        total += float(x.sum())\n        if step == 10: signal.raise_signal(signal.SIGTERM)\n    run.save()",
    # What changes in place is named one step after the first save, also where an epoch has one save, so that no second
    # one finds the same list.
    "losses": "for epoch in run.epochs(4):\n    losses = []\n    for step, x in run.batches(loader):\n"
    "        losses.append(float(x.sum()))\n        if step == 2: run.save()",
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_an_epoch_changes_is_named_where_it_is_in_use(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = noted(tmp_path, INSIDE[name], capsys)
    assert [line.partition(" changes")[0] for line in lines] == [f"{name} (variable)"]
