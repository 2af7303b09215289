"""The weighted mean of several sets of weights, computed in bounded memory while it is written.

Sums are kept in f64, those of 8- and 16-bit floats in f32, and rounded once at the end as torch rounds. Counters and
booleans have no mean: they are the last file's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Composite, Computed, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.blocks import BlockReader, Prefetcher
from ckptool.checkpoint.commands import Advice, command
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import same_kind
from ckptool.checkpoint.numeric import CHUNK, numbers, resolve, scratch
from ckptool.errors import Conflict, Unsupported, UsageError, counted, listed, printable
from ckptool.transforms.casting import rounded

if TYPE_CHECKING:
    from ckptool.checkpoint.numeric import Array

_COMPONENTS = {"c32": "f16", "c64": "f32", "c128": "f64"}


@dataclass(frozen=True, slots=True)
class Averaged:
    """The mean, as a state dict; `kept`: the names that are the last file's, with why."""

    tree: dict[str, Any]
    averaged: int
    kept: tuple[tuple[str, str], ...]


def weights_of(count: int, weights: Sequence[float] | None, ema: float | None) -> list[float]:
    """The share of each file: equal ones, those given, or those of an exponential moving average in order.

    Raises `UsageError` for a number of weights that is not that of the files, or a decay outside of 0 to 1.
    """
    if weights is not None and ema is not None:
        raise UsageError("weights and an exponential average were both asked for", "They are mutually exclusive.")
    if ema is not None:
        if not 0 <= ema < 1:
            raise UsageError(f"a decay of {ema} is not from 0 to 1", "", "For example: --ema 0.999")
        later = [(1 - ema) * ema ** (count - 1 - i) for i in range(1, count)]
        return [ema ** (count - 1), *later]
    if weights is None:
        return [1 / count] * count
    if len(weights) != count or not all(math.isfinite(weight) for weight in weights):
        raise UsageError(
            f"{counted(len(weights), 'weight was', 'weights were')} given for {count} files",
            "Each file has one, in the same order.",
        )
    return list(weights)


def average(nodes: Sequence[Mapping[Any, Any]], names: Sequence[str], weights: Sequence[float]) -> Averaged:
    """The mean of state dicts with the same keys, shapes and types. Reads nothing yet.

    Raises `Conflict` naming what they do not agree in, `Unsupported` for tensors that have no plain values.
    """
    last = nodes[-1]
    if problems := [
        line
        for node, name in zip(nodes[:-1], names, strict=False)
        for line in _differences(node, last, name, names[-1])
    ]:
        raise Conflict(
            f"the files do not hold the same weights: {listed(problems, 6)}",
            "The mean of different models is not a model. Nothing was written.",
            Advice("See all of it: ", command("diff", names[0], names[-1])),
        )
    made: dict[tuple[Any, ...], TensorEntry] = {}
    again: dict[int, TensorEntry] = {}
    tree = same_kind(last, {})
    kept: list[tuple[str, str]] = []
    ahead = Prefetcher()
    for key, value in last.items():
        if not isinstance(value, TensorEntry):
            kept.append((str(key), f"a {value.kind} tensor" if isinstance(value, Composite) else type(value).__name__))
            tree[key] = value
        elif not (value.dtype.is_float or value.dtype.name in _COMPONENTS):
            kept.append((str(key), f"of type {value.dtype.name}"))
            tree[key] = value
        else:
            # Names that are one tensor in every file stay one.
            entries = [node[key] for node in nodes]
            view = tuple(entry.view for entry in entries)
            if view not in made:
                made[view] = _mean(entries, weights, ahead)
            if id(value) not in again:  # what is one object stays one
                again[id(value)] = replace(made[view], flags=value.flags._replace(conj=False, neg=False))
            tree[key] = again[id(value)]
    return Averaged(tree, len(made), tuple(kept))


def _differences(node: Mapping[Any, Any], last: Mapping[Any, Any], name: str, other: str) -> list[str]:
    found = [f"{printable(str(key))} is only in {name}" for key in node if key not in last]
    found += [f"{printable(str(key))} is only in {other}" for key in last if key not in node]
    for key, value in last.items():
        before = node.get(key)
        if isinstance(value, TensorEntry) and isinstance(before, TensorEntry):
            if before.shape != value.shape:
                found.append(f"{printable(str(key))} is {list(before.shape)} in {name}, {list(value.shape)} in {other}")
            elif before.dtype is not value.dtype:
                found.append(f"{printable(str(key))} is {before.dtype} in {name}, {value.dtype} in {other}")
        elif key in node and type(before) is not type(value):
            found.append(f"{printable(str(key))} is a tensor in only one of {name} and {other}")
    return found


def _mean(entries: Sequence[TensorEntry], weights: Sequence[float], ahead: Prefetcher) -> TensorEntry:
    first = entries[0]
    if first.dtype.numpy is None and first.dtype.name != "c32":
        raise Unsupported(f"tensors of dtype {first.dtype} cannot be averaged", "Their values are packed.")
    reader = _Mean(entries, weights, ahead)
    storage = Storage(Computed(first.nbytes, reader.read, reader.sources.unchecked), entries[-1].location)
    return TensorEntry(storage, first.dtype, first.shape, row_major_strides(first.shape))


class _Mean:
    """The bytes of the mean, made block by block."""

    __slots__ = ("dtype", "kinds", "sources", "weights", "wide")

    def __init__(self, entries: Sequence[TensorEntry], weights: Sequence[float], ahead: Prefetcher) -> None:
        self.kinds, self.weights = [(entry.dtype, entry.flags) for entry in entries], weights
        self.dtype = by_name(_COMPONENTS.get(entries[0].dtype.name, entries[0].dtype.name))
        self.wide = "f8" if self.dtype.itemsize >= 4 else "f4"
        self.sources = BlockReader(entries, ahead, self._block)

    def read(self, offset: int, length: int) -> bytes:
        step = self.sources.block
        begin, end = offset - offset % step, min(offset + length, self.sources.length)
        made = [self.sources.made(place) for place in range(begin, end, step)]
        data = made[0] if len(made) == 1 else b"".join(made)
        return data if (begin, len(data)) == (offset, length) else data[offset - begin : end - begin]

    def _block(self, blocks: list[Array]) -> bytes:
        """The mean of one block, in pieces that stay in the processor's cache."""
        size, mean = CHUNK * self.dtype.itemsize, bytearray(len(blocks[0]))
        for start in range(0, len(mean), size):
            mean[start : start + size] = self._mean([block[start : start + size] for block in blocks]).view("u1").data
        return bytes(mean)

    def _mean(self, pieces: list[Array]) -> Array:
        import numpy

        count = len(pieces[0]) // self.dtype.itemsize
        total = scratch("mean total", self.wide, count)
        with numpy.errstate(all="ignore"):
            for number, (raw, (dtype, flags), weight) in enumerate(zip(pieces, self.kinds, self.weights, strict=True)):
                # Widened first: numpy multiplies half as fast while it converts.
                term = scratch("mean term", self.wide, count) if number else total
                numpy.copyto(term, numbers(resolve(raw, dtype, flags), self.dtype, "mean values"))
                numpy.multiply(term, weight, out=term)
                if number:
                    numpy.add(total, term, out=total)
            return rounded(total, self.dtype) if self.dtype.name != "f64" else total
