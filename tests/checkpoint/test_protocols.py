"""A checkpoint is a mapping, a tensor's entry is array-like: what Python, numpy and torch may ask of them."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ckptool
from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.files import Source
from ckptool.errors import Ambiguous, UsageError
from ckptool.formats import read
from fixtures.traps import TRAPS
from tests.support.errors import refused
from tests.support.files import load, saved, torch_bytes
from tests.support.looped import looped
from tests.support.processes import soon

WEIGHT = torch.randn(40, 6)
TREE = {
    "state_dict": {"fc.weight": WEIGHT, "half": WEIGHT.bfloat16(), "view": WEIGHT.t(), "step": torch.tensor(7)},
    "epoch": 3,
    "a/b": 1,
    "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "list": [torch.zeros(1), torch.zeros(2)]},
}


@pytest.fixture
def ckpt(tmp_path: Path) -> Checkpoint:
    torch.save(TREE, tmp_path / "a.pt")
    return ckptool.open(tmp_path / "a.pt")


@pytest.fixture
def entry(ckpt: Checkpoint) -> TensorEntry:
    found: TensorEntry = ckpt["state_dict"]["fc.weight"]
    return found


# A mapping ------------------------------------------------------------------------------------------------------------


def test_an_address_leads_to_what_keys_lead_to(ckpt: Checkpoint) -> None:
    assert ckpt["state_dict/fc.weight"] is ckpt["state_dict"]["fc.weight"]
    assert ckpt["optimizer/state/0/exp_avg"] is ckpt["optimizer"]["state"][0]["exp_avg"]
    assert ckpt["optimizer/list/1"].shape == (2,)
    assert "optimizer/state/0" in ckpt and "optimizer/state/1" not in ckpt
    assert ckpt["a/b"] == ckpt["a~1b"] == 1, "a key of that very name"


def test_a_key_and_an_address_that_read_the_same(tmp_path: Path) -> None:
    ckptool.save({"a": {"b": 1}, "a/b": 2}, tmp_path / "a.pt")
    ckpt = ckptool.open(tmp_path / "a.pt")
    assert ckpt["a/b"] == ckpt["a~1b"] == 2 and ckpt["a"]["b"] == 1, "a name is the key's, as in any mapping"
    assert dict(ckpt) == {"a": {"b": 1}, "a/b": 2}


def test_missing_many_keys_costs_nothing_until_the_error_is_read(tmp_path: Path) -> None:
    torch.save({"sd": {f"layers.{i}.weight": i for i in range(5_000)}}, tmp_path / "a.pt")
    names = ckptool.open(tmp_path / "a.pt")["sd"]
    with soon(2):
        for i in range(2_000):
            with pytest.raises(KeyError) as caught:
                names[f"layer.{i}.weight"]
    again = pickle.loads(pickle.dumps(caught.value))
    assert "Did you mean layers.1999.weight?" in str(caught.value) == str(again)


def test_every_tensor_by_its_address(ckpt: Checkpoint) -> None:
    found = ckpt.tensors()
    assert list(found)[:1] == ["state_dict/fc.weight"] and "optimizer/state/0/exp_avg" in found
    assert all(ckpt[name] is tensor for name, tensor in found.items())
    assert sum(tensor.numel for tensor in found.values()) == 40 * 6 * 3 + 1 + 2 + 3


def test_addresses_of_two_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({0: torch.ones(1), "0": torch.ones(2)}, tmp_path / "a.pt")
    refused(Ambiguous, tmp_path, lambda: ckptool.open(tmp_path / "a.pt").tensors(), "two tensors")


def test_a_list_or_a_tensor_at_the_top_has_no_names(tmp_path: Path) -> None:
    torch.save([torch.ones(2), {"w": torch.ones(3)}], tmp_path / "a.pt")
    ckpt = ckptool.open(tmp_path / "a.pt")
    assert ckpt["1/w"] is ckpt[1]["w"] and len(ckpt) == len(list(ckpt)) == 2 and "1/w" in ckpt
    refused(UsageError, tmp_path, lambda: dict(ckpt), r"ckpt\.tensors\(\)")
    assert repr(ckptool.open(part := f"{tmp_path / 'a.pt'}#1")) == f"<checkpoint {part} (torch-zip)>"
    assert repr(ckptool.open({})) == "<checkpoint (in memory)>"
    torch.save(torch.ones(2, 3), tmp_path / "b.pt")
    assert list(ckptool.open(tmp_path / "b.pt").tensors()) == [""]


def test_a_pickled_module_is_its_state_dict(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    torch.save(module, tmp_path / "a.pt")
    ckpt = ckptool.open(tmp_path / "a.pt")
    assert list(ckpt) == list(module.state_dict()) == list(ckpt.tensors())
    assert numpy.array_equal(ckpt["0.weight"], module[0].weight.detach())


# Closing --------------------------------------------------------------------------------------------------------------


def opened_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_without_a_name_stays_open(ckpt: Checkpoint) -> None:
    os.unlink(ckpt.source.path)  # type: ignore[union-attr]
    with ckpt:
        pass
    assert ckpt["state_dict/fc.weight"][0, 0] == WEIGHT[0, 0]


def test_a_folder_closes_all_its_files(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.ones(1000) for i in range(4)}
    ckptool.save(weights, tmp_path / "a.pt")
    ckptool.convert(tmp_path / "a.pt", f"{tmp_path}/shards/", shard_size="5KB")
    gc.collect()  # what other tests left
    before = opened_files()
    with ckptool.open(tmp_path / "shards") as ckpt:
        assert [numpy.asarray(each).sum() for each in ckpt.values()] == [1000] * 4
        assert opened_files() > before
    assert opened_files() == before


# Entries --------------------------------------------------------------------------------------------------------------

KEYS = [
    slice(3, 7), (..., 0), 2, -1, (slice(None), None), (slice(None, None, -2), -1), (3, 2),
    (slice(30, 2, -3), slice(1, None)), (None, ..., numpy.int64(2)), slice(50, 60), (slice(None), slice(0, 0)), ..., (),
    [1, 5], numpy.arange(40) % 3 == 0, (slice(2), [0, 1]), True,
]  # fmt: skip


@looped("key", KEYS, ids=str)
@pytest.mark.parametrize("name", ["fc.weight", "half", "view"])
def test_a_part_is_the_part_of_the_array(key: Any, name: str, ckpt: Checkpoint) -> None:
    whole = ckpt["state_dict"][name].numpy()
    try:
        expected = whole[key]
    except IndexError:
        with pytest.raises(IndexError):
            ckpt["state_dict"][name][key]
        return
    found = ckpt["state_dict"][name][key]
    assert type(found) is type(expected) and found.dtype == expected.dtype and found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    plain, into = Source.read, Source.read_into

    def read(self: Source, offset: int, length: int) -> bytes:
        counts.append(length)
        return plain(self, offset, length)

    def read_into(self: Source, offset: int, buffer: memoryview) -> None:
        counts.append(len(buffer))
        into(self, offset, buffer)

    monkeypatch.setattr(Source, "read", read)
    monkeypatch.setattr(Source, "read_into", read_into)
    return counts


@pytest.mark.parametrize("container", ["a.pt", "a.safetensors", "a.npz"])
def test_a_part_reads_its_bytes_alone(container: str, tmp_path: Path, bytes_read: list[int]) -> None:
    weight = torch.randn(2000, 1000)
    ckptool.save({"w": weight}, tmp_path / container)
    entry = ckptool.open(tmp_path / container)["w"]
    for key, most in ((slice(3, 7), 16_000), (5, 4_000), ((0, 0), 4), ((slice(0, 2), slice(0, 10)), 8_100)):
        entry[0, 0]  # a look at the header in front of the data
        bytes_read.clear()
        assert numpy.array_equal(entry[key], weight.numpy()[key])
        assert sum(bytes_read) <= most, key
    bytes_read.clear()
    half = entry.to("bf16")
    assert not bytes_read
    assert numpy.array_equal(half[3:7].astype("f4"), weight[3:7].bfloat16().float())
    assert sum(bytes_read) <= 16_000


def test_as_an_array(entry: TensorEntry) -> None:
    assert numpy.array_equal(numpy.asarray(entry), WEIGHT)
    assert numpy.asarray(entry, dtype="f8").dtype == numpy.float64 == numpy.array(entry, "f8").dtype
    assert entry.__array__(copy=True).flags.writeable
    with pytest.raises(ValueError, match="copy"):
        entry.__array__(copy=False)
    assert numpy.allclose(entry, WEIGHT) and (WEIGHT.numpy() - entry == 0).all()
    assert float(numpy.linalg.norm(entry)) == pytest.approx(float(WEIGHT.norm()))


def test_as_a_tensor_of_torch(tmp_path: Path) -> None:
    """Also what torch itself gives to no other library: parameters, and conjugated and negated views."""
    wave = torch.randn(3, dtype=torch.complex64)
    tensors = {"p": nn.Parameter(WEIGHT), "c": wave.conj(), "n": wave.clone().conj().imag, "h": WEIGHT.bfloat16()}
    for name, entry in ckptool.open(saved(tensors, tmp_path / "a.pt")).items():
        for make in (torch.as_tensor, torch.tensor, torch.from_dlpack):
            assert torch.equal(make(entry), tensors[name].detach()), name


def test_its_facts(ckpt: Checkpoint, entry: TensorEntry) -> None:
    assert (entry.ndim, len(entry), entry.size(), entry.size(0), entry.device) == (2, 40, (40, 6), 40, "cpu")
    assert entry.T.shape == (6, 40) and numpy.array_equal(entry.T, WEIGHT.T)
    assert all(entry.dtype == same for same in (torch.float32, numpy.float32, numpy.dtype("f4"), "f32", entry.dtype))
    assert entry.dtype != torch.float16 and entry.dtype != "nothing" and entry.dtype != None  # noqa: E711
    assert entry.dtype in (torch.float16, torch.float32)
    step = ckpt["state_dict/step"]
    assert (float(step), int(step), step.item(), step.tolist(), bool(step)) == (7.0, 7, 7, 7, True)
    with pytest.raises(TypeError, match="without dimensions"):
        len(step)
    with pytest.raises(TypeError, match="without dimensions"):
        list(step)
    assert ckpt["state_dict/half"].tolist() == WEIGHT.bfloat16().tolist()
    assert copy.deepcopy(entry).shape == entry.shape


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), (torch.float16, torch.float16)])
def test_cast_as_torch_does(name: Any, dtype: torch.dtype, ckpt: Checkpoint) -> None:
    for address in ("fc.weight", "half", "view"):
        cast = ckpt["state_dict"][address].to(name)
        assert cast.dtype == dtype
        assert torch.equal(cast.torch(), TREE["state_dict"][address].to(dtype))  # type: ignore[index]
    assert torch.equal(ckpt["state_dict/step"].to(torch.float64).torch(), torch.tensor(7.0, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_are_made_of_others(tmp_path: Path) -> None:
    sparse, quantized = torch.eye(3).to_sparse(), torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    torch.save({"s": sparse, "q": quantized}, tmp_path / "a.pt")
    ckpt = ckptool.open(tmp_path / "a.pt")
    assert ckpt["s"].numel == 9 and ckpt["s"].ndim == 2 and len(ckpt["q"]) == 3 and bool(ckpt["s"])
    with pytest.raises(TypeError, match="to_dense"):
        numpy.asarray(ckpt["s"])
    with pytest.raises(UsageError, match=r"entry\.torch\(\)\.to"):
        ckpt["s"].to("f16")


# One entry as a tensor of torch ---------------------------------------------------------------------------------------


@looped("name", [name for name in sorted(TRAPS) if name[:2] in ("06", "07", "08", "09", "10")])
def test_one_entry_as_a_tensor(name: str, tmp_path: Path) -> None:
    path = saved(TRAPS[name](), tmp_path / "x.pt")
    expected, tree = load(path), read(path).tree
    for key, tensor in expected.items():
        if isinstance(tensor, torch.Tensor):
            made = tree[key].torch()
            assert (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
            assert (made.is_conj(), made.is_neg(), made.requires_grad) == (
                tensor.is_conj(),
                tensor.is_neg(),
                tensor.requires_grad,
            )
            if not tensor.is_quantized:  # their bytes beyond the span were not read: compared are values
                made, tensor = made.clone(), tensor.clone()
            assert torch_bytes(made) == torch_bytes(tensor)


def test_tab_in_a_notebook_completes_names_and_addresses(tmp_path: Path) -> None:
    ipython = pytest.importorskip("IPython.core.completer")
    file = saved({"model": {"a.w": torch.ones(1), "b": torch.ones(1)}, "mode": 3, 4: 5}, tmp_path / "a.pt")
    completer = ipython.IPCompleter(None, namespace={"ckpt": ckptool.open(file)})
    with ipython.provisionalcompleter():
        found = [completion.text for completion in completer.completions('ckpt["mode', 10)]
    assert [name.removeprefix('ckpt["') for name in found] == ["mode", "model", "model/a.w", "model/b"]
