"""Reports as text: the lines that each tells, for a terminal or for a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from ckptool.errors import printable, quoted
from ckptool.facts import Marked, Note, Report, Table, Told, Verbatim
from ckptool.render.style import PLAIN, WIDEST, Style, columns


def text(report: Report, *, style: Style = PLAIN, **view: Any) -> str:
    """What a report tells, in lines.  view: options of its `told`."""
    return "".join(f"{line}\n" for line in lines(report.told(**view), style))


def lines(told: Told, style: Style = PLAIN) -> Iterator[str]:
    """The lines of what is told, escaped; an empty one only between two others."""
    gap, begun = False, False
    for line in _every(told, style):
        if line is not None:
            yield from [""] if gap and begun else []
            yield line
            begun = True
        gap = line is None


def _every(told: Told, style: Style) -> Iterator[str | None]:
    """Every line; None for an empty one between others."""
    for part in told:
        if isinstance(part, Verbatim):
            yield from map(printable, part.split("\n"))
        elif isinstance(part, str):
            yield _marked(part, style) or None
        elif isinstance(part, Table):
            yield from _table(part, style)
        elif isinstance(part, Note):
            yield f"{style.yellow(part.code)}: {part.message}"
            yield from [f"  {style.cyan(' '.join(map(quoted, part.fix)))}"] if part.fix else []
        elif callable(part):
            yield from _every(part(style.width), style)
        else:
            yield "".join(_marked(piece, style) for piece in part).rstrip() or None


def _marked(piece: str, style: Style) -> str:
    mark, text = getattr(piece, "mark", ""), printable(piece)
    return str(getattr(style, mark)(text)) if mark else text


def _table(table: Table, style: Style) -> Iterator[str]:
    """The rows as aligned lines, under the title. Where they are wider than the terminal: each row as its first cell,
    and below it the others, which nothing cuts."""
    rows, right, left = table.cells()
    if not rows:
        return
    shown = [[printable(cell) for cell in row] for row in rows]
    headed = [list(table.heads), *shown] if table.heads else shown
    aligned = columns(headed, right, " " * table.indent, widest=table.hang or WIDEST)
    title = printable(table.title)
    if table.hang:
        yield from [style.bold(title)] if title else []
        for row, texts, line in zip(rows, shown, aligned, strict=True):
            yield from _hanging(row, line, len(line) - len(texts[-1].rstrip()), style)
    elif style.width is not None and any(len(line) > style.width for line in aligned):
        yield from [style.bold(title)] if title else []
        heads = table.heads[1:] or [""] * max(map(len, shown))
        for row, texts in zip(rows, shown, strict=True):
            yield " " * table.indent + _marked(row[0], style)
            facts = [f"{head} {cell}".strip() for head, cell in zip(heads, texts[1:], strict=False) if cell]
            yield from [" " * (table.indent + 4) + ", ".join(facts)] if facts else []
    else:
        if table.heads:
            head = aligned.pop(0)
            fits = title and head[: len(title)].isspace()
            yield from [style.bold(title)] if title and not fits else []
            yield style.bold(title) + style.dim(head[len(title) :]) if fits else style.dim(head)
        elif title:
            yield style.bold(title)
        yield from (_coloured(row, line, style) for row, line in zip(rows, aligned, strict=True))
    yield from [table.more.format(f"{left:,}")] if left else []


def _hanging(row: Sequence[str], line: str, used: int, style: Style) -> Iterator[str]:
    """A line whose last cell begins after `used` columns, and goes on there where it is too long."""
    last = [line[used:]]
    if style.width is not None and len(line) > style.width and used <= style.width - 20:
        last = wrap(last[0], style.width - used, break_long_words=False, break_on_hyphens=False)
    mark = getattr(row[-1], "mark", "")
    for number, text in enumerate(last):
        before = _coloured(row[:-1], line[:used], style) if number == 0 else " " * used
        yield before + _marked(Marked(text, mark), style)


def _coloured(row: Sequence[str], line: str, style: Style) -> str:
    """A line of a table, whose cells stand out as they are marked."""
    if not style.colour:
        return line
    at = 0
    for cell in row:
        text = printable(cell)
        text = text if text in line[at:] else text.rstrip(" ")  # the end of a line has no blanks
        at = line.index(text, at)
        marked = _marked(Marked(text, getattr(cell, "mark", "")), style)
        line = line[:at] + marked + line[at + len(text) :]
        at += len(marked)
    return line
