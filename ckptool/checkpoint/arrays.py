"""Arrays that are not read yet, and what computes with them a block at a time: nothing is held whole.

An array is a `TensorEntry`, and its views (`permute`, `narrow`, `reshape`, `transforms.views`) cost nothing. Then there
are three ways, which alone decide how much is in memory:

    fold(take, *arrays)                one reading pass: `take(place, *blocks)` for each stretch of all of them
    each(make, *arrays, dtype=…)       elementwise: an array whose values `make(place, *blocks)` gives when it is read
    computed_rows(dtype, shape, rows)  by rows of the first dimension: `rows(start, stop)`

Blocks are bytes (uint8) in row-major order with conjugate and negative bits applied, of at most CHUNK elements, in
memory that is used again; `dtypes.numbers` reads them. `TensorValues` reads numbers from anywhere in an array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from ckptool.checkpoint import Computed, Data, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.blocks import fill
from ckptool.checkpoint.dtypes import CHUNK, Array, DType, aligned, by_name, numbers, resolve, rounded, scratch
from ckptool.checkpoint.strided import MadeBlocks
from ckptool.errors import Unsupported

ROWS = 1 << 17  # elements of rows that are computed at once
_ROOM, _LEAST = 8 * CHUNK, 512  # elements of all arrays that are in memory together, and of each at least
Numbers = Callable[[int, int], "Array"]
"""`(start, stop)`: the elements of these places in row-major order, as a flat array."""


def fold(take: Callable[..., Any], *arrays: TensorEntry, row: int = 1) -> None:
    """Reads arrays of one number of elements side by side, once, front to back: `take(place, *blocks)`, until it gives
    True.

    row: a number of elements of which as many as fit come together; a longer one comes in parts of one size.
    """
    sources, count, most = _Sources(arrays), arrays[0].numel, _step(len(arrays))
    long = row > most
    step = -(-row // -(-row // most)) if long else most - most % row
    for start in range(0, count, row if long else max(count, 1)):
        stop = min(count, start + row) if long else count
        for place in range(start, stop, step):
            if take(place, *sources.blocks("fold", place, min(place + step, stop))) is True:
                return


def each(make: Callable[..., Array], *arrays: TensorEntry, dtype: DType) -> TensorEntry:
    """An array of the shape of the first, whose elements `make(place, *blocks)` computes of the same ones of each.

    They are rounded as in `computed_rows`. `make` keeps nothing of what it is given.
    """
    return _array(dtype, arrays[0].shape, arrays, arrays[-1].location, _Elements(arrays, make, dtype).read)


def resolved(entry: TensorEntry) -> TensorEntry:
    """The tensor with its conjugate and negative bits applied to the values, row-major where there were any."""
    if not (entry.flags.conj or entry.flags.neg):
        return entry
    if entry.dtype.kind not in ("float", "complex"):
        raise Unsupported(f"a negated view of type {entry.dtype} cannot be resolved")
    kind = entry.dtype.to_numpy() if entry.dtype.is_float else "u1"
    made = each(lambda _, raw: raw.view(kind), entry, dtype=entry.dtype)
    return replace(made, flags=entry.flags._replace(conj=False, neg=False))


def swapped(storage: Storage, dtype: DType | None) -> Data:
    """The elements of a storage of a big-endian file in this machine's order. Raises `Unsupported` for an untyped
    one."""
    if dtype is None:
        what = "an untyped storage in a big-endian file"
        raise Unsupported(what, "The size of its elements is not recorded, so its bytes cannot be swapped.")
    if dtype.itemsize == 1:
        return storage.data
    width = dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize
    words = TensorEntry(storage, by_name(f"u{8 * width}"), (storage.nbytes // width,), (1,))
    return each(lambda _, raw: raw.view(f"u{width}").byteswap(), words, dtype=words.dtype).storage.data


def stretches(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """The rows from one to another, of so many elements each, in parts that are in memory together: about 1 MB of f32.

    Each as its first row and the one after its last, as `TensorValues.rows` takes them.
    """
    step = max(1, ROWS // max(1, width))
    return ((at, min(at + step, stop)) for at in range(start, stop, step))


def _step(arrays: int) -> int:
    """How many elements of each of so many arrays are in memory at a time."""
    return max(_LEAST, min(CHUNK, _ROOM // arrays))


class _Sources:
    """Arrays that are read side by side."""

    __slots__ = ("arrays", "data", "in_files")

    def __init__(self, arrays: Sequence[TensorEntry]) -> None:
        self.arrays = arrays
        self.data: list[Data] = [array.row_major() for array in arrays]
        self.in_files = not any(isinstance(data, Computed) for data in self.data)

    def blocks(self, use: str, start: int, stop: int) -> list[Array]:
        """The bytes of these elements of each. use: of the memory, which another reading may need meanwhile; empty for
        memory of its own."""
        sizes = [(stop - start) * array.dtype.itemsize for array in self.arrays]
        # What is computed may need the same memory for what it is computed from.
        memory = scratch(use, "u1", sum(sizes)) if use and self.in_files else aligned(sum(sizes))
        blocks, at = [], 0
        for array, data, size in zip(self.arrays, self.data, sizes, strict=True):
            block = memory[at : at + size]
            fill(data, start * array.dtype.itemsize, block.data)
            blocks.append(resolve(block, array.dtype, array.flags))
            at += size
        return blocks


class _Elements(_Sources):
    """Elements that are computed of those of other arrays, no others than are asked for. Not a closure: a checkpoint
    may have one of these for each of its tensors."""

    __slots__ = ("dtype", "make")

    def __init__(self, arrays: Sequence[TensorEntry], make: Callable[..., Array], dtype: DType) -> None:
        super().__init__(arrays)
        self.make, self.dtype = make, dtype

    def read(self, offset: int, length: int) -> bytes:
        import numpy

        size, step, parts = self.dtype.itemsize, _step(len(self.arrays)), []
        skip, stop = offset % size, -(-min(offset + length, self.arrays[0].numel * size) // size)
        with numpy.errstate(all="ignore"):
            for start in range(offset // size, stop, step):
                blocks = self.blocks("each", start, min(start + step, stop))
                parts.append(in_type(self.make(start, *blocks), self.dtype))
        return b"".join(parts)[skip : skip + length]


class TensorValues:
    """The elements of a tensor as numbers: f32 for floats of up to 32 bits, f64 for f64, integers and bool as such."""

    __slots__ = ("_source", "entry")

    def __init__(self, entry: TensorEntry) -> None:
        self.entry, self._source = entry, _Sources((entry,))

    def read(self, start: int, stop: int) -> Array:
        """The elements `start` to `stop` in row-major order, conjugate and negative bits applied; an array of its own.

        Raises `Unsupported` for a type that numpy has no numbers for.
        """
        return numbers(self._source.blocks("", start, stop)[0], self.entry.dtype)

    def rows(self, start: int, stop: int) -> Array:
        """The rows `start` to `stop` of the first dimension, in their shape."""
        width = prod(self.entry.shape[1:])
        return self.read(start * width, stop * width).reshape(stop - start, *self.entry.shape[1:])


def computed_rows(
    dtype: DType, shape: Sequence[int], rows: Numbers, inputs: Sequence[TensorEntry], location: str = "cpu"
) -> TensorEntry:
    """An array of whose first dimension `rows(start, stop)` gives rows, about 1 MB of f32 at a time.

    They are rounded once, as torch rounds, if they are floats of another type than `dtype`; a `dtype` of no numbers
    takes them as they are. inputs: the tensors that they are computed from, whose checksums are verified on the way.
    """
    width, length = max(1, prod(shape[1:]) * dtype.itemsize), prod(shape) * dtype.itemsize
    made = MadeBlocks(length, max(1, ROWS * dtype.itemsize // width) * width, partial(_row_bytes, dtype, rows, width))
    return _array(dtype, shape, inputs, location, made.read, made.view)


def _array(
    dtype: DType,
    shape: Sequence[int],
    inputs: Sequence[TensorEntry],
    location: str,
    read: Callable[[int, int], bytes],
    view: Callable[[int, int], memoryview] | None = None,
) -> TensorEntry:
    """An array in row-major order whose bytes are computed."""
    storages = tuple({id(entry.storage): entry.storage for entry in inputs}.values())
    length = prod(shape) * dtype.itemsize
    data = Computed(length, read, storages, view) if length else InlineBytes(b"")
    return TensorEntry(Storage(data, location), dtype, tuple(shape), row_major_strides(tuple(shape)))


def _row_bytes(dtype: DType, rows: Numbers, width: int, start: int, stop: int) -> memoryview:
    """Not a closure: a checkpoint may have one of these for each of its tensors."""
    import numpy

    with numpy.errstate(all="ignore"):
        return memoryview(in_type(rows(start // width, stop // width), dtype))


def in_type(values: Array, dtype: DType) -> bytes:
    """The bytes of numbers in a type, rounded as torch rounds where they are floats of another."""
    import numpy

    flat = numpy.ascontiguousarray(values).reshape(-1)
    if not dtype.is_float or flat.dtype == dtype.to_numpy():
        return flat.tobytes()
    with numpy.errstate(all="ignore"):
        return b"".join([rounded(flat[at : at + CHUNK], dtype).tobytes() for at in range(0, len(flat), CHUNK)])
