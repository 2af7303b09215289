"""Wrapper prefixes of keys, one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptool.conventions.state_dicts import INNER_WRAPPERS, unwrapped_front, without_wrappers, wrappers
from tests.support.looped import looped

# key, the same without wrappers, its wrappers
KEYS = [
    ("fc.weight", "fc.weight", ""),
    ("module.fc.weight", "fc.weight", "module."),
    ("_orig_mod.fc.weight", "fc.weight", "_orig_mod."),
    ("module._orig_mod.fc.weight", "fc.weight", "module._orig_mod."),
    ("_orig_mod.module.fc.weight", "fc.weight", "_orig_mod.module."),
    ("0._orig_mod.weight", "0.weight", "_orig_mod."),
    ("_fsdp_wrapped_module.0._fsdp_wrapped_module.weight", "0.weight", "_fsdp_wrapped_module._fsdp_wrapped_module."),
    ("layers.1._checkpoint_wrapped_module.weight", "layers.1.weight", "_checkpoint_wrapped_module."),
    ("_forward_module.module._orig_mod.a", "a", "_forward_module.module._orig_mod."),
    # `module.` once, from the front: a module of a user's own may be called so
    ("module.module.a", "module.a", "module."),
    ("backbone.module.a", "backbone.module.a", ""),
    ("model.module.a", "model.module.a", ""),
    ("backbone._orig_mod.module.a", "backbone.module.a", "_orig_mod."),
    ("module.backbone.module.a", "backbone.module.a", "module."),
    # whole segments only
    ("modules.a", "modules.a", ""),
    ("my_module.b", "my_module.b", ""),
    ("module_.c", "module_.c", ""),
    ("a_orig_mod.b", "a_orig_mod.b", ""),
    ("_orig_mod_x.b", "_orig_mod_x.b", ""),
    ("submodule.module", "submodule.module", ""),
    # nothing to take it off from
    ("module", "module", ""),
    ("_orig_mod", "_orig_mod", ""),
    ("a._forward_module", "a._forward_module", ""),
    ("module.", "", ""),
    ("n_averaged", "n_averaged", ""),
    ("", "", ""),
]


@looped(("key", "bare", "found"), KEYS, ids=[key or "(empty)" for key, _, _ in KEYS])
def test_wrapper_prefixes_are_found_and_taken_off(key: str, bare: str, found: str) -> None:
    assert without_wrappers(key) == bare
    assert wrappers(key) == found


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


def test_unwrapped_front() -> None:
    assert unwrapped_front("_orig_mod._forward_module.module.a") == "module.a"
    assert unwrapped_front("a._orig_mod.b") == "a._orig_mod.b"
    assert unwrapped_front("_orig_mod") == "_orig_mod"
