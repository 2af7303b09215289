"""The command line of a verb, parsed by typer; and what it does not take, in words."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from ckptool.cli.help import usage
from ckptool.errors import UsageError, quoted
from ckptool.options import Parameter, nearest
from ckptool.verbs._options import QUOTE_RULES, was_redirected

# What typer raises when a command line cannot be parsed; of its classes it exports the one below.
_BadUsage: Any = typer.BadParameter.__mro__[1]


def parse(verb: str, parameters: Sequence[Parameter], words: Sequence[str]) -> dict[str, Any]:
    """What was typed, by the names of the parameters; None for what was not. Raises `UsageError`."""
    try:
        found = parser(verb, parameters)(args=list(words), prog_name=f"ckptool {verb}", standalone_mode=False)
    except _BadUsage as error:
        raise _refusal(verb, parameters, error) from error
    typed: dict[str, Any] = found
    return {name: value.value if isinstance(value, Enum) else value for name, value in typed.items()}


def parser(verb: str, parameters: Sequence[Parameter]) -> Any:
    """The command of a verb, as typer has it, which gives what was typed."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    def typed(**given: Any) -> dict[str, Any]:
        return given

    command: Any = typed
    command.__signature__ = inspect.Signature([_as_typer_takes(each) for each in parameters])
    command.__annotations__ = {}
    app.command(verb, add_help_option=False)(command)
    made: Any = typer.main.get_command(app)
    for option in made.params:
        option.process_value = _as_typed(option)
    return made


def _as_typer_takes(parameter: Parameter) -> inspect.Parameter:
    name, kind, default, option = parameter
    more = {"min": option.least} if option.flags else {}
    declare: Any = typer.Option if option.flags else typer.Argument
    meta = declare(*option.flags, metavar=option.metavar or None, help=option.help, hidden=option.hidden, **more)
    if option.choices:
        kind = Enum("Choices", [(each, each) for each in option.choices], type=str)  # type: ignore[misc, no-redef]
        default = kind(default) if default in option.choices else default
    if parameter.is_needed:
        default = inspect.Parameter.empty
    elif default in (None, inspect.Parameter.empty) or kind == list[str]:
        kind, default = kind | None, None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, meta])


def _as_typed(option: Any) -> Callable[[Any, Any], Any]:
    """Takes texts and defaults as they are: typer would import pydantic to check them, a third of the time of a small
    `inspect`."""
    process: Callable[[Any, Any], Any] = option.process_value
    kind = getattr(option, "type_descriptor", None)  # which older typers do not have
    is_text = kind is not None and kind.annotation in (str, list[str])
    is_list = option.nargs == -1 or getattr(option, "multiple", False)

    def value_of(context: Any, value: Any) -> Any:
        if value is None and not option.required:
            return () if is_list else None
        if value is None or not (is_text or value is option.default):
            return process(context, value)
        return list(value) if is_list else value

    return value_of


def _refusal(verb: str, parameters: Sequence[Parameter], error: Any) -> UsageError:
    """The error for a command line that could not be parsed, with what is allowed there."""
    command, line = f"ckptool {verb}", usage(verb, parameters)
    file = next((word for word in sys.argv[1:] if word.startswith("-") and os.path.lexists(word)), "")
    fix = f"For the file: {quoted(os.path.join('.', file))}" if file else f"See: {command} --help"
    message = " ".join(error.message.split()).rstrip(".")
    kind = type(error).__name__
    named = getattr(error.param, "name", "") if hasattr(error, "param") else ""
    parameter = next((each for each in parameters if each.name == named), None)
    if kind == "NoSuchOption":
        meant = nearest(error.option_name, [name for each in parameters for name in each.option.flags])
        what = f"{command} has no option {error.option_name}"
        return UsageError(what, f"Did you mean {meant}?" if meant else line, fix)
    if kind == "MissingParameter" and parameter is not None:
        return UsageError(f"{command} needs {_called(parameter)}", line, fix)
    if kind == "BadOptionUsage":
        word = "takes no value" if "does not take" in message else "needs a value, and was given none"
        return UsageError(f"{error.option_name} {word}", line, fix)
    if kind == "BadParameter" and parameter is not None:
        value = _value_of(error)
        given = f", not {value!r}" if value is not None else ""
        return UsageError(f"{_flag_of(parameter)} takes {_allowed(parameter)}{given}", line, fix)
    more = message.rpartition("(")[2].rstrip(")") if "extra argument" in message else ""
    if more and was_redirected(more.split()):
        return UsageError(f"{command} was given {more}, which is a part of a rule", *QUOTE_RULES)
    return UsageError(f"{command} was given too many arguments: {more}" if more else message, line, fix)


def _called(parameter: Parameter) -> str:
    """An argument by its name in the help, an option with it."""
    name = parameter.option.metavar or parameter.name.upper()
    return f"{_flag_of(parameter)} {name}" if parameter.option.flags else name


def _flag_of(parameter: Parameter) -> str:
    """The long name of an option; of an argument what its help calls it."""
    return parameter.option.flags[-1] if parameter.option.flags else parameter.option.metavar


def _value_of(error: Any) -> str | None:
    """The value that was refused, where the parser says it."""
    if callable(details := getattr(error.__cause__, "errors", None)):
        return str(details()[0].get("input"))
    found = re.match(r"'?(.*?)'? is not ", error.message)
    return found[1] if found else None


def _allowed(parameter: Parameter) -> str:
    """The values that a parameter takes, in words."""
    _, kind, _, option = parameter
    if option.choices:
        return f"{', '.join(option.choices[:-1])} or {option.choices[-1]}"
    number = "a whole number" if kind is int else "a number"
    return number + (f" of at least {option.least:g}" if option.least is not None else "")
