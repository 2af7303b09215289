"""The page of `report`: one file without requests, whose template gets plain facts and escapes every one of them."""

from __future__ import annotations

import heapq
import json
import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from math import isfinite, prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import compress

from ckptool.analysis.curves import Curve
from ckptool.analysis.diff import BESIDE, EVIDENCE, aspect_rows, entry_rows, folded, tensors_changed, totals
from ckptool.analysis.differences import is_tensor
from ckptool.analysis.inspect import PartSummary, TensorRow, engine_of, summary_of
from ckptool.analysis.outline import overview
from ckptool.analysis.values import Statistics
from ckptool.checkpoint import Checkpoint, Flags, TensorEntry
from ckptool.checkpoint.tree import address, tensors
from ckptool.conventions.state_dicts import PLAIN, StateDict, bare
from ckptool.errors import counted, printable, quoted
from ckptool.facts import WHOLE, Table, number, percent, size
from ckptool.formats import PROGRAMS
from ckptool.render.lines import cut

if TYPE_CHECKING:
    from ckptool.analysis.diff import Diff
    from ckptool.verbs.report import CheckpointReport, FileReport

TEMPLATES = Path(__file__).with_name("templates")
CELLS, HUES = 80, 6  # of a treemap 1,000 units wide
LAYERS, KINDS = 60, 36  # rows and columns of a heatmap
LEVELS = (0, 0.01, 0.1, 0.5, 1)  # of a share: shades 0 … 5
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # heights of a histogram's bars
SHADES = 7  # of a thumbnail on each side of 0: -7 … 7, as digits 0 … e, and f where nothing is finite
EXACT = 1 << 53  # the greatest integer of JavaScript
EVENTS = {"save": "saves", "resume": "resumes", "kill": "kills", "stop": "stops"}


def page(report: CheckpointReport) -> str:
    """The page. Every text on it is escaped, and its control characters are shown."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        optimized=False,  # a page is made once: what this saves is less than it takes
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters.update(size=size, number=number, counted=counted, cut=cut, fit=fit, quoted=quoted)
    environment.tests["finite"] = isfinite
    environment.globals.update(treemap=treemap, overview=overview, curve=Curve, path=curve_path)
    style, script = (Markup(TEMPLATES.joinpath(name).read_text("utf-8")) for name in ("report.css", "report.js"))
    hashes = (f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in (style, script))
    compared = _Compared(report.diff, report.compared) if report.diff is not None else None
    rules = [rule for file in report.files for rule in file.health.rules]
    reported = {f"{finding.kind}: {finding.rule}" for file in report.files for finding in file.health.findings}
    files = []
    for side, file in enumerate(report.files):
        contents, facts = file.inspection, [file.diagnosis.is_a]
        if contents is not None:
            facts = [contents.container, size(contents.bytes), counted(len(contents.tensors), "tensor")]
            storages = f"{counted(contents.storages, 'storage')} of {size(contents.tensor_bytes)}"
            facts += [storages, engine_of(contents.metadata)]
            facts += [contents.part.label] if contents.part else []
        header = {"name": file.diagnosis.file or "in memory", "facts": " · ".join(filter(None, facts))}
        header |= {name: getattr(file, name) for name in ("inspection", "diagnosis", "health")}
        letter = "AB"[side] * (len(report.files) > 1)
        files.append({**header, "letter": letter, "verdicts": list(_verdicts(file)), "parts": _parts_of(file)})
    return environment.get_template("report.html").render(
        report=report,
        policy="default-src 'none'; style-src {}; script-src {}; base-uri 'none'; form-action 'none'".format(*hashes),
        style=style,
        script=script,
        files=files,
        change=_changes(report, compared) if compared is not None else None,
        clear=[rule for rule in dict.fromkeys(rules) if rule not in reported],
        events=[(kind, steps) for kind, name in EVENTS.items() if (steps := getattr(report.history, name, ()))],
        data=packed(report, compared) if any(map(_parts_of, report.files)) else "",
    )


def fit(text: str, room: int) -> tuple[str, str]:
    """As many of a name's last pieces as there is room for, and of those before them; a number stays with its name."""
    text = printable(text)
    ends = []
    for sign in (r"[./](?=\D)", r"[./]"):
        starts = [0, *(match.end() for match in re.finditer(sign, text))]
        start = next((at for at in starts if len(text) - at <= room), len(text))
        ends.append(text[start:])
        text = text[: max(start - 1, 0)]
    return ends[0], "" if ends[1].isdigit() else ends[1]  # it would pass for a size


