"""The options that several commands have, each declared once."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ckptool.checkpoint.commands import VERBS, function_name
from ckptool.checkpoint.paths import absolute
from ckptool.checkpoint.workers import Progress, in_turn
from ckptool.cli.output import FORM, Answer, AnswerForm, Answers, Printed, in_jobs, progress_bar
from ckptool.errors import CkptoolError, Conflict, UsageError, counted, form, printable

if TYPE_CHECKING:
    from ckptool.reports.save import Written


def option(words: str, text: str, *, panel: str | None = None, **more: Any) -> Any:
    """An option as its help prints it: its names and what stands for its value (`-o --out OUT`), then the text."""
    names = [word for word in words.split() if word.startswith("-")]
    metavar = words.removeprefix(" ".join(names)).strip() or None
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, **more)


def argument(word: str, text: str, show_default: bool = False) -> Any:
    """An argument as its help prints it: what stands for its value, then the text."""
    return typer.Argument(metavar=word, help=text, show_default=show_default)


def pairs(
    texts: Sequence[str], option: str, example: str, split: Callable[[str, str], tuple[str, str, str]] = str.rpartition
) -> dict[str, str]:
    """`OLD=NEW` as a dictionary; the last `=` separates, so that addresses may have one, unless `split` does."""
    found: list[tuple[str, str]] = []
    for text in texts:
        old, _, new = split(text, "=")
        if not (old and new):
            raise UsageError(
                f"{option} {text!r} is not of the form OLD=NEW",
                "Both sides are needed.",
                f"For example: {example}",
            )
        found.append((old, new))
    return once(option, found)


def once(option: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dictionary; raises `UsageError` for what was given twice."""
    names = [name for name, _ in pairs]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            raise UsageError(f"{option} was given {name!r} twice", "Only one can apply.")
    return dict(pairs)


# An address means one thing to all verbs of a kind (`commands.Use`): those that read take the part, those that
# change a file act there.
File = Annotated[str, argument("FILE", "A checkpoint, or FILE#ADDRESS for a part of it.")]
Files = Annotated[list[str], argument("FILE", "Checkpoints, or FILE#ADDRESS for a part of one.")]
At = Annotated[
    str | None, option("--at ADDRESS", "Take only this part: state_dict/fc.weight. The same as FILE#ADDRESS.")
]
ChangedFiles = Annotated[
    list[str], argument("FILE", "Checkpoints. FILE#ADDRESS changes only that part, and writes the whole file.")
]
ChangedAt = Annotated[
    str | None, option("--at ADDRESS", "Change only this part, and write the whole file. The same as FILE#ADDRESS.")
]
_PAYS = "Work on N files at a time, each in its own process. Pays for many files, with several cores or slow storage."
Jobs = Annotated[int, option("--jobs N", _PAYS)]
AsJson = Annotated[bool, option("--json", "Print one JSON object.")]
AsForm = Annotated[
    AnswerForm | None, option("--format FORM", "text, json, or markdown: for a job summary or a comment.")
]
Only = Annotated[
    list[str] | None,
    option("--only PATTERN", "Only keys that match; * also matches dots, re: starts a regular expression. Repeatable."),
]
Exclude = Annotated[list[str] | None, option("--exclude PATTERN", "Skip keys that match. Repeatable.")]

Part = Annotated[
    bool, option("--part", "Accept what is only a part of a checkpoint: one rank's file, one shard of several.")
]

_OUTPUT = "Where to"
Out = Annotated[str | None, option("-o --out OUT", "Write this new file.", panel=_OUTPUT)]
Folder = Annotated[
    str | None,
    option("-d --dir DIR", "Write into this folder, under the same names; it is created if needed.", panel=_OUTPUT),
]
InPlace = Annotated[
    bool, option("--in-place", "Change the files themselves; killed at any instant, they stay intact.", panel=_OUTPUT)
]
Force = Annotated[bool, option("-f --force", "Replace existing outputs.", panel=_OUTPUT)]
DryRun = Annotated[bool, option("-n --dry-run", "Show what would be done; write nothing.", panel=_OUTPUT)]
Verify = Annotated[
    bool,
    option(
        "--verify",
        "Check the input's checksums, then re-read the output and compare every tensor before it gets its name.",
        panel=_OUTPUT,
    ),
]
KeepUnknown = Annotated[
    bool,
    option("--keep-unknown", "Keep calls of unknown functions; whoever loads the file will run them.", panel=_OUTPUT),
]
Container = Annotated[
    str | None,
    option(
        "--to CONTAINER",
        "Write this container (torch-zip, safetensors, sharded, sharded-bin, dcp, npz), whatever the suffix.",
        panel=_OUTPUT,
    ),
]

