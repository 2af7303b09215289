"""Code that a configuration names: built in, or the user's own as `file.py:NAME` or `module:NAME`; and its errors.

The user's own code is imported only because it was named.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptool.analysis.targets import names_code
from ckptool.bridge.user_code import call_user_code, import_user_code
from ckptool.errors import CkptoolError, RunFailed, TextLines, UsageError, UserCodeFailed, listed


def classes_of(module: Any, base: type) -> dict[str, Any]:
    """The public classes of a module that derive from `base`, by their names in lower case."""
    return {
        name.lower(): value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and not name.startswith("_")
    }


@dataclass(frozen=True, slots=True)
class Choice:
    """What the names at a key of the configuration stand for: built in, a class of torch, or `file.py:NAME`.

    key: as messages call it.  yours: what `file.py:NAME` is or does, in words.  built_in: by name.  classes: torch's,
    by name in lower case; `step` and `step_lr` are StepLR.  gives: what a call must result in, in words, and the test
    for it.
    """

    key: str
    yours: str
    built_in: Mapping[str, Any] = field(default_factory=dict)
    classes: Mapping[str, Any] = field(default_factory=dict)
    gives: tuple[str, Callable[[Any], bool]] = ("", lambda made: True)

    @property
    def typed(self) -> str:
        """What to type for one of the user's own."""
        return f"Your own is file.py:NAME, which {self.yours}"

    def find(self, name: str) -> Any:
        """The object with a name. Raises `UsageError` for an unknown one, `UserCodeFailed` where its module raises."""
        if names_code(name):
            return import_user_code(name, self.key)
        if name in self.built_in:
            return self.built_in[name]
        plain = name.lower().replace("_", "")
        for spelling in (plain, f"{plain}lr", plain.removesuffix("lr")):
            if spelling in self.classes:
                return self.classes[spelling]
        known = {each.lower(): each for each in self.built_in}
        known |= {key: each.__name__ for key, each in self.classes.items()}
        close = difflib.get_close_matches(plain, known, 1)
        raise UsageError(
            f"{self.key}: there is no {name!r}",
            f"Known: {listed(sorted(known.values()), 40)}." if known else "Nothing is built in.",
            (f"Did you mean {known[close[0]]}? " if close else "") + self.typed,
        )

    def make(self, name: str, args: Mapping[str, Any], *first: Any) -> Any:
        """What the object with a name makes. Raises as `call` does, and `UsageError` for a result of another kind."""
        made = self.call(name, args, *first)
        words, is_one = self.gives
        if not is_one(made):
            raise UsageError(f"{self.key}: {name} returned {type(made).__name__}, not {words}", "", self.typed)
        return made

    def call(self, name: str, args: Mapping[str, Any], *first: Any) -> Any:
        """The result of calling the object with a name; first: what it gets before `args`.

        Raises `UsageError` for arguments that it does not take.
        """
        found, takes = self.find(name), ""
        try:
            signature = inspect.signature(found)
            takes = ", ".join([*signature.parameters][len(first) :])
            signature.bind_partial(*first, **args)  # a misspelt one is told before one that is missing
            signature.bind(*first, **args)
            return call_user_code(found, self.key, name, *first, **args) if names_code(name) else found(*first, **args)
        except CkptoolError:
            raise
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UsageError(
                f"{self.key}: {name} does not take these arguments: {error}",
                f"It takes: {takes}." if takes else self.typed,
            ) from error


def numbers(found: Any, what: str, name: str) -> dict[str, float]:
    """The numbers that the user's code gave, by name. Raises `UsageError` for anything else."""
    if not isinstance(found, Mapping):
        raise UsageError(f"{what}: {name} gave {type(found).__name__}, not a dictionary of numbers")
    made = {}
    for key, value in found.items():
        try:
            made[str(key)] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise UsageError(
                f"{what}: {name} gave {type(value).__name__} for {key!s}, which is not a number",
                "",
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
        frames = traceback.extract_tb(error.__traceback__)
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        last, theirs = frames[-1], [number for number, frame in enumerate(frames) if is_theirs(frame.filename)]
        if theirs:
            place = frames[theirs[-1]]
            raise UserCodeFailed(
                f"{place.filename}:{place.lineno} raised {what}",
                TextLines(*"".join(traceback.format_list(frames[theirs[0] :])).rstrip().split("\n")),
                "The error is in your code, not in ckptool's.",
            ) from error
        if last.filename.startswith(_OURS + os.sep) and not type(error).__module__.startswith("torch"):
            raise  # a fault of ckptool's
        raise RunFailed(
            f"training stopped: {what}",
            f"It was raised in {last.name} ({last.filename}:{last.lineno}).",
            "Check that the data, the model, the optimizer and their args fit each other.",
        ) from error


def took_part(error: BaseException) -> bool:
    """True where a file of the user's is in the traceback."""
    return any(is_theirs(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def is_theirs(file: str) -> bool:
    """True for a file that is neither ckptool's nor installed."""
    return os.path.isfile(file) and not os.path.abspath(file).startswith((_OURS + os.sep, *_INSTALLED))
