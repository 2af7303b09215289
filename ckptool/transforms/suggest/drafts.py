"""Pairs of keys as few rules: `encoder.layer.{n}.attention.* => blocks.{n}.attn.*`, each tried on all keys first."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, takewhile

from ckptool.errors import UsageError
from ckptool.transforms.rules import parse_rule
from ckptool.transforms.suggest.pairs import Budget

_DIGITS = re.compile(r"([0-9]+)")
_VARIABLES = "nmkjilpqrs"
DEEP = 32  # parts of a key beyond which no pattern is looked for
COMPILING = 400  # the cost of reading one rule, in keys that it is tried on

Numbered = dict[int, int]  # number of the new key -> the number of the old one that it is
Renaming = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Draft:
    """A rule, as its text, and the keys that it matches.

    right: keys that get their name by it alone.  over: keys that a rule before it has to take.
    takes: every key that it may take, with its new name: the right ones, those that get it by another rule as well, and
    keys without a counterpart in the target.
    """

    text: str
    right: tuple[str, ...]
    over: tuple[str, ...]
    takes: Mapping[str, str]

    @property
    def worth(self) -> tuple[int, int, int]:
        """How many keys it brings; then, how few it takes besides; then, how few variables it has."""
        variables = self.text.split(" => ")[0].count("{")
        return len(self.right) - len(self.over), len(self.right) - len(self.takes), -variables


@dataclass(slots=True, eq=False)
class Drafting:
    """The search for rules that give keys of `pairs` their names, and no key a wrong one.

    keys: all of the source, sorted.  placed: those that have a place, with their names.  reserved: those that other
    rules are for.  taken: names that no key without a counterpart may get: names that are given, and keys that stay.
    fits: whether a key and a name of the target have the same shape.  done: keys that have a rule already.
    """

    pairs: Mapping[str, str]
    keys: list[str]
    placed: Mapping[str, str]
    reserved: Collection[str]
    taken: frozenset[str]
    fits: Callable[[str, str], bool]
    budget: Budget
    done: set[str] = field(default_factory=set)

    def rules(self, leaves: Mapping[str, tuple[int, int]], kinds: Mapping[str, tuple[str, ...]]) -> list[Draft]:
        """The rules in the order in which they have to be tried, for as many of the pairs as the budget allows.

        leaves: for keys with another leaf in the target, how long the text before it is, in both names.
        kinds: pairs of one kind differ only in numbers that are alike in both names; without one, in any.
        """
        alike: dict[tuple[str, ...], list[str]] = {}
        for key, name in self.pairs.items():
            kind = kinds.get(key) or (_DIGITS.sub("0", key), _DIGITS.sub("0", name))
            alike.setdefault(kind, []).append(key)
        kin = {key: same for same in alike.values() for key in same}
        drafts: list[Draft] = []
        for key in self.pairs:
            if key in self.done or self.budget.left <= 0:
                continue
            # Others of its kind as well: in blocks.0.0 nobody can see which of the zeros goes where.
            examples = dict.fromkeys((key, kin[key][-1], kin[key][len(kin[key]) // 2]))
            texts = [text for one in examples for text in _candidates(one, self.pairs[one], leaves.get(one))]
            found = [draft for text in dict.fromkeys(texts) if (draft := self._tried(text)) and key in draft.right]
            if found:
                drafts.append(max(found, key=lambda draft: draft.worth))
                self.done.update(drafts[-1].right)
        return _ordered([draft for draft in drafts if self.done.issuperset(draft.over)])

    def _tried(self, text: str) -> Draft | None:
        """A rule and the keys that it takes; None if it spoils anything that a rule before it cannot prevent."""
        renamed = self._renaming(text)
        if renamed is None:
            return None
        right, over, takes = list[str](), list[str](), dict[str, str]()
        for key in self._keys_from(_literal_start(text)):
            self.budget.left -= 1 + len(key) // 100
            new = renamed(key)
            if new is None:
                continue
            self.budget.left -= 5
            goal = self.pairs.get(key)
            if goal is not None and new != goal:
                if key in self.done or not (_is_sayable(key) and _is_sayable(goal)):
                    return None
                over.append(key)
            elif goal is not None:
                takes[key] = new
                right += [] if key in self.done else [key]
            elif key in self.reserved or (key in self.placed and new != self.placed[key]):
                return None
            elif key not in self.placed and new != key:
                if new in self.taken or self.fits(key, new):
                    return None
                takes[key] = new
        return Draft(text, tuple(right), tuple(over), takes)

    def _keys_from(self, start: str) -> Iterator[str]:
        """The keys that begin with a text."""
        first = bisect_left(self.keys, start)
        places = takewhile(lambda at: self.keys[at].startswith(start), range(first, len(self.keys)))
        return (self.keys[at] for at in places)

    def _renaming(self, text: str) -> Renaming | None:
        """A rule as a function, with no limit to its time, as its pattern is quick; None for an invalid text."""
        if (plain := _plain(text)) is not None:
            return plain
        self.budget.left -= COMPILING
        try:
            rule = parse_rule(text)
        except UsageError:  # a name with what no rule can say
            return None
        return lambda key: match.expand(rule.template) if (match := rule.pattern.fullmatch(key)) else None


def _ordered(drafts: list[Draft]) -> list[Draft]:
    """The rules as they were found, but each after those that take keys from it; these were all found later."""
    owner = {key: number for number, draft in enumerate(drafts) for key in draft.right}
    level = [0] * len(drafts)
    for number in reversed(range(len(drafts))):
        level[number] = max((level[owner[key]] + 1 for key in drafts[number].over if key in owner), default=0)
    return [drafts[number] for number in sorted(range(len(drafts)), key=level.__getitem__)]


def _is_sayable(name: str) -> bool:
    """True for a name that can be a whole side of a rule, which loses the spaces around it."""
    return name != "" and name == name.strip()


def _plain(text: str) -> Renaming | None:
    """A rule with nothing but at most one `*` as a function, without compiling it; None for other rules."""
    left, right = text.split(" => ")
    if "\\" in text or "{" in text or left.count("*") > 1 or left.count("*") != right.count("*"):
        return None
    if not (_is_sayable(left) and _is_sayable(right)):
        return None
    before, star, end = left.partition("*")
    goal, _, rest = right.partition("*")
    if not star:
        return lambda key: goal if key == before else None

    def renamed(key: str) -> str | None:
        if len(key) < len(before) + len(end) or not (key.startswith(before) and key.endswith(end)):
            return None
        return goal + key[len(before) : len(key) - len(end)] + rest

    return renamed


def _literal_start(text: str) -> str:
    """The text that every key begins with that a rule matches."""
    match = re.match(r"(?:\\.|[^\\*{])*", text.split(" => ")[0], re.DOTALL)
    return re.sub(r"\\(.)", r"\1", match[0] if match else "", flags=re.DOTALL)


# Candidates ----------------------------------------------------------------------------------------------------------


def _candidates(key: str, name: str, leaf: tuple[int, int] | None) -> Iterator[str]:
    """Rules that make `name` of `key`, the most general first."""
    for old, new, old_end, new_end in _cuts(key, name, leaf):
        for numbered, free in _numberings(old, new):
            left, right = _sides(old, new, numbered, free)
            start = "\\" if left.startswith("re:") else ""  # it would begin like a regular expression
            yield f"{start}{left}{old_end} => {right}{new_end}"


def _cuts(key: str, name: str, leaf: tuple[int, int] | None) -> Iterator[tuple[str, str, str, str]]:
    """Both names before the parts in common, and the ends of a rule with `*` for these: the most parts first."""
    if max(key.count("."), name.count(".")) <= DEEP and (leaf is None or all(leaf)):
        ours, theirs, ends = key.split("."), name.split("."), ["*", "*"]
        if leaf is not None:
            ours, theirs = key[: leaf[0] - 1].split("."), name[: leaf[1] - 1].split(".")
            ends = [f"*.{_escaped(key[leaf[0] :])}", f"*.{_escaped(name[leaf[1] :])}"]
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(ours), reversed(theirs), strict=False))
        for length in range(sum(1 for _ in alike), 0, -1):
            old, new = ("".join(f"{part}." for part in parts[:-length]) for parts in (ours, theirs))
            yield old, new, ends[0], ends[1]
    yield key, name, "", ""


def _numberings(old: str, new: str) -> list[tuple[Numbered, frozenset[int]]]:
    """The numbers of a new name that come from the old one; and the other numbers of the old one that may be any."""
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


def _sides(old: str, new: str, numbered: Numbered, free: frozenset[int]) -> tuple[str, str]:
    """Both sides of a rule with variables for numbers: for those of the new name, and for the free ones of the old."""
    ours, theirs = _DIGITS.split(old), _DIGITS.split(new)
    parts: dict[int, int] = {}  # of numbers in the same part of a name, between two dots, the last one only
    for place in sorted({*numbered.values(), *free}):
        parts["".join(ours[: 2 * place + 1]).count(".")] = place
    variables = {place: f"{{{name}}}" for place, name in zip(sorted(parts.values()), _VARIABLES, strict=False)}
    left = [variables.get(at // 2, piece) if at % 2 else _escaped(piece) for at, piece in enumerate(ours)]
    right = [
        variables.get(numbered.get(at // 2, -1), piece) if at % 2 else _escaped(piece)
        for at, piece in enumerate(theirs)
    ]
    return "".join(left), "".join(right)


def _escaped(text: str) -> str:
    """A literal text in a rule: with a backslash before what would mean something."""
    return re.sub(r"([\\*{])", r"\\\1", text).replace("=>", "=\\>")
