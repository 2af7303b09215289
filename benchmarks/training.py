"""A step of the harness against the same loop written by hand, on a conv model and an MLP; and a save against
`torch.save`, each in turn.

Both loops are in one process, learn from the same data set, and go through the same switches; one step of each, which
of them first by chance, so that what else the machine does falls on both. A ratio is the median over such pairs; beside
it stands that of the quickest of each, on which other work of the machine fell least.
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

STEP = "training, a step of the {size}, against a loop by hand"
PICTURES = {  # model, channels, size, goal
    "conv model (32 of 3 × 32 × 32)": ("examples/models.py:Conv", 3, 32, "≤ 1.02 ×"),
    "conv model (32 of 1 × 8 × 8)": ("examples/models.py:Conv", 1, 8, ""),
    "MLP (32 of 1 × 8 × 8)": ("mlp", 1, 8, "≤ 1.1 ×"),
}
SAVE = "training, a save of {megabytes} MB (verify: {how}), against torch.save + sync"
PAIRS = 300
SAVES = 15
WARM = 2  # of each, not counted
Row = tuple[str, float, float, tuple[float, float], str]


def rows(only: str, runs: int) -> Iterator[Row]:
    """What was measured: name, seconds of ours and of the peer's, the ratio of pairs and that of the quickest, goal."""
    for size, (kind, channels, edge, goal) in PICTURES.items():
        if only in STEP.format(size=size):
            yield step(STEP.format(size=size), kind, channels, edge, PAIRS * max(1, runs // 5), goal)
    for megabytes, how in ((300, "size"), (300, "full"), (30, "size")):
        if only in SAVE.format(megabytes=megabytes, how=how):
            os.makedirs("build", exist_ok=True)  # the disk of the project, not one in memory
            with tempfile.TemporaryDirectory(dir="build") as folder:
                yield save(megabytes, how, max(runs, SAVES), Path(folder))


def step(name: str, kind: str, channels: int, edge: int, pairs: int, goal: str) -> Row:
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
        "data": {
            "name": "examples/data.py:images",
            "args": {"samples": 640, "channels": channels, "size": edge},
            "batch": 32,
        },
        "models": {"main": {"name": kind, "args": {"dropout": 0.1}}},
        "train": {"steps": 10**9},
    }
    trainer = build(configfile.checked(values, "benchmark"), World())
    batches = trainer.data.stream(trainer)
    hooks = Hooks([])
    by_hand = hand(trainer.data.dataset, kind, channels, edge)

    def ours() -> None:
        one_step(trainer, next(batches), hooks)

    return compared(name, ours, lambda: next(by_hand), pairs, goal)


def hand(dataset: Any, kind: str, channels: int, edge: int) -> Iterator[float]:
    """The loop of a tutorial: the loss is looked at in each step, as the harness looks at it."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from ckptool.training.models import MODELS

    torch.manual_seed(0)
    model = MODELS.find(kind)([channels, edge, edge], classes=4, dropout=0.1)
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


def save(megabytes: int, how: str, pairs: int, folder: Path) -> Row:
    """One save of a run against the usual careful one; `full` reads the file once more, as resuming does."""
    from benchmarks.saving import by_torch, state_of
    from ckptool.output import make_folder
    from ckptool.training.store import RunFolder, check

    state, store = state_of(megabytes), RunFolder(str(folder), "benchmark")
    make_folder(store.checkpoints)
    name = SAVE.format(megabytes=megabytes, how=how)
    goal = "≤ 1.1 ×" if how == "size" else ""

    def ours() -> None:
        check(store.commit(1, state, {}), how)

    return compared(name, ours, lambda: by_torch(state, folder), pairs, goal, os.sync)


def compared(
    name: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    pairs: int,
    goal: str,
    before: Callable[[], Any] = lambda: None,
) -> Row:
    """Both in turn, in an order that is drawn for each pair. `before` each of them something is done that does not
    count."""
    dice = random.Random(0)
    times: dict[Callable[[], Any], list[float]] = {ours: [], theirs: []}
    for _ in range(pairs + WARM):
        for work in dice.sample([ours, theirs], 2):
            before()
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
