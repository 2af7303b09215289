"""The numbers that a run logged, over its steps, and what happened to it on the way: its history as data to draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite

from ckptool.checkpoint.registry import Report

BUCKETS = 512  # stretches of the steps that a long curve keeps points of
MOST_POINTS = 4 * BUCKETS  # of a curve; one with more is thinned

Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A number over the steps, in their order.

    steps, values: all points, or of more than 2,048 the last one, and the lowest, the highest and the first NaN or
    infinity of each of some 512 equally long stretches of the steps.  points, not_finite: how many were logged, and of
    them NaN or infinite.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
    points: int
    not_finite: int = 0

    @property
    def finite(self) -> list[Point]:
        return [point for point in zip(self.steps, self.values, strict=True) if isfinite(point[1])]

    @property
    def odd_steps(self) -> list[int]:
        """Steps with NaN or an infinity, the first of them among these."""
        return [step for step, value in zip(self.steps, self.values, strict=True) if not isfinite(value)]

    def pieces(self, first: int, last: int, width: int) -> list[list[tuple[int, float]]]:
        """Lines to draw in `width` columns for the steps from `first` to `last`: columns, and heights from 0 to 1.

        Each has at most the lowest and the highest value of a column; a line ends where a value is not finite.
        """
        finite = [value for _, value in self.finite]
        low, span = min(finite, default=0.0), max(finite, default=0.0) / 2 - min(finite, default=0.0) / 2
        lines: list[list[tuple[int, float]]] = []
        for is_finite, group in groupby(zip(self.steps, self.values, strict=True), lambda point: isfinite(point[1])):
            line: list[tuple[int, float]] = []
            for at, points in groupby(group, lambda point: column(point[0], first, last, width)):
                values = [value for _, value in points]
                ends = sorted((values.index(min(values)), values.index(max(values)))) if is_finite else []
                # Halves: the distance of two numbers can be more than the largest number.
                line += [(at, (values[i] / 2 - low / 2) / span if span else 0.5) for i in dict.fromkeys(ends)]
            lines += [line] if line else []
        return lines


def column(step: int, first: int, last: int, width: int) -> int:
    """The column of a step, of `width` for the steps from `first` to `last`."""
    return (step - first) * (width - 1) // (last - first) if last > first else 0


@dataclass(frozen=True, slots=True, repr=False)
class RunHistory(Report):
    """The curves of a run by name, and the steps at which things happened to it.

    saves: checkpoints.  resumes: where it went on.  kills: where it began again though no end was noted.  stops: where
    it was stopped or failed.  event, step: the last of these.  left_out: curves for which there was no room.
    """

    path: str
    curves: dict[str, Curve]
    saves: tuple[int, ...] = ()
    resumes: tuple[int, ...] = ()
    kills: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    event: str = ""
    step: int | None = None
    left_out: int = 0

    @property
    def series(self) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
        """The steps and values of each curve."""
        return {name: (curve.steps, curve.values) for name, curve in self.curves.items()}

    @property
    def done(self) -> tuple[int, ...]:
        """The step at which it was done, where that is the last that happened to it."""
        return (self.step,) if self.event == "done" and self.step is not None else ()

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step of all curves and events: the axis."""
        steps = [step for curve in self.curves.values() for step in (curve.steps[0], curve.steps[-1])]
        steps += [*self.saves, *self.resumes, *self.kills, *self.stops, *self.done]
        return min(steps, default=0), max(steps, default=0)


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
        """The curve of the points until now, of which there must be one."""
        points = _thinned(self.points) if self.count > MOST_POINTS else sorted(self.points, key=_step)
        steps, values = zip(*points, strict=True)
        return Curve(steps, values, self.count, self.not_finite)


def _thinned(points: list[Point]) -> list[Point]:
    """The points that a curve of many keeps.

    A stretch is a power of two long and begins at a multiple of it, so that those of a longer curve are whole ones of
    a shorter: what is thinned again and again loses nothing that thinning once would keep.
    """
    points = sorted(points, key=_step)
    shift = max((points[-1][0] - points[0][0]).bit_length() - BUCKETS.bit_length() + 1, 0)
    kept: list[Point] = []
    for _, group in groupby(points, lambda point: point[0] >> shift):
        stretch = list(group)
        finite = [point for point in stretch if isfinite(point[1])]
        chosen = [min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])] if finite else []
        chosen += [point for point in stretch if not isfinite(point[1])][:1]
        kept += sorted(dict.fromkeys([*chosen, *(points[-1:] if stretch[-1] is points[-1] else [])]), key=_step)
    return kept


def _step(point: Point) -> int:
    return point[0]
