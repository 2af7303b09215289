"""The style of text: colours and width."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partialmethod

from ckptool.errors import Command, escaped, in_python

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_COMMAND = re.compile(r"ckptool [a-z-]+ ")
_WORDS = re.compile(r" *(?:ckptool [a-z-]+ .*|[^ ]+)")


@dataclass(frozen=True, slots=True)
class Style:
    """colour: ANSI colours are wanted.  width: columns of the terminal; None for lines of any length.

    python: for people who write Python: options are called as the arguments that they are there.
    """

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


PLAIN, PYTHON = Style(), Style(python=True)
