"""What no renaming can do: queries, keys and values that one side stores in one tensor and the other in three."""

from __future__ import annotations

from ckptool.errors import listed, printable
from ckptool.transforms.key_pairs import Found, Side
from ckptool.transforms.key_words import words


def fused(source: Side, target: Side, found: Found) -> None:
    """Queries, keys and values that one side keeps in one tensor and the other in three."""
    for one, other, told in (
        (source, target, "the checkpoint stores {three} apart, the target in one: {single}"),
        (target, source, "the checkpoint stores in one ({single}) what the target has apart: {three}"),
    ):
        apart = _apart(one)
        sums = {shape for shapes in apart.values() for shape in _fused_shapes(shapes)}
        single = [key for key, shape in other.shapes.items() if shape in sums and words(key).strong & {"qkv", "attn"}]
        if single and apart:
            three = listed([printable(key) for key in next(iter(apart))], 3)
            text = told.format(three=three, single=printable(single[0]))
            found.notes.append(f"{text}. No renaming can join or cut tensors; that has to be done on the values.")


def _apart(side: Side) -> dict[tuple[str, ...], list[tuple[int, ...]]]:
    """Triples of keys that differ in being query, key or value only, with their shapes."""
    roles: dict[frozenset[str], dict[str, tuple[str, tuple[int, ...]]]] = {}
    for key, shape in side.shapes.items():
        if shape and len(mine := words(key).strong & {"q", "k", "v"}) == 1:
            digits = "".join(char if char.isdecimal() else " " for char in key).split()
            rest = words(key).strong - mine | {f"#{place}{number}" for place, number in enumerate(digits)}
            roles.setdefault(rest, {}).setdefault(min(mine), (key, shape))
    return {
        tuple(by[role][0] for role in "qkv"): [by[role][1] for role in "qkv"] for by in roles.values() if len(by) == 3
    }


def _fused_shapes(shapes: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    first, rows, columns = shapes[0], sum(shape[0] for shape in shapes), sum(shape[-1] for shape in shapes)
    return {(rows, *first[1:]), (*first[:-1], columns)}
