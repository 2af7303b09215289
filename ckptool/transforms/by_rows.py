"""What formulas by rows share: how wide a row may be, results that are kept, and the norm of weight norm and DoRA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import Numbers, TensorValues, stretches
from ckptool.checkpoint.numeric import Array
from ckptool.errors import LimitExceeded, counted

MAX_WIDTH = 1 << 20  # elements of one row of a weight that is computed row by row: five of them, in f64, are 40 MB


def refuse_wide(shape: tuple[int, ...], width: int) -> None:
    """Raises `LimitExceeded` for a weight whose rows are too long to hold a few of them."""
    if width > MAX_WIDTH:
        what = f"a weight of {list(shape)} has rows of {counted(width, 'element')}"
        raise LimitExceeded(what, f"At most {MAX_WIDTH:,} are computed at once.")


_recent: list[tuple[object, Any]] = [(None, None)]  # the last result alone: a checkpoint has thousands


def once(owner: object, make: Callable[[], Any]) -> Any:
    """The result of `make` for an owner, kept until another asks."""
    last, made = _recent[0]
    if last is not owner:
        made = make()
        _recent[0] = owner, made
    return made


def normed(rows: Numbers, height: int, scale: TensorEntry, epsilon: float = 0.0) -> Numbers:
    """The rows of `scale` · x / (‖x‖ + epsilon), of the `height` rows of x that `rows` gives in f64.

    scale: of as many dimensions as x; the norm is over those where it has one element.
    """
    import numpy

    axes = tuple(axis for axis, size in enumerate(scale.shape) if size == 1)
    scales, of_all = TensorValues(scale), list[Array]()

    def squares(x: Array) -> Any:
        return numpy.square(x).sum(axes, keepdims=True)

    def factors(squares: Any, start: int, stop: int) -> Array:
        made: Array = scales.rows(start, stop) / (numpy.sqrt(squares) + epsilon)
        return made

    def made(start: int, stop: int) -> Array:
        with numpy.errstate(all="ignore"):
            x = rows(start, stop)
            if 0 not in axes:
                return x * factors(squares(x), start, stop)
            if not of_all:  # one pass over all rows
                total = sum(squares(rows(*at)) for at in stretches(0, height, x[0].size))
                of_all.append(factors(total, 0, 1))
            return x * of_all[0]

    return made
