"""One tensor out of rectangular chunks: any division that covers it gives its bytes, at any place; no other is
believed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ckptool.checkpoint import row_major_strides
from ckptool.errors import Unsupported
from ckptool.formats.boxes import Piece
from ckptool.formats.pieces import assembled, boxes_between, covers
from tests.support.entries import entry_of
from tests.support.looped import looped
from tests.support.processes import is_quick


def cut(tensor: torch.Tensor, boxes: list[Any]) -> list[Piece]:
    parts = []
    for begin, sizes in boxes:
        part = tensor[tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))]
        parts.append(Piece(entry_of(part), begin))
    return parts


def random_boxes(shape: tuple[int, ...], cuts: int, chosen: Any) -> list[Any]:
    """A division of the shape by random cuts, each of one of the boxes so far."""
    boxes: list[Any] = [((0,) * len(shape), shape)]
    for _ in range(cuts):
        begin, sizes = boxes.pop(chosen.randrange(len(boxes)))
        axis = chosen.randrange(len(shape))
        n = chosen.randint(0, sizes[axis])
        boxes.append((begin, (*sizes[:axis], n, *sizes[axis + 1 :])))
        boxes.append(
            ((*begin[:axis], begin[axis] + n, *begin[axis + 1 :]), (*sizes[:axis], sizes[axis] - n, *sizes[axis + 1 :]))
        )
    chosen.shuffle(boxes)
    return boxes


@looped("seed", range(12))
@pytest.mark.parametrize("shape", [(12,), (7, 9), (5, 1, 6), (3, 4, 2, 5), (0, 4)])
def test_any_division_gives_the_tensor(shape: tuple[int, ...], seed: int) -> None:
    chosen = random.Random(seed)
    tensor = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.int16)[: torch.Size(shape).numel()].reshape(
        shape
    )
    boxes = random_boxes(shape, seed, chosen)
    assert covers(shape, boxes)
    whole = assembled(shape, cut(tensor, boxes))
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert whole.shape == shape and whole.bytes() == raw
    for _ in range(20):  # any place and order
        at, size = chosen.randrange(len(raw) + 1), chosen.randrange(len(raw) + 5)
        assert whole.storage.data.read(at, size) == raw[at : at + size]
    solid = [box for box in boxes if 0 not in box[1]]
    if solid:
        assert not covers(shape, [box for box in boxes if box is not solid[0]])
        assert not covers(shape, [*boxes, solid[0]])
        grown = (solid[0][0], (solid[0][1][0] + 1, *solid[0][1][1:]))
        assert not covers(shape, [grown if box is solid[0] else box for box in boxes])


def test_the_boxes_of_a_range_are_that_range() -> None:
    shape, order = (3, 4, 5), torch.arange(60).reshape(3, 4, 5)
    for start in range(0, 60, 7):
        for stop in range(start, 61, 3):
            got: list[int] = []
            for begin, sizes in boxes_between(shape, row_major_strides(shape), start, stop):
                got += order[tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))].reshape(-1).tolist()
            assert got == list(range(start, stop))


def test_boxes_that_only_have_the_right_volume() -> None:
    assert not covers((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))])
    assert not covers((4, 4), [((0, 0), (4, 2)), ((2, 0), (2, 4))])
    assert not covers((2, 2), [((0, 0), (1, 1)), ((0, 0), (1, 1)), ((1, 1), (1, 1)), ((1, 1), (1, 1))])
    assert not covers((4,), [((0,), (2,)), ((3,), (2,))])
    assert covers((4,), [((2,), (2,)), ((0,), (2,)), ((4,), (0,))])
    assert covers((), [((), ())]) and not covers((), [((), ()), ((), ())])
    with pytest.raises(Unsupported, match="divided along 9 axes"):
        covers((2,) * 9, [((0,) * 9, (1,) * 9)])


def test_twenty_thousand_chunks_take_no_time() -> None:
    def work() -> None:
        assert covers((20_000, 4), [((i, 0), (1, 4)) for i in range(20_000)])
        assert covers((100, 200), [((i, j), (1, 1)) for i in range(100) for j in range(200)])

    assert is_quick(work, 1)
