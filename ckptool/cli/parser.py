"""What is typed for a verb, by the declaration of its function; parsed by typer; and what is not taken, in words."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, get_args

from ckptool.cli.help import called, usage
from ckptool.commands import Declared, Parameter, nearest, option, parameters_of, signature_of, watched
from ckptool.errors import UsageError, quoted
from ckptool.facts import Report
from ckptool.verbs._options import QUOTE_RULES, Folder, Jobs, SkipRefused, was_redirected

_FORMS = "text, json, or markdown: for a job summary or a comment."


def typed_parameters(function: Any) -> list[Parameter]:
    """All that is typed for a verb: its own parameters, those of its hooks and of its report's view, the program's."""
    declared: Declared = function.verb
    found: dict[str, Parameter] = {}
    sources = [function, *filter(None, (declared.from_words, declared.first_try))]
    kinds = [signature_of(source).return_annotation for source in sources]
    reports = [each for kind in kinds for each in get_args(kind) or (kind,) if isinstance(each, type)]
    sources += [each.told for each in reports if issubclass(each, Report)]
    taken: set[str] = set()
    for each in (each for source in sources for each in parameters_of(source)):
        if each.name not in found and taken.isdisjoint(each.option.flags):  # `--to DEVICE` wins over `--to CONTAINER`
            found[each.name] = each
            taken.update(each.option.flags)
    names = ["quiet"] if "training" in watched(function).values() else []
    are_files = any(each.option.each for each in found.values())
    if (writes(function) and not declared.one_output) or (are_files and "out" in found):
        names += ["folder", "skip_refused", "jobs"]
    elif are_files and "jobs" not in found:
        names += ["jobs"]
    program = {each.name: each for each in parameters_of(_program)}
    return [*found.values(), *(program[name] for name in (*names, "as_json", "as_form"))]


def _program(
    *,
    folder: Folder = None,
    skip_refused: SkipRefused = False,
    jobs: Jobs = 1,
    quiet: Annotated[bool, option("-q --quiet", "Show no progress.")] = False,
    as_json: Annotated[bool, option("--json", "Print one JSON object.")] = False,
    as_form: Annotated[Literal["text", "json", "markdown"] | None, option("--format", _FORMS, rare=True)] = None,
) -> None:
    """The options of the program: the first three for many files, the next for runs, the last for all."""


def writes(function: Any) -> bool:
    """True for a verb that writes its output whatever it finds."""
    whole = signature_of(function)
    kinds = (each for each in get_args(whole.return_annotation) if isinstance(each, type) and issubclass(each, Report))
    return "out" in whole.parameters and {getattr(each, "is_written", False) for each in kinds} == {True}


# With typer, which the help does not need -----------------------------------------------------------------------------


def parse(verb: str, parameters: Sequence[Parameter], words: Sequence[str]) -> dict[str, Any]:
    """What was typed, by the names of the parameters, else their defaults. Raises `UsageError`."""
    from typer import BadParameter

    bad_usage: Any = BadParameter.__mro__[1]  # what is raised for all that cannot be parsed; typer exports this one
    try:
        typed = parser(verb, parameters)(args=list(words), prog_name=f"ckptool {verb}", standalone_mode=False)
    except bad_usage as error:
        raise _refusal(verb, parameters, words, error) from error
    values: dict[str, Any] = {}
    for each in parameters:
        value, parse = typed[each.name], each.option.parse
        if value in (None, ()):
            value = None if each.default is inspect.Parameter.empty else each.default
        else:
            value = value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
            value = value if parse is None else parse(each.option.flags[0], value)
        values[each.name] = value
    return values


def parser(verb: str, parameters: Sequence[Parameter]) -> Any:
    """The command of a verb, as typer has it, which gives what was typed: None, or False, where nothing was."""
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    typed = []
    for each in parameters:
        asked, metavar = each.option, each.option.metavar or None
        kind: Any = Enum("Choices", [(word, word) for word in asked.choices], type=str) if asked.choices else each.kind
        meta: Any = typer.Argument(metavar=metavar)
        if asked.flags:
            meta = typer.Option(*asked.flags, metavar=metavar, min=asked.least)
        default: Any = inspect.Parameter.empty if each.is_needed else False if kind is bool else None
        annotation: Any = Annotated[kind | None if default is None else kind, meta]
        kinds = inspect.Parameter.KEYWORD_ONLY
        typed.append(inspect.Parameter(each.name, kinds, default=default, annotation=annotation))
    command: Any = lambda **given: given  # noqa: E731
    command.__signature__ = inspect.Signature(typed)
    app.command(verb, add_help_option=False)(command)
    made: Any = typer.main.get_command(app)
    for each in made.params:
        each.process_value = _as_typed(each)
    return made


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
    elif type(error).__name__ == "MissingParameter":
        missing = next(each for each in parameters if each.name == error.param.name)
        text = missing.option.help.rstrip(".") if missing.option.flags else ""
        what = f"ckptool {verb} needs {called(missing)}" + (f": {text[0].lower()}{text[1:]}" if text else "")
    elif "extra argument" in what:
        more = what.rpartition("(")[2].rstrip(")")
        more = more if len(more) < 80 else f"{more[:79]}…"
        what, why = f"too many arguments for ckptool {verb}: {more}", f"{why}; a part of a file is FILE#ADDRESS"
    if more and was_redirected(more.split()):
        return UsageError(f"ckptool {verb} was given {more}, which is a part of a rule", *QUOTE_RULES)
    file = next((word for word in words if word.startswith("-") and os.path.lexists(word)), "")
    fix = f"For the file: {quoted(os.path.join('.', file))}" if file else f"See: ckptool {verb} --help"
    return UsageError(what, why, fix)
