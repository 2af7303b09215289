"""`load_into` with an optimizer: its state goes along with the parameters, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptool
from ckptool.errors import NoMatch, UsageError
from fixtures.make import mlp, train
from tests.support.files import saved
from tests.support.live_models import load_refused

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


def test_optimizers_that_are_not_the_models(tmp_path: Path) -> None:
    trained, adam = trained_with(mlp)
    file = saved({"model": trained.state_dict(), "optim": adam.state_dict()}, tmp_path / "all.pt")
    model = mlp()
    load_refused(file, model, UsageError, "not the model's", optimizer=torch.optim.Adam(mlp().parameters()))
    mine = torch.optim.Adam(model.parameters())
    load_refused(file, model, UsageError, "would keep the tensors", optimizer=mine, assign=True)
    bare = saved(trained.state_dict(), tmp_path / "bare.pt")
    load_refused(bare, model, NoMatch, "no optimizer state", optimizer=mine)
