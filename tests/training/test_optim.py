"""Optimizers, groups, schedules, freezing, averages; several optimizers on one model; state that is matched by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import Conflict, NotFinite
from ckptool.training import optim
from ckptool.training.config import Group, Optim
from ckptool.training.optim import Average, build_optimizer, load_optimizer
from ckptool.training.trainer import Trainer, restore
from tests.support import small_runs as runs
from tests.support.small_runs import again, assert_same_trainers, last, own, run_to_end, take, toy, trainer


def rate_of(made: Trainer) -> float:
    return float(made.optimizers["main"].param_groups[0]["lr"])


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in made.models["main"].state_dict().items()}


def moved(made: Trainer, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in made.models["main"].state_dict().items() if not torch.equal(value, before[name])}


# Groups --------------------------------------------------------------------------------------------------------------


def test_every_parameter_is_in_exactly_one_group() -> None:
    groups = [{"match": "1.*", "lr": 0.5}, {"match": "*.bias", "weight_decay": 0.0}]
    made = trainer(optim={"main": {"name": "adamw", "lr": 0.1, "groups": groups}})
    found = [(g["param_names"], g["lr"], g["weight_decay"]) for g in made.optimizers["main"].param_groups]
    assert found == [(["1.weight", "1.bias"], 0.5, 0.01), (["4.bias"], 0.1, 0.0), (["4.weight"], 0.1, 0.01)]
    tied = trainer(**runs.TEXT)
    held = [id(p) for g in tied.optimizers["main"].param_groups for p in g["params"]]
    assert len(held) == len(set(held)) == len(list(tied.models["main"].parameters()))


# Schedules -----------------------------------------------------------------------------------------------------------


def test_a_plateau_follows_evaluation(tmp_path: Path) -> None:
    """A factor of one half whenever the metric does not get better: a rate of 100 makes sure that it does not."""
    plateau = {"name": "ReduceLROnPlateau", "args": runs.ARGS["ReduceLROnPlateau"]}
    run_to_end(
        tmp_path,
        "eval.every=1",
        "save.every=3",
        "train.on_nonfinite=skip",
        optim={"main": {"name": "sgd", "lr": 100.0, "schedule": plateau}},
    )
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rate, best, expected = 100.0, math.inf, []
    for line in lines:
        value = float(line["val_loss"])
        rate, best = (rate, value) if value < best * (1 - 1e-4) else (rate / 2, best)
        expected.append(rate)
    assert [line["lr"] for line in lines] == expected
    assert expected[-1] < 100


@pytest.mark.parametrize(
    ("made", "values"),
    [
        (partial(optim.warmup_cosine, warmup=2, total=6), {0: 0.5, 1: 1.0, 2: 1.0, 4: 0.5, 6: 0.0, 99: 0.0}),
        (partial(optim.warmup_cosine, warmup=2, total=6, floor=0.2), {4: 0.6, 6: 0.2}),
        (partial(optim.warmup_cosine, warmup=0, total=4), {0: 1.0, 2: 0.5}),
    ],
)
def test_lambdas(made: Callable[[int], float], values: dict[int, float]) -> None:
    assert {step: made(step) for step in values} == pytest.approx(values)


@pytest.mark.parametrize(
    ("name", "args", "rates"),
    [
        (own("warmup"), {}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        (own("warmup"), {"length": 2}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        (own("Halving"), {"every": 2}, [1.0, 1.0, 0.5, 0.5, 0.25]),
        (own("both"), {"length": 2}, [0.5, 1.0, 1.0, 0.9, 0.81]),
        ("warmup_cosine", {"warmup": 4, "total": 8}, [0.25, 0.5, 0.75, 1.0, 1.0]),
    ],
)
def test_the_rate_of_each_step(name: str, args: dict[str, Any], rates: list[float]) -> None:
    made = trainer(optim={"main": {"name": "sgd", "lr": 1.0, "schedule": {"name": name, "args": args}}})
    found = []
    for _ in rates:
        found.append(rate_of(made))
        take(made, 1)
    assert found == pytest.approx(rates)


def test_an_epoch_that_ends_with_a_step_left_out_still_counts() -> None:
    made = trainer("data.batch=24", "train.on_nonfinite=skip", optim=runs.scheduled("StepLR", per="epoch"))
    take(made, 1)
    with torch.no_grad():
        made.models["main"].get_parameter("1.weight").fill_(math.nan)
    take(made, 1)
    assert made.schedules["main"].last_epoch == 1


# Freezing and averages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_is_frozen_does_not_move(precision: str) -> None:
    """A part of a model, or the whole."""
    for rules, learning in ((["4.bias", "1.*"], {"4.weight"}), (["*"], set[str]())):
        model = {"main": {"name": "mlp", "args": {"hidden": [6]}, "freeze": rules}}
        made = trainer(f"train.precision={precision}", "train.ema=0.9", models=model)
        before = weights(made)
        take(made, 3)
        assert moved(made, before) == learning
        assert all(p.grad is None for name, p in made.models["main"].named_parameters() if name not in learning)
        assert len(made.optimizers["main"].param_groups[0]["params"]) == 4


def test_the_average_is_that_of_the_weights_and_a_copy_of_the_buffers() -> None:
    data = {"name": toy("data.py:images"), "args": {"samples": 40, "size": 6}, "batch": 8}
    made = trainer(
        "train.ema=0.75", data=data, models={"main": {"name": toy("models.py:Conv"), "args": {"channels": [3]}}}
    )
    mean, learned = weights(made), dict(made.models["main"].named_parameters())
    for _ in range(4):
        take(made, 1)
        for name, value in made.models["main"].state_dict().items():
            mean[name] = mean[name].lerp(value, 0.25) if name in learned else value.clone()
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


def names_of(made: torch.optim.Optimizer) -> list[list[str]]:
    return [group["param_names"] for group in made.param_groups]


def test_state_of_other_groups_or_shapes_is_refused(tmp_path: Path) -> None:
    """torch's own `load_state_dict` takes all of these in silence."""
    saved = small({"match": "0.*"}).state_dict()
    for other in (small({"match": "1.*"}), small()):
        with pytest.raises(Conflict, match="given to another"):
            load_optimizer(other, saved, "here", names_of(other))
    saved["state"][0]["exp_avg"] = torch.zeros(2, 3)
    with pytest.raises(Conflict, match=r"exp_avg of 0\.weight has the shape \[2, 3\]"):
        load_optimizer(small({"match": "0.*"}), saved, "here", names_of(small({"match": "0.*"})))
    sgd = {"name": "sgd", "model": "main", "args": {"momentum": 0.9}}
    made = trainer(optim={"a": {**sgd, "match": "*.bias"}, "b": sgd})
    take(made, 2)
    again(made, tmp_path / "a.pt")
    swapped = trainer(optim={"a": sgd, "b": {**sgd, "match": "*.bias"}})
    with pytest.raises(Conflict, match="given to another"):
        restore(swapped, torch.load(tmp_path / "a.pt", weights_only=True), "here")


