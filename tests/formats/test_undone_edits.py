"""An in-place edit of which not all reached the disk, or that was damaged later: the newest whole state stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import ckptool
from ckptool.formats import damaged
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


def test_an_edit_of_which_not_all_was_written_is_undone(tmp_path: Path) -> None:
    """Whatever block of it did not reach the disk: its pickle, its directory, or all from some byte on."""
    before, after = edited(tmp_path / "e.pt", 1)
    at = after.index(b"PK\x07\x08", len(before)) - 20
    torn = [after[:at] + bytes(16) + after[at + 16 :], before + bytes(len(after) - len(before))]
    for data in (*torn, *(after[:end] for end in range(len(before) + 1, len(after), 97))):
        done, tree = recovered(data, tmp_path)
        assert done.how == damaged.UNDONE and done.complete
        assert tree["epoch"] == 0 and torch.equal(tree["model"]["w"], torch.arange(6.0))


def test_an_edit_whose_pickle_is_whole_is_kept(tmp_path: Path) -> None:
    *_, data = edited(tmp_path / "e.pt", 2)
    at = data.rindex(b"PK\x07\x08", 0, data.rindex(b"PK\x01\x02"))  # behind the newest pickle
    for place in (at - 1, *range(at, at + 16)):
        done, tree = recovered(flipped(data, place), tmp_path)
        assert tree["epoch"] == (1 if place < at else 2), place - at
        assert (done.how == damaged.UNDONE) is (place < at)
