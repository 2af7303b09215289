"""What ranks saved with `torch.save`: which pieces of the tensors that they hold together (DTensor, ShardedTensor) each
file has; and their trees joined, walked side by side.

DTensors and ShardedTensors are assembled from the ranks' shards. Plain tensors are replicas, which have to agree; any
other value is the first rank's.

Source: torch/distributed/tensor (placement_types.py, _dtensor_spec.py, _utils.py), torch/distributed/device_mesh.py,
torch/distributed/_mesh_layout.py, torch/distributed/_shard (sharded_tensor, metadata.py), torch 2.0 to 2.13. A DTensor
is a local tensor with a mesh (a table of ranks) and for every axis of the mesh a placement; the place of the local
tensor follows from the rank's coordinate. A ShardedTensor lists the places of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, product
from math import prod
from typing import Any

from ckptool.checkpoint import Composite, Flags, Note, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.graph import alike, visit
from ckptool.checkpoint.nodes import Global, brief, fields, inside, items, same_kind
from ckptool.checkpoint.tree import Path, address
from ckptool.errors import LimitExceeded, Unsupported, counted, form, listed
from ckptool.facts import dataclass, field, replace
from ckptool.formats.distributed import Distributed, Order, distributed, rank_table, size_of, sizes_of
from ckptool.formats.folder import another_run, damaged
from ckptool.formats.marks import noted
from ckptool.formats.pieces import DIVIDED, STEPS, Box, Joiner, Piece

MAX_MESH = 1 << 20  # ranks
MAX_RUNS = 1_024  # of a rank's part of a tensor along one dimension; 4 times as many in all

Axis = tuple[int, int] | None
"""A placement on one axis of a mesh: the dimension that is divided and its split factor; None for replicas."""
Run = tuple[int, int]  # the first index of the whole, and a length
_Strides = tuple[tuple[int, ...], tuple[int, ...]]  # the sizes that an axis was flattened from, and their strides


@dataclass(frozen=True, slots=True, eq=False)
class RankShare:
    """The blocks of a tensor that one rank has.

    agreed: what all ranks have to say of it alike.  table: the ranks of its mesh; those of two shares are the same, or
    have no rank in common.

    readings: its blocks as the placements can be read, from left to right, or as the order that strided ones encode,
    which is how FSDP beside tensor parallelism divides; None where the local tensor does not fit. They are the same
    where everything divides, and where they are not, only one fits the local tensors of all ranks.
    """

    file: RankFile
    shape: tuple[int, ...]
    dtype: DType
    agreed: tuple[Any, ...]
    table: tuple[int, ...]
    readings: list[list[Piece] | None]
    flags: Flags


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks, of these sizes. table: the ranks it was cut from.  coordinate: that of the rank that saved."""

    sizes: tuple[int, ...]
    table: tuple[int, ...]
    coordinate: tuple[int, ...]


