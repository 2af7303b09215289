"""Strided views brought into row-major order, piece by piece, in bounded memory.

A view is cut into rectangles of a few megabytes of output. Of each, the parts that lie close together in the storage
are read at once (the rest of the span is thrown away), the others run by run, and numpy puts the elements in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Computed, Data, FileRange, InlineBytes, TensorEntry, row_major_strides
from ckptool.checkpoint.blocks import files_of, fill, verify
from ckptool.checkpoint.dtypes import aligned, packed, resolve, scratch
from ckptool.checkpoint.files import unchanged
from ckptool.checkpoint.paths import file_problem
from ckptool.commands import arg
from ckptool.errors import BadTensor, LimitExceeded

if TYPE_CHECKING:
    import numpy

    from ckptool.checkpoint.dtypes import Array

_BLOCK = 8 << 20  # bytes of output made at a time: long runs make few calls
_PACK = 4 << 20  # bytes read for it at a time
EDGE = 3

# A gap that costs about as much to read through as another call costs. A computed storage pays more for each call.
_GAP_FILE = 8 << 10
_GAP_COMPUTED = 256 << 10  # so does a remote file


def subrange(data: Data, offset: int, length: int) -> Data:
    """`length` bytes of `data` from `offset`; a range of a file stays one, so that it can be copied by the kernel."""
    if offset == 0 and length == data.length:
        return data
    if offset < 0 or length < 0 or offset + length > data.length:
        what = f"bytes {offset:,} to {offset + length:,} of a storage of {data.length:,} bytes"
        raise BadTensor(what, "A tensor lies outside its storage; the file contradicts itself.")
    if isinstance(data, FileRange):
        return FileRange(data.file, data.offset + offset, length, data.confirm)
    if isinstance(data, InlineBytes):
        return InlineBytes(data.content[offset : offset + length])
    return Computed(length, partial(_read_within, data, offset, length), data.inputs)


def _read_within(data: Data, offset: int, length: int, start: int, count: int) -> bytes:
    return data.read(offset + start, max(0, min(count, length - start)))


def row_major(entry: TensorEntry) -> Data:
    """The stored values in row-major order, not read yet (conjugate and negative bits not applied).

    Raises `BadTensor` if the view reaches outside its storage.
    """
    if entry.numel == 0:
        return InlineBytes(b"")
    start, stop = entry.span()
    data = subrange(entry.storage.data, start, stop - start)
    if entry.is_contiguous:
        return data
    size = entry.dtype.itemsize
    sizes, strides = merged(entry.shape, entry.stride)
    axis = next(axis for axis in range(len(sizes)) if prod(sizes[axis + 1 :]) <= _BLOCK // size)
    row = prod(sizes[axis + 1 :]) * size
    make = partial(_rows, data, sizes, strides, axis, size)
    blocks = LazyBlocks(entry.nbytes, _BLOCK // row * row, make, sizes[axis] * row)
    return Computed(entry.nbytes, blocks.read, (entry.storage,), blocks.view)


def apart(entry: TensorEntry) -> TensorEntry:
    """The tensor in row-major order on a storage of its own; reading it verifies the checksum of the old one.

    A range of a file without a checksum stays a range, which the kernel copies.
    """
    data = row_major(entry)
    if entry.storage.crc is not None and data.length:
        data = Computed(data.length, data.read, (entry.storage,), data.view if isinstance(data, Computed) else None)
    return entry.with_values(data)


def without_repeats(entry: TensorEntry) -> tuple[TensorEntry, int]:
    """The view with every expanded dimension (stride 0) at size 1, and how many times it shows each value.

    A file of a kilobyte may show a terabyte like that; what holds for the values holds for their repetitions.
    """
    if entry.nbytes <= entry.storage.nbytes:
        return entry, 1
    shape = tuple(1 if step == 0 and size > 1 else size for size, step in zip(entry.shape, entry.stride, strict=True))
    once = replace(entry, shape=shape)
    return once, entry.numel // once.numel


def in_storage_order(entry: TensorEntry) -> TensorEntry | None:
    """The same values as a contiguous view with permuted dimensions; None if they leave gaps or overlap."""
    permuted = entry.permute(storage_axes(entry))
    return permuted if permuted.is_contiguous else None


def storage_axes(entry: TensorEntry) -> list[int]:
    """The dimensions from the one with the widest steps in the storage to the one with the narrowest."""
    return sorted(range(len(entry.shape)), key=lambda axis: -entry.stride[axis])


def to_numpy(entry: TensorEntry, *, check: bool = True) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.generic]]:
    """A new array of the values, conjugate and negative bits applied.

    bf16 and float8 are ml_dtypes types, quantized types their integers. check: verify the checksum. Raises
    `Unsupported` for what numpy cannot hold (complex32, packed types), `LimitExceeded` where memory does not suffice.
    """
    import numpy

    if entry.dtype.numpy is None or len(entry.shape) > 64:
        raise packed(entry.dtype)
    try:
        array = numpy.empty(entry.shape, entry.dtype.to_numpy())
    except (MemoryError, ValueError) as error:
        nbytes = numpy_bytes(entry.shape, entry.dtype.itemsize)
        what = f"{entry!r} needs {nbytes:,} bytes of memory"
        raise LimitExceeded(what, "That is more than is available.", f"Look at a part: {arg(slice='0:4')}.") from error
    raw = array.reshape(-1).view(numpy.uint8)
    with unchanged(*files_of(entry)):
        if check:
            verify(entry)
        fill(row_major(entry), 0, raw.data)
    resolve(raw, entry.dtype, entry.flags)
    return array


def numpy_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """The bytes of an array as numpy counts them, which must fit into 63 bits: a dimension of 0 does not count."""
    return prod(size or 1 for size in shape) * itemsize


def corners(entry: TensorEntry, *, check: bool = True) -> Any:
    """The first and last three elements along every axis, and between them one that printing leaves out."""
    import numpy

    def block(view: TensorEntry, axis: int) -> Any:
        if axis == len(view.shape):
            return to_numpy(view, check=check)
        length = view.shape[axis]
        spans = [(0, length)] if length <= 2 * EDGE + 1 else [(0, EDGE + 1), (length - EDGE, EDGE)]
        return numpy.concatenate([block(view.narrow(axis, *span), axis + 1) for span in spans], axis=axis)

    return block(entry, 0)


def _rows(
    data: Data, sizes: tuple[int, ...], strides: tuple[int, ...], axis: int, itemsize: int, start: int, stop: int
) -> memoryview:
    """The bytes from `start` to `stop` of a view: rows along `axis`, whole below it, at one index of the axes above."""
    import numpy

    row = prod(sizes[axis + 1 :]) * itemsize
    lead, first = divmod(start // row, sizes[axis])
    base = first * strides[axis]
    for size, stride in zip(sizes[:axis][::-1], strides[:axis][::-1], strict=True):
        lead, index = divmod(lead, size)
        base += index * stride
    out = numpy.empty(((stop - start) // row, *sizes[axis + 1 :]), f"V{itemsize}")
    _collect(data, base, strides[axis:], out)
    return out.reshape(-1).view(numpy.uint8).data


def merged(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same view in fewer dimensions: those of size 1 dropped, those that continue each other joined."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == size * step:
            sizes[-1] *= size
            strides[-1] = step
        else:
            sizes.append(size)
            strides.append(step)
    return tuple(sizes), tuple(strides)


def reshaped(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """The same elements in another shape of equal size, over the same storage where strides can express it."""
    if shape == entry.shape:
        return entry
    strides: list[int] = []
    place, is_view = 0, True
    for size, step in zip(*merged(entry.shape, entry.stride), strict=True) if entry.numel else ():
        end = place
        while prod(shape[place:end]) < size and end < len(shape):
            end += 1
        is_view = is_view and prod(shape[place:end]) == size
        strides += [step * inner for inner in row_major_strides(shape[place:end])]
        place = end
    if not is_view:
        entry = entry.with_values(row_major(entry))
    strides = [*strides, *[1] * (len(shape) - place)] if is_view and entry.numel else [*row_major_strides(shape)]
    return replace(entry, shape=shape, stride=tuple(strides))


def _collect(data: Data, base: int, strides: tuple[int, ...], out: Array) -> None:
    """Fills `out` with the elements at `base + sum(index * stride)` of `data`; all counted in elements."""
    import numpy

    far = isinstance(data, Computed) or (isinstance(data, FileRange) and data.file.far)
    size, gap = out.itemsize, (_GAP_COMPUTED if far else _GAP_FILE) // out.itemsize
    # The dimensions whose every index is worth a read of its own, widest first; the elements that one read spans.
    outer, span = sorted(range(out.ndim), key=strides.__getitem__), 1
    while outer and strides[outer[0]] - span <= gap:
        axis = outer.pop(0)
        span += (out.shape[axis] - 1) * strides[axis]
    outer.reverse()
    step = span * size * prod(out.shape[axis] for axis in outer)
    if step > _PACK:
        widest = max(range(out.ndim), key=lambda axis: (out.shape[axis] - 1) * strides[axis])
        half = out.shape[widest] // 2
        before = (slice(None),) * widest
        _collect(data, base, strides, out[(*before, slice(half))])
        _collect(data, base + half * strides[widest], strides, out[(*before, slice(half, None))])
        return
    # Computed bytes may need the same scratch memory for their own inputs.
    runs = aligned(step) if isinstance(data, Computed) else scratch("runs", "u1", step)
    starts, steps = numpy.array([base]), [stride * size for stride in strides]
    for axis in outer:
        starts = (starts[:, None] + numpy.arange(out.shape[axis]) * strides[axis]).reshape(-1)
        step //= out.shape[axis]
        steps[axis] = step
    _read_runs(data, (starts * size).tolist(), span * size, runs.data)
    _copy(numpy.ndarray(out.shape, out.dtype, runs.data, strides=steps), out)


_TILE = 64, 256  # elements along the last dimension of the output, and along that which is last in the input


def _copy(source: Array, out: Array) -> None:
    """Fills `out`; where rows become columns, in tiles that stay in the processor's cache."""
    if source.itemsize in (1, 2, 4, 8):  # numbers are copied quicker than bytes of no type
        source, out = source.view(f"u{source.itemsize}"), out.view(f"u{source.itemsize}")
    last_axis = out.ndim - 1
    across = min(range(out.ndim), key=lambda axis: (source.strides[axis] or 1 << 62, -axis))
    if across == last_axis:
        out[...] = source
        return
    before, between = (slice(None),) * across, (slice(None),) * (last_axis - across - 1)
    for at in range(0, out.shape[across], _TILE[1]):
        for place in range(0, out.shape[last_axis], _TILE[0]):
            tile = (*before, slice(at, at + _TILE[1]), *between, slice(place, place + _TILE[0]))
            out[tile] = source[tile]


