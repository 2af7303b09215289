"""Reasons to stop a run before its end, checked between steps: a signal, or the time is over."""

from __future__ import annotations

import gc
import inspect
import opcode
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from types import CodeType, FrameType, GeneratorType
from typing import Any

SIGNALS = ("TERM", "INT", "USR1")


class Stopping:
    """Whether a run was asked to stop. number: of the signal that asked.  after: the seconds that it may take."""

    def __init__(self, after: float | None = None) -> None:
        self.number = 0
        self.after = after
        self.begun: float | None = None

    def begin(self) -> float:
        """Notes and returns when the first step began: `after` counts from there, not from the start of the program."""
        if self.begun is None:
            self.begun = time.monotonic()
        return self.begun

    @property
    def asked(self) -> bool:
        """True after a signal, and when the time is over."""
        is_late = self.after and self.begun is not None and time.monotonic() >= self.begun + self.after
        return bool(self.number or is_late)

    @property
    def exit_code(self) -> int:
        """128 plus the signal, as in shells; 0 if the run's own time was over."""
        return 128 + self.number if self.number else 0

    def caught(self, signum: int, frame: FrameType | None) -> None:
        if self.number and signum == signal.SIGINT:  # a person who asks twice means at once
            raise KeyboardInterrupt
        self.number = self.number or signum  # the job scheduler and torchrun may both forward it


@contextmanager
def stopping(names: Sequence[str] = SIGNALS, flag: Stopping | None = None) -> Iterator[Stopping]:
    """Catches signals by name (`TERM`) while a run lasts; only in the main thread, the one where Python can."""
    flag = flag or Stopping()
    before: dict[int, Any] = {}
    for name in names if threading.current_thread() is threading.main_thread() else ():
        signum = int(signal.Signals[f"SIG{name}"])
        if signal.getsignal(signum) is not signal.SIG_IGN or name != "HUP":  # nohup means it
            before[signum] = signal.signal(signum, flag.caught)
    try:
        yield flag
    finally:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in before.items():
                signal.signal(signum, handler)


def loop_frame(depth: int = 1) -> tuple[int, CodeType | None, int]:
    """In a generator: the frame that loops over it, also through generators around it (tqdm), its code and instruction.

    depth: how many frames below this one the generator is.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    return (id(frame), frame.f_code, frame.f_lasti) if frame is not None else (0, None, 0)


def counters_around(iterator: Any) -> list[str]:
    """The types of the wrappers that count from 0 in each process: `enumerate(iterator)`, also in generators (tqdm)."""
    pending, refs = [iterator], list[Any]()
    while pending and len(refs) < 20:
        for ref in gc.get_referrers(pending.pop()):
            if type(ref) in (enumerate, zip, islice, tuple, GeneratorType) and not any(ref is other for other in refs):
                refs.append(ref)
                pending.append(ref)
    return sorted({type(ref).__name__ for ref in refs} - {"tuple", "generator"})


def left_by_break(loop: tuple[int, CodeType | None, int]) -> bool | None:
    """In a generator that is being closed: True if `break` or `return` left its loop, False for an exception; None if
    the loop ended before this generator did, since what wraps it ended (`zip`), or failed.

    Both close it in the same way. But after `break` the frame of the loop is at the instruction that takes the iterator
    off the stack, and after an exception at the one that raised, which may be that of another loop in the body. loop:
    what `loop_frame` gave when the loop began.
    """
    identity, code, offset = loop_frame(2)
    if code is None or loop[:2] != (identity, code):
        return False
    instruction, previous = opcode.opname[code.co_code[offset]], opcode.opname[code.co_code[offset - 2]]
    if (instruction == "FOR_ITER" and offset == loop[2]) or "END_FOR" in (instruction, previous):
        return None
    return instruction in ("POP_TOP", "POP_ITER", "SWAP")
