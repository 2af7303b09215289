"""Models that learners, agents and dictionaries of people's own classes hold are found, and named by their address."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import UsageError


@dataclasses.dataclass
class Agent:
    net: Any
    steps: int = 1


class OwnDict(dict):  # type: ignore[type-arg]
    pass


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


WEIGHTS = module().state_dict()


def test_keys_of_weights_in_an_object_are_renamed_there(tmp_path: Path) -> None:
    torch.save({"agent": Agent(WEIGHTS)}, tmp_path / "a.pt")
    ckptool.rename(tmp_path / "a.pt", ["0.* => first.*"], out=tmp_path / "b.pt")
    agent = torch.load(tmp_path / "b.pt", weights_only=False)["agent"]
    assert type(agent) is Agent and torch.equal(agent.net["first.weight"], WEIGHTS["0.weight"])
    torch.save(OwnDict(WEIGHTS), tmp_path / "own.pt")
    with pytest.raises(UsageError, match="pickled with its class"):
        ckptool.rename(tmp_path / "own.pt", ["0.* => first.*"], out=tmp_path / "c.pt")
