"""Rules that would make more of a checkpoint fit a target: near misses, as what one can pass back to `--rename` or `--rules`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptool.errors import printable
from ckptool.transforms.key_families import Shape
from ckptool.transforms.key_fused import fused
from ckptool.transforms.key_moves import moved, same_spelling
from ckptool.transforms.key_pairs import Found, Pair, Side
from ckptool.transforms.key_structure import Structure
from ckptool.transforms.rule_texts import Drafted, Ground, Time, draft_rules

LONG = 500  # characters of a key: nothing is suggested for a longer one
MOST_WAYS = 40  # ambiguous findings that are told
MOST = 10_000  # keys of a side that have no counterpart: of more, only prefixes are found


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Rules that belong together, in the order in which they have to be given; `why`, what speaks for them.

    agree: how many keys get a name of the target with the same shape.  total: how many keys the rules take.
    unambiguous: False where something else would fit as well: to be looked at before it is used. rules: empty where no renaming can help.
    """

    rules: tuple[str, ...]
    agree: int
    total: int
    unambiguous: bool
    why: str


def suggest(
    source: Mapping[str, Shape], target: Mapping[str, Shape], placed: Mapping[str, str] | None = None
) -> list[Suggestion]:
    """Suggestions for the keys of `source` that have no counterpart in `target`: the unambiguous ones first, then by how much they bring.

    source: all keys as the rules will see them, with their shapes; None for what has none. placed: names of the target that keys have
    already; if not given, those that are equal. All unambiguous suggestions together, in order, are valid rules, give no two keys one name
    and change no key that is placed; so is each of the others alone, given before them.
    """
    placed = {key: key for key in source if key in target} if placed is None else placed
    names = set(placed.values())
    ours = Side({key: source[key] for key in source if key not in placed and len(key) <= LONG}, len(source))
    missing = (key for key in target if key not in names and key not in source and len(key) <= LONG)
    theirs = Side({key: target[key] for key in missing}, len(target))
    if not ours.shapes or not theirs.shapes:
        return []
    found = _found(ours, theirs)
    writer = _Writer(source, target, placed, ours, theirs)
    certain = writer.together(writer.made(found.certain, {}, True))
    kept = {pair.source: pair.target for pair in found.certain}
    either = [made for pairs in _joined(found)[:MOST_WAYS] for made in writer.made(pairs, kept, False)]
    either = [made for made in _ranked(either) if writer.names.allow(made.takes)]
    notes = [Suggestion((), 0, 0, False, note) for note in found.notes]
    return [*(made.suggestion for made in [*certain, *either]), *notes]


def _found(source: Side, target: Side) -> Found:
    """All that can be said of the keys of both sides; keys that are told of are taken from the sides."""
    found = Found()
    whole = Counter(source.shapes.values()) == Counter(target.shapes.values()) and (
        2 * len(source.shapes) >= source.total and 2 * len(target.shapes) >= target.total
    )
    same_spelling(source, target, found)
    moved(source, target, found)
    if max(len(source.shapes), len(target.shapes)) <= MOST:
        Structure(source, target, found, whole).run()
        fused(source, target, found)
    return found


