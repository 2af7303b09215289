"""Fingerprints of tensors: numbers that are equal for equal values, whatever their order, and that add up over parts.

Each value becomes a 64-bit number, and the number of a tensor or of a slice is the sum of those of its values. So a
transposed tensor has the number of the first one, three tensors together that of the tensor they were cut from, and a
row that of the same row elsewhere. Whatever they suggest is confirmed by bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Data, TensorEntry
from ckptool.checkpoint.blocks import fill
from ckptool.checkpoint.numeric import CHUNK, aligned
from ckptool.checkpoint.strided import resolved

if TYPE_CHECKING:
    from ckptool.checkpoint.numeric import Array

MOST = 1 << 19  # slices of a kind that are kept of a tensor while it is read
_KERNEL = 8  # sizes below it are of a convolution's kernel
_FEW = 4  # tensors with the same slice, beyond which it proves nothing


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """digest: of type and bytes, in order.  total: of all values.  probes: of it and of slices from the middle."""

    digest: int
    total: int
    probes: tuple[int, ...]


def fingerprint(entry: TensorEntry) -> Fingerprint:
    """The fingerprint of a tensor. Reads it once."""
    digest = blake2b(entry.dtype.name.encode(), digest_size=8)
    total, slices = _sums(entry, digest)
    middles = [int(each[len(each) // 2]) for each in slices if len(each)]
    return Fingerprint(int.from_bytes(digest.digest(), "little"), total, (total, *middles))


def _sums(entry: TensorEntry, digest: Any = None) -> tuple[int, list[Array]]:
    """The number of a tensor and those of its slices: for each depth of the first dimensions, along the second, and
    along the last one. A tensor of one dimension has none, nor one with too many."""
    import numpy

    data, shape, unit = resolved(entry).row_major(), _plain_shape(entry), min(8, entry.dtype.itemsize)
    width, height = (shape[-1], shape[-2]) if len(shape) > 1 else (CHUNK, 1)
    lines = prod(shape[:-1]) if len(shape) > 1 and entry.numel else 0
    if not 0 < lines <= MOST or width > 4 * CHUNK or lines // height * width > MOST:
        return sum(int(each.sum()) for each in _blocks(data, CHUNK, unit, digest)) % 2**64, []
    sums, columns = numpy.zeros(lines, numpy.uint64), numpy.zeros((lines // height, width), numpy.uint64)
    line = 0
    for numbers in _blocks(data, max(CHUNK // width, 1) * width, unit, digest):
        block = numbers.reshape(-1, width)
        end = line + len(block)
        sums[line:end] = block.sum(1)
        groups = range(line // height, (end - 1) // height + 1)
        starts = [max(0, group * height - line) for group in groups]
        columns[groups.start : groups.stop] += numpy.add.reduceat(block, starts, axis=0)
        line = end
    slices = [sums.reshape(prod(shape[:depth]), -1).sum(1) for depth in range(1, len(shape))]
    slices += [slices[1].reshape(shape[0], shape[1]).sum(0)] if len(shape) > 2 else []
    return int(sums.sum()), [*slices, columns.reshape(-1)]


def _plain_shape(entry: TensorEntry) -> list[int]:
    """The shape in 8-byte units at most, without dimensions of size 1, and with those of a kernel as one."""
    shape = [size for size in entry.shape if size != 1]
    shape += [2] if entry.dtype.itemsize > 8 else []
    while len(shape) > 2 and shape[-1] < _KERNEL:
        shape[-2:] = [shape[-2] * shape[-1]]
    return shape


def _blocks(data: Data, count: int, unit: int, digest: Any) -> Iterator[Array]:
    """A 64-bit number for each value, `count` at a time: the finalizer of splitmix64."""
    import numpy

    memory = aligned(min(count * unit, data.length))
    for place in range(0, data.length, count * unit):
        raw = memory[: data.length - place]
        fill(data, place, raw.data)
        if digest is not None:
            digest.update(raw.data)
        numbers = raw.view(f"u{unit}").astype(numpy.uint64)
        numbers += numpy.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            numbers ^= numbers >> numpy.uint64(shift)
            numbers *= numpy.uint64(factor)
        numbers ^= numbers >> numpy.uint64(31)
        yield numbers


class Probes:
    """The slices of many tensors, to be looked up in others."""

    def __init__(self, prints: Iterable[tuple[str, Fingerprint]]) -> None:
        import numpy

        self.owners: dict[int, list[str]] = {}
        for key, each in prints:
            for probe in dict.fromkeys(each.probes):
                self.owners.setdefault(probe, []).append(key)
        self.owners = {probe: keys for probe, keys in self.owners.items() if len(keys) <= _FEW}
        self.sorted = numpy.array(sorted(self.owners), numpy.uint64)

    def parts_of(self, entry: TensorEntry) -> Iterator[list[str]]:
        """Tensors of which slices are in this one, in the order in which they stand in it; for each way to slice it."""
        import numpy

        for slices in _sums(entry)[1] if len(self.sorted) else ():
            at = numpy.searchsorted(self.sorted, slices)
            at[at == len(self.sorted)] = 0
            places = numpy.flatnonzero(self.sorted[at] == slices)[:MOST]
            found = (key for place in places.tolist() for key in self.owners[int(slices[place])])
            yield list(dict.fromkeys(found))
