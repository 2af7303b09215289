"""A weight with an adapter's change, computed row by row in PEFT's order of operations, and so with its bits:

    linear, convolution           W + as_adapter(product · scale), one rounding; out_proj of attention: twice
    embedding, in_proj, experts   W + as_W(as_adapter(product · scale))
    DoRA                          (magnitude / norm) · (W + product · scale), the norm over the input's axes, in f64

Source: peft/tuners/lora/{layer,variants,dora}.py; for kohya's names lycoris/modules (the norm plus f32's epsilon).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.adapter_keys import LORA
from ckptool.checkpoint.dtypes import DType, by_name
from ckptool.checkpoint.numeric import numbers
from ckptool.errors import LimitExceeded, counted
from ckptool.transforms.blockwise import ROWS, Numbers, TensorValues, computed_rows, computed_tensor, in_type
from ckptool.transforms.lora.adapters import Delta
from ckptool.transforms.lora.products import Pair, Product, lora_factors, product, product_rows

if TYPE_CHECKING:
    from ckptool.checkpoint.numeric import Array

MAX_WIDTH = 1 << 22  # elements of one row of a weight that is changed


class Change:
    """The change of one weight. misfit: the shape that it is for, where that is not the weight's; else None.

    parameter: one of `target_parameters`, which may be experts, [experts, out, in] or [experts, in, out].
    peft: magnitudes are of the output and norms without an epsilon, as PEFT has them; else as LyCORIS.
    is_conv1d: tells whether a square weight is [in, out].
    """

    def __init__(
        self,
        delta: Delta,
        weight: TensorEntry,
        multiplier: float,
        parameter: bool,
        peft: bool,
        is_conv1d: Callable[[], bool],
    ) -> None:
        self.delta, self.weight, self.scale, self.parameter = delta, weight, delta.scale * multiplier, parameter
        self.misfit: tuple[int, ...] | None = None
        self.transposed = False
        self.matrix = weight.shape[0] if weight.shape else 1, prod(weight.shape[1:])
        if delta.method == LORA:
            self.rows = self._lora(is_conv1d)
        else:
            shape, self.rows = product_rows(delta.method, delta.factors)
            self.misfit = shape if shape != self.matrix else None
        if self.matrix[1] > MAX_WIDTH:
            what = f"a weight of {list(weight.shape)} has rows of {counted(self.matrix[1], 'element')}"
            raise LimitExceeded(what, f"At most {MAX_WIDTH:,} are computed at once.")
        self.kept = delta.factors["B"].dtype if delta.method == LORA else by_name("f32")
        self.weights = TensorValues(weight.reshape(self.matrix))
        self.epsilon = 0.0 if peft else 2**-23
        self.axis = 0
        if (magnitude := delta.magnitude) is not None:
            self.axis = int(self.transposed) if peft else int(magnitude.shape[:1] != weight.shape[:1])
            if len(weight.shape) < 2 or parameter or magnitude.numel != weight.shape[self.axis]:
                self.misfit = magnitude.shape

    def _lora(self, is_conv1d: Callable[[], bool]) -> Numbers:
        up, down = lora_factors(self.delta.factors)
        shape = self.weight.shape
        if self.parameter and len(shape) == 3:
            return self._experts(up, down, is_conv1d)
        wanted = up.shape[0], down.shape[1]
        if len(shape) == 2 and wanted == shape[::-1]:
            self.transposed = self.delta.embedding or wanted != shape or is_conv1d()
        elif wanted != self.matrix or self.delta.embedding or not self._has_kernel(shape[2:]):
            self.misfit = (up.shape[0], *self.delta.factors["A"].shape[1:])
        if self.transposed:
            up, down = down.transpose(), up.transpose()
        return product(up, down).rows

    def _has_kernel(self, kernel: tuple[int, ...]) -> bool:
        core = self.delta.factors.get("mid", self.delta.factors["A"])
        given = core.shape[2:]
        return given == kernel or prod(given) == prod(kernel) == 1

    def _experts(self, up: TensorEntry, down: TensorEntry, is_conv1d: Callable[[], bool]) -> Numbers:
        """A [experts · rank, in], B [out, rank · experts]: the first rank by rank, the second expert by expert."""
        experts, height, width = self.weight.shape
        wanted = up.shape[0], down.shape[1]
        rank = self.delta.rank // experts
        if wanted not in ((height, width), (width, height)) or rank * experts != self.delta.rank:
            self.misfit = (*self.weight.shape[:1], *wanted)
        self.transposed = is_conv1d() if height == width else wanted != (height, width)
        self.matrix = experts * height, width

        def pair(number: int) -> Pair:
            left = replace(
                up, shape=(up.shape[0], rank), stride=(up.stride[0], up.stride[1] * experts),
                offset=up.offset + number * up.stride[1],
            )  # fmt: skip
            right = down.narrow(0, number * rank, rank)
            return (right.transpose(), left.transpose()) if self.transposed else (left, right)

        return Product(height, pair).rows

    def applied(self, as_weight: bool) -> TensorEntry:
        """The weight with the change. as_weight: PEFT rounds the change to the weight's type before it is added."""
        delta, weight = self.delta, self.weight
        as_weight = as_weight or self.parameter or delta.embedding
        self.rounds = [self.kept, *([weight.dtype] if as_weight else [])]
        inputs = [weight, *delta.factors.values(), *([] if delta.magnitude is None else [delta.magnitude])]
        rows = self._sums if delta.magnitude is None else _Decomposed(self, delta.magnitude).rows
        return like(weight, computed_rows(weight.dtype, self.matrix, rows, inputs).reshape(weight.shape))

    def _sums(self, start: int, stop: int) -> Array:
        """Rows of the weight with the change, rounded where PEFT rounds, but for the last time."""
        import numpy

        with numpy.errstate(all="ignore"):
            made, total = self.rows(start, stop), self.weights.rows(start, stop)
            if self.parameter and len(self.weight.shape) == 3:
                made = through(made, self.kept)  # there PEFT multiplies in the adapter's type
            made = made * made.dtype.type(self.scale)
            for dtype in self.rounds:
                made = through(made, dtype)
            if self.delta.twice:
                total = through(total + through(made, self.weight.dtype), self.weight.dtype)
            added: Array = total + made
            return added


