"""Families: keys that differ in numbers only, and the words of their names.

`blocks.{n}.norm{m}.weight` is one family of the four keys of two blocks, or two families of two where only the first
number may vary. Rules are written for pairs of families, so the numbers of one have to follow from those of the other.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

Trait = tuple[int, ...] | None
"""What two keys must have in common to be the same tensor: the shape, or the shape and the values."""
Numbers = tuple[str, ...]

HOLE = chr(0xF0000)  # stands where a number was
VARIABLES = "nmkj"  # of rules, for the numbers of a family; so many of them vary at most
_NUMBER = re.compile(r"(?<![0-9])(?<!\.original)([0-9]{1,15})(?![0-9])")

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
weight: weights
bias: biases
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
_PARAMETERS = frozenset("weight bias running mean var num batches tracked gamma beta parametrizations original".split())
# A name with a word of such a set never means a name with a different one.
_ROLES = tuple(
    frozenset(roles.split())
    for roles in (
        "weight bias|mean var|enc dec|student teacher|online momentum|up down gate|self cross|left right|src tgt|in out"
        "|text image vision visual audio|real imag|generator discriminator|actor critic"
    ).split("|")
)
_QKV = frozenset("qkv") | {"qkv"}
_LETTERS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a name in their common spelling. inner: the strong ones that are no parameter's name."""

    strong: frozenset[str]
    weak: frozenset[str]
    inner: frozenset[str]

    def is_nearer(self, one: Words, other: Words) -> bool:
        """True if it shares more words with `one` than with `other`, and all that it shares with that."""
        near, far = (
            (self.strong & one.strong, self.weak & one.weak),
            (self.strong & other.strong, self.weak & other.weak),
        )
        return far[0] < near[0] or (far[0] == near[0] and far[1] < near[1])

    def contradict(self, other: Words) -> bool:
        """True for names that cannot be the same tensor, whatever their shapes: a query and a key."""
        ours, theirs = self.strong | self.weak, other.strong | other.weak
        if ours & _QKV != theirs & _QKV:
            return True
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


# Leaves with two names. Hugging Face models that came from TensorFlow have gamma and beta;
# torch.nn.utils.parametrizations calls what weight_norm and spectral_norm store otherwise.
_LEAVES = (
    (re.compile(r"(^|\.)gamma$"), r"\1weight"),
    (re.compile(r"(^|\.)beta$"), r"\1bias"),
    *(
        (re.compile(rf"(^|\.)parametrizations\.([^.]+)\.{new}$"), rf"\1\2_{old}")
        for new, old in (("original0", "g"), ("original1", "v"), ("original", "orig"), (r"0\._u", "u"), (r"0\._v", "v"))
    ),
)


# Families ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Family:
    """Keys that differ in their numbers only, by these, in order.

    pieces: the text around the numbers.  traits: of the keys, in their order.
    """

    pieces: tuple[str, ...]
    keys: dict[Numbers, str]
    traits: tuple[Trait, ...]

    @cached_property
    def text(self) -> str:
        """The name, with the leaf in one spelling of several."""
        text = HOLE.join(self.pieces)
        for leaf, common in _LEAVES:
            text = leaf.sub(common, text)
        return text

    @cached_property
    def words(self) -> Words:
        return words(self.text)

    @property
    def module(self) -> str:
        return self.text.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.text.rpartition(".")[2]

    @property
    def head(self) -> str:
        """The text before the first number: the name of the blocks, or the module."""
        before, hole, _ = without_numbers(self.text).partition(HOLE)
        return before if hole else self.module

    @property
    def is_tiny(self) -> bool:
        """True for scalars, which fit everywhere."""
        return all(trait in (None, (), (1,)) for trait in self.traits)

    def template(self, numbers: Sequence[str]) -> str:
        """The name in a rule, with these texts for its numbers."""
        texts = map(escaped, self.pieces)
        return "".join(text + number for text, number in zip(texts, [*numbers, ""], strict=True))

    @property
    def variables(self) -> list[str]:
        """Its numbers in a rule."""
        return [f"{{{name}}}" for name in VARIABLES[: len(self.pieces) - 1]]


def families(traits: Mapping[str, Trait], vary: int) -> list[Family]:
    """The families of keys. vary: how many numbers of a name may vary, the first ones; the others are text."""
    alike: dict[tuple[str, ...], list[tuple[Numbers, str]]] = defaultdict(list)
    for key in traits:
        parts = _NUMBER.split(key)
        alike[tuple(parts[::2])].append((tuple(parts[1::2]), key))
    return [each for pieces, rows in alike.items() for each in _families(pieces, rows, traits, vary)]


def _families(
    pieces: tuple[str, ...], rows: list[tuple[Numbers, str]], traits: Mapping[str, Trait], vary: int
) -> Iterator[Family]:
    columns = zip(*(numbers for numbers, _ in rows), strict=True)
    varying = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    if len(varying) > vary:
        parts: dict[Numbers, list[tuple[Numbers, str]]] = defaultdict(list)
        for numbers, key in rows:
            parts[tuple(numbers[place] for place in varying[vary:])].append((numbers, key))
        for some in parts.values():
            yield from _families(pieces, some, traits, vary)
        return
    texts, first = [pieces[0]], rows[0][0]
    for place, piece in enumerate(pieces[1:]):
        if place in varying:
            texts.append(piece)
        else:
            texts[-1] += first[place] + piece
    rows.sort(key=lambda row: ([*map(int, row[0])], row[0]))
    keys = {tuple(numbers[place] for place in varying): key for numbers, key in rows}
    yield Family(tuple(texts), keys, tuple(traits[key] for key in keys.values()))


def without_numbers(name: str) -> str:
    return re.sub(f"[0-9{HOLE}]+", HOLE, name)


def escaped(text: str) -> str:
    """A literal text in a rule: with a backslash before what would mean something."""
    return re.sub(r"([\\*{,]|\s(?=:\s))", r"\\\1", text).replace("=>", "=\\>")


class Match(NamedTuple):
    """Pairs of keys of two families. numbers: of the new names, as in rules.

    known: the numbers stay what they are, or the traits say which is which.
    """

    ours: Family
    theirs: Family
    pairs: dict[str, str]
    numbers: list[str]
    known: bool

    @property
    def changed(self) -> set[str]:
        """The numbers that are other ones in the new names."""
        return {number for number in self.numbers if number[1:-1] not in VARIABLES}


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
