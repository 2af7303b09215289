"""Regular expressions that a user wrote, matched against names that a stranger chose: never for longer than a limit."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import NoReturn

from ckptool.errors import UsageError, printable

LIMIT = 3.0  # seconds of processor time for one key
SHORT = 1_000  # characters of a key that an expression with a single repeat or choice cannot take long for

Match = re.Match[str] | None


def match_within_limit(match: Callable[[str], Match], key: str, pattern: re.Pattern[str]) -> Match:
    """`match(key)`, a method of `pattern`; raises `UsageError` when it has taken 3 s of processor time.

    Some expressions try exponentially many ways to match a name of 40 letters. The limit is a timer, which Python has in the
    main thread only; in other threads, and where the timer is someone else's, the match goes on until it is done.
    """
    if _is_quick(pattern.pattern, key) or not _has_timer():
        return match(key)

    def expired(number: int, frame: object) -> NoReturn:
        shown = printable(key if len(key) <= 60 else f"{key[:60]}…")
        raise UsageError(
            f"the pattern {printable(pattern.pattern)!r} was still being tried on {shown!r} after {LIMIT:g} seconds",
            "One repeat within another, or many in a row, can match in more ways than can ever be tried. Nothing was written.",
            "Write it with fewer of * and +: [^.]+ instead of .+, no + around a group that has one.",
        )

    before = signal.signal(signal.SIGVTALRM, expired)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
        return match(key)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)


def _is_quick(pattern: str, key: str) -> bool:
    """True where setting a timer would take longer than matching ever can: most names, most expressions."""
    return len(key) <= SHORT and _choices(pattern) <= 1


@lru_cache(64)
def _choices(pattern: str) -> int:
    """How many places of an expression can be passed in more than one way."""
    return sum(map(pattern.count, "*+{|?")) - pattern.count("(?")


def _has_timer() -> bool:
    return threading.current_thread() is threading.main_thread() and signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