SkipRefused = Annotated[
    bool, option("--skip-refused", "If one of several files is refused, write the others. Exit 1.", panel=_OUTPUT)
]
Extract = Annotated[bool, option("--extract", "Write only the part at the address, changed.", panel=_OUTPUT)]


@dataclass(frozen=True)
class OutputOptions:
    """The target options of a command: where and how it writes."""

    out: Out = None
    folder: Folder = None
    in_place: InPlace = False
    overwrite: Force = False
    dry_run: DryRun = False
    verify: Verify = False
    keep_unknown: KeepUnknown = False
    container: Container = None
    skip_refused: SkipRefused = False
    jobs: Jobs = 1
    as_json: AsJson = False

    def options(self, progress: Any) -> dict[str, Any]:
        """The options of the verb's function, which have the names that they have here."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _OF_THE_PROGRAM}
        return {**own, "progress": progress, "make_folder": self.folder is not None}


_OF_THE_PROGRAM = ("out", "folder", "skip_refused", "jobs", "as_json")


@dataclass(frozen=True)
class ChangeOutputOptions(OutputOptions):
    """The same for a command that changes files, at an address or as a whole."""

    at: ChangedAt = None
    extract: Extract = False


Command = Callable[..., "Answers | None"]
Call = Callable[..., Any]  # of a verb's function, with the options of its command that have the same names


def examples(*lines: tuple[str, str]) -> Callable[[Command], Command]:
    """Puts lines to type below the help of a command, each with what it is for."""

    def with_examples(command: Command) -> Command:
        vars(command)["examples"] = lines
        return command

    return with_examples


def calls(command: Command) -> Command:
    """A command that takes a `call`, as one that has only its options."""

    def run(**arguments: Any) -> Answers | None:
        return command(**arguments, call=_call(command, arguments))

    parameters = inspect.signature(command, eval_str=True).parameters.values()
    return _like(command, run, [p for p in parameters if p.name != "call"])


def writes(command: Command, without: Sequence[str] = (), through: Call | None = None) -> Command:
    """A command that takes a `target`, as one that has the target's options instead. An option that the command has
    itself wins. Its first argument is the files, and what it returns the answers; None: `through` makes them.

    without: options that the command refuses, with a word on what to do instead; its help does not offer them.
    through: writes each file, with `call`, which the command may also take; `write_each` unless another is named.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    own = [p for p in parameters.values() if p.name not in ("target", "call")]
    kind = parameters["target"].annotation
    taken = {name for p in own for meta in getattr(p.annotation, "__metadata__", ()) for name in _flags(meta)}
    kinds = get_type_hints(kind, include_extras=True)
    shared = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=_offered(kinds[f.name], without)
        )
        for f in fields(kind)
        if not taken & set(_flags(kinds[f.name].__metadata__[0]))
    ]

    def run(**arguments: Any) -> Answers | None:
        target = kind(**{p.name: arguments.pop(p.name) for p in shared})
        files = arguments[own[0].name]
        call = _call(command, {name: value for name, value in arguments.items() if name != own[0].name})
        answers = command(**arguments, target=target, **({"call": call} if "call" in parameters else {}))
        if answers is not None:
            return answers
        verb = next(verb for verb in VERBS if function_name(verb) == command.__name__)
        made: Answers = (through or write_each)(verb, files if isinstance(files, list) else [files], target, call)
        return made

    return _like(command, run, [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shared)


def _call(command: Command, given: Mapping[str, Any]) -> Call:
    """See `Call`. An option that was not given is left to the function; of a choice it gets the value."""
    function = getattr(import_module(f"ckptool.verbs.{command.__name__}"), command.__name__)
    taken = {*inspect.signature(function).parameters}
    taken |= {field.name for field in fields(OutputOptions) if "options" in taken} - {*_OF_THE_PROGRAM}
    values = {name: value for name, value in given.items() if name in taken and value is not None}
    return partial(function, **{name: v.value if isinstance(v, Enum) else v for name, v in values.items()})


def _like(command: Command, run: Any, parameters: Sequence[inspect.Parameter]) -> Command:
    """`run` in the place of a command, with other parameters."""
    vars(run).update(vars(command))
    run.__signature__, run.__annotations__ = inspect.Signature(parameters), {}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run  # type: ignore[no-any-return]


def in_forms(command: Command) -> Command:
    """A command that has `--json`, with `--format` as well; any other as it is."""
    signature = inspect.signature(command, eval_str=True)
    if "as_json" not in signature.parameters:
        return command

    def run(*, as_form: AnswerForm | None = None, **arguments: Any) -> Answers | None:
        as_json = bool(arguments.pop("as_json"))
        if as_json and as_form not in (None, AnswerForm.json):
            raise UsageError(
                f"--json and --format {as_form.value} exclude each other", "An answer has one form.", "Choose one."
            )
        FORM.set(AnswerForm.json if as_json else as_form or AnswerForm.text)
        return command(**arguments, as_json=FORM.get() is AnswerForm.json)

    added = inspect.Parameter("as_form", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=AsForm)
    return _like(command, run, [*signature.parameters.values(), added])


def _offered(kind: Any, without: Sequence[str]) -> Any:
    """The annotation of an option, hidden from the help where it is one of `without`."""
    (meta,) = kind.__metadata__
    if not {*_flags(meta)} & {*without}:
        return kind
    hidden = copy(meta)
    hidden.hidden = True
    return Annotated[kind.__origin__, hidden]


def _flags(meta: Any) -> list[str]:
    """The names of an option, as typer keeps them in an annotation."""
    names = (getattr(meta, "default", None), *(getattr(meta, "param_decls", None) or ()))
    return [name for name in names if isinstance(name, str) and name.startswith("-")]


Write = Callable[..., "Written"]
Pair = tuple[str, str | None]  # a file and its output

# Many files ----------------------------------------------------------------------------------------------------------


WAYS = "A new file: -o OUT; several into a folder: -d DIR; the file itself: --in-place"


def write_each(verb: str, files: Sequence[str], target: OutputOptions, write: Write, ways: str = WAYS) -> Answers:
    """The answers of `write(file, out=…, …)` for every file. Outputs are checked before the first is written.

    ways: what to say of the places that the verb can write to.
    """
    outs = _outputs(verb, files, target, ways)
    return Answers(_written(verb, files, outs, target, write), target.as_json)


def _written(
    verb: str, files: Sequence[str], outs: Sequence[str | None], target: OutputOptions, write: Write
) -> Iterator[Answer | Printed]:
    """The reports of all files. Of several each is planned before the first is written: where one is refused, none
    is."""
    pairs = list(zip(files, outs, strict=True))
    if len(files) > 1 and not target.dry_run:
        refused = yield from _refused(pairs, target, write)
        pairs = [pair for pair in pairs if pair[0] not in refused]
    jobs = target.jobs if target.jobs == 1 or target.dry_run or _are_apart(pairs) else 1
    with closing(in_jobs(partial(_write_one, write, target), pairs, jobs, target.as_json)) as tasks:
        for number, ((file, _), task) in enumerate(zip(pairs, tasks, strict=True)):
            with progress_bar(f"{verb} {printable(os.path.basename(file))}") as progress:
                try:
                    printed = task(progress)
                except CkptoolError as error:
                    raise error if len(files) == 1 else _stopped(error, file, number, len(files)) from error
            yield printed


def _write_one(write: Write, target: OutputOptions, pair: Pair, progress: Progress | None) -> Answer:
    return Answer(write(pair[0], out=pair[1], **target.options(progress)))


def _refused(pairs: Sequence[Pair], target: OutputOptions, write: Write) -> Generator[Answer, None, set[str]]:
    """The files that cannot be written, each with its error as an answer. Raises the first such error unless they are
    to be skipped."""
    refused: set[str] = set()
    with closing(in_turn(partial(_plan_one, write, target), pairs, target.jobs)) as tasks:
        for (file, _), task in zip(pairs, tasks, strict=True):
            try:
                task(None)
            except CkptoolError as error:
                if not target.skip_refused:
                    raise _stopped(error, file, 0, len(pairs)) from error
                refused.add(file)
                yield Answer(error.within(file), exit_code=1)
    return refused


def _plan_one(write: Write, target: OutputOptions, pair: Pair, progress: Progress | None) -> None:
    write(pair[0], out=pair[1], **target.options(None) | {"dry_run": True})


def _are_apart(pairs: Sequence[Pair]) -> bool:
    """True where nothing is written that another file is made from, nor beside it: then the order of work is free."""
    from ckptool.formats.opening import split

    read = [os.path.realpath(split(file)[0]) for file, _ in pairs]
    read = [os.path.dirname(place) if place.endswith(".index.json") else place for place in read]  # of its shards
    above = {folder for place in read for folder in _folders_above(place)}
    if pairs[0][1] is None:  # in place
        statuses = [os.stat(place) for place in read]
        return len({(each.st_dev, each.st_ino) for each in statuses}) == len(read) and above.isdisjoint(read)
    written = {os.path.dirname(os.path.realpath(out)) for _, out in pairs if out is not None}
    return written.isdisjoint(above) and all(_folders_above(out).isdisjoint(read) for out in (*written, *read))


def _folders_above(path: str) -> set[str]:
    return {str(folder) for folder in PurePath(path).parents}


def _stopped(error: CkptoolError, file: str, number: int, count: int) -> CkptoolError:
    """The error of one of several files, saying what was done before it."""
    told = error.within(file)
    done = "None of the files was written; to write the others: --skip-refused."
    if number:
        done = f"{number} of {count} files {form(number, 'was', 'were')} done before; the others were left as they are."
    told.why = " ".join(part for part in (told.why, done) if part)
    return told


def _outputs(verb: str, files: Sequence[str], target: OutputOptions, ways: str) -> list[str | None]:
    chosen = [
        flag for flag, given in (("-o", target.out), ("-d", target.folder), ("--in-place", target.in_place)) if given
    ]
    if len(chosen) != 1:
        raise UsageError(
            f"{verb} was given {' and '.join(chosen)}" if chosen else f"{verb} needs to know where to write",
            "They are mutually exclusive." if chosen else "Nothing is written unless you name an output.",
            ways,
        )
    if target.in_place:
        return [None] * len(files)
    if target.out is not None:
        if len(files) > 1:
            raise UsageError(
                f"{counted(len(files), 'file')} cannot be written to one",
                "-o names a single output.",
                "Several into a folder: -d DIR",
            )
        return [target.out]
    return list(_in_folder(verb, files, target))


def _in_folder(verb: str, files: Sequence[str], target: OutputOptions) -> Iterator[str]:
    """The name in the folder for each file; refuses two of one name, and what is there already."""
    from ckptool.formats.opening import split

    assert target.folder is not None
    if verb == "convert" and target.container is None:
        raise UsageError(
            "convert -d needs to know what to convert to",
            "A folder has no suffix to choose by.",
            "For example: --to safetensors",
        )
    taken: dict[str, str] = {}
    for file in files:
        out = os.path.join(target.folder, _named(_name_of(split(file)[0]), target.container))
        if other := taken.get(out):
            raise Conflict(
                f"{other} and {file} would both be written to {out}",
                "One would replace the other. Nothing was written.",
                "Write them into different folders.",
            )
        taken[out] = file
    if not target.overwrite:
        from ckptool.output import check_folder, check_target

        for out in taken if os.path.isdir(target.folder) else ():
            (check_folder if os.path.isdir(out) else check_target)(out, overwrite=False)
    yield from taken


def _name_of(path: str) -> str:
    """The name of a file or folder; of an index of shards, which is written as a folder, what it is the index of."""
    name = os.path.basename(absolute(path))
    return name.split(".")[0] if name.endswith(".index.json") else name


def _named(name: str, container: str | None) -> str:
    """The file's name, with the usual suffix of the container where it has another's."""
    from ckptool import formats

    if container is None or formats.for_output(name, formats.DEFAULT) == formats.by_name(container):
        return name
    return os.path.splitext(name)[0] + (formats.by_name(container).suffixes or ("",))[0]
