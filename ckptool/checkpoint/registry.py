"""Finds functions that a lower layer offers and a higher one defines: `.torch()`, `.cast()`, what notebooks show.

A function is registered for a type where it is defined. The package itself, which is above all layers, knows the module
that does so (`ckptool/__init__.py`). It is imported when one of its functions is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_FUNCTIONS: dict[tuple[type, str], Callable[..., Any]] = {}


def provides(form: str, *kinds: type) -> Callable[[Function], Function]:
    """Registers a function as the one that gives values of these types a form: `torch`, `cast`, `html`."""

    def register(function: Function) -> Function:
        _FUNCTIONS.update({(kind, form): function for kind in kinds})
        return function

    return register


def provide(form: str, value: Any, *arguments: Any, **options: Any) -> Any:
    """A value in a form that is registered for its type or a base of it. Raises `TypeError` for any other."""
    return provider(form, type(value))(value, *arguments, **options)


def provider(form: str, kind: type) -> Callable[..., Any]:
    """The function that gives values of a type a form. Raises `TypeError` where there is none."""
    for each in kind.__mro__:
        module = _provider(each, form)
        if module and (each, form) not in _FUNCTIONS:
            import_module(module)
        if (each, form) in _FUNCTIONS:
            return _FUNCTIONS[each, form]
    raise TypeError(f"nothing gives {kind.__name__} the form {form!r}")


def _provider(kind: type, form: str) -> str:
    """The module with the function for a type of ours; empty for any other."""
    if not kind.__module__.startswith("ckptool."):
        return ""
    homes: dict[str, str] = import_module("ckptool").PROVIDERS
    found = homes.get(f"{kind.__name__}.{form}") or homes.get(kind.__name__)
    return f"ckptool.{found}" if found else ""
