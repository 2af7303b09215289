"""`scan`: the checkpoints of a folder, one line each; of a file, what its pickles would call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Annotated

from ckptool import formats
from ckptool.analysis.inspect import listing
from ckptool.analysis.scan import Scan, ScannedFile, damaged, latest_good, scanned, unknown_names
from ckptool.checkpoint import FileRange
from ckptool.checkpoint.files import Folder, Source, open_input
from ckptool.checkpoint.paths import file_problem
from ckptool.checkpoint.workers import Progress, Task, in_turn
from ckptool.errors import CkptoolError, Corrupt, NotACheckpoint, Unsupported, UsageError, counted
from ckptool.formats import deepspeed, megatron, members, sharded, torch_checkpointing
from ckptool.formats.files_beside import is_pickled
from ckptool.formats.opening import PathLike, counting_whole, refuse_address
from ckptool.options import argument, option, verb
from ckptool.pickles.skeleton import reaches_a_call
from ckptool.training import is_run
from ckptool.training.reports import RunReport
from ckptool.verbs._options import Jobs

# What people call checkpoints. Pickles of other names in a folder are judged, and shown if they would run something;
# other files are counted.
SUFFIXES = frozenset(
    ".pt .pth .ckpt .bin .safetensors .sft .tar .pkl .pickle .model .th .npz .npy .jit .ptl .pts .t7 .weights".split()
)
ARCHIVES = (".zip", ".nemo")
MAX_FILES = 100_000
# Files that belong to a run and are no checkpoints, whatever their suffix.
_BESIDE = frozenset({"training_args.bin"})


def _of_run(path: str, full: bool = False, latest_only: bool = False, quiet: bool = False) -> RunReport | None:
    if latest_only or quiet or not is_run(path):
        return None
    from ckptool.training.inspect_run import inspect_run

    return inspect_run(path, full=full)


@verb(
    ("ckptool scan .", "every checkpoint here"),
    ("ckptool scan --latest-good -q .", "for scripts"),
    instead=_of_run,
    apart=True,
)
def scan(
    path: Annotated[
        PathLike,
        argument("PATH", "Folders of checkpoints, or checkpoints; whole files, not FILE#ADDRESS.", each=True),
    ],
    *,
    latest_only: Annotated[
        bool, option("--latest-good", "Print only the newest intact checkpoint. Exit 1: there is none.")
    ] = False,
    full: Annotated[bool, option("--full", "Verify every checksum too. Reads all data.")] = False,
    jobs: Jobs = 1,
) -> Scan:
    """Looks at every checkpoint below a folder, or at one file, without running anything.

    full: verify every checksum too, not only tables and structure. Files that cannot be opened are rows of the report.
    latest_only: only whether there is a good one, and which is the newest.  jobs: how many files of a folder are looked
    at at a time, each in a process of its own.
    Raises `FileProblem` where the path cannot be read, and for a single file whatever opening it raises.
    """
    refuse_address("scan", path)
    name = os.fspath(path)
    if not os.path.isdir(name):
        with counting_whole():
            row = _row(full, name)
        return Scan(name, False, (row,), 0, row if row.is_good else None, "", full, latest_only)
    every = list(_files(name))
    files = {file: is_named for file, is_named in every if is_named is not None}
    with closing(in_turn(partial(_row_or_bug, full), list(files), jobs)) as tasks:
        rows = [_row_of(file, task) for file, task in zip(files, tasks, strict=True)]
    found = [row for row in rows if files[row.path] or row.calls or _runs_first(row)]
    latest, by = latest_good(row for row in found if files[row.path])
    others = len(every) - len(found)
    if latest_only:
        found = [latest] if latest else []
    return Scan(name, True, tuple(found), others, latest, by, full, latest_only)


def _runs_first(row: ScannedFile) -> bool:
    """True for a damaged file that pickle would run up to the damage."""
    if row.state not in ("corrupt", "truncated"):
        return False
    source = Source(row.path)
    return reaches_a_call(FileRange(source, 0, source.size))


def _row_of(path: str, task: Task[ScannedFile]) -> ScannedFile:
    try:
        return task(None)
    except CkptoolError as error:
        return damaged(path, error)


def _row_or_bug(full: bool, path: str, progress: Progress | None = None) -> ScannedFile:
    """The row of one file of a folder: whatever goes wrong in it says nothing about the others."""
    try:
        return _row(full, path, progress)
    except CkptoolError:
        raise
    except Exception as error:
        what = f"ckptool could not judge it ({type(error).__name__}: {error!s})"
        raise Corrupt(what, "That is a bug in ckptool; nothing is known of the file.") from error


def _row(full: bool, path: str, progress: Progress | None = None) -> ScannedFile:
    checkpoint = formats.read(path)
    found = listing(checkpoint)
    if full:
        _verify(path)
    if not os.path.isdir(path):
        return scanned(path, checkpoint, found, unknown_names(checkpoint))
    layout = members.members_of(checkpoint, Folder(path))
    count = layout.count if layout is not None else 0
    return scanned(path, checkpoint, found, unknown_names(checkpoint), members.step_of(path), count)


def _verify(path: str) -> None:
    """Raises `Corrupt` with the first thing that is wrong with a file's contents."""
    from ckptool.verbs.verify import verify

    found = verify(path)
    if found.problems:
        first, more = found.problems[0], len(found.problems) - 1
        raise Corrupt(f"{first.what}" + (f" and {counted(more, 'more problem')}" if more else ""), first.why)


