"""Work on many files by several workers, with the same results as in one process, in the order of the files.

The workers are processes of `concurrent.futures`, or those of any executor of its kind: threads, a cluster. Processes
are spawned, not forked: threads and locks make a copy of a process unsafe. Only work, paths and reports are passed; no
byte of an input is read as Python objects.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from logging import getLogger
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from ckptool.checkpoint.jobs import DASK, ENDS, Executor, Jobs, checked_jobs, deliver_signal_again, signals_held, stop
from ckptool.checkpoint.paths import absolute, given_urls
from ckptool.checkpoint.progress import over
from ckptool.commands import arg
from ckptool.errors import CkptoolError, MissingExtra, RunFailed

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor

AHEAD = 256  # items that are in work, or done and not asked for yet
PATIENCE = 5.0  # seconds that a worker has to clean up what it began
ALONE = 60.0  # seconds for which a cluster may have no worker: some start new ones

Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Item], Result]
Task = Callable[[], Result]
"""Waits for one result, and raises what the work raised."""


def in_turn(
    work: Work[Item, Result], items: Sequence[Item], jobs: Jobs = 1, size: Callable[[Item], int] = lambda _: 1
) -> Generator[Task[Result], None, None]:
    """One task for each item, in order, each to be called before the next is taken; `close` ends what was begun.

    work: a function of a module (or a `partial` of one), called with an item.  jobs: see `Jobs`; with one, work is done
    in this process, when its task is called.  size: of an item, for the progress.  A task raises what its work raised.
    If a process is killed, a new one retries its work once, alone, and does the rest one by one; a cluster retries it
    elsewhere. If that fails too, the task raises `RunFailed`. Raises `UsageError` for invalid jobs, `MissingExtra`.
    """
    numbers = over(range(len(items)), lambda number: size(items[number]), are_files=True)
    jobs = checked_jobs(jobs)
    if isinstance(jobs, int) and min(jobs, len(items)) < 2:
        yield from (partial(work, items[number]) for number in numbers)
        return
    absolute(os.curdir)  # where workers work, too
    with ExitStack() as stack:
        executor = stack.enter_context(_cluster(jobs)) if isinstance(jobs, str) else jobs
        crew = _Crew(work, items, executor)
        stack.callback(crew.end)
        yield from (partial(crew.result, number) for number in numbers)


@contextmanager
def _cluster(address: str) -> Iterator[Executor]:
    """The workers of a dask scheduler."""
    from socket import create_connection

    try:
        distributed: Any = import_module("distributed")
    except ImportError as error:
        what = f"{arg(jobs=address)} needs dask's distributed, which is not installed"
        raise MissingExtra(what, "", "pip install 'ckptool[cluster]'") from error
    place, ended = f"tcp://{address.removeprefix(DASK)}", threading.Event()
    with ExitStack() as stack:
        for log in map(getLogger, ("distributed.client", "tornado.application")):  # which tell what the errors do
            stack.callback(setattr, log, "disabled", log.disabled)
            log.disabled = True
        try:
            socket_address = distributed.comm.get_address_host_port(place)
            with suppress(ConnectionError), create_connection(socket_address, PATIENCE) as probe:
                probe.recv(1)  # of another server, which does not speak first: dask would wait for it for ever
            client = stack.enter_context(distributed.Client(place, timeout=PATIENCE, set_as_default=False))
            client.wait_for_workers(1, timeout=PATIENCE)
        except Exception as error:
            what = f"no worker of a dask scheduler answers at {place}"
            raise RunFailed(what, str(error), f"Start both: dask scheduler; dask worker {place}") from error
        stack.callback(ended.set)
        threading.Thread(target=_leave, args=(client, ended), daemon=True).start()
        yield client.get_executor()


def _leave(client: Any, ended: threading.Event) -> None:
    """Leaves a cluster that has had no worker for a while: its scheduler would wait for one for ever."""
    seen = time.monotonic()
    while not ended.wait(1) and time.monotonic() - seen < ALONE:
        with suppress(Exception):  # the scheduler is gone, too
            seen = time.monotonic() if client.scheduler_info()["workers"] else seen
    if not ended.is_set():
        client.close()


class _Crew:
    """The workers and the work given to them. A pool that lost a process is broken: another takes over."""

    def __init__(self, work: Work[Any, Any], items: Sequence[Any], jobs: int | Executor) -> None:
        self.work, self.items, self.jobs = work, items, jobs
        self.outcomes: dict[int, Future[Any]] = {}
        self.pool: ProcessPoolExecutor | None = None
        if isinstance(jobs, int):
            self._begin(min(jobs, len(items)))

    def _begin(self, count: int) -> None:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        self.pool = ProcessPoolExecutor(count, get_context("spawn"), _serve, (os.getpid(), given_urls()))

    def _submit(self, first: int) -> None:
        """Submits work, far enough ahead that no worker waits, and no further."""
        pool: Any = self.pool or self.jobs
        run = partial(_outcome, self.work) if self.pool else partial(_outcome_in, os.getcwd(), given_urls(), self.work)
        with _starting() if self.pool else ExitStack():
            for number in range(first, min(first + AHEAD, len(self.items))):
                if number not in self.outcomes:
                    try:
                        self.outcomes[number] = pool.submit(run, self.items[number])
                    except Exception:
                        if number == first:
                            raise
                        break  # as many as it takes: the others when one is done

    def result(self, number: int) -> Any:
        """The result of the work. If its process was lost, perhaps to other work, a single new one goes on."""
        from concurrent.futures import BrokenExecutor

        item = self.items[number]
        name = item[0] if isinstance(item, tuple) else item
        for _ in range(2):
            try:
                self._submit(number)
                is_done, result = self.outcomes.pop(number).result()
            except BrokenExecutor:
                finished = {at: job for at, job in self.outcomes.items() if job.done() and not job.exception()}
                self.end()
                self.outcomes = finished
                self._begin(1)
            except Exception as error:
                if self.pool:
                    raise
                what = f"{name}: its worker was lost: {type(error).__name__}: {error}"
                raise RunFailed(what, "Its output is unchanged or complete.") from error
            else:
                if is_done:
                    return result
                raise result
        what = f"{name}: its worker process was killed twice"
        why = "Something killed it, or memory ran out. Its output is unchanged or complete."
        raise RunFailed(what, why, f"Try fewer at a time: {arg(jobs=1)}")

    def end(self) -> None:
        """Ends all processes of its own, which clean up what they have not committed, and cancels what other workers
        have not begun."""
        if self.pool is not None:
            with signals_held():  # a second one waits, or what is ended would be left half-way
                processes = list((self.pool._processes or {}).values())  # Python 3.14 has terminate_workers()
                for process in processes:
                    process.terminate()
                limit = time.monotonic() + PATIENCE
                for process in processes:
                    process.join(max(0.0, limit - time.monotonic()))
                    process.kill()  # which does nothing to one that has ended
                self.pool.shutdown(cancel_futures=True)
        for outcome in self.outcomes.values():
            outcome.cancel()


@contextmanager
def _starting() -> Iterator[None]:
    """Where processes are started: they do not import the main program, which need not be written for that, and hold
    signals back until they are ready for them."""
    main = sys.modules["__main__"]
    with signals_held():
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


# In a worker ---------------------------------------------------------------------------------------------------------


def _serve(parent: int, urls: dict[str, str]) -> None:
    """Sets up a worker process, which ends when the process that started it does."""
    given_urls(urls)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal, which sends it to the parent process, too
    sys.unraisablehook = deliver_signal_again
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *ENDS})

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _outcome(work: Work[Any, Any], item: Any) -> tuple[bool, Any]:
    """The outcome of the work in a process of ours, which a signal ends."""
    try:
        for number in ENDS:
            signal.signal(number, stop)
        return _tried(work, item)
    except SystemExit:  # what was begun is cleaned up, and nobody waits for more
        os._exit(1)
    finally:
        for number in ENDS:
            signal.signal(number, signal.SIG_DFL)


def _tried(work: Work[Any, Any], item: Any) -> tuple[bool, Any]:
    """Whether the work was done, with its result or the error that it raised; as text where only text can be sent."""
    try:
        return True, work(item)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is raised again where the work was asked for)
        if isinstance(error, CkptoolError) or type(error).__module__ == "builtins":
            return False, error
        return False, RuntimeError(f"{type(error).__name__}: {error}")


_turns = threading.Condition()
_under_way: list[tuple[str, int]] = []  # pieces of work in this process: their folder, and where it was before each


def _outcome_in(folder: str, urls: dict[str, str], work: Work[Any, Any], item: Any) -> tuple[bool, Any]:
    """The outcome of the work in somebody else's worker: paths mean there what they mean here. The threads of a process
    share its working directory, so work for another directory waits."""
    given_urls(urls)
    with _turns:
        _turns.wait_for(lambda: all(other == folder for other, _ in _under_way))
        _under_way.append((folder, os.open(".", os.O_RDONLY)))  # which may be gone from its path, or be replaced there
        try:
            os.chdir(folder)
        except OSError as error:
            if not all(os.path.isabs(path) or "://" in path for path in (item if isinstance(item, tuple) else [item])):
                os.close(_under_way.pop()[1])
                what = f"{os.uname().nodename}, where a worker runs, has no folder {folder}"
                fix = "Name files by absolute paths on a disk that all workers share, or by URLs."
                return False, RunFailed(what, str(error), fix)
    try:
        return _tried(work, item)
    finally:
        with _turns:
            previous = _under_way.pop()[1]
            if not _under_way:
                os.fchdir(previous)
            os.close(previous)
            _turns.notify_all()
