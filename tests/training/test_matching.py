"""Patterns for parameters and modules: one language for groups, freezing and activation checkpointing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ckptool.errors import UsageError
from ckptool.training.matching import parameters_matching
from examples.models import CharGPT
from tests.support.small_runs import take, toy, trainer


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        ("blocks.0", 12),
        ("blocks", 24),
        ("type:LayerNorm", 10),
        ("type:*Norm", 10),
        ("type:Linear.weight", 8),
        ("type:Block.mlp.*.weight", 4),
        ("blocks.*.weight", 12),
        ("re:norm[0-9]", 8),
        (["type:Linear.weight", "not:blocks.0"], 4),
        ("not:blocks", 4),
        (["tokens", "places"], 2),
    ],
)
def test_patterns_name_parameters_modules_and_classes(patterns: Any, count: int) -> None:
    model = CharGPT([4], 7, width=8)
    found = parameters_matching(model, patterns, "freeze")
    assert len(found) == count
    assert set(found) <= set(dict(model.named_parameters()))


def test_a_pattern_means_modules_only_where_it_matches_no_parameter() -> None:
    model = torch.nn.Module()
    model.norm, model.inner = torch.nn.Parameter(torch.ones(2)), torch.nn.Module()
    model.inner.norm = torch.nn.LayerNorm(2)
    assert parameters_matching(model, "*norm", "freeze") == ["norm"]


@pytest.mark.parametrize("pattern", ["head", "type:Conv2d", "type:Linear.gamma", "not:head", "re:^x"])
def test_a_pattern_that_matches_nothing_is_named(pattern: str) -> None:
    model = CharGPT([4], 7, width=8)  # its head is the tied embedding, which goes by the name tokens.weight
    with pytest.raises(UsageError, match=rf"(?s)freeze: '{re.escape(pattern)}' matches no parameter.*tokens\.weight"):
        parameters_matching(model, ["tokens", pattern], "freeze")


def test_groups_freezing_and_checkpointing_take_the_same_patterns() -> None:
    data = {"name": toy("data.py:text"), "args": {"samples": 20, "length": 4}, "batch": 4}
    model = {
        "name": toy("models.py:CharGPT"),
        "args": {"width": 8},
        "freeze": ["not:blocks", {"match": ["blocks.1"], "until": 2}],
    }
    groups = [{"match": ["type:LayerNorm", "*.bias"], "weight_decay": 0.0}]
    checkpointed = {"activation_checkpoint": {"match": "type:Block"}, "steps": 4}
    made = trainer(data=data, models={"main": model}, optim={"main": {"groups": groups}}, task="lm", train=checkpointed)
    learning = [name for name, p in made.models["main"].named_parameters() if p.requires_grad]
    assert {name.rpartition(".blocks.")[2][:8] for name in learning} == {"blocks.0"}
    flat, rest = made.optimizers["main"].param_groups
    assert (flat["weight_decay"], rest["weight_decay"]) == (0.0, 0.01)
    assert {p.dim() for p in flat["params"]} == {1}
    assert {p.dim() for p in rest["params"]} == {2}
    take(made, 3)
