"""What is typed for a verb, by the declaration of its function; and its answers."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, redirect_stdout
from functools import partial
from importlib import import_module
from typing import Annotated, Any, Literal, get_args

from ckptool.checkpoint.workers import Progress, checked_jobs, in_turn
from ckptool.cli.many_files import WAYS, write_each
from ckptool.cli.output import (
    FORM,
    Answer,
    answer_of,
    in_words,
    progress_bar,
    status_line,
    style_of,
    tell,
    training_progress,
)
from ckptool.commands import Declared, Parameter, function_name, module_of, option, parameters_of, signature_of, watched
from ckptool.errors import CkptoolError, UsageError, printable
from ckptool.facts import Page, Report
from ckptool.render.style import Style
from ckptool.verbs._options import Folder, Jobs, SkipRefused

Arguments = Mapping[str, Any]
_FORMS = "text, json, or markdown: for a job summary or a comment."


def function_of(verb: str) -> Any:
    return getattr(import_module(module_of(verb)), function_name(verb))


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
    if _writes(function) and not declared.one_output:
        names += ["folder", "skip_refused", "jobs"]
    elif any(each.option.each for each in found.values()) and "jobs" not in found:
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
    as_form: Annotated[Literal["text", "json", "markdown"] | None, option("--format", _FORMS)] = None,
) -> None:
    """The options of the program: the first three for many files, the next for runs, the last for all."""


def _writes(function: Any) -> bool:
    """True for a verb that writes its output whatever it finds."""
    whole = signature_of(function)
    kinds = get_args(whole.return_annotation)
    return "out" in whole.parameters and any(getattr(kind, "is_written", False) for kind in kinds)


def answers(verb: str, function: Any, typed: Arguments) -> tuple[Iterable[Answer | CkptoolError], bool]:
    """What a verb answers to what was typed for it, one file after the other; and whether a blank line stands between.

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
    jobs = checked_jobs(given.get("jobs", 1))
    if declared.from_words is not None:
        found = declared.from_words(**_named(declared.from_words, given))
        if isinstance(found, Report):
            return [answer_of(found, style, _named(found.told, given), found.exit())], False
        given |= found
    first = next(iter(signature_of(function).parameters))
    several = next((each.option.several for each in parameters_of(function) if each.name == first), False)
    files = given[first] if isinstance(given.get(first), list) and not several else None
    work = partial(_answer, verb, function, given, "" if files is None else first, style)
    if _writes(function):
        label = next((each for each in (given.get(first), given.get("out")) if isinstance(each, str)), "")
        return write_each(verb, [label] if files is None else files, given, work, declared.one_output or WAYS), False
    given["jobs"] = jobs if files is None or len(files) == 1 else 1  # of the work on one
    return _each(work, files or [given.get(first)], jobs), declared.blank_between and not given.get("quiet")


def _each(work: Callable[..., Answer], files: Sequence[str], jobs: int) -> Iterator[Answer | CkptoolError]:
    """The answers for all files, of which `jobs` are worked on at a time. The error of one of several files is its
    answer: the others are looked at all the same."""
    with closing(in_turn(work, files, jobs)) as tasks:
        for task in tasks:
            found: Answer | CkptoolError
            try:
                found = task(None)
            except Exception as error:
                if len(files) < 2:
                    raise
                found = in_words(error)
            yield found


def _named(function: Any, given: Arguments) -> dict[str, Any]:
    """The options that a hook or a view names."""
    names = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in names.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in names}


def _answer(
    verb: str,
    function: Any,
    given: Arguments,
    first: str,
    style: Style | None,
    file: Any,
    progress: Progress | None,
    **output: Any,
) -> Answer:
    """The answer on one file, which is the function's first argument, or else among what was given.

    output: where a verb writes to, which is told of its progress from outside.
    """
    given = {**given, **({first: file} if first else {}), **output}
    declared: Declared = function.verb
    report = declared.first_try(**_named(declared.first_try, given)) if declared.first_try is not None else None
    if report is None:
        arguments = {name: value for name, value in given.items() if name in signature_of(function).parameters}
        asked = watched(function)
        with ExitStack() as stack:
            for name, how in asked.items():
                arguments[name] = progress if output else stack.enter_context(_watching(how, verb, given))
            if "training" not in asked.values():
                stack.enter_context(redirect_stdout(sys.stderr))  # what a model's own code prints
            report = function(**arguments)
        if "training" in asked.values() and os.environ.get("RANK", "0") != "0":
            return answer_of(Page(), style, {}, report.exit())  # under torchrun the first process tells
    return answer_of(report, style, _named(report.told, given), report.exit() if declared.exits else 0)


@contextmanager
def _watching(how: str, verb: str, given: Arguments) -> Iterator[Any]:
    """What a function is given to tell how far it is."""
    if how == "status":
        with status_line() as say:
            yield say
    elif how == "training":
        gc.enable()  # a run lives long, and the models of its user may be rings of objects
        with nullcontext() if given.get("quiet") else training_progress() as progress:
            yield progress
    elif how == "lines":
        yield lambda text: tell(text + "\n")
    else:
        file = given.get("file")
        label = f"{verb} {printable(os.path.basename(file))}" if isinstance(file, str) else verb
        with progress_bar(label) as bar:
            yield bar
