"""Folders of files that each rank saved for itself are one checkpoint."""

from __future__ import annotations

import importlib
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptool
from tests.support.cli import Run
from tests.support.looped import looped
from tests.support.rank_files import FULL, divided, model, optimizer, save_ranks

FULL_GRID = torch.arange(8 * 6 * 3).reshape(8, 6, 3)


def loaded(folder: Path, out: Path, **options: Any) -> Any:
    ckptool.convert(folder, out, **options)
    return torch.load(out, weights_only=True)


def test_ranks_are_one_checkpoint_of_their_sets(tmp_path: Path, run: Run) -> None:
    def late(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return model(rank, mesh) | ({"late": torch.ones(2)} if rank else {})

    folder = save_ranks(tmp_path / "actor", late, (3,))
    save_ranks(folder, optimizer, (3,), name="optim")
    save_ranks(folder, lambda rank, mesh: {"rng": torch.full((8,), rank, dtype=torch.uint8), "epoch": 2, "seed": rank},
        (3,), name="extra_state")  # fmt: skip
    found = ckptool.open(folder)
    assert list(found.tree) == ["model", "extra_state", "optim"] and found.part is None
    assert found.metadata["ranks"] == 3
    assert {note.code for note in found.notes} == {"ranks-differ", "replicas-differ"}
    other = " ".join(note.message for note in found.notes if note.code == "ranks-differ")
    assert found.tree["model"]["late"].shape == (2,)
    assert "extra_state/seed" in other and "extra_state_world_size_3_rank_1.pt" in other
    tree = loaded(folder, tmp_path / "out.pt")
    for name, value in FULL.items():
        assert tree["model"][name].equal(value)
    assert tree["optim"]["state"][0]["exp_avg"].equal(FULL["fc.weight"])
    assert tree["extra_state"]["epoch"] == 2 and tree["extra_state"]["seed"] == 0
    assert run("verify", str(folder)).code == 0
    assert [file.path for file in ckptool.scan(tmp_path).files if file.path.endswith("actor")] == [str(folder)]


def test_a_mesh_that_was_cut_from_another(tmp_path: Path) -> None:
    """Tensor parallelism alone: the ranks of the other axis have replicas, and do not say so."""
    rows = torch.arange(10)
    folder = save_ranks(tmp_path / "in", lambda rank, mesh: {"w": divided(rows, mesh["axis1"], [Shard(0)])}, (2, 3))
    assert loaded(folder, tmp_path / "out.pt")["model"]["w"].equal(rows)


def test_replicas_that_differ_are_never_written(tmp_path: Path, run: Run) -> None:
    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"w": divided(FULL_GRID + (rank == 3), mesh, [Replicate(), Shard(0)])}

    folder = save_ranks(tmp_path / "in", make, (2, 2))
    done = run("convert", str(folder), "-o", str(tmp_path / "out.pt"))
    assert done.code == 2 and "rank 1 and rank 3" in done.err and not (tmp_path / "out.pt").exists()


def test_an_optimizer_that_does_not_say_how_it_is_divided_stays_with_its_ranks(tmp_path: Path) -> None:
    def flat(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"state": {0: {"exp_avg": torch.full((11,), float(rank))}}, "param_groups": []}

    folder = save_ranks(tmp_path / "in", model)
    save_ranks(folder, flat, name="optim")
    found = ckptool.open(folder)
    assert [note.code for note in found.notes] == ["not-joined"]
    assert list(found.tree["optim"]) == ["rank 0", "rank 1"]
    assert loaded(folder, tmp_path / "out.pt")["optim"]["rank 1"]["state"][0]["exp_avg"].tolist() == [1.0] * 11
    assert len(loaded(folder, tmp_path / "model.pt", at="model")) == 4


@pytest.mark.filterwarnings("ignore")
def test_files_of_older_torch_say_it_in_other_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.5 has other modules, and before 2.9 the table of a mesh has its shape."""
    old = "torch.distributed._tensor"
    importlib.import_module(f"{old}.placement_types")
    importlib.import_module(f"{old}.device_mesh")
    monkeypatch.setattr(DTensor, "__module__", f"{old}.api")
    monkeypatch.setattr(Shard, "__module__", f"{old}.placement_types")
    monkeypatch.setattr(DeviceMesh, "__module__", f"{old}.device_mesh")

    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        tensor = divided(FULL["fc.weight"], mesh, [Shard(0)])
        mesh.__dict__["mesh"] = torch.arange(2, dtype=torch.int32)
        for name in ("_layout", "_rank_map", "_flatten_rank_map", "_rank"):
            mesh.__dict__.pop(name)
        return {"fc.weight": tensor}

    folder = save_ranks(tmp_path / "in", make)
    with zipfile.ZipFile(next(folder.iterdir())) as file:
        data = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    assert f"{old}.api".encode() in data and f"{old}.placement_types".encode() in data
    assert loaded(folder, tmp_path / "out.pt")["model"]["fc.weight"].equal(FULL["fc.weight"])


@pytest.mark.filterwarnings("ignore")
@looped("seed", range(16))
def test_any_model_on_any_mesh(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    sizes = rng.choice([(2,), (5,), (2, 2), (2, 3), (2, 2, 2)])
    tensors = {f"layer{i}.weight": torch.randn([rng.randint(0, 7) for _ in range(rng.randint(1, 3))]) for i in range(6)}
    kinds: list[Callable[[int], Any]] = [
        lambda n: Shard(rng.randrange(n)),
        lambda n: Replicate(),
        lambda n: _StridedShard(rng.randrange(n), split_factor=rng.choice((2, 3))),
    ]
    placements = {name: [rng.choice(kinds)(value.ndim) for _ in sizes] for name, value in tensors.items()}

    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {name: divided(value, mesh, placements[name]) for name, value in tensors.items()}

    tree = loaded(save_ranks(tmp_path / "in", make, sizes), tmp_path / "out.pt")["model"]
    assert all(tree[name].equal(value) for name, value in tensors.items())
