"""Things that a configuration names: what is in the box, or the user's own, as `file.py:build` or `module:function`.

The user's own code is imported only because it was named.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ckptool.bridge.user_code import called as called
from ckptool.bridge.user_code import own
from ckptool.errors import CkptoolError, RunFailed, UsageError, UserCodeFailed, listed, printable
from ckptool.reports.targets import names_code


def find_named(name: str, box: Mapping[str, Any], what: str) -> Any:
    """What `name` stands for. Raises `UsageError` for a name that leads nowhere, `UserCodeFailed` where the user's module raises."""
    if name in box:
        return box[name]
    if not names_code(name):
        close = difflib.get_close_matches(name, box, 1)
        raise UsageError(
            f"{what}: there is no {printable(name)!r}",
            f"In the box are {listed(sorted(box), 20)}; one's own is file.py:NAME or module:NAME.",
            f"Did you mean {close[0]}?" if close else "",
        )
    return own(name, what)


def load_named(name: str, box: Mapping[str, Any], what: str, args: Mapping[str, Any]) -> Any:
    """What the thing called `name` makes of `args`. Raises what `find_named` raises, and `UsageError` for arguments it does not take."""
    found = find_named(name, box, what)
    try:
        inspect.signature(found).bind(**args)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{what}: {printable(name)} does not take what it was given: {error}", _takes(found)
        ) from error
    return called(found, what, name, **args)


def _takes(found: Any) -> str:
    try:
        return f"It takes: {', '.join(inspect.signature(found).parameters)}."
    except (TypeError, ValueError):
        return ""


def numbers(found: Any, what: str, name: str) -> dict[str, float]:
    """The numbers that the user's code gave, by name. Raises `UsageError` for anything else."""
    if not isinstance(found, Mapping):
        raise UsageError(
            f"{what}: {printable(name)} gave {type(found).__name__}, not a dictionary of numbers",
            "Each line of the metrics holds numbers by name.",
        )
    made = {}
    for key, value in found.items():
        try:
            made[str(key)] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            kind = f"{type(value).__name__} {printable(repr(value))[:60]}" if value is not None else "None"
            raise UsageError(
                f"{what}: {printable(name)} gave {kind} for {printable(str(key))}, which is not a number",
                "Each line of the metrics holds numbers by name.",
                "Give a number, a tensor of one number, or leave it out.",
            ) from None
    return made


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = tuple({os.path.dirname(torch.__path__[0]), *sysconfig.get_paths().values()})


@contextmanager
def blamed() -> Iterator[None]:
    """Tells what is raised inside, and is not ckptool's: as `UserCodeFailed` where a file of the user's took part, else as `RunFailed`."""
    try:
        yield
    except CkptoolError:
        raise
    except (MemoryError, RecursionError):
        raise
    except (Exception, SystemExit) as error:
        if (told := _told(error)) is None:
            raise
        raise told from error


def took_part(error: BaseException) -> bool:
    """True where a file of the user's is in the traceback."""
    return any(is_theirs(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def _told(error: BaseException) -> CkptoolError | None:
    """The error in words; None for one that ckptool itself raised."""
    frames = traceback.extract_tb(error.__traceback__)
    what = f"{type(error).__name__}: {printable(str(error).partition(chr(10))[0])[:200]}"
    theirs = [number for number, frame in enumerate(frames) if is_theirs(frame.filename)]
    if theirs:
        place = frames[theirs[-1]]
        return UserCodeFailed(
            f"{printable(place.filename)}:{place.lineno} raised {what}",
            "".join(traceback.format_list(frames[theirs[0] :])).rstrip(),
            "This is your code, not ckptool's.",
        )
    last = frames[-1]
    if last.filename.startswith(_OURS + os.sep) and not type(error).__module__.startswith("torch"):
        return None
    return RunFailed(
        f"training stopped: {what}",
        f"It was raised in {last.name} ({printable(last.filename)}:{last.lineno}).",
        "It does not go with what it was given: look at the data, the model, the optimizer and their args.",
    )


def is_theirs(file: str) -> bool:
    """True for a file that is neither ckptool's nor installed."""
    return os.path.isfile(file) and not os.path.abspath(file).startswith((_OURS + os.sep, *_INSTALLED))
