"""Signals and time: a handler only sets a flag, and the run stops between two steps, after saving."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ckptool.training.config import Stop

DONE = 0


class Stopping:
    """Whether the run is to stop. `number`: of the signal that asked for it; `late`: the time that it was given is over."""

    def __init__(self, settings: Stop) -> None:
        self.number = 0
        self.after = settings.after
        self.begun: float | None = None

    def begin(self) -> float:
        """When the first step began; its time runs from there, not from the start of the program."""
        if self.begun is None:
            self.begun = time.monotonic()
        return self.begun

    @property
    def late(self) -> bool:
        return bool(self.after) and self.begun is not None and time.monotonic() >= self.begun + (self.after or 0)

    @property
    def asked(self) -> bool:
        return bool(self.number) or self.late

    @property
    def exit_code(self) -> int:
        """128 plus the signal, as shells have it; 0 where the run's own time was over."""
        return 128 + self.number if self.number else DONE

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:  # a person who asks twice means at once
            raise KeyboardInterrupt
        self.number = self.number or number  # a scheduler and torchrun both pass on the one that they got


@contextmanager
def stopping(settings: Stop) -> Iterator[Stopping]:
    """Catches the signals that stop a run for as long as it lasts."""
    flag = Stopping(settings)
    before: dict[int, Any] = {}
    for name in settings.signals:
        number = int(signal.Signals[f"SIG{name}"])
        if signal.getsignal(number) is not signal.SIG_IGN or name != "HUP":  # nohup means it
            before[number] = signal.signal(number, flag._caught)
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ALL = ("TERM", "INT", "USR1", "USR2", "HUP")


@contextmanager
def held_back() -> Iterator[None]:
    """Signals wait meanwhile. A process that is forked here begins deaf to them, before it can say that it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.Signals[f"SIG{name}"] for name in _ALL])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_in_worker(_: int = 0) -> None:
    """What a loader's worker does: a signal to the whole process group is for the trainer, which still needs its workers."""
    for name in _ALL:
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
