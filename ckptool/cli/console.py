"""Where the program meets the terminal: stdout is the answer, stderr everything else."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from ckptool.errors import FileProblem
from ckptool.render.style import Style

# For streams that cannot say them.
_ASCII = (
    {"→": "->", "…": "...", "–": "-", "×": "x", "≤": "<=", "█": "#"}
    | dict.fromkeys("▏▎▍", "")
    | dict.fromkeys("▌▋▊▉", "#")
)


class LostAnswer(FileProblem):
    """Standard output takes no more."""


def style_of(stream: TextIO) -> Style:
    """Colour and width where the stream is a terminal. `NO_COLOR` wins over `FORCE_COLOR`, which wins over what the stream is."""
    terminal = stream.isatty()
    colour = terminal and os.environ.get("TERM") != "dumb"
    if os.environ.get("FORCE_COLOR"):
        colour = True
    if os.environ.get("NO_COLOR"):
        colour = False
    return Style(colour, _width(stream) if terminal else None)


def _width(stream: TextIO) -> int | None:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return 80


def say(text: str) -> None:
    """Writes a piece of the answer. Where nobody reads on (`| head`), it goes nowhere: the work and the exit code stay what they are.

    Raises `LostAnswer` where it cannot be written for another reason.
    """
    try:
        _write(sys.stdout, text)
    except (BrokenPipeError, ConnectionResetError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except OSError as error:
        raise lost_answer(error) from error


def lost_answer(error: OSError) -> LostAnswer:
    """The error for what standard output did not take."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return LostAnswer(
        f"cannot write to standard output: {reason}", "What was printed is not complete; files that were written are."
    )


def tell(text: str) -> None:
    """Writes what is no part of the answer: errors, hints, progress. Nothing fails because nobody can read them."""
    with suppress(OSError):
        _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        text = "".join(_ASCII.get(c, c) for c in text).encode("ascii", "backslashreplace").decode()
    stream.write(text)
    stream.flush()
