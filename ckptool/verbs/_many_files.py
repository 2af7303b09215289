"""Many files given to one verb, by the program or in Python: the results in order, with the errors of those that failed
among them; of a verb that writes, where each goes, all planned before the first is written."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar

from ckptool import formats
from ckptool.checkpoint.files import size_at
from ckptool.checkpoint.jobs import Jobs
from ckptool.checkpoint.paths import absolute
from ckptool.checkpoint.workers import in_turn
from ckptool.commands import DIR, OF_LISTS, arg
from ckptool.errors import CkptoolError, Conflict, Text, UsageError, form
from ckptool.formats import split
from ckptool.output import check_target, new_folder

Result = TypeVar("Result")
Work = Callable[..., Result]
Options = Mapping[str, Any]  # what was typed
Pair = tuple[str, str | None]  # a file and its output


def each_file(work: Work[Result], files: Sequence[Any], jobs: Jobs = 1) -> Iterator[Result | Exception]:
    """The results for all files. The error of one is its result, and the others are still worked on."""
    with closing(in_turn(work, files, jobs, _size_of)) as tasks:
        for task in tasks:
            result: Result | Exception
            try:
                result = task()
            except Exception as error:  # noqa: BLE001 (whatever it is, it is reported)
                result = error
            yield result


def _size_of(item: str | Pair) -> int:
    """Bytes of a file, or of a pair's input; 1 for anything else."""
    return size_at(item if isinstance(item, str) else item[0])[0] or 1


def of_list(function: Any, items: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """What a verb returns for a list of files, in Python: the report of each, or its error.
    options: those of the verb, and `jobs`; of one that writes also `folder` and `skip_refused`."""
    if odd := [type(path).__name__ for path in items if not isinstance(path, (str, os.PathLike))]:
        fix = f"One after the other: [ckptool.{function.__name__}(item) for item in …]"
        raise UsageError(f"{function.__name__} was given a list with {odd[0]} in it", OF_LISTS, fix)
    files = [os.fspath(path) for path in items]
    if options.pop("out", None) is not None:
        what = f"{function.__name__} was given a list of files and one output"
        raise UsageError(what, "An output is a single file.", f"Into a folder: {arg(folder=DIR)}")
    verb_options = {name: value for name, value in options.items() if name not in ("folder", "skip_refused", "jobs")}
    work: Work[Any] = partial(function, **verb_options)
    if "folder" not in options and not options.get("in_place"):
        results = list(each_file(work, files, options.get("jobs", 1)))
    else:
        verb = function.__name__.replace("_", "-")
        outs = in_folder(verb, files, options) if "folder" in options else [None] * len(files)
        results = list(write_many(list(zip(files, outs, strict=True)), options, work))
    if results and all(type(result) is UsageError for result in results):
        raise results[0]  # what was asked for makes no sense, whatever the file
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, CkptoolError):
            raise result  # an option that does not exist
    return results


def write_many(pairs: Sequence[Pair], options: Options, work: Work[Result]) -> Iterator[Result | CkptoolError]:
    """The results of `work(file, out=…, …)` for all files, in their order. Each is planned before the first is written:
    if one is refused, none is written; with `skip_refused`, the others are."""
    count, jobs, dry_run = len(pairs), options.get("jobs", 1), bool(options.get("dry_run"))
    parts = Counter((os.path.realpath(split(file)[0]), split(file)[1]) for file, out in pairs if out is None)
    if repeated := next((path for (path, _), times in parts.items() if times > 1), ""):
        raise Conflict(f"{repeated} was given twice", "It would be changed twice.", "Name it once.")
    folder, refused = options.get("folder"), dict[int, CkptoolError]()
    planning = partial(_work_on, work, {"make_folder": folder is not None, "dry_run": True})
    with closing(in_turn(planning, pairs, jobs)) as plans:
        for number, (pair, plan) in enumerate(zip(pairs, plans, strict=True)):
            planned: Result | CkptoolError
            try:
                planned = plan()
            except CkptoolError as error:
                if not options.get("skip_refused"):
                    raise _stopped_error(error, pair[0], 0, count) from error
                planned = refused[number] = error.within(pair[0])
            if dry_run:
                yield planned
    if dry_run:
        return
    accepted = {number: pair for number, pair in enumerate(pairs) if number not in refused}
    jobs = jobs if jobs == 1 or _are_apart([*accepted.values()]) else 1
    # The folder is made here: of several workers, one that fails would take it from the others.
    target = new_folder(os.fspath(folder)) if folder is not None and accepted else nullcontext()
    with target, closing(in_turn(partial(_work_on, work, {}), [*accepted.values()], jobs, _size_of)) as tasks:
        for (number, pair), task in zip(accepted.items(), tasks, strict=True):
            yield from (refused.pop(earlier) for earlier in [*refused] if earlier < number)
            try:
                result = task()
            except CkptoolError as error:  # its data is damaged, or the disk is full
                if not options.get("skip_refused"):
                    raise _stopped_error(error, pair[0], number, count, jobs) from error
                yield error.within(pair[0])
            else:
                yield result
    yield from refused.values()  # those behind the last


