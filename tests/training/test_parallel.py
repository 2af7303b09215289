"""Strategies: one process, copies, several processes; files without a wrapper's prefix, and the same samples
everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptool.errors import CkptoolError, UsageError
from ckptool.training import saving
from ckptool.training.config import Split
from ckptool.training.hooks import Hooks
from ckptool.training.parallel import Pipeline, World, place, world_of, wrapped
from ckptool.training.trainer import gathered, start
from tests.support import small_runs as runs
from tests.support.looped import sliced
from tests.support.same import first_difference
from tests.support.several_processes import processes
from tests.support.small_runs import assert_same_trainers, config, last, own, run_to_end, scheduled, take, toy, trainer

NO_DROPOUT = "models.main.args.dropout=0.0"
IMAGE: dict[str, Any] = {"data": runs.IMAGES, "models": {"main": runs.CONV}}


def tree_of(path: Path, step: int = 20) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path / f"run/checkpoints/step-{step:08d}.pt", weights_only=True)
    return found


def close(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Asserts that two states are alike but for the order in which numbers were added."""
    for key in ("model_state_dict", "ema_state_dict"):
        assert list(one[key]) == list(other[key])
        torch.testing.assert_close(one[key], other[key], rtol=1e-4, atol=1e-5)
    states = (tree["optimizer_state_dict"]["state"] for tree in (one, other))
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
    assert [one[key] for key in ("step", "epoch", "config")] == [other[key] for key in ("step", "epoch", "config")]


# One process ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_strategies_of_one_process_write_the_same_file(tmp_path: Path, strategy: str) -> None:
    """`dp` without a GPU is the model itself; `ddp` without torchrun is one process."""
    run_to_end(tmp_path / "a", "train.accumulate=2", **IMAGE)
    run_to_end(tmp_path / "b", "train.accumulate=2", f"strategy={strategy}", **IMAGE)
    assert last(tmp_path / "a") == last(tmp_path / "b")
    assert not torch.distributed.is_initialized()


def test_a_run_may_change_its_strategy(tmp_path: Path) -> None:
    run_to_end(tmp_path / "a")
    run_to_end(tmp_path / "b", "train.steps=7", "strategy=ddp")
    run_to_end(tmp_path / "b", "strategy=dp")
    assert last(tmp_path / "a") == last(tmp_path / "b")


def test_dp_on_a_gpu_wraps_and_puts_the_runs_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(nn, "DataParallel", lambda model, ids: given.append(ids))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    wrapped(nn.Linear(1, 1), config("strategy=dp"), World(device=torch.device("cuda:1")))
    wrapped(nn.Linear(1, 1), config("strategy=dp"), World(device=torch.device("cuda")))
    wrapped(nn.Linear(1, 1), config("strategy=dp"), World())
    assert given == [[1, 0, 2], [0, 1, 2]]


def test_several_processes_need_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(UsageError, match=r"(?s)torchrun started 2 processes, but strategy is single.*strategy=ddp"),
        world_of(config()),
    ):
        pass


# Two processes -------------------------------------------------------------------------------------------------------


def test_two_processes_end_as_one_does(tmp_path: Path) -> None:
    """Accumulation, clipping, an average, a frozen parameter, a last batch of one sample."""
    model = {"main": {"name": "mlp", "args": {"hidden": [6]}, "freeze": ["1.bias"]}}
    changes = ("data.batch=47", "train.accumulate=2", "train.ema=0.9", "train.steps=9", "save.every=3", "eval.every=3")
    optim = {"main": {"name": "sgd", "lr": 0.05, "args": {"momentum": 0.9}, "clip": {"norm": 0.5}}}
    run_to_end(tmp_path / "one", *changes, models=model, optim=optim)
    processes(2, lambda rank: run_to_end(tmp_path / "two", *changes, "strategy=ddp", models=model, optim=optim))
    one, two = tree_of(tmp_path / "one", 9), tree_of(tmp_path / "two", 9)
    close(one, two)
    assert first_difference(one, two) != ""  # else it was one process that did it all
    assert not any(key.startswith("module.") for key in two["model_state_dict"])
    trainer(*changes, models=model).models["main"].load_state_dict(two["model_state_dict"])
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / n / "run/metrics.jsonl").read_text().splitlines()]
        for n in ("one", "two")
    ]
    assert len(losses[0]) == len(losses[1]) > 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


