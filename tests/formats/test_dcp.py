"""Folders of torch.distributed.checkpoint: read as torch reads them, bit for bit, without torch and without running
anything."""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata

import ckptool
from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.tree import tensors
from ckptool.errors import Corrupt, NotACheckpoint, OnlyAPart, Truncated, Unsupported
from ckptool.formats import read, torch_zip
from ckptool.formats.dcp import payloads
from tests.support.dcp_folders import edit, save_dcp, training_state
from tests.support.errors import three_parts
from tests.support.files import CORPUS
from tests.support.ranks import save_on_two_ranks
from tests.support.same import assert_same_objects


def as_torch_reads(folder: Path, out: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dcp(training_state(), tmp_path_factory.mktemp("dcp") / "saved")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "saved"))


def live(found: Checkpoint) -> Any:
    """The tree with torch's tensors, as torch.load gives it."""
    out = Path(found.source.path).parent / "live.pt"  # type: ignore[union-attr]
    ckptool.convert(found.source.path, out, overwrite=True, verify=True)  # type: ignore[union-attr]
    return torch.load(out, weights_only=True)


# Reading -------------------------------------------------------------------------------------------------------------


def test_everything_as_torch_reads_it(folder: Path, tmp_path: Path) -> None:
    found = read(folder)
    assert found.container == "dcp" and found.notes == () and found.discarded == ()
    expected = as_torch_reads(folder, tmp_path / "torch.pt")
    got = live(found)
    assert expected.keys() == got.keys()
    # Views of one storage, and strides of what torch assembles itself, are not kept by torch's own reader.
    assert_same_objects(contiguous(expected), contiguous(got))
    assert got["list"][1]["inside"].tolist() == [0, 1, 2] and got["plain"] == [1, 2, "three"]
    assert list(got["optimizer"]["0"]) == ["step", "exp_avg", "exp_avg_sq"]


def contiguous(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: contiguous(part) for key, part in value.items()}
    return [contiguous(part) for part in value] if isinstance(value, list) else value


def test_verbs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ckptool.cli import main

    assert main(["inspect", str(folder), "--stats"]) == 0
    assert "dcp" in capsys.readouterr().out
    assert main(["convert", str(folder), "-o", str(tmp_path / "out.pt"), "--verify"]) == 0
    assert main(["diff", f"{folder}#model", f"{tmp_path / 'out.pt'}#model"]) == 0
    assert main(["convert", f"{folder}#model", "-o", str(tmp_path / "out.safetensors")]) == 0
    assert main(["strip-module", str(folder), "-o", str(tmp_path / "clean.pt"), "--at", "model"]) == 0
    assert (tmp_path / "clean.pt").is_file()
    assert main(["strip-module", str(folder), "--in-place"]) == 2


def test_the_corpus() -> None:
    path = CORPUS / "lightning_dcp"
    if not path.is_dir():
        return
    found = read(path)
    entries = [entry for _, entry in tensors(found.tree)]
    assert len(entries) == 4 and {str(entry.dtype) for entry in entries} == {"f32"}
    assert sorted(entry.shape or () for entry in entries) == [(2,), (2, 32), (32,), (32, 32)]
    places = pickle.loads((path / ".metadata").read_bytes()).storage_data
    for name, entry in found["model"].items():
        parts = sorted((at.offset, place) for at, place in places.items() if at.fqn == f"model.{name}")
        halves = [torch.load(io.BytesIO(raw_bytes(path, place)), weights_only=True) for _, place in parts]
        assert len(halves) == 2 and torch.equal(entry.torch(), torch.cat(halves)), name


def raw_bytes(folder: Path, place: Any) -> bytes:
    """What torch would be given to load of one chunk."""
    return (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]


# Many ranks ----------------------------------------------------------------------------------------------------------


APART = """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def save(rank, folder, mesh):
        whole = {"rows": torch.randn(7, 5), "same": torch.arange(6.0), "one": torch.randn(1, 8), "n": torch.tensor(2)}
        how = {"rows": Shard(0), "same": Replicate(), "one": Shard(0), "n": Replicate()}
        state = {"model": {n: distribute_tensor(t, mesh, [how[n]]) for n, t in whole.items()}, "step": 5, "rank": rank}
        state["buffer"] = torch.full((3,), float(rank))
        dcp.save(state, checkpoint_id=folder, use_collectives=False)
        if rank == 0:
            torch.save(whole, folder + ".pt")
"""


@pytest.fixture(scope="module")
def tables_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("apart")
    save_on_two_ranks(APART, scratch / "saved", scratch)
    return scratch / "saved"


@pytest.fixture
def apart(tables_of_two_ranks: Path, tmp_path: Path) -> Path:
    shutil.copy(f"{tables_of_two_ranks}.pt", tmp_path / "whole.pt")
    return Path(shutil.copytree(tables_of_two_ranks, tmp_path / "apart"))


