"""One tensor out of rectangular chunks, as the ranks of a distributed run each saved theirs.

The row-major bytes are made when they are asked for: the rectangle that a read covers is put together from the chunks
that it touches, so memory holds what was asked for and no more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from ckptool.checkpoint import Computed, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.strided import row_major
from ckptool.errors import Unsupported, counted

if TYPE_CHECKING:
    from ckptool.checkpoint.numeric import Array

MAX_RANK = 32  # numpy's, before its version 2
MAX_SPLIT = 8  # axes along which one tensor is divided


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A tensor that is the block of another one which begins at `offsets`, counted in elements."""

    entry: TensorEntry
    offsets: tuple[int, ...]


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offset of a block on every axis, and its sizes."""


def covers(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """True if the boxes lie in the shape and fill it, every element once.

    Each box adds its corners to a sum, with the signs of the corners of an integral; exactly where the corners of the
    whole are left over, every element is in one box. That is linear in the number of boxes. Raises `Unsupported` for
    boxes that are cut along more than 8 axes.
    """
    if any(not 0 <= lo <= lo + n <= full for box in boxes for lo, n, full in zip(*box, shape, strict=True)):
        return False
    whole: Box = ((0,) * len(shape), shape)
    cut = [axis for axis in range(len(shape)) if any(sizes[axis] != shape[axis] for _, sizes in boxes)]
    if len(cut) > MAX_SPLIT:
        what = f"a tensor that is divided along {counted(len(cut), 'axis', 'axes')}"
        raise Unsupported(what, "Real device meshes have three or four.")
    corners: Counter[tuple[int, ...]] = Counter()
    for begin, sizes in boxes:
        if prod(sizes):
            _add_corners(corners, [(begin[axis], begin[axis] + sizes[axis]) for axis in cut], 1)
    if prod(shape):
        _add_corners(corners, [(whole[0][axis], shape[axis]) for axis in cut], -1)
    return not any(corners.values())


def _add_corners(corners: Counter[tuple[int, ...]], edges: list[tuple[int, int]], sign: int) -> None:
    for choice in product((0, 1), repeat=len(edges)):
        corner = tuple(edge[side] for edge, side in zip(edges, choice, strict=True))
        corners[corner] += -sign if sum(choice) % 2 else sign


def assembled(shape: tuple[int, ...], chunks: list[Chunk]) -> TensorEntry:
    """The tensor of this shape that the chunks make up; they must cover it (see `covers`) and be of one type.

    Raises `Unsupported` for more than 32 dimensions.
    """
    if len(shape) > MAX_RANK:
        what = f"a tensor of {counted(len(shape), 'dimension')} in {counted(len(chunks), 'chunk')}"
        raise Unsupported(what, f"At most {MAX_RANK} are read.")
    first = chunks[0].entry
    length = prod(shape) * first.dtype.itemsize
    inputs = tuple({id(chunk.entry.storage): chunk.entry.storage for chunk in chunks}.values())
    data = Computed(length, _Assembly(shape, chunks).read, inputs) if length else InlineBytes(b"")
    return TensorEntry(Storage(data, first.location), first.dtype, shape, row_major_strides(shape))


class _Assembly:
    """The row-major bytes of a tensor in chunks, which are sorted by where they begin on the first axis."""

    __slots__ = ("begins", "chunks", "itemsize", "shape", "strides", "tallest")

    def __init__(self, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
        self.shape, self.strides = shape, row_major_strides(shape)
        self.itemsize = chunks[0].entry.dtype.itemsize
        self.chunks = sorted((chunk for chunk in chunks if chunk.entry.numel), key=lambda chunk: chunk.offsets)
        self.begins = [chunk.offsets[0] for chunk in self.chunks]
        self.tallest = max((chunk.entry.shape[0] for chunk in self.chunks), default=0)

    def read(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, prod(self.shape) * self.itemsize)
        if offset >= stop:
            return b""
        first, last = offset // self.itemsize, -(-stop // self.itemsize)
        data = b"".join(self._block(box).tobytes() for box in boxes_between(self.shape, self.strides, first, last))
        skip = offset - first * self.itemsize
        return data[skip : skip + stop - offset] if skip or len(data) != stop - offset else data

    def _block(self, box: Box) -> Array:
        """The elements in a box, from all chunks that it touches."""
        import numpy

        begin, sizes = box
        out = numpy.empty(sizes, f"V{self.itemsize}")
        from_ = bisect_left(self.begins, begin[0] - self.tallest + 1)
        for chunk in self.chunks[from_ : bisect_left(self.begins, begin[0] + sizes[0])]:
            common = _common(box, (chunk.offsets, chunk.entry.shape))
            if common is not None:
                place = tuple(slice(lo - b, lo - b + n) for lo, n, b in zip(*common, begin, strict=True))
                data = row_major(_cut(chunk, common))
                out[place] = numpy.frombuffer(data.read(0, data.length), out.dtype).reshape(common[1])
        return out


def boxes_between(shape: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes, in order, that hold the elements `start` to `stop` (in row-major order) of a tensor without gaps."""
    while start < stop:
        axis = next(a for a, step in enumerate(strides) if start % step == 0 and step <= stop - start)
        begin = tuple(start // step % size for step, size in zip(strides, shape, strict=True))
        count = min(shape[axis] - begin[axis], (stop - start) // strides[axis])
        yield begin, (*(1 for _ in range(axis)), count, *shape[axis + 1 :])
        start += count * strides[axis]


def _common(one: Box, other: Box) -> Box | None:
    """The overlap of two boxes; None without one."""
    begin, sizes = [], []
    for a, n, b, m in zip(*one, *other, strict=True):
        lo, hi = max(a, b), min(a + n, b + m)
        if lo >= hi:
            return None
        begin.append(lo)
        sizes.append(hi - lo)
    return tuple(begin), tuple(sizes)


def _cut(chunk: Chunk, box: Box) -> TensorEntry:
    """The part of a chunk that is in a box which lies within it."""
    entry = chunk.entry
    steps = zip(box[0], chunk.offsets, entry.stride, strict=True)
    return replace(entry, shape=box[1], offset=entry.offset + sum((lo - at) * step for lo, at, step in steps))
