"""The answers of a verb to what was typed for it: one file after the other."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from threading import current_thread, main_thread
from typing import Any

from ckptool.checkpoint import progress
from ckptool.cli.output import FORM, Answer, answer_of, in_words, status_line, style_of, tell, training_progress
from ckptool.cli.parser import writes
from ckptool.commands import Declared, as_argument, parameters_of, signature_of, watched
from ckptool.errors import CkptoolError, UsageError, counted, printable
from ckptool.facts import Page, Report
from ckptool.render.json import error_json
from ckptool.render.lines import Style, error_text

Arguments = Mapping[str, Any]
REFUSED = "refused"
WAYS = "A new file: -o OUT; several into a folder: -d DIR; the file itself: --in-place"


def answers(verb: str, function: Any, typed: Arguments) -> tuple[Iterable[Answer | CkptoolError], bool, str]:
    """What a verb answers to what was typed for it, one file after the other; whether a blank line stands between; and
    what its progress is called, where it does not show its own.

    Raises `UsageError` for what does not go together, and what the verb raises before its first answer.
    """
    as_json, as_form = typed["as_json"], typed["as_form"]
    if as_json and as_form not in (None, "json"):
        what = f"--json and --format {as_form} exclude each other"
        raise UsageError(what, "An answer has one form.", "Choose one.")
    FORM.set("json" if as_json else as_form or "text")
    given = {name: value for name, value in typed.items() if value not in (None, [], ())}  # others have their defaults
    given["as_json"] = FORM.get() == "json"
    style, declared = None if given["as_json"] else style_of(sys.stdout), function.verb
    if declared.from_words is not None:
        found = declared.from_words(**_named(declared.from_words, given))
        if isinstance(found, Report):
            return [answer_of(found, style, _named(found.told, given), found.exit())], False, ""
        given |= found
    first = next(iter(signature_of(function).parameters))
    several = next((each.option.several for each in parameters_of(function) if each.name == first), False)
    files = given[first] if isinstance(given.get(first), list) and not several else None
    work = partial(_answer, function, given, "" if files is None else first, style)
    is_output = writes(function) or (files is not None and any(map(given.get, ("out", "folder", "in_place"))))
    separate = declared.blank_between and not given.get("quiet") and not is_output
    if files is None or len(files) == 1:
        file = files[0] if files else given.get(first)
        if is_output:
            (out,) = _outputs(verb, [file], given, declared.one_output or WAYS)
            given |= {"out": out} | ({"make_folder": True} if "folder" in given else {})
        names = (each for each in (file, given.get("out")) if isinstance(each, str))
        label = f"{verb} {printable(os.path.basename(next(names, '')))}".rstrip()
        shows_own = "training" in watched(function).values()
        return (work(each) for each in [file]), separate, "" if shows_own else label
    from ckptool.verbs._many_files import each_file, write_many

    words = ("written", "", REFUSED) if is_output else ("fine", "with findings", "not read")
    words = words if declared.exits else ("read", "", "not read")
    results: Iterator[Any]
    if is_output:
        outs = _outputs(verb, files, given, declared.one_output or WAYS)
        results = write_many(list(zip(files, outs, strict=True)), given, work)
    else:
        results, given["jobs"] = each_file(work, files, given.get("jobs", 1)), 1  # the work on one is not divided
    return _summed(results, len(files), words, style, bool(given.get("quiet"))), separate, verb


def _summed(
    results: Iterator[Any], files: int, words: tuple[str, str, str], style: Style | None, quiet: bool
) -> Iterator[Answer | CkptoolError]:
    """The answers on several files, then a line that says how many went how.  words: for those that are fine, that have
    findings, that failed."""
    counts = [0, 0, 0]
    for result in results:
        failed = isinstance(result, Exception)
        counts[2 if failed else min(result.exit_code, 1)] += 1
        if failed and words[2] == REFUSED:  # as was asked for, the others are written
            result = Answer(error_json(result) if style is None else error_text(result, style), 1)
        yield in_words(result) if isinstance(result, Exception) else result
    if style is not None and not quiet:
        facts = (f"{count:,} {word}" for count, word in zip(counts, words, strict=True) if count)
        yield Answer(f"{counted(files, 'file')}: {', '.join(facts)}\n")


def _outputs(verb: str, files: Sequence[Any], given: Arguments, ways: str) -> list[str | None]:
    """Where each file is written to, None for in place; ways: what to say of the places that the verb can write to."""
    chosen = [flag for flag, name in (("-o", "out"), ("-d", "folder"), ("--in-place", "in_place")) if given.get(name)]
    if len(chosen) != 1:
        what = f"{verb} was given {' and '.join(chosen)}" if chosen else f"{verb} needs to know where to write"
        why = "They are mutually exclusive." if chosen else "Nothing is written unless you name an output."
        raise UsageError(what, why, ways)
    if chosen == ["-d"]:
        from ckptool.verbs._many_files import in_folder

        return list(in_folder(verb, files, given))
    if chosen == ["-o"] and len(files) > 1:
        what = f"{counted(len(files), 'file')} cannot be written to one"
        raise UsageError(what, "-o names a single output.", "Several into a folder: -d DIR")
    return [given.get("out")] * len(files)


def _named(function: Any, given: Arguments) -> dict[str, Any]:
    """The options that a hook or a view names."""
    names = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in names.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in names}


def _answer(function: Any, given: Arguments, first: str, style: Style | None, file: Any, **output: Any) -> Answer:
    """The answer on one file, which is the function's first argument, or else among what was given.

    output: where a verb that writes many files writes this one.
    """
    from ckptool.formats import split

    given = {**given, **({first: file} if first else {}), **output}
    declared: Declared = function.verb
    report = declared.first_try(**_named(declared.first_try, given)) if declared.first_try is not None else None
    if report is None:
        arguments = {name: value for name, value in given.items() if name in signature_of(function).parameters}
        asked = watched(function)
        with ExitStack() as stack:
            for name, how in asked.items():  # what the function is given to tell how far it is
                if how == "status":
                    arguments[name] = stack.enter_context(status_line())
                elif how == "training":
                    gc.enable()  # a run lives long, and the models of its user may be rings of objects
                    arguments[name] = None if given.get("quiet") else stack.enter_context(training_progress())
                elif how == "lines":
                    arguments[name] = lambda text: tell(text + "\n")
                else:
                    arguments[name] = progress.written if progress.is_watched else None
            if "training" not in asked.values() and current_thread() is main_thread():
                stack.enter_context(redirect_stdout(sys.stderr))  # what a model's own code prints
            try:
                report = function(**arguments)
            except CkptoolError as error:
                if isinstance(named := arguments.get("file"), str) and named != "-":
                    error.fill({"FILE": as_argument(split(named)[0])})
                raise
        if "training" in asked.values() and os.environ.get("RANK", "0") != "0":
            return answer_of(Page(), style, {}, report.exit())  # under torchrun the first process tells
    return answer_of(report, style, _named(report.told, given), report.exit() if declared.exits else 0)
