"""Older state dicts: what stock torch loads strictly is not called missing, by any verb; what it refuses is."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ckptool
from ckptool.errors import PlanRefused
from tests.support.looped import looped

State = dict[str, Any]


class Fused(nn.Module):
    """A module with a convolution and a BatchNorm fused for quantization-aware training."""

    def __init__(self) -> None:
        super().__init__()
        qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
        self.block = torch.ao.nn.intrinsic.qat.ConvBn2d(3, 4, 1, qconfig=qconfig)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.ones(2))


def norms() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "norms": norms,
    "sync": lambda: nn.SyncBatchNorm(4),
    "tracking instance norm": lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
    "instance norm": lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
    "spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 2))),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "lstm": lambda: nn.LSTM(3, 2),
    "fused": Fused,
    "scalar": Scalar,
}


def without_metadata(state: State) -> State:
    return dict(state)


def without_counters(state: State) -> State:
    return {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}


def version_1_without_counters(state: Any) -> State:
    made = OrderedDict(without_counters(state))
    made._metadata = {k: {**v, "version": 1} for k, v in state._metadata.items()}  # type: ignore[attr-defined]
    return made


def version_2_without_counters(state: Any) -> State:
    made = OrderedDict(without_counters(state))
    made._metadata = state._metadata  # type: ignore[attr-defined]
    return made


def one_counter_less(state: State) -> State:
    gone = next((key for key in state if key.endswith("num_batches_tracked")), None)
    return {key: value for key, value in state.items() if key != gone}


def old_weight_norm(state: State) -> State:
    names = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    return {_replaced(key, names): value for key, value in state.items()}


def old_spectral_norm(state: State) -> State:
    made = {key: value for key, value in state.items() if not key.endswith("weight_v")}
    return {**made, **{key[:-5]: value / 2 for key, value in made.items() if key.endswith("weight_orig")}}


def old_fused(state: State) -> State:
    names = {"bn.weight": "gamma", "bn.bias": "beta"} | {
        f"bn.{n}": n for n in ("running_mean", "running_var", "num_batches_tracked")
    }
    return {_replaced(key, names): value for key, value in state.items()}


def old_observers(state: State) -> State:
    return {key: value for key, value in state.items() if not key.endswith(".eps")}


def old_scalars(state: State) -> State:
    return {
        key: value.reshape(1) if value.dim() == 0 and value.is_floating_point() else value
        for key, value in state.items()
    }


def statistics_of_instance_norm(state: State) -> State:
    return {**state, "0.running_mean": torch.zeros(3), "0.running_var": torch.ones(3)}


def without_bias(state: State) -> State:
    return {key: value for key, value in state.items() if not key.endswith("bias")}


def _replaced(key: str, names: dict[str, str]) -> str:
    return next((key.removesuffix(new) + old for new, old in names.items() if key.endswith(new)), key)


ERAS = (
    without_metadata,
    without_counters,
    version_1_without_counters,
    version_2_without_counters,
    one_counter_less,
    old_weight_norm,
    old_spectral_norm,
    old_fused,
    old_observers,
    old_scalars,
    statistics_of_instance_norm,
    without_bias,
)
CASES = list(itertools.product(MODELS, ERAS))


def stock_loads(model: nn.Module, state: State) -> bool:
    try:
        copy.deepcopy(model).load_state_dict(copy.copy(state), strict=True)
    except RuntimeError:
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@looped(("name", "era"), CASES)
def test_missing_is_what_torch_misses(name: str, era: Callable[[State], State], tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved, model = MODELS[name](), MODELS[name]()
    state = era(saved.state_dict())
    torch.save(state, tmp_path / "old.pt")
    torch.save(model.state_dict(), tmp_path / "new.pt")
    loads = stock_loads(model, state)
    found = ckptool.doctor(tmp_path / "old.pt", against=tmp_path / "new.pt")
    assert found.loads is loads, [finding.what for finding in found.findings]
    report = ckptool.warm_start(tmp_path / "old.pt", tmp_path / "new.pt", strict=True)
    assert report.accepted is loads or (report.accepted and era is old_scalars), report.refused
    before = copy.deepcopy(model.state_dict())
    if not loads:
        with pytest.raises(PlanRefused):
            ckptool.load_into(model, tmp_path / "old.pt", strict=True)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        return
    ckptool.load_into(model, tmp_path / "old.pt", strict=True)
    stock = MODELS[name]()
    stock.load_state_dict(before)
    stock.load_state_dict(copy.copy(state))
    computed = era is old_spectral_norm  # torch solves for the second vector; the power iteration does that anyway
    for key, value in stock.state_dict().items():
        if isinstance(value, torch.Tensor) and not (computed and key.endswith("_v")):
            assert torch.equal(value, model.state_dict()[key]), key


def test_safetensors_have_no_versions(tmp_path: Path) -> None:
    state = without_counters(norms().state_dict())
    safetensors.torch.save_file(state, tmp_path / "old.safetensors")
    torch.save(norms().state_dict(), tmp_path / "new.pt")
    report = ckptool.warm_start(tmp_path / "old.safetensors", tmp_path / "new.pt", tmp_path / "out.pt", strict=True)
    assert report.accepted and not report.missing and len(report.supplied) == 2
    norms().load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))


def test_counters_on_the_meta_device_begin_at_zero(tmp_path: Path) -> None:
    torch.save(without_counters(norms().state_dict()), tmp_path / "old.pt")
    with torch.device("meta"):
        model = norms()
    ckptool.load_into(model, tmp_path / "old.pt", strict=True)
    assert model.get_buffer("1.num_batches_tracked").item() == 0 and not any(p.is_meta for p in model.parameters())
