"""A weight with an adapter's change, computed row by row, rounded wherever PEFT rounds:

    linear, convolution           W + as_adapter(product · scale), one rounding; out_proj of attention: twice
    embedding, in_proj, experts   W + as_W(as_adapter(product · scale))
    DoRA                          (magnitude / norm) · (W + product · scale), the norm over the input's axes, in f64

Source: peft/tuners/lora/{layer,variants,dora}.py; for kohya's names lycoris/modules (the norm plus f32's epsilon).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import ROWS, Numbers, TensorValues, computed_rows, computed_tensor
from ckptool.checkpoint.numeric import Array, through
from ckptool.conventions.adapter_keys import BIAS, LORA
from ckptool.errors import LimitExceeded, counted
from ckptool.transforms.lora.adapters import Delta
from ckptool.transforms.lora.products import Pair, product, product_rows, sides, stacked

MAX_WIDTH = 1 << 22  # elements of one row of a weight that is changed


class Misfit(Exception):
    """A change is for a tensor of the shape `args[0]`, which the base's is not."""


def changed(
    delta: Delta,
    weight: TensorEntry,
    scale: float,
    *,
    experts: bool,
    once: bool,
    peft: bool,
    turned: Callable[[], bool],
) -> TensorEntry:
    """The weight with a change. Raises `Misfit`, `Conflict` for factors that do not fit, `LimitExceeded` for wide rows.

    experts: of a parameter [experts, out, in] or [experts, in, out].  once: PEFT rounds the change to the weight's type
    before it is added.  peft: magnitudes are of the output and norms without an epsilon, as PEFT has them; else as
    LyCORIS.  turned: tells whether a square weight is [in, out].
    """
    import numpy

    if experts:
        is_turned, rows = _experts(delta, weight, turned)
        matrix = weight.shape[0] * weight.shape[1], weight.shape[2]
    else:
        matrix = weight.shape[0] if weight.shape else 1, prod(weight.shape[1:])
        is_turned, rows = _rows(delta, weight, matrix, turned)
    if matrix[1] > MAX_WIDTH:
        what = f"a weight of {list(weight.shape)} has rows of {counted(matrix[1], 'element')}"
        raise LimitExceeded(what, f"At most {MAX_WIDTH:,} are computed at once.")
    values = TensorValues(weight.reshape(matrix))
    kept = next((entry.dtype for role, entry in delta.factors.items() if role == "B" or delta.method == BIAS), None)
    rounds = [each for each in (kept, weight.dtype if once else None) if each is not None]
    twice = delta.method == LORA and any(".base_layer.out_proj." in key for key in delta.keys.values())

    def sums(start: int, stop: int) -> Array:
        """Rows of the changed weight, rounded wherever PEFT rounds before the last time."""
        with numpy.errstate(all="ignore"):
            made, total = rows(start, stop), values.rows(start, stop)
            if experts and kept is not None:
                made = through(made, kept)  # there PEFT multiplies in the adapter's type
            made *= made.dtype.type(scale)
            for dtype in rounds:
                made = through(made, dtype)
            if twice:  # PEFT adds it in training and in merging
                total = through(total + through(made, weight.dtype), weight.dtype)
            return numpy.add(total, made, out=total if total.dtype == made.dtype else None)

    def wide(start: int, stop: int) -> Array:
        return values.rows(start, stop) + rows(start, stop).astype("d") * scale

    inputs = [weight, *delta.factors.values()]
    made_rows: Numbers = sums
    if (magnitude := delta.magnitude) is not None:
        axis = int(is_turned) if peft else int(magnitude.shape[:1] != weight.shape[:1])
        if len(weight.shape) < 2 or experts or magnitude.numel != weight.shape[axis]:
            raise Misfit(magnitude.shape)
        inputs.append(magnitude)
        made_rows = _decomposed(wide, matrix, magnitude, axis, 0.0 if peft else 2**-23)
    return like(weight, computed_rows(weight.dtype, matrix, made_rows, inputs).reshape(weight.shape))


