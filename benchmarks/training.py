"""A step of the harness against the same loop written by hand, on the conv model; and a save against `torch.save`, each in turn.

Both loops are in one process, learn from the same data set, and go through the same switches; one step of each, which of them first by
chance, so that what else the machine does falls on both. A ratio is the median over such pairs; beside it stands that of the quickest of
each, on which other work of the machine fell least.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STEP = "training, a step of the conv model ({size}), against a loop by hand"
PICTURES = {"32 of 3 × 32 × 32": (3, 32, "≤ 1.02 ×"), "32 of 1 × 8 × 8": (1, 8, "")}  # channels, size, goal
SAVE = "training, a save of 50 MB ({how}), against torch.save + sync"
PAIRS = 300
SAVES = 15
WARM = 2  # of each, not counted
Row = tuple[str, float, float, tuple[float, float], str]


def rows(only: str, runs: int) -> Iterator[Row]:
    """What was measured: name, seconds of ours and of the peer's, the ratio of pairs and that of the quickest, goal."""
    for size, (channels, edge, goal) in PICTURES.items():
        if only in STEP.format(size=size):
            yield step(STEP.format(size=size), channels, edge, PAIRS * max(1, runs // 5), goal)
    for how in ("size", "full"):
        if only in SAVE.format(how=how):
            yield save(how, max(runs, SAVES))


def step(name: str, channels: int, edge: int, pairs: int, goal: str) -> Row:
    """One training step, on batches of 32 pictures."""
    import torch

    from ckptool.training import configfile
    from ckptool.training.hooks import Hooks
    from ckptool.training.loop import one_step
    from ckptool.training.parallel import World
    from ckptool.training.trainer import build

    torch.set_num_threads(1)  # two spin on each other's time where a machine does other things too
    values: dict[str, Any] = {
        "run": "unused",
        "data": {"name": "images", "args": {"samples": 640, "channels": channels, "size": edge}, "batch": 32},
        "models": {"main": {"name": "conv", "args": {"dropout": 0.1}}},
        "train": {"steps": 10**9},
    }
    trainer = build(configfile.checked(values, "benchmark"), World())
    batches = trainer.data.stream(trainer)
    hooks = Hooks([])
    by_hand = hand(trainer.data.dataset, channels, edge)

    def ours() -> None:
        one_step(trainer, next(batches), hooks)

    return compared(name, ours, lambda: next(by_hand), pairs, goal)


def hand(dataset: Any, channels: int, edge: int) -> Iterator[float]:
    """The loop of a tutorial: the loss is looked at in each step, as the harness looks at it."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from ckptool.training.models import Conv

    torch.manual_seed(0)
    model = Conv([channels, edge, edge], 4, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    loss_of = nn.CrossEntropyLoss()
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    while True:
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
            yield loss.item()


def save(how: str, pairs: int) -> Row:
    """One save: sha256 included; `full` reads the file once more, as resuming does."""
    import torch

    from ckptool.training.store import Store, check

    tree = {"model_state_dict": {f"layer{i}": torch.randn(1024, 1280) for i in range(10)}, "step": 1}
    os.makedirs("build", exist_ok=True)
    with tempfile.TemporaryDirectory(dir="build") as folder:
        store, peer = Store(folder, "benchmark"), Path(folder, "peer.pt")
        store.make()

        def ours() -> None:
            check(store.commit(1, tree, {}), how)

        def theirs() -> None:
            torch.save(tree, peer)
            with open(peer, "rb") as file:
                os.fsync(file.fileno())

        return compared(SAVE.format(how=how), ours, theirs, pairs, "≤ 1.1 ×" if how == "size" else "")


def compared(name: str, ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int, goal: str) -> Row:
    """Both in turn, in an order that is drawn for each pair."""
    dice = random.Random(0)
    times: dict[Callable[[], Any], list[float]] = {ours: [], theirs: []}
    for _ in range(pairs + WARM):
        for work in dice.sample([ours, theirs], 2):
            begun = time.perf_counter()
            work()
            times[work].append(time.perf_counter() - begun)
    one, other = times[ours][WARM:], times[theirs][WARM:]
    ratio = statistics.median(a / b for a, b in zip(one, other, strict=True))
    return name, statistics.median(one), statistics.median(other), (ratio, min(one) / min(other)), goal


def printed(row: Row) -> str:
    """A line of the table of `make bench`."""
    name, ours, theirs, ratio, goal = row
    ratios = f"{ratio[0]:.3f} ×, the quickest {ratio[1]:.3f} ×"
    return f"| {name} | {ours * 1e3:.2f} ms | | {theirs * 1e3:.2f} ms | {ratios} | {goal} |"


if __name__ == "__main__":
    for found in rows("", 5):
        print(printed(found), flush=True)
