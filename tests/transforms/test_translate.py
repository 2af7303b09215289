"""Random rules that change tensors: what comes out is what torch makes of them, and `--reverse` gives it all back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptool
from tests.support.random_rules import RandomRules

SEEDS = range(60)


def bits(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tuple(tensor.shape), plain.view(torch.uint8).numpy().tobytes()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        assert bits(value) == bits(other[key]), key


def ties(state: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    for one, a in state.items():
        for other, b in state.items():
            if one < other and a.numel() and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
                yield one, other


@pytest.mark.parametrize("seed", SEEDS)
def test_random_rules_there_and_back(seed: int, tmp_path: Path) -> None:
    given = RandomRules(seed)
    torch.save({"model": given.state, "epoch": 3}, tmp_path / "in.pt")
    numbers: Any = given.numbers
    ckptool.translate(tmp_path / "in.pt", given.rules, tmp_path / "out.pt", set=numbers, verify=True)
    after = torch.load(tmp_path / "out.pt")
    same(after["model"], given.translated(given.state))
    assert after["epoch"] == 3
    ckptool.translate(tmp_path / "out.pt", given.rules, tmp_path / "back.pt", set=numbers, reverse=True, verify=True)
    back = torch.load(tmp_path / "back.pt")["model"]
    same(back, given.state)
    assert list(ties(back)) == list(ties(given.state))
