"""A run's folder, as text and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ckptool.errors import counted, printable, quoted
from ckptool.render.json import Json, finite
from ckptool.render.style import PLAIN, Style, columns, size

if TYPE_CHECKING:
    from ckptool.reports.training import RunCheckpoint, RunReport


def run_text(found: RunReport, *, style: Style = PLAIN) -> str:
    """What happened to a run, where it goes on, and one line for each checkpoint."""
    total = size(sum(one.bytes for one in found.checkpoints))
    head = f"{style.bold(printable(found.path))}: a run, {counted(len(found.checkpoints), 'checkpoint')}, {total}"
    if found.damaged:
        head += f", {style.red(f'{found.damaged:,} damaged')}"
    lines = [head, f"  {_state(found)}"]
    if found.checkpoints:
        lines += ["", *_table(found, style)]
    return "\n".join(lines) + "\n"


def _state(found: RunReport) -> str:
    words = {
        "stop": "stopped",
        "start": "started",
        "save": "saved",
        "resume": "resumed",
        "prune": "pruned",
        "skip-damaged": "skipped",
    }
    event = printable(words.get(found.event, found.event) or "nothing happened yet")
    when = f" at step {found.step:,}" if found.step is not None else ""
    if not found.checkpoints:
        return f"{event}{when}"
    if found.event == "done" and found.resumes == found.step and found.step:
        length = f"train.epochs={2 * found.epochs}" if found.epochs else f"train.steps={2 * found.step}"
        return f"{event}{when}; make it longer: ckptool resume {quoted(found.path)} --set {length}"
    goes = "none of them is whole" if found.resumes is None else f"goes on from step {found.resumes:,}"
    return f"{event}{when}; {goes}: ckptool resume {quoted(found.path)}"


def _table(found: RunReport, style: Style) -> list[str]:
    metric = printable(found.metric)
    rows: list[tuple[str, ...]] = [("step", "epoch", "loss", metric, "size", "kept")]
    rows += [_row(one, found.metric) for one in found.checkpoints]
    head, *lines = columns(rows, right=(0, 1, 2, 3, 4))
    shown = zip(map(style.fit, lines), found.checkpoints, strict=True)
    return [style.dim(head), *(style.red(line) if one.problem else line for line, one in shown)]


def _row(one: RunCheckpoint, metric: str) -> tuple[str, ...]:
    value = one.metrics.get(metric)
    return (
        f"{one.step:,}",
        "" if one.epoch is None else f"{one.epoch:,}",
        "" if one.loss is None else f"{one.loss:.5g}",
        "" if value is None else f"{value:.5g}",
        size(one.bytes),
        printable(one.problem) if one.problem else ", ".join(one.kept) or "not: prune would delete it",
    )


# JSON ----------------------------------------------------------------------------------------------------------------


def run_json(found: RunReport) -> Json:
    """`ckptool.run/1`: a row for each checkpoint; sizes in bytes."""
    return {"schema": "ckptool.run/1", **finite(asdict(found))}
