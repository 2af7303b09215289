"""`torch-zip`: what torch writes comes back as it was, and torch opens what is written here."""

from __future__ import annotations

import itertools
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.checkpoint import Checkpoint, Storage, TensorEntry
from ckptool.checkpoint.tree import map_storages, tensors
from ckptool.formats import read, torch_zip
from fixtures.traps import TRAPS
from tests.formats import contract
from tests.support.entries import entry_of
from tests.support.files import carry_out, load, rewritten, torch_bytes, written
from tests.support.looped import examples, looped
from tests.support.same import assert_same_objects
from tests.support.small_zips import tied_state
from tests.support.zips import record_starts

FIXTURES = Path(__file__).parents[2] / "fixtures"


# The law --------------------------------------------------------------------------------------------------------------


@looped("name", TRAPS, here=1 / 3)
def test_every_trap_comes_back_as_the_same_tree(name: str, tmp_path: Path) -> None:
    original, out = contract.vector(name, tmp_path), tmp_path / "out.pt"
    checkpoint = read(original)
    unknown = name in contract.UNKNOWN_CALLS
    error = contract.refusal(lambda: torch_zip.write(checkpoint))
    named = error is not None and any(module in error.what for module in ("fixtures.traps", "torch.masked"))
    assert (error is not None and error.code == "unsafe-global" and named) is unknown
    contract.round_trip(torch_zip, checkpoint, out, keep_unknown=unknown)
    for mmap in (False, True):
        contract.same_for_torch(original, out, mmap=mmap)
    if _pickle(original) == _pickle(out):
        assert out.read_bytes() == original.read_bytes()


