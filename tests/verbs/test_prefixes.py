"""`strip-module` and `add-module`: wrappers' prefixes in every order, on some keys, in every root, on files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import ckptool
from ckptool.errors import CkptoolError, Conflict, NoMatch, UsageError
from fixtures.make import make, mlp
from fixtures.traps import TRAPS, batch_norm_model
from tests.support.files import load, saved, weights
from tests.support.looped import looped
from tests.support.same import assert_same_objects

# Off -----------------------------------------------------------------------------------------------------------------


@looped(
    ("name", "keys"),
    [
        ("13-at-the-start", "a b.c"),
        ("13-twice", "module.a module.b"),
        ("13-in-the-middle", "backbone.module.a backbone.module.b"),
        ("13-the-word-inside-a-name", "modules.a my_module.b module_.c submodule.module"),
        ("13-a-child-called-module", "weight bias"),
        ("14-fsdp", "0.weight 1.bias"),
        ("14-activation-checkpoint", "layers.0.weight layers.1.weight"),
        ("14-fsdp-of-activation-checkpoint", "layers.0.weight b"),
        ("14-deepspeed", "a.weight b.bias"),
        ("14-lightning-of-dp", "model.module.a.weight model.module.b.bias"),
        ("14-deepspeed-of-dp-of-compile", "a b"),
    ],
)
def test_stripped_keys_are_those_of_the_bare_model(name: str, keys: str) -> None:
    assert list(ckptool.strip_module(TRAPS[name]())) == keys.split()


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((name, batch_norm_model) for name in ("14-dp-of-compile", "14-compile-of-dp", "12-metadata-below-a-prefix")),
        ("14-compiled-submodule", lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))),
    ],
)
def test_a_stripped_wrapped_model_has_the_bare_models_metadata(name: str, model: Any) -> None:
    state, bare = ckptool.strip_module(TRAPS[name]()), model().state_dict()
    assert list(state) == list(bare) and list(state._metadata.items()) == list(bare._metadata.items())


@pytest.mark.parametrize("name", ["14-averaged", "14-averaged-of-dp", "averaged.pt"])
def test_n_averaged_does_not_stand_in_the_way(name: str, tmp_path: Path) -> None:
    keys = list(ckptool.strip_module(load(make(name, tmp_path))))
    front = "module." if name == "14-averaged-of-dp" else ""
    assert keys[0] == "n_averaged"
    assert all(key.startswith(front) and not key.startswith(f"{front}module.") for key in keys[1:])


def test_what_is_stripped_of_an_averaged_model_has_the_names_of_the_bare_one() -> None:
    model = batch_norm_model()
    stripped = ckptool.strip_module(swa_utils.AveragedModel(model).state_dict())
    assert list(stripped) == ["n_averaged", *model.state_dict()]


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


def test_all_roots_and_only_roots() -> None:
    model = weights("module.a.x")
    value = {"G": model, "D": weights("module.b.x"), "module.config": {"module.c": 1}, "best": model}
    done = ckptool.strip_module(value)
    assert [list(done[name]) for name in ("G", "D")] == [["a.x"], ["b.x"]] and list(done) == list(value)
    assert done["module.config"] == {"module.c": 1} and done["G"] is done["best"]


# On ------------------------------------------------------------------------------------------------------------------


def test_add_is_what_a_wrapper_does() -> None:
    model = batch_norm_model()
    for wrapped, prefix in ((nn.DataParallel(model), "module."), (torch.compile(model), "_orig_mod.")):
        done, there = ckptool.add_module(model.state_dict(), prefix=prefix), wrapped.state_dict()
        assert list(done) == list(there) and list(done._metadata.items()) == list(there._metadata.items())


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


@pytest.mark.parametrize(
    "name", ["training.pt", "gan.pt", "lightning.ckpt", "ties.pt", "numpy_values.pt", "averaged.pt"]
)
def test_there_and_back_on_files(name: str, tmp_path: Path) -> None:
    file, out, back = make(name, tmp_path), tmp_path / "out.pt", tmp_path / "back.pt"
    done = ckptool.add_module(file, out, verify=True)
    assert done.facts["changed"] == done.facts["keys"] - (name == "averaged.pt")
    ckptool.strip_module(out, back, prefix="module.", verify=True)
    assert ckptool.diff(file, back, strict=True).same


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", "dp.pt compiled.pt dp_compiled.pt compiled_dp.pt fsdp.pt deepspeed.pt".split())
@pytest.mark.parametrize("in_place", [False, True])
def test_the_result_loads_into_the_bare_model(name: str, in_place: bool, tmp_path: Path) -> None:
    file = make(name, tmp_path)
    before = load(file)
    out = file if in_place else tmp_path / "out.pt"
    done = ckptool.strip_module(file, None if in_place else out, in_place=in_place, verify=True)
    state = torch.load(out, weights_only=True)
    model = mlp()
    model.load_state_dict(state, strict=True)
    assert list(state) == list(model.state_dict()) and state._metadata == model.state_dict()._metadata
    assert_same_objects(list(before.values()), list(state.values()))
    assert done.facts["changed"] == done.facts["keys"] == 9 and done.summary == "9 of 9 keys renamed"


def test_a_training_checkpoint(tmp_path: Path) -> None:
    file, out = make("training_sgd.pt", tmp_path), tmp_path / "out.pt"
    done = ckptool.strip_module(file, out, verify=True)
    before, after = load(file), load(out)
    assert list(after) == list(before)
    mlp().load_state_dict(after["state_dict"])
    for key in ("epoch", "arch", "best_acc1", "optimizer"):
        assert_same_objects(before[key], after[key])
    assert done.facts["roots"] == [{"root": "state_dict", "changed": 9, "keys": 9}]
    assert "module.fc1.weight → fc1.weight" in done.details


def test_the_names_that_an_optimizer_keeps_follow(tmp_path: Path) -> None:
    file, out = make("training.pt", tmp_path), tmp_path / "out.pt"
    assert ckptool.add_module(file, out).facts["changed"] == 18
    groups = [load(path)["optimizer_state_dict"]["param_groups"][0]["param_names"] for path in (file, out)]
    assert groups[1] == [f"module.{name}" for name in groups[0]]
    with pytest.raises(UsageError, match="the prefix is empty"):
        ckptool.add_module(file, tmp_path / "none.pt", prefix="")
    assert not (tmp_path / "none.pt").exists()


def test_one_root_by_its_address(tmp_path: Path) -> None:
    file = saved({"G": weights("module.a.w"), "D": weights("module.a.w")}, tmp_path / "in.pt")
    ckptool.strip_module(f"{file}#D", tmp_path / "a.pt")
    ckptool.strip_module(file, tmp_path / "b.pt", at="D")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    assert [list(root) for root in load(tmp_path / "a.pt").values()] == [["module.a.w"], ["a.w"]]
    done = ckptool.strip_module(file, tmp_path / "c.pt")
    assert done.details[:2] == ("G: 1 of 1 key", "D: 1 of 1 key")


def test_safetensors(tmp_path: Path) -> None:
    import safetensors.torch

    file = tmp_path / "in.safetensors"
    state = weights("module.b.w", "module.a.w")
    safetensors.torch.save_file(state, file, metadata={"format": "pt", "note": "kept"})
    ckptool.strip_module(file, tmp_path / "out.safetensors", verify=True)
    again = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert sorted(again) == ["a.w", "b.w"] and torch.equal(again["a.w"], state["module.a.w"])
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as opened:
        assert opened.metadata()["note"] == "kept" and opened.metadata()["format"] == "pt"
    ckptool.strip_module(file, in_place=True, verify=True)
    assert file.read_bytes() == (tmp_path / "out.safetensors").read_bytes()
