"""HTML for notebooks: a plain table, no scripts, at home in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

CELL = "text-align:left;padding:0 1em 0 0;vertical-align:top;white-space:pre"
BAR = "display:inline-block;height:0.7em;background:currentColor;opacity:0.4"


def bar_html(part: int, whole: int) -> str:
    """A bar as long as `part` is of `whole`."""
    width = round(8 * part / whole, 2) if whole else 0
    return f'<span style="{BAR};width:{width}em"></span>' if width else ""


def page_html(title: str, facts: str, rows: Iterable[Sequence[str]], rest: str = "") -> str:
    """A report: a title with facts, a table whose cells are HTML, and lines of text below it."""
    cells = ("".join(f'<td style="{CELL}">{cell}</td>' for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    below = f"<pre>{escape(rest)}</pre>" if rest else ""
    return f"<div><b>{escape(title)}</b>{escape(facts)}<table>{body}</table>{below}</div>"
