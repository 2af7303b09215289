"""`ckptool.load` against `torch.load(mmap=True)` and `safetensors.torch.load_file`, in processes that have torch.

A run is a process of its own that loads a file once, first calls and imports included, and then again and again. CPU
time is compared, on which other work of the machine falls least; wall time stands beside it. Memory is what a process
has for itself (RssAnon) more than before, with the result in hand; mapped pages are the file's.

python -m benchmarks.loading ckptool|torch|safetensors FILE
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LATER = 5
NAME = "load, {what}, {which} call, against {peer}"
PEERS = {"torch": "torch.load(mmap=True)", "safetensors": "safetensors.torch.load_file"}
FILES = {  # name: what it is, its peer, goals of the first and the later calls
    "tensors.safetensors": ("20,000 tensors of safetensors", "safetensors", ("", "≤ 1.1 ×")),
    "tensors.pt": ("20,000 tensors of a .pt file", "torch", ("", "≤ 1.1 ×")),
    "big.safetensors": ("2 GB of safetensors", "safetensors", ("≤ 0.1 s", "")),
    "big.pt": ("2 GB of a .pt file", "torch", ("≤ 0.1 s", "")),
}


def rows(only: str, runs: int, folder: Path) -> Iterator[str]:
    """The lines of the table whose names contain `only`."""
    from benchmarks.files import prepare

    for file, (what, peer, goals) in FILES.items():
        names = [NAME.format(what=what, which=which, peer=PEERS[peer]) for which in ("first", "later")]
        if any(only in name for name in names):
            prepare(folder, ["big.pt", file])
            path = str(folder / file)
            found = [(measured("ckptool", path), measured(peer, path)) for _ in range(runs + 1)][1:]
            for which, name, goal in zip(("first", "later"), names, goals, strict=True):
                yield row(name, [(ours[which], theirs[which]) for ours, theirs in found], goal)


def row(name: str, pairs: list[tuple[Any, Any]], goal: str) -> str:
    """A line: CPU time, wall time in brackets, memory; the peer's; the median of the ratios of CPU time."""
    shown = []
    for runs in zip(*pairs, strict=True):
        cpu, wall, memory = (statistics.median(run[part] for run in runs) for part in ("cpu", "wall", "memory"))
        shown.append((f"{cpu * 1e3:.1f} ms CPU [{wall * 1e3:.1f} ms]", f"{memory / 1e6:.0f} MB"))
    ratio = statistics.median(ours["cpu"] / theirs["cpu"] for ours, theirs in pairs)
    (ours, memory), (theirs, their_memory) = shown
    return f"| {name} | {ours} | {memory} | {theirs}, {their_memory} | {ratio:.2f} × | {goal} |"


def measured(by: str, path: str) -> dict[str, dict[str, float]]:
    """One process: the time and memory of its first call, and the medians of later ones."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "benchmarks.loading", by, path]
    found: dict[str, dict[str, float]] = json.loads(subprocess.check_output(command, env=environment))
    return found


def by_ckptool(path: str) -> Any:
    import ckptool

    return ckptool.load(path)


def by_torch(path: str) -> Any:
    import torch

    return torch.load(path, mmap=True, weights_only=True)


def by_safetensors(path: str) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def timed(load: Callable[[str], Any], path: str) -> dict[str, float]:
    gc.collect()
    before, cpu, wall = anonymous(), time.process_time(), time.perf_counter()
    found = load(path)
    taken = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "memory": anonymous() - before}
    del found
    return taken


def anonymous() -> float:
    """Bytes of memory that are this process's own."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return float(status.partition("RssAnon:")[2].split()[0]) * 1024


def main(by: str, path: str) -> None:
    import torch

    torch.ones(2).sum()
    load = {"ckptool": by_ckptool, "torch": by_torch, "safetensors": by_safetensors}[by]
    first = timed(load, path)
    later = [timed(load, path) for _ in range(LATER)]
    median = {part: statistics.median(run[part] for run in later) for part in first}
    print(json.dumps({"first": first, "later": median}))


if __name__ == "__main__":
    main(*sys.argv[1:])
