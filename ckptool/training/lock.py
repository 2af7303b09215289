"""The right to write to a run's folder: one process at a time, on every machine that sees the folder."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
import weakref

from ckptool.checkpoint.paths import file_problem
from ckptool.commands import Command, arg
from ckptool.errors import Conflict, FileProblem

OTHER_RUN = arg(set="run=OTHER")  # how a run is given another folder
PATIENCE = 2.0  # seconds: a killed process holds its lock until all of it is gone
_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()
_HOLDER = re.compile(rb"pid [0-9]+[^\n]*\n?")


def _close_in_child() -> None:
    """A loader's worker may outlive a killed trainer by seconds, and must not hold the lock meanwhile."""
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)


class Lock:
    """The right to write to a run's folder; held until the process ends, however it ends.

    elsewhere: what to type for another folder.
    """

    def __init__(self, folder: str, elsewhere: str | Command = OTHER_RUN) -> None:
        path = os.path.join(folder, "lock")
        there = os.path.lexists(path)
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise file_problem(error, path, "write") from error
        _HELD.add(self)
        try:
            free = self._wait()
            held = os.pread(self.fd, 300, 0)
            if not free:
                holder = held.decode("utf-8", "replace").strip()
                raise Conflict(
                    f"{folder} is being written by another process ({holder or 'unknown'})",
                    "Two trainers on one run would mix their checkpoints.",
                    f"Wait for it, stop it, or name another folder: {elsewhere}",
                )
            if held and not _HOLDER.fullmatch(held):
                raise Conflict(
                    f"{path} is not the lock of a run",
                    "A run would overwrite it. It was left as it is.",
                    f"Move it away, or give the run a folder of its own: {elsewhere}",
                )
            if held or not there:  # an empty one may be anybody's: a lock works without a name in it
                os.ftruncate(self.fd, 0)
                os.pwrite(self.fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            self.release()
            why = "Without a lock two trainers could mix their files."
            raise FileProblem(f"cannot lock {path}: {error.strerror}", why) from error
        except BaseException:
            self.release()
            raise

    def _wait(self) -> bool:
        """Takes the lock; False if another process still has it when patience is over."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > until:
                    return False
                time.sleep(0.05)

    def release(self) -> None:
        """Releases the lock."""
        if self.fd >= 0:
            _HELD.discard(self)
            os.close(self.fd)
            self.fd = -1
