"""Keys in few lines, exactly: `layer.{0..11}.attn.{weight, bias}` stands for those 24 keys and no others.

Keys are taken apart at their dots. What differs in one piece only becomes one group, from the last piece to the first.
Numbers are sorted, three or more that follow each other are a range: `{0..3, 7}`. Names stay in the order in which they
were given. A brace or backslash of a name's own is written with a backslash, a comma only where it could be taken for
the end of an alternative.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby, product

_LAST_NUMBER = re.compile(r"(.*?)(?<!\d)(0|[1-9][0-9]{0,17})([^0-9]*)", re.DOTALL)  # 007 is a name
_DIGITS = re.compile(r"([0-9]+)")
DEEP = 32  # pieces of a key; one with more is a group of its own
NAMES = 8  # alternatives that are names and fit into one pair of braces; of numbers there can be any number


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Keys under one text. `keys` are all that the text stands for, in its order."""

    text: str
    keys: tuple[str, ...]


@dataclass(eq=False)
class _NamePiece:
    """The alternatives of one piece of keys: `before`, one of `middles`, `after`. Equal ones are one object.

    numbers: all middles are numbers.
    """

    before: str
    middles: tuple[str, ...]
    after: str
    numbers: bool

    @cached_property
    def choices(self) -> tuple[str, ...]:
        return tuple([self.before + middle + self.after for middle in self.middles])

    @cached_property
    def text(self) -> str:
        if len(self.middles) == 1:
            return _escaped(self.choices[0])
        inside = list[str]() if self.numbers else [_escaped(name, r"\\{},") for name in self.middles]
        numbers = self.middles if self.numbers else ()
        for _, run in groupby(enumerate(numbers), key=lambda item: int(item[1]) - item[0]):
            texts = [text for _, text in run]  # which follow each other
            inside += [f"{texts[0]}..{texts[-1]}"] if len(texts) >= 3 else texts
        return f"{_escaped(self.before)}{{{', '.join(inside)}}}{_escaped(self.after)}"


_Row = tuple[_NamePiece, ...]


def grouped(keys: Iterable[str]) -> list[KeyGroup]:
    """The keys in groups, each the keys that its text stands for, in natural order: `layer.2` before `layer.10`.

    A key that is given twice counts once. The time is proportional to the number of keys.
    """
    piece = cache(_NamePiece)

    @cache
    def single(text: str) -> _NamePiece:
        match = _LAST_NUMBER.fullmatch(text)
        return piece(match[1], (match[2],), match[3], True) if match else piece("", (text,), "", False)

    def merged(rows: list[_Row], at: int, numbers: bool) -> list[_Row]:
        """The rows, those as one that differ only in the piece at a place, and there in their number, or as names."""
        if not any(row[at].numbers is numbers for row in rows):
            return rows
        alike = defaultdict[tuple[object, ...], list[_Row]](list)
        for row in rows:
            common = row[at] if row[at].numbers is not numbers else (row[at].before, row[at].after)
            alike[(*row[:at], common, *row[at + 1 :])].append(row)
        joined: list[_Row] = []
        for together in alike.values():
            first = together[0]
            if len(together) == 1 or (not numbers and len(together) > NAMES):
                joined += together
                continue
            middles = [middle for row in together for middle in row[at].middles]
            middles = sorted(middles, key=int) if numbers else middles
            joint = piece(first[at].before, tuple(middles), first[at].after, numbers)
            joined.append((*first[:at], joint, *first[at + 1 :]))
        return joined

    groups, by_depth = list[KeyGroup](), defaultdict[int, list[_Row]](list)
    for key in dict.fromkeys(keys):
        pieces = key.split(".", DEEP)
        if len(pieces) > DEEP:
            groups.append(KeyGroup(_escaped(key), (key,)))
        else:
            by_depth[len(pieces)].append(tuple(map(single, pieces)))
    for depth, rows in by_depth.items():
        for at in reversed(range(depth)):
            rows = merged(merged(rows, at, True), at, False)
        for row in rows:
            choices = product(*[each.choices for each in row])
            groups.append(KeyGroup(".".join([each.text for each in row]), tuple(map(".".join, choices))))

    @cache
    def natural(text: str) -> tuple[str | int, ...]:
        """Text and numbers in turn, text first. A number of more than 18 digits sorts by its length: int() is slow."""
        split: list[str | int] = list(_DIGITS.split(text))
        split[1::2] = [int(each) if len(str(each)) < 19 else 10**18 + len(str(each)) for each in split[1::2]]
        return tuple(split)

    return sorted(groups, key=lambda group: [natural(text) for text in group.keys[0].split(".")])


def _escaped(text: str, special: str = r"\\{}") -> str:
    return re.sub(f"([{special}])", r"\\\1", text) if any(map(text.__contains__, "\\{},")) else text
