"""Keys in few lines, exactly: `layer.{0..11}.attn.{weight, bias}` stands for those 24 keys and no others.

Keys are taken apart at their dots. What differs in one part only becomes one group, from the last part to the first.
Numbers are sorted, three or more that follow each other are a range: `{0..3, 7}`. Names stay in the order in which they
were given. A brace or backslash of a name's own is written with a backslash, a comma only where it could be taken for
the end of an alternative.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, product
from typing import NamedTuple

_LAST_NUMBER = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})([^0-9]*)", re.DOTALL)
_DIGITS = re.compile(r"([0-9]+)")
DEEP = 32  # parts of a key; one with more is a group of its own
NAMES = 8  # alternatives that are names and fit into one pair of braces; of numbers there can be any number


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Keys under one text. `keys` are all that the text stands for, in its order."""

    text: str
    keys: tuple[str, ...]


class _Part(NamedTuple):
    """The alternatives of one part of a key: `before`, one of `middles`, `after`. numbers: all middles are numbers."""

    before: str
    middles: tuple[str, ...]
    after: str
    numbers: bool

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple([self.before + middle + self.after for middle in self.middles])

    @property
    def text(self) -> str:
        if len(self.middles) == 1:
            return _escaped(self.before + self.middles[0] + self.after)
        inside = _ranges(self.middles) if self.numbers else [_escaped(name, r"\\{},") for name in self.middles]
        return f"{_escaped(self.before)}{{{', '.join(inside)}}}{_escaped(self.after)}"


_Row = tuple[int, ...]  # the parts of a key or a group, by their numbers in `_PartTable`


def grouped(keys: Iterable[str]) -> list[KeyGroup]:
    """The keys in groups, each the keys that its text stands for, in natural order: `layer.2` before `layer.10`.

    A key that is given twice counts once. The time is proportional to the number of keys.
    """
    parts = _PartTable()
    rows: dict[int, list[_Row]] = {}
    groups = []
    for key in dict.fromkeys(keys):
        pieces = key.split(".", DEEP)
        if len(pieces) > DEEP:
            groups.append(KeyGroup(_escaped(key), (key,)))
        else:
            rows.setdefault(len(pieces), []).append(tuple(map(parts.of_piece, pieces)))
    for depth, alike in rows.items():
        for position in reversed(range(depth)):
            alike = parts.merged(alike, position, parts.frames)
            alike = parts.merged(alike, position, parts.names)
        groups += [parts.group(row) for row in alike]
    order = _Natural()
    return sorted(groups, key=lambda group: order(group.keys[0]))


class _PartTable:
    """Every part once, by a number, which is what rows are compared by.

    frames: for each part what parts have in common that differ in one number only; names: the same for parts that
    differ as names. What can be joined with nothing has its own number there.
    """

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.texts: list[str] = []
        self.choices: list[tuple[str, ...]] = []
        self.frames: list[int] = []
        self.names: list[int] = []
        self._of_piece: dict[str, int] = {}
        self._of_part: dict[_Part, int] = {}
        self._of_frame: dict[tuple[str, str], int] = {}

    def of_piece(self, piece: str) -> int:
        number = self._of_piece.get(piece)
        if number is None:
            number = self._of_piece[piece] = self._added(_single(piece))
        return number

    def _added(self, part: _Part) -> int:
        number = len(self.parts)
        self.parts.append(part)
        self.texts.append(part.text)
        self.choices.append(part.choices)
        frame = (
            self._of_frame.setdefault((part.before, part.after), -2 - len(self._of_frame)) if part.numbers else number
        )
        self.frames.append(frame)
        self.names.append(number if part.numbers else -1)
        return number

    def merged(self, rows: list[_Row], position: int, common: list[int]) -> list[_Row]:
        """The rows, those as one that differ only at `position`, and there in what is `common`."""
        if not any(common[row[position]] < 0 for row in rows):
            return rows
        alike: dict[_Row, list[_Row]] = {}
        after = position + 1
        for row in rows:
            alike.setdefault((*row[:position], common[row[position]], *row[after:]), []).append(row)
        if len(alike) == len(rows):
            return rows
        result = []
        for together in alike.values():
            if len(together) == 1 or (common is self.names and len(together) > NAMES):
                result += together
            else:
                first = together[0]
                result.append((*first[:position], self._joined([row[position] for row in together]), *first[after:]))
        return result

    def _joined(self, numbers: list[int]) -> int:
        first = self.parts[numbers[0]]
        middles = [middle for number in numbers for middle in self.parts[number].middles]
        middles = sorted(middles, key=int) if first.numbers else middles
        part = _Part(first.before, tuple(middles), first.after, first.numbers)
        if part not in self._of_part:
            self._of_part[part] = self._added(part)
        return self._of_part[part]

    def group(self, row: _Row) -> KeyGroup:
        text = ".".join([self.texts[number] for number in row])
        return KeyGroup(text, tuple(map(".".join, product(*[self.choices[number] for number in row]))))


class _Natural:
    """A sort key by which `layers.10` and `conv10` come after `layers.9` and `conv9`."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str | int, ...]] = {}

    def __call__(self, key: str) -> list[tuple[str | int, ...]]:
        known = self._known
        return [known.get(piece) or known.setdefault(piece, self._piece(piece)) for piece in key.split(".")]

    @staticmethod
    def _piece(piece: str) -> tuple[str | int, ...]:
        """Text and numbers in turn, text first. A number of more than 18 digits sorts by its length: int() is slow."""
        split: list[str | int] = list(_DIGITS.split(piece))
        split[1::2] = [
            int(str(digits)) if len(str(digits)) < 19 else 10**18 + len(str(digits)) for digits in split[1::2]
        ]
        return tuple(split)


def _single(piece: str) -> _Part:
    match = _LAST_NUMBER.fullmatch(piece)
    if match is None or match[1][-1:].isdecimal():  # 007 is a name
        return _Part("", (piece,), "", False)
    return _Part(match[1], (match[2],), match[3], True)


def _ranges(numbers: tuple[str, ...]) -> list[str]:
    """Sorted numbers, three or more in a row as one: `0..3`, `7`."""
    result: list[str] = []
    for _, run in groupby(enumerate(numbers), key=lambda item: int(item[1]) - item[0]):
        texts = [text for _, text in run]
        result += [f"{texts[0]}..{texts[-1]}"] if len(texts) >= 3 else texts
    return result


def _escaped(text: str, special: str = r"\\{}") -> str:
    return re.sub(f"([{special}])", r"\\\1", text) if any(map(text.__contains__, "\\{},")) else text
