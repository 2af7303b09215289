"""Keys in groups: few lines, and never a key too many or too few."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.analysis.fold import DEEP, NAMES, grouped
from tests.support.expanded_keys import expand
from tests.support.looped import looped
from tests.support.processes import is_quick


def texts(*keys: str) -> list[str]:
    return [group.text for group in grouped(keys)]


def in_layers(numbers: list[int], *names: str) -> list[str]:
    return [f"layer.{number}.{name}" for number in numbers for name in names]


def test_the_example() -> None:
    keys = in_layers(list(range(12)), "attn.weight", "attn.bias")
    assert texts(*keys) == ["layer.{0..11}.attn.{weight, bias}"]
    assert [group.keys for group in grouped(keys)] == [tuple(keys)]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0, 2, 4], "{0, 2, 4}"),
        ([4, 0, 2], "{0, 2, 4}"),
        ([0, 1, 2, 3, 7], "{0..3, 7}"),
        ([0, 1], "{0, 1}"),
        ([0, 1, 3, 4], "{0, 1, 3, 4}"),
        ([0, 1, 2], "{0..2}"),
        ([9, 10, 11, 100], "{9..11, 100}"),
        ([5], "5"),
        ([0, 1, 2, 4, 6, 7, 8], "{0..2, 4, 6..8}"),
    ],
)
def test_only_numbers_that_are_there_are_shown(numbers: list[int], text: str) -> None:
    assert texts(*in_layers(numbers, "weight")) == [f"layer.{text}.weight"]


@looped(
    ("keys", "expected"),
    [
        # a layer with one key more or less does not tear the others apart
        ([*in_layers([0, 1, 2], "a.w", "a.b"), "layer.1.extra.w"], ["layer.{0..2}.a.{w, b}", "layer.1.extra.w"]),
        (["layer.0.w", *in_layers([1, 2, 3], "w", "b")], ["layer.0.w", "layer.{1..3}.{w, b}"]),
        # a number within a name
        (
            ["layer1.0.conv1.w", "layer1.0.conv2.w", "layer2.0.conv1.w", "layer2.0.conv2.w"],
            ["layer{1, 2}.0.conv{1, 2}.w"],
        ),
        ([f"encoder_layer_{n}.w" for n in range(11, -1, -1)], ["encoder_layer_{0..11}.w"]),
        ([f"h{n}x.w" for n in range(3)], ["h{0..2}x.w"]),
        # names in the order in which they come
        (["a.query.w", "a.key.w", "a.value.w"], ["a.{query, key, value}.w"]),
        # groups in natural order
        (["l.10.a", "l.9.b", "l.2.c", "conv10.q", "conv9.r"], ["conv9.r", "conv10.q", "l.2.c", "l.9.b", "l.10.a"]),
        # numbers that are written otherwise are names
        (["l.00.w", "l.01.w", "l.1.w"], ["l.{00, 01}.w", "l.1.w"]),
        (["l.١.w", "l.٢.w"], ["l.{١, ٢}.w"]),
        (["l.-1.w", "l.-2.w", "l.-3.w"], ["l.-{1..3}.w"]),
        # characters of ours in names of theirs
        (["a{0..2}.w"], [r"a\{0..2\}.w"]),
        (["x.a,b", "x.c"], [r"x.{a\,b, c}"]),
        (["x.a,b"], ["x.a,b"]),
        (["x.\\", "x.c"], ["x.{\\\\, c}"]),
        # empty parts
        (["", "."], ["", "."]),
        (["a..b", "a.c.b"], ["a.{, c}.b"]),
        (["a", "a", "a"], ["a"]),
        ([], []),
    ],
)
def test_groups(keys: list[str], expected: list[str]) -> None:
    assert sorted(texts(*keys)) == sorted(expected)
    assert sorted(key for text in expected for key in expand(text)) == sorted(set(keys))


def test_more_names_than_one_reads_stay_apart() -> None:
    few, many = [f"{'x' * n}.w" for n in range(1, NAMES + 1)], [f"{'x' * n}.w" for n in range(1, NAMES + 2)]
    assert len(grouped(few)) == 1 and len(grouped(many)) == len(many)


PIECES = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "3", "4", "10", "01", "w", "b", "conv1", "conv2", "conv3", "", "{", "}", ",", ", ", "a, b"]
    ),
    st.sampled_from(
        ["0..2", "{0..2}", "\\", "\\{", " ", "1 ", "ß", "٣", "²", "\n", "9" * 30, "\ud800", "=>", "x2y3", "*"]
    ),
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


@given(DENSE)
def test_groups_do_not_depend_on_which_numbers_come_first(keys: list[str]) -> None:
    only = [key for key in keys if not key.count("w") and "b" not in key]
    assert grouped(only) == grouped(reversed(only))


def test_many_keys() -> None:
    names = ["attn.q.weight", "attn.q.bias", "attn.k.weight", "attn.k.bias", "norm.weight"]
    layers = in_layers(list(range(10_000)), *names)
    odd = [f"x{n * n}.{n}.w" for n in range(20_000)]
    for keys, most in ((layers, 3), (odd, 20_000)):
        assert len(grouped(keys)) <= most
        assert is_quick(partial(grouped, keys), 1.5)


@pytest.mark.parametrize("key", ["a." * 100_000, "9" * 100_000, "a9" * 50_000, "." * 100_000, "{" * 100_000])
def test_one_long_key(key: str) -> None:
    assert [group.keys for group in grouped([key, key + "x", "b"]) if key in group.keys]
    assert is_quick(lambda: grouped([key, key + "x", "b"]), 1)
    assert key.count(".") < DEEP or len(grouped([key, key + "x"])) == 2
