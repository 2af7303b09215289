"""`ckptool.open`, and which part of which file `FILE#address` names."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, UsageError
from ckptool.formats.opening import split
from tests.support.files import saved, weights


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


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an item": lambda opened: opened["a"].__setitem__("x", 1),
    "an item in a list": lambda opened: opened["a"]["list"][1].__setitem__("y", 3),
    "a deletion": lambda opened: opened["a"].__delitem__("x"),
    "update": lambda opened: opened["a"].update(x=2),
    "|=": lambda opened: opened["a"].__ior__({"z": 1}),
    "setdefault": lambda opened: opened["state_dict"].setdefault("z", 1),
    "pop": lambda opened: opened["state_dict"].pop("w"),
    "append": lambda opened: opened["a"]["list"].append(1),
    "sort": lambda opened: opened["a"]["list"].sort(),
    "an item of a list": lambda opened: opened["a"]["list"].__setitem__(0, 2),
    "at the top": lambda opened: opened.__setitem__("z", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_open_checkpoint_refuses_changes(change: str, tmp_path: Path) -> None:
    state = OrderedDict(w=torch.ones(2))
    opened = ckptool.open(saved({"a": {"x": 0, "list": [1, {"y": 2}]}, "state_dict": state}, tmp_path / "x.pt"))
    with pytest.raises((TypeError, AttributeError), match=r"read-only|__setitem__"):
        CHANGES[change](opened)
    assert opened["a"] == {"x": 0, "list": [1, {"y": 2}]} and list(opened["state_dict"]) == ["w"]


def test_copies_of_what_is_in_a_checkpoint_can_be_changed_and_saved(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    opened = ckptool.open(saved({"a": {"x": 0, "list": [1, {"y": 2}]}, "state_dict": state}, tmp_path / "x.pt"))
    changed = copy.deepcopy(opened["a"])
    changed["list"][1]["y"] = dict(opened["a"])["x"]
    assert (
        type(changed) is dict
        and opened["a"]["list"][1]["y"] == 2
        and json.loads(json.dumps(opened["a"])) == opened["a"]
    )
    ckptool.save({"a": changed, "state_dict": opened["state_dict"]}, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["a"] == {"x": 0, "list": [1, {"y": 0}]} and found["state_dict"]._metadata == state._metadata


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
        "import ckptool, ckptool.checkpoint.files, sys\n"
        "opened = ckptool.open(sys.argv[1])\n"
        "for name in list(vars(ckptool.checkpoint.files)): vars(ckptool.checkpoint.files)[name] = None\n"
        "del opened\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
