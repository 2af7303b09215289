"""Reports and errors as lines of text, for a terminal or for a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import partialmethod
from textwrap import wrap
from typing import Any
from unicodedata import combining, east_asian_width

from ckptool.commands import VERBS
from ckptool.errors import COLOURS, CkptoolError, Command, escaped, in_python, printable
from ckptool.facts import Marked, Note, Report, Table, Told, Verbatim, dataclass

_VERBS = "|".join(dict.fromkeys(verb.partition(" ")[0] for verb in VERBS))
_COMMAND = re.compile(rf"ckptool (?:{_VERBS}) ")
_UNIT = r"(?: (?:[kMGT]?B|\[[\d, ]{,30}\])[;:,.)]*(?= |$))?"  # stays with its number, and a shape with its type
_ARGUMENTS = r"(?:'[^']*'|[,;](?! )|[^,;'])*[,;]?"  # up to a comma or semicolon of the sentence; a command is cyan, too
_WORDS = re.compile(rf" *(?:\x1b\[36m[a-z-][^\x1b]*\x1b\[0m|{_COMMAND.pattern}{_ARGUMENTS}|[^ ]+{_UNIT})")


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
            if columns(visible) <= self.width or _COMMAND.match(start):
                lines.append(line)
                continue
            hang, used = " " * min(len(visible) - len(start) + HANG, self.width // 2), 0
            lines.append("")
            for word in _WORDS.findall(line):
                length = columns(COLOURS.sub("", word))
                if used and used + length > self.width:
                    lines.append("")
                    word = hang + word.lstrip(" ")
                    used, length = 0, columns(COLOURS.sub("", word))
                lines[-1] += word
                used += length
        return "\n".join(lines)


PLAIN, PYTHON = Style(), Style(python=True)
HANG = 4  # columns by which what goes on below is indented
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


def cut(text: str, room: int) -> str:
    """The beginning and the end of a text, as far as there is room."""
    text = printable(text)
    letters = max(room // 2, room - columns(text) + len(text))  # a wide one takes two columns
    return text if columns(text) <= room else f"{text[: letters // 2]}…{text[1 - letters // 2 :]}"


def columns(text: str) -> int:
    """The columns of a terminal that a text takes: two for a wide letter or a picture, none for an accent by itself."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(sign) else 2 if east_asian_width(sign) in "WF" else 1 for sign in text)


def _table(table: Table, style: Style) -> Iterator[str]:
    """The rows as aligned lines, under the title. Where they are wider than the terminal, a long first cell has its own
    line, and a long last one goes on below itself; if that is not enough, every row is its first cell, and below it the
    others, which nothing cuts."""
    rows, omitted = table.cells()
    if not rows:
        return
    indent, title, heads = " " * table.indent, printable(table.title), list(map(printable, table.heads))
    shown = [[*map(style.spelled, row[:-1]), style.spelled(row[-1]).rstrip()] for row in rows]
    grid = [heads, *shown] if heads else shown
    measure = len if all("".join(cells).isascii() for cells in grid) else columns
    most, edge = table.hang or WIDEST, style.width or sys.maxsize
    widths = [max((n for n in map(measure, column) if n <= most), default=most) for column in zip(*grid, strict=True)]
    last, between = min(widths[-1], LAST), table.indent + sum(width + 2 for width in widths[1:-1]) + 2
    firsts, room = [measure(cells[0]) for cells in grid], edge - between - last
    is_narrow = not table.hang and len(widths) > 1 and FIRST <= room < max(firsts)
    widths[0] = max((n for n in firsts if n <= room), default=0) if is_narrow else widths[0]
    split, splits = list[tuple[Sequence[str], list[str]]](), is_narrow or (table.hang and widths[0] <= room)
    for row, texts in zip(rows, shown, strict=True):
        is_long = splits and measure(texts[0]) > widths[0]
        is_long = is_long and (is_narrow or measure(texts[0] + texts[-1]) + between > edge)
        split += [(row[:1], texts[:1]), (("", *row[1:]), ["", *texts[1:]])] if is_long else [(row, texts)]

    def aligned(row: Sequence[str], texts: Sequence[str]) -> str:
        cells = []
        for number, (cell, text, width) in enumerate(zip(row, texts, widths, strict=False)):
            blanks, mark = " " * (width - measure(text)), getattr(cell, "mark", "")
            marked = getattr(style, mark)(text) if mark else text  # the blanks do not stand out
            cells.append(blanks + marked if number in table.right else marked + blanks)
        return (indent + "  ".join(cells)).rstrip()

    head, lines = aligned(heads, heads), [aligned(*pair) for pair in split]
    ends = [measure(COLOURS.sub("", line)) for line in lines]
    starts = [end - measure(texts[-1]) for end, (_, texts) in zip(ends, split, strict=True)]
    is_wide = not table.hang and max(columns(head), *ends) > edge and max(starts) > edge - last
    named = {n for n, name in enumerate(heads) if n in table.right or " " in name}  # texts say what they are
    if title and not is_wide and head[: len(title)].isspace():
        yield style.bold(title) + style.dim(head[len(title) :])
    else:
        yield from [style.bold(title)] if title else []
        yield from [style.dim(head)] if heads and not is_wide else []
    for (row, texts), line, start, end in zip(split, lines, starts, ends, strict=True):
        if is_wide:
            yield indent + _marked(row[0], style)
            facts = [f"{heads[n]} {text}" if n in named else text for n, text in enumerate(texts) if n and text]
            yield from [f"{indent}    {', '.join(facts)}"] if facts else []
        elif end <= edge or start > edge - last or len(row) == 1:
            yield line
        else:
            continued = wrap(texts[-1], edge - start, break_long_words=False, break_on_hyphens=False)
            if max(map(columns, continued)) > edge - start:  # a name that has no room there
                start = table.indent + 2 * HANG
                continued = ["", *wrap(texts[-1], edge - start, break_long_words=False, break_on_hyphens=False)]
            yield aligned(row, [*texts[:-1], continued[0]])
            mark = getattr(row[-1], "mark", "")
            yield from (" " * start + _marked(Marked(part, mark), style) for part in continued[1:])
    yield from [style.spelled(table.more.format(f"{omitted:,}"))] if omitted else []
