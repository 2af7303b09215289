"""Keys that one name of a rule says, as `h.{n}.attn.{q,k,v}.weight` says three: what is put together or cut."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from ckptool.names.chain import parse_operation
from ckptool.transforms.suggest.families import HOLE, VARIABLES, Numbers, Trait, escaped, families, words
from ckptool.transforms.suggest.links import Link

STACKED = "e"  # the variable of tensors that are stacked
_STACK, _WORDS = chr(0xF0001), chr(0xF0002)  # stand where that, and one of some words, was
MOST_WORDS = 16  # of a choice; of more than `FEW`, only two, three or all are tried
FEW = 6
_TOKENS = re.compile(f"[0-9]+|[._]|[{HOLE}{_STACK}]|[^0-9._{HOLE}{_STACK}]+")
_HELD = re.compile(f"[{HOLE}{_STACK}{_WORDS}]")
_WORD = re.compile(r"[\w.-]+")

Columns = tuple[tuple[str, ...], ...]
"""Keys that are put together: for each word, or once, those of each number that is stacked."""


@dataclass(frozen=True, slots=True)
class NameGroup:
    """Keys that differ in one of some words, or in a number from zero, or both, for each choice of other numbers."""

    text: str
    words: tuple[str, ...]
    members: Mapping[Numbers, Columns]

    @property
    def keys(self) -> list[str]:
        return [key for at in self.members for key in self.at(at)]

    def at(self, numbers: Numbers) -> list[str]:
        """The keys of a member."""
        return [key for column in self.members[numbers] for key in column]

    def ordered(self, order: Sequence[int]) -> NameGroup:
        """The group with its words in another order."""
        members = {at: tuple(columns[n] for n in order) for at, columns in self.members.items()}
        return NameGroup(self.text, tuple(self.words[n] for n in order) if self.words else (), members)

    def beside(self, change: Callable[[str], str]) -> NameGroup:
        """The group of other keys of the same modules. change: of the end of a key."""
        members = {at: tuple(tuple(map(change, each)) for each in columns) for at, columns in self.members.items()}
        return replace(self, text=change(self.text), members=members)

    def among(self, wholes: Mapping[Numbers, str], said: str) -> tuple[NameGroup, dict[Numbers, str]]:
        """The group of these members, and these by the numbers that are left.

        A number that is one and the same in all of them, and not in others, becomes text, unless its variable is `said`
        in the name of the wholes.
        """
        both = zip(VARIABLES, zip(*self.members, strict=True), zip(*wholes, strict=True), strict=False)
        fixed = {
            at for at, (name, every, some) in enumerate(both) if len({*every}) > len({*some}) == 1 and name not in said
        }
        if not fixed:
            return self, dict(wholes)
        first, *parts = self.text.split(HOLE)
        one = next(iter(wholes))
        text = first + "".join((one[at] if at in fixed else HOLE) + part for at, part in enumerate(parts))
        left = {at: tuple(number for place, number in enumerate(at) if place not in fixed) for at in wholes}
        return replace(self, text=text, members={left[at]: self.members[at] for at in wholes}), {
            left[at]: whole for at, whole in wholes.items()
        }

    def names(self, numbers: Sequence[str], words: Sequence[str]) -> list[str]:
        """The names for these numbers, as they are in a rule, for each of the words."""
        parts, places = re.split(f"([{HOLE}{_STACK}{_WORDS}])", self.text), iter(numbers)
        texts = {_STACK: lambda: f"{{{STACKED}}}", HOLE: lambda: next(places), _WORDS: lambda: _WORDS}
        name = "".join(texts[part]() if part in texts else part for part in parts)
        return [name.replace(_WORDS, word) for word in words or ("",)]

    def link(self, wholes: Mapping[Numbers, str], whole: str, chain: str, splits: bool, why: str) -> Link:
        """That the keys are tensors that, after operations, are one each; or the other way round.

        whole: the names of those in rules.
        """
        operations = [parse_operation(op) for op in chain.split(" | ") if op]
        literal = replace(self, text=re.sub(f"[^{HOLE}{_STACK}{_WORDS}]+", lambda text: escaped(text[0]), self.text))
        (name,) = literal.names([f"{{{each}}}" for each in VARIABLES], [f"{{{','.join(self.words)}}}"])
        goals: dict[str, tuple[str, ...]] = {}
        if splits:
            turned = [op.inverse() for op in reversed(operations)]
            chain = " | ".join(map(str, turned))
            goals = {key: (chain, *self.names(at, self.words)) for at, key in wholes.items()}
            return Link(whole, name, goals, why, chain=chain, origin=("joined", whole, name))
        chain = " | ".join(map(str, operations))
        for at, key in wholes.items():
            goals.update(dict.fromkeys((each for column in self.members[at] for each in column), (chain, key)))
        return Link(name, whole, goals, why, chain=chain, origin=("joined", name, whole))


def is_sayable(key: str) -> bool:
    """True for a key that can be one name of several: not empty, and without the characters that stand for others."""
    return key != "" and not _HELD.search(key)


def groups(keys: Mapping[str, Trait], vary: int) -> Iterator[NameGroup]:
    """The groups of keys: alone, those that are numbered, and then those with words, whose order says nothing.

    vary: how many of their numbers vary at most.
    """
    columns: dict[str, NameGroup] = {}
    for family in families({key: trait for key, trait in keys.items() if is_sayable(key)}, vary):
        text, alone = HOLE.join(family.pieces), {numbers: ((key,),) for numbers, key in family.keys.items()}
        columns[text] = NameGroup(text, (), alone)
        for place in range(len(family.pieces) - 1):
            rows: dict[Numbers, dict[str, str]] = defaultdict(dict)
            for numbers, key in family.keys.items():
                rows[(*numbers[:place], *numbers[place + 1 :])][numbers[place]] = key
            if all([*map(str, range(len(row)))] == [*row] for row in rows.values()):
                text = _STACK.join(HOLE.join(half) for half in (family.pieces[: place + 1], family.pieces[place + 1 :]))
                columns[text] = NameGroup(text, (), {at: (tuple(row.values()),) for at, row in rows.items()})
    yield from columns.values()
    yield from _with_words(columns)


def _with_words(columns: Mapping[str, NameGroup]) -> Iterator[NameGroup]:
    """Groups whose texts differ in a few tokens at one place, and that have the same numbers."""
    tokens = {text: _TOKENS.findall(text) for text in columns}
    alike: dict[tuple[str, str], dict[str, NameGroup]] = defaultdict(dict)
    for text, parts in tokens.items():
        for place in range(len(parts)):
            for length in (1, 2, 3):
                word = "".join(parts[place : place + length])
                if place + length <= len(parts) and _WORD.fullmatch(word):
                    alike["".join(parts[:place]) + _WORDS, "".join(parts[place + length :])][word] = columns[text]
    for (before, after), found in alike.items():
        by_shape: dict[object, list[str]] = defaultdict(list)
        for word, group in found.items():
            by_shape[frozenset((at, len(each[0])) for at, each in group.members.items())].append(word)
        for some in (some for alternatives in by_shape.values() for some in _choices(alternatives)):
            first = found[some[0]].members
            members = {at: tuple(found[word].members[at][0] for word in some) for at in first}
            yield NameGroup(before + after, some, members)


def _choices(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Some of the words, where they differ at both of their ends."""
    count, tokens = len(words), {word: _TOKENS.findall(word) for word in words}
    for size in (*range(2, count + 1),) if count <= FEW else (2, 3, count) if count <= MOST_WORDS else ():
        for some in combinations(words, size):
            if all(len({tokens[word][at] for word in some}) > 1 for at in (0, -1)):
                yield some


