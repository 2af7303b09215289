"""The options of every command, as the program declares them: what a new command or option is tried with, too."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

from ckptool.cli import function_of


@dataclass(frozen=True)
class Option:
    """flag: `--out`, or empty for an argument.  metavar: what its help calls the value.  choices, number: what it
    takes."""

    name: str
    flag: str
    metavar: str
    is_flag: bool
    required: bool
    choices: tuple[str, ...] = ()
    number: type | None = None


def options_of(command: str) -> list[Option]:
    """Every argument and option of a command."""
    parameters = inspect.signature(function_of(command), eval_str=True).parameters.values()
    return [_option(parameter) for parameter in parameters]


def _option(parameter: inspect.Parameter) -> Option:
    (meta,) = parameter.annotation.__metadata__
    kind: Any = parameter.annotation.__origin__
    kinds = [kind, *get_args(kind)]
    names = [meta.default, *(meta.param_decls or ())]
    flags = [name for name in names if isinstance(name, str) and name.startswith("-")]
    choices = [each.value for one in kinds if isinstance(one, type) and issubclass(one, Enum) for each in one]
    number = next((one for one in kinds if one in (int, float)), None)
    required = parameter.default is inspect.Parameter.empty
    metavar = str(meta.metavar or "")
    return Option(parameter.name, flags[-1] if flags else "", metavar, bool in kinds, required, tuple(choices), number)
