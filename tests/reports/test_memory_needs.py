"""The memory line: sizes by arithmetic, judged by torch's own parameters, gradients and moments of Adam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptool.analysis.inspect import listing
from ckptool.analysis.memory import MemoryNeeds, memory_needs
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


def test_averages_and_several_sets_are_told_apart(tmp_path: Path) -> None:
    state = nn.Linear(4, 4).state_dict()
    ema = {key: value.clone() for key, value in state.items()}
    assert str(needs({"model": state, "ema": ema}, tmp_path)).startswith("20 parameters: 80 B f32; EMA 80 B; ")
    gan = {"generator": state, "discriminator": nn.Linear(2, 2).state_dict()}
    assert str(needs(gan, tmp_path)).startswith("26 parameters in 2 sets of weights: 104 B f32; 104 B to load")
    assert needs({"generator": state, "discriminator": state}, tmp_path).parameters == 20  # one memory


def test_nothing_is_said_that_is_not_known(tmp_path: Path) -> None:
    none = needs({"epoch": 3, "lr": 0.1}, tmp_path)
    assert (none.parameters, none.to_load, none.to_train, str(none)) == (None, None, None, "")
    layer = {f"{name}.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn) for name in "ab"}
    scaled = needs(layer | {f"{name}.weight_scale": torch.ones(1) for name in "ab"}, tmp_path)
    assert (scaled.parameters, scaled.to_train, scaled.to_load) == (None, None, 40)
    assert str(scaled) == "weights: 32 B f8_e4m3fn + 8 B f32; 40 B to load"
    sparse = needs({"a.weight": torch.eye(4).to_sparse_csr(), "a.bias": torch.ones(4)}, tmp_path)
    assert sparse.parameters is None and sparse.to_train is None and sparse.to_load
    adapter = {
        "base_model.model.q.lora_A.weight": torch.ones(2, 4),
        "base_model.model.q.lora_B.weight": torch.ones(4, 2),
    }
    assert needs(adapter, tmp_path).to_train is None  # its model is elsewhere
    assert "train" not in str(needs(adapter, tmp_path))


def test_bytes_behind_views_take_memory_when_loaded(tmp_path: Path) -> None:
    found = needs({"a.weight": torch.zeros(100, 4)[:2]}, tmp_path)
    assert found.to_load == 1600 and found.dtypes == {"f32": 32}
