"""Rules that would make more of a checkpoint fit a target, in a form to pass back to `--rename` or `--rules`.

Keys that differ in numbers only are a family. A link says which family of the target a family of the checkpoint is: by
the prefix of a wrapper, or by words and shapes. It is made only if no other family of either side has as much evidence:
nothing ambiguous is suggested. That is conservative: where every word of a name either stays or is replaced by one that
is used nowhere else, and numbers stay, a link is a true one. The links become few rules, each tried on all keys.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain, islice, takewhile
from types import MappingProxyType
from typing import NamedTuple

from ckptool.analysis.warm_start import Suggestion
from ckptool.conventions.state_dicts import PEELED, without_wrappers
from ckptool.errors import CkptoolError, counted, form, listed, printable
from ckptool.facts import dataclass, field
from ckptool.names.rules import parse_operation, parse_rules
from ckptool.names.steps import Step, steps_of

Trait = tuple[int, ...] | None
"""What two keys must have in common to be the same tensor: the shape, or the shape and the values."""
Numbers = tuple[str, ...]
Goals = dict[str, tuple[str, ...]]
"""Where keys go: the operations, and the new names that a key becomes or becomes a part of."""

# Placeholders for a number, for the number of stacked tensors, and between names; keys that contain one are ignored.
HOLE, STACK, BREAK = map(chr, range(0xF0000, 0xF0003))
STACKED = "e"  # the variable of stacked tensors
VARIABLES = "nmkj"  # of rules, for the numbers of a family, of which at most as many vary
PLAIN = tuple(f"{{{name}}}" for name in VARIABLES)
_HELD = re.compile(f"[{HOLE}{STACK}{BREAK}]")
LEVELS = ((None, None), (3, 3), (2, 2), (2, 1), (1, 2), (1, 1), (0, 0))  # how many numbers of names vary: most first
LONG, DEEP = 500, 32  # characters of a key and parts of a name; nothing is suggested for longer ones
MOST = 10_000  # keys of a side; with more, only the prefix of a wrapper is found
MOST_ALIKE = 64  # names of the same shapes that are compared
MOST_WAYS = 16  # prefixes that are tried, and names with the same end
TRIES = 300_000  # of a rule on a key; parsing a rule counts as `READING` tries
READING = 400
_NUMBER = re.compile(r"(?<![0-9])(?<!\.original)([0-9]{1,15})(?![0-9])")
_PARTS = re.compile(r"\.(?![^{}]*\})")  # the dots of a name in a rule, but those within {a.b,c}

# Words ---------------------------------------------------------------------------------------------------------------

# Different libraries' words for one thing.
_SAME = """
norm: ln layernorm norms bn batchnorm gn groupnorm rmsnorm lnorm layernorms
attn: attention attentions selfattn selfattention mha multihead
q: query queries
k: key keys
v: value values
out: output o
mlp: ffn ff feedforward intermediate feed forward
embed: embedding embeddings emb embeds
pos: position positions positional
token: tok tokens word words
cls: class classification
head: heads classifier
conv: convolution convs convolutions
shortcut: downsample skip
enc: encoder
dec: decoder
linear: lin dense proj projection projector fc linears
block: blocks layer layers h stage stages encoderlayer resblocks
weight: weights gamma
bias: biases beta
var: variance
"""
_WORD = {word: line.split(":")[0] for line in _SAME.strip().splitlines() for word in line.replace(":", "").split()}
_COMPOUND = (
    (re.compile(r"in_proj|query_key_value|qkv_proj|c_attn"), "qkv"),
    (re.compile(r"\A([a-z_]+\.)?fc(?=\.[a-z]+\Z)"), "head"),  # a module of the model itself, as torchvision's
    (re.compile(r"\bwte\b"), "token_embed"),
    (re.compile(r"\bwpe\b"), "pos_embed"),
    (re.compile(r"layer_norm|LayerNorm"), "norm"),
)
# Words of many names, which do not distinguish one tensor of a block from another.
_WEAK = frozenset("linear block model module net network backbone features body self base transformer enc".split())
_PARAMETERS = frozenset("weight bias running mean var num batches tracked".split())
# A name with one word of such a set never matches a name with a different one.
_ROLES = tuple(
    frozenset(roles.split())
    for roles in (
        "weight bias|mean var|enc dec|student teacher|online momentum|up down gate|self cross|left right|src tgt|in out"
        "|text image vision visual audio|real imag|generator discriminator|actor critic|q k v qkv"
    ).split("|")
)
_LETTERS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_]+")


@lru_cache(4096)
def words(name: str) -> frozenset[str]:
    """The words of a name in their common spelling, without its numbers."""
    for compound, plain in _COMPOUND:
        name = compound.sub(plain, name)
    return frozenset(_WORD.get(word.lower(), word.lower()) for word in _LETTERS.findall(name))


def contradict(one: frozenset[str], other: frozenset[str]) -> bool:
    """True for words of names that cannot be the same tensor, whatever their shapes, such as a query and a key."""
    return any((ours := one & roles) and (theirs := other & roles) and not ours & theirs for roles in _ROLES)


# Families ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Family:
    """Keys that differ in their numbers only, by these numbers, in order.

    text: the name with `HOLE` in place of numbers.  traits: of the keys, in their order.
    """

    text: str
    keys: dict[Numbers, str]
    traits: tuple[Trait, ...]

    @cached_property
    def words(self) -> frozenset[str]:
        return words(self.text)

    @cached_property
    def unnumbered(self) -> str:
        """The name without its numbers."""
        return re.sub(rf"(?<![^.])[0-9{HOLE}]+\.|[0-9{HOLE}]+", "", self.text)

    @cached_property
    def rank(self) -> int:
        """The dimensions of its first tensor, without those of size 1."""
        return sum(size != 1 for size in self.traits[0] or ())

    @property
    def module(self) -> str:
        return self.text.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.text.removeprefix(self.module)


def families(traits: Mapping[str, Trait], vary: int | None) -> list[Family]:
    """The families of keys. vary: how many numbers of a name may vary, counted from the front; others are text. None:
    all do, also those that are the same in all keys."""
    by_text: dict[tuple[str, ...], list[tuple[Numbers, str]]] = defaultdict(list)
    for key in traits:
        parts = _NUMBER.split(key)
        by_text[tuple(parts[::2])].append((tuple(parts[1::2]), key))
    stack, results = [*by_text.items()], list[Family]()
    while stack:
        pieces, rows = stack.pop()
        columns = zip(*(numbers for numbers, _ in rows), strict=True)
        varying = [index for index, column in enumerate(columns) if vary is None or len(set(column)) > 1]
        if vary is not None and len(varying) > vary:
            parts_of: dict[Numbers, list[tuple[Numbers, str]]] = defaultdict(list)
            for numbers, key in rows:
                parts_of[tuple(numbers[index] for index in varying[vary:])].append((numbers, key))
            stack += [(pieces, members) for members in parts_of.values()]
            continue
        texts, first = [pieces[0]], rows[0][0]
        for index, piece in enumerate(pieces[1:]):
            if index in varying:
                texts.append(piece)
            else:
                texts[-1] += first[index] + piece
        rows.sort(key=lambda row: ([*map(int, row[0])], row[0]))
        keys = {tuple(numbers[index] for index in varying): key for numbers, key in rows}
        results.append(Family(HOLE.join(texts), keys, tuple(traits[key] for key in keys.values())))
    order = {key: number for number, key in enumerate(traits)}
    return sorted(results, key=lambda family: min(order[key] for key in family.keys.values()))


def matched(ours: Family, theirs: Family | None) -> Link | None:
    """Which key of one family is which of another, with the same traits; None where there is no evidence for it.

    Keys with the same numbers, if these begin alike and one family at most goes on for longer; or in their order, if
    the traits are evidence of that.
    """
    have, want = (dict(zip(family.keys, family.traits, strict=True)) if family else {} for family in (ours, theirs))
    mine, goals = [*have], [*want]
    if theirs is not None and mine[0] == goals[0] and (have.keys() <= want.keys() or want.keys() <= have.keys()):
        mine = goals = [numbers for numbers in mine if numbers in want]
    if theirs is None or [have[numbers] for numbers in mine] != [want[numbers] for numbers in goals]:
        return None
    traits_at: dict[Numbers, set[Trait]] = defaultdict(set)  # by the numbers that stay the same
    columns = {*zip(*mine, strict=True)}
    indices = [index for index, column in enumerate(zip(*goals, strict=True)) if column in columns]
    for numbers in goals:
        traits_at[tuple(numbers[index] for index in indices)].add(want[numbers])
    is_certain = len(traits_at) == len(goals) or any(len(traits) > 1 for traits in traits_at.values())
    keys = ((ours.keys[old], theirs.keys[new]) for old, new in zip(mine, goals, strict=True))
    return link_of([Pairing((old,), (old,), new) for old, new in keys]) if is_certain else None


def same_numbers(ours: Family, theirs: Family | None, end: str) -> dict[str, str]:
    """The keys of two families with the same numbers and traits. end: the part of both names that is the same; where a
    number comes first, it may be counted otherwise, unless all begin alike and one family at most goes on."""
    have, want = (dict(zip(family.keys, family.traits, strict=True)) if family else {} for family in (ours, theirs))
    is_alike = {*islice(have, 1)} == {*islice(want, 1)} and (have.keys() <= want.keys() or want.keys() <= have.keys())
    if theirs is None or (end.startswith(HOLE) and not is_alike):
        return {}
    return {key: theirs.keys[at] for at, key in ours.keys.items() if at in want and want[at] == have[at]}


def fitted(old: Sequence[Numbers], new: Sequence[Numbers]) -> list[str] | None:
    """How rules write the numbers of new names, from those of the old names: `{n}`, `{n + 1}`, `{n // 3}`, …"""
    columns = list(zip(VARIABLES, zip(*old, strict=True), strict=False))
    expressions = [next(_expressions(columns, goal), "") for goal in zip(*new, strict=True)]
    return [f"{{{expression}}}" for expression in expressions] if all(expressions) else None


def _expressions(columns: Iterable[tuple[str, tuple[str, ...]]], goal: tuple[str, ...]) -> Iterator[str]:
    targets = [int(number) for number in goal]
    for name, column in columns:
        have = [int(number) for number in column]
        if column == goal:
            yield name
        by = targets[0] - have[0]
        if by and all(b - a == by for a, b in zip(have, targets, strict=True)):
            yield f"{name} {'+' if by > 0 else '-'} {abs(by)}"
        for size in range(2, min(len(set(have)), 64)):
            if [number // size for number in have] == targets:
                yield f"{name} // {size}"
            if [number % size for number in have] == targets:
                yield f"{name} % {size}"


# Links ---------------------------------------------------------------------------------------------------------------


class Link(NamedTuple):
    """Keys of one side that are keys of the other. old, new: both names as a rule writes them.

    numbers: of the new names.  chain: the operations.  why: the evidence.
    """

    old: str
    new: str
    goals: Goals
    numbers: list[str]
    chain: str = ""
    why: str = ""


class Pairing(NamedTuple):
    """Keys that become one of the other side, or the reverse. names: theirs, with `STACK` for the numbers of stacked
    tensors.  whole: the one key."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    whole: str


