"""Patterns for keys."""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptool.checkpoint import patterns
from ckptool.checkpoint.patterns import match_within_limit, matcher, selected
from ckptool.errors import NoMatch, Unsupported, UsageError
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


def test_an_expression_of_a_file_has_a_limit_where_there_can_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def matches(key: str) -> bool:
        return match_within_limit(re.compile(r"(a|b|ab)*c"), key)

    with ThreadPoolExecutor(1) as pool:
        assert matches("abc") and pool.submit(matches, "abc").result()
        assert not matches("abcd") and not pool.submit(matches, "abcd").result()
        signal.setitimer(signal.ITIMER_VIRTUAL, 100)  # another's
        try:
            assert matches("abc") and not matches("abcd")
            assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 90
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        monkeypatch.setattr(patterns, "LIMIT", 0.05)
        with pytest.raises(Unsupported, match=r"'\(a\|b\|ab\)\*c' was still being tried on 'abab"):
            matches("ab" * 20)
        assert pool.submit(matches, "ab" * 8 + "c").result(), "there it goes on"
