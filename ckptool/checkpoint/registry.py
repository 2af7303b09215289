"""Functions that a lower layer offers and a higher one defines: `.torch()`, `.cast()`, what notebooks show.

The package itself, which is above all layers, knows which function gives a type which form (`ckptool/__init__.py`). Its
module is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def provide(form: str, value: Any, *arguments: Any, **options: Any) -> Any:
    """A value of ours in another form: `torch`, `cast`, `html`. Raises `TypeError` for a type that has none."""
    functions: dict[str, str] = import_module("ckptool").PROVIDERS
    for kind in type(value).__mro__:
        if kind.__module__.startswith("ckptool.") and f"{kind.__name__}.{form}" in functions:
            module, _, name = functions[f"{kind.__name__}.{form}"].partition(":")
            return getattr(import_module(f"ckptool.{module}"), name)(value, *arguments, **options)
    raise TypeError(f"nothing gives {type(value).__name__} the form {form!r}")
