"""Rules that make one checkpoint's tensors from another's: found by value, then by names and shapes, and proved.

First come tensors that one or several of the other side add up to, in whatever order their values are; then the rest
by names, first among equal values, then among equal shapes. A tensor that is split is found from the other side, as
one that is joined, and its operations are inverted. Sums of values tell which tensors may correspond; every match is
confirmed by bytes, and in the end all rules are applied and everything is compared.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, islice, permutations
from math import gcd, prod
from typing import Any, NamedTuple

from ckptool.checkpoint import Note, TensorEntry
from ckptool.checkpoint.arrays import fold, is_same
from ckptool.checkpoint.dtypes import Array
from ckptool.checkpoint.paths import literal, matcher
from ckptool.commands import OUT, command
from ckptool.errors import CkptoolError, counted, listed, printable
from ckptool.facts import Report, Told, bold, cyan, dataclass, green, yellow
from ckptool.names.rule_files import dropping
from ckptool.names.rules import Translation, parse_operation, parse_rules
from ckptool.names.steps import Overs, Step, steps_of
from ckptool.transforms.suggest import (
    HOLE,
    STACK,
    STACKED,
    VARIABLES,
    Link,
    Numbers,
    Pairing,
    Search,
    Trait,
    candidates,
    escaped,
    families,
    filled,
    goals_of,
    is_plain,
    link_of,
    links_of,
    rule_text,
    written_rules,
    yaml_item,
)
from ckptool.transforms.translate.apply import DROP, after_chain, plan_steps

TRIES = 4_000_000  # of a pattern on a key, when all rules are applied, and of groups; beyond that none are found
MOST_TRIES = 600  # of operations for tensors of given shapes
MOST_ORDERED = 4  # tensors that are tried in every order
MOST_TOKENS = 64  # of a name in which words may differ, dots included: no model has as many
MOST_WORDS = 16  # that differ; two, three or all of them are tried together
SHOWN = 6
MOST_SHOWN = 100  # rules that are printed beside their file

Entries = Mapping[str, TensorEntry]
Part = tuple[str, tuple[str, ...]]
"""A name, and the keys that it stands for: itself; or, with `STACK` for a number from zero, the stacked ones."""

# Groups --------------------------------------------------------------------------------------------------------------

_TOKENS = re.compile(f"[0-9]+|[._]|[{HOLE}{STACK}]|[^0-9._{HOLE}{STACK}]+")


def groups(keys: Iterable[str], vary: int) -> Iterator[list[tuple[Part, ...]]]:
    """Parts that may be joined, a tuple for each choice of the other numbers in their names: single parts, numbered
    ones, and then those whose names differ in a word, in no order that means anything.

    vary: how many of their numbers vary at most.
    """
    parts_by_text: dict[str, dict[Numbers, Part]] = {}
    for family in families(dict.fromkeys(keys), vary):
        parts_by_text[family.text] = {numbers: (key, (key,)) for numbers, key in family.keys.items()}
        pieces = family.text.split(HOLE)
        for index in range(len(pieces) - 1):
            rows: dict[Numbers, dict[str, str]] = defaultdict(dict)
            for numbers, key in family.keys.items():
                rows[(*numbers[:index], *numbers[index + 1 :])][numbers[index]] = key
            if all([*map(str, range(len(row)))] == [*row] for row in rows.values()):
                text = STACK.join(HOLE.join(half) for half in (pieces[: index + 1], pieces[index + 1 :]))
                parts_by_text[text] = {at: (filled(text, at), (*row.values(),)) for at, row in rows.items()}
    for parts in parts_by_text.values():
        yield [(part,) for part in parts.values()]
    tokens_of = {text: tokens for text in parts_by_text if len(tokens := _TOKENS.findall(text)) <= MOST_TOKENS}
    for index in range(max(map(len, tokens_of.values()), default=0)):  # one at a time, to save memory
        siblings: dict[object, list[dict[Numbers, Part]]] = defaultdict(list)  # with names that differ at this place
        for text, tokens in tokens_of.items():
            if index < len(tokens) and tokens[index] not in (HOLE, STACK):
                members = frozenset((at, len(keys)) for at, (_, keys) in parts_by_text[text].items())
                siblings["".join(tokens[:index]), "".join(tokens[index + 1 :]), members].append(parts_by_text[text])
        for words in (words for words in siblings.values() if len(words) <= MOST_WORDS):
            for first, *others in (combo for size in sorted({2, 3, len(words)}) for combo in combinations(words, size)):
                yield [(part, *(other[at] for other in others)) for at, part in first.items()]


# Operations ----------------------------------------------------------------------------------------------------------

Way = tuple[str, tuple[int, ...]]
"""A chain of operations, and the order of the words that it takes."""


def applied(chain: str, columns: Sequence[Sequence[TensorEntry]]) -> TensorEntry | None:
    """The tensor that a chain makes from those of each word and number; None where they do not fit."""
    rows = [list(row) for row in zip(*columns, strict=True)]
    values: dict[Overs, list[TensorEntry]] = {((STACKED, number),): row for number, row in enumerate(rows)}
    try:
        operations = [parse_operation(op) for op in chain.split(" | ") if op]
        results, _ = after_chain(
            operations, values if len(rows) > 1 else {(): rows[0]}, lambda size: size.value(lambda name: None)
        )
    except CkptoolError:
        return None
    outputs = [tensor for tensors in results.values() for tensor in tensors]
    return outputs[0] if len(outputs) == 1 else None


def _ways(shapes: Sequence[tuple[int, ...]], count: int) -> Iterator[Way]:
    """Chains with every order of the words, the simplest chain first."""
    natural = tuple(range(len(shapes)))
    orders = [*permutations(natural)] if len(shapes) <= MOST_ORDERED else [natural]
    for chains in zip(*(_chains([shapes[at] for at in order], count) for order in orders), strict=True):
        yield from zip(chains, orders, strict=True)


def _chains(shapes: Sequence[tuple[int, ...]], count: int) -> Iterator[str]:
    """Chains that join tensors of these shapes, or reorder a single one; the simplest first."""
    shape, rank = shapes[0], len(shapes[0])
    if len(shapes) == count == 1:
        yield ""
        yield from ["transpose"] if rank > 1 else []
        yield from (f"transpose {a} {b}" for a, b in combinations(range(rank), 2) if rank > 2)
        yield from (f"permute {' '.join(map(str, order))}" for order in permutations(range(rank)) if 2 < rank < 5)
        for axis, size in enumerate(shape):  # rows in another order: rotary halves, interleaved columns, blocks
            divisors = _divisors(size)
            heads = [number for number in divisors if axis == 0 and size % (2 * number) == 0]
            yield from (f"{op} {number}" for number in heads for op in ("rope", "unrope"))
            yield from (f"{op} {axis} {n}" for n in divisors[1:-1] for op in ("deinterleave", "interleave"))
            pairs = ((a, b) for a in divisors[1:] for b in divisors[1:] if size // a % b == 0 and a * b < size)
            for number, parts in pairs:
                inner = size // number // parts
                apart = f"unflatten {axis} [{number}, {parts}, {inner}] | transpose {axis + 1} {axis + 2}"
                yield f"{apart} | flatten {axis} [{number}, {inner}, {parts}]"
        return
    for before in ("", "transpose | ") if rank > 1 else ("",):
        joins = list(_joins([sizes[::-1] if before and rank == 2 else sizes for sizes in shapes])) or [""]
        stacks = [f"stack {axis} over {STACKED}" for axis in range(rank + 1)] if count > 1 else [""]
        joins += [f"stack {axis}" for axis in range(rank + 1)] if count == 1 else []
        yield from (before + " | ".join(filter(None, [join, stack])) for join in joins for stack in stacks)


def _joins(shapes: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Chains that concatenate tensors: as they are, or interleaved in groups (of heads, of single rows)."""
    for axis in range(len(shapes[0]) if len(shapes) > 1 else 0):
        sizes = [shape[axis] for shape in shapes]
        for number in _divisors(gcd(*sizes)):
            widths = [size // number for size in sizes]
            named = f" {widths}" if len({*widths}) > 1 else ""
            if number == 1:
                yield f"cat {axis}{named}"
            else:
                yield f"unflatten {axis} [{number}, -1] | cat {axis + 1}{named} | flatten {axis} [{number}, -1]"


@cache
def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, min(int(number**0.5) + 1, 1 << 16)) if number % n == 0]
    return [*small, *(number // n for n in reversed(small) if n * n != number)] or [1]


def _reshaping(have: Sequence[int], want: Sequence[int]) -> str | None:
    """The operations from one shape to another: dimensions of size 1, the last two exchanged, or any reshape; None
    where the number of values differs."""
    if have == want:
        return ""
    if [size for size in have if size != 1] == [size for size in want if size != 1]:
        drop = [f"squeeze {axis}" for axis in reversed(range(len(have))) if have[axis] == 1]
        return " | ".join([*drop, *(f"unsqueeze {axis}" for axis, size in enumerate(want) if size == 1)])
    if len(have) > 1 and [*have[:-2], have[-1], have[-2]] == [*want]:
        return "transpose"
    return f"reshape {[*want]} from {[*have]}" if prod(have) == prod(want) else None


# Values --------------------------------------------------------------------------------------------------------------


def fingerprint(entry: TensorEntry) -> int:
    """A fingerprint of a tensor's values, whatever their order: the sum of a 64-bit hash of each.

    A transposed tensor keeps its fingerprint, and those of three parts add up to that of the whole. Reads it once.
    """
    total = 0

    def add(_: int, raw: Array) -> None:
        import numpy

        nonlocal total
        numbers = raw.view(f"u{min(8, entry.dtype.itemsize)}").astype(numpy.uint64)
        numbers += numpy.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finalizer of splitmix64
            numbers ^= numbers >> numpy.uint64(shift)
            numbers *= numpy.uint64(factor)
        numbers ^= numbers >> numpy.uint64(31)
        total += int(numbers.sum())

    fold(add, entry)
    return total % 2**64


# The search ----------------------------------------------------------------------------------------------------------


class ValueSearch:
    """The links between two sides. free: keys of each side that have none yet.  alike: old keys whose values others
    have as well, so that only their names, which differ from the new ones, tell them apart."""

    def __init__(self, *sides: Entries) -> None:
        self.sides = sides
        self.links: list[Link] = []
        self.alike: set[str] = set()
        self._ways: dict[object, tuple[list[Way], bool]] = {}  # by shapes: what worked last, and whether to try others
        views = {entry.view: entry for side in sides for entry in side.values()}  # tied tensors are read once
        prints = {view: fingerprint(entry) for view, entry in views.items()}
        self.prints = [{key: prints[entry.view] for key, entry in side.items()} for side in sides]
        self.free = [{key: None for key in side if key and is_plain(key)} for side in sides]

    def run(self) -> None:
        """Finds all links."""
        for vary in range(len(VARIABLES), -1, -1):
            self._join(False, vary)
            self._join(True, vary)
        for link in self.links:
            self._extend(link)
        # By names: first among tensors with the same values, whose sum stands as one more size in the shape that the
        # search sees, then among tensors with equal shapes.
        for by_value in (True, False):
            traits: list[dict[str, Trait]] = [
                {key: (*side[key].shape, prints[key]) if by_value else side[key].shape for key in free}
                for side, prints, free in zip(self.sides, self.prints, self.free, strict=True)
            ]
            search = Search((traits[0], traits[1]))
            search.run()
            pairs = {key: key for key, trait in search.free[0].items() if search.free[1].get(key) == trait}
            if by_value:  # the others in the order of their families
                goals: dict[Trait, list[str]] = defaultdict(list)
                for trait, key in _by_family(search.free[1]):
                    goals[trait] += [key] if key not in pairs else []
                for trait, key in _by_family(search.free[0]):
                    if key not in pairs and goals[trait]:
                        pairs[key] = goals[trait].pop(0)
            for link in (*search.links, *links_of(pairs)):
                if by_value:
                    self.alike |= {key for key, goal in link.goals.items() if goal[1:] != (key,)}
                self._accept(link)

    def _accept(self, link: Link) -> None:
        self.links.append(link)
        names = {name for goal in link.goals.values() for name in goal[1:]}
        for free, taken in zip(self.free, (link.goals.keys(), names), strict=True):
            for name in taken:
                free.pop(name, None)

    def _join(self, splits: bool, vary: int) -> None:
        """Finds tensors whose values one or several of the other side add up to."""
        prints, wholes = self.prints[splits], self.free[not splits]
        counts = Counter(self.prints[not splits][key] for key in wholes)
        totals = {total: key for key in wholes if counts[total := self.prints[not splits][key]] == 1}
        claims: dict[str, set[frozenset[str]]] = defaultdict(set)
        hopeful: list[list[Pairing]] = []
        for group in islice(groups(self.free[splits], vary), TRIES):
            uses = []
            for parts in group:
                names, keys = zip(*parts, strict=True)
                use = Pairing(names, tuple(key for part_keys in keys for key in part_keys), "")
                if (whole := totals.get(sum(prints[key] for key in use.keys) % 2**64)) is not None:
                    uses.append(use._replace(whole=whole))
                    claims[whole].add(frozenset(use.keys))
            if 2 * len(uses) > len(group) and len({use.whole for use in uses}) == len(uses):
                hopeful.append(uses)
        ours, theirs = self.sides[splits], self.sides[not splits]
        for uses in hopeful:  # accepted where operations are found that prove it
            free = self.free[splits].keys()
            uses = [u for u in uses if len(claims[u.whole]) == 1 and u.whole in wholes and free >= {*u.keys}]
            columns = []
            for use in uses:
                count, keys = len(use.keys) // len(use.names), use.keys
                columns.append([[ours[key] for key in keys[at : at + count]] for at in range(0, len(keys), count)])
            ways = (self._way(column, theirs[use.whole]) for column, use in zip(columns, uses, strict=True))
            if (way := next(filter(None, ways), None)) is None:
                continue
            chain, order = way
            proved = []
            for column, use in zip(columns, uses, strict=True):
                result = applied(chain, [column[at] for at in order])
                if result is not None and is_same(result, theirs[use.whole]):
                    proved.append(use._replace(names=tuple(use.names[at] for at in order)))
            if (link := link_of(proved, chain, splits)) is not None:
                self._accept(link)
                for key in (key for use in proved for key in use.keys):
                    self.free[splits].pop(key, None)

    def _extend(self, link: Link) -> None:
        """Extends a link with operations by what else its rules make correctly: tensors whose values others share."""
        (old, new), (free, missing) = self.sides, self.free
        for text in candidates(link) if link.chain else ():
            try:
                for step in steps_of(parse_rules(text), free)[0]:
                    plan = plan_steps(Translation((step.rule,)), {key: old[key] for key in step.keys})
                    plan.carry_out(DROP)
                    if all(name in missing and is_same(entry, new[name]) for name, entry in plan.items.items()):
                        link.goals.update(goals_of([step]))
                        for side, names in ((free, step.keys), (missing, plan.items)):
                            for name in names:
                                side.pop(name, None)
            except CkptoolError:  # some of the tensors that belong together are missing
                continue

    def _way(self, columns: Sequence[Sequence[TensorEntry]], target: TensorEntry) -> Way | None:
        """The operations that make one tensor from others, compared by bytes, and the order of their words."""
        shapes = tuple(column[0].shape for column in columns), len(columns[0]), target.shape
        ways, has_more = self._ways.get(shapes, ([], True))
        for chain, order in (*ways, *islice(_ways(*shapes[:2]), MOST_TRIES * has_more)):
            parts = [columns[at] for at in order]
            result = applied(chain, parts)
            reshaping = _reshaping(result.shape, target.shape) if result is not None else None
            combined = " | ".join(filter(None, [chain, reshaping]))
            if reshaping is not None and (fitted := applied(combined, parts)) is not None and is_same(fitted, target):
                self._ways[shapes] = [(combined, order)], has_more
                return combined, order
        self._ways[shapes] = ways, False
        return None


def _by_family(keys: Mapping[str, Trait]) -> Iterator[tuple[Trait, str]]:
    """The keys with their traits, family by family: names that differ in one number."""
    for family in families(keys, 1):
        yield from zip(family.traits, family.keys.values(), strict=True)


# Proof ---------------------------------------------------------------------------------------------------------------


class FoundRule(NamedTuple):
    """A rule and what it makes. tensors: how many.  by_value: of them, those with the other checkpoint's bytes.

    alike: of those, tensors whose bytes others have as well, so that only names or their order tell them apart.
    """

    text: str
    tensors: int
    by_value: int
    alike: int

    def evidence(self) -> str:
        texts = [f"{self.by_value:,} of {counted(self.tensors, 'tensor')} by value"]
        if self.by_value < self.tensors:
            texts.append(f"{self.tensors - self.by_value:,} by name and shape only: the values differ")
        if self.alike:
            why = "with the same values as others, distinguished only by names or order: check them"
            texts.append(f"{self.alike:,} {why}")
        return "; ".join(texts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FoundRules(Report):
    """Rules that make the tensors of `new` of those of `old`, as applying them has shown.

    total: tensors of the new one.  by_value: those that are made with the same bytes.  by_name: names of those that are
    made with the same type and shape, and other values.  missing: those that are not made.  dropped: keys of the old
    one that become nothing; drop: patterns for them.  output: the file of rules.
    """

    schema = "find-rules/2"
    verdict = "complete"

    old: str
    new: str
    rules: tuple[FoundRule, ...]
    total: int
    by_value: int
    by_name: tuple[str, ...]
    missing: tuple[str, ...]
    dropped: tuple[str, ...]
    drop: tuple[str, ...]
    notes: tuple[Note, ...] = ()
    output: str = ""
    dry_run: bool = False

    @property
    def complete(self) -> bool:
        """True if every tensor of the new checkpoint is made with its values."""
        return not (self.missing or self.by_name)

    def told(self) -> Told:
        paint = green if self.complete else yellow
        yield bold(self.old), " → ", bold(self.new), ": ", paint(self._proof())
        in_file = self.output and not self.dry_run
        for rule in self.rules[:MOST_SHOWN] if in_file else self.rules:
            yield "  ", cyan(rule.text)
            yield f"    {rule.evidence()}"
        if in_file and len(self.rules) > MOST_SHOWN:
            yield f"  … {len(self.rules) - MOST_SHOWN:,} more in {self.output}"
        yield from (f"  {text}" for text in self._left_over())
        if self.output:
            yield f"{'would write' if self.dry_run else 'wrote'} {self.output}"
            if not self._is_incomplete():
                yield "  ", cyan(str(command("translate", self.old, rules_file=self.output, out=OUT)))
        yield from self.notes

    def rules_file(self) -> str:
        """The rules as the file that `translate --rules` takes, with the evidence as comments."""
        names = " → ".join(printable(os.path.basename(name)) for name in (self.old, self.new))
        lines = [f"# {names}: {self._proof()}.", *(f"# {printable(text)}" for text in self._left_over()), "rules:"]
        for rule in self.rules:
            lines += [f"# {rule.evidence()}", yaml_item(rule.text)]
        lines += (
            ["# What is missing may be made from these: check them."] if self.drop and self._is_incomplete() else []
        )
        lines += ["drop:", *map(yaml_item, self.drop)] if self.drop else []
        return "\n".join(lines) + "\n"

    def _proof(self) -> str:
        texts = [f"{self.by_value:,} of {self.total:,} by value"]
        texts += [f"{len(self.by_name):,} by name and shape"] if self.by_name else []
        return ", ".join([*texts, *([f"{len(self.missing):,} not made"] if self.missing else [])])

    def _is_incomplete(self) -> bool:
        """True where a tensor is missing that is not a second name of another."""
        return len(self.missing) > len(self.notes)

    def _left_over(self) -> list[str]:
        named = [("not made", self.missing), ("become nothing", self.dropped), ("values differ", self.by_name)]
        return [f"{label}: {listed(names, SHOWN)}" for label, names in named if names]


def proved_rules(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> FoundRules:
    """The rules that make one set of weights of another, with the proof: they are applied, and all bytes compared.

    Reads each tensor a few times. The report says neither the names of the files nor where the rules are written.
    """
    ours, theirs = ({k: v for k, v in side.items() if type(k) is str} for side in (old, new))
    entries, targets = ({k: v for k, v in side.items() if isinstance(v, TensorEntry)} for side in (ours, theirs))
    search = ValueSearch(entries, targets)
    search.run()
    written, covered = written_rules(search.links, dict.fromkeys(ours))
    plain = {key: goal[1] for link in search.links for key, goal in link.goals.items() if not link.chain}
    spelled_out = {key: name for key, name in plain.items() if key not in covered}
    covered |= spelled_out.keys()
    texts = [rule_text(escaped(key), escaped(name)) for key, name in spelled_out.items()]
    limit = TRIES // max(1, len(ours))
    texts += [rule for suggestion in written for rule in suggestion.rules][:limit]
    patterns = dict[str, None]()  # for keys that are left out: with `*` for numbers, where no other key has such a name
    for key in (key for key in ours if key not in covered):
        exact = literal(key)
        general = re.sub(r"[0-9]+", "*", exact)
        is_taken = general not in patterns and exact != general and any(map(matcher(general), covered))
        patterns[exact if is_taken else general] = None
    drop = list(patterns)[:limit]

    steps, items = list[Step](), dict[Any, Any]()
    try:
        rules = tuple(rule for text in texts for rule in parse_rules(text))
        plan = plan_steps(Translation(rules, drop=tuple(map(dropping, drop))), old)
        plan.carry_out(DROP)
    except CkptoolError:
        pass
    else:
        steps, items = plan.steps, plan.items
    output = {name: entry for name, entry in items.items() if isinstance(entry, TensorEntry)}
    shaped = {k for k, v in targets.items() if k in output and (output[k].dtype, output[k].shape) == (v.dtype, v.shape)}
    equal = {name for name in shaped if is_same(output[name], targets[name])}
    by_rule: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        by_rule[step.rule.text].append(step)
    proved = []
    for text, rule_steps in ((text, by_rule[text]) for text in texts if text in by_rule):
        outputs = [name for step in rule_steps for name in step.outputs]
        alike = sum(key in search.alike for step in rule_steps for key in step.keys)
        proved.append(FoundRule(text, len(outputs), sum(name in equal for name in outputs), alike))
    missing = tuple(name for name in theirs if name not in (shaped if name in targets else items))
    first_names = {targets[name].view: name for name in equal}
    second_names = ((name, first_names.get(targets[name].view)) for name in missing if name in targets)
    used = {key for step in steps for key in step.keys}
    return FoundRules(
        old="",
        new="",
        rules=tuple(proved),
        total=len(targets),
        by_value=len(equal),
        by_name=tuple(name for name in theirs if name in shaped and name not in equal),
        missing=missing,
        dropped=tuple(key for key in old if type(key) is str and key not in used),
        drop=tuple(drop),
        notes=tuple(
            Note("second-name", f"{name} is {same} under a second name; no rule makes it")
            for name, same in second_names
            if same is not None
        ),
    )
