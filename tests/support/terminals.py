"""Terminals of our own (`pty`), in which programs run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress


def shown_in(terminal: int) -> Iterator[bytes]:
    """What comes to a terminal, part by part, until its last user is gone; then it is closed."""
    with suppress(OSError):  # how Linux says that nobody writes any more
        while part := os.read(terminal, 1 << 16):
            yield part
    os.close(terminal)
