"""The loop: accumulation, clipping, precision, what is left out of a step, evaluation, and how a run ends."""

from __future__ import annotations

import json
import math
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.errors import Corrupt, DiskFull, NotFinite, UsageError, UserCodeFailed
from ckptool.training.hooks import Hooks
from ckptool.training.loop import one_step
from ckptool.training.start import rehearse, start
from ckptool.training.store import RunFolder
from ckptool.training.trainer import Trainer
from tests.support.several_processes import processes
from tests.support.small_runs import (
    CONV,
    GAN,
    IMAGES,
    assert_same_trainers,
    config,
    last,
    resumes,
    run_to_end,
    take,
    toy,
    trainer,
)

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


def test_the_loss_of_a_step_is_the_mean_over_its_samples() -> None:
    changes = (NO_DROPOUT, "data.batch=13", "optim.main.name=sgd", "optim.main.lr=1e-30")
    whole, divided = take(trainer(*changes), 4), take(trainer(*changes, "train.accumulate=4"), 4)
    assert whole == pytest.approx(divided, rel=1e-5)


def test_a_partial_last_batch_is_left_out_or_taken() -> None:
    taken, left = trainer("data.batch=13"), trainer("data.batch=13", "data.drop_last=true")
    assert (taken.steps_per_epoch, left.steps_per_epoch) == (4, 3)
    sizes = [sum(b.size for b in step) for step in taken.data.stream(taken)]
    assert sizes[:5] == [13, 13, 13, 9, 13]
    assert {sum(b.size for b in step) for step in left.data.stream(left)} == {13}


def test_an_empty_micro_batch_is_not_run() -> None:
    """BatchNorm would refuse, or count, a sample that stands for none."""
    made = trainer("data.batch=47", "train.accumulate=3", "train.steps=2")
    assert [[b.size for b in step] for step in made.data.stream(made)] == [[16, 16, 15], [1]]


# Clipping ------------------------------------------------------------------------------------------------------------


def test_clipping_by_norm_and_by_value() -> None:
    by_norm = gradients("optim.main.clip.norm=0.01")[0]
    assert math.sqrt(sum(float(g.pow(2).sum()) for g in by_norm)) == pytest.approx(0.01, rel=1e-3)
    by_value = gradients("optim.main.clip.value=0.001")[0]
    assert max(float(g.abs().max()) for g in by_value) == pytest.approx(0.001)
    with pytest.raises(UsageError, match="one of the two"):
        config("optim.main.clip.norm=1", "optim.main.clip.value=1")


# Precision and what is not finite ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precisions_resume_bit_for_bit(tmp_path: Path, precision: str) -> None:
    made = resumes(tmp_path, f"train.precision={precision}", "train.accumulate=2", "train.ema=0.9")
    assert all(p.dtype == torch.float32 for p in made.models["main"].parameters())
    assert (made.scaler is not None) is (precision == "fp16")


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


def test_the_schedule_waits_when_a_step_overflows() -> None:
    made, rates = overflowing(40)
    scales = [2.0**40, *(scale for _, scale in rates)]
    skipped = sum(after < before for before, after in pairwise(scales))  # each halves the scale
    assert skipped > 5
    taken = len(rates) - skipped
    assert taken > 5
    assert made.optimizers["main"].param_groups[0]["lr"] == pytest.approx(0.001 * 0.5**taken)
    assert {int(s["step"]) for s in made.optimizers["main"].state.values()} == {taken}


def test_nothing_moves_in_a_step_that_overflowed() -> None:
    made, rates = overflowing(3)
    assert {rate for rate, _ in rates} == {0.001}
    new = trainer("train.precision=fp16")
    for name, value in made.models["main"].state_dict().items():
        assert torch.equal(value, new.models["main"].state_dict()[name])
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


def test_the_box_resumes_bit_for_bit(tmp_path: Path) -> None:
    resumes(tmp_path, "train.accumulate=3", "train.ema=0.9")
    resumes(tmp_path, data=IMAGES, models={"main": CONV})
    resumes(tmp_path, "train.accumulate=2", **GAN)
    text = {"name": toy("data.py:text"), "args": {"samples": 30, "length": 6}, "batch": 4}
    gpt = {"main": {"name": toy("models.py:CharGPT"), "args": {"width": 8, "dropout": 0.1}}}
    made = resumes(tmp_path, "train.ema=0.9", data=text, models=gpt, task="lm")
    average = made.averages["main"].values
    assert average["head.weight"] is average["tokens.weight"]  # tied as the weights are


