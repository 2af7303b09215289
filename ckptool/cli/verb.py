"""What is typed for a verb, by the declaration of its function; and its answers."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from functools import partial
from importlib import import_module
from typing import Any, get_args

from ckptool.checkpoint.workers import Progress, checked_jobs
from ckptool.cli.many_files import WAYS, write_each
from ckptool.cli.output import (
    FORM,
    Answer,
    AnswerForm,
    Answers,
    each_answer,
    progress_bar,
    status_line,
    tell,
    training_progress,
)
from ckptool.commands import Declared, Parameter, function_name, module_of, option, parameters_of, signature_of, watched
from ckptool.errors import UsageError, printable
from ckptool.facts import Page, Report
from ckptool.verbs._options import Folder, Jobs, SkipRefused

Arguments = Mapping[str, Any]
_AS_JSON = Parameter("as_json", bool, False, option("--json", "Print one JSON object."))
_FORM = option(
    "--format FORM",
    "text, json, or markdown: for a job summary or a comment.",
    choices=tuple(form.value for form in AnswerForm),
)
_AS_FORM = Parameter("as_form", str, None, _FORM)


def function_of(verb: str) -> Any:
    return getattr(import_module(module_of(verb)), function_name(verb))


def typed_parameters(function: Any) -> list[Parameter]:
    """All that is typed for a verb: its own parameters, those of its hooks and of its report's view, the program's."""
    declared: Declared = function.verb
    found: dict[str, Parameter] = {}
    sources = [function, *filter(None, (declared.words, declared.instead))]
    kinds = [signature_of(source).return_annotation for source in sources]
    reports = [each for kind in kinds for each in get_args(kind) or (kind,) if isinstance(each, type)]
    sources += [each.told for each in reports if issubclass(each, Report)]
    taken: set[str] = set()
    for each in (each for source in sources for each in parameters_of(source)):
        if each.name not in found and taken.isdisjoint(each.option.flags):  # `--to DEVICE` wins over `--to CONTAINER`
            found[each.name] = each
            taken.update(each.option.flags)
    if _writes(function) and not declared.one_output:
        found |= {each.name: each for each in parameters_of(_of_writing)}
    elif any(each.option.each for each in found.values()) and "jobs" not in found:
        found |= {each.name: each for each in parameters_of(_of_reading)}
    own = [each for name, each in found.items() if name not in declared.without]
    return [*own, _AS_JSON, _AS_FORM]


def _of_writing(*, folder: Folder = None, skip_refused: SkipRefused = False, jobs: Jobs = 1) -> None:
    """The options of the program for verbs that write each of several files."""


def _of_reading(*, jobs: Jobs = 1) -> None:
    """Those for verbs that look at each of several."""


def _writes(function: Any) -> bool:
    """True for a verb that writes its output whatever it finds."""
    whole = signature_of(function)
    kinds = get_args(whole.return_annotation)
    return "out" in whole.parameters and any(getattr(kind, "is_written", False) for kind in kinds)


def answers(verb: str, function: Any, typed: Arguments) -> Answers:
    """What a verb answers to what was typed for it.

    Raises `UsageError` for what does not go together, and what the verb raises before its first answer.
    """
    as_json, as_form = typed["as_json"], typed["as_form"]
    if as_json and as_form not in (None, "json"):
        what = f"--json and --format {as_form} exclude each other"
        raise UsageError(what, "An answer has one form.", "Choose one.")
    FORM.set(AnswerForm.json if as_json else AnswerForm(as_form or "text"))
    as_json, declared = FORM.get() is AnswerForm.json, function.verb
    given = {name: value for name, value in typed.items() if value not in (None, [], ())}  # others have their defaults
    given["as_json"] = as_json
    jobs = checked_jobs(given.get("jobs", 1))
    if declared.words is not None:
        found = declared.words(**_named(declared.words, given))
        if isinstance(found, Report):
            return Answers([_answer(found, given)], as_json)
        given |= found
    names = signature_of(function).parameters
    first = next(iter(names))
    several = next((each.option.several for each in parameters_of(function) if each.name == first), False)
    files = given[first] if isinstance(given.get(first), list) and not several else None
    own = {name: value for name, value in given.items() if name in names}
    if _writes(function):
        write = partial(_write, function, own, first if files is not None else "")
        label = next((each for each in (given.get(first), given.get("out")) if isinstance(each, str)), "")
        return write_each(verb, [label] if files is None else files, given, write, declared.one_output or WAYS)
    if "jobs" in names:
        own["jobs"] = jobs if files is None or len(files) == 1 else 1
    work = partial(_report, verb, function, given, own, first)
    apart = declared.apart and not given.get("quiet")
    return Answers(each_answer(work, files or [given.get(first)], jobs, as_json), as_json, apart)


def _write(function: Any, own: Arguments, name: str, file: str, **output: Any) -> Any:
    """Calls a function that writes, with the file under its name; without a name the file is among the arguments."""
    return function(**{**own, **({name: file} if name else {}), **output})


def _named(function: Any, given: Arguments) -> dict[str, Any]:
    """The options that a hook or a view names."""
    names = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in names.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in names}


def _report(
    verb: str, function: Any, given: Arguments, own: Arguments, first: str, file: Any, progress: Progress | None
) -> Answer:
    """The answer on one file."""
    here = {first: file} if file is not None else {}
    declared: Declared = function.verb
    if declared.instead is not None:
        report = declared.instead(**_named(declared.instead, {**given, **here}))
        if report is not None:
            return _answer(report, given, declared.exits)
    asked = watched(function)
    with ExitStack() as stack:
        shown = {name: stack.enter_context(_watching(how, verb, {**given, **here})) for name, how in asked.items()}
        if "training" not in asked.values():
            stack.enter_context(redirect_stdout(sys.stderr))  # what a model's own code prints
        arguments = {**own, **here, **shown}
        kinds = {each.kind for each in inspect.signature(function).parameters.values()}
        several = arguments.pop(first) if inspect.Parameter.VAR_POSITIONAL in kinds else ()
        report = function(*several, **arguments)
    if "training" in asked.values() and os.environ.get("RANK", "0") != "0":
        return Answer(Page(), {}, report.exit())  # under torchrun the first process tells
    return _answer(report, given, declared.exits)


def _answer(report: Any, given: Arguments, exits: bool = True) -> Answer:
    return Answer(report, _named(report.told, given), report.exit() if exits else 0)


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
