"""Links between families of keys: by a part of the name that another replaces, by words and shapes, or by order alone.

A link is certain only if no other family of either side has as much for it; what rests on the order of the keys alone
never is. That makes it conservative: where every word of a name either stays or is replaced by one that is used nowhere
else, and numbers stay, a certain link is a true one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptool.errors import listed, printable
from ckptool.transforms.suggest.families import HOLE, Family, Match, Trait, families, matched, without_numbers

DEEP = 32  # parts of a name that is tried from all its dots
MOST_MOVES = 64
FEW = 4  # places with the same ending, beyond which an ending says nothing
MOST = 10_000  # keys of a side: of more, only what stands elsewhere is found
COMPARISONS = 400_000  # of the words of two names
LEVELS = ((4, 4), (3, 3), (2, 2), (2, 1), (1, 2), (1, 1), (0, 0))  # how many numbers of names vary: all first
RECOUNTED = "names differ in numbers only on both sides: one of them may count from another number"
ORDERED = "the shapes fit, and only the order of the names says which is which"
ALONE = "nothing else has these shapes"
UNSAID = "the shapes fit, but the names do not say so, or say it of others as well"

Goals = Mapping[str, tuple[str, ...]]
"""Where keys go: the operations, and the new names that a key becomes, or a part of."""


class Link(NamedTuple):
    """Keys of the one side that are keys of the other. old, new: both names as a rule has them, with its operations.

    origin: the finding that it is of.
    """

    old: str
    new: str
    goals: Goals
    why: str = ""
    certain: bool = True
    origin: tuple[str, ...] = ()
    chain: str = ""


class _Move(NamedTuple):
    """All families below `old` as those below `new`."""

    old: str
    new: str
    matches: list[Match]
    pairs: dict[str, str]

    @property
    def why(self) -> str:
        old, new = (repr(printable(text.replace(HOLE, "*"))) for text in (self.old, self.new))
        if self.old == self.new:
            return "leaves have older names: gamma and beta, weight_g and weight_v, weight_orig"
        if not self.new:
            return f"without {old} the names are the target's"
        if not self.old:
            return f"with {new} before them the names are the target's"
        return f"the names below {old} are those below {new} of the target"

    @property
    def numbers_are_known(self) -> bool:
        """True if numbers stay, or the shapes of some blocks say which is which."""
        if without_numbers(self.old) == without_numbers(self.new):
            return self.old == self.new and not any(match.changed for match in self.matches)
        known = {each for match in self.matches if match.known for each in match.changed}
        return all(known.issuperset(match.changed) for match in self.matches)

    def is_rival(self, other: _Move) -> bool:
        """True if both cannot be, and the other takes at least half of the keys of the smaller one."""
        origins = {goal: key for key, goal in self.pairs.items()}
        against = sum(self.pairs.get(s, t) != t or origins.get(t, s) != s for s, t in other.pairs.items())
        return 2 * against >= min(len(self.pairs), len(other.pairs))


@dataclass(slots=True, eq=False)
class Search:
    """The search for links. free: keys of both sides that have none so far.  modules: what the modules of some families
    are on the other side, and with which numbers.  heads: names of blocks that are the same."""

    free: tuple[dict[str, Trait], dict[str, Trait]]
    links: list[Link] = field(default_factory=list)
    left: int = COMPARISONS
    modules: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    heads: set[tuple[str, str]] = field(default_factory=set)

    def run(self) -> None:
        """Finds all: with all numbers of names as variables first, then with fewer."""
        few = max(map(len, self.free)) <= MOST
        for level in LEVELS:
            self._moves(*map(families, self.free, level))
            before = -1
            while few and len(self.links) != before:
                before = len(self.links)
                self._by_words(*map(families, self.free, level))
        self.modules.clear()
        for level in LEVELS if few else ():
            for kind in ({"weight"}, {"bias"}, set[str](), None):  # weights never stand for biases
                self._by_order(kind, *map(families, self.free, level))

    def _accept(self, match: Match, why: str, certain: bool = True, origin: tuple[str, ...] = ()) -> None:
        ours, theirs = match.ours, match.theirs
        heads = ours.head, theirs.head
        goals = {key: ("", goal) for key, goal in match.pairs.items()}
        old, new = ours.template(ours.variables), theirs.template(match.numbers)
        self.links.append(Link(old, new, goals, why, certain, origin or ("moved", *heads)))
        for key, goal in match.pairs.items():
            self.free[0].pop(key, None)
            self.free[1].pop(goal, None)
        if certain:
            self.heads.add(heads)
        if ours.leaf == theirs.leaf:
            self.modules.setdefault(ours.module, (theirs.module, match.numbers))

    def _open(self, side: int, some: Iterable[Family]) -> list[Family]:
        return [family for family in some if self.free[side].keys() >= {*family.keys.values()}]

    def _moves(self, ours: list[Family], theirs: list[Family]) -> None:
        """Names that stand elsewhere, of the wrapped model, the renamed backbone or block; doubtful with a rival."""
        texts = [{family.text: family for family in side if family.text.count(".") < DEEP} for side in (ours, theirs)]
        fronts: dict[str, list[str]] = defaultdict(list)
        for text in texts[1]:
            for start in _starts(text):
                fronts[text[start:]].append(text[:start])
        votes: Counter[tuple[str, str]] = Counter()
        for text, family in texts[0].items():
            at = next((start for start in _starts(text) if text[start:] in fronts), len(text))
            if len(places := fronts.get(text[at:], ())) <= FEW:
                votes.update({(text[:at], front): len(family.keys) for front in places})
        found = (_move(old, new, *texts) for (old, new), _ in votes.most_common(MOST_MOVES))
        moves = sorted(filter(None, found), key=lambda move: -len(move.pairs))
        for move in moves:
            if any(s not in self.free[0] or t not in self.free[1] for s, t in move.pairs.items()):
                continue  # a larger move has some of it; words will tell about the rest
            either = [move, *(each for each in moves if each is not move and move.is_rival(each))]
            sure, why = len(either) == 1 and move.numbers_are_known, move.why
            if len(either) > 1:
                shown = listed([printable(f"{each.old}* as {each.new}*".replace(HOLE, "*")) for each in either])
                why = f"the names and shapes fit in more than one way: {shown}"
            elif not sure:
                why = RECOUNTED
            heads = (without_numbers(each).partition(HOLE)[0] for each in (move.old, move.new))
            for each in either[:FEW]:
                origin = ("moved", *heads) if sure else ("either", each.old, each.new)
                for match in each.matches:
                    self._accept(match, why, sure, origin)

    def _by_words(self, ours: list[Family], theirs: list[Family]) -> None:
        """Accepts families with more words in common with each other than with any other of the same shapes."""
        by_trait: tuple[dict[Trait, list[Family]], ...] = defaultdict(list), defaultdict(list)
        for side, some in zip(by_trait, (ours, theirs), strict=True):
            for family in some:
                for trait in set(family.traits):
                    side[trait].append(family)
        for mine, goals in (*_classes(ours, theirs), *_classes(ours, theirs, deeper=True)):
            for known in self._of_modules(mine, goals):
                self._accept(known, "the other tensors of the module fit")
            mine, goals = self._open(0, mine), self._open(1, goals)
            self.left -= 2 * len(mine) * len(goals)
            if self.left < 0:
                return
            alone = len(mine) == len(goals) == 1
            for one in mine if goals else []:
                near = _nearest(one, goals)
                match = matched(one, near) if near is not None and _nearest(near, mine) is one else None
                if match and match.known and (why := self._evidence(match, alone, by_trait)):
                    self._accept(match, why)

    def _of_modules(self, ours: list[Family], theirs: list[Family]) -> Iterator[Match]:
        """The families of a class whose modules are known to be the same, and whose leaves are."""
        places = {(family.module, family.leaf): family for family in theirs}
        for one in self._open(0, ours):
            module, numbers = self.modules.get(one.module, ("\n", []))
            match = matched(one, places.get((module, one.leaf)))
            if match is not None and match.numbers == numbers and self._open(1, [match.theirs]):
                yield match

    def _evidence(self, match: Match, alone: bool, by_trait: tuple[Mapping[Trait, list[Family]], ...]) -> str:
        """Why two families are the same; empty where shapes alone would say so, which could be chance."""
        ours, theirs = match.ours, match.theirs
        if _cannot_be(ours, theirs):
            return ""
        for side, (family, goal) in enumerate(((ours, theirs), (theirs, ours))):
            rivals, own = by_trait[side][family.traits[0]], family.keys.values()
            self.left -= len(rivals)
            others = (each for each in self._open(side, rivals) if {*each.keys.values()}.isdisjoint(own))
            if not all(goal.words.is_nearer(family.words, rival.words) for rival in others):
                return ""
        if ours.words.inner & theirs.words.inner:
            return ALONE if alone else "of the tensors with these shapes, the names are the nearest"
        is_linear = alone and "linear" in ours.words.weak & theirs.words.weak
        in_blocks = (ours.head, theirs.head) in self.heads and len(ours.keys) > 1
        return ALONE if is_linear and (in_blocks or len(ours.traits[0] or ()) > 2) else ""

    def _by_order(self, kind: set[str] | None, some: list[Family], others: list[Family]) -> None:
        """Gives the rest of each class, of weights or biases or others, in the order of the keys, as doubtful.

        kind: None for the last of all blocks on both sides, whatever they are.
        """
        for mine, goals in _classes(some, others):
            matches = [*self._of_modules(mine, goals)]
            known = len(matches)
            if kind is not None:
                mine, goals = (
                    [f for f in side if f.words.strong & {"weight", "bias"} == kind] for side in (mine, goals)
                )
            if len(mine) == len(goals) and (kind is not None or (len(mine) == 1 and len(mine[0].keys) > 1)):
                matches += filter(None, map(matched, mine, goals))
            for number, match in enumerate(matches):
                ours, theirs, shape = match.ours, match.theirs, match.ours.traits[0]
                # One vector, whose length many have; a scalar, which fits everywhere.
                by_chance = number >= known and len(shape or (0, 0)) < 2 and len(ours.keys) == 1 == len(mine)
                if ours.is_tiny or by_chance or _cannot_be(ours, theirs):
                    continue
                if self._open(0, [ours]) and self._open(1, [theirs]):
                    why = ORDERED if len(mine) > 1 else UNSAID
                    self._accept(match, why, False, ("order", ours.head, theirs.head))


def _cannot_be(ours: Family, theirs: Family) -> bool:
    """True for names that contradict each other, and for those that differ in numbers only: these are different layers,
    or are counted from elsewhere."""
    return ours.words.contradict(theirs.words) or without_numbers(ours.text) == without_numbers(theirs.text)


def _starts(name: str) -> list[int]:
    """The places where the parts of a name begin."""
    return [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]


def _move(old: str, new: str, ours: Mapping[str, Family], theirs: Mapping[str, Family]) -> _Move | None:
    """A move that accounts for most of what it touches; None where too little fits."""
    below = {text.removeprefix(old): family for text, family in ours.items() if text.startswith(old)}
    both = {end: matched(family, theirs.get(new + end)) for end, family in below.items()}
    matches = {end: match for end, match in both.items() if match is not None}
    deep = not old or not new or (len(matches) > 2 and any("." in end for end in matches))
    if not matches or 2 * len(matches) < len(below) or not deep:
        return None
    pairs = {key: goal for match in matches.values() for key, goal in match.pairs.items()}
    return _Move(old, new, [*matches.values()], pairs)


def _classes(
    ours: Iterable[Family], theirs: Iterable[Family], deeper: bool = False
) -> list[tuple[list[Family], list[Family]]]:
    """The families of both sides that have the same traits, in order.

    deeper: one side may have more blocks of them, where all blocks are alike.
    """
    classes: dict[object, tuple[list[Family], list[Family]]] = defaultdict(lambda: ([], []))
    for side, some in enumerate((ours, theirs)):
        for family in some:
            alike = deeper and len(set(family.traits)) == 1
            classes[(len(family.pieces), family.traits[0]) if alike else family.traits][side].append(family)
    return [(mine, goals) for mine, goals in classes.values() if mine and goals]


def _nearest(family: Family, others: list[Family]) -> Family | None:
    """The one that shares more words than every other, and all that those share; None if none does."""
    mine = family.words
    best = max(others, key=lambda each: (len(mine.strong & each.words.strong), len(mine.weak & each.words.weak)))
    return best if all(each is best or mine.is_nearer(best.words, each.words) for each in others) else None
