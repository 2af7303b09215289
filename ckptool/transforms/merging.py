"""The ways to merge models: what becomes of a piece of one tensor, given the same piece of each model.

`mean` and `slerp` add up weighted tensors; `task-arithmetic`, `ties` and `dare` weighted differences from a base, of
which TIES (arXiv:2306.01708) keeps the largest and DARE (arXiv:2311.03099) random ones:

    ties  as mergekit has it: the sign that most of the weighted differences have, divided by the agreeing weights
    dare  as in the paper and in peft: what is kept is divided by the density

Differences are computed in f32 (in f64 for f64), where mergekit has the type of the tensors, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ckptool.checkpoint.numeric import Array, scratch
from ckptool.commands import Command, arg
from ckptool.errors import UsageError, counted, listed

PARALLEL = 0.9995  # of two directions; beyond, slerp is a straight line
_DIGIT = 16  # bits of a pattern that are counted in one pass
_SMALL = 1 << 12  # patterns that are sorted instead

Read = Callable[[int, str], "Array"]
"""`(number, name)`: the piece of this source as numbers, in the scratch array called `name`."""
Fold = Callable[..., None]
"""`(take, *numbers)`: `take` gets all of these sources side by side, front to back, a piece at a time."""


@dataclass(frozen=True, slots=True)
class Merge:
    """How models are merged. densities: of each file's differences, the share that is kept.  scale: of their sum."""

    method: str = "mean"
    densities: tuple[float, ...] = ()
    scale: float = 1.0
    seed: int = 0

    @property
    def has_base(self) -> bool:
        return issubclass(METHODS[self.method], Deltas)

    @property
    def settings(self) -> tuple[str, ...]:
        """The options that count for its method, as text."""
        density = ", ".join(f"{density:g}" for density in self.densities)
        every = {"scale": f"lambda {self.scale:g}", "density": f"density {density}"}
        every["seed"] = f"seed {self.seed}"
        return tuple(text for name, text in every.items() if name in METHODS[self.method].takes)


class Mean:
    """The weighted sum. The sources are all files."""

    __slots__ = ("how", "name", "weights")
    takes: ClassVar[tuple[str, ...]] = ("ema",)

    def __init__(self, how: Merge, weights: Sequence[float], name: str) -> None:
        self.how, self.weights, self.name = how, weights, name

    @staticmethod
    def work_type(itemsize: int) -> str:
        """The type of all numbers, for tensors of elements of this size."""
        return "f8" if itemsize >= 4 else "f4"

    def prepare(self, fold: Fold, count: int) -> None:
        """Reads what has to be known of the whole tensor, of `count` numbers, before the first piece."""

    def merged(self, read: Read, start: int) -> Array:
        """The piece of the result from element `start`."""
        import numpy

        total = read(0, "merge total")
        # The shares of equal values add up to that value, but in f64 nothing would round away what 1/n lacks.
        whole = total.dtype.itemsize == 8 and abs(math.fsum(self.weights) - 1) < 1e-12
        first = total.copy() if whole else total
        equal = numpy.full(len(first), whole)
        numpy.multiply(total, self.weights[0], out=total)
        for number, weight in enumerate(self.weights[1:], 1):
            term = read(number, "merge term")
            if whole:
                equal &= term.view("i8") == first.view("i8")
            numpy.multiply(term, weight, out=term)
            numpy.add(total, term, out=total)
        numpy.copyto(total, first, where=equal)
        return total


class Slerp(Mean):
    """The point between two tensors on the arc, at the share that the second has of the weights."""

    __slots__ = ()
    takes = ("t",)

    def prepare(self, fold: Fold, count: int) -> None:
        import numpy

        sums = [0.0, 0.0, 0.0]

        def add(x: Array, y: Array) -> None:
            for number, (a, b) in enumerate(((x, x), (y, y), (x, y))):
                sums[number] += float(numpy.add.reduce(numpy.multiply(a, b, dtype=numpy.float64)))

        fold(add, 0, 1)
        norms = [math.sqrt(total) if math.sqrt(total) > 1e-8 else 1.0 for total in sums[:2]]
        near = sums[2] / norms[0] / norms[1]
        t = self.weights[1] / sum(self.weights)
        self.weights = [1 - t, t]
        if abs(near) <= PARALLEL:
            angle = math.acos(near)
            # To as many digits as all mathematical libraries agree in.
            self.weights = [round(math.sin(part * angle) / math.sin(angle), 12) for part in (1 - t, t)]


