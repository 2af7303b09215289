"""Rules that would make more of a checkpoint fit a target, as what one can pass back to `--rename` or `--rules`.

Keys that differ in numbers only are a family. A link says which family of the target one of the checkpoint is: by the
prefix of a wrapper, by words and shapes, or by order alone. It is certain only if no other family of
either side has as much for it; what rests on the order of the keys alone never is. That makes it conservative: where
every word of a name either stays or is replaced by one that is used nowhere else, and numbers stay, a certain link is
a true one. The links become few rules, each tried on all keys.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice, takewhile
from typing import Any, NamedTuple

from ckptool.analysis.warm_start import Suggestion
from ckptool.conventions.state_dicts import without_wrappers
from ckptool.errors import CkptoolError, counted, form, listed, printable
from ckptool.facts import dataclass, field
from ckptool.names.rules import parse_operation, parse_rules
from ckptool.names.steps import Step, steps_of

Trait = tuple[int, ...] | None
"""What two keys must have in common to be the same tensor: the shape, or the shape and the values."""
Numbers = tuple[str, ...]
Goals = dict[str, tuple[str, ...]]
"""Where keys go: the operations, and the new names that a key becomes, or a part of."""

# Stand where a number was, and that of tensors that are stacked, and between names; no key that has one is looked at.
HOLE, STACK, BREAK = map(chr, range(0xF0000, 0xF0003))
STACKED = "e"  # the variable of those that are stacked
VARIABLES = "nmkj"  # of rules, for the numbers of a family; so many of them vary at most
PLAIN = tuple(f"{{{name}}}" for name in VARIABLES)
_HELD = re.compile(f"[{HOLE}{STACK}{BREAK}]")
LEVELS = ((4, 4), (3, 3), (2, 2), (2, 1), (1, 2), (1, 1), (0, 0))  # how many numbers of names vary: all first
LONG, DEEP = 500, 32  # characters of a key and parts of a name; nothing is suggested for longer ones
MOST = 10_000  # keys of a side: of more, only the prefix of a wrapper is found
MOST_ALIKE = 64  # names of the same shapes that are compared
MOST_WAYS, MOST_DOUBTFUL = 4, 40  # prefixes that may be meant, and doubtful rules, that are shown
TRIES = 300_000  # of a rule on a key; reading a rule counts for `READING` of them
READING = 400
_NUMBER = re.compile(r"(?<![0-9])(?<!\.original)([0-9]{1,15})(?![0-9])")
_PARTS = re.compile(r"\.(?![^{}]*\})")  # the dots of a name in a rule, but those within {a.b,c}

# Words ---------------------------------------------------------------------------------------------------------------

# Words of different libraries for one thing.
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
    (re.compile(r"\bwte\b"), "token_embed"),
    (re.compile(r"\bwpe\b"), "pos_embed"),
    (re.compile(r"layer_norm|LayerNorm"), "norm"),
)
# Words that many names have, and that do not tell one tensor of a block from another.
_WEAK = frozenset("linear block model module net network backbone features body self base transformer enc".split())
_PARAMETERS = frozenset("weight bias running mean var num batches tracked".split())
# A name with a word of such a set never means a name with a different one.
_ROLES = tuple(
    frozenset(roles.split())
    for roles in (
        "weight bias|mean var|enc dec|student teacher|online momentum|up down gate|self cross|left right|src tgt|in out"
        "|text image vision visual audio|real imag|generator discriminator|actor critic|q k v qkv"
    ).split("|")
)
_LETTERS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_]+")


class Words(NamedTuple):
    """The words of a name in their common spelling. inner: the strong ones that are no parameter's name."""

    strong: frozenset[str]
    weak: frozenset[str]
    inner: frozenset[str]

    def is_nearer(self, one: Words, other: Words) -> bool:
        """True if it shares more words with `one` than with `other`, and all that it shares with that."""
        near, far = ((self.strong & each.strong, self.weak & each.weak) for each in (one, other))
        return far[0] < near[0] or (far[0] == near[0] and far[1] < near[1])

    def contradict(self, other: Words) -> bool:
        """True for names that cannot be the same tensor, whatever their shapes: a query and a key."""
        ours, theirs = self.strong | self.weak, other.strong | other.weak
        return any((mine := ours & roles) and (also := theirs & roles) and not mine & also for roles in _ROLES)


