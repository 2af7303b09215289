"""`strip-module` and `add-module`: wrappers' prefixes in every order, on some keys, in every root, on files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import ckptool
from ckptool.errors import CkptoolError, Conflict, NoMatch, UsageError
from fixtures.make import make
from fixtures.traps import TRAPS, batch_norm_model
from tests.support.files import load, weights
from tests.support.looped import looped
from tests.support.same import assert_same_objects

# Off -----------------------------------------------------------------------------------------------------------------


@looped(
    ("value", "options", "keys"),
    [
        (TRAPS["13-on-some-keys"](), {"partial": True}, "a ema_decay"),
        (weights("_orig_mod.module.a", "_orig_mod.b"), {"partial": True}, "a b"),
        (weights("a._orig_mod.x", "b.x"), {}, "a.x b.x"),  # compiled submodules are no mixture
        (weights("model.net.a", "model.net.b"), {"prefix": "model."}, "net.a net.b"),
        (weights("model.net.a", "model.net.b"), {"prefix": ["model.", "net."]}, "a b"),
        (weights("module.module.a"), {"prefix": ["module.", "module."]}, "a"),
        (weights("module._orig_mod.a"), {"prefix": "module."}, "_orig_mod.a"),  # other wrappers stay
        (weights("model.a", "b"), {"prefix": "model.", "partial": True}, "a b"),
        (weights("_orig_mod.a", "b"), {"prefix": "_orig_mod.", "partial": True}, "a b"),
    ],
)
def test_prefixes_that_were_asked_for(value: Any, options: dict[str, Any], keys: str) -> None:
    assert list(ckptool.strip_module(value, **options)) == keys.split()


_SOME = "of the file begin with 'module.'; without it:"


@looped(
    ("value", "options", "kind", "says"),
    [
        (TRAPS["13-on-some-keys"](), {}, Conflict, f"1 of 2 keys {_SOME} ema_decay"),
        (TRAPS["13-a-submodule-called-module"](), {}, Conflict, f"2 of 3 keys {_SOME} head.weight"),
        (TRAPS["15-collision"](), {}, Conflict, f"1 of 2 keys {_SOME} a"),
        (weights("_orig_mod.module.a", "_orig_mod.b"), {}, Conflict, "1 of 2 keys"),  # behind a wrapper that goes too
        (weights("model.a", "b"), {"prefix": "model."}, Conflict, "1 of 2 keys"),
        (weights("_orig_mod.a", "b"), {"prefix": "_orig_mod."}, Conflict, "1 of 2 keys"),
        (
            TRAPS["15-collision"](),
            {"partial": True},
            Conflict,
            "keys of the file would collide: a and module.a would both be 'a'",
        ),
        (TRAPS["15-collision-of-wrappers"](), {}, Conflict, "a._orig_mod.b and a.b would both be 'a.b'"),
        (weights("module.", "module.a"), {}, Conflict, "become empty"),
        (weights("model.net.a"), {"prefix": ["net.", "model."]}, NoMatch, "no key begins with 'net.'"),
        (weights("model.net.a"), {"prefix": ["model.", ""]}, UsageError, "the prefix is empty"),
        (weights("model.net.a"), {"at": "x"}, UsageError, "there is no x"),
    ],
)
def test_what_is_not_stripped(value: Any, options: dict[str, Any], kind: type[CkptoolError], says: str) -> None:
    with pytest.raises(kind, match=re.escape(says)) as caught:
        ckptool.strip_module(value, **options)
    assert caught.value.exit_code == (2 if kind is UsageError or kind is Conflict else 1)
    assert ("--partial" in caught.value.fix) == ("keys of the file begin" in caught.value.what)


# On ------------------------------------------------------------------------------------------------------------------


def test_the_outermost_version_moves_along() -> None:
    state = batch_norm_model().state_dict()
    state._metadata[""] = {"version": 7}
    found = ckptool.add_module(state)._metadata
    assert (found[""], found["module"], found["module.1"]) == ({"version": 1}, {"version": 7}, {"version": 2})
    del state._metadata[""]
    assert_same_objects(state, ckptool.strip_module(ckptool.add_module(state)))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "net.", "a.b.", "a.b.c.", "x"])
@looped(
    "name",
    "12-metadata 12-metadata-of-an-old-version 12-metadata-missing 13-twice 14-averaged 14-averaged-of-dp"
    " 18-cyclic-dict".split(),
)
def test_strip_of_add_is_the_identity(name: str, prefix: str) -> None:
    state, at = TRAPS[name](), "" if name == "18-cyclic-dict" else None
    added = ckptool.add_module(state, prefix=prefix, at=at)
    assert all(key.startswith(prefix) or key == "n_averaged" for key in added)
    assert_same_objects(state, ckptool.strip_module(added, prefix=prefix, at=at))


# Files ---------------------------------------------------------------------------------------------------------------


def test_the_names_that_an_optimizer_keeps_follow(tmp_path: Path) -> None:
    file, out = make("training.pt", tmp_path), tmp_path / "out.pt"
    assert ckptool.add_module(file, out).facts["changed"] == 18
    groups = [load(path)["optimizer_state_dict"]["param_groups"][0]["param_names"] for path in (file, out)]
    assert groups[1] == [f"module.{name}" for name in groups[0]]
    with pytest.raises(UsageError, match="the prefix is empty"):
        ckptool.add_module(file, tmp_path / "none.pt", prefix="")
    assert not (tmp_path / "none.pt").exists()