def _read_runs(data: Data, starts: list[int], length: int, buffer: memoryview) -> None:
    """Fills `buffer` with `length` bytes from each of `starts`, one after the other."""
    if isinstance(data, FileRange):
        data.file.expect((data.offset + start, data.offset + start + length) for start in starts)
    if not isinstance(data, FileRange) or data.file.far:
        for place, start in zip(range(0, len(buffer), length), starts, strict=True):
            buffer[place : place + length] = data.read(start, length)
        return
    data.ready()
    preadv, shift = os.preadv, data.file.begin + data.offset
    try:
        fd = data.file.descriptor()
        for place, start in zip(range(0, len(buffer), length), starts, strict=True):
            run = buffer[place : place + length]
            if preadv(fd, [run], shift + start) != length:
                data.file.read_into(data.offset + start, run)
    except OSError as error:
        raise file_problem(error, data.file.path, "read") from error


def indexed(entry: TensorEntry, key: Any) -> Any:
    """The values of `numpy()[key]`; for a key of integers, slices, `...` and None, no others are read."""
    import numpy

    keys = key if type(key) is tuple else (key,)
    kinds = (int, numpy.integer, slice, type(...), type(None))
    if any(type(part) is bool or not isinstance(part, kinds) for part in keys):
        return entry.numpy()[key]
    # numpy says which elements these are, by indexing an array of one-byte elements of which nothing is read.
    addresses = numpy.lib.stride_tricks.as_strided(numpy.empty(1, numpy.uint8), entry.shape, entry.stride)
    chosen = addresses[keys if ... in keys else (*keys, ...)]
    forward: Any = tuple(slice(None, None, -1 if step < 0 else 1) for step in chosen.strides)
    straight = chosen[(*forward, ...)]
    offset = entry.offset + straight.ctypes.data - addresses.ctypes.data if straight.size else 0
    return to_numpy(replace(entry, shape=straight.shape, stride=straight.strides, offset=offset), check=False)[forward]


