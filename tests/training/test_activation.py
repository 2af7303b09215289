"""Activation checkpointing: the same weights to the last bit, less kept."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.errors import UsageError
from ckptool.training import models
from ckptool.training.config import ActivationCheckpoint
from ckptool.training.models import kept_bytes
from ckptool.training.parallel import World
from ckptool.training.start import rehearse
from ckptool.training.trainer import Trainer, build
from tests.support.small_runs import config, resumes, take, toy, trainer

GPT: dict[str, Any] = {
    "task": "lm",
    "data": {"name": toy("data.py:text"), "args": {"samples": 40, "length": 8}, "batch": 6},
    "models": {"main": {"name": toy("models.py:CharGPT"), "args": {"width": 8, "layers": 3, "dropout": 0.3}}},
}
DEEP = {"main": {"name": "mlp", "args": {"hidden": [8, 8, 8, 8], "dropout": 0.3}}}
CONV: dict[str, Any] = {
    "data": {"name": toy("data.py:images"), "args": {"samples": 60, "size": 6}, "batch": 8},
    "models": {"main": {"name": toy("models.py:Conv"), "args": {"channels": [4, 4], "dropout": 0.3}}},
}
KEYWORDS = """
import torch
from torch import nn
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x, *, scale, twice=False):
        return torch.dropout(self.layer(x) * scale, 0.5, self.training) * (2 if twice else 1)
class Model(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = Inner()
        self.head = nn.Linear(4, classes)
    def forward(self, x):
        return self.head(self.inner(x, scale=self.scale, twice=True))
"""


def state_of_main(made: Trainer) -> dict[str, torch.Tensor]:
    return made.models["main"].state_dict()


def ends_alike(train: dict[str, Any], wanted: dict[str, Any], *changes: str, but: str = "-", **sections: Any) -> None:
    """Asserts that the weights end the same with it and without."""
    plain = trainer(*changes, **{**sections, "train": train})
    saving = trainer(*changes, **{**sections, "train": {**train, "activation_checkpoint": wanted}})
    take(plain, 6)
    take(saving, 6)
    assert list(state_of_main(plain)) == list(state_of_main(saving))
    for name, value in state_of_main(plain).items():
        assert but in name or name.endswith("tracked") or torch.equal(value, state_of_main(saving)[name]), name
    assert any(
        not torch.equal(value, state_of_main(trainer(*changes, **sections))[name])
        for name, value in state_of_main(plain).items()
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_end_the_same_to_the_last_bit(tmp_path: Path, reentrant: bool, precision: str) -> None:
    """Dropout inside; tokens, which have no gradient, as the input of the first segment."""
    how = {"use_reentrant": reentrant}
    train = {"steps": 20, "precision": precision}
    ends_alike(train, {"match": "blocks.*", **how}, **GPT)
    ends_alike(train, {"match": "*", **how}, **GPT)
    ends_alike(train, {"match": "?", **how}, models=DEEP)
    ends_alike(train, {"sequential": "", "segments": 3, **how}, models=DEEP)
    (tmp_path / "own.py").write_text(KEYWORDS)
    ends_alike(train, {"match": "inner", **how}, models={"main": {"name": f"{tmp_path / 'own.py'}:Model"}})


@pytest.mark.parametrize("reentrant", [False, True])
def test_parameters_end_the_same_around_batch_norm_and_a_note_says_what_does_not(reentrant: bool) -> None:
    """The statistics of BatchNorm are updated twice; parameters do not depend on them while training."""
    wanted = {"match": "blocks.*", "use_reentrant": reentrant}
    ends_alike({"steps": 20}, wanted, but="running", **CONV)
    said: list[str] = []
    build(config(**CONV, train={"steps": 9, "activation_checkpoint": wanted}), World(), said.append)
    assert said == [
        "note: BatchNorm inside blocks.0, blocks.1 sees its batch twice, and updates its running statistics twice"
    ]


def test_without_the_random_state_a_note_says_that_weights_differ() -> None:
    said: list[str] = []
    wanted = {"match": "?", "preserve_rng_state": False}
    build(config(models=DEEP, train={"steps": 9, "activation_checkpoint": wanted}), World(), said.append)
    assert "dropout inside" in said[0]
    assert "results differ" in said[0]
    calm = {"main": {"name": "mlp", "args": {"hidden": [8, 8]}}}
    ends_alike({"steps": 20}, wanted, models=calm)


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    resumes(tmp_path, train={"steps": 20, "accumulate": 2, "activation_checkpoint": {"match": "blocks.*"}}, **GPT)


# What it saves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [{"match": "?"}, {"sequential": "", "segments": 2}])
def test_a_rehearsal_measures_what_it_saves(wanted: dict[str, Any]) -> None:
    wide = {"main": {"name": "mlp", "args": {"hidden": [64] * 6, "dropout": 0.1}}}
    plain = rehearse(config(models=wide))
    found = rehearse(config(models=wide, train={"steps": 5, "activation_checkpoint": wanted}))
    assert plain.without is None
    assert found.without == plain.activations
    assert found.activations < plain.activations * 0.8


def test_kept_bytes_count_a_storage_once_and_no_weights() -> None:
    model, x = torch.nn.Linear(4, 4), torch.ones(8, 4)
    with kept_bytes() as kept:
        y = model(x)
        (y * y).sum().backward()
    assert kept.bytes == x.nbytes + y.nbytes


# What it cannot do ---------------------------------------------------------------------------------------------------


def test_what_matches_nothing_or_is_no_sequence() -> None:
    with pytest.raises(UsageError, match=r"(?s)'layers\.\*' matches no module.*blocks\.0"):
        trainer(train={"steps": 5, "activation_checkpoint": {"match": "layers.*"}}, **GPT)
    with pytest.raises(UsageError, match=r"(?s)'blocks' is not an nn.Sequential.*blocks\.0\.mlp"):
        trainer(train={"steps": 5, "activation_checkpoint": {"sequential": "blocks"}}, **GPT)
    with pytest.raises(UsageError, match="match or sequential, exactly one of the two"):
        trainer(train={"steps": 5, "activation_checkpoint": {"match": "*", "sequential": "blocks"}}, **GPT)


@pytest.mark.parametrize("reentrant", [False, True])
def test_segments_whose_inputs_are_whole_numbers_learn_as_without(reentrant: bool) -> None:
    """The older way learns nothing where no input asks for a gradient, and these cannot."""
    data = {"name": toy("data.py:modadd"), "args": {"modulus": 5}, "batch": 4}
    wanted = {"sequential": "", "use_reentrant": reentrant}
    made = trainer(data=data, train={"steps": 5, "activation_checkpoint": wanted})
    plain = trainer(data=data, train={"steps": 5})
    assert take(made, 3) == take(plain, 3)
    assert all(map(torch.equal, made.models["main"].parameters(), plain.models["main"].parameters()))


def test_a_copy_of_a_module_runs_on_its_own_weights() -> None:
    """As DataParallel copies it: the copy must not go on with the weights of the first."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    models.checkpoint_activations(model, ActivationCheckpoint(match="*"), lambda text: None)
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.get_parameter("0.weight"))
    torch.nn.init.zeros_(other.get_parameter("0.bias"))
    assert torch.equal(other(torch.ones(1, 2)), other(torch.zeros(1, 2)))
    assert [type(part).__name__ for part in model] == ["Linear", "Linear"]