def _pickle(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read("archive/data.pkl")


@pytest.mark.parametrize("name", ["01-full-tie", "09-every-dtype-in-one-dict", "17-adam-tensor-lr", "06-channels-last"])
def test_an_untouched_file_is_written_byte_for_byte(name: str, tmp_path: Path) -> None:
    original = contract.vector(name, tmp_path)
    rewritten(original, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == original.read_bytes()


@looped("name", TRAPS, here=1 / 3)
def test_every_trap_comes_back_with_new_records(name: str, tmp_path: Path) -> None:
    """As a tree from another container is written: no record of the old file is copied."""
    original, out = contract.vector(name, tmp_path), tmp_path / "out.pt"
    checkpoint = read(original)
    fresh = Checkpoint(checkpoint.tree, checkpoint.container)
    contract.round_trip(torch_zip, fresh, out, keep_unknown=True)
    contract.same_for_torch(original, out, mmap=True)
    assert all(start % 64 == 0 for start in record_starts(out).values())


@pytest.mark.parametrize("name", sorted(p.name for p in FIXTURES.glob("torch-*.pt")))
def test_files_of_old_torch_are_read_and_rewritten(name: str, tmp_path: Path) -> None:
    original, out = FIXTURES / name, tmp_path / "out.pt"
    contract.round_trip(torch_zip, read(original), out)
    assert_same_objects(load(original), load(out))
    assert_same_objects(load(original, mmap=True), load(out, mmap=True))


@settings(max_examples=examples(60))
@given(data=st.data())
def test_any_views_of_any_storages(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("views")
    bases = [
        torch.arange(n, dtype=torch.float32) for n in data.draw(st.lists(st.integers(0, 24), min_size=1, max_size=3))
    ]
    tree: dict[str, Any] = {}
    for i in range(data.draw(st.integers(1, 6))):
        base = data.draw(st.sampled_from(bases))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        stride = [data.draw(st.integers(0, 4)) for _ in shape]
        reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else -1
        if reach < len(base):
            tree[f"t{i}"] = base.as_strided(shape, stride, data.draw(st.integers(0, max(0, len(base) - 1 - reach))))
    original = written(torch_bytes(tree), folder / "a.pt")
    contract.round_trip(torch_zip, read(original), folder / "b.pt")
    assert_same_objects(load(original), load(folder / "b.pt"))


# Layout ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 17, 63, 64, 65, 300, 70_000])
def test_data_stays_aligned_when_the_pickle_changes_its_length(length: int, tmp_path: Path) -> None:
    original = written(torch_bytes(tied_state() | {"note": "x" * 1000}), tmp_path / "a.pt")
    checkpoint = read(original)
    changed = replace(checkpoint, tree={**checkpoint.tree, "note": "x" * length})
    contract.round_trip(torch_zip, changed, tmp_path / "b.pt")
    assert all(start % 64 == 0 for start in record_starts(tmp_path / "b.pt").values())
    assert_same_objects(load(tmp_path / "b.pt", mmap=True), tied_state() | {"note": "x" * length})
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None


def test_records_are_copied_in_one_range(tmp_path: Path) -> None:
    original = written(torch_bytes({f"w{i}": torch.ones(50_000) for i in range(5)}), tmp_path / "a.pt")
    checkpoint = read(original)
    renamed = {f"layer.{name}": value for name, value in checkpoint.tree.items()}
    plan = torch_zip.write(replace(checkpoint, tree=renamed))
    (segments,) = plan.files.values()
    ranges = [s for s in segments if hasattr(s, "file")]
    assert sum(r.length for r in ranges) > 1_000_000
    for before, after in itertools.pairwise(ranges):
        assert before.offset + before.length == after.offset


@pytest.mark.parametrize("alignment", ["1", "16", "4096"])
def test_the_files_own_alignment_is_kept(alignment: str, tmp_path: Path) -> None:
    original = written(_aligned(int(alignment)), tmp_path / "a.pt")
    assert read(original).metadata[".storage_alignment"] == alignment
    rewritten(original, tmp_path / "b.pt")
    assert (tmp_path / "b.pt").read_bytes() == original.read_bytes()
    checkpoint = read(original)
    carry_out(torch_zip.write(replace(checkpoint, tree={**checkpoint.tree, "more": 1})), tmp_path / "c.pt")
    assert all(start % int(alignment) == 0 for start in record_starts(tmp_path / "c.pt").values())
    assert_same_objects(load(tmp_path / "c.pt"), tied_state() | {"more": 1})


def _aligned(alignment: int) -> bytes:
    config = torch.utils.serialization.config.save
    before, config.storage_alignment = config.storage_alignment, alignment
    try:
        return torch_bytes(tied_state())
    finally:
        config.storage_alignment = before


def test_a_root_folder_of_another_name_is_kept(tmp_path: Path) -> None:
    torch.save(tied_state(), tmp_path / "my model.pt")
    again = rewritten(tmp_path / "my model.pt", tmp_path / "b.pt")
    assert again.origin.root == "my model/"
    assert (tmp_path / "b.pt").read_bytes() == (tmp_path / "my model.pt").read_bytes()


def test_storages_that_nothing_uses_are_left_out(tmp_path: Path) -> None:
    checkpoint = read(written(torch_bytes(tied_state()), tmp_path / "a.pt"))
    kept = replace(checkpoint, tree={"c": checkpoint.tree["state_dict"]["c"]})
    contract.round_trip(torch_zip, kept, tmp_path / "b.pt")
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert [n for n in archive.namelist() if "/data/" in n] == ["archive/data/1"]
    assert_same_objects(load(tmp_path / "b.pt"), {"c": tied_state()["state_dict"]["c"]})


def test_new_storages_beside_old_ones(tmp_path: Path) -> None:
    checkpoint = read(written(torch_bytes(tied_state()), tmp_path / "a.pt"))
    new, other = entry_of(torch.arange(3)), entry_of(torch.ones(2).bfloat16())
    tree = {"old": checkpoint.tree["state_dict"], "new": new, "other": other}
    contract.round_trip(torch_zip, replace(checkpoint, tree=tree), tmp_path / "b.pt")
    expected = {"old": tied_state()["state_dict"], "new": torch.arange(3), "other": torch.ones(2).bfloat16()}
    assert_same_objects(load(tmp_path / "b.pt", mmap=True), expected)


def test_one_record_claimed_by_two_storages_is_written_twice(tmp_path: Path) -> None:
    """What a transform made different stays so: only storages that are one object share a record."""
    checkpoint = read(written(torch_bytes({"a": torch.ones(3)}), tmp_path / "a.pt"))
    entry = checkpoint.tree["a"]
    twin = TensorEntry(Storage(entry.storage.data, "cuda:0"), entry.dtype, entry.shape, entry.stride)
    contract.round_trip(torch_zip, replace(checkpoint, tree={"a": entry, "b": twin}), tmp_path / "b.pt")


def test_locations_can_be_changed_without_touching_the_data(tmp_path: Path) -> None:
    checkpoint = read(written(torch_bytes(tied_state()), tmp_path / "a.pt"))
    there = map_storages(checkpoint.tree, lambda s: Storage(s.data, "cuda:3", s.crc))
    again = contract.round_trip(torch_zip, replace(checkpoint, tree=there), tmp_path / "b.pt")
    assert {entry.location for _, entry in tensors(again.tree)} == {"cuda:3"}
    assert_same_objects(load(tmp_path / "b.pt"), tied_state())  # map_location="cpu"
