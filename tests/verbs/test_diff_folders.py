"""Folders of engines against the files that their own converters write, and against each other."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.cli import Run
from tests.support.engine_cases import ROOT

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
