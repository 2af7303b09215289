"""The style of text: colours, width, columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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
    rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ", gap: str = "  ", widest: int = WIDEST
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