def curve_path(curve: Curve, width: int, height: int) -> str:
    """The pieces of a curve as a path; a point that stands alone is a line of no length."""
    pieces = curve.pieces(curve.steps[0], curve.steps[-1], width)
    lines = (piece if len(piece) > 1 else piece * 2 for piece in pieces)
    return "".join("M" + "L".join(f"{x},{height - y * height:.1f}" for x, y in line) for line in lines)


# A file --------------------------------------------------------------------------------------------------------------


def _verdicts(file: FileReport) -> Iterator[tuple[str, str, str, str]]:
    """Four questions, answered as far as values were read: question, tone (`good`, `bad`, `warn`), answer, detail."""
    if file.inspection is None:
        yield "Does it load?", "bad", "It cannot be opened", "What it is, and what to do, is below."
        return
    codes = {note.code for note in file.inspection.notes}
    blocking = sum(finding.blocks for finding in file.diagnosis.findings)
    loads = ("bad", f"No: {counted(blocking, 'problem')}", "The notes say what to do.")
    yield ("Does it load?", *(loads if blocking else ("good", "No problem found", "Judged by its structure.")))
    runs = {
        "unsafe-global": ("bad", "Yes, with pickle", "The notes name it; ckptool ran nothing."),
        "custom-class": ("warn", "It imports classes", "The notes name them."),
        **dict.fromkeys(PROGRAMS, ("warn", "It holds a program", "It runs when the model is called.")),
    }
    nothing = ("good", "Nothing unknown", "It calls only what builds tensors and values.")
    yield ("Would it run anything?", *next((verdict for code, verdict in runs.items() if code in codes), nothing))
    health = file.health
    bad_count = len(file.inspection.non_finite)
    is_partial = any(reason != "empty" for reason in health.skipped.values())
    unset = sum(bool(stats.nans or stats.infs) for stats in file.inspection.statistics.values()) - bad_count
    finite = f"All but {unset:,} without a value yet" if unset else "All that were read"
    answer = f"{counted(bad_count, 'tensor')} with NaN or Inf" if bad_count else finite
    tone = "bad" if bad_count else "warn" if is_partial else "good"
    read = f"{health.read:,} of {counted(health.tensors, 'tensor')} read."
    yield "Are the values finite?", *((tone, answer) if health.read else ("", "Not looked at")), read
    yield "Do checksums match?", "", "Not checked", ""


def _parts_of(file: FileReport) -> list[PartSummary]:
    """The parts of a file that have tensors; a last one for tensors outside of all parts."""
    if file.inspection is None:
        return []
    parts = file.inspection.parts
    placed = {id(row) for part in parts for row in part.rows}
    rest = [row for row in file.inspection.tensors if id(row) not in placed]
    return [part for part in parts if part.rows] + ([summary_of(StateDict((), None, PLAIN, ""), rest)] if rest else [])


# The map of modules ---------------------------------------------------------------------------------------------------

Box = tuple[float, float, float, float]  # left, top, width, height
Item = tuple[str, int]  # the address of a tensor, and its bytes


class Cell(NamedTuple):
    """A module in the treemap. name: its tensors' addresses begin so.  label: without what all names have in common.
    leaf: it is a tensor.  hue: of the largest module that it is in, from 0.
    odd: of its tensors, those with NaN or Inf."""

    name: str
    label: str
    leaf: bool
    tensors: int
    bytes: int
    hue: int
    odd: int
    box: Box = (0, 0, 0, 0)

    @property
    def glob(self) -> str:
        """The search pattern that matches its tensors and no others."""
        signs = ["?" if c in "! " or not c.isprintable() else f"[{c}]" if c in "*?[" else c for c in self.name]
        if signs[0] not in ("?", "[*]", "[?]", "[[]") and (self.leaf or self.name.startswith("re:")):
            signs[0] = f"[{signs[0]}]"  # a pattern, neither a part of names nor an expression
        return "".join(signs) + ("" if self.leaf else "[./]*")


