"""The ways to merge models: formulas for a piece of one tensor, given the same piece of each model.

`mean` and `slerp` add up weighted tensors; `task-arithmetic`, `ties` and `dare` weighted differences from a base, of
which TIES (arXiv:2306.01708) keeps the largest and DARE (arXiv:2311.03099) random ones:

    ties  as mergekit has it: the sign that most of the weighted differences have, divided by the agreeing weights
    dare  as in the paper and in peft: what is kept is divided by the density

Differences are computed in f32 (in f64 for f64), where mergekit has the type of the tensors, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import each, fold
from ckptool.checkpoint.dtypes import DType, by_name
from ckptool.checkpoint.numeric import Array, numbers, rounded, scratch
from ckptool.commands import Command, arg
from ckptool.errors import Unsupported, UsageError, counted, listed

COMPONENTS = {"c32": "f16", "c64": "f32", "c128": "f64"}
PARALLEL = 0.9995  # of two directions; beyond, slerp is a straight line
_DIGIT = 16  # bits of a pattern that are counted in one pass
_SMALL = 1 << 12  # patterns that are sorted instead

Read = Callable[[int, str], "Array"]
"""`(number, name)`: the piece of this source as numbers, in the scratch array called `name`."""
Piece = Callable[[Read, int], "Array"]
"""`(read, start)`: the piece of the result from element `start`."""
Kept = Callable[["Array", int, int], "Array"]
"""`(delta, number, start)`: the differences of a file from element `start`, zeros for those that are left out."""


@dataclass(frozen=True, slots=True)
class Merge:
    """How models are merged. densities: of each file's differences, the share that is kept.  scale: of their sum."""

    method: str = "mean"
    densities: tuple[float, ...] = ()
    scale: float = 1.0
    seed: int = 0

    @property
    def has_base(self) -> bool:
        """True where the first source is not merged itself, but what the others are differences from."""
        return "base" in METHODS[self.method].takes

    @property
    def settings(self) -> tuple[str, ...]:
        """The options that count for its method, as text."""
        density = ", ".join(f"{density:g}" for density in self.densities)
        every = {"scale": f"lambda {self.scale:g}", "density": f"density {density}", "seed": f"seed {self.seed}"}
        return tuple(text for name, text in every.items() if name in METHODS[self.method].takes)

    def density(self, number: int) -> float:
        return self.densities[number % len(self.densities)]


def merged(entries: Sequence[TensorEntry], how: Merge, weights: Sequence[float], name: str) -> TensorEntry:
    """One tensor of all sources, merged when it is read. name: what it is called in all of them.

    Raises `Unsupported` for packed types.
    """
    dtype = entries[0].dtype
    if dtype.numpy is None and dtype.name != "c32":
        raise Unsupported(f"tensors of dtype {dtype} cannot be averaged", "Their values are packed.")
    return each(_Merged(entries, how, weights, name).piece, *entries, dtype=dtype)


