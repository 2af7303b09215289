"""States that make a library's own class work without an end when it is loaded, or change what was made before."""

from __future__ import annotations

import collections
import random
from pathlib import Path
from typing import Any

import torch

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