DATA = {"batch": 8, "val": {"name": own("PointItems")}}
# How many processes, the steps at which they are stopped, and what they train.
TOGETHER: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    # BatchNorm's statistics are those of the first process, which gives them to the others: also when it goes on.
    "two with BatchNorm": (2, (5, 10), {**IMAGE, "optim": scheduled("ReduceLROnPlateau"), "train": {"ema": 0.9}}),
    # A sum of three depends on its order, and that on where a gradient lies in what they exchange: always the same.
    "three": (3, (3, 6, 9), {**IMAGE, "train": {}}),
    "a stream": (2, (4, 7, 11), {"data": {**DATA, "name": own("Points")}, "train": {}}),
    "a sampler": (
        2,
        (4, 7, 11),
        {"data": {**DATA, "name": own("PointItems"), "sampler": own("weighted")}, "train": {}},
    ),
}


@pytest.mark.long("several runs of several processes")
@pytest.mark.parametrize("name", sliced(TOGETHER, 2))
def test_processes_resume_to_the_same_bytes(tmp_path: Path, name: str) -> None:
    """With workers and without."""
    count, ends, sections = TOGETHER[name]

    def trained(folder: str, steps: int, workers: int = 0) -> Callable[[int], Any]:
        changes = ("strategy=ddp", "eval.every=3", "save.every=3", f"data.workers={workers}")
        train = {**sections["train"], "steps": steps}
        return lambda rank: run_to_end(tmp_path / folder, *changes, **{**sections, "train": train})

    parts = [trained("parts", end, 2 * (number % 2) * name.startswith("a ")) for number, end in enumerate(ends)]
    processes(count, trained("whole", ends[-1]), *parts)
    assert last(tmp_path / "whole") == last(tmp_path / "parts")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_save_by_time_and_stop_early_at_the_same_step(tmp_path: Path, strategy: str) -> None:
    """Also where the clock of one of them alone says that it is time."""
    changes = ("optim.main.lr=1e-30", "eval.every=2", "stop.patience=2", "save.every=100", "save.keep_last=9")

    def trained(rank: int) -> None:
        now = [0]
        saving.time.monotonic = lambda: now[0]  # type: ignore[assignment,attr-defined]
        Hooks.call = lambda _, method, *given: now.__setitem__(  # type: ignore[method-assign]
            0, now[0] + rank * (method == "after_step")
        )
        done = run_to_end(tmp_path, *changes, "save.seconds=3", f"strategy={strategy}")
        assert (done.status, done.step, done.exit_code) == ("stopped-early", 6, 0)

    processes(2, trained, trained)
    assert [path.stem for path in sorted((tmp_path / "run/checkpoints").glob("*.json"))] == [
        "step-00000003",
        "step-00000006",
    ]


@pytest.mark.long("two runs of two processes")
def test_two_processes_train_two_models_and_several_precisions(tmp_path: Path) -> None:
    def trained(name: str, *changes: str, **sections: Any) -> Callable[[int], Any]:
        return lambda rank: run_to_end(tmp_path / name, "strategy=ddp", "train.steps=6", *changes, **sections)

    halves = [trained(name, f"train.precision={name}", NO_DROPOUT) for name in ("bf16", "fp16")]
    processes(2, trained("gan", **runs.GAN), *halves)
    run_to_end(tmp_path / "half", "train.steps=6", "train.precision=fp16", NO_DROPOUT)
    assert tree_of(tmp_path / "half", 6)["scaler_state_dict"] == tree_of(tmp_path / "fp16", 6)["scaler_state_dict"]
    judge = tree_of(tmp_path / "gan", 6)["model_discriminator_state_dict"]
    trainer(**runs.GAN).models["discriminator"].load_state_dict(judge)


def test_what_fails_in_the_first_process_fails_in_all(tmp_path: Path) -> None:
    run_to_end(tmp_path)

    def work(rank: int) -> None:
        with pytest.raises(CkptoolError, match="is a run already"):
            start(config("strategy=ddp", run=tmp_path / "run"))

    processes(2, work)


# Compiling -----------------------------------------------------------------------------------------------------------


def test_a_compiled_model_leaves_no_prefix_and_the_same_weights(tmp_path: Path) -> None:
    run_to_end(tmp_path / "a", "train.steps=6", NO_DROPOUT)
    run_to_end(tmp_path / "b", "train.steps=6", NO_DROPOUT, "train.compile=eager")
    assert first_difference(tree_of(tmp_path / "a", 6), tree_of(tmp_path / "b", 6)) == ""


