"""Patterns for keys: globs in which `*` crosses dots, and `re:` for regular expressions, matched for a limited time."""

from __future__ import annotations

import fnmatch
import re
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NoReturn

from ckptool.commands import FILE, command
from ckptool.errors import NoMatch, UsageError

LIMIT = 3.0  # seconds of processor time for one key
SHORT = 1_000  # characters of a key that an expression with a single repeat or choice cannot take long for

Match = re.Match[str] | None
Matcher = Callable[[str], bool]


def matcher(pattern: str) -> Matcher:
    """A test of whole keys for `pattern`. Raises `UsageError` for a regular expression that is none."""
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise UsageError(f"{pattern!r} is not a regular expression: {error}") from None
        return lambda key: match_within_limit(expression.search, key, expression) is not None
    compiled = re.compile(fnmatch.translate(pattern))
    return lambda key: compiled.match(key) is not None


def selected(keys: Iterable[str], only: Sequence[str] = (), exclude: Sequence[str] = ()) -> set[str]:
    """The keys that match one of `only` (all, if there is none) and none of `exclude`.

    Raises `NoMatch` naming a pattern that matches nothing.
    """
    keys = list(keys)
    chosen = {key for pattern in only for key in _matching(keys, pattern)} if only else set(keys)
    return chosen - {key for pattern in exclude for key in _matching(keys, pattern)}


def _matching(keys: list[str], pattern: str) -> list[str]:
    matches = matcher(pattern)
    found = [key for key in keys if matches(key)]
    if not found:
        raise NoMatch(
            f"the pattern {pattern!r} matches no key",
            "Patterns match whole keys; `*` also matches dots.",
            f"See the keys: {command('inspect', FILE, all=True)}",
        )
    return found


# Time ---------------------------------------------------------------------------------------------------------------


def match_within_limit(match: Callable[[str], Match], key: str, pattern: re.Pattern[str]) -> Match:
    """`match(key)`, a method of `pattern`; raises `UsageError` when it has taken 3 s of processor time.

    Some expressions try exponentially many ways to match a name of 40 letters. The limit is a timer, which Python has
    in the main thread only; in other threads, and where the timer is someone else's, the match goes on until it is
    done.
    """
    # For most names and expressions setting a timer would take longer than matching ever can.
    if (len(key) <= SHORT and _choices(pattern.pattern) <= 1) or not _has_timer():
        return match(key)

    def expired(number: int, frame: object) -> NoReturn:
        shown = key if len(key) <= 60 else f"{key[:60]}…"
        raise UsageError(
            f"the pattern {pattern.pattern!r} was still being tried on {shown!r} after {LIMIT:g} seconds",
            "Nested repeats, or many in a row, can match in exponentially many ways. Nothing was written.",
            "Write it with fewer of * and +: [^.]+ instead of .+, no + around a group that has one.",
        )

    before = signal.signal(signal.SIGVTALRM, expired)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
        return match(key)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)


@lru_cache(64)
def _choices(pattern: str) -> int:
    """The number of places of an expression that can be passed in more than one way."""
    return sum(map(pattern.count, "*+{|?")) - pattern.count("(?")


def _has_timer() -> bool:
    return threading.current_thread() is threading.main_thread() and signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
