"""Rules that make one checkpoint's tensors of another's: found by value, then by names and shapes, and proved.

In this order: tensors that one or several of the other side add up to, whatever the order of their values; the same
with more rows; what lies beside those in its module; the rest by names, first among equal values, then among equal
shapes.
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
from ckptool.names.steps import Step
from ckptool.transforms.suggest import Writing
from ckptool.transforms.suggest.families import VARIABLES, Numbers, Trait, escaped, families, fitted
from ckptool.transforms.suggest.groups import NameGroup, fused, groups, is_sayable
from ckptool.transforms.suggest.links import Link, Search
from ckptool.transforms.suggest.relations import Fingerprint, Ways, applied, fingerprint, is_same, is_tuned
from ckptool.transforms.translate.apply import DROP, plan_steps

TRIES = 4_000_000  # of a rule on a key, when all rules are applied, and of groups: what goes beyond has no rule
FEW = 12  # rules, of which nobody asks why they are so many

Entries = Mapping[str, TensorEntry]


@dataclass(slots=True)
class ValueSearch:
    """The links between two sides. free: keys of each side that have none yet.  alike: old keys whose values others
    have as well, so that only their names tell which is which.  by_name: old keys whose values differ."""

    sides: tuple[Entries, Entries]
    links: list[Link] = field(default_factory=list)
    alike: set[str] = field(default_factory=set)
    by_name: set[str] = field(default_factory=set)
    ways: Ways = field(default_factory=Ways)
    joined: list[tuple[NameGroup, dict[Numbers, str], str, bool]] = field(default_factory=list)
    free: tuple[dict[str, None], dict[str, None]] = field(init=False)
    prints: tuple[dict[str, Fingerprint], dict[str, Fingerprint]] = field(init=False)
    known: dict[object, Fingerprint] = field(default_factory=dict)  # by view: tied and renamed tensors are read once

    def __post_init__(self) -> None:
        ours, theirs = self.sides
        self.prints = {k: self.print(v) for k, v in ours.items()}, {k: self.print(v) for k, v in theirs.items()}
        self.free = dict.fromkeys(filter(is_sayable, ours)), dict.fromkeys(filter(is_sayable, theirs))

    def print(self, entry: TensorEntry) -> Fingerprint:
        """The fingerprint of a tensor of a side, or of one that rules make."""
        if entry.view not in self.known:
            self.known[entry.view] = fingerprint(entry)
        return self.known[entry.view]

    def run(self) -> None:
        """Finds all of them."""
        for vary in range(len(VARIABLES), -1, -1):
            self._join(False, vary)
            self._join(True, vary)
        ours, theirs = self._unique(0, self._head), self._unique(1, self._head)
        for head in [head for head in ours if head in theirs]:
            self._relate(NameGroup(ours[head], (), {(): ((ours[head],),)}), {(): theirs[head]}, False)
        for group, wholes, chain, splits in self.joined:
            self._beside(group, wholes, chain, splits)
        for of, kept in ((self._values, self.alike), (lambda side, key: self.sides[side][key].shape, self.by_name)):
            traits: list[dict[str, Trait]] = [{key: of(side, key) for key in self.free[side]} for side in (0, 1)]
            search = Search((traits[0], traits[1]))
            search.run()
            others = list(fused(*search.free)) if kept is self.by_name else []
            taken = (set[str](), set[str]())
            for link in (*sorted(search.links, key=lambda each: not each.certain), *others):
                olds, news = link.goals.keys(), {name for goal in link.goals.values() for name in goal[1:]}
                if (link.certain or kept is self.alike) and taken[0].isdisjoint(olds) and taken[1].isdisjoint(news):
                    taken[0].update(olds)
                    taken[1].update(news)
                    kept.update(olds)
                    self._accept(link)

    def _values(self, side: int, key: str) -> tuple[int, ...]:
        """The shape and, as one more size, the values: what the search by names takes for a shape."""
        return *self.sides[side][key].shape, self.prints[side][key].digest

    def _accept(self, link: Link) -> None:
        self.links.append(link)
        for key, goal in link.goals.items():
            self.free[0].pop(key, None)
            for name in goal[1:]:
                self.free[1].pop(name, None)

    def _head(self, side: int, key: str) -> Hashable:
        """What a tensor has in common with the same one with more rows."""
        entry = self.sides[side][key]
        return (entry.dtype, entry.shape[1:], self.prints[side][key].head) if len(entry.shape) > 1 else key

    def _unique(self, side: int, of: Callable[[int, str], Hashable]) -> dict[Hashable, str]:
        """The free keys that alone on their side have something, by what they have."""
        counts = Counter(of(side, key) for key in self.free[side])
        return {mark: key for key in self.free[side] if counts[mark := of(side, key)] == 1}

    def _relate(self, group: NameGroup, wholes: Mapping[Numbers, str], splits: bool, first: str = "") -> None:
        """Accepts that groups of tensors are one tensor each, where operations are found that say so.

        wholes: those, for some of the members.  first: operations that are tried before others.
        """
        parts, whole = self.sides[splits], self.sides[not splits]

        def tensors(at: Numbers) -> list[list[TensorEntry]]:
            return [[parts[key] for key in column] for column in group.members[at]]

        ways = (self.ways.find(tensors(at), whole[name], first) for at, name in wholes.items())
        chain, order = next(filter(None, ways), ("", ()))
        group = group.ordered(order) if order else group
        made = {at: applied(chain, tensors(at)) for at in wholes} if order else {}
        found = {at: wholes[at] for at, one in made.items() if one is not None and is_same(one, whole[wholes[at]])}
        names = families(dict.fromkeys(found.values()), len(VARIABLES))
        if len(names) != 1:
            return
        numbers = {key: each for each, key in names[0].keys.items()}
        goals = [numbers[name] for name in found.values()]
        fitting = fitted([*found], goals)
        if fitting is not None:
            group, found = group.among(found, "".join(fitting))
            fitting = fitted([*found], goals) or fitting
            self._accept(group.link(found, names[0].template(fitting), chain, splits, ""))
            self.joined.append((group, found, chain, splits))
            for key in [key for at in found for key in group.at(at)]:
                self.free[splits].pop(key, None)

    def _join(self, splits: bool, vary: int) -> None:
        """Finds tensors that one or several of the other side add up to."""
        totals = self._unique(not splits, lambda side, key: self.prints[side][key].total)
        claims: dict[str, set[frozenset[str]]] = defaultdict(set)
        hopeful: list[tuple[NameGroup, dict[Numbers, str]]] = []
        for group in islice(groups(self.free[splits], vary), TRIES):
            sums = {at: sum(self.prints[splits][key].total for key in group.at(at)) for at in group.members}
            hits = {at: totals[total % 2**64] for at, total in sums.items() if total % 2**64 in totals}
            for at, one in hits.items():
                claims[one].add(frozenset(group.at(at)))
            if 2 * len(hits) > len(group.members) and len({*hits.values()}) == len(hits):
                hopeful.append((group, hits))
        for group, hits in hopeful:
            sure = {at: one for at, one in hits.items() if len(claims[one]) == 1}
            self._relate(group, self._open(group, sure, splits), splits)

    def _open(self, group: NameGroup, wholes: Mapping[Numbers, str], splits: bool) -> dict[Numbers, str]:
        """Those of the members and wholes that are free."""
        parts, whole = self.free[splits].keys(), self.free[not splits].keys()
        return {at: one for at, one in wholes.items() if one in whole and parts >= {*group.at(at)}}

    def _beside(self, group: NameGroup, wholes: Mapping[Numbers, str], chain: str, splits: bool) -> None:
        """Finds the same for the other tensors of the same modules: the biases of weights."""
        for leaf in (re.compile(r"[^.]*\Z"), re.compile(r"[^._]*\Z")):
            start = leaf.sub("", group.keys[0])
            for key in [key for key in self.free[splits] if leaf.sub("", key, 1) == start]:
                change = partial(leaf.sub, key[len(start) :].replace("\\", r"\\"), count=1)
                other = group.beside(change)
                goals = self._open(other, {at: change(name) for at, name in wholes.items()}, splits)
                if len({*other.keys}) == len(other.keys) and len({*goals.values()}) == len(goals):
                    self._relate(other, goals, splits, chain)


# Proof ---------------------------------------------------------------------------------------------------------------


def proved_rules(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> FoundRules:
    """The rules that make one set of weights of another, with the proof: they are applied, and all bytes compared.

    Reads each tensor a few times. The report says neither the names of the files nor where the rules are written.
    """
    ours, theirs = ({k: v for k, v in side.items() if type(k) is str} for side in (old, new))
    search = ValueSearch((_tensors(ours), _tensors(theirs)))
    search.run()
    links, most = search.links, TRIES // max(1, len(ours))
    goals = {key: goal for link in links for key, goal in link.goals.items()}
    written = Writing(dict.fromkeys(ours), {}, {}).rules(links, ours.keys() - goals.keys())
    covered = {key for rule in written for key in rule.takes}
    others = {key: goal[1] for key, goal in goals.items() if key not in covered and not goal[0]}
    texts = [f"{escaped(key)} => {escaped(name)}" for key, name in others.items()]
    texts = [*(f"\\{text}" if text.startswith("re:") else text for text in texts), *(rule.text for rule in written)]
    covered |= others.keys()
    drop = _patterns([key for key in ours if key not in covered], covered)
    report = _proof(texts[:most], drop if len(drop) <= most else [], old, theirs, search)
    return replace(report, notes=tuple(_notes(search, report, len(texts), len(goals), most)))


def _notes(search: ValueSearch, report: FoundRules, rules: int, keys: int, most: int) -> Iterator[Note]:
    if rules > most:
        what = f"only {most:,} of {counted(rules, 'rule')} are here: each is for one key, and applied to all"
        yield Note("spelled-out", what)
    elif 2 * rules > keys > 2 * FEW:
        yield Note("spelled-out", "most keys have a rule of their own: no rule for several of them was found in time")
    prints, other = search.prints[1], {*report.missing, *report.by_name}
    made = {prints[name].digest: name for name in prints if name not in other}
    for name in search.free[1]:
        if (same := made.get(prints[name].digest)) is not None:
            tied = search.sides[1][name].view == search.sides[1][same].view
            what = f"is {same} under a second name" if tied else f"has the values of {same}"
            yield Note("second-name" if tied else "same-values", f"{name} {what}; no rule makes it")


def _tensors(side: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {key: value for key, value in side.items() if isinstance(value, TensorEntry)}


def _proof(
    texts: Sequence[str], drop: Sequence[str], old: Mapping[Any, Any], new: Mapping[str, Any], search: ValueSearch
) -> FoundRules:
    """Applies rules as `translate` does, and compares all that they make."""
    steps, items = dict[str, list[Step]](), dict[Any, Any]()
    try:
        rules = tuple(rule for text in texts for rule in parse_rules(text))
        translation = Translation(rules, drop=tuple(map(dropping, drop)))
        done = plan_steps(translation, old)
        done.carry_out(DROP)
    except CkptoolError:
        pass
    else:
        items = done.items
        for step in done.steps:
            steps.setdefault(step.rule.text, []).append(step)
    wanted = _tensors(new)
    made = _tensors(items)
    shaped = {k for k, v in wanted.items() if k in made and (made[k].dtype, made[k].shape) == (v.dtype, v.shape)}
    equal = {name for name in shaped if is_same(items[name], wanted[name])}
    used = {key for found in steps.values() for step in found for key in step.keys}
    other = [name for name in new if name in shaped - equal]
    moved = [name for name in other if search.print(items[name]).total == search.prints[1][name].total]
    told = {name: is_tuned(items[name], wanted[name]) for name in other if name not in moved}
    proved = True in told.values() or any(is_tuned(wanted[name], wanted[name]) for name in equal)
    return FoundRules(
        old="",
        new="",
        rules=tuple(_found_rule(text, steps[text], equal, search.alike) for text in texts if text in steps),
        total=len(wanted),
        by_value=len(equal),
        by_name=tuple(other),
        reordered=tuple(moved),
        unrelated=tuple(name for name in told if not (proved if told[name] is None else told[name])),
        missing=tuple(name for name in new if name not in (shaped if name in wanted else items)),
        dropped=tuple(key for key in old if type(key) is str and key not in used),
        drop=tuple(drop),
    )


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
