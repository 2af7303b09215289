"""HTML for notebooks and Markdown for summaries of jobs: of bounded size; whatever a file calls things, it stays text.

The HTML is text in a block, without scripts, at home in light and dark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from ckptool.checkpoint import Checkpoint
from ckptool.facts import Report
from ckptool.render.lines import PYTHON, lines

LIMIT = 29_800  # bytes of a text: a notebook keeps each that it shows
MARKDOWN_LIMIT = 60_000  # characters: a summary on GitHub has room for sixteen, a comment for one


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


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """An opened checkpoint: its parts and an outline of their tensors."""
    from ckptool.analysis.inspect import listing

    return report_html(replace(listing(checkpoint), notes=()))


def report_html(report: Report) -> str:
    """A report: its lines in a block of their own, the first as a title, as far as they fit."""
    shown = [f"{escape(_cut(line, 2_000))}\n" for line in lines(report.told(), PYTHON)]
    shown[:1] = [f"<b>{line}</b>" for line in shown[:1]]
    text = fitting(shown, LIMIT, "… and {} more lines")
    return f'<div style="overflow-x:auto"><pre style="margin:0">{text}</pre></div>'


def markdown(text: str) -> str:
    """The plain text of an answer: its first line as a heading, what follows in a block of its own, as far as it fits.

    Both are code to Markdown, between more backticks than the text has in a row: nothing in it ends them.
    """
    title, _, rest = text.strip("\n").partition("\n")
    ticks = _ticks(title, least=1)
    heading = f"#### {ticks} {title} {ticks}\n" if title else ""
    body = fitting([f"{line}\n" for line in rest.strip("\n").split("\n")], MARKDOWN_LIMIT, "… and {} more lines\n")
    fence = _ticks(body, least=3)
    return f"{heading}\n{fence}text\n{body}{fence}\n" if rest else heading


def _ticks(text: str, least: int) -> str:
    """More backticks than stand in a row anywhere in the text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))
