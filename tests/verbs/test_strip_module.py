"""`strip-module` on what wrappers leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import Conflict, NoMatch, UsageError
from fixtures.make import make, mlp
from tests.support.files import load, saved, weights
from tests.support.same import assert_same_objects

WRAPPED = "dp.pt compiled.pt dp_compiled.pt compiled_dp.pt fsdp.pt deepspeed.pt".split()


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_result_loads_into_the_bare_model(name: str, in_place: bool, tmp_path: Path) -> None:
    file = make(name, tmp_path)
    before = load(file)
    out = file if in_place else tmp_path / "out.pt"
    done = ckptool.strip_module(file, None if in_place else out, in_place=in_place, verify=True)
    state = torch.load(out, weights_only=True)
    model = mlp()
    model.load_state_dict(state, strict=True)
    assert list(state) == list(model.state_dict()) and state._metadata == model.state_dict()._metadata
    assert_same_objects(list(before.values()), list(state.values()))
    assert done.facts["changed"] == done.facts["keys"] == 9 and done.summary == "9 of 9 keys renamed"


def test_a_training_checkpoint(tmp_path: Path) -> None:
    file, out = make("training_sgd.pt", tmp_path), tmp_path / "out.pt"
    done = ckptool.strip_module(file, out, verify=True)
    before, after = load(file), load(out)
    assert list(after) == list(before)
    mlp().load_state_dict(after["state_dict"])
    for key in ("epoch", "arch", "best_acc1", "optimizer"):
        assert_same_objects(before[key], after[key])
    assert done.facts["roots"] == [{"root": "state_dict", "changed": 9, "keys": 9}]
    assert "module.fc1.weight → fc1.weight" in done.details


def test_one_root_by_its_address(tmp_path: Path) -> None:
    file = saved({"G": weights("module.a.w"), "D": weights("module.a.w")}, tmp_path / "in.pt")
    ckptool.strip_module(f"{file}#D", tmp_path / "a.pt")
    ckptool.strip_module(file, tmp_path / "b.pt", at="D")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    assert [list(root) for root in load(tmp_path / "a.pt").values()] == [["module.a.w"], ["a.w"]]
    done = ckptool.strip_module(file, tmp_path / "c.pt")
    assert done.details[:2] == ("G: 1 of 1 key", "D: 1 of 1 key")


def test_refusals(tmp_path: Path) -> None:
    file, out = saved(weights("module.a.w", "b.w"), tmp_path / "in.pt"), tmp_path / "out.pt"
    with pytest.raises(Conflict, match="1 of 2 keys"):
        ckptool.strip_module(file, out)
    with pytest.raises(NoMatch, match=r"no key begins with 'net\.'"):
        ckptool.strip_module(file, out, prefix="net.")
    with pytest.raises(UsageError, match="there is no x"):
        ckptool.strip_module(file, out, at="x")
    with pytest.raises(UsageError, match="the prefix is empty"):
        ckptool.strip_module(file, out, prefix="")
    assert not out.exists()
    ckptool.strip_module(file, out, partial=True)
    assert list(load(out)) == ["a.w", "b.w"]


def test_safetensors(tmp_path: Path) -> None:
    import safetensors.torch

    file = tmp_path / "in.safetensors"
    state = weights("module.b.w", "module.a.w")
    safetensors.torch.save_file(state, file, metadata={"format": "pt", "note": "kept"})
    ckptool.strip_module(file, tmp_path / "out.safetensors", verify=True)
    again = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert sorted(again) == ["a.w", "b.w"] and torch.equal(again["a.w"], state["module.a.w"])
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as opened:
        assert opened.metadata()["note"] == "kept" and opened.metadata()["format"] == "pt"
    ckptool.strip_module(file, in_place=True, verify=True)
    assert file.read_bytes() == (tmp_path / "out.safetensors").read_bytes()
