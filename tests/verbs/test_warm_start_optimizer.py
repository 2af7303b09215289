"""`warm-start --optimizer`: the state of the optimizer goes along with its parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import Conflict, UsageError
from fixtures.make import train
from tests.support.files import saved
from tests.support.same import assert_same_objects
from tests.support.warm_starts import warm_started


def test_an_optimizer_goes_along(tmp_path: Path, code: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    adam = torch.optim.Adam(model.parameters(), lr=0.3)
    train(model, adam)
    file = saved({"model": nn.DataParallel(model).state_dict(), "optim": adam.state_dict()}, tmp_path / "all.pt")
    report, done = warm_started(file, f"{code}:build", tmp_path / "out.pt", on_mismatch="skip", optimizer=True)
    fresh = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    fresh.load_state_dict(done["model_state_dict"], strict=True)
    mine = torch.optim.Adam(fresh.parameters())
    mine.load_state_dict(done["optimizer_state_dict"])
    assert mine.param_groups[0]["lr"] == 0.3
    for old, new in zip(list(model.parameters())[:4], list(fresh.parameters())[:4], strict=True):
        assert_same_objects(mine.state[new]["exp_avg"], adam.state[old]["exp_avg"])
    assert report.optimizer is not None and report.optimizer.fresh == ("3.weight", "3.bias")
    train(fresh, mine, 1)
    with pytest.raises(UsageError, match="no optimizer state"):
        ckptool.warm_start(file, f"{code}:build", tmp_path / "o.safetensors", on_mismatch="skip", optimizer=True)


def test_a_new_parameter_and_two_groups(tmp_path: Path, code: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    named = list(model.named_parameters())
    adam = torch.optim.Adam([{"params": named[:2]}, {"params": named[2:], "lr": 0.7}], lr=0.1)
    train(model, adam)
    file = saved({"model": model.state_dict(), "optim": adam.state_dict()}, tmp_path / "all.pt")
    with pytest.raises(Conflict, match="unclear which of them 3"):
        ckptool.warm_start(file, f"{code}:build", tmp_path / "out.pt", on_mismatch="skip", optimizer=True)
    same = saved(model.state_dict(), tmp_path / "same.pt")
    _, done = warm_started(file, same, tmp_path / "out.pt", optimizer=True)
    assert [group["lr"] for group in done["optimizer_state_dict"]["param_groups"]] == [0.1, 0.7]
    assert done["optimizer_state_dict"]["param_groups"][1]["param_names"] == [name for name, _ in named[2:]]
