"""A run that goes on ends with the very state of one that never stopped, and a run that is made longer with that of one
which was so long from the beginning: whatever its configuration asks for."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ckptool.errors import Conflict
from ckptool.training.start import resume, start
from tests.support.looped import looped, sliced
from tests.support.small_runs import (
    ARGS,
    BOTH,
    CONV,
    GAN,
    IMAGES,
    TEXT,
    again,
    config,
    last,
    own,
    resumes,
    run_to_end,
    scheduled,
    split_at,
    take,
    toy,
    trainer,
)


def names(base: type, module: Any) -> list[str]:
    """Every class of a module that is one of `base`."""
    return sorted(
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and key[0] != "_"
    )


DENSE = [name for name in names(torch.optim.Optimizer, torch.optim) if name not in ("LBFGS", "SparseAdam", "Muon")]
MODADD = {"name": toy("data.py:modadd"), "args": {"modulus": 5}, "batch": 4}
GPT = {"main": {"name": toy("models.py:CharGPT"), "args": {"width": 8, "layers": 3, "dropout": 0.2}}}
CHECKPOINTED = {"activation_checkpoint": {"match": "blocks.*"}}
THAWS = [{"match": "1.*", "until": 3}, {"match": "*.bias", "until": 5}]
LION = {"name": own("Lion"), "lr": 0.002, "args": {"weight_decay": 0.1}}
OF_OWN = {"warmup": {}, "Halving": {"every": 2}, "both": {"length": 2}}
STREAM = {"batch": 8, "val_fraction": 0}


def schedule(name: str, per: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """In epochs of three steps, or of eight where evaluation is followed."""
    batch = "data.batch=6" if name == "ReduceLROnPlateau" else "data.batch=16"
    return (batch,), {"optim": scheduled(name, per=per), "middle": 4, "steps": 11}


# What a run has -> `KEY=VALUE` changes, sections, and where it is stopped.
RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{name: ((f"optim.main.name={name.lower()}",), {}) for name in DENSE},
    "Muon": (("optim.main.name=muon",), {"models": {"main": {"name": own("matrix")}}}),
    "SparseAdam": (("optim.main.name=sparse_adam",), {"models": {"main": {"name": own("Words")}}, "data": MODADD}),
    **{f"{name} per {per}": schedule(name, per) for name, per in product(ARGS, ("step", "epoch"))},
    "Lion": ((), {"optim": {"main": LION}}),
    "Lion in groups": ((), {"optim": {"main": {**LION, "groups": [{"match": "*.bias", "weight_decay": 0.0}]}}}),
    "an optimizer with modes": ((f"optim.main.name={own('Moody')}",), {}),
    **{
        f"{name} of one's own": (
            (),
            {"optim": {"main": {"schedule": {"name": own(name), "args": args}}}, "middle": 3, "steps": 7},
        )
        for name, args in OF_OWN.items()
    },
    **{
        f"two optimizers, {half}": ((f"train.precision={half}", "train.ema=0.9", "train.accumulate=2"), BOTH)
        for half in ("fp32", "fp16")
    },
    "bf16": (("train.precision=bf16", "train.accumulate=2", "train.ema=0.9"), {}),
    "fp16": (("train.precision=fp16", "train.accumulate=2", "train.ema=0.9"), {}),
    "accumulation": (("train.accumulate=3", "train.ema=0.9"), {}),
    "BatchNorm": ((), {"data": IMAGES, "models": {"main": CONV}}),
    "a GAN": (("train.accumulate=2",), GAN),
    "tied weights": (("train.ema=0.9",), TEXT),
    **{
        f"thawing, {half}, stopped at {middle}": (
            (f"train.precision={half}",),
            {"models": {"main": {"name": "mlp", "freeze": THAWS}}, "middle": middle, "steps": 8},
        )
        for half, middle in product(("fp32", "fp16"), (1, 3, 5))
    },
    "checkpointing": (("train.accumulate=2",), {**TEXT, "train": {"steps": 20, **CHECKPOINTED}}),
    "a split model": (("train.accumulate=2",), split_at("4", microbatches=2)),
    "a split model with checkpointing": (
        ("train.precision=bf16",),
        {**TEXT, "models": GPT, **split_at("blocks.1"), "train": {"steps": 9, **CHECKPOINTED}},
    ),
    "a stream": ((), {"data": {"name": own("Points"), **STREAM}}),
    "a sampler": ((), {"data": {"name": own("PointItems"), "sampler": own("weighted"), "batch": 8}}),
}


@looped("name", RUNS, at_once=6)
def test_a_run_that_goes_on_is_one_that_never_stopped(tmp_path: Path, name: str) -> None:
    changes, sections = RUNS[name]
    resumes(tmp_path, *changes, **sections)


def test_every_optimizer_and_schedule_of_torch_is_in_the_table_or_cannot_be_named() -> None:
    """Functions, other schedules and closures are nothing that a configuration can hold."""
    refused = {"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"}
    assert set(names(lr_scheduler.LRScheduler, lr_scheduler)) <= set(ARGS) | refused
    for name in DENSE:
        assert type(trainer(f"optim.main.name={name.lower()}").optimizers["main"]) is getattr(torch.optim, name)


def test_what_is_resumed_is_what_was_asked_for(tmp_path: Path) -> None:
    """Not one of another kind: state of one's own with its dtype, averages that are tied, f32 weights, the scaler."""
    changes, sections = RUNS["Lion in groups"]
    made = trainer(*changes, **sections)
    take(made, 9)
    found = [name for group in made.optimizers["main"].param_groups for name in group["param_names"]]
    assert sorted(found) == sorted(dict(made.models["main"].named_parameters()))
    slots = next(iter(again(made, tmp_path / "b.pt").optimizers["main"].state.values()))
    assert (slots["signs"].dtype, slots["signs"].tolist()) == (torch.int64, [9, 9, 9])
    average = trainer(*RUNS["tied weights"][0], **TEXT).averages["main"].values
    assert average["head.weight"] is average["tokens.weight"]
    for half in ("bf16", "fp16"):
        made = trainer(f"train.precision={half}")
        assert (made.scaler is not None) is (half == "fp16")
        assert all(p.dtype == torch.float32 for p in made.models["main"].parameters())
    for per, count in (("step", 11), ("epoch", 3)):
        made = trainer("data.batch=16", optim=scheduled("StepLR", per=per))
        take(made, 11)
        assert made.schedules["main"].last_epoch == count


