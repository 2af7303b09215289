"""What is the user's own: what their model's code froze and how it is set, and the names by which its parts are found
again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.training.start import resume, start
from ckptool.training.trainer import Trainer, gathered, restored
from tests.support.small_runs import GAN, again, config, last, resumes, run_to_end, take, trainer

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


@pytest.mark.parametrize("seed", range(8))
def test_what_the_users_own_code_froze_stays_so(tmp_path: Path, seed: int) -> None:
    """Whatever rules name, when they end, where the run is resumed, and when rules are taken away: only those that a
    rule names change."""
    dice = random.Random(seed)
    frozen, ruled, later = (dice.sample(NAMES, dice.randrange(4)) for _ in range(3))
    rules = [*ruled, *({"match": name, "until": 3} for name in later if name not in ruled)]
    own = owned(tmp_path, frozen, *rules)
    made = trainer(models={"main": own})
    flags = {name: p.requires_grad for name, p in made.models["main"].named_parameters()}
    assert flags == {name: name not in {*frozen, *ruled, *later} for name in NAMES}
    assert moved(made, 3) == {*NAMES} - {*frozen, *ruled, *later}
    for new in (again(made, tmp_path / "a.pt"), made):
        assert moved(new, 3) == {*NAMES} - {*frozen, *ruled}
    free = trainer(models={"main": {**own, "freeze": []}})
    restored(free, torch.load(tmp_path / "a.pt", weights_only=True), "here")
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
    models["generator"]["freeze"] = [{"match": "2.*", "until": 2}]  # type: ignore[assignment]
    made = trainer(**{**GAN, "models": models})
    for steps, still in ((2, {"0.weight", "0.bias", "2.weight", "2.bias"}), (2, {"0.weight", "0.bias"})):
        before = {name: p.detach().clone() for name, p in made.models["generator"].named_parameters()}
        take(made, steps)
        assert {n for n, p in made.models["generator"].named_parameters() if torch.equal(p, before[n])} == still
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
    restored(new, torch.load(tmp_path / "a.pt", weights_only=True), "here")
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
