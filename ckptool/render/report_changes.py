"""What a page shows of two files, of several, and of a run, as plain facts for its template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ckptool.analysis.diff import Diff
from ckptool.analysis.report import CheckpointReport, Distances, FileReport, NormsOverTime
from ckptool.checkpoint.state_dicts import bare
from ckptool.checkpoint.tree import Path, address
from ckptool.errors import counted, printable
from ckptool.facts import number
from ckptool.render.diff import (
    EVIDENCE,
    aspect_rows,
    entry_rows,
    folded,
    group_facts,
    grouped_rows,
    only_rows,
    tensors_changed,
)
from ckptool.render.style import WHOLE
from ckptool.render.svg import polyline

LAYERS, KINDS, LISTED = 60, 36, 300  # rows and columns of a heatmap, rows of a list
WIDE, HIGH = 24, 16  # of a cell with its gap
LEVELS = (0, 0.01, 0.1, 0.5, 1)  # of a share: shades 0 … 5
CURVE = (420, 106)
VALUES, ONLY = ("", "tensors", "elements that differ", "largest |a−b|", "cosine"), ("", "what")
SIDES = {"left": "A", "right": "B"}


@dataclass(frozen=True, slots=True)
class PageNote:
    """Something to know, with the commands that help. blocks: it keeps the file from loading."""

    code: str
    text: str
    commands: list[str]
    blocks: bool = False
    says: str = ""
    advice: str = ""


def place(diff: Diff, side: int, path: Path) -> str | None:
    """What the differences call an entry of a file, the first or the second; None where it was not compared."""
    base = diff.bases[side]
    if path[: len(base)] != base:
        return None
    inside = path[len(base) :]
    return address(bare(inside) if "prefix" in diff.ignored else inside)


def level(share: float) -> int:
    """The shade of a share: 0 for nothing, 5 for all."""
    return sum(1 for most in LEVELS if share > most) + (share >= 1)


# Two files -----------------------------------------------------------------------------------------------------------


def changes(report: CheckpointReport, sizes: dict[str, int]) -> dict[str, Any]:
    """Two files compared. sizes: elements of the first one's weights, by address, for the heatmap."""
    diff = report.diff
    assert diff is not None
    values = tensors_changed(diff)
    groups = [(text, *group_facts(members, 0)[:4]) for text, members in folded(values)]
    only = [(f"Only in {side}", ONLY, grouped_rows(only_rows(found))) for side, found in _only(diff)]
    lists: list[tuple[str, tuple[str, ...], list[Any]]] = [
        ("Changed in value", VALUES, groups),
        ("Changed other than by value", ("", "old → new"), grouped_rows(aspect_rows(diff))),
        *only,
        ("Entries that changed", ("", "old → new"), grouped_rows(entry_rows(diff))),
        ("Tied in one file only", ("in", "names"), [(SIDES[side], ", ".join(names[:20])) for side, names in diff.ties]),
        ("In another order", ("keys of",), [(name,) for name in diff.order_differs]),
    ]
    remarks = [*diff.remarks, *([f"Not compared: {', '.join(diff.not_compared)}."] if diff.not_compared else [])]
    if any("shape" in change.aspects for change in diff.changed):
        remarks.append("Values are compared only where the shapes agree.")
    verdict = "; ".join(_clauses(report))
    return {
        "verdict": verdict[:1].upper() + verdict[1:],
        "equal": f"{diff.equal:,} of {counted(diff.tensors, 'tensor')} are the same, {EVIDENCE[diff.evidence]}.",
        "moved": _moved(diff),
        "remarks": remarks,
        "lists": [(title, heads, rows[:LISTED], max(len(rows) - LISTED, 0)) for title, heads, rows in lists if rows],
        **_heatmap({name: one.values for name, one in values if one.values is not None}, sizes),
    }


def _only(diff: Diff) -> list[tuple[str, Any]]:
    return [(side, found) for side, found in (("A", diff.only_left), ("B", diff.only_right)) if found]


