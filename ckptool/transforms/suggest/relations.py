"""Tensors of one side that, joined and reordered, are a tensor of the other: found by value, as operations of rules.

A tensor that is split is found from the other side, as one that is joined, and its operations are inverted. Which
tensors may be which, fingerprints tell; whatever they suggest is confirmed by bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import chain as chained
from itertools import combinations, islice, permutations
from math import gcd, prod
from typing import NamedTuple

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import TensorValues, fold, resolved
from ckptool.checkpoint.blocks import same_bytes
from ckptool.checkpoint.numeric import Array, has_numbers
from ckptool.errors import CkptoolError
from ckptool.names.chain import parse_operation
from ckptool.names.steps import Overs
from ckptool.transforms.suggest.groups import STACKED
from ckptool.transforms.translate.apply import after_chain

MOST_TRIES = 600  # of operations for tensors of some shapes
MOST_ORDERED = 4  # tensors that are tried in every order

HEAD = 64  # bytes of a first row
SAMPLED = 256  # values at each place
FEW_VALUES = 32  # fewer may be unlike by chance
LEAST_ALIKE = 0.2  # the correlation of a long-tuned tensor with its base; chance comes to 0.03 in a full sample
NEAR = 0.9  # the cosine from where on a common mean may be all that is said


# Fingerprints --------------------------------------------------------------------------------------------------------


class Fingerprint(NamedTuple):
    """What a tensor's values are, whatever their order: each becomes a 64-bit number, and their sum is the tensor's.

    A transposed tensor has that of the first one, and three together that of the one they were cut from.
    digest: of type and bytes, in order.  total: of all values.  head: the first bytes of the first row.
    """

    digest: int
    total: int
    head: bytes


def fingerprint(entry: TensorEntry) -> Fingerprint:
    """The fingerprint of a tensor. Reads it once."""
    digest, total, head = blake2b(entry.dtype.name.encode(), digest_size=8), 0, b""

    def add(_: int, raw: Array) -> None:
        nonlocal total, head
        digest.update(raw.data)
        head = head or raw[:HEAD].tobytes()
        total += int(_mixed(raw.view(f"u{min(8, entry.dtype.itemsize)}")).sum())

    fold(add, entry)
    row = entry.nbytes // (entry.shape or (1,))[0] if entry.numel else 0
    return Fingerprint(int.from_bytes(digest.digest(), "little"), total % 2**64, head[:row])


def _mixed(values: Array) -> Array:
    """A 64-bit number for each value: the finalizer of splitmix64."""
    import numpy

    numbers = values.astype(numpy.uint64)
    numbers += numpy.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers ^= numbers >> numpy.uint64(shift)
        numbers *= numpy.uint64(factor)
    numbers ^= numbers >> numpy.uint64(31)
    return numbers


# Operations ----------------------------------------------------------------------------------------------------------


def applied(chain: str, columns: Sequence[Sequence[TensorEntry]]) -> TensorEntry | None:
    """One tensor of those of each word and number; None where they do not fit."""
    rows = [list(row) for row in zip(*columns, strict=True)]
    values: dict[Overs, list[TensorEntry]] = {((STACKED, number),): row for number, row in enumerate(rows)}
    try:
        operations = [parse_operation(op) for op in chain.split(" | ") if op]
        done, _ = after_chain(
            operations, values if len(rows) > 1 else {(): rows[0]}, lambda size: size.value(lambda name: None)
        )
    except CkptoolError:
        return None
    only = [tensor for tensors in done.values() for tensor in tensors]
    return only[0] if len(only) == 1 else None


Columns = Sequence[Sequence[TensorEntry]]
Way = tuple[str, tuple[int, ...]]
"""A chain of operations, and the order of the words that it is for."""


@dataclass(slots=True)
class Ways:
    """The search for operations. known: the last that did for tensors of some shapes, tried first.

    hopeless: shapes for which none was found, and that are not searched again.
    """

    known: dict[object, Way] = field(default_factory=dict)
    hopeless: set[object] = field(default_factory=set)

    def find(self, columns: Columns, whole: TensorEntry, first: str = "") -> Way | None:
        """The operations that make one tensor of others, by bytes, and the order of their words; None where none is
        found. first: tried first."""
        shapes = tuple(column[0].shape for column in columns), len(columns[0]), whole.shape
        told = [(first, tuple(range(len(columns))))] if first else []
        if shapes in self.known:
            told.append(self.known[shapes])
        others = () if shapes in self.hopeless else islice(_ways(shapes[0], len(columns[0])), MOST_TRIES)
        for chain, order in chained(told, others):
            parts = [columns[at] for at in order]
            made = applied(chain, parts)
            for after in _reshapings(made.shape, whole.shape) if made is not None else ():
                both = " | ".join(filter(None, [chain, after]))
                if (done := applied(both, parts)) is not None and is_same(done, whole):
                    self.known[shapes] = both, order
                    return both, order
        self.hopeless.add(shapes)
        return None


def _ways(shapes: Sequence[tuple[int, ...]], count: int) -> Iterator[Way]:
    """Chains in every order of the words, the plainest chain first."""
    natural = tuple(range(len(shapes)))
    orders = [*permutations(natural)] if len(shapes) <= MOST_ORDERED else [natural]
    for chains in zip(*(_chains([shapes[at] for at in order], count) for order in orders), strict=True):
        yield from zip(chains, orders, strict=True)


def is_same(one: TensorEntry, other: TensorEntry) -> bool:
    """True for the same type, shape and bytes."""
    alike = one.dtype is other.dtype and one.shape == other.shape
    return alike and same_bytes(resolved(one).row_major(), resolved(other).row_major())


def is_tuned(one: TensorEntry, other: TensorEntry) -> bool | None:
    """True if values correlate as those of a tensor and of a fine-tuned copy do; None where they cannot tell.

    Looks at 64 places of a tensor at most. A mean that both have (norms near 1), constants and few values tell nothing.
    """
    import numpy

    if not has_numbers(one.dtype):
        return None
    x, y = (_sample(entry) for entry in (one, other))
    known = numpy.isfinite(x) & numpy.isfinite(y)
    x, y = x[known], y[known]
    if not len(x) or x.min() == x.max() or y.min() == y.max():
        return None
    x, y = x / abs(x).max(), y / abs(y).max()  # sums and squares of very small and very large values would be lost
    if _cosine(x - x.mean(), y - y.mean()) > max(LEAST_ALIKE, 3 / len(x) ** 0.5):  # chance: three standard deviations
        return True
    return None if len(x) < FEW_VALUES or _cosine(x, y) > NEAR else False


def _sample(entry: TensorEntry) -> Array:
    """Values at places that follow from the shape alone; the parts of complex ones."""
    import numpy

    flat, step = TensorValues(entry), max(SAMPLED, -(-entry.numel // 64))
    parts = [flat.read(at, min(at + SAMPLED, entry.numel)) for at in range(0, entry.numel, step)]
    values = numpy.concatenate(parts or [numpy.empty(0)])
    return values.astype("c16").view("f8") if values.dtype.kind == "c" else values.astype("f8")


def _cosine(x: Array, y: Array) -> float:
    return float(x @ y / ((x @ x) * (y @ y)) ** 0.5)


def _reshapings(have: Sequence[int], want: Sequence[int]) -> list[str]:
    """Operations that give a tensor a shape: dimensions of size 1, the last two exchanged, fewer or more rows at the
    end (of a padded vocabulary); or any."""
    if have == want:
        return [""]
    if [size for size in have if size != 1] == [size for size in want if size != 1]:
        drop = [f"squeeze {axis}" for axis in reversed(range(len(have))) if have[axis] == 1]
        return [" | ".join([*drop, *(f"unsqueeze {axis}" for axis, size in enumerate(want) if size == 1)])]
    if len(have) > 1 and [*have[:-2], have[-1], have[-2]] == [*want]:
        return ["transpose"]
    if have and want and have[1:] == want[1:]:
        return [f"slice 0 0:{want[0]}" if want[0] < have[0] else f"pad 0 {want[0]}"]
    return [f"reshape {[*want]} from {[*have]}"] if prod(have) == prod(want) else []


def _chains(shapes: Sequence[tuple[int, ...]], count: int) -> Iterator[str]:
    """Operations that put tensors of these shapes together, or reorder the only one; the plainest first."""
    shape, rank = shapes[0], len(shapes[0])
    if len(shapes) == count == 1:
        yield ""
        yield from ["transpose"] if rank > 1 else []
        yield from (f"transpose {a} {b}" for a, b in combinations(range(rank), 2) if rank > 2)
        yield from (f"permute {' '.join(map(str, order))}" for order in permutations(range(rank)) if 2 < rank < 5)
        yield from _reorderings(shape)
        return
    for before in ("", "transpose | ") if rank > 1 else ("",):
        joins = list(_joins([each[::-1] if before and rank == 2 else each for each in shapes])) or [""]
        stacks = [f"stack {axis} over {STACKED}" for axis in range(rank + 1)] if count > 1 else [""]
        joins += [f"stack {axis}" for axis in range(rank + 1)] if count == 1 else []
        yield from (before + " | ".join(filter(None, [join, stack])) for join in joins for stack in stacks)


def _joins(shapes: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Operations that put tensors side by side: as they are, or in turns of groups (of heads, of single rows)."""
    for axis in range(len(shapes[0]) if len(shapes) > 1 else 0):
        sizes = [shape[axis] for shape in shapes]
        for groups in _divisors(gcd(*sizes)):
            each = [size // groups for size in sizes]
            parts = f" {each}" if len({*each}) > 1 else ""
            if groups == 1:
                yield f"cat {axis}{parts}"
            else:
                yield f"unflatten {axis} [{groups}, -1] | cat {axis + 1}{parts} | flatten {axis} [{groups}, -1]"


def _reorderings(shape: Sequence[int]) -> Iterator[str]:
    """Rows in another order: rotary halves of so many heads, columns that take turns, blocks."""
    for axis, size in enumerate(shape):
        divisors = _divisors(size)
        if axis == 0:
            yield from (f"{op} {heads}" for heads in divisors if size % (2 * heads) == 0 for op in ("rope", "unrope"))
        yield from (f"{op} {axis} {n}" for n in divisors[1:-1] for op in ("deinterleave", "interleave"))
        for groups, parts in (
            (a, b) for a in divisors[1:] for b in divisors[1:] if size // a % b == 0 and a * b < size
        ):
            inner = size // groups // parts
            apart = f"unflatten {axis} [{groups}, {parts}, {inner}] | transpose {axis + 1} {axis + 2}"
            yield f"{apart} | flatten {axis} [{groups}, {inner}, {parts}]"


@cache
def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, min(int(number**0.5) + 1, 1 << 16)) if number % n == 0]
    return [*small, *(number // n for n in reversed(small) if n * n != number)] or [1]
