"""Finds functions that a lower layer offers and a higher one defines: `.torch()`, a report as text, JSON, HTML.

A function is registered for a type where it is defined. The package itself, which is above all layers, knows the module
that does so for the nouns (`ckptool/__init__.py`); that of a report is called like the report's own. It is imported
when one of its functions is first asked for.
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
    """A value in a form that is registered for its type or a base of it. Raises `TypeError` for any other."""
    for kind in type(value).__mro__:
        module = _provider(kind)
        if module and (kind, form) not in _FUNCTIONS:
            import_module(module)
        if (kind, form) in _FUNCTIONS:
            return _FUNCTIONS[kind, form](value, *arguments, **options)
    raise TypeError(f"nothing gives {type(value).__name__} the form {form!r}")


def _provider(kind: type) -> str:
    """The module with the functions for a type of ours; empty for any other."""
    if kind.__module__.startswith("ckptool.reports."):
        return kind.__module__.replace("reports", "render", 1)
    found = import_module("ckptool").PROVIDERS.get(kind.__name__) if kind.__module__.startswith("ckptool.") else None
    return f"ckptool.{found}" if found else ""
