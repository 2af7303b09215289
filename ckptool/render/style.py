"""How text looks: colours or none, as wide as the terminal or as long as it has to be; sizes and counts for people; columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

BAR = 12  # characters
WIDEST = 72  # column


@dataclass(frozen=True, slots=True)
class Style:
    """colour: ANSI colours are wanted.  width: columns of the terminal; None where lines may be as long as they have to be."""

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

    def fit(self, text: str, used: int = 0) -> str:
        """The text, cut to what is left of the line after `used` columns."""
        if self.width is None or used + len(text) <= self.width:
            return text
        return text[: max(self.width - used - 1, 0)] + "…"


PLAIN = Style()

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def size(nbytes: int) -> str:
    """Bytes for people, three digits: `44.7 MB` (10^6), `512 B`."""
    for unit, name in _UNITS:
        if nbytes >= unit * 0.9995:
            return f"{_three_digits(nbytes / unit)} {name}"
    return f"{nbytes} B"


def short(count: int) -> str:
    """A count for people: `950`, `78.2k`, `11.2M`."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit * 0.9995:
            return f"{_three_digits(count / unit)}{name}"
    return str(count)


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def bar(part: int, whole: int, width: int = BAR) -> str:
    """A bar as long as `part` is of `whole`, in eighths of a character."""
    eighths = round(part * width * 8 / whole) if whole else 0
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def number(value: float | int | None) -> str:
    """A number for people, five significant digits; `–` for none."""
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ", gap: str = "  ") -> list[str]:
    """Rows of plain cells as aligned lines; the columns in `right` are aligned to the right. Few very long cells stand out."""
    widths = [min(max(map(len, column)), WIDEST) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + gap.join(cells)).rstrip())
    return lines
