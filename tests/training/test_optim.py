"""Optimizers, groups, schedules, freezing, averages; and state that is matched by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ckptool.errors import Conflict, UsageError
from ckptool.training import schedules
from ckptool.training.config import Group, Optim, Schedule
from ckptool.training.optim import build_optimizer, load_optimizer
from ckptool.training.parallel import World
from ckptool.training.schedules import build_schedule
from ckptool.training.start import resume
from ckptool.training.trainer import Trainer, build, restored
from tests.support.small_runs import (
    ARGS,
    again,
    assert_same_trainers,
    config,
    last,
    resumes,
    run_to_end,
    scheduled,
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


# Optimizers ----------------------------------------------------------------------------------------------------------

DENSE = [n for n in names(torch.optim.Optimizer, torch.optim) if n not in ("LBFGS", "SparseAdam", "Muon")]


@pytest.mark.parametrize("name", DENSE)
def test_every_optimizer_of_torch_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    made = resumes(tmp_path, f"optim.main.name={name.lower()}")
    assert type(made.optimizers["main"]) is getattr(torch.optim, name)


def test_optimizers_for_special_parameters_resume_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def matrix(inputs, classes):\n    return nn.Linear(inputs[0], classes, bias=False)\n"
        "class Words(nn.Module):\n"
        "    def __init__(self, vocabulary, classes):\n"
        "        super().__init__()\n"
        "        self.table = nn.Embedding(vocabulary, classes, sparse=True)\n"
        "    def forward(self, x):\n        return self.table(x).sum(dim=1)\n"
    )
    mine = tmp_path / "mine.py"
    resumes(tmp_path, "optim.main.name=muon", models={"main": {"name": f"{mine}:matrix"}})
    words: dict[str, Any] = {"models": {"main": {"name": f"{mine}:Words"}}}
    words["data"] = {"name": toy("data.py:modadd"), "args": {"modulus": 5}, "batch": 4}
    resumes(tmp_path, "optim.main.name=sparse_adam", **words)


def test_an_optimizer_that_needs_a_closure_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"(?s)LBFGS.*closure"):
        trainer("optim.main.name=lbfgs")


def test_arguments_that_an_optimizer_does_not_take() -> None:
    with pytest.raises(
        UsageError, match=r"(?s)optim: sgd does not take these arguments.*momentun.*It takes: lr, momentum"
    ):
        trainer("optim.main.name=sgd", "optim.main.args.momentun=0.9")
    with pytest.raises(UsageError, match="Invalid momentum"):
        trainer("optim.main.name=sgd", "optim.main.args.momentum=-1")


# Groups --------------------------------------------------------------------------------------------------------------


def test_every_parameter_is_in_exactly_one_group() -> None:
    groups = [{"match": "1.*", "lr": 0.5}, {"match": "*.bias", "weight_decay": 0.0}]
    made = trainer(optim={"main": {"name": "adamw", "lr": 0.1, "groups": groups}})
    found = [(g["param_names"], g["lr"], g["weight_decay"]) for g in made.optimizers["main"].param_groups]
    assert found == [(["1.weight", "1.bias"], 0.5, 0.01), (["4.bias"], 0.1, 0.0), (["4.weight"], 0.1, 0.01)]


def test_a_group_that_matches_nothing_or_says_nothing_is_an_error() -> None:
    def grouped(*groups: dict[str, Any]) -> Trainer:
        return trainer(optim={"main": {"name": "adamw", "groups": list(groups)}})

    with pytest.raises(UsageError, match=r"(?s)'head\.\*' matches no parameter.*1\.weight"):
        grouped({"match": "head.*"})
    with pytest.raises(UsageError, match="outside the earlier groups"):
        grouped({"match": "*"}, {"match": "*.bias"})
    with pytest.raises(UsageError, match=r"(?s)AdamW has no option 'weight_decy'.*Did you mean weight_decay"):
        grouped({"match": "*", "weight_decy": 0.0})


def test_a_tied_parameter_is_in_one_group() -> None:
    text = {"name": toy("data.py:text"), "args": {"samples": 20, "length": 4}, "batch": 4}
    made = trainer(data=text, models={"main": {"name": toy("models.py:CharGPT"), "args": {"width": 8}}}, task="lm")
    held = [id(p) for g in made.optimizers["main"].param_groups for p in g["params"]]
    assert len(held) == len(set(held)) == len(list(made.models["main"].parameters()))


# Schedules -----------------------------------------------------------------------------------------------------------

REFUSED = {"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"}


def test_every_schedule_of_torch_is_tried_or_refused() -> None:
    assert set(names(lr_scheduler.LRScheduler, lr_scheduler)) <= set(ARGS) | REFUSED


@pytest.mark.parametrize("per", ["step", "epoch"])
@pytest.mark.parametrize("name", ARGS)
def test_every_schedule_resumes_with_the_same_rates(tmp_path: Path, name: str, per: str) -> None:
    steps = {"ReduceLROnPlateau": "data.batch=6"}.get(name, "data.batch=16")  # 3 steps an epoch
    made = resumes(tmp_path, steps, optim=scheduled(name, per=per), middle=4, steps=11)
    assert per == "epoch" or name == "ReduceLROnPlateau" or made.schedules["main"].last_epoch == 11
    assert per == "step" or name == "ReduceLROnPlateau" or made.schedules["main"].last_epoch == 3


def test_a_plateau_follows_evaluation(tmp_path: Path) -> None:
    """A factor of one half whenever the metric does not get better: a rate of 100 makes sure that it does not."""
    plateau = {
        "main": {
            "name": "sgd",
            "lr": 100.0,
            "schedule": {"name": "ReduceLROnPlateau", "args": ARGS["ReduceLROnPlateau"]},
        }
    }
    run_to_end(tmp_path / "a", "eval.every=1", "save.every=3", "train.on_nonfinite=skip", optim=plateau)
    lines = [json.loads(line) for line in (tmp_path / "a/run/metrics.jsonl").read_text().splitlines()]
    rate, best, expected = 100.0, math.inf, []
    for line in lines:
        value = float(line["val_loss"])
        rate, best = (rate, value) if value < best * (1 - 1e-4) else (rate / 2, best)
        expected.append(rate)
    assert [line["lr"] for line in lines] == expected
    assert expected[-1] < 100
    with pytest.raises(UsageError, match=r"(?s)needs evaluation.*eval\.every"):
        trainer("eval.every=0", optim=plateau)


def test_what_a_schedule_does_not_take() -> None:
    with pytest.raises(UsageError, match=r"(?s)schedule: step does not take these arguments.*gama"):
        trainer("optim.main.schedule.name=step", "optim.main.schedule.args.gama=1")
    with pytest.raises(UsageError, match=r"(?s)schedule: inverse_sqrt does not take these arguments.*division by zero"):
        trainer("optim.main.schedule.name=inverse_sqrt", "optim.main.schedule.args.warmup=0")
    with pytest.raises(
        UsageError, match=r"(?s)schedule: warmup_cosine does not take these arguments.*It takes: warmup, total, floor"
    ):
        trainer("optim.main.schedule.name=warmup_cosine", "optim.main.schedule.args.warmup=5")
    with pytest.raises(UsageError, match=r"(?s)ends before step 5.*shorter than the run.*total_steps=20"):
        take(trainer(optim={"main": {"schedule": {"name": "one_cycle", "args": {"max_lr": 1, "total_steps": 4}}}}), 6)


@pytest.mark.parametrize(
    ("made", "values"),
    [
        (partial(schedules.warmup_cosine, warmup=2, total=6), {0: 0.5, 1: 1.0, 2: 1.0, 4: 0.5, 6: 0.0, 99: 0.0}),
        (partial(schedules.warmup_cosine, warmup=2, total=6, floor=0.2), {4: 0.6, 6: 0.2}),
        (partial(schedules.warmup_cosine, warmup=0, total=4), {0: 1.0, 2: 0.5}),
        (partial(schedules.warmup_linear, warmup=2, total=6), {0: 0.5, 2: 1.0, 4: 0.5, 6: 0.0, 99: 0.0}),
        (partial(schedules.warmup_linear, warmup=2, total=6, floor=0.2), {4: 0.6, 6: 0.2, 99: 0.2}),
        (partial(schedules.inverse_sqrt, warmup=4), {0: 0.25, 3: 1.0, 15: 0.5}),
    ],
)
def test_lambdas(made: Callable[[int], float], values: dict[int, float]) -> None:
    assert {step: made(step) for step in values} == pytest.approx(values)


def test_an_epoch_that_ends_with_a_step_left_out_still_counts() -> None:
    made = trainer("data.batch=24", "train.on_nonfinite=skip", optim=scheduled("StepLR", per="epoch"))
    take(made, 1)
    made.step = 1
    with torch.no_grad():
        made.models["main"].get_parameter("1.weight").fill_(math.nan)
    take(made, 1)
    assert made.schedules["main"].last_epoch == 1


# Declared changes ----------------------------------------------------------------------------------------------------


def changed(made: Trainer, path: Path, **sections: Any) -> Trainer:
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
        assert one["lr"] == two["lr"]
        assert one["betas"] == two["betas"]
        take(new, 1)
        take(other, 1)


def test_a_declared_rate_stays_when_the_run_goes_on_again(tmp_path: Path) -> None:
    """Killed after the change or not, and without saying it again."""
    for name in ("a", "b"):
        run_to_end(tmp_path / name, "train.steps=6", "save.keep_last=9")
        resume(str(tmp_path / name / "run"), ["optim.main.lr=0.5", "train.steps=10", "save.every=2"])
    for step in (8, 10):
        (tmp_path / "b/run/checkpoints" / f"step-{step:08d}.pt").unlink()
    for name in ("a", "b"):
        resume(str(tmp_path / name / "run"), ["train.steps=12"])
    assert last(tmp_path / "a") == last(tmp_path / "b")
    tree = torch.load(tmp_path / "a/run/checkpoints/step-00000012.pt", weights_only=True)
    assert tree["optimizer_state_dict"]["param_groups"][0]["lr"] == 0.5


# Freezing ------------------------------------------------------------------------------------------------------------


def test_what_is_frozen_does_not_move_and_what_thaws_does() -> None:
    rules = ["4.bias", {"match": "1.*", "until": 3}]
    made = trainer(models={"main": {"name": "mlp", "args": {"hidden": [6]}, "freeze": rules}})
    model = made.models["main"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    take(made, 3)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"4.weight"}
    assert all(p.grad is None for name, p in model.named_parameters() if name != "4.weight")
    take(made, 1)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"1.weight", "1.bias", "4.weight"}
    assert len(made.optimizers["main"].param_groups[0]["params"]) == 4


@pytest.mark.parametrize("middle", [1, 3, 5])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_freezing_resumes_before_at_and_after_the_thaw(tmp_path: Path, middle: int, precision: str) -> None:
    rules = [{"match": "1.*", "until": 3}, {"match": "*.bias", "until": 5}]
    model = {"main": {"name": "mlp", "args": {"hidden": [6]}, "freeze": rules}}
    resumes(tmp_path, f"train.precision={precision}", models=model, middle=middle, steps=8)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_model_may_be_frozen_as_a_whole_for_some_steps(precision: str) -> None:
    model = {"main": {"name": "mlp", "freeze": [{"match": "*", "until": 2}]}}
    made = trainer(f"train.precision={precision}", "train.ema=0.9", models=model)
    before = {name: value.clone() for name, value in made.models["main"].state_dict().items()}
    take(made, 2)
    assert all(torch.equal(value, before[name]) for name, value in made.models["main"].state_dict().items())
    take(made, 2)
    assert not all(torch.equal(value, before[name]) for name, value in made.models["main"].state_dict().items())


def test_a_pattern_that_freezes_nothing_is_an_error_before_the_first_step() -> None:
    with pytest.raises(UsageError, match=r"(?s)freeze: 'body\.\*' matches no parameter.*1\.weight"):
        trainer(models={"main": {"name": "mlp", "freeze": ["body.*"]}})


# Averages ------------------------------------------------------------------------------------------------------------


def test_the_average_is_that_of_the_weights_and_a_copy_of_the_buffers() -> None:
    data = {"name": toy("data.py:images"), "args": {"samples": 40, "size": 6}, "batch": 8}
    made = trainer(
        "train.ema=0.75", data=data, models={"main": {"name": toy("models.py:Conv"), "args": {"channels": [3]}}}
    )
    mean = {name: value.clone() for name, value in made.models["main"].state_dict().items()}
    for _ in range(4):
        take(made, 1)
        for name, value in made.models["main"].state_dict().items():
            mean[name] = (
                mean[name].lerp(value, 0.25) if name in dict(made.models["main"].named_parameters()) else value.clone()
            )
    for name, value in made.averages["main"].values.items():
        torch.testing.assert_close(value, mean[name])
    assert int(made.averages["main"].values["blocks.0.1.num_batches_tracked"]) == 4


# State ---------------------------------------------------------------------------------------------------------------


def small(*groups: dict[str, Any]) -> torch.optim.Optimizer:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    made = build_optimizer(model, Optim(name="adam", groups=[Group.model_validate(g) for g in groups]))
    model(torch.ones(1, 2)).sum().backward()
    made.step()
    return made


def test_state_of_other_groups_or_shapes_is_refused() -> None:
    """torch's own `load_state_dict` takes all of these in silence."""
    saved = small({"match": "0.*"}).state_dict()
    with pytest.raises(Conflict, match="given to another"):
        load_optimizer(small({"match": "1.*"}), saved, "here")
    with pytest.raises(Conflict, match="given to another"):
        load_optimizer(small(), saved, "here")
    saved["state"][0]["exp_avg"] = torch.zeros(2, 3)
    with pytest.raises(Conflict, match=r"exp_avg of 0\.weight has the shape \[2, 3\]"):
        load_optimizer(small({"match": "0.*"}), saved, "here")


