"""Pieces of tensors in safetensors: put together here, and by torch, whose own way is wrong for some."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter

import ckptool
from tests.support.cli import Run
from tests.support.engine_cases import ROOT
from tests.support.errors import refused
from tests.support.looped import looped

Piece = tuple[torch.Tensor, tuple[int, ...]]  # of a tensor, and its offsets in the whole


def write_pieces(folder: Path, *ranks: dict[str, Piece]) -> Path:
    """The folder with a file for each rank, as torch writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, pieces in enumerate(ranks, 1):
        info = {name: {"saved_offsets": list(offsets)} for name, (_, offsets) in pieces.items()}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
        tensors = {name: tensor for name, (tensor, _) in pieces.items()}
        save_file(tensors, folder / f"shard-{rank:05}-model-00001-of-00001.safetensors", metadata=metadata)
    return folder


ROWS = torch.arange(15.0).reshape(5, 3)
HALVES = {"w": (ROWS[:3], (0, 0))}, {"w": (ROWS[3:].clone(), (3, 0))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "state", [lambda w: {"emb.weight": w, "head.weight": w}, lambda w: {"w": w.t()}], ids=["tied", "not contiguous"]
)
def test_what_torchs_writer_refuses_is_written_here(state: Any, tmp_path: Path) -> None:
    tensors = state(ROWS.clone())
    with pytest.raises(CheckpointException, match=r"share memory|contiguous"):
        dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(tmp_path / "torch")), no_dist=True)
    torch.save(tensors, tmp_path / "in.pt")
    ckptool.convert(tmp_path / "in.pt", tmp_path / "out", shard_size="1MB")
    found = ckptool.load(tmp_path / "out")
    assert all(found[name].equal(value) for name, value in tensors.items())


def test_whole_files_stand_for_their_pieces(tmp_path: Path, run: Run) -> None:
    shutil.copytree(ROOT / "hf-consolidated" / "checkpoint", tmp_path / "in")
    found = ckptool.open(tmp_path / "in")
    assert found.container == "sharded" and "pieces-not-read" in [note.code for note in found.notes]
    assert [file.path for file in ckptool.scan(tmp_path).files] == [str(tmp_path / "in")]
    assert run("diff", str(tmp_path / "in"), str(tmp_path / "in" / "sharded")).code == 0
    for path in (tmp_path / "in").glob("model*"):  # as torch leaves it where it fails
        path.write_bytes(b"") if path.suffix == ".safetensors" else path.unlink()
    assert "sharded" in refused("part", tmp_path, lambda: ckptool.open(tmp_path / "in")).fix


HOSTILE: dict[str, tuple[tuple[dict[str, Piece], ...], str]] = {
    "a gap": (({"w": (ROWS[:2], (0, 0))}, {"w": (ROWS[3:].clone(), (3, 0))}), "in no file"),
    "an overlap": (({"w": (ROWS[:4], (0, 0))}, {"w": (ROWS[3:].clone(), (3, 0))}), "overlap"),
    "another type": ((HALVES[0], {"w": (ROWS[3:].half(), (3, 0))}), "f16"),
    "other dimensions": ((HALVES[0], {"w": (ROWS[3], (3,))}), "block"),
    "an offset below 0": ((HALVES[0], {"w": (ROWS[3:].clone(), (-2, 0))}), "does not say"),
    "offsets without end": ((HALVES[0], {"w": (ROWS[3:].clone(), (1 << 70, 0))}), "does not say"),
    "too few offsets": ((HALVES[0], {"w": (ROWS[3:].clone(), (3,))}), "does not say"),
}


@looped("kind", HOSTILE)
def test_pieces_that_are_no_tensors_are_refused(kind: str, tmp_path: Path) -> None:
    ranks, words = HOSTILE[kind]
    folder = write_pieces(tmp_path / "in", *ranks)
    assert words in refused("corrupt", tmp_path, lambda: ckptool.convert(folder, tmp_path / "out.pt")).what


def test_a_table_of_pieces_that_is_none_and_a_missing_rank_are_named(tmp_path: Path) -> None:
    folder = write_pieces(tmp_path / "in", HALVES[0], {}, HALVES[1])
    first, second = sorted(folder.iterdir())[:2]
    for text in ("", "[]", "{", '{"w": 3}', '{"w": {"saved_offsets": "00"}}', "[" * 5_000):
        save_file({"w": ROWS}, first, metadata={"DCP_SHARDING_INFO": text})
        refused("corrupt", tmp_path, lambda: ckptool.open(folder))
    second.unlink()
    assert second.name in refused("corrupt", tmp_path, lambda: ckptool.open(folder)).what
