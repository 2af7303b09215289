"""Folders as DeepSpeed lays them out, of any world and of wrong ones; without DeepSpeed, whose source they follow."""

import json
import pickle
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckptool
from ckptool.checkpoint import Checkpoint
from ckptool.errors import CkptoolError, Conflict

STEP = 2
Shapes = Sequence[dict[str, tuple[int, ...]]]  # by group
SHAPES: Shapes = ({"embed.weight": (7, 3), "wide.weight": (5, 3), "scale": (1,)}, {"wide.bias": (5,), "out.bias": (3,)})
Weights = dict[str, torch.Tensor]


def zero_weights(seed: int = 0, shapes: Shapes = SHAPES) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for group in shapes for name, shape in group.items()}


def random_shapes(random: Random) -> Shapes:
    """Groups of parameters of any shapes, empty ones among them."""
    sizes = [(), (0,), (1,), (2,), (5,), (0, 3), (4, 1), (3, 5), (2, 2, 3)]
    count = random.randint(1, 3)
    return [{f"{g}.{n}.weight": random.choice(sizes) for n in range(random.randint(1, 4))} for g in range(count)]


def states_of(stage: int, world: int, model: Weights, shapes: Shapes = SHAPES, **more: Any) -> dict[str, Any]:
    """The model states of a rank: bf16 copies, of stage 3 placeholders, and a buffer."""
    empty = torch.empty(0, dtype=torch.bfloat16)
    module = {name: empty if stage == 3 else value.bfloat16() for name, value in model.items()}
    return {
        "module": module | {"places": torch.arange(4)}, "buffer_names": ["places"], "optimizer": None,
        "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in shapes],
        "frozen_param_shapes": {}, "shared_params": {}, "frozen_param_fragments": {}, "global_steps": STEP,
        "dp_world_size": world, "mp_world_size": 1, "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.19.8", **more,
    }  # fmt: skip


