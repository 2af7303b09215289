"""A progress bar on stderr: only on a terminal, and only for what takes more than half a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ckptool.cli.console import style_of, tell
from ckptool.errors import printable
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


@contextmanager
def training_progress() -> Iterator[Callable[[dict[str, Any], float], None]]:
    """What tells each logged line of a run: on a terminal one line with a bar, which is written over; a line each elsewhere."""
    style = style_of(sys.stderr)
    drawn = False

    def told(fact: dict[str, Any], rate: float) -> None:
        nonlocal drawn
        if style.width is None:
            tell(_logged(fact, rate) + "\n")
            return
        drawn = True
        share = f"{bar(fact['step'], fact['steps'], 16):16} " if fact.get("steps") else ""
        tell(f"\r\x1b[K{style.fit(share + _logged(fact, rate))}")

    try:
        yield told
    finally:
        if drawn:
            tell("\n")


def _logged(fact: dict[str, Any], rate: float) -> str:
    """A line of a run: where it is, its numbers, and how fast it goes."""
    numbers = [f"{printable(key)} {value:.5g}" for key, value in fact.items() if isinstance(value, float)]
    return f"step {fact['step']:,}  {'  '.join(numbers)}  {rate:.1f} steps/s"