@lru_cache(4096)
def words(name: str) -> Words:
    """The words of a name, without its numbers. The second and third of the same word get a mark each."""
    for compound, plain in _COMPOUND:
        name = compound.sub(plain, name)
    counts = Counter(_WORD.get(word.lower(), word.lower()) for word in _LETTERS.findall(name))
    marked = frozenset(word + "+" * more for word, count in counts.items() for more in range(min(count, 3)))
    weak = frozenset(word for word in marked if word.rstrip("+") in _WEAK)
    inner = frozenset(word for word in marked - weak if word.rstrip("+") not in _PARAMETERS)
    return Words(marked - weak, weak, inner)


# Families ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Family:
    """Keys that differ in their numbers only, by these, in order.

    text: with `HOLE` in the places of numbers.  traits: of the keys, in their order.
    """

    text: str
    keys: dict[Numbers, str]
    traits: tuple[Trait, ...]

    @cached_property
    def words(self) -> Words:
        return words(self.text)

    @cached_property
    def unnumbered(self) -> str:
        """The name without the parts that are numbers."""
        return re.sub(rf"(?<![^.])[0-9{HOLE}]+\.", "", self.text)

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


def families(traits: Mapping[str, Trait], vary: int) -> list[Family]:
    """The families of keys. vary: how many numbers of a name may vary, the first ones; the others are text."""
    alike: dict[tuple[str, ...], list[tuple[Numbers, str]]] = defaultdict(list)
    for key in traits:
        parts = _NUMBER.split(key)
        alike[tuple(parts[::2])].append((tuple(parts[1::2]), key))
    stack, found = [*alike.items()], list[Family]()
    while stack:
        pieces, rows = stack.pop()
        columns = zip(*(numbers for numbers, _ in rows), strict=True)
        varying = [place for place, column in enumerate(columns) if len(set(column)) > 1]
        if len(varying) > vary:
            parts_of: dict[Numbers, list[tuple[Numbers, str]]] = defaultdict(list)
            for numbers, key in rows:
                parts_of[tuple(numbers[place] for place in varying[vary:])].append((numbers, key))
            stack += [(pieces, some) for some in parts_of.values()]
            continue
        texts, first = [pieces[0]], rows[0][0]
        for place, piece in enumerate(pieces[1:]):
            if place in varying:
                texts.append(piece)
            else:
                texts[-1] += first[place] + piece
        rows.sort(key=lambda row: ([*map(int, row[0])], row[0]))
        keys = {tuple(numbers[place] for place in varying): key for numbers, key in rows}
        found.append(Family(HOLE.join(texts), keys, tuple(traits[key] for key in keys.values())))
    order = {key: number for number, key in enumerate(traits)}
    return sorted(found, key=lambda family: min(order[key] for key in family.keys.values()))


class Match(NamedTuple):
    """Pairs of keys of two families. numbers: of the new names, as in rules.

    known: the numbers stay what they are, or the traits say which is which.
    """

    ours: Family
    theirs: Family
    pairs: dict[str, str]
    numbers: list[str]
    known: bool


def matched(ours: Family, theirs: Family | None) -> Match | None:
    """Which key of one family is which of another, with the same traits; None where the numbers do not say so.

    Keys of the same numbers, where these begin alike and one family may go on for longer; or in their order.
    """
    if theirs is None:
        return None
    have, want = (dict(zip(each.keys, each.traits, strict=True)) for each in (ours, theirs))
    mine, goals = [*have], [*want]
    if mine[0] == goals[0] and (have.keys() <= want.keys() or want.keys() <= have.keys()):
        mine = goals = [numbers for numbers in mine if numbers in want]
    fitting = fitted(mine, goals) if [have[each] for each in mine] == [want[each] for each in goals] else None
    if fitting is None:
        return None
    pairs = {ours.keys[old]: theirs.keys[new] for old, new in zip(mine, goals, strict=True)}
    plain = [at for at, number in enumerate(fitting) if number[1:-1] in VARIABLES]
    alike: dict[Numbers, list[Trait]] = defaultdict(list)
    for numbers in goals:
        alike[tuple(numbers[at] for at in plain)].append(want[numbers])
    known = len(alike) == len(goals) or any(len(set(each)) > 1 for each in alike.values())
    return Match(ours, theirs, pairs, fitting, known)


