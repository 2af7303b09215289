"""Answers of commands: reports, one for each file, that `main` prints as they come."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from ckptool.checkpoint.workers import Task, in_turn
from ckptool.commands import nearest
from ckptool.errors import CkptoolError, FileProblem, LimitExceeded, UsageError, printable, quoted
from ckptool.facts import bar, size
from ckptool.render import lines
from ckptool.render.style import Style

if TYPE_CHECKING:
    from ckptool.output.sink import Progress

Json = dict[str, Any]


class AnswerForm(str, Enum):
    """The forms of an answer on standard output."""

    text = "text"
    json = "json"
    markdown = "markdown"


FORM = ContextVar("form", default=AnswerForm.text)  # of the command that runs


class Answer(NamedTuple):
    """One report, and how it is to be shown as text.  exit_code: its meaning for the whole command."""

    report: Any
    options: Mapping[str, Any] = MappingProxyType({})
    exit_code: int = 0

    def text(self, style: Style) -> str:
        text = lines.text(self.report, style=style, **self.options)
        return text if self.options.get("quiet") else style.page(text)  # quiet: every line is one name, spaces and all

    def json(self) -> Json:
        return dict(self.report.to_dict())


class Printed(NamedTuple):
    """An answer that was made in another process: what is to be printed of it, as text or as JSON."""

    content: Any
    exit_code: int

    def text(self, style: Style) -> str:
        return str(self.content)

    def json(self) -> Json:
        return dict(self.content)


Answering = Callable[[Any, "Progress | None"], Answer]


def in_jobs(answer: Answering, items: Sequence[Any], jobs: int, as_json: bool) -> Generator[Task[Printed]]:
    """Tasks that give what `answer(item, progress)` is printed as, for each item; see `workers.in_turn`."""
    return in_turn(partial(_printed, answer, None if as_json else style_of(sys.stdout)), items, jobs)


def _printed(answer: Answering, style: Style | None, item: Any, progress: Progress | None) -> Printed:
    found = answer(item, progress)
    return Printed(found.json() if style is None else found.text(style), found.exit_code)


def each_answer(answer: Answering, files: Sequence[str], jobs: int, as_json: bool) -> Iterator[Printed | CkptoolError]:
    """The answers for all files, one after the other, of which `jobs` are worked on at a time. The error of one of
    several files is its answer: the others are looked at all the same."""
    with closing(in_jobs(answer, files, jobs, as_json)) as tasks:
        for task in tasks:
            found: Printed | CkptoolError
            try:
                found = task(None)
            except Exception as error:
                if len(files) < 2:
                    raise
                found = in_words(error)
            yield found


class Answers(NamedTuple):
    """The results of a command, made one after the other.  separate: a blank line between them."""

    each: Iterable[Answer | Printed | CkptoolError]
    as_json: bool = False
    separate: bool = False


# For streams that cannot say them.
_ASCII = (
    {"→": "->", "…": "...", "–": "-", "×": "x", "≤": "<=", "█": "#"}
    | dict.fromkeys("▏▎▍", "")
    | dict.fromkeys("▌▋▊▉", "#")
    | {"▁": "1", "▂": "2", "▃": "3", "▄": "4", "▅": "5", "▆": "6", "▇": "7"}
    | {"┤": "|", "│": "|", "└": "+", "─": "-"}
    | dict.fromkeys(map(chr, range(0x2801, 0x2900)), "*")  # braille
)


class LostAnswer(FileProblem):
    """Standard output cannot be written."""


def style_of(stream: TextIO) -> Style:
    """Colour and width where the stream is a terminal. `NO_COLOR` wins over `FORCE_COLOR`, which wins over what the
    stream is; Markdown has neither."""
    if stream is sys.stdout and FORM.get() is AnswerForm.markdown:
        return Style()
    terminal = stream.isatty()
    colour = terminal and os.environ.get("TERM") != "dumb"
    if os.environ.get("FORCE_COLOR"):
        colour = True
    if os.environ.get("NO_COLOR"):
        colour = False
    return Style(colour, _width(stream) if terminal else None)


def _width(stream: TextIO) -> int | None:
    columns = os.environ.get("COLUMNS", "")
    if re.fullmatch("[0-9]{2,4}", columns) and int(columns) >= 20:  # what is narrower was not meant
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return 80


def say(text: str) -> None:
    """Writes a piece of the answer. Where nobody reads on (`| head`), it goes nowhere: the work and the exit code stay
    what they are.

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
        f"cannot write to standard output: {reason}",
        "The printed answer is incomplete; files that were written are complete.",
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


@contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """Something to tell the bytes done and in all; None where nobody would see it. The line is wiped at the end."""
    if not sys.stderr.isatty():
        yield None
        return
    start, drawn = time.monotonic(), False
    following = start + 0.5  # seconds

    def update(done: int, total: int) -> None:
        nonlocal following, drawn
        now = time.monotonic()
        if now < following or not total:
            return
        following, drawn = now + 0.1, True
        speed = size(int(done / (now - start)))
        facts = f"{done / total:4.0%} {bar(done, total, 24):24} {size(done)} of {size(total)}, {speed}/s"
        tell(f"\r\x1b[K{label} {facts}")

    try:
        yield update
    finally:
        if drawn:
            tell("\r\x1b[K")


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Something to tell what is being done: on a terminal in one line, which is wiped at the end; elsewhere nowhere."""
    terminal = sys.stderr.isatty()
    try:
        yield lambda text: tell(f"\r\x1b[K{text} …") if terminal else None
    finally:
        if terminal:
            tell("\r\x1b[K")


@contextmanager
def training_progress() -> Iterator[Callable[[dict[str, Any], float], None]]:
    """Shows each logged line of a run: on a terminal one line with a bar and the time left, which is written over; a
    line each elsewhere."""
    style, drawn = style_of(sys.stderr), False

    def told(fact: dict[str, Any], rate: float) -> None:
        nonlocal drawn
        if style.width is None:
            tell(f"step {fact['step']:,}  {_numbers(fact)}  {rate:.1f} steps/s\n")
            return
        drawn = True
        share = f"{bar(fact['step'], fact['steps'], 16):16} " if fact.get("steps") else ""
        line = f"{share}step {fact['step']:,}{_pace(fact, rate)}  {_numbers(fact)}"
        tell(f"\r\x1b[K{line if len(line) <= style.width else line[: max(style.width - 1, 0)] + '…'}")

    try:
        yield told
    finally:
        if drawn:
            tell("\n")


def _numbers(fact: dict[str, Any]) -> str:
    return "  ".join(f"{printable(key)} {value:.5g}" for key, value in fact.items() if isinstance(value, float))


def _pace(fact: dict[str, Any], rate: float) -> str:
    """The rate of a run, the mean since it was started or resumed, and the time that is left by it: `0:01:10 left`."""
    if not rate:
        return ""
    speed = f"{rate:.1f} steps/s" if rate >= 1 else f"{1 / rate:.1f} s/step"
    left = timedelta(seconds=round(max(0, fact.get("steps", 0) - fact["step"]) / rate))
    return f"  {speed}, {left} left" if left else f"  {speed}"


_LOST = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)


class Bug(CkptoolError, code="bug"):
    """Something that ckptool did not expect: its own fault."""


def in_words(error: Exception) -> CkptoolError:
    """The error for people, whatever was raised."""
    if isinstance(error, CkptoolError):
        return error
    # The system refuses a module, a thread or a file for want of room, and Python says so in four ways.
    words = ("Too many open files", "failed to map segment", "annot allocate memory", "can't start new thread")
    has_run_out = isinstance(error, (ImportError, RuntimeError)) and any(word in str(error) for word in words)
    if isinstance(error, OSError):
        has_run_out = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
    if has_run_out:
        return FileProblem(
            f"a system limit was reached: {error!s}",
            "This process cannot open more files, start threads or use more memory. Outputs were left as they were.",
            "Look at the limits: ulimit -a",
        )
    if isinstance(error, (MemoryError, RecursionError)) or failed_silently(error):
        what = "there is not enough memory" if not isinstance(error, RecursionError) else "values are nested too deep"
        why = "The file needs more than this machine has, or is malicious. Outputs were left as they were."
        return LimitExceeded(what, why)
    if isinstance(error, OSError) and error.errno in _LOST and error.filename is None:
        return lost_answer(error)  # of the help, which the parser prints
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(frame[0].filename)}:{frame[0].lineno})" if frame else ""
    return Bug(
        f"{type(error).__name__}: {error}{where}",
        "This is a bug in ckptool, not in what you typed. Files are as they were, or complete.",
        "Run it again with CKPTOOL_DEBUG=1 and report what it prints.",
    )


def failed_silently(error: Exception) -> bool:
    """True where C code could not even make its `MemoryError`."""
    return isinstance(error, SystemError) and "without exception set" in str(error)


def unknown_command(name: str, known: Iterable[str]) -> UsageError:
    """The error for a word that is no command: what was meant, or what to do with a file."""
    if name.startswith("-"):
        return UsageError(f"ckptool has no option {name}", "Options stand after the command.", "See: ckptool --help")
    what = f"there is no command {name!r}"
    if os.path.lexists(name):
        return UsageError(what, "It is a file.", f"Look inside: ckptool inspect {quoted(name)}")
    meant = nearest(name.lower().replace("_", "-"), known)
    return UsageError(what, f"Did you mean '{meant}'?" if meant else "", f"See: ckptool {meant or '--help'}".strip())
