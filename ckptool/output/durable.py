"""Durable replacement: write beside the target, sync, rename, sync the folder. There is no other way to make a file.

At any instant, killed or out of disk, the old file or the new one is whole under its name. What a killed run leaves is
a temporary file in the same folder; it was locked by its writer, so the next run that writes into the folder can tell
that nobody owns it and removes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress

from ckptool.checkpoint import InlineBytes, Note
from ckptool.checkpoint.files import Input, unchanged
from ckptool.checkpoint.paths import absolute, file_problem, refused_place
from ckptool.checkpoint.plan import Plan
from ckptool.commands import arg, other_program
from ckptool.errors import CkptoolError, DiskFull, FileProblem, OutputExists, Text, printable
from ckptool.output.attributes import attribute_notes, keep_attributes
from ckptool.output.copying import reserve
from ckptool.output.hashing import StreamingSha256
from ckptool.output.sink import Progress, Sink, segments_of

ATTEMPTS = 100  # to make a temporary file that no other run takes for one that was left
UNTOUCHED = "Nothing else was changed: {} is as it was."


def check_target(target: str | os.PathLike[str], *, overwrite: bool) -> str:
    """The path that a write to `target` replaces (a link's own target); raises if it cannot or must not be written.

    Raises `OutputExists` where something is there and `overwrite` is false, `FileProblem` for a folder or a missing
    one.
    """
    path = os.fspath(target)
    if elsewhere := refused_place(path, writing=True):
        raise elsewhere
    real = os.path.realpath(path) if os.path.islink(path) else path
    folder = os.path.dirname(absolute(real))
    try:
        status = os.stat(real)
    except FileNotFoundError:
        if not os.path.isdir(folder):
            raise FileProblem(
                f"cannot write {path}: there is no folder {folder}",
                "",
                f"Make it first: {other_program('mkdir -p', folder)}",
            ) from None
        if not os.path.basename(path):
            raise FileProblem(
                f"cannot write {path}: it names a folder, which is not there",
                "A file was to be written there.",
                Text("Name a file; or use -d for the folder, which is made.", python="Name a file."),
            ) from None
        return real
    except (OSError, ValueError) as error:
        raise file_problem(error, path, "write") from error
    if stat.S_ISDIR(status.st_mode):
        raise FileProblem(
            f"cannot write {path}: it is a folder",
            "A file was to be written there.",
            Text("Name a file in it; or use -d for the folder.", python="Name a file in it."),
        )
    if not stat.S_ISREG(status.st_mode):
        raise FileProblem(f"cannot write {path}: it is not a regular file", "A checkpoint is written in many places.")
    if not overwrite:
        raise OutputExists(
            f"{path} exists already", fix=f"Overwrite it: {arg(overwrite=True)}, or choose another name."
        )
    return real


def replace_file(
    plan: Plan | bytes,
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    inputs: Iterable[Input] = (),
    verify: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    digest: StreamingSha256 | None = None,
    sync_folder: bool = True,
) -> tuple[Note, ...]:
    """Writes a plan of one file, or bytes, to `target`, durably. Returns what is to be known of the new file.

    inputs: must not have changed by the time of the commit.  verify: called with the complete temporary file; it raises
    to refuse.
    digest: adds up what is written, on the way.  sync_folder: False where the name of another file, synced next, makes
    it durable too. Raises `OutputExists`, `DiskFull`, `FileProblem`, `Corrupt` (an input does not match its checksum);
    then nothing is changed.
    """
    plan = Plan({"": [InlineBytes(plan)]}) if isinstance(plan, bytes) else plan
    _sweep(check_target(target, overwrite=True))
    real = check_target(target, overwrite=overwrite)
    temporary, fd = "", -1
    try:
        _check_space(plan.nbytes, os.path.dirname(absolute(real)), real)
        temporary, fd = _temporary_for(real)
        notes = attribute_notes(real, keep_attributes(real, fd))
        with unchanged(*inputs):
            reserve(fd, plan.nbytes)
            Sink(fd, 0, plan.nbytes, progress, digest).write(segments_of(plan), plan.checks)
            settle(fd)
            if verify is not None:
                verify(temporary)
        _commit(temporary, real, overwrite)
        temporary = ""
    except OSError as error:
        raise write_problem(error, target) from error
    finally:
        if temporary:
            _remove(temporary)
        _close(fd)
        if digest is not None:
            digest.close()
    return (*notes, *_sync_folder(real)) if sync_folder else notes


def settle(fd: int) -> None:
    """Waits until everything is on the disk. Raises `OSError` if any is not; it must not be asked again then.

    Some file systems (NFS, quotas) report what went wrong when a file is closed. Closing a second descriptor asks them,
    while the first keeps the lock.
    """
    os.fsync(fd)
    os.close(os.dup(fd))


def make_folder(path: str) -> None:
    """Makes a folder and those above it, so that their names survive a power cut. Raises `FileProblem`."""
    if elsewhere := refused_place(path, writing=True):
        raise elsewhere
    missing, place = [], absolute(path)
    while not os.path.lexists(place):
        missing.append(place)
        place = os.path.dirname(place)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise file_problem(error, path, "make the folder") from error
    for made in reversed(missing):
        _sync_folder(made)


def write_problem(error: OSError, target: str | os.PathLike[str]) -> CkptoolError:
    """The error for a failed write, with what was not touched."""
    if isinstance(error, CkptoolError):
        return error
    name = os.fspath(target)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        words = {errno.EDQUOT: "your quota is used up", errno.EFBIG: "the limit on file sizes was reached"}.get(
            error.errno, "the disk is full"
        )
        return DiskFull(
            f"cannot write {name}: {words}",
            UNTOUCHED.format(name),
            f"Make room, or write to another disk with {arg('out')}.",
        )
    problem = file_problem(error, target, "write")
    problem.why = " ".join(part for part in (problem.why, printable(UNTOUCHED.format(name))) if part)
    return problem


def _check_space(needed: int, folder: str, target: str) -> None:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and needed > free:  # special file systems count no blocks at all
        raise DiskFull(
            f"cannot write {target}: it needs {needed:,} bytes, {free:,} are free",
            f"Nothing was written, and {target} is as it was.",
            f"Make room, or write to another disk with {arg('out')}.",
        )


# Temporary files -----------------------------------------------------------------------------------------------------


_OURS = re.compile(r"\.ckptool-[0-9a-f]{16}-[0-9a-f]{16}\.tmp")


def _prefix(target: str) -> str:
    """The prefix of a target's temporary files: a digest, since a long name leaves no room for more."""
    return f".ckptool-{hashlib.sha256(os.path.basename(target).encode('utf-8', 'surrogateescape')).hexdigest()[:16]}-"


def _new_file(path: str, folder: int | None = None) -> int:
    """A new file; `folder` is an open one, in which `path` is a name."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)


def _temporary_for(target: str, make: Callable[[str], int] = _new_file) -> tuple[str, int]:
    """A new, locked, empty file beside the target (or what else `make` opens)."""
    folder = os.path.dirname(absolute(target))
    for _ in range(ATTEMPTS):
        path, fd = os.path.join(folder, f"{_prefix(target)}{secrets.token_hex(8)}.tmp"), -1
        try:
            fd = make(path)
            if _lock(fd) is not False and os.fstat(fd).st_nlink:  # else it is being swept, or was, before it was locked
                return path, fd
        except FileExistsError:  # or, of a folder, that it was swept at once: under another name, then
            continue
        except BaseException:
            _remove(path)
            _close(fd)
            raise
        _close(fd)
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def _close(fd: int) -> None:
    """Closes a file of which nothing is wanted any more."""
    if fd >= 0:
        with suppress(OSError):
            os.close(fd)


def _lock(fd: int) -> bool | None:
    """Marks a file as owned by this process while it lives. False if another owns it, None without locks.

    It never waits: the lock of a machine that is gone may stay for ever.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: then nothing is ever swept there
        return None
    return True


def _sweep(target: str) -> None:
    """Removes what killed runs left beside this target, for it or for another."""
    sweep_folder(os.path.dirname(absolute(target)))


def sweep_folder(folder: str) -> None:
    """Removes what killed runs left in a folder, for whatever target: only what has one of our names and no lock."""
    try:
        names = [name for name in os.listdir(folder) if _OURS.fullmatch(name)]
    except OSError:
        return  # a folder that may be written to but not listed
    for name in names:
        path = os.path.join(folder, name)
        try:
            fd = _opened(path)
        except OSError:
            continue
        try:
            if _lock(fd):
                _remove(path, fd)
        finally:
            _close(fd)


def _opened(path: str) -> int:
    """A descriptor of a temporary file or folder, to lock it by."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except IsADirectoryError:
        return _opened_folder(path)


def _opened_folder(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)


def _remove(path: str, fd: int = -1) -> None:
    """Removes a temporary file, or a temporary folder with its files. fd: it, where it is open."""
    try:
        _unlink(path, fd)
    except OSError:
        return  # someone else was quicker, or the folder became read-only: the next run sweeps
    except BaseException:  # a signal: first what was begun
        with suppress(OSError):
            _unlink(path, fd)
        raise


def _unlink(path: str, fd: int) -> None:
    """Removes a file, or a folder with the files in it, but nothing that somebody else put under the name meanwhile."""
    if fd >= 0 and not os.path.samestat(os.lstat(path), os.fstat(fd)):
        return
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    folder = fd if fd >= 0 else _opened_folder(path)
    try:
        for name in os.listdir(folder):
            with suppress(FileNotFoundError):  # two runs remove the same folder: neither may stop half-way
                os.unlink(name, dir_fd=folder)
    finally:
        if folder != fd:
            _close(folder)
    os.rmdir(path)


# The commit ----------------------------------------------------------------------------------------------------------


def _commit(temporary: str, target: str, overwrite: bool) -> None:
    if overwrite:
        os.replace(temporary, target)
        return
    try:
        os.link(temporary, target)  # unlike a rename, this fails if someone made the target meanwhile
    except FileExistsError:
        raise OutputExists(
            f"{target} was created by another process in the meantime", fix=f"Overwrite it: {arg(overwrite=True)}."
        ) from None
    except OSError:  # a file system without hard links
        check_target(target, overwrite=False)
        os.replace(temporary, target)
        return
    _remove(temporary)  # the new file is there: if its other name stays, the next run sweeps it


def _sync_folder(target: str) -> tuple[Note, ...]:
    """Makes the name itself survive a power cut. Returns a note where the disk says that it may not."""
    fd = -1
    try:
        fd = os.open(os.path.dirname(absolute(target)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fsync(fd)
    except OSError as error:
        return (
            Note(
                "not-synced",
                f"{target} is complete and visible, but its durability is uncertain: its folder could "
                "not be synced "
                f"({os.strerror(error.errno or 0)}), so a power cut may undo the change of its name",
            ),
        )
    finally:
        _close(fd)
    return ()
