"""`inspect`: what is in a checkpoint, its statistics, and the notes on it with the commands that mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import ckptool
from ckptool.analysis.inspect import Listing
from ckptool.checkpoint import Note
from fixtures.traps import TRAPS
from tests.support.cli import Run
from tests.support.files import saved
from tests.support.looped import looped


def listed(value: Any, folder: Path, at: str | None = None, **options: Any) -> Listing:
    return ckptool.inspect(saved(value, folder / "in.pt"), at=at, **options)


def notes(found: Listing) -> dict[str, Note]:
    return {note.code: note for note in found.notes}


def test_every_tensor_by_every_name(tmp_path: Path) -> None:
    found = listed(TRAPS["01-full-tie-three-roots"](), tmp_path)
    assert [(row.address, row.storage) for row in found.tensors] == [
        (name, 0) for name in ("model/w", "ema/w", "list/0", "list/1")
    ]
    assert (found.storages, found.tensor_bytes) == (1, 16)


def test_a_line_of_each_tensor_says_what_is_unusual(tmp_path: Path, run: Run) -> None:
    w = torch.ones(2, 3)
    path = saved({"w": w, "turned": w.t(), "again": w, "sparse": torch.eye(2).to_sparse()}, tmp_path / "a.pt")
    ckptool.remap(path, tmp_path / "b.pt", to="cuda:1")
    words = {"w": "", "turned": "strides [1, 3]", "again": "tied to w", "sparse": "sparse coo"}
    for file, place in ((path, ""), (tmp_path / "b.pt", "cuda:1")):
        lines = [line for line in run("inspect", str(file), "--all").out.splitlines() if " f32 " in line]
        found = {line.split()[0]: line.partition(" B")[2].strip() for line in lines}
        assert found == {name: ", ".join(filter(None, (place, text))) for name, text in words.items()}


def test_a_conjugate_view_is_no_more_memory(tmp_path: Path) -> None:
    values = torch.randn(6, dtype=torch.complex64)
    (part,) = listed({"x": values, "y": values.conj()}, tmp_path).parts
    assert (len(part.rows), part.elements, part.bytes, part.tied) == (2, 6, 48, {1: 0})


def test_a_file_that_is_one_tensor_or_has_no_parts(tmp_path: Path, run: Run) -> None:
    alone = str(saved(torch.ones(2), tmp_path / "alone.pt"))
    assert run("inspect", alone, "-q").out == "/\n"
    assert "(the whole file)  8 B" in run("inspect", alone).out
    entries = str(saved({"model": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "in.pt"))
    found = run("inspect", entries, "--only", "epoch")
    assert found.code == 0 and found.out.split("\n")[2:5] == ["entries", "  epoch  3", ""]


def test_tensors_under_keys_that_read_alike(tmp_path: Path, run: Run) -> None:
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


# Statistics -----------------------------------------------------------------------------------------------------------


@looped("name", TRAPS)
def test_statistics_count_every_element_of_every_trap(name: str, tmp_path: Path) -> None:
    found = ckptool.inspect(saved(TRAPS[name](), tmp_path / "in.pt"), stats=True)
    for row in found.tensors:
        values = found.statistics.get(row.address)
        assert values is None or values.count == row.tensor.numel  # type: ignore[union-attr]


# Notes ---------------------------------------------------------------------------------------------------------------


def test_wasted_bytes_are_those_behind_no_tensor(tmp_path: Path) -> None:
    big = torch.zeros(100_000)
    wasted = notes(listed({"a": big[10:12], "b": torch.ones(3)}, tmp_path))["wasted-storage"]
    assert "400 kB in 1 storage" in wasted.message
    assert "wasted-storage" not in notes(listed({"a": big[:50_000], "b": big[50_000:]}, tmp_path))
    assert "wasted-storage" not in notes(listed({"a": big[10:], "all": big}, tmp_path))
    assert "wasted-storage" not in notes(listed({"a": torch.ones(1, 4).expand(100_000, 4)}, tmp_path))
