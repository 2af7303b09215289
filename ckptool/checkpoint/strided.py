"""Strided views brought into row-major order, piece by piece, in bounded memory.

A view is cut into rectangles of a few megabytes of output. Of each, the parts that lie close together in the storage
are read at once (the rest of the span is thrown away), the others run by run, and numpy puts the elements in order.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Computed, Data, FileRange, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.blocks import blocks, check_files, verify
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.numeric import aligned, packed, resolve
from ckptool.checkpoint.paths import file_problem
from ckptool.commands import arg
from ckptool.errors import BadTensor, LimitExceeded, Unsupported, counted

if TYPE_CHECKING:
    import numpy

    from ckptool.checkpoint.numeric import Array

_BLOCK = 8 << 20  # bytes of output made at a time: long runs make few calls
_PACK = 4 << 20  # bytes read for it at a time
_KEPT = 2  # blocks kept for the next read, in all: two views can be read side by side

# A gap that costs about as much to read through as another call costs. A computed storage pays more for each call.
_GAP_FILE = 8 << 10
_GAP_COMPUTED = 256 << 10


def subrange(data: Data, offset: int, length: int) -> Data:
    """`length` bytes of `data` from `offset`; a range of a file stays one, so that it can be copied by the kernel."""
    if offset == 0 and length == data.length:
        return data
    if offset < 0 or length < 0 or offset + length > data.length:
        raise BadTensor(
            f"bytes {offset:,} to {offset + length:,} of a storage of {data.length:,} bytes",
            "A tensor lies outside its storage; the file contradicts itself.",
        )
    if isinstance(data, FileRange):
        return FileRange(data.file, data.offset + offset, length, data.confirm)
    if isinstance(data, InlineBytes):
        return InlineBytes(data.content[offset : offset + length])
    return Computed(length, lambda start, n: data.read(offset + start, max(0, min(n, length - start))))


def swapped(storage: Storage, dtype: DType | None) -> Data:
    """The elements of a storage of a big-endian file in this machine's order. Raises `Unsupported` for an untyped
    one."""
    if dtype is None:
        what = "an untyped storage in a big-endian file"
        raise Unsupported(what, "The size of its elements is not recorded, so their bytes cannot be swapped.")
    if dtype.itemsize == 1:
        return storage.data
    data, width = storage.data, dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize

    def read(offset: int, length: int) -> bytes:
        begin, end = offset - offset % width, min(-(-(offset + length) // width) * width, data.length)
        raw = data.read(begin, end - begin)
        turned = bytearray(len(raw))
        for i in range(width):
            turned[i::width] = raw[width - 1 - i :: width]
        return bytes(turned[offset - begin : offset - begin + length])

    return Computed(data.length, read, (storage,))


def row_major(entry: TensorEntry) -> Data:
    """The stored values in row-major order, not read yet (conjugate and negative bits not applied).

    Raises `BadTensor` if the view reaches outside of its storage.
    """
    if entry.numel == 0:
        return InlineBytes(b"")
    start, stop = entry.span()
    whole = subrange(entry.storage.data, start, stop - start)
    if entry.is_contiguous:
        return whole
    made = _Gather(whole, entry)
    return Computed(entry.nbytes, made.read, view=made.view)


def without_repeats(entry: TensorEntry) -> tuple[TensorEntry, int]:
    """The view with every expanded dimension (stride 0) at size 1, and how many times it shows each value.

    A file of a kilobyte may show a tensor of a terabyte so; what holds for the values holds for their repetitions.
    """
    if entry.nbytes <= entry.storage.nbytes:
        return entry, 1
    shape = tuple(1 if step == 0 and size > 1 else size for size, step in zip(entry.shape, entry.stride, strict=True))
    once = replace(entry, shape=shape)
    return once, entry.numel // once.numel


def in_storage_order(entry: TensorEntry) -> TensorEntry | None:
    """The same values as a contiguous view with permuted dimensions; None if they leave gaps or overlap."""
    turned = entry.permute(storage_axes(entry))
    return turned if turned.is_contiguous else None


def storage_axes(entry: TensorEntry) -> list[int]:
    """The dimensions from the one with the widest steps in the storage to the one with the narrowest."""
    return sorted(range(len(entry.shape)), key=lambda axis: -entry.stride[axis])


def to_numpy(entry: TensorEntry, *, check: bool = True) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.generic]]:
    """A new array of the values, conjugate and negative bits applied.

    bf16 and float8 are ml_dtypes types, quantized types their integers. check: look at the checksum. Raises
    `Unsupported` for what numpy cannot hold (complex32, packed types), `LimitExceeded` where memory does not suffice.
    """
    import numpy

    if entry.dtype.numpy is None or len(entry.shape) > 64:
        raise packed(entry.dtype)
    if check:
        verify(entry)
    try:
        array = numpy.empty(entry.numel, entry.dtype.to_numpy())
    except (MemoryError, ValueError) as error:
        raise LimitExceeded(
            f"{entry!r} needs {entry.nbytes:,} bytes of memory",
            "More than is available.",
            f"Look at a part: {arg(slice='0:4')}.",
        ) from error
    raw = array.view(numpy.uint8)
    data = row_major(entry)
    for _ in blocks(data, into=raw.data):
        pass
    check_files(entry)
    resolve(raw, entry.dtype, entry.flags)
    return array.reshape(entry.shape)


class _Gather:
    """The row-major bytes of a view of `data`, made block by block.

    A block is `rows` rows of the dimension `axis`, with everything below it, at one place of the dimensions above it.
    """

    __slots__ = ("axis", "data", "itemsize", "length", "rows", "sizes", "strides", "tail")

    def __init__(self, data: Data, entry: TensorEntry) -> None:
        self.data = data
        self.length = entry.nbytes
        self.itemsize = entry.dtype.itemsize
        self.sizes, self.strides = _merged(entry.shape, entry.stride)
        room = _BLOCK // self.itemsize
        self.axis = next(axis for axis in range(len(self.sizes)) if prod(self.sizes[axis + 1 :]) <= room)
        self.tail = prod(self.sizes[self.axis + 1 :])
        self.rows = min(self.sizes[self.axis], room // self.tail)

    def read(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, self.length)
        parts = []
        while offset < stop:
            start, block = self._block(offset // self.itemsize)
            end = min(stop, start + len(block))
            parts.append(block[offset - start : end - start].tobytes())
            if end == start + len(block):
                _forget(self)
            offset = end
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def view(self, offset: int, length: int) -> memoryview:
        """At most so many bytes, as far as the block goes, without a copy."""
        start, block = self._block(offset // self.itemsize)
        end = min(offset + length, start + len(block))
        if end == start + len(block):
            _forget(self)
        return block[offset - start : end - start].data

    def _block(self, element: int) -> tuple[int, Array]:
        """The block that `element` is in: where it starts in the output, in bytes, and its bytes."""
        per_lead = self.sizes[self.axis] * self.tail
        lead, rest = divmod(element, per_lead)
        row = rest // self.tail // self.rows * self.rows
        start = (lead * per_lead + row * self.tail) * self.itemsize
        for owner, kept_start, kept in _recent:
            if owner is self and kept_start == start:
                return start, kept
        block = self._make(lead, row)
        _forget(self)
        _recent.append((self, start, block))
        del _recent[:-_KEPT]
        return start, block

    def _make(self, lead: int, row: int) -> Array:
        import numpy

        base = row * self.strides[self.axis]
        for size, stride in zip(self.sizes[: self.axis][::-1], self.strides[: self.axis][::-1], strict=True):
            lead, index = divmod(lead, size)
            base += index * stride
        count = min(self.rows, self.sizes[self.axis] - row)
        out = numpy.empty((count, *self.sizes[self.axis + 1 :]), f"V{self.itemsize}")
        _collect(self.data, base, self.strides[self.axis :], out)
        return out.reshape(-1).view(numpy.uint8)


# Blocks live here and not in their readers: a tree may hold thousands of views, and each would keep its last block.
_recent: list[tuple[_Gather, int, Array]] = []


def _forget(owner: _Gather) -> None:
    _recent[:] = [kept for kept in _recent if kept[0] is not owner]


def _merged(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
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


def _collect(data: Data, base: int, strides: tuple[int, ...], out: Array) -> None:
    """Fills `out` with the elements at `base + sum(index * stride)` of `data`; all counted in elements."""
    gap = (_GAP_COMPUTED if isinstance(data, Computed) else _GAP_FILE) // out.itemsize
    outer, span = _runs(out.shape, strides, gap)
    if span * prod(out.shape[axis] for axis in outer) * out.itemsize <= _PACK:
        _collect_runs(data, base, strides, outer, span, out)
        return
    widest = max(range(out.ndim), key=lambda axis: (out.shape[axis] - 1) * strides[axis])
    half = out.shape[widest] // 2
    before = (slice(None),) * widest
    _collect(data, base, strides, out[(*before, slice(half))])
    _collect(data, base + half * strides[widest], strides, out[(*before, slice(half, None))])


def _runs(shape: tuple[int, ...], strides: tuple[int, ...], gap: int) -> tuple[list[int], int]:
    """The dimensions whose every index is worth a read of its own, widest first; the elements that one read spans."""
    axes = sorted(range(len(shape)), key=strides.__getitem__)
    span = 1
    while axes and strides[axes[0]] - span <= gap:
        axis = axes.pop(0)
        span += (shape[axis] - 1) * strides[axis]
    return axes[::-1], span


def _collect_runs(data: Data, base: int, strides: tuple[int, ...], outer: list[int], span: int, out: Array) -> None:
    """Reads one run of `span` elements for each index of the `outer` dimensions, then puts the elements in order."""
    import numpy

    starts = numpy.array([base])
    steps = [stride * out.itemsize for stride in strides]
    packed_step = span * out.itemsize * prod(out.shape[axis] for axis in outer)
    for axis in outer:
        starts = (starts[:, None] + numpy.arange(out.shape[axis]) * strides[axis]).reshape(-1)
        packed_step //= out.shape[axis]
        steps[axis] = packed_step
    runs = _memory(len(starts) * span * out.itemsize)
    _read_runs(data, (starts * out.itemsize).tolist(), span * out.itemsize, runs.data)
    _copy(numpy.ndarray(out.shape, out.dtype, runs.data, strides=steps), out)


_local = threading.local()


def _memory(length: int) -> Array:
    """Memory for what is read at a time, the same for each call: fresh memory costs page faults."""
    if length > _PACK:
        return aligned(length)
    if not hasattr(_local, "runs"):
        _local.runs = aligned(_PACK)
    memory: Array = _local.runs[:length]
    return memory


_TILE = 64, 256  # elements along the last dimension of the output, and along that which is last in the input


def _copy(source: Array, out: Array) -> None:
    """Fills `out`; where rows become columns, in tiles that stay in the processor's cache."""
    if source.itemsize in (1, 2, 4, 8):  # numbers are copied quicker than bytes of no type
        source, out = source.view(f"u{source.itemsize}"), out.view(f"u{source.itemsize}")
    last = out.ndim - 1
    across = min(range(out.ndim), key=lambda axis: (source.strides[axis] or 1 << 62, -axis))
    if across == last:
        out[...] = source
        return
    before, between = (slice(None),) * across, (slice(None),) * (last - across - 1)
    for at in range(0, out.shape[across], _TILE[1]):
        for place in range(0, out.shape[last], _TILE[0]):
            tile = (*before, slice(at, at + _TILE[1]), *between, slice(place, place + _TILE[0]))
            out[tile] = source[tile]


