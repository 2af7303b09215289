"""Patterns for keys."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.checkpoint import paths
from ckptool.checkpoint.paths import literal, match_within_limit, matcher
from ckptool.errors import Unsupported


@given(st.text(st.sampled_from("re:*?[]!-a./\\\n~é"), max_size=8), st.text(st.sampled_from("re:*?[]a./"), max_size=8))
def test_the_pattern_of_one_key_matches_it_and_no_other(key: str, other: str) -> None:
    matches = matcher(literal(key))
    assert matches(key) and matches(other) == (key == other)


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
        monkeypatch.setattr(paths, "LIMIT", 0.05)
        with pytest.raises(Unsupported, match=r"'\(a\|b\|ab\)\*c' was still being tried on 'abab"):
            matches("ab" * 20)
        assert pool.submit(matches, "ab" * 8 + "c").result(), "there it goes on"
