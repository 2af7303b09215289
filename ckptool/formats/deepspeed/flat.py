"""Flat vectors that ranks hold pieces of, and the tensors that were laid one after the other in them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from ckptool.checkpoint import NO_FLAGS, Composite, TensorEntry
from ckptool.checkpoint.dtypes import BY_TORCH
from ckptool.checkpoint.nodes import Global
from ckptool.formats.boxes import Chunk, Joiner
from ckptool.pickles.torch_objects import BUILDERS

FLOAT32 = BY_TORCH["float32"]

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of tensors by name, in the order in which they lie in a vector."""


def bare(node: Any) -> Any:
    """The tensor of one with attributes (`ds_id`), as a parameter of stage 3 has them; anything else as it is."""
    args: tuple[Any, ...] = node.made.args if isinstance(node, Composite) and "with attributes" in node.kind else ()
    if len(args) == 4 and isinstance(args[0], Global) and isinstance(args[2], tuple) and args[0] in BUILDERS:
        return BUILDERS[args[0]](args[2])
    return args[0] if args and isinstance(args[0], TensorEntry) else node


class RankVector(NamedTuple):
    """A vector of one dimension, and who saved it (`rank 3`)."""

    entry: TensorEntry
    owner: str


class Vector:
    """Several vectors read as one."""

    __slots__ = ("begins", "length", "pieces")

    def __init__(self, pieces: Iterable[RankVector]) -> None:
        self.pieces = list(pieces)
        ends = list(accumulate((piece.entry.shape[0] for piece in self.pieces), initial=0))
        self.begins, self.length = ends[:-1], ends[-1]

    def cut(self, begin: int, length: int) -> Iterator[RankVector]:
        """The pieces of the elements from `begin`, fewer than `length` where it ends; of nothing, an empty one."""
        at = max(0, bisect_right(self.begins, begin) - 1)
        while at < len(self.pieces):
            entry, owner = self.pieces[at]
            skip = begin - self.begins[at]
            count = max(0, min(length, entry.shape[0] - skip))
            if count or not length:
                yield RankVector(entry.narrow(0, skip, count).with_flags(NO_FLAGS), owner)
            begin, length, at = begin + count, length - count, at + 1
            if not length:
                return


Range = tuple[Vector, int, int]
"""Elements of a vector: where they begin, and how many there are."""


def join(
    joiner: Joiner, name: str, shape: tuple[int, ...], ranges: Iterable[Range], copy: Chunk | None = None
) -> TensorEntry:
    """The tensor whose elements these ranges are, in this order. copy: another of it, which has to be the same.

    Raises `Corrupt` where some are in no file.
    """
    chunks: list[Chunk] = []
    position = 0
    for vector, begin, length in ranges:
        for piece in vector.cut(begin, length):
            chunks.append(Chunk(piece.entry, (position,), piece.owner))
            position += piece.entry.shape[0]
    return joiner.flat(name, shape, chunks[0].entry.dtype if chunks else FLOAT32, chunks, copy)


def in_a_row(shapes: Shapes, paddings: Iterable[int] = ()) -> Iterator[tuple[str, int, int]]:
    """For tensors that lie one after the other (each with so many unused elements behind it): name, begin, length."""
    begin = 0
    behind = iter(paddings)
    for name, shape in shapes.items():
        length = prod(shape)
        yield name, begin, length
        begin += length + next(behind, 0)
