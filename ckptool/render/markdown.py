"""Answers as Markdown, for the summaries of jobs: whatever a file calls things, it stays text."""

from __future__ import annotations

import re

from ckptool.render.html import fitting

LIMIT = 60_000  # characters: a summary on GitHub has room for sixteen, a comment for one


def markdown(text: str) -> str:
    """The plain text of an answer: its first line as a heading, what follows in a block of its own, as far as it fits.

    Both are code to Markdown, between more backticks than the text has in a row: nothing in it ends them.
    """
    title, _, rest = text.strip("\n").partition("\n")
    ticks = _ticks(title, least=1)
    heading = f"#### {ticks} {title} {ticks}\n" if title else ""
    body = fitting([f"{line}\n" for line in rest.strip("\n").split("\n")], LIMIT, "… and {} more lines\n")
    fence = _ticks(body, least=3)
    return f"{heading}\n{fence}text\n{body}{fence}\n" if rest else heading


def _ticks(text: str, least: int) -> str:
    """More backticks than stand in a row anywhere in the text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))
