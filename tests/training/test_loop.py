"""The loop: accumulation, clipping, precision, what is left out of a step, tasks, evaluation, and how a run ends."""

from __future__ import annotations

import copy
import json
import math
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ckptool.errors import Corrupt, NotFinite, UsageError
from ckptool.training.data import Batch
from ckptool.training.hooks import Hooks
from ckptool.training.loop import one_step
from ckptool.training.rng import seed_all
from ckptool.training.tasks import classify, gan, lm, regress
from ckptool.training.trainer import Trainer, rehearse
from tests.support.several_processes import processes
from tests.support.small_runs import GAN, config, own, run_to_end, take, trainer

NO_DROPOUT = "models.main.args.dropout=0.0"


def gradients(*changes: str, steps: int = 1) -> list[list[torch.Tensor]]:
    """The gradients of each step of a model that does not learn, in 64 bits."""
    made = trainer(NO_DROPOUT, "optim.main.name=sgd", "optim.main.lr=1e-30", *changes)
    for model in made.models.values():
        model.double()
    found = []
    for batches in made.data.stream(made):
        batches = [type(b)((b.data[0].double(), b.data[1]), b.size, b.total) for b in batches]
        one_step(made, batches, Hooks([]))
        found.append([p.grad.clone() for p in made.models["main"].parameters() if p.grad is not None])
        if len(found) == steps:
            break
    return found


# Accumulation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3, 8, 11])
@pytest.mark.parametrize("batch", [8, 13])
def test_accumulation_gives_the_gradient_of_the_whole_batch(parts: int, batch: int) -> None:
    """48 samples in batches of 13: the last window has 9. In 11 parts of 9 two are empty, and take no part."""
    steps = -(-48 // batch)
    whole = gradients(f"data.batch={batch}", steps=steps)
    divided = gradients(f"data.batch={batch}", f"train.accumulate={parts}", steps=steps)
    for one, other in zip(whole, divided, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_a_partial_last_batch_is_left_out_or_taken() -> None:
    taken, left = trainer("data.batch=13"), trainer("data.batch=13", "data.drop_last=true")
    assert (taken.data.steps_per_epoch, left.data.steps_per_epoch) == (4, 3)
    sizes = [sum(b.size for b in step) for step in taken.data.stream(taken)]
    assert sizes[:5] == [13, 13, 13, 9, 13]
    assert {sum(b.size for b in step) for step in left.data.stream(left)} == {13}


# Clipping ------------------------------------------------------------------------------------------------------------


def test_clipping_by_norm_and_by_value() -> None:
    by_norm = gradients("optim.main.clip.norm=0.01")[0]
    assert math.sqrt(sum(float(g.pow(2).sum()) for g in by_norm)) == pytest.approx(0.01, rel=1e-3)
    by_value = gradients("optim.main.clip.value=0.001")[0]
    assert max(float(g.abs().max()) for g in by_value) == pytest.approx(0.001)


# Precision and what is not finite ------------------------------------------------------------------------------------


def overflowing(steps: int) -> Any:
    """A run whose scale is so large that its first steps overflow."""
    schedule = {"name": "step", "args": {"step_size": 1, "gamma": 0.5}}
    made = trainer(
        "train.precision=fp16",
        "train.ema=0.5",
        f"train.steps={steps}",
        optim={"main": {"name": "adamw", "schedule": schedule}},
    )
    assert made.scaler is not None
    made.scaler.load_state_dict({**made.scaler.state_dict(), "scale": 2.0**40})
    rates = []
    for batches in made.data.stream(made):
        one_step(made, batches, Hooks([]))
        rates.append((made.optimizers["main"].param_groups[0]["lr"], made.scaler.get_scale()))
    return made, rates


def test_the_schedule_waits_when_a_step_overflows_and_nothing_moves() -> None:
    made, rates = overflowing(40)
    scales = [2.0**40, *(scale for _, scale in rates)]
    skipped = sum(after < before for before, after in pairwise(scales))  # each halves the scale
    taken = len(rates) - skipped
    assert skipped > 5 and taken > 5
    assert made.optimizers["main"].param_groups[0]["lr"] == pytest.approx(0.001 * 0.5**taken)
    assert {int(s["step"]) for s in made.optimizers["main"].state.values()} == {taken}
    made, rates = overflowing(3)
    assert {rate for rate, _ in rates} == {0.001}
    new = trainer("train.precision=fp16").models["main"].state_dict()
    for name, value in made.models["main"].state_dict().items():
        assert torch.equal(value, new[name])
        assert torch.equal(made.averages["main"].values[name], value)


POISON = """
import torch
from torch.nn import functional
from ckptool.training.tasks import Task, Phase, classify, inputs_of, target_of
calls = 0
def task():
    def loss(models, batch):
        global calls
        calls += 1
        out = models["main"](*inputs_of(batch))
        value = functional.cross_entropy(out, target_of(batch))
        if calls == 3:
            POISONED
        return value
    return Task([Phase("main", loss)], classify().evaluate)
"""


def calm(*changes: str) -> Trainer:
    """A trainer whose scale is too small to overflow."""
    made = trainer(*changes)
    if made.scaler is not None:
        made.scaler.load_state_dict({**made.scaler.state_dict(), "scale": 16.0})
    return made


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "poison",
    ["value = value * float('nan')", "value = value + float('inf')", "out.register_hook(lambda g: g * float('inf'))"],
)
def test_a_step_that_is_not_finite_stops_the_run_or_is_left_out(tmp_path: Path, poison: str, precision: str) -> None:
    (tmp_path / "poison.py").write_text(POISON.replace("POISONED", poison))
    changes = (f"task={tmp_path / 'poison.py'}:task", f"train.precision={precision}")
    if precision == "fp16" and "hook" in poison:
        made = calm(*changes)  # the scaler's to see: an overflow like any other
        take(made, 5)
    else:
        with pytest.raises(NotFinite, match="step 3"):
            take(calm(*changes), 5)
        (tmp_path / "again.py").write_text(POISON.replace("POISONED", poison))
        made = calm(f"task={tmp_path / 'again.py'}:task", changes[1], "train.on_nonfinite=skip")
        take(made, 5)
    assert made.step == 5
    assert {int(s["step"]) for s in made.optimizers["main"].state.values()} == {4}
    assert all(bool(torch.isfinite(value).all()) for value in made.models["main"].state_dict().values())


def test_a_run_that_stops_at_what_is_not_finite_keeps_its_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "poison.py").write_text(POISON.replace("POISONED", "value = value / 0").replace("== 3", "== 8"))
    with pytest.raises(NotFinite, match="step 8") as caught:
        run_to_end(tmp_path, f"task={tmp_path / 'poison.py'}:task")
    assert "on_nonfinite=skip" in caught.value.fix
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("*.pt")] == ["step-00000005.pt"]


