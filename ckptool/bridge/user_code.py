"""The user's own code, named as `file.py:NAME` or `module:NAME`: imported only because it was named, and called under
its own name.

What it raises becomes one error that contains its traceback, so that nobody takes it for ckptool's.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from typing import Any

from ckptool.analysis.targets import names_code
from ckptool.checkpoint.paths import absolute
from ckptool.errors import CkptoolError, TextLines, UsageError, UserCodeFailed, listed


def import_user_code(name: str, what: str) -> Any:
    """The object that `file.py:NAME` or `module:NAME` names. what: what it is for, in messages.

    Raises `UsageError` for a name that leads nowhere, `UserCodeFailed` where the module raises.
    """
    place, _, attribute = name.rpartition(":")
    try:
        if place.endswith(".py"):
            module = _from_file(place, what)
        else:
            folder = absolute(os.curdir)
            if folder not in sys.path:
                sys.path.insert(0, folder)  # the user, who is in this folder, named it
            module = importlib.import_module(place)
    except CkptoolError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and place.split(".")[0] == error.name:
            raise UsageError(f"{what}: there is no module {place}", "It was taken for code of your own.") from error
        raise _failure(what, name, error) from error
    if not hasattr(module, attribute):
        public = sorted(member for member in vars(module) if not member.startswith("_"))
        raise UsageError(f"{what}: {place} has no {attribute}", f"It has: {listed(public, 12)}.")
    return getattr(module, attribute)


def call_user_code(function: Any, what: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """The result of the user's function; an error that it raises includes its traceback."""
    try:
        return function(*args, **kwargs)
    except CkptoolError:
        raise
    except (Exception, SystemExit) as error:
        raise _failure(what, name, error) from error


def _from_file(place: str, what: str) -> Any:
    name, path = f"_ckptool_user_{os.path.splitext(os.path.basename(place))[0]}", absolute(place)
    folder = os.path.dirname(path)
    _refuse_two_of_a_name(folder, what)
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == path:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not os.path.isfile(place):
        if os.path.exists(place):
            raise UsageError(f"{what}: {place} is not a file", "Code has to be in a regular file.", "Name a file.")
        raise UsageError(f"{what}: there is no file {place}", "It was taken for code of your own.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # workers find its classes by this name
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module must not be found again
        raise
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
        if folder not in sys.path:  # else it is the user's own
            sys.path.append(folder)  # it imports neighbours later, and in workers
        _FOLDERS.add(folder)
    return module


_FOLDERS = set[str]()  # of code that was named


def _refuse_two_of_a_name(folder: str, what: str) -> None:
    """Raises `UsageError` where a module that code of another folder has imported has the name of one in this folder:
    a process has one module of a name, and two runs in it must never mix."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        home = os.path.dirname(file.removesuffix(f"{os.sep}__init__.py")) if isinstance(file, str) else folder
        beside = os.path.join(folder, name)
        if home != folder and home in _FOLDERS and (os.path.lexists(beside) or os.path.lexists(f"{beside}.py")):
            why = f"{folder} has a module of that name, too, and a process holds only one."
            raise UsageError(f"{what}: {name} of {home} is imported already", why, "Run it in a process of its own.")


def _failure(what: str, name: str, error: BaseException) -> UserCodeFailed:
    words, _, rest = str(error).strip().partition("\n")
    if "DataLoader worker" in words:  # which puts its traceback before the message
        words = rest.rpartition("\n")[2].partition(": ")[2] or words
    # The traceback from the first line of the user's code on.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen importlib") and "importlib" not in file.split(os.sep):
            break
        trace = trace.tb_next
    return UserCodeFailed(
        f"{what}: {name} raised {type(error).__name__}: {words[:200]}",
        TextLines(*"".join(traceback.format_exception(type(error), error, trace)).rstrip().split("\n")),
        "The error is in your own code, not in ckptool."
        if names_code(name)
        else "It was called with something it does not expect: check the data, the model and their args.",
    )
