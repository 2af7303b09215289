"""Many files written by one command: where each goes, all planned before the first is written, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from ckptool.checkpoint.paths import absolute
from ckptool.checkpoint.workers import Progress, in_turn
from ckptool.cli.output import Answer, Answers, Printed, in_jobs, progress_bar
from ckptool.errors import CkptoolError, Conflict, UsageError, counted, form, printable

if TYPE_CHECKING:
    from ckptool.verbs._written import Written

Write = Callable[..., "Written"]
Pair = tuple[str, str | None]  # a file and its output


class OutputOptions(NamedTuple):
    """The options of a command that say where it writes, as they were typed."""

    out: str | None = None
    folder: str | None = None
    in_place: bool = False
    overwrite: bool = False
    dry_run: bool = False
    container: str | None = None
    skip_refused: bool = False
    jobs: int = 1
    as_json: bool = False


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
    return Answer(write(pair[0], out=pair[1], progress=progress, make_folder=target.folder is not None))


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
    write(pair[0], out=pair[1], make_folder=target.folder is not None, dry_run=True)


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