# Whole runs ----------------------------------------------------------------------------------------------------------


def test_epochs_count_steps(tmp_path: Path) -> None:
    made = trainer(train={"epochs": 2})
    assert made.total_steps == 2 * 6
    take(made, 7)
    assert (made.epoch, made.place["batch"], made.samples) == (1, 1, 56)


def test_metrics_have_any_names(tmp_path: Path) -> None:
    """Also those that are words of the loop; what is not finite ranks nowhere."""
    run_to_end(tmp_path, f"task={own('odd_metrics')}", "save.seconds=1000", "log.every=9")
    sidecar = json.loads((tmp_path / "run/checkpoints/step-00000010.json").read_text())
    assert sidecar["metrics"] == dict.fromkeys(("every", "seconds", "step", "self", "val_loss"), 0.5)
    state = torch.load(tmp_path / "run/checkpoints/step-00000010.pt", weights_only=True)
    assert sidecar["loss"] == state["loss"]
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert (line["step"], line["seconds"], line["odd"]) == (20, 0.5, "nan")


# Tasks --------------------------------------------------------------------------------------------------------------


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
        (real,) = given.data
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


# Rehearsals ----------------------------------------------------------------------------------------------------------


def test_a_rehearsal_names_what_does_not_come_back() -> None:
    """A model that saves a count, and takes it back or does not."""
    kept, forgets = ({"main": {"name": own("Kept"), "args": {"forgets": forgets}}} for forgets in (False, True))
    assert rehearse(config(models=kept)).steps == 20
    with pytest.raises(UsageError, match="is f1, which the task does not give"):
        rehearse(config("eval.metric=f1", models=kept))
    with pytest.raises(Corrupt, match="reloaded state differs in model_state_dict/_extra_state"):
        rehearse(config(models=forgets))


def test_processes_rehearse_together() -> None:
    processes(2, lambda rank: rehearse(config("strategy=fsdp")) and None)


def test_an_empty_micro_batch_is_not_run() -> None:
    """BatchNorm would refuse, or count, a sample that stands for none."""
    made = trainer("data.batch=47", "train.accumulate=3", "train.steps=2")
    assert [[b.size for b in step] for step in made.data.stream(made)] == [[16, 16, 15], [1]]


def test_async_saving_ends_with_the_same_files(tmp_path: Path) -> None:
    run_to_end(tmp_path / "a", "save.every=1", "save.keep_last=30")
    run_to_end(tmp_path / "b", "save.every=1", "save.keep_last=30", "save.async=true")
    one, other = (
        {p.name: p.read_bytes() for p in sorted((tmp_path / n / "run" / "checkpoints").glob("*.pt"))} for n in "ab"
    )
    assert len(one) == 20
    assert one == other
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptool-save"]
    facts = [json.loads(line) for line in (tmp_path / "b" / "run" / "history.jsonl").read_text().splitlines()]
    assert [fact["step"] for fact in facts if fact["event"] == "save"] == list(range(1, 21))


def test_only_the_model_of_a_phase_gets_gradients() -> None:
    made = trainer(**GAN)
    take(made, 1)
    phases = gan().phases
    assert [phase.model for phase in phases] == ["discriminator", "generator"]
    with phases[0].alone(made.models):
        assert not any(p.requires_grad for p in made.models["generator"].parameters())
        assert all(p.requires_grad for p in made.models["discriminator"].parameters())
    assert all(p.requires_grad for model in made.models.values() for p in model.parameters())
