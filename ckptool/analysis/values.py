"""The values of tensors, read once: of one its range, mean, spread, what is no number, a histogram and a thumbnail; of
two whether their bytes are the same, and if not, how far their values are apart."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import gcd, inf, isfinite, sqrt
from operator import sub
from typing import NamedTuple

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import fold
from ckptool.checkpoint.blocks import same_bytes
from ckptool.checkpoint.dtypes import Array, dot, has_numbers, numbers, scratch, total
from ckptool.checkpoint.strided import in_storage_order, storage_axes, without_repeats
from ckptool.errors import UsageError
from ckptool.facts import dataclass, replace

BINS = 24  # of a histogram
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
# By the number of tensors: cells along a side of a thumbnail, and values in a histogram. All thumbnails of a file have
# some 60,000 cells at most.
_DETAIL = ((50, 32, 1 << 14), (250, 16, 1 << 12), (1000, 8, 1 << 10))
MOST_THUMBNAILS, _LEAST = _DETAIL[-1][0], 1 << 9


@dataclass(frozen=True, slots=True)
class Statistics:
    """Facts about the values of one tensor.
    count, zeros, nans, infs: elements.  min, max, mean, std, norm: of the finite ones, None where there is none.
    Minimum and maximum of integers are exact ints; everything else is computed in f64. `std` divides by n - 1, as
    torch's default does (None for one value). `norm` is the Euclidean norm. Complex values count by magnitude, bool as
    0 and 1, quantized as their integers."""

    count: int
    min: int | float | None
    max: int | float | None
    mean: float | None
    std: float | None
    norm: float | None
    zeros: int
    nans: int
    infs: int


@dataclass(frozen=True, slots=True)
class TensorPicture:
    """The values of a tensor as a histogram and as a thumbnail, from the pass over them that makes the statistics.
    counts: values in each of BINS equal bins between the least and the greatest finite value.  counted: of how
    many values, evenly taken; fewer than there are where it is large.  quantiles: of those, at 5, 25, 50, 75, 95 %.
    means: rows of means of blocks, of the tensor as a matrix (its first dimension by the others); None where a block
    has no finite value; empty where no thumbnail was made."""

    counts: tuple[int, ...]
    counted: int
    quantiles: tuple[float, ...]
    means: tuple[tuple[float | None, ...], ...]


def statistics(entry: TensorEntry) -> Statistics:
    """Reads the tensor once, in chunks, and returns its statistics. Raises `Unsupported` for packed types."""
    view, times = without_repeats(entry)
    return _statistics_of(in_storage_order(view) or view, times)


def detail(tensors: int) -> tuple[int, int]:
    """Cells along a side of each thumbnail, and values in each histogram, for so many tensors."""
    return next(((side, values) for limit, side, values in _DETAIL if tensors <= limit), (_DETAIL[-1][1], _LEAST))


class Values(NamedTuple):
    """What one pass over a tensor gives.  zero_rows: those that are all zero, of a tensor of two dimensions or more;
    None where they were not counted."""

    numbers: Statistics
    picture: TensorPicture
    zero_rows: int | None


def values_of(entry: TensorEntry, side: int, sample: int) -> Values:
    """Reads a tensor once. Repetitions of an expanded one count in the statistics alone.
    side: of the thumbnail, 0 for none.  sample: values in the histogram."""
    view, times = without_repeats(entry)
    sketch = _Sketch(view, side, sample)
    stats = _statistics_of(view, times, sketch)
    return Values(stats, sketch.picture(stats), sketch.zero_rows if view is entry and len(entry.shape) > 1 else None)


def _statistics_of(entry: TensorEntry, times: int, sketch: _Sketch | None = None) -> Statistics:
    """The statistics of a tensor that repeats each of its values `times` times; a sketch is given each chunk.
    Chunks are merged as in Chan, Golub, LeVeque, "Updating formulae" (1979)."""
    import numpy

    zeros = nans = infs = count = 0
    mean = squares = 0.0  # squares: of the distances from the mean
    ends: list[int | float] = []

    def add(_: int, raw: Array) -> None:
        nonlocal zeros, nans, infs, count, mean, squares, ends
        values = numbers(raw, entry.dtype, "wide")
        zero = numpy.equal(values, 0, out=scratch("mask", "?", len(values)))
        zeros_here = int(numpy.count_nonzero(zero))
        zeros += zeros_here
        if values.dtype.kind == "c":
            is_nan = numpy.isnan(values)  # of a magnitude, either part
            values = numpy.abs(values.astype(numpy.complex128))
            values[is_nan] = numpy.nan
        finite, lowest, highest = values, values.min(), values.max()
        if not (numpy.isfinite(lowest) and numpy.isfinite(highest)):
            finite = values[numpy.isfinite(values)]
            nans_here = int(numpy.count_nonzero(numpy.isnan(values)))
            nans += nans_here
            infs += len(values) - len(finite) - nans_here
        shifted = scratch("f64", "f8", len(finite))
        numpy.copyto(shifted, finite, casting="unsafe")
        if sketch is not None:
            sketch.add(values, zero, zeros_here, shifted if finite is values else None)
        if len(finite):
            if finite is not values:
                lowest, highest = finite.min(), finite.max()
            ends = [min([*ends[:1], lowest.item()]), max([*ends[1:], highest.item()])]
            chunk_mean = float(shifted.mean())
            numpy.subtract(shifted, chunk_mean, out=shifted)
            delta, share = chunk_mean - mean, len(finite) / (count + len(finite))
            squares += dot(shifted, shifted) + count * share * delta * delta
            mean += delta * share
            count += len(finite)

    with numpy.errstate(all="ignore"):
        fold(add, entry, row=1 if sketch is None else sketch.row)
    low, high = (int(end) if type(end) is bool else end for end in ends) if ends else (None, None)
    squares, n = squares * times, count * times
    std = sqrt(squares / (n - 1)) if n > 1 else None
    norm = sqrt(squares + n * mean * mean) if n else None
    odd_values = zeros * times, nans * times, infs * times
    return Statistics(entry.numel * times, low, high, mean if n else None, std, norm, *odd_values)


class _Sketch:
    """The running picture of a tensor as a matrix, its first dimension by the others."""

    def __init__(self, entry: TensorEntry, side: int, values: int) -> None:
        import numpy

        count, self.rows = entry.numel, entry.shape[0] if len(entry.shape) > 1 else 1
        self.row = count // self.rows
        step = max(1, -(-count // values))
        while step > 1 and gcd(step, count) > 1:  # otherwise only some of the columns would be sampled
            step += 1
        self.step, self.position, self.sample = step, 0, list[Array]()
        self.zero_rows, self.is_zero = 0, False  # is_zero: of a row that comes in parts, so far
        # Where the blocks of rows and of columns begin; and of each block the sum, and what is not finite.
        self.tops, self.lefts = _part_starts(self.rows, side), _part_starts(self.row, side)
        self.sums, self.missing = numpy.zeros((2, len(self.tops), len(self.lefts)))

    def add(self, values: Array, zero: Array, zeros: int, doubles: Array | None) -> None:
        """Takes whole rows, or a part of one, and which of them are zero; all arrays are overwritten by the next.
        doubles: the same in f64; None where one of them is not finite."""
        import numpy

        count, (top, left) = len(values), divmod(self.position, self.row)
        self.sample.append(values[-self.position % self.step :: self.step].copy())
        self.position += count
        lines = max(1, count // self.row)
        if count < self.row:
            self.is_zero = zeros == count and (left == 0 or self.is_zero)
            self.zero_rows += self.is_zero and left + count == self.row
        elif zeros >= self.row:
            self.zero_rows += int(zero.reshape(lines, -1).all(axis=1).sum())
        if not self.tops:
            return
        (y, tops), (x, lefts) = _parts_from(self.tops, top, lines), _parts_from(self.lefts, left, count // lines)
        blocks = slice(y, y + len(tops) - 1), slice(x, x + len(lefts) - 1)
        if doubles is None:
            not_finite = ~numpy.isfinite(values)
            self.missing[blocks] += _block_sums(not_finite.astype(numpy.float64), tops, lefts)
            doubles = numpy.where(not_finite, 0, values).astype(numpy.float64)
        self.sums[blocks] += _block_sums(doubles, tops, lefts)

    def picture(self, statistics: Statistics) -> TensorPicture:
        """The picture; the bins of its histogram are between the least and the greatest value of all."""
        import numpy

        values = numpy.concatenate(self.sample)
        values.sort()  # NaN last
        if statistics.nans or statistics.infs:
            values = values[numpy.isfinite(values)]
        count = len(values)
        if not count or statistics.min is None or statistics.max is None:
            return TensorPicture((0,) * BINS, 0, (), ())
        below = [count] * (BINS - 1)
        if statistics.min < statistics.max:
            edges = [statistics.min * (1 - n / BINS) + statistics.max * (n / BINS) for n in range(1, BINS)]
            below = values.searchsorted(edges).tolist()
        counts = tuple(map(sub, [*below, count], [0, *below]))
        quantiles = []
        for share in QUANTILES:
            place, fraction = divmod(share * (count - 1), 1)
            low, high = values.item(int(place)), values.item(min(int(place) + 1, count - 1))
            quantiles.append(low * (1 - fraction) + high * fraction)
        if not self.tops:
            return TensorPicture(counts, count, tuple(quantiles), ())
        with numpy.errstate(all="ignore"):
            areas = numpy.outer(numpy.diff([*self.tops, self.rows]), numpy.diff([*self.lefts, self.row]))
            means = self.sums / (areas - self.missing)
        rows = tuple(tuple(mean if isfinite(mean) else None for mean in row) for row in means.tolist())
        return TensorPicture(counts, count, tuple(quantiles), rows)


def _part_starts(count: int, side: int) -> list[int]:
    """The first index of each of at most `side` equal parts of `count`."""
    parts = min(count, side)
    return [number * count // parts for number in range(parts)]


def _parts_from(starts: list[int], first: int, count: int) -> tuple[int, list[int]]:
    """The part that `first` is in; and the boundaries of the parts within the `count` from there, relative to it."""
    number = bisect_right(starts, first) - 1
    return number, [0, *(start - first for start in starts[number + 1 : bisect_left(starts, first + count)]), count]


def _block_sums(values: Array, tops: list[int], lefts: list[int]) -> Array:
    """The sums of the blocks between these rows and these columns."""
    import numpy

    lines = values.reshape(tops[-1], -1)
    if len(tops) <= len(lines):  # by far the most additions: along the rows, which is quick
        lines = numpy.array([numpy.add.reduce(lines[start:stop], axis=0) for start, stop in pairwise(tops)])
    return numpy.add.reduceat(lines, lefts[:-1], axis=1)


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """The distance of two tensors of one shape.

    changed: elements whose stored bytes differ (with -0.0 and 0.0, or two NaN payloads, they do; between different
    types, elements whose values differ).  total: all elements.
    max_abs: the largest |a - b|, exact: an int for integers, `inf` where one side is NaN or infinite and the other is
    not the same.  max_rel, mean_rel: of |a - b| / max(|a|, |b|), 0 for equal values, over elements that are finite on
    both sides.
    cosine: of the angle between the two, over the same elements; None where one side is all zero.
    within_tolerance: |a - b| <= atol + rtol * |b| everywhere; NaN agrees with NaN, an infinity with itself.
    first: the index of the first changed element (in row-major order; in storage order if both are permuted alike).
    Complex numbers differ by magnitude. Packed types have no numbers: all but the counts and `first` is None.
    """

    changed: int
    total: int
    max_abs: int | float | None
    mean_rel: float | None
    max_rel: float | None
    cosine: float | None
    within_tolerance: bool
    first: tuple[int, ...] | None


def compare_values(a: TensorEntry, b: TensorEntry, atol: float = 0.0, rtol: float = 0.0) -> ValueDifference | None:
    """The difference of the values of `b` from those of `a`; None if they are the same bytes in row-major order.
    Different types are compared in one that holds both exactly (64-bit integers against floats: rounded to f64).
    Raises `UsageError` if the shapes differ, or if a packed type meets another type."""
    import numpy

    if a.shape != b.shape:
        raise UsageError(f"cannot compare values of shape {list(a.shape)} with shape {list(b.shape)}")
    order: Sequence[int] = range(len(a.shape))
    if a.stride == b.stride and not a.is_contiguous:  # permuted alike: nothing has to be gathered
        turned_a, turned_b = in_storage_order(a), in_storage_order(b)
        if turned_a and turned_b:
            order, a, b = storage_axes(a), turned_a, turned_b
    if a.dtype is b.dtype and a.flags.lazy == b.flags.lazy:
        if same_bytes(a.row_major(), b.row_major()):
            return None
        a, b = (replace(entry, flags=entry.flags._replace(conj=False, neg=False)) for entry in (a, b))
    comparison = _Comparison(a, b, atol, rtol)
    with numpy.errstate(all="ignore"):
        fold(comparison.add, a, b)
    return None if a.dtype is b.dtype and not comparison.changed else comparison.result(order)


def change_of(values: ValueDifference) -> float:
    """How much a tensor changed, to sort by: the mean relative change; `inf` where one side alone is not finite."""
    return inf if values.max_abs == inf else values.mean_rel or 0.0


class _Comparison:
    """The running comparison of two tensors, chunk by chunk."""

    def __init__(self, a: TensorEntry, b: TensorEntry, atol: float, rtol: float) -> None:
        self.a, self.b = a, b
        self.atol, self.rtol = atol, rtol
        self.same_type = a.dtype is b.dtype
        self.changed = 0
        self.first: int | None = None
        self.max_abs: int | float = 0
        self.max_rounded = 0.0  # the largest difference, as f32 rounds it
        self.max_rel = self.sum_rel = 0.0
        self.finite = 0
        self.ab = self.aa = self.bb = 0.0  # the products of the two
        self.within = True
        self.packed = not (has_numbers(a.dtype) and has_numbers(b.dtype))
        if self.packed and not self.same_type:
            raise UsageError(f"cannot compare the values of {a.dtype.name} with those of {b.dtype.name}: one is packed")

    def add(self, offset: int, x: Array, y: Array) -> None:
        import numpy

        if self.same_type:
            if (size := self.a.dtype.itemsize) == 16:
                differs: Array = (x.view("u8") != y.view("u8")).reshape(-1, 2).any(axis=1)
            else:
                differs = scratch("mask", "?", len(x) // size)
                numpy.not_equal(x.view(f"u{size}"), y.view(f"u{size}"), out=differs)
            self._count_changed(offset, differs)
        if self.packed:
            return
        x, y = numbers(x, self.a.dtype, "wide a"), numbers(y, self.b.dtype, "wide b")
        if x.dtype.kind in "biu" and y.dtype.kind in "biu":
            distance, x, y = _integer_distance(x, y)
            if not self.same_type:
                self._count_changed(offset, distance != 0)
            self.max_abs = max(self.max_abs, int(distance.max()))
            x, y, distance = (values.astype(numpy.float64) for values in (x, y, distance))
            self._add_finite(x, y, distance, distance)
            return
        if not self.same_type:
            common = numpy.result_type(x, y)
            x, y = x.astype(common, copy=False), y.astype(common, copy=False)
            self._count_changed(offset, ~_same_values(x, y))
        if x.dtype != numpy.float32 or not self._add_single(x, y):
            self._add_double(x, y)

    def _count_changed(self, offset: int, differs: Array) -> None:
        import numpy

        changed = int(numpy.count_nonzero(differs))
        if changed and self.first is None:
            self.first = offset + int(differs.argmax())
        self.changed += changed

    def _add_single(self, x: Array, y: Array) -> bool:
        """Adds f32 values, in f32 where that loses no digit of the result; False if not all are finite."""
        import numpy

        distance = numpy.subtract(x, y, out=scratch("distance", "f4", len(x)))
        numpy.abs(distance, out=distance)
        top = float(numpy.maximum.reduce(distance))
        if not isfinite(top):
            return False
        if top >= self.max_rounded and top > 0:
            # Rounding to f32 keeps the order, so the largest difference is one of those that share the top.
            self.max_rounded = top
            at_top = (distance == top).nonzero()[0]
            self.max_abs = max(self.max_abs, float(abs(x[at_top].astype("f8") - y[at_top].astype("f8")).max()))
        exact = abs(x.astype("f8") - y.astype("f8")) if self.within and top > 0 else None
        self._add_finite(x, y, distance, exact)
        return True

    def _add_double(self, x: Array, y: Array) -> None:
        """Adds f64 or complex values, and f32 ones that are not all finite."""
        import numpy

        dtype = numpy.complex128 if numpy.iscomplexobj(x) else numpy.float64
        x, y = x.astype(dtype, copy=False), y.astype(dtype, copy=False)
        distance = abs(x - y)
        if not isfinite(distance.max()):
            finite = numpy.isfinite(x) & numpy.isfinite(y)
            if not _same_values(x[~finite], y[~finite]).all():
                self.max_abs = inf
                self.within = False
            x, y, distance = x[finite], y[finite], distance[finite]
        if len(x):
            self.max_abs = max(self.max_abs, float(distance.max()))
            self._add_finite(x, y, distance, distance)

    def _add_finite(self, x: Array, y: Array, distance: Array, exact: Array | None) -> None:
        """Adds to the cosine and to the relative differences, and checks the exact distances against the tolerance.
        Overwrites `x` and, if they are real, `y`."""
        import numpy

        if exact is not None and self.within:
            doubles = y.astype("f8") if y.dtype == numpy.float32 else y
            self.within = bool((exact <= self.atol + self.rtol * abs(doubles)).all())
        self.finite += len(x)
        ab, aa, bb = _products(x, y)
        self.ab += ab
        self.aa += aa
        self.bb += bb
        # In place: three arrays fit into the second-level cache, five do not.
        out = None if x.dtype.kind == "c" else (x, y)
        relative = numpy.maximum(numpy.abs(x, out=out and out[0]), numpy.abs(y, out=out and out[1]), out=out and out[0])
        numpy.divide(distance, relative, out=relative)
        top = float(numpy.maximum.reduce(relative))
        if not isfinite(top):
            relative[distance == 0] = 0  # 0 / 0
            top = float(relative.max())
        self.max_rel = max(self.max_rel, top)
        self.sum_rel += total(relative)

    def result(self, order: Sequence[int]) -> ValueDifference:
        """The result. `order`: for each dimension of the compared view, the dimension of the tensor."""
        import numpy

        first = None
        if self.first is not None:
            index = dict(zip(order, map(int, numpy.unravel_index(self.first, self.a.shape)), strict=True))
            first = tuple(index[axis] for axis in range(len(index)))
        lengths = sqrt(self.aa) * sqrt(self.bb)
        return ValueDifference(
            changed=self.changed,
            total=self.a.numel,
            max_abs=None if self.packed else self.max_abs,
            mean_rel=self.sum_rel / self.finite if self.finite else None,
            max_rel=self.max_rel if self.finite else None,
            cosine=min(1.0, max(-1.0, self.ab / lengths)) if 0 < lengths < inf else None,
            within_tolerance=self.within and not (self.packed and self.changed),
            first=first,
        )


def _same_values(x: Array, y: Array) -> Array:
    """For each element, whether both are the same number, or both NaN; of complex numbers, both parts."""
    if x.dtype.kind == "c":
        return _same_values(x.real, y.real) & _same_values(x.imag, y.imag)
    same: Array = (x == y) | ((x != x) & (y != y))
    return same


def _integer_distance(x: Array, y: Array) -> tuple[Array, Array, Array]:
    """|x - y| of integers, exact, without wrapping around; and both in the type that it was computed in."""
    import numpy

    common = numpy.result_type(x, y, numpy.int8)
    if common.kind == "f":  # i64 with u64: Python's integers have room for both
        common = numpy.dtype(object)
    elif common.kind == "i":
        common = numpy.dtype(numpy.int64)
    x, y = x.astype(common), y.astype(common)
    if common.kind == "O":
        return abs(x - y), x, y
    # Of 64-bit numbers only the larger minus the smaller, modulo 2**64, is sure to fit.
    left, right = x.view(numpy.uint64), y.view(numpy.uint64)
    return numpy.where(x >= y, left - right, right - left), x, y


def _products(x: Array, y: Array) -> tuple[float, float, float]:
    """x·y, x·x and y·y in f64; f32 values in f32 blocks where that neither overflows nor underflows."""
    import numpy

    if x.dtype == numpy.float32:
        ab, aa, bb = dot(x, y), dot(x, x), dot(y, y)
        if 1e-25 < aa < inf and 1e-25 < bb < inf:
            return ab, aa, bb
    dtype = numpy.complex128 if x.dtype.kind == "c" else numpy.float64
    x, y = x.astype(dtype, copy=False).view(numpy.float64), y.astype(dtype, copy=False).view(numpy.float64)
    return dot(x, y), dot(x, x), dot(y, y)