# Longer runs ---------------------------------------------------------------------------------------------------------

LONGER: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{
        # Also where the first part ends between two evaluations, and is judged once more for that.
        f"{name} {every}": ((f"eval.every={every}", "train.ema=0.9"), {"optim": scheduled(name)})
        for name, every in product(["ReduceLROnPlateau", "warmup_cosine", "StepLR"], [3, 5, 7, 1000])
    },
    **{
        f"{name} per {per}": (("eval.every=4",), {"optim": scheduled(name, per=per)})
        for name, per in product(sorted(ARGS), ["step", "epoch"])
    },
    "gan": (("eval.every=4",), GAN),
    "conv": (("eval.every=4",), {"data": IMAGES, "models": {"main": CONV}}),
    "fp16": (("eval.every=4",), {"train": {"steps": 9, "precision": "fp16", "accumulate": 3}}),
}


@pytest.mark.parametrize("name", sliced(LONGER, 12))
def test_a_run_that_is_made_longer_was_always_so_long(tmp_path: Path, name: str) -> None:
    """Nothing of the state knows where the run was to end."""
    changes, sections = LONGER[name]
    run_to_end(tmp_path / "whole", "train.steps=20", *changes, **sections)
    for first in (10, 13):
        start(config(f"train.steps={first}", *changes, run=tmp_path / f"{first}/run", **sections))
        resume(str(tmp_path / f"{first}/run"), ["train.steps=20"])
        assert last(tmp_path / "whole") == last(tmp_path / f"{first}"), first


