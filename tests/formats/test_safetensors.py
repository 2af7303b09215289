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
from ckptool.errors import Ambiguous, CkptoolError, Unsupported
from ckptool.formats import read, strict_json
from ckptool.formats import safetensors as ours
from ckptool.formats.safetensors import METADATA
from ckptool.formats.strict_json import parse_object
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


# Headers that are read many members at once ---------------------------------------------------------------------------


KINDS = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1, "F8_E4M3": 1, "F4": 0.5, "C64": 8}


def _header(rng: random.Random, count: int) -> dict[str, Any]:
    """A sound header of `count` tensors."""
    fields: dict[str, Any] = {METADATA: {"format": "pt"}} if rng.random() < 0.7 else {}
    at = 0
    for number in range(count):
        kind = rng.choice(list(KINDS))
        shape = [rng.choice((0, 1, 2, 4)) for _ in range(rng.randrange(4))]
        if kind == "F4":
            shape = [*shape, 4]
        size = KINDS[kind]
        for length in shape:
            size *= length
        fields[f"layer.{number}"] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + int(size)]}
        at += int(size)
    return fields


def _odd(rng: random.Random, fields: dict[str, Any]) -> str:
    """The header as JSON, with one thing in it that is not as writers write it."""
    name = rng.choice([name for name in fields if name != METADATA])
    entry, text = fields[name], json.dumps(fields, separators=rng.choice([(",", ":"), (", ", ": ")]))
    change = rng.randrange(14)
    if change == 0:
        entry["dtype"] = rng.choice(["F99", "f32", 3, None, ["F32"], {"F32": 1}, "F4"])
    elif change == 1:
        entry["shape"] = rng.choice([3, "ab", {"a": 1, "b": 2}, [True], [1.0], [-1], [[1]], [1 << 62], [0] * 65])
    elif change == 2:
        entry["data_offsets"] = rng.choice([[0], [0, 1, 2], "ab", {"a": 0, "b": 4}, [0.0, 4], [True, 4], [4, 0]])
    elif change == 3:
        fields[name] = dict(sorted(entry.items(), key=lambda item: rng.random()))
    elif change == 4:
        entry["extra"] = rng.choice([1, {"a": [1]}, "x" * rng.choice([5, 70_000])])
    elif change == 5:
        del entry[rng.choice(list(entry))]
    elif change == 6:
        fields[name] = rng.choice([[["dtype", "F32"], ["shape", []], ["data_offsets", [0, 4]]], 5, None, "text", []])
    elif change == 7:
        entry["data_offsets"] = [part + rng.choice([-1, 1, 8]) for part in entry["data_offsets"]]
    elif change == 8:
        fields[name + rng.choice(['},"', "},", '"', "\\", "\u00e9", "\ud800"])] = fields.pop(name)
    else:
        cut = rng.choice(['"shape"', "},", '"layer.', "[", "}"])
        at = rng.choice([i for i in range(len(text)) if text.startswith(cut, i)])
        put = {9: f'"{name}":{{}},', 10: "NaN,", 11: '"dtype":"F32",', 12: " \n\t", 13: ","}[change]
        return text[:at] + put + text[at:]
    return json.dumps(fields, separators=rng.choice([(",", ":"), (", ", ": ")]), ensure_ascii=rng.random() < 0.5)


def _judged(path: Path) -> Any:
    try:
        found = read(path)
    except CkptoolError as error:
        return type(error), error.what, error.why
    entries = [
        (name, entry.dtype, entry.shape, entry.stride, entry.storage.data.offset, entry.storage.data.length)
        for name, entry in found.tree.items()
    ]
    return entries, found.metadata, [note.message for note in found.notes]


@looped("seed", range(400))
def test_a_header_is_judged_as_member_by_member(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    fields = _header(rng, rng.choice([3, 40, 700]))
    length = max((entry["data_offsets"][1] for name, entry in fields.items() if name != METADATA), default=0)
    text = json.dumps(fields, separators=(",", ":")) if seed % 8 == 0 else _odd(rng, fields)
    raw = text.encode("utf-8", "surrogatepass")
    path = written(len(raw).to_bytes(8, "little") + raw + bytes(length), tmp_path / "x.safetensors")
    at_once = _judged(path)
    monkeypatch.setattr(strict_json, "_BATCH", 1 << rng.randrange(5, 15))
    in_small_batches = _judged(path)
    monkeypatch.setattr(strict_json, "_BATCH", 0)
    assert _judged(path) == at_once == in_small_batches
    assert seed % 8 or isinstance(at_once[0], list)


def test_the_name_that_stands_twice_is_said() -> None:
    assert parse_object(b'{"a": 1, "w": {"b": 2}}', "it") == {"a": 1, "w": {"b": 2}}
    for text in (b'{"a": 1, "w": 2, "w": 3}', b'{"x": {"a": 1, "w": 2, "w": 3}}'):
        with pytest.raises(Ambiguous, match="names w twice"):
            parse_object(text, "it")
