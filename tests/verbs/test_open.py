"""`ckptool.open`, and which part of which file `FILE#address` names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, UsageError
from ckptool.verbs.opening import split
from tests.checkpoints import saved, weights


def test_an_open_file_is_a_lazy_mapping(tmp_path: Path) -> None:
    opened = ckptool.open(
        saved({"state_dict": {"fc.weight": torch.arange(6.0).reshape(2, 3)}, "epoch": 3}, tmp_path / "x.pt")
    )
    assert list(opened) == ["state_dict", "epoch"] and len(opened) == 2 and "epoch" in opened and opened["epoch"] == 3
    entry = opened["state_dict"]["fc.weight"]
    assert (entry.shape, entry.dtype.name, entry.location) == ((2, 3), "f32", "cpu")
    assert entry.numpy().tolist() == [[0, 1, 2], [3, 4, 5]] and torch.equal(
        entry.torch(), torch.arange(6.0).reshape(2, 3)
    )
    assert repr(opened) == f"<checkpoint {tmp_path / 'x.pt'} (torch-zip)>" and repr(entry) == "<tensor f32[2, 3]>"


def test_a_part(tmp_path: Path) -> None:
    file = saved({"models": [weights("a.w"), weights("b.w")]}, tmp_path / "x.pt")
    assert list(ckptool.open(f"{file}#models/1").tree) == ["b.w"]
    assert ckptool.open(f"{file}#").tree.keys() == {"models"}
    with pytest.raises(UsageError, match="there is no 7 in models"):
        ckptool.open(f"{file}#models/7")


def test_a_file_under_the_whole_name_wins(tmp_path: Path) -> None:
    saved({"a": 1}, tmp_path / "x.pt")
    whole = saved({"b": 2}, tmp_path / "x.pt#a")
    assert split(whole) == (str(whole), None) and ckptool.open(whole)["b"] == 2
    assert split(f"{whole}#b") == (str(whole), "b")
    whole.unlink()
    assert split(whole) == (str(tmp_path / "x.pt"), "a") and ckptool.open(whole).tree == 1
    assert split("missing.pt#a/b#c") == ("missing.pt", "a/b#c")


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello")
    for name, code in (("missing.pt", "io"), (".", "not-a-checkpoint"), ("text.pt", "not-a-checkpoint")):
        with pytest.raises(CkptoolError) as caught:
            ckptool.open(tmp_path / name)
        assert caught.value.code == code, caught.value


def test_a_file_that_is_still_open_when_the_interpreter_ends_makes_no_noise(tmp_path: Path) -> None:
    """Where a library keeps the main module alive, Python first empties the modules, and then the checkpoint goes."""
    path = saved(weights("w"), tmp_path / "x.pt")
    code = (
        "import ckptool, ckptool.files, sys\n"
        "opened = ckptool.open(sys.argv[1])\n"
        "for name in list(vars(ckptool.files)): vars(ckptool.files)[name] = None\n"
        "del opened\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
