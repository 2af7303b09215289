"""The change that an adapter makes to a weight, in rows of its matrix, computed in bounded memory.

A product of f32 matrices is the chain of fused multiply-adds over the rank, in order, that torch's own is on CPUs: each
step exact in f64 and rounded to f32. Rounding twice gives another bit in one of 10⁸ steps or fewer. No BLAS: the bytes
are the same on every machine. (Torch's are not: for matrices of few columns its library rounds each product on some.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.adapter_keys import LOHA, LOKR, LORA
from ckptool.checkpoint.arrays import ROWS, Numbers, TensorValues, computed_rows, in_pieces
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.numeric import Array
from ckptool.errors import Conflict

_TILE = 1 << 15  # elements whose sums are kept in f64, in the processor's cache
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
    step = max(1, ROWS // max(1, left.shape[1]))  # rows that are held in f64
    sides = TensorValues(left), TensorValues(right)
    return stacked(step, lambda number: lambda first, last: _product(*sides, number * step + first, last - first))


def _misfit(first: TensorEntry, second: TensorEntry) -> Conflict:
    what = f"its factors of shape {list(first.shape)} and {list(second.shape)} do not fit each other"
    return Conflict(what, "The adapter is damaged. Nothing was written.")


def _product(left: TensorValues, right: TensorValues, first: int, count: int) -> Array:
    import numpy

    rank, width = right.entry.shape
    rows = left.rows(first, first + count)
    wide = numpy.float64 in (rows.dtype, right.read(0, min(1, rank * width)).dtype)
    total = numpy.zeros((count, width), numpy.float64 if wide else numpy.float32)
    step = max(1, ROWS // max(1, width))
    with numpy.errstate(all="ignore"):
        for start in range(0, rank, step):
            stop = min(start + step, rank)
            _add_product(total, rows[:, start:stop].astype("d"), right.rows(start, stop).astype("d"))
    return total


def _add_product(total: Array, left: Array, right: Array) -> None:
    """Adds the product of two f64 matrices to `total`, term by term, each sum rounded to the type of `total`."""
    import numpy

    columns = min(_TILE, total.shape[1])
    height = max(1, _TILE // max(1, columns))
    for top in range(0, total.shape[0], height):
        for begin in range(0, total.shape[1], columns):
            tile = total[top : top + height, begin : begin + columns]
            rounded, term = tile.copy(), numpy.empty(tile.shape)
            for k in range(left.shape[1]):
                numpy.multiply(left[top : top + height, k, None], right[k, begin : begin + columns], out=term)
                numpy.add(rounded, term, out=term)
                numpy.copyto(rounded, term, casting="same_kind")
            tile[...] = rounded


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
    values = TensorValues(core)

    def rows(start: int, stop: int) -> Array:
        import numpy

        block = values.rows(start, stop).reshape(stop - start, core.shape[1], kernel)
        narrow = TensorValues(down).rows(0, down.shape[0]).astype("d")
        out = numpy.zeros((stop - start, kernel, down.shape[1]), numpy.float32)
        for number, each in enumerate(block):
            _add_product(out[number], each.T.astype("d"), narrow)
        return out.transpose(0, 2, 1)

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
