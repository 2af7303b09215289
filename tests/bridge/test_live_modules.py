"""Modules of many kinds: `load_into` and `warm_start` do to them what `load_state_dict` does, or refuse."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, prune

import ckptool
from ckptool.bridge import to_live
from ckptool.bridge.tensors import untyped
from ckptool.checkpoint.dtypes import BY_SAFETENSORS
from ckptool.errors import PlanRefused, Unsupported
from tests.support.errors import refused
from tests.support.files import written
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


# From safetensors -----------------------------------------------------------------------------------------------------
# Safetensors as live tensors: what the stock library gives, by our mapping or, to accelerators, by its own ways.


VALUE = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.zeros(0, 3), "c": torch.tensor(7), "d": torch.ones(3).half()}


def _file(fields: dict[str, tuple[str, list[int], bytes]], path: Path, pad: int = 0) -> Path:
    """A file with these dtypes, shapes and bytes, one after the other whatever that does to their alignment."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in fields.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    raw = json.dumps(header).encode() + b" " * pad
    return written(len(raw).to_bytes(8, "little") + raw + data, path)


@pytest.mark.parametrize("mmap", [True, False])
@looped("kind", sorted(BY_SAFETENSORS))
def test_every_dtype_at_every_alignment(kind: str, mmap: bool, tmp_path: Path) -> None:
    dtype = BY_SAFETENSORS[kind]
    factor = 2 if kind == "F4" else 1
    for pad in range(9):
        fields = {
            "one": (kind, [factor] if factor > 1 else [], bytes(range(dtype.itemsize))),
            "odd": ("U8", [3], b"abc"),
            "many": (kind, [2, 4 * factor], bytes(i % 2 for i in range(8 * dtype.itemsize))),
            "none": (kind, [0, 2], b""),
        }
        path = _file(fields, tmp_path / "x.safetensors", pad)
        try:
            expected = load_file(path)
        except (SafetensorError, AttributeError, KeyError, RuntimeError, TypeError):
            expected = None  # a dtype that the stock library or this torch lacks, or packs
        made = ckptool.load(path, mmap=mmap)
        for name, (_, shape, raw) in fields.items():
            tensor = made[name]
            assert torch_bytes_of(tensor) == raw
            assert math.prod(tensor.shape) * (1 if name == "odd" else factor) == math.prod(shape)
            assert tensor.data_ptr() % min(tensor.element_size(), 8) == 0
        if expected is not None:
            assert_same_objects(expected, {name: made[name] for name in expected})


def torch_bytes_of(tensor: torch.Tensor) -> bytes:
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return bytes(raw.tolist())


# The stock library's ways ---------------------------------------------------------------------------------------------


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Stands in for accelerators, and for safetensors' readers to them as 0.9 documents those; they fail as it says."""
    failures: list[Exception] = []

    class Handle:
        def __init__(self, name: str, framework: str, device: str, *, backend: str) -> None:
            assert (framework, backend) == ("pt", "pread") and device in ("cuda:1", "mps")
            if failures:
                raise failures[0]
            self.found = dict(sorted(load_file(name).items(), reverse=True))

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def get_tensors(self) -> dict[str, torch.Tensor]:
            return self.found

        def prefetch(self) -> Any:
            return nullcontext(iter(self.found.items()))

    monkeypatch.setattr("safetensors.safe_open", Handle)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for kind in ("cuda", "mps"):
        monkeypatch.setattr(untyped.get_device_module(kind), "is_available", lambda: True)
    return failures


def test_a_plain_file_is_loaded_by_the_stock_library_and_all_else_by_ours(
    fails: list[Exception], tmp_path: Path
) -> None:
    save_file(VALUE, path := tmp_path / "x.safetensors")
    ckptool.save({"a": VALUE["b"], "b": VALUE["b"]}, tmp_path / "tied.safetensors")
    ckptool.save({"w": VALUE["b"], "epoch": 3}, tmp_path / "whole.pt")
    for device in map(torch.device, ("cuda", "cuda:1", "mps")):
        made = to_live.load_plain(ckptool.open(path), device)
        assert made is not None and list(made) == list(ckptool.open(path).tree)
        assert_same_objects(load_file(path), made)
        for other in (f"{path}#b", tmp_path / "tied.safetensors", tmp_path / "whole.pt"):
            assert to_live.load_plain(ckptool.open(other), device) is None, other
    for nowhere in (None, torch.device("cpu")):
        assert to_live.load_plain(ckptool.open(path), nowhere) is None
    for error in (SafetensorError("no"), RuntimeError("no"), TypeError("no"), OSError("no")):
        fails[:] = [error]
        assert to_live.load_plain(ckptool.open(path), torch.device("cuda")) is None


def test_our_reader_judges_before_the_stock_library(fails: list[Exception], tmp_path: Path) -> None:
    fails.append(AssertionError("asked"))
    raw = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}'
    path = written(len(raw).to_bytes(8, "little") + raw + b"a", tmp_path / "x.safetensors")
    refused(ckptool.CkptoolError, tmp_path, lambda: ckptool.load(path, "mps"), "twice")


@pytest.mark.skipif(not torch.cuda.is_available() or not hasattr(safe_open, "prefetch"), reason="needs CUDA")
def test_prefetch_to_a_device(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(VALUE, path)
    made = ckptool.load(path, "cuda")
    assert_same_objects(load_file(path), {name: value.cpu() for name, value in made.items()})
