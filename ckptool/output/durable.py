"""Durable replacement: write beside the target, sync, rename, sync the folder. Edits in place are `edits`, folders
`folders`; there is no other way to make or change a file.

At any instant, killed or out of disk, the old file or the new one is whole under its name. What a killed run leaves is
a temporary file in the same folder; it was locked by its writer, so the next run that writes into the folder can tell
that nobody owns it and removes it. The new file gets the owner, permissions and attributes of the old one, as far as
the system allows it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ckptool.checkpoint import InlineBytes, Note
from ckptool.checkpoint.blocks import Plan
from ckptool.checkpoint.files import Input, unchanged
from ckptool.checkpoint.paths import TEMPORARY, absolute, file_problem, is_url, may_exist, refused_place
from ckptool.commands import arg, other_program
from ckptool.errors import CkptoolError, DiskFull, FileProblem, OutputExists, Text, listed, printable
from ckptool.output.sink import Feed, Progress, Sink, reserve

ATTEMPTS = 100  # to make a temporary file that no other run takes for a leftover


def check_target(target: str | os.PathLike[str], *, overwrite: bool, sweep: bool = False) -> str:
    """The path that a write to `target` replaces (a link's own target); raises if it cannot or must not be written.

    sweep: what killed runs left beside it is removed, even where writing is refused since it exists. Raises
    `OutputExists` where something is there and `overwrite` is false, `FileProblem` for a folder or a missing one.
    """
    path = os.fspath(target)
    if is_url(path):
        from ckptool.output.uploads import check_upload

        check_upload(path, overwrite=overwrite)
        return path
    if problem := refused_place(path, writing=True):
        raise problem
    real = os.path.realpath(path) if os.path.islink(path) else path
    try:
        mode = os.stat(path).st_mode  # /dev/stdout leads to a pipe, which has no path
    except FileNotFoundError:
        if not os.path.isdir(folder := folder_of(real)):
            what = f"cannot write {path}: there is no folder {folder}"
            raise FileProblem(what, "", f"Make it first: {other_program('mkdir -p', folder)}") from None
        mode = 0
    except (OSError, ValueError) as error:
        raise file_problem(error, path, "write") from error
    if stat.S_ISDIR(mode) or not os.path.basename(path):
        what = f"cannot write {path}: it {'is a folder' if mode else 'names a folder, which does not exist'}"
        how = Text("Name a file in it; or, if the command has it, use -d.", python="Name a file in it.")
        raise FileProblem(what, "The output is a file.", how)
    if mode and not stat.S_ISREG(mode):
        raise FileProblem(f"cannot write {path}: it is not a regular file", "Writing a checkpoint takes random access.")
    if sweep:
        sweep_folder(folder_of(real))
    if mode and not overwrite:
        fix = f"Overwrite it: {arg(overwrite=True)}, or choose another name."
        raise OutputExists(f"{path} already exists", fix=fix)
    return real


def replace_file(
    plan: Plan | bytes,
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    inputs: Iterable[Input] = (),
    verify: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    feed: Feed | None = None,
    sync_folder: bool = True,
) -> tuple[Note, ...]:
    """Writes a plan of one file, or bytes, to `target`, durably. Returns notes on the new file.

    inputs: must not have changed by the time of the commit.  verify: called with the complete temporary file; it raises
    to refuse.
    feed: called with all that is written.  sync_folder: False where syncing the folder for another file, written next,
    makes this name durable too. Raises `OutputExists`, `DiskFull`, `FileProblem`, `Corrupt` (an input does not match
    its checksum); then nothing is changed.
    """
    plan = Plan({"": [InlineBytes(plan)]}) if isinstance(plan, bytes) else plan
    if is_url(path := os.fspath(target)):
        from ckptool.output.uploads import upload

        return upload(plan, path, overwrite=overwrite, inputs=inputs, verify=verify, progress=progress)
    real = check_target(target, overwrite=overwrite, sweep=True)
    temporary, fd, notes = "", -1, tuple[Note, ...]()
    try:
        check_space(plan.nbytes, real)
        temporary, fd = temporary_for(real)
        if os.path.lexists(real):
            notes = attribute_notes(real, keep_attributes(real, fd))
        with unchanged(*inputs):
            reserve(fd, plan.nbytes)
            Sink(fd, 0, plan.nbytes, progress, feed).write(plan.files[""], plan.checks)
            settle(fd)
            if verify is not None:
                verify(temporary)
        if overwrite:
            os.replace(temporary, real)
        else:
            try:
                os.link(temporary, real)  # unlike a rename, this fails if someone made the target meanwhile
            except FileExistsError:
                what = f"{real} was created by another process in the meantime"
                raise OutputExists(what, fix=f"Overwrite it: {arg(overwrite=True)}.") from None
            except OSError:  # a file system without hard links
                check_target(real, overwrite=False)
                os.replace(temporary, real)
    except OSError as error:
        raise write_problem(error, target) from error
    finally:
        if temporary:  # after the commit it is a second name of the file, or nothing
            remove(temporary, fd)
        close(fd)
    return (*notes, *sync_folder_of(real)) if sync_folder else notes


def settle(fd: int) -> None:
    """Waits until everything is on the disk. Raises `OSError` if anything is not; it must not be called again then.

    Some file systems (NFS, quotas) report what went wrong when a file is closed. Closing a second descriptor makes them
    do so, while the first keeps the lock.
    """
    os.fsync(fd)
    os.close(os.dup(fd))


def make_folder(path: str) -> list[str]:
    """Makes a folder and those above it, so that their names survive a power cut. Returns those that were not there,
    the innermost first. Raises `DiskFull`, `FileProblem`; then none of them is left."""
    if problem := refused_place(path, writing=True):
        raise problem
    missing, place = [], absolute(path)
    while not os.path.lexists(place):
        missing.append(place)
        place = os.path.dirname(place)
    try:
        with write_problems(path, "make the folder"):
            os.makedirs(path, exist_ok=True)
        for created in reversed(missing):
            sync_folder_of(created)
    except BaseException:
        remove_empty(missing)
        raise
    return missing


@contextmanager
def new_folder(path: str) -> Iterator[None]:
    """Makes a folder, if there is none, for what is written meanwhile; it goes again if nothing is in it at the end."""
    made = [] if may_exist(path) else make_folder(path)
    try:
        yield
    finally:
        remove_empty(made)


def remove_empty(folders: Iterable[str]) -> None:
    """Removes the folders that nothing is in, each after those in it."""
    for folder in folders:
        with suppress(OSError):
            os.rmdir(folder)


def _untouched(target: str) -> str:
    """What became of the target of a failed write, in words."""
    return f"Nothing else was changed: {target} is as it was." if os.path.lexists(target) else "Nothing was written."


def write_problem(error: OSError, target: str | os.PathLike[str], doing: str = "write") -> CkptoolError:
    """The error for a failed write, which says what was not touched."""
    if isinstance(error, CkptoolError):
        return error
    name = os.fspath(target)
    words = _FULL.get(error.errno or 0)
    if words:
        return DiskFull(f"cannot {doing} {name}: {words}", _untouched(name), _ROOM).about(error.errno, name)
    problem = file_problem(error, target, doing)
    problem.why = " ".join(part for part in (problem.why, printable(_untouched(name))) if part)
    return problem


@contextmanager
def write_problems(target: str | os.PathLike[str], doing: str = "write") -> Iterator[None]:
    """Raises the error for a failed write in place of the system's."""
    try:
        yield
    except OSError as error:
        raise write_problem(error, target, doing) from error


_ROOM = f"Make room, or write to another disk with {arg('out')}."
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your quota is used up",
    errno.EFBIG: "the file size limit was reached",
}


