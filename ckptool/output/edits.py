"""Edits in place, which are appended and commit by truncation: readers find the old state or the new one, at every
instant.

1. Stretch the file: copies of the old end records (`Plan.guard`) at every `guard_every` bytes and behind the new end;
   sync. However far this has come when the process dies, the last end records in the file are the old ones.
2. Write the new records into the stretch, before the last copy; sync. Still nobody sees them.
3. Cut off the last copy. The new end records are now the last: that is the commit. Sync.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

from ckptool.checkpoint.blocks import Plan
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.paths import file_problem
from ckptool.commands import arg, command
from ckptool.errors import Conflict, FileProblem
from ckptool.output.durable import check_space, close, folder_of, settle, sweep_folder, write_problems
from ckptool.output.sink import Progress, Sink, write_all


def append_in_place(
    plan: Plan, source: Source, *, verify: Callable[[str], None] | None = None, progress: Progress | None = None
) -> None:
    """Carries out a plan with `keep` on the file that was read as `source`.

    verify: called with the file's path after the commit; if it raises, the file is cut back to its old state.
    Raises `Conflict` for a link, a file with several names or one that another process edits, `FileChanged`,
    `DiskFull`, `FileProblem`.
    """
    path, end = source.path, plan.keep + plan.nbytes
    sweep_folder(folder_of(path))
    refuse_links(path)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise file_problem(error, path, "change") from error
    try:
        with write_problems(path):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                what, why = f"{source} is being edited by another process", "Of two edits at once, one would be lost."
                raise Conflict(what, why, "Try again when it is done.") from None
            except OSError as error:
                what, why = f"{source} cannot be locked: {error.strerror}", "Without a lock, two edits could mix."
                raise FileProblem(what, why, f"Write a new file with {arg('out')}.") from error
            source.check_unchanged()
            if not source.is_of(os.fstat(fd)):
                raise source.changed()
            check_space(plan.nbytes + len(plan.guard), path)
            source.is_edited = True
            try:
                os.ftruncate(fd, plan.keep)  # what an interrupted run left behind
                places = range(plan.keep + plan.guard_every - len(plan.guard), end, plan.guard_every)
                for place in (*places, end):
                    write_all(fd, plan.guard, place)
                os.fsync(fd)  # before what they guard: a power cut may lose any of the writes since the last sync
                Sink(fd, plan.keep, plan.nbytes, progress).write(plan.files[""], plan.checks)
                os.fsync(fd)
                os.ftruncate(fd, end)
                settle(fd)
                if verify is not None:
                    verify(path)
            except BaseException as error:
                try:
                    os.ftruncate(fd, plan.keep)
                    os.fsync(fd)
                except OSError as second:
                    how = os.strerror(second.errno or 0)
                    what = f"the edit of {path} was interrupted, and could not be undone: {how}"
                    why = "Readers find the old state or the new one, whole; leftovers of the other may follow it."
                    fix = f"The next in-place edit removes them. See what it has: {command('inspect', path)}"
                    raise FileProblem(what, why, fix) from error
                raise
    finally:
        source.is_edited = False
        close(fd)


def refuse_links(path: str) -> None:
    """Raises `Conflict` for a file that others see under another name: caches link to one file from many places."""
    if os.path.islink(path):
        what = f"{path} is a symbolic link, to {os.path.realpath(path)}"
        raise Conflict(what, "Others may link to it.", f"Write a new file with {arg('out')}, or name the file itself.")
    try:
        names = os.stat(path).st_nlink
    except OSError as error:
        raise file_problem(error, path, "change") from error
    if names > 1:
        what = f"{path} is one of {names} hard links to the same file"
        raise Conflict(what, "Changing it in place would change all of them.", f"Write a new file with {arg('out')}.")
