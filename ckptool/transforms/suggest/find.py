"""Rules that make one checkpoint's tensors of another's: found by value, then by names and shapes, and proved.

In this order: equal tensors of which there is one on each side; the same values in another order; tensors put together
or cut; what lies beside those in its module; the rest by names, first among equal values, then among equal shapes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptool.checkpoint import Note, TensorEntry
from ckptool.checkpoint.patterns import matcher
from ckptool.errors import CkptoolError, counted, printable
from ckptool.reports.find_rules import FoundRule, FoundRules
from ckptool.transforms.suggest import Drafting, escaped, fused_relations, search_pairs
from ckptool.transforms.suggest.fingerprints import Fingerprint, Probes, fingerprint
from ckptool.transforms.suggest.keys import without_numbers
from ckptool.transforms.suggest.pairs import WorkBudget
from ckptool.transforms.suggest.relations import Entries, Holes, Relation, Ways, as_one_name, has_holes, is_same
from ckptool.transforms.translate.apply import DROP, Step, carry_out, plan_steps
from ckptool.transforms.translate.scope import Scope
from ckptool.transforms.translate.translation import DropPattern, Translation, parse_translation_rule

TRIES = 4_000_000  # of a rule on a key, when all rules are applied: what goes beyond has no rule
FEW = 12  # keys of a kind that rules are found on: those that differ in their numbers


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

    def __post_init__(self) -> None:
        made: dict[object, Fingerprint] = {}  # tied tensors are read once

        def known(entry: TensorEntry) -> Fingerprint:
            if entry.view not in made:
                made[entry.view] = fingerprint(entry)
            return made[entry.view]

        ours, theirs = self.sides
        self.prints = {k: known(v) for k, v in ours.items()}, {k: known(v) for k, v in theirs.items()}
        self.free = _sayable(ours), _sayable(theirs)

    def search(self) -> None:
        """Finds all of them."""
        for key in [
            key for key in self.free[0] if key in self.free[1] and self._values(0, key) == self._values(1, key)
        ]:
            self._accept(Relation((key,), key, key, ""))
        for old, new in self._unique(self._values):
            self._accept(Relation((old,), new, old, ""))
        for old, new in self._unique(lambda side, key: (self.sides[side][key].dtype, self.prints[side][key].total)):
            self._relate([old], new, False)
        for splits in (False, True):
            self._join(splits)
        for relation in self.found:
            self._beside(relation)
        for of, kept in ((self._values, self.alike), (lambda side, key: self.sides[side][key].shape, self.by_name)):
            for old, new in self._by_names(of, kept is self.alike):
                self._accept(Relation((old,), new, old, ""))
                kept.add(old)
            if kept is self.alike:
                self._in_order()

    def _in_order(self) -> None:
        """Pairs what is left of equal tensors as they come: any way is right by value."""
        left: dict[tuple[int, ...], list[str]] = {}
        for key in self.free[1]:
            left.setdefault(self._values(1, key), []).append(key)
        left = {values: names[::-1] for values, names in left.items()}
        for key in list(self.free[0]):
            if names := left.get(self._values(0, key)):
                self._accept(Relation((key,), names.pop(), key, ""))
                self.alike.add(key)

    def _values(self, side: int, key: str) -> tuple[int, ...]:
        """The shape and, as one more size, the values: what the search by names takes for a shape."""
        return *self.sides[side][key].shape, self.prints[side][key].digest

    def _accept(self, relation: Relation) -> None:
        self.found.append(relation)
        for side, keys in zip(self.free, relation.sides, strict=True):
            for key in keys:
                del side[key]

    def _unique(self, of: Callable[[int, str], Hashable]) -> list[tuple[str, str]]:
        """The free keys that alone on their side have something, and have it in common."""
        keys = [{of(side, key): key for key in self.free[side]} for side in (0, 1)]
        counts = [Counter(of(side, key) for key in self.free[side]) for side in (0, 1)]
        return [
            (key, keys[1][mark]) for mark, key in keys[0].items() if counts[0][mark] == 1 and counts[1].get(mark) == 1
        ]

    def _relate(self, many: Sequence[str], one: str, splits: bool, first: str = "") -> bool:
        """Accepts that some tensors are one, where operations are found that say so."""
        parts, whole = self.sides[splits], self.sides[not splits]
        for names, stacked in as_one_name(many, self.holes):
            chain = self.ways.find([parts[key] for key in many], whole[one], stacked, first)
            if chain is not None:
                self._accept(Relation((*many,), one, names, chain, splits))
                return True
        return False

    def _join(self, splits: bool) -> None:
        """Finds tensors of which several of the other side are the parts."""
        parts, wholes = splits, not splits
        prints, sums = Probes((key, self.prints[parts][key]) for key in self.free[parts]), self.prints[parts]
        for one in list(self.free[wholes]):
            entry = self.sides[wholes][one]
            for found in prints.parts_of(entry) if len(entry.shape) > 1 else ():
                many = [key for key in found if key in self.free[parts]]
                total = sum(sums[key].total for key in many) % 2**64
                if len(many) > 1 and total == self.prints[wholes][one].total and self._relate(many, one, splits):
                    break
                padded = (key for key in many if self.sides[parts][key].shape[1:] == entry.shape[1:])
                if any(self._relate([one if splits else key], key if splits else one, False) for key in padded):
                    break

    def _beside(self, relation: Relation) -> None:
        """Finds the same for the other tensors of the same modules: the biases of weights."""
        first = relation.sides[0][0]
        for marks in (".", "._"):
            start = _stem(first, marks)
            for key in self._modules(marks).get(start, ()):
                olds, news = ([_stem(name, marks) + key[len(start) :] for name in side] for side in relation.sides)
                if not (self.free[0].keys() >= {*olds} and self.free[1].keys() >= {*news}):
                    continue
                many, one = (news, olds[0]) if relation.splits else (olds, news[0])
                if len({*olds}) == len(olds) and len({*news}) == len(news):
                    self._relate(many, one, relation.splits, relation.chain)

    def _modules(self, marks: str) -> Mapping[str, list[str]]:
        if marks not in self._stems:
            for key in self.free[0]:
                self._stems.setdefault(marks, {}).setdefault(_stem(key, marks), []).append(key)
        return self._stems.get(marks, {})

    _stems: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def _by_names(self, of: Callable[[int, str], tuple[int, ...]], doubtful: bool) -> list[tuple[str, str]]:
        """Pairs of free keys that names tell, among those that have something in common. doubtful: order may, too."""
        ours, theirs = ({key: of(side, key) for key in self.free[side]} for side in (0, 1))
        found = search_pairs(ours, theirs, Counter(ours.values()) == Counter(theirs.values()))
        for relation in () if doubtful else list(fused_relations(found, self.holes)):
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


def _stem(key: str, marks: str) -> str:
    return key[: 1 + max(key.rfind(mark) for mark in marks)]


# Rules ---------------------------------------------------------------------------------------------------------------


def rules_of(pairs: Mapping[str, str], holes: Holes) -> list[str]:
    """Few rules for pairs of old and new names, in the order in which they are to be tried.

    They are found on a few keys of each kind, and may say too much of others: whoever calls it looks.
    """
    kinds: dict[tuple[str, str], list[str]] = {}
    for key, name in pairs.items():
        kinds.setdefault((without_numbers(key), without_numbers(name)), []).append(key)
    some = [
        key for keys in kinds.values() for key in dict.fromkeys([*keys[:FEW], *keys[:: len(keys) // FEW + 1], keys[-1]])
    ]
    drafting = Drafting(
        {key: pairs[key] for key in some}, sorted(some), {}, (), frozenset(), lambda key, name: False, WorkBudget()
    )
    drafts = drafting.rules({}, {})
    covered = {key for draft in drafts for key in draft.right}
    plain = [literal_rule(key, pairs[key], holes) for key in some if key not in covered]
    return [*plain, *(holes.filled(draft.text) for draft in drafts)]


def literal_rule(key: str, name: str, holes: Holes) -> str:
    start = "\\" if key.startswith("re:") else ""  # it would begin like a regular expression
    return holes.filled(f"{start}{escaped(key)} => {escaped(name)}")


# Proof ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Proof:
    """What rules make. steps: each of its rule.  equal, alike: names of the other side's tensors that have its bytes,
    or its type and shape only.  names: all."""

    steps: tuple[Step, ...] = ()
    equal: frozenset[str] = frozenset()
    shaped: frozenset[str] = frozenset()
    names: frozenset[Any] = frozenset()


def proved_rules(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> FoundRules:
    """The rules that make one set of weights of another, with the proof: they are applied, and all bytes compared.

    Reads each tensor a few times. The report says neither the names of the files nor where the rules are written.
    """
    ours, theirs = ({k: v for k, v in side.items() if type(k) is str} for side in (old, new))
    relations = Relations((_tensors(ours), _tensors(theirs)))
    relations.search()
    others = (key for key in ours if key in theirs and not any(key in side for side in relations.sides))
    found = [*relations.found, *(Relation((key,), key, key, "") for key in others)]
    claimed = {name for each in relations.found if each.sides[0][0] not in relations.by_name for name in each.sides[1]}
    pairs, most = dict(relation.pair(relations.holes) for relation in found), TRIES // max(1, len(ours))
    texts, taken = rules_of(pairs, relations.holes), {key for relation in found for key in relation.sides[0]}
    drop = _patterns([key for key in ours if key not in taken], taken)
    proof = _applied(texts, drop, old, theirs) if len(texts) <= most else _Proof()
    if not claimed <= proof.equal:  # rules that say too much, or not all
        texts = [literal_rule(key, name, relations.holes) for key, name in list(pairs.items())[:most]]
        proof = _applied(texts, drop if len(drop) <= most else [], old, theirs)
    used = {key for step in proof.steps for key in step.keys}
    return FoundRules(
        "",
        "",
        tuple(_found_rules(texts, proof, relations.alike)),
        len(_tensors(theirs)),
        len(proof.equal),
        tuple(key for key in theirs if key in proof.shaped),
        tuple(
            key
            for key, each in theirs.items()
            if key not in (proof.equal | proof.shaped) and (isinstance(each, TensorEntry) or key not in proof.names)
        ),
        tuple(key for key in ours if key not in used),
        tuple(drop),
        tuple(_notes(relations, proof, len(texts), len(pairs), most)),
    )


def _notes(relations: Relations, proof: _Proof, rules: int, pairs: int, most: int) -> Iterator[Note]:
    if pairs > rules == most:
        yield Note(
            "spelled-out",
            f"only {rules:,} of {counted(pairs, 'rule')} are here: each is for one key, and applied to all",
        )
    elif 2 * rules > pairs > 2 * FEW:
        yield Note("spelled-out", "most keys have a rule of their own: no rule for several of them was found in time")
    made = {relations.prints[1][name].digest: name for name in proof.equal}
    for name in relations.free[1]:
        if (same := made.get(relations.prints[1][name].digest)) is not None:
            text = f"{printable(name)} is {printable(same)} under a second name, which no rule makes"
            yield Note("second-name", text)


def _tensors(side: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {key: value for key, value in side.items() if isinstance(value, TensorEntry)}


def _applied(texts: Sequence[str], drop: Sequence[str], old: Mapping[Any, Any], new: Mapping[str, Any]) -> _Proof:
    """Applies rules as `translate` does, and compares all that they make."""
    try:
        rules = tuple(rule for text in texts for rule in parse_translation_rule(text))
        translation = Translation(rules, drop=tuple(DropPattern(text, "", matcher(text)) for text in drop))
        scope = Scope({}, {}, {}, old)
        done = carry_out(translation, plan_steps(translation, old, scope), old, scope, DROP)
    except CkptoolError:
        return _Proof()
    equal, shaped = set[str](), set[str]()
    for name, want in _tensors(new).items():
        made = done.items.get(name)
        if isinstance(made, TensorEntry) and (made.dtype, made.shape) == (want.dtype, want.shape):
            (equal if is_same(made, want) else shaped).add(name)
    return _Proof(done.steps, frozenset(equal), frozenset(shaped), frozenset(done.items))


def _found_rules(texts: Sequence[str], proof: _Proof, alike: Collection[str]) -> Iterator[FoundRule]:
    steps: dict[str, list[Step]] = {}
    for step in proof.steps:
        steps.setdefault(step.rule.text, []).append(step)
    for text in (text for text in texts if text in steps):
        outputs = [name for step in steps[text] for name in step.outputs]
        doubtful = sum(key in alike for step in steps[text] for key in step.keys)
        yield FoundRule(text, len(outputs), sum(name in proof.equal for name in outputs), doubtful)


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