class _Decomposed:
    """The rows of weights decomposed into magnitude and direction (DoRA), in f64: a norm has no order to keep."""

    def __init__(self, change: Change, magnitude: TensorEntry) -> None:
        self.change, self.magnitude = change, magnitude
        self._factor: Array | None = None  # of all columns

    def rows(self, start: int, stop: int) -> Array:
        import numpy

        with numpy.errstate(all="ignore"):
            total = self._total(start, stop)
            if self.change.axis == 1:
                return self._of_columns() * total
            return self._factors(numpy.square(total).sum(1), start, stop)[:, None] * total

    def _total(self, start: int, stop: int) -> Array:
        import numpy

        change = self.change
        return change.weights.rows(start, stop) + change.rows(start, stop).astype(numpy.float64) * change.scale

    def _of_columns(self) -> Array:
        """The factor of each column: of one pass over all rows."""
        import numpy

        if self._factor is None:
            (height, width), count = self.change.matrix, self.magnitude.numel
            step, squares = max(1, ROWS // width), numpy.zeros(count)
            for start in range(0, height, step):
                total = numpy.square(self._total(start, min(start + step, height))).sum(0)
                squares += total.reshape(count, -1).sum(1)
            self._factor = numpy.repeat(self._factors(squares, 0, count), width // count)[None, :]
        return self._factor

    def _factors(self, squares: Array, start: int, stop: int) -> Array:
        import numpy

        values: Array = TensorValues(self.magnitude).read(start, stop)
        return values / (numpy.sqrt(squares) + self.change.epsilon)


def through(values: Array, dtype: DType) -> Array:
    """Numbers rounded to a type, as f32 again; those of at least 32 bits stay as they are."""
    import numpy

    if dtype.itemsize >= values.dtype.itemsize or dtype.name == "f64":
        return values
    return numbers(numpy.frombuffer(in_type(values, dtype), numpy.uint8), dtype).reshape(values.shape)


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
