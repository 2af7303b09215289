"""Rules that would make more of a checkpoint fit a target, as what one can pass back to `--rename` or `--rules`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ckptool.errors import counted, form, printable
from ckptool.reports.warm_start import Suggestion
from ckptool.transforms.suggest.drafts import Draft, Drafting
from ckptool.transforms.suggest.names import Shape
from ckptool.transforms.suggest.pairs import Moves, Pair, Search, Side, accept_same_spelling
from ckptool.transforms.suggest.structure import Structure, note_fused

LONG = 500  # characters of a key: nothing is suggested for a longer one
MOST_WAYS = 40  # ambiguous findings that are shown
MOST = 10_000  # keys of a side without a counterpart: of more, only prefixes are found


def suggest(
    source: Mapping[str, Shape], target: Mapping[str, Shape], placed: Mapping[str, str] | None = None
) -> list[Suggestion]:
    """Suggestions for keys of `source` without a counterpart in `target`: unambiguous ones first, then by gain.

    source: all keys as the rules will see them, with their shapes; None for what has none.  placed: names of the target
    that keys have already; by default those that are equal. All unambiguous suggestions together, in order, are valid
    rules, give no two keys one name and change no key that is placed; so is each of the others alone, given before
    them.
    """
    placed = {key: key for key in source if key in target} if placed is None else placed
    names = set(placed.values())
    ours = {key: source[key] for key in source if key not in placed and len(key) <= LONG}
    theirs = {key: target[key] for key in target if key not in names and key not in source and len(key) <= LONG}
    if not ours or not theirs:
        return []
    whole = Counter(ours.values()) == Counter(theirs.values()) and (
        2 * len(ours) >= len(source) and 2 * len(theirs) >= len(target)
    )
    search = Search(Side(ours), Side(theirs))
    accept_same_spelling(search)
    Moves(search).run()
    if max(len(search.source.shapes), len(search.target.shapes)) <= MOST:
        Structure(search, whole).run()
        note_fused(search)
    writer = _Writer(search, source, target, placed)
    certain = writer.written(search.certain, {}, certain=True)
    kept = {pair.source: pair.target for pair in search.certain}
    ways = [one for pairs in _joined(search)[:MOST_WAYS] for one in writer.written(pairs, kept, certain=False)]
    notes = [Suggestion((), 0, 0, False, note) for note in search.notes]
    return [*certain, *sorted(ways, key=lambda one: -one.agree), *notes]


def _joined(search: Search) -> list[list[Pair]]:
    """Ways that could be, those of one origin together."""
    by_origin: dict[tuple[tuple[str, ...], str], list[Pair]] = {}
    for pairs in search.ways:
        by_origin.setdefault((pairs[0].origin, pairs[0].why), []).extend(pairs)
    return sorted(by_origin.values(), key=len, reverse=True)


class _Writer:
    """Makes suggestions of pairs. `names`: the name that each key has so far; `owners`: the key of each name."""

    def __init__(
        self, search: Search, source: Mapping[str, Shape], target: Mapping[str, Shape], placed: Mapping[str, str]
    ) -> None:
        self.search, self.source, self.target, self.placed = search, source, target, placed
        self.keys = sorted(source)
        self.names = {key: placed.get(key, key) for key in source}
        self.owners = {name: key for key, name in self.names.items()}

    def written(self, pairs: Sequence[Pair], kept: Mapping[str, str], certain: bool) -> list[Suggestion]:
        """Pairs as suggestions, the largest first: rules that overlap or come from the same finding are one.

        kept: keys that other rules are for, with their names.  certain: True to give all in a row, else each alone.
        """
        by_key = {pair.source: pair for pair in pairs}
        names = {pair.source: pair.target for pair in pairs}
        stay = [key for key in self.source if key not in names and key not in kept and key not in self.placed]
        taken = frozenset([*stay, *names.values(), *kept.values(), *self.placed.values()])
        drafting = Drafting(names, self.keys, self.placed, kept, taken, self._fits, self.search.budget)
        leaves = {pair.source: leaf for pair in pairs if (leaf := self._leaf(pair)) is not None}
        drafts = drafting.rules(leaves, {pair.source: pair.kind for pair in pairs if pair.kind})
        groups = sorted(_grouped(drafts, by_key), key=lambda group: -sum(len(draft.right) for draft in group))
        done: set[str] = set()
        result = []
        for group in groups:
            one = self._suggestion(group, by_key, done if certain else set(), certain)
            result += [one] if one is not None else []
        return result

    def _suggestion(
        self, group: Sequence[Draft], by_key: Mapping[str, Pair], done: set[str], certain: bool
    ) -> Suggestion | None:
        """Rules as one suggestion, without those that find every key taken; `done` are keys that are, and gets these.

        None if a rule would take what none before it takes and should, or two keys would get one name.
        """
        rules, takes = list[str](), dict[str, str]()
        for draft in group:
            if any(key not in takes and key not in done for key in draft.over):
                return None
            mine = {key: new for key, new in draft.takes.items() if key not in takes and key not in done}
            rules += [draft.text] if mine else []
            takes.update(mine)
        agree = [key for key in takes if key in by_key]
        owners = [self.owners.get(new) for new in takes.values()]
        clash = len(set(takes.values())) < len(takes) or any(key is not None and key not in takes for key in owners)
        if not agree or clash:
            return None
        if certain:
            self._rename(takes)
            done.update(takes)
        whys = Counter(by_key[key].why for key in agree)
        why = "; ".join(why for why, _ in whys.most_common(2) if why)
        return Suggestion(tuple(rules), len(agree), len(takes), certain, why)

    def _rename(self, takes: Mapping[str, str]) -> None:
        for key in takes:
            if self.owners.get(self.names[key]) == key:
                del self.owners[self.names[key]]
        self.names.update(takes)
        self.owners.update((new, key) for key, new in takes.items())

    def _fits(self, key: str, name: str) -> bool:
        return name in self.target and self.target[name] == self.source[key]

    def _leaf(self, pair: Pair) -> tuple[int, int] | None:
        """The places where the leaf begins in both names, if one of them has an older spelling."""
        old, new = self.search.source.old.get(pair.source), self.search.target.old.get(pair.target)
        known = old or new
        if known is None or (old and new):
            return None
        leaf, other = known.key[known.stem :], pair.target if old else pair.source
        if not other.endswith(leaf):
            return None
        places = known.stem, len(other) - len(leaf)
        return places if old else places[::-1]


def _grouped(drafts: Sequence[Draft], by_key: Mapping[str, Pair]) -> list[list[Draft]]:
    """Rules of one origin, and rules of which one takes keys of another, together and in order."""
    parents = list(range(len(drafts)))

    def top(number: int) -> int:
        while parents[number] != number:
            parents[number] = number = parents[parents[number]]
        return number

    by_origin: dict[tuple[str, ...], int] = {}
    owner = {key: number for number, draft in enumerate(drafts) for key in draft.right}
    for number, draft in enumerate(drafts):
        first = by_origin.setdefault(by_key[draft.right[0]].origin, number)
        for other in {first, *(owner[key] for key in draft.over if key in owner)}:
            parents[top(other)] = top(number)
    groups: dict[int, list[Draft]] = {}
    for number, draft in enumerate(drafts):
        groups.setdefault(top(number), []).append(draft)
    return list(groups.values())


def rules_file(suggestions: Iterable[Suggestion]) -> str:
    """The suggestions as a YAML file for `rename --rules` and `warm-start --rules`; ambiguous ones as comments."""
    import yaml

    lines = ["# Rules OLD => NEW, tried in this order; the first that matches a key counts."]
    for suggestion in sorted(suggestions, key=lambda one: one.unambiguous):
        lines.append("")
        if suggestion.rules:
            total, agree = counted(suggestion.total, "shape"), form(suggestion.agree, "agrees", "agree")
            lines.append(f"# {suggestion.agree:,} of {total} {agree}")
        lines.append(f"# {printable(suggestion.why)}")
        if not suggestion.unambiguous and suggestion.rules:
            lines.append("# AMBIGUOUS: look before you take the # away")
        for rule in suggestion.rules:
            text = yaml.safe_dump([rule], default_style="'", width=1 << 30, allow_unicode=False).strip()
            lines.append(text if suggestion.unambiguous else f"# {text}")
    return "\n".join(lines) + "\n"
