"""Older spellings of a key's leaf, the words in it, and families of keys that differ in their numbers only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations

Shape = tuple[int, ...] | None

# Spellings -----------------------------------------------------------------------------------------------------------

# Leaves that one module stores together, and what they are called today. {} is the parameter's name.
# gamma, beta: Hugging Face models that came from TensorFlow. The others: torch.nn.utils.weight_norm and spectral_norm
# against torch.nn.utils.parametrizations.
OLD_LEAVES: tuple[tuple[str, dict[str, str]], ...] = (
    ("gamma and beta are older names of weight and bias", {"gamma": "weight", "beta": "bias"}),
    (
        "a newer weight norm stores weight_g and weight_v as parametrizations",
        {"{}_g": "parametrizations.{}.original0", "{}_v": "parametrizations.{}.original1"},
    ),
    (
        "a newer spectral norm stores weight_orig, weight_u and weight_v as parametrizations",
        {
            "{}_orig": "parametrizations.{}.original",
            "{}_u": "parametrizations.{}.0._u",
            "{}_v": "parametrizations.{}.0._v",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class Spelling:
    """A key in today's spelling; the first `stem` characters are the same in both. why: the reason for the change."""

    key: str
    stem: int
    why: str


def spellings(keys: Collection[str]) -> dict[str, Spelling]:
    """The keys with an older leaf in today's spelling, where the whole set of leaves is there and no name is taken."""
    result: dict[str, Spelling] = {}
    for why, leaves in OLD_LEAVES:
        first = next(iter(leaves)).removeprefix("{}")
        for key in keys:
            stem = key.rfind(".") + 1
            leaf = key[stem:]
            if not leaf.endswith(first) or (not first.startswith("_") and leaf != first):
                continue
            name = leaf.removesuffix(first)
            pairs = {key[:stem] + old.format(name): key[:stem] + new.format(name) for old, new in leaves.items()}
            there = all(old in keys and old not in result for old in pairs)
            if there and not any(new in keys for new in pairs.values()):
                result.update((old, Spelling(new, stem, why)) for old, new in pairs.items())
    return result


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
_LEAVES = frozenset("weight bias running mean var num batches tracked gamma beta parametrizations original".split())
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

Shared = tuple[frozenset[str], frozenset[str]]  # strong words, weak words


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a name in their common spelling. inner: the strong ones that are no parameter's name."""

    strong: frozenset[str]
    weak: frozenset[str]
    inner: frozenset[str]

    def shared(self, other: Words) -> Shared:
        return self.strong & other.strong, self.weak & other.weak


@lru_cache(4096)
def words(name: str) -> Words:
    """The words of a name, without its numbers. The second and third of the same word get a mark each."""
    for compound, plain in _COMPOUND:
        name = compound.sub(plain, name)
    counts = Counter(_WORD.get(word.lower(), word.lower()) for word in _LETTERS.findall(name))
    marked = frozenset(word + "+" * more for word, count in counts.items() for more in range(min(count, 3)))
    weak = frozenset(word for word in marked if word.rstrip("+") in _WEAK)
    return Words(marked - weak, weak, frozenset(word for word in marked - weak if word.rstrip("+") not in _LEAVES))


def contradict(one: Words, other: Words) -> bool:
    """True for names that cannot be the same tensor, whatever their shapes: a query and a key, a weight and a bias."""
    ours, theirs = one.strong | one.weak, other.strong | other.weak
    if ours & _QKV != theirs & _QKV:
        return True
    return any((mine := ours & roles) and (also := theirs & roles) and not mine & also for roles in _ROLES)


# Numbers -------------------------------------------------------------------------------------------------------------

Numbers = tuple[str, ...]
Signature = tuple[int, frozenset[tuple[Numbers, Shape]]]
MOST_NUMBERS = 4  # in a family that is also tried with some of its numbers fixed
HOLE = "\0"  # stands where a number was
_DIGITS = re.compile(r"([0-9]+)")


def without_numbers(name: str) -> str:
    return re.sub(f"[0-9{HOLE}]+", HOLE, name)


