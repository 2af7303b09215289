"""A training process that ends itself, as by SIGKILL, at its N-th file-system event: what `prove` kills inside a save.

Events are the calls by which a run changes its folder, each killed before it; a write is killed half done too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

# Calls that are given a path, or a descriptor of a file below the folder.
_OF_PATHS = ("open", "mkdir", "link", "rename", "replace", "unlink", "remove", "rmdir")
_OF_FILES = ("write", "pwrite", "copy_file_range", "ftruncate", "fchmod", "fsync", "fdatasync", "dup", "close")


@dataclass(slots=True)
class Crash:
    """Where to die. at: the number of the event.  part: count events of a `save` or a `prune` only, of the state after `step` or later."""

    folder: str
    at: int
    part: str = ""
    step: int = 0
    armed: bool = True

    def event(self, half: Callable[[], Any] | None = None) -> None:
        """Dies here if it is time; `half` does half of what was to be done first."""
        if not self.armed:
            return
        if self.at <= 0:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        self.at -= 1


def install_crash(folder: str, at: int, part: str = "", step: int = 0) -> None:
    """Has this process kill itself before its event number `at` below a run's folder."""
    crash = Crash(os.path.abspath(folder), at, part, step, armed=not part)
    if part:
        _arm_in(crash)
    _watch(crash)


def _watch(crash: Crash) -> None:
    files: set[int] = set()
    below = crash.folder + os.sep

    def of_path(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        opens = function is opened
        inside = (
            os.path.abspath(os.fspath(args[0])).startswith(below) if isinstance(args[0], (str, os.PathLike)) else False
        )
        if inside and not (opens and not _writes(*args, **kwargs)):
            crash.event()
        made = function(*args, **kwargs)
        if opens and inside and _writes(*args, **kwargs):
            files.add(made)
        return made

    def of_file(function: Callable[..., Any], fd: int, *args: Any, **kwargs: Any) -> Any:
        if fd not in files:
            return function(fd, *args, **kwargs)
        crash.event()
        if function in writers and len(args[0]) > 1:
            crash.event(lambda: function(fd, memoryview(args[0])[: len(args[0]) // 2], *args[1:]))
        if function is closed:
            files.discard(fd)
        made = function(fd, *args, **kwargs)
        if function is doubled:
            files.add(made)
        return made

    opened, closed, doubled, writers = os.open, os.close, os.dup, (os.write, os.pwrite)
    for names, watched in ((_OF_PATHS, of_path), (_OF_FILES, of_file)):
        for name in names:
            if hasattr(os, name):
                setattr(os, name, partial(watched, getattr(os, name)))


def _writes(path: Any, flags: int = 0, *args: Any, **kwargs: Any) -> bool:
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_DIRECTORY))


def _arm_in(crash: Crash) -> None:
    """Counts events only while a checkpoint of `crash.step` or later is written, or while what is older is deleted after it."""
    from ckptool.training.store import Store

    commit, remove = Store.commit, Store.remove
    newest = 0

    def committed(store: Store, step: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal newest
        newest = step
        crash.armed = crash.part == "save" and step >= crash.step
        made = commit(store, step, *args, **kwargs)
        if crash.armed:  # it had fewer events
            crash.at = 0
            crash.event()
        return made

    def removed(store: Store, *args: Any, **kwargs: Any) -> None:
        crash.armed = crash.part == "prune" and newest >= crash.step
        remove(store, *args, **kwargs)
        crash.armed = False

    for name, function in (("commit", committed), ("remove", removed)):
        setattr(Store, name, function)
