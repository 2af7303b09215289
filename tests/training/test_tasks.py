"""Tasks: losses, metrics, two models in one step, and the user's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ckptool.errors import UsageError, UserCodeFailed
from ckptool.training.data import Batch, seed_all
from ckptool.training.tasks import classify, gan, lm, load_task, regress
from tests.support.small_runs import GAN, run_to_end, take, toy, trainer


class Given(nn.Module):
    """Gives what it was made with, whatever it is asked."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = nn.Parameter(output)

    def forward(self, *_: Any) -> torch.Tensor:
        return self.output


def batch(*parts: torch.Tensor) -> Batch:
    return Batch(parts, len(parts[0]), len(parts[0]))


def test_losses_and_metrics() -> None:
    scores = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    labels = torch.tensor([0, 1, 1])
    models, given = {"main": Given(scores)}, batch(torch.zeros(3, 1), labels)
    assert classify().phases[0].loss(models, given).item() == functional.cross_entropy(scores, labels).item()
    found = classify().evaluate(models, [given])
    assert found["val_acc"] == pytest.approx(2 / 3)
    numbers = {"main": Given(torch.tensor([[1.0], [2.0]]))}
    assert regress().evaluate(numbers, [batch(torch.zeros(2), torch.tensor([[1.0], [4.0]]))]) == {"val_loss": 2.0}
    tokens = {"main": Given(scores.view(1, 3, 2))}
    found = lm().evaluate(tokens, [batch(torch.zeros(1, 3), labels.view(1, 3))])
    assert found["val_acc"] == pytest.approx(2 / 3)
    assert found["val_loss"] == pytest.approx(functional.cross_entropy(scores, labels).item())


def test_metrics_are_weighted_by_samples() -> None:
    whole = trainer("data.batch=12").data.validation(torch.device("cpu"))
    parts = trainer("data.batch=5").data.validation(torch.device("cpu"))
    models = trainer().models
    models["main"].eval()
    with torch.no_grad():
        one, other = classify().evaluate(models, whole), classify().evaluate(models, parts)
    assert one == pytest.approx(other)
    assert classify().evaluate(models, []) == {}


@pytest.mark.parametrize(
    ("task", "data", "model"),
    [
        ("regress", {"name": toy("data.py:linear"), "args": {"samples": 60}}, {"name": "mlp"}),
        ("classify", {"name": toy("data.py:spirals"), "args": {"samples": 60}}, {"name": "mlp"}),
        (
            "lm",
            {"name": toy("data.py:text"), "args": {"samples": 60, "length": 6}},
            {"name": toy("models.py:CharGPT"), "args": {"width": 8}},
        ),
    ],
)
def test_tasks_in_the_box_learn(task: str, data: dict[str, Any], model: dict[str, Any]) -> None:
    losses = take(trainer("optim.main.lr=0.02", "train.steps=30", task=task, data=data, models={"main": model}), 30)
    assert sum(losses[-5:]) < sum(losses[:5])


# Two models ----------------------------------------------------------------------------------------------------------


def test_a_gan_step_is_the_one_that_is_written_by_hand() -> None:
    """The discriminator first, on made samples without a gradient; then the generator, against the new
    discriminator."""
    made = trainer(**GAN)
    generator, judge = copy.deepcopy(made.models["generator"]), copy.deepcopy(made.models["discriminator"])
    optims = [torch.optim.Adam(model.parameters(), lr=0.001) for model in (judge, generator)]
    loss_of = functional.binary_cross_entropy_with_logits
    for step, [given] in enumerate(made.data.stream(made)):
        if step == 3:
            break
        real = given.data
        seed_all(torch.device("cpu"), 3, "step", step, 0, 0, 0)
        good = judge(real)
        bad = judge(generator(torch.randn(len(real), 4)).detach())
        optims[0].zero_grad()
        torch.autograd.backward(loss_of(good, torch.ones_like(good)) + loss_of(bad, torch.zeros_like(bad)))
        optims[0].step()
        seed_all(torch.device("cpu"), 3, "step", step, 1, 0, 0)
        score = judge(generator(torch.randn(len(real), 4)))
        optims[1].zero_grad()
        torch.autograd.backward(loss_of(score, torch.ones_like(score)))
        optims[1].step()
    take(made, 3)
    for name, model in (("generator", generator), ("discriminator", judge)):
        for key, value in made.models[name].state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[key])


def test_only_the_model_of_a_phase_gets_gradients() -> None:
    made = trainer(**GAN)
    take(made, 1)
    phases = gan().phases
    assert [phase.model for phase in phases] == ["discriminator", "generator"]
    with phases[0].alone(made.models):
        assert not any(p.requires_grad for p in made.models["generator"].parameters())
        assert all(p.requires_grad for p in made.models["discriminator"].parameters())
    assert all(p.requires_grad for model in made.models.values() for p in model.parameters())


def test_what_is_frozen_stays_so_after_the_other_models_phase() -> None:
    models = {**GAN["models"], "generator": {"name": toy("models.py:Generator"), "freeze": ["0.*"]}}
    made = trainer(**{**GAN, "models": models})
    before = made.models["generator"].state_dict()["0.weight"].clone()
    take(made, 3)
    assert torch.equal(before, made.models["generator"].state_dict()["0.weight"])


def test_a_gan_writes_both_models_under_their_names(tmp_path: Path) -> None:
    run_to_end(tmp_path, "train.ema=0.9", **GAN)
    tree = torch.load(tmp_path / "run/checkpoints/step-00000020.pt", weights_only=True)
    for kind in ("model", "optimizer", "ema"):
        assert {f"{kind}_generator_state_dict", f"{kind}_discriminator_state_dict"} <= set(tree)


# The user's own ------------------------------------------------------------------------------------------------------


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from ckptool.training.tasks import Task, Phase\n"
        "def loss(models, batch):\n    return models['net'](batch.data[0]).pow(2).mean()\n"
        "def evaluate(models, batches):\n    return {'val_loss': loss(models, next(iter(batches)))}\n"
        "def task():\n    return Task([Phase('net', loss)], evaluate)\n"
        "def number():\n    return 1\n"
        "def fails():\n    raise OSError('no file')\n"
    )
    own = tmp_path / "own.py"
    net: dict[str, Any] = {"models": {"net": {"name": "mlp"}}, "optim": {"net": {}}}
    run_to_end(tmp_path, f"task={own}:task", **net)
    with pytest.raises(UsageError, match="returned int, not a ckptool"):
        load_task(f"{own}:number")
    with pytest.raises(UserCodeFailed, match="no file"):
        load_task(f"{own}:fails")


def test_a_task_for_a_model_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"(?s)trains the model 'main'.*Available: net"):
        trainer(models={"net": {"name": "mlp"}}, optim={"net": {}})


def test_what_does_not_go_together_is_not_blamed_on_code_of_ones_own() -> None:
    with pytest.raises(UserCodeFailed, match="task: classify raised RuntimeError") as raised:
        take(trainer(data={"name": toy("data.py:text"), "args": {"length": 8, "samples": 40}, "batch": 8}), 1)
    assert raised.value.fix == "It does not fit what it was given: check the data, the model and their args."


def test_samples_without_a_target_are_an_error_that_says_so() -> None:
    with pytest.raises(UsageError, match=r"(?s)a batch is Tensor.*\(inputs, target\)"):
        take(trainer(data={"name": toy("data.py:ring")}, models={"main": {"name": "mlp", "args": {"classes": 2}}}), 1)
