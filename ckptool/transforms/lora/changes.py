"""A weight with an adapter's change, computed row by row in bounded memory, and rounded wherever PEFT rounds by more
than one unit of W's:

    LoRA        W + as_adapter(product · scale), one rounding; out_proj of attention: twice
    experts     W + as_adapter(as_adapter(product) · scale)
    DoRA        (magnitude / norm) · (W + product · scale), the norm over the input's axes, in f64

Matrix products are BLAS's, in f32 (f64 where a factor is f64). It sums in another order than torch, so that a value
differs from torch's by at most rank · eps · Σ|B||A|; the bytes are the same on one machine, not everywhere.
Source: peft/tuners/lora/{layer,variants,dora}.py; for kohya's names lycoris/modules (the norm plus f32's epsilon).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import Numbers, TensorValues, computed_rows, elementwise
from ckptool.checkpoint.dtypes import Array, by_name, numbers, through
from ckptool.conventions.adapter_keys import BIAS, LOHA, LOKR, LORA
from ckptool.errors import Conflict
from ckptool.transforms.lora.adapters import Delta
from ckptool.transforms.views import joined, normed, once, refuse_wide

_HELD = 1 << 20  # elements of a factor held in memory
_TILE, _HEIGHT, _RANKS = 1 << 18, 16, 64  # multiplications per tile, its rows, and at most so many ranks
Pair = tuple[TensorEntry, TensorEntry]


class Misfit(Exception):
    """A change is for a tensor of shape `args[0]`, and the base's has another."""


def changed(
    delta: Delta, weight: TensorEntry, scale: float, *, experts: bool, peft: bool, turned: Callable[[], bool]
) -> TensorEntry:
    """The weight with a change. Raises `Misfit`, `Conflict` for factors that do not fit, `LimitExceeded` for wide rows.

    experts: the weight is a parameter [experts, out, in] or [experts, in, out].  peft: magnitudes are by output, and
    norms without an epsilon, as in PEFT; else as in LyCORIS.  turned: tells whether a square weight is [in, out].
    """
    import numpy

    shape = weight.shape
    if experts:
        matrix = shape[0] * shape[1], shape[2]
        is_turned, rows = _expert_rows(delta, weight, turned)
    else:
        matrix = shape[0] if shape else 1, prod(shape[1:])
        is_turned, rows = _change_rows(delta, weight, matrix, turned)
    refuse_wide(shape, matrix[1])
    values = TensorValues(weight.reshape(matrix))
    dtype = next((entry.dtype for role, entry in delta.factors.items() if role == "B" or delta.method == BIAS), None)
    is_twice = delta.method == LORA and any(".base_layer.out_proj." in key for key in delta.keys.values())

    def sums(start: int, stop: int) -> Array:
        with numpy.errstate(all="ignore"):
            change, total = rows(start, stop), values.rows(start, stop)
            if experts and dtype:
                change = through(change, dtype)  # for experts PEFT multiplies in the adapter's type
            change *= change.dtype.type(scale)
            change = through(change, dtype) if dtype else change
            if is_twice:  # PEFT adds it while training and again when merging
                total = through(total + through(change, weight.dtype), weight.dtype)
            return numpy.add(total, change, out=total if total.dtype == change.dtype else None)

    inputs = [weight, *delta.factors.values()]
    made_rows: Numbers = sums
    if (magnitude := delta.magnitude) is not None:
        axis = int(is_turned) if peft else int(magnitude.shape[:1] != shape[:1])
        if len(shape) < 2 or experts or magnitude.numel != shape[axis]:
            raise Misfit(magnitude.shape)
        inputs.append(magnitude)

        def wide(start: int, stop: int) -> Array:
            merged = values.rows(start, stop) + rows(start, stop).astype("d") * scale
            return merged.reshape(stop - start, *shape[1:])

        norms = magnitude.reshape(tuple(size if at == axis else 1 for at, size in enumerate(shape)))
        made_rows = normed(wide, shape[0], norms, 0.0 if peft else 2**-23)
    return like(weight, computed_rows(weight.dtype, matrix, made_rows, inputs).reshape(shape))


