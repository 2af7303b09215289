"""`save_for_cpu`: a module's weights as anyone can load them, without wrappers and without its devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import ckptool
from ckptool.errors import OutputExists
from fixtures.make import TiedLanguageModel, mlp
from tests.support.live_models import assert_same_state, compiled


@pytest.mark.parametrize(
    "wrap",
    [lambda model: model, nn.DataParallel, compiled, swa_utils.AveragedModel],
    ids=["bare", "dp", "compiled", "average"],
)
def test_save_for_cpu(tmp_path: Path, wrap: Any) -> None:
    model, out = mlp(), tmp_path / "cpu.pt"
    ckptool.save_for_cpu(wrap(model), out)
    state = torch.load(out, weights_only=True)
    fresh = mlp()
    fresh.load_state_dict(state, strict=True)
    assert_same_state(fresh, model.state_dict())
    assert state._metadata["bn"] == {"version": 2}
    with pytest.raises(OutputExists):
        ckptool.save_for_cpu(model, out)
    ckptool.save_for_cpu(model, out, overwrite=True)


def test_save_for_cpu_of_wrapped_submodules(tmp_path: Path) -> None:
    model = nn.Sequential(compiled(nn.Linear(2, 2)), nn.Module())
    model[1].module = nn.Linear(2, 2)  # one's own name
    ckptool.save_for_cpu(model, tmp_path / "cpu.safetensors")
    assert set(ckptool.load(tmp_path / "cpu.safetensors")) == {"0.weight", "0.bias", "1.module.weight", "1.module.bias"}


def test_save_for_cpu_keeps_ties_and_other_devices_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    ckptool.save_for_cpu(TiedLanguageModel(), tmp_path / "cpu.pt")
    checkpoint = ckptool.open(tmp_path / "cpu.pt")
    assert {tensor.location for tensor in checkpoint.tree.values()} == {"cpu"}
    assert checkpoint["head.weight"].storage is checkpoint["embed.weight"].storage