def treemap(divided: Sequence[PartSummary], non_finite: Collection[str], width: float, height: float) -> Iterator[Cell]:
    """The modules of all parts as cells with areas as their bytes; the largest are divided while there is room."""
    total, limit = sum(part.bytes for part in divided), max(int(CELLS * width / 1_000), 56)
    shown = heapq.nlargest(limit, [part for part in divided if part.bytes], key=lambda part: part.bytes)
    areas = boxes([part.bytes for part in shown], (0, 0, width, height))
    for part, area in zip(shown, areas, strict=True):
        cells = list(_modules(part, non_finite, max(limit * part.bytes // total, 1)))
        for cell, box in zip(cells, boxes([cell.bytes for cell in cells], area), strict=True):
            yield cell._replace(box=box)


def _modules(part: PartSummary, non_finite: Collection[str], limit: int) -> Iterator[Cell]:
    """A part's modules, largest first; small ones go together in the cell of the module that they are in."""
    items = list(zip([address(row.path) for row in part.rows], part.sizes, strict=True))
    start, groups = _by_piece(items, len(part.root.address) + 1 if part.root.address else 0)
    todo: list[tuple[int, int, str, list[Item]]] = []
    cells: list[tuple[int, int, str, list[Item]]] = []
    while True:
        for name, members in groups.items():
            heapq.heappush(todo, (-sum(nbytes for _, nbytes in members), len(todo) + len(cells), name, members))
        if not todo or len(todo) + len(cells) > limit:  # there is no room to divide any of them
            break
        cell = heapq.heappop(todo)
        _, groups = _by_piece(cell[3], len(cell[2]) + 1)
        is_flat = all(place == name for name, group in groups.items() for place, _ in group)  # tensors alone
        if is_flat or len(groups) + len(todo) + len(cells) > limit:
            cells, groups = [*cells, cell], {}
    cells = sorted(cells + todo)
    remaining = [item for *_, members in cells[2 * CELLS :] for item in members]
    hues: dict[str, int] = {}
    for name, members in [*((name, members) for *_, name, members in cells[: 2 * CELLS]), ("", remaining)]:
        hue = hues.setdefault(_piece(name, start), len(hues) % HUES) if part.root.is_model else HUES
        bad = sum(place in non_finite for place, _ in members)
        label = name[start:] if any(c.isalpha() for c in name[start:]) else name  # a number alone says nothing
        if nbytes := sum(nbytes for _, nbytes in members):
            yield Cell(name, label, [place for place, _ in members] == [name], len(members), nbytes, hue, bad)


def _by_piece(items: Sequence[Item], start: int) -> tuple[int, dict[str, list[Item]]]:
    """Items by what their names have in common up to the end of the first piece in which they differ, or of their last
    one; and where that piece begins, which is not before `start`."""
    common = os.path.commonprefix([name for name, _ in items])  # noqa: RUF071 -- of texts
    start = max(start, 1 + max(common.rfind(sign) for sign in "./"))
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(_piece(item[0], start), []).append(item)
    return start, groups


def _piece(name: str, start: int) -> str:
    """A name up to the end of the piece that begins at `start`."""
    return name[: min((at for sign in "./" if (at := name.find(sign, start)) >= 0), default=len(name))]


def boxes(sizes: Sequence[float], area: Box) -> list[Box]:
    """Boxes of these sizes, the largest first, that fill an area and are nearly square.
    Bruls, Huizing, van Wijk, "Squarified treemaps" (2000)."""
    x, y, width, height = area
    side, scale = min(width, height), width * height / (sum(sizes) or 1)
    if not sizes or not scale:
        return [area] * len(sizes)

    def flattest(count: int) -> float:
        """The worst aspect ratio of a row of the first `count` boxes."""
        total = sum(sizes[:count]) * scale
        return max(side**2 * max(sizes[:count]) * scale / total**2, total**2 / (side**2 * min(sizes[:count]) * scale))

    count = 1
    while count < len(sizes) and flattest(count + 1) <= flattest(count):
        count += 1
    thickness, offset, row = sum(sizes[:count]) * scale / side, 0.0, list[Box]()
    for amount in sizes[:count]:
        length = amount * scale / thickness
        row.append((x, y + offset, thickness, length) if width >= height else (x + offset, y, length, thickness))
        offset += length
    wide, high = (width - thickness, height) if width >= height else (width, height - thickness)
    return row + boxes(sizes[count:], (x + width - wide, y + height - high, max(wide, 0), max(high, 0)))


# All tensors ----------------------------------------------------------------------------------------------------------

STATISTICS = [field.name for field in fields(Statistics)]
_statistics_in = attrgetter(*STATISTICS)
COLUMNS = [*"name part dtype shape bytes tied more".split(), *STATISTICS, *"hist quantiles thumb change".split()]


def packed(report: CheckpointReport, compared: _Compared | None) -> str:
    """All tensors as base64 of deflated columns of JSON: ten thousand of them, with pictures, have to fit in 3 MB."""
    rows: list[tuple[Any, ...]] = []
    names: list[dict[str, Any]] = []
    for side, file in enumerate(report.files):
        for part in _parts_of(file):
            names.append({"file": side, "at": part.root.address, "model": part.root.is_model, "is": part.root.kind})
            for index, row in enumerate(part.rows):
                tied = part.rows[part.tied[index]].address if index in part.tied else 0
                change = compared.change(side, row) if compared is not None else 0
                rows.append((row.address, len(names) - 1, *_tensor_cells(row, tied, file), change))
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    files = [file.diagnosis.file for file in report.files]
    table = {"files": files, "parts": names, "diff": compared is not None, "columns": columns}
    text = json.dumps(table, separators=(",", ":"), allow_nan=False)
    return b64encode(compress(text.encode(), 2)).decode()  # higher levels: 6 % less, in three times the time


def _tensor_cells(row: TensorRow, tied: str | int, file: FileReport) -> Iterator[Any]:
    """The cells of a tensor from its dtype to its thumbnail: rows, columns, the value of the strongest shade, a digit
    for each block."""
    assert file.inspection is not None
    tensor, place = row.tensor, row.address
    words = [] if tensor.location == "cpu" else [printable(tensor.location)]  # what is unusual about it
    if isinstance(tensor, TensorEntry):
        words += [] if tensor.is_contiguous else [f"strides {list(tensor.stride)}"]
        words += [f"offset {tensor.offset:,}"] if tensor.offset else []
        words += [name for name, value in zip(Flags._fields, tensor.flags, strict=True) if value]
    else:
        words.append(printable(tensor.kind))
    yield tensor.dtype.name if tensor.dtype else "?"
    yield from (tensor.shape, tensor.nbytes, tied, [row.storage, ", ".join(words)])
    statistics, picture = file.inspection.statistics.get(place), file.pictures.get(place)
    yield from [None] * len(STATISTICS) if statistics is None else map(_plain, _statistics_in(statistics))
    if picture is None:
        yield from (0, 0, 0)
        return
    peak = max(picture.counts) or 1
    yield "".join([DIGITS[-(-count * 35 // peak)] for count in picture.counts])  # none that is not empty is 0
    yield [_plain(float(f"{value:.5g}")) for value in picture.quantiles]  # as many digits as the page shows
    if not picture.means:
        yield 0
        return
    means = [mean for row in picture.means for mean in row]
    scale = max((abs(mean) for mean in means if mean is not None), default=0.0)
    shades = ["f" if m is None else DIGITS[SHADES + (round(m / scale * SHADES) if scale else 0)] for m in means]
    yield [len(picture.means), len(picture.means[0]), _plain(float(f"{scale:.3g}")), "".join(shades)]


def _plain(value: float | int | None) -> Any:
    """A number in a form that JavaScript reads exactly: a text where it has no such number."""
    if isinstance(value, int):
        return value if abs(value) < EXACT else str(value)
    return value if value is None or isfinite(value) else str(value).replace("inf", "Infinity").replace("nan", "NaN")


# Two files ------------------------------------------------------------------------------------------------------------


class _Compared:
    """The differences of two files, and the names by which they call the listed tensors.

    A whole module is listed by the names of its state dict, and may be compared as the object that it is: then its
    tensors are found by what they view.
    """

    def __init__(self, diff: Diff, parts: Sequence[Checkpoint]) -> None:
        self.diff, self.bases = diff, [part.base for part in parts]
        self.paths: list[dict[Any, dict[tuple[Any, ...], None]]] = [{}, {}]
        for by_view, part in zip(self.paths, parts, strict=True):
            for path, tensor in tensors(part.tree):
                by_view.setdefault(tensor.view, {})[path] = None
        self.only = {address(path) for path, _ in (*diff.only_left, *diff.only_right)}
        self.changed = {change.address: change for change in diff.changed}

    def name(self, side: int, row: TensorRow) -> str | None:
        """The compared name of a tensor of the first or second file; None where it was not compared."""
        base, paths = self.bases[side], self.paths[side].get(row.tensor.view, {})
        path = row.path[len(base) :] if row.path[: len(base)] == base else None
        if paths and path not in paths:
            path = next(iter(paths))
        return None if path is None else address(bare(path) if "prefix" in self.diff.ignored else path)

    def change(self, side: int, row: TensorRow) -> list[Any]:
        """How a tensor of a file changed: a word; elements that moved and all of them; then the largest difference and
        the cosine, where they are known."""
        if (name := self.name(side, row)) is None:
            return ["not compared"]
        if (difference := self.changed.get(name)) is None:
            parents = [name[:at] for at, sign in enumerate(f"{name}/") if sign == "/"]
            if any(part in self.changed for part in parents):  # of another type in the other file
                return ["not compared"]
            return ["only here" if any(part in self.only for part in parents) else f"same: {self.diff.evidence}"]
        word = ", ".join(name for name in difference.aspects if name != "values") or "values"
        values = difference.values
        facts = () if values is None else (values.changed, values.total, _plain(values.max_abs), _plain(values.cosine))
        return [word, *facts]


def _changes(report: CheckpointReport, compared: _Compared) -> dict[str, Any]:
    diff, values = compared.diff, tensors_changed(compared.diff)
    remarks = [*diff.remarks, *([f"Not compared: {', '.join(diff.not_compared)}."] if diff.not_compared else [])]
    if any("shape" in change.aspects for change in diff.changed):
        remarks.append("Values are compared only where the shapes agree.")
    # What changed, in a few words for each kind of change.
    clauses, bad = list[str](), list[set[str | None]]()
    for side, file in enumerate(report.files):
        places = file.inspection.non_finite if file.inspection is not None else ()
        rows = file.inspection.tensors if file.inspection is not None else ()
        bad.append({compared.name(side, row) for row in rows if row.address in places} - {None})
    for letter, new in (("B", bad[1] - bad[0]), ("A", bad[0] - bad[1])):
        if new:
            clauses.append(f"NaN or Inf only in {letter}: {_names_text(sorted(filter(None, new)))}")
    by_text: dict[str, list[str]] = {}
    for name, text in aspect_rows(diff):
        by_text.setdefault(text, []).append(name)
    clauses += [f"{cut(text, 90)} in {_names_text(names)}" for text, names in list(by_text.items())[:3]]
    if len(by_text) > 3:
        clauses.append(counted(len(by_text) - 3, "more change of that kind", "more changes of that kind"))
    if values:
        deltas = [change.values for _, change in values if change.values is not None]
        changed, total, largest = totals(deltas)
        extent = f": {changed:,} of {counted(total, 'element')}, by up to {number(largest)}" if deltas else ""
        clauses.append(f"values changed in {_names_text([name for name, _ in values])}{extent}")
    for letter, only in (("A", diff.only_left), ("B", diff.only_right)):
        if only:
            clauses.append(f"only in {letter}: {_names_text([address(path) for path, _ in only], 'entry', 'entries')}")
    if entries := [f"{cut(name, 60)} {cut(text, 60)}" for name, text in entry_rows(diff)]:
        more = f" and {len(entries) - 3:,} more" if len(entries) > 3 else ""
        clauses.append(f"entries changed: {', '.join(entries[:3])}{more}")
    clauses += ["different ties"] if diff.ties else []
    clauses += ["a different order of keys"] if diff.order_differs else []
    if "prefix" in diff.ignored:
        clauses.append("the names differ by a wrapper's prefix" + (", and by nothing else" if diff.same else ""))
    verdict = "; ".join(clauses)
    unchanged = [change for change in diff.changed if is_tensor(change.left) and change.aspects.keys() <= BESIDE]
    words = "have the same values" if unchanged else "are the same"
    equal = f"{diff.equal + len(unchanged):,} of {counted(diff.tensors, 'tensor')} {words}, {EVIDENCE[diff.evidence]}."
    if diff.changed_elements:
        share = percent(diff.changed_elements / max(diff.elements, 1))
        equal += f" {diff.changed_elements:,} of {counted(diff.elements, 'element')} differ ({share})."
    tables = [table for table in diff.differences(("A", "B"), room=0) if isinstance(table, Table) and table.rows]
    moved = {name: change.values.changed for name, change in values if change.values is not None}
    return {
        "verdict": verdict[:1].upper() + verdict[1:],
        "equal": equal,
        "remarks": remarks,
        "tables": tables,
        "heatmap": _heatmap(report, compared, moved) if moved else {},
    }


def _names_text(names: Sequence[str], one: str = "tensor", many: str = "") -> str:
    """The number of names, and the first two of their groups."""
    groups = [text for text, _ in folded((name, None) for name in names)]
    shown = [cut(group, 90) or WHOLE for group in groups[:2]]
    if len(groups) > 2:
        shown.append("…")
    text = ", ".join(shown)
    return text if len(names) == 1 else f"{counted(len(names), one, many)} ({text})"


def _heatmap(report: CheckpointReport, compared: _Compared, moved: Mapping[str, int]) -> dict[str, Any]:
    """Share of the elements of the first file's weights that moved, by layer (the name up to its first number) and
    kind, whose numbers do not count. Layers in which nothing did are there, too; those beyond the room are counted."""
    sums: dict[tuple[str, str], list[int]] = {}
    kinds: Counter[str] = Counter()
    for part in _parts_of(report.files[0]):
        for row in part.rows if part.root.is_model else ():
            if (name := compared.name(0, row)) is not None:
                match = re.match(r"((?:.*?[./])?\d+)[./](.+)", name)
                layer, kind = match.groups() if match else name.rpartition(".")[::2]
                kind = re.sub(r"(?<![^./])\d+(?![^./])", "*", kind)
                kinds[kind] += 1
                counts = sums.setdefault((layer or name, kind), [0, 0])
                counts[0] += moved.get(name, 0)
                counts[1] += max(prod(row.tensor.shape or (1,)), 1)
    if not sums:
        return {}  # what moved is in no model
    layers = list(dict.fromkeys(layer for layer, _ in sums))
    common = {kind for kind, _ in kinds.most_common(KINDS)}
    shares = {place: count / total for place, (count, total) in sums.items()}
    hidden = [(len(layers) - LAYERS, "more layers"), (len(kinds) - KINDS, "more kinds")]
    return {
        "layers": layers[:LAYERS],
        "kinds": [kind for kind in kinds if kind in common],
        "shares": shares,
        "levels": {place: sum(share > level for level in LEVELS) + (share >= 1) for place, share in shares.items()},
        "hidden": ", ".join(f"{count:,} {what}" for count, what in hidden if count > 0),
    }
