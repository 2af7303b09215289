"""A process that ends itself, as by SIGKILL, at its N-th file-system event.

`FolderCalls` sees the calls of `os` by which a process touches a folder; the tests of output build on it, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]

# The calls by which a run changes its folder: of paths, and of descriptors of its files.
CHANGES = (
    *("open", "mkdir", "link", "rename", "replace", "unlink", "remove", "rmdir"),
    *("write", "pwrite", "copy_file_range", "ftruncate", "fchmod", "fsync", "fdatasync", "dup", "close"),
)
# The arguments that say what a call is about, where it is not the first.
_ABOUT = dict.fromkeys(("rename", "replace", "link", "copy_file_range"), (0, 1)) | {"renameat2": (1, 3)}


class FolderCalls:
    """The calls of `os` that touch a folder; `event` is called in place of each. known: files of it that are open."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.known: dict[int, str] = {}

    def install(self, names: tuple[str, ...]) -> None:
        """Watches the functions of `os` with these names, as far as there are any."""
        for name in names:
            if hasattr(os, name):
                setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name: str, real: Call) -> Call:
        """A function that stands for `real`."""

        def call(*args: Any, **options: Any) -> Any:
            if self.passes(name, args):
                return real(*args, **options)
            about = [self._place(args[at], options) for at in _ABOUT.get(name, (0,))]
            if not any(about):
                return real(*args, **options)
            return self.event(name, [part or "?" for part in about], real, args, options)

        return call

    def passes(self, name: str, args: tuple[Any, ...]) -> bool:
        """True for a call that is no event, wherever it goes."""
        return False

    def event(self, name: str, about: list[str], real: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Makes the call. about: the paths that it is about, from the folder."""
        if name == "close":
            self.known.pop(args[0], None)
        result = real(*args, **options)
        if name in ("open", "dup"):
            self.known[result] = about[0]
        return result

    def _place(self, first: Any, options: dict[str, Any]) -> str | None:
        """The path below the folder of an argument; None where it is none of it."""
        if isinstance(first, int):
            return self.known.get(first)
        if not isinstance(first, (str, bytes, os.PathLike)):
            return None
        path = os.fsdecode(first)
        if (parent := options.get("dir_fd")) is not None:
            if parent not in self.known:
                return None
            path = os.path.join(self.folder, self.known[parent], path)
        path = os.path.abspath(path)
        if path == self.folder:
            return "."
        return path.removeprefix(self.folder + os.sep) if path.startswith(self.folder + os.sep) else None


def half_of(name: str, real: Call, args: tuple[Any, ...]) -> Any:
    """Does half of a write or a copy."""
    if name in ("pwrite", "write"):
        data = memoryview(args[1])
        return real(args[0], data[: (len(data) + 1) // 2], *args[2:])
    return real(args[0], args[1], (args[2] + 1) // 2, *args[3:])


class Crash(FolderCalls):
    """Ends the process at an event, before it or, in a write, half done.

    at: the number of the event.  part: count those of a `save` or a `prune` only, of the state after `step` or later.
    """

    def __init__(self, folder: str, at: int, part: str = "", step: int = 0) -> None:
        super().__init__(os.path.abspath(folder))
        self.at, self.part, self.step, self.armed = at, part, step, not part
        if part:
            self._arm_in_part()
        self.install(CHANGES)

    def passes(self, name: str, args: tuple[Any, ...]) -> bool:
        """True for opening a file to read it."""
        changes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_DIRECTORY
        return name == "open" and not (len(args) > 1 and args[1] & changes)

    def event(self, name: str, about: list[str], real: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Makes the call, if it is not yet time to end."""
        self._count()
        if name in ("write", "pwrite") and len(args[1]) > 1:
            self._count(lambda: half_of(name, real, args))
        return super().event(name, about, real, args, options)

    def _count(self, half: Callable[[], Any] | None = None) -> None:
        if not self.armed:
            return
        if self.at <= 0:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        self.at -= 1

    def _arm_in_part(self) -> None:
        """Counts only while a checkpoint of `step` or later is written, or while older ones are deleted after it."""
        from ckptool.training.store import RunFolder

        remove = RunFolder.remove
        newest = 0

        def counted(commit: Call) -> Call:
            def committed(run: RunFolder, step: int, *args: Any, **kwargs: Any) -> Any:
                nonlocal newest
                newest = step
                self.armed = self.part == "save" and step >= self.step
                saved = commit(run, step, *args, **kwargs)
                if self.armed:  # it had fewer events
                    self.at = 0
                    self._count()
                return saved

            return committed

        def removed(run: RunFolder, *args: Any, **kwargs: Any) -> None:
            self.armed = self.part == "prune" and newest >= self.step
            remove(run, *args, **kwargs)
            self.armed = False

        for name in ("commit", "commit_together"):
            setattr(RunFolder, name, counted(getattr(RunFolder, name)))
        setattr(RunFolder, "remove", removed)  # noqa: B010