def _change_rows(
    delta: Delta, weight: TensorEntry, matrix: tuple[int, int], turned: Callable[[], bool]
) -> tuple[bool, Numbers]:
    """Whether the weight is [in, out], and the change by rows."""
    factors = delta.factors
    if delta.method != LORA:
        if delta.method == LOKR:
            change_shape, rows = _kronecker(*(_kronecker_side(factors, number) for number in "12"))
        elif delta.method == LOHA:
            one, other = (
                _factor_pair(factors, f"hada_w{number}_a", f"hada_w{number}_b", f"hada_t{number}") for number in "12"
            )
            change_shape = one[0].shape[0], one[1].shape[1]
            if change_shape != (other[0].shape[0], other[1].shape[1]):
                raise _factor_mismatch(factors["hada_w1_b"], factors["hada_w2_b"])
            first, second = _product(*one), _product(*other)

            def rows(start: int, stop: int) -> Array:
                return first(start, stop) * second(start, stop)
        else:
            flat = _as_matrix(next(iter(factors.values())))
            change_shape, rows = flat.shape, TensorValues(flat).rows
        if change_shape != matrix:
            raise Misfit(next(iter(factors.values())).shape if delta.method == BIAS else change_shape)
        return False, rows
    up, down = _factor_pair(factors)
    dims, kernel = (up.shape[0], down.shape[1]), factors.get("mid", factors["A"]).shape[2:]
    if len(weight.shape) == 2 and dims == weight.shape[::-1]:
        if delta.embedding or dims != weight.shape or turned():
            return True, _product(down.transpose(), up.transpose())
    elif (
        dims != matrix or delta.embedding or (kernel != weight.shape[2:] and prod(kernel) * prod(weight.shape[2:]) != 1)
    ):
        raise Misfit((up.shape[0], *factors["A"].shape[1:]))
    return False, _product(up, down)


def _expert_rows(delta: Delta, weight: TensorEntry, turned: Callable[[], bool]) -> tuple[bool, Numbers]:
    """As `_change_rows`. A is [experts · rank, in], expert by expert; B is [out, rank · experts], rank by rank."""
    up, down = _factor_pair(delta.factors)
    experts, height, width = weight.shape
    dims, rank = (up.shape[0], down.shape[1]), delta.rank // max(1, experts)
    if dims not in ((height, width), (width, height)) or rank * experts != delta.rank:
        raise Misfit((experts, *dims))
    is_turned = turned() if height == width else dims != (height, width)

    def pair(number: int) -> Pair:
        stride = up.stride[0], up.stride[1] * experts
        left = replace(up, shape=(up.shape[0], rank), stride=stride, offset=up.offset + number * up.stride[1])
        right = down.narrow(0, number * rank, rank)
        return (right.transpose(), left.transpose()) if is_turned else (left, right)

    return is_turned, _stacked(height, lambda number: _product(*pair(number)))


def with_rows(rows: TensorEntry, indices: Sequence[int], weight: TensorEntry) -> TensorEntry:
    """The weight with new rows at these places; of a repeated place the last counts. Raises `Misfit`."""
    row_of = {index: number for number, index in enumerate(indices)}
    expected = (len(indices), *weight.shape[1:])
    if rows.shape != expected or not weight.shape or not all(0 <= index < weight.shape[0] for index in row_of):
        raise Misfit(rows.shape)
    new, parts, begin = as_type(rows, weight), list[TensorEntry](), 0
    for index, number in sorted(row_of.items()):
        parts += [weight.narrow(0, begin, index - begin), new.narrow(0, number, 1)]
        begin = index + 1
    return like(weight, joined([*parts, weight.narrow(0, begin, weight.shape[0] - begin)], 0))


def as_type(entry: TensorEntry, target: TensorEntry) -> TensorEntry:
    """A tensor in the type of another, with its flags."""
    if entry.dtype is target.dtype:
        return like(target, entry)
    return like(target, elementwise(lambda _, raw: numbers(raw, entry.dtype), entry, dtype=target.dtype))


def like(weight: TensorEntry, entry: TensorEntry) -> TensorEntry:
    """The values of `entry` as a tensor in the weight's place: on its device, and a parameter if it is one."""
    flags = weight.flags._replace(conj=entry.flags.conj, neg=entry.flags.neg)
    location = weight.location
    storage = entry.storage if entry.location == location else replace(entry.storage, location=location)
    return replace(entry, flags=flags, storage=storage)


# Products -----------------------------------------------------------------------------------------------------------


def _as_matrix(entry: TensorEntry) -> TensorEntry:
    """A tensor as a matrix: its first dimension by all others."""
    return entry.reshape((entry.shape[0] if entry.shape else 1, prod(entry.shape[1:])))


