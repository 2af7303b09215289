"""Models: built from data, initialised, started from a checkpoint; patterns for their parts; activation checkpointing,
which ends with the same weights to the last bit and keeps less."""

from __future__ import annotations

import copy
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptool.errors import PlanRefused, UsageError
from ckptool.training import models
from ckptool.training.config import ActivationCheckpoint, Data, Model
from ckptool.training.data import load_data
from ckptool.training.extensions import parameters_matching
from ckptool.training.models import build_model
from ckptool.training.parallel import World
from ckptool.training.trainer import Trainer, build, start
from examples.models import CharGPT
from tests.support.looped import sliced
from tests.support.small_runs import CONV, IMAGES, TEXT, config, own, run_to_end, take, toy, trainer


def built(data: str, of_data: dict[str, Any] = {}, name: str = "mlp", **args: Any) -> Any:  # noqa: B006
    settings = Model.model_validate({"name": name, "args": args})
    return build_model(settings, load_data(Data.model_validate({"name": data, "args": of_data}), 0))


# First values --------------------------------------------------------------------------------------------------------


def test_first_values_of_ones_own() -> None:
    """Set once: a run that goes on has its own, but what the function adds to a model is there again."""
    settings = {"main": {"name": "mlp", "init": own("ones")}}
    ones = trainer(models=settings).models["main"]
    assert all(bool((p == 1).all()) for p in ones.parameters())


# From a checkpoint ---------------------------------------------------------------------------------------------------


def test_a_run_starts_from_a_checkpoint_and_goes_on_without_it(tmp_path: Path) -> None:
    run_to_end(tmp_path / "first", "train.steps=5", data=IMAGES, models={"main": CONV})
    source = tmp_path / "weights.pt"
    tree = torch.load(tmp_path / "first/run/checkpoints/step-00000005.pt", weights_only=True)
    torch.save(tree["model_state_dict"], source)
    warm = {"main": {**CONV, "from": str(source)}}
    for name, value in trainer(data=IMAGES, models=warm).models["main"].state_dict().items():
        assert torch.equal(value, tree["model_state_dict"][name])
    run_to_end(tmp_path / "second", "train.steps=5", data=IMAGES, models=warm)
    source.unlink()
    done = start(config("train.steps=8", data=IMAGES, models=warm, run=tmp_path / "second/run"), resume="must")
    assert done.step == 8


def test_what_a_checkpoint_that_need_not_fit_lacks_is_told(tmp_path: Path) -> None:
    whole = trainer(data=IMAGES, models={"main": CONV}).models["main"].state_dict()
    extra = {"head.weight": torch.ones(9, 4), "old": torch.ones(2)}
    torch.save({**{k: v + 1 for k, v in whole.items() if k != "head.bias"}, **extra}, tmp_path / "old.pt")
    settings = Model.model_validate({**CONV, "from": str(tmp_path / "old.pt"), "strict": False})
    said: list[str] = []
    made = build_model(settings, load_data(Data.model_validate(IMAGES), 3), say=said.append).state_dict()
    assert torch.equal(made["blocks.0.0.weight"], whole["blocks.0.0.weight"] + 1)
    assert made["head.weight"].shape == (4, 4)
    (told,) = said
    assert "1 skipped, as its shape differs: head.weight (f32 [9, 4] for f32 [4, 4])" in told
    assert "1 not in it: head.bias" in told
    assert "1 not in the model: old" in told


WEIGHTS = {
    "other names": {"a.weight": torch.ones(3, 3)},
    "another shape": {"1.weight": torch.ones(3, 3), "1.bias": torch.ones(6)},
    "some": {"1.bias": torch.ones(6)},
    "no weights": [1],
}


@pytest.mark.parametrize(("kind", "strict"), list(product(WEIGHTS, [True, False])))
def test_weights_that_do_not_fit_are_told_with_what_a_configuration_can_say(
    tmp_path: Path, kind: str, strict: bool
) -> None:
    """The options of `warm-start`, which has more of them, are not those of `train`."""
    torch.save(WEIGHTS[kind], tmp_path / "old.pt")
    model = {"name": "mlp", "args": {"hidden": [6]}, "from": str(tmp_path / "old.pt"), "strict": strict}
    model |= {} if strict else {"min_loaded": 0}
    if kind in ("some", "another shape") and not strict:
        trainer(models={"main": model})
        return
    with pytest.raises((PlanRefused, UsageError)) as raised:
        trainer(models={"main": model})
    told = str(raised.value.fix)
    assert set(re.findall(r"--[a-z-]+", told)) <= {"--set", "--all"}  # the latter is of inspect
    assert f"ckptool inspect {tmp_path / 'old.pt'} --all" in told
    assert ("--set models.main.strict=false" in told) is strict


# Patterns ------------------------------------------------------------------------------------------------------------

CHOSEN: dict[Any, int] = {
    "blocks.0": 12,
    "blocks": 24,
    "type:LayerNorm": 10,
    "type:*Norm": 10,
    "type:Linear.weight": 8,
    "type:Block.mlp.*.weight": 4,
    "blocks.*.weight": 12,
    "re:norm[0-9]": 8,
    ("type:Linear.weight", "not:blocks.0"): 4,
    "not:blocks": 4,
    ("tokens", "places"): 2,
    **dict.fromkeys(("head", "type:Conv2d", "type:Linear.gamma", "not:head", "re:^x"), 0),  # the head is tied
}