def _read_runs(data: Data, starts: list[int], length: int, buffer: memoryview) -> None:
    """Fills `buffer` with `length` bytes from each of `starts`, one after the other."""
    if not isinstance(data, FileRange):
        for place, start in zip(range(0, len(buffer), length), starts, strict=True):
            buffer[place : place + length] = data.read(start, length)
        return
    data.ready()
    preadv, shift = os.preadv, data.offset
    try:
        fd = data.file.descriptor()
        for place, start in zip(range(0, len(buffer), length), starts, strict=True):
            run = buffer[place : place + length]
            if preadv(fd, [run], shift + start) != length:
                data.file.read_into(shift + start, run)
    except OSError as error:
        raise file_problem(error, data.file.path, "read") from error


def indexed(tensor: Any, key: Any) -> Any:
    """The values of `numpy()[key]`; where the key is of numbers, slices, `...` and None, no others are read."""
    import numpy

    keys = key if type(key) is tuple else (key,)
    kinds = (int, numpy.integer, slice, type(...), type(None))
    if not isinstance(tensor, TensorEntry) or any(type(part) is bool or not isinstance(part, kinds) for part in keys):
        return tensor.numpy()[key]
    rank, used = len(tensor.shape), sum(part is not None and part is not ... for part in keys)
    if used > rank or keys.count(...) > 1:
        raise IndexError(f"{counted(used, 'index', 'indices')} for a tensor of {counted(rank, 'dimension')}: {keys}")
    place = keys.index(...) if ... in keys else len(keys)
    order: list[Any] = []
    view, axis = tensor, 0
    for part in (*keys[:place], *[slice(None)] * (rank - used), *keys[place + 1 :]):
        if part is None:
            order.append(part)
            continue
        size = view.shape[axis]
        if isinstance(part, slice):
            chosen = range(size)[part]
            order.append(slice(None, None, -1 if chosen.step < 0 else 1))
        elif -size <= part < size:
            chosen = range(size)[part % size :][:1]
            order.append(0)
        else:
            raise IndexError(f"index {part} is out of bounds for dimension {axis} of size {size:,}")
        # Of these indices along a dimension, the lowest first.
        shape, stride = list(view.shape), list(view.stride)
        offset = view.offset + (min(chosen[0], chosen[-1]) * stride[axis] if chosen else 0)
        shape[axis], stride[axis] = len(chosen), stride[axis] * abs(chosen.step)
        view, axis = replace(view, shape=tuple(shape), stride=tuple(stride), offset=offset), axis + 1
    return to_numpy(view, check=False)[tuple(order)]


