"""The names that loading a checkpoint with `pickle` would call, make and import."""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.checkpoint import Checkpoint
from ckptool.pickles.calls import CALLED, MADE, NAMED, uses_of


@dataclass(frozen=True, slots=True)
class Call:
    """One name that is not known to be inert. how: `called` (a call, or a class with arguments), `made` (an object), `named` (by itself).

    places: addresses in the tree, the first of `count`.
    """

    name: str
    how: str
    places: tuple[str, ...]
    count: int


MAX_PLACES = 5


def unknown_names(checkpoint: Checkpoint) -> list[Call]:
    """Every name that is not known to be inert where it stands, with how it is used and where; the most dangerous use first."""
    found: dict[tuple[str, str], list[str]] = {}
    counts: dict[tuple[str, str], int] = {}
    for use, place in uses_of(checkpoint):
        kind = (use.name, use.how)
        counts[kind] = counts.get(kind, 0) + 1
        places = found.setdefault(kind, [])
        if len(places) < MAX_PLACES and place not in places:
            places.append(place)
    calls = [Call(name, how, tuple(places), counts[name, how]) for (name, how), places in found.items()]
    return sorted(calls, key=lambda call: (CALLED, MADE, NAMED).index(call.how))
