"""The memory line: sizes by arithmetic, judged by torch's own parameters, gradients and moments of Adam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptool.analysis.inspect import listing
from ckptool.analysis.outline import MemoryNeeds, memory_needs
from tests.support.files import opened


def needs(value: Any, folder: Path, at: str = "") -> MemoryNeeds:
    return memory_needs(listing(opened(value, folder), at))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 4))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 4), nn.Linear(4, 20))
    model[2].weight = model[0].weight
    return model


MODELS = {"conv": conv, "tied": tied, "encoder": lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True)}
INPUTS = {"conv": torch.rand(2, 3, 8, 8), "tied": torch.tensor([[1, 2]]), "encoder": torch.rand(2, 3, 8)}


def nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["state_dict", "module"])
def test_numbers_are_those_of_torch(name: str, dtype: torch.dtype, form: str, tmp_path: Path) -> None:
    model = MODELS[name]().to(dtype)
    given = INPUTS[name]
    model(given if given.dtype == torch.int64 else given.to(dtype)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    optimizer.step()
    found = needs(model.state_dict() if form == "state_dict" else model, tmp_path)
    held = [*model.parameters(), *model.buffers()]
    gradients = [p.grad for p in model.parameters()]
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.to_load == sum(found.dtypes.values()) == nbytes(held)
    assert found.to_train == nbytes([*held, *gradients, *moments])
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    both = needs(saved, tmp_path)
    steps = [state["step"] for state in optimizer.state.values()]
    assert both.optimizer == nbytes([*moments, *steps]) and both.to_train == found.to_train
    assert both.optimizer_share == both.optimizer / (both.optimizer + nbytes(held))


def test_frozen_parameters_of_a_module_need_no_gradients(tmp_path: Path) -> None:
    model = conv()
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    trained = [p for p in model.parameters() if p.requires_grad]
    found = needs(model, tmp_path)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.to_load is not None and found.to_train == found.to_load + 3 * nbytes(trained)


def test_bytes_behind_views_take_memory_when_loaded(tmp_path: Path) -> None:
    found = needs({"a.weight": torch.zeros(100, 4)[:2]}, tmp_path)
    assert found.to_load == 1600 and found.dtypes == {"f32": 32}
