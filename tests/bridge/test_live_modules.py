"""Modules of many kinds: `load_into` and `warm_start` do to them what `load_state_dict` does, or refuse."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, prune

import ckptool
from ckptool.errors import PlanRefused, Unsupported
from tests.support.looped import looped
from tests.support.same import assert_same_objects


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, flat = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), torch.randn(10)
        self.head.weight = self.embedding.weight
        self.first, self.rest = nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[4:])


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.empty = nn.Parameter(torch.randn(())), nn.Parameter(torch.empty(0, 3))
        self.turned, self.frozen = (
            nn.Parameter(torch.randn(3, 4).t()),
            nn.Parameter(torch.randn(2), requires_grad=False),
        )
        for dtype in ("complex64", "float16", "bfloat16", "float64", "float8_e4m3fn", "int16", "bool"):
            self.register_buffer(f"of {dtype}", torch.randn(3, dtype=torch.cfloat).real.to(getattr(torch, dtype)))
        self.register_buffer("unsaved", torch.randn(2), persistent=False)
        self.register_buffer("none", None)
        self.add_module("a b/ö", nn.Linear(1, 1))


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5)


def quantized(make: Callable[[Any], Any], config: Any) -> nn.Module:
    model = nn.Sequential(quantization.QuantStub(), nn.Conv2d(1, 2, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model.qconfig = config
    model[3].qconfig = None
    return make(model)


def trained(model: nn.Module) -> nn.Module:
    return quantization.prepare_qat(model.train())


def static(model: nn.Module) -> nn.Module:
    prepared = quantization.prepare(model.eval())
    prepared(torch.randn(2, 1, 5, 5))
    return quantization.convert(prepared)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied, "odd": Odd, "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)), "pruned": pruned,
    "half": lambda: nn.Linear(3, 2).half(), "batch norm": lambda: nn.BatchNorm2d(2), "lstm": lambda: nn.LSTM(3, 4, 2),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8), "script": lambda: torch.jit.script(nn.Linear(3, 3)),
    "parallel": lambda: nn.DataParallel(Tied()), "compiled": lambda: torch.compile(nn.DataParallel(nn.BatchNorm1d(3))),
    "inside": lambda: nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.DataParallel(nn.Linear(2, 2))),
    "average": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
    "to be quantized": lambda: quantized(trained, quantization.get_default_qat_qconfig("fbgemm")),
}  # fmt: skip


def made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


@looped("name", MODULES)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("on_meta", [False, True])
def test_as_load_state_dict(name: str, on_meta: bool, tmp_path: Path) -> None:
    make = MODULES[name]
    given = made(make, 1)
    torch.save(given.state_dict(), tmp_path / "a.pt")
    for source in (tmp_path / "a.pt", given.state_dict(), given, ckptool.open(tmp_path / "a.pt")):
        found, expected = made(make, 2), made(make, 2)
        if on_meta:
            found.to("meta")
        parameters, grads = [*found.parameters()], [value.requires_grad for value in found.parameters()]
        assert ckptool.load_into(found, source).applied
        expected.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=False))
        assert_same_objects(dict(expected.state_dict()), dict(found.state_dict()), storages=False)
        assert [value.requires_grad for value in found.parameters()] == grads
        assert on_meta or all(map(lambda a, b: a is b, parameters, found.parameters()))
        state = ckptool.warm_start(source if isinstance(source, dict) else given.state_dict(), made(make, 2))
        (other := made(make, 3)).load_state_dict(state)
        assert_same_objects(dict(given.state_dict()), dict(other.state_dict()), storages=False)
        assert vars(state)["_metadata"].items() <= vars(given.state_dict())["_metadata"].items()


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "dynamic": lambda: quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4), nn.Embedding(9, 9)), {nn.Linear}),
    "static": lambda: quantized(static, quantization.get_default_qconfig("fbgemm")),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)),
}


@looped("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_only_their_own_code_fills_is_refused(name: str) -> None:
    """Rather than called loaded, with the weights that the model happens to have."""
    given, model = made(REFUSED[name], 1), made(REFUSED[name], 2)
    before = copy.deepcopy([value for value in model.state_dict().values() if type(value) is torch.Tensor])
    with pytest.raises((Unsupported, PlanRefused)):
        ckptool.load_into(model, given.state_dict())
    with pytest.raises(Unsupported, match="not plain tensors"):
        ckptool.warm_start(given.state_dict(), model)
    after = [value for value in model.state_dict().values() if type(value) is torch.Tensor]
    assert_same_objects(before, after, storages=False)
