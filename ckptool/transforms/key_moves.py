"""Keys that are the target's under another prefix, or with an older spelling of their last part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ckptool.errors import listed, printable
from ckptool.transforms.key_pairs import Found, Pair, Side, before_numbers, pattern

DEEP = 32  # parts of a key that is looked at from all its dots
MOST_MOVES = 64  # that are looked at
MOST_FRONTS = 16  # places of one ending that are looked at
FEW = 4  # places of the target with the same ending, beyond which an ending says nothing


def same_spelling(source: Side, target: Side, found: Found) -> None:
    """Takes the keys that are the same when both are spelled as today."""
    goals = {target.spelled(key): key for key in target.shapes}
    pairs = []
    for key, shape in source.shapes.items():
        goal = goals.get(source.spelled(key))
        if goal is not None and target.shapes[goal] == shape:
            why = source.old[key].why if key in source.old else target.old[goal].why if goal in target.old else ""
            pairs.append(Pair(key, goal, ("spelling", why), why))
    found.accept(source, target, pairs)


@dataclass(slots=True, eq=False)
class _Move:
    """All keys under `old` as keys under `new`.

    uncounted: what is left on both sides where it differs in numbers only: one of them may count from another number.
    """

    old: str
    new: str
    pairs: list[tuple[str, str]]
    uncounted: tuple[list[str], list[str]]


def moved(source: Side, target: Side, found: Found) -> None:
    """Takes subtrees that stand elsewhere with the same names below: the wrapped model, the renamed backbone."""
    names = _Names(source, target)
    moves = names.moves()
    for move in moves:
        if any(key not in source.shapes or goal not in target.shapes for key, goal in move.pairs):
            continue  # a larger move or a doubt has some of it; words will tell what is left
        ways = [move, *names.rivals(move), *(other for other in moves if other is not move and _rival(move, other))]
        ways = list({(way.old, way.new): way for way in reversed(ways)}.values())[::-1]
        if len(ways) == 1 and not move.uncounted[0] and pattern(move.old) != pattern(move.new):
            heads = before_numbers(move.old, move.old), before_numbers(move.new, move.new)
            found.accept(source, target, _as_pairs(move.pairs, ("moved", *heads), _move_text(move)))
            continue
        found.doubt(source, move.uncounted[0])
        found.doubt(target, move.uncounted[1])
        for way in ways[:FEW]:
            found.set_aside(source, target, _as_pairs(way.pairs, ("either", way.old, way.new), _either_text(ways)))


def _as_pairs(pairs: list[tuple[str, str]], origin: tuple[str, ...], why: str) -> list[Pair]:
    return [Pair(s, t, origin, why) for s, t in pairs]


def _either_text(ways: list[_Move]) -> str:
    if len(ways) == 1:
        return "names differ in numbers only on both sides: one of them may count from another number"
    told = listed([printable(f"{way.old}* as {way.new}*") for way in ways])
    return f"the names and shapes fit in more than one way: {told}"


def _move_text(move: _Move) -> str:
    if not move.new:
        return f"without {printable(move.old)!r} the names are the target's"
    if not move.old:
        return f"with {printable(move.new)!r} before them the names are the target's"
    return f"the names below {printable(move.old)!r} are those below {printable(move.new)!r} of the target"


def _rival(one: _Move, other: _Move) -> bool:
    """True if both moves cannot be, and the other takes at least half of what the smaller one has."""
    goals, origins = dict(one.pairs), {t: s for s, t in one.pairs}
    against = sum(goals.get(s, t) != t or origins.get(t, s) != s for s, t in other.pairs)
    return 2 * against >= min(len(one.pairs), len(other.pairs))


class _Names:
    """The names of both sides as they are spelled today, and what stands before each of their endings."""

    def __init__(self, source: Side, target: Side) -> None:
        self.ours = {source.spelled(key): key for key in source.shapes}
        self.theirs = {target.spelled(key): key for key in target.shapes}
        self.spelled = {key: name for name, key in self.ours.items()}
        self.shapes = dict(source.shapes), dict(target.shapes)
        self.fronts = _fronts(self.ours), _fronts(self.theirs)

    def moves(self) -> list[_Move]:
        """Moves that account for most of what they touch, the largest first."""
        votes: Counter[tuple[str, str]] = Counter()
        for name in self.ours:
            start = next((start for start in _starts(name) if name[start:] in self.fronts[1]), None)
            if start is not None and len(news := self.fronts[1][name[start:]]) <= FEW:
                votes.update((name[:start], new) for new in news)
        found = (self._move(old, new) for (old, new), _ in votes.most_common(MOST_MOVES))
        return sorted(filter(None, found), key=lambda move: -len(move.pairs))

    def _move(self, old: str, new: str) -> _Move | None:
        below = dict.fromkeys(name[len(old) :] for name in self.ours if name.startswith(old)).keys()
        same = [end for end in below if new + end in self.theirs]
        pairs = [pair for end in same if (pair := self._pair(old, new, end)) is not None]
        deep = not old or not new or (len(pairs) > 2 and any("." in end for end in same))
        if not pairs or 2 * len(pairs) < len(below) or not deep:
            return None
        there = {name[len(new) :] for name in self.theirs if name.startswith(new)}
        return _Move(old, new, pairs, self._uncounted(old, below - there, new, there - below))

    def _pair(self, old: str, new: str, end: str) -> tuple[str, str] | None:
        """The keys old + end and new + end, if both are there with the same shape."""
        s, t = self.ours.get(old + end), self.theirs.get(new + end)
        return (s, t) if s is not None and t is not None and self.shapes[0][s] == self.shapes[1][t] else None

    def _uncounted(self, old: str, ours: set[str], new: str, theirs: set[str]) -> tuple[list[str], list[str]]:
        both = _patterns(ours) & _patterns(theirs)
        return [self.ours[old + end] for end in ours if pattern(end) in both], [
            self.theirs[new + end] for end in theirs if pattern(end) in both
        ]

    def rivals(self, move: _Move) -> list[_Move]:
        """Other places, on either side, that have more than half of the same endings with the same shapes."""
        ends = [self._end(move, pair) for pair in move.pairs]
        rivals = []
        for side, own in enumerate((move.old, move.new)):
            members = {pair[side] for pair in move.pairs}
            counts = Counter(front for end in ends for front in self.fronts[side].get(end, ())[:MOST_FRONTS])
            names = (self.ours, self.theirs)[side]
            for front, count in counts.most_common(FEW):
                if front == own or 2 * count <= len(ends):
                    continue
                old, new = (front, move.new) if side == 0 else (move.old, front)
                free = [end for end in ends if names.get(front + end) not in members]
                pairs = [pair for end in free if (pair := self._pair(old, new, end)) is not None]
                if 2 * len(pairs) > len(ends):
                    rivals.append(_Move(old, new, pairs, ([], [])))
        return rivals

    def _end(self, move: _Move, pair: tuple[str, str]) -> str:
        return self.spelled[pair[0]][len(move.old) :]


def _fronts(names: Iterable[str]) -> dict[str, list[str]]:
    fronts: dict[str, list[str]] = {}
    for name in names:
        for start in _starts(name):
            fronts.setdefault(name[start:], []).append(name[:start])
    return fronts


def _patterns(names: Iterable[str]) -> set[str]:
    return {found for name in names if (found := pattern(name)) != name}


def _starts(name: str) -> Iterable[int]:
    """Where the parts of a name begin."""
    if name.count(".") >= DEEP:
        return
    start = 0
    while True:
        yield start
        dot = name.find(".", start)
        if dot < 0:
            return
        start = dot + 1