class Deltas(Mean):
    """The base, and the weighted sum of the differences of the files from it. The first source is the base."""

    __slots__ = ()
    takes: ClassVar[tuple[str, ...]] = ("base", "scale")

    @staticmethod
    def work_type(itemsize: int) -> str:
        return "f8" if itemsize > 4 else "f4"

    def merged(self, read: Read, start: int) -> Array:
        import numpy

        base = read(0, "merge base")
        mixed = self.mixed(lambda number: self._kept(read, base, number, start), base)
        numpy.multiply(mixed, base.dtype.type(self.how.scale), out=mixed)
        return numpy.add(base, mixed, out=mixed)

    def _kept(self, read: Read, base: Array, number: int, start: int) -> Array:
        import numpy

        delta = read(number + 1, "merge delta")
        return self.kept(numpy.subtract(delta, base, out=delta), number, start)

    def kept(self, delta: Array, number: int, start: int) -> Array:
        """The differences of a file with zeros for those that are left out."""
        return delta

    def mixed(self, delta: Callable[[int], Array], base: Array) -> Array:
        """One difference for each element; like `base`, those of the files."""
        import numpy

        total = _zeros("merge total", base)
        for number, weight in enumerate(self.weights):
            term = delta(number)
            numpy.multiply(term, base.dtype.type(weight), out=term)
            numpy.add(total, term, out=total)
        return total

    def density(self, number: int) -> float:
        return self.how.densities[number % len(self.how.densities)]


class TiesMerge(Deltas):
    """Of each file the largest differences; of those, the ones whose sign is elected.

    cuts: of each file the bit pattern of the smallest magnitude that is kept, and the last place where it is.
    """

    __slots__ = ("cuts",)
    takes = ("base", "scale", "density")

    def prepare(self, fold: Fold, count: int) -> None:
        import numpy

        def patterns(number: int, take: Callable[[Array], Any]) -> None:
            fold(lambda base, values: take(_magnitudes(numpy.subtract(values, base, out=values))), 0, number)

        self.cuts = []
        for number in range(len(self.weights)):
            keep = max(1, int(self.density(number) * count))
            self.cuts.append(_cut(partial(patterns, number + 1), keep, count) if keep < count else (0, count))

    def kept(self, delta: Array, number: int, start: int) -> Array:
        import numpy

        smallest, last = self.cuts[number]
        patterns = _magnitudes(delta)
        keep = patterns > smallest
        also = min(len(patterns), max(0, last + 1 - start))
        keep[:also] |= patterns[:also] == smallest
        numpy.multiply(delta, keep, out=delta)
        return delta

    def mixed(self, delta: Callable[[int], Array], base: Array) -> Array:
        import numpy

        kind, count = base.dtype.str, len(base)
        votes = _zeros("merge total", base)
        sums = [_zeros(f"merge {side}", base) for side in ("above", "below")]
        shares = [_zeros(f"merge share {side}", base) for side in ("above", "below")]
        weighted, term = scratch("merge weighted", kind, count), scratch("merge term", kind, count)
        mask = scratch("merge mask", "?", count)
        for number, weight in enumerate(map(base.dtype.type, self.weights)):
            numpy.multiply(delta(number), weight, out=weighted)
            numpy.add(votes, weighted, out=votes)
            for side, agrees in enumerate((numpy.greater, numpy.less)):
                agrees(weighted, 0, out=mask)
                numpy.add(sums[side], numpy.multiply(weighted, mask, out=term), out=sums[side])
                numpy.add(shares[side], numpy.multiply(mask, weight, out=term), out=shares[side])
        below = ~(votes >= 0)
        for above, other in zip((sums[0], shares[0]), (sums[1], shares[1]), strict=True):
            numpy.copyto(above, other, where=below)
        numpy.copyto(shares[0], 1, where=shares[0] == 0)
        numpy.divide(sums[0], shares[0], out=sums[0])
        numpy.copyto(sums[0], votes, where=votes != votes)  # what is NaN in one file is in the result
        return sums[0]


