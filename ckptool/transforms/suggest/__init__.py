"""Rules that would make more of a checkpoint fit a target, as what one can pass back to `--rename` or `--rules`.

Pairs of keys are found by names and shapes (`pairs`, `structure`), and become few rules, each tried on all keys first.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, takewhile
from typing import Any

from ckptool.analysis.warm_start import Suggestion
from ckptool.errors import UsageError, counted, form, printable
from ckptool.names.rules import parse_rules
from ckptool.transforms.suggest.groups import Holes
from ckptool.transforms.suggest.keys import Shape
from ckptool.transforms.suggest.pairs import Moves, Pair, Search, Side, WorkBudget, accept_same_spelling
from ckptool.transforms.suggest.structure import Structure, fused

LONG = 500  # characters of a key: nothing is suggested for a longer one
MOST_WAYS = 40  # ambiguous findings that are shown
MOST = 10_000  # keys of a side without a counterpart: of more, only prefixes are found
DEEP = 32  # parts of a key beyond which no pattern is looked for
COMPILING = 400  # the cost of reading one rule, in keys that it is tried on
_DIGITS = re.compile(r"([0-9]+)")
_VARIABLES = "nmkjilpqrs"

EMPTY: Mapping[str, Any] = {}

Numbered = dict[int, int]  # number of the new key -> the number of the old one that it is
Renaming = Callable[[str], str | None]


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
    search = search_pairs(ours, theirs, whole)
    writer = _Writer(search, source, target, placed)
    certain = writer.written(search.certain, {}, certain=True)
    kept = {pair.source: pair.target for pair in search.certain}
    ways = [one for pairs in _joined(search)[:MOST_WAYS] for one in writer.written(pairs, kept, certain=False)]
    return [*certain, *sorted(ways, key=lambda one: -one.agree), *_fused(search, source, placed)]


def _fused(search: Search, source: Mapping[str, Shape], placed: Mapping[str, str]) -> Iterator[Suggestion]:
    """Rules that fuse queries, keys and values, or split them."""
    holes, relations = Holes(), list(fused(search))
    pairs = dict(relation.pair(holes) for relation in relations)
    others = source.keys() - {key for relation in relations for key in relation.sides[0]}
    why = "the shapes of queries, keys and values fit one after the other, and heads in turns would, too"
    for draft in Drafting(pairs, sorted([*pairs, *others]), placed, others, budget=search.budget).rules():
        yield Suggestion((holes.filled(draft.text),), len(draft.right), len(draft.right), False, why)


def search_pairs(ours: Mapping[str, Shape], theirs: Mapping[str, Shape], whole: bool) -> Search:
    """The search for pairs by names and shapes (or anything that says that two can be the same), done.

    whole: both are most of their sides, so that a shape that only one of each has says something.
    """
    search = Search(Side(dict(ours)), Side(dict(theirs)))
    accept_same_spelling(search)
    Moves(search).run()
    if max(len(search.source.shapes), len(search.target.shapes)) <= MOST:
        Structure(search, whole).run()
    return search


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


# Rules -------------------------------------------------------------------------------------------------------------


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
        """Sorts rules by the keys that they bring, then by how few others they take, then by how few variables they
        have."""
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
    placed: Mapping[str, str] = field(default_factory=dict)
    reserved: Collection[str] = ()
    taken: frozenset[str] = frozenset()
    fits: Callable[[str, str], bool] = lambda key, name: False
    budget: WorkBudget = field(default_factory=WorkBudget)
    done: set[str] = field(default_factory=set)

    def rules(
        self, leaves: Mapping[str, tuple[int, int]] = EMPTY, kinds: Mapping[str, tuple[str, ...]] = EMPTY
    ) -> list[Draft]:
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
        """A rule as a function; None for an invalid text."""
        if (plain := _plain(text)) is not None:
            return plain
        self.budget.left -= COMPILING
        try:
            (rule,) = parse_rules(text)
        except UsageError:  # a name with what no rule can say
            return None
        pattern, new = rule.old[0].pattern, rule.new[0]
        return lambda key: new.fill(match.groupdict()) if (match := pattern.fullmatch(key)) else None


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
            ends = [f"*.{escaped(key[leaf[0] :])}", f"*.{escaped(name[leaf[1] :])}"]
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
    left = [variables.get(at // 2, piece) if at % 2 else escaped(piece) for at, piece in enumerate(ours)]
    right = [
        variables.get(numbered.get(at // 2, -1), piece) if at % 2 else escaped(piece) for at, piece in enumerate(theirs)
    ]
    return "".join(left), "".join(right)


def escaped(text: str) -> str:
    """A literal text in a rule: with a backslash before what would mean something."""
    return re.sub(r"([\\*{,]|\s(?=:\s))", r"\\\1", text).replace("=>", "=\\>")
