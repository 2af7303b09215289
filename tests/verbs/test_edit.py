"""`edit`: drop, set, and new values for tensors, together."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

import ckptool
from ckptool.errors import Conflict, NoMatch, UsageError
from fixtures.make import make
from tests.support.files import load
from tests.support.same import assert_same_objects


@pytest.mark.parametrize("in_place", [False, True])
def test_all_three(in_place: bool, tmp_path: Path) -> None:
    file = make("training.pt", tmp_path)
    before = load(file)
    numpy.save(tmp_path / "bias.npy", numpy.arange(4, dtype="f4"))
    out = file if in_place else tmp_path / "out.pt"
    done = ckptool.edit(
        file,
        None if in_place else out,
        drop=["optimizer*", "scheduler_state_dict"],
        set={"epoch": 9, "config/lr": 0.5, "note": {"by": "me"}},
        tensor={"model_state_dict/fc2.bias": str(tmp_path / "bias.npy"), "loss": numpy.array(1.5, "f4")},
        in_place=in_place,
        verify=True,
    )
    before["epoch"], before["config"]["lr"], before["note"] = 9, 0.5, {"by": "me"}
    before["model_state_dict"]["fc2.bias"] = torch.arange(4.0)
    before["loss"] = torch.tensor(1.5)
    del before["optimizer_state_dict"], before["scheduler_state_dict"]
    assert_same_objects(before, load(out))
    assert done.summary == "entries: 2 dropped, 3 set, 2 replaced"
    assert done.facts == {
        "dropped": ["optimizer_state_dict", "scheduler_state_dict"],
        "set": ["epoch", "config/lr", "note"],
        "replaced": ["model_state_dict/fc2.bias", "loss"],
    }


def test_dropped_tensors_leave_the_file(tmp_path: Path) -> None:
    file = make("training.pt", tmp_path)
    done = ckptool.edit(file, tmp_path / "out.pt", drop="ema_state_dict", verify=True)
    assert done.file_bytes < file.stat().st_size - 1000
    assert not [note for note in ckptool.inspect(tmp_path / "out.pt").notes if "unused" in note.code]


def test_refusals(tmp_path: Path) -> None:
    file, out = make("training.pt", tmp_path), tmp_path / "out.pt"
    with pytest.raises(UsageError, match="edit was given nothing to do"):
        ckptool.edit(file, out)
    with pytest.raises(NoMatch):
        ckptool.edit(file, out, drop=["nope"])
    with pytest.raises(UsageError, match="there is no nope"):
        ckptool.edit(file, out, tensor={"nope": numpy.zeros(1)})
    with pytest.raises(Conflict, match="shape"):
        ckptool.edit(file, out, tensor={"loss": numpy.zeros(2, "f4")})
    assert not out.exists()
