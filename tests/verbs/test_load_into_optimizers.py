"""`load_into` with an optimizer: its state goes along with the parameters, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import Conflict, NoMatch, UsageError
from fixtures.make import mlp, train
from tests.support.files import saved
from tests.support.live_models import bits, load_refused

STEPS = 3


def trained_with(build: Any, named: bool = False, groups: int = 1) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = build()
    parameters: Any = list(model.named_parameters() if named else model.parameters())
    if groups == 2:
        parameters = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.5}]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    train(model, optimizer, STEPS)
    return model, optimizer


@pytest.mark.parametrize("named", [True, False])
def test_optimizer_state_goes_along_by_name(tmp_path: Path, named: bool) -> None:
    trained, adam = trained_with(mlp, named)
    file = saved({"model": nn.DataParallel(trained).state_dict(), "optim": adam.state_dict()}, tmp_path / "all.pt")
    model = mlp()
    mine = torch.optim.AdamW(reversed(list(model.parameters())), lr=0.7)
    report = ckptool.load_into(model, file, optimizer=mine)
    assert report.optimizer is not None and report.optimizer.known_by == ("names" if named else "order")
    assert len(report.optimizer.carried) == 6 and mine.param_groups[0]["lr"] == 0.7
    for old, new in zip(trained.parameters(), model.parameters(), strict=True):
        assert bits(adam.state[old]["exp_avg"]) == bits(mine.state[new]["exp_avg"])
        assert mine.state[new]["step"] == STEPS
    train(model, mine, 1)


def test_a_new_head_starts_without_state(tmp_path: Path) -> None:
    trained, adam = trained_with(mlp)
    file = saved({"model": trained.state_dict(), "optim": adam.state_dict()}, tmp_path / "all.pt")
    model = mlp()
    model.fc2 = nn.Linear(16, 7)
    mine = torch.optim.Adam(model.parameters())
    report = ckptool.load_into(model, file, on_mismatch="skip", optimizer=mine)
    assert report.optimizer is not None
    assert report.optimizer.fresh == ("fc2.weight", "fc2.bias") and model.fc2.weight not in mine.state
    assert dict(report.optimizer.left_out).keys() == {"fc2.weight", "fc2.bias"}
    train(model, mine, 1)


def test_slots_that_cannot_be_told_apart(tmp_path: Path) -> None:
    trained, adam = trained_with(mlp, groups=2)
    file = saved({"model": trained.state_dict(), "optim": adam.state_dict()}, tmp_path / "groups.pt")
    model = mlp()
    load_refused(file, model, Conflict, "cannot be known which slots", optimizer=torch.optim.Adam(model.parameters()))
    trained, adam = trained_with(lambda: nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)), groups=2)
    file = saved({"model": trained.state_dict(), "optim": adam.state_dict()}, tmp_path / "shapes.pt")
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
    mine = torch.optim.Adam(model.parameters())
    report = ckptool.load_into(model, file, optimizer=mine)
    assert report.optimizer is not None and report.optimizer.known_by == "order"
    for old, new in zip(trained.parameters(), model.parameters(), strict=True):
        assert bits(adam.state[old]["exp_avg"]) == bits(mine.state[new]["exp_avg"])


def test_optimizers_that_are_not_the_models(tmp_path: Path) -> None:
    trained, adam = trained_with(mlp)
    file = saved({"model": trained.state_dict(), "optim": adam.state_dict()}, tmp_path / "all.pt")
    model = mlp()
    load_refused(file, model, UsageError, "not the model's", optimizer=torch.optim.Adam(mlp().parameters()))
    mine = torch.optim.Adam(model.parameters())
    load_refused(file, model, UsageError, "would keep the tensors", optimizer=mine, assign=True)
    bare = saved(trained.state_dict(), tmp_path / "bare.pt")
    load_refused(bare, model, NoMatch, "no optimizer state", optimizer=mine)
