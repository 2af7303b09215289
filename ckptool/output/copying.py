"""Moving bytes from file to file without looking at them; and what a new file takes over from the one it replaces.

Kernel-side where the platform can (`copy_file_range`, at most 8 MB a call), with writeback started after each piece:
that halves the time of the sync at the end. Elsewhere, and between file systems that refuse, through a small buffer.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.files import Source
from ckptool.errors import listed

PIECE = 8 << 20
BUFFER = 256 << 10
PATIENCE, PAUSE = 100, 0.01  # how often, and after how many seconds, a write that took nothing is tried again

# What copy_file_range answers where it cannot: other file systems, old kernels, special mounts.
_CANNOT = {getattr(errno, name) for name in "EXDEV EINVAL ENOSYS EOPNOTSUPP EPERM EBADF ETXTBSY EAGAIN".split()}


def copy_range(source: Source, offset: int, fd: int, at: int, length: int, progress: Callable[[int], None]) -> None:
    """Copies `length` bytes of `source` from `offset` to byte `at` of `fd`; `progress` gets each piece's size."""
    done, in_kernel = 0, hasattr(os, "copy_file_range")
    while done < length:
        copied = 0
        if in_kernel:
            try:
                size = min(PIECE, length - done)
                copied = os.copy_file_range(source.descriptor(), fd, size, offset + done, at + done)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
            in_kernel = copied > 0  # some file systems answer 0 instead of an error
        if not copied:
            data = source.read(offset + done, min(BUFFER, length - done))
            write_all(fd, data, at + done)
            copied = len(data)
        start_writeback(fd, at + done, copied)
        done += copied
        progress(copied)


def write_all(fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
    """Writes all of `data` to byte `at`, however many calls that takes."""
    view, patience = memoryview(data), PATIENCE
    while len(view):
        try:
            written = os.pwrite(fd, view, at)
        except BlockingIOError:  # "try again", as some network file systems say
            written = 0
        if not written:
            if not patience:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            patience -= 1
            time.sleep(PAUSE)
        view = view[written:]
        at += written


def start_writeback(fd: int, at: int, length: int) -> None:
    """Tells the kernel to begin writing these pages to disk, and does not wait. Only speed depends on it."""
    call = system_call("sync_file_range")
    if call is not None:
        call(fd, at, length, 2)  # SYNC_FILE_RANGE_WRITE


def reserve(fd: int, length: int) -> None:
    """Reserves the room for a file before it is written: a full disk shows at once, and writing is a third faster.

    Where the file system cannot, nothing is done (the library's own function would write zeros instead). Raises
    `OSError`.
    """
    import ctypes

    call = system_call("fallocate")
    if call is not None and length and call(fd, 0, 0, length):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(number, os.strerror(number))


@cache
def system_call(name: str) -> Callable[..., int] | None:
    """A function of the C library that Python does not offer; None where there is none."""
    if sys.platform != "linux":
        return None
    import ctypes

    arguments = {
        "sync_file_range": (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint),
        "fallocate": (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
        "renameat2": (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint),
    }
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    call.argtypes = arguments[name]
    return call  # type: ignore[no-any-return]


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
    mine, lost = os.fstat(fd), list[str]()

    def attempt(what: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except OSError:
            lost.append("its access list" if what == ACCESS_LIST else what)

    def copy_attribute(name: str) -> None:
        value = os.getxattr(old, name)
        if name not in _attribute_names(fd) or os.getxattr(fd, name) != value:
            os.setxattr(fd, name, value)

    if status.st_gid != mine.st_gid:
        attempt(f"its group ({status.st_gid})", os.fchown, fd, -1, status.st_gid)
    names = _attribute_names(old)
    for name in names:
        if name not in _OF_THE_CONTENTS:
            attempt(name if name == ACCESS_LIST else f"the attribute {name}", copy_attribute, name)
    if ACCESS_LIST not in names and ACCESS_LIST in _attribute_names(fd):  # it came from the folder
        attempt(ACCESS_LIST, os.removexattr, fd, ACCESS_LIST)
    mode = stat.S_IMODE(status.st_mode)
    if lost or status.st_uid != mine.st_uid:
        mode &= ~(stat.S_ISUID | stat.S_ISGID)  # which would hand somebody else's rights on
    os.fchmod(fd, mode)
    if status.st_uid != mine.st_uid:  # last: afterwards it may not be ours to change
        attempt(f"its owner ({status.st_uid})", os.fchown, fd, status.st_uid, -1)
    return lost


def _attribute_names(place: str | int) -> list[str]:
    try:
        return os.listxattr(place)
    except (OSError, AttributeError):  # a file system, or a system, that has none
        return []


def attribute_notes(target: str, lost: Iterable[str]) -> tuple[Note, ...]:
    """A note of what could not be kept, if anything."""
    found = list(dict.fromkeys(lost))
    message = f"{target} was replaced by a file that you own: {listed(found)} could not be kept"
    return (Note("attributes-lost", message),) if found else ()
