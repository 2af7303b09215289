"""The change that an adapter makes to a weight, in rows of its matrix, computed in bounded memory.

A product of f32 matrices is the chain of fused multiply-adds over the rank, in order, that torch's own is on CPUs: each
step exact in f64 and rounded to f32. Rounding twice gives another bit in one of 10⁸ steps or fewer. No BLAS: the bytes
are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.adapter_keys import LOHA, LOKR, LORA
from ckptool.checkpoint.dtypes import by_name
from ckptool.errors import Conflict
from ckptool.transforms.blockwise import ROWS, Numbers, TensorValues, computed_rows, in_pieces

if TYPE_CHECKING:
    from ckptool.checkpoint.numeric import Array

_TILE = 1 << 15  # elements whose sums are kept in f64, in the processor's cache
Pair = tuple[TensorEntry, TensorEntry]


def flat(entry: TensorEntry) -> TensorEntry:
    """A tensor as a matrix: its first dimension, and all others as one."""
    return entry.reshape((entry.shape[0], prod(entry.shape[1:])))


class Product:
    """The rows of matrices one below the other, each [height, rank] @ [rank, width]: those of `pair(number)`."""

    __slots__ = ("_kept", "height", "pair")

    def __init__(self, height: int, pair: Callable[[int], Pair]) -> None:
        self.height, self.pair = height, pair
        self._kept: tuple[int, TensorValues, TensorValues] | None = None

    def rows(self, start: int, stop: int) -> Array:
        """f64 if either side is, else f32."""
        return in_pieces(start, stop, self._piece)

    def _piece(self, start: int, stop: int) -> Array:
        number, first = divmod(start, self.height)
        if self._kept is None or self._kept[0] != number:
            left, right = self.pair(number)
            self._kept = number, TensorValues(left), TensorValues(right)
        _, rows, columns = self._kept
        last = min(self.height, first + stop - start, first + max(1, ROWS // max(1, rows.entry.shape[1])))
        return _product(rows, columns, first, last)


def product(left: TensorEntry, right: TensorEntry) -> Product:
    """One product of two matrices. Raises `Conflict` for two that have no product."""
    if left.shape[1] != right.shape[0]:
        raise _misfit(left, right)
    return Product(left.shape[0], lambda _: (left, right))


def _misfit(first: TensorEntry, second: TensorEntry) -> Conflict:
    what = f"its factors of shape {list(first.shape)} and {list(second.shape)} do not fit each other"
    return Conflict(what, "The adapter is damaged. Nothing was written.")


def _product(left: TensorValues, right: TensorValues, first: int, last: int) -> Array:
    import numpy

    rank, width = right.entry.shape
    rows = left.rows(first, last)
    wide = numpy.float64 in (rows.dtype, right.read(0, min(1, rank * width)).dtype)
    total = numpy.zeros((last - first, width), numpy.float64 if wide else numpy.float32)
    step = max(1, ROWS // max(1, width))
    with numpy.errstate(all="ignore"):
        for start in range(0, rank, step):
            stop = min(start + step, rank)
            _add_product(
                total, rows[:, start:stop].astype(numpy.float64), right.rows(start, stop).astype(numpy.float64)
            )
    return total


def _add_product(total: Array, left: Array, right: Array) -> None:
    """Adds the product of two f64 matrices to `total`, term by term, each sum rounded to the type of `total`."""
    import numpy

    columns = min(_TILE, total.shape[1])
    height = max(1, _TILE // max(1, columns))
    for top in range(0, total.shape[0], height):
        for begin in range(0, total.shape[1], columns):
            tile = total[top : top + height, begin : begin + columns]
            rounded, wide, term = tile.copy(), tile.astype(numpy.float64), numpy.empty(tile.shape)
            for k in range(left.shape[1]):
                numpy.multiply(left[top : top + height, k, None], right[k, begin : begin + columns], out=term)
                numpy.add(wide, term, out=wide)
                numpy.copyto(rounded, wide, casting="same_kind")
                numpy.copyto(wide, rounded)
            tile[...] = rounded


# Methods -------------------------------------------------------------------------------------------------------------


def lora_factors(factors: dict[str, TensorEntry]) -> Pair:
    """B as [out, rank] and A as [rank, in × kernel], with what is between them multiplied in."""
    down, up = factors["A"], flat(factors["B"])
    if "mid" in factors:
        return up, _with_core(factors["mid"], flat(down))
    return up, flat(down)


def _with_core(core: TensorEntry, down: TensorEntry) -> TensorEntry:
    """`core` [p, q, kernel…] times `down` [q, in]: [p, in × kernel]."""
    if core.shape[1] != down.shape[0]:
        raise _misfit(core, down)
    kernel = prod(core.shape[2:])
    values = TensorValues(core)

    def rows(start: int, stop: int) -> Array:
        import numpy

        block = values.rows(start, stop).reshape(stop - start, core.shape[1], kernel)
        narrow = TensorValues(down).rows(0, down.shape[0]).astype(numpy.float64)
        out = numpy.zeros((stop - start, kernel, down.shape[1]), numpy.float32)
        for number, each in enumerate(block):
            _add_product(out[number], each.T.astype(numpy.float64), narrow)
        return out.transpose(0, 2, 1)

    return computed_rows(by_name("f32"), (core.shape[0], down.shape[1] * kernel), rows, (core, down))


def product_rows(method: str, factors: dict[str, TensorEntry]) -> tuple[tuple[int, int], Numbers]:
    """The matrix of a change before its scale: its shape, and its rows."""
    if method == LORA:
        left, right = lora_factors(factors)
        return (left.shape[0], right.shape[1]), product(left, right).rows
    if method == LOHA:
        sides = [_hadamard_side(factors, number) for number in "12"]
        shape = sides[0][0].shape[0], sides[0][1].shape[1]
        if shape != (sides[1][0].shape[0], sides[1][1].shape[1]):
            raise _misfit(factors["hada_w1_b"], factors["hada_w2_b"])
        first, second = (product(*pair).rows for pair in sides)
        return shape, lambda start, stop: first(start, stop) * second(start, stop)
    if method == LOKR:
        return _kronecker(*(_kronecker_side(factors, number) for number in "12"))
    (entry,) = factors.values()
    whole = flat(entry) if entry.shape else entry.reshape((1, 1))
    return (whole.shape[0], whole.shape[1]), TensorValues(whole).rows


def _hadamard_side(factors: dict[str, TensorEntry], number: str) -> Pair:
    up, down, core = (factors.get(f"hada_{name}") for name in (f"w{number}_a", f"w{number}_b", f"t{number}"))
    assert up is not None and down is not None
    return (flat(up), flat(down)) if core is None else (up.transpose(), _with_core(core, down))


def _kronecker_side(factors: dict[str, TensorEntry], number: str) -> TensorEntry:
    """One of the two matrices, [rows, columns, kernel…]."""
    if whole := factors.get(f"lokr_w{number}"):
        return whole
    up, down = factors[f"lokr_w{number}_a"], factors[f"lokr_w{number}_b"]
    core = factors.get(f"lokr_t{number}")
    left, right = (flat(up), flat(down)) if core is None else (up.transpose(), _with_core(core, down))
    made = computed_rows(by_name("f32"), (left.shape[0], right.shape[1]), product(left, right).rows, (left, right))
    kernel = down.shape[2:] if core is None else core.shape[2:]
    return made.reshape((left.shape[0], down.shape[1], *kernel))


def _kronecker(first: TensorEntry, second: TensorEntry) -> tuple[tuple[int, int], Numbers]:
    left, right = TensorValues(flat(first)), TensorValues(flat(second))
    height, width = second.shape[0], prod(second.shape[1:])

    def piece(start: int, stop: int) -> Array:
        number, begin = divmod(start, height)
        end = min(height, begin + stop - start)
        products = left.rows(number, number + 1)[0][None, :, None] * right.rows(begin, end)[:, None, :]
        block: Array = products.reshape(end - begin, -1)
        return block

    return (first.shape[0] * height, prod(first.shape[1:]) * width), partial(in_pieces, piece=piece)
