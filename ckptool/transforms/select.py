"""Patterns for keys: globs in which `*` crosses dots, and `re:` for regular expressions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

from ckptool.errors import NoMatch, UsageError, printable
from ckptool.transforms.expressions import match_within_limit

Matcher = Callable[[str], bool]


def matcher(pattern: str) -> Matcher:
    """Whether a whole key matches `pattern`. Raises `UsageError` for a regular expression that is none."""
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise UsageError(f"{printable(pattern)!r} is not a regular expression: {error}") from None
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
            f"the pattern {printable(pattern)!r} matches no key",
            "Patterns are for whole keys; `*` crosses dots.",
            "See the keys: ckptool inspect FILE --all",
        )
    return found
