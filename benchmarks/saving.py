"""Saving a checkpoint of a run against `torch.save` of the same state and a sync; how long a save in the background
blocks, the first, which allocates its copy, and later ones; and what verifying costs when a run is resumed.

    python -m benchmarks.saving [--megabytes 300] [--runs 7] [--folder build/bench]

They take turns, on the same disk; the run's side writes the file, its sha256 and its sidecar, syncs them and the
folder, renames, and deletes the one before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckptool.training import run_folder
from ckptool.training.parallel import World
from ckptool.training.saving import Saver
from ckptool.training.store import Retention, check


def state_of(megabytes: int) -> dict[str, Any]:
    """What Adam keeps of a model: weights, and two moments of each."""
    count = max(1, megabytes // 3)
    model = {f"blocks.{number}.weight": torch.randn(1 << 18) for number in range(count)}
    moments = {
        n: {"step": torch.tensor(1.0), "exp_avg": w * 0.1, "exp_avg_sq": w * w} for n, w in enumerate(model.values())
    }
    groups = [{"lr": 1e-3, "params": list(range(count))}]
    return {"step": 1, "model_state_dict": model, "optimizer_state_dict": {"state": moments, "param_groups": groups}}


def by_torch(state: dict[str, Any], folder: Path) -> None:
    """The usual careful way: beside the target, synced, renamed, the folder synced."""
    path = folder / "torch.pt"
    with open(f"{path}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def seconds(work: Callable[..., Any], *arguments: Any) -> float:
    """How long it takes, on a disk that is idle before it."""
    os.sync()
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def measured(megabytes: int, runs: int, folder: Path) -> str:
    """A row of the table."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    state = state_of(megabytes)
    savers = [
        Saver(run_folder.create(str(folder / name), {}, Retention(1, 0, 0, "", "min")), World(), background=name == "b")
        for name in "ab"
    ]
    rows: list[list[float]] = []
    for step in range(1, runs + 2):
        row = [seconds(by_torch, state, folder)]
        for saver in savers:
            row.append(seconds(saver.save, step, lambda: state, {}))
            saver.wait()
        rows.append([*row, seconds(check, savers[0].run.all()[-1], "full")])
    shutil.rmtree(folder)
    first, later = rows[0], rows[1:]
    theirs, ours, blocked, verified = ([row[column] for row in later] for column in range(4))

    def ratio(some: list[float], others: list[float]) -> str:
        return f"{statistics.median(a / b for a, b in zip(some, others, strict=True)):.2f} ×"

    times = [f"{statistics.median(each):.3f} s [{min(each):.3f}–{max(each):.3f}]" for each in (theirs, ours, blocked)]
    cells = [f"{megabytes} MB", *times, ratio(ours, theirs), ratio(blocked, ours), f"{first[2] / first[1]:.2f} ×"]
    return f"| {' | '.join(cells)} | {statistics.median(verified):.3f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 30, 300])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("build/bench/saving"))
    options = parser.parse_args()
    heads = ["state", "torch.save + sync", "save in a run", "blocked in the background"]
    heads += ["save / torch", "blocked / save", "the first blocked", "verify: full"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for megabytes in options.megabytes:
        print(measured(megabytes, options.runs, options.folder), flush=True)


if __name__ == "__main__":
    main()