def resolved(entry: TensorEntry) -> TensorEntry:
    """The tensor with its conjugate and negative bits applied to the values, row-major where there were any."""
    if not (entry.flags.conj or entry.flags.neg):
        return entry
    if entry.dtype.kind not in ("float", "complex"):
        raise Unsupported(f"a negated view of type {entry.dtype} cannot be resolved")
    data = flipped(row_major(entry), entry.dtype, entry.flags.conj, entry.flags.neg, entry.storage)
    return replace(entry.with_values(data), flags=entry.flags._replace(conj=False, neg=False))


def flipped(data: Data, dtype: DType, conj: bool, neg: bool, storage: Storage) -> Computed:
    """The values conjugated or negated, by their sign bits: doing it twice gives the same bits again."""
    part = dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize
    # `neg` flips every part of an element, `conj` the imaginary ones (the second of each pair).
    flips = [bool(neg) ^ (bool(conj) and dtype.kind == "complex" and i == 1) for i in range(dtype.itemsize // part)]

    def read(offset: int, length: int) -> bytes:
        raw = bytearray(data.read(offset, length))
        for i, flip in enumerate(flips):
            if flip:
                first = (i * part + part - 1 - offset) % dtype.itemsize
                raw[first :: dtype.itemsize] = bytes(raw[first :: dtype.itemsize]).translate(_SIGN)
        return bytes(raw)

    return Computed(data.length, read, (storage,))


_SIGN = bytes(byte ^ 0x80 for byte in range(256))
