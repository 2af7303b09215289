"""`load_into`: a plan on a live module, all of it: the cases of the tutorials, ties, devices, wrappers, shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import ckptool
from ckptool.errors import PlanRefused, UsageError
from fixtures.make import mlp, train
from tests.support.files import saved
from tests.support.live_models import Classifier, assert_same_state, compiled

# The cases of the tutorials ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_renamed_backbone(tmp_path: Path, wrapper: str) -> None:
    """A rule is for keys without wrappers too."""
    trained, model = Classifier(), Classifier()
    state = {wrapper + name.replace("backbone", "encoder"): tensor for name, tensor in trained.state_dict().items()}
    report = ckptool.load_into(model, saved(state, tmp_path / "old.pt"), rename="encoder.* => backbone.*", strict=True)
    assert_same_state(model, trained.state_dict())
    assert report.share == 1


def in_dtype(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def test_a_float_checkpoint_into_a_half_model(tmp_path: Path) -> None:
    trained, model = mlp(), mlp().half()
    with torch.no_grad():
        trained.fc2.bias.fill_(1e6)
        trained.fc1.bias.fill_(0.5)
    report = ckptool.load_into(model, saved(trained.state_dict(), tmp_path / "float.pt"))
    assert_same_state(model, in_dtype(trained.state_dict(), torch.float16))
    lossy = {fact.target: (fact.exact, fact.changed, fact.overflowed) for fact in report.dtype_changes}
    assert lossy["fc2.bias"] == (False, 4, 4) and lossy["fc1.bias"] == (True, 0, 0) and lossy["fc1.weight"][0] is False


def test_an_extra_optimizer_is_no_part_of_the_model(tmp_path: Path) -> None:
    trained = mlp()
    adam = torch.optim.Adam(trained.parameters())
    train(trained, adam)
    file = saved(
        {"model": trained.state_dict(), "opt1": adam.state_dict(), "opt2": adam.state_dict()}, tmp_path / "two.pt"
    )
    model = mlp()
    assert ckptool.load_into(model, file, strict=True).share == 1
    with pytest.raises(UsageError, match="has 2 optimizers: opt1, opt2"):
        ckptool.load_into(model, file, optimizer=torch.optim.Adam(model.parameters()))


# Devices, wrappers ---------------------------------------------------------------------------------------------------


def test_a_meta_model_that_would_stay_without_values(tmp_path: Path) -> None:
    state = Classifier().state_dict()
    file = saved({name: tensor for name, tensor in state.items() if "head" not in name}, tmp_path / "backbone.pt")
    with torch.device("meta"):
        model = Classifier().half()
    with pytest.raises(PlanRefused, match="without values after it: head"):
        ckptool.load_into(model, file)
    with pytest.raises(PlanRefused, match="have no memory"):
        ckptool.load_into(model, file, assign=False)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    ckptool.load_into(model, file, missing="head.*")
    assert model.backbone[0].weight.dtype is torch.float16 and model.head.weight.device.type == "meta"
    assert torch.equal(model.backbone[0].weight, state["backbone.0.weight"].half())


def test_buffers_that_are_not_saved(tmp_path: Path) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.register_buffer("angles", torch.arange(4.0), persistent=False)

    file = saved(Rotary().state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        model = Rotary()
    report = ckptool.load_into(model, file, strict=True)
    assert [note.code for note in report.normalised] == ["meta-buffers"] and "angles" in str(report)


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, compiled, lambda model: nn.DataParallel(compiled(model)), swa_utils.AveragedModel],
    ids=["dp", "compiled", "dp(compiled)", "averaged"],
)
def test_wrapped_models(tmp_path: Path, wrap: Any) -> None:
    trained, model = mlp(), mlp()
    wrapped = wrap(model)
    report = ckptool.load_into(wrapped, saved(trained.state_dict(), tmp_path / "model.pt"))
    inner = wrapped.module if isinstance(wrapped, swa_utils.AveragedModel) else model
    assert_same_state(inner, trained.state_dict())
    assert len(report.loaded) == 9


# Shapes --------------------------------------------------------------------------------------------------------------


def test_pad_and_slice(tmp_path: Path) -> None:
    small, large = nn.Embedding(5, 4), nn.Embedding(8, 4)
    old = large.weight.detach().clone()
    report = ckptool.load_into(large, saved(small.state_dict(), tmp_path / "small.pt"), on_mismatch="pad")
    assert torch.equal(large.weight[:5], small.weight) and torch.equal(large.weight[5:], old[5:])
    assert report.share == 5 / 8 and report.mismatched[0].done == "padded"
    target = nn.Embedding(3, 4)
    report = ckptool.load_into(target, saved(large.state_dict(), tmp_path / "large.pt"), on_mismatch="slice")
    assert torch.equal(target.weight, large.weight[:3]) and report.share == 1
    with pytest.raises(PlanRefused, match="of another shape"):
        ckptool.load_into(nn.Embedding(9, 4), tmp_path / "large.pt", on_mismatch="slice")
    with pytest.raises(PlanRefused, match="of another shape"):
        ckptool.load_into(nn.Embedding(9, 3), tmp_path / "large.pt", on_mismatch="pad")


def test_memory_of_a_large_file(tmp_path: Path) -> None:
    """A file of 64 MB goes into a meta model without being read into memory of its own."""
    code = """
import sys, torch, ckptool
from torch import nn

def mine():
    with open("/proc/self/status") as status:
        return int([line.split()[1] for line in status if line.startswith("RssAnon")][0]) // 1024

with torch.device("meta"):
    model, small = nn.Linear(4096, 4096), nn.Linear(2, 2)
ckptool.load_into(small, sys.argv[2])
before = mine()
ckptool.load_into(model, sys.argv[1])
assert model.weight[0, 0] == 1 and model.bias[5] == 2
print(mine() - before)
"""
    large, small = tmp_path / "large.pt", saved(nn.Linear(2, 2).state_dict(), tmp_path / "small.pt")
    torch.save({"weight": torch.ones(4096, 4096), "bias": torch.full((4096,), 2.0)}, large)
    if not os.path.exists("/proc/self/status"):
        return
    done = subprocess.run(
        [sys.executable, "-c", code, str(large), str(small)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 24
