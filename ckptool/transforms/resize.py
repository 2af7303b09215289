"""Tensors of another size: position embeddings, rows of a vocabulary, classes of a head, input channels.

Places and weights are those of torch's `interpolate` with `align_corners=False` (aten/src/ATen/native/UpSample.h and
cpu/UpSampleKernel.cpp), channels those of timm's `adapt_input_conv`. Everything is computed in f64, in blocks as it is
read, and rounded once, so that no value is further from the exact one than that of an f32 kernel.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from math import isqrt, prod
from typing import Any, NamedTuple

from ckptool.checkpoint import Flags, TensorEntry
from ckptool.checkpoint.arrays import TensorValues, computed_rows, resolved, stretches
from ckptool.checkpoint.dtypes import Array, by_name
from ckptool.commands import NAME, arg
from ckptool.errors import LimitExceeded, Unsupported, UsageError, counted
from ckptool.transforms.casting import compact, converted
from ckptool.transforms.views import joined, once, refuse_wide, zeros

MAX_SIDE = 1 << 16  # of a grid, and of tables of weights

GRID, OF_ROWS, CHANNELS = "grid", "rows", "channels"
_FILLS = ("mean", "zero")
# Name of a way: its kind, and the modes that its brackets may hold; the first is the default.
_WAYS = {
    "bicubic": (GRID, ("bicubic",)),
    "bilinear": (GRID, ("bilinear",)),
    "table": (GRID, ("bicubic", "bilinear")),
    "rows": (OF_ROWS, _FILLS),
    "classes": (OF_ROWS, _FILLS),
    "heads": (OF_ROWS, _FILLS),
    "channels": (CHANNELS, ()),
}
_EXAMPLE = "For example: bicubic(cls=1), bilinear(from=14x20, to=28x40), rows(mean), channels"


class Resize(NamedTuple):
    """How a tensor gets another size; `text`: as the user wrote it.

    grid: tokens [.., N, D] as an image, or each axis of [.., H, W, ..] that differs; mode: `bicubic` or `bilinear`.
      cls, extra: rows before and after the image, which are kept.  old, new: height and width, where they are given.
    rows: the first dimension; mode: added rows are the `mean` of the others, or `zero`.
    channels: the second dimension, as in timm: a single channel is the sum of the old ones; of several, each is one of
      the old ones, scaled by old / new.
    """

    text: str
    kind: str
    mode: str
    antialias: bool = False
    cls: int = 0
    extra: int = 0
    old: tuple[int, int] | None = None
    new: tuple[int, int] | None = None


def parse_resize(text: str) -> Resize:
    """The `Resize` that a text such as `bicubic(cls=1)`, `rows(mean)` or `channels` names. Raises `UsageError`."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if match is None or match[1] not in _WAYS:
        raise UsageError(f"unknown way to resize: {text!r}", f"Available: {', '.join(_WAYS)}.", _EXAMPLE)
    kind, modes = _WAYS[match[1]]
    options: dict[str, Any] = {}
    for word in filter(None, (re.sub(r"\s", "", word) for word in (match[2] or "").split(","))):
        part = re.fullmatch(r"(?:(cls|extra)=|(from|to)=([0-9]{1,9})[x×])([0-9]{1,9})|antialias", word)
        value: Any
        if word in modes:
            name, value = "mode", word
        elif kind != GRID or part is None:
            known = [*modes, *(["antialias", "cls=N", "extra=N", "from=HxW", "to=HxW"] if kind == GRID else [])]
            takes = f"It takes {', '.join(known)}." if known else "It takes no arguments."
            raise UsageError(f"{match[1]} does not take {word!r}", takes, _EXAMPLE)
        elif part[2]:
            name, value = part[2], (int(part[3]), int(part[4]))
        elif part[1]:
            name, value = part[1], int(part[4])
        else:
            name, value = "antialias", True
        if name in options:
            raise UsageError(f"{text!r} gives the {name} twice", "", _EXAMPLE)
        options[name] = value
    fields = {{"from": "old", "to": "new"}.get(name, name): value for name, value in options.items()}
    return Resize(text.strip(), kind, **{"mode": next(iter(modes), ""), **fields})


class _Unfit(Exception):
    """A way that does not lead to the shape: args are why, and what would."""