def test_what_is_loaded_is_no_part_of_the_file(tmp_path: Path) -> None:
    """A file that is pruned, or cut, while the run goes on must not reach into its state."""
    made = trainer("train.ema=0.9")
    take(made, 2)
    new = again(made, tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes(b"")
    assert_same_trainers(made, new)
    take(new, 1)


def test_build_schedule_leaves_the_rate_to_the_first_step() -> None:
    made = small()
    schedule = build_schedule(made, Schedule(name="warmup_linear", args={"warmup": 4, "total": 8}))
    assert made.param_groups[0]["lr"] == pytest.approx(0.001 / 4)
    assert schedule.last_epoch == 0


def test_config_refuses_several_optimizers_for_one_model() -> None:
    with pytest.raises(UsageError, match="each model needs one"):
        config(optim={"main": {}, "other": {}})


@pytest.mark.parametrize("per", ["step", "epoch"])
@pytest.mark.parametrize("name", sorted(ARGS))
def test_a_schedule_that_is_shorter_than_the_run_is_told(tmp_path: Path, name: str, per: str) -> None:
    """Judged by the rates themselves: nothing is trained at a rate of 0, or at one that rises again after its end,
    without a word."""
    args = {**ARGS[name], **({"floor": 0.0} if "floor" in ARGS[name] else {})}

    def built(steps: int, args: dict[str, Any]) -> tuple[Trainer, list[str]]:
        said: list[str] = []
        optim_of = {"main": {"lr": 0.01, "schedule": {"name": name, "args": args, "per": per}}}
        changes = (f"train.steps={steps}", "data.batch=16", "eval.every=5")
        return build(config(*changes, optim=optim_of), World(), said.append), said

    for steps in (2, 40):
        made, said = built(steps, args)
        rates = [group_rate(made)]
        with suppress(UsageError):
            for _ in range(steps - 1):
                take(made, 1)
                rates.append(group_rate(made))
        if min(rates[1:]) < 1e-8 or len(rates) < steps:
            (told,) = said
            key, value = told.rpartition("--set optim.main.schedule.args.")[2].split("=")
            said = built(steps, {**args, key: int(value)})[1]
        assert said == [] or (name == "CosineAnnealingLR" and "rising again" in said[0])


def group_rate(made: Trainer) -> float:
    return float(made.optimizers["main"].param_groups[0]["lr"])
