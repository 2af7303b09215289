"""What doctor says of a folder that an engine wrote: one command writes the weights, and no copy of the rest first."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

import ckptool
from tests.support.cli import Run
from tests.support.dcp_folders import save_dcp


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = torch.nn.Linear(3, 2)
    state = {"model": model.state_dict(), "path": Path("x"), "step": 1}  # a Path is none of weights_only's values
    save_dcp(state, tmp_path / "step-1")
    return tmp_path / "step-1"


def test_one_command_writes_a_file_that_the_model_loads(folder: Path, run: Run) -> None:
    found = ckptool.doctor(folder)
    (command,) = [fix for each in found.findings for fix in each.fixes]
    program, *words = shlex.split(command)
    assert program == "ckptool" and f"{folder}#model" in words
    assert run(*words).code == 0
    out = words[words.index("-o") + 1]
    torch.nn.Linear(3, 2).load_state_dict(torch.load(out, weights_only=True))


def test_what_it_says_to_do_in_python_works(folder: Path, run: Run) -> None:
    line = next(line for line in run("doctor", str(folder)).out.splitlines() if "Or in Python: " in line)
    model = torch.nn.Linear(3, 2)
    exec(line.partition("Or in Python: ")[2], {"model": model, "ckptool": ckptool})
    assert model.weight.equal(ckptool.load(folder)["model"]["weight"])


def test_of_several_models_each_is_named(tmp_path: Path, run: Run) -> None:
    models = {"actor": torch.nn.Linear(3, 2), "critic": torch.nn.Linear(3, 1)}
    save_dcp({name: model.state_dict() for name, model in models.items()}, tmp_path / "x")
    said = run("doctor", str(tmp_path / "x")).out
    assert "2 sets of weights" in said and "x.fixed.pt#actor" in said
