"""`diff` of two files: what is compared with what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import UsageError
from fixtures.make import make
from tests.checkpoints import saved, weights


def test_a_file_and_its_copy(tmp_path: Path) -> None:
    file = make("training.pt", tmp_path)
    ckptool.convert(file, tmp_path / "out.pt")
    found = ckptool.diff(file, tmp_path / "out.pt")
    assert found.same and (found.left, found.right) == (str(file), str(tmp_path / "out.pt")) and found.remarks == ()


def test_a_training_file_and_the_weights_out_of_it(tmp_path: Path) -> None:
    file, out = make("training.pt", tmp_path), tmp_path / "out.safetensors"
    ckptool.convert(file, out)
    chose = ("took model_state_dict, the model; ema_state_dict is its average", f"compared model_state_dict of {file}")
    for left, right in ((file, out), (out, file)):
        found = ckptool.diff(left, right)
        assert found.same and found.tensors == 9 and found.remarks == chose
        assert "device" in found.not_compared


def test_row_29_several_models_are_not_chosen_from(tmp_path: Path) -> None:
    bare = saved(weights("a.w"), tmp_path / "bare.pt")
    with pytest.raises(UsageError, match="2 sets of model weights"):
        ckptool.diff(make("gan.pt", tmp_path), bare)


def test_parts(tmp_path: Path) -> None:
    file = saved({"G": weights("a.w", "b.w"), "D": weights("a.w", "b.w"), "epoch": 1}, tmp_path / "in.pt")
    assert ckptool.diff(f"{file}#G", f"{file}#D").same
    bare = saved(weights("a.w", "b.w"), tmp_path / "bare.pt")
    assert ckptool.diff(f"{file}#D", bare).same and ckptool.diff(bare, f"{file}#G").same
    one = saved({"net": weights("a.w", "b.w"), "epoch": 3}, tmp_path / "one.pt")
    found = ckptool.diff(f"{file}#D", one)
    assert found.same and found.remarks == (f"compared net of {one}",)
    assert ckptool.diff(one, f"{file}#D").same
    assert not ckptool.diff(f"{file}#epoch", f"{one}#epoch").same


def test_whole_files_where_both_are_alike(tmp_path: Path) -> None:
    a = saved({"model": weights("a.w"), "epoch": 1}, tmp_path / "a.pt")
    b = saved({"model": weights("a.w"), "epoch": 2}, tmp_path / "b.pt")
    found = ckptool.diff(a, b)
    assert [change.address for change in found.changed] == ["epoch"] and found.remarks == ()


def test_options(tmp_path: Path) -> None:
    a = saved({"a.w": torch.tensor([1.0, 2.0])}, tmp_path / "a.pt")
    b = saved({"module.a.w": torch.tensor([1.0, 2.001])}, tmp_path / "b.pt")
    assert not ckptool.diff(a, b).same
    assert not ckptool.diff(a, b, ignore=["prefix"]).same
    assert ckptool.diff(a, b, ignore=["prefix"], atol=0.01).same
    (change,) = ckptool.diff(a, b, ignore=["prefix"], stat=False).changed
    assert change.values is None
    (change,) = ckptool.diff(a, b, ignore=["prefix"], quick=True).changed
    assert change.values is not None and change.values.changed == 1


def test_row_17_what_was_stripped_is_the_same_but_for_the_prefix(tmp_path: Path) -> None:
    file = make("training.pt", tmp_path)
    ckptool.add_module(file, tmp_path / "out.pt")
    names = ckptool.open(f"{tmp_path / 'out.pt'}#optimizer_state_dict/param_groups/0/param_names").tree
    assert names[0] == "module.fc1.weight"
    assert ckptool.diff(file, tmp_path / "out.pt", ignore=["prefix"]).same
    assert not ckptool.diff(file, tmp_path / "out.pt").same


def test_optimizers_are_compared(tmp_path: Path) -> None:
    file = make("training.pt", tmp_path)
    ckptool.edit(file, tmp_path / "out.pt", set={"optimizer_state_dict/param_groups/0/lr": 0.5})
    (change,) = ckptool.diff(file, tmp_path / "out.pt").changed
    assert change.address == "optimizer_state_dict/param_groups/0/lr" and change.aspects["value"][1] == 0.5
