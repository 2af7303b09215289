"""Rules that would make more of a checkpoint fit a target, as what one can pass back to `--rename` or `--rules`.

Keys that differ in numbers only are a family. A link says which family of the target one of the checkpoint is: by the
prefix of a wrapper, or by words and shapes. It is made only if no other family of either side has as much for it: what
is ambiguous is not suggested. That makes it conservative: where every word of a name either stays or is replaced by one
that is used nowhere else, and numbers stay, a link is a true one. The links become few rules, each tried on all keys.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from types import MappingProxyType
from typing import NamedTuple

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


@lru_cache(4096)
def words(name: str) -> frozenset[str]:
    """The words of a name in their common spelling, without its numbers."""
    for compound, plain in _COMPOUND:
        name = compound.sub(plain, name)
    return frozenset(_WORD.get(word.lower(), word.lower()) for word in _LETTERS.findall(name))


def contradict(one: frozenset[str], other: frozenset[str]) -> bool:
    """True for the words of names that cannot be the same tensor, whatever their shapes: a query and a key."""
    return any((ours := one & roles) and (theirs := other & roles) and not ours & theirs for roles in _ROLES)


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
    def words(self) -> frozenset[str]:
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


def matched(ours: Family, theirs: Family | None) -> Link | None:
    """Which key of one family is which of another, with the same traits; None where nothing says so.

    Keys of the same numbers, where these begin alike and one family may go on for longer; or in their order, where the
    traits tell that it is so.
    """
    have, want = (dict(zip(each.keys, each.traits, strict=True)) if each else {} for each in (ours, theirs))
    mine, goals = [*have], [*want]
    if theirs is not None and mine[0] == goals[0] and (have.keys() <= want.keys() or want.keys() <= have.keys()):
        mine = goals = [numbers for numbers in mine if numbers in want]
    if theirs is None or [have[each] for each in mine] != [want[each] for each in goals]:
        return None
    alike: dict[Numbers, set[Trait]] = defaultdict(set)  # of the keys of which the same numbers stay what they are
    places = [place for place, column in enumerate(zip(*goals, strict=True)) if column in zip(*mine, strict=True)]
    for numbers in goals:
        alike[tuple(numbers[place] for place in places)].add(want[numbers])
    known = len(alike) == len(goals) or any(len(each) > 1 for each in alike.values())
    keys = ((ours.keys[old], theirs.keys[new]) for old, new in zip(mine, goals, strict=True))
    return link_of([Pairing((old,), (old,), new) for old, new in keys]) if known else None


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


class Link(NamedTuple):
    """Keys of the one side that are keys of the other. old, new: both names as a rule has them, with its operations.

    numbers: of the new names.  why: the evidence.
    """

    old: str
    new: str
    goals: Goals
    numbers: list[str]
    chain: str = ""
    why: str = ""


class Pairing(NamedTuple):
    """Keys that become one of the other side, or that one becomes. names: theirs, where `STACK` stands for the numbers
    of what is stacked.  whole: that one."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    whole: str


def link_of(uses: Sequence[Pairing], chain: str = "", splits: bool = False) -> Link | None:
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
    return Link(choice(names[:parts]), choice(names[parts:]), goals, new, text)


def links_of(pairs: Mapping[str, str]) -> Iterator[Link]:
    """Links for keys that are only renamed: for many of them together, or for each where its numbers do not fit."""
    alike: dict[str, list[Pairing]] = defaultdict(list)
    for old, new in pairs.items():
        alike[_NUMBER.sub(HOLE, old + BREAK + new)].append(Pairing((old,), (old,), new))
    for uses in alike.values():
        together = link_of(uses)
        yield from filter(None, [together] if together else (link_of([use]) for use in uses))


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
    """Those of a side that have no link. alike: by shape.  called: by word and rank.  modules: by leaf."""

    alike: dict[Trait, list[Family]]
    called: dict[tuple[str, int], list[Family]]
    modules: dict[str, dict[str, Family]]

    @classmethod
    def of(cls, some: Iterable[Family], free: Mapping[str, Trait]) -> OpenFamilies:
        found = cls(defaultdict(list), defaultdict(list), defaultdict(dict))
        for family in (each for each in some if free.keys() >= {*each.keys.values()}):
            found.modules[family.module][family.leaf] = family
            for trait in {*family.traits}:
                found.alike[trait].append(family)
            for word in family.words:
                found.called[word, family.rank].append(family)
        return found

    def has_rival(self, chosen: Family, other: Family, others: OpenFamilies) -> bool:
        """True if the name of another of these is as near to that of the other side: it has a shape of the chosen one,
        or it is nearer, and has a shape that the other side does not have."""
        name, shared = other.words, other.words & chosen.words
        alike = (each for trait in {*chosen.traits} for each in self.alike[trait])
        if any(each is not chosen and not name & each.words < shared for each in alike):
            return True
        called = (each for word in name - shared for each in self.called.get((word, other.rank), ()))
        return any(name & each.words > shared and others.alike.keys().isdisjoint(each.traits) for each in called)


