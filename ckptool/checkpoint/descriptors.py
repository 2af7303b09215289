"""Descriptors of input files, and how many of them are open at a time.

A system allows a process some hundreds, and an engine writes thousands of files. Those of folders take turns: the least
recently used is closed for the next, and opened again when it is read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from threading import RLock

from ckptool.checkpoint.paths import file_problem
from ckptool.errors import UsageError

# File modes that are not a regular file's, as people call them.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

# O_NONBLOCK: a FIFO without a writer would otherwise hang here.  O_NOCTTY: a terminal stays whose it is.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def open_descriptor(path: str) -> tuple[int, str, os.stat_result]:
    """A descriptor of what is at a path, and what it is where that is no regular file. It never waits for anyone."""
    try:
        try:
            fd = os.open(path, _FLAGS)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            open_files.close_idle()
            fd = os.open(path, _FLAGS)
        status = os.fstat(fd)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.ENXIO:
            raise UsageError(
                f"{path} is a socket, not a regular file", "A socket has nothing to read at once.", "Name a file."
            ) from None
        raise file_problem(error, path, "read") from error
    return fd, _KINDS.get(stat.S_IFMT(status.st_mode), ""), status


class Descriptor(int):
    """A file descriptor that is closed when nothing refers to it any more."""

    __slots__ = ()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        try:  # noqa: SIM105 (when the interpreter ends, this module's names may be gone: builtins stay)
            close(self)
        except OSError:  # it was only read
            pass


class OpenFiles:
    """The descriptors of the files of folders: the least recently used is closed for the next one.

    limit: how many there are at most, beside those in use at the moment; 0 until the system was asked.
    """

    def __init__(self) -> None:
        self.limit = 0
        self._open: dict[int, Descriptor] = {}  # by the `id` of their owners, the least recently used first
        self._lock = RLock()  # a signal's handler may read, too

    def get(self, owner: object, opened: Callable[[], Descriptor]) -> Descriptor:
        """The descriptor of an owner, which `opened` gives where it has none or had to close it."""
        with self._lock:
            found = self._open.pop(id(owner), None) or opened()
            self._open[id(owner)] = found
            self.limit = self.limit or _share_of_descriptors()
            while len(self._open) > self.limit:
                # An iterator would not allow that `forget` changes it meanwhile.
                self._open.pop(list(self._open)[0], None)  # noqa: RUF015
            return found

    def forget(self, owner: object) -> None:
        """Drops the descriptor of an owner that ends. Without the lock: this thread may have it already."""
        self._open.pop(id(owner), None)

    def close_idle(self) -> None:
        """Closes all that are not in use."""
        self._open.clear()


open_files = OpenFiles()


def _share_of_descriptors() -> int:
    """The number of files that may be open at once, a quarter of the system's limit: outputs, the libraries beside
    ckptool and the program around it need others."""
    import resource

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(512, max(4, allowed // 4)) if allowed != resource.RLIM_INFINITY else 512
