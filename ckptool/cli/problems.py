"""Whatever goes wrong, in the three parts of a `CkptoolError`."""

from __future__ import annotations

import errno
import os
import sys
import traceback

import typer

from ckptool.errors import CkptoolError, FileProblem, LimitExceeded, UsageError, printable, quoted

# What typer raises when the command line cannot be parsed; of its classes it exports the one below.
BadUsage = typer.BadParameter.__mro__[1]


class Bug(CkptoolError):
    """Something that ckptool did not expect: its own fault."""

    code = "bug"


def in_words(error: Exception) -> CkptoolError:
    """The error for people, whatever was raised."""
    if isinstance(error, CkptoolError):
        return error
    if isinstance(error, BadUsage):
        return _usage(error)
    if _has_run_out(error):
        return FileProblem(
            f"the system gives no more: {printable(str(error))}",
            "This process may not open more files, start more threads or use more memory. Outputs were left as they were.",
            "Look at the limits: ulimit -a",
        )
    if isinstance(error, (MemoryError, RecursionError)):
        what = "there is not enough memory" if isinstance(error, MemoryError) else "values are nested too deep"
        return LimitExceeded(
            what, "The file asks for more than this machine has, or was built to. Outputs were left as they were."
        )
    if (
        isinstance(error, OSError)
        and error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)
        and error.filename is None
    ):
        return FileProblem(
            f"cannot write to standard output: {os.strerror(error.errno)}", "What was printed is not complete."
        )
    return _bug(error)


def _has_run_out(error: Exception) -> bool:
    """True where the system refuses a module, a thread or a file for want of room; Python says so in four ways."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
    words = ("Too many open files", "failed to map segment", "annot allocate memory", "can't start new thread")
    return isinstance(error, (ImportError, RuntimeError)) and any(word in str(error) for word in words)


def _usage(error: Exception) -> CkptoolError:
    context = getattr(error, "ctx", None)
    text = " ".join(str(error.format_message()).split()) if hasattr(error, "format_message") else str(error)
    command = context.command_path if context else "ckptool"
    usage = " ".join(context.get_usage().split()) if context else ""
    file = next((word for word in sys.argv[1:] if word.startswith("-") and os.path.lexists(word)), "")
    fix = f"For the file: {quoted(os.path.join('.', file))}" if file else f"See: {command} --help"
    return UsageError(text.rstrip("."), usage, fix)


def _bug(error: Exception) -> Bug:
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(frame[0].filename)}:{frame[0].lineno})" if frame else ""
    return Bug(
        f"{type(error).__name__}: {error}{where}",
        "This is a bug in ckptool, not in what you typed. Files are as they were, or complete.",
        "Run it again with CKPTOOL_DEBUG=1 and report what it prints.",
    )
