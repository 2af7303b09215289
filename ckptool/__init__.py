"""ckptool: open any PyTorch checkpoint without running its code, without importing torch, without loading it into memory.

    >>> import ckptool
    >>> ckpt = ckptool.open("model.pt")                # lazy: tables only
    >>> ckpt["state_dict"]["fc.weight"].shape
    >>> ckptool.strip_module("model.pt", "clean.pt")   # every command is a function
    >>> weights = ckptool.load("clean.pt")             # what torch.load gives, safely

Names are resolved when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptool.checkpoint import Checkpoint as Checkpoint
    from ckptool.checkpoint import Composite as Composite
    from ckptool.checkpoint import Note as Note
    from ckptool.checkpoint import Storage as Storage
    from ckptool.checkpoint import TensorEntry as TensorEntry
    from ckptool.errors import CkptoolError as CkptoolError
    from ckptool.verbs.add_module import add_module as add_module
    from ckptool.verbs.cast import cast as cast
    from ckptool.verbs.convert import convert as convert
    from ckptool.verbs.diff import diff as diff
    from ckptool.verbs.edit import edit as edit
    from ckptool.verbs.inspect import inspect as inspect
    from ckptool.verbs.load import load as load
    from ckptool.verbs.open import open as open
    from ckptool.verbs.remap import remap as remap
    from ckptool.verbs.rename import rename as rename
    from ckptool.verbs.save import save as save
    from ckptool.verbs.show import show as show
    from ckptool.verbs.strip_module import strip_module as strip_module

__version__ = "0.1.0"

# Public name -> the module that has it.
_HOMES = {
    "Checkpoint": "checkpoint",
    "CkptoolError": "errors",
    "Composite": "checkpoint",
    "Note": "checkpoint",
    "Storage": "checkpoint",
    "TensorEntry": "checkpoint",
    "add_module": "verbs.add_module",
    "cast": "verbs.cast",
    "convert": "verbs.convert",
    "diff": "verbs.diff",
    "edit": "verbs.edit",
    "inspect": "verbs.inspect",
    "load": "verbs.load",
    "open": "verbs.open",
    "remap": "verbs.remap",
    "rename": "verbs.rename",
    "save": "verbs.save",
    "show": "verbs.show",
    "strip_module": "verbs.strip_module",
}

__all__ = [
    *sorted(_HOMES),
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptool' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"ckptool.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
