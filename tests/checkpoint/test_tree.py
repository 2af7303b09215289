"""Walking, finding and copying trees."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptool
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.graph import alike
from ckptool.checkpoint.nodes import Global, Object, Set
from ckptool.checkpoint.tree import address, children, find, holders, map_storages, rebuild, replaced_at, walk
from ckptool.conventions.state_dicts import (
    AVERAGE,
    INNER_WRAPPERS,
    OPTIMIZER,
    PLAIN,
    WEIGHTS,
    find_state_dicts,
    without_wrappers,
    wrappers,
)
from ckptool.errors import UnsafeObject
from ckptool.formats import read
from ckptool.pickles.calls import refuse_unknown
from fixtures.make import PRODUCERS, make
from fixtures.traps import TRAPS
from tests.support.files import load, opened, saved, weights
from tests.support.looped import looped
from tests.support.same import assert_same_tree

F32 = by_name("f32")


def entry(nbytes: int = 8, storage: Storage | None = None) -> TensorEntry:
    storage = storage or Storage(InlineBytes(bytes(range(nbytes))))
    return TensorEntry(storage, F32, (storage.nbytes // 4,), (1,))


# Walking -------------------------------------------------------------------------------------------------------------


def test_parts_of_objects_have_paths() -> None:
    made = Object(Global("argparse", "Namespace"), (1,))
    made.items, made.elements, made.state = {"k": 2}, [3], {"lr": 4}
    assert dict(walk({"o": made})) | {} == {
        (): {"o": made}, ("o",): made, ("o", "(args)"): (1,), ("o", "(args)", 0): 1, ("o", "k"): 2, ("o", 0): 3,
        ("o", "lr"): 4,
    }  # fmt: skip
    assert [made[key] for key in ("k", 0, "lr")] == [2, 3, 4]
    for missing in (1, -1, False, "(args)"):
        with pytest.raises(KeyError):
            made[missing]
    opaque = Object(Global("a", "b"), ())
    opaque.state = [5]
    assert [path for path, _ in walk(opaque)] == [(), ("(state)",), ("(state)", 0)]


# Addresses -----------------------------------------------------------------------------------------------------------


keys = st.text("ab/~.0é", min_size=1, max_size=4) | st.integers(-2, 3) | st.none() | st.booleans()


@given(st.lists(keys, min_size=1, max_size=4))
def test_every_address_leads_back(path: list[Any]) -> None:
    tree: Any = "leaf"
    for key in reversed(path):
        tree = {key: tree, "other": 0}
    assert find(tree, address(tuple(path))) == (tuple(path), "leaf")


@looped("name", TRAPS)
def test_another_node_at_any_place_leaves_the_others(name: str, tmp_path: Path) -> None:
    tree, other = opened(TRAPS[name](), tmp_path).tree, object()
    places = list(walk(tree))
    for path, _ in places[1 :: len(places) // 10 + 1]:
        made = replaced_at(tree, path, other)
        for before, after, segment in zip(holders(tree, path), holders(made, path), path, strict=True):
            assert type(after) is type(before) and after is not before
            there, here = ([each for each in children(one) if each[0] != segment] for one in (before, after))
            assert [(key, id(part)) for key, part in here] == [(key, id(part)) for key, part in there]
        assert dict(children(after))[path[-1]] is other


# Copies --------------------------------------------------------------------------------------------------------------


@looped("name", TRAPS)
def test_a_copy_is_the_same_graph(name: str, tmp_path: Path) -> None:
    tree = opened(TRAPS[name](), tmp_path).tree
    assert_same_tree(tree, rebuild(tree))
    assert_same_tree(tree, map_storages(tree, dataclasses.replace))  # other storages, tied as before


def test_deep_tuples_and_cycles_do_not_recurse() -> None:
    deep: Any = (entry(),)
    for _ in range(4_000):
        deep = (deep,)
    ring: list[Any] = [deep]
    ring.append(ring)
    copy = rebuild({"ring": ring}, lambda node: entry())
    assert copy["ring"][1] is copy["ring"] is not ring
    assert sum(1 for _ in walk(copy["ring"][0])) > 4_000


# Unknown calls -------------------------------------------------------------------------------------------------------


def test_calls_that_are_thrown_away_cannot_be_kept() -> None:
    gone = Checkpoint({}, "live", discarded=(Object(Global("os", "system"), ()),))
    for keep in (False, True):
        with pytest.raises(UnsafeObject, match="created and discarded"):
            refuse_unknown(gone, keep_unknown=keep)


# Graphs ---------------------------------------------------------------------------------------------------------------


def test_what_graphs_are_alike() -> None:
    storage = Storage(InlineBytes(bytes(16)))

    def tree(value: Any = 0.5, offset: int = 0) -> Any:
        view = TensorEntry(storage, by_name("f32"), (2,), (1,), offset)
        return {"w": [view, (value, float("nan"), Set([]))], "name": "".join(["a", "b"])}

    assert alike(tree(), tree()) and alike(tree(), tree(), limit=100)
    assert not alike(tree(), tree(), limit=3)
    for other in (tree(offset=1), tree(0.75), tree(1), tree(None), {**tree(), "more": 1}):
        assert not alike(tree(), other) and not alike(other, tree())


class Bag(dict):  # type: ignore[type-arg]
    """A dictionary with attributes."""


def test_an_item_and_an_attribute_of_one_name_are_told_apart(tmp_path: Path) -> None:
    bag = Bag(a=1)
    bag.a = 2  # type: ignore[attr-defined]
    path = saved({"w": torch.ones(1), "bag": bag}, tmp_path / "a.pt")
    ckptool.edit(path, tmp_path / "b.pt", set={"x": 1}, verify=True, keep_unknown=True)
    found = load(tmp_path / "b.pt", weights_only=False)["bag"]
    assert (found["a"], found.a) == (1, 2)
    bag.a = 3  # type: ignore[attr-defined]
    assert not ckptool.diff(path, saved({"w": torch.ones(1), "bag": bag}, tmp_path / "c.pt")).same


# State dicts ----------------------------------------------------------------------------------------------------------
# Which parts of a checkpoint are weights, their average, an optimizer, plain values.


MODEL = weights("fc.weight", "fc.bias")
OTHER = weights("fc.weight", "fc.bias", "out.weight")
BYTES = torch.zeros(16, dtype=torch.uint8)
LOSS = torch.tensor(0.5)
ADAM = {
    "state": {0: {"step": LOSS, "exp_avg": BYTES, "exp_avg_sq": BYTES}},
    "param_groups": [{"lr": 0.1, "params": [0]}],
}

BARE = (
    "dp.pt compiled.pt dp_compiled.pt compiled_dp.pt compiled_submodule.pt averaged.pt fsdp.pt deepspeed.pt cuda.pt "
    "crc_off.pt old_zip.pt big_endian.pt rezipped_zip64.pt model.safetensors bf16.safetensors ties.safetensors ties.pt"
).split()
KINDS = {"": PLAIN, "W": WEIGHTS, "A": AVERAGE, "O": OPTIMIZER}


def roots(words: str) -> list[tuple[str, str]]:
    """The roots of `epoch model=W`, each with its kind."""
    return [(name, KINDS[kind]) for name, _, kind in (word.partition("=") for word in words.split())]


FIXTURES: dict[str, list[tuple[str, str]]] = {
    **{name: roots("=W") for name in [*BARE, "whole_module.pt"]},
    "training.pt": roots(
        "epoch global_step model_state_dict=W ema_state_dict=A optimizer_state_dict=O scheduler_state_dict rng_state "
        "loss best_metric config"
    ),
    "training_sgd.pt": roots("epoch arch state_dict=W best_acc1 optimizer=O"),
    "gan.pt": roots("iteration generator=W generator_optimizer=O discriminator=W discriminator_optimizer=O"),
    "lightning.ckpt": roots(
        "epoch global_step pytorch-lightning_version state_dict=W loops callbacks optimizer_states/0=O lr_schedulers "
        "MixedPrecision hparams_name hyper_parameters"
    ),
    **{f"protocol{number}.pt": roots("state_dict=W raw epoch") for number in (4, 5)},
    "rezipped_deflated.pt": roots("state_dict=W zeros"),
    "numpy_values.pt": roots("state_dict=W loss history confusion args meters price when classes root"),
}
LEGACY = {"legacy.pt", "cuda1_legacy.pt"}  # another container


def test_every_fixture_has_its_line() -> None:
    assert FIXTURES.keys() | LEGACY == PRODUCERS.keys()


@looped("name", FIXTURES)
def test_fixture(name: str, tmp_path: Path) -> None:
    found = find_state_dicts(read(make(name, tmp_path)))
    assert [(root.address, root.kind) for root in found] == FIXTURES[name]


# Made-up layouts, and where their weights are.
LAYOUTS: dict[str, tuple[Any, str]] = {
    "bare": (MODEL, "=W"), "bare, names without dots": (weights("a", "b"), "=W"),
    "ordered": (collections.OrderedDict(MODEL), "=W"), "model": ({"model": MODEL, "epoch": 3}, "model=W"),
    "model of plain names": ({"params": weights("w", "b"), "epoch": 3}, "params=W"),
    "module": ({"module": MODEL, "optimizer": None}, "module=W"),
    "nested": ({"models": {"G": MODEL, "D": OTHER}}, "models/G=W models/D=W"),
    "nested beside a tensor": ({"models": {"G": MODEL, "D": OTHER}, "rng": BYTES}, "models/G=W models/D=W"),
    "a list": ([MODEL, OTHER], "0=W 1=W"), "a list inside": ({"models": [MODEL, OTHER]}, "models/0=W models/1=W"),
    "a tuple": ((MODEL, ADAM, 3), "0=W"), "the same twice": ({"model": MODEL, "best": MODEL}, "model=W"),
    "random states": ({"model": MODEL, "rng_state": BYTES, "cuda_rng_state": BYTES, "loss": LOSS}, "model=W"),
    "class weights": ({"model": MODEL, "weight": BYTES, "scale": LOSS}, "model=W"),
    "curves": ({"train_losses": BYTES, "val_losses": BYTES, "net": MODEL}, "net=W"),
    "curves below": ({"history": weights("train.loss", "val.loss"), "net": MODEL}, "net=W"),
    "random states only": ({"rng_states": {"python": BYTES, "numpy": BYTES}}, ""),
    "normalizer": ({"state_dict": MODEL, "normalizer": {"mean": LOSS, "std": LOSS}}, "state_dict=W"),
    "statistics": ({"model": MODEL, "obs_norm_state_dict": weights("_mean", "_var", "_std", "count")}, "model=W"),
    "two letters": ({"model": MODEL, "gt": weights("x", "y"), "DM": weights("perm")}, "model=W"),
    "one letter": ({"G": weights("x"), "d": weights("y"), "G_A": weights("z")}, "G=W d=W G_A=W"),
    "statistics of layers": ({"running_mean_std": weights("running_mean", "running_var", "count")}, ""),
    "EMA of losses": ({"model": MODEL, "ema_stats": {"loss": LOSS}}, "model=W"),
    "Caffe2": ({"blobs": weights("conv1_w", "conv1_b"), "cfg": ""}, "blobs=W"),
    "optimizer": (ADAM, ""), "deep optimizer": ({"trainer": {"parts": [ADAM]}, "model": MODEL}, "model=W"),
    "state of an optimizer without groups": ({"optimizer": {"exp.avg": BYTES, "exp.sq": BYTES}}, ""),
    "extra state": (MODEL | {"fc._extra_state": {"amax": BYTES}, "a._extra_state": b"1", "b._extra_state": {}}, "=W"),
    "weights and a counter": ({**MODEL, "ema_decay": 0.9}, "=W"),
    "weights beside an optimizer": ({**MODEL, "optimizer": ADAM}, "=W"),
    "few tensors among settings": ({"config": {"a": LOSS, "b": 1, "c": 2, "d": 3}}, ""),
    "integer keys": ({0: BYTES, 1: BYTES}, ""), "empty": ({}, ""), "empty weights": ({"state_dict": {}}, ""),
    "one tensor": (LOSS, ""), "nothing": (None, ""),
    "EMA, suffix": ({"model": MODEL, "model_ema": OTHER}, "model=W model_ema=A"),
    "EMA, prefix": ({"ema_model": MODEL, "net": OTHER}, "ema_model=A net=W"),
    "EMA, camel": ({"emaModel": MODEL, "net": OTHER}, "emaModel=A net=W"),
    "average of icefall": ({"model": MODEL, "model_avg": OTHER}, "model=W model_avg=A"),
    "weights of classes in the loss": ({"model": MODEL, "criterion": weights("weight")}, "model=W"),
    "EMA below": ({"model": MODEL, "ema": {"module": OTHER, "updates": 5}}, "model=W ema/module=A"),
    "SWA": ({"swa": {"n_averaged": LOSS, **MODEL}}, "swa=A"),
    "no EMA: e-mail": ({"email_encoder": MODEL, "emanet": OTHER}, "email_encoder=W emanet=W"),
    "teacher": ({"student": MODEL, "teacher": OTHER}, "student=W teacher=W"),
}  # fmt: skip


@looped("name", LAYOUTS)
def test_layout(name: str, tmp_path: Path) -> None:
    value, expected = LAYOUTS[name]
    found = find_state_dicts(opened(value, tmp_path))
    assert [(root.address, root.kind) for root in found if root.is_model] == roots(expected)


def test_every_top_level_entry_is_named(tmp_path: Path) -> None:
    value = {"epoch": 1, "model": MODEL, 7: [1], None: "x", "models": {"a": OTHER, "config": {}}}
    found = find_state_dicts(opened(value, tmp_path))
    paths = [("epoch",), ("model",), (7,), (None,), ("models", "a"), ("models", "config")]
    assert [root.path for root in found] == paths


# Wrapper prefixes of keys, one by one ---------------------------------------------------------------------------------


segments = st.sampled_from(["a", "0", "module", "modules", "weight", "_x", *INNER_WRAPPERS])
keys_of = st.lists(segments, min_size=1, max_size=6).map(".".join)


@given(keys_of)
def test_only_wrappers_go_and_all_of_them(key: str) -> None:
    *modules, name = key.split(".")
    modules = [part for part in modules if part not in INNER_WRAPPERS]
    peeled = modules[1:] if modules[:1] == ["module"] else modules
    assert without_wrappers(key) == ".".join([*peeled, name])
    assert wrappers(key).count(".") == key.count(".") - without_wrappers(key).count(".")
    assert all(part in ("", "module", *INNER_WRAPPERS) for part in wrappers(key).split("."))


@given(keys_of)
def test_a_key_that_is_clean_stays_clean(key: str) -> None:
    bare = without_wrappers(key)
    assert (wrappers(key) == "") == (bare == key)
    assert "module" in bare.split(".") or without_wrappers(bare) == bare