def _joined(found: Found) -> list[list[Pair]]:
    """Ways that could be, those of one origin together."""
    by_origin: dict[tuple[tuple[str, ...], str], list[Pair]] = {}
    for pairs in found.either:
        by_origin.setdefault((pairs[0].origin, pairs[0].why), []).extend(pairs)
    return sorted(by_origin.values(), key=len, reverse=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A suggestion and what its rules make of the keys they take."""

    suggestion: Suggestion
    takes: dict[str, str]


def _ranked(made: Iterable[_Made]) -> list[_Made]:
    return sorted(made, key=lambda one: -one.suggestion.agree)


class _Writer:
    """Makes rules of pairs, and tries them."""

    def __init__(
        self,
        source: Mapping[str, Shape],
        target: Mapping[str, Shape],
        placed: Mapping[str, str],
        ours: Side,
        theirs: Side,
    ) -> None:
        self.source, self.target, self.placed = source, target, placed
        self.ours, self.theirs = ours, theirs
        self.keys = sorted(source)
        self.time = Time()
        self.names = _Names({key: placed.get(key, key) for key in source})

    def made(self, pairs: Sequence[Pair], kept: Mapping[str, str], certain: bool) -> list[_Made]:
        """Pairs as suggestions: rules that overlap or come from the same finding are one."""
        origins = {pair.source: pair for pair in pairs}
        names = {pair.source: pair.target for pair in pairs}
        everything = {**self.placed, **kept}
        stay = [key for key in self.source if key not in names and key not in everything]
        ground = Ground(self.keys, everything, frozenset([*stay, *names.values(), *everything.values()]), self._fits)
        kinds = {pair.source: pair.kind for pair in pairs if pair.kind}
        groups = _grouped_rules(draft_rules(names, self._leaves(pairs), kinds, ground, self.time), origins)
        return [one for group in groups if (one := _suggestion(group, origins, certain)) is not None]

    def together(self, made: Iterable[_Made]) -> list[_Made]:
        """Those that can be given in a row, the ones that bring most first."""
        result = []
        for one in _ranked(made):
            takes = {key: new for key, new in one.takes.items() if not self.names.changed(key)}
            if self.names.allow(takes):
                self.names.change(takes)
                result.append(one)
        return result

    def _fits(self, key: str, name: str) -> bool:
        return name in self.target and self.target[name] == self.source[key]

    def _leaves(self, pairs: Sequence[Pair]) -> dict[str, tuple[int, int]]:
        """Where the leaf begins in both names, for pairs whose leaves are spelled differently."""
        leaves = {}
        for pair in pairs:
            old, new = self.ours.old.get(pair.source), self.theirs.old.get(pair.target)
            if (old is None) == (new is None):
                continue
            spelled = (old or new).key[(old or new).stem :]  # type: ignore[union-attr]
            if old is not None and pair.target.endswith(spelled):
                leaves[pair.source] = (old.stem, len(pair.target) - len(spelled))
            elif new is not None and pair.source.endswith(spelled):
                leaves[pair.source] = (len(pair.source) - len(spelled), new.stem)
        return leaves


class _Names:
    """Which name each key has, and which key each name."""

    def __init__(self, names: dict[str, str]) -> None:
        self.before, self.now = names, dict(names)
        self.owner = {name: key for key, name in names.items()}

    def changed(self, key: str) -> bool:
        return self.now[key] != self.before[key]

    def allow(self, takes: Mapping[str, str]) -> bool:
        """True if new names for some keys leave no two keys with one name."""
        return len(set(takes.values())) == len(takes) and all(
            (owner := self.owner.get(new)) is None or owner in takes for new in takes.values()
        )

    def change(self, takes: Mapping[str, str]) -> None:
        for key in takes:
            if self.owner.get(self.now[key]) == key:
                del self.owner[self.now[key]]
        for key, new in takes.items():
            self.now[key], self.owner[new] = new, key


def _suggestion(group: Sequence[Drafted], origins: Mapping[str, Pair], certain: bool) -> _Made | None:
    """Rules as one suggestion; None if one of them takes what none before it has taken and should have."""
    takes: dict[str, str] = {}
    for one in group:
        if any(key not in takes for key in one.over):
            return None
        for key, new in [*((key, origins[key].target) for key in one.right), *one.other.items()]:
            takes.setdefault(key, new)
    agree = [key for one in group for key in one.right]
    whys = Counter(origins[key].why for key in agree if origins[key].why)
    rules = tuple(one.text for one in group)
    return _Made(
        Suggestion(rules, len(agree), len(takes), certain, "; ".join(why for why, _ in whys.most_common(2))), takes
    )


def _grouped_rules(drafted: Sequence[Drafted], origins: Mapping[str, Pair]) -> list[list[Drafted]]:
    """Rules of one origin, and rules of which one takes keys of another, together and in order."""
    parents = list(range(len(drafted)))

    def top(number: int) -> int:
        while parents[number] != number:
            parents[number] = number = parents[parents[number]]
        return number

    by_origin: dict[tuple[str, ...], int] = {}
    owner = {key: number for number, one in enumerate(drafted) for key in one.right}
    for number, one in enumerate(drafted):
        first = by_origin.setdefault(origins[one.right[0]].origin, number)
        for other in {first, *(owner[key] for key in one.over if key in owner)}:
            parents[top(other)] = top(number)
    result: dict[int, list[Drafted]] = {}
    for number, one in enumerate(drafted):
        result.setdefault(top(number), []).append(one)
    return list(result.values())


def rules_file(suggestions: Iterable[Suggestion]) -> str:
    """The suggestions as a rules file (YAML) that `rename --rules` and `warm-start --rules` read; ambiguous ones as comments."""
    import yaml

    lines = ["# Rules OLD => NEW, tried in this order; the first that matches a key counts."]
    for suggestion in sorted(suggestions, key=lambda one: one.unambiguous):
        lines.append("")
        if suggestion.rules:
            lines.append(f"# {suggestion.agree:,} of {suggestion.total:,} shapes agree")
        lines.append(f"# {printable(suggestion.why)}")
        if not suggestion.unambiguous and suggestion.rules:
            lines.append("# AMBIGUOUS: look before you take the # away")
        for rule in suggestion.rules:
            text = yaml.safe_dump([rule], default_style="'", width=1 << 30, allow_unicode=False).strip()
            lines.append(text if suggestion.unambiguous else f"# {text}")
    return "\n".join(lines) + "\n"
