"""The program: finds the command, prints what it answers, and turns whatever goes wrong into words and an exit code."""

from __future__ import annotations

import gc
import inspect
import os
import re
import signal
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from functools import partial
from io import TextIOWrapper
from threading import current_thread, main_thread
from typing import Any, NoReturn

from ckptool import commands
from ckptool.checkpoint import progress
from ckptool.checkpoint.files import while_open
from ckptool.checkpoint.jobs import deliver_signal_again, stop
from ckptool.checkpoint.paths import as_typed, may_exist, named_urls
from ckptool.cli import output
from ckptool.cli.output import FORM, Answer, LostAnswer, answer_of, in_words, say, style_of, tell
from ckptool.cli.parser import HELP_FLAGS, parse, program_help, typed_parameters, verb_help, writes
from ckptool.commands import ALIASES, VERBS, Declared, signature_of, watched
from ckptool.errors import CkptoolError, UsageError, counted, printable, quoted
from ckptool.facts import Page, Report
from ckptool.render.json import Json, dumps, error_json, results_json
from ckptool.render.lines import Style, error_text

Arguments = Mapping[str, Any]
REFUSED = "refused"
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
    results: list[Json] = []
    debug = os.environ.get("CKPTOOL_DEBUG")  # read now: once memory has run out, even that fails
    words = list(sys.argv[1:] if arguments is None else arguments)
    forms = re.findall(r"^--(?:format[=\n])?(json|markdown)$", "\n".join(words), re.MULTILINE)  # parsed or not
    FORM.set(forms[-1] if forms else "text")
    reserve: list[bytes] = []
    try:
        reserve.append(bytes(RESERVE))
        with while_open():
            named_urls(" ".join(words))  # from here on, no printed text shows the secrets in URLs
            code = _run(words, results)
    except KeyboardInterrupt:
        _stopped_by.append(signal.SIGINT)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except Exception as error:  # the one place that reports all errors
        if debug:
            raise
        reserve.clear()
        try:
            code = 0 if _stopped_by else _print_error(error, results)
        except Exception as failure:  # noqa: BLE001 (there is no room even for that: memory or files have run out)
            problem = in_words(MemoryError() if isinstance(failure, MemoryError) else error)
            tell(f"error[{problem.code}]: {problem.what}\n  Outputs were left as they were.\n")
            code = 2
    if _stopped_by:
        code = 128 + _stopped_by[0]
        tell("interrupted\n" if code == INTERRUPTED else "")
        _stopped_by.clear()
    if arguments is None:
        os._exit(code)  # at once: taking a large tree apart takes as long as building it
    return code


def _run(words: list[str], results: list[Json]) -> int:
    words = commands.with_verb(as_typed(words))
    first = words[0] if words else ""
    before_dashes = words[: words.index("--")] if "--" in words else words
    subcommands = [name for name in VERBS if first and name.startswith(f"{first} ")]  # `lora` is the first word of some
    if not words:
        tell(FIRST_STEPS)
        return 2
    if first in ("--version", "version"):
        from ckptool import __version__

        say(f"ckptool {__version__}\n")
        return 0
    if first in HELP_FLAGS or (subcommands and (not words[1:] or words[1] in HELP_FLAGS)):
        say(program_help(style_of(sys.stdout), subcommands or tuple(VERBS)))
        return 0
    if first not in VERBS:
        from ckptool.formats import split

        if not subcommands and may_exist(split(first)[0]):
            first, words = "inspect", ["inspect", *words]
    if first not in VERBS:
        name, names, closest = " ".join(words[: 2 if subcommands else 1]), [*VERBS, *ALIASES], ""
        if name.startswith("-"):
            raise UsageError(f"ckptool has no option {name}", "Options come after the command.", "See: ckptool --help")
        with suppress(OSError):  # a file here was meant, or a command
            files = (file for file in os.listdir() if "." in name or file.startswith(f"{name}."))
            closest = commands.nearest(name, files)
        closest = closest or commands.nearest(name.lower().replace("_", "-"), names)
        see = f"{closest} --help" if closest in names else quoted(closest or "--help")
        why = f"Did you mean '{closest}'?" if closest else ""
        raise UsageError(f"there is no command or file {name!r}", why, f"See: ckptool {see}")
    function = commands.function_of(first)
    parameters = typed_parameters(function)
    if not {*HELP_FLAGS}.isdisjoint(before_dashes):
        say(verb_help(first, function.verb, parameters, style_of(sys.stdout)))
        return 0
    answers, is_spaced, label = _answers(first, function, parse(first, parameters, words[1:]))
    form, code = FORM.get(), 0
    with output.shown_progress(label), ExitStack() as stack:
        if isinstance(answers, Generator):  # whatever happens, no worker process is left
            stack.callback(answers.close)
        for number, answer in enumerate(answers):  # each is printed as it comes; JSON is one object at the end
            code = max(code, answer.exit_code)
            if isinstance(answer, CkptoolError) and form == "json":  # of one file: it is one of the results
                results.append(error_json(answer))
            elif isinstance(answer, CkptoolError):
                _print_error(answer, [])
            elif form == "json":
                results.append(answer.content)
            elif form == "markdown":
                from ckptool.render.html import markdown

                say(("\n" if number else "") + markdown(answer.content))
            else:
                say(("\n" if number and is_spaced else "") + answer.content)
    if form == "json":
        say(dumps(results_json(results)) + "\n")
    return code


