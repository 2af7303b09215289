"""Two tensors compared: are their bytes the same, and if not, how far are their values apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import fold
from ckptool.checkpoint.blocks import same_bytes
from ckptool.checkpoint.dtypes import DType, dot, has_numbers, numbers, scratch, total
from ckptool.checkpoint.strided import in_storage_order, storage_axes
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.checkpoint.dtypes import Array


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
    Raises `UsageError` if the shapes differ, or if a packed type meets another type.
    """
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

    def add(self, place: int, x: Array, y: Array) -> None:
        if self.same_type:
            self._count(place, _differing_bytes(x, y, self.a.dtype))
        if not self.packed:
            self._add(place, numbers(x, self.a.dtype, "wide a"), numbers(y, self.b.dtype, "wide b"))

    def _count(self, place: int, differs: Array) -> None:
        import numpy

        changed = int(numpy.count_nonzero(differs))
        if changed and self.first is None:
            self.first = place + int(differs.argmax())
        self.changed += changed

    def _add(self, place: int, x: Array, y: Array) -> None:
        import numpy

        if x.dtype.kind in "biu" and y.dtype.kind in "biu":
            distance, x, y = _integer_distance(x, y)
            if not self.same_type:
                self._count(place, distance != 0)
            self.max_abs = max(self.max_abs, int(distance.max()))
            x, y, distance = (values.astype(numpy.float64) for values in (x, y, distance))
            self._add_finite(x, y, distance, distance)
            return
        if not self.same_type:
            common = numpy.result_type(x, y)
            x, y = x.astype(common, copy=False), y.astype(common, copy=False)
            self._count(place, ~_same_values(x, y))
        if x.dtype != numpy.float32 or not self._add_single(x, y):
            self._add_double(x, y)

    def _add_single(self, x: Array, y: Array) -> bool:
        """Adds f32 values, in f32 as far as no digit of the result is lost; False if not all are finite."""
        import numpy

        distance = numpy.subtract(x, y, out=scratch("distance", "f4", len(x)))
        numpy.abs(distance, out=distance)
        top = float(numpy.maximum.reduce(distance))
        if not isfinite(top):
            return False
        if top >= self.max_rounded and top > 0:
            # Rounding to f32 keeps the order, so the largest difference is one of those that share the top.
            self.max_rounded = top
            chosen = (distance == top).nonzero()[0]
            self.max_abs = max(self.max_abs, float(abs(x[chosen].astype("f8") - y[chosen].astype("f8")).max()))
        exact = abs(x.astype("f8") - y.astype("f8")) if self.within and top > 0 else None
        self._add_finite(x, y, distance, exact)
        return True

    def _add_double(self, x: Array, y: Array) -> None:
        """Adds f64 or complex values, and f32 ones that are not all finite."""
        import numpy

        wide = numpy.complex128 if numpy.iscomplexobj(x) else numpy.float64
        x, y = x.astype(wide, copy=False), y.astype(wide, copy=False)
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
        """Adds to the cosine and to the relative differences, and asks whether the exact distances are within the
        tolerance. Overwrites `x` and, if they are real, `y`."""
        import numpy

        if exact is not None and self.within:
            wide = y.astype("f8") if y.dtype == numpy.float32 else y
            self.within = bool((exact <= self.atol + self.rtol * abs(wide)).all())
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
        """The result. `order`: the dimensions of the tensor those of the compared view are."""
        import numpy

        first = None
        if self.first is not None:
            place = dict(zip(order, map(int, numpy.unravel_index(self.first, self.a.shape)), strict=True))
            first = tuple(place[axis] for axis in range(len(place)))
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


def _differing_bytes(x: Array, y: Array, dtype: DType) -> Array:
    """For each element of two byte arrays, whether its bytes differ; in a scratch array."""
    import numpy

    if dtype.itemsize == 16:
        differs: Array = (x.view("u8") != y.view("u8")).reshape(-1, 2).any(axis=1)
        return differs
    kind = f"u{dtype.itemsize}"
    differs = scratch("mask", "?", len(x) // dtype.itemsize)
    numpy.not_equal(x.view(kind), y.view(kind), out=differs)
    return differs


def _same_values(x: Array, y: Array) -> Array:
    """For each element, whether both are the same number, or both NaN; of complex numbers, both parts."""
    if x.dtype.kind == "c":
        return _same_values(x.real, y.real) & _same_values(x.imag, y.imag)
    same: Array = (x == y) | ((x != x) & (y != y))
    return same


def _integer_distance(x: Array, y: Array) -> tuple[Array, Array, Array]:
    """|x - y| of integers, exact and never wrapped, and both in the type that it was computed in."""
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
    wide = numpy.complex128 if x.dtype.kind == "c" else numpy.float64
    x, y = x.astype(wide, copy=False).view(numpy.float64), y.astype(wide, copy=False).view(numpy.float64)
    return dot(x, y), dot(x, x), dot(y, y)
