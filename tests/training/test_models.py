"""Models: built from data, initialised, started from a checkpoint, and the user's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptool.errors import PlanRefused, UsageError, UserCodeFailed
from ckptool.training.config import Data, Model
from ckptool.training.data import load_data
from ckptool.training.models import build_model, initialise
from ckptool.training.start import start
from tests.support.small_runs import CONV, IMAGES, config, run_to_end, take, toy, trainer

TEXT = {"name": toy("data.py:text"), "args": {"samples": 20, "length": 6}, "batch": 4}


def built(data: dict[str, Any], **model: Any) -> nn.Module:
    return build_model(Model.model_validate(model), load_data(Data.model_validate(data), 0))


def test_models_take_from_the_data_what_they_need() -> None:
    assert built({"name": "blobs", "args": {"inputs": 5, "classes": 3}}, name="mlp")[-1].out_features == 3  # type: ignore[index]
    assert built({"name": toy("data.py:linear")}, name="mlp")[-1].out_features == 1  # type: ignore[index]
    conv = built({"name": toy("data.py:images"), "args": {"channels": 3}}, name=toy("models.py:Conv"))
    assert conv(torch.zeros(2, 3, 8, 8)).shape == (2, 4)
    tokens = built({"name": toy("data.py:modadd"), "args": {"modulus": 5}}, name="mlp", args={"width": 4})
    assert tokens(torch.zeros(2, 2, dtype=torch.int64)).shape == (2, 5)
    assert built({"name": "blobs"}, name="mlp", args={"classes": 9})[-1].out_features == 9  # type: ignore[index]


def test_all_models_are_the_same_for_a_seed() -> None:
    one, other = trainer(data=TEXT, models={"main": {"name": toy("models.py:CharGPT")}}, task="lm"), trainer("seed=4")
    again = trainer(data=TEXT, models={"main": {"name": toy("models.py:CharGPT")}}, task="lm")
    for name, value in one.models["main"].state_dict().items():
        assert torch.equal(value, again.models["main"].state_dict()[name])
    assert not torch.equal(other.models["main"][1].weight, trainer().models["main"][1].weight)  # type: ignore[index]


# First values --------------------------------------------------------------------------------------------------------


def initialised(scheme: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 16))
    initialise(model, scheme)
    return model


def first(scheme: str) -> torch.Tensor:
    return initialised(scheme).get_parameter("0.weight").detach()


def test_schemes() -> None:
    uniform = first("xavier_uniform")
    assert float(uniform.abs().max()) <= (6 / 96) ** 0.5
    assert float(uniform.std()) == pytest.approx((2 / 96) ** 0.5, rel=0.1)
    assert float(first("xavier_normal").std()) == pytest.approx((2 / 96) ** 0.5, rel=0.1)
    assert float(first("kaiming_normal").std()) == pytest.approx((2 / 64) ** 0.5, rel=0.1)
    assert float(first("kaiming_uniform").abs().max()) <= (6 / 64) ** 0.5
    rows = first("orthogonal")
    torch.testing.assert_close(rows @ rows.T, torch.eye(32), atol=1e-5, rtol=0)


def test_a_scheme_sets_biases_to_zero_and_leaves_norms_and_padding() -> None:
    model = initialised("xavier_uniform")
    assert not model.get_parameter("0.bias").any()
    assert model.get_parameter("1.weight").tolist() == [1.0] * 32
    table = nn.Embedding(4, 3, padding_idx=1)
    initialise(table, "xavier_uniform")
    assert not table.weight[1].any()
    assert bool(table.weight[0].any())
    before = nn.Linear(3, 3)
    kept = before.weight.clone()
    initialise(before, "default")
    assert torch.equal(before.weight, kept)


def test_a_scheme_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\ndef ones(model):\n    for p in model.parameters():\n        torch.nn.init.ones_(p)\n"
        "def bad(model):\n    raise ValueError('no such layer')\n"
    )
    made = trainer(models={"main": {"name": "mlp", "init": f"{tmp_path / 'own.py'}:ones"}})
    assert all(bool((p == 1).all()) for p in made.models["main"].parameters())
    with pytest.raises(UserCodeFailed, match="no such layer"):
        trainer(models={"main": {"name": "mlp", "init": f"{tmp_path / 'own.py'}:bad"}})


# The user's own ------------------------------------------------------------------------------------------------------


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self, inputs, classes, bias=True):\n       "
        " super().__init__(inputs[0], classes, bias)\ndef broken(inputs):\n    raise RuntimeError('out of ideas')\ndef"
        " text():\n    return 'model'\n"
    )
    own = f"{tmp_path / 'own.py'}"
    made = trainer(models={"main": {"name": f"{own}:Net", "args": {"bias": False}}})
    take(made, 2)
    assert list(made.models["main"].state_dict()) == ["weight"]
    with pytest.raises(UserCodeFailed, match=r"(?s)own.py:broken raised RuntimeError: out of ideas.*line 6") as caught:
        trainer(models={"main": {"name": f"{own}:broken"}})
    assert "not in ckptool" in caught.value.fix
    with pytest.raises(UsageError, match=r"returned str, not a torch\.nn\.Module"):
        trainer(models={"main": {"name": f"{own}:text"}})
    with pytest.raises(UsageError, match=r"(?s)has no Nett.*It has: Net"):
        trainer(models={"main": {"name": f"{own}:Nett"}})
    with pytest.raises(UsageError, match=r"(?s)mlp does not take.*It takes: inputs"):
        trainer(models={"main": {"name": "mlp", "args": {"hiden": [3]}}})
    (tmp_path / "bad.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(UserCodeFailed, match="nothing_of_that_name"):
        trainer(models={"main": {"name": f"{tmp_path / 'bad.py'}:Net"}})


# From a checkpoint ---------------------------------------------------------------------------------------------------


def test_a_run_starts_from_a_checkpoint_and_goes_on_without_it(tmp_path: Path) -> None:
    models = {"main": CONV}
    run_to_end(tmp_path / "first", "train.steps=5", data=IMAGES, models=models)
    source = tmp_path / "weights.pt"
    tree = torch.load(tmp_path / "first/run/checkpoints/step-00000005.pt", weights_only=True)
    torch.save(tree["model_state_dict"], source)
    warm = {"main": {**CONV, "from": str(source)}}
    made = trainer(data=IMAGES, models=warm)
    for name, value in made.models["main"].state_dict().items():
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
    assert "1 skipped, of another shape: head.weight (f32 [9, 4] for f32 [4, 4])" in told
    assert "1 not in it: head.bias" in told
    assert "1 not in the model: old" in told


WEIGHTS = {
    "other names": {"a.weight": torch.ones(3, 3)},
    "another shape": {"1.weight": torch.ones(3, 3), "1.bias": torch.ones(6)},
    "some": {"1.bias": torch.ones(6)},
    "no weights": [1],
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("strict", [True, False])
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
