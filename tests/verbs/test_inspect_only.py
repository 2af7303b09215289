"""`inspect --only` and `-q`: what is chosen, what is read, what a script gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckptool
from tests.support.cli import Run


@pytest.fixture
def file(tmp_path: Path) -> str:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "notes": {"lr": 0.1}}
    torch.save(saved, tmp_path / "m.pt")
    return str(tmp_path / "m.pt")


def test_statistics_are_of_what_is_chosen(tmp_path: Path, run: Run) -> None:
    torch.save({"m": {"a.weight": torch.ones(9), "b.weight": torch.full((9,), torch.nan)}}, tmp_path / "m.pt")
    one = ckptool.inspect(tmp_path / "m.pt", stats=True, only="a.weight")
    assert list(one.statistics) == ["m/a.weight"] and one.statistics["m/a.weight"].mean == 1
    assert not one.notes and ckptool.inspect(tmp_path / "m.pt", stats=True).notes[0].code == "non-finite"


def test_verify_names_the_files_that_are_not_fine(file: str, tmp_path: Path, run: Run) -> None:
    cut = tmp_path / "cut.pt"
    cut.write_bytes(Path(file).read_bytes()[:-40])
    found = run("verify", "-q", file, str(cut))
    assert (found.code, found.out.splitlines()) == (1, [str(cut)])
    assert (run("verify", "-q", file).code, run("verify", "-q", file).out) == (0, "")
