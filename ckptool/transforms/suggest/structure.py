"""Pairs by what is stored under the numbers of keys: families with the same shapes, told apart by their words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from ckptool.errors import counted, listed, printable
from ckptool.transforms.suggest.groups import groups
from ckptool.transforms.suggest.keys import (
    Family,
    Shape,
    Shared,
    Signature,
    before_numbers,
    contradict,
    families,
    subsets,
    without_numbers,
    words,
)
from ckptool.transforms.suggest.pairs import Pair, Search, Side
from ckptool.transforms.suggest.relations import Relation

PART = 10  # the cost of trying a key with some of its numbers fixed, in comparisons
_ALONE = "nothing else has these shapes"


@dataclass(slots=True, eq=False)
class _ShapeClass:
    """Families of both sides that have the same shapes at the same numbers."""

    ours: list[Family]
    theirs: list[Family]


class Structure:
    """Families of both sides, matched step by step: by words, by their module, by being the only ones of a shape."""

    def __init__(self, search: Search, whole: bool) -> None:
        self.search, self.source, self.target, self.whole = search, search.source, search.target, whole
        self._consider(*(families(s.shapes, [(k, s.spelled(k)) for k in s.shapes]) for s in (self.source, self.target)))
        self.modules: dict[str, str] = {}
        self.heads: set[tuple[str, str]] = set()
        # By module of the source: the module of the target that it may be, and the pairs that say so.
        self.likely: dict[str, str] = {}
        self.doubts: dict[str, tuple[tuple[str, ...], str]] = {}

    def run(self) -> None:
        """Matches families, first whole, then in parts; sets aside what the order alone would tell."""
        self._settle()
        self._match_longer()
        self._split()
        self._settle()
        classes = self._classes()
        for leaf in ("weight", "bias", ""):
            for one in classes:
                # Sets aside what lies beside a tensor that is set aside.
                self._keep_open(one)
                for ours, theirs in _in_same_module(one, self.likely):
                    self.search.set_aside(_family_pairs(ours, theirs, *self.doubts[ours.module]))
                self._keep_open(one)
                self._likely_by_order(one, leaf)

    def _consider(self, ours: list[Family], theirs: list[Family]) -> None:
        self.ours, self.theirs = ours, theirs
        self.by_shape = _by_shape(ours), _by_shape(theirs)

    def _settle(self) -> None:
        """Accepts certain matches until a fixpoint."""
        before = -1
        while len(self.search.certain) != before:
            before = len(self.search.certain)
            for one in self._classes():
                # Matches what lies beside a tensor that is known: the bias of a weight.
                for ours, theirs in _in_same_module(one, self.modules):
                    self._match(ours, theirs, "the other tensors of the module fit")
                self._keep_open(one)
                self._by_words(one)
            self._consider(_open(self.ours, self.source), _open(self.theirs, self.target))

    def _classes(self) -> list[_ShapeClass]:
        """Families by signature; one without a counterpart also by fewer of its numbers."""
        mine, theirs = _by_signature(self.ours), _by_signature(self.theirs)
        classes = {mark: _ShapeClass(list(ours), list(theirs[mark])) for mark, ours in mine.items() if mark in theirs}
        for lonely, others, ours in ((mine, theirs, True), (theirs, mine, False)):
            for family in chain(*(group for mark, group in lonely.items() if mark not in others)):
                fewer = next((less for less in family.by_fewer() if less.signature in others), None)
                if fewer is not None:
                    one = classes.setdefault(fewer.signature, _ShapeClass([], []))
                    own, other = (one.ours, one.theirs) if ours else (one.theirs, one.ours)
                    own.append(fewer)
                    other += [] if other else others[fewer.signature]
        return sorted(classes.values(), key=lambda one: one.ours[0].order)

    def _keep_open(self, one: _ShapeClass) -> None:
        """Drops the families that have their counterpart."""
        one.ours, one.theirs = _open(one.ours, self.source), _open(one.theirs, self.target)

    def _match(self, ours: Family, theirs: Family, why: str) -> None:
        heads = _head(ours), _head(theirs)
        self.search.accept(_family_pairs(ours, theirs, ("moved", *heads), why))
        self.heads.add(heads)
        if ours.leaf == theirs.leaf:
            self.modules.setdefault(ours.module, theirs.module)

    def _by_words(self, one: _ShapeClass) -> None:
        """Matches families with more words in common with each other than with any other of their class."""
        matched = True
        while matched and one.ours and one.theirs and self.search.budget.take(2 * len(one.ours) * len(one.theirs)):
            alone = len(one.ours) == len(one.theirs) == 1
            goals = [_best(family, one.theirs) for family in one.ours]
            origins = {id(family): _best(family, one.ours) for family in one.theirs}
            matched = False
            for ours, theirs in zip(one.ours, goals, strict=True):
                if theirs is not None and origins[id(theirs)] is ours and (why := self._evidence(ours, theirs, alone)):
                    self._match(ours, theirs, why)
                    matched = True
            self._keep_open(one)

    def _evidence(self, ours: Family, theirs: Family, alone: bool) -> str:
        """Why two families are the same; empty where shapes alone would say so, which could be chance."""
        if contradict(ours.words, theirs.words) or not self.search.doubtful.isdisjoint(ours.shapes.values()):
            return ""
        if without_numbers(ours.text) == without_numbers(theirs.text) or self._has_rival(ours, theirs):
            return ""  # names that differ in numbers only are different layers, or are counted from elsewhere
        shape = next(iter(ours.shapes.values()))
        if ours.words.inner & theirs.words.inner:
            return _ALONE if alone else "of the tensors with these shapes, the names are the nearest"
        if alone and self.whole and not _is_tiny(ours):
            return f"{_ALONE}, and both sides have the same shapes in all"
        blocks = len(ours.keys) > 1 and (_head(ours), _head(theirs)) in self.heads
        if alone and "linear" in ours.words.weak & theirs.words.weak and (blocks or len(shape or ()) > 2):
            return _ALONE
        return ""

    def _has_rival(self, ours: Family, theirs: Family) -> bool:
        """True if a family with other numbers has such a shape, and as much in common with one of the two."""
        shared, shape = ours.words.shared(theirs.words), next(iter(ours.shapes.values()))
        for family, goal, others, side in (
            (ours, theirs, self.by_shape[0], self.source),
            (theirs, ours, self.by_shape[1], self.target),
        ):
            own = set(family.keys.values())
            if not self.search.budget.take(len(others[shape])):
                return True
            for rival in _open(others[shape], side):
                if own.isdisjoint(rival.keys.values()) and not _is_less(rival.words.shared(goal.words), shared):
                    return True
        return False

    def _match_longer(self) -> None:
        """Matches families that go on for longer on one side: 24 layers against 12."""
        take = self.search.budget.take
        if not take(len(self.ours) * len(self.theirs)):
            return
        matched = {id(family) for one in self._classes() for family in (*one.ours, *one.theirs)}
        ours, theirs = ([family for family in group if id(family) not in matched] for group in (self.ours, self.theirs))
        fits = [(a, b) for a in ours for b in theirs if a.within(b) or b.within(a)]
        ours_of, theirs_of = defaultdict[int, list[Family]](list), defaultdict[int, list[Family]](list)
        for a, b in fits:
            theirs_of[id(a)].append(b)
            ours_of[id(b)].append(a)
        for a, b in fits:
            mine, goals = ours_of[id(b)], theirs_of[id(a)]
            still = take(len(mine) + len(goals)) and _is_open(a, self.source) and _is_open(b, self.target)
            nearest = still and _best(a, goals) is b and _best(b, mine) is a and a.words.inner & b.words.inner
            if nearest and self._evidence(a, b, len(mine) == len(goals) == 1):
                count = counted(min(len(a.keys), len(b.keys)), "number is", "numbers are")
                self._match(a, b, f"the names are the nearest; {count} on both sides")

    def _split(self) -> None:
        """Fixes numbers of families without a counterpart, as few as needed: `mlp.fc1`, `fc2` and `mlp.0`, `3`."""
        mine, theirs = ({family.signature for family in group} for group in (self.ours, self.theirs))
        lonely = [family for family in self.ours if family.signature not in theirs]
        others = [family for family in self.theirs if family.signature not in mine]
        costs = [PART * len(family.keys) << min(len(family.pieces) - 1, 4) for family in (*lonely, *others)]
        if self.search.budget.take(sum(costs)):
            goals, origins = theirs | _signatures(others), mine | _signatures(lonely)
            ours = [[one] if one.signature in theirs else _parts(one, goals) for one in self.ours]
            others_in_parts = [[one] if one.signature in mine else _parts(one, origins) for one in self.theirs]
            self._consider([*chain(*ours)], [*chain(*others_in_parts)])

    def _likely_by_order(self, one: _ShapeClass, leaf: str) -> None:
        """Sets aside the rest of a class, of weights or biases or others, in the order of the keys."""
        ours, theirs = (
            sorted((family for family in group if _kind(family) == leaf), key=lambda family: family.order)
            for group in (one.ours, one.theirs)
        )
        why = "the shapes fit, and only the order of the names says which is which"
        if len(ours) != len(theirs):
            if min(len(ours), len(theirs)) != 1:
                return
            several = [printable(next(iter(family.keys.values()))) for family in (ours if len(ours) > 1 else theirs)]
            why = f"the shapes fit, and so do those of others: {listed(several)}"
        elif len(ours) == 1:
            why = "the shapes fit, but the names do not say so, or say it of others as well"
        for a, b in zip(ours, theirs, strict=False):
            if not contradict(a.words, b.words) and not _is_tiny(a):
                origin = ("order", _around(a), _around(b))
                self.search.set_aside(_family_pairs(a, b, origin, why))
                if a.module not in self.likely:
                    self.likely[a.module], self.doubts[a.module] = b.module, (origin, why)


def _in_same_module(one: _ShapeClass, modules: Mapping[str, str]) -> list[tuple[Family, Family]]:
    """The families of a class whose modules are known to be the same, and whose leaves are."""
    places = {(family.module, family.leaf): family for family in one.theirs}
    found = ((ours, places.pop((modules.get(ours.module, "\n"), ours.leaf), None)) for ours in one.ours)
    return [(ours, theirs) for ours, theirs in found if theirs is not None]


def _family_pairs(ours: Family, theirs: Family, origin: tuple[str, ...], why: str) -> list[Pair]:
    kind = (ours.text, theirs.text)
    return [Pair(key, theirs.keys[at], origin, why, kind) for at, key in ours.keys.items() if at in theirs.keys]


def _open(group: list[Family], side: Side) -> list[Family]:
    return [family for family in group if _is_open(family, side)]


def _is_open(family: Family, side: Side) -> bool:
    return all(key in side.shapes for key in family.keys.values())


def _is_tiny(family: Family) -> bool:
    """True for scalars, which fit everywhere; nothing can be said of one that did not come with its module."""
    return all(shape is None or shape in ((), (1,)) for shape in family.shapes.values())


def _head(family: Family) -> str:
    return before_numbers(family.text, family.module or family.text)


def _around(family: Family) -> str:
    """The name of the blocks that a family is of, or of the module that its module is in."""
    return before_numbers(family.text, family.module.rpartition(".")[0])


def _kind(family: Family) -> str:
    """The sort of parameter: weights never stand for biases."""
    return next((word for word in ("weight", "bias") if word in family.words.strong), "")


def _by_signature(group: Iterable[Family]) -> dict[Signature, list[Family]]:
    result = defaultdict[Signature, list[Family]](list)
    for family in group:
        result[family.signature].append(family)
    return result


def _by_shape(group: Iterable[Family]) -> dict[Shape, list[Family]]:
    result = defaultdict[Shape, list[Family]](list)
    for family in group:
        for shape in set(family.shapes.values()):
            result[shape].append(family)
    return result


def _is_less(one: Shared, other: Shared) -> bool:
    """True for fewer words in common, and no other ones; strong words count before weak ones."""
    return one[0] < other[0] or (one[0] == other[0] and one[1] < other[1])


def _best(family: Family, others: list[Family]) -> Family | None:
    """The one of `others` that shares more words than every other, and all that those share; None if none does."""
    if len(others) == 1:
        return others[0]
    shared = [family.words.shared(other.words) for other in others]
    first = max(range(len(others)), key=lambda n: (len(shared[n][0]), len(shared[n][1])))
    if all(number == first or _is_less(one, shared[first]) for number, one in enumerate(shared)):
        return others[first]
    return None


def _signatures(lonely: list[Family]) -> set[Signature]:
    """The signatures that the parts of some families can have."""
    parts = [part for family in lonely for some in subsets(family) for part in family.fixed(some)]
    return {one.signature for part in parts for one in (part, *part.by_fewer())}


def _parts(family: Family, goals: set[Signature]) -> list[Family]:
    """The parts of a family, if that makes most of them fit something; else the family."""
    for some in subsets(family):
        parts = family.fixed(some)
        fit = sum(part.signature in goals or any(less.signature in goals for less in part.by_fewer()) for part in parts)
        if 2 * fit >= len(parts):
            return parts
    return [family]


# Fused ---------------------------------------------------------------------------------------------------------------


def fused(search: Search) -> Iterator[Relation]:
    """Queries, keys and values that one side keeps in one tensor and the other in three, by names and shapes."""
    for three_side, one_side, splits in ((search.source, search.target, False), (search.target, search.source, True)):
        by_shape: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for key, shape in one_side.shapes.items():
            if words(key).strong & {"qkv", "attn"}:
                by_shape[(shape, *_place(key))].append(key)
        for group in groups(key for key, shape in three_side.shapes.items() if shape and len(_roles(key)) == 1):
            roles = ["".join(_roles(column[0])) for column in group.columns]
            same = len({words(key).strong - _roles(key) for key in group.keys}) == 1
            if group.stacked or not same or sorted(roles) != ["k", "q", "v"]:
                continue
            three = group.ordered([roles.index(role) for role in "qkv"])
            shapes = [three_side.shapes[key] or () for key in three.keys]
            for axis in (0, -1) if len(shapes[0]) > 1 else (0,):
                sizes = [shape[axis] for shape in shapes]
                whole = (sum(sizes), *shapes[0][1:]) if axis == 0 else (*shapes[0][:-1], sum(sizes))
                if len(found := by_shape.pop((whole, *_place(three.keys[0])), [])) == 1:
                    parts = f" {sizes}" if len(set(sizes)) > 1 else ""
                    yield Relation(three, found[0], f"cat {axis}{parts}", splits)
                    break


def _roles(key: str) -> frozenset[str]:
    return words(key).strong & {"q", "k", "v"}


def _place(key: str) -> tuple[str, bool]:
    """The numbers of a name, and whether it is a bias's."""
    return " ".join("".join(char if char.isdecimal() else " " for char in key).split()), "bias" in words(key).strong
