"""The program: finds the command, prints what it answers, and turns whatever goes wrong into words and an exit code."""

from __future__ import annotations

import fcntl
import gc
import hashlib  # noqa: F401 (imported when memory has run out, it prints tracebacks of its own)
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptool.checkpoint.commands import ALIASES, VERBS, function_name, with_verb
from ckptool.checkpoint.workers import deliver_signal_again, stop
from ckptool.cli.output import (
    FORM,
    AnswerForm,
    LostAnswer,
    failed_silently,
    in_words,
    say,
    style_of,
    tell,
    unknown_command,
)
from ckptool.errors import CkptoolError, printable
from ckptool.render.markdown import markdown

if TYPE_CHECKING:
    from ckptool.cli.output import Answers, Json

COMMANDS = VERBS
INTERRUPTED = 130
LEAST_WIDTH = 20  # columns
RESERVE = 1 << 20  # bytes, kept to tell an error in where memory has run out
HELP = ["-h", "--help"]
FIRST_STEPS = """\
ckptool looks into PyTorch checkpoints, and fixes, converts and combines them.

  ckptool inspect model.pt          what is in it, and what is wrong with it
  ckptool doctor model.pt           why it does not load, and what fixes it
  ckptool diff model.pt other.pt    what differs between two

Two checkpoints to try it on: ckptool demo
All commands: ckptool --help
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code. Without arguments: as the program, which ends here."""
    if arguments is None:
        _as_program()
    done: list[Json] = []
    debug = os.environ.get("CKPTOOL_DEBUG")  # asked now: where memory has run out, even that fails
    words = list(sys.argv[1:] if arguments is None else arguments)
    FORM.set(_form_of(words))
    reserve: list[bytes] = []
    try:
        reserve.append(bytes(RESERVE))
        code = _run(words, done)
    except (KeyboardInterrupt, typer.Abort):
        tell("interrupted\n")
        code = INTERRUPTED
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
        if isinstance(stop.__context__, BrokenPipeError):
            code = 0  # rich gives up where nobody reads the help to its end (`| head`)
    except Exception as error:  # the one place that tells all of them
        if debug:
            raise
        reserve.clear()
        try:
            code = _told(error, done)
        except Exception as another:  # noqa: BLE001 (not even for that there is room: memory or files have run out)
            code = _told_in_short(MemoryError() if isinstance(another, MemoryError) else error)
    if arguments is None:
        os._exit(code)  # at once: taking a large tree apart takes as long as building it
    return code


def _run(words: list[str], done: list[Json]) -> int:
    words = with_verb(words)
    below = [name for name in COMMANDS if words and name.startswith(f"{words[0]} ")]  # `lora` is the first word of some
    if below and (not words[1:] or words[1] in HELP):
        named, words = below, words[1:]
    elif words[:1] and not words[0].startswith("-") and words[0] not in COMMANDS:
        raise unknown_command(" ".join(words[: 2 if below else 1]), [*COMMANDS, *ALIASES])
    else:
        named = words[:1] if words[:1] and words[0] in COMMANDS else list(COMMANDS)  # one, where it is clear which
    lists = not words or words[0] in (*HELP, "--version")  # no command runs
    answers: Any = parser(named, bare=lists)(args=words, prog_name="ckptool", standalone_mode=False)
    return answers if isinstance(answers, int) else _print(answers, done)


def parser(names: Sequence[str], bare: bool = False) -> Any:
    """The program with these of its commands.  bare: without their options, to list them."""
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": HELP}
    )
    app.callback(invoke_without_command=True)(program)
    for name in names:
        function = function_of(name)
        others = [alias for alias, verb in ALIASES.items() if verb == name]
        examples = epilog(function.examples, others)
        add = app.command(name, rich_help_panel=VERBS[name].group.capitalize(), epilog=examples)
        add(_without_options(function) if bare else function)
    return _adjusted(app)


def _without_options(function: Any) -> Callable[[], None]:
    def bare() -> None:
        """The help of the command."""

    bare.__doc__ = function.__doc__
    return bare


def epilog(examples: Iterable[tuple[str, str]], aliases: Sequence[str] = ()) -> str:
    r"""The examples of a command, and its other names, as typer wants them: after `\b` its lines stay lines."""
    lines = [part for line, purpose in examples for part in (f"# {purpose}", line)]
    also = ["", "\b", f"Also: {', '.join(f'ckptool {alias}' for alias in aliases)}"] if aliases else []
    return "\n".join(["\b", "Examples:" if len(lines) > 2 else "Example:", *lines, *also])


def function_of(command: str) -> Any:
    """The function of a command, whose signature declares its options."""
    from ckptool.cli.options import in_forms

    return in_forms(getattr(import_module(f"ckptool.cli.{VERBS[command].group}"), function_name(command)))


