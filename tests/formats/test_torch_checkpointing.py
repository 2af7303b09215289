"""Folders of torch_checkpointing, with its table and without, and tables that lie."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from tests.support.engine_cases import ROOT
from tests.support.errors import refused
from tests.support.looped import looped
from tests.support.processes import soon

CASE, BARE = ROOT / "torch-checkpointing", ROOT / "torch-checkpointing-bare"


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the case of which the table says something else."""
    shutil.copytree(CASE / "checkpoint", folder)
    table = pickle.loads((folder / "metadata.pkl").read_bytes())
    change(table)
    (folder / "metadata.pkl").write_bytes(pickle.dumps(table, 4))
    return folder


def test_places_that_are_listed_are_refused(tmp_path: Path) -> None:
    def change(table: dict[str, Any]) -> None:
        ((group,),) = [table["metadata"]["model"]["nested_path_to_metadata"]['["emb.weight"]']]
        group["sharding_metadata"]["type"] = "default_tensor_v1"

    folder = changed(tmp_path / "in", change)
    assert "default_tensor_v1" in str(refused("unsupported", tmp_path, lambda: ckptool.open(folder)))


class Calls:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("called",)


def layout(table: dict[str, Any]) -> Any:
    return table["metadata"]["model"]["rank_to_layout_info"]


def sharding(table: dict[str, Any]) -> Any:
    ((group,),) = [table["metadata"]["model"]["nested_path_to_metadata"]['["emb.weight"]']]
    return group["sharding_metadata"]["data"]


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path outside": lambda t: layout(t)[1].update(file_path="../model_1.safetensors"),
    "an absolute path": lambda t: layout(t)[1].update(file_path="/etc/passwd"),
    "a file that is not there": lambda t: layout(t)[1].update(file_path="x/model.safetensors"),
    "a path that is none": lambda t: layout(t)[1].update(file_path=3),
    "an unknown way of writing": lambda t: layout(t)[1].update(serialization_format={"type": "Pickle"}),
    "one file for two items": lambda t: t["metadata"].update(other={"rank_to_layout_info": layout(t)}),
    "a missing rank": lambda t: layout(t).pop(1),
    "a third rank": lambda t: t.update(world_size=3),
    "a billion ranks of many items": lambda t: t.update(
        world_size=10**9, metadata={f"{n}": {"rank_to_layout_info": {0: None}} for n in range(50_000)}),
    "an item that is none": lambda t: t["metadata"].update(other=3),
    "a call": lambda t: t.update(other=Calls()),
    "no placements": lambda t: sharding(t).pop("placements"),
    "an unknown placement": lambda t: sharding(t)["placements"][0].update(type="Partial"),
    "a dimension outside": lambda t: sharding(t)["placements"][0].update(dim=5),
    "a mesh that does not fit": lambda t: sharding(t)["mesh_spec"].update(mesh_shape=(7,)),
    "a rank that is not in the mesh": lambda t: sharding(t)["mesh_spec"].update(mesh_data=(0, 9)),
    "another shape": lambda t: sharding(t).update(global_shape=[9, 3]),
    "another type": lambda t: sharding(t).update(dtype="torch.float16"),
    "an unknown type": lambda t: sharding(t).update(dtype="float"),
    "paths that are no paths": lambda t: t["metadata"]["model"]["nested_path_to_metadata"].update(x=3),
}  # fmt: skip


@looped("kind", HOSTILE)
def test_a_table_that_lies_is_refused(kind: str, tmp_path: Path) -> None:
    folder = changed(tmp_path / "in", HOSTILE[kind])
    code = "conflict" if kind == "another shape" else "corrupt"
    with soon(2):
        refused(code, tmp_path, lambda: ckptool.convert(folder, tmp_path / "out.pt"))
    assert [file.state for file in ckptool.scan(tmp_path).files] == [code]
    assert not Path("called").exists()


def test_a_second_pickle_behind_the_table_is_ambiguous(tmp_path: Path) -> None:
    folder = changed(tmp_path / "in", lambda table: None)
    with (folder / "metadata.pkl").open("ab") as file:
        file.write(pickle.dumps(Calls()))
    refused("ambiguous", tmp_path, lambda: ckptool.open(folder))


def test_a_file_that_ranks_share_is_read_once(tmp_path: Path) -> None:
    told = {"file_path": "shared.pt", "serialization_format": {"type": "TorchSerialization"}}
    item = {"rank_to_layout_info": dict.fromkeys(range(2), told)}
    folder = changed(tmp_path / "in", lambda table: table["metadata"].update(shared=item))
    torch.save({"w": torch.ones(2), "n": 3}, folder / "shared.pt")
    found = ckptool.open(folder)
    assert found["shared"]["n"] == 3 and not found.notes and found.metadata["ranks"] == 2


def test_a_rank_of_another_run_is_named(tmp_path: Path) -> None:
    shutil.copytree(BARE / "checkpoint", tmp_path / "in")
    (tmp_path / "in" / "model_1.pt").unlink()
    assert "in no file" in refused("corrupt", tmp_path, lambda: ckptool.open(tmp_path / "in")).what
    torch.save(7, tmp_path / "in" / "epoch_1.pt")
    shutil.copy(BARE / "checkpoint" / "model_1.pt", tmp_path / "in" / "model_1.pt")
    assert "epoch" in refused("conflict", tmp_path, lambda: ckptool.open(tmp_path / "in")).what


@pytest.mark.parametrize("name", ["mine_rank{}.pt", "step5-rank-{}.pth", "rank{}.bin", "a.rank_{}.pt", "w_{}.pt"])
def test_files_of_ranks_by_any_name_are_joined_where_their_tensors_say_how(name: str, tmp_path: Path) -> None:
    engines = ROOT / "verl-2"
    (folder := tmp_path / "run").mkdir()
    for rank in range(2):
        shutil.copy(engines / "checkpoint" / f"model_world_size_2_rank_{rank}.pt", folder / name.format(rank))
    (item,) = ckptool.open(folder).tree
    ckptool.convert(f"{folder}#{item}", tmp_path / "out.safetensors")
    found, expected = load_file(tmp_path / "out.safetensors"), load_file(engines / "weights.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    if "rank" in name:
        (fix,) = [each.fixes for each in ckptool.doctor(folder / name.format(1)).findings if each.code == "part"]
        assert fix == (f"ckptool inspect {folder}",)
    if name.endswith(".pt"):
        other = shutil.copy(folder / name.format(1), folder / name.format(1).replace(".pt", ".bin"))
        assert "both belong to one rank" in str(refused("conflict", tmp_path, lambda: ckptool.open(folder)))
        other.unlink()
    shutil.copy(folder / name.format(1), folder / name.format(3))
    if "rank" in name:
        assert name.format(2) in str(refused("corrupt", tmp_path, lambda: ckptool.open(folder)))
    (folder / name.format(3)).unlink()
    (folder / name.format(1)).unlink()
    assert "A file is missing" in str(refused("conflict", folder, lambda: ckptool.open(folder)))
