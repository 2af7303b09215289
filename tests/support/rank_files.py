"""Files that each rank of a run saved for itself, made in one process: a process group that only says which rank it
is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

FULL = {"fc.weight": torch.arange(21.0).reshape(7, 3), "fc.bias": torch.arange(7.0) / 8, "gain": torch.tensor([2.5])}


def save_ranks(folder: Path, make: Callable[[int, DeviceMesh], Any], sizes: tuple[int, ...] = (2,),
    name: str = "model") -> Path:  # fmt: skip
    """The folder with `make(rank, mesh)` of every rank of a mesh of these sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    world = torch.Size(sizes).numel()
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            names = tuple(f"axis{i}" for i in range(len(sizes)))
            value = make(rank, init_device_mesh("cpu", sizes, mesh_dim_names=names))
            torch.save(value, folder / f"{name}_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    return folder


def divided(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any], order: Any = None) -> DTensor:
    """What this rank has of a tensor, cut as torch cuts it, from left to right or in the order given."""
    local = full
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis in order or range(len(placements)):
        if not isinstance(placements[axis], Replicate):
            pieces, _ = placements[axis]._split_tensor(local, mesh.size(axis), with_padding=False)
            local = pieces[coordinate[axis]]
    shape, stride = full.shape, full.stride()
    return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=shape, stride=stride)


def model(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """A model with its rows over the ranks of one axis, and a buffer that all have."""
    weights: dict[str, Any] = {name: divided(value, mesh, [Shard(0)]) for name, value in FULL.items()}
    return weights | {"counts": torch.arange(4)}


def optimizer(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    slots = {"exp_avg": divided(FULL["fc.weight"], mesh, [Shard(0)]), "step": torch.tensor(3.0)}
    return {"state": {0: slots}, "param_groups": [{"params": [0], "lr": 0.1}]}
