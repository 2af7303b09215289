"""A run that goes on ends with the very state of one that never stopped, and a run that is made longer with that of one
which was so long from the beginning: whatever its configuration asks for."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ckptool.errors import Conflict
from ckptool.training.trainer import Trainer, gathered, restore, resume, start
from tests.support import small_runs as runs
from tests.support.looped import looped, sliced
from tests.support.small_runs import again, config, last, own, resumes, run_to_end, scheduled, take, toy, trainer


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
    **{f"{name} per {per}": schedule(name, per) for name, per in product(runs.ARGS, ("step", "epoch"))},
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
        f"two optimizers, {half}": ((f"train.precision={half}", "train.ema=0.9", "train.accumulate=2"), runs.BOTH)
        for half in ("fp32", "fp16")
    },
    "bf16": (("train.precision=bf16", "train.accumulate=2", "train.ema=0.9"), {}),
    "fp16": (("train.precision=fp16", "train.accumulate=2", "train.ema=0.9"), {}),
    "accumulation": (("train.accumulate=3", "train.ema=0.9"), {}),
    "BatchNorm": ((), {"data": runs.IMAGES, "models": {"main": runs.CONV}}),
    "a GAN": (("train.accumulate=2",), runs.GAN),
    "tied weights": (("train.ema=0.9",), runs.TEXT),
    "frozen": (("train.precision=fp16",), {"models": {"main": {"name": "mlp", "freeze": ["1.*", "*.bias"]}}}),
    "checkpointing": (("train.accumulate=2",), {**runs.TEXT, "train": {"steps": 20, **CHECKPOINTED}}),
    "a split model": (("train.accumulate=2",), runs.split_at("4", microbatches=2)),
    "a split model with checkpointing": (
        ("train.precision=bf16",),
        {**runs.TEXT, "models": GPT, **runs.split_at("blocks.1"), "train": {"steps": 9, **CHECKPOINTED}},
    ),
    "a stream": ((), {"data": {"name": own("Points"), **STREAM}}),
    "a sampler": ((), {"data": {"name": own("PointItems"), "sampler": own("weighted"), "batch": 8}}),
}


@looped("name", RUNS, at_once=6, here=48)
def test_a_run_that_goes_on_is_one_that_never_stopped(tmp_path: Path, name: str) -> None:
    changes, sections = RUNS[name]
    resumes(tmp_path, *changes, **sections)


def test_every_optimizer_and_schedule_of_torch_is_in_the_table_or_cannot_be_named() -> None:
    """Functions, other schedules and closures are nothing that a configuration can hold."""
    refused = {"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"}
    assert set(names(lr_scheduler.LRScheduler, lr_scheduler)) <= set(runs.ARGS) | refused
    for name in DENSE:
        assert type(trainer(f"optim.main.name={name.lower()}").optimizers["main"]) is getattr(torch.optim, name)


# Longer runs ---------------------------------------------------------------------------------------------------------

LONGER: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{
        # Also where the first part ends between two evaluations, and is judged once more for that.
        f"{name} {every}": ((f"eval.every={every}", "train.ema=0.9"), {"optim": scheduled(name)})
        for name, every in product(["ReduceLROnPlateau", "warmup_cosine", "StepLR"], [3, 5, 7, 1000])
    },
    **{
        f"{name} per {per}": (("eval.every=4",), {"optim": scheduled(name, per=per)})
        for name, per in product(sorted(runs.ARGS), ["step", "epoch"])
    },
    "gan": (("eval.every=4",), runs.GAN),
    "conv": (("eval.every=4",), {"data": runs.IMAGES, "models": {"main": runs.CONV}}),
    "fp16": (("eval.every=4",), {"train": {"steps": 9, "precision": "fp16", "accumulate": 3}}),
}


@pytest.mark.parametrize("name", sliced(LONGER, 8))
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
    from ckptool.training.trainer import restore

    again(made, path)
    new = trainer(**sections)
    restore(new, torch.load(path, weights_only=True), "here")
    return new


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
        run_to_end(tmp_path / name, "train.steps=6", "save.keep_last=9", **runs.BOTH)
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


# What is the user's own -----------------------------------------------------------------------------------------------

OWN_MODEL = """
from torch import nn
def model(inputs, classes, frozen=(), swapped=False):
    parts = [("one", nn.Linear(inputs[0], 6)), ("act", nn.ReLU()), ("norm", nn.BatchNorm1d(6)),
        ("two", nn.Linear(6, classes))]
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            for name, part in reversed(parts) if swapped else parts:
                setattr(self, name, part)
        def forward(self, x):
            for name, _ in parts:
                x = getattr(self, name)(x)
            return x
    own = Own()
    for name, parameter in own.named_parameters():
        parameter.requires_grad = name not in frozen
    if "norm" in frozen:
        own.norm.eval()
    return own
"""
NAMES = [f"{part}.{kind}" for part in ("one", "norm", "two") for kind in ("weight", "bias")]


def owned(path: Path, frozen: list[str], *rules: Any, **args: Any) -> dict[str, Any]:
    """A model of the user's own, some of whose parameters are frozen by its own code."""
    (path / "own.py").write_text(OWN_MODEL)
    return {"name": f"{path / 'own.py'}:model", "args": {"frozen": frozen, **args}, "freeze": list(rules)}


