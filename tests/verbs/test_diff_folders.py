"""Folders of engines against the files that their own converters write, and against each other."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import ckptool
from ckptool.render.lines import Style
from tests.support.cli import Run
from tests.support.dcp_folders import save_dcp
from tests.support.engine_cases import ROOT
from tests.support.rank_files import divided, save_ranks

ZERO = ROOT / "deepspeed-zero2-groups"  # a run in f32


def test_a_zero_folder_is_the_same_as_what_zero_to_fp32_makes_of_it(tmp_path: Path, run: Run) -> None:
    file = str(ZERO / "weights.safetensors")
    assert all(value.dtype != torch.bfloat16 for value in load_file(file).values())
    done = run("diff", ZERO / "checkpoint", file)
    assert done.code == 0 and done.out.startswith("same: "), done
    weights = load_file(file)
    weights["wide.weight"][2, 1] += 1
    save_file(weights, tmp_path / "other.safetensors")
    done = run("diff", ZERO / "checkpoint", tmp_path / "other.safetensors")
    assert done.code == 1 and "1 of 15 tensors changed" in done.out and "wide.weight" in done.out, done


def test_it_is_told_in_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a terminal shows it, but for paths that are longer."""
    shutil.copytree(ZERO / "checkpoint", tmp_path / "run")
    shutil.copy(ZERO / "weights.safetensors", tmp_path / "fp32.safetensors")
    monkeypatch.chdir(tmp_path)
    text = Style(width=80).page(str(ckptool.diff("run", "fp32.safetensors")))
    assert (
        text
        == """\
same: 16 tensors, byte for byte

compared module of run

not compared (one of the containers does not record it): order, ties, device,
    strides, requires_grad, metadata"""
    )


def test_folders_of_different_engines_with_the_same_weights_are_the_same(tmp_path: Path, run: Run) -> None:
    """ZeRO of DeepSpeed; torch's tables, ranks' files of DTensors, and the shards that ckptool writes."""
    zero = ROOT / "deepspeed-zero1"
    weights = load_file(zero / "weights.safetensors")

    def share(rank: int, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        return {name: divided(value, mesh, [Shard(0)]) if value.ndim else value for name, value in weights.items()}

    folders = [
        zero / "checkpoint",
        save_dcp({"model": weights}, tmp_path / "dcp"),
        save_ranks(tmp_path / "ranks", share, (3,)),
        tmp_path / "shards",
    ]
    assert run("convert", folders[1], "-o", f"{folders[3]}/", "--shard-size", "200B").code == 0
    for left, right in itertools.permutations(folders, 2):
        done = run("diff", left, right)
        assert done.code == 0 and done.out.startswith(f"same: {len(weights)} tensors, byte for byte\n"), done
    weights["scale"] += 1
    other = save_dcp({"model": weights}, tmp_path / "other")
    for folder in folders:
        done = run("diff", folder, other)
        assert done.code == 1 and f"1 of {len(weights)} tensors changed" in done.out, done