def link_of(uses: Sequence[Pairing], chain: str = "", splits: bool = False) -> Link | None:
    """The link of keys that become others by the same operations; None where their numbers do not tell which.

    splits: the wholes become the others, by the inverse operations.
    """
    rows = [BREAK.join((use.whole, *use.names) if splits else (*use.names, use.whole)) for use in uses]
    family, *others = families(dict.fromkeys(rows), len(rows[0]))
    texts, numbers = family.text.split(BREAK), [*family.keys]
    count = texts[0].count(HOLE)
    new = fitted([row[:count] for row in numbers], [row[count:] for row in numbers])
    if others or new is None or count > len(VARIABLES):
        return None
    names = filled(escaped(family.text), [*PLAIN[:count], *new]).replace(STACK, f"{{{STACKED}}}").split(BREAK)
    parts = 1 if splits else len(names) - 1
    operations = [parse_operation(op) for op in chain.split(" | ") if op]
    operations = [op.inverse() or op for op in reversed(operations)] if splits else operations
    text, goals = " | ".join(map(str, operations)), Goals()
    for use in uses:
        if splits:
            goals[use.whole] = (text, *(name.replace(STACK, f"{{{STACKED}}}") for name in use.names))
        else:
            goals |= dict.fromkeys(use.keys, (text, use.whole))
    return Link(choice(names[:parts]), choice(names[parts:]), goals, new, text)


