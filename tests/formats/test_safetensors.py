"""`safetensors`: the stock library reads what is written, and what it would not write is refused or noticed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.dtypes import DTYPES
from ckptool.errors import Ambiguous, BadTensor, CkptoolError, Corrupt, LimitExceeded, Truncated, Unsupported
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


# Hostile headers ------------------------------------------------------------------------------------------------------


def made(header: Any, data: bytes = b"", path: Path = Path(), size: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return written((len(raw) if size is None else size).to_bytes(8, "little") + raw + data, path / "a.safetensors")


def tensor(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


W = tensor()
TWO = json.dumps({"w": W})[:-1] + "," + json.dumps({"w": W})[1:]
HEADERS: dict[str, tuple[Any, bytes, type[CkptoolError]]] = {
    "119 longer than the file": (b'{"w":', b"", Corrupt),
    "120 not JSON": (b'{"w" 1}', b"", Corrupt),
    "120 not UTF-8": (b'{"\xff": 1}', b"", Corrupt),
    "120 NaN": (b'{"w": NaN}', b"", Corrupt),
    "120 half a surrogate pair": (b'{"\\ud800": ' + json.dumps(W).encode() + b"}", bytes(4), Corrupt),
    "121 a name twice": (TWO.encode(), bytes(4), Ambiguous),
    "121 a field twice": (
        b'{"w": {"dtype": "F32", "dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}',
        bytes(4),
        Ambiguous,
    ),
    "122 nested": (b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", Corrupt),
    "122 a huge integer": (
        b'{"w": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}',
        bytes(4),
        Corrupt,
    ),
    "122 a float in the shape": ({"w": tensor(shape=[1.0])}, bytes(4), BadTensor),
    "122 a bool in the shape": ({"w": tensor(shape=[True])}, bytes(4), BadTensor),
    "122 a negative shape": ({"w": tensor(shape=[-1])}, bytes(4), BadTensor),
    "122 a shape that is a number": ({"w": tensor(shape=4)}, bytes(4), Corrupt),
    "123 overlap": ({"w": W, "v": tensor(offsets=(2, 6))}, bytes(6), Corrupt),
    "123 the same bytes twice": ({"w": W, "v": W}, bytes(4), Corrupt),
    "123 a hole": ({"w": W, "v": tensor(offsets=(8, 12))}, bytes(12), Corrupt),
    "123 a hole at the start": ({"w": tensor(offsets=(4, 8))}, bytes(8), Corrupt),
    "123 reversed": ({"w": tensor(offsets=(4, 0))}, bytes(4), Corrupt),
    "123 negative": ({"w": tensor(offsets=(-4, 0))}, bytes(4), Corrupt),
    "123 text": ({"w": tensor(offsets=("0", "4"))}, bytes(4), Corrupt),
    "123 three": ({"w": tensor(offsets=(0, 2, 4))}, bytes(4), Corrupt),
    "124 trailing": ({"w": W}, bytes(5), Corrupt),
    "124 short": ({"w": W}, bytes(3), Truncated),
    "125 shape and bytes": ({"w": tensor(shape=[2])}, bytes(4), BadTensor),
    "125 overflow": ({"w": tensor(shape=[1 << 32, 1 << 32])}, bytes(4), BadTensor),
    "125 an unknown type": ({"w": tensor(dtype="F7")}, bytes(4), Unsupported),
    "125 a type that is none": ({"w": tensor(dtype=None)}, bytes(4), Corrupt),
    "125 a type that is a list": ({"w": tensor(dtype=[])}, bytes(4), Corrupt),
    "125 half a byte": ({"w": tensor(dtype="F4", shape=[7])}, bytes(4), BadTensor),
    "126 metadata that is no text": ({"__metadata__": {"a": 1}, "w": W}, bytes(4), Corrupt),
    "126 metadata that is a list": ({"__metadata__": [], "w": W}, bytes(4), Corrupt),
    "120 a tensor that is a number": ({"w": 4}, bytes(4), Corrupt),
    "120 a tensor that is a list": ({"w": []}, b"", Corrupt),
}


@looped("name", HEADERS)
def test_a_hostile_header_is_refused_with_its_file_named(name: str, tmp_path: Path) -> None:
    header, data, error = HEADERS[name]
    with pytest.raises(error) as caught:
        read(made(header, data, tmp_path))
    assert str(tmp_path) in caught.value.what


def test_header_lengths_that_lie_are_refused(tmp_path: Path) -> None:
    raw = json.dumps({"w": W}).encode()
    for size, error in (
        (len(raw) + 100, Truncated),
        (200_000_000, LimitExceeded),
        (1 << 39, LimitExceeded),
        (1 << 63, CkptoolError),
        (0, CkptoolError),
    ):
        with pytest.raises(error):
            read(made(raw, bytes(4), tmp_path, size))


def test_a_file_cut_at_every_length_is_refused(tmp_path: Path) -> None:
    data = converted({"w": values(3), "v": values(2, dtype=torch.int64)}, tmp_path).read_bytes()
    for size in range(len(data)):
        with pytest.raises(CkptoolError):
            read(written(data[:size], tmp_path / "b.safetensors"))


def test_every_byte_of_the_header_changed_gives_an_error_of_ours_or_what_stock_reads(tmp_path: Path) -> None:
    data = converted({"w": values(3), "v": values(2, dtype=torch.int64), "n": values(0)}, tmp_path).read_bytes()
    chosen = random.Random(1)
    agreed = 0
    for at in range(8 + int.from_bytes(data[:8], "little")):
        for value in {data[at] ^ 1, data[at] ^ 0x80, chosen.randrange(256)}:
            path = written(data[:at] + bytes([value]) + data[at + 1 :], tmp_path / "b.safetensors")
            try:
                tree = read(path).tree
            except CkptoolError:
                continue
            with safe_open(path, "pt") as stock:
                for name in stock.keys():  # noqa: SIM118
                    assert bytes(stock.get_tensor(name).reshape(-1).view(torch.uint8).numpy()) == tree[name].bytes()
                    agreed += 1
    assert agreed > 20
