"""What a page shows of two files, of several, and of a run, as plain facts for its template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ckptool.checkpoint import Composite, TensorEntry
from ckptool.checkpoint.tree import address
from ckptool.errors import counted, printable
from ckptool.render.style import number, short, size, tensor_text, value_text
from ckptool.render.svg import polyline
from ckptool.reports.diff import Diff
from ckptool.reports.report import CheckpointReport, Distances, NormsOverTime

LAYERS, KINDS, LISTED = 60, 36, 300  # rows and columns of a heatmap, rows of a list
WIDE, HIGH = 24, 16  # of a cell with its gap
LEVELS = (0, 0.01, 0.1, 0.5, 1)  # of a share: shades 0 … 5
CURVE = (420, 106)


@dataclass(frozen=True, slots=True)
class PageNote:
    """Something to know, with the commands that help. blocks: it keeps the file from loading."""

    code: str
    text: str
    commands: list[str]
    blocks: bool = False
    says: str = ""
    advice: str = ""


def level(share: float) -> int:
    """The shade of a share: 0 for nothing, 5 for all."""
    return sum(1 for most in LEVELS if share > most) + (share >= 1)


# Two files -----------------------------------------------------------------------------------------------------------


def changes(diff: Diff, tensors: dict[str, int]) -> dict[str, Any]:
    """Two files compared. tensors: elements of the first one's weights, by address, for the heatmap."""
    tensors_changed = [change for change in diff.changed if _is_tensor(change.left)]
    moved = {change.address: change.values for change in tensors_changed if change.values is not None}
    entries = [change for change in diff.changed if not _is_tensor(change.left)]
    same = (
        "They are the same" if diff.same else f"{len(tensors_changed):,} of {counted(diff.tensors, 'tensor')} changed"
    )
    counts = [(len(entries), "entry", "entries")]
    rest = [counted(count, one, many) + " changed" for count, one, many in counts if count]
    rest += [f"{len(only):,} only in {side}" for side, only in (("A", diff.only_left), ("B", diff.only_right)) if only]
    equal = f"{counted(diff.equal, 'tensor')} equal, by {diff.evidence}"
    lists = [
        (f"Only in {side}", [(address(path), _text(node)) for path, node in only])
        for side, only in (("A", diff.only_left), ("B", diff.only_right))
    ]
    lists += [("Entries that changed", [(one.address, f"{_text(one.left)} → {_text(one.right)}") for one in entries])]
    other = [
        (
            one.address,
            ", ".join(f"{name} {_side(a)} → {_side(b)}" for name, (a, b) in one.aspects.items() if name != "values"),
        )
        for one in tensors_changed
        if set(one.aspects) - {"values"}
    ]
    lists += [("Changed other than by value", other)]
    lists += [("Tied in one file only", [(side, ", ".join(names[:20])) for side, names in diff.ties])]
    shown = [
        (f"{title} ({len(rows):,})", rows[:LISTED] + [("…", f"{len(rows) - LISTED:,} more")] * (len(rows) > LISTED))
        for title, rows in lists
        if rows
    ]
    return {
        "same": diff.same,
        "verdict": "; ".join([same, *rest, equal]) + ".",
        "moved": _moved(diff),
        "remarks": [*diff.remarks, *([f"Not compared: {', '.join(diff.not_compared)}."] if diff.not_compared else [])],
        "lists": shown,
        **_heatmap(moved, tensors),
    }


def _moved(diff: Diff) -> str:
    """How many elements moved, and how large a patch of them would be."""
    changed, total, patch = (getattr(diff, name, None) for name in ("changed_elements", "elements", "patch_bytes"))
    if changed is None:
        found = [change.values for change in diff.changed if change.values is not None]
        return f"{counted(sum(one.changed for one in found), 'element')} moved in them." if found else ""
    share = f" ({changed / total:.2%} of {short(total)})" if total else ""
    return f"{counted(changed, 'element')} moved{share}." + (
        f" A sparse patch would have {size(patch)}." if patch else ""
    )


def _is_tensor(node: Any) -> bool:
    return isinstance(node, (TensorEntry, Composite))


def _text(node: Any) -> str:
    return tensor_text(node) if _is_tensor(node) else value_text(node)


def _side(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


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
        said += [f"resumes at step {run.resumes:,}"] if run.resumes is not None else []
    return {
        "text": "; ".join([*said, *unread]),
        "curves": [curve for curve in curves if curve.paths],
        "marks": ", ".join(counted(count, kind) for kind, count in kinds if count),
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
