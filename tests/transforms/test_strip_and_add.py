"""Prefixes off and on: wrappers in every order, on some keys, in every root."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from ckptool.conventions.state_dicts import model_state_dicts
from ckptool.errors import Conflict, NoMatch, UsageError
from ckptool.transforms.rename import add, strip
from fixtures.make import make
from fixtures.traps import TRAPS, batch_norm_model
from tests.support.errors import three_parts
from tests.support.files import opened, weights
from tests.support.same import assert_same_tree
from tests.support.stripping import stripped

# Prefixes off --------------------------------------------------------------------------------------------------------

STRIPPED = {
    "13-at-the-start": ["a", "b.c"],
    "13-twice": ["module.a", "module.b"],
    "13-in-the-middle": ["backbone.module.a", "backbone.module.b"],
    "13-the-word-inside-a-name": ["modules.a", "my_module.b", "module_.c", "submodule.module"],
    "13-a-child-called-module": ["weight", "bias"],
    "14-fsdp": ["0.weight", "1.bias"],
    "14-activation-checkpoint": ["layers.0.weight", "layers.1.weight"],
    "14-fsdp-of-activation-checkpoint": ["layers.0.weight", "b"],
    "14-deepspeed": ["a.weight", "b.bias"],
    "14-lightning-of-dp": ["model.module.a.weight", "model.module.b.bias"],
    "14-deepspeed-of-dp-of-compile": ["a", "b"],
}


@pytest.mark.parametrize("name", STRIPPED)
def test_stripped_keys_are_those_of_the_bare_model(name: str, tmp_path: Path) -> None:
    assert list(stripped(TRAPS[name](), tmp_path)) == STRIPPED[name]


@pytest.mark.parametrize("name", ["14-dp-of-compile", "14-compile-of-dp", "12-metadata-below-a-prefix"])
def test_a_stripped_wrapped_model_has_the_bare_models_metadata(name: str, tmp_path: Path) -> None:
    tree = stripped(TRAPS[name](), tmp_path)
    bare = batch_norm_model().state_dict()
    assert list(tree) == list(bare)
    assert tree.metadata == bare._metadata and list(tree.metadata) == list(bare._metadata)


def test_a_compiled_submodule_is_stripped(tmp_path: Path) -> None:
    tree = stripped(TRAPS["14-compiled-submodule"](), tmp_path)
    bare = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    assert list(tree) == list(bare) and tree.metadata == bare._metadata


@pytest.mark.parametrize("name", ["14-averaged", "14-averaged-of-dp", "averaged.pt"])
def test_n_averaged_does_not_stand_in_the_way(name: str, tmp_path: Path) -> None:
    from ckptool.formats import read

    checkpoint = read(make(name, tmp_path))
    done = strip(checkpoint, model_state_dicts(checkpoint))
    keys = list(done.checkpoint.tree)
    assert keys[0] == "n_averaged" and done.changed == len(keys) - 1
    front = "module." if name == "14-averaged-of-dp" else ""
    assert all(key.startswith(front) and not key.startswith(f"{front}module.") for key in keys[1:])


def test_a_collision_names_both_keys(tmp_path: Path) -> None:
    with pytest.raises(Conflict) as caught:
        stripped(TRAPS["15-collision"](), tmp_path, partial=True)
    assert three_parts(caught.value) == (
        "conflict",
        "keys of the file would collide: a and module.a would both be 'a'",
    )
    with pytest.raises(Conflict, match=re.escape("a._orig_mod.b and a.b would both be 'a.b'")):
        stripped(TRAPS["15-collision-of-wrappers"](), tmp_path)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("13-on-some-keys", "1 of 2 keys of the file begin with 'module.'; without it: ema_decay"),
        ("13-a-submodule-called-module", "2 of 3 keys of the file begin with 'module.'; without it: head.weight"),
        ("15-collision", "1 of 2 keys of the file begin with 'module.'; without it: a"),
    ],
)
def test_a_prefix_on_some_keys_only_is_a_conflict(name: str, counts: str, tmp_path: Path) -> None:
    with pytest.raises(Conflict) as caught:
        stripped(TRAPS[name](), tmp_path)
    assert three_parts(caught.value) == ("conflict", counts) and "--partial" in caught.value.fix


def test_partial_strips_a_prefix_on_some_keys(tmp_path: Path) -> None:
    assert list(stripped(TRAPS["13-on-some-keys"](), tmp_path, partial=True)) == ["a", "ema_decay"]
    wrapped = {"_orig_mod.module.a": torch.ones(1), "_orig_mod.b": torch.ones(1)}
    with pytest.raises(Conflict, match="1 of 2"):  # module. is behind a wrapper that goes too
        stripped(wrapped, tmp_path)
    assert list(stripped(wrapped, tmp_path, partial=True)) == ["a", "b"]


def test_compiled_submodules_are_no_mixture(tmp_path: Path) -> None:
    assert list(stripped(weights("a._orig_mod.x", "b.x"), tmp_path)) == ["a.x", "b.x"]


def test_a_key_that_is_only_the_prefix_is_a_conflict(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="become empty"):
        stripped({"module.": torch.ones(1), "module.a": torch.ones(1)}, tmp_path)


def test_named_prefixes_in_order(tmp_path: Path) -> None:
    value = weights("model.net.a", "model.net.b")
    assert list(stripped(value, tmp_path, "model.")) == ["net.a", "net.b"]
    assert list(stripped(value, tmp_path, "model.", "net.")) == ["a", "b"]
    assert list(stripped(weights("module.module.a"), tmp_path, "module.", "module.")) == ["a"]
    with pytest.raises(NoMatch, match=r"no key begins with 'net\.'") as caught:
        stripped(value, tmp_path, "net.", "model.")
    assert caught.value.exit_code == 1
    with pytest.raises(UsageError, match="empty"):
        stripped(value, tmp_path, "model.", "")


@pytest.mark.parametrize("prefix", ["model.", "_orig_mod."])
def test_a_named_prefix_on_some_keys(prefix: str, tmp_path: Path) -> None:
    value = weights(f"{prefix}a", "b")
    with pytest.raises(Conflict, match="1 of 2 keys"):
        stripped(value, tmp_path, prefix)
    assert list(stripped(value, tmp_path, prefix, partial=True)) == ["a", "b"]


def test_a_named_prefix_leaves_other_wrappers(tmp_path: Path) -> None:
    assert list(stripped(weights("module._orig_mod.a"), tmp_path, "module.")) == ["_orig_mod.a"]


def test_all_roots_and_only_roots(tmp_path: Path) -> None:
    value = {"G": weights("module.a.x"), "D": weights("module.b.x"), "module.config": {"module.c": 1}}
    tree = stripped(value, tmp_path)
    assert [list(tree[name]) for name in ("G", "D")] == [["a.x"], ["b.x"]]
    assert list(tree) == ["G", "D", "module.config"] and tree["module.config"] == {"module.c": 1}


def test_a_root_that_stands_twice_stays_one(tmp_path: Path) -> None:
    model = weights("module.a.x")
    tree = stripped({"model": model, "best": model}, tmp_path)
    assert tree["model"] is tree["best"] and list(tree["best"]) == ["a.x"]


def test_nothing_to_do_is_the_same_checkpoint(tmp_path: Path) -> None:
    checkpoint = opened(weights("a.x", "backbone.module.y"), tmp_path)
    done = strip(checkpoint, model_state_dicts(checkpoint))
    assert done.checkpoint is checkpoint and (done.changed, done.total, done.examples) == (0, 2, ())


def test_the_report_counts_by_root(tmp_path: Path) -> None:
    value = {"G": weights("module.a.x", "module.b.x"), "D": weights("b.x")}
    checkpoint = opened(value, tmp_path)
    done = strip(checkpoint, model_state_dicts(checkpoint))
    assert (done.changed, done.total, done.roots) == (2, 3, (("G", 2, 2), ("D", 0, 1)))
    assert done.examples == (("module.a.x", "a.x"), ("module.b.x", "b.x"))


# Prefixes on ---------------------------------------------------------------------------------------------------------


def test_add_is_what_a_wrapper_does(tmp_path: Path) -> None:
    model = batch_norm_model()
    checkpoint = opened(model.state_dict(), tmp_path)
    for wrapped, prefix in ((nn.DataParallel(model), "module."), (torch.compile(model), "_orig_mod.")):
        tree = add(checkpoint, model_state_dicts(checkpoint), prefix).checkpoint.tree
        there = wrapped.state_dict()
        assert list(tree) == list(there)
        assert tree.metadata == there._metadata and list(tree.metadata) == list(there._metadata)


def test_the_outermost_version_moves_along(tmp_path: Path) -> None:
    state = batch_norm_model().state_dict()
    state._metadata[""] = {"version": 7}
    checkpoint = opened(state, tmp_path)
    metadata = add(checkpoint, model_state_dicts(checkpoint)).checkpoint.tree.metadata
    assert (metadata[""], metadata["module"], metadata["module.1"]) == ({"version": 1}, {"version": 7}, {"version": 2})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "net.", "a.b.", "a.b.c.", "x"])
@pytest.mark.parametrize(
    "name",
    [
        "12-metadata",
        "12-metadata-of-an-old-version",
        "12-metadata-missing",
        "13-twice",
        "14-averaged",
        "14-averaged-of-dp",
        "18-cyclic-dict",
    ],
)
def test_strip_of_add_is_the_identity(name: str, prefix: str, tmp_path: Path) -> None:
    checkpoint = opened(TRAPS[name](), tmp_path)
    named = name == "18-cyclic-dict"
    added = add(checkpoint, model_state_dicts(checkpoint, named=named), prefix).checkpoint
    assert all(key.startswith(prefix) or key == "n_averaged" for key in added.tree)
    assert_same_tree(checkpoint, strip(added, model_state_dicts(added, named=named), [prefix]).checkpoint)


def test_strip_of_add_without_an_entry_for_the_outermost_module(tmp_path: Path) -> None:
    state = batch_norm_model().state_dict()
    del state._metadata[""]
    checkpoint = opened(state, tmp_path)
    added = add(checkpoint, model_state_dicts(checkpoint)).checkpoint
    assert_same_tree(checkpoint, strip(added, model_state_dicts(added)).checkpoint)


@pytest.mark.parametrize(
    "name", ["training.pt", "gan.pt", "lightning.ckpt", "ties.pt", "numpy_values.pt", "averaged.pt"]
)
def test_strip_of_add_on_training_files(name: str, tmp_path: Path) -> None:
    from ckptool.formats import read

    checkpoint = read(make(name, tmp_path))
    added = add(checkpoint, model_state_dicts(checkpoint)).checkpoint
    assert_same_tree(checkpoint, strip(added, model_state_dicts(added), ["module."]).checkpoint)


def test_swa_model_goes_through(tmp_path: Path) -> None:
    """What is stripped of an averaged model loads into the bare one, apart from the counter."""
    model = batch_norm_model()
    tree = stripped(swa_utils.AveragedModel(model).state_dict(), tmp_path)
    assert [key for key in tree if key != "n_averaged"] == list(model.state_dict())
