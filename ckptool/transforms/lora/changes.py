"""A weight with an adapter's change, computed row by row, rounded wherever PEFT rounds by more than one unit of W's:

    LoRA        W + as_adapter(product · scale), one rounding; out_proj of attention: twice
    experts     W + as_adapter(as_adapter(product) · scale)
    DoRA        (magnitude / norm) · (W + product · scale), the norm over the input's axes, in f64

Source: peft/tuners/lora/{layer,variants,dora}.py; for kohya's names lycoris/modules (the norm plus f32's epsilon).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import Numbers, TensorValues, computed_rows, computed_tensor
from ckptool.checkpoint.numeric import Array, through
from ckptool.conventions.adapter_keys import BIAS, LORA
from ckptool.transforms.by_rows import normed, refuse_wide
from ckptool.transforms.lora.adapters import Delta
from ckptool.transforms.lora.products import Pair, product, product_rows, sides, stacked
from ckptool.transforms.views import joined


class Misfit(Exception):
    """A change is for a tensor of the shape `args[0]`, which the base's is not."""


def changed(
    delta: Delta, weight: TensorEntry, scale: float, *, experts: bool, peft: bool, turned: Callable[[], bool]
) -> TensorEntry:
    """The weight with a change. Raises `Misfit`, `Conflict` for factors that do not fit, `LimitExceeded` for wide rows.

    experts: of a parameter [experts, out, in] or [experts, in, out].  peft: magnitudes are of the output and norms
    without an epsilon, as PEFT has them; else as LyCORIS.  turned: tells whether a square weight is [in, out].
    """
    import numpy

    shape = weight.shape
    if experts:
        matrix = shape[0] * shape[1], shape[2]
        is_turned, rows = _experts(delta, weight, turned)
    else:
        matrix = shape[0] if shape else 1, prod(shape[1:])
        is_turned, rows = _rows(delta, weight, matrix, turned)
    refuse_wide(shape, matrix[1])
    values = TensorValues(weight.reshape(matrix))
    kept = next((entry.dtype for role, entry in delta.factors.items() if role == "B" or delta.method == BIAS), None)
    twice = delta.method == LORA and any(".base_layer.out_proj." in key for key in delta.keys.values())

    def sums(start: int, stop: int) -> Array:
        with numpy.errstate(all="ignore"):
            made, total = rows(start, stop), values.rows(start, stop)
            if experts and kept:
                made = through(made, kept)  # there PEFT multiplies in the adapter's type
            made *= made.dtype.type(scale)
            made = through(made, kept) if kept else made
            if twice:  # PEFT adds it in training and in merging
                total = through(total + through(made, weight.dtype), weight.dtype)
            return numpy.add(total, made, out=total if total.dtype == made.dtype else None)

    inputs = [weight, *delta.factors.values()]
    made_rows: Numbers = sums
    if (magnitude := delta.magnitude) is not None:
        axis = int(is_turned) if peft else int(magnitude.shape[:1] != shape[:1])
        if len(shape) < 2 or experts or magnitude.numel != shape[axis]:
            raise Misfit(magnitude.shape)
        inputs.append(magnitude)

        def wide(start: int, stop: int) -> Array:
            made = values.rows(start, stop) + rows(start, stop).astype("d") * scale
            return made.reshape(stop - start, *shape[1:])

        norms = magnitude.reshape(tuple(size if at == axis else 1 for at, size in enumerate(shape)))
        made_rows = normed(wide, shape[0], norms, 0.0 if peft else 2**-23)
    return like(weight, computed_rows(weight.dtype, matrix, made_rows, inputs).reshape(shape))


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


def with_rows(rows: TensorEntry, places: Sequence[int], weight: TensorEntry) -> TensorEntry:
    """The weight with other rows at these places, the last one where a place is there twice. Raises `Misfit`."""
    at = {place: number for number, place in enumerate(places)}
    wanted = (len(places), *weight.shape[1:])
    if rows.shape != wanted or not weight.shape or not all(0 <= each < weight.shape[0] for each in at):
        raise Misfit(rows.shape)
    new, parts, begin = as_type(rows, weight), list[TensorEntry](), 0
    for place, number in sorted(at.items()):
        parts += [weight.narrow(0, begin, place - begin), new.narrow(0, number, 1)]
        begin = place + 1
    return like(weight, joined([*parts, weight.narrow(0, begin, weight.shape[0] - begin)], 0))


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
