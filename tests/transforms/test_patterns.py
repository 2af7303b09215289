"""Patterns for keys."""

from __future__ import annotations

import pytest

from ckptool.checkpoint.patterns import matcher, selected
from ckptool.errors import NoMatch, UsageError
from tests.support.looped import looped

KEYS = ["a.weight", "a.bias", "b.0.weight", "b.10.weight", "weird[x]", "é\n"]


@looped(
    ("pattern", "found"),
    [
        ("*", KEYS),
        ("a.*", ["a.weight", "a.bias"]),
        ("*.weight", ["a.weight", "b.0.weight", "b.10.weight"]),  # * crosses dots
        ("b.?.weight", ["b.0.weight"]),
        ("b.[01].weight", ["b.0.weight"]),
        ("b.*t", ["b.0.weight", "b.10.weight"]),
        ("weird[[]x]", ["weird[x]"]),
        ("é*", ["é\n"]),
        ("a.weight", ["a.weight"]),
        (r"re:\d\d", ["b.10.weight"]),  # anywhere in the key
        (r"re:^a\.", ["a.weight", "a.bias"]),
        ("weight", []),  # globs are for whole keys
        ("A.*", []),
    ],
)
def test_pattern(pattern: str, found: list[str]) -> None:
    matches = matcher(pattern)
    assert [key for key in KEYS if matches(key)] == found


def test_only_and_exclude() -> None:
    assert selected(KEYS) == set(KEYS)
    assert selected(KEYS, ["a.*", "b.*"], ["*.bias", "re:10"]) == {"a.weight", "b.0.weight"}
    assert selected(KEYS, exclude=["*"]) == set()


@pytest.mark.parametrize(("only", "exclude"), [(["a.*", "c.*"], []), ([], ["c.*"])])
def test_a_pattern_that_matches_nothing_is_named(only: list[str], exclude: list[str]) -> None:
    with pytest.raises(NoMatch, match=r"the pattern 'c\.\*' matches no key") as caught:
        selected(KEYS, only, exclude)
    assert caught.value.exit_code == 1 and caught.value.fix


def test_not_a_regular_expression() -> None:
    with pytest.raises(UsageError, match="is not a regular expression"):
        matcher("re:(")
