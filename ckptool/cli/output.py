"""What is printed: answers on standard output; errors, and how far the work is, on standard error; whatever was raised
in words."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple, TextIO, cast

from ckptool.checkpoint import progress
from ckptool.errors import CkptoolError, FileProblem, LimitExceeded, counted, printable
from ckptool.facts import bar, size
from ckptool.render import lines
from ckptool.render.lines import Style

FORM = ContextVar("form", default="text")  # of what the running command prints: text, json or markdown


class Answer(NamedTuple):
    """What is printed of a report: its text, or its facts for JSON.  exit_code: its meaning for the whole command."""

    content: Any
    exit_code: int = 0


def answer_of(report: Any, style: Style | None, view: Mapping[str, Any], exit_code: int) -> Answer:
    """The answer that prints a report. style: None for JSON.  view: the options of its printing."""
    if style is None:
        return Answer(report.to_dict(), exit_code)
    text = lines.text(report, style=style, **view)
    return Answer(text if view.get("quiet") else style.page(text), exit_code)  # quiet: a line is a name, spaces and all


class LostAnswer(FileProblem):
    """Standard output cannot be written."""


def style_of(stream: TextIO) -> Style:
    """Colour and width where the stream is a terminal. `NO_COLOR` wins over `FORCE_COLOR`, which wins over what the
    stream is; Markdown has neither."""
    if stream is sys.stdout and FORM.get() == "markdown":
        return Style()
    terminal = stream.isatty()
    colour = bool(os.environ.get("FORCE_COLOR")) or (terminal and os.environ.get("TERM") != "dumb")
    colour = colour and not os.environ.get("NO_COLOR")
    columns = os.environ.get("COLUMNS", "")
    if not terminal:
        return Style(colour)
    if re.fullmatch("[0-9]{2,4}", columns) and int(columns) >= 20:  # narrower is no real width
        return Style(colour, int(columns))
    width = 80
    with suppress(OSError, ValueError):
        width = os.get_terminal_size(stream.fileno()).columns
    return Style(colour, width or None)


def say(text: str) -> None:
    """Writes a piece of the answer. Where nobody reads on (`| head`), it goes nowhere: the work and the exit code stay
    what they are.

    Raises `LostAnswer` where it cannot be written for another reason.
    """
    try:
        with _Live.lock:  # of both, or progress were drawn between them
            tell("")
            sys.stdout.write(text)
            sys.stdout.flush()
    except (BrokenPipeError, ConnectionResetError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except OSError as error:
        raise lost_answer(error) from error


def lost_answer(error: OSError) -> LostAnswer:
    """The error for an answer that could not be written to standard output."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    why = "The printed answer is incomplete; files that were written are complete."
    return LostAnswer(f"cannot write to standard output: {reason}", why)


class _Live:
    """The last line of a terminal, while what is written next replaces it."""

    lock, is_drawn = threading.RLock(), False


def tell(text: str, live: bool = False) -> None:
    """Writes what is no part of the answer: errors, hints, progress. A failure to write them is ignored.
    live: on a terminal, where it is replaced by what is written next."""
    with _Live.lock, suppress(OSError):
        wipe = "\r\x1b[K" if live or _Live.is_drawn else ""
        _Live.is_drawn = live
        sys.stderr.write(wipe + text)
        sys.stderr.flush()


@contextmanager
def _live_line() -> Iterator[Callable[[str], None] | None]:
    """A function that shows a line, which the next one replaces and the end wipes; None where there is no terminal.
    There is room behind it for the ^C that a terminal shows: what goes on in the next line would not be wiped."""
    room = (style_of(sys.stderr).width or 80) - 3
    try:
        yield (lambda text: tell(_cut(text, room), live=True)) if sys.stderr.isatty() else None
    finally:
        tell("")


