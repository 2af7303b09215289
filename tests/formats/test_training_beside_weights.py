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


def test_the_weights_are_taken_and_the_rest_is_listed(
    folder: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    done = ckptool.convert(folder, tmp_path / "model.safetensors")
    assert done.facts["tensors"] == 2 and done.facts["left_behind"] == BESIDE
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == weights.keys() and all(found[name].equal(weights[name]) for name in weights)
    assert ckptool.diff(folder, tmp_path / "model.safetensors").same


def test_what_no_name_says_is_training_is_not_left_behind(tmp_path: Path) -> None:
    """The extra state of a module holds tensors that are the model's."""
    save_dcp(
        {"a.weight": torch.ones(2), "b.weight": torch.ones(2), "a.extra": {"scale": torch.ones(1)}}, tmp_path / "x"
    )
    with pytest.raises(ckptool.CkptoolError, match=r"a.extra \(a dictionary with 1 tensor\)"):
        ckptool.convert(tmp_path / "x", tmp_path / "model.safetensors")


def test_each_part_is_shown_with_its_own_tensors(folder: Path, run: Run) -> None:
    shown = run("inspect", str(folder), "--depth", "0").out
    assert "model weights: 2 tensors" in shown
    assert "Adam state for 2 parameters: 4 tensors" in shown
    assert all(name in shown for name in BESIDE)


def test_names_of_the_training_are_no_keys(folder: Path, tmp_path: Path) -> None:
    wrapped = ckptool.add_module(folder, tmp_path / "wrapped.dcp")
    assert (wrapped.facts["changed"], wrapped.facts["keys"]) == (2, 2)
    tree = ckptool.open(tmp_path / "wrapped.dcp").tree
    assert [key for key in tree if not key.startswith("module.")] == BESIDE
    assert set(tree["optimizer"]["state"]) == {"module.tok.weight", "module.norm.weight"}
    note = next(note for note in ckptool.inspect(tmp_path / "wrapped.dcp").notes if note.code == "prefix-module")
    assert note.message.startswith("2 of 2 keys") and "--partial" not in str(note.fix)
    ckptool.strip_module(tmp_path / "wrapped.dcp", tmp_path / "bare.dcp")
    assert ckptool.diff(folder, tmp_path / "bare.dcp").same


def test_a_file_of_tensors_names_the_command_for_the_weights(folder: Path, tmp_path: Path, run: Run) -> None:
    refused = run("cast", str(folder), "--dtype", "bf16", "-o", str(tmp_path / "half.safetensors")).err
    assert f"Write only the weights, then change those: ckptool convert {folder} -o OUT.safetensors" in refused
    assert "--all" not in refused and "--exclude" not in refused


def test_a_folder_that_is_written_is_called_one(folder: Path, tmp_path: Path, run: Run) -> None:
    assert "new folder)" in run("convert", str(folder), "-o", str(tmp_path / "x.dcp")).out
    assert "new folder)" in run("convert", str(folder), "-o", f"{tmp_path}/shards/").out
    assert "in a compact file" in run("convert", str(folder), "-o", str(tmp_path / "x.pt")).out
    assert "compact file" not in run("convert", str(folder), "-o", str(tmp_path / "y.dcp")).out


def test_an_optimizer_in_the_form_asked_for_is_named(folder: Path, tmp_path: Path, run: Run) -> None:
    out = run("convert", str(folder), "--optimizer-as", "names", "-o", str(tmp_path / "x.pt")).out
    assert "  optimizer: 2 parameters by name, as it was\n" in out


def test_the_number_of_a_step_is_not_one_of_an_epoch(folder: Path) -> None:
    (found,) = ckptool.scan(folder.parent).files
    assert (found.step, found.epoch) == (2, None)


def test_the_mean_is_of_the_weights_alone(folder: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    done = ckptool.average([folder, folder], tmp_path / "mean.safetensors")
    assert done.facts["left_behind"] == BESIDE and done.facts["kept"] == {}
    found = load_file(tmp_path / "mean.safetensors")
    assert found.keys() == weights.keys() and all(found[name].equal(weights[name]) for name in weights)
