"""Geometry of a page's pictures, in plain numbers: a template writes them as inline SVG, and escapes every text."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from ckptool.analysis.inspect import PartSummary
from ckptool.analysis.statistics import Statistics
from ckptool.checkpoint.tree import address

Box = tuple[float, float, float, float]
"""Left, top, width, height."""

CELLS = 80  # of a treemap 1,000 units wide
HUES = 6


@dataclass(frozen=True, slots=True)
class Cell:
    """A module in the treemap.

    name: its tensors' addresses begin so.  label: the same without what all names of the part have in common.
    leaf: it is a tensor.  hue: of the largest module that it is in, from 0.
    not_finite: of its tensors, those with NaN or Inf.
    """

    name: str
    label: str
    part: int
    leaf: bool
    tensors: int
    bytes: int
    hue: int
    not_finite: int
    box: Box = (0, 0, 0, 0)

    @property
    def glob(self) -> str:
        """What to search for in order to see its tensors, and no other's."""
        signs = ["?" if c in "! " or not c.isprintable() else f"[{c}]" if c in "*?[" else c for c in self.name]
        if signs[0] not in ("?", "[*]", "[?]", "[[]") and (self.leaf or self.name.startswith("re:")):
            signs[0] = f"[{signs[0]}]"  # a pattern, neither a part of names nor an expression
        return "".join(signs) + ("" if self.leaf else "[./]*")


def treemap(
    divided: Sequence[PartSummary], statistics: dict[str, Statistics], width: float, height: float
) -> list[Cell]:
    """The modules of all parts as cells whose areas are as their bytes; the largest are divided while there is room."""
    total = sum(part.bytes for part in divided)
    most = max(int(CELLS * width / 1_000), 56)
    largest = heapq.nlargest(most, enumerate(divided), key=lambda one: one[1].bytes)
    shown = [(number, part) for number, part in largest if part.bytes]
    areas = squarify([part.bytes for _, part in shown], (0, 0, width, height))
    cells: list[Cell] = []
    for (number, part), area in zip(shown, areas, strict=True):
        modules = list(_modules(part, number, statistics, max(most * part.bytes // total, 1)))
        boxes = squarify([cell.bytes for cell in modules], area)
        cells += [replace(cell, box=box) for cell, box in zip(modules, boxes, strict=True)]
    return cells


Item = tuple[str, int]
"""The address of a tensor, and its bytes."""


def _modules(part: PartSummary, number: int, statistics: dict[str, Statistics], most: int) -> Iterator[Cell]:
    """A part's modules, largest first, the small ones together in the cells of those that they are in."""
    rows = list(zip([address(row.path) for row in part.rows], part.sizes, strict=True))
    start = _begin(rows, len(part.root.address) + 1 if part.root.address else 0)
    todo: list[tuple[int, int, str, list[Item]]] = []
    done: list[tuple[str, list[Item]]] = []

    def add(below: dict[str, list[Item]]) -> None:
        for count, (name, items) in enumerate(below.items()):
            heapq.heappush(todo, (-sum(size for _, size in items), count + len(done), name, items))

    add(_by_piece(rows, start))
    while todo:
        _, _, name, items = heapq.heappop(todo)
        below = _by_piece(items, _begin(items, len(name) + 1))
        if _are_tensors(below) or len(below) + len(todo) + len(done) > most:
            done.append((name, items))
        else:
            add(below)
    hues: dict[str, int] = {}
    done = sorted(done, key=lambda one: -sum(size for _, size in one[1]))
    if rest := done[2 * CELLS :]:
        done = [*done[: 2 * CELLS], ("", [item for _, items in rest for item in items])]
    for name, items in done:
        hue = hues.setdefault(name[: _next_end(name, start)], len(hues) % HUES) if part.root.is_model else HUES
        known = [statistics[place] for place, _ in items if place in statistics]
        odd = sum(1 for one in known if one.nans or one.infs)
        leaf = len(items) == 1 and items[0][0] == name
        if nbytes := sum(size for _, size in items):
            label = name[start:] if any(c.isalpha() for c in name[start:]) else name  # a number says nothing alone
            yield Cell(name, label, number, leaf, len(items), nbytes, hue, odd)


def _begin(items: Sequence[Item], start: int) -> int:
    """Where the first piece begins in which the names differ; their last one where they do not."""
    common = os.path.commonprefix([name for name, _ in items])  # noqa: RUF071 -- of texts
    return max(start, 1 + max(common.rfind(sign) for sign in "./"))


def _by_piece(items: Sequence[Item], start: int) -> dict[str, list[Item]]:
    """The items by what their names have in common up to the end of the piece that begins at `start`."""
    below: dict[str, list[Item]] = {}
    for item in items:
        below.setdefault(item[0][: _next_end(item[0], start)], []).append(item)
    return below


def _are_tensors(below: dict[str, list[Item]]) -> bool:
    return all(len(items) == 1 and items[0][0] == name for name, items in below.items())


def _next_end(name: str, start: int) -> int:
    """Where the piece of a name ends that begins at `start`."""
    ends = [at for sign in "./" if (at := name.find(sign, start)) >= 0]
    return min(ends, default=len(name))


def squarify(sizes: Sequence[float], area: Box) -> list[Box]:
    """Boxes of these sizes, the largest first, that fill the area and are nearly squares.

    Bruls, Huizing, van Wijk, "Squarified treemaps" (2000).
    """
    x, y, width, height = area
    scale = width * height / sum(sizes) if sum(sizes) else 0
    todo, boxes = [size * scale for size in sizes], list[Box]()
    while todo:
        side = min(width, height)
        count = 1
        while count < len(todo) and _worst(todo[: count + 1], side) <= _worst(todo[:count], side):
            count += 1
        row, todo = todo[:count], todo[count:]
        thick = sum(row) / side if side else 0
        at = 0.0
        for size in row:
            long = size / thick if thick else 0
            boxes.append((x, y + at, thick, long) if width >= height else (x + at, y, long, thick))
            at += long
        if width >= height:
            x, width = x + thick, max(width - thick, 0)
        else:
            y, height = y + thick, max(height - thick, 0)
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    total = sum(row)
    low = min(row)
    return max(side * side * max(row) / total**2, total**2 / (side * side * low)) if total and low and side else 1e9


# Curves --------------------------------------------------------------------------------------------------------------


def polyline(xs: Sequence[float], ys: Sequence[float], width: float, height: float) -> tuple[str, float, float]:
    """A path through the finite points of a curve, and its least and greatest value."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if isfinite(y)]
    if not points:
        return "", 0.0, 0.0
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, span = xs[0], (xs[-1] - xs[0]) or 1
    spread = high / 2 - low / 2  # halves: the distance of two numbers can be more than the largest number
    at = [
        f"{(x - first) / span * width:.1f},{height - ((y / 2 - low / 2) / spread if spread else 0.5) * height:.1f}"
        for x, y in points
    ]
    return "M" + "L".join(at), low, high