def _stacked(height: int, part: Callable[[int], Numbers]) -> Numbers:
    """The rows of matrices of this height, one below the other; `part(number)` makes one, and only the last is kept."""
    import numpy

    current: dict[int, Numbers] = {}

    def rows(start: int, stop: int) -> Array:
        parts = []
        for number in range(start // height, -(-stop // height)):
            if number not in current:
                current.clear()
                current[number] = part(number)
            above = number * height
            parts.append(current[number](max(start - above, 0), min(stop - above, height)))
        return parts[0] if len(parts) == 1 else numpy.concatenate(parts)

    return rows


def _product(left: TensorEntry, right: TensorEntry) -> Numbers:
    """The rows of a product, in f64 if either side is, else f32. Raises `Conflict` for sides that do not match."""
    if left.shape[1] != right.shape[0]:
        raise _factor_mismatch(left, right)
    up, down, rank = TensorValues(left), TensorValues(right), right.shape[0]
    step = max(1, _HELD // max(1, right.shape[1]))  # rows of the right side held at once

    def rows(start: int, stop: int) -> Array:
        block = up.rows(start, stop)
        if rank <= step:
            return _multiplied(block, once(down, lambda: down.rows(0, rank)))
        total = _multiplied(block[:, :step], down.rows(0, step))
        for at in range(step, rank, step):
            total += _multiplied(block[:, at : at + step], down.rows(at, min(at + step, rank)))
        return total

    return rows


def _multiplied(left: Array, right: Array) -> Array:
    """The product of two matrices, in tiles so small that BLAS computes them in this thread: for a low rank, waking
    other threads takes more time than they save."""
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


def _factor_mismatch(first: TensorEntry, second: TensorEntry) -> Conflict:
    what = f"its factors of shape {list(first.shape)} and {list(second.shape)} do not fit each other"
    return Conflict(what, "The adapter is damaged. Nothing was written.")


# Methods -------------------------------------------------------------------------------------------------------------


def _factor_pair(factors: dict[str, TensorEntry], up: str = "B", down: str = "A", core: str = "mid") -> Pair:
    """[out, rank] and [rank, in × kernel], with the core between them multiplied in."""
    left, right = _as_matrix(factors[up]), _as_matrix(factors[down])
    if core not in factors:
        return left, right
    middle = factors[core]  # [p, q, kernel…], times [q, in]: [p, in × kernel]
    if middle.shape[1] != right.shape[0]:
        raise _factor_mismatch(middle, right)
    kernel, outer, inner = prod(middle.shape[2:]), TensorValues(middle), TensorValues(right)

    def rows(start: int, stop: int) -> Array:
        block = outer.rows(start, stop).reshape(stop - start, middle.shape[1], kernel)
        narrow = once(inner, lambda: inner.rows(0, right.shape[0]))
        product = _multiplied(block.transpose(0, 2, 1).reshape(-1, middle.shape[1]), narrow)
        return product.reshape(stop - start, kernel, -1).transpose(0, 2, 1)

    shape = middle.shape[0], right.shape[1] * kernel
    combined = computed_rows(by_name("f32"), shape, rows, (middle, right))
    return left if core == "mid" else left.transpose(), combined


def _kronecker_side(factors: dict[str, TensorEntry], number: str) -> TensorEntry:
    """One of the two matrices, [rows, columns, kernel…]."""
    if entry := factors.get(f"lokr_w{number}"):
        return entry
    down, core = factors[f"lokr_w{number}_b"], factors.get(f"lokr_t{number}")
    left, right = _factor_pair(factors, f"lokr_w{number}_a", f"lokr_w{number}_b", f"lokr_t{number}")
    product = computed_rows(by_name("f32"), (left.shape[0], right.shape[1]), _product(left, right), (left, right))
    return product.reshape((left.shape[0], down.shape[1], *(down if core is None else core).shape[2:]))


def _kronecker(first: TensorEntry, second: TensorEntry) -> tuple[tuple[int, ...], Numbers]:
    left, right = TensorValues(_as_matrix(first)), TensorValues(_as_matrix(second))
    height, width = second.shape[0], prod(second.shape[1:])

    def part(number: int) -> Numbers:
        row = left.rows(number, number + 1)[0][None, :, None]
        return lambda start, stop: (row * right.rows(start, stop)[:, None, :]).reshape(stop - start, -1)

    return (first.shape[0] * height, prod(first.shape[1:]) * width), _stacked(height, part)
