"""Rules that make one checkpoint's tensors of another's: found by value, then by names and shapes, and proved.

In this order: equal tensors of one name; those that one or several of the other side add up to, whatever the order of
their values; the same with more rows; what lies beside those in its module; the rest by names, first among equal
values, then among equal shapes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from ckptool.analysis.find_rules import FoundRule, FoundRules
from ckptool.checkpoint import Note, TensorEntry
from ckptool.checkpoint.patterns import matcher
from ckptool.errors import CkptoolError, counted
from ckptool.names.rule_files import dropping
from ckptool.names.rules import Translation, parse_rules
from ckptool.names.scope import Scope
from ckptool.names.steps import Step
from ckptool.transforms.suggest import Drafting, escaped, search_pairs
from ckptool.transforms.suggest.fingerprints import Fingerprint, fingerprint
from ckptool.transforms.suggest.groups import Holes, NameGroup, alone, groups, has_holes
from ckptool.transforms.suggest.keys import without_numbers
from ckptool.transforms.suggest.relations import Relation, Ways, is_same, is_tuned
from ckptool.transforms.suggest.structure import fused
from ckptool.transforms.translate.apply import DROP, carry_out, plan_steps

TRIES = 4_000_000  # of a rule on a key, when all rules are applied, and of groups: what goes beyond has no rule
FEW = 12  # keys of a kind that rules are found on: those that differ in their numbers

Entries = Mapping[str, TensorEntry]


@dataclass(slots=True)
class Relations:
    """The relations between two sides. free: keys of each side that have none yet.  alike: old keys whose values others
    have as well, so that only their names tell which is which.  by_name: old keys whose values differ."""

    sides: tuple[Entries, Entries]
    holes: Holes = field(default_factory=Holes)
    found: list[Relation] = field(default_factory=list)
    alike: set[str] = field(default_factory=set)
    by_name: set[str] = field(default_factory=set)
    ways: Ways = field(default_factory=Ways)
    free: tuple[dict[str, None], dict[str, None]] = field(init=False)
    prints: tuple[dict[str, Fingerprint], dict[str, Fingerprint]] = field(init=False)
    modules: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    known: dict[object, Fingerprint] = field(default_factory=dict)  # by view: tied and renamed tensors are read once

    def __post_init__(self) -> None:
        ours, theirs = self.sides
        self.prints = {k: self.print(v) for k, v in ours.items()}, {k: self.print(v) for k, v in theirs.items()}
        self.free = _sayable(ours), _sayable(theirs)

    def print(self, entry: TensorEntry) -> Fingerprint:
        """The fingerprint of a tensor of a side, or of one that rules make."""
        if entry.view not in self.known:
            self.known[entry.view] = fingerprint(entry)
        return self.known[entry.view]

    def search(self) -> None:
        """Finds all of them."""
        for key in [*self.free[0]]:
            if key in self.free[1] and self._values(0, key) == self._values(1, key):
                self._accept(Relation(alone(key), key))
        for splits in (False, True):
            self._join(splits)
        ours, theirs = self._unique(0, self._head), self._unique(1, self._head)
        for old, new in [(ours[head], theirs[head]) for head in ours if head in theirs]:
            self._relate(alone(old), new, False)
        for key in self.free[0]:
            for dots in (".", "._"):
                self.modules.setdefault((dots, _stem(key, dots)), []).append(key)
        for relation in self.found:
            self._beside(relation)
        for of, kept in ((self._values, self.alike), (lambda side, key: self.sides[side][key].shape, self.by_name)):
            for old, new in self._by_names(of, kept is self.alike):
                self._accept(Relation(alone(old), new))
                kept.add(old)
            left = defaultdict[tuple[int, ...], list[str]](list)
            for key in reversed(self.free[1]) if kept is self.alike else ():
                left[self._values(1, key)].append(key)
            for key in [*self.free[0]]:  # any way is right by value
                if names := left.get(self._values(0, key)):
                    self._accept(Relation(alone(key), names.pop()))
                    kept.add(key)

    def _values(self, side: int, key: str) -> tuple[int, ...]:
        """The shape and, as one more size, the values: what the search by names takes for a shape."""
        return *self.sides[side][key].shape, self.prints[side][key].digest

    def _accept(self, relation: Relation) -> None:
        self.found.append(relation)
        for side, keys in zip(self.free, relation.sides, strict=True):
            for key in keys:
                del side[key]

    def _head(self, side: int, key: str) -> Hashable:
        """What a tensor has in common with the same one with more rows."""
        entry = self.sides[side][key]
        return (entry.dtype, entry.shape[1:], self.prints[side][key].head) if len(entry.shape) > 1 else key

    def _unique(self, side: int, of: Callable[[int, str], Hashable]) -> dict[Hashable, str]:
        """The free keys that alone on their side have something, by what they have."""
        counts = Counter(of(side, key) for key in self.free[side])
        return {mark: key for key in self.free[side] if counts[mark := of(side, key)] == 1}

    def _relate(self, group: NameGroup, one: str, splits: bool, first: str = "") -> None:
        """Accepts that some tensors are one, where operations are found that say so."""
        parts, whole = self.sides[splits], self.sides[not splits]
        if way := self.ways.find([[parts[key] for key in each] for each in group.columns], whole[one], first):
            self._accept(Relation(group.ordered(way[1]), one, way[0], splits))

    def _join(self, splits: bool) -> None:
        """Finds tensors that one or several of the other side add up to, where no others do."""
        totals = self._unique(not splits, lambda side, key: self.prints[side][key].total)
        found: dict[str, list[NameGroup]] = {}
        for group in islice(groups(self.free[splits]), TRIES):
            if (one := totals.get(sum(self.prints[splits][key].total for key in group.keys) % 2**64)) is not None:
                found.setdefault(one, []).append(group)
        for one, several in found.items():
            if len({frozenset(group.keys) for group in several}) == 1:
                for group in several:
                    if one in self.free[not splits] and self.free[splits].keys() >= {*group.keys}:
                        self._relate(group, one, splits)

    def _beside(self, relation: Relation) -> None:
        """Finds the same for the other tensors of the same modules: the biases of weights."""
        first = relation.sides[0][0]
        for dots in (".", "._"):
            start = _stem(first, dots)
            for key in self.modules.get((dots, start), ()):
                change = partial(_with_end, dots, key[len(start) :])
                group, one = relation.group.beside(change), change(relation.one)
                olds, news = Relation(group, one, "", relation.splits).sides
                free = self.free[0].keys() >= {*olds} and self.free[1].keys() >= {*news}
                if free and len({*group.keys}) == len(group.keys):
                    self._relate(group, one, relation.splits, relation.chain)

    def _by_names(self, of: Callable[[int, str], tuple[int, ...]], doubtful: bool) -> list[tuple[str, str]]:
        """Pairs of free keys that names tell, among those that have something in common. doubtful: order may, too."""
        ours, theirs = ({key: of(side, key) for key in self.free[side]} for side in (0, 1))
        found = search_pairs(ours, theirs, Counter(ours.values()) == Counter(theirs.values()))
        for relation in () if doubtful else list(fused(found)):
            if all(free.keys() >= {*keys} for free, keys in zip(self.free, relation.sides, strict=True)):
                self._accept(relation)
                self.by_name.update(relation.sides[0])
        pairs = {pair.source: pair.target for pair in found.certain if pair.source in self.free[0]}
        goals = {*pairs.values()}
        for pair in (pair for ways in found.ways * doubtful for pair in ways):
            if pair.source not in pairs and pair.target not in goals:
                pairs[pair.source] = pair.target
                goals.add(pair.target)
        return list(pairs.items())


def _sayable(keys: Iterable[str]) -> dict[str, None]:
    """The keys that a rule can be written for."""
    return dict.fromkeys(key for key in keys if key and not has_holes(key))


def _stem(key: str, dots: str) -> str:
    return key[: 1 + max(key.rfind(dot) for dot in dots)]


def _with_end(dots: str, end: str, key: str) -> str:
    return _stem(key, dots) + end


# Rules ---------------------------------------------------------------------------------------------------------------


def rules_of(pairs: Mapping[str, str], holes: Holes, more: Iterable[str] = ()) -> list[str]:
    """Few rules for pairs of old and new names, in the order in which they are to be tried.

    They are found on a few keys of each kind, and `more`, and may say too much of others: whoever calls it looks.
    """
    kinds: dict[tuple[str, str], list[str]] = {}
    for key, name in pairs.items():
        kinds.setdefault((without_numbers(key), without_numbers(name)), []).append(key)
    sample = (key for keys in kinds.values() for key in [*keys[:FEW], *keys[:: len(keys) // FEW + 1], keys[-1]])
    some = list(dict.fromkeys([*sample, *more]))
    drafts = Drafting({key: pairs[key] for key in some}, sorted(some)).rules()
    covered = {key for draft in drafts for key in draft.right}
    plain = [literal_rule(key, pairs[key], holes) for key in some if key not in covered]
    return [*plain, *(holes.filled(draft.text) for draft in drafts)]


def literal_rule(key: str, name: str, holes: Holes) -> str:
    start = "\\" if key.startswith("re:") else ""  # it would begin like a regular expression
    return holes.filled(f"{start}{escaped(key)} => {escaped(name)}")


# Proof ---------------------------------------------------------------------------------------------------------------


def proved_rules(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> FoundRules:
    """The rules that make one set of weights of another, with the proof: they are applied, and all bytes compared.

    Reads each tensor a few times. The report says neither the names of the files nor where the rules are written.
    """
    ours, theirs = ({k: v for k, v in side.items() if type(k) is str} for side in (old, new))
    relations = Relations((_tensors(ours), _tensors(theirs)))
    relations.search()
    found = list(relations.found)
    found += [Relation(alone(k), k) for k in ours if k in theirs and not any(k in side for side in relations.sides)]
    claims = {
        each.pair(relations.holes)[0]: each.sides[1]
        for each in relations.found
        if each.sides[0][0] not in relations.by_name
    }
    pairs, most = dict(relation.pair(relations.holes) for relation in found), TRIES // max(1, len(ours))
    taken, wrong = {key for relation in found for key in relation.sides[0]}, dict[str, None]()
    drop = _patterns([key for key in ours if key not in taken], taken)
    for spelled in (False, False, False, True):  # rules that say too much, or not all, are made again
        texts = rules_of(pairs, relations.holes, wrong)
        if spelled or len(texts) > most:
            texts = [literal_rule(key, name, relations.holes) for key, name in list(pairs.items())[:most]]
        report = _proof(texts, drop if len(drop) <= most else [], old, theirs, relations)
        other = {*report.missing, *report.by_name}
        again = [key for key, names in claims.items() if not other.isdisjoint(names)]
        if not again:
            break
        wrong |= dict.fromkeys(again)
    return replace(report, notes=tuple(_notes(relations, report, len(texts), len(pairs), most)))


def _notes(relations: Relations, report: FoundRules, rules: int, pairs: int, most: int) -> Iterator[Note]:
    if pairs > rules == most:
        yield Note(
            "spelled-out",
            f"only {rules:,} of {counted(pairs, 'rule')} are here: each is for one key, and applied to all",
        )
    elif 2 * rules > pairs > 2 * FEW:
        yield Note("spelled-out", "most keys have a rule of their own: no rule for several of them was found in time")
    prints, other = relations.prints[1], {*report.missing, *report.by_name}
    made = {prints[name].digest: name for name in prints if name not in other}
    for name in relations.free[1]:
        if (same := made.get(prints[name].digest)) is not None:
            text = f"{name} is {same} under a second name, which no rule makes"
            yield Note("second-name", text)


def _tensors(side: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {key: value for key, value in side.items() if isinstance(value, TensorEntry)}


def _proof(
    texts: Sequence[str], drop: Sequence[str], old: Mapping[Any, Any], new: Mapping[str, Any], relations: Relations
) -> FoundRules:
    """Applies rules as `translate` does, and compares all that they make."""
    steps, items = dict[str, list[Step]](), dict[Any, Any]()
    try:
        rules = tuple(rule for text in texts for rule in parse_rules(text))
        translation = Translation(rules, drop=tuple(map(dropping, drop)))
        scope = Scope({}, {}, {}, old)
        done = carry_out(translation, plan_steps(translation, old, scope), old, scope, DROP)
    except CkptoolError:
        pass
    else:
        items = done.items
        for step in done.steps:
            steps.setdefault(step.rule.text, []).append(step)
    wanted = _tensors(new)
    shaped = {name for name, want in wanted.items() if _is_like(items.get(name), want)}
    equal = {name for name in shaped if is_same(items[name], wanted[name])}
    used = {key for found in steps.values() for step in found for key in step.keys}
    other = [name for name in new if name in shaped - equal]
    moved = [name for name in other if relations.print(items[name]).total == relations.prints[1][name].total]
    told = {name: is_tuned(items[name], wanted[name]) for name in other if name not in moved}
    proved = True in told.values() or any(is_tuned(wanted[name], wanted[name]) for name in equal)
    return FoundRules(
        old="",
        new="",
        rules=tuple(_found_rule(text, steps[text], equal, relations.alike) for text in texts if text in steps),
        total=len(wanted),
        by_value=len(equal),
        by_name=tuple(other),
        reordered=tuple(moved),
        unrelated=tuple(name for name in told if not (proved if told[name] is None else told[name])),
        missing=tuple(name for name in new if name not in (shaped if name in wanted else items)),
        dropped=tuple(key for key in old if type(key) is str and key not in used),
        drop=tuple(drop),
    )


def _is_like(made: Any, want: TensorEntry) -> bool:
    return isinstance(made, TensorEntry) and (made.dtype, made.shape) == (want.dtype, want.shape)


def _found_rule(text: str, steps: Sequence[Step], equal: Collection[str], alike: Collection[str]) -> FoundRule:
    outputs = [name for step in steps for name in step.outputs]
    doubtful = sum(key in alike for step in steps for key in step.keys)
    return FoundRule(text, len(outputs), sum(name in equal for name in outputs), doubtful)


def _patterns(keys: Iterable[str], taken: Collection[str]) -> list[str]:
    """Patterns for keys that are left out: with `*` for their numbers, where nothing else has such a name."""
    patterns = dict[str, None]()
    for key in keys:
        literal = re.sub(r"^re:", "[r]e:", re.sub(r"([*?[])", r"[\1]", key))
        general = re.sub(r"[0-9]+", "*", literal)
        if general not in patterns and literal != general:
            matches = matcher(general)
            general = literal if any(map(matches, taken)) else general
        patterns[general] = None
    return list(patterns)
