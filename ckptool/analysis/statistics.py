"""The values of a tensor, read once: range, mean, spread, what is no number; a histogram and a thumbnail of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, sqrt
from typing import NamedTuple

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import fold
from ckptool.checkpoint.dtypes import Array, dot, numbers, scratch
from ckptool.checkpoint.strided import in_storage_order, without_repeats

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
    0 and 1, quantized as their integers.
    """

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
    has no finite value; empty where no thumbnail was made.
    """

    counts: tuple[int, ...]
    counted: int
    quantiles: tuple[float, ...]
    means: tuple[tuple[float | None, ...], ...]


def statistics(entry: TensorEntry) -> Statistics:
    """Reads the tensor once, in chunks, and returns its statistics. Raises `Unsupported` for packed types."""
    once, times = without_repeats(entry)
    return _read(in_storage_order(once) or once, times)


def detail(tensors: int) -> tuple[int, int]:
    """Cells along a side of each thumbnail, and values in each histogram, for so many tensors."""
    return next(((side, values) for most, side, values in _DETAIL if tensors <= most), (_DETAIL[-1][1], _LEAST))


class Values(NamedTuple):
    """What one reading of a tensor gives.  zero_rows: those that are all zero, of a tensor of two dimensions or more;
    None where they were not looked at."""

    numbers: Statistics
    picture: TensorPicture
    zero_rows: int | None


def values_of(entry: TensorEntry, side: int, sample: int) -> Values:
    """Reads a tensor once. Repetitions of an expanded one count in the statistics alone.

    side: of the thumbnail, 0 for none.  sample: values in the histogram.
    """
    once, times = without_repeats(entry)
    sketch = _Sketch(once, side, sample)
    found = _read(once, times, sketch)
    return Values(found, sketch.picture(found), sketch.zero_rows if once is entry and len(entry.shape) > 1 else None)


def _read(entry: TensorEntry, times: int, sketch: _Sketch | None = None) -> Statistics:
    """The statistics of a tensor that shows each of its values so many times; a sketch takes each part as it comes.

    Chunks are merged as in Chan, Golub, LeVeque, "Updating formulae" (1979).
    """
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
            odd = numpy.isnan(values)  # of a magnitude, either part
            values = numpy.abs(values.astype(numpy.complex128))
            values[odd] = numpy.nan
        finite, least, most = values, values.min(), values.max()
        if not (numpy.isfinite(least) and numpy.isfinite(most)):
            finite = values[numpy.isfinite(values)]
            nans_here = int(numpy.count_nonzero(numpy.isnan(values)))
            nans += nans_here
            infs += len(values) - len(finite) - nans_here
        shifted, here = scratch("f64", "f8", len(finite)), 0.0
        if len(finite):
            if finite is not values:
                least, most = finite.min(), finite.max()
            ends = [min([*ends[:1], least.item()]), max([*ends[1:], most.item()])]
            numpy.copyto(shifted, finite, casting="unsafe")
            here = float(shifted.mean())
            numpy.subtract(shifted, here, out=shifted)
            apart, share = here - mean, len(finite) / (count + len(finite))
            squares += dot(shifted, shifted) + apart * apart * count * share
            mean += apart * share
            count += len(finite)
        if sketch is not None:
            sketch.add(values, zero, zeros_here, shifted if finite is values else None, here)

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
        while step > 1 and gcd(step, count) > 1:  # else only some of the columns would be seen
            step += 1
        self.step, self.place, self.sample = step, 0, list[Array]()
        self.zero_rows, self.is_zero = 0, False  # is_zero: so far, of a row that comes in parts
        # Where the blocks of rows and of columns begin; and of each block the sum, and what is not finite.
        self.tops, self.lefts = _starts(self.rows, side), _starts(self.row, side)
        self.sums, self.missing = numpy.zeros((2, len(self.tops), len(self.lefts)))

    def add(self, values: Array, zero: Array, zeros: int, shifted: Array | None, mean: float) -> None:
        """Takes whole rows, or a part of one, and which of them are zero; all arrays are overwritten by the next.

        shifted: their distances from their mean, in f64; None where one of them is not finite.
        """
        import numpy

        count, (top, left) = len(values), divmod(self.place, self.row)
        self.sample.append(values[-self.place % self.step :: self.step].copy())
        self.place += count
        lines = max(1, count // self.row)
        if count < self.row:
            self.is_zero = zeros == count and (left == 0 or self.is_zero)
            self.zero_rows += self.is_zero and left + count == self.row
        elif zeros >= self.row:
            self.zero_rows += int(zero.reshape(lines, -1).all(axis=1).sum())
        if not self.tops:
            return
        (y, ups), (x, lefts) = _within(self.tops, top, lines), _within(self.lefts, left, count // lines)
        blocks = slice(y, y + len(ups) - 1), slice(x, x + len(lefts) - 1)
        if shifted is None:
            odd = ~numpy.isfinite(values)
            self.missing[blocks] += _sums(odd.astype(numpy.float64), ups, lefts)
            shifted, mean = numpy.where(odd, 0, values).astype(numpy.float64), 0.0
        self.sums[blocks] += _sums(shifted, ups, lefts) + mean * _areas(ups, lefts)

    def picture(self, found: Statistics) -> TensorPicture:
        """The picture; the bins of its histogram are between the least and the greatest value of all."""
        import numpy

        values = numpy.concatenate(self.sample)
        values.sort()  # NaN last
        if found.nans or found.infs:
            values = values[numpy.isfinite(values)]
        count = len(values)
        if not count or found.min is None or found.max is None:
            return TensorPicture((0,) * BINS, 0, (), ())
        shares = numpy.arange(1, BINS) / BINS
        below = [count] * (BINS - 1)
        if found.min < found.max:
            below = values.searchsorted(found.min * (1 - shares) + found.max * shares).tolist()
        counts = tuple(stop - start for start, stop in pairwise([0, *below, count]))
        places = numpy.multiply(QUANTILES, count - 1)
        low, part = places.astype(int), places % 1
        quantiles = values[low] * (1 - part) + values[numpy.minimum(low + 1, count - 1)] * part
        if not self.tops:
            return TensorPicture(counts, count, tuple(quantiles.tolist()), ())
        with numpy.errstate(all="ignore"):
            means = self.sums / (_areas([*self.tops, self.rows], [*self.lefts, self.row]) - self.missing)
        rows = tuple(tuple(mean if mean == mean else None for mean in row) for row in means.tolist())
        return TensorPicture(counts, count, tuple(quantiles.tolist()), rows)


def _starts(count: int, side: int) -> list[int]:
    """The first of each of at most `side` equal parts of so many."""
    parts = min(count, side)
    return [number * count // parts for number in range(parts)]


def _within(starts: list[int], first: int, count: int) -> tuple[int, list[int]]:
    """The part that `first` is in; and where it and the parts after it begin in the `count` from there, and its end."""
    number = bisect_right(starts, first) - 1
    return number, [0, *(start - first for start in starts[number + 1 : bisect_left(starts, first + count)]), count]


def _sums(values: Array, ups: list[int], lefts: list[int]) -> Array:
    """The sums of the blocks between these rows and these columns."""
    import numpy

    lines = values.reshape(ups[-1], -1)
    if len(ups) <= len(lines):  # by far the most additions: along the rows, which is quick
        lines = numpy.array([numpy.add.reduce(lines[start:stop], axis=0) for start, stop in pairwise(ups)])
    return numpy.add.reduceat(lines, lefts[:-1], axis=1)


def _areas(ups: list[int], lefts: list[int]) -> Array:
    import numpy

    return numpy.outer(numpy.diff(ups), numpy.diff(lefts))
