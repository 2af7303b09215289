"""The style of text: colours, width, sizes and counts for people, columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ckptool.checkpoint import Note
from ckptool.errors import quoted

WIDEST = 72  # column


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_COMMAND = re.compile(r"ckptool [a-z-]+ ")
_WORDS = re.compile(r" *(?:ckptool [a-z-]+ .*|[^ ]+)")


@dataclass(frozen=True, slots=True)
class Style:
    """colour: ANSI colours are wanted.  width: columns of the terminal; None for lines of any length."""

    colour: bool = False
    width: int | None = None

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text

    def bold(self, text: str) -> str:
        return self._wrap("1", text)

    def dim(self, text: str) -> str:
        return self._wrap("2", text)

    def red(self, text: str) -> str:
        return self._wrap("1;31", text)

    def green(self, text: str) -> str:
        return self._wrap("1;32", text)

    def yellow(self, text: str) -> str:
        return self._wrap("33", text)

    def blue(self, text: str) -> str:
        return self._wrap("34", text)

    def cyan(self, text: str) -> str:
        return self._wrap("36", text)

    def prose(self, text: str, indent: str = "  ") -> list[str]:
        """A sentence in lines as wide as the terminal, cut between words only; those after the first are indented."""
        if self.width is None or len(text) <= self.width:
            return [text]
        return textwrap.wrap(
            text,
            max(self.width, 20),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )

    def table(self, rows: Sequence[Sequence[str]], right: Sequence[int] = (), title: str = "") -> list[str]:
        """Rows as aligned lines, under a title with the first row as heads where there is one.

        Where they are wider than the terminal: each row as its first cell, and below it the others, which nothing cuts.
        """
        lines = columns(rows, right)
        head = rows[0] if title else [""] * max(map(len, rows), default=0)
        if self.width is not None and any(len(line) > self.width for line in lines):
            lines = [] if not title else [title]
            for row in rows[1:] if title else rows:
                facts = [f"{name} {cell}".strip() for name, cell in zip(head[1:], row[1:], strict=True) if cell]
                lines += self.prose(f"  {row[0]}", "    ")
                lines += self.prose(f"      {', '.join(facts)}", " " * 6) if facts else []
            return [self.bold(lines[0]), *lines[1:]] if title else lines
        if title and lines[0][: len(title)].isspace():
            lines[0] = self.bold(title) + self.dim(lines[0][len(title) :])
        elif title:
            lines.insert(0, self.bold(title))
        return lines

    def page(self, text: str) -> str:
        """Text in lines as wide as the terminal: what is longer goes on below, between words; commands stay whole."""
        if self.width is None:
            return text
        return "\n".join(part for line in text.split("\n") for part in self._broken(line))

    def _broken(self, line: str) -> list[str]:
        width, seen = self.width or 0, _COLOURS.sub("", line)
        start = seen.lstrip(" ")
        if len(seen) <= width or _COMMAND.match(start):
            return [line]
        hang = " " * min(len(seen) - len(start) + 4, width // 2)
        lines, used = [""], 0
        for word in _WORDS.findall(line):
            length = len(_COLOURS.sub("", word))
            if used and used + length > width:
                lines.append("")
                word = hang + word.lstrip(" ")
                used, length = 0, len(_COLOURS.sub("", word))
            lines[-1] += word
            used += length
        return lines

    def fit(self, text: str, used: int = 0) -> str:
        """The text, cut to what is left of the line after `used` columns."""
        if self.width is None or used + len(text) <= self.width:
            return text
        return text[: max(self.width - used - 1, 0)] + "…"


PLAIN = Style()


def columns(
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    indent: str = "  ",
    gap: str = "  ",
    widest: int = WIDEST,
) -> list[str]:
    """Rows of plain cells as aligned lines; the columns in `right` to the right. Few very long cells stand out."""
    widths = [min(max(map(len, column)), widest) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + gap.join(cells)).rstrip())
    return lines


WHOLE = "(the whole file)"


def notes_text(notes: Sequence[Note], style: Style = PLAIN) -> str:
    """Notes with their codes, and the command that fixes each, ready to paste."""
    lines = []
    for note in notes:
        first, *rest = style.prose(f"{note.code}: {note.message}")
        lines += [style.yellow(note.code) + first.removeprefix(note.code), *rest]
        if note.fix:
            lines.append(f"  {style.cyan(' '.join(map(quoted, note.fix)))}")
    return "\n".join(lines)