def test_patterns_name_parameters_modules_and_classes() -> None:
    model = CharGPT([4], 7, width=8)
    for pattern, count in CHOSEN.items():
        if count:
            found = parameters_matching(model, pattern, "freeze")
            assert (len(found), set(found) <= set(dict(model.named_parameters()))) == (count, True), pattern
            continue
        told = rf"(?s)freeze: '{re.escape(pattern)}' matches no parameter.*tokens\.weight"
        with pytest.raises(UsageError, match=told):
            parameters_matching(model, ["tokens", pattern], "freeze")
    model = nn.Module()  # a pattern means modules only where it matches no parameter
    model.norm, model.inner = nn.Parameter(torch.ones(2)), nn.Module()
    model.inner.norm = nn.LayerNorm(2)
    assert parameters_matching(model, "*norm", "freeze") == ["norm"]


def test_groups_freezing_and_checkpointing_take_the_same_patterns() -> None:
    frozen = ["not:blocks", "blocks.1"]
    made = trainer(
        **{**TEXT, "models": {"main": {**TEXT["models"]["main"], "freeze": frozen}}},
        optim={"main": {"groups": [{"match": ["type:LayerNorm", "*.bias"], "weight_decay": 0.0}]}},
        train={"activation_checkpoint": {"match": "type:Block"}, "steps": 4},
    )
    learning = [name for name, p in made.models["main"].named_parameters() if p.requires_grad]
    assert {name.rpartition(".blocks.")[2][:8] for name in learning} == {"blocks.0"}
    flat, rest = made.optimizers["main"].param_groups
    assert (flat["weight_decay"], rest["weight_decay"]) == (0.0, 0.01)
    assert ({p.dim() for p in flat["params"]}, {p.dim() for p in rest["params"]}) == ({1}, {2})
    take(made, 3)


# Activation checkpointing --------------------------------------------------------------------------------------------

GPT: dict[str, Any] = {
    **TEXT,
    "models": {"main": {"name": toy("models.py:CharGPT"), "args": {"width": 8, "layers": 3, "dropout": 0.3}}},
}
DEEP = {"models": {"main": {"name": "mlp", "args": {"hidden": [8, 8, 8, 8], "dropout": 0.3}}}}
CALM = {"models": {"main": {"name": "mlp", "args": {"hidden": [8, 8]}}}}
DROPS: dict[str, Any] = {"data": IMAGES, "models": {"main": {**CONV, "args": {"channels": [4, 4], "dropout": 0.3}}}}
KEYWORDS = {"models": {"main": {"name": own("Keywords")}}}
# Of dropout, of tokens as inputs, which have no gradient, of tensors by keyword; and around BatchNorm, whose running
# statistics are updated twice.
ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"match": "blocks.*"}, GPT),
    ({"match": "*"}, GPT),
    ({"match": "?"}, DEEP),
    ({"sequential": "", "segments": 3}, DEEP),
    ({"match": "inner"}, KEYWORDS),
    ({"match": "blocks.*"}, DROPS),
]


def state_of(made: Trainer) -> dict[str, torch.Tensor]:
    return made.models["main"].state_dict()


def ends_alike(train: dict[str, Any], wanted: dict[str, Any], **sections: Any) -> None:
    """Asserts that the weights end the same with it and without, and elsewhere than they began."""
    plain, other = trainer(**sections, train=train), trainer(**sections, train=train)
    saving = trainer(**sections, train={**train, "activation_checkpoint": wanted})
    assert take(plain, 6) == take(saving, 6)
    assert list(state_of(plain)) == list(state_of(saving))
    for name, value in state_of(plain).items():
        statistics = "running" in name or name.endswith("tracked")
        assert statistics or torch.equal(value, state_of(saving)[name]), (wanted, name)
    assert any(not torch.equal(value, state_of(other)[name]) for name, value in state_of(plain).items())


@pytest.mark.parametrize(("reentrant", "precision"), sliced(product([False, True], ["fp32", "bf16", "fp16"]), 3))
def test_weights_end_the_same_to_the_last_bit(reentrant: bool, precision: str) -> None:
    for wanted, sections in ALIKE:
        ends_alike({"steps": 20, "precision": precision}, {**wanted, "use_reentrant": reentrant}, **sections)


def test_a_note_says_what_differs() -> None:
    said: list[str] = []
    asked = {"steps": 9, "activation_checkpoint": {"match": "blocks.*"}}
    build(config(**{**DROPS, "train": asked}), World(), said.append)
    (told,) = said
    assert told == (
        "note: BatchNorm inside blocks.0, blocks.1 sees its batch twice, and updates its running statistics twice"
    )
    ends_alike({"steps": 20}, {"match": "?", "preserve_rng_state": False}, **CALM)


def test_what_matches_is_computed_again_for_the_backward_pass() -> None:
    model, seen = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)), list[torch.Tensor]()
    models.checkpoint_activations(model, ActivationCheckpoint(match="0"), lambda text: None)
    for part in (model.get_submodule("0.0"), model[1]):
        part.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 3


def test_a_copy_of_a_module_runs_on_its_own_weights() -> None:
    """As DataParallel copies it: the copy must not go on with the weights of the first."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    models.checkpoint_activations(model, ActivationCheckpoint(match="*"), lambda text: None)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.get_parameter("0.weight"))
    nn.init.zeros_(other.get_parameter("0.bias"))
    assert torch.equal(other(torch.ones(1, 2)), other(torch.zeros(1, 2)))
    assert [type(part).__name__ for part in model] == ["Linear", "Linear"]
