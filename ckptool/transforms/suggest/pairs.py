"""Pairs of a checkpoint's key and a target's key, by names and shapes: certain with the reason, or one of several ways.

Two things count as evidence: shapes at the same numbers, and words. A pair is certain only if no other key of either
side has as much for it; what rests on the order of the keys alone never is. That makes it conservative: where every
word of a name either stays or is replaced by one that is used nowhere else, and numbers stay, a certain pair is a true
one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptool.errors import listed, printable
from ckptool.transforms.suggest.keys import Shape, Spelling, before_numbers, spellings, without_numbers

FOR_RULES = 800_000  # of the budget: kept for the writing of rules
DEEP = 32  # parts of a key that is tried from all its dots
MOST_MOVES = 64
MOST_FRONTS = 16  # places of one ending that are tried
FEW = 4  # places of the target with the same ending, beyond which an ending says nothing


@dataclass(slots=True)
class WorkBudget:
    """Work that may still be done, in comparisons of two names or tries of a rule on a key: about a second in all."""

    left: int = 500_000 + FOR_RULES

    def take(self, cost: int, keep: int = FOR_RULES) -> bool:
        """True, and the cost is taken, if that much is left besides what is kept."""
        if cost > self.left - keep:
            return False
        self.left -= cost
        return True


@dataclass(frozen=True, slots=True)
class Pair:
    """A key of the source and the target's name for it.

    origin: the finding that it is of; pairs of one origin belong together.  kind: shared by pairs that differ in their
    numbers only.
    """

    source: str
    target: str
    origin: tuple[str, ...]
    why: str
    kind: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Side:
    """The keys of one side without a counterpart so far, with their shapes; `old`: today's spelling of some."""

    shapes: dict[str, Shape]
    old: dict[str, Spelling] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.old = spellings(self.shapes)

    def spelled(self, key: str) -> str:
        return self.old[key].key if key in self.old else key

    def take(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.shapes.pop(key, None)


@dataclass(slots=True, eq=False)
class Search:
    """Both sides, and what was found so far: `certain` pairs; `ways` that could be.

    doubtful: shapes of keys that are set aside, or that may be: no other key of such a shape is ever certain.
    """

    source: Side
    target: Side
    budget: WorkBudget = field(default_factory=WorkBudget)
    certain: list[Pair] = field(default_factory=list)
    ways: list[list[Pair]] = field(default_factory=list)
    doubtful: set[Shape] = field(default_factory=set)

    def accept(self, pairs: Iterable[Pair]) -> None:
        """Adds certain pairs, and takes their keys from the sides."""
        pairs = list(pairs)
        self.certain += pairs
        self._take(pairs)

    def set_aside(self, pairs: list[Pair]) -> None:
        """Adds pairs that could be, and takes their keys from the sides."""
        self.ways.append(pairs)
        self.doubt([pair.source for pair in pairs], [pair.target for pair in pairs])
        self._take(pairs)

    def doubt(self, ours: Iterable[str], theirs: Iterable[str]) -> None:
        """Lets nothing be certain that has the shape of one of these keys."""
        for side, keys in ((self.source, ours), (self.target, theirs)):
            self.doubtful.update(side.shapes[key] for key in keys if key in side.shapes)

    def _take(self, pairs: list[Pair]) -> None:
        self.source.take(pair.source for pair in pairs)
        self.target.take(pair.target for pair in pairs)


def accept_same_spelling(search: Search) -> None:
    """Accepts the keys that are equal in today's spelling."""
    source, target = search.source, search.target
    goals = {target.spelled(key): key for key in target.shapes}
    pairs = []
    for key, shape in source.shapes.items():
        goal = goals.get(source.spelled(key))
        if goal is not None and target.shapes[goal] == shape:
            old = source.old.get(key) or target.old.get(goal)
            why = old.why if old else ""
            pairs.append(Pair(key, goal, ("spelling", why), why))
    search.accept(pairs)


# Subtrees that stand elsewhere ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Move:
    """All keys under `old` as keys under `new`, by what is behind that in both names.

    recounted: the rest of both sides where it differs in numbers only: one of them may count from another number.
    """

    old: str
    new: str
    pairs: dict[str, tuple[str, str]]
    recounted: tuple[list[str], list[str]]

    def as_pairs(self, origin: tuple[str, ...], why: str) -> list[Pair]:
        return [Pair(key, goal, origin, why) for key, goal in self.pairs.values()]

    @property
    def why(self) -> str:
        old, new = self.old, self.new
        if not new:
            return f"without {old!r} the names are the target's"
        if not old:
            return f"with {new!r} before them the names are the target's"
        return f"the names below {old!r} are those below {new!r} of the target"

    def is_rival(self, other: _Move) -> bool:
        """True if both cannot be, and the other takes at least half of the keys of the smaller one."""
        goals, origins = dict(self.pairs.values()), {goal: key for key, goal in self.pairs.values()}
        against = sum(goals.get(s, t) != t or origins.get(t, s) != s for s, t in other.pairs.values())
        return 2 * against >= min(len(self.pairs), len(other.pairs))


class Moves:
    """Subtrees with the same names below another front: the wrapped model, the renamed backbone."""

    def __init__(self, search: Search) -> None:
        self.search = search
        source, target = search.source, search.target
        self.names = (
            {source.spelled(key): key for key in source.shapes},
            {target.spelled(key): key for key in target.shapes},
        )
        self.shapes = dict(source.shapes), dict(target.shapes)
        self.fronts = _fronts(self.names[0]), _fronts(self.names[1])

    def run(self) -> None:
        """Accepts the moves without a rival; sets the others aside."""
        search, moves = self.search, self._candidates()
        for move in moves:
            if any(s not in search.source.shapes or t not in search.target.shapes for s, t in move.pairs.values()):
                continue  # a larger move or a doubt has some of it; words will tell about the rest
            ways: dict[tuple[str, str], _Move] = {}
            others = (other for other in moves if other is not move and move.is_rival(other))
            for way in (move, *self._rivals(move), *others):
                ways.setdefault((way.old, way.new), way)
            recounted = move.recounted[0] or without_numbers(move.old) == without_numbers(move.new)
            if len(ways) == 1 and not recounted:
                heads = before_numbers(move.old, move.old), before_numbers(move.new, move.new)
                search.accept(move.as_pairs(("moved", *heads), move.why))
                continue
            search.doubt(*move.recounted)
            why = _either_text(list(ways.values()))
            for way in list(ways.values())[:FEW]:
                search.set_aside(way.as_pairs(("either", way.old, way.new), why))

    def _candidates(self) -> list[_Move]:
        """Moves that account for most of what they touch, the largest first."""
        votes: Counter[tuple[str, str]] = Counter()
        for name in self.names[0]:
            start = next((start for start in _starts(name) if name[start:] in self.fronts[1]), None)
            if start is not None and len(news := self.fronts[1][name[start:]]) <= FEW:
                votes.update((name[:start], new) for new in news)
        found = (self._move(old, new) for (old, new), _ in votes.most_common(MOST_MOVES))
        return sorted(filter(None, found), key=lambda move: -len(move.pairs))

    def _move(self, old: str, new: str) -> _Move | None:
        ours, theirs = self.names
        below = dict.fromkeys(name[len(old) :] for name in ours if name.startswith(old)).keys()
        there = {name[len(new) :] for name in theirs if name.startswith(new)}
        pairs = self._pairs(old, new, below)
        deep = not old or not new or (len(pairs) > 2 and any("." in end for end in below & there))
        if not pairs or 2 * len(pairs) < len(below) or not deep:
            return None
        both = _patterns(below - there) & _patterns(there - below)
        left = [ours[old + end] for end in below - there if without_numbers(end) in both]
        missing = [theirs[new + end] for end in there - below if without_numbers(end) in both]
        return _Move(old, new, pairs, (left, missing))

    def _pairs(self, old: str, new: str, ends: Iterable[str]) -> dict[str, tuple[str, str]]:
        """The keys old + end and new + end that are both there with the same shape, by their ends."""
        ours, theirs = self.names
        there = [end for end in ends if old + end in ours and new + end in theirs]
        pairs = {end: (ours[old + end], theirs[new + end]) for end in there}
        return {end: pair for end, pair in pairs.items() if self.shapes[0][pair[0]] == self.shapes[1][pair[1]]}

    def _rivals(self, move: _Move) -> list[_Move]:
        """Other places, on either side, that have more than half of the same endings with the same shapes."""
        rivals = []
        for side, own in enumerate((move.old, move.new)):
            members = {pair[side] for pair in move.pairs.values()}
            counts = Counter(front for end in move.pairs for front in self.fronts[side].get(end, ())[:MOST_FRONTS])
            for front, count in counts.most_common(FEW):
                if front == own or 2 * count <= len(move.pairs):
                    continue
                old, new = (front, move.new) if side == 0 else (move.old, front)
                free = [end for end in move.pairs if self.names[side].get(front + end) not in members]
                pairs = self._pairs(old, new, free)
                if 2 * len(pairs) > len(move.pairs):
                    rivals.append(_Move(old, new, pairs, ([], [])))
        return rivals


def _either_text(ways: list[_Move]) -> str:
    if len(ways) == 1:
        return "names differ in numbers only on both sides: one of them may count from another number"
    text = listed([printable(f"{way.old}* as {way.new}*") for way in ways])
    return f"the names and shapes fit in more than one way: {text}"


def _fronts(names: Iterable[str]) -> dict[str, list[str]]:
    """For every ending of a name, at its dots, all that stands before it."""
    fronts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for start in _starts(name):
            fronts[name[start:]].append(name[:start])
    return fronts


def _patterns(names: Iterable[str]) -> set[str]:
    """The names without their numbers, of those that have any."""
    return {pattern for name in names if (pattern := without_numbers(name)) != name}


def _starts(name: str) -> list[int]:
    """The places where the parts of a name begin; none for a name of very many parts."""
    if name.count(".") >= DEEP:
        return []
    return [0, *(at + 1 for at, char in enumerate(name) if char == ".")]
