"""Safetensors as live tensors: what the stock library gives, by our mapping or, to accelerators, by its own ways."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.bridge import to_live
from ckptool.bridge.tensors import untyped
from ckptool.checkpoint.dtypes import BY_SAFETENSORS
from tests.support.errors import refused
from tests.support.files import written
from tests.support.looped import looped
from tests.support.same import assert_same_objects

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
