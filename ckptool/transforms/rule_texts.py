"""Pairs of keys as few rules: `encoder.layer.{n}.attention.* => blocks.{n}.attn.*`, each tried on all keys before it is taken."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from ckptool.errors import UsageError
from ckptool.transforms.rules import Rule, parse_rule

_DIGITS = re.compile(r"([0-9]+)")
_VARIABLES = "nmkjilpqrs"
DEEP = 32  # parts of a key beyond which no pattern is looked for

COMPILING = 400  # what reading one rule costs, in keys that it is tried on

Numbered = dict[int, int]  # number of the new key -> the number of the old one that it is


@dataclass(frozen=True, slots=True)
class Drafted:
    """A rule, as its text, and the keys that it matches.

    right: keys that get their name by it.  also: keys that get it by another as well.  over: keys that a rule before it has to take.
    other: keys without a counterpart in the target, with what it makes of them.
    """

    text: str
    right: tuple[str, ...]
    also: tuple[str, ...]
    over: tuple[str, ...]
    other: Mapping[str, str]

    @property
    def worth(self) -> tuple[int, int, int]:
        """What it brings; then, how little it touches besides; then, how few variables it has: one that is always 0 is none."""
        variables = self.text.split(" => ")[0].count("{")
        return len(self.right) - len(self.over), -len(self.other), -variables


@dataclass(slots=True)
class Time:
    """How many times a key may still be tried on a rule: about half a second at first."""

    left: int = 800_000


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """What rules have to leave alone. keys: all of the source, sorted.  kept: those that have a place, with their names.

    spoken_for: keys that other rules are for.
    taken: names that no key without a counterpart may get: those that are given already, and those of keys that stay as they are.
    fits: whether a key and a name of the target have the same shape.
    """

    keys: list[str]
    kept: Mapping[str, str]
    spoken_for: Collection[str]
    taken: frozenset[str]
    fits: Callable[[str, str], bool]


def draft_rules(
    pairs: Mapping[str, str],
    leaves: Mapping[str, tuple[int, int]],
    kinds: Mapping[str, tuple[str, ...]],
    ground: Ground,
    time: Time,
) -> list[Drafted]:
    """Rules that give keys of `pairs` their names and no key a wrong one, in the order in which they have to be tried.

    leaves: for keys whose leaf is spelled otherwise in the target, how long what stands before the leaf is, in both names.
    kinds: pairs of one kind differ only in numbers that are alike in both names; without one, in any.
    Stops where there is no time left; what has no rule then is left out.
    """
    work = _Work(pairs, ground, time)
    alike: dict[tuple[str, ...], list[str]] = {}
    for key, name in pairs.items():
        alike.setdefault(kinds.get(key) or _patterns(key, name), []).append(key)
    drafted: list[Drafted] = []
    for key, name in pairs.items():
        if key in work.done or time.left <= 0:
            continue
        # Others of its kind as well: in blocks.0.0 nobody can see which of the zeros goes where.
        same = alike[kinds.get(key) or _patterns(key, name)]
        examples = dict.fromkeys((key, same[-1], same[len(same) // 2]))
        texts = dict.fromkeys(text for one in examples for text in _candidates(one, pairs[one], leaves.get(one)))
        found = [one for text in texts if (one := work.tried(text)) is not None and key in one.right]
        found.sort(key=lambda one: one.worth, reverse=True)
        if (best := next(filter(work.holds, found), None)) is not None:
            drafted.append(best)
            work.done.update(best.right)
    return _ordered([one for one in drafted if all(key in work.done for key in one.over)])


def _ordered(drafted: list[Drafted]) -> list[Drafted]:
    """The rules as they were found, but each after those that take keys from it; these were all found later."""
    owner = {key: number for number, one in enumerate(drafted) for key in one.right}
    level = [0] * len(drafted)
    for number in reversed(range(len(drafted))):
        level[number] = max((level[owner[key]] + 1 for key in drafted[number].over if key in owner), default=0)
    return [drafted[number] for number in sorted(range(len(drafted)), key=lambda number: level[number])]


class _Work:
    """Candidates tried on all keys. `done`: keys that have a rule already."""

    def __init__(self, pairs: Mapping[str, str], ground: Ground, time: Time) -> None:
        self.pairs, self.ground, self.time = pairs, ground, time
        self.done: set[str] = set()

    def tried(self, text: str) -> Drafted | None:
        """A rule and what it takes; None if it spoils anything that a rule before it cannot mend."""
        renamed = _plain(text)
        if renamed is None:
            self.time.left -= COMPILING
            try:
                renamed = _matching(parse_rule(text))
            except UsageError:
                return None
        takes: tuple[dict[str, str], ...] = ({}, {}, {}, {})
        start = _literal(text)
        for at in range(bisect_left(self.ground.keys, start), len(self.ground.keys)):
            key = self.ground.keys[at]
            if not key.startswith(start):
                break
            self.time.left -= 1 + len(key) // 100
            new = renamed(key)
            if new is None:
                continue
            self.time.left -= 5
            place = self._place(key, new)
            if place == _SPOILT:
                return None
            if place != _NOTHING:
                takes[place][key] = new
        return Drafted(text, tuple(takes[_RIGHT]), tuple(takes[_ALSO]), tuple(takes[_OVER]), takes[_OTHER])

    def holds(self, drafted: Drafted) -> bool:
        """True if a rule, read as a rule, does what it was tried for."""
        self.time.left -= COMPILING
        try:
            renamed = _matching(parse_rule(drafted.text))
        except UsageError:  # a name with what no rule can say, like a space at its end
            return False
        return all(renamed(key) == self.pairs[key] for key in drafted.right)

    def _place(self, key: str, new: str) -> int:
        """Which list of `Drafted` a key belongs to that a rule makes `new` of."""
        if (name := self.pairs.get(key)) is not None:
            if key in self.done:
                return _ALSO if new == name else _SPOILT
            return _RIGHT if new == name else _OVER if _can_be_said(key) and _can_be_said(name) else _SPOILT
        if key in self.ground.spoken_for:
            return _SPOILT
        if (name := self.ground.kept.get(key)) is not None:
            return _NOTHING if new == name else _SPOILT
        if new == key:
            return _NOTHING
        return _SPOILT if new in self.ground.taken or self.ground.fits(key, new) else _OTHER


_RIGHT, _ALSO, _OVER, _OTHER, _NOTHING, _SPOILT = range(6)


def _can_be_said(name: str) -> bool:
    """True for a name that a rule can have for a whole side: rules lose the spaces around it."""
    return name != "" and name == name.strip()


def _matching(rule: Rule) -> Callable[[str], str | None]:
    """The rule without a limit to its time: one variable in a part and one `*` in all are quick to match."""

    def renamed(key: str) -> str | None:
        match = rule.pattern.fullmatch(key)
        return None if match is None else match.expand(rule.template)

    return renamed


def _plain(text: str) -> Callable[[str], str | None] | None:
    """What a rule with nothing but a `*` or less does, found without compiling it; None for other rules."""
    left, right = text.split(" => ")
    before, *after = left.split("*")
    goal, *rest = right.split("*")
    if "\\" in text or "{" in text or len(after) != len(rest) or len(after) > 1:
        return None
    if not after:
        return lambda key: goal if key == before else None
    start, end, size = len(before), after[0], len(before) + len(after[0])

    def renamed(key: str) -> str | None:
        if len(key) < size or not (key.startswith(before) and key.endswith(end)):
            return None
        return goal + key[start : len(key) - len(end)] + rest[0]

    return renamed


def _literal(text: str) -> str:
    """What every key that a rule matches begins with."""
    match = re.match(r"(?:\\.|[^\\*{])*", text.split(" => ")[0], re.DOTALL)
    return _unescaped(match[0] if match else "")


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


def _patterns(key: str, name: str) -> tuple[str, str]:
    return _DIGITS.sub("0", key), _DIGITS.sub("0", name)


# Candidates ----------------------------------------------------------------------------------------------------------


def _candidates(key: str, name: str, leaf: tuple[int, int] | None) -> Iterator[str]:
    """Rules that make `name` of `key`, the most general first."""
    if max(key.count("."), name.count(".")) <= DEEP:
        old_stem, new_stem = leaf or (len(key), len(name))
        if leaf is None:
            yield from _starred(key, name, "", "")
        elif old_stem and new_stem:
            yield from _starred(key[: old_stem - 1], name[: new_stem - 1], key[old_stem:], name[new_stem:])
    for numbered, rest in _numberings(key, name):
        yield _text(key, name, numbered, rest)


def _starred(old: str, new: str, old_leaf: str, new_leaf: str) -> Iterator[str]:
    """Rules with `*` for the last parts that both have in common, all of them first."""
    ours, theirs = old.split("."), new.split(".")
    common = 0
    while common < min(len(ours), len(theirs)) and ours[-1 - common] == theirs[-1 - common]:
        common += 1
    for length in range(common, 0, -1):
        old_front = "".join(f"{part}." for part in ours[:-length])
        new_front = "".join(f"{part}." for part in theirs[:-length])
        ends = [f".{_escaped(leaf)}" if leaf else "" for leaf in (old_leaf, new_leaf)]
        for numbered, rest in _numberings(old_front, new_front):
            left, right = _sides(old_front, new_front, numbered, rest)
            yield f"{_whole(f'{left}*{ends[0]}')} => {right}*{ends[1]}"


def _numberings(old: str, new: str) -> list[tuple[Numbered, frozenset[int]]]:
    """Which numbers of a new name come from the old one; and which other numbers of the old one may be any."""
    ours, theirs = _DIGITS.findall(old), _DIGITS.findall(new)
    ways: list[tuple[Numbered, frozenset[int]]] = []
    for numbered in (_aligned(ours, theirs), _aligned_from_end(ours, theirs)):
        if numbered:
            others = [place for place in range(len(ours)) if place not in numbered.values()][:3]
            subsets = [some for size in range(len(others) + 1) for some in combinations(others, size)]
            ways += [(numbered, frozenset(some)) for some in subsets]
    return [*ways, ({}, frozenset())]


def _aligned(ours: list[str], theirs: list[str]) -> Numbered:
    numbered: Numbered = {}
    start = 0
    for place, number in enumerate(theirs):
        if number in ours[start:]:
            numbered[place] = ours.index(number, start)
            start = numbered[place] + 1
    return numbered


def _aligned_from_end(ours: list[str], theirs: list[str]) -> Numbered:
    backwards = _aligned(ours[::-1], theirs[::-1])
    return {len(theirs) - 1 - theirs_at: len(ours) - 1 - ours_at for theirs_at, ours_at in backwards.items()}


def _text(old: str, new: str, numbered: Numbered, rest: frozenset[int]) -> str:
    left, right = _sides(old, new, numbered, rest)
    return f"{_whole(left)} => {right}"


def _sides(old: str, new: str, numbered: Numbered, rest: frozenset[int]) -> tuple[str, str]:
    ours, theirs = _DIGITS.split(old), _DIGITS.split(new)
    used = _one_of_a_part(ours, sorted({*numbered.values(), *rest}))
    variables = {place: f"{{{name}}}" for place, name in zip(used, _VARIABLES, strict=False)}
    left = [variables.get(at // 2, piece) if at % 2 else _escaped(piece) for at, piece in enumerate(ours)]
    right = [
        variables.get(numbered.get(at // 2, -1), piece) if at % 2 else _escaped(piece)
        for at, piece in enumerate(theirs)
    ]
    return "".join(left), "".join(right)


def _one_of_a_part(pieces: list[str], places: list[int]) -> list[int]:
    """Of numbers in the same part of a name, between two dots, the last one only."""
    parts: dict[int, int] = {}
    for place in places:
        parts["".join(pieces[: 2 * place + 1]).count(".")] = place
    return sorted(parts.values())


def _escaped(text: str) -> str:
    """A literal text as rules have it: a backslash before what would mean something."""
    return re.sub(r"([\\*{])", r"\\\1", text).replace("=>", "=\\>")


def _whole(left: str) -> str:
    """A left side that begins like a regular expression, as one that is none."""
    return "\\" + left if left.startswith("re:") else left
