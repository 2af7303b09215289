"""`ckptool.Run` in several processes, with DDP and FSDP2: killed in one or in all of them, the run ends with the same
files; resumed by another number of them with a seed, it sees the same samples.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptool
from ckptool.errors import UsageError
from ckptool.training.state import ranks_with_own, with_own
from tests.support.killed_loops import import_needed, run_and_exit
from tests.support.looped import sliced
from tests.support.small_runs import contents_but_lock

BEGIN = """
torch.distributed.init_process_group("gloo")
torch.manual_seed(3)
norm = nn.BatchNorm1d(6) if {kind!r} == "ddp" else nn.LayerNorm(6)
model = nn.Sequential(nn.Linear(4, 6), norm, nn.Dropout({dropout}), nn.Linear(6, 1))
wrapped = DistributedDataParallel(model, find_unused_parameters={unused}) if {kind!r} == "ddp" else fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
data = list(zip(torch.arange(144.0).view(36, 4).sin(), torch.arange(36)))
sampler = torch.utils.data.DistributedSampler(data, seed=5)
loader = torch.utils.data.DataLoader(data, batch_size=12 // world, sampler=sampler)
torch.manual_seed(10 + rank)
run = ckptool.Run(folder, model=wrapped, optimizer=optimizer, scheduler=scheduler, seed={seed}, say=notes.append)
"""
STEP = """
    inputs, numbers = batch
    loss = (wrapped(inputs) - 1).square().mean() / 2
    loss.backward()
    if step % {window} == 0:
        optimizer.step()
        optimizer.zero_grad()
    seen = numbers.square().sum().double()
    torch.distributed.all_reduce(seen)
    run.log(samples=seen, loss=loss)
    run.save(every=2)
"""
SHAPES = {
    "nested": "for epoch in run.epochs(3):\n  for step, batch in run.batches(loader):\n"
    + STEP.replace("\n", "\n  ")
    + "\n  scheduler.step()\n  run.save()\n",
    "flat": "for step, batch in run.batches(loader, steps=9):\n" + STEP + "    scheduler.step()\n",
}


def script(kind: str, shape: str, window: int = 1, seed: int | None = None, **more: Any) -> str:
    """The source of a loop. DDP adds the gradients of three processes in the same order in each step if it is told to
    look for unused parameters; else they move after the first one."""
    values = {"kind!r": repr(kind), "window": window, "seed": seed, "dropout": 0.3, "unused": True, **more}
    return re.sub(r"\{([a-z!]+)\}", lambda found: str(values[found[1]]), BEGIN + SHAPES[shape])


def ranks(world: int, source: str, folder: Path, kills: dict[int, tuple[int, int]] | None = None) -> list[int]:
    """Runs a script in so many processes; returns their exit codes. kills: for a rank, before which line of the
    script a signal comes, and which."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    import_needed()
    for rank in range(world):
        if not (child := os.fork()):
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            _work(rank, world, source, folder, *(kills or {}).get(rank, (0, 0)))
        children.append(child)
    until = time.monotonic() + 60
    codes: dict[int, int] = {}
    while len(codes) < world:
        for child in set(children) - set(codes):
            if (found := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(found[1])
        if time.monotonic() > until:
            for child in set(children) - set(codes):
                os.kill(child, signal.SIGKILL)
            until += 60
        time.sleep(0.01)
    return [codes[child] for child in children]


def _work(rank: int, world: int, source: str, folder: Path, line: int, number: int) -> None:
    notes: list[str] = []

    def write() -> None:
        if not rank:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "notes").write_text("\n".join(notes))

    names = {"torch": torch, "nn": nn, "ckptool": ckptool, "folder": folder, "rank": rank, "world": world}
    names |= {"notes": notes, "fully_shard": fully_shard, "DistributedDataParallel": DistributedDataParallel}
    run_and_exit(source, names, line, number, write)


def files(folder: Path) -> dict[str, bytes]:
    found = {name: data for name, data in contents_but_lock(str(folder / "checkpoints")).items() if ".json" not in name}
    return {**found, "metrics.jsonl": (folder / "metrics.jsonl").read_bytes()}


OWN = """
class Env:
    seen = torch.full((2,), float(rank))
    def state_dict(self):
        return {"seen": self.seen, "same": torch.ones(2, dtype=torch.cfloat).conj()}
    def load_state_dict(self, state):
        self.seen = state["seen"]
env, scale = Env(), nn.BatchNorm1d(4).requires_grad_(False)
"""


@pytest.mark.long("three runs of several processes")
@pytest.mark.parametrize("kind, world", sliced(itertools.product(("ddp", "fsdp"), (2, 3)), 1))
def test_what_differs_between_processes_is_saved_of_each_and_any_of_them_may_mark(
    tmp_path: Path, kind: str, world: int
) -> None:
    """A value, an object, buffers that nothing broadcasts."""
    source = script(kind, "flat").replace(
        "run = ckptool.Run(folder", f"{OWN}run = ckptool.Run(folder, env=env, scale=scale"
    )
    body = (
        "    inputs += run.get('last', torch.full((4,), float(rank))) + env.seen.sum() + run.get('best', 0)\n"
        "    if rank == 0:\n        run['best'] = step / 9\n"
        "    run['last'], run['step'] = inputs.mean(0) / 9, step\n    env.seen = env.seen / 2 + inputs.mean() / 9\n"
        "    inputs = scale(inputs)\n"
    )
    source = source.replace("    inputs, numbers = batch\n", f"    inputs, numbers = batch\n{body}")
    source = source.replace("run.save(every=2)", "if rank == step // 2 % world: run.save(every=2)")
    assert ranks(world, source, tmp_path / "whole") == [0] * world
    assert "keeps the order" not in (tmp_path / "whole/notes").read_text()
    for line in 80, 110:
        assert all(ranks(world, source, tmp_path / "killed", {1: (line, signal.SIGKILL)}))
    assert ranks(world, source, tmp_path / "killed") == [0] * world
    whole, killed = files(tmp_path / "whole"), files(tmp_path / "killed")
    assert whole.keys() == killed.keys() and [name for name in whole if whole[name] != killed[name]] == []
    path = tmp_path / "whole/checkpoints" / f"step-00000009.{'pt' if kind == 'ddp' else 'dcp'}"
    first, second = ckptool.load(path)["rng_state"]["ranks"][:2]
    assert "own" not in first and second["own"].keys() == {"values", "env_state_dict", "scale_buffers"}
    assert second["own"]["values"].keys() == {"last", "step"}


def in_two_processes(work: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """What two that work at once give; each with its number, and a function that gives the values of both."""
    values, barrier = list[Any]([None, None]), threading.Barrier(2, timeout=5)

    def gathered(rank: int, value: Any) -> list[Any]:
        values[rank] = value
        barrier.wait()
        both = [*values]
        barrier.wait()
        return both

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: work(rank, partial(gathered, rank)), range(2)))


