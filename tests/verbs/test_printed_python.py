"""What `doctor` prints as Python loads the weights, in a real Python that trusts the file: torch is the judge."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.cli import Run


class Learner:
    """A trainer's object; the test module is where its class is found."""

    def __init__(self, model: Any) -> None:
        self.model, self.rate = model, 0.1


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


FILES = {
    "module in a dictionary": lambda: {"model": model(), "epoch": 1},
    "state dict in a dictionary": lambda: {"model": model().state_dict(), "epoch": 1},
    "nested": lambda: {"train": {"state dict": model().state_dict()}, "epoch": 1},
    "list": lambda: [model().state_dict(), 1],
    "a quote and a newline": lambda: {"it's\nhere": model().state_dict(), "epoch": 1},
    "module of an object": lambda: {"learner": Learner(model()), "epoch": 1},
    "state dict of an object": lambda: {"learner": Learner(model().state_dict()), "epoch": 1},
    "the object alone": lambda: Learner(model()),
    "simple namespace": lambda: {"all": types.SimpleNamespace(net=model().state_dict()), "epoch": 1},
}


@pytest.mark.parametrize("name", FILES)
def test_a_python_line_loads_the_weights(name: str, tmp_path: Path, run: Run) -> None:
    torch.save(FILES[name](), tmp_path / "a.pt")
    said = run("doctor", tmp_path / "a.pt").out
    lines = re.findall(r"in Python: (model\.load_state_dict\(.*\))$", said, re.MULTILINE | re.IGNORECASE)
    assert lines, said
    for line in lines:
        fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        checkpoint = torch.load(tmp_path / "a.pt", weights_only=False)
        exec(line, {"model": fresh, "checkpoint": checkpoint})
        assert all(
            torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), model().state_dict().values(), strict=True)
        )