def moved(made: Trainer, steps: int) -> set[str]:
    """The parameters that change in so many steps."""
    before = {name: p.detach().clone() for name, p in made.models["main"].named_parameters()}
    take(made, steps)
    return {name for name, p in made.models["main"].named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.parametrize("seed", range(5))
def test_what_the_users_own_code_froze_stays_so(tmp_path: Path, seed: int) -> None:
    """Whatever rules name, where the run is resumed, and when rules are taken away: only those that a rule names
    change."""
    dice = random.Random(seed)
    frozen, ruled = (dice.sample(NAMES, dice.randrange(4)) for _ in range(2))
    own = owned(tmp_path, frozen, *ruled)
    made = trainer(models={"main": own})
    flags = {name: p.requires_grad for name, p in made.models["main"].named_parameters()}
    assert flags == {name: name not in {*frozen, *ruled} for name in NAMES}
    for new in (again(made, tmp_path / "a.pt"), made):
        assert moved(new, 3) == {*NAMES} - {*frozen, *ruled}
    free = trainer(models={"main": {**own, "freeze": []}})
    restore(free, torch.load(tmp_path / "a.pt", weights_only=True), "here")
    assert moved(free, 1) == {*NAMES} - {*frozen}
    resumes(tmp_path, models={"main": own}, middle=dice.randrange(1, 6), steps=7)


def test_each_model_keeps_what_its_own_code_froze(tmp_path: Path) -> None:
    """The discriminator's phase freezes the generator for itself, and gives it back as it was."""
    (tmp_path / "own.py").write_text(
        "from examples.models import Generator, Discriminator\ndef generator(inputs):\n    made ="
        " Generator(inputs)\n    made[0].requires_grad_(False)\n    return made\ndef discriminator(inputs):\n    made ="
        " Discriminator(inputs)\n    made[1].requires_grad_(False)\n    return made\n"
    )
    models = {name: {"name": f"{tmp_path / 'own.py'}:{name}"} for name in ("generator", "discriminator")}
    models["generator"]["freeze"] = ["2.*"]  # type: ignore[assignment]
    made = trainer(**{**runs.GAN, "models": models})
    before = {name: p.detach().clone() for name, p in made.models["generator"].named_parameters()}
    take(made, 2)
    still = {n for n, p in made.models["generator"].named_parameters() if torch.equal(p, before[n])}
    assert still == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert not any(p.requires_grad for p in made.models["discriminator"][1].parameters())  # type: ignore[index]


def test_a_module_that_the_user_put_into_evaluation_mode_stays_there(tmp_path: Path) -> None:
    """Evaluation gives each module the mode that it had, so a run that is resumed behind one ends with the same
    bytes."""
    own = {"main": owned(tmp_path, ["norm"])}
    run_to_end(tmp_path / "a", models=own)
    tree = torch.load(tmp_path / "a/run/checkpoints/step-00000020.pt", weights_only=True)
    assert int(tree["model_state_dict"]["norm.num_batches_tracked"]) == 0
    start(config("train.steps=7", run=tmp_path / "b/run", models=own))
    resume(str(tmp_path / "b/run"), ["train.steps=20"])
    assert last(tmp_path / "a") == last(tmp_path / "b")


@pytest.mark.parametrize("groups", [[], [{"match": "*.bias", "weight_decay": 0.0}]])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_modules_in_another_order_get_their_own_state(tmp_path: Path, name: str, groups: list[Any]) -> None:
    optim_of = {"main": {"name": name, "lr": 0.01, "groups": groups}}
    made = trainer("train.ema=0.9", models={"main": owned(tmp_path, [])}, optim=optim_of)
    take(made, 4)
    torch.save(gathered(made), tmp_path / "a.pt")
    new = trainer("train.ema=0.9", models={"main": owned(tmp_path, [], swapped=True)}, optim=optim_of)
    restore(new, torch.load(tmp_path / "a.pt", weights_only=True), "here")
    take(made, 3)
    take(new, 3)
    assert list(new.models["main"].state_dict()) != list(made.models["main"].state_dict())
    one, other = (state_by_name(each) for each in (made, new))
    for key in one:
        torch.testing.assert_close(one[key], other[key])


def state_by_name(made: Trainer) -> dict[str, torch.Tensor]:
    """Weights, and what the optimizer remembers of each, by name."""
    found = dict(made.models["main"].state_dict())
    for group in made.optimizers["main"].param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            slots = made.optimizers["main"].state[parameter]
            found |= {f"{name} {slot}": value for slot, value in slots.items() if isinstance(value, torch.Tensor)}
    return found


def test_what_the_users_code_keeps_and_no_checkpoint_has_is_told(tmp_path: Path) -> None:
    """Once; not what a module saves itself."""
    notes: dict[str, list[str]] = {}
    for name, data in (("Remembers", "PointItems"), ("Extra", "PointItems"), ("layers", "Noisy")):
        notes[name] = []
        sections = {"models": {"main": {"name": own(name)}}, "data": {"name": own(data), "batch": 8}}
        made = config("save.every=1", "train.steps=9", run=tmp_path / name, **sections)
        start(made, say=notes[name].append)
    said = " changes during training and is not saved; "
    draw = "draw from the global generators, which are seeded for each step and sample"
    buffer = "make it a buffer, or give the module get_extra_state() and set_extra_state()"
    assert notes == {
        "Remembers": [
            f"main.mean (non-persistent buffer){said}write: register_buffer(…, persistent=True)",
            f"main.calls (module attribute){said}{buffer}",
            f"main.noise (generator){said}{draw}",
        ],
        "Extra": [],
        "layers": [f"data.random (generator){said}{draw}"],
    }