class _Merged:
    """One tensor of all sources: what a formula may read before its first piece, and then the pieces.

    count: its numbers.  Not a closure: a checkpoint may have one of these for each of its tensors.
    """

    __slots__ = ("count", "dtype", "entries", "formula", "how", "kind", "name", "weights")

    def __init__(self, entries: Sequence[TensorEntry], how: Merge, weights: Sequence[float], name: str) -> None:
        self.entries, self.how, self.weights, self.name = entries, how, weights, name
        self.dtype: DType = by_name(COMPONENTS.get(entries[0].dtype.name, entries[0].dtype.name))
        self.count = entries[0].nbytes // self.dtype.itemsize
        self.kind = "f8" if self.dtype.itemsize >= METHODS[how.method].wide else "f4"
        self.formula: Piece | None = None

    def piece(self, place: int, *blocks: Array) -> Array:
        if self.formula is None:
            self.formula = METHODS[self.how.method].formula(self)
        start = place * (self.entries[0].dtype.itemsize // self.dtype.itemsize)
        total = self.formula(lambda number, name: self._numbers(blocks[number], name), start)
        return rounded(total, self.dtype) if self.dtype.name != "f64" else total

    def _numbers(self, raw: Array, name: str) -> Array:
        """The elements of a block, widened first: numpy multiplies half as fast while it converts."""
        import numpy

        values = scratch(name, self.kind, len(raw) // self.dtype.itemsize)
        numpy.copyto(values, numbers(raw, self.dtype, "merge values"))
        return values

    def fold(self, take: Callable[..., Any], *chosen: int) -> None:
        """`take` gets all numbers of these sources side by side, a piece at a time, until it gives True."""

        def take_numbers(_: int, *blocks: Array) -> Any:
            return take(*(self._numbers(block, f"merge source {number}") for number, block in enumerate(blocks)))

        fold(take_numbers, *(self.entries[number] for number in chosen))


# Formulas ------------------------------------------------------------------------------------------------------------


def _mean(of: _Merged, shares: Sequence[float] = ()) -> Piece:
    """The weighted sum. shares: other weights than its own."""
    import numpy

    weights = shares or of.weights

    def piece(read: Read, start: int) -> Array:
        total = read(0, "merge total")
        # The shares of equal values add up to that value, but in f64 nothing would round away what 1/n lacks.
        exact = total.dtype.itemsize == 8 and abs(math.fsum(weights) - 1) < 1e-12
        first = total.copy() if exact else total
        equal = numpy.full(len(first), exact)
        numpy.multiply(total, weights[0], out=total)
        for number, weight in enumerate(weights[1:], 1):
            term = read(number, "merge term")
            if exact:
                equal &= term.view("i8") == first.view("i8")
            numpy.add(total, numpy.multiply(term, weight, out=term), out=total)
        numpy.copyto(total, first, where=equal)
        return total

    return piece


def _slerp(of: _Merged) -> Piece:
    """The point between two tensors on the arc, at the share that the second has of the weights."""
    import numpy

    sums = [0.0, 0.0, 0.0]

    def add(x: Array, y: Array) -> None:
        for number, (a, b) in enumerate(((x, x), (y, y), (x, y))):
            sums[number] += float(numpy.add.reduce(numpy.multiply(a, b, dtype=numpy.float64)))

    of.fold(add, 0, 1)
    norms = [math.sqrt(total) if math.sqrt(total) > 1e-8 else 1.0 for total in sums[:2]]
    near = sums[2] / norms[0] / norms[1]
    t = of.weights[1] / sum(of.weights)
    shares = [1 - t, t]
    if abs(near) <= PARALLEL:
        angle = math.acos(near)
        # To as many digits as all mathematical libraries agree in.
        shares = [round(math.sin(part * angle) / math.sin(angle), 12) for part in shares]
    return _mean(of, shares)


Deltas = Callable[[int], "Array"]
"""`(number)`: the differences of a file from the base, zeros for those that are left out; in one memory for all."""


def _added(of: _Merged, mixed: Callable[[Deltas, Sequence[float]], Array], kept: Kept | None = None) -> Piece:
    """The base, and what is made of the differences of the files from it, scaled. kept: leaves some of them out."""
    import numpy

    def piece(read: Read, start: int) -> Array:
        base = read(0, "merge base")

        def delta(number: int) -> Array:
            values = read(number + 1, "merge delta")
            numpy.subtract(values, base, out=values)
            return kept(values, number, start) if kept else values

        total = mixed(delta, [base.dtype.type(weight) for weight in of.weights])
        numpy.multiply(total, base.dtype.type(of.how.scale), out=total)
        return numpy.add(base, total, out=total)

    return piece


def _task_arithmetic(of: _Merged) -> Piece:
    """The base, and the weighted sum of the differences of the files from it."""
    return _added(of, _weighted_sum)


def _weighted_sum(delta: Deltas, weights: Sequence[float]) -> Array:
    total: Any = sum(delta(number) * weight for number, weight in enumerate(weights))
    return cast(Array, total)


def _dare(of: _Merged) -> Piece:
    """Of each file random differences, which depend on the tensor's name alone, scaled up to make up for the others."""
    import numpy

    def kept(delta: Array, number: int, start: int) -> Array:
        density = of.how.density(number)
        if density < 1:
            chosen = _drawn(f"{of.how.seed}\0{number}\0{of.name}", density, start, len(delta))
            numpy.multiply(delta, chosen, out=delta)
            numpy.divide(delta, delta.dtype.type(density), out=delta)
        return delta

    return _added(of, _weighted_sum, kept)


def _drawn(words: str, density: float, start: int, count: int) -> Array:
    """True for the elements that are kept: random bits of the counter that is the place (Philox, 32 bits each)."""
    import hashlib

    import numpy

    key = int.from_bytes(hashlib.sha256(words.encode("utf-8", "surrogatepass")).digest()[:16], "little")
    counter, skip = divmod(start, 8)
    random = numpy.random.Philox(key=key, counter=counter).random_raw(-(-(skip + count) // 2))
    drawn = random.astype("<u8", copy=False).view("<u4")[skip : skip + count]
    chosen: Array = drawn < numpy.uint32(min(round(density * 2**32), 2**32 - 1))
    return chosen


def _ties(of: _Merged) -> Piece:
    """Of each file the largest differences; of those, the ones whose sign is elected."""
    import numpy

    # Of each file the bit pattern of the smallest magnitude that is kept, and the last place where it is.
    cuts = [_cut(of, number, max(1, int(of.how.density(number) * of.count))) for number in range(len(of.weights))]

    def kept(delta: Array, number: int, start: int) -> Array:
        smallest, last = cuts[number]
        patterns = _magnitudes(delta)
        keep = patterns > smallest
        also = min(len(patterns), max(0, last + 1 - start))
        keep[:also] |= patterns[:also] == smallest
        return numpy.multiply(delta, keep, out=delta)

    return _added(of, _elected, kept)


def _elected(delta: Deltas, weights: Sequence[float]) -> Array:
    """The sum of the weighted differences that have the sign of all of it, divided by their weights."""
    import numpy

    weighted = [delta(number) * weight for number, weight in enumerate(weights)]
    votes: Any = sum(weighted)
    sign = numpy.where(votes >= 0, votes.dtype.type(1), votes.dtype.type(-1))
    agree = [each * sign > 0 for each in weighted]
    total: Any = sum(each * mask for each, mask in zip(weighted, agree, strict=True))
    shares: Any = sum(mask * weight for weight, mask in zip(weights, agree, strict=True))
    shares[shares == 0] = 1
    total /= shares
    numpy.copyto(total, votes, where=votes != votes)  # what is NaN in one file is in the result
    return cast(Array, total)


def _cut(of: _Merged, number: int, keep: int) -> tuple[int, int]:
    """The bit pattern of the smallest of the `keep` largest differences of a file, and the last place where it is
    kept: of equal ones, the first are.

    Unless there are few, it is found digit by digit, in a pass for each.
    """
    import numpy

    if keep >= of.count:
        return 0, of.count

    def patterns(take: Callable[[Array], Any]) -> None:
        of.fold(lambda base, values: take(_magnitudes(numpy.subtract(values, base, out=values))), 0, number + 1)

    if of.count <= _SMALL:
        few: list[Array] = []
        patterns(lambda found: few.append(found.copy()))
        place = int(numpy.argsort(~few[0], kind="stable")[keep - 1])
        return int(few[0][place]), place
    cut, left, place, width = 0, keep, 0, 64 if of.kind == "f8" else 32
    for shift in range(width - _DIGIT, -1, -_DIGIT):
        counts = numpy.zeros(1 << _DIGIT, numpy.int64)

        def add(found: Array, shift: int = shift, cut: int = cut, counts: Array = counts) -> None:
            above = found if shift + _DIGIT == width else found[found >> (shift + _DIGIT) == cut]
            digits = scratch("merge digits", "i8", len(above))
            numpy.right_shift(above, shift, out=digits, casting="unsafe")
            digits &= (1 << _DIGIT) - 1
            counts += numpy.bincount(digits, minlength=1 << _DIGIT)

        patterns(add)
        larger = counts[::-1].cumsum()[::-1] - counts  # those with a larger digit
        digit = int(numpy.flatnonzero(larger < left)[0])
        cut, left = cut << _DIGIT | digit, left - int(larger[digit])

    def last(found: Array) -> bool:
        nonlocal place, left
        equal = numpy.flatnonzero(found == cut)
        is_last = len(equal) >= left
        place, left = place + int(equal[left - 1] if is_last else len(found)), left - len(equal)
        return is_last

    patterns(last)
    return cut, place


def _magnitudes(delta: Array) -> Array:
    """Whole numbers in the order of the magnitudes: the bit patterns without their signs. NaN is the largest."""
    import numpy

    patterns = delta.view(f"u{delta.itemsize}")
    mask = patterns.dtype.type((1 << (8 * delta.itemsize - 1)) - 1)
    found: Array = numpy.bitwise_and(patterns, mask, out=scratch("merge magnitudes", patterns.dtype.str, len(patterns)))
    return found


# Options -------------------------------------------------------------------------------------------------------------


class Method(NamedTuple):
    """A formula, the options that it takes, and the bytes of an element from which on it computes in f64."""

    formula: Callable[[_Merged], Piece]
    takes: tuple[str, ...]
    wide: int


METHODS = {
    "mean": Method(_mean, ("ema",), 4),
    "task-arithmetic": Method(_task_arithmetic, ("base", "scale"), 8),
    "slerp": Method(_slerp, ("t",), 4),
    "ties": Method(_ties, ("base", "scale", "density"), 8),
    "dare": Method(_dare, ("base", "scale", "density", "seed"), 8),
}
LAMBDA = Command(("--lambda",), "scale")  # another verb has --scale


def merge_of(method: str, files: int, given: Mapping[str, Any]) -> Merge:
    """The way to merge so many files. Raises `UsageError` for what does not go together, or is out of range.

    given: `base`, `density`, `scale`, `t`, `seed` and `ema`, None where the user gave none.
    """
    if method not in METHODS:
        raise UsageError(f"unknown {arg('method')} {method!r}", f"Available: {', '.join(METHODS)}.")
    asked = {name: value for name, value in given.items() if value is not None}
    known = {"density": 0.5, "scale": 1.0, "t": 0.5, "seed": 0} | asked
    density = known["density"]
    how = Merge(
        method, (density,) if isinstance(density, (int, float)) else tuple(density), known["scale"], known["seed"]
    )
    for what, why in _problems(how, files, asked, known["t"]):
        raise UsageError(what, why, "See ckptool average --help")
    return how


def _problems(how: Merge, files: int, asked: Mapping[str, Any], t: float) -> Iterator[tuple[str, str]]:
    """What is wrong with a way to merge so many files, and why."""
    method, densities = how.method, how.densities
    if how.has_base and "base" not in asked:
        yield f"{arg(method=method)} needs {arg('base')}", "It merges differences from it."
    if method == "slerp" and files != 2:
        yield f"{arg(method='slerp')} was given {counted(files, 'file')}", "It takes two."
    if files < 2 - how.has_base:
        yield "average needs at least two files", f"With {arg('base')}, one."
    if not math.isfinite(how.scale):
        yield f"{LAMBDA} {how.scale} is not a finite number", ""
    if not 0 <= t <= 1:
        yield f"{arg(t=t)} is not from 0 to 1", "0 is the first file, 1 the second."
    if len(densities) not in (1, files):
        yield f"{arg('density')} gives {counted(len(densities), 'value')}", "One, or one each."
    if not all(1e-9 <= density <= 1 for density in densities):
        yield f"{arg('density')} {','.join(f'{density:g}' for density in densities)} is not from 1e-9 to 1", ""
    for name in (name for name in asked if name not in METHODS[method].takes):
        those = listed([other for other, way in METHODS.items() if name in way.takes])
        option = LAMBDA if name == "scale" else arg(name)
        yield f"{arg(method=method)} does not take {option}", f"It is for {those}."
