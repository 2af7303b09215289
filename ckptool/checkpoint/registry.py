"""Functions that nouns and reports offer and a layer above them has: `.torch()`, and reports as text, JSON and HTML.

A function is registered for a type where it is defined. The package itself, which is above all layers, knows the module
that does so for each type (`ckptool/__init__.py`); it is imported when one of its functions is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_FUNCTIONS: dict[tuple[type, str], Callable[..., Any]] = {}


def provides(form: str, *kinds: type) -> Callable[[Function], Function]:
    """Registers a function as the one that gives values of these types a form: `torch`, `text`, `json`, `html`."""

    def register(function: Function) -> Function:
        _FUNCTIONS.update({(kind, form): function for kind in kinds})
        return function

    return register


def provide(form: str, value: Any, *arguments: Any, **options: Any) -> Any:
    """A value in a form that is registered for its type or a base of it."""
    kind = next(kind for kind in type(value).__mro__ if kind.__name__ in _providers())
    if (kind, form) not in _FUNCTIONS:
        import_module(f"ckptool.{_providers()[kind.__name__]}")
    return _FUNCTIONS[kind, form](value, *arguments, **options)


def _providers() -> dict[str, str]:
    """The module with the functions for each type."""
    providers: dict[str, str] = import_module("ckptool").PROVIDERS
    return providers
