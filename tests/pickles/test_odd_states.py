"""States that make a library's own class work without an end when it is loaded, or change what was made before."""

from __future__ import annotations

import collections
import inspect
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._utils import _rebuild_parameter_with_state
from torch.nn import Parameter

import ckptool
from tests.support.files import saved


class Made:
    """Pickles as an object of a class, made with these arguments and given this state."""

    def __init__(self, made: Any, arguments: tuple[Any, ...], state: Any = None) -> None:
        self.parts = made, arguments, state

    def __reduce__(self) -> Any:
        return self.parts


def test_states_of_generators_and_layers_are_those_of_their_classes(tmp_path: Path) -> None:
    layer = torch.nn.LSTM
    odd = {
        "numbers": Made(random.Random, (), (2, range(10**12), None)),
        "few": Made(random.Random, (), (3, (1, 2, 3), None)),
        "words": Made(random.Random, (), (2, ("a",) * 625, None)),
        "layers": Made(layer.__new__, (layer,), {"num_layers": 10**9}),
        "counted": Made(layer.__new__, (layer,), collections.Counter(num_layers=10**9)),
    }
    for name, value in odd.items():
        (row,) = ckptool.scan(saved({"x": value}, tmp_path / f"{name}.pt")).files
        assert row.state == "unsafe-global", name
    usual = {"random": random.Random(3), "layer": layer(2, 3), "used": random.Random(4)}
    usual["used"].gauss(0, 1)
    (row,) = ckptool.scan(saved(usual, tmp_path / "usual.pt")).files
    assert row.is_good


@pytest.mark.filterwarnings("ignore:volatile was removed")
def test_attributes_that_a_tensor_has_are_not_set_by_a_state(tmp_path: Path) -> None:
    """Each attribute that `torch.nn.Parameter` itself lets be set, in a state; `data` would change the values."""
    value = torch.full((3,), 7.0)
    of_tensors = [name for name in dir(Parameter) if hasattr(type(inspect.getattr_static(Parameter, name)), "__set__")]
    settable = [name for name in of_tensors if _can_be_set(name, value) and name != "requires_grad"]
    assert {"data", "grad", "_backward_hooks"} <= {*settable}
    for name in [*settable, "ds_id"]:
        for number, state in enumerate(({name: value}, (None, {name: value}), collections.Counter({name: value}))):
            made = Made(_rebuild_parameter_with_state, (torch.zeros(3), True, OrderedDict(), state))
            (row,) = ckptool.scan(saved({"w": made}, tmp_path / f"{name}{number}.pt")).files
            inert = name == "ds_id" and number < 2
            assert row.is_good if inert else row.state == "unsafe-global", (name, number)
    loaded = torch.load(tmp_path / "data0.pt", weights_only=False)["w"]
    assert torch.equal(loaded, value), "or the trap is none"


def _can_be_set(name: str, value: torch.Tensor) -> bool:
    try:
        setattr(Parameter(torch.zeros(3)), name, value)
    except (AttributeError, TypeError, RuntimeError):
        return False
    return True
