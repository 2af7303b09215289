"""Keys in groups: few lines, and never a key too many or too few."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.analysis.inspect import PartSummary, listing
from ckptool.analysis.outline import Branch, outline
from ckptool.analysis.words import DEEP, grouped
from ckptool.checkpoint import NO_FLAGS, Checkpoint, Flags, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.tree import address
from tests.support.expanded_keys import expand
from tests.support.looped import examples
from tests.support.processes import is_quick

PIECES = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "3", "4", "10", "01", "w", "b", "conv1", "conv2", "conv3", "", "{", "}", ",", ", ", "a, b"]
    ),
    st.sampled_from(
        [
            "0..2",
            "{0..2}",
            "\\",
            "\\{",
            " ",
            "1 ",
            "ß",
            "٣",
            "²",
            "\n",
            "9" * 30,
            "\ud800",
            "=>",
            "x2y3",
            "*",
            "m/w",
            "m/b",
            "m/n/w",
            "/",
        ]
    ),
    st.sampled_from(["m/w", "m/b", "m/n/w", "/"]),
    st.text(max_size=4),
)
KEYS = st.lists(st.lists(PIECES, max_size=4).map(".".join), max_size=30)
DENSE = st.lists(st.tuples(*[st.sampled_from(["0", "1", "2", "3", "w1", "w2", "b"])] * 3).map(".".join), max_size=120)


@given(st.one_of(KEYS, DENSE))
def test_a_group_is_exactly_its_keys(keys: list[str]) -> None:
    groups = grouped(keys)
    for group in groups:
        assert expand(group.text) == list(group.keys)
    found = [key for group in groups for key in group.keys]
    assert len(found) == len(set(found)) and set(found) == set(keys)
    assert groups == grouped(keys)


def test_the_part_of_the_file_stands_once() -> None:
    keys = [f"model/{name}.{kind}" for name in ("q", "k", "v") for kind in ("weight", "bias")]
    assert [group.text for group in grouped(keys)] == ["model/{q, k, v}.{weight, bias}"]
    assert [group.text for group in grouped(["model/q.w", "ema/q.w"])] == ["{model/q, ema/q}.w"]


@given(DENSE)
def test_groups_do_not_depend_on_which_numbers_come_first(keys: list[str]) -> None:
    only = [key for key in keys if not key.count("w") and "b" not in key]
    assert grouped(only) == grouped(reversed(only))


@pytest.mark.parametrize("key", ["a." * 100_000, "9" * 100_000, "a9" * 50_000, "." * 100_000, "{" * 100_000])
def test_one_long_key(key: str) -> None:
    assert [group.keys for group in grouped([key, key + "x", "b"]) if key in group.keys]
    assert is_quick(lambda: grouped([key, key + "x", "b"]), 1)
    assert key.count(".") < DEEP or len(grouped([key, key + "x"])) == 2


# Outlines -------------------------------------------------------------------------------------------------------------
# Folding is exact: unfolded, an outline without limits is the table of tensors, whatever they are called.


Fact = tuple[object, ...]


def tensor(shape: tuple[int, ...], dtype: str = "f32", location: str = "cpu", flags: Flags = NO_FLAGS) -> TensorEntry:
    kind, size = by_name(dtype), 1
    for length in shape:
        size *= length
    storage = Storage(InlineBytes(bytes(size * kind.itemsize)), location)
    return TensorEntry(storage, kind, shape, row_major_strides(shape), 0, flags)


def name(part: PartSummary, row: int) -> str:
    return address(part.rows[row].path[len(part.root.path) :])


def facts(entry: Any) -> Fact:
    return entry.dtype.name, entry.shape, entry.stride, entry.location, entry.flags


def table(part: PartSummary) -> Counter[Fact]:
    """Every tensor: its name, what it is, and the name that it is tied to."""
    rows = range(len(part.rows))
    ties = {row: name(part, target) for row, target in part.tied.items()}
    return Counter((name(part, row), facts(part.rows[row].tensor), ties.get(row)) for row in rows)


Fold = tuple[int, list[str], frozenset[int]]
"""The place of a number among the pieces of a name, the pieces in place of it, and the rows of the first block."""


def unfolded(part: PartSummary, branch: Branch, folds: tuple[Fold, ...] = ()) -> Counter[Fact]:
    assert branch.hidden == 0
    if branch.run > 1:
        found = re.search(r"\{([0-9]+)\.\.([0-9]+)\}$", branch.label)
        assert found and int(found[2]) - int(found[1]) + 1 == branch.run
        before = branch.items[0][0][branch.depth - 1].removesuffix(found[1])
        pieces = [f"{before}{number:0{len(found[1])}}" for number in range(int(found[1]), int(found[2]) + 1)]
        folds = (*folds, (branch.depth - 1, pieces, frozenset(item[1] for item in branch.items)))
    if branch.leaf is None:
        return sum((unfolded(part, child, folds) for child in branch.expanded), Counter())
    row, every = branch.leaf, Counter[Fact]()
    for chosen in product(*(pieces for _, pieces, _ in folds)):
        target = part.tied.get(row)
        tied = None if target is None else renamed(part, target, folds, chosen)
        every[(renamed(part, row, folds, chosen), facts(part.rows[row].tensor), tied)] += 1
    return every


def renamed(part: PartSummary, row: int, folds: tuple[Fold, ...], chosen: tuple[str, ...]) -> str:
    """The name of a row of the first blocks in other ones; a row that is in none keeps its name."""
    pieces = re.split("([./])", name(part, row))
    for (place, _, rows), piece in zip(folds, chosen, strict=True):
        if row in rows:
            pieces[2 * place] = piece
    return "".join(pieces)


def whole(branch: Branch) -> list[Branch]:
    return [branch, *(below for child in branch.expanded for below in whole(child))]


def check(tree: Any) -> list[Branch]:
    """Unfolds all parts of a tree; the branches of their outlines."""
    seen: list[Branch] = []
    for part in listing(Checkpoint(tree, "torch-zip")).parts:
        if not part.rows:
            continue
        top = outline(part, 10**9, None)
        assert unfolded(part, top) == table(part)
        seen += whole(top)
    return seen


WORDS = st.sampled_from(
    ["", "a", "layer", "0", "1", "2", "3", "01", "02", "03", "9", "10", "w1", "w2", "w3", "{0..2}", "~", "é"]
)
NAMES = st.builds("".join, st.lists(st.one_of(WORDS, st.sampled_from("./")), max_size=7))
TENSORS = st.builds(
    tensor,
    st.sampled_from([(2,), (2, 2), (), (0,)]),
    st.sampled_from(["f32", "f32", "i64"]),
    st.sampled_from(["cpu", "cpu", "cuda:0"]),
    st.sampled_from([Flags(), Flags(), Flags(True, True), Flags(False, True)]),
)


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, TensorEntry]:
    """Layers of one kind, some of them with something odd: another type, a tie, strides, a name, a number left out."""
    before, between = draw(NAMES), draw(st.sampled_from([".", "/", ""]))
    inside = draw(
        st.lists(st.sampled_from(["w", "b", "q.w", "e.0.w", "e.1.w", "e.2.w", "e/2.w", ""]), min_size=1, unique=True)
    )
    width, start = draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 7, 8, 98]))
    found: dict[str, TensorEntry] = {}
    layers = list(range(start, start + draw(st.integers(3, 8))))
    for number in draw(st.permutations(layers)) if draw(st.booleans()) else layers:
        odd = draw(st.integers(0, 12))
        for end in inside:
            key = f"{before}{between}{number:0{width}}.{end}"
            found[key] = draw(TENSORS) if odd == 0 else tensor((2, 2))
            if odd == 1:
                found[key].stride = (1, 2)
            elif odd == 2 and len(found) > 1:
                found[key] = next(iter(found.values()))
            elif odd == 3:
                found[f"{key}.more"] = tensor((2,))
        if odd == 4:
            found[f"{before}{between}{number}.{inside[0]}x"] = found[key]
    return found


@settings(max_examples=examples(500))
@given(blocks(), blocks(), st.dictionaries(NAMES, TENSORS, max_size=6))
def test_an_outline_unfolds_to_the_table(one: Any, other: Any, more: Any) -> None:
    flat = {f"m.{key}": value for key, value in (one | more | other).items()}
    check(flat)
    check({"model": flat, "n": [one, other, more], "deep": {0: more, "0": one, ("x", 1): other}})


@settings(max_examples=examples(300))
@given(st.dictionaries(NAMES, TENSORS, max_size=12), st.lists(st.tuples(NAMES, st.integers(0, 11)), max_size=4))
def test_any_names_unfold(tensors: dict[str, TensorEntry], ties: list[tuple[str, int]]) -> None:
    values = list(tensors.values())
    check(tensors | {key: values[number % len(values)] for key, number in ties if values})


def folds(tree: Any) -> list[str]:
    return [branch.label for branch in check(tree) if branch.run > 1]
