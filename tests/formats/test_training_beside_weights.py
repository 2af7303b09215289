"""What torchtitan saves: the model's keys on top, and between them the optimizer and the training's own state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from tests.support.cli import Run
from tests.support.dcp_folders import save_dcp

BESIDE = ["optimizer", "train_state", "lr_scheduler", "dataloader"]


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"tok.weight": torch.arange(6.0).view(3, 2), "norm.weight": torch.ones(2)}


@pytest.fixture
def folder(weights: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    slots = {f"state.{name}.exp_avg": torch.zeros_like(value) for name, value in weights.items()}
    slots |= {f"state.{name}.exp_avg_sq": torch.zeros_like(value) for name, value in weights.items()}
    groups = {f"param_groups.{name}.lr": 0.1 for name in weights}
    training: dict[str, Any] = {
        "optimizer": {**slots, **groups},
        "train_state": {"step": torch.tensor(2), "ntokens_seen": 7},
        "lr_scheduler": {"last_epoch": 2},
        "dataloader": {"dp_rank_0": b"bytes", "world_size": 1},
    }
    save_dcp({**weights, **training}, tmp_path / "step-2")
    return tmp_path / "step-2"


def test_each_part_is_shown_with_its_own_tensors(folder: Path, run: Run) -> None:
    shown = run("inspect", str(folder), "--depth", "0").out
    assert "model weights: 2 tensors" in shown
    assert "Adam state for 2 parameters: 4 tensors" in shown
    assert all(name in shown for name in BESIDE)


def test_the_mean_is_of_the_weights_alone(folder: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    done = ckptool.average([folder, folder], tmp_path / "mean.safetensors")
    assert done.facts["left_behind"] == BESIDE and done.facts["kept"] == {}
    found = load_file(tmp_path / "mean.safetensors")
    assert found.keys() == weights.keys() and all(found[name].equal(weights[name]) for name in weights)