@dataclass(slots=True, eq=False)
class RankFile:
    """A file of one rank, in a folder of `world` ranks. `where`: its name, for messages."""

    folder: str
    where: str
    rank: int
    world: int
    tables: dict[tuple[int, ...], tuple[int, ...]]  # of all files, each once
    _meshes: dict[int, tuple[Any, Mesh]] = field(default_factory=dict)

    def share(self, name: str, saved: Distributed) -> RankShare:
        """The blocks of the tensor called `name` that are in this file.

        Raises `Conflict` for facts that contradict each other, `Unsupported` for sums (Partial) and local tensors that
        are not plain ones, `Corrupt` or `LimitExceeded` for tables that cannot be read.
        """
        shape, dtype = saved.tensor.shape, saved.tensor.dtype
        if shape is None or dtype is None:
            raise damaged(self.path, f"{name} has no shape or type")
        for local, _ in saved.local:
            if isinstance(local, TensorEntry) and local.dtype != dtype:
                raise another_run(self.path, f"{name} is {dtype}, but its values here are {local.dtype}")
        if not saved.is_dtensor:
            if sizes_of(saved.facts.get("size")) not in (None, shape):
                raise another_run(self.path, f"{name} has the shape {list(shape)}, but its metadata says otherwise")
            places = tuple(map(_shard_place, items(saved.facts.get("shards_metadata"))))  # of the shards of all ranks
            chunks: list[Piece] = []
            for local, metadata in saved.local:
                place = _shard_place(metadata)
                if not isinstance(local, TensorEntry) or place is None:
                    raise damaged(self.path, f"{name} has a shard without values or without a place")
                begin, sizes, rank = place
                if sizes != local.shape or place[:2] not in [shard[:2] for shard in places if shard]:
                    what = f"{name} has {list(local.shape)} at {list(begin)}, where its metadata has no shard"
                    raise another_run(self.path, what)
                if rank not in (None, self.rank):
                    raise another_run(self.path, f"{name} was saved by rank {rank:,}")
                chunks.append(Piece(local, begin, self.owner))
            return RankShare(self, shape, dtype, places, (), [chunks], saved.flags)
        ((local, _),) = saved.local
        if not isinstance(local, TensorEntry):
            kind = local.kind if isinstance(local, Composite) else type(local).__name__
            what = f"{self.path}: the part of {name} that is here is a {kind}, no plain tensor"
            raise Unsupported(what, fix="With torch: call full_tensor() on all ranks, and save that.")
        if id(saved.mesh) not in self._meshes:
            self._meshes[id(saved.mesh)] = saved.mesh, self._read_mesh(name, fields(saved.mesh))
        for kind, *_ in saved.placements:
            if kind not in ("Shard", "StridedShard", "Replicate"):
                what, why = f"{self.path}: {name} has the placement {kind}", "Of a Partial each rank has one summand."
                raise Unsupported(what, why, "With torch: redistribute it to Shard or Replicate before saving.")
        mesh = self._meshes[id(saved.mesh)][1]
        try:
            return self.divided(local, shape, dtype, mesh, saved.placements, saved.flags, saved.order)
        except ValueError as error:
            raise damaged(self.path, f"{name} cannot be sharded the way it says: {error}") from None

    def divided(
        self,
        local: TensorEntry,
        shape: tuple[int, ...],
        dtype: DType,
        mesh: Mesh,
        placements: Sequence[tuple[Any, Any, Any]],
        flags: Flags,
        order: Order | None = None,
    ) -> RankShare:
        """The blocks of a tensor that a mesh divides, in this order or, where none is given, as the placements read.

        placements: on each axis of the mesh `Replicate`, or `Shard` or `StridedShard` with the dimension and the split
        factor. Raises `ValueError` for impossible ones.
        """
        axes: list[Axis] = []
        for kind, dim, split in placements:
            fits = type(dim) is int and type(split) is int and -len(shape) <= dim < len(shape) and split > 0
            if kind != "Replicate" and not (kind in ("Shard", "StridedShard") and fits):
                raise ValueError(f"along dimension {brief(dim)} of {len(shape)}")
            axes.append(None if kind == "Replicate" else (dim % len(shape), split))
        if len(axes) != len(mesh.sizes):
            on = f"on a mesh of {counted(len(mesh.sizes), 'axis', 'axes')}"
            raise ValueError(f"by {counted(len(axes), 'placement')} {on}")
        orders = [(tuple(axes), order)] if order else [(tuple(axes), {}), encoded_order(tuple(axes), mesh.sizes)]
        readings = [blocks(local, shape, mesh, *variant, self.owner) for variant in orders]
        agreed = mesh.sizes, tuple(axes), tuple((order or {}).items())
        return RankShare(self, shape, dtype, agreed, mesh.table, readings, flags)

    def mesh(self, ranks: tuple[int, ...], axes: Sequence[_Strides]) -> Mesh:
        """The mesh with these axes, cut from a table of ranks that this one is in."""
        place = ranks.index(self.rank)
        coordinate = [0] * len(axes)
        for axis, flattened in enumerate(axes):
            for size, stride in zip(*flattened, strict=True):
                coordinate[axis] = coordinate[axis] * size + place // stride % size
        sizes = tuple(prod(sizes) for sizes, _ in axes)
        return Mesh(sizes, self.tables.setdefault(ranks, ranks), tuple(coordinate))

    @property
    def path(self) -> str:
        return os.path.join(self.folder, self.where)

    @property
    def owner(self) -> str:
        return f"rank {self.rank}"

    def _read_mesh(self, name: str, facts: dict[Any, Any]) -> Mesh:
        grid, table = facts.get("mesh"), rank_table(facts)
        if size_of(table) > MAX_MESH:
            raise LimitExceeded(f"{self.path}: the mesh of {name} has more than {MAX_MESH:,} ranks")
        ranks = tuple(table.numpy().reshape(-1).tolist() if isinstance(table, TensorEntry) else items(table))
        if not ranks or not all(type(rank) is int and rank >= 0 for rank in ranks):
            raise damaged(self.path, f"{name} has a mesh without a table of ranks")
        if max(ranks) >= self.world:
            files = counted(self.world, "rank")
            raise another_run(self.path, f"{name} is on a mesh with a rank {max(ranks):,}; there are files of {files}")
        if self.rank not in ranks or facts.get("_rank", self.rank) != self.rank:
            raise another_run(self.path, f"{name} was saved by rank {brief(facts.get('_rank'))} of its mesh")
        axes = row_major_axes(grid.shape) if isinstance(grid, TensorEntry) else _layout_axes(facts.get("_layout"))
        if axes is None or prod(prod(sizes) for sizes, _ in axes) > len(ranks):
            raise damaged(self.path, f"{name} has a mesh whose axes do not fit its table of ranks")
        mesh = self.mesh(ranks, axes)
        saved = facts.get("_coordinate_on_dim")
        if isinstance(saved, (list, tuple)) and tuple(saved) != mesh.coordinate:
            claim = f"is at {brief(tuple(saved), 60)} of its mesh, whose table says {mesh.coordinate}"
            raise another_run(self.path, f"{name} {claim}")
        return mesh


