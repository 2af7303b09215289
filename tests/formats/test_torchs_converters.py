"""What torch's own converters of distributed checkpoints make of the values that they get wrong, and what ckptool makes
of them: from a folder of torch.distributed.checkpoint to safetensors and folders of Hugging Face, and back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import ckptool
from tests.support.cli import Run
from tests.support.dcp_folders import save_dcp
from tests.support.files import saved

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns that one process saves

WEIGHT = torch.arange(15.0).reshape(5, 3)
WRONG = {
    "scalar": torch.tensor(3.5),
    "integers": torch.tensor([3, 1, 2]),
    "an integer": torch.tensor(7),
    "booleans": torch.tensor([True, False]),
}


def by_torch(folder: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """A folder of dcp as torch itself brings it to Hugging Face: loaded whole, saved, consolidated."""
    dcp_to_torch_save(folder, scratch / "whole.pt")
    state = torch.load(scratch / "whole.pt", weights_only=True)
    writer = HuggingFaceStorageWriter(str(scratch / "torch"), save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return load_file(scratch / "torch" / "model-00001-of-00001.safetensors")


def by_ckptool(folder: Path, scratch: Path, run: Run) -> list[dict[str, torch.Tensor]]:
    """The same from dcp to safetensors, on to shards, and from those to a `.pt` file and back to dcp."""
    steps = ["a.safetensors", "hf/", "b.pt", "c.dcp", "d.safetensors"]
    found, before = [], folder
    for step in steps:
        out = scratch / step
        more = ("--shard-size", "50B") if step == "hf/" else ()
        done = run("convert", before, "-o", f"{out}/" if step == "hf/" else out, *more)
        assert done.code == 0, done
        found.append(dict(ckptool.load(out)))
        before = out
    return found


def test_a_scalar_is_zero_in_torchs_folder_and_itself_in_ckptools(tmp_path: Path, run: Run) -> None:
    state = {"weight": WEIGHT, "scalar": WRONG["scalar"]}
    folder = save_dcp(state, tmp_path / "dcp")
    torchs = by_torch(folder, tmp_path)
    assert torchs["weight"].equal(WEIGHT)
    assert torchs["scalar"].shape == () and torchs["scalar"] == 0.0  # and nothing says so
    for found in by_ckptool(folder, tmp_path, run):
        assert found.keys() == state.keys() and all(found[name].equal(value) for name, value in state.items())
    done = run("diff", folder, tmp_path / "torch")
    assert done.code == 1 and "scalar" in done.out and "1 of 2 tensors changed" in done.out, done


@pytest.mark.parametrize("kind", ["integers", "an integer", "booleans"])
def test_what_is_no_float_fails_in_torch_and_is_written_by_ckptool(kind: str, tmp_path: Path, run: Run) -> None:
    state = {"weight": WEIGHT, kind: WRONG[kind]}
    folder = save_dcp(state, tmp_path / "dcp")
    with pytest.raises((TypeError, CheckpointException)):
        by_torch(folder, tmp_path)
    for found in by_ckptool(folder, tmp_path, run):
        assert found[kind].dtype == WRONG[kind].dtype and found[kind].equal(WRONG[kind])


def tied() -> dict[str, Any]:
    return {"emb.weight": (weight := WEIGHT.clone()), "head.weight": weight}


def test_ties_come_apart_in_torchs_folder_and_stay_in_ckptools(tmp_path: Path, run: Run) -> None:
    file = saved(tied(), tmp_path / "in.pt")
    torch_save_to_dcp(file, tmp_path / "torch.dcp")
    dcp_to_torch_save(tmp_path / "torch.dcp", tmp_path / "torch.pt")
    torchs = torch.load(tmp_path / "torch.pt")
    assert torchs["emb.weight"].data_ptr() != torchs["head.weight"].data_ptr()
    steps = [file, *(tmp_path / name for name in ("a.dcp", "b.safetensors", "c/", "d.dcp", "e.pt"))]
    for before, out in itertools.pairwise(steps):
        folder = out.name == "c"
        done = run("convert", before, "-o", f"{out}/" if folder else out, *(("--shard-size", "1MB") if folder else ()))
        assert done.code == 0, done
    ours = torch.load(tmp_path / "e.pt")
    assert ours.keys() == tied().keys() and ours["emb.weight"].equal(WEIGHT)
    assert ours["emb.weight"].data_ptr() == ours["head.weight"].data_ptr()
    assert run("diff", file, tmp_path / "e.pt").code == 0
