"""Keys in few lines, exactly: `layer.{0..11}.attn.{weight, bias}` stands for those 24 keys and no others.

Keys are taken apart at their dots. What differs in one part only becomes one group, from the last part to the first. Numbers are
sorted, three or more that follow each other are a range: `{0..3, 7}`. Names stay in the order in which they were given. A brace or
backslash of a name's own is written with a backslash, a comma only where it could be taken for the end of an alternative.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, product

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_LAST_NUMBER = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})([^0-9]*)", re.DOTALL)
_DIGITS = re.compile(r"([0-9]+)")
DEEP = 32  # parts of a key; one with more is a group of its own
NAMES = 8  # alternatives that are names and fit into one pair of braces; of numbers there can be any number


@dataclass(frozen=True, slots=True)
class Group:
    """Keys under one text. `keys` are all that the text stands for, in its order."""

    text: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """The alternatives of one part of a key: `before`, then one of `middles`, then `after`. numbers: whether the middles are numbers."""

    before: str
    middles: tuple[str, ...]
    after: str
    numbers: bool

    def __iter__(self) -> Iterator[str]:
        return (self.before + middle + self.after for middle in self.middles)

    @property
    def text(self) -> str:
        if len(self.middles) == 1:
            return _escaped(self.before + self.middles[0] + self.after)
        inside = _ranges(self.middles) if self.numbers else [_escaped(name, r"\\{},") for name in self.middles]
        return f"{_escaped(self.before)}{{{', '.join(inside)}}}{_escaped(self.after)}"


_Row = tuple[_Part, ...]


def grouped(keys: Iterable[str]) -> list[Group]:
    """The keys in groups, each exactly the keys that its text stands for, in natural order: `layer.2` before `layer.10`.

    A key that is given twice counts once. The time is proportional to the number of keys.
    """
    rows: dict[int, list[_Row]] = {}
    parts: dict[str, _Part] = {}
    groups = []
    for key in dict.fromkeys(keys):
        pieces = key.split(".", DEEP)
        if len(pieces) > DEEP:
            groups.append(Group(_escaped(key), (key,)))
            continue
        row = tuple(parts.get(piece) or parts.setdefault(piece, _single(piece)) for piece in pieces)
        rows.setdefault(len(row), []).append(row)
    for depth, alike in rows.items():
        for position in reversed(range(depth)):
            alike = _merged(_merged(alike, position, numbers=True), position, numbers=False)
        groups += [_group(row) for row in alike]
    return sorted(groups, key=lambda group: natural(group.keys[0]))


def natural(key: str) -> list[tuple[str, list[tuple[str, int]]]]:
    """A sort key by which `layers.10` and `conv10` come after `layers.9` and `conv9`."""
    parts = []
    for piece in key.split("."):
        split = _DIGITS.split(piece)
        # int() of more digits than 18 is refused or slow where they are thousands; such a number sorts by its length
        numbers = [int(digits) if len(digits) < 19 else 10**18 + len(digits) for digits in split[1::2]]
        parts.append((piece if not numbers else split[0], list(zip(split[2::2], numbers, strict=True))))
    return parts


def _single(piece: str) -> _Part:
    match = _LAST_NUMBER.fullmatch(piece)
    if match is None or match[1][-1:].isdecimal():  # 007 is a name
        return _Part("", (piece,), "", False)
    return _Part(match[1], (match[2],), match[3], True)


def _merged(rows: list[_Row], position: int, numbers: bool) -> list[_Row]:
    """The rows, those that differ only at `position` as one: in their number, or in their name where none has a number."""
    alike: dict[object, list[_Row]] = {}
    for row in rows:
        part = row[position]
        mark: object = (part.before, part.after) if part.numbers else part.numbers
        if part.numbers is not numbers:
            mark = part
        alike.setdefault((row[:position], mark, row[position + 1 :]), []).append(row)
    result = []
    for together in alike.values():
        if len(together) == 1 or not (numbers or len(together) <= NAMES):
            result += together
            continue
        first = together[0][position]
        middles = [middle for row in together for middle in row[position].middles]
        part = _Part(first.before, tuple(sorted(middles, key=int) if numbers else middles), first.after, numbers)
        result.append((*together[0][:position], part, *together[0][position + 1 :]))
    return result


def _group(row: _Row) -> Group:
    return Group(".".join(part.text for part in row), tuple(map(".".join, product(*row))))


def _ranges(numbers: tuple[str, ...]) -> list[str]:
    """Sorted numbers, three or more in a row as one: `0..3`, `7`."""
    result: list[str] = []
    for _, run in groupby(enumerate(numbers), key=lambda item: int(item[1]) - item[0]):
        texts = [text for _, text in run]
        result += [f"{texts[0]}..{texts[-1]}"] if len(texts) >= 3 else texts
    return result


def _escaped(text: str, special: str = r"\\{}") -> str:
    return re.sub(f"([{special}])", r"\\\1", text)
