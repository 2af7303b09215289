"""Whatever goes wrong, in the three parts of a `CkptoolError`."""

from __future__ import annotations

import errno
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable
from enum import Enum
from typing import Any, get_args

import typer

from ckptool.checkpoint.commands import nearest
from ckptool.cli.console import lost_answer
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
            f"a system limit was reached: {printable(str(error))}",
            "This process may not open more files, start more threads or use more memory. Outputs were left as they were.",
            "Look at the limits: ulimit -a",
        )
    if isinstance(error, (MemoryError, RecursionError)) or _failed_silently(error):
        what = "there is not enough memory" if not isinstance(error, RecursionError) else "values are nested too deep"
        return LimitExceeded(
            what, "The file asks for more than this machine has, or was built to. Outputs were left as they were."
        )
    if (
        isinstance(error, OSError)
        and error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)
        and error.filename is None
    ):
        return lost_answer(error)  # of the help, which the parser prints
    return _bug(error)


def _failed_silently(error: Exception) -> bool:
    """True where C code could not even make its `MemoryError`."""
    return isinstance(error, SystemError) and "without exception set" in str(error)


def _has_run_out(error: Exception) -> bool:
    """True where the system refuses a module, a thread or a file for want of room; Python says so in four ways."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
    words = ("Too many open files", "failed to map segment", "annot allocate memory", "can't start new thread")
    return isinstance(error, (ImportError, RuntimeError)) and any(word in str(error) for word in words)


def unknown_command(name: str, known: Iterable[str]) -> UsageError:
    """The error for a word that is no command: what was meant, or what to do with a file."""
    what = f"there is no command {printable(name)!r}"
    if os.path.lexists(name):
        return UsageError(what, "It is a file.", f"Look into it: ckptool inspect {quoted(name)}")
    meant = nearest(name.lower().replace("_", "-"), known)
    return UsageError(what, f"Did you mean '{meant}'?" if meant else "", f"See: ckptool {meant or '--help'}".strip())


QUOTE_RULES = (
    "A rule without quotes is taken apart by the shell: its > sends the output into a file of the name that follows.",
    "Put the rule in quotes: 'OLD => NEW'. Look at what the shell made: ls -lt",
)


def was_redirected(words: Iterable[str]) -> bool:
    """True where a word is the rest of a rule `OLD => NEW` of which the shell took `> NEW` for itself."""
    return any(word.endswith("=") and not os.path.lexists(word) for word in words)


def _usage(error: Any) -> CkptoolError:
    """The error for a command line that could not be parsed, with what is allowed there."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "ckptool"
    usage = " ".join(context.get_usage().split()) if context else ""
    file = next((word for word in sys.argv[1:] if word.startswith("-") and os.path.lexists(word)), "")
    fix = f"For the file: {quoted(os.path.join('.', file))}" if file else f"See: {command} --help"
    message = printable(" ".join(error.message.split())).rstrip(".")
    kind = type(error).__name__
    parameter = getattr(error, "param", None)
    if kind == "NoSuchOption":
        option = error.option_name
        meant = nearest(option, [name for each in context.command.params for name in each.opts] if context else ())
        return UsageError(
            f"{command} has no option {printable(option)}", f"Did you mean {meant}?" if meant else usage, fix
        )
    if kind == "MissingParameter" and parameter is not None:
        return UsageError(f"{command} needs {_called(parameter)}", usage, fix)
    if kind == "BadOptionUsage":
        word = "takes no value" if "does not take" in message else "needs a value, and was given none"
        return UsageError(f"{error.option_name} {word}", usage, fix)
    if kind == "BadParameter" and parameter is not None:
        return _refused(error, parameter, usage, fix)
    more = message.rpartition("(")[2].rstrip(")") if "extra argument" in message else ""
    if more and was_redirected(more.split()):
        return UsageError(f"{command} was given {more}, which is a part of a rule", *QUOTE_RULES)
    return UsageError(f"{command} was given more than it takes: {more}" if more else message, usage, fix)


def _called(parameter: Any) -> str:
    """An argument by its name in the help, an option with it."""
    name = parameter.metavar or parameter.name.upper()
    return f"{_flag_of(parameter)} {name}" if parameter.opts[-1].startswith("-") else name


def _flag_of(parameter: Any) -> str:
    """The long name of an option."""
    name: str = parameter.opts[-1]
    return name


def _refused(error: Any, parameter: Any, usage: str, fix: str) -> UsageError:
    """The error for a value that an option does not take, with those that it takes."""
    value = _value_of(error)
    given = f", not {printable(value)!r}" if value is not None else ""
    return UsageError(f"{_flag_of(parameter)} takes {_allowed(error.ctx, parameter)}{given}", usage, fix)


def _value_of(error: Any) -> str | None:
    """The value that was refused, where the parser says it."""
    if callable(details := getattr(error.__cause__, "errors", None)):
        return str(details()[0].get("input"))
    found = re.match(r"'?(.*?)'? is not ", error.message)
    return found[1] if found else None


def _allowed(context: Any, parameter: Any) -> str:
    """The values that an option takes, in words, as its command declares it."""
    from ckptool.cli import function_of

    declared = inspect.signature(function_of(context.info_name), eval_str=True).parameters[parameter.name].annotation
    kinds = [declared.__origin__, *get_args(declared.__origin__)]
    least = next((meta.min for meta in declared.__metadata__ if getattr(meta, "min", None) is not None), None)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Enum):
            choices = [each.value for each in kind]
            return f"{', '.join(choices[:-1])} or {choices[-1]}"
    number = "a whole number" if int in kinds else "a number"
    return number + (f" of at least {least:g}" if least is not None else "")


def _bug(error: Exception) -> Bug:
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(frame[0].filename)}:{frame[0].lineno})" if frame else ""
    return Bug(
        f"{type(error).__name__}: {error}{where}",
        "This is a bug in ckptool, not in what you typed. Files are as they were, or complete.",
        "Run it again with CKPTOOL_DEBUG=1 and report what it prints.",
    )
