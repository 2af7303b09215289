"""A model in parts: the same gradients, the same names; where parts go, and what cannot be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptool.errors import UsageError
from ckptool.training.config import Split
from ckptool.training.parallel import Pipeline, place
from ckptool.training.trainer import gathered
from tests.support.same import first_difference
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

CPU = torch.device("cpu")
GPT: dict[str, Any] = {
    "task": "lm",
    "data": {"name": toy("data.py:text"), "args": {"samples": 40, "length": 8}, "batch": 6},
    "models": {"main": {"name": toy("models.py:CharGPT"), "args": {"width": 8, "layers": 3, "dropout": 0.2}}},
}


def cut(*at: str, microbatches: int = 1) -> dict[str, Any]:
    return {
        "strategy": "split",
        "split": {"devices": ["cpu"] * (len(at) + 1), "at": list(at), "microbatches": microbatches},
    }


@pytest.mark.parametrize(
    ("at", "sections"),
    [(["4"], {}), (["blocks.1"], {"data": IMAGES, "models": {"main": CONV}}), (["blocks.1", "blocks.2", "norm"], GPT)],
)
def test_a_split_model_trains_as_the_whole_does(at: list[str], sections: dict[str, Any]) -> None:
    whole, split = trainer(**sections), trainer(**sections, **cut(*at))
    take(whole, 5)
    take(split, 5)
    assert list(whole.models["main"].state_dict()) == list(split.models["main"].state_dict())
    assert_same_trainers(whole, split)


def test_micro_batches_give_the_gradient_of_the_batch() -> None:
    changes = ("models.main.args.dropout=0.0", "data.batch=13")
    whole, split = trainer(*changes), trainer(*changes, **cut("4", microbatches=4))
    take(whole, 4)
    take(split, 4)
    for name, value in split.models["main"].state_dict().items():
        torch.testing.assert_close(value, whole.models["main"].state_dict()[name], rtol=1e-4, atol=1e-5)
    assert first_difference(gathered(whole), gathered(split)) != ""


def test_a_split_run_resumes_and_goes_on_whole(tmp_path: Path) -> None:
    resumes(tmp_path, "train.accumulate=2", **cut("4", microbatches=2))
    run_to_end(tmp_path / "a")
    run_to_end(tmp_path / "b", "train.steps=9", **cut("4"))
    run_to_end(tmp_path / "b")
    assert last(tmp_path / "a") == last(tmp_path / "b")


def test_it_works_with_activation_checkpointing_and_half_precision(tmp_path: Path) -> None:
    for precision in ("bf16", "fp16"):
        train = {"steps": 9, "precision": precision, "activation_checkpoint": {"match": "blocks.*"}}
        whole = trainer(**{**GPT, "train": train})
        split = resumes(tmp_path, **{**GPT, "train": train}, **cut("blocks.1"))
        take(whole, 9)
        assert_same_trainers(whole, split)


# Where parts go ------------------------------------------------------------------------------------------------------


def places(model: nn.Module, devices: list[str], at: list[str]) -> dict[str, str]:
    place(model, Split(devices=devices, at=at), CPU)
    return {name: value.device.type for name, value in model.state_dict().items()}


def test_each_part_is_on_its_device() -> None:
    model = trainer(data=IMAGES, models={"main": CONV}).models["main"]
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
    with pytest.raises(UsageError, match=r"(?s)returns str.*microbatches=1"):
        Pipeline(_Text(), 2)(x)


class _Text(nn.Module):
    def forward(self, x: torch.Tensor) -> str:
        return "text"


# What cannot be cut --------------------------------------------------------------------------------------------------


def test_cuts_that_are_not_there_or_out_of_order() -> None:
    with pytest.raises(UsageError, match=r"(?s)no module 'blocks\.9'.*blocks\.0"):
        trainer(**GPT, **cut("blocks.9"))
    with pytest.raises(UsageError, match=r"(?s)not in the order.*blocks\.1, norm"):
        trainer(**GPT, **cut("norm", "blocks.1"))
    with pytest.raises(UsageError, match="not in the order"):
        trainer(**GPT, **cut("norm", "norm"))


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="split needs the section"):
        config("strategy=split")
    with pytest.raises(UsageError, match="1 cut makes 2 parts, for 3 devices"):
        config("split.devices=[cpu, cpu, cpu]", "split.at=['4']", "strategy=split")
    with pytest.raises(UsageError, match="'gpu:7' is not a device of this machine"):
        trainer(strategy="split", split={"devices": ["cpu", "gpu:7"], "at": ["4"]})
    with pytest.raises(UsageError, match=r"(?s)cuts one model.*There are 2"):
        trainer(**GAN, **cut("4"))
