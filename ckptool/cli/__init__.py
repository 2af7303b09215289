"""The program: finds the command, prints what it answers, and turns whatever goes wrong into words and an exit code."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, NoReturn

from ckptool.checkpoint.files import while_open
from ckptool.checkpoint.paths import named_urls
from ckptool.checkpoint.workers import deliver_signal_again, stop
from ckptool.cli.help import FLAGS, program_help, verb_help
from ckptool.cli.output import (
    FORM,
    LostAnswer,
    in_words,
    names_place,
    say,
    shown_progress,
    style_of,
    tell,
    unknown_command,
)
from ckptool.commands import ALIASES, VERBS, function_of, with_verb
from ckptool.errors import CkptoolError
from ckptool.render.lines import error_text

if TYPE_CHECKING:
    from ckptool.cli.output import Json

INTERRUPTED = 130
RESERVE = 1 << 20  # bytes, kept to tell an error in where memory has run out
FIRST_STEPS = """\
ckptool looks into PyTorch checkpoints, and fixes, converts and combines them.

  ckptool model.pt                  what is in it, and what is wrong with it
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
    forms = re.findall(r"^--(?:format[=\n])?(json|markdown)$", "\n".join(words), re.MULTILINE)  # parsed or not
    FORM.set(forms[-1] if forms else "text")
    reserve: list[bytes] = []
    try:
        reserve.append(bytes(RESERVE))
        with while_open():
            named_urls(" ".join(words))  # from here on, no text that is printed has what is secret in them
            code = _run(words, done)
    except KeyboardInterrupt:
        _interrupts.append(signal.SIGINT)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except Exception as error:  # the one place that tells all of them
        if debug:
            raise
        reserve.clear()
        try:
            code = 0 if _interrupts else _told(error, done)
        except Exception as another:  # noqa: BLE001 (not even for that there is room: memory or files have run out)
            problem = in_words(MemoryError() if isinstance(another, MemoryError) else error)
            tell(f"error[{problem.code}]: {problem.what}\n  Outputs were left as they were.\n")
            code = 2
    if _interrupts:
        _interrupts.clear()
        tell("interrupted\n")
        code = INTERRUPTED
    if arguments is None:
        os._exit(code)  # at once: taking a large tree apart takes as long as building it
    return code


def _run(words: list[str], done: list[Json]) -> int:
    words = with_verb(words)
    first = words[0] if words else ""
    asked = words[: words.index("--")] if "--" in words else words
    below = [name for name in VERBS if first and name.startswith(f"{first} ")]  # `lora` is the first word of some
    if not words:
        tell(FIRST_STEPS)
        return 2
    if first in ("--version", "version"):
        from ckptool import __version__

        say(f"ckptool {__version__}\n")
        return 0
    if first in FLAGS or (below and (not words[1:] or words[1] in FLAGS)):
        say(program_help(style_of(sys.stdout), below or tuple(VERBS)))
        return 0
    if first not in VERBS and not below and names_place(first):
        first, words = "inspect", ["inspect", *words]
    if first not in VERBS:
        raise unknown_command(" ".join(words[: 2 if below else 1]), [*VERBS, *ALIASES])
    from ckptool.cli.parser import parse, typed_parameters

    function = function_of(first)
    parameters = typed_parameters(function)
    if not {*FLAGS}.isdisjoint(asked):
        say(verb_help(first, function.verb, parameters, style_of(sys.stdout)))
        return 0
    from ckptool.cli.answers import answers

    found, separate, label = answers(first, function, parse(first, parameters, words[1:]))
    form, code = FORM.get(), 0
    with shown_progress(label), ExitStack() as stack:
        if isinstance(found, Generator):  # whatever happens, no process is left that works for it
            stack.callback(found.close)
        for number, answer in enumerate(found):  # each is printed as it comes; JSON is one object at the end
            code = max(code, answer.exit_code)
            if isinstance(answer, CkptoolError) and form == "json":  # of one file: it stands among the results
                from ckptool.render.json import error_json

                done.append(error_json(answer))
            elif isinstance(answer, CkptoolError):
                _told(answer, [])
            elif form == "json":
                done.append(answer.content)
            elif form == "markdown":
                from ckptool.render.html import markdown

                say(("\n" if number else "") + markdown(answer.content))
            else:
                say(("\n" if number and separate else "") + answer.content)
    if form == "json":
        from ckptool.render.json import dumps, results_json

        say(dumps(results_json(done)) + "\n")
    return code


def _told(error: Exception, done: list[Json]) -> int:
    """Prints an error in its three parts, as text, JSON or Markdown, and returns its exit code; as JSON with what was
    done before it. Where standard output takes nothing, standard error has it."""
    problem: CkptoolError = in_words(error)
    as_text = error_text(problem, style_of(sys.stderr))
    form = "text" if isinstance(problem, LostAnswer) else FORM.get()
    with suppress(LostAnswer):
        if form == "json":
            from ckptool.render.json import dumps, error_json

            say(dumps(error_json(problem, done)) + "\n")
            return problem.exit_code
        if form == "markdown":
            from ckptool.render.html import markdown

            say(markdown(error_text(problem)))
    tell(as_text)
    return problem.exit_code


_interrupts: list[int] = []  # noted, since modules that are half imported drop the exception, or raise another for it


def _interrupt(number: int, frame: object) -> NoReturn:
    _interrupts.append(number)
    raise KeyboardInterrupt


def _as_program() -> None:
    # Streams that are closed (`>&-`) go to nowhere: a file that got the number of one would have messages written into
    # it.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the help has letters that not every encoding has
    sys.unraisablehook = deliver_signal_again
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            signal.signal(number, stop)
