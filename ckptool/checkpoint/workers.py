"""Work on many files in several processes, with the results of doing it in this one, in the order of the files.

The processes are those of `concurrent.futures`. They are started, not forked: threads and locks make a copy of a
process unsafe. What crosses is work, paths and reports; no byte of an input is read as Python objects.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ckptool.commands import arg
from ckptool.errors import CkptoolError, RunFailed, UsageError, given_urls

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

MAX_JOBS = 256
PATIENCE = 5.0  # seconds that a worker has to clear away what it began

Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Item, "Progress | None"], Result]
Task = Callable[["Progress | None"], Result]
"""Waits for one result, and raises what the work raised; with one job it tells the progress of the work."""

_ENDS = {signal.SIGTERM, signal.SIGHUP}


def checked_jobs(jobs: int) -> int:
    """The number of processes; raises `UsageError` for one that cannot be meant."""
    if not 1 <= jobs <= MAX_JOBS:
        why = "It is the number of processes that work at the same time; each takes a processor."
        some = min(MAX_JOBS, max(2, os.cpu_count() or 2))
        what = f"{arg('jobs')} takes a number from 1 to {MAX_JOBS}, not {jobs}"
        raise UsageError(what, why, f"For example: {arg(jobs=some)}")
    return jobs


def in_turn(work: Work[Item, Result], items: Sequence[Item], jobs: int = 1) -> Generator[Task[Result], None, None]:
    """One task for each item, in order, to be called before the next is taken; `close` ends what was begun.

    work: a function of a module (or a `partial` of one), given an item and what to tell of its progress.  jobs: how
    many work ahead, each in a process of its own; with one, work is done when its task is called.  A task raises what
    its work raised. Where a process is killed, its work is tried once more, in a process that does nothing else; then
    its task raises `RunFailed`, and the others go on. Raises `UsageError` for a number that cannot be meant.
    """
    if min(checked_jobs(jobs), len(items)) < 2:
        yield from (partial(work, item) for item in items)
        return
    crew = _Crew(work, items, jobs)
    try:
        yield from (partial(crew.result, number) for number in range(len(items)))
    finally:
        _end(crew.pool)


class _Crew:
    """The processes that work, and what they were given. A pool that lost a process is useless: another takes over."""

    def __init__(self, work: Work[Any, Any], items: Sequence[Any], jobs: int) -> None:
        self.work, self.items, self.jobs = work, items, min(jobs, len(items))
        self.outcomes: dict[int, Any] = {}
        self._begin(0)

    def _begin(self, first: int) -> None:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        facts = os.getpid(), given_urls()
        self.pool = ProcessPoolExecutor(self.jobs, get_context("spawn"), initializer=_serve, initargs=facts)
        with _starting():
            for number in range(first, len(self.items)):
                if number not in self.outcomes:
                    self.outcomes[number] = self.pool.submit(_outcome, self.work, self.items[number])

    def result(self, number: int, progress: Progress | None) -> Any:
        """The result of the work. If its process was lost, perhaps through other work, a crew of one tries it again."""
        from concurrent.futures.process import BrokenProcessPool

        item = self.items[number]
        try:
            is_done, result = self.outcomes.pop(number).result()
        except BrokenProcessPool:
            _end(self.pool)
            if len(self.items) == 1:
                what = (
                    f"{item[0] if isinstance(item, tuple) else item}: the process that worked on it was killed, twice"
                )
                why = "Somebody ended it, or memory ran out. What it wrote is as it was, or complete."
                raise RunFailed(what, why, f"Try it with fewer at a time: {arg(jobs=1)}") from None
            self.outcomes = {at: each for at, each in self.outcomes.items() if each.done() and not each.exception()}
            alone = _Crew(self.work, [item], 1)
            try:
                is_done, result = True, alone.result(0, progress)
            except Exception as error:  # noqa: BLE001 (it is raised below)
                is_done, result = False, error
            finally:
                _end(alone.pool)
            self._begin(number + 1)
        if is_done:
            return result
        raise result


@contextmanager
def _starting() -> Iterator[None]:
    """For processes to be started in: they do not import the program that asks, which need not be written for that,
    and hold signals back until they are ready for them."""
    main = sys.modules["__main__"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDS})
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(pool: ProcessPoolExecutor) -> None:
    """Ends all processes; what they have not committed is cleared away."""
    processes = list((pool._processes or {}).values())  # Python 3.14 has terminate_workers()
    for process in processes:
        process.terminate()
    limit = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
        if process.is_alive():
            process.kill()
    pool.shutdown(cancel_futures=True)


# In a worker ---------------------------------------------------------------------------------------------------------


def _serve(parent: int, urls: dict[str, str]) -> None:
    """Begins the life of a worker, which ends with that of the process that started it."""
    given_urls(urls)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; whoever started this hears it, too
    sys.unraisablehook = deliver_signal_again
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *_ENDS})
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


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


def _outcome(work: Work[Any, Any], item: Any) -> tuple[bool, Any]:
    """Whether the work was done, with its result or the error that it raised, in words where only words can be sent."""
    try:
        for number in _ENDS:
            signal.signal(number, stop)
        return True, work(item, None)
    except SystemExit:  # what was begun is cleared away, and nobody waits for more
        os._exit(1)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is raised again where the work was asked for)
        if isinstance(error, CkptoolError) or type(error).__module__ == "builtins":
            return False, error
        return False, RuntimeError(f"{type(error).__name__}: {error}")
    finally:
        for number in _ENDS:
            signal.signal(number, signal.SIG_DFL)
