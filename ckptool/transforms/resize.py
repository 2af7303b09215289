"""Tensors of another size: position embeddings, rows of a vocabulary, classes of a head, input channels.

Places and weights are those of torch's `interpolate` with `align_corners=False` (aten/src/ATen/native/UpSample.h and
cpu/UpSampleKernel.cpp), channels those of timm's `adapt_input_conv`. All of it is computed in f64, in blocks and while
it is read, and rounded once, so that no value is further from the exact one than that of an f32 kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil, isqrt, prod
from typing import Any, NoReturn

from ckptool.checkpoint import Computed, Flags, TensorEntry
from ckptool.checkpoint.arrays import Numbers, TensorValues, computed_tensor, in_pieces
from ckptool.checkpoint.numeric import Array
from ckptool.commands import NAME, arg
from ckptool.errors import LimitExceeded, Unsupported, UsageError, counted
from ckptool.formats.pieces import Piece, assembled
from ckptool.transforms.casting import compact

MAX_SIDE = 1 << 16  # of a grid, and of tables of weights
ROOM = 1 << 18  # elements that are read at once
KEPT = 1 << 16  # elements of a row that are kept

GRID, ROWS, CHANNELS = "grid", "rows", "channels"
_FILLS = ("mean", "zero", "copy")
# Name of a way: its kind, and the modes that may stand in its brackets; the first is the one that it has without.
_WAYS = {
    "bicubic": (GRID, ("bicubic",)),
    "bilinear": (GRID, ("bilinear",)),
    "table": (GRID, ("bicubic", "bilinear")),
    "rows": (ROWS, _FILLS),
    "classes": (ROWS, _FILLS),
    "heads": (ROWS, _FILLS),
    "channels": (CHANNELS, ("timm", "mean", "sum", "repeat")),
}
_EXAMPLE = "For example: bicubic(cls=1), bilinear(from=14x20, to=28x40), rows(mean), channels(sum)"


@dataclass(frozen=True, slots=True)
class Resize:
    """How a tensor gets another size; `text` as it was written.

    grid: tokens [.., N, D] as an image, or each axis of [.., H, W, ..] that differs; mode: `bicubic` or `bilinear`.
      cls, extra: rows before and after the image, which are kept.  old, new: height and width, where they are given.
    rows: the first dimension; mode: the rows that are added are the `mean` of the others, `zero`, or a `copy` of the
      first ones again (of the one numbered `row`).
    channels: the second dimension; mode: `mean` (the first ones are kept, others are their mean), `sum` (each is the
      sum, divided by their new number), `repeat` (each is one of the old, scaled by old / new), `timm` (as timm: `sum`
      where it is one, else `repeat`).
    """

    text: str
    kind: str
    mode: str
    antialias: bool = False
    cls: int = 0
    extra: int = 0
    old: tuple[int, int] | None = None
    new: tuple[int, int] | None = None
    row: int | None = None

    def __str__(self) -> str:
        return self.text


def parse_resize(text: str) -> Resize:
    """The way that a text like `bicubic(cls=1)`, `rows(mean)` or `channels(sum)` means. Raises `UsageError`."""
    found = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if found is None or found[1] not in _WAYS:
        raise UsageError(f"unknown way to resize: {text!r}", f"Available: {', '.join(_WAYS)}.", _EXAMPLE)
    kind, modes = _WAYS[found[1]]
    given: dict[str, Any] = {"mode": modes[0]}
    seen: set[str] = set()
    for word in filter(None, map(str.strip, (found[2] or "").split(","))):
        key, _, value = (part.strip() for part in word.partition("="))
        if (kind_of := "mode" if word in modes or key == "copy" else key) in seen:
            raise UsageError(f"{text!r} gives the {kind_of} twice", "", _EXAMPLE)
        seen.add(kind_of)
        if word in modes:
            given["mode"] = word
        elif kind == GRID and word == "antialias":
            given["antialias"] = True
        elif kind == GRID and key in ("cls", "extra") and _number(value) is not None:
            given[key] = _number(value)
        elif kind == GRID and key in ("from", "to") and (sides := re.fullmatch(r"(\d{1,9})[x×](\d{1,9})", value)):
            given["old" if key == "from" else "new"] = (int(sides[1]), int(sides[2]))
        elif kind == ROWS and key == "copy" and _number(value) is not None:
            given |= {"mode": "copy", "row": _number(value)}
        else:
            known = [*modes, "antialias", "cls=N", "extra=N", "from=HxW", "to=HxW"] if kind == GRID else [*modes]
            what = f"{found[1]} does not take {word!r}"
            raise UsageError(what, f"It takes {', '.join(known + ['copy=ROW'] * (kind == ROWS))}.", _EXAMPLE)
    return Resize(text.strip(), kind, **given)


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else None


def resized(entry: TensorEntry, shape: tuple[int, ...], how: Resize, name: str) -> TensorEntry:
    """The tensor in another shape, computed when it is read; of the same type, in bounded memory.

    name: what it is called in messages. Raises `UsageError` where `how` does not lead from its shape to this one,
    `Unsupported` for values that are no floating-point numbers, `LimitExceeded` for sides of over 65,536.
    """
    if not entry.dtype.is_float:
        raise Unsupported(
            f"{name} is {entry!r}, and cannot be resized",
            "Only floating-point numbers have means and values in between. Nothing was written.",
            f"Leave it out: {arg(exclude=NAME)}",
        )
    whole = compact(entry)
    if whole.flags.lazy != (False, False):
        whole = computed_tensor(whole.dtype, whole.shape, TensorValues(whole).read, [whole], whole.location)
    work = _Work(whole, tuple(shape), how, name)
    made = {GRID: work.grid, ROWS: work.rows, CHANNELS: work.channels}[how.kind]()
    return made.with_flags(Flags(entry.flags.requires_grad, entry.flags.parameter))


@dataclass(frozen=True, slots=True)
class _Work:
    """A tensor in row-major order that gets another shape."""

    entry: TensorEntry
    shape: tuple[int, ...]
    how: Resize
    name: str

    def refuse(self, why: str, fix: str = "") -> NoReturn:
        what = f"{self.name} {list(self.entry.shape)} cannot become {list(self.shape)} by {self.how.text}"
        raise UsageError(what, f"{why} Nothing was written.", fix)

    def grid(self) -> TensorEntry:
        """Tokens as an image; with other dimensions than those of tokens, each that differs."""
        entry, shape, how = self.entry, self.shape, self.how
        if len(shape) not in (2, 3) or len(entry.shape) != len(shape) or not self._agrees_but(len(shape) - 2):
            return self._every_axis()
        around = how.cls + how.extra
        old = self._sides(how.old, entry.shape[-2] - around, "from")
        new = self._sides(how.new, shape[-2] - around, "to")
        axis, lead, width = len(shape) - 2, shape[:-2], shape[-1]
        image = entry.narrow(axis, how.cls, prod(old))
        if old != new:
            values = self._mapped(TensorValues(image).read, (prod(lead), *old, width), (prod(lead), *new, width))
            image = self._computed((*lead, prod(new), width), values)
        if not around:
            return image
        first, last = entry.narrow(axis, 0, how.cls), entry.narrow(axis, entry.shape[-2] - how.extra, how.extra)
        begins = (0, how.cls, how.cls + prod(new))
        parts = zip((first, image, last), begins, strict=True)
        zeros = (0,) * len(lead)
        return assembled(shape, [Piece(part, (*zeros, begin, 0)) for part, begin in parts if part.numel], self.name)

    def _agrees_but(self, axis: int) -> bool:
        """True if only one dimension differs, or none."""
        old, new = self.entry.shape, self.shape
        return (*old[:axis], *old[axis + 1 :]) == (*new[:axis], *new[axis + 1 :])

    def _sides(self, given: tuple[int, int] | None, count: int, word: str) -> tuple[int, int]:
        """The height and width of an image of so many tokens."""
        if given is not None:
            if prod(given) != count or not count:
                found = f"{word}={given[0]}x{given[1]} is {counted(prod(given), 'token')}"
                self.refuse(f"{found}, and the tensor's image has {max(count, 0):,}.")
            return given
        side = isqrt(max(count, 0))
        if side * side != count or not count:
            more = next((n for n in range(1, 6) if count > n and isqrt(count - n) ** 2 == count - n), 0)
            hint = f", or {more} of them not part of the image: cls={self.how.cls + more}" if more else ""
            self.refuse(f"{counted(max(count, 0), 'token')} are no square.", f"Say the sizes: {word}=HxW{hint}")
        return side, side

    def _every_axis(self) -> TensorEntry:
        old, new, how = self.entry.shape, self.shape, self.how
        axes = [axis for axis, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
        channels = len(new) < 4 and len(new) - 1 in axes  # numbers that are not near each other
        if len(old) != len(new) or not 1 <= len(axes) <= 2 or channels or 0 in (*old, *new):
            self.refuse("A grid is [.., N, D], of which N differs, or [.., H, W, ..], of which H, W or both differ.")
        if how.cls or how.extra or how.old or how.new:
            self.refuse("cls, extra, from and to are for tokens [.., N, D], of which only N differs.")
        return self._computed(new, self._mapped(TensorValues(self.entry).read, old, new))

    def _mapped(self, values: Numbers, old: Sequence[int], new: Sequence[int]) -> Numbers:
        """The values with every dimension that differs interpolated, the last one last."""
        sizes = list(old)
        for axis, (size, wanted) in enumerate(zip(old, new, strict=True)):
            if size != wanted:
                self._limit(max(size, wanted))
                taps = partial(_taps, self.how.mode, self.how.antialias, size, wanted)
                values = _Axis(values, size, wanted, prod(sizes[axis + 1 :]), taps).read
                sizes[axis] = wanted
        return values

    def _limit(self, size: int) -> None:
        if size > MAX_SIDE:
            what = f"{self.name}: {self.how.text} from or to {size:,}"
            raise LimitExceeded(what, f"At most {MAX_SIDE:,} are computed. Nothing was written.")

    def _computed(self, shape: Sequence[int], values: Numbers) -> TensorEntry:
        return computed_tensor(self.entry.dtype, shape, values, [self.entry], self.entry.location)

    def rows(self) -> TensorEntry:
        """The first rows, and rows that are made of them where more are wanted."""
        import numpy

        entry, shape, how = self.entry, self.shape, self.how
        if not shape or len(entry.shape) != len(shape) or not self._agrees_but(0):
            self.refuse("Only the first dimension, the number of rows, may change.")
        count, more = entry.shape[0], shape[0] - entry.shape[0]
        if more <= 0:
            return entry.narrow(0, 0, shape[0])
        rest = (more, *shape[1:])
        if how.mode != "zero" and not 0 <= (how.row or 0) < count:
            self.refuse(f"There {'is' if count == 1 else 'are'} {counted(count, 'row')}.")
        if how.mode == "zero":
            added = self._computed(rest, lambda start, stop: numpy.zeros(stop - start, numpy.float32))
        elif how.mode == "mean":
            added = self._computed(rest, _MeanRow(entry, prod(rest)).read)
        elif how.row is not None:
            added = TensorEntry(entry.storage, entry.dtype, rest, (0, *entry.stride[1:]), how.row * entry.stride[0])
        else:
            times = TensorEntry(entry.storage, entry.dtype, (ceil(more / count), *entry.shape), (0, *entry.stride))
            again = times.with_values(Computed(times.nbytes, times.row_major().read, (entry.storage,)))
            added = again.reshape((times.shape[0] * count, *shape[1:])).narrow(0, 0, more)
        zeros = (0,) * (len(shape) - 1)
        return assembled(shape, [Piece(entry, (0, *zeros)), Piece(added, (count, *zeros))], self.name)

    def channels(self) -> TensorEntry:
        """Other input channels of a first convolution, or of anything that has them in its second dimension."""
        old, new = self.entry.shape, self.shape
        if len(new) < 2 or len(old) != len(new) or not self._agrees_but(1) or not old[1] or not new[1]:
            self.refuse("Only the second dimension, the number of input channels, may change.")
        self._limit(old[1] * new[1])
        taps = partial(_channels, self.how.mode, old[1], new[1])
        return self._computed(new, _Axis(TensorValues(self.entry).read, old[1], new[1], prod(new[2:]), taps).read)


# Weights -------------------------------------------------------------------------------------------------------------

Taps = tuple["Array", "Array"]
"""Of each place of an axis: the places that it is made of, and their weights in f64; [new, taps] each."""


@lru_cache(4)
def _taps(mode: str, antialias: bool, size: int, new: int) -> Taps:
    import numpy

    places = numpy.arange(new, dtype=numpy.float64)
    scale, reach = size / new, 2 if mode == "bicubic" else 1
    if antialias:
        support, shrink = reach * max(scale, 1.0), 1 / max(scale, 1.0)
        centers = scale * (places + 0.5)
        first = numpy.maximum((centers - support + 0.5).astype(numpy.int64), 0)
        last = numpy.minimum((centers + support + 0.5).astype(numpy.int64), size)
        indices = first[:, None] + numpy.arange((last - first).max())
        far = numpy.abs((indices - centers[:, None] + 0.5) * shrink)
        weights = _cubic(far, -0.5) if reach == 2 else numpy.maximum(1 - far, 0)
        weights = numpy.where(indices < last[:, None], weights, 0)
        return numpy.minimum(indices, last[:, None] - 1), weights / weights.sum(axis=1, keepdims=True)
    at = scale * (places + 0.5) - 0.5
    if mode == "bilinear":
        at = numpy.maximum(at, 0)
    indices = numpy.floor(at).astype(numpy.int64)[:, None] + numpy.arange(1 - reach, 1 + reach)
    far = numpy.abs(at[:, None] - indices)
    return numpy.clip(indices, 0, size - 1), _cubic(far, -0.75) if reach == 2 else 1 - far


def _cubic(far: Array, a: float) -> Array:
    """Keys' kernel at these distances."""
    import numpy

    near = ((a + 2) * far - (a + 3)) * far * far + 1
    away = ((far - 5) * far + 8) * far * a - 4 * a
    return numpy.where(far <= 1, near, numpy.where(far < 2, away, 0))


