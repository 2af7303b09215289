"""Building blocks of operations on tensors: views and concatenations, which read nothing, and what formulas by rows
share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

from ckptool.checkpoint import InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.arrays import Numbers, TensorValues, computed_rows, elementwise, resolved, stretches
from ckptool.checkpoint.dtypes import Array, numbers
from ckptool.errors import Conflict, LimitExceeded, Unsupported, UsageError, counted
from ckptool.formats.pieces import Piece, assembled

MAX_WIDTH = 1 << 20  # elements in a row of a weight that is computed row by row: five rows, in f64, are 40 MB
UNFIT = "The rule does not fit this tensor, or a variable is that of a different model. Nothing was written."


def woven(tensor: TensorEntry, axis: int, groups: int, parts: int, *, apart: bool) -> TensorEntry:
    """Interleaves the parts of each group of a dimension; with `apart`, the inverse."""
    shape = tensor.shape
    if not shape or parts < 1 or groups < 1 or shape[axis] % (parts * groups):
        size = f"{shape[axis]:,}" if shape else "a single value"
        raise UsageError(f"{size} is not a multiple of {groups} x {parts}", UNFIT)
    inner = shape[axis] // parts // groups
    sizes = (inner, parts) if apart else (parts, inner)
    divided = tensor.reshape((*shape[:axis], groups, *sizes, *shape[axis + 1 :]))
    order = list(range(len(divided.shape)))
    order[axis + 1 : axis + 3] = axis + 2, axis + 1
    return divided.permute(order).reshape(shape)


def joined(tensors: Sequence[TensorEntry], axis: int) -> TensorEntry:
    """Tensors of one type, and of one shape except along the axis, concatenated along it."""
    plain = [resolved(tensor) for tensor in tensors]
    first = plain[0]
    begins = list(accumulate((tensor.shape[axis] for tensor in plain), initial=0))
    shape = (*first.shape[:axis], begins[-1], *first.shape[axis + 1 :])
    chunks = [
        Piece(tensor, tuple(begin * (dimension == axis) for dimension in range(len(shape))))
        for tensor, begin in zip(plain, begins, strict=False)
        if tensor.numel
    ]
    result = assembled(shape, chunks) if chunks else first.with_values(InlineBytes(b"")).reshape(shape)
    return result.with_flags(first.flags)


def zeros(like: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """A tensor of zeros of the type of `like`: a single zero, expanded."""
    storage = Storage(InlineBytes(bytes(like.dtype.itemsize)), like.location)
    return TensorEntry(storage, like.dtype, shape, (0,) * len(shape))


# By rows -------------------------------------------------------------------------------------------------------------


def refuse_wide(shape: tuple[int, ...], width: int) -> None:
    """Raises `LimitExceeded` for a weight whose rows are too long to hold a few of them in memory."""
    if width > MAX_WIDTH:
        what = f"a weight of {list(shape)} has rows of {counted(width, 'element')}"
        raise LimitExceeded(what, f"ckptool computes at most {MAX_WIDTH:,} at once.")


_recent: list[tuple[object, Any]] = [(None, None)]  # the last result only: a checkpoint has thousands


def once(owner: object, make: Callable[[], Any]) -> Any:
    """The result of `make` for an owner, cached until another owner asks."""
    last, result = _recent[0]
    if last is not owner:
        result = make()
        _recent[0] = owner, result
    return result


def normed(rows: Numbers, height: int, scale: TensorEntry, epsilon: float = 0.0) -> Numbers:
    """The rows of `scale` · x / (‖x‖ + epsilon), of the `height` rows of x that `rows` gives in f64.

    scale: has as many dimensions as x; the norm is over those in which it has one element.
    """
    import numpy

    axes = tuple(axis for axis, size in enumerate(scale.shape) if size == 1)
    scales, of_all = TensorValues(scale), list[Array]()

    def squares(x: Array) -> Any:
        return numpy.square(x).sum(axes, keepdims=True)

    def factors(squares: Any, start: int, stop: int) -> Array:
        values: Array = scales.rows(start, stop) / (numpy.sqrt(squares) + epsilon)
        return values

    def normed_rows(start: int, stop: int) -> Array:
        with numpy.errstate(all="ignore"):
            x = rows(start, stop)
            if 0 not in axes:
                return x * factors(squares(x), start, stop)
            if not of_all:  # one pass over all rows
                total = sum(squares(rows(*stretch)) for stretch in stretches(0, height, x[0].size))
                of_all.append(factors(total, 0, 1))
            return x * of_all[0]

    return normed_rows


def weight_normed(weight: str, g: TensorEntry, v: TensorEntry) -> TensorEntry:
    """v · g / ‖v‖, the norm over the axes where g has one element. weight: its name, for errors."""
    shape = g.shape if len(g.shape) == len(v.shape) else (1,) * len(v.shape)
    if g.numel != prod(shape) or any(a not in (1, b) for a, b in zip(shape, v.shape, strict=True)):
        what = f"{weight}: g of shape {list(g.shape)} is not a norm of v of shape {list(v.shape)}"
        raise Conflict(what, "They do not belong together.")
    _refuse_types(g, v)
    refuse_wide(v.shape, prod(v.shape[1:]))
    matrix = v.reshape(v.shape or (1,))
    values = TensorValues(matrix)
    rows = normed(lambda *place: values.rows(*place).astype("d"), matrix.shape[0], g.reshape(shape or (1,)))
    entry = computed_rows(v.dtype, matrix.shape, rows, (g, v), v.location).reshape(v.shape)
    return entry.with_flags(v.flags._replace(conj=False, neg=False))


def pruned(weight: str, orig: TensorEntry, mask: TensorEntry) -> TensorEntry:
    """orig · mask, exact. weight: its name, for errors."""
    if orig.shape != mask.shape:
        what = f"{weight}: the mask has a different shape, {list(mask.shape)}"
        raise Conflict(what, f"A mask has the shape of its weight, here {list(orig.shape)}.")
    _refuse_types(mask, orig)

    def product(_: int, mask_block: Array, block: Array) -> Array:
        values: Array = numbers(block, orig.dtype) * numbers(mask_block, mask.dtype)
        return values

    return elementwise(product, mask, orig, dtype=orig.dtype).with_flags(orig.flags._replace(conj=False, neg=False))


def _refuse_types(factor: TensorEntry, entry: TensorEntry) -> None:
    """Raises `Unsupported` for a factor and a parametrized weight that have no product."""
    if not entry.dtype.is_float or not (factor.dtype.is_float or factor.dtype.kind == "bool"):
        raise Unsupported(f"tensors of type {entry.dtype} are not folded", "Parametrized weights are floating-point.")
