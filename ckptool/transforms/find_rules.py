"""Rules that make one checkpoint's tensors of another's: found by value, then by names and shapes, and proved.

In this order: tensors that one or several of the other side add up to, whatever the order of their values; then the
rest by names, first among equal values, then among equal shapes. A tensor that is split is found from the other side,
as one that is joined, and its operations are inverted. Which tensors may be which, sums of values tell; whatever they
suggest is confirmed by bytes, and at last all rules are applied and everything is compared.
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
from ckptool.checkpoint.arrays import fold, resolved
from ckptool.checkpoint.compare import same_bytes
from ckptool.checkpoint.dtypes import Array
from ckptool.checkpoint.paths import matcher
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

TRIES = 4_000_000  # of a rule on a key, when all rules are applied, and of groups: what goes beyond has no rule
MOST_TRIES = 600  # of operations for tensors of some shapes
MOST_ORDERED = 4  # tensors that are tried in every order
MOST_TOKENS = 64  # of a name, dots among them, in which words may differ: no model's has as many
MOST_WORDS = 16  # of which two, three or all are tried
SHOWN = 6

Entries = Mapping[str, TensorEntry]
Part = tuple[str, tuple[str, ...]]
"""A name, and the keys that it stands for: itself, or with `STACK` for a number from zero, those that are stacked."""

# Groups --------------------------------------------------------------------------------------------------------------

_TOKENS = re.compile(f"[0-9]+|[._]|[{HOLE}{STACK}]|[^0-9._{HOLE}{STACK}]+")


def groups(keys: Iterable[str], vary: int) -> Iterator[list[tuple[Part, ...]]]:
    """Parts that may be put together, for each choice of the other numbers of their names: single ones, those that are
    numbered, and then those whose names differ in a word, whose order says nothing.

    vary: how many of their numbers vary at most.
    """
    found: dict[str, dict[Numbers, Part]] = {}
    for family in families(dict.fromkeys(keys), vary):
        found[family.text] = {numbers: (key, (key,)) for numbers, key in family.keys.items()}
        pieces = family.text.split(HOLE)
        for place in range(len(pieces) - 1):
            rows: dict[Numbers, dict[str, str]] = defaultdict(dict)
            for numbers, key in family.keys.items():
                rows[(*numbers[:place], *numbers[place + 1 :])][numbers[place]] = key
            if all([*map(str, range(len(row)))] == [*row] for row in rows.values()):
                text = STACK.join(HOLE.join(half) for half in (pieces[: place + 1], pieces[place + 1 :]))
                found[text] = {at: (filled(text, at), (*row.values(),)) for at, row in rows.items()}
    for parts in found.values():
        yield [(part,) for part in parts.values()]
    tokens_of = {text: tokens for text in found if len(tokens := _TOKENS.findall(text)) <= MOST_TOKENS}
    for place in range(max(map(len, tokens_of.values()), default=0)):  # one after the other, for the sake of memory
        alike: dict[object, list[dict[Numbers, Part]]] = defaultdict(list)  # of names that differ here
        for text, tokens in tokens_of.items():
            if place < len(tokens) and tokens[place] not in (HOLE, STACK):
                members = frozenset((at, len(keys)) for at, (_, keys) in found[text].items())
                alike["".join(tokens[:place]), "".join(tokens[place + 1 :]), members].append(found[text])
        for some in (each for each in alike.values() if len(each) <= MOST_WORDS):
            for first, *others in (chosen for size in sorted({2, 3, len(some)}) for chosen in combinations(some, size)):
                yield [(part, *(other[at] for other in others)) for at, part in first.items()]


# Operations ----------------------------------------------------------------------------------------------------------

Way = tuple[str, tuple[int, ...]]
"""A chain of operations, and the order of the words that it is for."""


def applied(chain: str, columns: Sequence[Sequence[TensorEntry]]) -> TensorEntry | None:
    """One tensor of those of each word and number; None where they do not fit."""
    rows = [list(row) for row in zip(*columns, strict=True)]
    values: dict[Overs, list[TensorEntry]] = {((STACKED, number),): row for number, row in enumerate(rows)}
    try:
        operations = [parse_operation(op) for op in chain.split(" | ") if op]
        done, _ = after_chain(
            operations, values if len(rows) > 1 else {(): rows[0]}, lambda size: size.value(lambda name: None)
        )
    except CkptoolError:
        return None
    only = [tensor for tensors in done.values() for tensor in tensors]
    return only[0] if len(only) == 1 else None


def _ways(shapes: Sequence[tuple[int, ...]], count: int) -> Iterator[Way]:
    """Chains in every order of the words, the plainest chain first."""
    natural = tuple(range(len(shapes)))
    orders = [*permutations(natural)] if len(shapes) <= MOST_ORDERED else [natural]
    for chains in zip(*(_chains([shapes[at] for at in order], count) for order in orders), strict=True):
        yield from zip(chains, orders, strict=True)


def _chains(shapes: Sequence[tuple[int, ...]], count: int) -> Iterator[str]:
    """Operations that put tensors of these shapes together, or reorder the only one; the plainest first."""
    shape, rank = shapes[0], len(shapes[0])
    if len(shapes) == count == 1:
        yield ""
        yield from ["transpose"] if rank > 1 else []
        yield from (f"transpose {a} {b}" for a, b in combinations(range(rank), 2) if rank > 2)
        yield from (f"permute {' '.join(map(str, order))}" for order in permutations(range(rank)) if 2 < rank < 5)
        for axis, size in enumerate(shape):  # rows in another order: rotary halves, columns that take turns, blocks
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
        joins = list(_joins([each[::-1] if before and rank == 2 else each for each in shapes])) or [""]
        stacks = [f"stack {axis} over {STACKED}" for axis in range(rank + 1)] if count > 1 else [""]
        joins += [f"stack {axis}" for axis in range(rank + 1)] if count == 1 else []
        yield from (before + " | ".join(filter(None, [join, stack])) for join in joins for stack in stacks)


def _joins(shapes: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Operations that put tensors side by side: as they are, or in turns of groups (of heads, of single rows)."""
    for axis in range(len(shapes[0]) if len(shapes) > 1 else 0):
        sizes = [shape[axis] for shape in shapes]
        for number in _divisors(gcd(*sizes)):
            each = [size // number for size in sizes]
            parts = f" {each}" if len({*each}) > 1 else ""
            if number == 1:
                yield f"cat {axis}{parts}"
            else:
                yield f"unflatten {axis} [{number}, -1] | cat {axis + 1}{parts} | flatten {axis} [{number}, -1]"


@cache
def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, min(int(number**0.5) + 1, 1 << 16)) if number % n == 0]
    return [*small, *(number // n for n in reversed(small) if n * n != number)] or [1]


def _reshaping(have: Sequence[int], want: Sequence[int]) -> str | None:
    """The operations that give a tensor a shape: dimensions of size 1, the last two exchanged, or any; None for
    another number of values."""
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
    """What a tensor's values are, whatever their order: each becomes a 64-bit number, and their sum is the tensor's.

    A transposed tensor has that of the first one, and three together that of the one they were cut from. Reads it once.
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


def is_same(one: TensorEntry, other: TensorEntry) -> bool:
    """True for the same type, shape and bytes."""
    alike = one.dtype is other.dtype and one.shape == other.shape
    return alike and same_bytes(resolved(one).row_major(), resolved(other).row_major())


# The search ----------------------------------------------------------------------------------------------------------


class ValueSearch:
    """The links between two sides. free: keys of each side that have none yet.  alike: old keys whose values others
    have as well, so that only their names, which are not the same, tell which is which."""

    def __init__(self, *sides: Entries) -> None:
        self.sides = sides
        self.links: list[Link] = []
        self.alike: set[str] = set()
        self._ways: dict[object, tuple[list[Way], bool]] = {}  # by shapes: the last that did, and whether to try others
        views = {entry.view: entry for side in sides for entry in side.values()}  # tied tensors are read once
        prints = {view: fingerprint(entry) for view, entry in views.items()}
        self.prints = [{key: prints[entry.view] for key, entry in side.items()} for side in sides]
        self.free = [{key: None for key in side if key and is_plain(key)} for side in sides]

    def run(self) -> None:
        """Finds all of them."""
        for vary in range(len(VARIABLES), -1, -1):
            self._join(False, vary)
            self._join(True, vary)
        for link in self.links:
            self._extend(link)
        # By names: of those that have the same values, whose sum as one more size is what the search takes for a shape,
        # and then of those that have equal shapes.
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
                for trait, key in _in_order(search.free[1]):
                    goals[trait] += [key] if key not in pairs else []
                for trait, key in _in_order(search.free[0]):
                    if key not in pairs and goals[trait]:
                        pairs[key] = goals[trait].pop(0)
            for link in (*search.links, *links_of(pairs)):
                if by_value:
                    self.alike |= {key for key, goal in link.goals.items() if goal[1:] != (key,)}
                self._accept(link)

    def _accept(self, link: Link) -> None:
        self.links.append(link)
        names = {name for goal in link.goals.values() for name in goal[1:]}
        for free, gone in zip(self.free, (link.goals.keys(), names), strict=True):
            for name in gone:
                free.pop(name, None)

    def _join(self, splits: bool, vary: int) -> None:
        """Finds tensors that one or several of the other side add up to."""
        prints, wholes = self.prints[splits], self.free[not splits]
        counts = Counter(self.prints[not splits][key] for key in wholes)
        totals = {total: key for key in wholes if counts[total := self.prints[not splits][key]] == 1}
        claims: dict[str, set[frozenset[str]]] = defaultdict(set)
        hopeful: list[list[Pairing]] = []
        for group in islice(groups(self.free[splits], vary), TRIES):
            uses = []
            for parts in group:
                names, keys = zip(*parts, strict=True)
                use = Pairing(names, tuple(key for each in keys for key in each), "")
                if (one := totals.get(sum(prints[key] for key in use.keys) % 2**64)) is not None:
                    uses.append(use._replace(whole=one))
                    claims[one].add(frozenset(use.keys))
            if 2 * len(uses) > len(group) and len({use.whole for use in uses}) == len(uses):
                hopeful.append(uses)
        ours, whole = self.sides[splits], self.sides[not splits]
        for uses in hopeful:  # each is accepted where operations are found that say so
            free = self.free[splits].keys()
            uses = [u for u in uses if len(claims[u.whole]) == 1 and u.whole in wholes and free >= {*u.keys}]
            columns = []
            for use in uses:
                count, keys = len(use.keys) // len(use.names), use.keys
                columns.append([[ours[key] for key in keys[at : at + count]] for at in range(0, len(keys), count)])
            tried = (self._way(each, whole[use.whole]) for each, use in zip(columns, uses, strict=True))
            if (way := next(filter(None, tried), None)) is None:
                continue
            chain, order = way
            proved = []
            for each, use in zip(columns, uses, strict=True):
                made = applied(chain, [each[at] for at in order])
                if made is not None and is_same(made, whole[use.whole]):
                    proved.append(use._replace(names=tuple(use.names[at] for at in order)))
            if (link := link_of(proved, chain, splits)) is not None:
                self._accept(link)
                for key in (key for use in proved for key in use.keys):
                    self.free[splits].pop(key, None)

    def _extend(self, link: Link) -> None:
        """Adds to a link with operations what else its rules make right: tensors whose values others have, too."""
        (old, new), (free, missing) = self.sides, self.free
        for text in candidates(link) if link.chain else ():
            try:
                for step in steps_of(parse_rules(text), free)[0]:
                    done = plan_steps(Translation((step.rule,)), {key: old[key] for key in step.keys})
                    done.carry_out(DROP)
                    if all(name in missing and is_same(one, new[name]) for name, one in done.items.items()):
                        link.goals.update(goals_of([step]))
                        for side, names in ((free, step.keys), (missing, done.items)):
                            for name in names:
                                side.pop(name, None)
            except CkptoolError:  # some of what belongs together is not there
                continue

    def _way(self, columns: Sequence[Sequence[TensorEntry]], whole: TensorEntry) -> Way | None:
        """The operations that make one tensor of others, by bytes, and the order of their words."""
        shapes = tuple(column[0].shape for column in columns), len(columns[0]), whole.shape
        known, has_more = self._ways.get(shapes, ([], True))
        for chain, order in (*known, *islice(_ways(*shapes[:2]), MOST_TRIES * has_more)):
            parts = [columns[at] for at in order]
            made = applied(chain, parts)
            after = _reshaping(made.shape, whole.shape) if made is not None else None
            both = " | ".join(filter(None, [chain, after]))
            if after is not None and (done := applied(both, parts)) is not None and is_same(done, whole):
                self._ways[shapes] = [(both, order)], has_more
                return both, order
        self._ways[shapes] = known, False
        return None


def _in_order(keys: Mapping[str, Trait]) -> Iterator[tuple[Trait, str]]:
    """The keys with what they have, family by family: of names that differ in one number."""
    for family in families(keys, 1):
        yield from zip(family.traits, family.keys.values(), strict=True)


# Proof ---------------------------------------------------------------------------------------------------------------


class FoundRule(NamedTuple):
    """A rule and what it makes. tensors: how many.  by_value: those with the bytes of the other checkpoint's.

    alike: those among them whose bytes other tensors have as well, so that names or their order tell which is which.
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
        for rule in self.rules:
            yield "  ", cyan(rule.text)
            yield f"    {rule.evidence()}"
        yield from (f"  {text}" for text in self._left_over())
        if self.output:
            yield f"{'would write' if self.dry_run else 'wrote'} {self.output}"
            if not self._lacks():
                yield "  ", cyan(str(command("translate", self.old, rules_file=self.output, out=OUT)))
        yield from self.notes

    def rules_file(self) -> str:
        """The rules as the file that `translate --rules` takes, with the evidence as comments."""
        names = " → ".join(printable(os.path.basename(name)) for name in (self.old, self.new))
        lines = [f"# {names}: {self._proof()}.", *(f"# {printable(text)}" for text in self._left_over()), "rules:"]
        for rule in self.rules:
            lines += [f"# {rule.evidence()}", yaml_item(rule.text)]
        lines += ["# What is missing may be made from these: check them."] if self.drop and self._lacks() else []
        lines += ["drop:", *map(yaml_item, self.drop)] if self.drop else []
        return "\n".join(lines) + "\n"

    def _proof(self) -> str:
        texts = [f"{self.by_value:,} of {self.total:,} by value"]
        texts += [f"{len(self.by_name):,} by name and shape"] if self.by_name else []
        return ", ".join([*texts, *([f"{len(self.missing):,} not made"] if self.missing else [])])

    def _lacks(self) -> bool:
        """True where a tensor is not made that is no second name of one."""
        return len(self.missing) > len(self.notes)

    def _left_over(self) -> list[str]:
        named = [("not made", self.missing), ("become nothing", self.dropped), ("values differ", self.by_name)]
        return [f"{what}: {listed(names, SHOWN)}" for what, names in named if names]


def proved_rules(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> FoundRules:
    """The rules that make one set of weights of another, with the proof: they are applied, and all bytes compared.

    Reads each tensor a few times. The report says neither the names of the files nor where the rules are written.
    """
    ours, theirs = ({k: v for k, v in side.items() if type(k) is str} for side in (old, new))
    entries, wanted = ({k: v for k, v in side.items() if isinstance(v, TensorEntry)} for side in (ours, theirs))
    search = ValueSearch(entries, wanted)
    search.run()
    written, covered = written_rules(search.links, dict.fromkeys(ours))
    plain = {key: goal[1] for link in search.links for key, goal in link.goals.items() if not link.chain}
    spelled_out = {key: name for key, name in plain.items() if key not in covered}
    covered |= spelled_out.keys()
    texts = [rule_text(escaped(key), escaped(name)) for key, name in spelled_out.items()]
    most = TRIES // max(1, len(ours))
    texts = [*texts, *(rule for each in written for rule in each.rules)][:most]
    patterns = dict[str, None]()  # for keys that are left out: with `*` for numbers, where nothing else has such a name
    for key in (key for key in ours if key not in covered):
        literal = re.sub(r"^re:", "[r]e:", re.sub(r"([*?[])", r"[\1]", key))
        general = re.sub(r"[0-9]+", "*", literal)
        is_taken = general not in patterns and literal != general and any(map(matcher(general), covered))
        patterns[literal if is_taken else general] = None
    drop = list(patterns)[:most]

    steps, items = list[Step](), dict[Any, Any]()
    try:
        rules = tuple(rule for text in texts for rule in parse_rules(text))
        done = plan_steps(Translation(rules, drop=tuple(map(dropping, drop))), old)
        done.carry_out(DROP)
    except CkptoolError:
        pass
    else:
        steps, items = done.steps, done.items
    made = {name: one for name, one in items.items() if isinstance(one, TensorEntry)}
    shaped = {k for k, v in wanted.items() if k in made and (made[k].dtype, made[k].shape) == (v.dtype, v.shape)}
    equal = {name for name in shaped if is_same(made[name], wanted[name])}
    by_rule: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        by_rule[step.rule.text].append(step)
    found = []
    for text, each in ((text, by_rule[text]) for text in texts if text in by_rule):
        outputs = [name for step in each for name in step.outputs]
        alike = sum(key in search.alike for step in each for key in step.keys)
        found.append(FoundRule(text, len(outputs), sum(name in equal for name in outputs), alike))
    missing = tuple(name for name in theirs if name not in (shaped if name in wanted else items))
    first = {wanted[name].view: name for name in equal}
    second = ((name, first.get(wanted[name].view)) for name in missing if name in wanted)
    used = {key for step in steps for key in step.keys}
    return FoundRules(
        old="",
        new="",
        rules=tuple(found),
        total=len(wanted),
        by_value=len(equal),
        by_name=tuple(name for name in theirs if name in shaped - equal),
        missing=missing,
        dropped=tuple(key for key in old if type(key) is str and key not in used),
        drop=tuple(drop),
        notes=tuple(
            Note("second-name", f"{name} is {same} under a second name; no rule makes it")
            for name, same in second
            if same is not None
        ),
    )
