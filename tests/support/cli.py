"""The program run in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Ran(NamedTuple):
    """What a command line printed, and how it ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def done(ran: Ran) -> str:
    assert (ran.code, ran.err) == (0, ""), ran
    return ran.out
