"""The change that an adapter makes to a weight, in rows of its matrix, computed in bounded memory.

Products of matrices are BLAS's, in f32 (f64 where a factor is f64). Its sums have another order than torch's, so that a
value differs from torch's by at most rank · eps · Σ|B||A|; the bytes are the same on one machine, not everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import Numbers, TensorValues, computed_rows, in_pieces
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.numeric import Array
from ckptool.conventions.adapter_keys import LOHA, LOKR, LORA
from ckptool.errors import Conflict
from ckptool.transforms.by_rows import once

_HELD = 1 << 20  # elements of a factor in memory
_TILE, _HEIGHT, _RANKS = 1 << 18, 16, 64  # multiplications at once, of so many rows and at most so many ranks
Pair = tuple[TensorEntry, TensorEntry]


def flat(entry: TensorEntry) -> TensorEntry:
    """A tensor as a matrix: its first dimension, and all others as one."""
    return entry.reshape((entry.shape[0] if entry.shape else 1, prod(entry.shape[1:])))


def stacked(height: int, part: Callable[[int], Numbers]) -> Numbers:
    """The rows of matrices of this height, one below the other: those of `part(number)`, asked for once at a time."""
    kept: dict[int, Numbers] = {}

    def piece(start: int, stop: int) -> Array:
        number, first = divmod(start, height)
        if number not in kept:
            kept.clear()
            kept[number] = part(number)
        return kept[number](first, min(height, first + stop - start))

    return partial(in_pieces, piece=piece)


def product(left: TensorEntry, right: TensorEntry) -> Numbers:
    """The rows of a product, in f64 if either side is, else f32. Raises `Conflict` for two that have no product."""
    if left.shape[1] != right.shape[0]:
        raise _misfit(left, right)
    up, down, rank = TensorValues(left), TensorValues(right), right.shape[0]
    step = max(1, _HELD // max(1, right.shape[1]))  # rows of the right side that are held at once

    def rows(start: int, stop: int) -> Array:
        block = up.rows(start, stop)
        if rank <= step:
            return multiplied(block, once(down, lambda: down.rows(0, rank)))
        total = multiplied(block[:, :step], down.rows(0, step))
        for at in range(step, rank, step):
            total += multiplied(block[:, at : at + step], down.rows(at, min(at + step, rank)))
        return total

    return rows


def multiplied(left: Array, right: Array) -> Array:
    """The product of two matrices, in tiles so small that BLAS computes them in this thread: to wake others for a low
    rank takes more time than they save."""
    import numpy

    total = numpy.empty((len(left), right.shape[1]), numpy.result_type(left, right))
    with numpy.errstate(all="ignore"):
        for at in range(0, max(1, len(right)), _RANKS):
            ranks = slice(at, at + _RANKS)
            width = _TILE // (_HEIGHT * max(1, min(_RANKS, len(right) - at)))
            for top in range(0, len(left), _HEIGHT):
                rows = slice(top, top + _HEIGHT)
                for begin in range(0, right.shape[1], width):
                    columns = slice(begin, begin + width)
                    tile = total[rows, columns]
                    if at:
                        tile += left[rows, ranks] @ right[ranks, columns]
                    else:
                        numpy.matmul(left[rows, ranks], right[ranks, columns], out=tile)
    return total


def _misfit(first: TensorEntry, second: TensorEntry) -> Conflict:
    what = f"its factors of shape {list(first.shape)} and {list(second.shape)} do not fit each other"
    return Conflict(what, "The adapter is damaged. Nothing was written.")


# Methods -------------------------------------------------------------------------------------------------------------


def sides(factors: dict[str, TensorEntry], up: str = "B", down: str = "A", core: str = "mid") -> Pair:
    """[out, rank] and [rank, in × kernel], with what is between them multiplied in."""
    left, right = flat(factors[up]), flat(factors[down])
    if core not in factors:
        return left, right
    return left if core == "mid" else left.transpose(), _with_core(factors[core], right)


def _with_core(core: TensorEntry, down: TensorEntry) -> TensorEntry:
    """`core` [p, q, kernel…] times `down` [q, in]: [p, in × kernel]."""
    if core.shape[1] != down.shape[0]:
        raise _misfit(core, down)
    kernel = prod(core.shape[2:])
    outer, inner = TensorValues(core), TensorValues(down)

    def rows(start: int, stop: int) -> Array:
        block = outer.rows(start, stop).reshape(stop - start, core.shape[1], kernel)
        narrow = once(inner, lambda: inner.rows(0, down.shape[0]))
        made = multiplied(block.transpose(0, 2, 1).reshape(-1, core.shape[1]), narrow)
        return made.reshape(stop - start, kernel, -1).transpose(0, 2, 1)

    return computed_rows(by_name("f32"), (core.shape[0], down.shape[1] * kernel), rows, (core, down))


def product_rows(method: str, factors: dict[str, TensorEntry]) -> tuple[tuple[int, ...], Numbers]:
    """The matrix of a change before its scale: its shape, and its rows."""
    if method == LOKR:
        return _kronecker(*(_kronecker_side(factors, number) for number in "12"))
    if method not in (LORA, LOHA):
        whole = flat(next(iter(factors.values())))
        return whole.shape, TensorValues(whole).rows
    pairs = (
        [sides(factors)]
        if method == LORA
        else [sides(factors, f"hada_w{number}_a", f"hada_w{number}_b", f"hada_t{number}") for number in "12"]
    )
    shape, *other = [(left.shape[0], right.shape[1]) for left, right in pairs]
    if other not in ([], [shape]):
        raise _misfit(factors["hada_w1_b"], factors["hada_w2_b"])
    first, *second = [product(*pair) for pair in pairs]
    return shape, (lambda start, stop: first(start, stop) * second[0](start, stop)) if second else first


def _kronecker_side(factors: dict[str, TensorEntry], number: str) -> TensorEntry:
    """One of the two matrices, [rows, columns, kernel…]."""
    if whole := factors.get(f"lokr_w{number}"):
        return whole
    down, core = factors[f"lokr_w{number}_b"], factors.get(f"lokr_t{number}")
    left, right = sides(factors, f"lokr_w{number}_a", f"lokr_w{number}_b", f"lokr_t{number}")
    made = computed_rows(by_name("f32"), (left.shape[0], right.shape[1]), product(left, right), (left, right))
    return made.reshape((left.shape[0], down.shape[1], *(down if core is None else core).shape[2:]))


def _kronecker(first: TensorEntry, second: TensorEntry) -> tuple[tuple[int, ...], Numbers]:
    left, right = TensorValues(flat(first)), TensorValues(flat(second))
    height, width = second.shape[0], prod(second.shape[1:])

    def part(number: int) -> Numbers:
        one = left.rows(number, number + 1)[0][None, :, None]
        return lambda start, stop: (one * right.rows(start, stop)[:, None, :]).reshape(stop - start, -1)

    return (first.shape[0] * height, prod(first.shape[1:]) * width), stacked(height, part)
