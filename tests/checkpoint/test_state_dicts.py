"""Which parts of a checkpoint are weights, their average, an optimizer, plain values."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.conventions.state_dicts import AVERAGE, OPTIMIZER, PLAIN, WEIGHTS, find_state_dicts, one_state_dict
from ckptool.errors import UsageError
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
FIXTURES: dict[str, list[tuple[str, str]]] = {
    **{name: [("", WEIGHTS)] for name in BARE},
    "training.pt": [
        ("epoch", PLAIN),
        ("global_step", PLAIN),
        ("model_state_dict", WEIGHTS),
        ("ema_state_dict", AVERAGE),
        ("optimizer_state_dict", OPTIMIZER),
        ("scheduler_state_dict", PLAIN),
        ("rng_state", PLAIN),
        ("loss", PLAIN),
        ("best_metric", PLAIN),
        ("config", PLAIN),
    ],
    "training_sgd.pt": [
        ("epoch", PLAIN),
        ("arch", PLAIN),
        ("state_dict", WEIGHTS),
        ("best_acc1", PLAIN),
        ("optimizer", OPTIMIZER),
    ],
    "gan.pt": [
        ("iteration", PLAIN),
        ("generator", WEIGHTS),
        ("generator_optimizer", OPTIMIZER),
        ("discriminator", WEIGHTS),
        ("discriminator_optimizer", OPTIMIZER),
    ],
    "lightning.ckpt": [
        ("epoch", PLAIN),
        ("global_step", PLAIN),
        ("pytorch-lightning_version", PLAIN),
        ("state_dict", WEIGHTS),
        ("loops", PLAIN),
        ("callbacks", PLAIN),
        ("optimizer_states/0", OPTIMIZER),
        ("lr_schedulers", PLAIN),
        ("MixedPrecision", PLAIN),
        ("hparams_name", PLAIN),
        ("hyper_parameters", PLAIN),
    ],
    "protocol4.pt": [("state_dict", WEIGHTS), ("raw", PLAIN), ("epoch", PLAIN)],
    "protocol5.pt": [("state_dict", WEIGHTS), ("raw", PLAIN), ("epoch", PLAIN)],
    "rezipped_deflated.pt": [("state_dict", WEIGHTS), ("zeros", PLAIN)],
    "whole_module.pt": [("", WEIGHTS)],
    "numpy_values.pt": [
        ("state_dict", WEIGHTS),
        *((name, PLAIN) for name in "loss history confusion args meters price when classes root".split()),
    ],
}
LEGACY = {"legacy.pt", "cuda1_legacy.pt"}  # another container


def test_every_fixture_has_its_line() -> None:
    assert FIXTURES.keys() | LEGACY == PRODUCERS.keys()


@looped("name", FIXTURES)
def test_fixture(name: str, tmp_path: Path) -> None:
    found = find_state_dicts(read(make(name, tmp_path)))
    assert [(root.address, root.kind) for root in found] == FIXTURES[name]


# Made-up layouts, and where their weights are.
LAYOUTS: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "bare": (MODEL, [("", WEIGHTS)]),
    "bare, names without dots": (weights("a", "b"), [("", WEIGHTS)]),
    "ordered": (collections.OrderedDict(MODEL), [("", WEIGHTS)]),
    "model": ({"model": MODEL, "epoch": 3}, [("model", WEIGHTS)]),
    "model of plain names": ({"params": weights("w", "b"), "epoch": 3}, [("params", WEIGHTS)]),
    "module": ({"module": MODEL, "optimizer": None}, [("module", WEIGHTS)]),
    "nested": ({"models": {"G": MODEL, "D": OTHER}}, [("models/G", WEIGHTS), ("models/D", WEIGHTS)]),
    "nested beside a tensor": (
        {"models": {"G": MODEL, "D": OTHER}, "rng": BYTES},
        [("models/G", WEIGHTS), ("models/D", WEIGHTS)],
    ),
    "a list": ([MODEL, OTHER], [("0", WEIGHTS), ("1", WEIGHTS)]),
    "a list inside": ({"models": [MODEL, OTHER]}, [("models/0", WEIGHTS), ("models/1", WEIGHTS)]),
    "a tuple": ((MODEL, ADAM, 3), [("0", WEIGHTS)]),
    "the same twice": ({"model": MODEL, "best": MODEL}, [("model", WEIGHTS)]),
    "random states and a loss": (
        {"model": MODEL, "rng_state": BYTES, "cuda_rng_state": BYTES, "loss": LOSS},
        [("model", WEIGHTS)],
    ),
    "class weights": ({"model": MODEL, "weight": BYTES, "scale": LOSS}, [("model", WEIGHTS)]),
    "curves": ({"train_losses": BYTES, "val_losses": BYTES, "net": MODEL}, [("net", WEIGHTS)]),
    "curves below": ({"history": weights("train.loss", "val.loss"), "net": MODEL}, [("net", WEIGHTS)]),
    "random states only": ({"rng_states": {"python": BYTES, "numpy": BYTES}}, []),
    "normalizer": ({"state_dict": MODEL, "normalizer": {"mean": LOSS, "std": LOSS}}, [("state_dict", WEIGHTS)]),
    "optimizer": (ADAM, []),
    "deep optimizer": ({"trainer": {"parts": [ADAM]}, "model": MODEL}, [("model", WEIGHTS)]),
    "state of an optimizer without groups": ({"optimizer": {"exp.avg": BYTES, "exp.sq": BYTES}}, []),
    "extra state": (
        {**MODEL, "fc._extra_state": {"amax": BYTES}, "a._extra_state": b"1", "b._extra_state": {}},
        [("", WEIGHTS)],
    ),
    "weights and a counter": ({**MODEL, "ema_decay": 0.9}, [("", WEIGHTS)]),
    "weights beside an optimizer": ({**MODEL, "optimizer": ADAM}, [("", WEIGHTS)]),
    "few tensors among settings": ({"config": {"a": LOSS, "b": 1, "c": 2, "d": 3}}, []),
    "integer keys": ({0: BYTES, 1: BYTES}, []),
    "empty": ({}, []),
    "empty weights": ({"state_dict": {}}, []),
    "one tensor": (LOSS, []),
    "nothing": (None, []),
    "EMA, suffix": ({"model": MODEL, "model_ema": OTHER}, [("model", WEIGHTS), ("model_ema", AVERAGE)]),
    "EMA, prefix": ({"ema_model": MODEL, "net": OTHER}, [("ema_model", AVERAGE), ("net", WEIGHTS)]),
    "EMA, camel": ({"emaModel": MODEL, "net": OTHER}, [("emaModel", AVERAGE), ("net", WEIGHTS)]),
    "EMA below": (
        {"model": MODEL, "ema": {"module": OTHER, "updates": 5}},
        [("model", WEIGHTS), ("ema/module", AVERAGE)],
    ),
    "SWA": ({"swa": {"n_averaged": LOSS, **MODEL}}, [("swa", AVERAGE)]),
    "no EMA: e-mail": ({"email_encoder": MODEL, "emanet": OTHER}, [("email_encoder", WEIGHTS), ("emanet", WEIGHTS)]),
    "teacher": ({"student": MODEL, "teacher": OTHER}, [("student", WEIGHTS), ("teacher", WEIGHTS)]),
}


@looped("name", LAYOUTS)
def test_layout(name: str, tmp_path: Path) -> None:
    value, expected = LAYOUTS[name]
    found = find_state_dicts(opened(value, tmp_path))
    assert [(root.address, root.kind) for root in found if root.is_model] == expected


def test_every_top_level_entry_is_named(tmp_path: Path) -> None:
    value = {"epoch": 1, "model": MODEL, 7: [1], None: "x", "models": {"a": OTHER, "config": {}}}
    found = find_state_dicts(opened(value, tmp_path))
    assert [root.path for root in found] == [
        ("epoch",),
        ("model",),
        (7,),
        (None,),
        ("models", "a"),
        ("models", "config"),
    ]


# Choosing ------------------------------------------------------------------------------------------------------------


def test_names_are_escaped(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        one_state_dict(opened({"net\x1b[31m": MODEL, "net\n": OTHER}, tmp_path))
    assert "\x1b" not in str(caught.value) and "net\\n" in caught.value.what
