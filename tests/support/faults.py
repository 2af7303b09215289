"""A file system that fails: commands run in forked children in which any system call can be the last one, or go wrong.

`Bench` starts one warm process (`python -m tests.support.faults`) that has everything imported. For every point it
forks; the child is the program, with the functions of `os` through which the package touches files wrapped. They count
as events, and at the chosen event the child is killed, gets an error or a signal, or has half of the work done.
Everything else is real.
"""

import contextlib
import errno
import gc
import io
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.crash import FolderCalls, half_of
from tests.support.fork_server import ForkServer, answer_requests

ROOT = Path(__file__).parents[2]

# What the errors of a broken or full disk are, by call. `close` and `dup` report late what a write did (NFS, quotas).
ERRORS = {
    name: tuple(getattr(errno, error) for error in errors.split())
    for names, _, errors in (line.partition(":") for line in """
        open: EIO ENOSPC EMFILE EACCES
        pwrite write: ENOSPC EDQUOT EFBIG EIO
        copy_file_range: ENOSPC EDQUOT EFBIG EIO EXDEV
        fallocate: ENOSPC EDQUOT EOPNOTSUPP
        ftruncate truncate: EIO ENOSPC EFBIG
        fsync fdatasync: EIO ENOSPC EDQUOT
        close: EIO EDQUOT
        dup: EMFILE
        rename replace: EXDEV EPERM EBUSY EIO ENOSPC
        renameat2: EPERM EINVAL EIO ENOSPC
        link: EPERM EXDEV EIO ENOSPC EMLINK
        unlink remove: EIO EPERM EROFS
        rmdir: EIO EPERM ENOTEMPTY
        mkdir: EIO ENOSPC EACCES
        fchmod chmod: EPERM EIO
        pread preadv sync_file_range: EIO
        statvfs: EIO ENOSYS
        listdir: EACCES EIO
        flock: ENOLCK EOPNOTSUPP EWOULDBLOCK
    """.strip().splitlines())
    for name in names.split()
}  # fmt: skip
WRITES = set(ERRORS) - {"pread", "preadv", "statvfs", "listdir"}
HALVES = {"pwrite", "write", "copy_file_range"}
TEMPORARY = ".ckptool-"


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code, or minus the signal that ended it; and what it printed."""

    code: int
    out: str
    err: str


# In the child --------------------------------------------------------------------------------------------------------


class Faults(FolderCalls):
    """Counts the events in one folder and does to them what the job says. Other threads' calls go through uncounted."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(os.path.realpath(job["folder"]))
        self.how, self.at, self.number = job["how"], job["at"], job.get("number", 0)
        self.events: list[str] = []
        self.trace: list[tuple[Any, ...]] = []
        self.thread = threading.get_ident()
        self.quiet = False
        self.real_read, self.real_size = os.pread, os.fstat

    def install_all(self) -> None:
        import fcntl

        from ckptool.output import sink

        self.install(tuple(ERRORS))
        fcntl.flock = self.wrapped("flock", fcntl.flock)  # type: ignore[assignment]
        real = sink.system_call

        def system_call(name: str) -> Callable[..., int] | None:
            call = real(name)
            return None if call is None else self.wrapped(name, call)

        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("ckptool") and getattr(module, "system_call", None) is real:
                module.system_call = system_call  # type: ignore[attr-defined]

    def passes(self, name: str, args: tuple[Any, ...]) -> bool:
        return self.quiet or threading.get_ident() != self.thread

    def event(
        self, name: str, about: list[str], real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        number = len(self.events)
        self.events.append(name + " " + " ".join(masked(part) for part in about))
        here = number == self.at
        if here and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if here and self.how == "half" and name in HALVES:
            half_of(name, real, args)
            os.kill(os.getpid(), signal.SIGKILL)
        if (here and self.how == "error") or (number >= self.at and self.how == "broken" and name in WRITES):
            return self.failed(name)
        if self.how == "short" and name in (*HALVES, "pread", "preadv"):
            return self.halved(name, real, args)
        try:
            result = self.done(name, about, real, args, options)
        finally:
            if here and self.how == "signal":
                os.kill(os.getpid(), self.number)  # its handler runs as soon as this call returns
        if here and self.how == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        if here and self.how == "late":
            return self.failed(name)
        return result

    def failed(self, name: str) -> int:
        if name in ("fallocate", "sync_file_range", "renameat2"):
            import ctypes

            ctypes.set_errno(self.number)
            return -1
        raise OSError(self.number, os.strerror(self.number))

    def halved(self, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name in HALVES:
            return half_of(name, real, args)
        if name == "pread":
            return real(args[0], (args[1] + 1) // 2, args[2])
        (buffer,) = args[1]
        return real(args[0], [buffer[: (len(buffer) + 1) // 2]], args[2])

    def done(
        self, name: str, about: list[str], real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """The real call; for `trace`, with what it wrote."""
        result = super().event(name, about, real, args, options)
        if name == "open" and args[1] & os.O_CREAT:
            self.trace.append(("create", about[0]))
        elif self.how == "trace":
            self.traced(name, about, args, result)
        return result

    def traced(self, name: str, about: list[str], args: tuple[Any, ...], result: Any) -> None:
        if name == "pwrite":
            self.trace.append(("write", about[0], args[2], bytes(args[1])[:result]))
        elif name == "copy_file_range":
            self.trace.append(("write", about[1], args[4], self.real_read(args[1], result, args[4])))
        elif name in ("fallocate", "ftruncate"):
            size = args[1] if name == "ftruncate" else self.real_size(args[0]).st_size
            self.trace.append(("size", about[0], size))
        elif name in TRACED:
            self.trace.append((TRACED[name], *about))


# What calls do to a disk, beside those that write.
TRACED = {
    "fsync": "sync", "fdatasync": "sync", "link": "link", "rename": "rename", "replace": "rename",
    "unlink": "unlink", "remove": "unlink", "mkdir": "mkdir", "rmdir": "rmdir", "renameat2": "exchange",
    "write": "unknown", "truncate": "unknown",
}  # fmt: skip


def masked(name: str) -> str:
    """A name without what is random in it."""
    return "/".join("TEMPORARY" if part.startswith(TEMPORARY) else part for part in name.split("/"))


def child(job: dict[str, Any]) -> int:
    """Runs the program in this process, and does not return."""
    scratch = job["scratch"]
    for number, name in ((1, "out"), (2, "err")):
        fd = os.open(f"{scratch}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, number)
        os.close(fd)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(job["folder"])
    faults = Faults(job)
    ending = os._exit

    def end(code: int) -> None:
        faults.quiet = True
        # A signal that was to be heard a moment later: the real process is gone by then.
        signal.setitimer(signal.ITIMER_REAL, 0)
        with open(f"{scratch}/events", "wb") as file:
            pickle.dump((faults.events, faults.trace), file)
        ending(code)

    os._exit = end  # type: ignore[assignment]
    sys.argv = ["ckptool", *job["words"]]
    faults.install_all()
    from ckptool.cli import main

    return main()


VERBS = "strip-module add-module rename remap cast edit slim convert recover verify".split()


def warm() -> None:
    """Imports what commands import, once for all children."""
    import importlib
    import pkgutil

    for package in ("formats", "pickles", "transforms", "analysis", "output", "render"):
        for module in pkgutil.walk_packages(
            importlib.import_module(f"ckptool.{package}").__path__, f"ckptool.{package}."
        ):
            importlib.import_module(module.name)
    for name in ("numpy", "ml_dtypes", "yaml", "typer.core", "ctypes"):
        importlib.import_module(name)
    from ckptool.output import sink

    sink.system_call("fallocate")
    sink.system_call("sync_file_range")
    for verb in ("average", "bake", "bundle", "spec", "unbundle", "warm_start"):
        importlib.import_module(f"ckptool.verbs.{verb}")
    with contextlib.redirect_stderr(io.StringIO()):
        for verb in VERBS:
            importlib.import_module("ckptool.cli").main([verb, "/nowhere"])
    gc.freeze()


# In the test ---------------------------------------------------------------------------------------------------------


class Bench:
    """The warm process, and a folder in which commands run."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.runs = 0
        self.server = ForkServer(str(scratch / "log"), module="tests.support.faults", cwd=str(ROOT))

    def close(self) -> None:
        self.server.__exit__(None, None, None)

    def run(self, folder: Path, words: list[str], how: str = "none", at: float = -1, number: int = 0) -> Ended:
        """Runs `ckptool WORDS` in `folder`; `how` and `at` say what happens to it at which event."""
        self.runs += 1
        job = {"folder": str(folder), "scratch": str(self.scratch), "how": how, "at": at, "number": number}
        process = self.server.start(words, **job)
        if how == "shot":  # killed from outside, after so many seconds
            time.sleep(at)
            with suppress(ProcessLookupError):  # it has ended before
                os.kill(process, signal.SIGKILL)
        code = self.server.wait()
        out, err = ((self.scratch / name).read_text("utf-8", "replace") for name in ("out", "err"))
        return Ended(code, out, err)

    def recorded(self) -> tuple[list[str], list[tuple[Any, ...]]]:
        """The events of the last run, and what they did if it was run as `trace`."""
        events, trace = pickle.loads((self.scratch / "events").read_bytes())
        return events, trace


@dataclass(frozen=True)
class FaultPoint:
    """One thing that goes wrong, at one event of a command."""

    how: str
    at: int
    event: str
    number: int = 0

    def __str__(self) -> str:
        what = {"error": errno.errorcode.get(self.number), "broken": errno.errorcode.get(self.number)}.get(self.how, "")
        if self.how == "signal":
            what = signal.Signals(self.number).name
        return f"{self.how} {what or ''} at event {self.at} ({self.event})"


def kill_points(events: list[str]) -> list[FaultPoint]:
    """Before every event, after the last, and in the middle of those that can be half done."""
    points = [FaultPoint("kill", at, event) for at, event in enumerate(events)]
    points += [FaultPoint("half", at, event) for at, event in enumerate(events) if event.split()[0] in HALVES]
    return [*points, FaultPoint("after", len(events) - 1, events[-1])]


def error_points(events: list[str]) -> list[FaultPoint]:
    """Every error at every event: once; and, for what writes, from there on."""
    points = []
    for at, event in enumerate(events):
        name = event.split()[0]
        points += [FaultPoint("error", at, event, number) for number in ERRORS[name]]
        points += [FaultPoint("broken", at, event, number) for number in ERRORS[name][:2] if name in WRITES]
    return points


def signal_points(events: list[str]) -> list[FaultPoint]:
    """Every signal that asks a program to stop, during every event."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return [FaultPoint("signal", at, event, number) for at, event in enumerate(events) for number in numbers]


if __name__ == "__main__":
    warm()
    answer_requests(child)
