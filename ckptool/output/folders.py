"""Durable replacement of a folder: all is written into a temporary folder beside it, synced, and renamed once.

Over an existing folder the two names are exchanged, which Linux does in one step; then the old one is removed. Where
the file system cannot (NFS, other systems), the old folder is put aside under another name first: a process that is
killed between the two renames leaves no folder under the target's name, but both complete, and the next run for the
same target puts the old one back.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.blocks import Plan
from ckptool.checkpoint.files import Input, unchanged
from ckptool.checkpoint.paths import absolute, file_problem, is_url, refused_place
from ckptool.commands import arg
from ckptool.errors import Conflict, FileProblem, OutputExists, counted, listed
from ckptool.output.durable import (
    NEW,
    attribute_notes,
    check_space,
    check_target,
    close,
    folder_of,
    hidden_name,
    keep_attributes,
    opened,
    remove,
    settle,
    sweep_folder,
    sync_folder_of,
    temporary_for,
    write_problems,
)
from ckptool.output.sink import Progress, Sink, reserve, system_call

ASIDE = "old"  # the end of the old folder's name between two renames: for an instant it is the only one, so not swept
_HERE = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def check_folder(target: str | os.PathLike[str], *, overwrite: bool, replaceable: Collection[str] = ()) -> str:
    """The path of the folder that a write to `target` makes or replaces (a link's own target); raises if it must not.

    replaceable: the names in an existing folder that may go. Raises `OutputExists` where there are files and
    `overwrite` is false, `Conflict` where others are among them, `FileProblem` for a file at the target or a missing
    folder above it.
    """
    if is_url(path := os.fspath(target)):
        from ckptool.output.uploads import check_upload

        check_upload(path, overwrite=overwrite, names=replaceable)
        return path
    real = _real_path(target)
    if problem := refused_place(path, writing=True):
        raise problem
    try:
        status = os.stat(real)
        if not stat.S_ISDIR(status.st_mode):
            what, why = f"cannot write {path}: it is a file", "The output is a folder of several files."
            raise FileProblem(what, why, f"Choose another name; or write one file: {arg(container='safetensors')}")
        names = os.listdir(real)
    except FileNotFoundError:
        try:
            return check_target(path.rstrip("/"), overwrite=overwrite)
        except FileProblem:
            if not os.path.isdir(real):
                raise
        # Another writer has given a folder this name meanwhile.
        return check_folder(target, overwrite=overwrite, replaceable=replaceable)
    except (OSError, ValueError) as error:
        raise file_problem(error, path, "write") from error
    if names and not overwrite:
        what = f"the folder {path} already exists, with {counted(len(names), 'file')} in it"
        raise OutputExists(what, fix=f"Replace it: {arg(overwrite=True)}, or choose another name.")
    _refuse_foreign(path, real, names, replaceable.__contains__)
    return real


def _real_path(target: str | os.PathLike[str]) -> str:
    """The absolute path of a folder, without a slash at its end; of a link, what it leads to."""
    path = os.fspath(target).rstrip("/") or "/"
    try:
        return absolute(os.path.realpath(path) if os.path.islink(path) else path)
    except ValueError as error:
        raise file_problem(error, path, "write") from error


def _refuse_foreign(shown: str, folder: str, names: Iterable[str], may_go: Callable[[str], Any]) -> None:
    """Raises `Conflict` for a folder that holds other files than those that may go."""
    foreign = [
        name
        for name in sorted(names)
        if not may_go(name) or (os.path.isdir(path := os.path.join(folder, name)) and not os.path.islink(path))
    ]
    if foreign:
        what = f"cannot replace the folder {shown}: {listed(foreign)} would be deleted, too"
        raise Conflict(what, "It was left as it is.", "Write to a new folder; or remove those files first.")


class NewFolder:
    """A folder beside `target`, in which callers write and sync files; `commit` gives it its name.

    What killed runs left is removed first.  path: of the new folder, or of the old one that it replaced; `close`
    removes it.  Raises `DiskFull`, `FileProblem`.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.shown, self.target, self.path, self.fd = target, _real_path(target), "", -1
        _put_back(self.target)
        sweep_folder(folder_of(self.target))

    def begin(self) -> None:
        """Makes the folder, which is empty and locked."""
        with write_problems(self.shown):
            self.path, self.fd = temporary_for(self.target, _new_folder)

    def commit(self, may_go: Callable[[str], Any], overwrite: bool = True) -> tuple[Note, ...]:
        """Gives it its name, durably. may_go: whether a name may go with the folder that it replaces."""
        with write_problems(self.shown):
            try:
                os.fsync(self.fd)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # folders cannot be synced there
                    raise
            # In one step: `close` removes what is at the path by then, the old folder, which is not the open one.
            self.path, fd, self.fd = _commit(self.path, self.target, may_go, overwrite), self.fd, -1
        close(fd)
        return sync_folder_of(self.target)

    def close(self) -> None:
        """Removes what is under a temporary name: the new folder, or the one that it replaced."""
        if self.path:
            remove(self.path, self.fd)
        close(self.fd)


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
    if is_url(path := os.fspath(target)):
        from ckptool.output.uploads import upload

        return upload(plan, path, overwrite=overwrite, inputs=inputs, verify=verify, progress=progress)
    allowed = {*replaceable, *plan.files}
    folder = NewFolder(target)
    check_folder(target, overwrite=overwrite, replaceable=allowed)
    try:
        with write_problems(target):
            check_space(plan.nbytes, folder.target)
            folder.begin()
            lost = keep_attributes(folder.target, folder.fd)
            with unchanged(*inputs):
                lost += write_files(plan, folder, progress)
                if verify is not None:
                    verify(folder.path)
        return (*attribute_notes(folder.target, lost), *folder.commit(allowed.__contains__, overwrite))
    finally:
        folder.close()


def write_files(plan: Plan, folder: NewFolder, progress: Progress | None) -> list[str]:
    """Writes all files of the plan, each synced; the bytes written are counted over all of them.

    Returns what could not be kept of the files in the folder that is replaced.
    """
    written, checks, lost = 0, plan.checks, []
    for name, segments in plan.files.items():
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise AssertionError(f"{name!r} is not a file name")
        size = sum(segment.length for segment in segments)
        fd = os.open(name, NEW, 0o666, dir_fd=folder.fd)
        try:
            lost += keep_attributes(os.path.join(folder.target, name), fd)
            reserve(fd, size)
            sink = Sink(fd, 0, plan.nbytes, progress)
            sink.written = written
            sink.write(segments, checks)
            settle(fd)
        finally:
            close(fd)
        written, checks = written + size, []
    return lost


def remove_folder(path: str, removable: Callable[[str], Any]) -> None:
    """Removes a folder of files with such names, renaming it first; one with other files in it stays."""
    try:
        _refuse_foreign(path, path, os.listdir(path), removable)
        old = hidden_name(path)
        os.rename(path, old)
        remove(old)
    except (Conflict, FileNotFoundError):
        return
    except OSError as error:
        raise file_problem(error, path, "delete") from error


def move_folder(temporary: str, target: str) -> None:
    """Gives a complete folder, which others have written beside the target, the target's name, durably.

    All in it is synced first. It replaces a folder that is there already in one step. Raises `DiskFull`, `FileProblem`.
    """
    with write_problems(target):
        for place, _, names in os.walk(temporary):
            for path in (*(os.path.join(place, name) for name in names), place):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    close(fd)
        _put_back(target)
        old = _commit(temporary, target, None)
        sync_folder_of(target)
        if old:
            shutil.rmtree(old, ignore_errors=True)


def _new_folder(path: str) -> int:
    """A new folder, open; `FileExistsError` where another run swept it before it was opened."""
    os.mkdir(path)
    try:
        return opened(path)
    except FileNotFoundError:
        raise FileExistsError(errno.EEXIST, "swept before it was locked", path) from None
    except OSError:  # no more files may be open, nor one to remove it by
        os.rmdir(path)
        raise


# The commit ----------------------------------------------------------------------------------------------------------


def _commit(temporary: str, target: str, may_go: Callable[[str], Any] | None, overwrite: bool = True) -> str:
    """Gives a new folder its name. Returns the path of the old one, to be removed, or "".

    may_go: whether a name may go with the old one; None for all.
    """
    new = os.stat(temporary)
    try:
        os.rename(temporary, target)  # also onto an empty folder, but never onto one with files in it
        return ""
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if not overwrite:
        what = f"{target} was created by another process in the meantime"
        raise OutputExists(what, fix=f"Replace it: {arg(overwrite=True)}.")
    old = temporary
    try:
        if not _exchange(temporary, target):
            old = hidden_name(target, ASIDE)
            os.rename(target, old)
            os.rename(temporary, target)
        if may_go is not None:
            try:
                names = os.listdir(old)
            except FileNotFoundError:
                return ""  # under a temporary name, without a lock: another writer has removed it already
            _refuse_foreign(target, old, names, may_go)
    except BaseException:
        # A rename failed; or a file was put into the old folder at the last moment, or may have been.
        if os.path.exists(target) and os.path.samestat(os.stat(target), new):
            if old == temporary:
                _exchange(temporary, target)
            else:
                os.rename(target, temporary)
        if old != temporary and not os.path.lexists(target):
            os.rename(old, target)
        raise
    return old


def _exchange(one: str, other: str) -> bool:
    """Exchanges the names of two folders in one step; False where the system cannot."""
    import ctypes

    call = system_call("renameat2")
    if call is None:
        return False
    if not call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number))


def _put_back(target: str) -> None:
    """Puts the old folder back after a run that was killed between two renames; removes it after one killed later."""
    aside = hidden_name(target, ASIDE)
    if not os.path.isdir(aside):
        return
    try:
        os.rename(aside, target)  # onto nothing: the new folder had not got its name
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            remove(aside)