def check_space(needed: int, target: str) -> None:
    """Raises `DiskFull` if there is no room for `needed` bytes beside the target."""
    status = os.statvfs(folder_of(target))
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and needed > free:  # special file systems count no blocks at all
        what = f"cannot write {target}: it needs {needed:,} bytes, {free:,} are free"
        raise DiskFull(what, _untouched(target), _ROOM).about(errno.ENOSPC, target)


# Temporary files -----------------------------------------------------------------------------------------------------


NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def folder_of(target: str) -> str:
    """The absolute path of the folder that a file or folder is in."""
    return os.path.dirname(absolute(target))


def hidden_name(target: str, end: str = "") -> str:
    """A path beside a target: a digest of its name (it may be too long to extend), and `end` or one for a temporary."""
    digest = hashlib.sha256(os.path.basename(target).encode("utf-8", "surrogateescape")).hexdigest()
    return os.path.join(folder_of(target), f".ckptool-{digest[:16]}-{end or secrets.token_hex(8) + '.tmp'}")


def temporary_for(target: str, make: Callable[[str], int] | None = None) -> tuple[str, int]:
    """A new, locked, empty file beside the target (or what else `make` opens)."""
    for _ in range(ATTEMPTS):
        path, fd = hidden_name(target), -1
        try:
            fd = os.open(path, NEW, 0o666) if make is None else make(path)
            if _lock(fd) is not False and os.fstat(fd).st_nlink:  # else it is being swept, or was, before it was locked
                return path, fd
        except FileExistsError:  # or, of a folder, that it was swept at once: under another name, then
            continue
        except BaseException:
            remove(path)
            close(fd)
            raise
        close(fd)
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def close(fd: int) -> None:
    """Closes a file that is not needed any more."""
    if fd >= 0:
        with suppress(OSError):
            os.close(fd)


