"""What a key says about its tensor: older spellings of the same leaf, and words that mean the same in different libraries."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

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
    """A key as it would be spelled today. The first `stem` characters are the same in both; why: what is known of the leaf."""

    key: str
    stem: int
    why: str


def spellings(keys: Collection[str]) -> dict[str, Spelling]:
    """The keys with an older leaf, as they would be spelled today, where the whole set of leaves is there and no name is taken."""
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
            if all(old in keys and old not in result for old in pairs) and not any(
                new in keys for new in pairs.values()
            ):
                result.update((old, Spelling(new, stem, why)) for old, new in pairs.items())
    return result


# Words ---------------------------------------------------------------------------------------------------------------

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
_WORD = {
    word: line.split(":")[0]
    for line in _SAME.strip().splitlines()
    for word in [line.split(":")[0], *line.split(":")[1].split()]
}
_COMPOUND = (
    (re.compile(r"in_proj|query_key_value|qkv_proj|c_attn"), "qkv"),
    (re.compile(r"\bwte\b"), "token_embed"),
    (re.compile(r"\bwpe\b"), "pos_embed"),
    (re.compile(r"layer_norm|LayerNorm"), "norm"),
)
# Words that many names have, and that do not tell one tensor of a block from another.
WEAK = frozenset("linear block model module net network backbone features body self base transformer enc".split())
_LEAVES = frozenset("weight bias running mean var num batches tracked gamma beta parametrizations original".split())
# A name with a word of such a set is never another with a different one.
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
    """The words of a name in their common spelling. inner: the strong ones that are no name of a parameter."""

    strong: frozenset[str]
    weak: frozenset[str]
    inner: frozenset[str]

    def shared(self, other: Words) -> tuple[frozenset[str], frozenset[str]]:
        return self.strong & other.strong, self.weak & other.weak


@lru_cache(4096)
def words(name: str) -> Words:
    """The words of a name; numbers are none. A word that stands there twice counts as two."""
    for pattern, plain in _COMPOUND:
        name = pattern.sub(plain, name)
    counted = _counted(_words(name))
    weak = frozenset(word for word in counted if word.rstrip("+") in WEAK)
    return Words(counted - weak, weak, frozenset(word for word in counted - weak if word.rstrip("+") not in _LEAVES))


def _words(text: str) -> Iterable[str]:
    return (_WORD.get(word.lower(), word.lower()) for word in _LETTERS.findall(text))


def _counted(found: Iterable[str]) -> frozenset[str]:
    """The words, a second and third one of the same marked."""
    return frozenset(word + "+" * more for word, count in Counter(found).items() for more in range(min(count, 3)))


def contradict(one: Words, other: Words) -> bool:
    """True for names that cannot be the same tensor, whatever their shapes: a query and a key, a weight and a bias."""
    ours, theirs = one.strong | one.weak, other.strong | other.weak
    if ours & _QKV != theirs & _QKV:
        return True
    return any((mine := ours & roles) and (also := theirs & roles) and not mine & also for roles in _ROLES)
