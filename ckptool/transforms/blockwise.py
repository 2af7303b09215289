"""Tensors computed from the values of others, block by block, while they are read: nothing is held whole.

`TensorValues` reads a tensor's elements as numbers, by their places in row-major order; `computed_tensor` makes a
tensor of a function from places to numbers. What lies between is numpy, in f32 (f64 for f64).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from ckptool.checkpoint import InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.blocks import computed, fill
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.numeric import CHUNK, Array, numbers, resolve
from ckptool.transforms.casting import rounded

ROWS = 1 << 17  # elements of rows that are computed at once
Numbers = Callable[[int, int], "Array"]
"""`(start, stop)`: the elements of these places in row-major order, as a flat array."""


class TensorValues:
    """The elements of a tensor as numbers: f32 for floats of up to 32 bits, f64 for f64, integers and bool as such."""

    __slots__ = ("_data", "entry")

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self._data = entry.row_major()

    def read(self, start: int, stop: int) -> Array:
        """The elements `start` to `stop` in row-major order, conjugate and negative bits applied; an array of its own.

        Raises `Unsupported` for a type that numpy has no numbers for.
        """
        import numpy

        size = self.entry.dtype.itemsize
        raw = numpy.empty((stop - start) * size, numpy.uint8)
        fill(self._data, start * size, raw.data)
        return numbers(resolve(raw, self.entry.dtype, self.entry.flags), self.entry.dtype)

    def rows(self, start: int, stop: int) -> Array:
        """The rows `start` to `stop` of the first dimension, in their shape."""
        width = prod(self.entry.shape[1:])
        return self.read(start * width, stop * width).reshape(stop - start, *self.entry.shape[1:])


def computed_tensor(
    dtype: DType, shape: Sequence[int], values: Numbers, inputs: Sequence[TensorEntry], location: str = "cpu"
) -> TensorEntry:
    """A tensor whose elements `values(start, stop)` gives, at most 64 K of them at a time, as floats of any width.

    They are rounded once, as torch rounds, if they are of another type than `dtype`; a `dtype` of no numbers takes
    them as they are. inputs: the tensors that they are computed from, whose checksums are verified on the way.
    """
    whole = tuple(shape)
    storages = tuple({id(entry.storage): entry.storage for entry in inputs}.values())
    if not prod(whole):
        return TensorEntry(Storage(InlineBytes(b""), location), dtype, whole, row_major_strides(whole))
    made = computed(prod(whole), dtype.itemsize, _Rounded(dtype, values).chunk, *storages)
    return TensorEntry(Storage(made, location), dtype, whole, row_major_strides(whole))


def computed_rows(
    dtype: DType, shape: Sequence[int], rows: Numbers, inputs: Sequence[TensorEntry], location: str = "cpu"
) -> TensorEntry:
    """As `computed_tensor`, but of `rows(start, stop)`: whole rows of the first dimension, about 1 MB of f32 at a time.

    For what is quicker a row at a time: products of matrices, scales of blocks of rows.
    """
    block = _Rows(tuple(shape), rows).read
    return computed_tensor(dtype, shape, partial(in_pieces, piece=block), inputs, location)


def in_pieces(start: int, stop: int, piece: Numbers) -> Array:
    """The elements from `start` to `stop` of a function that may give only the first ones at once."""
    import numpy

    parts = []
    while start < stop:
        parts.append(piece(start, stop))
        start += len(parts[-1])
    return parts[0] if len(parts) == 1 else numpy.concatenate(parts)


class _Rows:
    """The elements of rows that are made several at a time. Keeps the last block of them, as it is read in order."""

    __slots__ = ("_kept", "count", "height", "rows", "width")

    def __init__(self, shape: tuple[int, ...], rows: Numbers) -> None:
        self.rows, self.width, self.count = rows, prod(shape[1:]), shape[0]
        self.height = max(1, ROWS // max(1, self.width))
        self._kept: tuple[int, Array] | None = None

    def read(self, start: int, stop: int) -> Array:
        block = start // self.width // self.height
        begin = block * self.height * self.width
        if self._kept is None or self._kept[0] != block:
            first = block * self.height
            self._kept = block, self.rows(first, min(first + self.height, self.count)).reshape(-1)
        values = self._kept[1]
        end = min(stop, begin + len(values))
        if end == begin + len(values):
            self._kept = None  # a tree has thousands of these
        return values[start - begin : end - begin]


class _Rounded:
    __slots__ = ("dtype", "values")

    def __init__(self, dtype: DType, values: Numbers) -> None:
        self.dtype, self.values = dtype, values

    def chunk(self, start: int, stop: int) -> bytes:
        return in_type(self.values(start, stop), self.dtype)


def in_type(values: Array, dtype: DType) -> bytes:
    """The bytes of numbers in a type, rounded as torch rounds where they are floats of another."""
    import numpy

    flat = numpy.ascontiguousarray(values).reshape(-1)
    if not dtype.is_float or flat.dtype == dtype.to_numpy():
        return flat.tobytes()
    with numpy.errstate(all="ignore"):
        parts = [rounded(flat[at : at + CHUNK], dtype).tobytes() for at in range(0, len(flat), CHUNK)]
    return b"".join(parts)
