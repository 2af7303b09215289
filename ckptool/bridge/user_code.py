"""The user's own code, named as `file.py:NAME` or `module:NAME`: imported only because it was named, and called under
its own name.

What it raises comes back as one error that holds its traceback, so that nobody takes it for ckptool's.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from typing import Any

from ckptool.checkpoint.paths import absolute
from ckptool.errors import CkptoolError, UsageError, UserCodeFailed, listed, printable
from ckptool.reports.targets import names_code


def import_user_code(name: str, what: str) -> Any:
    """The thing that `file.py:NAME` or `module:NAME` stands for. what: what it is for, in the messages.

    Raises `UsageError` for a name that leads nowhere, `UserCodeFailed` where the module raises.
    """
    place, _, attribute = name.rpartition(":")
    module = _module(place, what)
    if not hasattr(module, attribute):
        raise UsageError(
            f"{what}: {printable(place)} has no {printable(attribute)}", f"It has: {listed(_public(module), 12)}."
        )
    return getattr(module, attribute)


def call_user_code(function: Any, what: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """The result of a call of the user's function; what it raises comes with its traceback."""
    try:
        return function(*args, **kwargs)
    except CkptoolError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(what, name, error) from error


def _public(module: Any) -> list[str]:
    return sorted(name for name in vars(module) if not name.startswith("_"))


def _module(place: str, what: str) -> Any:
    try:
        return _from_file(place, what) if place.endswith(".py") else _by_name(place)
    except CkptoolError:
        raise
    except ModuleNotFoundError as error:
        if error.name and place.split(".")[0] == error.name:
            raise UsageError(
                f"{what}: there is no module {printable(place)}", "It was given as your own code."
            ) from error
        raise _failed(what, place, error) from error
    except Exception as error:
        raise _failed(what, place, error) from error


def _by_name(place: str) -> Any:
    here = absolute(os.curdir)
    if here not in sys.path:
        sys.path.insert(0, here)  # named by the user, who is in this folder
    return importlib.import_module(place)


def _from_file(place: str, what: str) -> Any:
    name = f"_ckptool_user_{os.path.splitext(os.path.basename(place))[0]}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == absolute(place):
        return known
    spec = importlib.util.spec_from_file_location(name, absolute(place))
    if os.path.exists(place) and not os.path.isfile(place):
        raise UsageError(
            f"{what}: {printable(place)} is not a file", "Code is read from a regular file.", "Name a file."
        )
    if spec is None or spec.loader is None or not os.path.isfile(place):
        raise UsageError(f"{what}: there is no file {printable(place)}", "It was given as your own code.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # workers find its classes by this name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half of it is no module to be found again
        raise
    return module


def _failed(what: str, name: str, error: BaseException) -> UserCodeFailed:
    return UserCodeFailed(
        f"{what}: {printable(name)} raised {type(error).__name__}: {printable(str(error).partition(_LINE)[0])[:200]}",
        _traceback(error),
        "The error is in your own code, not in ckptool."
        if names_code(name)
        else "It does not fit what it was given: check the data, the model and their args.",
    )


_LINE = "\n"


def _traceback(error: BaseException) -> str:
    """The traceback from the first line of the user's code on."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None and _is_ours(place.tb_frame.f_code.co_filename):
        place = place.tb_next
    return "".join(traceback.format_exception(type(error), error, place)).rstrip()


def _is_ours(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen importlib") or "importlib" in file.split(os.sep)