@pytest.mark.parametrize("odd", [(0, 1), (1,)])
def test_a_state_of_one_process_that_cannot_be_saved_is_refused_in_all(odd: tuple[int, ...]) -> None:
    """Else the others would wait for it."""

    def work(rank: int, gather: Callable[[Any], list[Any]]) -> None:
        state = {"a": numpy.ones(1) if rank in odd else 1}
        with pytest.raises(UsageError, match=r"the state of env holds numpy\.ndarray"):
            ranks_with_own({}, {"env_state_dict": state}, gather)

    in_two_processes(work)


@pytest.mark.parametrize("first", [{}, {"env_state_dict": {"b": 2}}, {"env_state_dict": [1]}, {"env_state_dict": None}])
def test_a_state_that_one_process_alone_has_comes_back_to_it(first: dict[str, Any]) -> None:
    each = (first, {"env_state_dict": {"a": 1}})
    ranks = in_two_processes(lambda rank, gather: ranks_with_own({}, each[rank], gather))[0]
    assert [with_own(first, rank) for rank in ranks] == [*each]


ALL = list(itertools.product(("ddp", "fsdp"), SHAPES, (1, 2), (2, 3), ("one", "all", "stop")))


@pytest.mark.long("three runs of several processes")
@pytest.mark.parametrize("kind, shape, window, world, which", sliced(ALL, 1))
def test_killed_in_one_or_all_processes_it_ends_with_the_same_files(
    tmp_path: Path, kind: str, shape: str, window: int, world: int, which: str
) -> None:
    source, dice = script(kind, shape, window), random.Random(f"{kind}{shape}{window}{world}{which}")
    assert ranks(world, source, tmp_path / "whole") == [0] * world
    for _ in range(2):
        line, number = dice.randrange(14, 90), signal.SIGTERM if which == "stop" else signal.SIGKILL
        hit = range(world) if which == "all" else [dice.randrange(world)]
        codes = ranks(world, source, tmp_path / "killed", dict.fromkeys(hit, (line, number)))
        assert codes in ([143] * world, [0] * world) if which == "stop" else all(codes) or not any(codes), (line, codes)
    assert ranks(world, source, tmp_path / "killed") == [0] * world
    whole, killed = files(tmp_path / "whole"), files(tmp_path / "killed")
    assert sorted(whole) == sorted(killed)
    assert [name for name in whole if whole[name] != killed[name]] == []
    saved = ckptool.load(tmp_path / "killed/checkpoints" / f"step-00000009.{'pt' if kind == 'ddp' else 'dcp'}")
    assert list(saved["model_state_dict"])[:2] == ["0.weight", "0.bias"]  # without a wrapper's prefix


@pytest.mark.long("three runs of several processes")
@pytest.mark.parametrize("kind, shape, after", sliced(itertools.product(("ddp", "fsdp"), SHAPES, (1, 3)), 1))
def test_on_another_number_of_processes_a_seed_gives_the_same_samples_and_a_note(
    tmp_path: Path, kind: str, shape: str, after: int
) -> None:
    """Sums in another order differ in their last bits."""
    source = script(kind, shape, seed=7, dropout=0)
    assert ranks(2, source, tmp_path / "whole") == [0, 0]
    assert all(ranks(2, source, tmp_path / "moved", dict.fromkeys(range(2), (60, signal.SIGKILL))))
    assert ranks(after, source, tmp_path / "moved") == [0] * after
    assert "the last bits" in (tmp_path / "moved/notes").read_text()
    whole, moved = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "moved")
    )
    assert [line["samples"] for line in whole] == [line["samples"] for line in moved]


def test_ddp_that_adds_in_another_order_is_noted(tmp_path: Path) -> None:
    assert ranks(3, script("ddp", "flat", unused=False), tmp_path) == [0, 0, 0]
    assert (tmp_path / "notes").read_text().count("keeps the order") == 1
