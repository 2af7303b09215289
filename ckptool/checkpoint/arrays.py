"""Arrays that are not read yet, and computing with them a block at a time: no array is ever whole in memory.

An array is a `TensorEntry`, and its views (`permute`, `narrow`, `reshape`, `transforms.views`) cost nothing. There are
three ways to compute, and they alone decide how much is in memory:

    fold(take, *arrays)                  one reading pass: `take(place, *blocks)` for each stretch of the arrays
    elementwise(make, *arrays, dtype=…)  an array whose values `make(place, *blocks)` gives when it is read
    computed_rows(dtype, shape, rows)    by rows of the first dimension: `rows(start, stop)`

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
from ckptool.checkpoint.blocks import fill, same_bytes
from ckptool.checkpoint.dtypes import CHUNK, Array, DType, aligned, by_name, in_type, numbers, resolve, scratch
from ckptool.checkpoint.strided import LazyBlocks
from ckptool.errors import Unsupported

ROWS = 1 << 17  # elements of rows that are computed at once
_ROOM, _LEAST = 8 * CHUNK, 512  # elements of all arrays that are in memory together, and of each at least
Numbers = Callable[[int, int], "Array"]
"""`(start, stop)`: the elements of these places in row-major order, as a flat array."""


def fold(take: Callable[..., Any], *arrays: TensorEntry, row: int = 1) -> None:
    """Reads arrays of equal length side by side, once, front to back: `take(place, *blocks)`, until it returns True.

    row: elements that belong together: a block holds as many whole rows as fit; a longer row comes in equal parts.
    """
    sources, count, chunk = _Sources(arrays), arrays[0].numel, _step(len(arrays))
    is_long = row > chunk
    step = -(-row // -(-row // chunk)) if is_long else chunk - chunk % row
    for start in range(0, count, row if is_long else max(count, 1)):
        stop = min(count, start + row) if is_long else count
        for place in range(start, stop, step):
            if take(place, *sources.blocks("fold", place, min(place + step, stop))) is True:
                return


def elementwise(make: Callable[..., Array], *arrays: TensorEntry, dtype: DType) -> TensorEntry:
    """An array shaped like the first, whose elements `make(place, *blocks)` computes from the same ones of each.

    They are rounded as in `computed_rows`. `make` must not keep the blocks: their memory is used again.
    """
    return _array(dtype, arrays[0].shape, arrays, arrays[-1].location, _Elements(arrays, make, dtype).read)


def resolved(entry: TensorEntry) -> TensorEntry:
    """The tensor with its conjugate and negative bits applied to the values, row-major where there were any."""
    if not (entry.flags.conj or entry.flags.neg):
        return entry
    if entry.dtype.kind not in ("float", "complex"):
        raise Unsupported(f"a negated view of type {entry.dtype} cannot be resolved")
    kind = entry.dtype.to_numpy() if entry.dtype.is_float else "u1"
    array = elementwise(lambda _, raw: raw.view(kind), entry, dtype=entry.dtype)
    return replace(array, flags=entry.flags._replace(conj=False, neg=False))


def is_same(one: TensorEntry, other: TensorEntry) -> bool:
    """True for the same type, shape and bytes."""
    is_alike = one.dtype is other.dtype and one.shape == other.shape
    return is_alike and same_bytes(resolved(one).row_major(), resolved(other).row_major())


def swapped(storage: Storage, dtype: DType | None) -> Data:
    """The elements of a big-endian file's storage in this machine's byte order; raises `Unsupported` for an untyped
    one."""
    if dtype is None:
        what = "an untyped storage in a big-endian file"
        raise Unsupported(what, "The size of its elements is not recorded, so its bytes cannot be swapped.")
    if dtype.itemsize == 1:
        return storage.data
    width = dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize
    words = TensorEntry(storage, by_name(f"u{8 * width}"), (storage.nbytes // width,), (1,))
    return elementwise(lambda _, raw: raw.view(f"u{width}").byteswap(), words, dtype=words.dtype).storage.data


def stretches(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """The rows `start` to `stop`, of `width` elements each, in stretches that fit in memory: about 1 MB of f32.

    Each is its first row and the one after its last, as `TensorValues.rows` takes them.
    """
    step = max(1, ROWS // max(1, width))
    return ((at, min(at + step, stop)) for at in range(start, stop, step))


def _step(arrays: int) -> int:
    """How many elements of each array are in memory at a time when so many arrays are read together."""
    return max(_LEAST, min(CHUNK, _ROOM // arrays))


class _Sources:
    """Arrays that are read side by side."""

    __slots__ = ("arrays", "data", "in_files")

    def __init__(self, arrays: Sequence[TensorEntry]) -> None:
        self.arrays = arrays
        self.data: list[Data] = [array.row_major() for array in arrays]
        self.in_files = not any(isinstance(data, Computed) for data in self.data)

    def blocks(self, use: str, start: int, stop: int) -> list[Array]:
        """The bytes of these elements of each array. use: the name of the scratch memory, as another pass may need its
        own meanwhile; empty for new memory."""
        sizes = [(stop - start) * array.dtype.itemsize for array in self.arrays]
        # Computed bytes may need the same scratch memory for their own inputs.
        memory = scratch(use, "u1", sum(sizes)) if use and self.in_files else aligned(sum(sizes))
        blocks, at = [], 0
        for array, data, size in zip(self.arrays, self.data, sizes, strict=True):
            block = memory[at : at + size]
            fill(data, start * array.dtype.itemsize, block.data)
            blocks.append(resolve(block, array.dtype, array.flags))
            at += size
        return blocks


class _Elements(_Sources):
    """Elements computed from those of other arrays, only the ones asked for. Not a closure: a checkpoint may have one
    of these for each of its tensors."""

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
        """The elements `start` to `stop` in row-major order, conjugate and negative bits applied, in a new array.

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
    """An array whose rows, along the first dimension, `rows(start, stop)` computes, about 1 MB of f32 at a time.

    They are rounded once, as torch rounds, to a `dtype` that is another float type; one that is no float type takes
    them as they are. inputs: the tensors they are computed from, whose checksums are verified on the way.
    """
    width, length = max(1, prod(shape[1:]) * dtype.itemsize), prod(shape) * dtype.itemsize
    blocks = LazyBlocks(length, max(1, ROWS * dtype.itemsize // width) * width, partial(_row_bytes, dtype, rows, width))
    return _array(dtype, shape, inputs, location, lambda *place: blocks.read(*place), blocks.view)  # not to be pickled


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
