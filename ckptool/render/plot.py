"""Renders the history of a run: curves in braille for a terminal, as SVG for a notebook, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ckptool.analysis.plot import Curve, RunHistory, column
from ckptool.checkpoint.registry import provides
from ckptool.errors import counted, printable
from ckptool.facts import number
from ckptool.render.html import page_html
from ckptool.render.json import document
from ckptool.render.style import PLAIN, Style, columns

WIDTH, HEIGHT = 80, 6  # characters
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # of a braille character, from below


@provides("text", RunHistory)
def plot_text(found: RunHistory, *, style: Style = PLAIN) -> str:
    """Each curve above an axis with what happened on the way, and the meaning of its letters."""
    first, last = found.span
    step = "" if found.step is None else f" at step {found.step:,}"
    lines = style.prose(f"{style.bold(printable(found.path))}: " + (f"{found.event}{step}" or "nothing recorded yet"))
    if not found.curves:
        return "\n".join([*lines, "", "  nothing was logged yet"]) + "\n"
    margin = max(len(number(end)) for curve in found.curves.values() for end in _ends(curve)) + 2
    width = max((style.width or WIDTH) - margin - 2, 10)
    for name, curve in found.curves.items():
        lines += ["", *style.prose(f"{style.bold(printable(name))}  {_facts(curve)}")]
        low, high = _ends(curve)
        rows = _braille(curve, first, last, width, HEIGHT if low != high else 1)
        labels = [number(high), *[""] * (len(rows) - 2), number(low)][-len(rows) :]
        for label, text in zip(labels, rows, strict=True):
            lines.append(f"{label:>{margin}} {'┤' if label else '│'}{style.cyan(text)}".rstrip())
        lines.append(f"{'':{margin}} └{_axis(found, curve, width)}")
    lines.append(f"{'':{margin + 2}}{first:,}{last:>{width - len(f'{first:,}')},}")
    lines += ["", *columns(list(_legend(found)))] if any(_legend(found)) else []
    lines += [f"  not drawn: {counted(found.left_out, 'more curve')}"] if found.left_out else []
    return "\n".join(lines) + "\n"


def _ends(curve: Curve) -> tuple[float | None, float | None]:
    values = [value for _, value in curve.finite]
    return min(values, default=None), max(values, default=None)


def _facts(curve: Curve) -> str:
    low, high = _ends(curve)
    where = {value: step for step, value in reversed(curve.finite)}
    facts = [f"last {number(curve.values[-1])}"]
    if low is not None and high is not None and low < high:
        facts += [f"min {number(low)} at {where[low]:,}", f"max {number(high)} at {where[high]:,}"]
    facts += [counted(curve.points, "point")]
    if curve.not_finite:
        facts += [f"{curve.not_finite:,} of them NaN or infinite, the first at {curve.odd_steps[0]:,}"]
    return ", ".join(facts)


def _braille(curve: Curve, first: int, last: int, width: int, lines: int) -> list[str]:
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


def _axis(found: RunHistory, curve: Curve, width: int) -> str:
    marks = ["─"] * width
    events = (("s", found.saves), ("x", found.stops), ("d", found.done), ("r", found.resumes), ("k", found.kills))
    for letter, steps in (*events, ("!", curve.odd_steps)):
        for step in steps:
            marks[column(step, *found.span, width)] = letter
    return "".join(marks)


def _legend(found: RunHistory) -> Iterator[tuple[str, str]]:
    for letter, word, steps in (
        ("s", "saved", found.saves),
        ("r", "resumed", [step for step in found.resumes if step not in found.kills]),
        ("k", "killed, then restarted", found.kills),
        ("x", "stopped or failed", found.stops),
        ("d", "done", found.done),
        ("!", "NaN or infinite", sorted({step for curve in found.curves.values() for step in curve.odd_steps})),
    ):
        if steps:
            yield (
                letter,
                f"{word} at {steps[0]:,}" + (f" and {len(steps) - 1:,} more, up to {steps[-1]:,}" * (len(steps) > 1)),
            )


document(RunHistory, "plot", "path curves saves resumes kills stops event step left_out")


@provides("html", RunHistory)
def plot_html(found: RunHistory) -> str:
    """A curve in each row, as SVG."""
    width = min(240, max(20, 14_000 // max(len(found.curves), 1) // 16 - 40))
    rows = [
        (escape(printable(name)[:200]), _svg(curve, *found.span, width), escape(_facts(curve)))
        for name, curve in found.curves.items()
    ]
    legend = "\n".join(meaning for _, meaning in _legend(found))
    return page_html(printable(found.path), f" {found.event}", rows, legend)


def _svg(curve: Curve, first: int, last: int, width: int) -> str:
    lines = curve.pieces(first, last, width)
    drawn = "".join(
        "M" + "L".join(f"{at},{round(40 - 40 * height)}" for at, height in (line if len(line) > 1 else line * 2))
        for line in lines
    )
    path = f'<path d="{drawn}" fill="none" stroke="currentColor" stroke-linecap="round"/>'
    return f'<svg viewBox="-1 -1 {width + 2} 42" width="{2 * width}" height="84">{path}</svg>'
