"""The command line of a verb, parsed by typer; and what it does not take, in words."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from ckptool.cli.help import usage
from ckptool.commands import Parameter, nearest
from ckptool.errors import UsageError, quoted
from ckptool.verbs._options import QUOTE_RULES, was_redirected

# What typer raises when a command line cannot be parsed; of its classes it exports the one below.
_BadUsage: Any = typer.BadParameter.__mro__[1]


def parse(verb: str, parameters: Sequence[Parameter], words: Sequence[str]) -> dict[str, Any]:
    """What was typed, by the names of the parameters, else their defaults. Raises `UsageError`."""
    try:
        typed = parser(verb, parameters)(args=list(words), prog_name=f"ckptool {verb}", standalone_mode=False)
    except _BadUsage as error:
        raise _refusal(verb, parameters, words, error) from error
    values: dict[str, Any] = {}
    for name, _, default, option in parameters:
        value = typed[name]
        if value in (None, ()):
            values[name] = None if default is inspect.Parameter.empty else default
        else:
            value = value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
            values[name] = value if option.parse is None else option.parse(option.flags[0], value)
    return values


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
    name, kind, _, option = parameter
    declare: Any = typer.Option if option.flags else typer.Argument
    meta = declare(*option.flags, metavar=option.metavar or None, **({"min": option.least} if option.flags else {}))
    if option.choices:
        kind = Enum("Choices", [(each, each) for each in option.choices], type=str)  # type: ignore[misc, no-redef]
    default: Any = inspect.Parameter.empty if parameter.is_needed else False if kind is bool else None
    kind = kind | None if default is None else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, meta])


def _as_typed(option: Any) -> Callable[[Any, Any], Any]:
    """Takes texts and flags as they are: typer would import pydantic to check them, a third of the time of a small
    `inspect`."""
    process: Callable[[Any, Any], Any] = option.process_value
    kind = getattr(option, "type_descriptor", None)  # which older typers do not have
    is_plain = kind is not None and kind.annotation in (str, list[str], bool)

    def value_of(context: Any, value: Any) -> Any:
        if value is None and not option.required:
            return None
        return value if is_plain and value is not None else process(context, value)

    return value_of


def _refusal(verb: str, parameters: Sequence[Parameter], words: Sequence[str], error: Any) -> UsageError:
    """The error for a command line that could not be parsed: what the parser says, and what stands there."""
    what = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    why, more = usage(verb, parameters), ""
    if type(error).__name__ == "NoSuchOption":
        what = f"ckptool {verb} has no option {error.option_name}"
        meant = nearest(error.option_name, [name for each in parameters for name in each.option.flags])
        why = f"Did you mean {meant}?" if meant else why
    elif "extra argument" in what:
        more = what.rpartition("(")[2].rstrip(")")
    if more and was_redirected(more.split()):
        return UsageError(f"ckptool {verb} was given {more}, which is a part of a rule", *QUOTE_RULES)
    file = next((word for word in words if word.startswith("-") and os.path.lexists(word)), "")
    fix = f"For the file: {quoted(os.path.join('.', file))}" if file else f"See: ckptool {verb} --help"
    return UsageError(what, why, fix)