def _cut(text: str, room: int) -> str:
    """A text that takes so many columns at most: letters of some scripts take two."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= room else set_cell_size(text, max(room - 1, 0)).rstrip() + "…"


SHOWN_AFTER, SHOWN_EVERY = 1.0, 0.1  # seconds of a command, and half of them of a pass; seconds between two lines


@contextmanager
def shown_progress(label: str) -> Iterator[None]:
    """Shows the progress of passes over values, on a terminal, after the first second, unless there is no label. A
    thread draws it, so that the work itself does not have to."""
    with _live_line() as show:
        if show is None or not label:
            yield
            return
        ended, width = threading.Event(), style_of(sys.stderr).width or 80

        def draw() -> None:
            pause = SHOWN_AFTER
            while not ended.wait(pause):
                with suppress(IndexError):  # the pass ended meanwhile
                    if monotonic() - progress.passes[0].began >= SHOWN_AFTER / 2:
                        show(progress_line(label, width))
                pause = SHOWN_EVERY

        thread = threading.Thread(target=draw, daemon=True)
        progress.is_watched = True
        try:
            with suppress(RuntimeError):  # no more threads are allowed
                thread.start()
            yield
        finally:
            progress.is_watched = False
            progress.passes.clear()
            ended.set()
            if thread.ident:
                thread.join()


def progress_line(label: str, width: int) -> str:
    """`verify model.pt  45% ████      1.93 GB of 4.29 GB, 0:00:02 left`, as far as there is room in so many columns."""
    share, outer = 0.0, progress.passes[0]
    for step in reversed(list(progress.passes)):
        share = step.share(share)
    done, files = outer.files
    nbytes = f"{size(int(share * outer.total))} of {size(outer.total)}"
    amount = f"{done:,} of {counted(files, 'file')}" if files else nbytes
    seconds = monotonic() - outer.began
    remaining = f", {timedelta(seconds=round(seconds / share - seconds))} left" if share >= 0.01 else ""
    room = width - len(amount + remaining) - 10
    length = max(0, min(24, room - len(label)))
    label = _cut(label, room - length)
    return f"{label} {share:4.0%} {bar(round(share * 1000), 1000, length):{length}} {amount}{remaining}"


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done: on a terminal in one line, which is overwritten; else a line each."""
    with _live_line() as show:
        yield lambda text: show(f"{text} …") if show is not None else tell(f"{printable(text)}\n")


@contextmanager
def training_progress() -> Iterator[Callable[[dict[str, Any], float], None]]:
    """A function that shows each logged line of a run: on a terminal in one line with a bar and the time left, which is
    overwritten; else a line each."""
    from ckptool.training.reports import line_of

    with _live_line() as show:
        width, last = style_of(sys.stderr).width, ""

        def show_fact(fact: dict[str, Any], rate: float) -> None:
            nonlocal last
            if show is None or width is None:
                tell(f"{line_of(fact, rate)}\n")
                return
            last = line_of(fact, rate)
            show(_cut(line_of(fact, rate, drawn=True), width))

        try:
            yield show_fact
        finally:
            tell(f"{last}\n" if last else "")  # the last stays, whole


_LOST = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)


class Bug(CkptoolError, code="bug"):
    """Something that ckptool did not expect: its own fault."""


def in_words(error: Exception) -> CkptoolError:
    """The error that people see for any exception."""
    if isinstance(error, CkptoolError):
        return error
    code = error.errno if isinstance(error, OSError) else None
    if code in _LOST and getattr(error, "filename", None) is None:
        return lost_answer(cast(OSError, error))  # of the help, which the parser prints
    # The system refuses a module, a thread or a file for want of room, and Python says so in four ways.
    words = ("Too many open files", "failed to map segment", "annot allocate memory", "can't start new thread")
    is_refused = isinstance(error, (ImportError, RuntimeError)) and any(word in str(error) for word in words)
    if is_refused or code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
        what = f"a system limit was reached: {error!s}"
        why = "This process cannot open more files, start threads or use more memory. Outputs are unchanged."
        return FileProblem(what, why, "Look at the limits: ulimit -a")
    # C code that failed to set an error, or to look at the one that was set.
    is_silent = isinstance(error, SystemError) and (" without " in str(error) or type(error.__cause__) is MemoryError)
    if isinstance(error, (MemoryError, RecursionError)) or is_silent:
        what = "there is not enough memory" if not isinstance(error, RecursionError) else "values are nested too deep"
        return LimitExceeded(what, "The file needs more than this machine has, or is malicious. Outputs are unchanged.")
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(frame[0].filename)}:{frame[0].lineno})" if frame else ""
    why = "This is a bug in ckptool, not in what you typed. Files are unchanged or complete."
    fix = "Run it again with CKPTOOL_DEBUG=1 and report what it prints."
    return Bug(f"{type(error).__name__}: {error}{where}", why, fix)
