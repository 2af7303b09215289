"""The page of `report`: one file without requests, whose template gets plain facts and escapes every one of them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from re import finditer
from typing import TYPE_CHECKING, Any

from ckptool.analysis.inspect import engine_of
from ckptool.analysis.outline import Branch, outline, overview
from ckptool.analysis.report import CheckpointReport, FileReport
from ckptool.errors import counted, printable, quoted
from ckptool.facts import size
from ckptool.render.report_changes import PageNote, changes, distance_rows, place, run_facts
from ckptool.render.report_table import packed, parts_of
from ckptool.render.svg import treemap

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
LINES = 90  # of an outline
FOUND = 200  # tensors that a finding names


def report_page(report: CheckpointReport) -> str:
    """The page. Every text on it is escaped, and its control characters are shown."""
    from markupsafe import Markup

    style, script = (TEMPLATES.joinpath(name).read_text("utf-8") for name in ("report.css", "report.js"))
    several = len(report.files) > 1
    files = [_file(file) | {"letter": letter(number) if several else ""} for number, file in enumerate(report.files)]
    listed = any(file.inspection is not None and file.inspection.tensors for file in report.files)
    rules = dict.fromkeys(rule for file in report.files for rule in file.health.rules)
    found = {f"{finding.kind}: {finding.rule}" for file in report.files for finding in file.health.findings}
    return (
        _environment()
        .get_template("report.html")
        .render(
            title=report.files[0].diagnosis.file or "checkpoint",
            policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
            "base-uri 'none'; form-action 'none'",
            style=Markup(style),
            script=Markup(script),
            files=files,
            clear=[rule for rule in rules if rule not in found],
            change=changes(report, _models(report)) if report.diff is not None else None,
            fits=[(f"Does it fit {report.fit.against}?", _findings(report.fit))] if report.fit is not None else [],
            distances=distance_rows(report.distances) if report.distances is not None else None,
            run=run_facts(report) if report.run is not None or report.history is not None else None,
            data=packed(report) if listed else "",
        )
    )


def letter(number: int) -> str:
    """What a file is called on a page about several."""
    return chr(ord("A") + number) if number < 26 else str(number + 1)  # as `letter` of report.js


def _models(report: CheckpointReport) -> dict[str, int]:
    """What was compared of the first file's weights, and how many elements each has."""
    assert report.diff is not None
    models = [part for part in parts_of(report.files[0]) if part.root.is_model]
    sizes = ((place(report.diff, 0, row.path), row.tensor.shape) for part in models for row in part.rows)
    return {name: max(prod(shape or (1,)), 1) for name, shape in sizes if name is not None}


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        autoescape=True,
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    made.filters |= {
        "size": size,
        "short": _short,
        "tail": _tail,
        "fit": fit,
        "counted": lambda n: counted(n, "tensor"),
    }
    return made


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:120]}…{text[-60:]}"


def _tail(text: str, room: int) -> str:
    """The end of a name, which tells it from its neighbours, as far as there is room."""
    text = printable(text)
    return text if len(text) <= room else f"…{text[1 - room :]}"


def fit(text: str, room: int) -> tuple[str, str]:
    """As many of a name's last pieces as there is room for, and of those before them; a number stays with its name."""
    text = printable(text)
    start = _start(text, room, r"[./](?=\D)")
    above = text[: max(start - 1, 0)]
    return text[start:], above[_start(above, room, "[./]") :]


def _start(text: str, room: int, sign: str) -> int:
    """Where the first piece of a name begins from which on there is room; its end where there is none."""
    starts = [0, *(match.end() for match in finditer(sign, text))]
    return next((at for at in starts if len(text) - at <= room), len(text))


# A file --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """A question about a file with its answer. tone: `good`, `bad`, `warn` or empty."""

    question: str
    answer: str
    tone: str
    detail: str = ""
    command: str = ""


def _file(file: FileReport) -> dict[str, Any]:
    """Everything that the page says of a file alone."""
    notes = _findings(file.diagnosis)
    known = {note.code for note in notes}
    facts = {"name": file.diagnosis.file or "in memory", "facts": file.diagnosis.is_a}
    if file.inspection is None:
        verdict = Verdict("Does it load?", "It cannot be opened", "bad", "What it is, and what to do, stands below.")
        empty = dict.fromkeys(("cells", "health", "memory", "outline"))
        return facts | empty | {"verdicts": [verdict], "notes": notes}
    found, divided = file.inspection, parts_of(file)
    notes += [
        PageNote(note.code, note.message, [" ".join(map(quoted, note.fix))] if note.fix else [])
        for note in file.inspection.notes
        if note.code not in known
    ]
    engine = engine_of(found.metadata)
    what = [found.container, size(found.bytes), counted(len(found.tensors), "tensor")]
    what += [f"{counted(found.storages, 'storage')} of {size(found.tensor_bytes)}", *([engine] if engine else [])]
    what += [found.part.label] if found.part else []
    return facts | {
        "facts": " · ".join(what),
        "verdicts": list(_verdicts(file, {note.code for note in file.inspection.notes})),
        "notes": notes,
        "memory": str(found.memory),
        "cells": treemap(divided, file.inspection.statistics, 1000, 260),
        "narrow": treemap(divided, file.inspection.statistics, 372, 420),
        "outline": list(_outline(file)),
        "health": _health(file) if file.health.tensors else None,
    }


