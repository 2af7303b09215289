"""`inspect`, with and without statistics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.support.files import saved
from tests.support.looped import looped


def test_a_listing(tmp_path: Path) -> None:
    file = make("training.pt", tmp_path)
    found = ckptool.inspect(file)
    assert (found.file, found.container, found.bytes) == (
        str(file),
        "torch-zip",
        file.stat().st_size,
    )
    assert found.statistics == {} and found.notes == ()
    part = ckptool.inspect(f"{file}#model_state_dict")
    assert len(part.tensors) == 9 and part.at == "model_state_dict"
    assert [row.address for row in part.tensors] == [
        row.address for row in ckptool.inspect(file, at="model_state_dict").tensors
    ]


def test_statistics(tmp_path: Path) -> None:
    w = torch.tensor([[1.0, -2.0], [0.0, 5.0]])
    state = {
        "w": w,
        "tied": w,
        "n": torch.tensor([1, 2, 3]),
        "none": torch.empty(0),
        "q": TRAPS["11-sparse-coo"]()["w"],
    }
    found = ckptool.inspect(saved(state, tmp_path / "in.pt"), stats=True)
    assert list(found.statistics) == ["w", "tied", "n"] and found.statistics["w"] is found.statistics["tied"]
    values = found.statistics["w"]
    assert (values.count, values.min, values.max, values.mean, values.zeros) == (4, -2, 5, 1, 1)
    assert values.std == pytest.approx(w.std().item()) and values.norm == pytest.approx(w.norm().item())


def test_a_note_on_what_is_not_finite(tmp_path: Path) -> None:
    state = {"a.w": torch.tensor([1.0, float("nan")]), "b.w": torch.tensor([float("inf")]), "c.w": torch.ones(1)}
    file = saved(state, tmp_path / "in.pt")
    assert [note.code for note in ckptool.inspect(file).notes] == []
    (note,) = ckptool.inspect(file, stats=True).notes
    assert (note.code, note.message) == ("non-finite", "2 of 3 tensors hold NaN or Inf: a.w, b.w")


def test_json_has_the_rows_with_their_statistics(tmp_path: Path) -> None:
    state = {"w": torch.tensor([0.0, 2.0]), "n": torch.nn.Parameter(torch.ones(1)), "s": torch.eye(2).to_sparse()}
    found = ckptool.inspect(saved({"model": state, "epoch": 3}, tmp_path / "in.pt"), stats=True).to_dict()
    w, n, s = found["tensors"]
    assert w["path"] == ["model", "w"] and (w["shape"], w["stride"], w["storage"]) == ([2], [1], 0)
    assert (w["statistics"]["max"], w["statistics"]["zeros"]) == (2.0, 1) and "kind" not in w
    assert n["parameter"] is n["requires_grad"] is True and s["kind"] == "sparse coo" and s["stride"] is None
    assert [part["path"] for part in found["parts"]] == [["model"], ["epoch"]]
    assert (found["parts"][0]["tensors"], found["memory"]["sets"], found["unlisted"]) == (3, 1, 0)
    assert found["entries"] == [{"path": ["epoch"], "type": "int", "value": 3}]


def test_a_file_that_is_one_tensor_or_has_no_parts(tmp_path: Path, run: Callable[..., Any]) -> None:
    alone = str(saved(torch.ones(2), tmp_path / "alone.pt"))
    assert run("inspect", alone, "-q").out == "/\n"
    assert "(the whole file)  8 B" in run("inspect", alone).out
    entries = str(saved({"model": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "in.pt"))
    found = run("inspect", entries, "--only", "epoch")
    assert found.code == 0 and found.out.split("\n")[2:5] == ["entries", "  epoch  3", ""]


@looped("name", TRAPS)
def test_statistics_count_every_element_of_every_trap(name: str, tmp_path: Path) -> None:
    found = ckptool.inspect(saved(TRAPS[name](), tmp_path / "in.pt"), stats=True)
    for row in found.tensors:
        values = found.statistics.get(row.address)
        assert values is None or values.count == row.tensor.numel  # type: ignore[union-attr]


def test_tensors_under_keys_that_read_alike(tmp_path: Path, run: Callable[..., Any]) -> None:
    """An optimizer that was pickled whole keeps its state by parameters, and two of one shape have one name."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    torch.save(
        {"optimizer": optimizer, "keys": {torch.ones(2): torch.ones(1), torch.ones(2): torch.ones(1)}},
        file := tmp_path / "x.pt",
    )
    for words in ((), ("--all",), ("--depth", "9"), ("--stats",), ("--json",)):
        found = run("inspect", str(file), *words)
        assert found.code == 0 and not found.err, (words, found)
    shown = run("inspect", str(file), "--depth", "9").out
    assert shown.count("exp_avg_sq") == 6 and shown.count("<tensor f32[2]>") == 2, shown
