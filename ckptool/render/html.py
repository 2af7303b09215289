"""HTML for notebooks and Markdown for summaries of jobs: of bounded size; whatever a file calls things, it stays text.

The HTML is plain tables, without scripts, at home in light and dark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import printable
from ckptool.facts import Report, Table, Told, Verbatim, replace
from ckptool.render.lines import PYTHON, cut, lines

LIMIT = 30_000  # bytes of a page: a notebook keeps each that it shows
STYLE = "<style>.ckptool td{text-align:left;padding:0 1em 0 0;vertical-align:top;white-space:pre}</style>"
WRAPPED, LONG = ' style="white-space:pre-wrap;overflow-wrap:anywhere"', 60  # letters of a name
MARKDOWN_LIMIT = 60_000  # characters: a summary on GitHub has room for sixteen, a comment for one


def fitting(pieces: Sequence[str], room: int, remainder: str) -> str:
    """As many pieces as fit, and how many were left out."""
    count = 0
    for piece in pieces:
        room -= len(piece.encode())
        if room < 0:
            break
        count += 1
    omitted = len(pieces) - count
    return "".join(pieces[:count]) + (remainder.format(f"{omitted:,}") if omitted else "")


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """An opened checkpoint: its parts and an outline of their tensors."""
    from ckptool.analysis.inspect import listing

    return report_html(replace(listing(checkpoint), notes=()))


def report_html(report: Report) -> str:
    """A report: its first line as a title, its tables, and its other lines, as far as they fit."""
    pieces: list[str] = []
    pending: list[Any] = []

    def end_lines() -> None:
        text = "".join(f"{escape(cut(line, 2_000))}\n" for line in lines(pending, PYTHON))
        pieces.extend([f'<pre style="margin:0.5em 0 0">{text}</pre>'] if text else [])
        pending.clear()

    for number, part in enumerate(_parts(report.told())):
        if number == 0 and isinstance(part, (str, tuple)) and not isinstance(part, Verbatim):
            pieces.append(f"<b>{escape(cut(next(lines([part], PYTHON), ''), 1_000))}</b>")
        elif isinstance(part, Table) and part.rows:
            end_lines()
            pieces += _table(part)
        else:
            pending.append(part)
    end_lines()
    return f'<div class="ckptool" style="overflow-x:auto">{STYLE}{fitting(pieces, LIMIT, "… and more")}</div>'


def _parts(parts: Told) -> Iterator[Any]:
    for part in parts:
        if callable(part):
            yield from _parts(part(None))
        elif part is not None:
            yield part


def _table(table: Table) -> Iterator[str]:
    rows, omitted = table.cells()
    title = f'<caption style="text-align:left;white-space:nowrap"><b>{escape(cut(table.title, 1_000))}</b></caption>'
    shown = [[printable(cell) for cell in row] for row in ([table.heads, *rows] if table.heads else rows)]
    cells = ["".join(f"<td{WRAPPED * (len(c) > LONG)}>{escape(cut(c, 1_000))}</td>" for c in row) for row in shown]
    footer = f'<td colspan="{len(shown[0])}">{escape(PYTHON.spelled(table.more.format(f"{omitted:,}")).strip())}</td>'
    body = [f"<tr>{row}</tr>" for row in [*cells, *([footer] if omitted else [])]]
    lines = fitting(body, LIMIT // 2, "<tr><td>… and {} more</td></tr>")
    yield f"<table>{title if table.title else ''}{lines}</table>"


def markdown(text: str) -> str:
    """The plain text of an answer: its first line as a heading, what follows in a block of its own, as far as it fits.
    Both are code to Markdown, between more backticks than the text has in a row: nothing in it ends them."""
    title, _, rest = text.strip("\n").partition("\n")
    ticks = _ticks(title, least=1)
    heading = f"#### {ticks} {title} {ticks}\n" if title else ""
    body = fitting([f"{line}\n" for line in rest.strip("\n").split("\n")], MARKDOWN_LIMIT, "… and {} more lines\n")
    fence = _ticks(body, least=3)
    return f"{heading}\n{fence}text\n{body}{fence}\n" if rest else heading


def _ticks(text: str, least: int) -> str:
    """More backticks than stand in a row anywhere in the text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))