def resized(entry: TensorEntry, shape: tuple[int, ...], how: Resize, name: str) -> TensorEntry:
    """The tensor in another shape and the same type, computed when it is read, in bounded memory.

    name: the tensor's, for messages. Raises `UsageError` where `how` does not lead from its shape to this one,
    `Unsupported` for values that are no floating-point numbers, `LimitExceeded` for sides of over 65,536, and for rows
    of over 1 M elements.
    """
    if not entry.dtype.is_float:
        why = "Only floating-point values can be interpolated or averaged. Nothing was written."
        raise Unsupported(f"{name} is {entry!r}, and cannot be resized", why, f"Leave it out: {arg(exclude=NAME)}")
    try:
        result = {GRID: _grid, OF_ROWS: _rows, CHANNELS: _channels}[how.kind](resolved(compact(entry)), shape, how)
    except _Unfit as unfit:
        why, *fix = unfit.args
        what = f"{name} {list(entry.shape)} cannot become {list(shape)} by {how.text}"
        raise UsageError(what, f"{why} Nothing was written.", *fix) from None
    except LimitExceeded as error:
        raise error.within(name) from None
    return result.with_flags(Flags(entry.flags.requires_grad, entry.flags.parameter))


def _grid(entry: TensorEntry, shape: tuple[int, ...], how: Resize) -> TensorEntry:
    """Resizes tokens as an image; in tensors of other dimensions, each dimension that differs."""
    old = entry.shape
    differing = [axis for axis, (a, b) in enumerate(zip(old, shape, strict=False)) if a != b]
    axis = len(shape) - 2
    if len(shape) in (2, 3) and len(old) == len(shape) and differing in ([], [axis]):
        before = _image_size(how, how.old, old[axis], "from")
        after = _image_size(how, how.new, shape[axis], "to")
        first, image, last = (
            entry.narrow(axis, begin, count)
            for begin, count in ((0, how.cls), (how.cls, prod(before)), (old[axis] - how.extra, how.extra))
        )
        if before != after:
            image = _interpolated(image.reshape((*old[:axis], *before, old[-1])), (*old[:axis], *after, old[-1]), how)
            image = image.reshape((*shape[:axis], prod(after), shape[-1]))
        return joined([first, image, last], axis) if how.cls or how.extra else image
    channels = len(shape) < 4 and len(shape) - 1 in differing  # which are not neighbours in space
    if len(old) != len(shape) or not 1 <= len(differing) <= 2 or channels or 0 in (*old, *shape):
        raise _Unfit("A grid is [.., N, D], of which N differs, or [.., H, W, ..], of which H, W or both differ.")
    if how.cls or how.extra or how.old or how.new:
        raise _Unfit("cls, extra, from and to are for tokens [.., N, D], of which only N differs.")
    return _interpolated(entry, shape, how)


def _interpolated(entry: TensorEntry, shape: tuple[int, ...], how: Resize) -> TensorEntry:
    """Interpolates every dimension that differs, from the first to the last."""
    result = entry
    for axis, (size, new) in enumerate(zip(entry.shape, shape, strict=True)):
        result = result if size == new else _resampled(result, axis, *_taps(how, size, new))
    return converted(result, entry.dtype)


def _image_size(how: Resize, sides: tuple[int, int] | None, tokens: int, word: str) -> tuple[int, int]:
    """The height and width of an image among so many tokens."""
    count = tokens - how.cls - how.extra
    if sides is not None:
        if prod(sides) != count or not count:
            text = f"{word}={sides[0]}x{sides[1]} is {counted(prod(sides), 'token')}"
            raise _Unfit(f"{text}, and the tensor's image has {max(count, 0):,}.")
        return sides
    side = isqrt(max(count, 0))
    if side * side != count or not count:
        outside = next((n for n in range(1, 6) if count > n and isqrt(count - n) ** 2 == count - n), 0)
        hint = f", or {outside} of them not part of the image: cls={how.cls + outside}" if outside else ""
        raise _Unfit(f"{counted(max(count, 0), 'token')} are not a square.", f"Give the sizes: {word}=HxW{hint}")
    return side, side


def _rows(entry: TensorEntry, shape: tuple[int, ...], how: Resize) -> TensorEntry:
    """The first rows; where more are wanted, zeros or the mean row after them."""
    import numpy

    if not shape or len(entry.shape) != len(shape) or entry.shape[1:] != shape[1:]:
        raise _Unfit("Only the first dimension, the number of rows, may change.")
    count, added = entry.shape[0], shape[0] - entry.shape[0]
    if added <= 0:
        return entry.narrow(0, 0, shape[0])
    if how.mode == "zero":
        return joined([entry, zeros(entry, (added, *shape[1:]))], 0)
    if not count:
        raise _Unfit("There are no rows.")
    refuse_wide(entry.shape, prod(entry.shape[1:]))
    values, row_shape = TensorValues(entry), (1, *entry.shape[1:])

    def mean() -> Array:  # the sum in f64, divided and rounded once
        total = numpy.zeros(row_shape)
        for stretch in stretches(0, count, prod(row_shape)):
            total += numpy.add.reduce(values.rows(*stretch), axis=0, dtype=numpy.float64, keepdims=True)
        return total / count

    row = computed_rows(entry.dtype, row_shape, lambda *_: once(mean, mean), [entry], entry.location)
    return joined([entry, replace(row, shape=(added, *row.shape[1:]), stride=(0, *row.stride[1:]))], 0)


