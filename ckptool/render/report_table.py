"""The tensors of a report as columns of JSON, deflated: ten thousand of them, with pictures, have to fit in 3 MB."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import fields
from math import isfinite, isqrt
from typing import Any
from zlib import compress

from ckptool.analysis.diff import Diff, Difference
from ckptool.analysis.inspect import PartSummary, TensorRow, summary_of
from ckptool.analysis.report import CheckpointReport, FileReport, TensorPicture
from ckptool.analysis.statistics import Statistics
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.state_dicts import PLAIN, StateDict
from ckptool.checkpoint.tree import address
from ckptool.errors import printable
from ckptool.render.report_changes import place

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # heights of a histogram's bars
SHADES = 15  # of a thumbnail: -7 … 7, as digits 0 … e, and f where nothing is finite
EXACT = 1 << 53  # the greatest integer of JavaScript
ROOM, ROOM_EACH = 40_000, 110  # bytes of a page for thumbnails, and for each of them
STATISTICS = [field.name for field in fields(Statistics)]


def packed(report: CheckpointReport) -> str:
    """All tensors of a report, as base64 of deflated JSON."""
    columns: dict[str, list[Any]] = {name: [] for name in ("name", "part", "dtype", "shape", "bytes", "tied", "more")}
    columns |= {name: [] for name in (*STATISTICS, "hist", "quantiles", "thumb", "change")}
    pictures = [picture for file in report.files for picture in file.pictures.values() if picture.means]
    cells = (ROOM // max(len(pictures), 1) + ROOM_EACH) * 3 // 2  # four bits each, six bits a character
    names: list[dict[str, Any]] = []
    changes = _changes(report.diff) if report.diff is not None else None
    for number, file in enumerate(report.files):
        for part in parts_of(file):
            names.append({"file": number, "at": part.root.address, "model": part.root.is_model, "is": part.root.kind})
            for index, row in enumerate(part.rows):
                _add(columns, len(names) - 1, part, index, row, file, cells)
                columns["change"].append(_change(report.diff, changes, number, row) if number < 2 else 0)
    files = [file.diagnosis.file for file in report.files]
    table = {"files": files, "parts": names, "diff": report.diff is not None, "columns": columns}
    text = json.dumps(table, separators=(",", ":"), allow_nan=False)
    return b64encode(compress(text.encode(), 5)).decode()


def parts_of(file: FileReport) -> list[PartSummary]:
    """The parts of a file that have tensors; the last one for those that are in none."""
    if file.inspection is None:
        return []
    found = file.inspection.parts
    inside = {id(row) for part in found for row in part.rows}
    rest = [row for row in file.inspection.tensors if id(row) not in inside]
    return [part for part in found if part.rows] + ([summary_of(StateDict((), None, PLAIN, ""), rest)] if rest else [])


def _add(
    columns: dict[str, list[Any]],
    number: int,
    part: PartSummary,
    index: int,
    row: TensorRow,
    file: FileReport,
    cells: int,
) -> None:
    tensor, at = row.tensor, row.address
    assert file.inspection is not None
    statistics, picture = file.inspection.statistics.get(at), file.pictures.get(at)
    columns["name"].append(at)
    columns["part"].append(number)
    columns["dtype"].append(tensor.dtype.name if tensor.dtype else "?")
    columns["shape"].append(None if tensor.shape is None else list(tensor.shape))
    columns["bytes"].append(tensor.nbytes)
    columns["tied"].append(part.rows[part.tied[index]].address if index in part.tied else 0)
    columns["more"].append(_more(row))
    for name in STATISTICS:
        columns[name].append(None if statistics is None else number_json(getattr(statistics, name)))
    columns["hist"].append(_bars(picture.counts) if picture else 0)
    columns["quantiles"].append([number_json(value) for value in picture.quantiles] if picture else 0)
    columns["thumb"].append(_thumbnail(picture, cells) if picture and picture.means else 0)


def _more(row: TensorRow) -> list[Any]:
    """What is unusual about a tensor: its storage's number, then in words."""
    tensor = row.tensor
    words = [] if tensor.location == "cpu" else [printable(tensor.location)]
    if isinstance(tensor, TensorEntry):
        words += [] if tensor.is_contiguous else [f"strides {list(tensor.stride)}"]
        words += [f"offset {tensor.offset:,}"] if tensor.offset else []
        words += [name for name, value in tensor.flags._asdict().items() if value]
    else:
        words.append(printable(tensor.kind))
    return [row.storage, ", ".join(words)]


def number_json(value: float | int | None) -> Any:
    """A number that JavaScript reads as the same number: as a text where it has none like it."""
    if isinstance(value, int):
        return value if abs(value) < EXACT else str(value)
    if value is None or isfinite(value):
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def _bars(counts: Sequence[int]) -> str:
    """A digit for each bin, of the highest; none that is not empty is 0."""
    most = max(counts, default=0) or 1
    return "".join(DIGITS[-(-count * (len(DIGITS) - 1) // most)] for count in counts)


def _thumbnail(picture: TensorPicture, cells: int) -> list[Any]:
    """Rows, columns, the value of the strongest shade, a digit for each block; blocks are merged until they fit."""
    means = picture.means
    rows, columns = len(means), len(means[0])
    most = max(isqrt(cells), 4)
    height, width = min(rows, max(most, cells // max(columns, 1))), min(columns, max(most, cells // max(rows, 1)))
    if height * width > cells:
        height, width = min(height, most), min(width, most)
    merged = [
        [_mean([means[y][x] for y in _span(i, height, rows) for x in _span(j, width, columns)]) for j in range(width)]
        for i in range(height)
    ]
    scale = max((abs(value) for line in merged for value in line if value is not None), default=0.0)
    half = SHADES // 2
    values = [value for line in merged for value in line]
    shades = [
        "f" if value is None else DIGITS[half + (round(value / scale * half) if scale else 0)] for value in values
    ]
    return [height, width, number_json(float(f"{scale:.3g}")), "".join(shades)]


def _span(index: int, count: int, whole: int) -> range:
    return range(index * whole // count, max((index + 1) * whole // count, index * whole // count + 1))


def _mean(values: Iterable[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return sum(value / len(finite) for value in finite) if finite else None


# Changes -------------------------------------------------------------------------------------------------------------


def _changes(diff: Diff) -> tuple[dict[str, Difference], dict[str, str]]:
    """The differences by address, and the addresses that are in one file only, with which."""
    only = {address(path): "only here" for path, _ in (*diff.only_left, *diff.only_right)}
    return {change.address: change for change in diff.changed}, only


def _change(diff: Diff | None, changes: Any, side: int, row: TensorRow) -> Any:
    """A word; elements that moved and all of them; then the largest difference and the cosine, where they are known."""
    if diff is None:
        return 0
    changed, only = changes
    if (name := place(diff, side, row.path)) is None:
        return ["not compared"]
    if (change := changed.get(name)) is None:
        above = (name[:at] for at, sign in enumerate(f"{name}/") if sign == "/")
        return [next((only[part] for part in above if part in only), f"same: {diff.evidence}")]
    aspects = ", ".join(name for name in change.aspects if name != "values")
    if change.values is None:
        return [aspects or "values"]
    found = change.values
    return [aspects or "values", found.changed, found.total, number_json(found.max_abs), number_json(found.cosine)]
