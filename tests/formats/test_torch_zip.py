"""`torch-zip`: what torch writes comes back as it was, and torch opens what is written here."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.checkpoint import Checkpoint
from ckptool.formats import read, torch_zip
from fixtures.traps import TRAPS
from tests.formats import contract
from tests.support.files import load, rewritten, torch_bytes, written
from tests.support.looped import examples, looped
from tests.support.same import assert_same_objects
from tests.support.zips import record_starts

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
