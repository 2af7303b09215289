"""Safetensors as live tensors: what the stock library gives, by our mapping or, to accelerators, by its own ways."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.bridge import to_live
from ckptool.bridge.storages import untyped
from ckptool.checkpoint.dtypes import BY_SAFETENSORS
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
        except (
            SafetensorError,
            AttributeError,
            KeyError,
            RuntimeError,
            TypeError,
        ):  # a dtype that the stock library or this torch lacks, or packs
            expected = None
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
def stock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Takes the CPU for an accelerator, and lists what the stock library gave."""
    given: list[Any] = []

    def noted(checkpoint: Any, device: Any) -> Any:
        given.append(real(checkpoint, device))
        return given[-1]

    real = to_live.load_plain
    monkeypatch.setattr(to_live, "_is_quicker", lambda device: device.type == "cpu")
    monkeypatch.setattr("ckptool.bridge.to_live.load_plain", noted)
    yield given


def test_a_plain_file_is_loaded_by_the_stock_library(stock: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(VALUE, path)
    made = ckptool.load(path, "cpu")
    assert made is stock[0]
    assert_same_objects(load_file(path), made)
    assert list(made) == list(ckptool.open(path).tree)


def test_what_is_not_plain_is_loaded_by_ours(stock: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(VALUE, path)
    assert ckptool.load(f"{path}#b", "cpu").shape == (2, 3)
    assert ckptool.load(ckptool.open(path), {"cpu": "cpu"}).keys() == VALUE.keys()
    tied = {"a": VALUE["b"], "b": VALUE["b"]}
    ckptool.save(tied, tmp_path / "tied.safetensors")
    made = ckptool.load(tmp_path / "tied.safetensors", "cpu")
    assert made["a"].data_ptr() == made["b"].data_ptr()
    ckptool.save({"w": VALUE["b"], "epoch": 3}, tmp_path / "whole.pt")
    assert ckptool.load(tmp_path / "whole.pt", "cpu")["epoch"] == 3
    assert stock == [None] * len(stock)


def test_our_reader_judges_before_the_stock_library(stock: list[Any], tmp_path: Path) -> None:
    raw = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}'
    path = written(len(raw).to_bytes(8, "little") + raw + b"a", tmp_path / "x.safetensors")
    with pytest.raises(ckptool.CkptoolError, match="twice"):
        ckptool.load(path, "cpu")
    assert not stock


def test_where_the_stock_library_fails_ours_goes_on(
    stock: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(VALUE, path)
    monkeypatch.setattr(to_live, "_name", lambda device: "no-such-device")
    assert_same_objects(load_file(path), ckptool.load(path, "cpu"))
    assert stock == [None]


def test_prefetch_is_used_as_safetensors_09_documents_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines without CUDA, and with an older safetensors, by a stand-in for its loader."""
    path = tmp_path / "x.safetensors"
    save_file(VALUE, path)

    class Loader:
        def __enter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(sorted(load_file(path).items(), reverse=True))

        def __exit__(self, *_: object) -> None: ...

    class Handle:
        def __init__(self, name: str, framework: str, device: str, *, backend: str) -> None:
            assert (framework, device, backend) == ("pt", "cuda:1", "pread")

        def __enter__(self) -> Handle:
            return self

        def __exit__(self, *_: object) -> None: ...

        def prefetch(self) -> Loader:
            return Loader()

    monkeypatch.setattr("safetensors.safe_open", Handle)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(untyped.get_device_module("cuda"), "is_available", lambda: True)
    made = to_live.load_plain(ckptool.open(path), torch.device("cuda"))
    assert made is not None
    assert list(made) == list(ckptool.open(path).tree)
    assert to_live.load_plain(ckptool.open(path), torch.device("cuda:2")) is None


@pytest.mark.skipif(not torch.cuda.is_available() or not hasattr(safe_open, "prefetch"), reason="needs CUDA")
def test_prefetch_to_a_device(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(VALUE, path)
    made = ckptool.load(path, "cuda")
    assert_same_objects(load_file(path), {name: value.cpu() for name, value in made.items()})
