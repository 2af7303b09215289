"""One file per verb: open, transform, save or report. The command line and the library call the same function.

A verb is a function of the name of its command. Those that write take the options of `_save.SaveOptions`, and return
`Written`.
"""

from __future__ import annotations

import re
from inspect import Parameter, signature
from typing import Any


def show_options(function: Any) -> Any:
    """The function, of whose `**options: Unpack[…]` `help()` shows each option with its default."""
    declared = signature(function)
    *named, last = declared.parameters.values()
    given = re.fullmatch(r"Unpack\[(\w+)\]", str(last.annotation))
    if given is None:
        return function
    options = function.__globals__[given[1]]
    types = {name: getattr(kind, "__forward_arg__", kind) for name, kind in options.__annotations__.items()}
    shown = [
        Parameter(name, last.KEYWORD_ONLY, default=None if "None" in str(kind) else False, annotation=kind)
        for name, kind in types.items()
    ]
    function.__signature__ = declared.replace(parameters=[*named, *shown])
    function.__doc__ = f"{function.__doc__.rstrip()}\n\n    {options.__doc__.strip()}\n    "
    return function
