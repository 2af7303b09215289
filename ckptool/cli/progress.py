"""A progress bar on stderr: only on a terminal, and only for what takes more than half a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from ckptool.cli.console import tell
from ckptool.output.sink import Progress
from ckptool.render.style import bar, size

AFTER = 0.5  # seconds
EVERY = 0.1


@contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """Something to tell the bytes done and in all; None where nobody would see it. The line is wiped at the end."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(label)
    try:
        yield bar.update
    finally:
        bar.wipe()


class _Bar:
    def __init__(self, label: str) -> None:
        self.label = label
        self.start = time.monotonic()
        self.next = self.start + AFTER
        self.drawn = False

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self.next or not total:
            return
        self.next = now + EVERY
        self.drawn = True
        speed = done / (now - self.start)
        facts = f"{done / total:4.0%} {bar(done, total, 24):24} {size(done)} of {size(total)}, {size(int(speed))}/s"
        tell(f"\r\x1b[K{self.label} {facts}")

    def wipe(self) -> None:
        if self.drawn:
            tell("\r\x1b[K")


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Something to tell what is being done: on a terminal in one line, which is wiped at the end; elsewhere nowhere."""
    terminal = sys.stderr.isatty()
    try:
        yield lambda text: tell(f"\r\x1b[K{text} …") if terminal else None
    finally:
        if terminal:
            tell("\r\x1b[K")


def training_progress(stream: TextIO) -> Callable[[dict[str, Any], float], None]:
    """What tells each logged line of a run: one line that is written over on a terminal, a line each elsewhere."""
    terminal = stream.isatty()

    def tell(fact: dict[str, Any], rate: float) -> None:
        numbers = [f"{key} {value:.5g}" for key, value in fact.items() if isinstance(value, float)]
        line = f"step {fact['step']:,}  {'  '.join(numbers)}  {rate:.1f} steps/s"
        stream.write(f"\r\x1b[K{line}" if terminal else line + "\n")
        stream.flush()

    return tell
