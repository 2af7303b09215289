"""Numbers over the steps of a run: curves that are thinned as they grow, and the pieces to draw of them."""

from __future__ import annotations

from itertools import groupby
from math import isfinite
from operator import itemgetter
from typing import Annotated

from ckptool.errors import counted
from ckptool.facts import LIVE, dataclass, field, number

BUCKETS = 512  # stretches of the steps that a long curve keeps points of
MOST_POINTS = 4 * BUCKETS  # of a curve; one with more is thinned
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # of a braille character, from below

Point = tuple[int, float]
_step = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Curve:
    """A number over the steps, in their order.
    steps, values: all points, or of more than 2,048 the last one, and the lowest, the highest and the first NaN or
    infinity of each of some 512 equally long stretches of the steps.  points, not_finite: how many were logged, and of
    them NaN or infinite."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    points: int = 0
    not_finite: int = 0

    @property
    def finite(self) -> Annotated[list[Point], LIVE]:
        return [point for point in zip(self.steps, self.values, strict=True) if isfinite(point[1])]

    @property
    def ends(self) -> Annotated[tuple[float, float] | None, LIVE]:
        """The lowest and the highest finite value, if there is any."""
        values = [value for _, value in self.finite]
        return (min(values), max(values)) if values else None

    @property
    def odd_steps(self) -> Annotated[list[int], LIVE]:
        """Steps with NaN or an infinity, the first of them among these."""
        return [step for step, value in zip(self.steps, self.values, strict=True) if not isfinite(value)]

    def pieces(self, first: int, last: int, width: int) -> list[list[tuple[int, float]]]:
        """Lines to draw in `width` columns for the steps from `first` to `last`: columns, and heights from 0 to 1.
        Each has at most the lowest and the highest value of a column; a line ends where a value is not finite."""
        low, high = self.ends or (0.0, 0.0)
        span = high / 2 - low / 2  # halves: the distance of two numbers can be more than the largest number
        lines: list[list[tuple[int, float]]] = []
        for is_finite, group in groupby(zip(self.steps, self.values, strict=True), lambda point: isfinite(point[1])):
            line: list[tuple[int, float]] = []
            for at, points in groupby(group if is_finite else (), lambda point: column(point[0], first, last, width)):
                values = [value for _, value in points]
                ends = sorted((values.index(min(values)), values.index(max(values))))
                line += [(at, (values[i] / 2 - low / 2) / span if span else 0.5) for i in dict.fromkeys(ends)]
            lines += [line] if line else []
        return lines


def column(step: int, first: int, last: int, width: int) -> int:
    """The column of a step, of `width` for the steps from `first` to `last`."""
    return (step - first) * (width - 1) // (last - first) if last > first else 0


@dataclass(slots=True)
class CurveBuilder:
    """A curve that grows point by point, in bounded memory."""

    points: list[Point] = field(default_factory=list)
    count: int = 0
    not_finite: int = 0

    def add(self, step: int, value: float) -> None:
        self.count += 1
        self.not_finite += not isfinite(value)
        self.points.append((step, value))
        if len(self.points) > 4 * MOST_POINTS:
            self.points = _thinned(self.points)

    def curve(self) -> Curve:
        """The curve of the points so far; there must be at least one."""
        points = _thinned(self.points) if self.count > MOST_POINTS else sorted(self.points, key=_step)
        steps, values = zip(*points, strict=True)
        return Curve(steps, values, self.count, self.not_finite)


def _thinned(points: list[Point]) -> list[Point]:
    """The points that a long curve keeps.
    A stretch is a power of two long and begins at a multiple of it, so that those of a longer curve are made of whole
    ones of a shorter: thinning again and again loses nothing that thinning once would keep."""
    points = sorted(points, key=_step)
    shift = max((points[-1][0] - points[0][0]).bit_length() - BUCKETS.bit_length() + 1, 0)
    thinned: list[Point] = []
    for _, group in groupby(points, lambda point: point[0] >> shift):
        stretch = list(group)
        finite = sorted((point for point in stretch if isfinite(point[1])), key=lambda point: point[1])
        not_finite = [point for point in stretch if not isfinite(point[1])]
        last = [stretch[-1]] if stretch[-1] is points[-1] else []
        thinned += sorted(dict.fromkeys([*finite[:1], *finite[-1:], *not_finite[:1], *last]), key=_step)
    return thinned


def summary(curve: Curve) -> str:
    """The last value, the lowest and the highest, and how many there are."""
    facts = [f"last {number(curve.values[-1])}"]
    low, high = curve.ends or (0.0, 0.0)
    if low < high:
        steps = {value: step for step, value in reversed(curve.finite)}
        facts += [f"{name} {number(end)} at {steps[end]:,}" for name, end in (("min", low), ("max", high))]
    facts += [counted(curve.points, "point")]
    if curve.not_finite:
        facts += [f"{curve.not_finite:,} of them NaN or infinite, the first at {curve.odd_steps[0]:,}"]
    return ", ".join(facts)


def braille(curve: Curve, first: int, last: int, width: int, lines: int) -> list[str]:
    """The lines of a curve, from the top: two dots a character wide, four high."""
    cells = [[0x2800] * width for _ in range(lines)]
    for piece in curve.pieces(first, last, 2 * width):
        dots = [(at, round(height * (4 * lines - 1))) for at, height in piece]
        for (x, y), (to_x, to_y) in zip(dots, dots[1:] or dots, strict=False):
            count = max(abs(to_x - x), abs(to_y - y), 1)
            for i in range(count + 1):
                at, height = x + (to_x - x) * i // count, y + (to_y - y) * i // count
                cells[lines - 1 - height // 4][at // 2] |= _DOTS[at % 2][height % 4]
    return ["".join(map(chr, row)).replace("\u2800", " ") for row in cells]