def _findings(diagnosis: Any) -> list[PageNote]:
    return [
        PageNote(each.code, each.what, list(each.fixes), bool(each.blocks), each.says, str(each.advice))
        for each in diagnosis.findings
    ]


def _verdicts(file: FileReport, codes: set[str]) -> Iterator[Verdict]:
    """The four questions, answered as far as was looked."""
    assert file.inspection is not None
    blocking = sum(finding.blocks for finding in file.diagnosis.findings)
    if file.diagnosis.loads:
        yield Verdict("Does it load?", "No problem found", "good", "Judged by its structure.")
    else:
        yield Verdict("Does it load?", f"No: {counted(blocking, 'problem')}", "bad", "The notes say what to do.")
    if "unsafe-global" in codes:
        yield Verdict("Would it run anything?", "Yes, with pickle", "bad", "The notes name it; ckptool ran nothing.")
    elif "custom-class" in codes:
        yield Verdict("Would it run anything?", "It imports classes", "warn", "The notes name them.")
    elif "torchscript" in codes:
        yield Verdict("Would it run anything?", "It holds a program", "warn", "It runs when the model is called.")
    else:
        yield Verdict(
            "Would it run anything?", "Nothing unknown", "good", "It calls only what builds tensors and values."
        )
    statistics, health = file.inspection.statistics.values(), file.health
    odd = sum(1 for one in statistics if one.nans or one.infs)
    read = f"{health.read:,} of {counted(health.tensors, 'tensor')} read."
    if not health.read:
        yield Verdict("Are the values finite?", "Not looked at", "", read)
    else:
        answer = f"{counted(odd, 'tensor')} with NaN or Inf" if odd else "All that were read"
        tone = "bad" if odd else "warn" if any(reason != "empty" for reason in health.skipped.values()) else "good"
        yield Verdict("Are the values finite?", answer, tone, read)
    yield Verdict("Do checksums match?", "Not checked", "", "", file.diagnosis.unread)


@dataclass(frozen=True, slots=True)
class OutlineLine:
    """A line of the folded table. bar: of 100, its share of the largest."""

    label: str
    level: int
    times: int
    detail: str
    size: str
    bar: int


def _outline(file: FileReport) -> Iterator[OutlineLine]:
    assert file.inspection is not None
    shown, hidden = overview(file.inspection.parts)
    most = max((row.bytes or 0 for row in shown), default=0) or 1
    deep = sum(1 for row in shown if row.outline is not None) or 1
    for row in shown:
        bar = 100 * (row.bytes or 0) // most
        yield OutlineLine(row.name, 0, 1, row.detail, "" if row.bytes is None else size(row.bytes), bar)
        if row.outline is not None:
            branch = outline(row.part, LINES // deep, None)
            yield from _branches(branch, 1, most)
    if hidden:
        yield OutlineLine("…", 0, 1, f"and {counted(hidden, 'more part')}, in the table of all tensors", "", 0)


def _branches(branch: Branch, level: int, most: int) -> Iterator[OutlineLine]:
    for child in branch.expanded:
        tied = child.is_tied
        detail, bar = child.detail, 100 * child.size // most
        yield OutlineLine(
            child.label,
            min(level, 8),
            child.times // branch.times,
            detail,
            "" if tied else size(child.size),
            0 if tied else bar,
        )
        yield from _branches(child, level + 1, most)
    if branch.hidden:
        yield OutlineLine("…", min(level, 8), 1, f"{branch.hidden:,} more, in the table of all tensors", "", 0)


def _health(file: FileReport) -> dict[str, Any]:
    """What was found, with its rule, and how much of the values was read."""
    health = file.health
    reasons: dict[str, list[str]] = {}
    for name, reason in health.skipped.items():
        reasons.setdefault(reason, []).append(name)
    found = [(each.kind, each.rule, len(each.details), list(each.details.items())[:FOUND]) for each in health.findings]
    coverage = f"{health.read:,} of {counted(health.tensors, 'tensor')} read."
    return {"coverage": coverage, "found": found, "skipped": list(reasons.items())}
