"""HTML for notebooks: a plain table, no scripts, at home in light and dark, of bounded size whatever it is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ckptool.checkpoint.registry import Report, provides

LIMIT = 30_000  # bytes of a page: a notebook keeps each that it shows
CELL = "text-align:left;padding:0 1em 0 0;vertical-align:top;white-space:pre"
BAR = "display:inline-block;height:0.7em;background:currentColor;opacity:0.4"


def bar_html(part: int, whole: int) -> str:
    """A bar as long as `part` is of `whole`."""
    width = round(8 * part / whole, 2) if whole else 0
    return f'<span style="{BAR};width:{width}em"></span>' if width else ""


def page_html(title: str, facts: str, rows: Iterable[Sequence[str]], rest: str = "") -> str:
    """A report: a title with facts, a table whose cells are HTML, and lines of text below it, as far as they fit."""
    head = f"<b>{escape(_cut(title, 1_000))}</b>{escape(_cut(facts, 1_000))}" if title or facts else ""
    body = ["".join(f'<td style="{CELL}">{cell}</td>' for cell in row) for row in rows]
    table = fitting([f"<tr>{row}</tr>" for row in body], LIMIT // 2, "<tr><td>… and {} more</td></tr>")
    below = fitting([escape(_cut(line, 2_000)) + "\n" for line in rest.splitlines()], LIMIT // 3, "… and {} more lines")
    return (
        f'<div style="overflow-x:auto">{head}'
        + (table and f"<table>{table}</table>")
        + (below and f'<pre style="margin:0.5em 0 0">{below}</pre>')
        + "</div>"
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def fitting(pieces: Sequence[str], room: int, rest: str) -> str:
    """As many pieces as have room, and how many were left out."""
    kept = 0
    for piece in pieces:
        room -= len(piece.encode())
        if room < 0:
            break
        kept += 1
    left = len(pieces) - kept
    return "".join(pieces[:kept]) + (rest.format(f"{left:,}") if left else "")


@provides("html", Report)
def report_html(report: Report) -> str:
    """A report without a table of its own: its text, whose first line is its title unless it is a row already."""
    text = str(report)
    title, _, rest = text.partition("\n")
    return page_html("", "", (), text) if "  " in title else page_html(title, "", (), rest.strip("\n"))