@pytest.mark.parametrize("name", ["model.same", "buffer"])
def test_damage_in_values_that_both_ranks_saved_is_found(name: str, apart: Path) -> None:
    """Rank 0's are taken; those of rank 1 are in no tensor, and read by nothing else."""
    assert ckptool.verify(apart).fine
    table = pickle.loads((apart / "__1.metadata").read_bytes())  # made by this test
    info = next(info for index, info in table.storage_data.items() if index.fqn == name)
    entry = torch_zip.read(Source(apart / "__1_0.distcp").part(info.offset, info.length)).tree
    data = bytearray((apart / "__1_0.distcp").read_bytes())
    data[entry.storage.data.offset + 5] ^= 16
    (apart / "__1_0.distcp").write_bytes(data)
    found = ckptool.verify(apart)
    (problem,) = found.problems
    assert problem.code == "checksum" and "__1_0.distcp" in problem.record and problem.tensors


def test_large_objects_of_ranks_are_not_said_to_differ(apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "SMALL", 8)
    notes = {note.code: note.message for note in read(apart).notes}
    assert "rank" in notes["replicas-not-compared"] and "that of rank 0" not in notes["replicas-differ"]


def test_tables_of_ranks_that_lack_one(apart: Path) -> None:
    (apart / "__1.metadata").rename(apart / "other")
    with pytest.raises(Corrupt, match=r"\(the tables of 1 rank\): rows|the tables of 1 rank\): model.rows") as caught:
        read(apart)
    assert "15 of its 35 elements are in no file" in str(caught.value)
    (apart / "__1.metadata.tmp").write_bytes(b"")
    with pytest.raises(Corrupt, match=r"lacks the tables of 1 rank: __1\.metadata"):
        read(apart)
    (apart / "__1.metadata.tmp").unlink()
    (apart / "other").rename(apart / "__2.metadata")
    with pytest.raises(Corrupt, match=r"lacks the tables of 1 rank: __1\.metadata"):
        read(apart)


def test_a_table_that_was_not_renamed(folder: Path) -> None:
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    with pytest.raises(Truncated, match=r"holds \.metadata\.tmp and no \.metadata") as caught:
        read(folder)
    three_parts(caught.value)


# What engines and versions write -----------------------------------------------------------------------------------


def test_tables_of_megatron_name_other_classes(folder: Path) -> None:
    """By hand, after megatron_core 0.16.1: `MCoreMetadata` in a module of its own, and no paths."""
    expected = set(read(edit(folder, lambda metadata: setattr(metadata, "planner_data", {}))).tree)
    path = folder / ".metadata"
    old = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    data = pickle.dumps(pickle.loads(path.read_bytes()), protocol=2)  # made by this test
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"))
    found = read(folder)
    assert set(found.tree) == expected and [note.code for note in found.notes] == ["flat-names"]
    path.write_bytes(data.replace(old, b"cmegatron.other\nMetadata\n"))
    with pytest.raises(NotACheckpoint):
        read(folder)


def test_parameters_that_fsdp_flattened_are_no_model(tmp_path: Path, run: Callable[..., Any]) -> None:
    state = {"_flat_param": torch.randn(63), "1.running_mean": torch.ones(5)}
    folder = save_dcp({"model": state}, tmp_path / "saved")
    found = run("convert", str(folder), "-o", str(tmp_path / "out.safetensors"))
    assert found.code == 2 and "LOCAL_STATE_DICT" in found.err and not (tmp_path / "out.safetensors").exists()


# Files by themselves -------------------------------------------------------------------------------------------------


def test_a_file_of_a_rank_is_what_that_rank_saved(folder: Path) -> None:
    (rank,) = folder.glob("*.distcp")
    found = ckptool.open(rank)
    whole = dict(tensors(read(folder).tree))
    assert {entry.bytes() for _, entry in tensors(found.tree)} == {entry.bytes() for entry in whole.values()}
    (note,) = found.notes
    assert (
        note.code == "part"
        and found.part is not None
        and found.part.label == "rank 0 of 1"
        and note.fix == ("ckptool", "inspect", str(folder))
    )
    (folder / "__3_0.distcp").write_bytes(rank.read_bytes())
    with pytest.raises(Unsupported, match=r"no value of \.metadata is in"):
        ckptool.inspect(folder / "__3_0.distcp")
    (folder / ".metadata").unlink()
    with pytest.raises(OnlyAPart, match="without the table"):
        ckptool.inspect(rank)
    with pytest.raises(Truncated, match=r"no \.metadata"):
        ckptool.inspect(folder)


def test_what_nothing_uses_is_noted(folder: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata.pop("half")

    (folder / "__3_0.distcp").write_bytes(b"old")
    found = read(edit(folder, change))
    assert [note.code for note in found.notes] == ["unused-record", "stale-shards"]
    assert "half" in found.notes[0].message and "__3_0.distcp" in found.notes[1].message
