"""Signals, processor time and terminals of the processes that tests start."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.guard import slowness

ROOT = Path(__file__).parents[2]
HANG = 120  # seconds after which a process of tests hangs, however busy the machine is


def default_signals() -> None:
    """For `preexec_fn`: signals as a shell in the foreground gives them. Started in the background, tests inherit them
    ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def is_quick(work: Callable[[], object], seconds: float) -> bool:
    """True if one of three runs of `work` takes less than so many seconds of processor time of a usual machine, without
    the garbage of the tests before it.

    Others are at work on the same cores; what takes quadratic time is slow in every run.
    """
    gc.disable()
    try:
        for _ in range(3):
            began = time.process_time()
            work()
            if time.process_time() - began < seconds * slowness():
                return True
    finally:
        gc.enable()
    return False


@contextmanager
def soon(seconds: float) -> Iterator[None]:
    """Fails if a block, with the processes that it waits for, takes more processor time than so many seconds of a usual
    machine (tests/guard.py)."""
    began = sum(os.times()[:4])
    yield
    taken = sum(os.times()[:4]) - began
    if taken > seconds:
        taken /= slowness()
    assert taken <= seconds, f"{taken:.2f} s of processor time"


def python_process(head: str, code: str, *args: object, **options: Any) -> subprocess.Popen[bytes]:
    """A process that does what `head` and then `code` say, with `args` in `sys.argv`."""
    text = textwrap.dedent(head) + textwrap.dedent(code)
    command = [sys.executable, "-c", text, *map(str, args)]
    options.setdefault("preexec_fn", default_signals)
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def shown_in(terminal: int) -> Iterator[bytes]:
    """What comes to a terminal, part by part, until its last user is gone; then it is closed."""
    with suppress(OSError):  # how Linux says that nobody writes any more
        while part := os.read(terminal, 1 << 16):
            yield part
    os.close(terminal)
