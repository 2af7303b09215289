"""Rules that would make more of a checkpoint fit a target: near misses, as what one can pass back to `--rename` or `--rules`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptool.errors import counted, form, printable
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
    certain = writer.written(found.certain, {}, certain=True)
    kept = {pair.source: pair.target for pair in found.certain}
    ways = [one for pairs in _joined(found)[:MOST_WAYS] for one in writer.written(pairs, kept, certain=False)]
    notes = [Suggestion((), 0, 0, False, note) for note in found.notes]
    return [*certain, *_ranked(ways), *notes]


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


def _ranked(suggestions: Iterable[Suggestion]) -> list[Suggestion]:
    return sorted(suggestions, key=lambda one: -one.agree)


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

    def written(self, pairs: Sequence[Pair], kept: Mapping[str, str], certain: bool) -> list[Suggestion]:
        """Pairs as suggestions, those that bring most first: rules that overlap or come from the same finding are one.

        kept: keys that other rules are for, with their names. certain: whether they are to be given all in a row, or each alone.
        """
        origins = {pair.source: pair for pair in pairs}
        names = {pair.source: pair.target for pair in pairs}
        stay = [key for key in self.source if key not in names and key not in kept and key not in self.placed]
        taken = frozenset([*stay, *names.values(), *kept.values(), *self.placed.values()])
        ground = Ground(self.keys, self.placed, kept, taken, self._fits)
        kinds = {pair.source: pair.kind for pair in pairs if pair.kind}
        drafted = draft_rules(names, self._leaves(pairs), kinds, ground, self.time)
        groups = sorted(_grouped_rules(drafted, origins), key=lambda group: -sum(len(one.right) for one in group))
        done: set[str] = set()
        result = []
        for group in groups:
            found = self._suggestion(group, origins, done, certain)
            result += [found] if found is not None else []
            done = done if certain else set()
        return result

    def _suggestion(
        self, group: Sequence[Drafted], origins: Mapping[str, Pair], done: set[str], certain: bool
    ) -> Suggestion | None:
        """Rules as one suggestion, without those that find every key taken already; `done` are keys that are, and gets these.

        None if a rule would take what none before it takes and should, or two keys would get one name.
        """
        rules, takes = [], {}
        for one in group:
            if any(key not in takes and key not in done for key in one.over):
                return None
            makes = {**{key: origins[key].target for key in (*one.right, *one.also)}, **one.other}
            mine = {key: new for key, new in makes.items() if key not in takes and key not in done}
            rules += [one.text] if mine else []
            takes.update(mine)
        agree = [key for key in takes if key in origins]
        if not agree or not self.names.allow(takes):
            return None
        if certain:
            self.names.change(takes)
            done.update(takes)
        whys = Counter(origins[key].why for key in agree)
        why = "; ".join(why for why, _ in whys.most_common(2) if why)
        return Suggestion(tuple(rules), len(agree), len(takes), certain, why)

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
        self.now = names
        self.owner = {name: key for key, name in names.items()}

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
            lines.append(
                f"# {suggestion.agree:,} of {counted(suggestion.total, 'shape')} {form(suggestion.agree, 'agrees', 'agree')}"
            )
        lines.append(f"# {printable(suggestion.why)}")
        if not suggestion.unambiguous and suggestion.rules:
            lines.append("# AMBIGUOUS: look before you take the # away")
        for rule in suggestion.rules:
            text = yaml.safe_dump([rule], default_style="'", width=1 << 30, allow_unicode=False).strip()
            lines.append(text if suggestion.unambiguous else f"# {text}")
    return "\n".join(lines) + "\n"