@dataclass(slots=True, eq=False)
class Search:
    """The search for links. free: keys of both sides that have none so far.  ways: prefixes that would fit."""

    free: tuple[dict[str, Trait], dict[str, Trait]]
    links: list[Link] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Finds all, with all numbers of names as variables first, then with fewer."""
        self._by_prefix(*map(families, self.free, LEVELS[0]))
        for level in LEVELS if max(map(len, self.free)) <= MOST else ():
            self._by_words(*map(families, self.free, level))

    def _is_open(self, link: Link) -> bool:
        return all(key in self.free[0] and goal in self.free[1] for key, (_, goal) in link.goals.items())

    def _accept(self, link: Link, why: str) -> None:
        self.links.append(link._replace(why=why))
        for key, (_, goal) in link.goals.items():
            del self.free[0][key], self.free[1][goal]

    def _by_prefix(self, *sides: list[Family]) -> None:
        """Names that are the same, or are without the prefix of a wrapper, or with it."""
        ours, theirs = ({each.text: each for each in side if each.text.count(".") < DEEP} for side in sides)
        votes = dict[tuple[str, str], None]()
        for mine, others, back in ((ours, theirs, False), (theirs, ours, True)):
            for text in mine:
                starts = (start for start in _starts(text) if text[start:] in others)
                votes |= {("", text[:start]) if back else (text[:start], ""): None for start in starts}
        ways = list[tuple[str, str, dict[str, Link]]]()
        for old, new in votes:
            below = [text for text in ours if text.startswith(old)]
            goals = ((text, theirs.get(new + text.removeprefix(old))) for text in below)
            links = {text.removeprefix(old): link for text, goal in goals if (link := matched(ours[text], goal))}
            if 2 * len(links) >= len(below):
                ways.append((old, new, links))
        largest = max((len(links) for *_, links in ways), default=0)
        ways = [way for way in ways if 2 * len(way[2]) >= largest]
        self.ways = [f"{old}* as {new}*".replace(HOLE, "*") for old, new, _ in ways]
        for old, new, links in ways if len(ways) == 1 else ():
            # Other names of either side that end in what the prefix leaves may be meant instead.
            linked = {prefix + text for prefix in (old, new) for text in links}
            rest = [each for side in (ours, theirs) for text, each in side.items() if text not in linked]
            ends = {
                (each.text[start:], trait) for each in rest for start in _starts(each.text) for trait in each.traits
            }
            rivals = sum(not ends.isdisjoint((text, trait) for trait in ours[old + text].traits) for text in links)
            if 2 * rivals < len(links) or not without_wrappers(old or new):
                how = f"with {printable(new)!r} before them" if new else f"without {printable(old)!r}"
                for link in links.values():
                    self._accept(link, f"{how} the names are the target's")

    def _by_words(self, *sides: list[Family]) -> None:
        """Families that have more words in common with each other than with any rival, in modules whose other tensors
        are not of another rank; and with them those of their modules, of no other numbers, that share leaves and
        shapes."""
        before = -1
        while len(self.links) != before:
            before = len(self.links)
            ours, theirs = map(OpenFamilies.of, sides, self.free)
            for one, shape in ((one, shape) for shape, some in ours.alike.items() for one in some):
                goals = theirs.alike.get(shape, [])
                if not goals or max(len(ours.alike[shape]), len(goals)) > MOST_ALIKE:
                    continue
                near = max(goals, key=lambda each: len(one.words & each.words))
                shapes = {*one.traits, *near.traits}
                alone = all(len(side.alike.get(each, ())) == 1 for side in (ours, theirs) for each in shapes)
                linear = {"linear"} if alone and len(one.keys) + len(shape or ()) > 3 else set[str]()
                if not one.words & near.words - _PARAMETERS - (_WEAK - linear):
                    continue
                link = matched(one, near)
                # Names that contradict each other, or differ in numbers only, are of other layers, or count otherwise.
                if (
                    link is None
                    or not self._is_open(link)
                    or one.unnumbered == near.unnumbered
                    or contradict(one.words, near.words)
                    or theirs.has_rival(near, one, ours)
                    or ours.has_rival(one, near, theirs)
                ):
                    continue
                beside = theirs.modules[near.module] if one.leaf == near.leaf else {}
                both = [(each, beside[leaf]) for leaf, each in ours.modules[one.module].items() if leaf in beside]
                if all(each.rank == other.rank for each, other in both):
                    nearest = "of the tensors with these shapes, the names are the closest"
                    self._accept(link, "nothing else has these shapes" if alone else nearest)
                    for each, other in both:
                        more = matched(each, other) if each.keys.keys() <= one.keys.keys() else None
                        if more is not None and more.numbers == link.numbers and self._is_open(more):
                            self._accept(more, "the other tensors of the module fit")


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
    """Few rules for links, of which each is right by itself, and the keys that they take.

    source, target: all keys; no target: rules take nothing that has no link.  placed: keys that have a place, with
    their names. No rule takes a key that belongs to another, or gives a key without a counterpart a name that is
    somebody's.
    """
    links = sorted(links, key=lambda link: not link.chain)
    meant = {key: ("", name) for key, name in placed.items()} | {k: g for link in links for k, g in link.goals.items()}
    names = {name for goal in meant.values() for name in goal[1:]} | {key for key in source if key not in meant}
    left, rules, covered = TRIES // (READING + len(source)), list[Suggestion](), set[str]()

    def taken_by(text: str) -> Goals:
        """What the rule makes of keys; nothing if it would take a key that it must not."""
        try:
            made = goals_of(steps_of(parse_rules(text), source)[0])
        except CkptoolError:  # a name with what no rule can say, or some of what belongs together
            return {}
        takes = {k: goal for k, goal in made.items() if k not in placed and (target is None or goal != ("", k))}
        others = {key: goal for key, goal in takes.items() if key not in meant}
        new = {goal[1] for goal in others.values()}
        is_wrong = any(goal != meant.get(key, goal) for key, goal in made.items()) or (target is None and others)
        is_anothers = len(new) < len(others) or not names.isdisjoint(new)
        fits = any(goal[0] or (target or {}).get(goal[1], 0) == source[key] for key, goal in others.items())
        return {} if is_wrong or is_anothers or fits else takes

    for link in links:
        open_goals = link.goals.keys() - covered
        for text in candidates(link) if open_goals else ():
            left -= 1
            takes = taken_by(text) if left >= 0 else {}
            if takes.keys() & open_goals:
                names.update(goal[1] for goal in takes.values())
                takes = {key: goal for key, goal in takes.items() if key not in covered}
                agree = len({takes[key] for key in takes.keys() & meant.keys()})
                rules.append(Suggestion((text,), agree, len({*takes.values()}), link.why))  # several may become one
                covered |= takes.keys()
                break
    return rules, covered


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
    """Suggestions for keys of `source` without a counterpart in `target`, a rule each.

    source: all keys as the rules will see them, with their shapes; None for what has none.  placed: names of the target
    that keys have already; by default those that are equal. All rules together are valid, give no two keys one name
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
    found, _ = written_rules(search.links, source, target, placed)
    if len(search.ways) > 1:
        why = f"the names and shapes fit in more than one way: {listed([*map(printable, search.ways)])}"
        found.append(Suggestion((), 0, 0, why))
    return found


def is_plain(key: str) -> bool:
    """True for a key that is neither too long nor has what stands for something else here."""
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
    """A text as an item of a list in a file of rules, in a line."""
    import yaml

    return yaml.safe_dump([text], default_style="'", width=1 << 30, allow_unicode=False).strip()
