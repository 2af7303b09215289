"""Reports and errors as lines of text, for a terminal or for a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import partialmethod
from textwrap import wrap
from typing import Any

from ckptool.commands import VERBS
from ckptool.errors import COLOURS, CkptoolError, Command, escaped, in_python, printable
from ckptool.facts import Marked, Note, Report, Table, Told, Verbatim, dataclass

_VERBS = "|".join(dict.fromkeys(verb.partition(" ")[0] for verb in VERBS))
_COMMAND = re.compile(rf"ckptool (?:{_VERBS}) ")
_WORDS = re.compile(rf" *(?:\x1b\[36m[a-z-][^\x1b]*\x1b\[0m|{_COMMAND.pattern}.*|[^ ]+)")  # a command is cyan


@dataclass(frozen=True, slots=True)
class Style:
    """colour: ANSI colours are wanted.  width: columns of the terminal; None for lines of any length.
    python: for people who write Python: options are called as the arguments that they are there."""

    colour: bool = False
    width: int | None = None
    python: bool = False

    def spelled(self, text: str | Command) -> str:
        """A text, escaped, in which commands and options are spelled as its readers type them."""
        return in_python(escaped(text)) if self.python else str(escaped(text))

    def _marked(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text

    bold = partialmethod(_marked, "1")
    dim = partialmethod(_marked, "2")
    red = partialmethod(_marked, "1;31")
    green = partialmethod(_marked, "1;32")
    yellow = partialmethod(_marked, "33")
    blue = partialmethod(_marked, "34")
    cyan = partialmethod(_marked, "36")

    def page(self, text: str) -> str:
        """Text in lines as wide as the terminal: what is longer goes on below, between words; commands stay whole."""
        if self.width is None:
            return text
        lines: list[str] = []
        for line in text.split("\n"):
            visible = COLOURS.sub("", line)
            start = visible.lstrip(" ")
            if len(visible) <= self.width or _COMMAND.match(start):
                lines.append(line)
                continue
            hang, used = " " * min(len(visible) - len(start) + 4, self.width // 2), 0
            lines.append("")
            for word in _WORDS.findall(line):
                length = len(COLOURS.sub("", word))
                if used and used + length > self.width:
                    lines.append("")
                    word = hang + word.lstrip(" ")
                    used, length = 0, len(COLOURS.sub("", word))
                lines[-1] += word
                used += length
        return "\n".join(lines)


PLAIN, PYTHON = Style(), Style(python=True)
FIRST, LAST = 12, 20  # columns for the first and the last cell of a row, at least
WIDEST = 72  # column: few very long cells stand out


def text(report: Report, *, style: Style = PLAIN, **view: Any) -> str:
    """The text of a report, in lines.  view: options of its `told`."""
    return "".join(f"{line}\n" for line in lines(report.told(**view), style))


def error_text(error: CkptoolError, style: Style = PLAIN) -> str:
    """The three parts of an error, a line each: what happened, what it means, what to type."""
    lines = [f"{style.red(f'error[{error.code}]')}: {error.what}"]
    lines += [f"  {line}" for line in error.why.split("\n")] if error.why else []
    lines += [f"  {style.cyan(error.fix)}"] if error.fix else []
    return style.page("\n".join(lines) + "\n")


def lines(parts: Told, style: Style = PLAIN) -> Iterator[str]:
    """The lines of a report, escaped; an empty one only between two others."""
    gap, is_begun = False, False
    for line in _all_lines(parts, style):
        if line is not None:
            yield from [""] if gap and is_begun else []
            yield line
            is_begun = True
        gap = line is None


def _all_lines(parts: Told, style: Style) -> Iterator[str | None]:
    """Every line; None for an empty one between others."""
    for part in parts:
        if isinstance(part, Verbatim):
            yield from map(printable, part.split("\n"))
        elif isinstance(part, str):
            yield _marked(part, style) or None
        elif isinstance(part, Table):
            yield from _table(part, style)
        elif isinstance(part, Note):
            yield f"{style.yellow(part.code)}: {style.spelled(part.message)}"
            fix = part.fix if isinstance(part.fix, Command) else Command(part.fix)
            yield from [f"  {style.cyan(style.spelled(fix))}"] if fix else []
        elif callable(part):
            yield from _all_lines(part(style.width), style)
        elif part is not None:
            yield "".join(_marked(piece, style) for piece in part).rstrip() or None


def _marked(piece: str, style: Style) -> str:
    mark, text = getattr(piece, "mark", ""), style.spelled(piece)
    return str(getattr(style, mark)(text)) if mark else text


def _table(table: Table, style: Style) -> Iterator[str]:
    """The rows as aligned lines, under the title. Where they are wider than the terminal, a long first cell has its own
    line, and a long last one goes on below itself; if that is not enough, every row is its first cell, and below it the
    others, which nothing cuts."""
    rows, omitted = table.cells()
    if not rows:
        return
    indent, title = " " * table.indent, printable(table.title)
    heads, *shown = [[printable(cell) for cell in row] for row in (table.heads, *rows)]
    grid = [heads, *shown] if heads else shown
    widths = [min(max(map(len, column)), table.hang or WIDEST) for column in zip(*grid, strict=True)]
    last, between = min(widths[-1], LAST), table.indent + sum(width + 2 for width in widths[1:-1]) + 2
    room = (style.width or sys.maxsize) - between - last
    if not table.hang and len(widths) > 2 and FIRST <= room < widths[0]:
        widths[0] = max((len(cells[0]) for cells in grid if len(cells[0]) <= room), default=0)
        split = list[tuple[Sequence[str], list[str]]]()
        for row, texts in zip(rows, shown, strict=True):
            is_long = len(texts[0]) > widths[0]
            split += [(row[:1], texts[:1]), (("", *row[1:]), ["", *texts[1:]])] if is_long else [(row, texts)]
        rows, shown = [row for row, _ in split], [texts for _, texts in split]
        grid = [heads, *shown] if heads else shown
    signs = [f"{'>' if number in table.right else '<'}{width}" for number, width in enumerate(widths)]
    cells = [[f"{cell:{sign}}" for cell, sign in zip(row, signs, strict=False)] for row in grid]

    def joined(cells: Sequence[str]) -> str:
        return (indent + "  ".join(cells)).rstrip()

    head = joined(cells.pop(0)) if heads else ""
    aligned = list(map(joined, cells))
    is_wide = not table.hang and style.width is not None and max(map(len, (head, *aligned))) > style.width
    last_start = max(len(line) - len(texts[-1].rstrip()) for texts, line in zip(shown, aligned, strict=True))
    is_wide = is_wide and last_start > (style.width or 0) - last
    if title and not is_wide and head[: len(title)].isspace():
        yield style.bold(title) + style.dim(head[len(title) :])
    else:
        yield from [style.bold(title)] if title else []
        yield from [style.dim(head)] if heads and not is_wide else []
    for row, texts, row_cells, line in zip(rows, shown, cells, aligned, strict=True):
        if is_wide:
            yield indent + _marked(row[0], style)
            pairs = zip(heads[1:] or [""] * len(texts), texts[1:], strict=False)
            facts = [f"{name} {text}".strip() for name, text in pairs if text]
            yield from [f"{indent}    {', '.join(facts)}"] if facts else []
            continue
        texts[-1] = texts[-1].rstrip()  # as the line is
        coloured = list(row_cells)
        for number, (cell, text, padded) in enumerate(zip(row, texts, row_cells, strict=True)) if style.colour else ():
            before, _, after = padded.partition(text) if text else ("", "", padded)  # the blanks do not stand out
            coloured[number] = before + _marked(Marked(text, getattr(cell, "mark", "")), style) + after
        used = len(line) - len(texts[-1])
        if style.width is not None and len(line) > style.width and used <= style.width - last:
            first, *continued = wrap(line[used:], style.width - used, break_long_words=False, break_on_hyphens=False)
            mark = getattr(row[-1], "mark", "")
            yield joined([*coloured[:-1], _marked(Marked(first, mark), style)])
            yield from (" " * used + _marked(Marked(part, mark), style) for part in continued)
        else:
            yield joined(coloured)
    yield from [style.spelled(table.more.format(f"{omitted:,}"))] if omitted else []
