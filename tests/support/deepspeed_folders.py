"""Folders as DeepSpeed lays them out, of any world and of wrong ones; without DeepSpeed, whose source they follow."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

import ckptool
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