def links_of(pairs: Mapping[str, str]) -> Iterator[Link]:
    """Links for keys that are only renamed: one for many keys together, or one each where the numbers do not fit."""
    by_text: dict[str, list[Pairing]] = defaultdict(list)
    for old, new in pairs.items():
        by_text[_NUMBER.sub(HOLE, old + BREAK + new)].append(Pairing((old,), (old,), new))
    for uses in by_text.values():
        together = link_of(uses)
        yield from filter(None, [together] if together else (link_of([use]) for use in uses))


def filled(text: str, numbers: Sequence[str]) -> str:
    """A text with numbers, or variables, in their places."""
    places = iter(numbers)
    return re.sub(HOLE, lambda _: next(places), text)


def escaped(text: str) -> str:
    """A literal text in a rule, with a backslash before special characters."""
    return re.sub(r"([\\*{,]|\s(?=:\s))", r"\\\1", text).replace("=>", "=\\>")


def choice(names: Sequence[str]) -> str:
    """Names that differ at one place, written as one: `attn.{q,k,v}_proj`."""
    if len(names) == 1:
        return names[0]
    rows = [re.findall(r"\{[^{}]*\}|\\.|[^\W_]+|.", name, re.DOTALL) for name in names]
    front = _common_start(rows)
    end = _common_start([row[len(front) :][::-1] for row in rows])[::-1]
    middles = ("".join(row[len(front) : len(row) - len(end)]) for row in rows)
    return "".join([*front, "{", ",".join(middles), "}", *end])


