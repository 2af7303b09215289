"""Durable replacement of a folder: all is written into a temporary folder beside it, synced, and renamed once.

Over an existing folder the two names are exchanged, which Linux does in one step; then the old one is removed. Where
the file system cannot (NFS, other systems), the old folder is put aside under another name first: a process that is
killed between the two renames leaves no folder under the target's name, but both complete, and the next run for the
same target puts the old one back.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.files import Input, unchanged
from ckptool.checkpoint.paths import absolute, file_problem, refused_place
from ckptool.checkpoint.plan import Plan
from ckptool.commands import arg
from ckptool.errors import Conflict, FileProblem, OutputExists, counted, listed
from ckptool.output.attributes import attribute_notes, keep_attributes
from ckptool.output.copying import _system_call, reserve
from ckptool.output.durable import (
    _check_space,
    _close,
    _new_file,
    _prefix,
    _remove,
    _sweep,
    _sync_folder,
    _temporary_for,
    check_target,
    settle,
    sweep_folder,
    write_problem,
)
from ckptool.output.sink import Progress, Sink

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def check_folder(target: str | os.PathLike[str], *, overwrite: bool, replaceable: Collection[str] = ()) -> str:
    """The path of the folder that a write to `target` makes or replaces (a link's own target); raises if it must not.

    replaceable: the names in an existing folder that may go. Raises `OutputExists` where there are files and
    `overwrite` is false, `Conflict` where others are among them, `FileProblem` for a file at the target or a missing
    folder above it.
    """
    path, real = os.fspath(target), _real_path(target)
    if elsewhere := refused_place(path, writing=True):
        raise elsewhere
    try:
        status = os.stat(real)
        if not stat.S_ISDIR(status.st_mode):
            raise FileProblem(
                f"cannot write {path}: it is a file",
                "A folder of several files was to be written there.",
                f"Choose another name; or write one file: {arg(container='safetensors')}",
            )
        held = os.listdir(real)
    except FileNotFoundError:
        try:
            return check_target(real, overwrite=overwrite)
        except FileProblem:
            if not os.path.isdir(real):
                raise
        # Another writer gave a folder this name meanwhile.
        return check_folder(target, overwrite=overwrite, replaceable=replaceable)
    except (OSError, ValueError) as error:
        raise file_problem(error, path, "write") from error
    if held and not overwrite:
        raise OutputExists(
            f"the folder {path} exists already, with {counted(len(held), 'file')} in it",
            fix=f"Replace it: {arg(overwrite=True)}, or choose another name.",
        )
    if foreign := _foreign(real, held, replaceable):
        raise _would_lose(path, foreign)
    return real


def _real_path(target: str | os.PathLike[str]) -> str:
    """The absolute path of a folder, without a slash at its end; of a link, what it leads to."""
    path = os.fspath(target).rstrip("/") or "/"
    try:
        return absolute(os.path.realpath(path) if os.path.islink(path) else path)
    except ValueError as error:
        raise file_problem(error, path, "write") from error


def _foreign(folder: str, held: Iterable[str], replaceable: Collection[str]) -> list[str]:
    """The files in a folder beside those that may go."""
    return sorted(
        name
        for name in held
        if name not in replaceable or (os.path.isdir(path := os.path.join(folder, name)) and not os.path.islink(path))
    )


def _would_lose(path: str, foreign: list[str]) -> Conflict:
    return Conflict(
        f"cannot replace the folder {path}: {listed(foreign)} would be deleted with it",
        "Only files of the checkpoint in it may be deleted; it was left as it is.",
        "Write to a new folder; or remove those files first.",
    )


def replace_folder(
    plan: Plan,
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    replaceable: Collection[str] = (),
    inputs: Iterable[Input] = (),
    verify: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> tuple[Note, ...]:
    """Writes a plan of files to the folder `target`, durably. Returns notes on the new folder.

    replaceable: the names in an existing folder that may go, beside those that are written.  inputs: must not have
    changed by the time of the commit.  verify: called with the complete temporary folder; it raises to refuse. Raises
    `OutputExists`, `Conflict` (other files would be deleted), `DiskFull`, `FileProblem`, `Corrupt` (an input does not
    match its checksum); then nothing is changed.
    """
    allowed = {*replaceable, *plan.files}
    _put_back(_real_path(target))
    _sweep(_real_path(target))
    real = check_folder(target, overwrite=overwrite, replaceable=allowed)
    temporary, fd, old = "", -1, ""
    try:
        _check_space(plan.nbytes, os.path.dirname(real), real)
        temporary, fd = _temporary_for(real, _new_folder)
        lost = keep_attributes(real, fd)
        with unchanged(*inputs):
            lost += _write_files(plan, fd, real, progress)
            _sync(fd)
            if verify is not None:
                verify(temporary)
        old = _commit(temporary, real, allowed, overwrite, fd)
        temporary = ""
        return (*attribute_notes(real, lost), *_sync_folder(real))
    except OSError as error:
        raise write_problem(error, target) from error
    finally:
        if temporary:
            _remove(temporary, fd)
        elif old:
            _remove(old)
        _close(fd)


class NewFolder:
    """A folder beside `target` that others fill, synced file by file; `commit` gives it its name, else it is removed.

    Raises `FileProblem`, `DiskFull` where it cannot be made.
    """

    def __init__(self, target: str) -> None:
        _put_back(target)
        sweep_folder(os.path.dirname(target))
        self.target = target
        try:
            self.path, self.fd = _temporary_for(target, _new_folder)
        except OSError as error:
            raise write_problem(error, target) from error

    def commit(self, replaceable: Callable[[str], Any]) -> None:
        """Gives the folder its name, durably. replaceable: tells the names that may go with a folder it replaces."""
        try:
            _sync(self.fd)
            held = os.listdir(self.target) if os.path.isdir(self.target) else []
            old = _commit(self.path, self.target, [*filter(replaceable, held)], True, self.fd)
        except OSError as error:
            raise write_problem(error, self.target) from error
        self.path = old
        _sync_folder(self.target)

    def close(self) -> None:
        """Removes what has no name: the new folder, or the one that it replaced."""
        if self.path:
            _remove(self.path)
        _close(self.fd)


def remove_folder(path: str, removable: Callable[[str], Any]) -> None:
    """Removes a folder with files of these names, which loses its own name first; one with others in it stays."""
    try:
        if not _foreign(path, held := os.listdir(path), [*filter(removable, held)]):
            old = os.path.join(os.path.dirname(path), f"{_prefix(path)}{secrets.token_hex(8)}.tmp")
            os.rename(path, old)
            _remove(old)
    except FileNotFoundError:
        return
    except OSError as error:
        raise file_problem(error, path, "delete") from error


def move_folder(temporary: str, target: str) -> None:
    """Gives a complete folder, which others have written beside the target, the target's name, durably.

    All in it is synced first. A folder that is there already goes at the same moment. Raises `DiskFull`, `FileProblem`.
    """
    try:
        for place, _, names in os.walk(temporary):
            for path in (*(os.path.join(place, name) for name in names), place):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    _close(fd)
        _put_back(target)
        old = temporary
        try:
            os.rename(temporary, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not _exchange(temporary, target):
                old = _put_aside(temporary, target)
        _sync_folder(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise write_problem(error, target) from error


def _new_folder(path: str) -> int:
    """A new folder, open; `FileExistsError` where another run swept it before it was opened."""
    os.mkdir(path)
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise FileExistsError(errno.EEXIST, "swept before it was locked", path) from None


def _write_files(plan: Plan, folder: int, old: str, progress: Progress | None) -> list[str]:
    """Writes all files of the plan, each synced, into an open folder; the bytes written are counted over all of them.

    old: the folder that is replaced. Returns what could not be kept of the files in it.
    """
    before, checks, lost = 0, plan.checks, []
    for name, segments in plan.files.items():
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise AssertionError(f"{name!r} is not the name of a file")
        size = sum(segment.length for segment in segments)
        fd = _new_file(name, folder)
        try:
            lost += keep_attributes(os.path.join(old, name), fd)
            reserve(fd, size)
            Sink(fd, 0, size, _counted(progress, before, plan.nbytes)).write(segments, checks)
            settle(fd)
        finally:
            _close(fd)
        before, checks = before + size, []
    return lost


def _counted(progress: Progress | None, before: int, total: int) -> Progress | None:
    return None if progress is None else lambda done, _: progress(before + done, total)


def _sync(fd: int) -> None:
    """Makes the names in a folder survive a power cut, where the file system has such a notion."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


# The commit ----------------------------------------------------------------------------------------------------------


def _commit(temporary: str, target: str, allowed: Collection[str], overwrite: bool, fd: int) -> str:
    """Gives the new folder, open as `fd`, its name. Returns the path of the old one, to be removed, or ""."""
    try:
        os.rename(temporary, target)  # also onto an empty folder, but never onto one with files in it
        return ""
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if not overwrite:
        raise OutputExists(
            f"{target} was created by another process in the meantime", fix=f"Replace it: {arg(overwrite=True)}."
        )
    old = temporary
    try:
        if not _exchange(temporary, target):
            old = _put_aside(temporary, target)
        try:
            held = os.listdir(old)
        except FileNotFoundError:
            return ""  # under a temporary's name, and nobody's: another writer cleared it away already
        if foreign := _foreign(old, held, allowed):
            raise _would_lose(target, foreign)
    except BaseException:
        if os.path.samestat(os.stat(target), os.fstat(fd)):
            # Undoes the exchange: a file was put into the old folder at the last moment, or may have been.
            if old == temporary:
                _exchange(temporary, target)
            else:
                os.rename(target, temporary)
                os.rename(old, target)
        raise
    return old


def _exchange(one: str, other: str) -> bool:
    """Exchanges the names of two folders in one step; False where the system cannot."""
    import ctypes

    call = _system_call("renameat2")
    if call is None:
        return False
    if not call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number))


def _aside(target: str) -> str:
    """The path of the old folder between two renames. Not a name that is swept: for an instant it is the only one."""
    return os.path.join(os.path.dirname(target), f"{_prefix(target)}old")


def _put_aside(temporary: str, target: str) -> str:
    aside = _aside(target)
    os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except BaseException:
        os.rename(aside, target)
        raise
    return aside


def _put_back(target: str) -> None:
    """Undoes what a run left that was killed between two renames; removes what one left that was killed after them."""
    aside = _aside(target)
    if not os.path.isdir(aside):
        return
    try:
        os.rename(aside, target)  # onto nothing: the new folder had not got its name
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            _remove(aside)
