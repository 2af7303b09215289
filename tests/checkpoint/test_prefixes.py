"""Wrapper prefixes of keys, one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptool.conventions.state_dicts import INNER_WRAPPERS, without_wrappers, wrappers

segments = st.sampled_from(["a", "0", "module", "modules", "weight", "_x", *INNER_WRAPPERS])
keys = st.lists(segments, min_size=1, max_size=6).map(".".join)


@given(keys)
def test_only_wrappers_go_and_all_of_them(key: str) -> None:
    *modules, name = key.split(".")
    modules = [part for part in modules if part not in INNER_WRAPPERS]
    peeled = modules[1:] if modules[:1] == ["module"] else modules
    assert without_wrappers(key) == ".".join([*peeled, name])
    assert wrappers(key).count(".") == key.count(".") - without_wrappers(key).count(".")
    assert all(part in ("", "module", *INNER_WRAPPERS) for part in wrappers(key).split("."))


@given(keys)
def test_a_key_that_is_clean_stays_clean(key: str) -> None:
    bare = without_wrappers(key)
    assert (wrappers(key) == "") == (bare == key)
    assert "module" in bare.split(".") or without_wrappers(bare) == bare
