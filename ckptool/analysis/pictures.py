"""The values of a tensor in pictures: a histogram and a thumbnail, from the pass that makes its statistics."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cache
from itertools import pairwise
from math import gcd
from typing import Any

from ckptool.analysis.report import BINS, TensorPicture
from ckptool.analysis.statistics import Statistics, ValueChunk, read
from ckptool.checkpoint import Data, TensorEntry
from ckptool.checkpoint.numeric import CHUNK, Array
from ckptool.checkpoint.strided import in_storage_order, row_major, storage_axes, without_repeats

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MAX_TURNED = 1 << 24  # rows that are looked at side by side, a byte for each
# By the number of tensors: cells along a side of a thumbnail, and values in a histogram. All thumbnails of a file have
# some 60,000 cells at most.
_DETAIL = ((50, 32, 1 << 14), (250, 16, 1 << 12), (1000, 8, 1 << 10))
_LEAST = 1 << 9
MOST_THUMBNAILS = _DETAIL[-1][0]


def detail(tensors: int) -> tuple[int, int]:
    """Cells along a side of each thumbnail, and values in each histogram, for so many tensors."""
    return next(((side, values) for most, side, values in _DETAIL if tensors <= most), (_DETAIL[-1][1], _LEAST))


def pictured(entry: TensorEntry, side: int, values: int) -> tuple[Statistics, TensorPicture, int | None]:
    """Reads a tensor once: its statistics, its picture, and the number of its rows that are all zero.

    side: of the thumbnail, 0 for none.  values: in the histogram.  The rows are those of a tensor of two dimensions or
    more; None where they were not looked at. Repetitions of an expanded tensor are not counted.
    """
    once, times = without_repeats(entry)
    sketch = Sketch(once, side, values)
    found = read(once, times, sketch)
    dead = sketch.dead_rows()
    return found, sketch.picture(found), dead if once is entry else None


_NO_BLOCKS: tuple[Any, Any] = (None, None)


class Sketch:
    """The running picture of a tensor, which is read as a matrix of rows that lie behind one another in the storage.

    They are the rows of the tensor, its first dimension by the others; `turned`: its columns, where it was saved
    transposed. inner: how the other dimensions are brought into their own order, where the storage has another.
    """

    def __init__(self, entry: TensorEntry, side: int, values: int) -> None:
        import numpy

        self.data, self.turned, self.inner = _laid_out(entry)
        self.matrix = len(entry.shape) > 1
        count = entry.numel
        rows = entry.shape[0] if self.matrix else 1
        self.rows, self.row = (count // rows, rows) if self.turned else (rows, count // rows)
        step = max(1, -(-count // values))
        while step > 1 and gcd(step, count) > 1:  # else only some of the columns would be seen
            step += 1
        self.step, self.place = step, 0
        self.sample: list[Array] = []
        self.tops, self.lefts = (_starts(self.rows, side), _starts(self.row, side)) if side else ([], [])
        # Of each block the sum, and how many values are not finite.
        self.sums, self.missing = _NO_BLOCKS
        if side:
            self.sums, self.missing = numpy.zeros((2, len(self.tops), len(self.lefts)))
        self.dead = 0
        self.dying = True  # the row that is read has had only zeros so far; of columns, one of them has
        self.zero_columns = numpy.ones(self.row, bool) if self.turned and self.row <= MAX_TURNED else None

    def add(self, part: ValueChunk) -> None:
        """Takes whole rows, or a part of one."""
        self.sample.append(part.values[-self.place % self.step :: self.step].copy())
        if self.matrix:
            self._find_zeros(part)
        if self.tops:
            self._add_means(part)
        self.place += len(part.values)

    def _find_zeros(self, part: ValueChunk) -> None:
        count, start = len(part.zero), self.place % self.row
        if self.zero_columns is not None:
            if self.dying:
                columns = self.zero_columns[start : start + count]
                columns &= part.zero if count < self.row else part.zero.reshape(-1, self.row).all(axis=0)
                self.dying = bool(self.zero_columns.any())
        elif count >= self.row:
            self.dead += int(part.zero.reshape(-1, self.row).all(axis=1).sum()) if part.zeros >= self.row else 0
        else:
            self.dying = (start == 0 or self.dying) and part.zeros == count
            self.dead += self.dying and start + count == self.row

    def _add_means(self, part: ValueChunk) -> None:
        import numpy

        top, left = divmod(self.place, self.row)
        count = max(1, len(part.values) // self.row)
        first, ups = _within(self.tops, top, count)
        at, lefts = _within(self.lefts, left, len(part.values) // count)
        cells = slice(first, first + len(ups) - 1), slice(at, at + len(lefts) - 1)
        if part.shifted is not None:
            sizes = numpy.multiply.outer(_sizes(ups), _sizes(lefts))
            self.sums[cells] += self._blocks(part.shifted, ups, lefts) + part.mean * sizes
            return
        strange = ~numpy.isfinite(part.values)
        finite = part.values.astype(numpy.float64)
        finite[strange] = 0
        self.sums[cells] += self._blocks(finite, ups, lefts)
        self.missing[cells] += self._blocks(strange.astype(numpy.float64), ups, lefts)

    def _blocks(self, values: Array, ups: list[int], lefts: list[int]) -> Array:
        """The sums of the blocks between these rows and these columns."""
        import numpy

        lines = values.reshape(ups[-1], -1)
        if len(ups) <= len(lines):  # by far the most additions: along the rows, which is quick
            every, lines = lines, numpy.empty((len(ups) - 1, lines.shape[1]))
            for number, (start, stop) in enumerate(pairwise(ups)):
                numpy.add.reduce(every[start:stop], axis=0, out=lines[number])
        if self.inner:
            shape, axes = self.inner
            lines = lines.reshape(-1, *shape).transpose(0, *axes).reshape(len(lines), -1)
        found: Array = numpy.add.reduceat(lines, lefts[:-1], axis=1)
        return found

    def dead_rows(self) -> int | None:
        """The rows that hold nothing but zeros; None where they were not looked at."""
        if not self.matrix or (self.turned and self.zero_columns is None):
            return None
        return self.dead if self.zero_columns is None else int(self.zero_columns.sum())

    def picture(self, found: Statistics) -> TensorPicture:
        """The picture; the bins of its histogram are between the least and the greatest value of all."""
        import numpy

        values = numpy.concatenate(self.sample) if len(self.sample) > 1 else self.sample[0]
        values.sort()  # NaN last
        if found.nans or found.infs:
            values = values[numpy.isfinite(values)]
        count = len(values)
        if not count or found.min is None or found.max is None:
            return TensorPicture((0,) * BINS, 0, (), ())
        below = [count] * (BINS - 1)
        if found.min < found.max:
            shares = _shares()
            below = values.searchsorted(found.min * (1 - shares) + found.max * shares).tolist()
        return TensorPicture(tuple(_sizes([0, *below, count])), count, _quantiles(values), self._means())

    def _means(self) -> tuple[tuple[float | None, ...], ...]:
        import numpy

        if not self.tops:
            return ()
        sizes = numpy.multiply.outer(_sizes([*self.tops, self.rows]), _sizes([*self.lefts, self.row]))
        with numpy.errstate(all="ignore"):
            means = self.sums / (sizes - self.missing)
        rows = (means.T if self.turned else means).tolist()
        return tuple(tuple(mean if mean == mean else None for mean in row) for row in rows)


def _laid_out(entry: TensorEntry) -> tuple[Data, bool, tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """The values as they are read, whether that is column by column, and the order of the dimensions in each row."""
    turned = None if entry.is_contiguous or len(entry.shape) < 2 else in_storage_order(entry)
    if turned is None:
        return row_major(entry), False, None
    order = storage_axes(entry)
    if order == [*range(1, len(order)), 0]:
        return row_major(turned), True, None
    if order[0] == 0 and entry.numel // entry.shape[0] <= CHUNK:
        axes = tuple(order.index(axis) for axis in range(1, len(order)))
        return row_major(turned), False, (turned.shape[1:], axes)
    return row_major(entry), False, None


def _starts(count: int, side: int) -> list[int]:
    """The first of each of at most `side` equal parts of so many."""
    parts = min(count, side)
    return [number * count // parts for number in range(parts)]


def _within(starts: list[int], first: int, count: int) -> tuple[int, list[int]]:
    """The part that `first` is in; and where it and the parts after it begin in the `count` from there, and its end."""
    number = bisect_right(starts, first) - 1
    return number, [0, *(start - first for start in starts[number + 1 : bisect_left(starts, first + count)]), count]


def _sizes(edges: list[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(edges)]


@cache
def _shares() -> Array:
    import numpy

    return numpy.arange(1, BINS) / BINS


def _quantiles(values: Array) -> tuple[float, ...]:
    """The quantiles of sorted values, as numpy's `linear` has them."""
    last = len(values) - 1
    places = [share * last for share in QUANTILES]
    low = values[[int(place) for place in places]].tolist()
    high = values[[min(int(place) + 1, last) for place in places]].tolist()
    return tuple(a * (1 - place % 1) + b * (place % 1) for a, b, place in zip(low, high, places, strict=True))
