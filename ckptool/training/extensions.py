"""Code that a configuration names: built in, or the user's own as `file.py:NAME` or `module:NAME`; and its errors.

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

from ckptool.analysis.targets import names_code
from ckptool.bridge.user_code import call_user_code, import_user_code
from ckptool.errors import CkptoolError, RunFailed, TextLines, UsageError, UserCodeFailed, listed

MOVED = {
    **{name: f"data.py:{name}" for name in ("images", "linear", "modadd", "ring", "spirals", "text")},
    **{name.lower(): f"models.py:{name}" for name in ("CharGPT", "Conv", "Discriminator", "Generator", "Tagger")},
    "sequences": "data.py:Sequences",
}


def find_named(name: str, built_in: Mapping[str, Any], what: str) -> Any:
    """The object with a name. Raises `UsageError` for an unknown one, `UserCodeFailed` where its module raises."""
    if name in built_in:
        return built_in[name]
    if name in MOVED:
        raise UsageError(
            f"{what}: {name} is no longer built in; it is {MOVED[name]} in the folder examples of ckptool's source",
            "",
            f"Copy that file beside your configuration, and name it so: {MOVED[name]}",
        )
    if not names_code(name):
        close = difflib.get_close_matches(name, built_in, 1)
        raise UsageError(
            f"{what}: there is no {name!r}",
            f"Built in are {listed(sorted(built_in), 20)}; your own is file.py:NAME or module:NAME.",
            f"Did you mean {close[0]}?" if close else "",
        )
    return import_user_code(name, what)


def load_named(name: str, built_in: Mapping[str, Any], what: str, args: Mapping[str, Any], *first: Any) -> Any:
    """The result of calling the object with a name. Raises `UsageError` for arguments it does not take, too.

    first: what it gets before them.
    """
    found = find_named(name, built_in, what)
    try:
        inspect.signature(found).bind(*first, **args)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what}: {name} does not take these arguments: {error}", _takes(found)) from error
    return call_user_code(found, what, name, *first, **args)


def class_of(module: Any, name: str, base: type, what: str) -> Any:
    """A class of a module by its name, whatever the case."""
    classes = {
        key.lower(): value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and not key.startswith("_")
    }
    wanted = name.lower().replace("_", "")
    found = classes.get(wanted) or classes.get(wanted + "lr") or classes.get(wanted.removesuffix("lr"))
    if found is None:
        close = difflib.get_close_matches(wanted, classes, 1)
        hint = f"Did you mean {classes[close[0]].__name__}?" if close else ""
        raise UsageError(f"there is no {what} {name!r}", f"Available: {listed(sorted(classes), 40)}.", hint)
    return found


def _takes(found: Any) -> str:
    try:
        return f"It takes: {', '.join(inspect.signature(found).parameters)}."
    except (TypeError, ValueError):
        return ""


def numbers(found: Any, what: str, name: str) -> dict[str, float]:
    """The numbers that the user's code gave, by name. Raises `UsageError` for anything else."""
    if not isinstance(found, Mapping):
        raise UsageError(
            f"{what}: {name} gave {type(found).__name__}, not a dictionary of numbers",
            "Each line of the metrics holds numbers by name.",
        )
    made = {}
    for key, value in found.items():
        try:
            made[str(key)] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            kind = f"{type(value).__name__} {repr(value)[:60]}" if value is not None else "None"
            raise UsageError(
                f"{what}: {name} gave {kind} for {key!s}, which is not a number",
                "Each line of the metrics holds numbers by name.",
                "Give a number, a tensor of one number, or leave it out.",
            ) from None
    return made


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = tuple({os.path.dirname(torch.__path__[0]), *sysconfig.get_paths().values()})


@contextmanager
def name_culprits() -> Iterator[None]:
    """Raises errors that are not ckptool's as `UserCodeFailed` where the user's code took part, else as `RunFailed`."""
    try:
        yield
    except (CkptoolError, MemoryError, RecursionError):
        raise
    except (Exception, SystemExit) as error:
        if (described := _described(error)) is None:
            raise
        raise described from error


def took_part(error: BaseException) -> bool:
    """True where a file of the user's is in the traceback."""
    return any(is_theirs(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def _described(error: BaseException) -> CkptoolError | None:
    """The error in words; None for one that ckptool itself raised."""
    frames = traceback.extract_tb(error.__traceback__)
    what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    theirs = [number for number, frame in enumerate(frames) if is_theirs(frame.filename)]
    if theirs:
        place = frames[theirs[-1]]
        return UserCodeFailed(
            f"{place.filename}:{place.lineno} raised {what}",
            TextLines(*"".join(traceback.format_list(frames[theirs[0] :])).rstrip().split("\n")),
            "The error is in your code, not in ckptool's.",
        )
    last = frames[-1]
    if last.filename.startswith(_OURS + os.sep) and not type(error).__module__.startswith("torch"):
        return None
    return RunFailed(
        f"training stopped: {what}",
        f"It was raised in {last.name} ({last.filename}:{last.lineno}).",
        "Check that the data, the model, the optimizer and their args fit each other.",
    )


def is_theirs(file: str) -> bool:
    """True for a file that is neither ckptool's nor installed."""
    return os.path.isfile(file) and not os.path.abspath(file).startswith((_OURS + os.sep, *_INSTALLED))