def _rows(
    delta: Delta, weight: TensorEntry, matrix: tuple[int, int], turned: Callable[[], bool]
) -> tuple[bool, Numbers]:
    """Whether the weight is [in, out], and the rows of the change."""
    if delta.method != LORA:
        made, rows = product_rows(delta.method, delta.factors)
        if made != matrix:
            raise Misfit(next(iter(delta.factors.values())).shape if delta.method == BIAS else made)
        return False, rows
    up, down = sides(delta.factors)
    wanted, given = (up.shape[0], down.shape[1]), delta.factors.get("mid", delta.factors["A"]).shape[2:]
    if len(weight.shape) == 2 and wanted == weight.shape[::-1]:
        if delta.embedding or wanted != weight.shape or turned():
            return True, product(down.transpose(), up.transpose())
    elif (
        wanted != matrix or delta.embedding or (given != weight.shape[2:] and prod(given) * prod(weight.shape[2:]) != 1)
    ):
        raise Misfit((up.shape[0], *delta.factors["A"].shape[1:]))
    return False, product(up, down)


def _experts(delta: Delta, weight: TensorEntry, turned: Callable[[], bool]) -> tuple[bool, Numbers]:
    """As `_rows`. A is [experts · rank, in], B [out, rank · experts]: the first rank by rank, the second by expert."""
    up, down = sides(delta.factors)
    experts, height, width = weight.shape
    wanted, rank = (up.shape[0], down.shape[1]), delta.rank // max(1, experts)
    if wanted not in ((height, width), (width, height)) or rank * experts != delta.rank:
        raise Misfit((experts, *wanted))
    is_turned = turned() if height == width else wanted != (height, width)

    def pair(number: int) -> Pair:
        stride = up.stride[0], up.stride[1] * experts
        left = replace(up, shape=(up.shape[0], rank), stride=stride, offset=up.offset + number * up.stride[1])
        right = down.narrow(0, number * rank, rank)
        return (right.transpose(), left.transpose()) if is_turned else (left, right)

    return is_turned, stacked(height, lambda number: product(*pair(number)))


def _decomposed(total: Numbers, matrix: tuple[int, int], magnitude: TensorEntry, axis: int, epsilon: float) -> Numbers:
    """The rows of weights decomposed into magnitude and direction (DoRA), in f64: a norm has no order to keep."""
    import numpy

    (height, width), count = matrix, magnitude.numel
    columns: list[Array] = []

    def factors(squares: Array, start: int, stop: int) -> Array:
        made: Array = TensorValues(magnitude).read(start, stop) / (numpy.sqrt(squares) + epsilon)
        return made

    def of_columns() -> Array:
        """The factor of each column: of one pass over all rows."""
        step, squares = max(1, ROWS // width), numpy.zeros(count)
        for start in range(0, height, step):
            squares += numpy.square(total(start, min(start + step, height))).sum(0).reshape(count, -1).sum(1)
        return numpy.repeat(factors(squares, 0, count), width // count)[None, :]

    def rows(start: int, stop: int) -> Array:
        with numpy.errstate(all="ignore"):
            if axis == 1:
                columns.extend([] if columns else [of_columns()])
                return numpy.multiply(columns[0], total(start, stop))
            made = total(start, stop)
            return numpy.multiply(factors(numpy.square(made).sum(1), start, stop)[:, None], made)

    return rows


def with_rows(rows: TensorEntry, places: Sequence[int], weight: TensorEntry) -> TensorEntry:
    """The weight with other rows at these places, the last one where a place is there twice. Raises `Misfit`."""
    at = {place: number for number, place in enumerate(places)}
    wanted = (len(places), *weight.shape[1:])
    if rows.shape != wanted or not weight.shape or not all(0 <= each < weight.shape[0] for each in at):
        raise Misfit(rows.shape)
    old, new = TensorValues(weight), TensorValues(rows)

    def made(start: int, stop: int) -> Array:
        block = old.rows(start, stop)
        for place in at.keys() & range(start, stop):
            block[place - start] = new.rows(at[place], at[place] + 1)[0]
        return block

    return like(weight, computed_rows(weight.dtype, weight.shape, made, (weight, rows)))


def as_type(entry: TensorEntry, like_this: TensorEntry) -> TensorEntry:
    """A tensor in the type of another, with its flags."""
    if entry.dtype is like_this.dtype:
        return like(like_this, entry)
    values = TensorValues(entry)
    return like(like_this, computed_tensor(like_this.dtype, entry.shape, values.read, (entry,)))


def like(weight: TensorEntry, entry: TensorEntry) -> TensorEntry:
    """The values of `entry` as a tensor of the weight's place: its device, and whether it is a parameter."""
    flags = weight.flags._replace(conj=entry.flags.conj, neg=entry.flags.neg)
    location = weight.location
    storage = entry.storage if entry.location == location else replace(entry.storage, location=location)
    return replace(entry, flags=flags, storage=storage)