def shares_of(stage: int, world: int, values: Weights, shapes: Shapes = SHAPES) -> list[list[torch.Tensor]]:
    """Every rank's pieces of the groups' flat vectors, the last of them without the padding of stages 1 and 2."""
    ranks: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for group in shapes:
        if stage == 3:
            for rank, flat in enumerate(ranks):
                flat.append(torch.cat([piece_of(values[name].flatten(), rank, world) for name in group]))
            continue
        vector = torch.cat([values[name].flatten() for name in group])
        size = -(-len(vector) // (2 * world)) * 2
        for rank, flat in enumerate(ranks):
            flat.append(vector[rank * size : (rank + 1) * size].clone())
    return ranks


def piece_of(flat: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """What a rank of stage 3 has of a parameter, the last filled up."""
    each = -(-len(flat) // world)
    mine = flat[rank * each : (rank + 1) * each]
    return torch.cat([mine, torch.full((each - len(mine),), 9e9, dtype=flat.dtype)])


def write_zero(
    folder: Path,
    stage: int,
    world: int,
    model: Weights | None = None,
    change: Callable[[int, dict[str, Any], dict[str, Any]], None] | None = None,
    shapes: Shapes = SHAPES,
) -> Path:
    """A tag's folder. change: what is done to each rank's model states and optimizer before they are saved."""
    model = model or zero_weights(0, shapes)
    folder.mkdir(parents=True, exist_ok=True)
    shares = shares_of(stage, world, model, shapes)
    moments = {key: shares_of(stage, world, {n: v * f for n, v in model.items()}, shapes) for key, f in MOMENTS.items()}
    for rank in range(world):
        states = states_of(stage, world, model, shapes)
        state = {
            group: {key: _padded(values[rank][group], stage, named, world) for key, values in moments.items()}
            | {"step": torch.tensor(float(STEP))}
            for group, named in enumerate(shapes)
        }
        base = {"state": state, "param_groups": [{"lr": 0.1, "params": [group]} for group in range(len(shapes))]}
        share: dict[str, Any] = {"zero_stage": stage, "partition_count": world if stage == 3 else [world] * len(shapes)}
        if stage == 3:
            share |= {"fp32_flat_groups": shares[rank], "optimizer_state_dict": base}
        else:
            share |= {"single_partition_of_fp32_groups": shares[rank], "base_optimizer_state": base}
        if change is not None:
            change(rank, states, share)
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_" * (stage == 3) + "mp_rank_00_model_states.pt"
            torch.save(states, folder / name)
        torch.save({"optimizer_state_dict": share}, folder / optimizer_file(rank))
    return folder


MOMENTS = {"exp_avg": 2.0, "exp_avg_sq": 4.0}


def _padded(piece: torch.Tensor, stage: int, named: dict[str, tuple[int, ...]], world: int) -> torch.Tensor:
    """Moments have the padding that the weights of the last ranks lack."""
    if stage == 3:
        return piece
    numel = sum(torch.Size(shape).numel() for shape in named.values())
    size = -(-numel // (2 * world)) * 2
    return torch.cat([piece, torch.full((size - len(piece),), 9e9)])


def optimizer_file(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def verdict(folder: Path, out: Path) -> str:
    """Why a folder is refused, by `verify` and by `convert`; empty where it is fine."""
    try:
        ckptool.convert(folder, out, overwrite=True)
        said = ""
    except CkptoolError as error:
        said = str(error)
    try:
        assert ckptool.verify(folder).fine == (not said), said
    except Conflict:
        assert said
    return said


# DCP ------------------------------------------------------------------------------------------------------------------
# Folders of torch.distributed.checkpoint that tests save, and change as its own classes would write them.


def training_state() -> dict[str, Any]:
    """What a training run saves: a model, an optimizer, lists, objects, and types of all sorts."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    return {
        "model": dict(model.state_dict()), "optimizer": optimizer.state_dict()["state"],
        "list": [torch.ones(2), {"inside": torch.arange(3)}, 7], "plain": [1, 2, "three"], "epoch": 3,
        "name": "run", "nothing": None, "half": torch.randn(5, 3).bfloat16(),
        "float8": torch.randn(4).to(torch.float8_e4m3fn), "unsigned": torch.arange(4).to(torch.uint16),
        "complex": torch.randn(2, 2, dtype=torch.complex64), "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4), "transposed": torch.randn(3, 5).t(), "a.b": {"c.d": torch.ones(1)},
    }  # fmt: skip


def save_dcp(value: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_state(value, checkpoint_id=folder, no_dist=True)
    return folder


def edit(folder: Path, change: Callable[[Any], Any]) -> Path:
    """The folder with another table, written by torch's own classes."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # made by this test
    replaced = change(metadata)
    path.write_bytes(pickle.dumps(replaced if isinstance(replaced, Metadata) else metadata))
    return folder


def place_of(metadata: Metadata, name: str = "half") -> tuple[MetadataIndex, _StorageInfo]:
    return next((index, info) for index, info in metadata.storage_data.items() if index.fqn == name)


def placed(tensor: str = "half", /, **changes: Any) -> Callable[[Any], None]:
    """Changes where one tensor is."""

    def change(metadata: Metadata) -> None:
        index, info = place_of(metadata, tensor)
        for name, value in changes.items():
            setattr(info, name, value)
        assert metadata.storage_data[index] is info

    return change


def chunk(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda metadata: change(metadata.state_dict_metadata["half"])


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    parts = [ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes)) for begin, sizes in boxes]
    return chunk(lambda tensor: setattr(tensor, "chunks", parts))


# Shards ---------------------------------------------------------------------------------------------------------------
# Sharded checkpoints as the hub's savers write them.


INDEX = "model.safetensors.index.json"


def sharded_state() -> dict[str, torch.Tensor]:
    """Twelve tensors in an order of their own, of several types."""
    torch.manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(10, 25) for i in range(9)}
    return {
        **tensors,
        "norm": torch.randn(50).bfloat16(),
        "a.first": torch.arange(7),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
    }


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())  # type: ignore[no-any-return]


def hub(folder: Path, tensors: dict[str, torch.Tensor] | None = None, shards: int = 3, **metadata: Any) -> Path:
    """A folder as the hub's savers write it: names sorted in the index, ties named in its metadata."""
    tensors = tensors if tensors is not None else sharded_state()
    folder.mkdir(parents=True, exist_ok=True)
    names, places = list(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_index(folder, places, {"total_size": total, **metadata})
    return folder


def write_index(folder: Path, places: dict[str, str], metadata: Any = None, name: str = INDEX) -> None:
    index = {"metadata": metadata or {}, "weight_map": places}
    (folder / name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def bins(folder: Path, parts: list[Any], **options: Any) -> Path:
    """Shards as torch.save writes them, and their index."""
    folder.mkdir()
    places = {}
    for number, part in enumerate(parts, 1):
        file = f"pytorch_model-{number:05d}-of-{len(parts):05d}.bin"
        torch.save(part, folder / file, **options)
        places.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for part in parts for tensor in part.values())
    write_index(folder, places, {"total_size": total}, "pytorch_model.bin.index.json")
    return folder


def assert_values(found: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    assert set(found.tree) == set(tensors)
    for name, tensor in tensors.items():
        entry = found[name]
        assert entry.shape == tuple(tensor.shape) and entry.dtype.torch == str(tensor.dtype).removeprefix("torch.")
        assert entry.bytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name


# Files of ranks -------------------------------------------------------------------------------------------------------
# Files that each rank of a run saved for itself, made in one process: a process group that only says which rank it is.


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
