"""An in-place edit that was damaged later, or cut: the state before it or the new one, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import Corrupt, Truncated
from ckptool.verbs.recover import Recovery, recover
from tests.support.files import load, saved, written


def edited(path: Path, edits: int) -> list[bytes]:
    """A file before and after each of some in-place edits; its epoch is how many there were."""
    states = [saved({"model": {"w": torch.arange(6.0)}, "epoch": 0}, path).read_bytes()]
    for number in range(1, edits + 1):
        ckptool.edit(path, set={"epoch": number}, in_place=True)
        states.append(path.read_bytes())
    return states


def recovered(data: bytes, folder: Path) -> tuple[Recovery, Any]:
    """The report, and what torch loads of what was written."""
    done = recover(written(data, folder / "d.pt"), folder / "o.pt", overwrite=True)
    return done, load(folder / "o.pt")


def flipped(data: bytes, *places: int) -> bytes:
    return bytes(byte ^ (place in places) for place, byte in enumerate(data))


def test_an_edit_that_was_cut_is_undone_or_refused(tmp_path: Path) -> None:
    """Whatever is told to do about it works."""
    before, after = edited(tmp_path / "e.pt", 1)
    for data in (
        before + bytes(len(after) - len(before)),
        *(after[:end] for end in range(len(before) + 1, len(after), 97)),
    ):
        try:
            done, tree = recovered(data, tmp_path)
        except Truncated:
            with pytest.raises(Truncated) as caught:
                ckptool.open(tmp_path / "d.pt")
            assert "recover" not in caught.value.fix
        else:
            assert done.complete and tree["epoch"] == 0 and torch.equal(tree["model"]["w"], torch.arange(6.0))


def test_an_edit_whose_pickle_is_whole_is_kept(tmp_path: Path) -> None:
    *_, data = edited(tmp_path / "e.pt", 2)
    at = data.rindex(b"PK\x07\x08", 0, data.rindex(b"PK\x01\x02"))  # behind the newest pickle
    for place in range(at, at + 16):
        assert recovered(flipped(data, place), tmp_path)[1]["epoch"] == 2, place - at
    with pytest.raises(Corrupt, match="its pickle is lost"):
        recovered(flipped(data, at - 1), tmp_path)
