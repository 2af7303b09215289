"""Arguments as people give them: one text where several may be, and names that are nearly right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def several(texts: str | Iterable[str]) -> list[str]:
    """The texts as a list. A text by itself is one, not its letters: every option that takes several is read through this."""
    return [texts] if isinstance(texts, str) else list(texts)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was most likely meant: the one that it begins, else the one with the fewest changes; empty for none."""
    names = sorted(known)
    begun = [each for each in names if len(name) > 1 and each.startswith(name)]
    close = begun or difflib.get_close_matches(name, names, 1, 0.6)
    return min(close, key=len) if close else ""