def _shard_place(node: Any) -> tuple[tuple[int, ...], tuple[int, ...], int | None] | None:
    """The offsets and sizes of a shard, and the rank that has it."""
    begin, sizes = sizes_of(inside(node, "shard_offsets")), sizes_of(inside(node, "shard_sizes"))
    rank = inside(node, "placement._rank")
    return (begin, sizes, rank if type(rank) is int else None) if begin is not None and sizes is not None else None


def row_major_axes(shape: tuple[int, ...]) -> list[_Strides]:
    """The axes of a mesh whose table has its shape."""
    return [((size,), (stride,)) for size, stride in zip(shape, row_major_strides(shape), strict=True)]


def _layout_axes(node: Any) -> list[_Strides] | None:
    """The axes of a mesh that was cut from a larger table."""
    if (axes_of := inside(node, "axes")) is not None:
        axis_pairs = [(inside(axis, "shape"), inside(axis, "stride")) for axis in items(axes_of)]
    else:
        sizes = inside(node, "shape") or inside(node, "sizes")
        strides = inside(node, "stride") or inside(node, "strides")
        pairs = zip(items(sizes), items(strides), strict=False)
        axis_pairs = list(pairs) if isinstance(sizes, tuple) else [(sizes, strides)]
    axes = [(_numbers(sizes), _numbers(strides)) for sizes, strides in axis_pairs]
    fits = all(len(a) == len(b) <= MAX_RUNS and all(n > 0 for n in (*a, *b)) for a, b in axes)
    return axes if axes and fits else None


def _numbers(node: Any) -> tuple[int, ...]:
    """The numbers in nested tuples, in order; (0,), which no layout has, for anything else."""
    if not isinstance(node, (tuple, list)):
        return (node,) if type(node) is int else (0,)
    flat = [number for item in items(node) for number in (items(item) or (item,))]
    return tuple(flat) if all(type(number) is int for number in flat) else (0,)


def blocks(
    local: TensorEntry, shape: tuple[int, ...], mesh: Mesh, axes: tuple[Axis, ...], order: Order, owner: str
) -> list[Piece] | None:
    """The blocks of the whole that a local tensor is; None where its shape is not the one that the placements give."""
    runs = runs_of(shape, mesh, axes, order)
    if local.shape != tuple(sum(length for _, length in dim) for dim in runs):
        return None
    if (count := prod(len(dim) for dim in runs)) > 4 * MAX_RUNS:
        raise LimitExceeded(f"a local tensor in {counted(count, 'block')}", "Real ones have a few.")
    if not local.numel:
        return [Piece(local, tuple(dim[0][0] if dim else n for dim, n in zip(runs, shape, strict=True)), owner)]
    chunks = []
    for place in product(*map(_with_offsets, runs)):
        box: Box = tuple(begin for _, begin, _ in place), tuple(length for _, _, length in place)
        skip = sum(at * stride for (at, _, _), stride in zip(place, local.stride, strict=True))
        chunks.append(Piece(replace(local, shape=box[1], offset=local.offset + skip), box[0], owner))
    return chunks


