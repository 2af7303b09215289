"""Work on many files in several processes, with the results of doing it in this one.

A worker is a Python of its own with nothing of this one's memory, since threads and locks make a copy of a process
unsafe. What it is asked and what it answers goes through a pipe that nobody else has; no byte of an input is read as
Python objects. Results come in the order of the files. A worker that is about to commit waits until all files before
its own are done: after a failure the later ones are as they were, as if nobody had begun with them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ckptool.commands import arg
from ckptool.errors import CkptoolError, RunFailed, UsageError

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import Connection

MAX_JOBS = 256
PATIENCE = 5.0  # seconds that a worker has to clear away what it began
EVERY = 0.1  # seconds between two messages of progress

Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Item, "Progress | None"], Result]
Task = Callable[["Progress | None"], Result]
"""Waits for one result, telling the progress of its work, and raises what the work raised."""

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_DONE, _FAILED, _PROGRESS, _READY = "done", "failed", "progress", "ready"


def checked_jobs(jobs: int) -> int:
    """The number of processes; raises `UsageError` for one that cannot be meant."""
    if not 1 <= jobs <= MAX_JOBS:
        why = "It is the number of processes that work at the same time; each takes a processor."
        raise UsageError(
            f"{arg('jobs')} takes a number from 1 to {MAX_JOBS}, not {jobs}", why, f"For example: {arg(jobs=_some())}"
        )
    return jobs


def _some() -> int:
    return min(MAX_JOBS, max(2, os.cpu_count() or 2))


def in_turn(work: Work[Item, Result], items: Sequence[Item], jobs: int = 1) -> Generator[Task[Result], None, None]:
    """One task for each item, in order, to be called before the next is taken; `close` ends what was begun.

    work: a function of a module (or a `partial` of one), given an item and what to tell of its progress.  jobs: how
    many work ahead, each in a process of its own; with one, work is done when its task is called.  A task raises what
    its work raised, and `RunFailed` where the process was killed; the others go on. Raises `UsageError` for a number
    that cannot be meant.
    """
    if min(checked_jobs(jobs), len(items)) < 2:
        yield from (partial(work, item) for item in items)
        return
    crew = _Crew(work, items, jobs)
    try:
        for number in range(len(items)):
            yield partial(crew.result, number)
    finally:
        crew.close()


@dataclass(eq=False)
class _Worker:
    """A process, and the number of the item that it works on. is_ready: it waits for its turn to commit."""

    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    number: int | None = None
    is_ready: bool = False


class _Crew:
    def __init__(self, work: Work[Any, Any], items: Sequence[Any], jobs: int) -> None:
        self.work, self.items = work, items
        self.begun = 0
        self.results: dict[int, tuple[bool, Any]] = {}
        self.workers: list[_Worker] = []
        try:
            for _ in range(min(jobs, len(items))):
                self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        import subprocess
        from multiprocessing.connection import Pipe
        from multiprocessing.spawn import get_executable

        executable = os.fsdecode(get_executable() or sys.executable)
        ours, theirs = Pipe()
        places = list(map(str, sys.path))
        code = f"import sys; sys.path[:] = {places}; from {__name__} import serve; serve({theirs.fileno()})"
        try:
            with _no_signals(), theirs:  # a worker that is stopped before it is ready for that would say so at length
                process = subprocess.Popen(
                    [executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )  # fmt: skip
                self.workers.append(_Worker(process, ours))
        except OSError:
            ours.close()
            if not self.workers:
                raise
            return  # fewer, then
        self._send(self.workers[-1], self.work)
        self._give(self.workers[-1])

    def _send(self, worker: _Worker, message: Any) -> None:
        with suppress(ConnectionError):  # it has died, as will be heard
            worker.connection.send(message)

    def _give(self, worker: _Worker) -> None:
        worker.number = None
        if self.begun < len(self.items):
            worker.number = self.begun
            self.begun += 1
            self._send(worker, self.items[worker.number])

    def result(self, number: int, progress: Progress | None) -> Any:
        from multiprocessing.connection import wait

        while number not in self.results:
            busy = {worker.connection: worker for worker in self.workers if worker.number is not None}
            for worker in busy.values():
                if worker.number == number and worker.is_ready:
                    worker.is_ready = False
                    self._send(worker, _READY)
            for connection in wait(list(busy)):
                self._hear(busy[connection], number, progress)  # type: ignore[index]
        is_done, found = self.results.pop(number)
        if is_done:
            return found
        raise found

    def _hear(self, worker: _Worker, number: int, progress: Progress | None) -> None:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._lost(worker)
            return
        if kind == _READY:
            worker.is_ready = True
        elif kind != _PROGRESS:
            assert worker.number is not None
            self.results[worker.number] = (kind == _DONE, value)
            self._give(worker)
        elif progress is not None and worker.number == number:
            progress(*value)

    def _lost(self, worker: _Worker) -> None:
        """Notes that a worker ended without a result, and starts another for what is left."""
        code = worker.process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        assert worker.number is not None
        item = self.items[worker.number]
        what = f"{item[0] if isinstance(item, tuple) else item!s}: the process that worked on it {how}"
        why = "Somebody ended it, or memory ran out. What it wrote is as it was, or complete."
        self.results[worker.number] = (False, RunFailed(what, why, f"Try it with fewer at a time: {arg(jobs=1)}"))
        worker.connection.close()
        self.workers.remove(worker)
        if self.begun < len(self.items):
            self._start()

    def close(self) -> None:
        """Ends all workers; what they have not committed is cleared away."""
        from subprocess import TimeoutExpired

        for worker in self.workers:
            worker.connection.close()
            worker.process.terminate()
        limit = time.monotonic() + PATIENCE
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, limit - time.monotonic()))
            except TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


@contextmanager
def _no_signals() -> Iterator[None]:
    """Holds signals back; processes that are started in there do so as well, until they say otherwise."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In a worker ---------------------------------------------------------------------------------------------------------

