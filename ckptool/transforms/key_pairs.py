"""Which key of a checkpoint is which key of a target, by names and shapes: found with the reason, or given as one of several ways.

Two things count as evidence: shapes at the same numbers, and words. A pair is certain only if no other key of either side has as much
for it; what rests on the order of the keys alone never is. That makes it conservative: where every word of a name either stays or is
replaced by one that is used nowhere else, and numbers stay, a certain pair is a true one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptool.transforms.key_families import HOLE, Shape
from ckptool.transforms.key_words import Spelling, spellings


@dataclass(frozen=True, slots=True)
class Pair:
    """A key of the source and the target's name for it.

    origin: what it was found with; pairs of one origin belong together.  kind: pairs of one kind differ in their numbers only.
    """

    source: str
    target: str
    origin: tuple[str, ...]
    why: str
    kind: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Found:
    """`certain` pairs; `either`: lists of pairs that could be, each to be looked at; `notes`: what no renaming can do.

    doubtful: shapes of keys that are set aside, or that may be: what is left with such a shape is never certain.
    """

    certain: list[Pair] = field(default_factory=list)
    either: list[list[Pair]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    doubtful: set[Shape] = field(default_factory=set)

    def accept(self, source: Side, target: Side, pairs: Iterable[Pair]) -> None:
        """Adds certain pairs, and takes their keys from the sides."""
        pairs = list(pairs)
        self.certain += pairs
        source.take(pair.source for pair in pairs)
        target.take(pair.target for pair in pairs)

    def set_aside(self, source: Side, target: Side, pairs: list[Pair]) -> None:
        """Adds pairs that could be, and takes their keys from the sides."""
        self.either.append(pairs)
        self.doubt(source, (pair.source for pair in pairs))
        self.doubt(target, (pair.target for pair in pairs))
        source.take(pair.source for pair in pairs)
        target.take(pair.target for pair in pairs)

    def doubt(self, side: Side, keys: Iterable[str]) -> None:
        """Lets nothing be certain that has the shape of one of these keys."""
        self.doubtful.update(side.shapes[key] for key in keys if key in side.shapes)


@dataclass(slots=True, eq=False)
class Side:
    """The keys of one side that have no counterpart yet, in order, with their shapes and their spelling of today."""

    shapes: dict[str, Shape]
    total: int
    old: dict[str, Spelling] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.old = spellings(self.shapes)

    def spelled(self, key: str) -> str:
        return self.old[key].key if key in self.old else key

    def take(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.shapes.pop(key, None)


def pattern(name: str) -> str:
    """A name without its numbers."""
    return re.sub(f"[0-9{HOLE}]+", HOLE, name)


def before_numbers(name: str, otherwise: str) -> str:
    """What stands before the first number of a name: what the blocks are called; `otherwise` where there is none."""
    match = re.match(f"([^0-9{HOLE}]*)[0-9{HOLE}]", name)
    return match[1] if match else otherwise
