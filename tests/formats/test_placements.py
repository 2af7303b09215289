"""Which part of a tensor a rank has, by torch's own placements and arithmetic; and which parts cover one."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckptool.checkpoint import InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import BY_TORCH
from ckptool.checkpoint.files import Folder
from ckptool.errors import LimitExceeded, Unsupported
from ckptool.formats.pieces import Joiner, covers
from ckptool.formats.placements import Axis, Mesh, blocks, encoded_order, runs_of
from tests.support.looped import looped

I64 = BY_TORCH["int64"]


def random_case(seed: int) -> tuple[tuple[int, ...], tuple[int, ...], list[object]]:
    """A shape, the sizes of a mesh, and a placement for each of its axes."""
    rng = random.Random(seed)
    shape = tuple(rng.choice((0, 1, 2, 3, 5, 7, 8, 12)) for _ in range(rng.randint(1, 3)))
    sizes = tuple(rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 3)))
    kinds = (
        lambda: Replicate(),
        lambda: Shard(rng.randrange(len(shape))),
        lambda: _StridedShard(rng.randrange(len(shape)), split_factor=rng.choice((2, 3, 4))),
    )
    return shape, sizes, [rng.choice(kinds)() for _ in sizes]


def local_of(full: torch.Tensor, sizes: tuple[int, ...], place: tuple[int, ...], placements: list) -> torch.Tensor:
    """What a rank at this place has, as torch distributes a tensor: from left to right."""
    for size, index, placement in zip(sizes, place, placements, strict=True):
        if not isinstance(placement, Replicate):
            full = placement._split_tensor(full, size, with_padding=False)[0][index]
    return full


def entry_of(tensor: torch.Tensor) -> TensorEntry:
    shape = tuple(tensor.shape)
    return TensorEntry(
        Storage(InlineBytes(tensor.contiguous().numpy().tobytes())), I64, shape, row_major_strides(shape)
    )


def axis_of(placement: object) -> Axis:
    if isinstance(placement, Replicate):
        return None
    return placement.dim, getattr(placement, "split_factor", 1)  # type: ignore[attr-defined]


@looped("seed", range(400))
def test_any_mesh_and_placements_give_the_places_that_torch_gives(seed: int) -> None:
    shape, sizes, placements = random_case(seed)
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    axes = tuple(map(axis_of, placements))
    chunks = []
    for rank, place in enumerate(product(*map(range, sizes))):
        mesh, local = Mesh(sizes, (), place), local_of(full, sizes, place, placements)
        told = _compute_local_shape_and_global_offset(shape, sizes, list(place), placements)
        assert tuple(local.shape) == tuple(told[0])
        runs = runs_of(shape, mesh, axes, {})
        if local.numel():
            assert tuple(each[0][0] for each in runs) == tuple(told[1])
        found = blocks(entry_of(local), shape, mesh, axes, {}, f"rank {rank}")
        assert found is not None
        chunks += found
    whole = Joiner(Folder("."), "folder").tensor("weight", shape, I64, chunks)
    assert whole.bytes() == full.numpy().tobytes()


def indices(runs: list[list[tuple[int, int]]]) -> list[int]:
    return [first + n for first, length in runs[0] for n in range(length)]


@looped("rows", [*range(1, 41), 97])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 4), (4, 3)])
def test_rows_that_do_not_divide_are_where_fsdp_beside_tensor_parallelism_puts_them(
    rows: int, dp: int, tp: int
) -> None:
    """Tensor parallelism divides first, and FSDP what is left; the placements say so by a strided shard."""
    full, axes = torch.arange(rows), ((0, tp), (0, 1))
    encoded = encoded_order(axes, (dp, tp))
    assert encoded == (((0, 1), (0, 1)), {0: (1, 0)})
    readings: list[list[bool]] = []
    for i, j in product(range(dp), range(tp)):
        column = Shard(0)._split_tensor(full, tp, with_padding=False)[0][j]
        local = Shard(0)._split_tensor(column, dp, with_padding=False)[0][i]
        mesh = Mesh((dp, tp), (), (i, j))
        assert indices(runs_of((rows,), mesh, *encoded)) == local.tolist()
        left_to_right = indices(runs_of((rows,), mesh, axes, {}))
        readings.append([len(left_to_right) == len(local), left_to_right == local.tolist()])
    fits, same = zip(*readings, strict=True)
    assert all(same) or not all(fits)  # else nobody could tell which is meant


def test_a_split_into_very_many_pieces_is_refused() -> None:
    with pytest.raises(LimitExceeded):
        runs_of((10**12,), Mesh((2,), (), (0,)), ((0, 10**9),), {})


def test_boxes_that_only_have_the_right_volume() -> None:
    assert not covers((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))])
    assert not covers((4, 4), [((0, 0), (4, 2)), ((2, 0), (2, 4))])
    assert not covers((2, 2), [((0, 0), (1, 1)), ((0, 0), (1, 1)), ((1, 1), (1, 1)), ((1, 1), (1, 1))])
    assert not covers((4,), [((0,), (2,)), ((3,), (2,))])
    assert covers((4,), [((2,), (2,)), ((0,), (2,)), ((4,), (0,))])
    assert covers((), [((), ())]) and not covers((), [((), ()), ((), ())])
    with pytest.raises(Unsupported, match="sharded along 9 axes"):
        covers((2,) * 9, [((0,) * 9, (1,) * 9)])
