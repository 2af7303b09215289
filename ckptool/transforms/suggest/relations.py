"""Tensors of one side that, joined and reordered, are a tensor of the other: found by value, as operations of rules.

A tensor that is split is found from the other side, as one that is joined, and its operations are inverted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, permutations
from math import gcd, prod

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.strided import resolved
from ckptool.errors import CkptoolError
from ckptool.reports.compare import same_bytes
from ckptool.transforms.arithmetic import Arithmetic
from ckptool.transforms.translate.apply import Overs, after_chain
from ckptool.transforms.translate.operations import parse_operation

STACKED = "e"  # the variable of tensors that are stacked
MOST_WORDS = 16  # names of a choice {q,k,v}
MOST_TRIES = 600  # of operations for tensors of some shapes
_HOLES = 0xF0000  # from here: characters that stand for {e}, a choice or operations while rules are written
_TOKENS = re.compile(r"[0-9]+|[._]|[^0-9._]+")
_WORD = re.compile(r"[\w.-]*")

Entries = Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class Relation:
    """Tensors that are one tensor after a chain of operations. names: them as one name, with holes.

    splits: the one is of the old side.
    """

    many: tuple[str, ...]
    one: str
    names: str
    chain: str
    splits: bool = False

    @property
    def operations(self) -> str:
        """The chain from the old side to the new one."""
        if not self.splits:
            return self.chain
        inverse = [parse_operation(op).inverse() for op in reversed(_operations(self.chain))]
        return " | ".join(map(str, inverse))

    @property
    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ((self.one,), self.many) if self.splits else (self.many, (self.one,))

    def pair(self, holes: Holes) -> tuple[str, str]:
        """Both sides as one name each, the new one with the operations before it."""
        old, new = (self.one, self.names) if self.splits else (self.names, self.one)
        return old, holes.hole(f" : {self.operations}") + new if self.chain else new


@dataclass(slots=True)
class Holes:
    """Characters that stand for texts while rules are written of names: a name has `{q,k,v}` as one character."""

    texts: dict[str, str] = field(default_factory=dict)
    characters: dict[str, str] = field(default_factory=dict)

    def hole(self, text: str) -> str:
        character = self.characters.setdefault(text, chr(_HOLES + len(self.characters)))
        self.texts[character] = text
        return character

    def filled(self, rule: str) -> str:
        """The text of a rule, with its operations at its end."""
        parts = [self.texts.get(letter, letter) for letter in rule]
        operations = "".join(part for part in parts if part.startswith(" : "))
        return "".join(part for part in parts if not part.startswith(" : ")) + operations


def has_holes(name: str) -> bool:
    return any(ord(letter) >= _HOLES for letter in name)


# Names ---------------------------------------------------------------------------------------------------------------


def as_one_name(names: Sequence[str], holes: Holes) -> Iterator[tuple[str, int]]:
    """Names as one with holes: numbered from zero (and by how many), or a few words that differ."""
    if len(names) == 1:
        yield names[0], 0
        return
    split = [_TOKENS.findall(name) for name in names]
    if len({len(tokens) for tokens in split}) == 1:
        for place, column in enumerate(zip(*split, strict=True)):
            count = len(set(column))
            each = len(names) // count
            if count > 1 and list(column) == [str(number) for number in range(count) for _ in range(each)]:
                hole = holes.hole(f"{{{STACKED}}}")
                rest = [[*tokens[:place], hole, *tokens[place + 1 :]] for tokens in split]
                if rest == rest[:each] * count and (name := _with_choice(rest[:each], holes)):
                    yield name, count
    if name := _with_choice(split, holes):
        yield name, 0


def _with_choice(names: Sequence[list[str]], holes: Holes) -> str:
    """Names as one with a choice of words; empty where there is none."""
    first, length = names[0], min(map(len, names))
    if len(names) == 1:
        return "".join(first)
    before = next((at for at in range(length) if len({name[at] for name in names}) > 1), length)
    after = next((at for at in range(length - before) if len({name[-1 - at] for name in names}) > 1), length - before)
    words = ["".join(name[before : len(name) - after]) for name in names]
    if len(words) > MOST_WORDS or len({*words}) < len(words) or not all(map(_WORD.fullmatch, words)):
        return ""
    if any(map(has_holes, words)):
        return ""
    return "".join([*first[:before], holes.hole(f"{{{','.join(words)}}}"), *first[len(first) - after :]])


# Operations ----------------------------------------------------------------------------------------------------------


def _operations(chain: str) -> list[str]:
    return chain.split(" | ") if chain else []


def _number(expression: Arithmetic) -> int:
    return expression.value(lambda name: None)


def _applied(chain: str, parts: Sequence[TensorEntry], stacked: int) -> TensorEntry | None:
    """One tensor of parts; None where they do not fit."""
    words = len(parts) // max(1, stacked)
    overs: list[Overs] = [((STACKED, number),) for number in range(stacked)] or [()]
    values = {over: list(parts[at * words :][:words]) for at, over in enumerate(overs)}
    try:
        done, _ = after_chain([parse_operation(op) for op in _operations(chain)], values, _number)
    except CkptoolError:
        return None
    only = [tensor for tensors in done.values() for tensor in tensors]
    return only[0] if len(only) == 1 else None


@dataclass(slots=True)
class Ways:
    """The search for operations. known: the last chain that did for tensors of some shapes, which is tried first.

    tries: how many are left for them.
    """

    known: dict[object, str] = field(default_factory=dict)
    tries: dict[object, int] = field(default_factory=dict)

    def find(self, parts: Sequence[TensorEntry], whole: TensorEntry, stacked: int, first: str = "") -> str | None:
        """The operations that make one tensor of others, by bytes; None where there are none. first: tried first."""
        shapes = tuple(dict.fromkeys(part.shape for part in parts)), len(parts), whole.shape, stacked
        chains = _chains([part.shape for part in parts], stacked)
        for chain in (*filter(None, [first, self.known.get(shapes)]), *chains):
            if self.tries.setdefault(shapes, MOST_TRIES) <= 0:
                return None
            self.tries[shapes] -= 1
            made = _applied(chain, parts, stacked)
            for after in _reshapings(made.shape, whole.shape) if made is not None else ():
                both = " | ".join(filter(None, [chain, after]))
                if (done := _applied(both, parts, stacked)) is not None and is_same(done, whole):
                    self.known[shapes], self.tries[shapes] = both, MOST_TRIES
                    return both
        return None


def is_same(one: TensorEntry, other: TensorEntry) -> bool:
    """True for the same type, shape and bytes."""
    alike = one.dtype is other.dtype and one.shape == other.shape
    return alike and same_bytes(resolved(one).row_major(), resolved(other).row_major())


def _reshapings(have: Sequence[int], want: Sequence[int]) -> list[str]:
    """Operations that give a tensor a shape: dimensions of size 1, the last two exchanged, fewer or more rows at the
    end (of a padded vocabulary); or any."""
    if have == want:
        return [""]
    if [size for size in have if size != 1] == [size for size in want if size != 1]:
        drop = [f"squeeze {axis}" for axis in reversed(range(len(have))) if have[axis] == 1]
        return [" | ".join([*drop, *(f"unsqueeze {axis}" for axis, size in enumerate(want) if size == 1)])]
    if len(have) > 1 and [*have[:-2], have[-1], have[-2]] == [*want]:
        return ["transpose"]
    if have and want and have[1:] == want[1:]:
        return [f"slice 0 0:{want[0]}" if want[0] < have[0] else f"pad 0 {want[0]}"]
    return [f"reshape {[*want]} from {[*have]}"] if prod(have) == prod(want) else []


def _chains(shapes: Sequence[tuple[int, ...]], stacked: int) -> Iterator[str]:
    """Operations that put tensors of these shapes together, or reorder the only one; the plainest first."""
    shape, words = shapes[0], len(shapes) // max(1, stacked)
    rank = len(shape)
    if len(shapes) == 1:
        yield ""
        yield from ["transpose"] if rank > 1 else []
        yield from (f"transpose {a} {b}" for a, b in combinations(range(rank), 2) if rank > 2)
        yield from (f"permute {' '.join(map(str, order))}" for order in permutations(range(rank)) if 2 < rank < 5)
        yield from _reorderings(shape)
        return
    for before in ("", "transpose | ") if rank > 1 else ("",):
        joins = list(_joins([each[::-1] if before and rank == 2 else each for each in shapes[:words]])) or [""]
        stacks = [f"stack {axis} over {STACKED}" for axis in range(rank + 1)] if stacked else [""]
        joins += [f"stack {axis}" for axis in range(rank + 1)] if not stacked else []
        yield from (before + " | ".join(filter(None, [join, stack])) for join in joins for stack in stacks)


def _joins(shapes: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Operations that put tensors side by side: as they are, or in turns of groups (of heads, of single rows)."""
    for axis in range(len(shapes[0]) if len(shapes) > 1 else 0):
        sizes = [shape[axis] for shape in shapes]
        for groups in _divisors(gcd(*sizes)):
            each = [size // groups for size in sizes]
            parts = f" {each}" if len({*each}) > 1 else ""
            if groups == 1:
                yield f"cat {axis}{parts}"
            else:
                yield f"unflatten {axis} [{groups}, -1] | cat {axis + 1}{parts} | flatten {axis} [{groups}, -1]"


def _reorderings(shape: Sequence[int]) -> Iterator[str]:
    """Rows in another order: rotary halves of so many heads, columns that take turns, blocks."""
    for axis, size in enumerate(shape):
        divisors = _divisors(size)
        if axis == 0:
            yield from (f"{op} {heads}" for heads in divisors if size % (2 * heads) == 0 for op in ("rope", "unrope"))
        yield from (f"{op} {axis} {n}" for n in divisors[1:-1] for op in ("deinterleave", "interleave"))
        for groups, parts in (
            (a, b) for a in divisors[1:] for b in divisors[1:] if size // a % b == 0 and a * b < size
        ):
            inner = size // groups // parts
            apart = f"unflatten {axis} [{groups}, {parts}, {inner}] | transpose {axis + 1} {axis + 2}"
            yield f"{apart} | flatten {axis} [{groups}, {inner}, {parts}]"


@cache
def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, min(int(number**0.5) + 1, 1 << 16)) if number % n == 0]
    return [*small, *(number // n for n in reversed(small) if n * n != number)] or [1]