def _common_start(rows: Sequence[Sequence[str]]) -> list[str]:
    return [column[0] for column in takewhile(lambda column: len({*column}) == 1, zip(*rows, strict=False))]


# The search ----------------------------------------------------------------------------------------------------------


class OpenFamilies(NamedTuple):
    """The families of a side that have no link. by_word: by word and rank.  by_module: by module, then by leaf."""

    by_trait: dict[Trait, list[Family]]
    by_word: dict[tuple[str, int], list[Family]]
    by_module: dict[str, dict[str, Family]]

    @classmethod
    def of(cls, side: Iterable[Family]) -> OpenFamilies:
        result = cls(defaultdict(list), defaultdict(list), defaultdict(dict))
        for family in side:
            result.by_module[family.module][family.leaf] = family
            for trait in {*family.traits}:
                result.by_trait[trait].append(family)
            for word in family.words:
                result.by_word[word, family.rank].append(family)
        return result

    def has_rival(self, chosen: Family, other: Family, others: OpenFamilies) -> bool:
        """True if another of these is as near in name to `other`: with a shape of the chosen one, or nearer and with a
        shape that the other side lacks."""
        name, shared = other.words, other.words & chosen.words
        same_trait = (near for trait in {*chosen.traits} for near in self.by_trait[trait] if near is not chosen)
        same_word = (near for word in name - shared for near in self.by_word.get((word, other.rank), ()))
        nearer = (
            near for near in same_word if name & near.words > shared and others.by_trait.keys().isdisjoint(near.traits)
        )
        rivals = chain((near for near in same_trait if not name & near.words < shared), nearer)
        return any(not contradict(name, near.words) for near in rivals)