def _with_offsets(runs: list[Run]) -> list[tuple[int, int, int]]:
    """Each run with its offset in the local tensor."""
    return [(at, *run) for at, run in zip(accumulate((length for _, length in runs), initial=0), runs, strict=False)]


def runs_of(shape: tuple[int, ...], mesh: Mesh, axes: tuple[Axis, ...], order: Order) -> list[list[Run]]:
    """For each dimension the indices of the whole that a rank has, in the order of its local tensor.

    The axes of the mesh divide from left to right, or in the order given for a dimension.
    """
    runs: list[list[Run]] = [[(0, size)] if size else [] for size in shape]
    for dim in range(len(shape)):
        dividing = [axis for axis, placement in enumerate(axes) if placement is not None and placement[0] == dim]
        stated = order.get(dim, ())
        for axis in stated if sorted(stated) == dividing else dividing:
            placement = axes[axis]
            assert placement is not None
            runs[dim] = _share_of_runs(runs[dim], placement[1], mesh.sizes[axis], mesh.coordinate[axis])
    return runs


def encoded_order(axes: tuple[Axis, ...], sizes: tuple[int, ...]) -> tuple[tuple[Axis, ...], Order]:
    """The placements without split factors, and for each dimension the order of the axes of the mesh that these encode.

    A split factor is the number of shards by axes further right that come before it. Where they encode no order, the
    placements are as they were.
    """
    order: Order = {}
    for axis in reversed(range(len(axes))):
        dim, split = axes[axis] or (None, 1)
        behind = order.get(dim, ())
        places = [place for place in range(len(behind) + 1) if prod(sizes[a] for a in behind[:place]) == split]
        if dim is not None and not places:
            return axes, {}
        if dim is not None:
            order[dim] = (*behind[: places[0]], axis, *behind[places[0] :])
    return tuple(None if placement is None else (placement[0], 1) for placement in axes), order


