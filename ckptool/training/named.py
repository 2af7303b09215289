"""Things that a configuration names: what is in the box, or the user's own, as `file.py:build` or `module:function`.

The user's own code is imported only because it was named.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from ckptool.bridge.user_code import called as called
from ckptool.bridge.user_code import own
from ckptool.errors import UsageError, listed, printable
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
