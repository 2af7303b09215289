"""Weights that stand for a folder of several files: what is made of them names the files it leaves, `diff` those it did
not look at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import Ambiguous
from tests.support.part_files import FOLDERS, WITH_WEIGHTS, random_weights, saved_below, trainer_folder

WRITERS = {
    "convert": (),
    "slim": (),
    "remap": ("--to", "cpu"),
    "cast": ("--dtype", "bf16"),
    "rename": ("* => model.*",),
    "edit": ("--drop", "*.weight"),
    "strip-module": (),
    "add-module": (),
}


@pytest.mark.parametrize("kind", WITH_WEIGHTS)
def test_the_files_beside_the_weights_are_named_as_left_behind(
    kind: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    make, _, member = FOLDERS[kind]
    folder = make(tmp_path / "step-500")
    name = member.split("/")[0]
    out = tmp_path / "out.safetensors"
    found = run("convert", str(folder), "-o", str(out), "--json")
    said = [note["message"] for note in json.loads(found.out)["notes"] if note["code"] == "members"]
    assert found.code == 0 and len(said) == 1 and "left out" in said[0] and name in said[0], found
    assert "everything" not in run("convert", str(folder), "-n", "-o", str(tmp_path / "out.pt")).out


@pytest.mark.parametrize("verb", WRITERS)
def test_every_writer_of_the_weights_says_what_it_leaves(verb: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    folder = trainer_folder(tmp_path / "step-500")
    out = tmp_path / "out.safetensors"
    found = run(verb, str(folder), *WRITERS[verb], "-o", str(out))
    assert found.code == 0 and "left out" in found.out and "optimizer.pt" in found.out, found
    alone = run(verb, str(folder / "model.safetensors"), *WRITERS[verb], "-f", "-o", str(out))
    assert alone.code == 0 and "optimizer.pt" not in alone.out, alone


def test_what_is_changed_in_place_leaves_nothing(tmp_path: Path, run: Callable[..., Any]) -> None:
    folder = trainer_folder(tmp_path / "step-500")
    found = run("add-module", str(folder), "--in-place")
    assert found.code == 0 and "left out" not in found.out, found


def test_diff_says_that_it_compared_the_weights_alone(tmp_path: Path, run: Callable[..., Any]) -> None:
    one = trainer_folder(tmp_path / "one")
    shutil.copytree(one, other := tmp_path / "other")
    state = torch.load(other / "optimizer.pt")
    torch.save({"another": state}, other / "optimizer.pt")
    found = run("diff", str(one), str(other))
    assert found.code == 0 and found.out.count("optimizer.pt") == 2 and "compared the weights" in found.out, found
    assert "optimizer.pt" not in run("diff", str(one / "model.safetensors"), str(other / "model.safetensors")).out


def test_a_folder_of_two_formats_is_not_damaged(tmp_path: Path, run: Callable[..., Any]) -> None:
    saved_below(random_weights("a.weight"), tmp_path / "pytorch_model.bin")
    ckptool.convert(tmp_path / "pytorch_model.bin", tmp_path / "model.safetensors")
    found = run("verify", str(tmp_path))
    assert found.code == 2 and "error[ambiguous]" in found.err and "damaged" not in found.out, found
    with pytest.raises(Ambiguous, match="2 checkpoints"):
        ckptool.verify(tmp_path)
    assert "OSError" not in run("doctor", str(tmp_path)).out
