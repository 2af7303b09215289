"""What moved and is in no state dict: every kind is found under its owner's name, and no code of the objects runs."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptool.training import rng
from ckptool.training.moving import MAX_OBJECTS, kind_of, reachable, unsaved
from tests.support.processes import soon


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.counter, self.seen, self.scale = 0, [1, 2], torch.zeros(2)
        self.register_buffer("noise", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        self.seen[0] += 1
        self.noise += 1
        self.scale += 1
        return self.body(x)  # type: ignore[no-any-return]


class Data:
    __slots__ = ("__dict__", "rng")

    def __init__(self) -> None:
        self.rng, self.gen, self.dice = np.random.default_rng(0), torch.Generator(), random.Random(1)
        self.old, self.lottery = np.random.RandomState(1), random.SystemRandom()
        self.shared = [torch.default_generator, np.random.mtrand._rand]
        self.table = np.zeros(4)

    @property
    def trap(self) -> None:
        raise SystemExit("a property was read")

    def __getattr__(self, name: str) -> Any:
        raise SystemExit(f"{name} was looked for")

    def __repr__(self) -> str:
        raise SystemExit("it was printed")


def closure() -> Any:
    rng = np.random.default_rng(1)
    return lambda: rng.random()


def stream() -> Iterator[torch.Tensor]:
    generator = torch.Generator()
    while True:
        yield torch.rand(1, generator=generator)


def test_what_moved_and_is_in_no_state_is_named_by_its_owner() -> None:
    model, data, draws, batches = Net(), Data(), closure(), stream()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    flips = functools.partial(draws)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": data, "flips": flips}
    objects |= {"batches": zip(batches), "again": {"data": data}}
    next(batches)
    before = reachable(objects)[0]
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    torch.rand(1, generator=data.gen)
    for draw in (data.rng.random, data.dice.random, data.old.rand, data.lottery.random, draws):
        draw()
    data.table += 1
    next(batches)
    after = reachable(objects)[0]
    saved = {*(f"model.{key}" for key in model.state_dict()), "optimizer", "schedule"}
    assert unsaved(before, after, saved) == {
        **dict.fromkeys(("model.counter", "model.seen", "model.scale"), "module attribute"),
        "model.noise": "non-persistent buffer",
        **{f"data.{name}": "generator" for name in ("rng", "gen", "dice", "old")},
        "data.table": "attribute",
        **dict.fromkeys(("flips.rng", "batches[0].generator"), "generator"),
    }
    assert before["model.counter"] == "module attribute: 0" and after["model.counter"] == "module attribute: 1"
    assert kind_of(after["model.body.1.running_mean"]) == "buffer"
    assert unsaved(before, after, {"model", "data", "flips", "batches", "schedule"}) == {}


def test_nothing_moves_by_looking() -> None:
    objects = {"model": Net(), "data": Data(), "loader": torch.utils.data.DataLoader([1, 2, 3], shuffle=True)}
    states = rng.global_states()
    assert unsaved(reachable(objects)[0], reachable(objects)[0], ()) == {}
    assert rng.moved(rng.global_states(), states) == set()
    torch.rand(1)
    assert rng.moved(rng.global_states(), states) == {"torch"}


def test_extra_state_saves_a_modules_attributes() -> None:
    class Counted(nn.Module):
        count = 0

        def get_extra_state(self) -> int:
            return self.count

    model = nn.Sequential(Counted())
    before, after = ({f"model.{at}.count": f"x: {value}" for at in (0, 1)} for value in (0, 1))
    assert unsaved(before, after, {f"model.{key}".removesuffix("._extra_state") for key in model.state_dict()}) == {
        "model.1.count": "x"
    }


@pytest.mark.parametrize("size", [7, 10**6])
def test_large_values_are_sampled(size: int) -> None:
    values: dict[str, Any] = {"list": list(range(size)), "tensor": torch.arange(size), "array": np.arange(size)}
    values |= {
        "text": "x" * size,
        "set": set(range(size)),
        "dict": dict.fromkeys(range(size)),
        "t": torch.rand(2, size).T,
    }
    before = reachable(values)[0]
    assert set(before) == set(values)
    values["list"][:] = values["list"][::-1]
    values["array"][:] = values["array"][::-1].copy()
    for tensor in (values["tensor"], values["t"]):
        tensor.copy_(tensor.flip(0))
    assert [*unsaved(before, reachable(values)[0], ())] == ["list", "tensor", "array", "t"]


def test_it_is_quick_and_bounded_and_never_raises() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)) for _ in range(100)])
    with soon(2):  # 0.1 s on an idle machine
        assert len(reachable({"model": model})[0]) > 1000
    ring: list[Any] = [threading.Lock()]
    ring.append(ring)
    chain: Any = None
    for _ in range(2 * MAX_OBJECTS):
        chain = [object(), chain]
    odd = {"ring": ring, "chain": chain, "meta": torch.empty(3, device="meta"), "sparse": torch.eye(3).to_sparse()}
    odd |= {"module": np, "class": Net, "huge": 10**5000, "objects": np.array([object()])}
    assert reachable({**odd, "last": 1})[0]["last"] == "value: 1"
