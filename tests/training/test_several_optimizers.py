"""Several optimizers on one model: who steps what, state, clipping, scaling, schedules; and kernels by timing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import Conflict, NotFinite, UsageError
from ckptool.training.start import resume
from ckptool.training.trainer import restored
from tests.support.fork_server import ForkServer
from tests.support.killed_runs import ends_the_same, lab
from tests.support.small_runs import again, config, events, last, resumes, run_to_end, take, toy, trainer

TEXT = {
    "data": {"name": toy("data.py:text"), "args": {"samples": 40, "length": 4}, "batch": 8},
    "models": {"main": {"name": toy("models.py:CharGPT"), "args": {"width": 8, "dropout": 0.1}}},
    "task": "lm",
}
SCHEDULE = {"name": "StepLR", "args": {"step_size": 2, "gamma": 0.5}}
MUON = {"name": "muon", "model": "main", "match": "type:Linear.weight", "lr": 0.02}
BOTH: dict[str, Any] = {**TEXT, "optim": {"muon": {**MUON, "schedule": SCHEDULE}, "rest": {"model": "main"}}}


def both(**more: Any) -> dict[str, Any]:
    """Muon for the matrices inside, SGD for the rest, with other settings for both."""
    rest = {"name": "sgd", "model": "main", "lr": 0.1, **more}
    return {**TEXT, "optim": {"muon": {**MUON, **more}, "rest": rest}}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_muon_with_adamw_resumes_bit_for_bit(tmp_path: Path, precision: str) -> None:
    made = resumes(tmp_path, f"train.precision={precision}", "train.ema=0.9", "train.accumulate=2", **BOTH)
    muon, rest = made.optimizers.values()
    assert type(muon) is torch.optim.Muon
    assert {p.dim() for p in muon.param_groups[0]["params"]} == {2}
    held = [name for each in (muon, rest) for group in each.param_groups for name in group["param_names"]]
    assert sorted(held) == sorted(dict(made.models["main"].named_parameters()))
    assert [group["lr"] for each in (muon, rest) for group in each.param_groups] == [0.02 * 0.5**4, 0.001]


def test_a_run_of_two_optimizers_killed_in_the_middle_ends_with_the_same_bytes(tmp_path: Path) -> None:
    run_to_end(tmp_path / "whole", "train.steps=12", "save.every=3", **BOTH)
    run_to_end(tmp_path / "half", "train.steps=12", "save.every=3", **BOTH)
    for step in (9, 12):
        (tmp_path / f"half/run/checkpoints/step-{step:08d}.pt").unlink()
    resume(str(tmp_path / "half/run"))
    assert last(tmp_path / "half") == last(tmp_path / "whole")
    tree = torch.load(tmp_path / "whole/run/checkpoints/step-00000012.pt", weights_only=True)
    assert {key for key in tree if key.endswith("_state_dict")} == {
        "model_state_dict",
        "optimizer_muon_state_dict",
        "optimizer_rest_state_dict",
        "scheduler_muon_state_dict",
    }
    shown = str(ckptool.inspect(tmp_path / "whole/run/checkpoints/step-00000012.pt"))
    assert "Muon state for 8 parameters" in shown
    assert "Adam state for 20 parameters" in shown
    line = (tmp_path / "whole/run/metrics.jsonl").read_text().splitlines()[0]
    assert '"lr_muon"' in line
    assert '"lr_rest"' in line


def test_two_optimizers_one_of_ones_own_killed_at_two_steps_end_with_the_same_bytes(
    tmp_path: Path, server: ForkServer
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\n"
        "class Signs(torch.optim.SGD):\n    pass\n"
        "def warmup(step, length=20):\n    return min(1.0, (step + 1) / length)\n"
    )
    rest = {"name": f"{own}:Signs", "model": "main", "args": {"momentum": 0.9}}
    muon = {**MUON, "schedule": {"name": f"{own}:warmup", "args": {"length": 30}}}
    sections = {**TEXT, "optim": {"muon": muon, "rest": rest}, "train": {"steps": 40, "precision": "fp16"}}
    ends_the_same(lab(tmp_path, server, **sections), [(7, "KILL", ()), (22, "TERM", ())])


def test_one_optimizer_under_another_name_has_the_keys_of_one(tmp_path: Path) -> None:
    made = trainer(optim={"adam": {"model": "main"}})
    again(made, tmp_path / "a.pt")
    tree = torch.load(tmp_path / "a.pt", weights_only=True)
    assert "optimizer_state_dict" in tree


def test_a_parameter_that_none_or_two_take_is_refused_by_name() -> None:
    muon, rest = BOTH["optim"]["muon"], {"model": "main", "match": ["type:LayerNorm", "*.bias", "tokens"]}
    with pytest.raises(
        UsageError, match=r"(?s)that no optimizer takes: places\.weight\n.*without match takes the rest"
    ):
        trainer(**{**TEXT, "optim": {"muon": muon, "rest": rest}})
    frozen = {"main": {**TEXT["models"]["main"], "freeze": ["places"]}}
    made = trainer(**{**TEXT, "models": frozen, "optim": {"muon": muon, "rest": rest}})
    take(made, 2)
    thawed = {"main": {**TEXT["models"]["main"], "freeze": [{"match": "places", "until": 3}]}}
    with pytest.raises(UsageError, match=r"no optimizer takes: places\.weight"):
        trainer(**{**TEXT, "models": thawed, "optim": {"muon": muon, "rest": rest}})
    with pytest.raises(UsageError, match=r"several optimizers take: blocks\.0\.qkv\.weight \(muon, rest\)"):
        trainer(**{**TEXT, "optim": {"muon": muon, "rest": {"model": "main", "match": ["blocks.0.qkv.weight"]}}})
    with pytest.raises(UsageError, match=r"optim\.rest\.match: 'body' matches no parameter"):
        trainer(**{**TEXT, "optim": {"muon": muon, "rest": {"model": "main", "match": "body"}}})


def test_a_configuration_says_which_model_and_which_parameters() -> None:
    with pytest.raises(UsageError, match=r"several optimizers take the rest of \['main'\]; all but one need match"):
        config(optim={"a": {"model": "main"}, "b": {"model": "main"}})
    with pytest.raises(UsageError, match=r"optimizers for \['a', 'main'\]; each model needs one.*or `model`"):
        config(optim={"main": {}, "a": {"match": "*"}})


def norm_of(gradients: list[torch.Tensor]) -> float:
    return float(torch.stack([g.norm() for g in gradients]).norm())


def test_clipping_is_by_optimizer_or_over_all_of_a_model() -> None:
    """At a rate of 0.1 without momentum the step of SGD is the gradient: what it took shows how it was cut."""
    small = 1e-3
    taken = {}
    for key, sections in {
        "no": both(),
        "own": both(clip={"norm": small}),
        "all": {**both(), "models": {"main": {**TEXT["models"]["main"], "clip": {"norm": small}}}},
    }.items():
        made = trainer(**sections)
        take(made, 1)
        of_all = [p.grad for p in made.models["main"].parameters() if p.grad is not None]
        rest = [p.grad for p in made.optimizers["rest"].param_groups[0]["params"] if p.grad is not None]
        taken[key] = (norm_of(rest), norm_of(of_all))
    assert taken["own"][0] == pytest.approx(small, rel=1e-3)
    assert taken["own"][1] == pytest.approx(small * math.sqrt(2), rel=1e-3)
    assert taken["all"][1] == pytest.approx(small, rel=1e-3)
    assert taken["all"][0] == pytest.approx(small * taken["no"][0] / taken["no"][1], rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gradient_that_is_not_finite_stops_or_skips_all_of_them(precision: str) -> None:
    """The one in the share of SGD leaves Muon, the averages and both schedules where they were, too."""
    sections = both(schedule=SCHEDULE)
    made = trainer("train.on_nonfinite=skip", "train.ema=0.9", f"train.precision={precision}", **sections)
    take(made, 1)
    model = made.models["main"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mean = {name: value.clone() for name, value in made.averages["main"].values.items()}
    handle = model.get_parameter("places.weight").register_hook(lambda grad: torch.full_like(grad, math.inf))
    take(made, 1)
    handle.remove()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, mean[name]) for name, value in made.averages["main"].values.items())
    assert [schedule.last_epoch for schedule in made.schedules.values()] == [1, 1]
    if made.scaler is not None:
        assert made.scaler.get_scale() == 2.0**15
    take(made, 1)
    assert [schedule.last_epoch for schedule in made.schedules.values()] == [2, 2]
    if precision == "fp32":
        stopping = trainer(**sections)
        stopping.models["main"].get_parameter("places.weight").register_hook(lambda grad: grad * math.nan)
        with pytest.raises(NotFinite):
            take(stopping, 1)


def test_the_state_of_swapped_optimizers_is_refused(tmp_path: Path) -> None:
    sgd = {"name": "sgd", "model": "main", "args": {"momentum": 0.9}}
    made = trainer(optim={"a": {**sgd, "match": "*.bias"}, "b": sgd})
    take(made, 2)
    again(made, tmp_path / "a.pt")
    other = trainer(optim={"a": sgd, "b": {**sgd, "match": "*.bias"}})
    with pytest.raises(Conflict, match="given to another"):
        restored(other, torch.load(tmp_path / "a.pt", weights_only=True), "here")


def test_a_rate_is_declared_for_one_of_them(tmp_path: Path) -> None:
    run_to_end(tmp_path, "train.steps=6", **BOTH)
    resume(str(tmp_path / "run"), ["optim.rest.lr=0.5", "train.steps=8"])
    tree = torch.load(tmp_path / "run/checkpoints/step-00000008.pt", weights_only=True)
    assert tree["optimizer_rest_state_dict"]["param_groups"][0]["lr"] == 0.5
    assert tree["optimizer_muon_state_dict"]["param_groups"][0]["lr"] == 0.02 * 0.5**4
    with pytest.raises(Conflict, match=r"optim\.muon\.match was"):
        resume(str(tmp_path / "run"), ["optim.muon.match=blocks"])


def test_what_a_model_did_not_take_of_its_checkpoint_is_in_the_history(tmp_path: Path) -> None:
    whole = trainer().models["main"].state_dict()
    torch.save({**whole, "4.bias": torch.ones(9)}, tmp_path / "old.pt")
    model = {"name": "mlp", "args": {"hidden": [6]}, "from": str(tmp_path / "old.pt"), "strict": False}
    run_to_end(tmp_path, "train.steps=5", models={"main": model})
    (words,) = events(tmp_path / "run")[0]["skipped"]
    assert "1 skipped, of another shape: 4.bias (f32 [9] for f32 [4])" in words


def test_kernels_are_picked_by_timing_only_where_bits_may_differ() -> None:
    with pytest.raises(UsageError, match="cudnn_benchmark picks kernels by timing, which needs deterministic: false"):
        config("cudnn_benchmark=true")
    trainer("cudnn_benchmark=true", "deterministic=false")
    assert torch.backends.cudnn.benchmark
    trainer()
    assert not torch.backends.cudnn.benchmark