# Computed bytes -------------------------------------------------------------------------------------------------------


class LazyBlocks:
    """Bytes that are computed a block at a time: `make(start, stop)` gives one block, of at most `step` bytes.

    No block crosses a multiple of `period` (0: no such limit). A block is kept for the next read, until its end has
    been read: in one list for all readers, as a tree may hold thousands of these.
    """

    __slots__ = ("length", "make", "period", "step")

    def __init__(self, length: int, step: int, make: Callable[[int, int], memoryview], period: int = 0) -> None:
        self.length, self.step, self.make, self.period = length, step, make, period or length

    def read(self, offset: int, length: int) -> bytes:
        """The bytes asked for; fewer only at the end."""
        stop, parts = min(offset + length, self.length), []
        while offset < stop:
            parts.append(self.view(offset, stop - offset))
            offset += len(parts[-1])
        return b"".join(parts)

    def view(self, offset: int, length: int) -> memoryview:
        """At most `length` bytes, up to the end of the block, without a copy."""
        begin = offset - offset % self.period
        start = offset - (offset - begin) % self.step
        stop = min(start + self.step, begin + self.period, self.length)
        block = next((block for owner, place, block in _cached if owner is self and place == start), None)
        if block is None:
            block = self.make(start, stop)
        _cached[:] = [cached for cached in _cached if cached[0] is not self]
        if offset + length < stop:
            _cached.append((self, start, block))
            while len(_cached) > 1 and (len(_cached) > _MOST_KEPT or sum(len(cached[2]) for cached in _cached) > KEPT):
                del _cached[:1]
        return block[offset - start : offset - start + length]


KEPT, _MOST_KEPT = 16 << 20, 32  # bytes of blocks, and their number
_cached: list[tuple[LazyBlocks, int, memoryview]] = []