class DareMerge(Deltas):
    """Of each file random differences, which depend on the tensor's name alone, scaled up to make up for the others."""

    __slots__ = ()
    takes = ("base", "scale", "density", "seed")

    def kept(self, delta: Array, number: int, start: int) -> Array:
        import numpy

        if self.density(number) == 1:
            return delta
        numpy.multiply(delta, self._chosen(number, start, len(delta)), out=delta)
        numpy.divide(delta, delta.dtype.type(self.density(number)), out=delta)
        return delta

    def _chosen(self, number: int, start: int, count: int) -> Array:
        """True for the elements that are kept: random bits of the counter that is the place (Philox, 32 bits each)."""
        import hashlib

        import numpy

        words = f"{self.how.seed}\0{number}\0{self.name}".encode("utf-8", "surrogatepass")
        key = int.from_bytes(hashlib.sha256(words).digest()[:16], "little")
        counter, skip = divmod(start, 8)
        random = numpy.random.Philox(key=key, counter=counter).random_raw(-(-(skip + count) // 2))
        drawn = random.astype("<u8", copy=False).view("<u4")[skip : skip + count]
        chosen: Array = drawn < numpy.uint32(min(round(self.density(number) * 2**32), 2**32 - 1))
        return chosen


METHODS = {"mean": Mean, "task-arithmetic": Deltas, "slerp": Slerp, "ties": TiesMerge, "dare": DareMerge}
LAMBDA = Command(("--lambda",), "scale")  # another verb has --scale


def merge_of(method: str, files: int, given: Mapping[str, Any]) -> Merge:
    """The way to merge so many files. Raises `UsageError` for what does not go together, or is out of range.

    given: `base`, `density`, `scale`, `t`, `seed` and `ema`, None where the user gave none.
    """
    if method not in METHODS:
        raise UsageError(f"unknown {arg('method')} {method!r}", f"Available: {', '.join(METHODS)}.")
    takes = METHODS[method].takes
    defaults: dict[str, Any] = {"density": 0.5, "scale": 1.0, "t": 0.5, "seed": 0}
    known = defaults | {name: value for name, value in given.items() if value is not None}
    scale, t, density = (known[name] for name in ("scale", "t", "density"))
    densities = (density,) if isinstance(density, (int, float)) else tuple(density)
    shown = ",".join(f"{each:g}" for each in densities)
    checks = [
        (
            "base" in takes and "base" not in known,
            f"{arg(method=method)} needs {arg('base')}",
            "It merges differences from it.",
        ),
        (
            method == "slerp" and files != 2,
            f"{arg(method='slerp')} was given {counted(files, 'file')}",
            "It takes two.",
        ),
        (files < 2 - ("base" in takes), "average needs at least two files", f"With {arg('base')}, one."),
        (not math.isfinite(scale), f"{LAMBDA} {scale} is not a finite number", ""),
        (not 0 <= t <= 1, f"{arg(t=t)} is not from 0 to 1", "0 is the first file, 1 the second."),
        (
            len(densities) not in (1, files),
            f"{arg('density')} gives {counted(len(densities), 'value')}",
            "One, or one each.",
        ),
        (not all(1e-9 <= each <= 1 for each in densities), f"{arg('density')} {shown} is not from 1e-9 to 1", ""),
    ]
    for name in (name for name, value in given.items() if value is not None and name not in takes):
        those = listed([other for other, kind in METHODS.items() if name in kind.takes])
        option = LAMBDA if name == "scale" else arg(name)
        checks.append((True, f"{arg(method=method)} does not take {option}", f"It is for {those}."))
    for wrong, what, why in checks:
        if wrong:
            raise UsageError(what, why, "See ckptool average --help")
    return Merge(method, densities, scale, known["seed"])


def _zeros(name: str, like: Array) -> Array:
    memory = scratch(name, like.dtype.str, len(like))
    memory.fill(0)
    return memory


def _magnitudes(delta: Array) -> Array:
    """Whole numbers in the order of the magnitudes: the bit patterns without their signs. NaN is the largest."""
    patterns = delta.view(f"u{delta.itemsize}")
    magnitudes: Array = patterns & patterns.dtype.type((1 << (8 * delta.itemsize - 1)) - 1)
    return magnitudes


def _cut(fold: Callable[[Callable[[Array], Any]], None], keep: int, count: int) -> tuple[int, int]:
    """The smallest of the `keep` largest of `count` patterns, and the last place where an equal one is kept.

    Of equal ones, the first are kept. Unless there are few, it is found digit by digit, in a pass for each.
    """
    import numpy

    first: Array = numpy.zeros(0)

    def begin(patterns: Array) -> bool:
        nonlocal first
        first = patterns
        return True

    fold(begin)
    cut, left, width = 0, keep, 8 * first.itemsize
    if not keep:
        return (1 << width - 1) - 1, -1
    if len(first) == count <= _SMALL:
        place = int(numpy.argsort(~first, kind="stable")[keep - 1])
        return int(first[place]), place
    for shift in range(width - _DIGIT, -1, -_DIGIT):
        counts = numpy.zeros(1 << _DIGIT, numpy.int64)

        def add(patterns: Array, shift: int = shift, cut: int = cut, counts: Array = counts) -> None:
            above = patterns if shift + _DIGIT == width else patterns[patterns >> (shift + _DIGIT) == cut]
            digits = (above >> shift).astype(numpy.int64) & ((1 << _DIGIT) - 1)
            counts += numpy.bincount(digits, minlength=1 << _DIGIT)

        fold(add)
        larger = counts[::-1].cumsum()[::-1] - counts  # those with a larger digit
        digit = int(numpy.flatnonzero(larger < left)[0])
        cut, left = cut << _DIGIT | digit, left - int(larger[digit])
    place = 0

    def last(patterns: Array) -> bool:
        nonlocal place, left
        equal = numpy.flatnonzero(patterns == cut)
        if len(equal) >= left:
            place += int(equal[left - 1])
            return True
        place, left = place + len(patterns), left - len(equal)
        return False

    fold(last)
    return cut, place
