"""Dividing a checkpoint into shards: what is written, stock safetensors reads, and what was divided stays so."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.checkpoint.blocks import Plan
from ckptool.errors import UsageError
from ckptool.formats import by_name, read, sharded
from ckptool.formats.sharded import size_in_bytes
from tests.support.files import carry_out, contents, saved
from tests.support.looped import looped
from tests.support.same import assert_same_tree
from tests.support.sharded_folders import INDEX, assert_values, bins, hub, index_of, sharded_state


def carried_out(plan: Plan, folder: Path) -> Path:
    """Executes a plan of several files, without the care that a user's folder needs."""
    folder.mkdir()
    checks = plan.checks
    for name, segments in plan.files.items():
        carry_out(Plan({"": segments}, checks), folder / name)
        checks = []
    return folder


def stock(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors as loaders of the hub's kind read them: by the index, each from its shard."""
    index = index_of(folder)
    tensors = {}
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(folder / file, "pt") as shard:
            assert shard.metadata()["format"] == "pt"
            tensors[name] = shard.get_tensor(name)
    for file in set(index["weight_map"].values()):
        with safetensors.safe_open(folder / file, "pt") as shard:
            assert {n for n, f in index["weight_map"].items() if f == file} == set(shard.keys())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors


def same_values(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("size", [1, 1000, 2500, 3333, 6000])
def test_what_is_written_stock_safetensors_reads(size: int, tmp_path: Path) -> None:
    model = saved({"state_dict": sharded_state(), "epoch": 3}, tmp_path / "model.pt")
    done = ckptool.convert(model, tmp_path / "out", shard_size=f"{size}B", verify=True)
    assert done.container == "sharded" and done.verified and done.facts["left_behind"] == ["epoch"]
    same_values(stock(tmp_path / "out"), sharded_state())
    found = read(tmp_path / "out")
    assert list(found.tree) == list(sharded_state()) and found.notes == ()
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    for number, shard in enumerate(shards, 1):
        assert shard.name == f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        sizes = [entry.nbytes for entry in read(shard).tree.values()]
        assert sum(sizes) <= size or len(sizes) == 1
    assert ckptool.diff(model, tmp_path / "out").same


def test_ties_across_shards_are_kept(tmp_path: Path) -> None:
    shared = torch.randn(10, 25)
    tensors = {"embed": shared, **sharded_state(), "head": shared, "transposed": shared.t()}
    ckptool.convert(saved(tensors, tmp_path / "model.pt"), tmp_path / "out", shard_size="2kB", verify=True)
    index = index_of(tmp_path / "out")
    assert "head" not in index["weight_map"]
    with safetensors.safe_open(tmp_path / "out" / index["weight_map"]["embed"], "pt") as shard:
        assert shard.metadata()["head"] == "embed"
    found = read(tmp_path / "out")
    assert found["head"].storage is found["embed"].storage is not found["transposed"].storage
    assert_values(found, tensors)
    ckptool.convert(tmp_path / "out", tmp_path / "back.pt")
    again = torch.load(tmp_path / "back.pt", weights_only=True)
    assert again["head"].data_ptr() == again["embed"].data_ptr()
    ckptool.convert(tmp_path / "out", tmp_path / "copies", ties="copy", shard_size="2kB")
    same_values(stock(tmp_path / "copies"), tensors)


def test_the_metadata_of_shards_and_index_is_kept(tmp_path: Path) -> None:
    folder = hub(tmp_path / "model", total_parameters=1, note="text")
    first = folder / "model-00001-of-00003.safetensors"
    save_file(
        {n: e for n, e in sharded_state().items() if n in read(first).tree},
        first,
        metadata={"format": "pt", "step": "7"},
    )
    ckptool.add_module(folder, tmp_path / "out")
    metadata = index_of(tmp_path / "out")["metadata"]
    assert metadata["note"] == "text" and metadata["total_parameters"] == sum(
        t.numel() for t in sharded_state().values()
    )
    with safetensors.safe_open(tmp_path / "out" / first.name, "pt") as shard:
        assert shard.metadata() == {"format": "pt", "step": "7"}


def test_changed_torch_shards_are_safetensors(tmp_path: Path) -> None:
    shared = torch.randn(4, 6)
    parts = [
        OrderedDict(a=shared, b=shared.t(), c=torch.nn.Parameter(torch.ones(3))),
        OrderedDict(d=torch.arange(4), e=torch.ones(2).bfloat16()),
    ]
    parts[0]._metadata = OrderedDict({"": {"version": 1}, "a": {"version": 2}})  # type: ignore[attr-defined]
    folder = bins(tmp_path / "model", parts)
    assert read(folder).tree.metadata == {"": {"version": 1}, "a": {"version": 2}}
    done = ckptool.add_module(folder, tmp_path / "out", verify=True)
    assert [note.code for note in done.notes] == ["sharing-lost", "side-car"]
    assert sorted(p.name for p in (tmp_path / "out").glob("model*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    ckptool.strip_module(tmp_path / "out", tmp_path / "back", verify=True)
    assert_values(read(tmp_path / "back"), {**parts[0], **parts[1]})
    assert read(tmp_path / "back").tree.metadata["a"] == {"version": 2}
    unchanged = ckptool.strip_module(folder, tmp_path / "copy", verify=True)
    assert unchanged.how == "copy" and not unchanged.notes
    assert contents(tmp_path / "copy").keys() == contents(folder).keys()


def test_the_contract(tmp_path: Path) -> None:
    """What was read, written and read again is the same tree, and the same bytes."""
    found = read(hub(tmp_path / "model"))
    again = read(carried_out(sharded.write(found), tmp_path / "one"))
    assert_same_tree(found, again)
    carried_out(sharded.write(again), tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes()
    assert by_name("sharded").append(found) is None


def test_in_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be changed in place"):
        ckptool.add_module(hub(tmp_path / "model"), in_place=True)


SIZES = {"5GB": 5_000_000_000, "5 gb": 5_000_000_000, "5GiB": 5 << 30, "500MB": 500_000_000, "1.5KB": 1500}
SIZES |= {"10k": 10_000, "2KiB": 2048, "1TiB": 1 << 40, "1000000": 1_000_000, "7B": 7}


def test_sizes() -> None:
    assert {text: size_in_bytes(text) for text in SIZES} == SIZES and size_in_bytes(1_234_567) == 1_234_567


@looped("text", [*"|0|-1|5XB|1.5|GB|1e9|nan|5 G B|1iB|\x1b|5|1000".split("|"), "9" * 100, 0, -5, 1.5, 5, 999_999])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(UsageError) as caught:
        size_in_bytes(text)
    assert "\x1b" not in str(caught.value)
