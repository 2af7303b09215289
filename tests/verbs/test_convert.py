"""`convert` both ways: what stock safetensors reads, what is left behind, what comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

import ckptool
from ckptool.errors import CkptoolError, Unsupported
from ckptool.formats import read
from fixtures.make import PRODUCERS, make
from fixtures.traps import TRAPS
from tests.formats.contract import same_for_torch
from tests.support.files import load, saved
from tests.support.looped import looped
from tests.support.same import assert_same_objects, assert_same_tree

KINDS = [name for name in PRODUCERS if "legacy" not in name and name not in ("whole_module.pt",)]
# What a plain safetensors file can hold.
DTYPES = [name for name in safetensors.torch._TYPES.values() if f"09-{str(name).removeprefix('torch.')}" in TRAPS]


# To safetensors ------------------------------------------------------------------------------------------------------


@looped("dtype", DTYPES, ids=str)
def test_every_dtype_goes_to_safetensors_and_back(dtype: torch.dtype, tmp_path: Path) -> None:
    name = str(dtype).removeprefix("torch.")
    if name == "float4_e2m1fn_x2":  # packed: a scalar of it has no shape there
        with pytest.raises(Unsupported, match="scalar"):
            ckptool.convert(saved(TRAPS[f"09-{name}"](), tmp_path / "in.pt"), tmp_path / "out.safetensors")
        return
    file = saved(TRAPS[f"09-{name}"](), tmp_path / "in.pt")
    ckptool.convert(file, tmp_path / "out.safetensors", verify=True)
    before, after = load(file), safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert after.keys() == before.keys()
    assert_same_objects([before[key].contiguous() for key in before], [after[key] for key in before])


@looped(
    "name",
    [
        name
        for name in TRAPS
        if name[:2] in ("06", "07", "10", "16") and name not in ("06-expanded", "06-sliding-windows")
    ],
)
def test_strided_and_empty_tensors_are_written_in_row_major_order(name: str, tmp_path: Path) -> None:
    file = saved(TRAPS[name](), tmp_path / "in.pt")
    done = ckptool.convert(file, tmp_path / "out.safetensors", verify=True)
    before, after = load(file), safetensors.torch.load_file(tmp_path / "out.safetensors")
    for key, tensor in before.items():
        assert after[key].shape == tensor.shape and after[key].contiguous().view(-1).tolist() == pytest.approx(
            tensor.reshape(-1).tolist(), nan_ok=True
        )
        assert after[key].numpy().tobytes() == tensor.contiguous().numpy().tobytes()
    assert list(read(tmp_path / "out.safetensors").tree) == list(before), "the order of keys is kept"
    assert done.file_bytes < 100_000


@pytest.mark.parametrize("name", ["06-expanded", "06-sliding-windows"])
def test_expanded_views_are_written_out_and_noted(name: str, tmp_path: Path) -> None:
    file, out = saved(TRAPS[name](), tmp_path / "in.pt"), tmp_path / "out.safetensors"
    done = ckptool.convert(file, out, verify=True)
    assert "resolved-views" in [note.code for note in done.notes]
    before, after = load(file), safetensors.torch.load_file(out)
    assert all(after[key].numpy().tobytes() == tensor.contiguous().numpy().tobytes() for key, tensor in before.items())


# Ties ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["02-partial-overlap", "02-overlap-of-two-parts", "04-two-shapes", "05-transposed-tie"]
)
def test_lost_sharing_is_noted(name: str, tmp_path: Path) -> None:
    file, out = saved(TRAPS[name](), tmp_path / "in.pt"), tmp_path / "out.safetensors"
    done = ckptool.convert(file, out, verify=True)
    assert [note.code for note in done.notes] == ["sharing-lost"]
    before, after = load(file), safetensors.torch.load_file(out)
    assert all(after[key].numpy().tobytes() == tensor.contiguous().numpy().tobytes() for key, tensor in before.items())


# Back, and the whole tree --------------------------------------------------------------------------------------------


@looped("name", KINDS, here=1 / 3)
def test_all_of_every_fixture_and_back(name: str, tmp_path: Path) -> None:
    file, there = make(name, tmp_path), tmp_path / "all.safetensors"
    done = ckptool.convert(file, there, all=True, verify=True)
    assert done.facts["left_behind"] == [] and done.facts["tensors"] > 0
    safetensors.torch.load_file(there)  # stock reads its tensors
    ckptool.convert(there, tmp_path / "back.pt", verify=True)
    assert_same_tree(read(file), read(tmp_path / "back.pt"))
    if file.suffix != ".safetensors":
        same_for_torch(file, tmp_path / "back.pt", mmap=name != "rezipped_deflated.pt")


# Torch to torch ------------------------------------------------------------------------------------------------------


def test_what_in_place_edits_left_is_gone(tmp_path: Path) -> None:
    file = make("training_sgd.pt", tmp_path)
    before, size = load(file), file.stat().st_size
    for _ in range(3):
        ckptool.add_module(file, in_place=True)
        ckptool.strip_module(file, in_place=True, prefix="module.")
    assert file.stat().st_size > size + 5000
    ckptool.convert(file, tmp_path / "out.pt", verify=True)
    assert abs((tmp_path / "out.pt").stat().st_size - size) < 600
    assert_same_objects(before, load(tmp_path / "out.pt"))


# Refusals ------------------------------------------------------------------------------------------------------------


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    file = saved({"__metadata__": torch.ones(1), "a.w": torch.ones(1)}, tmp_path / "in.pt")
    with pytest.raises(CkptoolError) as caught:
        ckptool.convert(file, tmp_path / "out.safetensors")
    assert "__metadata__" in caught.value.what
