"""`safetensors`: the stock library reads what is written, and what it would not write is refused or noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.dtypes import DTYPES
from ckptool.errors import Unsupported
from ckptool.formats import read
from ckptool.formats import safetensors as ours
from fixtures.traps import TRAPS, values
from tests.formats import contract
from tests.support.files import carry_out, torch_bytes, written
from tests.support.looped import looped


def converted(tree: Any, folder: Path) -> Path:
    return carry_out(ours.write(read(written(torch_bytes(tree), folder / "a.pt"))), folder / "a.safetensors")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [
        bytes(t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())
        for t in (a, b)
    ]
    return a.dtype == b.dtype and a.shape == b.shape and raw[0] == raw[1]


# The law --------------------------------------------------------------------------------------------------------------


@looped("name", TRAPS)
def test_every_trap_is_written_bit_for_bit_or_refused_by_name(name: str, tmp_path: Path) -> None:
    value = TRAPS[name]()
    checkpoint = read(written(torch_bytes(value), tmp_path / "a.pt"))
    error = contract.refusal(lambda: ours.write(checkpoint))
    if error is not None:
        assert error.code == "unsupported"
        return
    contract.round_trip(
        ours, read(carry_out(ours.write(checkpoint), tmp_path / "a.safetensors")), tmp_path / "b.safetensors"
    )
    with safe_open(tmp_path / "a.safetensors", "pt") as stock:
        assert stock.metadata()["format"] == "pt"
        for key, tensor in value.items():
            stored = key if key in stock.keys() else stock.metadata()[key]  # noqa: SIM118 (not a dictionary)
            assert same_bits(stock.get_tensor(stored), tensor), key


@looped("dtype", [d for d in DTYPES if d.safetensors], ids=lambda d: d.name)
def test_what_safetensors_writes_is_read_in_every_dtype(dtype: Any, tmp_path: Path) -> None:
    tensors = {
        "w": values(4, 6, dtype=getattr(torch, dtype.torch)),
        "e": values(0, 2, dtype=getattr(torch, dtype.torch)),
    }
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", {"format": "pt", "note": "é"})
    checkpoint = read(tmp_path / "a.safetensors")
    assert checkpoint.metadata == {"format": "pt", "note": "é"}
    for name, tensor in tensors.items():
        entry = checkpoint.tree[name]
        assert entry.dtype is dtype and entry.shape == tuple(tensor.shape) and entry.stride == tensor.stride()
        assert entry.bytes() == bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    contract.round_trip(ours, checkpoint, tmp_path / "b.safetensors")


def test_a_tensor_that_is_called_as_the_format_is_no_tie(tmp_path: Path) -> None:
    tensors = {"pt": values(3), "w": values(2)}
    safetensors.torch.save_file(tensors, tmp_path / "stock.safetensors", {"format": "pt"})
    for path in (tmp_path / "stock.safetensors", converted(tensors, tmp_path)):
        assert read(path).tree.keys() == safetensors.torch.load_file(path).keys() == tensors.keys()
    tied = {"pt": tensors["pt"], "format": tensors["pt"]}
    with pytest.raises(Unsupported, match="format"):
        converted(tied, tmp_path)


@pytest.mark.parametrize("name", ["\ud800", "a\udfff"])
def test_a_name_that_is_no_text_is_refused(name: str, tmp_path: Path) -> None:
    checkpoint = read(written(torch_bytes({"w": values(2)}), tmp_path / "a.pt"))
    with pytest.raises(Unsupported, match="not Unicode"):
        ours.write(Checkpoint({name: checkpoint.tree["w"]}, "torch-zip"))


def test_odd_names_reach_stock_unchanged(tmp_path: Path) -> None:
    names = ["", "é\n\x1b[31m", "\0", "a/b~", '"', "\\", "😀", " "]
    path = converted({name: values(2) for name in names}, tmp_path)
    with safe_open(path, "pt") as stock:
        assert set(stock.keys()) == set(names)
    assert list(read(path).tree) == names
