"""What is typed for a verb, from the declaration of its function: its help, and its parsing by typer."""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Annotated, Any, get_args

from ckptool import commands
from ckptool.commands import ALIASES, VERBS, Declared, Parameter, signature_of
from ckptool.errors import UsageError, listed, quoted
from ckptool.facts import Report, Table
from ckptool.render.lines import Style, lines

HELP_FLAGS = ("-h", "--help")
WIDEST = 100  # columns; longer lines are hard to read
MORE = "More options"
ABOUT = """\
Open any PyTorch checkpoint without running its code, without importing torch, without loading it into memory.

See it, compare it, fix it, convert it. Nothing is written without -o, -d or --in-place, or replaced without -f."""
_ROOM = 24  # columns for the names; what is longer has a line of its own


def program_help(style: Style, verbs: Sequence[str] = tuple(VERBS)) -> str:
    """The verbs by their groups, each with its line."""
    is_whole = len(verbs) == len(VERBS)
    prose = [textwrap.wrap(text, _width(style)) for text in ABOUT.split("\n\n")] if is_whole else []
    usages = [
        "Usage: ckptool COMMAND [OPTIONS] …",
        *(["       ckptool FILE            what is in it: inspect"] * is_whole),
    ]
    blocks = [usages, *prose]
    for group in dict.fromkeys(VERBS[verb].group for verb in verbs):
        rows = [(verb, VERBS[verb].about) for verb in verbs if VERBS[verb].group == group]
        blocks.append(_table(style, group.capitalize(), rows))
    rows = [("-h, --help", "Show this message; for one command: ckptool help inspect")]
    rows += [("--version", "Print the version.")] if is_whole else []
    return _page([*blocks, _table(style, "Options", rows)])


def verb_help(verb: str, declared: Declared, parameters: Sequence[Parameter], style: Style) -> str:
    """All parameters of a verb, by the parts of the help, and its examples."""
    blocks = [[usage(verb, parameters)], textwrap.wrap(VERBS[verb].about, _width(style))]
    shown = [param for param in parameters if not param.option.hidden]
    rows = [(called(param), about(param)) for param in shown if not param.option.flags]
    blocks += [_table(style, "Arguments", rows)] if rows else []
    several = sum(param.option.rare for param in shown) > 1  # a single rare one is listed with the others
    flags = [param for param in shown if param.option.flags]
    options = [(MORE if param.option.rare and several else param.option.panel, param) for param in flags]
    for panel in sorted(dict.fromkeys([None, *(panel for panel, _ in options)]), key=lambda panel: panel == MORE):
        rows = [(called(param), about(param)) for place, param in options if place == panel]
        rows += [("-h, --help", "Show this message.")] if panel is None else []
        blocks.append(_table(style, panel or "Options", rows))
    examples = [part for line, purpose in declared.examples for part in (f"  # {purpose}", f"  {line}")]
    blocks.append([style.bold("Examples" if len(examples) > 2 else "Example"), *examples])
    others = [f"ckptool {alias}" for alias, target in ALIASES.items() if target == verb]
    return _page([*blocks, *([[f"Also: {', '.join(others)}"]] if others else [])])


def usage(verb: str, parameters: Iterable[Parameter]) -> str:
    """`Usage: ckptool diff [OPTIONS] A B`."""
    arguments = [param for param in parameters if not param.option.flags]
    words = [called(param) if param.is_needed else f"[{called(param).strip('[]')}]" for param in arguments]
    return " ".join(["Usage: ckptool", verb, "[OPTIONS]", *words])


def called(parameter: Parameter) -> str:
    """A parameter as its help calls it: `-o, --out OUT`, `FILE…`."""
    option = parameter.option
    if not option.flags:
        is_repeated = (option.several or option.each) and not option.metavar.endswith("…")
        return f"{option.metavar}…" if is_repeated else option.metavar
    value = "|".join(option.choices) or option.metavar
    return ", ".join(option.flags) + (f" {value}" if parameter.kind is not bool else "")


def about(parameter: Parameter) -> str:
    option, default = parameter.option, parameter.default
    words = [option.help]
    if option.flags and option.several:
        words.append("Repeatable.")
    if option.least is not None and option.least > 0:
        words.append(f"[at least {option.least:g}]")
    if parameter.is_needed and option.flags:
        words.append("[required]")
    if option.flags and type(default) in (str, int, float) and default not in ("", *option.flags):
        words.append(f"[default: {default}]")
    return " ".join(words)


