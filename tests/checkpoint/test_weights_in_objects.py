"""Models that learners, agents and dictionaries of people's own classes hold are found, and named by their address."""

from __future__ import annotations

import collections
import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptool
from ckptool.conventions.state_dicts import find_state_dicts
from ckptool.errors import UsageError
from ckptool.formats import read


class Learner:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


@dataclasses.dataclass
class Agent:
    net: Any
    steps: int = 1


class OwnDict(dict):  # type: ignore[type-arg]
    pass


class OwnOrdered(collections.OrderedDict):  # type: ignore[type-arg]
    pass


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


WEIGHTS = module().state_dict()
HELD: dict[str, tuple[Any, str]] = {
    "module in an object": (lambda: Learner(lr=0.1, model=module()), "model"),
    "weights in an object": (lambda: Learner(lr=0.1, model=WEIGHTS), "model"),
    "dataclass": (lambda: Agent(WEIGHTS), "net"),
    "namespace": (lambda: types.SimpleNamespace(policy=WEIGHTS, cfg={"a": 1}), "policy"),
    "own dictionary of parts": (lambda: OwnDict(epoch=1, generator=WEIGHTS), "generator"),
    "own dictionary": (lambda: OwnDict(WEIGHTS), ""),
    "own ordered dictionary": (lambda: OwnOrdered(WEIGHTS), ""),
    "object in an object": (lambda: Learner(agent=Agent(module())), "agent/net"),
    "object in a list": (lambda: Learner(agents=[1, Agent(WEIGHTS)]), "agents/1/net"),
}


@pytest.mark.parametrize("name", HELD)
def test_a_model_in_an_object_is_found_and_converted(name: str, tmp_path: Path) -> None:
    make, place = HELD[name]
    for top in ("", "learner"):
        held = make()
        torch.save({top: held, "step": 1} if top else held, tmp_path / "a.pt")
        address = "/".join(part for part in (top, place) if part)
        assert [root.address for root in find_state_dicts(read(tmp_path / "a.pt")) if root.is_model] == [address]
        done = ckptool.convert(tmp_path / "a.pt", tmp_path / "o.safetensors", overwrite=True)
        assert not top or "step" in done.facts["left_behind"]
        assert load_file(tmp_path / "o.safetensors").keys() == WEIGHTS.keys()
        named = ckptool.convert(f"{tmp_path / 'a.pt'}#{address}", tmp_path / "o.safetensors", overwrite=True)
        assert named and load_file(tmp_path / "o.safetensors").keys() == WEIGHTS.keys()


def test_keys_of_weights_in_an_object_are_renamed_there(tmp_path: Path) -> None:
    torch.save({"agent": Agent(WEIGHTS)}, tmp_path / "a.pt")
    ckptool.rename(tmp_path / "a.pt", ["0.* => first.*"], out=tmp_path / "b.pt")
    agent = torch.load(tmp_path / "b.pt", weights_only=False)["agent"]
    assert type(agent) is Agent and torch.equal(agent.net["first.weight"], WEIGHTS["0.weight"])
    torch.save(OwnDict(WEIGHTS), tmp_path / "own.pt")
    with pytest.raises(UsageError, match="pickled with its class"):
        ckptool.rename(tmp_path / "own.pt", ["0.* => first.*"], out=tmp_path / "c.pt")


def test_several_are_listed_and_what_is_no_model_is_not_taken_for_one(tmp_path: Path) -> None:
    torch.save(Learner(actor=WEIGHTS, critic=module()), tmp_path / "two.pt")
    with pytest.raises(UsageError, match="2 sets of model weights: actor"):
        ckptool.convert(tmp_path / "two.pt", tmp_path / "o.safetensors")
    model = module()
    others = {
        "graph": Learner(x=torch.ones(3), edge_index=torch.ones(2, 4)),
        "optimizer": torch.optim.Adam(model.parameters()),
        "callbacks": Learner(callbacks=[Learner(best={"loss.weight": torch.ones(1)})]),
        "samples": Learner(items=[{"image": torch.ones(3, 3), "label": torch.ones(1)}]),
        "plain": OwnDict(epoch=1, seen={"a": torch.ones(1), "b": 1}),
    }
    for name, other in others.items():
        torch.save(other, tmp_path / f"{name}.pt")
        assert not [root for root in find_state_dicts(read(tmp_path / f"{name}.pt")) if root.is_model], name
