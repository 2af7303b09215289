"""Keys by what is stored under their numbers: families with the same shapes, told apart by their words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptool.errors import counted, listed, printable
from ckptool.transforms.key_families import Family, Shape, Signature, families, subsets
from ckptool.transforms.key_pairs import Found, Pair, Side, before_numbers, pattern
from ckptool.transforms.key_words import Words, contradict

MOST_COMPARISONS = 500_000  # of two names, less than half a second; then nothing more is certain
Shared = tuple[frozenset[str], frozenset[str]]
PART = 10  # what it costs to look at a key with some of its numbers fixed, in comparisons
_ALONE = "nothing else has these shapes"


@dataclass(slots=True, eq=False)
class _Class:
    """Families of both sides that have the same shapes at the same numbers."""

    ours: list[Family]
    theirs: list[Family]

    def keep_open(self, source: Side, target: Side) -> None:
        """Drops the families that have their counterpart."""
        self.ours, self.theirs = _open(self.ours, source), _open(self.theirs, target)


class Structure:
    """Families of both sides, matched step by step: by words, by their module, by being the only ones that are left."""

    def __init__(self, source: Side, target: Side, found: Found, whole: bool) -> None:
        """whole: a whole model under other words, every shape there being there as often as here."""
        self.source, self.target, self.found, self.whole = source, target, found, whole
        self._consider(
            families(source.shapes, [(key, source.spelled(key)) for key in source.shapes]),
            families(target.shapes, [(key, target.spelled(key)) for key in target.shapes]),
        )
        self.modules: dict[str, str] = {}
        self.likely: dict[str, tuple[str, tuple[str, ...], str]] = {}
        self.heads: set[tuple[str, str]] = set()
        self.left = MOST_COMPARISONS

    def run(self) -> None:
        """Matches families, first whole, then parts of them, then says what could be."""
        self._settle()
        self._contained()
        self._split()
        self._settle()
        classes = self._classes()
        for leaf in ("weight", "bias", ""):
            for one in classes:
                self._likely_beside(one)
                self._by_order(one, leaf)

    def _consider(self, ours: list[Family], theirs: list[Family]) -> None:
        self.ours, self.theirs = ours, theirs
        self.by_shape = _by_shape(ours), _by_shape(theirs)

    def _settle(self) -> None:
        """Takes what is certain from every class until nothing more is."""
        before = -1
        while len(self.found.certain) != before:
            before = len(self.found.certain)
            for one in self._classes():
                self._by_module(one)
                self._by_words(one)
            self._consider(_open(self.ours, self.source), _open(self.theirs, self.target))

    def _classes(self) -> list[_Class]:
        """Families by signature; one without a counterpart also by fewer of its numbers."""
        mine, theirs = _by_signature(self.ours), _by_signature(self.theirs)
        classes = {mark: _Class(list(ours), list(theirs[mark])) for mark, ours in mine.items() if mark in theirs}
        for lonely, others, ours in ((mine, theirs, True), (theirs, mine, False)):
            for family in [one for mark, group in lonely.items() if mark not in others for one in group]:
                fewer = next((less for less in family.by_fewer() if less.signature in others), None)
                if fewer is None:
                    continue
                one = classes.setdefault(fewer.signature, _Class([], []))
                (one.ours if ours else one.theirs).append(fewer)
                if not (one.theirs if ours else one.ours):
                    (one.theirs if ours else one.ours).extend(others[fewer.signature])
        return sorted(classes.values(), key=lambda one: one.ours[0].order)

    def _may(self, comparisons: int) -> bool:
        """True if there is time for so many comparisons of two names."""
        if comparisons > self.left:
            return False
        self.left -= comparisons
        return True

    def _match(self, ours: Family, theirs: Family, why: str) -> None:
        heads = _head(ours), _head(theirs)
        self.found.accept(self.source, self.target, _family_pairs(ours, theirs, ("moved", *heads), why))
        self.heads.add(heads)
        if ours.leaf == theirs.leaf:
            self.modules.setdefault(ours.module, theirs.module)

    def _by_module(self, one: _Class) -> None:
        """What lies beside a tensor that is known: the bias of a weight."""
        places: dict[tuple[str | None, str], Family] = {(family.module, family.leaf): family for family in one.theirs}
        for ours in one.ours:
            if (theirs := places.pop((self.modules.get(ours.module), ours.leaf), None)) is not None:
                self._match(ours, theirs, "the other tensors of the module fit")
        one.keep_open(self.source, self.target)

    def _by_words(self, one: _Class) -> None:
        """Families that have more words in common with each other than with any other of their class."""
        matched = True
        while matched and one.ours and one.theirs and self._may(2 * len(one.ours) * len(one.theirs)):
            alone = len(one.ours) == len(one.theirs) == 1
            goals = [_best(family, one.theirs) for family in one.ours]
            origins = {id(family): _best(family, one.ours) for family in one.theirs}
            matched = False
            for ours, theirs in zip(one.ours, goals, strict=True):
                if theirs is not None and origins[id(theirs)] is ours and (why := self._evidence(ours, theirs, alone)):
                    self._match(ours, theirs, why)
                    matched = True
            one.keep_open(self.source, self.target)

    def _evidence(self, ours: Family, theirs: Family, alone: bool) -> str:
        """Why two families are the same; empty where shapes alone would say so, which could be chance."""
        if contradict(ours.words, theirs.words) or not self.found.doubtful.isdisjoint(ours.shapes.values()):
            return ""
        if pattern(ours.text) == pattern(theirs.text) or self._rivalled(ours, theirs):
            return ""  # names that differ in numbers only are different layers, or are counted from elsewhere
        shape = next(iter(ours.shapes.values()))
        if ours.words.inner & theirs.words.inner:
            return _ALONE if alone else "of the tensors with these shapes, the names are the nearest"
        if alone and self.whole and not _tiny(ours):
            return f"{_ALONE}, and both sides have the same shapes in all"
        blocks = len(ours.keys) > 1 and (_head(ours), _head(theirs)) in self.heads
        if alone and "linear" in ours.words.weak & theirs.words.weak and (blocks or len(shape or ()) > 2):
            return _ALONE
        return ""

    def _rivalled(self, ours: Family, theirs: Family) -> bool:
        """True if a family with other numbers, but with a tensor of such a shape, has as much in common with one of the two."""
        shared, shape = ours.words.shared(theirs.words), next(iter(ours.shapes.values()))
        for family, goal, others, side in (
            (ours, theirs, self.by_shape[0], self.source),
            (theirs, ours, self.by_shape[1], self.target),
        ):
            own = set(family.keys.values())
            if not self._may(len(others[shape])):
                return True
            for rival in _open(others[shape], side):
                if own.isdisjoint(rival.keys.values()) and not _less(rival.words.shared(goal.words), shared):
                    return True
        return False

    def _contained(self) -> None:
        """Families that go on for longer on one side: 24 layers against 12."""
        if not self._may(len(self.ours) * len(self.theirs)):
            return
        matched = {mark for one in self._classes() for mark in map(id, [*one.ours, *one.theirs])}
        ours = [family for family in self.ours if id(family) not in matched]
        theirs = [family for family in self.theirs if id(family) not in matched]
        ours_of: dict[int, list[Family]] = {}
        theirs_of: dict[int, list[Family]] = {}
        fits = [(a, b) for a in ours for b in theirs if a.within(b) or b.within(a)]
        for a, b in fits:
            theirs_of.setdefault(id(a), []).append(b)
            ours_of.setdefault(id(b), []).append(a)
        for a, b in fits:
            mine, goals = ours_of[id(b)], theirs_of[id(a)]
            still = self._may(len(mine) + len(goals)) and _all_open(a, self.source) and _all_open(b, self.target)
            nearest = still and _best(a, goals) is b and _best(b, mine) is a and a.words.inner & b.words.inner
            if nearest and self._evidence(a, b, len(mine) == len(goals) == 1):
                count = min(len(a.keys), len(b.keys))
                self._match(
                    a, b, f"the names are the nearest; {counted(count, 'number is', 'numbers are')} on both sides"
                )

    def _split(self) -> None:
        """Fixes numbers of families without a counterpart, as few as needed: `mlp.fc1` and `mlp.fc2` against `mlp.0` and `mlp.3`."""
        mine, theirs = _by_signature(self.ours), _by_signature(self.theirs)
        lonely = [family for mark, group in mine.items() if mark not in theirs for family in group]
        others = [family for mark, group in theirs.items() if mark not in mine for family in group]
        if not self._may(
            sum(PART * len(family.keys) << min(len(family.pieces) - 1, 4) for family in [*lonely, *others])
        ):
            return
        marks, goals = _marks(lonely), _marks(others)
        self._consider(
            _in_parts(self.ours, lonely, goals | set(theirs)), _in_parts(self.theirs, others, marks | set(mine))
        )

    def _likely_beside(self, one: _Class) -> None:
        """What lies beside a tensor of which it was said what it could be."""
        one.keep_open(self.source, self.target)
        places: dict[tuple[str | None, str], Family] = {(family.module, family.leaf): family for family in one.theirs}
        for ours in one.ours:
            module, origin, why = self.likely.get(ours.module, (None, (), ""))
            if (theirs := places.pop((module, ours.leaf), None)) is not None:
                self.found.set_aside(self.source, self.target, _family_pairs(ours, theirs, origin, why))
        one.keep_open(self.source, self.target)

    def _by_order(self, one: _Class, leaf: str) -> None:
        """What is left of a class, of weights or biases or others: in the order of the keys, which has to be looked at."""
        ours, theirs = (
            sorted((family for family in group if _kind(family.words) == leaf), key=lambda family: family.order)
            for group in (one.ours, one.theirs)
        )
        told = "the shapes fit, and only the order of the names says which is which"
        if len(ours) != len(theirs):
            if min(len(ours), len(theirs)) != 1:
                return
            several = ours if len(ours) > 1 else theirs
            told = f"the shapes fit, and so do those of others: {listed([_name(family) for family in several])}"
        elif len(ours) == 1:
            told = "the shapes fit, but the names do not say so, or say it of others as well"
        for a, b in zip(ours, theirs, strict=False):
            if not contradict(a.words, b.words) and not _tiny(a):
                origin = ("order", _around(a), _around(b))
                self.found.set_aside(self.source, self.target, _family_pairs(a, b, origin, told))
                self.likely.setdefault(a.module, (b.module, origin, told))


def _family_pairs(ours: Family, theirs: Family, origin: tuple[str, ...], why: str) -> list[Pair]:
    kind = (ours.text, theirs.text)
    return [Pair(key, theirs.keys[at], origin, why, kind) for at, key in ours.keys.items() if at in theirs.keys]


def _open(group: list[Family], side: Side) -> list[Family]:
    return [family for family in group if _all_open(family, side)]


def _all_open(family: Family, side: Side) -> bool:
    return all(key in side.shapes for key in family.keys.values())


def _tiny(family: Family) -> bool:
    """Scalars fit everywhere; nothing can be said of one that did not come with its module."""
    return all(shape is None or shape in ((), (1,)) for shape in family.shapes.values())


def _head(family: Family) -> str:
    return before_numbers(family.text, family.module or family.text)


def _around(family: Family) -> str:
    """What the blocks are called that a family is of, or the module that its module is in."""
    return before_numbers(family.text, family.module.rpartition(".")[0])


def _name(family: Family) -> str:
    return printable(next(iter(family.keys.values())))


def _by_signature(group: Iterable[Family]) -> dict[Signature, list[Family]]:
    result: dict[Signature, list[Family]] = {}
    for family in group:
        result.setdefault(family.signature, []).append(family)
    return result


def _by_shape(group: Iterable[Family]) -> dict[Shape, list[Family]]:
    result: dict[Shape, list[Family]] = {}
    for family in group:
        for shape in family.all_shapes:
            result.setdefault(shape, []).append(family)
    return result


def _less(one: Shared, other: Shared) -> bool:
    """True if the one has fewer words in common than the other, and no other ones; strong words count before weak ones."""
    return one[0] < other[0] or (one[0] == other[0] and one[1] < other[1])


def _best(family: Family, others: list[Family]) -> Family | None:
    """The one of `others` that shares more words than every other does, and all that those share; None where none does."""
    if len(others) == 1:
        return others[0]
    shared = [family.words.shared(other.words) for other in others]
    first = max(range(len(others)), key=lambda n: (len(shared[n][0]), len(shared[n][1])))
    for number, one in enumerate(shared):
        if number != first and not _less(one, shared[first]):
            return None
    return others[first]


def _marks(lonely: list[Family]) -> set[Signature]:
    parts = [part for family in lonely for some in subsets(family) for part in family.fixed(some)]
    return {one.signature for part in parts for one in (part, *part.by_fewer())}


def _in_parts(group: list[Family], lonely: list[Family], goals: set[Signature]) -> list[Family]:
    """The families, those without a counterpart in parts that have one."""
    alone = {id(family) for family in lonely}
    return [part for family in group for part in (_parts(family, goals) if id(family) in alone else [family])]


def _parts(family: Family, goals: set[Signature]) -> list[Family]:
    """The parts of a family, if that makes most of them fit something; else the family."""
    for some in subsets(family):
        parts = family.fixed(some)
        fit = sum(part.signature in goals or any(less.signature in goals for less in part.by_fewer()) for part in parts)
        if 2 * fit >= len(parts):
            return parts
    return [family]


def _kind(found: Words) -> str:
    """What sort of parameter a name is of: weights never stand for biases."""
    return next((word for word in ("weight", "bias") if word in found.strong), "")