def test_a_wrapper_of_the_users_own_code_is_in_no_name(tmp_path: Path) -> None:
    """Of weights, averages and optimizers; patterns are those of the model inside. The run goes on without it."""
    for wrapper, strategy in product(("", "compiled", "replicated"), ("single", "fsdp")):
        path, changes = tmp_path / f"{wrapper}-{strategy}", ("train.ema=0.9", f"strategy={strategy}")
        model = {"main": {"name": own("layers"), "args": {"wrapper": wrapper}, "freeze": ["0.bias"]}}
        groups = {"main": {"groups": [{"match": "0.weight", "lr": 0.1}]}}
        run_to_end(path, "train.steps=3", *changes, models=model, optim=groups)
        run_to_end(path, "train.steps=6", "train.ema=0.9", models=model, optim=groups)
        trees = [tree_of(folder, 6) | {"config": ""} for folder in (path, tmp_path / "-single")]
        assert first_difference(*trees) == "", (wrapper, strategy)


# Randomness ----------------------------------------------------------------------------------------------------------


def test_dropout_differs_between_processes_and_micro_steps() -> None:
    one = take(trainer(), 3)
    other = take(trainer(world=World(rank=1, size=1)), 3)
    assert one != other


# A model in parts ----------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
GPT: dict[str, Any] = {
    **runs.TEXT,
    "models": {"main": {"name": toy("models.py:CharGPT"), "args": {"width": 8, "layers": 3}}},
}


@pytest.mark.parametrize(
    ("at", "sections"), [(["4"], {}), (["blocks.1"], IMAGE), (["blocks.1", "blocks.2", "norm"], GPT)]
)
def test_a_split_model_trains_as_the_whole_does(at: list[str], sections: dict[str, Any]) -> None:
    whole, split = trainer(**sections), trainer(**sections, **runs.split_at(*at))
    take(whole, 5)
    take(split, 5)
    assert list(whole.models["main"].state_dict()) == list(split.models["main"].state_dict())
    assert_same_trainers(whole, split)


def test_micro_batches_give_the_gradient_of_the_batch() -> None:
    changes = ("models.main.args.dropout=0.0", "data.batch=13")
    whole, split = trainer(*changes), trainer(*changes, **runs.split_at("4", microbatches=4))
    take(whole, 4)
    take(split, 4)
    for name, value in split.models["main"].state_dict().items():
        torch.testing.assert_close(value, whole.models["main"].state_dict()[name], rtol=1e-4, atol=1e-5)
    assert first_difference(gathered(whole), gathered(split)) != ""


def test_a_split_run_goes_on_whole(tmp_path: Path) -> None:
    run_to_end(tmp_path / "a")
    run_to_end(tmp_path / "b", "train.steps=9", **runs.split_at("4"))
    run_to_end(tmp_path / "b")
    assert last(tmp_path / "a") == last(tmp_path / "b")


# Where parts go ------------------------------------------------------------------------------------------------------


def places(model: nn.Module, devices: list[str], at: list[str]) -> dict[str, str]:
    place(model, Split(devices=devices, at=at), CPU)
    return {name: value.device.type for name, value in model.state_dict().items()}


def test_each_part_is_on_its_device() -> None:
    model = trainer(**IMAGE).models["main"]
    found = places(model, ["cpu", "meta"], ["blocks.1"])
    assert {name for name, device in found.items() if device == "meta"} == {
        name for name in found if name.startswith(("blocks.1", "head"))
    }
    assert "blocks.1.1.running_mean" in found


def test_tied_weights_stay_where_they_came_first() -> None:
    model = trainer(**GPT).models["main"]
    found = places(model, ["cpu", "meta"], ["norm"])
    assert (found["norm.weight"], found["head.weight"], found["tokens.weight"]) == ("meta", "cpu", "cpu")
    assert model.get_parameter("head.weight") is model.get_parameter("tokens.weight")


def test_tensors_are_moved_between_parts() -> None:
    """On two devices: what the second part is given is on its own."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 4)))
    seen: list[torch.device] = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.extend((inputs[0].device, output.device)))
    place(model, Split(devices=["cpu", "meta"], at=["1"]), torch.device("meta"))
    assert model(torch.ones(5, 2)).device.type == "meta"
    assert [device.type for device in seen] == ["cpu", "meta"] or [d.type for d in seen] == ["meta", "meta"]


class Both(nn.Module):
    """Takes and gives several things."""

    def forward(self, x: torch.Tensor, scale: float, *, more: torch.Tensor) -> dict[str, Any]:
        return {"sum": x + more * scale, "pair": (x, [more])}


def test_a_pipeline_takes_and_gives_several_tensors() -> None:
    x, more = torch.arange(5.0), torch.ones(5)
    whole, parts = Both()(x, 2.0, more=more), Pipeline(Both(), 3)(x, 2.0, more=more)
    assert str(whole) == str(parts)
    assert str(Pipeline(Both(), 9)(x, 2.0, more=more)) == str(whole)
