"""`edit`: drop, set, and new values for tensors, together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    "kind", [torch.as_tensor, numpy.asarray, str, Path, lambda tensor: ckptool.open("new.pt")["w"]]
)
def test_new_values_are_whatever_holds_them(
    kind: Callable[[torch.Tensor], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    new = torch.randn(2, 3)
    torch.save({"w": torch.zeros(2, 3), "epoch": 1}, "a.pt")
    torch.save({"w": new}, "new.pt")
    numpy.save("new.npy", new)
    given = kind("new.npy") if kind in (str, Path) else kind(new)  # type: ignore[arg-type]
    ckptool.edit("a.pt", "b.pt", tensor={"w": given}, set={"epoch": numpy.int64(4), "more": new})
    assert torch.equal(torch.load("b.pt")["w"], new) and torch.load("b.pt")["epoch"] == 4
    assert torch.equal(torch.load("b.pt")["more"], new)


def test_bfloat16_is_given_as_torch_has_it(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3).bfloat16()}, tmp_path / "a.pt")
    ckptool.edit(tmp_path / "a.pt", tmp_path / "b.pt", tensor={"w": torch.ones(3).bfloat16()})
    assert torch.equal(torch.load(tmp_path / "b.pt")["w"], torch.ones(3).bfloat16())
    with pytest.raises(UsageError, match=r"numpy\.asarray"):
        ckptool.edit(tmp_path / "a.pt", tmp_path / "c.pt", tensor={"w": [1, 2, 3]})
