"""Weights that stand for a folder of several files: what is made of them names the files it leaves, `diff` those it did
not look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptool
from ckptool.errors import Ambiguous
from tests.support.part_files import random_weights, saved_below, trainer_folder

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


def test_a_folder_of_two_formats_is_not_damaged(tmp_path: Path, run: Callable[..., Any]) -> None:
    saved_below(random_weights("a.weight"), tmp_path / "pytorch_model.bin")
    ckptool.convert(tmp_path / "pytorch_model.bin", tmp_path / "model.safetensors")
    found = run("verify", str(tmp_path))
    assert found.code == 2 and "error[ambiguous]" in found.err and "damaged" not in found.out, found
    with pytest.raises(Ambiguous, match="2 checkpoints"):
        ckptool.verify(tmp_path)
    assert "OSError" not in run("doctor", str(tmp_path)).out