def _clauses(report: CheckpointReport) -> Iterator[str]:
    """What changed, in a few words for each kind of change."""
    diff = report.diff
    assert diff is not None
    odd = [_not_finite(diff, side, file) for side, file in enumerate(report.files)]
    for side, new in (("B", odd[1] - odd[0]), ("A", odd[0] - odd[1])):
        if new:
            yield f"NaN or Inf only in {side}: {_named(sorted(new))}"
    by_text: dict[str, list[str]] = {}
    for name, text in aspect_rows(diff):
        by_text.setdefault(text, []).append(name)
    yield from (f"{_cut(text, 90)} in {_named(names)}" for text, names in list(by_text.items())[:3])
    if len(by_text) > 3:
        yield counted(len(by_text) - 3, "more change of that kind", "more changes of that kind")
    if values := tensors_changed(diff):
        _, share, most, _, _ = group_facts({name: [change] for name, change in values}, 0)
        far = f": {share} elements, by up to {most}" if most else ""
        yield f"values changed in {_named([name for name, _ in values])}{far}"
    for side, found in _only(diff):
        yield f"only in {side}: {_named([address(path) for path, _ in found], 'entry')}"
    if entries := [f"{_cut(name, 60)} {_cut(text, 60)}" for name, text in entry_rows(diff)]:
        more = f" and {len(entries) - 3:,} more" if len(entries) > 3 else ""
        yield f"entries changed: {', '.join(entries[:3])}{more}"
    yield from ["different ties"] * bool(diff.ties) + ["a different order of keys"] * bool(diff.order_differs)
    if "prefix" in diff.ignored:
        yield "the names differ by a wrapper's prefix" + (", and by nothing else" if diff.same else "")


def _not_finite(diff: Diff, side: int, file: FileReport) -> set[str]:
    """What was compared of a file and holds NaN or Inf."""
    rows = file.inspection.tensors if file.inspection is not None else ()
    numbers = file.inspection.statistics if file.inspection is not None else {}
    odd = [row for row in rows if (one := numbers.get(row.address)) is not None and (one.nans or one.infs)]
    return {name for row in odd if (name := place(diff, side, row.path)) is not None}


def _named(names: list[str], one: str = "tensor") -> str:
    """Their number, and the first two of their groups."""
    groups = [text for text, _ in folded((name, None) for name in names)]
    text = ", ".join(_cut(group, 90) or WHOLE for group in groups[:2]) + ", …" * (len(groups) > 2)
    return text if len(names) == 1 else f"{counted(len(names), one, 'entries' if one == 'entry' else '')} ({text})"


def _moved(diff: Diff) -> str:
    """How many elements differ."""
    if not diff.changed_elements:
        return ""
    share = f"{100 * diff.changed_elements / max(diff.elements, 1):.3g} %"
    return f"{diff.changed_elements:,} of {counted(diff.elements, 'element')} differ ({share})."


def _place(name: str) -> tuple[str, str]:
    """The layer of a tensor, up to the first number in its name, and its kind, whose numbers do not count."""
    match = re.match(r"((?:.*?[./])?\d+)[./](.+)", name)
    layer, kind = match.groups() if match else name.rpartition(".")[::2]
    return layer or name, re.sub(r"(?<![^./])\d+(?![^./])", "*", kind)


