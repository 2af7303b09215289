"""Many files written by one command: where each goes, all planned before the first is written, several at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import PurePath
from typing import Any

from ckptool.checkpoint.paths import absolute
from ckptool.checkpoint.workers import Progress, in_turn
from ckptool.cli.output import Answer, progress_bar, style_of
from ckptool.errors import CkptoolError, Conflict, UsageError, form, printable
from ckptool.render.lines import error_text

Work = Callable[..., Answer]
Given = Mapping[str, Any]  # what was typed
Pair = tuple[str, str | None]  # a file and its output


def write_many(verb: str, pairs: Sequence[Pair], given: Given, work: Work) -> Iterator[Answer]:
    """The answers of `work(file, progress, out=…, …)` for all files. Each is planned before the first is written: where
    one is refused, none is."""
    count, jobs, dry_run = len(pairs), given.get("jobs", 1), given.get("dry_run", False)
    options = {"make_folder": "folder" in given}
    if not dry_run:
        refused = set()
        with closing(in_turn(partial(_one, work, {**options, "dry_run": True}), pairs, jobs)) as plans:
            for pair, plan in zip(pairs, plans, strict=True):
                try:
                    plan(None)
                except CkptoolError as error:
                    if not given.get("skip_refused"):
                        raise _stopped(error, pair[0], 0, count) from error
                    from ckptool.render.json import error_json

                    refused.add(pair)
                    told = error.within(pair[0])
                    yield Answer(error_json(told) if given["as_json"] else error_text(told, style_of(sys.stdout)), 1)
        pairs = [pair for pair in pairs if pair not in refused]
    jobs = jobs if jobs == 1 or dry_run or _are_apart(pairs) else 1
    with closing(in_turn(partial(_one, work, options), pairs, jobs)) as tasks:
        for number, ((file, _), task) in enumerate(zip(pairs, tasks, strict=True)):
            with progress_bar(f"{verb} {printable(os.path.basename(file))}") as progress:
                try:
                    answer = task(progress)
                except CkptoolError as error:
                    raise _stopped(error, file, number, count, jobs) from error
            yield answer


def _one(work: Work, options: Given, pair: Pair, progress: Progress | None) -> Answer:
    file, out = pair
    return work(file, progress, out=out, **options)


def _are_apart(pairs: Sequence[Pair]) -> bool:
    """True where nothing is written that another file is made from, nor beside it: then the order of work is free."""
    from ckptool.formats.opening import split

    def above(path: str) -> set[str]:
        return {str(folder) for folder in PurePath(path).parents}

    read = [os.path.realpath(split(file)[0]) for file, _ in pairs]
    read = [os.path.dirname(place) if place.endswith(".index.json") else place for place in read]  # of its shards
    around = {folder for place in read for folder in above(place)}
    if pairs[0][1] is None:  # in place
        statuses = [os.stat(place) for place in read]
        return len({(each.st_dev, each.st_ino) for each in statuses}) == len(read) and around.isdisjoint(read)
    written = {os.path.dirname(os.path.realpath(out)) for _, out in pairs if out is not None}
    return written.isdisjoint(around) and all(above(out).isdisjoint(read) for out in (*written, *read))


def _stopped(error: CkptoolError, file: str, number: int, count: int, jobs: int = 1) -> CkptoolError:
    """The error of one of several files, saying what was done before it."""
    told = error.within(file)
    done = "None of the files was written; to write the others: --skip-refused."
    if number or jobs > 1:
        others = "of the others, some may be done, too." if jobs > 1 else "the others were left as they are."
        done = f"{number} of {count} files {form(number, 'was', 'were')} done before; {others}"
    told.why = " ".join(part for part in (told.why, done) if part)
    return told


def in_folder(verb: str, files: Sequence[str], given: Given) -> Iterator[str]:
    """The name in the folder for each file; refuses two of one name, and what is there already."""
    from ckptool import formats
    from ckptool.formats.opening import split

    folder, container = given["folder"], given.get("container")
    if verb == "convert" and container is None:
        what = "convert -d needs to know what to convert to"
        raise UsageError(what, "A folder has no suffix to choose by.", "For example: --to safetensors")
    taken: dict[str, str] = {}
    for file in files:
        name = os.path.basename(absolute(split(file)[0]))
        name = name.split(".")[0] if name.endswith(".index.json") else name  # shards are written as a folder
        if container is not None and formats.for_output(name, formats.DEFAULT) != formats.by_name(container):
            name = os.path.splitext(name)[0] + (formats.by_name(container).suffixes or ("",))[0]
        out = os.path.join(folder, name)
        if other := taken.get(out):
            what = f"{other} and {file} would both be written to {out}"
            why = "One would replace the other. Nothing was written."
            raise Conflict(what, why, "Write them into different folders.")
        taken[out] = file
    if not given.get("overwrite"):
        from ckptool.output import check_target
        from ckptool.output.folders import check_folder

        for out in taken if os.path.isdir(folder) else ():
            (check_folder if os.path.isdir(out) else check_target)(out, overwrite=False)
    yield from taken
