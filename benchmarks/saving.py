"""Saving a checkpoint of a run against `torch.save` of the same state and a sync, and what verifying costs when it is
resumed from.

    python -m benchmarks.saving [--megabytes 300] [--runs 7] [--folder build/bench]

The two take turns, on the same disk; the run's side writes the file, its sha256 and its sidecar, syncs them and the
folder, and renames.
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

from ckptool.training.store import SavedState, Store, check


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


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes, on a disk that is idle before it."""
    os.sync()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measured(megabytes: int, runs: int, folder: Path) -> str:
    """A row of the table."""
    shutil.rmtree(folder, ignore_errors=True)
    store, state = Store(str(folder), "bench"), state_of(megabytes)
    store.make()
    saved: list[SavedState] = []
    theirs, ours, verified = [], [], []
    for _ in range(runs + 1):
        theirs.append(seconds(lambda: by_torch(state, folder)))
        ours.append(seconds(lambda: saved.append(store.commit(1, state, {}))))
        verified.append(seconds(lambda: check(saved[-1], "full")))
    shutil.rmtree(folder)
    ratio = statistics.median(a / b for a, b in zip(ours[1:], theirs[1:], strict=True))
    times = [
        f"{statistics.median(each[1:]):.3f} s [{min(each[1:]):.3f}–{max(each[1:]):.3f}]" for each in (ours, theirs)
    ]
    return f"| {megabytes} MB | {times[0]} | {times[1]} | {ratio:.2f} × | {statistics.median(verified[1:]):.3f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 30, 300])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("build/bench/saving"))
    options = parser.parse_args()
    print(
        "| state | save in a run, hash included | torch.save + sync | ratio | verify: full |\n| --- | --- | --- | --- |"
        " --- |"
    )
    for megabytes in options.megabytes:
        print(measured(megabytes, options.runs, options.folder), flush=True)


if __name__ == "__main__":
    main()