@pytest.mark.parametrize("change", ["eval.every=2", "eval.metric=val_acc"])
def test_what_a_plateau_follows_changes_only_when_it_is_said(tmp_path: Path, change: str) -> None:
    plateau = scheduled("ReduceLROnPlateau")
    run_to_end(tmp_path, "train.steps=10", optim=plateau)
    with pytest.raises(Conflict, match=change.partition("=")[0]):
        start(config("train.steps=20", change, run=tmp_path / "run", optim=plateau), resume="auto")
    resume(str(tmp_path / "run"), ["train.steps=20", change])
    run_to_end(tmp_path / "free", "train.steps=10")
    start(config("train.steps=20", change, run=tmp_path / "free" / "run"), resume="auto")


# Declared changes ----------------------------------------------------------------------------------------------------


def changed(made: Any, path: Path, **sections: Any) -> Any:
    """A trainer of another configuration, with the state of one."""
    from ckptool.training.trainer import restored

    again(made, path)
    new = trainer(**sections)
    restored(new, torch.load(path, weights_only=True), "here")
    return new


def test_a_declared_rate_is_the_one_that_is_used(tmp_path: Path) -> None:
    made = trainer(optim={"main": {"lr": 0.01}})
    take(made, 4)
    new = changed(made, tmp_path / "a.pt", optim={"main": {"lr": 0.5}})
    assert new.optimizers["main"].param_groups[0]["lr"] == 0.5
    assert int(new.optimizers["main"].state_dict()["state"][0]["step"]) == 4


@pytest.mark.parametrize("before", [None, "ExponentialLR", "OneCycleLR"])
@pytest.mark.parametrize("after", ["StepLR", "warmup_cosine", "OneCycleLR", "CosineAnnealingLR"])
def test_a_declared_schedule_goes_on_as_if_it_had_been_so(tmp_path: Path, before: str | None, after: str) -> None:
    made = trainer(optim=scheduled(before) if before else {"main": {"lr": 0.3}})
    take(made, 4)
    new = changed(made, tmp_path / "a.pt", optim=scheduled(after))
    other = trainer(optim=scheduled(after))
    take(other, 4)
    for _ in range(3):
        one, two = new.optimizers["main"].param_groups[0], other.optimizers["main"].param_groups[0]
        assert (one["lr"], one["betas"]) == (two["lr"], two["betas"])
        take(new, 1)
        take(other, 1)


def test_a_declared_rate_stays_when_the_run_goes_on_again(tmp_path: Path) -> None:
    """Killed after the change or not, and without saying it again; of one of two optimizers alone."""
    for name in ("a", "b"):
        run_to_end(tmp_path / name, "train.steps=6", "save.keep_last=9", **BOTH)
        resume(str(tmp_path / name / "run"), ["optim.rest.lr=0.5", "train.steps=10", "save.every=2"])
    for step in (8, 10):
        (tmp_path / "b/run/checkpoints" / f"step-{step:08d}.pt").unlink()
    for name in ("a", "b"):
        resume(str(tmp_path / name / "run"), ["train.steps=12"])
    assert last(tmp_path / "a") == last(tmp_path / "b")
    tree = torch.load(tmp_path / "a/run/checkpoints/step-00000012.pt", weights_only=True)
    assert tree["optimizer_rest_state_dict"]["param_groups"][0]["lr"] == 0.5
    assert tree["optimizer_muon_state_dict"]["param_groups"][0]["lr"] == 0.02 * 0.5**6
    with pytest.raises(Conflict, match=r"optim\.muon\.match was"):
        resume(str(tmp_path / "a/run"), ["optim.muon.match=blocks"])
