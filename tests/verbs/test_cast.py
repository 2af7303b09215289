"""`cast`, and what it says about the values that it changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import Conflict, NoMatch, UsageError
from fixtures.make import make, mlp
from fixtures.traps import TRAPS
from tests.support.files import load, saved
from tests.support.same import assert_same_objects


@pytest.mark.parametrize("in_place", [False, True])
def test_a_training_checkpoint(in_place: bool, tmp_path: Path) -> None:
    file = make("training.pt", tmp_path)
    before = load(file)
    out = file if in_place else tmp_path / "out.pt"
    done = ckptool.cast(file, None if in_place else out, dtype="bfloat16", in_place=in_place, verify=True)
    after = torch.load(out, weights_only=True)
    for root in ("model_state_dict", "ema_state_dict"):
        before[root].update(
            {key: value.bfloat16() if value.is_floating_point() else value for key, value in before[root].items()}
        )
    assert_same_objects(before, after)
    mlp().bfloat16().load_state_dict(after["model_state_dict"])
    assert done.facts["dtype"] == "bf16" and done.facts["tensors"] == 16
    assert done.facts["bytes_after"] * 2 == done.facts["bytes_before"]


def test_what_was_lost(tmp_path: Path) -> None:
    state = {"a.w": torch.tensor([1.0, 1.001, 70000.0]), "b.w": torch.tensor([1e-9, 2.0]), "c.w": torch.tensor([0.5])}
    done = ckptool.cast(saved(state, tmp_path / "in.pt"), tmp_path / "out.pt", dtype="f16")
    facts = {fact["storage_of"]: fact for fact in done.facts["lossy"]}
    assert list(facts) == ["a.w", "b.w"] and facts["a.w"]["overflowed"] == 1 and facts["b.w"]["underflowed"] == 1
    assert (facts["a.w"]["elements"], facts["a.w"]["changed"]) == (3, 2)
    assert done.details[0].startswith("values rounded in 2 of 3 storages")
    assert "1 value became infinite or NaN" in done.details and "1 value became zero" in done.details
    exact = ckptool.cast(saved({"c.w": state["c.w"]}, tmp_path / "c.pt"), tmp_path / "exact.pt", dtype="f16")
    assert exact.details == ("no value was changed",) and exact.facts["lossy"] == []
    dry = ckptool.cast(tmp_path / "in.pt", tmp_path / "dry.pt", dtype="f16", dry_run=True)
    assert dry.details == ()


def test_only_exclude_and_at(tmp_path: Path) -> None:
    state = {"a.w": torch.ones(1), "a.norm": torch.ones(1), "b.w": torch.ones(1)}
    file = saved({"G": state, "D": {key: value.clone() for key, value in state.items()}}, tmp_path / "in.pt")
    ckptool.cast(f"{file}#D", tmp_path / "out.pt", dtype="bf16", only="*.w", exclude=["b.*"])
    half = {
        f"{root}/{key}"
        for root, part in load(tmp_path / "out.pt").items()
        for key, t in part.items()
        if t.dtype is torch.bfloat16
    }
    assert half == {"D/a.w"}
    with pytest.raises(NoMatch):
        ckptool.cast(file, tmp_path / "none.pt", dtype="bf16", only=["z*"])


def test_already_so_is_a_copy(tmp_path: Path) -> None:
    file = make("bf16.safetensors", tmp_path)
    done = ckptool.cast(file, tmp_path / "out.safetensors", dtype="bf16")
    assert done.how == "copy" and done.summary.startswith("already clean")
    assert (tmp_path / "out.safetensors").read_bytes() == file.read_bytes()


def test_safetensors(tmp_path: Path) -> None:
    import safetensors.torch

    file = make("model.safetensors", tmp_path)
    ckptool.cast(file, tmp_path / "out.safetensors", dtype="f16", verify=True)
    before, after = (safetensors.torch.load_file(path) for path in (file, tmp_path / "out.safetensors"))
    assert after.keys() == before.keys()
    assert all(
        torch.equal(after[key], value.half() if value.is_floating_point() else value) for key, value in before.items()
    )


def test_skipped_tensors_are_named(tmp_path: Path) -> None:
    state = {**TRAPS["09-qint8-per-tensor"](), "a.b": torch.ones(1)}
    done = ckptool.cast(saved(state, tmp_path / "in.pt"), tmp_path / "out.pt", dtype="bf16", verify=True)
    assert "w left as it is (quantized)" in done.details and done.facts["skipped"] == [
        {"path": "w", "kind": "quantized"}
    ]


def test_refusals(tmp_path: Path) -> None:
    w = torch.ones(2)
    file = saved({"a.w": w, "b.w": w}, tmp_path / "in.pt")
    with pytest.raises(Conflict, match="shares its storage"):
        ckptool.cast(file, tmp_path / "out.pt", dtype="f16", exclude=["b.*"])
    with pytest.raises(UsageError, match="is not a floating-point dtype"):
        ckptool.cast(file, tmp_path / "out.pt", dtype="int8")
    assert not (tmp_path / "out.pt").exists()


def test_what_cannot_be_cast_is_not_called_clean(tmp_path: Path) -> None:
    w = torch.eye(4)
    for kind in (w.to_sparse(), w.to_sparse_csr()):
        file = saved({"w": kind, "b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "in.pt")
        done = ckptool.cast(file, tmp_path / "out.pt", dtype="bf16", overwrite=True)
        assert "clean" not in done.summary and "1 tensor is left as before" in done.summary, done.summary
    done = ckptool.cast(
        saved({"b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "in.pt"), tmp_path / "c.pt", dtype="bf16"
    )
    assert done.summary.startswith("already clean")


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16", "bf16"])
def test_the_dtype_is_torchs_own_or_any_name_of_it(dtype: object, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    ckptool.cast(tmp_path / "a.pt", tmp_path / "b.pt", dtype=dtype)
    assert torch.load(tmp_path / "b.pt")["w"].dtype is torch.bfloat16