def fitted(old: Sequence[Numbers], new: Sequence[Numbers]) -> list[str] | None:
    """The numbers of new names, in rules, by those of the old ones beside them: `{n}`, `{n + 1}`, `{n // 3}`, …"""
    columns = list(zip(VARIABLES, zip(*old, strict=True), strict=False))
    found = [next(_expressions(columns, goal), "") for goal in zip(*new, strict=True)]
    return [f"{{{each}}}" for each in found] if all(found) else None


def _expressions(columns: Iterable[tuple[str, tuple[str, ...]]], goal: tuple[str, ...]) -> Iterator[str]:
    wanted = [int(number) for number in goal]
    for name, column in columns:
        have = [int(number) for number in column]
        if column == goal:
            yield name
        by = wanted[0] - have[0]
        if by and all(b - a == by for a, b in zip(have, wanted, strict=True)):
            yield f"{name} {'+' if by > 0 else '-'} {abs(by)}"
        for size in range(2, min(len(set(have)), 64)):
            if [each // size for each in have] == wanted:
                yield f"{name} // {size}"
            if [each % size for each in have] == wanted:
                yield f"{name} % {size}"


# Links ---------------------------------------------------------------------------------------------------------------


class Reason(NamedTuple):
    """Why a link is thought to be true. way: what it is one of several ways to do, where it is doubtful."""

    why: str = ""
    certain: bool = True
    way: object = None


SEEN = Reason()


class Link(NamedTuple):
    """Keys of the one side that are keys of the other. old, new: both names as a rule has them, with its operations."""

    old: str
    new: str
    goals: Goals
    chain: str = ""
    reason: Reason = SEEN


class Use(NamedTuple):
    """Keys that become one of the other side, or that one becomes. names: theirs, where `STACK` stands for the numbers
    of what is stacked.  whole: that one."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    whole: str


def link_of(uses: Sequence[Use], chain: str = "", splits: bool = False, reason: Reason = SEEN) -> Link | None:
    """The link of keys that become others by the same operations; None where their numbers do not say which.

    splits: the wholes become the others, by the inverse.
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
    return Link(choice(names[:parts]), choice(names[parts:]), goals, text, reason)


def filled(text: str, numbers: Sequence[str]) -> str:
    """A text with numbers, or variables, in their places."""
    places = iter(numbers)
    return re.sub(HOLE, lambda _: next(places), text)


def escaped(text: str) -> str:
    """A literal text in a rule: with a backslash before what would mean something."""
    return re.sub(r"([\\*{,]|\s(?=:\s))", r"\\\1", text).replace("=>", "=\\>")


def choice(names: Sequence[str]) -> str:
    """Names that differ at one place as one: `attn.{q,k,v}_proj`."""
    if len(names) == 1:
        return names[0]
    rows = [re.findall(r"\{[^{}]*\}|\\.|[^\W_]+|.", name, re.DOTALL) for name in names]
    front = _common_start(rows)
    end = _common_start([row[len(front) :][::-1] for row in rows])[::-1]
    middles = ("".join(row[len(front) : len(row) - len(end)]) for row in rows)
    return "".join([*front, "{", ",".join(middles), "}", *end])


def _common_start(rows: Sequence[list[str]]) -> list[str]:
    return [column[0] for column in takewhile(lambda column: len({*column}) == 1, zip(*rows, strict=False))]


# The search ----------------------------------------------------------------------------------------------------------


class OpenFamilies(NamedTuple):
    """Those of a side that have no certain link. alike: by shape.  called: by word and rank."""

    alike: Mapping[Trait, list[Family]]
    called: Mapping[tuple[str, int], list[Family]]

    @classmethod
    def of(cls, some: Iterable[Family], *keys: Mapping[str, Trait]) -> OpenFamilies:
        found, every = cls(defaultdict(list), defaultdict(list)), {key for each in keys for key in each}
        for family in (each for each in some if every >= {*each.keys.values()}):
            for trait in {*family.traits}:
                found.alike[trait].append(family)
            for word in family.words.strong | family.words.weak:
                found.called[word, family.rank].append(family)
        return found

    def has_rival(self, chosen: Family, other: Family, others: OpenFamilies) -> bool:
        """True if the name of another of these is as near to that of the other side: it has a shape of the chosen one,
        or it is nearer, and has a shape that the other side does not have."""
        near, far = other.words, chosen.words
        alike = (each for trait in {*chosen.traits} for each in self.alike[trait])
        if any(each is not chosen and not near.is_nearer(far, each.words) for each in alike):
            return True
        more = (near.strong | near.weak) - far.strong - far.weak
        named = (each for word in more for each in self.called.get((word, other.rank), ()))
        return any(near.is_nearer(each.words, far) and others.alike.keys().isdisjoint(each.traits) for each in named)


Modules = Mapping[str, Mapping[str, Family]]
"""Families by their modules and the last parts of their names."""


def _modules(some: Iterable[Family]) -> Modules:
    found: dict[str, dict[str, Family]] = defaultdict(dict)
    for family in some:
        found[family.module][family.leaf] = family
    return found


@dataclass(slots=True, eq=False)
class Search:
    """The search for links. free: keys of both sides that have none so far.  doubtful: those that have a doubtful one,
    and may be what another key is."""

    free: tuple[dict[str, Trait], dict[str, Trait]]
    links: list[Link] = field(default_factory=list)
    doubtful: tuple[dict[str, Trait], dict[str, Trait]] = field(default_factory=lambda: ({}, {}))

    def run(self) -> None:
        """Finds all, with all numbers of names as variables first, then with fewer."""
        levels = LEVELS if max(map(len, self.free)) <= MOST else ()
        self._by_prefix(*map(families, self.free, LEVELS[0]))
        for level in levels:
            open_ones = (free | doubtful for free, doubtful in zip(self.free, self.doubtful, strict=True))
            self._by_words(*map(families, open_ones, level))
        for level in levels:
            self._by_order(*map(families, self.free, level))

    def _is_open(self, match: Match) -> bool:
        return all(key in self.free[0] and goal in self.free[1] for key, goal in match.pairs.items())

    def _may_be(self, match: Match) -> bool:
        """False where names contradict each other, or differ in numbers only: other layers, or counted otherwise."""
        one, other = match.ours, match.theirs
        return one.unnumbered != other.unnumbered and not one.words.contradict(other.words) and self._is_open(match)

    def _accept(self, match: Match, reason: Reason) -> None:
        link = link_of([Use((old,), (old,), new) for old, new in match.pairs.items()], reason=reason)
        if link is not None:
            self.links.append(link)
            for free, doubtful, keys in zip(self.free, self.doubtful, (match.pairs, match.pairs.values()), strict=True):
                gone = {key: free.pop(key, None) for key in keys}
                doubtful |= {} if reason.certain else gone

    def _with_its_module(self, match: Match, modules: Sequence[Modules], why: str, certain: bool = True) -> None:
        """Accepts two families, and those of their modules, of no other numbers, that share leaves and shapes."""
        self._accept(match, Reason(why, certain))
        ours, theirs = match.ours, match.theirs
        for leaf, one in modules[0][ours.module].items() if ours.leaf == theirs.leaf else ():
            other = matched(one, modules[1][theirs.module].get(leaf)) if one.keys.keys() <= ours.keys.keys() else None
            if other is not None and other.numbers == match.numbers and self._is_open(other):
                self._accept(other, Reason("the other tensors of the module fit", certain))

    def _by_prefix(self, *sides: list[Family]) -> None:
        """Names that are the same, or are without the prefix of a wrapper, or with it; doubtful where several fit."""
        ours, theirs = ({each.text: each for each in side if each.text.count(".") < DEEP} for side in sides)
        votes = dict[tuple[str, str], None]()
        for mine, others, back in ((ours, theirs, False), (theirs, ours, True)):
            for text in mine:
                starts = (start for start in _starts(text) if text[start:] in others)
                votes |= {("", text[:start]) if back else (text[:start], ""): None for start in starts}
        ways = list[tuple[str, str, list[Match]]]()
        for old, new in votes:
            below = [
                matched(each, theirs.get(new + t.removeprefix(old))) for t, each in ours.items() if t.startswith(old)
            ]
            matches = [match for match in below if match is not None]
            if 2 * len(matches) >= len(below):
                ways.append((old, new, matches))
        largest = max((len(matches) for *_, matches in ways), default=0)
        ways = [way for way in ways if 2 * len(way[2]) >= largest]
        for old, new, matches in ways[:MOST_WAYS]:
            why = f"without {printable(old)!r} the names are the target's"
            why = f"with {printable(new)!r} before them the names are the target's" if new else why
            # Other names of either side that end in what the prefix leaves may be meant instead.
            taken = {id(each) for match in matches for each in (match.ours, match.theirs)}
            rest = [each for side in (ours, theirs) for each in side.values() if id(each) not in taken]
            ends = {
                (each.text[start:], trait) for each in rest for start in _starts(each.text) for trait in each.traits
            }
            bare = [match.ours if new else match.theirs for match in matches]
            rivals = sum(any((each.text, trait) in ends for trait in each.traits) for each in bare)
            is_certain = len(ways) == 1 and (2 * rivals < len(matches) or not without_wrappers(old or new))
            if len(ways) > 1:
                shown = listed([printable(f"{old}* as {new}*".replace(HOLE, "*")) for old, new, _ in ways])
                why = f"the names and shapes fit in more than one way: {shown}"
            elif not is_certain:
                why += "; other names end so, too"
            for match in matches:
                self._accept(match, Reason(why, is_certain, (old, new)))

    def _by_words(self, *sides: list[Family]) -> None:
        """Families that have more words in common with each other than with any rival, in modules whose other tensors
        are not of another rank."""
        before, modules = -1, [*map(_modules, sides)]
        while len(self.links) != before:
            before = len(self.links)
            ours, theirs = map(OpenFamilies.of, sides, self.free, self.doubtful)
            for shape, mine in ours.alike.items():
                goals = theirs.alike.get(shape, ())
                for one in mine if goals and max(len(mine), len(goals)) <= MOST_ALIKE else ():
                    near = max(goals, key=lambda each: [len(a & b) for a, b in zip(one.words, each.words, strict=True)])
                    shapes = {*one.traits, *near.traits}
                    alone = all(len(side.alike.get(each, ())) == 1 for side in (ours, theirs) for each in shapes)
                    linear = alone and "linear" in one.words.weak & near.words.weak
                    telling = one.words.inner & near.words.inner or (linear and len(one.keys) + len(shape or ()) > 3)
                    match = matched(one, near) if telling else None
                    if match is None or not match.known or not self._may_be(match):
                        continue
                    beside = modules[1][near.module] if one.leaf == near.leaf else {}
                    leaves = modules[0][one.module].items()
                    if (
                        all(each.rank == beside[leaf].rank for leaf, each in leaves if leaf in beside)
                        and not theirs.has_rival(near, one, ours)
                        and not ours.has_rival(one, near, theirs)
                    ):
                        why = "of the tensors with these shapes, the names are the nearest"
                        self._with_its_module(match, modules, "nothing else has these shapes" if alone else why)

    def _by_order(self, *sides: list[Family]) -> None:
        """What is left, in the order of the keys, as doubtful: weights, biases and others of the same shapes, where
        both sides have as many."""
        classes: dict[object, tuple[list[Family], list[Family]]] = defaultdict(lambda: ([], []))
        modules = [*map(_modules, sides)]
        for side, some in enumerate(sides):
            for family in some:
                classes[family.traits, family.words.strong & {"weight", "bias"}][side].append(family)
        for mine, goals in classes.values():
            for match in map(matched, mine, goals) if len(mine) == len(goals) else ():
                if match is None or not self._may_be(match):
                    continue
                by_chance = len(mine) == len(match.pairs) == 1 and len(match.ours.traits[0] or (0, 0)) < 2
                if not by_chance and any(trait not in (None, (), (1,)) for trait in match.ours.traits):
                    order = "the shapes fit, and only the order of the names says which is which"
                    unsaid = "the shapes fit, but the names do not say so, or say it of others as well"
                    self._with_its_module(match, modules, order if len(mine) > 1 else unsaid, False)


def _starts(text: str) -> list[int]:
    """Where the parts of a name begin."""
    return [0, *(at + 1 for at, letter in enumerate(text) if letter == ".")]


def fused(ours: Mapping[str, Trait], theirs: Mapping[str, Trait]) -> Iterator[Link]:
    """Queries, keys and values that one side keeps in one tensor and the other in three, by names and shapes."""
    why = "the shapes of queries, keys and values fit one after the other, and heads in turns would, too"
    for apart, wholes, splits in ((ours, theirs, False), (theirs, ours, True)):
        threes: dict[object, dict[str, Family]] = defaultdict(dict)
        for family in families(apart, len(VARIABLES)):
            if len(role := family.words.strong & {"q", "k", "v"}) == 1:
                same = family.words.strong - role, family.words.weak, family.text.split(HOLE)[-1].rpartition(".")[2]
                threes[(*same, tuple(family.keys))].setdefault("".join(role), family)
        ones = [one for one in families(wholes, len(VARIABLES)) if one.words.strong & {"qkv", "attn"}]
        for three in threes.values():
            parts = [three[role] for role in "qkv" if role in three]
            for axis in (
                (0, -1)
                if len(parts) == 3 and all(len({*part.traits}) == 1 and part.traits[0] for part in parts)
                else ()
            ):
                shapes: list[Any] = [part.traits[0] for part in parts]
                sizes, total = [shape[axis] for shape in shapes], [*shapes[0]]
                total[axis] = sum(sizes)
                kind = parts[0].keys.keys(), "bias" in parts[0].words.strong, {(*total,)}
                fits = [one for one in ones if kind == (one.keys.keys(), "bias" in one.words.strong, {*one.traits})]
                if len(fits) == 1:
                    chain = f"cat {axis}{f' {sizes}' if len(set(sizes)) > 1 else ''}"
                    rows = ((key, tuple(part.keys[at] for part in parts)) for at, key in fits[0].keys.items())
                    link = link_of([Use(keys, keys, key) for key, keys in rows], chain, splits, Reason(why, False))
                    yield from [] if link is None else [link]
                    break


# Rules ---------------------------------------------------------------------------------------------------------------


class WrittenRule(NamedTuple):
    """A rule for a link. takes: the keys that no rule before it takes, with what it makes of them.  agree: of how many
    goals that is what they are."""

    text: str
    link: Link
    takes: Goals
    agree: int


def written_rules(
    links: Iterable[Link],
    source: Mapping[str, Trait],
    target: Mapping[str, Trait],
    placed: Mapping[str, str],
    kept: Collection[str] = (),
) -> list[WrittenRule]:
    """Few rules for links, of which each is right by itself.

    source, target: all keys.  placed: keys that have a place, with their names.  kept: keys that other rules are for.
    No rule takes a key that belongs to another, or gives a key without a counterpart a name that is somebody's.
    """
    links = sorted(links, key=lambda link: not link.chain)
    meant = {key: ("", name) for key, name in placed.items()} | {k: g for link in links for k, g in link.goals.items()}
    names = {name for goal in meant.values() for name in goal[1:]} | {key for key in source if key not in meant}
    left, rules, covered = TRIES // (READING + len(source)), list[WrittenRule](), set[str]()

    def taken_by(text: str) -> Goals:
        """What the rule makes of keys; nothing if it would take a key that it must not."""
        try:
            made = goals_of(steps_of(parse_rules(text), source)[0])
        except CkptoolError:  # a name with what no rule can say, or some of what belongs together
            return {}
        takes = {key: goal for key, goal in made.items() if key not in placed and goal != ("", key)}
        others = {key: goal for key, goal in takes.items() if key not in meant}
        new = {goal[1] for goal in others.values()}
        is_wrong = any(goal != meant.get(key, goal) for key, goal in made.items()) or not others.keys().isdisjoint(kept)
        is_anothers = len(new) < len(others) or not names.isdisjoint(new)
        fits = any(goal[0] or target.get(goal[1], False) == source[key] for key, goal in others.items())
        return {} if is_wrong or is_anothers or fits else takes

    for link in links:
        open_goals = link.goals.keys() - covered
        if not open_goals or not (link.reason.certain or len(rules) < MOST_DOUBTFUL):
            continue
        texts = list(islice(candidates(link), max(0, left)))
        left -= len(texts)
        tried = [(text, takes) for text in texts if (takes := taken_by(text)).keys() & open_goals]
        if tried:
            text, takes = max(tried, key=lambda each: (len(each[1].keys() & meant.keys()), -len(each[1])))
            names.update(goal[1] for goal in takes.values())
            takes = {key: goal for key, goal in takes.items() if key not in covered}
            rules.append(WrittenRule(text, link, takes, len({takes[key] for key in takes.keys() & meant.keys()})))
            covered |= takes.keys()
    return rules


def goals_of(steps: Iterable[Step]) -> Goals:
    """Where keys go by the steps; the number of what is stacked stays open."""
    goals = Goals()
    for step in steps:
        groups = {**step.groups, f"v_{STACKED}": f"{{{STACKED}}}"}
        goals |= dict.fromkeys(step.keys, (step.rule.operations, *(name.fill(groups) for name in step.rule.new)))
    return goals


def candidates(link: Link) -> Iterator[str]:
    """Rules for a link, the most general first: with `*` for parts that both names share before their ends."""
    old, new = _PARTS.split(link.old), _PARTS.split(link.new)
    leaf = int(old[-1] != new[-1])  # which may have another name: `gamma`, `weight`
    stems, ends = [side[: len(side) - leaf] for side in (old, new)], [side[len(side) - leaf :] for side in (old, new)]
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(*map(reversed, stems), strict=False))
    for length in range(sum(1 for _ in alike), 0, -1):
        before, after = (".".join([*stem[:-length], "*", *end]) for stem, end in zip(stems, ends, strict=True))
        yield rule_text(before, after, link.chain)
    yield rule_text(link.old, link.new, link.chain)


