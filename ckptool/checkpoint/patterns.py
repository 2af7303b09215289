"""Patterns for keys: globs in which `*` crosses dots, and `re:` for regular expressions."""

from __future__ import annotations

import fnmatch
import re
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from ckptool.commands import FILE, command
from ckptool.errors import NoMatch, Unsupported, UsageError

LIMIT = 3.0  # seconds of processor time for one key

Matcher = Callable[[str], bool]


def matcher(pattern: str) -> Matcher:
    """A test of whole keys for `pattern`. Raises `UsageError` for a regular expression that is none."""
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            what = f"{pattern!r} is not a regular expression: {error}"
            raise UsageError(what, "It is what stands after re:.") from None
        return lambda key: expression.search(key) is not None
    compiled = re.compile(fnmatch.translate(pattern))
    return lambda key: compiled.match(key) is not None


def selected(keys: Iterable[str], only: Sequence[str] = (), exclude: Sequence[str] = ()) -> set[str]:
    """The keys that match one of `only` (all, if there is none) and none of `exclude`.

    Raises `NoMatch` naming a pattern that matches nothing.
    """
    keys = list(keys)
    found = {pattern: list(filter(matcher(pattern), keys)) for pattern in (*only, *exclude)}
    if nothing := [pattern for pattern in found if not found[pattern]]:
        why = "Patterns match whole keys (`*` matches dots, too); a part of a file is named as FILE#ADDRESS."
        fix = f"See the keys: {command('inspect', FILE, all=True)}"
        raise NoMatch(f"the pattern {nothing[0]!r} matches no key", why, fix)
    chosen = {key for pattern in only for key in found[pattern]} if only else set(keys)
    return chosen.difference(*(found[pattern] for pattern in exclude))


def match_within_limit(pattern: re.Pattern[str], key: str) -> bool:
    """Whether an expression that a file gives is that of a whole key; raises `Unsupported` after 3 s of processor time.

    Some expressions try exponentially many ways to match a name of 40 letters. The limit is a timer, which Python has
    in the main thread only; in other threads, and where the timer is someone else's, the match goes on until it is
    done.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_VIRTUAL) != (0, 0):
        return pattern.fullmatch(key) is not None

    def expired(number: int, frame: object) -> NoReturn:
        what = f"the pattern {pattern.pattern!r} was still being tried on {key[:60]!r} after {LIMIT:g} seconds"
        raise Unsupported(what, "Nested repeats can match in exponentially many ways. Nothing was written.")

    before = signal.signal(signal.SIGVTALRM, expired)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
        return pattern.fullmatch(key) is not None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)
