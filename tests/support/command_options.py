"""The options of every command, as the program declares them: what a new command or option is tried with, too."""

from dataclasses import dataclass

from ckptool.cli.parser import typed_parameters
from ckptool.commands import Parameter, function_of


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
    return [_option(parameter) for parameter in typed_parameters(function_of(command))]


def _option(parameter: Parameter) -> Option:
    name, kind, _, option = parameter
    flag = option.flags[-1] if option.flags else ""
    number = kind if kind in (int, float) else None
    return Option(name, flag, option.metavar, kind is bool, parameter.is_needed, option.choices, number)