def _table(style: Style, title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    page = Style(style.colour, _width(style))
    return page.page("\n".join(lines([Table(rows, title, hang=_ROOM)], page))).split("\n")


def _width(style: Style) -> int:
    return max(min(style.width or 80, WIDEST), 40)


def _page(blocks: Iterable[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def typed_parameters(function: Any) -> list[Parameter]:
    """All parameters that are typed for a verb: its own, those of its hooks and its report's view, the program's."""
    declared: Declared = function.verb
    typed: dict[str, Parameter] = {}
    sources = [function, *filter(None, (declared.from_words, declared.first_try))]
    kinds = [signature_of(source).return_annotation for source in sources]
    reports = [report for kind in kinds for report in get_args(kind) or (kind,) if isinstance(report, type)]
    sources += [report.told for report in reports if issubclass(report, Report)]
    taken: set[str] = set()
    for param in (param for source in sources for param in commands.parameters_of(source)):
        if param.name not in typed and taken.isdisjoint(param.option.flags):  # `--to DEVICE` wins over `--to CONTAINER`
            typed[param.name] = param
            taken.update(param.option.flags)
    names = ["quiet"] if "training" in commands.watched(function).values() else []
    are_files = any(param.option.each for param in typed.values())
    if (writes(function) and not declared.one_output) or (are_files and "out" in typed):
        names += ["folder", "skip_refused", "jobs"]
    elif are_files and "jobs" not in typed:
        names += ["jobs"]
    from ckptool.verbs._options import program_options  # with types that the program's help does without

    program = {param.name: param for param in commands.parameters_of(program_options)}
    return [*typed.values(), *(program[name] for name in (*names, "as_json", "as_form"))]


def writes(function: Any) -> bool:
    """True for a verb that always writes its output, whatever it finds."""
    sig = signature_of(function)
    kinds = (kind for kind in get_args(sig.return_annotation) if isinstance(kind, type) and issubclass(kind, Report))
    return "out" in sig.parameters and {getattr(kind, "is_written", False) for kind in kinds} == {True}


def parse(verb: str, parameters: Sequence[Parameter], words: Sequence[str]) -> dict[str, Any]:
    """What was typed, by the names of the parameters, else their defaults. Raises `UsageError`."""
    from typer import BadParameter

    bad_usage: Any = BadParameter.__mro__[1]  # the base of all parse errors; typer exports only this one
    try:
        typed = parser(verb, parameters)(args=list(words), prog_name=f"ckptool {verb}", standalone_mode=False)
    except bad_usage as error:
        raise _refusal(verb, parameters, words, error) from error
    values: dict[str, Any] = {}
    for param in parameters:
        value, parse = typed[param.name], param.option.parse
        if value in (None, ()):
            value = None if param.default is inspect.Parameter.empty else param.default
        else:
            value = value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
            value = value if parse is None else parse(param.option.flags[0], value)
        values[param.name] = value
    return values


def parser(verb: str, parameters: Sequence[Parameter]) -> Any:
    """The typer command of a verb. Called, it returns what was typed: None, or False, where nothing was."""
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    typed = []
    for param in parameters:
        option, metavar = param.option, param.option.metavar or None
        kind: Any = Enum("Choices", [(c, c) for c in option.choices], type=str) if option.choices else param.kind
        meta: Any = typer.Argument(metavar=metavar)
        if option.flags:
            meta = typer.Option(*option.flags, metavar=metavar, min=option.least)
        default: Any = inspect.Parameter.empty if param.is_needed else False if kind is bool else None
        annotation: Any = Annotated[kind | None if default is None else kind, meta]
        kinds = inspect.Parameter.KEYWORD_ONLY
        typed.append(inspect.Parameter(param.name, kinds, default=default, annotation=annotation))
    command: Any = lambda **arguments: arguments  # noqa: E731
    command.__signature__ = inspect.Signature(typed)
    app.command(verb, add_help_option=False)(command)
    parser: Any = typer.main.get_command(app)
    for param in parser.params:
        param.process_value = partial(_parsed_value, param, param.process_value)
    return parser


def _parsed_value(option: Any, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    """Texts and flags as they are: typer would import pydantic for them, a third of the time of a small `inspect`."""
    kind = getattr(option, "type_descriptor", None)  # which older typers do not have
    if value is None and not option.required:
        return None
    is_plain = kind is not None and kind.annotation in (str, list[str], bool) and value is not None
    return value if is_plain else process(context, value)


def _refusal(verb: str, parameters: Sequence[Parameter], words: Sequence[str], error: Any) -> UsageError:
    """The error for a command line that could not be parsed: the parser's message, and what was typed."""
    from ckptool.verbs._options import QUOTE_RULES, was_redirected

    what = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    why, surplus = usage(verb, parameters), ""
    if type(error).__name__ == "NoSuchOption":
        what = f"ckptool {verb} has no option {error.option_name}"
        flags = {flag.lstrip("-"): flag for param in parameters for flag in param.option.flags}  # dashes make all alike
        in_python = {f"--{param.name.replace('_', '-')}": param.option.flags[-1:] for param in parameters}
        closest = flags.get(commands.nearest(error.option_name.lstrip("-"), flags), "")
        closest = next(iter(in_python.get(error.option_name, ())), closest)
        by_verb = ((name, commands.parameters_of(commands.function_of(name))) for name in VERBS)
        others = [name for name, params in by_verb if any(error.option_name in param.option.flags for param in params)]
        why = f"It is an option of {listed(others, 4)}." if others else f"Did you mean {closest}?" if closest else why
    elif type(error).__name__ == "MissingParameter":
        missing = next(param for param in parameters if param.name == error.param.name)
        text = missing.option.help.rstrip(".") if missing.option.flags else ""
        what = f"ckptool {verb} needs {called(missing)}" + (f": {text[0].lower()}{text[1:]}" if text else "")
    elif "extra argument" in what:
        surplus = what.rpartition("(")[2].rstrip(")")
        surplus = surplus if len(surplus) < 80 else f"{surplus[:79]}…"
        what, why = f"too many arguments for ckptool {verb}: {surplus}", f"{why}; a part of a file is FILE#ADDRESS"
    if surplus and was_redirected(surplus.split()):
        return UsageError(f"ckptool {verb} was given {surplus}, which is part of a rule", *QUOTE_RULES)
    file = next((word for word in words if word.startswith("-") and os.path.lexists(word)), "")
    why = f"{file} is a file, but begins with a dash, as options do." if file else why
    fix = f"For the file: {quoted(os.path.join('.', file))}" if file else f"See: ckptool {verb} --help"
    return UsageError(what, why, fix)