@dataclass(slots=True, eq=False)
class Search:
    """The search for links. free: keys of both sides that have none yet.  ways: prefixes that would fit.
    originals: the keys of those that are searched under new names."""

    free: tuple[dict[str, Trait], dict[str, Trait]]
    links: list[Link] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)
    originals: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Finds all links, first with all numbers of names as variables, then with fewer."""
        ours, theirs = map(dict, self.free)
        self._by_prefix()
        for level in LEVELS if max(map(len, self.free)) <= MOST else ():
            self._by_words(level)
        for key, (_, goal) in (item for link in self.links for item in link.goals.items()):
            del ours[key], theirs[goal]
        self.free = ours, theirs

    def _is_open(self, link: Link) -> bool:
        return all(key in self.free[0] and goal in self.free[1] for key, (_, goal) in link.goals.items())

    def _accept(self, link: Link, why: str) -> None:
        for key, (_, goal) in link.goals.items():
            del self.free[0][key], self.free[1][goal]
        pairs = {self.originals.get(key, key): goal for key, (_, goal) in link.goals.items()}
        links = [link] if pairs.keys() == link.goals.keys() else links_of(pairs)
        self.links += [each._replace(why=why) for each in links]

    def _by_prefix(self) -> None:
        """Links names that are the same once a prefix is removed or added, or another stands in its place."""
        ours, theirs = ({f.text: f for f in families(free, None) if f.text.count(".") < DEEP} for free in self.free)
        by_end = defaultdict[str, list[Family]](list)
        for goal in theirs.values():
            for start in _starts(goal.text):
                by_end[goal.text[start:]].append(goal)
        votes = Counter[tuple[str, str]]()
        for mine, start in ((family, start) for family in ours.values() for start in _starts(family.text)):
            old, end = mine.text[:start], mine.text[start:]
            # A leaf alone is no evidence, but around it there may be a wrapper more or less.
            wrapped = (theirs.get(name) for name in (end, old.removesuffix(PEELED) + end, old + PEELED + end))
            goals = by_end.get(end, []) if not start or "." in end else []
            for goal in goals if 0 < len(goals) <= MOST_WAYS else filter(None, wrapped):
                new = goal.text.removesuffix(end)
                both = len(_common_start([old, new]))
                is_prefix = HOLE not in old[both:] + new[both:] and old.split(".")[-2:-1] != new.split(".")[-2:-1]
                if is_prefix and same_numbers(mine, goal, end) and not contradict(words(old), words(new)):
                    votes[old, new] += 1
        ways = list[tuple[str, str, dict[str, dict[str, str]], set[tuple[int, str]]]]()
        for (old, new), _ in votes.most_common(MOST_WAYS):
            ends = [text.removeprefix(old) for text in ours if text.startswith(old)]
            pairs = {end: keys for end in ends if (keys := same_numbers(ours[old + end], theirs.get(new + end), end))}
            of_both = {side_key for linked in pairs.values() for pair in linked.items() for side_key in enumerate(pair)}
            ways += [(old, new, pairs, of_both)] if 2 * len(pairs) >= len(ends) else []
        accepted = list[tuple[str, str]]()
        for old, new, pairs, of_both in ways:
            # Another prefix, or other names of either side that end the same after it, may be meant instead.
            rivals = [way for way in ways if 2 * len(way[2]) >= len(pairs) and not of_both.isdisjoint(way[3])]
            if len(rivals) > 1:
                self.ways = self.ways or [f"{way[0]}* as {way[1]}*".replace(HOLE, "*") for way in rivals]
                continue
            names = {prefix + end for prefix in (old, new) for end in pairs}
            rest = [other for side in (ours, theirs) for text, other in side.items() if text not in names]
            tails = {(other.text[at:], trait) for other in rest for at in _starts(other.text) for trait in other.traits}
            doubtful = [end for end in pairs if any((end, trait) in tails for trait in ours[old + end].traits)]
            if 2 * len(doubtful) < len(pairs) or not without_wrappers(old or new):
                instead = f"in place of {printable(old)!r}" if old else "before them"
                how = f"with {printable(new)!r} {instead}" if new else f"without {printable(old)!r}"
                for link in links_of({key: goal for keys in pairs.values() for key, goal in keys.items()}):
                    self._accept(link, f"{how} the names are the target's")
                accepted += [(old, new)] if HOLE not in old + new else []
        # The search goes on with new names for the keys below; one that the target has is its own, in another shape.
        below = {
            key: new + key.removeprefix(old) for old, new in accepted for key in self.free[0] if key.startswith(old)
        }
        for key, name in below.items():
            trait = self.free[0].pop(key)
            if self.free[1].pop(name, self) is self and name not in self.free[0]:
                self.free[0][name], self.originals[name] = trait, self.originals.get(key, key)
        if accepted:
            self._by_prefix()

    def _by_words(self, level: tuple[int | None, int | None]) -> None:
        """Links families that have more words in common than either has with any rival, in modules whose other tensors
        have the same ranks; and with them families of the same modules and numbers that share leaves and shapes."""
        before = -1
        while len(self.links) != before:
            before = len(self.links)
            ours, theirs = map(OpenFamilies.of, map(families, self.free, level))
            tried = set[tuple[int, int]]()  # a pair with a thousand shapes is met a thousand times
            for mine, shape in ((mine, shape) for shape, members in ours.by_trait.items() for mine in members):
                goals = theirs.by_trait.get(shape, [])
                if not (shape and goals) or max(len(ours.by_trait[shape]), len(goals)) > MOST_ALIKE:
                    continue
                near = max(goals, key=lambda goal: len(mine.words & goal.words))
                if (id(mine), id(near)) in tried:
                    continue
                tried.add((id(mine), id(near)))
                shapes = {*mine.traits, *near.traits}
                alone = all(len(side.by_trait.get(trait, ())) == 1 for side in (ours, theirs) for trait in shapes)
                linear = {"linear"} if alone and len(mine.keys) + len(shape or ()) > 3 else set[str]()
                if not mine.words & near.words - _PARAMETERS - (_WEAK - linear):
                    continue
                link = matched(mine, near)
                # Names that contradict each other or differ in numbers only are other layers, or are counted otherwise.
                if (
                    link is None
                    or not self._is_open(link)
                    or mine.unnumbered == near.unnumbered
                    or contradict(mine.words, near.words)
                    or theirs.has_rival(near, mine, ours)
                    or ours.has_rival(mine, near, theirs)
                ):
                    continue
                beside = theirs.by_module[near.module] if mine.leaf == near.leaf else {}
                pairs = [(other, beside[leaf]) for leaf, other in ours.by_module[mine.module].items() if leaf in beside]
                if all(other.rank == counterpart.rank for other, counterpart in pairs):
                    nearest = "of the tensors with these shapes, the names are the closest"
                    self._accept(link, "nothing else has these shapes" if alone else nearest)
                    for other, counterpart in pairs:
                        extra = matched(other, counterpart) if other.keys.keys() <= mine.keys.keys() else None
                        if extra is not None and extra.numbers == link.numbers and self._is_open(extra):
                            self._accept(extra, "the other tensors of the module fit")


def _starts(text: str) -> list[int]:
    """Where the parts of a name begin."""
    return [0, *(at + 1 for at, letter in enumerate(text) if letter == ".")]


# Rules ---------------------------------------------------------------------------------------------------------------


def written_rules(
    links: Iterable[Link],
    source: Mapping[str, Trait],
    target: Mapping[str, Trait] | None = None,
    placed: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[Suggestion], set[str]]:
    """Few rules for links, each correct by itself, and the keys that they take.

    source, target: all keys; without a target, rules take only keys with a link.  placed: keys that have a place
    already, with their names. No rule takes a key that belongs to another, or gives a key without a counterpart a name
    that is in use.
    """
    links = sorted(links, key=lambda link: not link.chain)
    meant = {key: ("", name) for key, name in placed.items()} | {k: g for link in links for k, g in link.goals.items()}
    names = {name for goal in meant.values() for name in goal[1:]} | {key for key in source if key not in meant}
    budget, rules, covered = TRIES // (READING + len(source)), list[Suggestion](), set[str]()

    def taken_by(text: str) -> Goals:
        """Where the rule sends keys; nothing if it would take a key that it must not."""
        try:
            goals = goals_of(steps_of(parse_rules(text), source)[0])
        except CkptoolError:  # a name that no rule can write, or tensors that belong together and are not all there
            return {}
        takes = {k: goal for k, goal in goals.items() if k not in placed and (target is None or goal != ("", k))}
        unlinked = {key: goal for key, goal in takes.items() if key not in meant}
        new = {goal[1] for goal in unlinked.values()}
        is_wrong = any(goal != meant.get(key, goal) for key, goal in goals.items()) or (target is None and unlinked)
        is_anothers = len(new) < len(unlinked) or not names.isdisjoint(new)
        fits = any(goal[0] or (target or {}).get(goal[1], 0) == source[key] for key, goal in unlinked.items())
        return {} if is_wrong or is_anothers or fits else takes

    for link in links:
        open_goals = link.goals.keys() - covered
        for text in candidates(link) if open_goals else ():
            budget -= 1
            takes = taken_by(text) if budget >= 0 else {}
            if takes.keys() & open_goals:
                names.update(goal[1] for goal in takes.values())
                takes = {key: goal for key, goal in takes.items() if key not in covered}
                agree = len({takes[key] for key in takes.keys() & meant.keys()})
                rules.append(Suggestion((text,), agree, len({*takes.values()}), link.why))  # several may become one
                covered |= takes.keys()
                break
    return rules, covered


def goals_of(steps: Iterable[Step]) -> Goals:
    """Where keys go by the steps; the number of stacked tensors stays open."""
    goals = Goals()
    for step in steps:
        groups = {**step.groups, f"v_{STACKED}": f"{{{STACKED}}}"}
        goals |= dict.fromkeys(step.keys, (step.rule.operations, *(name.fill(groups) for name in step.rule.new)))
    return goals


def candidates(link: Link) -> Iterator[str]:
    """Rules for a link, the most general first: with `*` for the parts that both names share before their ends."""
    old, new = _PARTS.split(link.old), _PARTS.split(link.new)
    leaf = int(old[-1] != new[-1])  # the leaf may be renamed: `gamma`, `weight`
    stems, ends = [side[: len(side) - leaf] for side in (old, new)], [side[len(side) - leaf :] for side in (old, new)]
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(*map(reversed, stems), strict=False))
    for length in range(sum(1 for _ in shared), 0, -1):
        before, after = (".".join([*stem[:-length], "*", *end]) for stem, end in zip(stems, ends, strict=True))
        yield rule_text(before, after, link.chain)
    yield rule_text(link.old, link.new, link.chain)


def rule_text(old: str, new: str, chain: str = "") -> str:
    """A rule from the names of its sides; with a backslash where it would begin like a regular expression."""
    start = "\\" if old.startswith("re:") else ""
    return f"{start}{old} => {new}{f' : {chain}' if chain else ''}"


def suggest(
    source: Mapping[str, Trait], target: Mapping[str, Trait], placed: Mapping[str, str] | None = None
) -> list[Suggestion]:
    """Suggestions for keys of `source` without a counterpart in `target`, a rule each.

    source: all keys as the rules will see them, with their shapes; None for what has none.  placed: keys that have a
    name of the target already; by default those that are equal. All rules together are valid, give no two keys one name
    and change no key that is placed.
    """
    placed = {key: key for key in source if key in target} if placed is None else placed
    names = set(placed.values())
    ours = {key: source[key] for key in source if key not in placed and is_plain(key)}
    theirs = {key: target[key] for key in target if key not in names and key not in source and is_plain(key)}
    if not ours or not theirs:
        return []
    search = Search((ours, theirs))
    search.run()
    suggestions, _ = written_rules(search.links, source, target, placed)
    if len(search.ways) > 1:
        why = f"the names and shapes fit in more than one way: {listed([*map(printable, search.ways)])}"
        suggestions.append(Suggestion((), 0, 0, why))
    return suggestions


def is_plain(key: str) -> bool:
    """True for a key that is not too long and contains no placeholder."""
    return len(key) <= LONG and not _HELD.search(key)


def rules_file(suggestions: Iterable[Suggestion]) -> str:
    """The suggestions as a YAML file for `rename --rules` and `warm-start --rules`."""
    lines = ["# Rules OLD => NEW, tried in this order; the first that matches a key counts."]
    for suggestion in suggestions:
        lines.append("")
        if suggestion.rules:
            total, agree = counted(suggestion.total, "shape"), form(suggestion.agree, "agrees", "agree")
            lines.append(f"# {suggestion.agree:,} of {total} {agree}")
        lines += [f"# {printable(suggestion.why)}", *map(yaml_item, suggestion.rules)]
    return "\n".join(lines) + "\n"


def yaml_item(text: str) -> str:
    """A text as a one-line list item in a file of rules."""
    import yaml

    return yaml.safe_dump([text], default_style="'", width=1 << 30, allow_unicode=False).strip()