def _adjusted(app: typer.Typer) -> Any:
    """The commands, with flags that do not ask for a `<bool>` in the help, and texts that are taken as they are
    typed."""
    program: Any = typer.main.get_command(app)
    for command in (program, *program.commands.values()):
        own_help = command.get_help_option(typer.Context(command, help_option_names=HELP))
        for option in (*command.params, own_help):
            if getattr(option, "is_flag", False):
                option.metavar = ""
            option.process_value = _as_typed(option)
    return program


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


def program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> int:
    """Open any PyTorch checkpoint without running its code, without importing torch, without loading it into memory.

    See it, compare it, fix it, convert it. Nothing is written without -o, -d or --in-place, or replaced without -f.
    """
    if version:
        from ckptool import __version__

        say(f"ckptool {__version__}\n")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        tell(FIRST_STEPS)
        raise typer.Exit(2)
    return 0


def _print(answers: Answers, done: list[Json]) -> int:
    """Prints the pieces of an answer as they come, or one JSON object at the end."""
    style, code = style_of(sys.stdout), 0
    with ExitStack() as stack:
        if isinstance(answers.each, Generator):  # whatever happens, no process is left that works for it
            stack.callback(answers.each.close)
        for number, answer in enumerate(answers.each):
            code = max(code, answer.exit_code)
            if isinstance(answer, CkptoolError):
                done += _told_of_one(answer)
            elif answers.as_json:
                done.append(answer.json())
            elif FORM.get() is AnswerForm.markdown:
                say("\n" * bool(number) + markdown(answer.text(style)))
            else:
                say(("\n" if number and answers.separate else "") + answer.text(style))
    if answers.as_json:
        from ckptool.render.json import dumps, results_json

        say(dumps(results_json(done)) + "\n")
    return code


def _form_of(words: Sequence[str]) -> AnswerForm:
    """The form that a command line asks for, whether or not it can be parsed."""
    asked = re.findall(r"^--(?:format[=\n])?(json|markdown)$", "\n".join(words), re.MULTILINE)
    return AnswerForm(asked[-1]) if asked else AnswerForm.text


def _told(error: Exception, done: list[Json]) -> int:
    """Prints an error in its three parts, as text, JSON or Markdown, and returns its exit code."""
    from ckptool.render.error import error_text

    problem: CkptoolError = in_words(error)
    if FORM.get() is AnswerForm.markdown and not isinstance(problem, LostAnswer):
        with suppress(LostAnswer):
            say(markdown(error_text(problem)))
    if not (FORM.get() is AnswerForm.json and _said_as_json(problem, done)):
        tell(error_text(problem, style_of(sys.stderr)))
    return problem.exit_code


def _told_of_one(problem: CkptoolError) -> list[Json]:
    """Prints the error of one of several files; as JSON it stands among their results."""
    from ckptool.render.error import error_json

    if FORM.get() is AnswerForm.json:
        return [error_json(problem)]
    _told(problem, [])
    return []


def _said_as_json(problem: CkptoolError, done: list[Json]) -> bool:
    """Prints an error as JSON with what was done before it; False where standard output takes nothing."""
    from ckptool.render.error import error_json
    from ckptool.render.json import dumps

    if isinstance(problem, LostAnswer):
        return False
    try:
        say(dumps(error_json(problem, done)) + "\n")
    except LostAnswer:
        return False
    return True


def _told_in_short(error: Exception) -> int:
    """Prints an error using only what is imported already: memory or open files have run out."""
    code, what = "bug", f"{type(error).__name__}: {printable(str(error))}"
    if isinstance(error, CkptoolError):
        code, what = error.code, error.what
    elif isinstance(error, (OSError, ImportError)):
        code, what = "io", f"a system limit was reached: {printable(str(error))}"
    elif isinstance(error, MemoryError) or failed_silently(error):
        code, what = "limit-exceeded", "there is not enough memory"
    tell(f"error[{code}]: {what}\n  Outputs were left as they were.\n")
    return 2


def _as_program() -> None:
    _open_standard_streams()
    _forget_odd_widths()
    sys.unraisablehook = deliver_signal_again
    gc.disable()  # it would search the tree again and again; nothing here lives long enough to be collected
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            signal.signal(number, stop)


def _open_standard_streams() -> None:
    """Opens those that are closed (`>&-`), or open the wrong way (`1<FILE`), to nowhere.

    A file that got the number of a closed one would have messages written into it.
    """
    for name, mode, wrong in (("stdin", "r", os.O_WRONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_RDONLY)):
        stream = getattr(sys, name)
        if stream is None or fcntl.fcntl(stream.fileno(), fcntl.F_GETFL) & os.O_ACCMODE == wrong:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the help has letters that not every encoding has


def _forget_odd_widths() -> None:
    """Ignores terminal widths that the help cannot be printed in: it would come out empty, or not at all."""
    for name in ("COLUMNS", "TERMINAL_WIDTH"):
        text = os.environ.get(name, "80")
        if not (text.isascii() and text.isdecimal() and len(text) < 5 and int(text) >= LEAST_WIDTH):
            del os.environ[name]