def test_what_is_loaded_is_no_part_of_the_file(tmp_path: Path) -> None:
    """A file that is pruned, or cut, while the run goes on must not reach into its state."""
    made = trainer("train.ema=0.9")
    take(made, 2)
    new = again(made, tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes(b"")
    assert_same_trainers(made, new)
    take(new, 1)


# Several optimizers on one model -------------------------------------------------------------------------------------


def both(**more: Any) -> dict[str, Any]:
    """Muon for the matrices inside, SGD for the rest, with other settings for both."""
    rest = {"name": "sgd", "model": "main", "lr": 0.1, **more}
    return {**runs.TEXT, "optim": {"muon": {**runs.MUON, **more}, "rest": rest}}


def test_each_of_two_optimizers_takes_its_own_and_is_saved_by_its_name(tmp_path: Path) -> None:
    made = trainer(**runs.BOTH)
    muon, rest = made.optimizers.values()
    assert type(muon) is torch.optim.Muon
    assert {p.dim() for p in muon.param_groups[0]["params"]} == {2}
    held = [name for each in (muon, rest) for group in each.param_groups for name in group["param_names"]]
    assert sorted(held) == sorted(dict(made.models["main"].named_parameters()))
    for name, steps in (("whole", [12]), ("half", [9, 12])):
        for step in steps:
            run_to_end(tmp_path / name, f"train.steps={step}", "save.every=3", **runs.BOTH)
    assert last(tmp_path / "half") == last(tmp_path / "whole")
    path = tmp_path / "whole/run/checkpoints/step-00000012.pt"
    assert {key for key in torch.load(path, weights_only=True) if key.endswith("_state_dict")} == {
        "model_state_dict",
        "optimizer_muon_state_dict",
        "optimizer_rest_state_dict",
        "scheduler_muon_state_dict",
    }
    shown = str(ckptool.inspect(path))
    assert "Muon state for 8 parameters" in shown
    assert "Adam state for 20 parameters" in shown
    line = json.loads((tmp_path / "whole/run/metrics.jsonl").read_text().splitlines()[0])
    assert {"lr_muon", "lr_rest"} < set(line)
    again(trainer(optim={"adam": {"model": "main"}}), tmp_path / "a.pt")  # one, under another name
    assert "optimizer_state_dict" in torch.load(tmp_path / "a.pt", weights_only=True)


def norm_of(gradients: list[torch.Tensor]) -> float:
    return float(torch.stack([g.norm() for g in gradients]).norm())


def test_clipping_is_by_optimizer_or_over_all_of_a_model() -> None:
    """At a rate of 0.1 without momentum the step of SGD is the gradient: what it took shows how it was cut."""
    small = 1e-3
    taken = {}
    for key, sections in {
        "no": both(),
        "own": both(clip={"norm": small}),
        "all": {**both(), "models": {"main": {**runs.TEXT["models"]["main"], "clip": {"norm": small}}}},
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
    sections = both(schedule=runs.HALVED)
    made = trainer("train.on_nonfinite=skip", "train.ema=0.9", f"train.precision={precision}", **sections)
    take(made, 1)
    before = weights(made)
    mean = {name: value.clone() for name, value in made.averages["main"].values.items()}
    place = made.models["main"].get_parameter("places.weight")
    handle = place.register_hook(lambda grad: torch.full_like(grad, math.inf))
    take(made, 1)
    handle.remove()
    assert moved(made, before) == set()
    assert all(torch.equal(value, mean[name]) for name, value in made.averages["main"].values.items())
    assert [schedule.last_epoch for schedule in made.schedules.values()] == [1, 1]
    assert made.scaler is None or made.scaler.get_scale() == 2.0**15
    take(made, 1)
    assert [schedule.last_epoch for schedule in made.schedules.values()] == [2, 2]
    if precision == "fp32":
        stopping = trainer(**sections)
        stopping.models["main"].get_parameter("places.weight").register_hook(lambda grad: grad * math.nan)
        with pytest.raises(NotFinite):
            take(stopping, 1)


@pytest.mark.parametrize("sizes", [(3, 2), (3, 3)])
def test_the_average_of_weights_that_are_tied_transposed_trades_places_and_back(sizes: tuple[int, int]) -> None:
    model = nn.Module()
    model.a, model.b = nn.Linear(*sizes, bias=False), nn.Linear(*sizes[::-1], bias=False)
    model.b.weight = nn.Parameter(model.a.weight.data.t())
    model.register_buffer("scale", torch.ones(1).expand(4))
    average, before = Average(model, 0.5), model.a.weight.detach().clone()
    with torch.no_grad():
        model.a.weight.add_(1)
    average.update()
    with average.in_place():
        assert torch.allclose(model.a.weight, before + 0.5) and torch.allclose(model.b.weight, (before + 0.5).t())
    assert torch.equal(model.a.weight, before + 1) and torch.equal(model.b.weight, (before + 1).t())