def _lock(fd: int) -> bool | None:
    """Marks a file as owned by this process while it lives. False if another owns it, None without locks.

    It never waits: the lock of a machine that is gone may never be released.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: then nothing is ever swept there
        return None
    return True


def sweep_folder(folder: str) -> None:
    """Removes what killed runs left in a folder, for whatever target: only what has one of our names and no lock."""
    try:
        names = [name for name in os.listdir(folder) if TEMPORARY.fullmatch(name)]
    except OSError:
        return  # a folder that may be written to but not listed
    for name in names:
        path = os.path.join(folder, name)
        try:
            fd = opened(path)
        except OSError:
            continue
        try:
            if _lock(fd):
                remove(path, fd)
        finally:
            close(fd)


def opened(path: str) -> int:
    """A descriptor of a temporary file or folder, to lock it by."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_RDWR)
    except IsADirectoryError:
        return os.open(path, flags | os.O_RDONLY | os.O_DIRECTORY)


def remove(path: str, fd: int = -1) -> None:
    """Removes a temporary file, or a temporary folder with the files in it, but nothing that somebody else put under
    the name meanwhile. fd: its descriptor, if it is open."""
    try:
        status = os.lstat(path)
        if fd >= 0 and not os.path.samestat(status, os.fstat(fd)):
            return
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(path)
            return
        with suppress(OSError):  # nothing is in it; where no more files may be open, it cannot be listed
            os.rmdir(path)
            return
        folder = fd if fd >= 0 else opened(path)
        try:
            for name in os.listdir(folder):
                with suppress(FileNotFoundError):  # two runs remove the same folder: neither may stop half-way
                    os.unlink(name, dir_fd=folder)
        finally:
            if folder != fd:
                close(folder)
        os.rmdir(path)
    except OSError:
        return  # someone else was quicker, or the folder became read-only: the next run sweeps
    except BaseException:  # a signal: first finish the removal
        remove(path, fd)
        raise


def sync_folder_of(target: str) -> tuple[Note, ...]:
    """Makes the name itself survive a power cut. Returns a note if the disk reports that it may not."""
    fd = -1
    try:
        fd = os.open(folder_of(target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fsync(fd)
    except OSError as error:
        why = f"its folder could not be synced ({os.strerror(error.errno or 0)}), so a power cut may undo the rename"
        return (Note("not-synced", f"{target} is complete, but may not be durable: {why}"),)
    finally:
        close(fd)
    return ()


# Owner, permissions, attributes --------------------------------------------------------------------------------------

ACCESS_LIST = "system.posix_acl_access"
_OF_THE_CONTENTS = {"security.ima", "security.evm"}  # signatures, which the new contents do not have


def keep_attributes(old: str, fd: int) -> list[str]:
    """Gives a new file or folder, open as `fd` and still ours, the attributes of `old`. Returns those that were lost.

    Where there is none, nothing is done. Raises `OSError` where not even the permissions can be set.
    """
    try:
        status = os.stat(old)
    except FileNotFoundError:
        return []
    new_status, lost = os.fstat(fd), list[str]()

    def attempt(what: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except OSError:
            lost.append("its access list" if what == ACCESS_LIST else what)

    def copy_attribute(name: str) -> None:
        value = os.getxattr(old, name)
        if name not in _attribute_names(fd) or os.getxattr(fd, name) != value:
            os.setxattr(fd, name, value)

    if status.st_gid != new_status.st_gid:
        attempt(f"its group ({status.st_gid})", os.fchown, fd, -1, status.st_gid)
    names = _attribute_names(old)
    for name in names:
        if name not in _OF_THE_CONTENTS:
            attempt(name if name == ACCESS_LIST else f"the attribute {name}", copy_attribute, name)
    if ACCESS_LIST not in names and ACCESS_LIST in _attribute_names(fd):  # it came from the folder
        attempt(ACCESS_LIST, os.removexattr, fd, ACCESS_LIST)
    mode = stat.S_IMODE(status.st_mode)
    if lost or status.st_uid != new_status.st_uid:
        mode &= ~(stat.S_ISUID | stat.S_ISGID)  # which would hand somebody else's rights on
    os.fchmod(fd, mode)
    if status.st_uid != new_status.st_uid:  # last: afterwards it may not be ours to change
        attempt(f"its owner ({status.st_uid})", os.fchown, fd, status.st_uid, -1)
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:  # which stay names of the old file
        lost.append(f"its hard links ({status.st_nlink - 1} more)")
    return lost


def _attribute_names(place: str | int) -> list[str]:
    try:
        return os.listxattr(place)
    except (OSError, AttributeError):  # a file system, or a system, that has none
        return []


def attribute_notes(target: str, lost: Iterable[str]) -> tuple[Note, ...]:
    """A note of what could not be kept, if anything."""
    attributes = list(dict.fromkeys(lost))
    message = f"{target} was replaced by a file that you own: {listed(attributes)} could not be kept"
    return (Note("attributes-lost", message),) if attributes else ()
