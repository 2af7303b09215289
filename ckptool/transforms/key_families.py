"""Keys that differ only in their numbers, as one family: `blocks.{}.attn.qkv.weight`, with the shape at each number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from ckptool.transforms.key_words import Words, words

Shape = tuple[int, ...] | None
Numbers = tuple[str, ...]
Signature = tuple[int, frozenset[tuple[Numbers, Shape]]]

_DIGITS = re.compile(r"([0-9]+)")
MOST_NUMBERS = 4  # of a family that is also looked at with some of its numbers fixed
HOLE = "\0"  # stands where a number was


@dataclass(frozen=True, eq=False)
class Family:
    """Keys of one pattern. pieces: the text around the numbers.  keys, shapes: by numbers.  order: where the first key stood."""

    pieces: tuple[str, ...]
    keys: dict[Numbers, str]
    shapes: dict[Numbers, Shape]
    order: int

    @cached_property
    def text(self) -> str:
        return HOLE.join(self.pieces)

    @cached_property
    def words(self) -> Words:
        return words(self.text)

    @cached_property
    def signature(self) -> Signature:
        return len(self.pieces) - 1, frozenset(self.shapes.items())

    @cached_property
    def all_shapes(self) -> frozenset[Shape]:
        """All shapes that a key of the family has."""
        return frozenset(self.shapes.values())

    @property
    def module(self) -> str:
        return self.text.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.text.rpartition(".")[2]

    def fixed(self, positions: tuple[int, ...]) -> list[Family]:
        """The family as several, one for each choice of numbers at `positions`."""
        found: dict[Numbers, dict[Numbers, str]] = {}
        for numbers, key in self.keys.items():
            rest = tuple(number for place, number in enumerate(numbers) if place not in positions)
            found.setdefault(tuple(numbers[place] for place in positions), {})[rest] = key
        result = []
        for chosen, keys in found.items():
            at = dict(zip(positions, chosen, strict=True))
            shapes = {rest: self.shapes[self._whole(rest, at)] for rest in keys}
            result.append(Family(self._filled(at), keys, shapes, self.order))
        return result

    def _whole(self, rest: Numbers, at: Mapping[int, str]) -> Numbers:
        left = iter(rest)
        return tuple(at[place] if place in at else next(left) for place in range(len(self.pieces) - 1))

    def _filled(self, at: Mapping[int, str]) -> tuple[str, ...]:
        pieces = [self.pieces[0]]
        for place, piece in enumerate(self.pieces[1:]):
            if place in at:
                pieces[-1] += at[place] + piece
            else:
                pieces.append(piece)
        return tuple(pieces)

    def by_fewer(self) -> Iterator[Family]:
        """The family by fewer of its numbers, where those tell its keys apart as well: the inner ones first."""
        count = len(self.pieces) - 1
        for size in range(min(count, MOST_NUMBERS) - 1, 0, -1):
            for kept in sorted(combinations(range(count), size), reverse=True):
                names = {tuple(numbers[place] for place in kept): key for numbers, key in self.keys.items()}
                if len(names) == len(self.keys):
                    chosen = {numbers: tuple(numbers[place] for place in kept) for numbers in self.keys}
                    shapes = {chosen[numbers]: shape for numbers, shape in self.shapes.items()}
                    yield Family(self._without(kept), names, shapes, self.order)

    def _without(self, kept: tuple[int, ...]) -> tuple[str, ...]:
        pieces = [self.pieces[0]]
        for place, piece in enumerate(self.pieces[1:]):
            if place in kept:
                pieces.append(piece)
            else:
                pieces[-1] += piece
        return tuple(pieces)

    def within(self, other: Family) -> bool:
        """True if `other` has all the numbers of this family, with the same shapes."""
        return (
            len(self.pieces) == len(other.pieces)
            and len(self.shapes) > 1
            and len(self.shapes) < len(other.shapes)
            and all(
                other.shapes.get(numbers, ()) == shape and numbers in other.shapes
                for numbers, shape in self.shapes.items()
            )
        )


def families(shapes: Mapping[str, Shape], keys: Iterable[tuple[str, str]]) -> list[Family]:
    """The families of `keys`, pairs of a key and its spelling of today. A number that is the same in all keys of a pattern is text."""
    found: dict[tuple[str, ...], dict[Numbers, tuple[int, str]]] = {}
    for order, (key, spelling) in enumerate(keys):
        pieces = _DIGITS.split(spelling)
        found.setdefault(tuple(pieces[::2]), {})[tuple(pieces[1::2])] = (order, key)
    result = []
    for texts, members in found.items():
        names = {numbers: key for numbers, (_, key) in members.items()}
        table = {numbers: shapes[key] for numbers, key in names.items()}
        family = Family(texts, names, table, min(order for order, _ in members.values()))
        same = tuple(place for place in range(len(texts) - 1) if len({numbers[place] for numbers in names}) == 1)
        result += family.fixed(same) if same else [family]
    return result


def subsets(family: Family) -> Iterator[tuple[int, ...]]:
    """Which numbers of a family could be fixed: none, then as few as possible, the inner ones first."""
    count = len(family.pieces) - 1
    yield ()
    if count > MOST_NUMBERS:
        yield tuple(range(count))
        return
    for size in range(1, count + 1):
        yield from sorted(combinations(range(count), size), reverse=True)