def _print_error(error: Exception, results: list[Json]) -> int:
    """Prints an error in its three parts, as text, JSON or Markdown, and returns its exit code; as JSON with the
    results before it. Where standard output takes nothing, standard error has it."""
    problem: CkptoolError = in_words(error)
    as_text = error_text(problem, style_of(sys.stderr))
    form = "text" if isinstance(problem, LostAnswer) else FORM.get()
    with suppress(LostAnswer):
        if form == "json":
            say(dumps(error_json(problem, results)) + "\n")
            return problem.exit_code
        if form == "markdown":
            from ckptool.render.html import markdown

            say(markdown(error_text(problem)))
    tell(as_text)
    return problem.exit_code


# The answers of a verb, one file after the other ----------------------------------------------------------------------


def _answers(verb: str, function: Any, typed: Arguments) -> tuple[Iterable[Answer | CkptoolError], bool, str]:
    """The answers of a verb, one file after the other; whether a blank line stands between them; and the label of its
    progress, where it does not show its own.

    Raises `UsageError` for options that exclude each other, and what the verb raises before its first answer.
    """
    as_json, as_form = typed["as_json"], typed["as_form"]
    if as_json and as_form not in (None, "json"):
        raise UsageError(f"--json and --format {as_form} exclude each other", "Output has one format.", "Choose one.")
    FORM.set("json" if as_json else as_form or "text")
    args = {name: value for name, value in typed.items() if value not in (None, [], ())}  # others have their defaults
    args["as_json"] = FORM.get() == "json"
    style, declared = None if args["as_json"] else style_of(sys.stdout), function.verb
    if declared.from_words is not None:
        with redirect_stdout(sys.stdout if FORM.get() == "text" else sys.stderr):
            prepared = declared.from_words(**_options_of(declared.from_words, args))
        if isinstance(prepared, Report):
            return [answer_of(prepared, style, _options_of(prepared.told, args), prepared.exit())], False, ""
        args |= prepared
    first = next(iter(signature_of(function).parameters))
    several = next((param.option.several for param in commands.parameters_of(function) if param.name == first), False)
    files = args[first] if isinstance(args.get(first), list) and not several else None
    work = partial(_answer, function, args, "" if files is None else first, style)
    is_output = writes(function) or (files is not None and any(map(args.get, ("out", "folder", "in_place"))))
    is_spaced = declared.blank_between and not args.get("quiet") and not is_output
    inputs: list[Any] = [args.get(first)] if files is None else files
    outs = list[Any]()  # where each file is written to, None for in place
    if is_output:
        chosen = [at for at, name in (("-o", "out"), ("-d", "folder"), ("--in-place", "in_place")) if args.get(name)]
        if len(chosen) != 1:
            what = f"{verb} was given {' and '.join(chosen)}" if chosen else f"{verb} needs an output"
            why = "They are mutually exclusive." if chosen else "Nothing is written unless you name an output."
            last = inputs[-1] if len(inputs) > 1 and not may_exist(inputs[-1].partition("#")[0]) else "OUT"
            ways = f"A new file: -o {quoted(last)}" + "; several into a folder: -d DIR" * ("folder" in typed)
            ways += "; the file itself: --in-place" * ("in_place" in typed)
            raise UsageError(what, why, declared.one_output or ways)
        if chosen == ["-o"] and len(inputs) > 1:
            what = f"{counted(len(inputs), 'file')} cannot be written to one"
            raise UsageError(what, "-o names a single output.", "Several into a folder: -d DIR")
        outs = [args.get("out")] * len(inputs)
        if chosen == ["-d"]:
            from ckptool.verbs._many_files import in_folder

            outs = list(in_folder(verb, inputs, args))
    if len(inputs) == 1:
        args |= {"out": outs[0]} if outs else {}
        args |= {"make_folder": True} if outs and "folder" in args else {}
        texts = (name for name in (inputs[0], args.get("out")) if isinstance(name, str))
        label = f"{verb} {printable(os.path.basename(next(texts, '')))}".rstrip()
        shows_own = "training" in watched(function).values()
        return (work(file) for file in inputs), is_spaced, "" if shows_own else label
    from ckptool.verbs._many_files import each_file, write_many

    words = ("fine", "with findings", "not read") if declared.exits else ("read", "", "not read")
    if is_output:
        words = ("would be written" if args.get("dry_run") else "written", "", REFUSED)
    results: Iterator[Any]
    if is_output:
        results = write_many(list(zip(inputs, outs, strict=True)), args, work)
    else:
        results, args["jobs"] = each_file(work, inputs, args.get("jobs", 1)), 1  # the work on one is not divided
    return _with_summary(results, len(inputs), words, style, bool(args.get("quiet"))), is_spaced, verb