def test_the_same_end_whether_killed_between_saves_or_not(tmp_path: Path) -> None:
    run_to_end(tmp_path / "a")
    start(config("train.steps=13", run=tmp_path / "b" / "run"))
    (tmp_path / "b" / "run" / "checkpoints" / "step-00000013.pt").unlink()
    run_to_end(tmp_path / "b")
    assert last(tmp_path / "a") == last(tmp_path / "b")


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


def test_what_goes_wrong_in_an_async_save_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise DiskFull("no space left")

    monkeypatch.setattr(RunFolder, "commit", full)
    with pytest.raises(DiskFull, match="no space left"):
        run_to_end(tmp_path, "save.async=true", "save.every=20")


def test_the_best_is_remembered_by_the_metric_and_the_metric_has_to_be_there(tmp_path: Path) -> None:
    made = run_to_end(tmp_path, "eval.metric=val_acc", "eval.mode=max", "save.every=20")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = max((line for line in lines if "val_acc" in line), key=lambda line: line["val_acc"])
    tree = torch.load(tmp_path / "run/checkpoints/step-00000020.pt", weights_only=True)
    assert tree["best"] == {"metric": "val_acc", "value": best["val_acc"], "step": best["step"]}
    assert (made.status, made.exit_code) == ("done", 0)
    with pytest.raises(UsageError, match=r"val_f1.*does not give") as caught:
        run_to_end(tmp_path / "b", "eval.metric=val_f1")
    assert "val_loss, val_acc" in str(caught.value)


def test_epochs_count_steps(tmp_path: Path) -> None:
    made = trainer(train={"epochs": 2})
    assert made.total_steps == 2 * 6
    take(made, 7)
    assert (made.epoch, made.batch_in_epoch, made.samples) == (1, 1, 56)


def test_a_task_that_raises_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from ckptool.training.tasks import Task, Phase\n"
        "def loss(models, batch):\n    return models['main'](batch.nothing)\n"
        "def task():\n    return Task([Phase('main', loss)], lambda models, batches: {})\n"
    )
    with pytest.raises(UserCodeFailed, match="AttributeError") as caught:
        take(trainer(f"task={tmp_path / 'mine.py'}:task"), 1)
    assert "batch.nothing" in str(caught.value)


def test_two_trainers_of_one_configuration_are_one() -> None:
    one, other = trainer(), trainer()
    take(one, 4)
    take(other, 4)
    assert_same_trainers(one, other)


def test_metrics_have_any_names(tmp_path: Path) -> None:
    """Also those that are words of the loop; what is not finite ranks nowhere."""
    (tmp_path / "own.py").write_text(
        "from ckptool.training.tasks import Task, classify\n"
        "def task():\n    names = ('every', 'seconds', 'step', 'self', 'val_loss')\n"
        "    found = dict.fromkeys(names, 0.5) | {'odd': float('nan')}\n"
        "    return Task(classify().phases, lambda models, batches: found)\n"
    )
    run_to_end(tmp_path, f"task={tmp_path / 'own.py'}:task", "save.seconds=1000", "log.every=9")
    sidecar = json.loads((tmp_path / "run/checkpoints/step-00000010.json").read_text())
    assert sidecar["metrics"] == dict.fromkeys(("every", "seconds", "step", "self", "val_loss"), 0.5)
    state = torch.load(tmp_path / "run/checkpoints/step-00000010.pt", weights_only=True)
    assert sidecar["loss"] == state["loss"]
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert (line["step"], line["seconds"], line["odd"]) == (20, 0.5, "nan")


# Rehearsals ----------------------------------------------------------------------------------------------------------


FORGETFUL = """
import torch
from torch import nn
class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.count = 0
    def forward(self, x):
        self.count += 1
        return super().forward(x)
    def get_extra_state(self):
        return self.count
    def set_extra_state(self, state):
        SET
"""


def test_a_rehearsal_names_what_does_not_come_back(tmp_path: Path) -> None:
    """A model that saves a count, and takes it back or does not."""
    for name, how in (("good", "self.count = state"), ("forgetful", "pass")):
        (tmp_path / f"{name}.py").write_text(FORGETFUL.replace("SET", how))
        made = config(models={"main": {"name": f"{tmp_path / name}.py:Net"}})
        if name == "good":
            assert rehearse(made).steps == 20
            continue
        with pytest.raises(Corrupt, match="reloaded state differs in model_state_dict/_extra_state"):
            rehearse(made)


def test_processes_rehearse_together() -> None:
    processes(2, lambda rank: rehearse(config("strategy=fsdp")) and None)