# Fused ---------------------------------------------------------------------------------------------------------------

_FUSED = "the shapes of queries, keys and values fit one after the other, and heads in turns would, too"


def fused(ours: Mapping[str, Trait], theirs: Mapping[str, Trait]) -> Iterator[Link]:
    """Queries, keys and values that one side keeps in one tensor and the other in three, by names and shapes."""
    taken = set[str]()
    for parts, wholes, splits in ((ours, theirs, False), (theirs, ours, True)):
        ones = {key: shape for key, shape in wholes.items() if shape and words(key).strong & {"qkv", "attn"}}
        threes = {key: shape for key, shape in parts.items() if shape and len(_roles(key)) == 1}
        for group in (each for vary in range(len(VARIABLES), -1, -1) for each in groups(threes, vary)):
            columns = next(iter(group.members.values()))
            roles = ["".join(_roles(column[0])) for column in columns]
            same = {words(column[0]).strong - _roles(column[0]) for column in columns}
            if sorted(roles) != ["k", "q", "v"] or len(columns[0]) > 1 or len(same) > 1:
                continue
            group = group.ordered([roles.index(role) for role in "qkv"])
            shapes: list[Any] = [[parts[column[0]] for column in columns] for columns in group.members.values()]
            for axis in (0, -1) if len(shapes[0][0]) > 1 else (0,):
                sizes = [shape[axis] for shape in shapes[0]]
                total = (sum(sizes), *shapes[0][0][1:]) if axis == 0 else (*shapes[0][0][:-1], sum(sizes))
                fits = {
                    key: shape
                    for key, shape in ones.items()
                    if shape == total and _is_bias(key) == _is_bias(group.text)
                }
                found = [each for each in families(fits, len(VARIABLES)) if each.keys.keys() == group.members.keys()]
                free = taken.isdisjoint(group.keys) and shapes.count(shapes[0]) == len(shapes)
                if len(found) == 1 and free:
                    taken.update(group.keys)
                    chain = f"cat {axis} {sizes}" if len(set(sizes)) > 1 else f"cat {axis}"
                    yield group.link(found[0].keys, found[0].template(found[0].variables), chain, splits, _FUSED)
                    break


def _roles(key: str) -> frozenset[str]:
    return words(key).strong & {"q", "k", "v"}


def _is_bias(key: str) -> bool:
    return "bias" in words(key).strong