def _files(folder: str) -> Iterator[tuple[str, bool | None]]:
    """The files of a folder and below it: True for checkpoints, by name, False for other pickles, None for the rest.

    Links are not followed.
    """
    count = 0
    stack = [folder]
    while stack:
        here = stack.pop()
        try:
            with os.scandir(here) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if here == folder:
                raise file_problem(error, here, "read") from error
            continue
        count += len(inside)
        if count > MAX_FILES:
            raise UsageError(f"{folder} holds more than {MAX_FILES:,} files", "Name a folder below it.")
        own, claimed = _checkpoints_of(here, is_top=here == folder)
        yield from ((path, True) for path in own)
        below: list[str] = []
        for entry in inside:
            if entry.name in claimed:
                continue
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith(".") or is_checkpoint_folder(entry.path):
                    below.append(entry.path)
            elif _is_file(entry):
                is_named = _is_named_like_one(entry.name) or (entry.name.endswith(ARCHIVES) and _is_pickled(entry.path))
                yield entry.path, is_named or (False if _is_pickled(entry.path) else None)
        stack.extend(reversed(below))


def _is_file(entry: os.DirEntry[str]) -> bool:
    """True for a file, or a link to one; a link that leads to itself is none."""
    try:
        return entry.is_file()
    except OSError:
        return False


def _checkpoints_of(path: str, *, is_top: bool) -> tuple[list[str], set[str]]:
    """The checkpoints of a folder (as a rule the folder itself), each with the names in it that belong to it."""
    if not is_checkpoint_folder(path):
        return [], set()
    folder = Folder(path)
    if megatron.is_run(folder):
        return [], set()  # each of its iterations is one
    candidates = sharded.candidates(folder)
    claimed = sharded.belonging(folder) | members.claimed(folder) | deepspeed.belonging(folder)
    claimed -= deepspeed.other_tags(folder)
    claimed |= torch_checkpointing.belonging(folder)
    alone = is_top and len(claimed) == 1  # a file among others
    if len(candidates) > 1 or (alone and candidates):
        return [os.path.join(path, name) for name in candidates], claimed
    return [path], claimed


def _is_named_like_one(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES and name not in _BESIDE and not name.startswith(".")


def _is_pickled(path: str) -> bool:
    """True for a file that is a pickle, or has one inside, by its content."""
    try:
        return is_pickled(Source(path))
    except CkptoolError:
        return False


def is_checkpoint_folder(path: str) -> bool:
    """True for a folder whose files together are one checkpoint."""
    try:
        source = open_input(path)
        return any(container.detect(b"", source) for container in formats.FORMATS)
    except (NotACheckpoint, Unsupported):
        return False
    except CkptoolError:
        return True  # it is one, and something is wrong with it: that is to be said
