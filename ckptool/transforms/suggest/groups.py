"""Keys that one name of a rule says, as `h.{n}.attn.{q,k,v}.weight` says three: what is put together or cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from sys import intern

STACKED = "e"  # the variable of tensors that are stacked
_HOLES = 0xF0000  # from here: characters that stand for {e}, a choice or operations while rules are written
_STACK = chr(_HOLES)
DEEP = 64  # parts of a name beyond which it is in no group
MOST_WORDS = 16  # of a choice; of more than `FEW`, only two, three or all are tried
FEW = 6
_TOKENS = re.compile(r"[0-9]+|[._]|[^0-9._]+")
_WORD = re.compile(r"[\w.-]*")


@dataclass(slots=True)
class Holes:
    """Characters that stand for texts while rules are written of names: a name has `{q,k,v}` as one character."""

    texts: dict[str, str] = field(default_factory=lambda: {_STACK: f"{{{STACKED}}}"})
    characters: dict[str, str] = field(default_factory=dict)

    def hole(self, text: str) -> str:
        character = self.characters.setdefault(text, chr(_HOLES + len(self.characters) + 1))
        self.texts[character] = text
        return character

    def filled(self, rule: str) -> str:
        """The text of a rule, with its operations at its end."""
        parts = [self.texts.get(letter, letter) for letter in rule]
        operations = "".join(part for part in parts if part.startswith(" : "))
        return "".join(part for part in parts if not part.startswith(" : ")) + operations


def has_holes(name: str) -> bool:
    return any(ord(letter) >= _HOLES for letter in name)


@dataclass(frozen=True, slots=True)
class NameGroup:
    """Keys that differ in one of some words, between two ends, or in a number from zero, or both; or a key alone.

    columns: for each word, or the only name, the keys by their number.  stacked: the numbers are one.
    """

    ends: tuple[str, str]
    words: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    stacked: bool = False

    @property
    def keys(self) -> list[str]:
        return [key for column in self.columns for key in column]

    def name(self, holes: Holes) -> str:
        return (holes.hole(f"{{{','.join(self.words)}}}") if self.words else "").join(self.ends)

    def ordered(self, order: Sequence[int]) -> NameGroup:
        words = tuple(self.words[at] for at in order) if self.words else ()
        return NameGroup(self.ends, words, tuple(self.columns[at] for at in order), self.stacked)

    def beside(self, change: Callable[[str], str]) -> NameGroup:
        """The group of other keys of the same modules. change: of the end of a key."""
        before, after = self.ends
        ends = (before, change(after)) if after else (change(before), "")
        return NameGroup(ends, self.words, tuple(tuple(map(change, each)) for each in self.columns), self.stacked)


def alone(key: str) -> NameGroup:
    return NameGroup((key, ""), (), ((key,),))


def groups(keys: Iterable[str]) -> Iterator[NameGroup]:
    """All groups: keys alone, those that are numbered, and then those with words, whose order says nothing."""
    split = {key: tokens for key in keys if len(tokens := tuple(map(intern, _TOKENS.findall(key)))) <= DEEP}
    columns: dict[str, tuple[str, ...]] = {key: (key,) for key in split}
    yield from map(alone, split)
    for ends, found in _alike(split, (1,)):
        numbers = tuple(found[each] for number in range(len(found)) if (each := str(number)) in found)
        if len(numbers) == len(found):
            name = _STACK.join(ends)
            columns[name] = numbers
            yield NameGroup((name, ""), (), (numbers,), True)
    for name in [name for name in columns if name not in split]:
        split[name] = tuple(map(intern, _TOKENS.findall(name)))
    for ends, found in _alike(split, (1, 2, 3)):
        by_count: dict[int, list[str]] = {}
        for word, name in found.items():
            if _WORD.fullmatch(word) and not has_holes(word):
                by_count.setdefault(len(columns[name]), []).append(word)
        for words in by_count.values():
            for some in _choices(words):
                chosen = tuple(columns[found[word]] for word in some)
                yield NameGroup(ends, some, chosen, found[some[0]] not in chosen[0])


def _alike(
    split: Mapping[str, Sequence[str]], lengths: Sequence[int]
) -> Iterator[tuple[tuple[str, str], dict[str, str]]]:
    """Names that differ in so many tokens at one place: the ends that they share, and the names by what differs."""
    for place in range(max(map(len, split.values()), default=0)):
        alike: dict[tuple[str, str], dict[str, str]] = {}
        for name, tokens in split.items():
            for length in lengths:
                if place + length <= len(tokens):
                    ends = "".join(tokens[:place]), "".join(tokens[place + length :])
                    alike.setdefault(ends, {})["".join(tokens[place : place + length])] = name
        yield from ((ends, found) for ends, found in alike.items() if len(found) > 1)


def _choices(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Some of the words, where they differ at both of their ends."""
    count, tokens = len(words), {word: _TOKENS.findall(word) for word in words}
    for size in (*range(2, count + 1),) if count <= FEW else (2, 3, count) if count <= MOST_WORDS else ():
        for some in combinations(words, size):
            if all(len({tokens[word][at] for word in some}) > 1 for at in (0, -1)):
                yield some
