"""Statistics of a tensor's values: range, mean, spread, and values that are no numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.blocks import chunks
from ckptool.checkpoint.numeric import CHUNK, Array, dot, numbers, resolve, scratch
from ckptool.checkpoint.strided import any_order, without_repeats

if TYPE_CHECKING:
    from ckptool.analysis.pictures import Sketch


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


def statistics(entry: TensorEntry) -> Statistics:
    """Reads the tensor once, in chunks, and returns its statistics. Raises `Unsupported` for packed types."""
    return read(*without_repeats(entry))


class ValueChunk(NamedTuple):
    """Values that were read at a time, those of complex numbers as magnitudes; all arrays are overwritten by the next.

    zero: which are zero, `zeros` of them.  shifted: their distances from their mean, in f64; None where one of them is
    not finite.
    """

    values: Array
    zero: Array
    zeros: int
    shifted: Array | None
    mean: float


def read(entry: TensorEntry, times: int, sketch: Sketch | None = None) -> Statistics:
    """The statistics of a tensor that shows each of its values so many times; a sketch takes each part as it comes."""
    import numpy

    moments = _Moments()
    data, row = (any_order(entry), CHUNK) if sketch is None else (sketch.data, sketch.row)
    with numpy.errstate(all="ignore"):
        for raw in chunks(data, entry.dtype.itemsize, "raw", row):
            part = moments.add(numbers(resolve(raw, entry.dtype, entry.flags), entry.dtype, "wide"))
            if sketch is not None:
                sketch.add(part)
    return moments.repeated(times).result(entry.numel * times)


class _Moments:
    """The running statistics; chunks are merged as in Chan, Golub, LeVeque, "Updating formulae" (1979)."""

    def __init__(self) -> None:
        self.zeros = self.nans = self.infs = self.finite = 0
        self.low: int | float | None = None
        self.high: int | float | None = None
        self.mean = self.squares = 0.0  # squares: of the distances from the mean

    def repeated(self, times: int) -> _Moments:
        """The same as if every value had come so many times."""
        for name in ("zeros", "nans", "infs", "finite"):
            setattr(self, name, getattr(self, name) * times)
        self.squares *= times
        return self

    def add(self, values: Array) -> ValueChunk:
        import numpy

        zero = numpy.equal(values, 0, out=scratch("mask", "?", len(values)))
        zeros = int(numpy.count_nonzero(zero))
        self.zeros += zeros
        if values.dtype.kind == "c":
            values = _magnitudes(values)
        low, high = _range(values)
        finite = values
        if not (numpy.isfinite(low) and numpy.isfinite(high)):
            finite = self._without_special(values)
            if not len(finite):
                return ValueChunk(values, zero, zeros, None, 0)
            low, high = _range(finite)
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        shifted, mean = self._merge(finite)
        return ValueChunk(values, zero, zeros, shifted if finite is values else None, mean)

    def _without_special(self, values: Array) -> Array:
        import numpy

        nans = int(numpy.count_nonzero(numpy.isnan(values)))
        finite: Array = values[numpy.isfinite(values)]
        self.nans += nans
        self.infs += len(values) - len(finite) - nans
        return finite

    def _merge(self, values: Array) -> tuple[Array, float]:
        import numpy

        wide = scratch("f64", "f8", len(values))
        numpy.copyto(wide, values, casting="unsafe")
        mean = float(wide.mean())
        numpy.subtract(wide, mean, out=wide)
        count = self.finite + len(values)
        apart = mean - self.mean
        self.squares += dot(wide, wide) + apart * apart * self.finite * (len(values) / count)
        self.mean += apart * (len(values) / count)
        self.finite = count
        return wide, mean

    def result(self, count: int) -> Statistics:
        n = self.finite
        return Statistics(
            count=count,
            min=self.low,
            max=self.high,
            mean=self.mean if n else None,
            std=sqrt(self.squares / (n - 1)) if n > 1 else None,
            norm=sqrt(self.squares + n * self.mean * self.mean) if n else None,
            zeros=self.zeros,
            nans=self.nans,
            infs=self.infs,
        )


def _range(values: Array) -> tuple[int | float, int | float]:
    low, high = values.min().item(), values.max().item()
    return (int(low), int(high)) if values.dtype.kind == "b" else (low, high)


def _magnitudes(values: Array) -> Array:
    """The absolute values of complex numbers, in f64; NaN if either part is."""
    import numpy

    found: Array = numpy.abs(values.astype(numpy.complex128))
    found[numpy.isnan(values)] = numpy.nan
    return found