def before_numbers(name: str, otherwise: str) -> str:
    """The text before the first number of a name: the name of the blocks. `otherwise` where there is no number."""
    match = re.match(f"([^0-9{HOLE}]*)[0-9{HOLE}]", name)
    return match[1] if match else otherwise


@dataclass(frozen=True, eq=False)
class Family:
    """Keys that differ in their numbers only: `blocks.{}.attn.qkv.weight`, with the shape at each number.

    pieces: the text around the numbers.  keys, shapes: by numbers.  order: the place of the first key.
    """

    pieces: tuple[str, ...]
    keys: dict[Numbers, str]
    shapes: dict[Numbers, Shape]
    order: int

    @cached_property
    def text(self) -> str:
        return HOLE.join(self.pieces)

    @cached_property
    def words(self) -> Words:
        return words(self.text)

    @cached_property
    def signature(self) -> Signature:
        return len(self.pieces) - 1, frozenset(self.shapes.items())

    @property
    def module(self) -> str:
        return self.text.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.text.rpartition(".")[2]

    def fixed(self, positions: tuple[int, ...]) -> list[Family]:
        """The family as several, one for each choice of numbers at `positions`."""
        parts: dict[Numbers, Family] = {}
        for numbers, key in self.keys.items():
            at = {place: numbers[place] for place in positions}
            choice = tuple(at.values())
            if choice not in parts:
                parts[choice] = Family(self._filled(at), {}, {}, self.order)
            rest = tuple(number for place, number in enumerate(numbers) if place not in at)
            parts[choice].keys[rest], parts[choice].shapes[rest] = key, self.shapes[numbers]
        return list(parts.values())

    def by_fewer(self) -> Iterator[Family]:
        """The family by fewer of its numbers, where those tell its keys apart as well: the inner ones first."""
        count = len(self.pieces) - 1
        for size in range(min(count, MOST_NUMBERS) - 1, 0, -1):
            for kept in sorted(combinations(range(count), size), reverse=True):
                chosen = {numbers: tuple(numbers[place] for place in kept) for numbers in self.keys}
                if len(set(chosen.values())) == len(chosen):
                    keys = {chosen[numbers]: key for numbers, key in self.keys.items()}
                    shapes = {chosen[numbers]: shape for numbers, shape in self.shapes.items()}
                    pieces = self._filled({place: "" for place in range(count) if place not in kept})
                    yield Family(pieces, keys, shapes, self.order)

    def _filled(self, texts: Mapping[int, str]) -> tuple[str, ...]:
        """The pieces with texts in place of some of the numbers."""
        pieces = [self.pieces[0]]
        for place, piece in enumerate(self.pieces[1:]):
            if place in texts:
                pieces[-1] += texts[place] + piece
            else:
                pieces.append(piece)
        return tuple(pieces)

    def within(self, other: Family) -> bool:
        """True if `other` has all the numbers of this family, with the same shapes, and more."""
        alike = len(self.pieces) == len(other.pieces) and 1 < len(self.shapes) < len(other.shapes)
        return alike and self.shapes.items() <= other.shapes.items()


def families(shapes: Mapping[str, Shape], keys: Iterable[tuple[str, str]]) -> list[Family]:
    """The families of `keys`, pairs of a key and today's spelling. A number that a whole family shares is text."""
    found: dict[tuple[str, ...], Family] = {}
    for order, (key, spelling) in enumerate(keys):
        split = _DIGITS.split(spelling)
        pieces, numbers = tuple(split[::2]), tuple(split[1::2])
        family = found.setdefault(pieces, Family(pieces, {}, {}, order))
        family.keys[numbers], family.shapes[numbers] = key, shapes[key]
    result = []
    for family in found.values():
        columns = list(zip(*family.keys, strict=True))
        same = tuple(place for place, column in enumerate(columns) if len(set(column)) == 1)
        result += family.fixed(same) if same else [family]
    return result


def subsets(family: Family) -> Iterator[tuple[int, ...]]:
    """The numbers of a family that could be fixed: none, then as few as possible, the inner ones first."""
    count = len(family.pieces) - 1
    yield ()
    if count > MOST_NUMBERS:
        yield tuple(range(count))
        return
    for size in range(1, count + 1):
        yield from sorted(combinations(range(count), size), reverse=True)