def rule_text(old: str, new: str, chain: str = "") -> str:
    """A rule of names as rules have them; with a backslash where it would begin like a regular expression."""
    start = "\\" if old.startswith("re:") else ""
    return f"{start}{old} => {new}{f' : {chain}' if chain else ''}"


def suggest(
    source: Mapping[str, Trait], target: Mapping[str, Trait], placed: Mapping[str, str] | None = None
) -> list[Suggestion]:
    """Suggestions for keys of `source` without a counterpart in `target`, a rule each: unambiguous ones first.

    source: all keys as the rules will see them, with their shapes; None for what has none.  placed: names of the target
    that keys have already; by default those that are equal. All unambiguous rules together are valid, give no two keys
    one name and change no key that is placed; so is each of the others, given before them.
    """
    placed = {key: key for key in source if key in target} if placed is None else placed
    names = set(placed.values())
    ours = {key: source[key] for key in source if key not in placed and is_plain(key)}
    theirs = {key: target[key] for key in target if key not in names and key not in source and is_plain(key)}
    if not ours or not theirs:
        return []
    search = Search((ours, theirs))
    search.run()
    ways: dict[object, list[Link]] = defaultdict(list)
    for link in (*search.links, *fused(*search.free)):
        ways[link.reason.certain or link.reason.way].append(link)
    sure = ways.pop(True, [])
    kept = {key for link in sure for key in link.goals}
    found = written_rules(sure, source, target, placed)
    others = [rule for links in ways.values() for rule in written_rules(links, source, target, placed, kept)]
    others = sorted(others, key=lambda rule: -rule.agree)[:MOST_DOUBTFUL]
    return [
        Suggestion(
            (rule.text,), rule.agree, len({*rule.takes.values()}), rule.link.reason.certain, rule.link.reason.why
        )
        for rule in (*found, *others)  # of which several keys may become one
    ]


def is_plain(key: str) -> bool:
    """True for a key that is neither too long nor has what stands for something else here."""
    return len(key) <= LONG and not _HELD.search(key)


def rules_file(suggestions: Iterable[Suggestion]) -> str:
    """The suggestions as a YAML file for `rename --rules` and `warm-start --rules`; ambiguous ones as comments."""
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
            lines.append(f"{'' if suggestion.unambiguous else '# '}{yaml_item(rule)}")
    return "\n".join(lines) + "\n"


def yaml_item(text: str) -> str:
    """A text as an item of a list in a file of rules, in a line."""
    import yaml

    return yaml.safe_dump([text], default_style="'", width=1 << 30, allow_unicode=False).strip()