def _heatmap(moved: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Share of elements that moved, layer by kind. Layers in which nothing did are there, too; those beyond the room
    are counted."""
    if not moved:
        return {"cells": []}
    layers: dict[str, None] = {}
    kinds: dict[str, int] = {}
    sums: dict[tuple[str, str], list[int]] = {}
    for name in sizes:
        layer, kind = _place(name)
        layers.setdefault(layer)
        kinds[kind] = kinds.get(kind, 0) + 1
        values, counts = moved.get(name), sums.setdefault((layer, kind), [0, 0])
        counts[0] += values.changed if values else 0
        counts[1] += sizes[name]
    rows = list(layers)[:LAYERS]
    columns = sorted(kinds, key=lambda kind: -kinds[kind])[:KINDS]
    columns = [kind for kind in kinds if kind in set(columns)]
    left, top = min(7.2 * max(map(len, rows)), 260) + 10, min(5 * max(map(len, columns)), 150) + 14
    cells = [
        (left + WIDE * x, top + HIGH * y, level(share), f"{row} {column}: {share:.1%} of its elements moved")
        for y, row in enumerate(rows)
        for x, column in enumerate(columns)
        if (found := sums.get((row, column))) is not None
        for share in [found[0] / found[1]]
    ]
    labels = [(_cut(row, 34), left - 8, top + HIGH * y + 11) for y, row in enumerate(rows)]
    labels += [(_cut(column, 30), left + WIDE * x + 12, top - 6) for x, column in enumerate(columns)]
    hidden = [(len(layers) - len(rows), "more layers"), (len(kinds) - len(columns), "more kinds")]
    out = ", ".join(f"{count:,} {what}" for count, what in hidden if count > 0)
    width, height = left + WIDE * len(columns) + top, top + HIGH * len(rows) + 4
    return {
        "cells": cells,
        "labels": labels,
        "top": top,
        "width": round(width),
        "height": round(height),
        "left_out": f"Not drawn: {out}; the table has all." if out else "",
    }


def _cut(text: str, room: int) -> str:
    text = printable(text)
    return text if len(text) <= room else f"{text[: room // 2]}…{text[1 - room // 2 :]}"


# Several files -------------------------------------------------------------------------------------------------------


def distance_rows(found: Distances) -> dict[str, Any]:
    """The matrix, with the shade of the share that is equal."""
    rows = [
        (
            name,
            [
                (
                    level(found.equal[i][j] or 0) if i != j else 0,
                    "–"
                    if i == j
                    else f"{found.shared[i][j]:,} shared, {_share(found.equal[i][j])} equal, "
                    f"cosine {number(found.cosine[i][j])}",
                )
                for j in range(len(found.names))
            ],
        )
        for i, name in enumerate(found.names)
    ]
    return {"names": found.names, "rows": rows}


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


# A run ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawn:
    """A curve. paths: of its finite pieces.  marks: where something happened, as column, kind, step."""

    title: str
    paths: list[str]
    low: str
    high: str
    first: int
    last: int
    marks: list[tuple[float, str, int]]


def run_facts(report: CheckpointReport) -> dict[str, Any]:
    """The curves of a run with what happened to it, and the norms of its layers over its checkpoints."""
    run, history, norms = report.run, report.history, report.norms
    events = [
        (kind, step)
        for kind, name in (("save", "saves"), ("resume", "resumes"), ("kill", "kills"), ("stop", "stops"))
        for step in getattr(history, name, ())
    ]
    curves = [_drawn(name, curve, events) for name, curve in (history.curves if history is not None else {}).items()]
    kinds = [(kind, sum(1 for each, _ in events if each == kind)) for kind in ("save", "resume", "kill", "stop")]
    rows = list(_norm_rows(norms)) if norms is not None else []
    unread = [f"step {step} was left out: {why}" for step, why in (norms.unread if norms is not None else {}).items()]
    said = []
    if run is not None:
        said = [f"{run.path}: {counted(len(run.checkpoints), 'checkpoint')}"]
        said += [f"{counted(run.damaged, 'damaged one')}"] if run.damaged else []
        if run.event == "done":
            said += [f"done at step {run.step:,}"] if run.step is not None else ["done"]
        elif run.resumes is not None:
            said += [f"resumes at step {run.resumes:,}"]
    return {
        "text": "; ".join([*said, *unread]),
        "curves": [curve for curve in curves if curve.paths],
        "marks": [(kind, counted(count, kind)) for kind, count in kinds if count],
        "norms": rows[:LISTED],
        "steps": ", ".join(f"{step:,}" for step in (norms.steps if norms is not None else ())[:12]),
    }


def _norm_rows(norms: NormsOverTime) -> Iterator[tuple[str, ...]]:
    for layer, values in norms.norms.items():
        moved = max((one for one in norms.moved.get(layer, ()) if isfinite(one)), default=None)
        path = polyline(norms.steps, values, 160, 18)[0]
        yield layer, path, number(values[0]), number(values[-1]), "–" if moved is None else f"{moved:.2%}"


def _drawn(name: str, curve: Any, events: list[tuple[str, int]]) -> Drawn:
    steps, values = curve.steps, curve.values
    first, last = (steps[0], steps[-1]) if steps else (0, 0)
    path, low, high = polyline(steps, values, *CURVE)
    width = CURVE[0] / ((last - first) or 1)
    marks = [(round((step - first) * width, 1), kind, step) for kind, step in events if first <= step <= last]
    return Drawn(name, [path] if path else [], number(low), number(high), first, last, marks)
