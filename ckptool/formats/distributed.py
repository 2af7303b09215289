"""Tensors of torch.distributed (DTensor, ShardedTensor) as one rank saved them; nothing is checked.

Source: torch/distributed/tensor (placement_types.py, _dtensor_spec.py), torch/distributed/device_mesh.py,
torch/distributed/_shard (sharded_tensor, metadata.py), torch 2.0 to 2.13.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ckptool.checkpoint import Composite, Flags, TensorEntry
from ckptool.checkpoint.nodes import Global, Object, fields, inside, items
from ckptool.facts import dataclass, field

MAX_DIMENSIONS = 64

Order = dict[Any, tuple[int, ...]]
"""By dimension the axes of a mesh that divide it, in the order in which they do."""


@dataclass(frozen=True, slots=True, eq=False)
class Distributed:
    """A tensor of torch.distributed as one rank saved it, with what it says of its division; nothing is checked.

    tensor: with the shape of the whole.  local: the tensors that are here, of a ShardedTensor each with its place.
    rank, world: its rank and the number of ranks.  flags: those of the parameter, where it is one.  is_whole: this rank
    alone has all values.
    mesh, placements, order: of a DTensor, the placements as kinds, dimensions and split factors.
    facts: of a ShardedTensor, its metadata.
    """

    tensor: Composite
    is_dtensor: bool
    flags: Flags
    local: list[tuple[Any, Any]]
    rank: Any
    world: Any
    is_whole: bool
    mesh: Any = None
    placements: list[tuple[str, Any, Any]] = field(default_factory=list)
    order: Order = field(default_factory=dict)
    facts: dict[Any, Any] = field(default_factory=dict)


def distributed(value: Any) -> Distributed | None:
    """The DTensor or ShardedTensor that a value is, or is a Parameter of; None for anything else."""
    if type(value) is not Composite:
        return None
    flags = Flags()
    for _ in range(4):  # a Parameter of it
        args = value.made.args
        if type(args) is not tuple or not args or not isinstance(args[0], Composite):
            break
        flags = Flags(len(args) > 1 and args[1] is True, True)
        value = args[0]
    args = value.made.args
    if type(args) is not tuple or len(args) < 4 or type(args[1]) is not Global:
        return None
    if not args[1].module.startswith("torch.distributed") or args[1].name not in ("DTensor", "ShardedTensor"):
        return None
    wrapper = args[2] if type(args[2]) is tuple and len(args[2]) > 7 else (None,) * 8  # the last: requires_grad
    state, attributes = args[3], dict[Any, Any]()
    for part in state if isinstance(state, tuple) else (state,):  # the instance dictionary, and the slots
        if isinstance(part, dict):
            attributes |= part
    flags = Flags(flags.requires_grad or wrapper[7] is True, flags.parameter or attributes.get("_is_param") is True)
    if args[1].name == "ShardedTensor":
        shards, facts, group = (*items(state), None, None, None)[:3] if len(items(state)) > 1 else ((), None, None)
        local = [(inside(shard, "tensor"), inside(shard, "metadata")) for shard in items(shards)]
        local_numel = sum(tensor.numel for tensor, _ in local if isinstance(tensor, TensorEntry))
        is_whole = value.shape is not None and local_numel >= prod(value.shape)
        ranks = inside(group, "global_rank"), inside(group, "global_world_size")
        return Distributed(value, False, flags, local, *ranks, is_whole, facts=fields(facts))
    spec, tensor = fields(attributes.get("_spec")), attributes.get("_local_tensor")
    if max(len(items(spec.get(name))) for name in ("placements", "shard_order")) > MAX_DIMENSIONS:
        return None
    placements = []
    for node in items(spec.get("placements")):
        dim, values = inside(node, "dim"), node.args if isinstance(node, Object) else ()
        kind = node.name.rpartition(".")[2].lstrip("_") if isinstance(node, Object) else ""
        placements.append((kind, values[0] if dim is None and values else dim, fields(node).get("split_factor", 1)))
    pairs = (items(node.args if isinstance(node, Object) else node) for node in items(spec.get("shard_order")))
    order = {pair[0]: sizes_of(pair[1]) or () for pair in pairs if len(pair) == 2 and type(pair[0]) is int}
    is_full = isinstance(tensor, (TensorEntry, Composite)) and tensor.shape == value.shape
    is_whole = bool(spec) and is_full and not any(kind.endswith("Partial") for kind, *_ in placements)
    mesh = fields(spec.get("mesh"))
    ranks = mesh.get("_rank"), size_of(rank_table(mesh))
    return Distributed(value, True, flags, [(tensor, None)], *ranks, is_whole, spec.get("mesh"), placements, order)


def rank_table(mesh: dict[Any, Any]) -> Any:
    """The table of the ranks of a mesh; its name differs between versions of torch."""
    tables = (mesh.get(name) for name in ("mesh", "_rank_map", "_flatten_rank_map"))
    return next((table for table in tables if isinstance(table, (TensorEntry, tuple, list))), ())


def size_of(table: Any) -> int:
    return table.numel if isinstance(table, TensorEntry) else len(table)


def sizes_of(node: Any, limit: int = MAX_DIMENSIONS) -> tuple[int, ...] | None:
    """The numbers in a `torch.Size`, a tuple or a list; None where it is anything else, or has more than `limit`."""
    if isinstance(node, Object) and str(node.fn) == "torch.Size" and type(node.args) is tuple and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, (list, tuple)) or len(node) > limit:
        return None
    return tuple(node) if all(type(n) is int and 0 <= n < 1 << 62 for n in node) else None