def _with_summary(
    results: Iterator[Any], files: int, outcomes: tuple[str, str, str], style: Style | None, quiet: bool
) -> Iterator[Answer | CkptoolError]:
    """The answers on several files, then a line that counts them.  outcomes: words for those that are fine, that have
    findings, that failed."""
    counts = [0, 0, 0]
    for result in results:
        failed = isinstance(result, Exception)
        counts[2 if failed else min(result.exit_code, 1)] += 1
        if failed and outcomes[2] == REFUSED:  # with --skip-refused, the others are written
            result = Answer(error_json(result) if style is None else error_text(result, style), 1)
        yield in_words(result) if isinstance(result, Exception) else result
    if style is not None and not quiet:
        parts = (f"{count:,} {word}" for count, word in zip(counts, outcomes, strict=True) if count)
        yield Answer(f"{counted(files, 'file')}: {', '.join(parts)}\n")


def _options_of(function: Any, args: Arguments) -> dict[str, Any]:
    """The options that a hook or a view names."""
    names = inspect.signature(function).parameters
    takes_all = any(param.kind is param.VAR_KEYWORD for param in names.values())
    return {name: value for name, value in args.items() if takes_all or name in names}


def _answer(function: Any, args: Arguments, first: str, style: Style | None, file: Any, **output_to: Any) -> Answer:
    """The answer on one file, which is the argument called `first`, or is among `args` already.
    output_to: where a verb that writes many files writes this one."""
    from ckptool.formats import split

    args = {**args, **({first: file} if first else {}), **output_to}
    declared: Declared = function.verb
    report = declared.first_try(**_options_of(declared.first_try, args)) if declared.first_try is not None else None
    if report is None:
        keywords = {name: value for name, value in args.items() if name in signature_of(function).parameters}
        hooks = watched(function)
        with ExitStack() as stack:
            for name, style_name in hooks.items():  # what the function reports its progress to
                if style_name == "status":
                    keywords[name] = stack.enter_context(output.status_line())
                elif style_name == "training":
                    gc.enable()  # a run lives long, and the models of its user may be rings of objects
                    keywords[name] = None if args.get("quiet") else stack.enter_context(output.training_progress())
                elif style_name == "lines":
                    keywords[name] = lambda text: tell(text + "\n")
                else:
                    keywords[name] = progress.written if progress.is_watched else None
            if current_thread() is main_thread() and ("training" not in hooks.values() or FORM.get() != "text"):
                stack.enter_context(redirect_stdout(sys.stderr))  # what a model's own code prints
            try:
                report = function(**keywords)
            except CkptoolError as error:
                if isinstance(path := keywords.get("file"), str) and path != "-":
                    error.fill({"FILE": commands.as_argument(split(path)[0])})
                raise
        if "training" in hooks.values() and os.environ.get("RANK", "0") != "0":
            return answer_of(Page(), style, {}, report.exit())  # under torchrun only the first process reports
    return answer_of(report, style, _options_of(report.told, args), report.exit() if declared.exits else 0)


_stopped_by: list[int] = []  # noted, since modules that are half imported drop the exception, or raise another for it


def _stop(number: int, frame: object) -> NoReturn:
    _stopped_by.append(number)
    stop(number, frame)


def _as_program() -> None:
    # Streams that are closed (`>&-`) go to nowhere: a file that got the number of one would have messages written into
    # it.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the help has letters that not every encoding has
    sys.unraisablehook = deliver_signal_again
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who ignores it is not told how git ended
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            signal.signal(number, _stop)