@lru_cache(4)
def _channels(mode: str, size: int, new: int) -> Taps:
    import numpy

    if mode == "timm":
        mode = "sum" if new == 1 else "repeat"
    numbers = numpy.arange(new)[:, None]
    if mode == "repeat":
        return numbers % size, numpy.full((new, 1), size / new)
    indices, weights = numpy.tile(numpy.arange(size), (new, 1)), numpy.full((new, size), 1 / new)
    if mode == "mean":
        kept = (numbers < size) & (new > size)
        indices = numpy.where(kept, numbers, indices)
        weights = numpy.where(kept, numpy.arange(size) == 0, 1 / size)
    return indices, weights


# Values --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Axis:
    """The values of a tensor [.., new, inner], each a weighted sum along the axis of [.., size, inner]; in f64."""

    values: Numbers
    size: int
    new: int
    inner: int
    taps: Callable[[], Taps]

    def read(self, start: int, stop: int) -> Array:
        import numpy

        with numpy.errstate(all="ignore"):
            return in_pieces(start, stop, self._piece)

    def _piece(self, start: int, stop: int) -> Array:
        before, after = self.size * self.inner, self.new * self.inner
        lead, first = divmod(start, after)
        count = min((stop - start) // after, ROOM // before) if not first else 0
        if not count:
            return self._part(lead * before, first, min(after, first + stop - start))
        block = self.values(lead * before, (lead + count) * before).reshape(count, self.size, self.inner)
        return _summed(block, *self.taps())

    def _part(self, base: int, first: int, last: int) -> Array:
        """The elements from `first`, at most to `last`, of the [new, inner] that are made of those from `base`."""
        indices, weights = self.taps()
        begin, end = first // self.inner, -(-last // self.inner)
        rows, shares = indices[begin:end], weights[begin:end]
        low, high = int(rows.min()), int(rows.max()) + 1
        skip = begin * self.inner
        if (high - low) * self.inner <= ROOM:
            block = self.values(base + low * self.inner, base + high * self.inner).reshape(1, high - low, self.inner)
            return _summed(block, rows - low, shares)[first - skip : last - skip]
        if end - begin > 1:
            return self._part(base, first, skip + self.inner)
        begins = [base + int(row) * self.inner - skip for row in rows[0]]
        terms = (self.values(at + first, at + last) * share for at, share in zip(begins, shares[0], strict=True))
        total: Array = next(terms)
        for term in terms:
            total += term
        return total


def _summed(block: Array, indices: Array, weights: Array) -> Array:
    """The weighted sums of a block [count, size, inner] along its second axis, flat; added in the order of the taps."""
    total = block[:, indices[:, 0]] * weights[:, 0, None]
    for tap in range(1, indices.shape[1]):
        total += block[:, indices[:, tap]] * weights[:, tap, None]
    flat: Array = total.reshape(-1)
    return flat


class _MeanRow:
    """The mean of all rows, again and again, in `count` elements. One of up to 64 K elements is kept until the end."""

    __slots__ = ("count", "entry", "kept", "width")

    def __init__(self, entry: TensorEntry, count: int) -> None:
        self.count, self.width = count, prod(entry.shape[1:])
        self.entry = entry.reshape((entry.shape[0], self.width))
        self.kept: Array | None = None

    def read(self, start: int, stop: int) -> Array:
        import numpy

        if self.width <= KEPT:
            row = self._columns(0, self.width) if self.kept is None else self.kept
            self.kept = row if stop < self.count else None  # a tree has thousands of these
            return row.take(numpy.arange(start, stop) % self.width)
        return in_pieces(start, stop, self._piece)

    def _piece(self, start: int, stop: int) -> Array:
        first = start % self.width
        return self._columns(first, min(self.width, first + stop - start))

    def _columns(self, first: int, last: int) -> Array:
        """The mean of each of these columns: the sum in f64, divided once."""
        import numpy

        width, rows = last - first, self.entry.shape[0]
        values = TensorValues(self.entry.narrow(1, first, width))
        total = numpy.zeros(width)
        height = max(1, ROOM // width)
        for row in range(0, rows, height):
            total += numpy.add.reduce(values.rows(row, min(row + height, rows)), axis=0, dtype=numpy.float64)
        mean: Array = total / rows
        return mean