def _work_on(work: Work[Result], options: Options, pair: Pair) -> Result:
    file, out = pair
    return work(file, out=out, **options)


def _are_apart(pairs: Sequence[Pair]) -> bool:
    """True where no output is another file's input, or lies beside one: then the order of work is free."""

    def above(path: str) -> set[str]:
        return {str(folder) for folder in PurePath(path).parents}

    read = [os.path.realpath(split(file)[0]) for file, _ in pairs]
    read = [os.path.dirname(place) if place.endswith(".index.json") else place for place in read]  # of its shards
    parents = {folder for place in read for folder in above(place)}
    if pairs and pairs[0][1] is None:  # in place
        statuses = [os.stat(place) for place in read]
        return len({(status.st_dev, status.st_ino) for status in statuses}) == len(read) and parents.isdisjoint(read)
    written = {os.path.dirname(os.path.realpath(out)) for _, out in pairs if out is not None}
    return written.isdisjoint(parents) and all(above(out).isdisjoint(read) for out in (*written, *read))


def _stopped_error(error: CkptoolError, file: str, number: int, count: int, jobs: Jobs = 1) -> CkptoolError:
    """The error of one of several files, which says what was written before it."""
    located = error.within(file)
    progress = f"None of the files were written; to write the others: {arg(skip_refused=True)}."
    if number or jobs != 1:
        others = "some of the others may be done, too." if jobs != 1 else "the others are unchanged."
        progress = f"{number} of {count} files {form(number, 'was', 'were')} done before; {others}"
    located.why = Text(located.why, " " if located.why else "", progress)
    return located


def in_folder(verb: str, files: Sequence[str], options: Options) -> Iterator[str]:
    """The path in the folder for each file; refuses two of one name, and outputs that exist."""
    folder, container = options["folder"], options.get("container")
    if verb == "convert" and container is None:
        what = f"convert {arg('folder')} needs a container to convert to"
        raise UsageError(what, "A folder has no suffix.", f"For example: {arg(container='safetensors')}")
    outs = list[str]()
    places = (os.path.realpath(absolute(split(file)[0])) for file in files)  # links may lead anywhere
    taken = {place: number for number, place in enumerate(places)}
    for number, file in enumerate(files):
        name = os.path.basename(absolute(split(file)[0]).rstrip("/"))
        name = name.split(".")[0] if name.endswith(".index.json") else name  # shards are written as a folder
        if container is not None and formats.for_output(name, formats.DEFAULT) != formats.by_name(container):
            name = os.path.splitext(name)[0] + (formats.by_name(container).suffixes or ("",))[0]
        out = os.path.join(folder, name)
        other = taken.setdefault(os.path.realpath(absolute(out)), number)
        if other != number:
            what = f"{file} would be written to {out}, where {files[other]} is, or would be, too"
            why = "One would replace the other. Nothing was written."
            raise Conflict(what, why, "Write them into different folders.")
        outs.append(out)
    if not options.get("overwrite"):
        from ckptool.output.folders import check_folder

        for out in outs if os.path.isdir(folder) else ():
            (check_folder if os.path.isdir(out) else check_target)(out, overwrite=False)
    yield from outs
