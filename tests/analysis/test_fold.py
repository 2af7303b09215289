"""Keys in groups: few lines, and never a key too many or too few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.analysis.words import DEEP, grouped
from tests.support.expanded_keys import expand
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