def _share_of_runs(runs: list[Run], split: int, count: int, index: int) -> list[Run]:
    """The share with this index: of each of `split` pieces, one of `count`. Pieces are as those of `torch.chunk`."""
    total = sum(length for _, length in runs)
    step = -(-total // split)
    if min(split, total) > MAX_RUNS:
        raise LimitExceeded(f"a split factor of {split:,}", f"At most {MAX_RUNS:,} are followed.")
    share: list[Run] = []
    for begin in range(0, total, step or 1):
        size = min(step, total - begin)
        low = min(size, -(-size // count) * index)
        high = min(size, low - (-size // count))
        for at, first, length in _with_offsets(runs):  # the indices from place `low` to `high` among them
            start, stop = max(begin + low, at), min(begin + high, at + length)
            if start >= stop:
                continue
            if share and sum(share[-1]) == first + start - at:
                share[-1] = share[-1][0], share[-1][1] + stop - start
            else:
                share.append((first + start - at, stop - start))
    return share


# The ranks' trees ----------------------------------------------------------------------------------------------------

Described = Callable[[RankFile, Path, TensorEntry], RankShare | None]
DIFFERENT, NOT_JOINED = "ranks-differ", "not-joined"  # of the notes
UNLIKE = "value differs", "values differ", "between ranks, and the first rank's is used"
MAX_DEPTH = 200
_HOLDERS = (dict, list, tuple, TensorEntry, Composite)


def joined_trees(
    joiner: Joiner,
    name: str,
    files: Sequence[RankFile],
    trees: Sequence[Any],
    described: Described | None = None,
    *,
    apart: bool = False,
) -> Any:
    """The tree joined from those that ranks saved as `name`, each in its file; what differs is noted.

    described: gives the blocks that a plain tensor is, where a table says how it is divided.  apart: where the trees
    differ (random states, tensors of which nothing says whether they are divided), and no tensor in them is divided,
    each rank's stays as it is, by its rank; else different tensors are `Unsupported`. Raises `Conflict` for ranks of
    different steps or runs, and what `Joiner.tensor` raises.
    """
    walk, different = _SideBySide(joiner, described), dict(joiner.different)
    tree = walk.join((name,), files, trees)
    if not walk.counts_steps and len(files) > 1:
        joiner.untied += [file.where for file in files]
    for path, (entry, _) in walk.differing.items():
        if str(path[-1]).rpartition(".")[2] in STEPS and entry.numel == 1:
            raise another_run(joiner.where, f"{address(path)} is one step on some ranks and another on others")
    if apart and not walk.distributed and (places := [*map(address, walk.differing), *walk.unequal]):
        joiner.different = different
        what = f"{listed(places, 2)} {form(len(places), 'is', 'are')} not the same on all ranks"
        joiner.notes.append(Note(NOT_JOINED, f"{name} is not joined: {what}, so it holds what each rank saved"))
        return {f"rank {file.rank}": tree for file, tree in zip(files, trees, strict=True)}
    differing = [] if walk.distributed else list(walk.differing.values())  # they may be parts of larger ones
    unjoinable = [what for entry, what in differing if entry.dtype.kind != "uint" and what[-1:] == ")"]  # shapes differ
    unjoinable = unjoinable or [what for entry, what in differing if entry.dtype.kind in ("float", "complex")]
    if unjoinable:
        what = f"{joiner.where}: the ranks saved different plain tensors as {name}: {listed(unjoinable, 3)}"
        fix = "Save a full state dict: torch.distributed's get_model_state_dict(…, full_state_dict=True)"
        raise Unsupported(what, "No file says whether or how they are sharded.", fix)
    for path, (entry, what) in walk.differing.items():  # which should be the same on all ranks
        if str(path[-1]).rpartition(".")[2] in DIVIDED or entry.flags.requires_grad or what.endswith(")"):
            what += " differs between ranks, is not sharded, and looks like a weight"
            raise another_run(joiner.where, what)
    unlike = (f"{place} (unlike {listed(files, 2)})" for place, files in walk.unequal.items())
    joiner.notes += noted(DIFFERENT, unlike, *UNLIKE)
    return tree


class _SideBySide:
    """The state of walking the trees of one set of files.

    distributed: how many tensors the ranks hold together.  differing: plain tensors that differ between ranks.
    unequal: addresses of other values that differ, and the files whose value is not that of the first.
    counts_steps: a number of steps was compared.
    """

    def __init__(self, joiner: Joiner, described: Described | None) -> None:
        self.joiner, self.where, self.described = joiner, joiner.where, described
        self.distributed, self.counts_steps = 0, False
        self.differing: dict[Path, tuple[TensorEntry, str]] = {}
        self.unequal: dict[str, list[str]] = {}
        self._joined: dict[tuple[int, ...], Any] = {}

    def join(self, path: Path, files: Sequence[RankFile], values: Sequence[Any]) -> Any:
        """The joined value at `path`, from those that these files have there."""
        if len(path) > MAX_DEPTH:
            raise LimitExceeded(f"{self.where}: values nested more than {MAX_DEPTH} deep", "No real checkpoint is.")
        self.counts_steps |= path[-1] in STEPS
        if any(isinstance(value, (TensorEntry, Composite)) for value in values):
            return self._join_tensor(path, files, values)
        kind = next((k for k in (dict, list, tuple) if all(isinstance(value, k) for value in values)), None)
        uneven = kind is not dict and kind and len({len(value) for value in values}) > 1
        if kind is None or uneven or (kind is not dict and not any(isinstance(i, _HOLDERS) for v in values for i in v)):
            return self._compared(path, files, values)
        key = tuple(map(id, values))
        if key not in self._joined:
            if kind is dict:
                joined = {}
                for name in dict.fromkeys(chain(*values)):
                    present = [(file, value[name]) for file, value in zip(files, values, strict=True) if name in value]
                    if absent := [file.where for file, value in zip(files, values, strict=True) if name not in value]:
                        self.unequal.setdefault(address((*path, name)), absent)
                    joined[name] = self.join((*path, name), *zip(*present, strict=True))
                self._joined[key] = same_kind(values[0], joined)
            else:
                rows = enumerate(zip(*values, strict=True))
                self._joined[key] = kind(self.join((*path, i), files, items) for i, items in rows)
        return self._joined[key]

    def _join_tensor(self, path: Path, files: Sequence[RankFile], values: Sequence[Any]) -> Any:
        name = address(path)
        tensors = [tensor for tensor in map(distributed, values) if tensor is not None]
        if tensors and len(tensors) < len(values):
            raise another_run(self.where, f"{name} is sharded in some of the ranks' files and whole in others")
        if tensors:
            return self._from_shares(name, [f.share(name, tensor) for f, tensor in zip(files, tensors, strict=True)])
        entries = [value for value in values if type(value) is TensorEntry]
        if len(entries) < len(values):
            return self._compared(path, files, values)
        if self.described is not None:
            shares = [self.described(file, path, entry) for file, entry in zip(files, entries, strict=True)]
            if None not in shares:
                return self._from_shares(name, [share for share in shares if share is not None])
        first = entries[0]
        if other := next((e for e in entries if (e.shape, e.dtype) != (first.shape, first.dtype)), None):
            shapes = f"{first.dtype}{list(first.shape)} and {other.dtype}{list(other.shape)}"
            self.differing[path] = first, f"{name} ({shapes})"
            return first
        copies = [Piece(entry, (0,) * len(entry.shape), f.owner) for f, entry in zip(files, entries, strict=True)]
        tensor = self.joiner.replicated(name, copies)
        if name in self.joiner.different:
            self.differing[path] = first, name
        return tensor

    def _from_shares(self, name: str, shares: Sequence[RankShare]) -> TensorEntry:
        """The tensor that these shares of the ranks make up."""
        self.distributed += 1
        first = shares[0]
        for share in shares:
            sources = f"{first.file.where} and {share.file.where}"
            if (share.shape, share.dtype) != (first.shape, first.dtype):
                one, other = f"{first.dtype}{list(first.shape)}", f"{share.dtype}{list(share.shape)}"
                raise another_run(self.where, f"{name} is {one} and {other}, by {sources}")
            if share.agreed != first.agreed:
                raise another_run(self.where, f"{name} is sharded in two ways, by {sources}")
        tables = dict.fromkeys(share.table for share in shares)
        if sum(map(len, tables)) > len({rank for table in tables for rank in table}):
            raise another_run(self.where, f"{name} is sharded over overlapping meshes")
        fits = (reading for reading in zip(*(share.readings for share in shares), strict=True) if None not in reading)
        if (blocks := next(fits, None)) is None:  # the reading that fits all of them
            misfit = next(share for share in shares if None in share.readings)
            what = f"{name} has a different shape here than its rank's part of {list(misfit.shape)} would have"
            raise another_run(misfit.file.path, what)
        tensor = self.joiner.tensor(name, first.shape, first.dtype, chain(*filter(None, blocks)))
        flags = first.flags
        return tensor.with_flags(tensor.flags._replace(requires_grad=flags.requires_grad, parameter=flags.parameter))

    def _compared(self, path: Path, files: Sequence[RankFile], values: Sequence[Any]) -> Any:
        """The first rank's value; notes which have another. Raises `Conflict` where that is a part of a tensor, or a
        step."""
        name, first = address(path), values[0]
        where = [
            file.where for file, value in zip(files, values, strict=True) if not alike(first, value, equal=same_leaf)
        ]
        if where:
            if any(distributed(node) for value in values for node in visit(value)):
                what = "holds sharded tensors, but not of one kind on all ranks"
                raise another_run(self.where, f"{name} {what}")
            if path and path[-1] in STEPS and all(type(value) in (int, float) for value in values):
                what = f"{name} is {first!r} by {files[0].where}, and another step by {where[0]}"
                raise another_run(self.where, what)
            self.unequal.setdefault(name, where)
        return first


def same_leaf(one: Any, other: Any) -> bool:
    """True for values without parts, or tensors, that are written alike."""
    if isinstance(one, TensorEntry):
        ours, theirs = ((e.dtype.name, e.shape, e.stride, e.storage.crc, e.storage.nbytes) for e in (one, other))
        return ours == theirs
    return not isinstance(one, Global) and bool(one == other or (one != one and other != other))
