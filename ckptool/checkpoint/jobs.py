"""Who may do long work (`Jobs`), and the signals that end it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ckptool.commands import arg
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from concurrent.futures import Future


class Executor(Protocol):
    """What `concurrent.futures` calls an executor: threads, processes, dask's `client.get_executor()`, …"""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]: ...


Jobs = int | str | Executor
"""A number of processes, the address of a cluster (`dask://HOST:PORT`), or an executor."""

MAX_JOBS = 256
DASK = "dask://"
ENDS = {signal.SIGTERM, signal.SIGHUP}


def checked_jobs(jobs: Jobs) -> Jobs:
    """The workers for many files, checked; raises `UsageError` for anything that is not `Jobs`."""
    jobs = int(jobs) if isinstance(jobs, str) and jobs.isdecimal() and len(jobs) < 10 else jobs
    is_number = isinstance(jobs, int) and 1 <= jobs <= MAX_JOBS
    if is_number or hasattr(jobs, "submit") or (isinstance(jobs, str) and jobs.startswith(DASK)):
        return jobs
    example = min(MAX_JOBS, max(2, os.cpu_count() or 2))
    value = "more" if isinstance(jobs, int) and jobs > MAX_JOBS else f"{jobs!s:.60}"
    what = f"{arg('jobs')} takes a number from 1 to {MAX_JOBS}, or {DASK}HOST:PORT, not {value}"
    why = "A number is how many processes work at a time; an address is that of a dask scheduler."
    raise UsageError(what, why, f"For example: {arg(jobs=example)}")


def stop(number: int, frame: object) -> NoReturn:
    """Ends by an exception, so that temporary files are removed on the way."""
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def deliver_signal_again(unraisable: Any) -> None:
    """As `sys.unraisablehook`: Python drops what is raised while an object is deleted. A signal's exception is raised
    again a moment later; an error is not reported."""
    if isinstance(unraisable.exc_value, (KeyboardInterrupt, SystemExit)):

        def again(number: int, frame: object) -> NoReturn:
            raise unraisable.exc_value

        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, 0.001)


@contextmanager
def signals_held() -> Iterator[list[int]]:
    """Holds back the signals that end the program, blocked and caught, until its own handlers are back. The list is of
    those that came meanwhile, which are raised then."""
    received, handlers = list[int](), dict[int, Any]()
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDS})
    if threading.current_thread() is threading.main_thread():  # where a signal that another thread gets is raised
        for signum in (signal.SIGINT, *ENDS):
            handlers[signum] = signal.signal(signum, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        for number in dict.fromkeys(received):
            signal.raise_signal(number)
