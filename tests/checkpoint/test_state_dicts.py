"""Which parts of a checkpoint are weights, their average, an optimizer, plain values."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

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
from ckptool.formats import read
from fixtures.make import PRODUCERS, make
from tests.support.files import opened, weights
from tests.support.looped import looped

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


# Choosing ------------------------------------------------------------------------------------------------------------


# Wrapper prefixes of keys, one by one ---------------------------------------------------------------------------------


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