def _channels(entry: TensorEntry, shape: tuple[int, ...], how: Resize) -> TensorEntry:
    """Changes the input channels of a first convolution, or of anything that has them in its second dimension."""
    old = entry.shape
    fits = len(shape) > 1 and len(old) == len(shape) and (old[0], *old[2:]) == (shape[0], *shape[2:])
    if not fits or not old[1] or not shape[1]:
        raise _Unfit("Only the second dimension, the number of input channels, may change.")
    return converted(_resampled(entry, 1, *_channel_taps(how, old[1], shape[1])), entry.dtype)


# Weights -------------------------------------------------------------------------------------------------------------

Taps = tuple["Array", "Array"]
"""For each new place along an axis, the old places that it is computed from, and their weights in f64: [new, taps]."""


@lru_cache(4)
def _taps(how: Resize, size: int, new: int) -> Taps:
    import numpy

    _refuse_large(how, max(size, new))
    mode = how.mode
    places = numpy.arange(new, dtype=numpy.float64)
    scale, reach = size / new, 2 if mode == "bicubic" else 1
    if how.antialias:
        support, shrink = reach * max(scale, 1.0), 1 / max(scale, 1.0)
        centers = scale * (places + 0.5)
        first = numpy.maximum((centers - support + 0.5).astype(numpy.int64), 0)
        last = numpy.minimum((centers + support + 0.5).astype(numpy.int64), size)
        indices = first[:, None] + numpy.arange((last - first).max())
        distances = numpy.abs((indices - centers[:, None] + 0.5) * shrink)
        weights = _cubic(distances, -0.5) if reach == 2 else numpy.maximum(1 - distances, 0)
        weights = numpy.where(indices < last[:, None], weights, 0)
        return numpy.minimum(indices, last[:, None] - 1), weights / weights.sum(axis=1, keepdims=True)
    positions = scale * (places + 0.5) - 0.5
    if mode == "bilinear":
        positions = numpy.maximum(positions, 0)
    indices = numpy.floor(positions).astype(numpy.int64)[:, None] + numpy.arange(1 - reach, 1 + reach)
    distances = numpy.abs(positions[:, None] - indices)
    return numpy.clip(indices, 0, size - 1), _cubic(distances, -0.75) if reach == 2 else 1 - distances


def _cubic(distances: Array, a: float) -> Array:
    """Keys' kernel at these distances."""
    import numpy

    near = ((a + 2) * distances - (a + 3)) * distances * distances + 1
    away = ((distances - 5) * distances + 8) * distances * a - 4 * a
    return numpy.where(distances <= 1, near, numpy.where(distances < 2, away, 0))


@lru_cache(4)
def _channel_taps(how: Resize, size: int, new: int) -> Taps:
    import numpy

    _refuse_large(how, size * new)
    if new == 1:
        return numpy.arange(size)[None], numpy.ones((1, size))
    return numpy.arange(new)[:, None] % size, numpy.full((new, 1), size / new)


def _refuse_large(how: Resize, size: int) -> None:
    if size > MAX_SIDE:
        what = f"{how.text} from or to {size:,}"
        raise LimitExceeded(what, f"ckptool computes at most {MAX_SIDE:,}. Nothing was written.")


# Values --------------------------------------------------------------------------------------------------------------


def _resampled(entry: TensorEntry, axis: int, indices: Array, weights: Array) -> TensorEntry:
    """The tensor in f64 with new places along an axis: weighted sums of old ones, added in the order of `Taps`."""
    import numpy

    (new, taps), size, inner = indices.shape, entry.shape[axis], prod(entry.shape[axis + 1 :])
    refuse_wide(entry.shape, taps * inner)
    lead = prod(entry.shape[:axis])
    values = TensorValues(entry.reshape((lead * size, inner)))
    width = inner * max(taps, size // new)  # elements read for a row

    def rows(start: int, stop: int) -> Array:
        blocks = []
        with numpy.errstate(all="ignore"):
            for begin, end in stretches(start, stop, width):
                number, index = numpy.divmod(numpy.arange(begin, end), new)
                sources, shares = number[:, None] * size + indices[index], weights[index]
                low, high = int(sources.min()), int(sources.max()) + 1
                window = values.rows(low, high)
                total: Array = window[sources[:, 0] - low] * shares[:, :1]
                for tap in range(1, taps):
                    total += window[sources[:, tap] - low] * shares[:, tap : tap + 1]
                blocks.append(total)
        return numpy.concatenate(blocks)

    result = computed_rows(by_name("f64"), (lead * new, inner), rows, [entry], entry.location)
    return result.reshape((*entry.shape[:axis], new, *entry.shape[axis + 1 :]))