_parent: Connection[Any, Any] | None = None


def serve(fd: int) -> NoReturn:
    """A worker's life: does the work for one item after the other, until the process that started it is gone."""
    from multiprocessing.connection import Connection

    global _parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; whoever started this hears it, too
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    sys.unraisablehook = deliver_signal_again
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _parent = Connection(fd)
    with suppress(BaseException):
        work = _parent.recv()
        while True:
            _parent.send(_outcome(work, _parent.recv()))
    os._exit(0)


def stop(number: int, frame: object) -> NoReturn:
    """Leaves by an exception, so that temporary files are removed on the way."""
    raise SystemExit(128 + number)


def deliver_signal_again(lost: Any) -> None:
    """As `sys.unraisablehook`: Python drops what is raised while an object is thrown away. A signal's exception is
    raised again a moment later; an error is not reported."""
    if isinstance(lost.exc_value, (KeyboardInterrupt, SystemExit)):

        def again(number: int, frame: object) -> NoReturn:
            raise lost.exc_value

        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, 0.001)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def _outcome(work: Work[Any, Any], item: Any) -> tuple[str, Any]:
    try:
        return _DONE, work(item, _Reporter())
    except Exception as error:  # noqa: BLE001 (whatever it is, it is raised again where the work was asked for)
        return _FAILED, _transported(error)


def _transported(error: Exception) -> Exception:
    """The error as it can be sent: one of ckptool's or of Python's own, else its words."""
    if isinstance(error, CkptoolError) or type(error).__module__ == "builtins":
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class _Reporter:
    """Tells the process that started this one how far the work is, now and then."""

    def __init__(self) -> None:
        self.next = time.monotonic() + EVERY

    def __call__(self, done: int, total: int) -> None:
        if _parent is not None and time.monotonic() >= self.next:
            self.next = time.monotonic() + EVERY
            _tell(_parent, (_PROGRESS, (done, total)))


def _tell(parent: Connection[Any, Any], message: Any) -> None:
    try:
        parent.send(message)
    except OSError:
        raise SystemExit(1) from None  # nobody wants the result any more


def my_turn() -> None:
    """Waits, in a worker, until all files before its own are done. To be called when all that is left is the commit."""
    if _parent is None:
        return
    _tell(_parent, (_READY, None))
    try:
        _parent.recv()
    except (EOFError, OSError):
        raise SystemExit(1) from None
