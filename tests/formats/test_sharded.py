"""Checkpoints in shards: index and shards agree on every name, or are refused; what is written, stock safetensors
reads."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.errors import (
    Ambiguous,
    CkptoolError,
    Conflict,
    Corrupt,
    LimitExceeded,
    NotACheckpoint,
    OnlyAPart,
    Unsupported,
    UsageError,
)
from ckptool.formats import read
from ckptool.formats.folder import MAX_TABLE
from ckptool.formats.sharded import size_in_bytes
from tests.support.cli import Run
from tests.support.engine_folders import INDEX, assert_values, bins, hub, index_of, sharded_state, write_index
from tests.support.errors import refused, three_parts
from tests.support.files import contents, saved, written
from tests.support.looped import looped

# Reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_torch_shards(zipped: bool, tmp_path: Path) -> None:
    tensors = sharded_state()
    names = list(tensors)
    parts = [{n: tensors[n] for n in names[:5]}, {n: tensors[n] for n in names[5:]}]
    folder = bins(tmp_path / "model", parts, _use_new_zipfile_serialization=zipped)
    found = read(folder)
    assert_values(found, tensors)
    assert list(found.tree) == names and not found.tensors_only  # the order of the model, which their pickles have
    assert_values(read(folder / "pytorch_model.bin.index.json"), tensors)


def test_a_folder_of_two_checkpoints(tmp_path: Path) -> None:
    folder = hub(tmp_path / "model")
    older = {name: tensor + 1 for name, tensor in sharded_state().items()}
    saved(older, folder / "pytorch_model.bin")
    save_file(older, folder / "consolidated.safetensors")  # Mistral's, beside the same weights for transformers
    assert_values(read(folder), sharded_state())
    # transformers and accelerate take a single file before an index, diffusers the index.
    save_file(older, folder / "model.safetensors")
    refused(Ambiguous, tmp_path, lambda: read(folder), r"model\.safetensors\.index\.json, model\.safetensors")
    assert {INDEX, "model.safetensors"} <= {Path(row.path).name for row in ckptool.scan(folder).files if row.is_good}
    (folder / INDEX).rename(folder / "pytorch_model.bin.index.json")  # the torch files of the weights are not read
    assert_values(read(folder), older)
    (folder / "pytorch_model.bin.index.json").rename(folder / INDEX)
    (folder / "model.safetensors").unlink()
    shutil.copy(folder / INDEX, folder / "other.safetensors.index.json")
    refused(Ambiguous, tmp_path, lambda: read(folder), "holds 2 checkpoints")
    assert_values(read(folder / INDEX), sharded_state())
    one = hub(tmp_path / "one", shards=1)  # an index of one file of the usual name
    (one / "model-00001-of-00001.safetensors").rename(one / "model.safetensors")
    write_index(one, dict.fromkeys(sharded_state(), "model.safetensors"))
    assert_values(read(one), sharded_state())
    save_file(sharded_state(), tmp_path / "model.safetensors")
    save_file(sharded_state(), tmp_path / "adapter_model.safetensors")
    refused(Ambiguous, tmp_path, lambda: read(tmp_path), r"adapter_model\.safetensors, model\.safetensors")


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model", "adapter_model", "model.fp16", "index"])
def test_torch_files_beside_the_same_weights_in_safetensors_are_named_and_not_read(stem: str, tmp_path: Path) -> None:
    """As on the hub: bert-base-uncased, falcon-7b and stable-diffusion-v1-5 have both."""
    torch_stem = stem.replace("model", "pytorch_model", 1) if stem.startswith("model") else stem
    names = f"{stem}.safetensors", f"{torch_stem}.bin"
    old = {name: tensor + 1 for name, tensor in sharded_state().items()}
    if stem == "index":
        names = INDEX, "pytorch_model.bin.index.json"
        for folder in hub(tmp_path / "hub"), bins(tmp_path / "bins", [old]):
            shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    else:
        save_file(sharded_state(), tmp_path / names[0])
        saved(old, tmp_path / names[1])
    found = read(tmp_path)
    assert_values(found, sharded_state())
    said = next(note.message for note in found.notes if note.code == "not-read")
    assert said.startswith(f"{names[1]} was not read: transformers and diffusers take {names[0]}")
    assert "not-read" in [note.code for note in ckptool.verify(tmp_path).notes]
    (tmp_path / names[0]).unlink()
    assert_values(read(tmp_path), old)


@pytest.mark.parametrize("name", ["non_lora_trainables.bin", "value_head.safetensors"])
def test_weights_trained_with_an_adapter_are_not_passed_over(name: str, tmp_path: Path, run: Run) -> None:
    save_file(
        {"q.lora_A.weight": torch.ones(4, 8), "q.lora_B.weight": torch.ones(8, 4)},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')
    torch.save({"mm_projector.weight": torch.ones(2)}, tmp_path / name)
    save_file({"q.weight": torch.ones(8, 8)}, tmp_path / "base.safetensors")
    merge = "lora merge", str(tmp_path / "base.safetensors"), str(tmp_path), "-o", str(tmp_path / "merged.pt")
    for words in (("inspect", str(tmp_path)), ("convert", str(tmp_path), "-o", str(tmp_path / "out.pt")), merge):
        told = run(*words)
        assert told.code == 0 and (told.out + told.err).count(f"are not among them: {name}") == 1, told


def test_shards_without_their_index(tmp_path: Path) -> None:
    folder = hub(tmp_path / "model")
    (folder / INDEX).unlink()
    refused(OnlyAPart, tmp_path, lambda: read(folder), "holds shards but no index")
    for path in list(folder.iterdir()):
        path.rename(folder / f"shard-00001-{path.name}")
    refused(Corrupt, tmp_path, lambda: read(folder), "does not say where its piece of")


def test_ties_that_the_hubs_savers_record_in_the_index(tmp_path: Path) -> None:
    folder = hub(tmp_path / "model", head="layers.0.weight", total_parameters=5, other="text")
    found = read(folder)
    assert found["head"].storage is found["layers.0.weight"].storage
    assert found.metadata == {"total_size": found.metadata["total_size"], "total_parameters": 5, "other": "text"}
    assert [note.code for note in found.notes] == ["ties-recorded"]


def test_ties_within_a_shard(tmp_path: Path) -> None:
    folder = hub(tmp_path / "model")
    first = folder / "model-00001-of-00003.safetensors"
    names = [n for n, f in index_of(folder)["weight_map"].items() if f == first.name]
    tied = {"format": "pt", "head": names[0]}
    save_file({name: sharded_state()[name] for name in names}, first, metadata=tied)
    found = read(folder)
    assert found["head"].storage is found[names[0]].storage and found.notes[0].code == "ties-recorded"
    assert_values(found, {**sharded_state(), "head": sharded_state()[names[0]]})


# Index and shards against each other ----------------------------------------------------------------------------------


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    index = index_of(folder)
    replaced = change(index)
    (folder / INDEX).write_text(json.dumps(index if replaced is None else replaced))
    return folder


def pointed(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["weight_map"].update({"norm": name})


OUTSIDE = "../model-00001-of-00003.safetensors|/etc/passwd|..|.||sub/m.bin|..\\m.safetensors|nul\0|C:m.safetensors"
ELSEWHERE = [*((name, "outside its folder") for name in OUTSIDE.split("|")), (INDEX, "as a shard")]
ELSEWHERE += [("other.safetensors.index.json", "as a shard")]
ELSEWHERE += [("x\x1b.safetensors", r"lacks 1 of its 4 shards: x\\x1b\.safetensors")]
ELSEWHERE += [("missing.safetensors", "lacks 1 of its 4 shards: missing.safetensors")]


@looped(("name", "words"), ELSEWHERE)
def test_shard_names_that_lead_elsewhere_are_corrupt(name: str, words: str, tmp_path: Path) -> None:
    hub(tmp_path / "model")
    folder = changed(hub(tmp_path / "model"), pointed(name))
    shutil.copy(folder / INDEX, folder / "other.safetensors.index.json")
    error = refused(Corrupt, tmp_path, lambda: read(folder / INDEX), words)
    three_parts(error)


@pytest.mark.parametrize("said", [1, 10**12, -5, 0.5, "many", [1], True])
def test_a_wrong_total_size_is_only_noted(said: Any, tmp_path: Path) -> None:
    """Many writers get it wrong, and no tensor depends on it: a note."""
    folder = changed(hub(tmp_path / "model"), lambda index: index["metadata"].update({"total_size": said}))
    found = read(folder)
    assert [note.code for note in found.notes] == ["total-size"]
    assert_values(found, sharded_state())


FORMS: dict[type[CkptoolError], list[bytes]] = {
    Ambiguous: [
        b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', b'{"weight_map": {}, "weight_map": {}}'],
    Corrupt: [
        b'{"weight_map": {}}', b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b'{"weight_map": {"a": ["x"]}}',
        b'{"weight_map": {"a": "x.safetensors"}, "metadata": []}', b'{"weight_map": {"a": "x.safetensors"}, "n": NaN}',
        b'{"weight_map": {"a": "\xff"}}', b'{"weight_map": {"\\ud800": "x.safetensors"}}',
        b'{"weight_map": {"a": "x.safetensors"}', b'{"weight_map": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"weight_map": ' + b"9" * 100_000 + b"}"],
    NotACheckpoint: [b'{"error": "Repository not found"}', b"<!doctype html>", b"[]"],
}  # fmt: skip


@looped(("text", "error"), [(text, error) for error, texts in FORMS.items() for text in texts])
def test_an_index_of_another_form_is_refused(text: bytes, error: type[CkptoolError], tmp_path: Path) -> None:
    with pytest.raises(error) as caught:
        read(written(text, tmp_path / INDEX))
    assert str(tmp_path) in caught.value.what
    three_parts(caught.value) if error is not Corrupt else None


def test_an_index_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = written(b'{"weight_map": {', tmp_path / INDEX)
    with path.open("r+b") as file:
        file.truncate(MAX_TABLE + 1)
    with pytest.raises(LimitExceeded, match=r"100,000,001"):
        read(path)


def test_a_shard_that_only_a_large_index_names_is_a_part(tmp_path: Path) -> None:
    for name in "ab":
        save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    table = {"metadata": {"about": "x" * (17 << 20)}, "weight_map": {name: f"{name}.safetensors" for name in "ab"}}
    (tmp_path / INDEX).write_text(json.dumps(table))
    part = read(tmp_path / "a.safetensors").part
    assert part is not None and part.label == "shard 1 of 2"


def renamed(folder: Path, old: str, new: str) -> None:
    """The shards and the index of a folder with another text in the names of files."""
    (folder / INDEX).write_text((folder / INDEX).read_text().replace(old, new))
    for file in [file for file in folder.iterdir() if old in file.name]:
        file.rename(folder / file.name.replace(old, new))


def without_numbers(folder: Path, added: str, into: str) -> None:
    """Names of shards without numbers, which would be compared first, and one shard more in the index."""
    changed(folder, lambda index: index["weight_map"].update({added: into}))
    for file in list(folder.glob("model-*")):
        renamed(folder, file.name, f"part{file.name[6:11]}.safetensors")


FIRST = "model-00001-of-00003.safetensors"


def twin(folder: Path) -> None:
    (folder / "twin.safetensors").symlink_to(FIRST)
    name = min(n for n, f in index_of(folder)["weight_map"].items() if "00001" in f)
    changed(folder, lambda index: index["weight_map"].update({name: "twin.safetensors"}))


def of_another_run(folder: Path) -> None:
    other = hub(folder.parent / "other", {f"other.{name}": tensor for name, tensor in sharded_state().items()})
    shutil.copy(other / "model-00002-of-00003.safetensors", folder / "model-00002-of-00003.safetensors")


def in_two_shards(folder: Path) -> None:
    save_file({"x": torch.ones(2), "norm": torch.zeros(50)}, folder / "more.safetensors")
    without_numbers(folder, "x", "more.safetensors")


def of_two_containers(folder: Path) -> None:
    saved({"x": torch.ones(2)}, folder / "x.bin")
    without_numbers(folder, "x", "x.bin")


CONFLICTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "one shard under two names": (twin, "is in model-00001-of-00003.safetensors, where the index does not list it"),
    "a tensor that the index does not list": (
        lambda folder: changed(folder, lambda index: index["weight_map"].pop("norm") and None),
        r"1 name differs \(norm is in model-00003\S+, where the index"),
    "a name that no shard has": (
        lambda folder: changed(folder, lambda index: index["weight_map"].update(gone=FIRST)),
        r"\(gone is not in model-00001"),
    "a tensor in another shard": (lambda folder: changed(folder, pointed(FIRST)), "do not belong together"),
    "one name in two shards": (in_two_shards, "norm is in more.safetensors, where the index does not list it"),
    "a shard of another run": (of_another_run, "do not belong together"),
    "names of fewer": (lambda folder: renamed(folder, "-of-00003", "-of-00002"), "names 3 shards, .* they are of 2"),
    "names of more": (lambda folder: renamed(folder, "-of-00003", "-of-00004"), "names 3 shards, .* they are of 4"),
    "two divisions": (lambda folder: renamed(folder, "00002-of-00003", "00002-of-00004"), "of 3 and of 4"),
    "two containers": (of_two_containers, "safetensors and of torch"),
}  # fmt: skip


@looped("name", CONFLICTS)
def test_an_index_and_shards_that_do_not_fit_are_a_conflict(name: str, tmp_path: Path) -> None:
    change, words = CONFLICTS[name]
    folder = hub(tmp_path / "model")
    change(folder)
    error = refused(Conflict, tmp_path, lambda: read(folder), words)
    three_parts(error)


def test_stale_shards_are_noted(tmp_path: Path) -> None:
    folder = hub(tmp_path / "model")
    for name in ("model-00001-of-00002.safetensors", "other-00001-of-00002.safetensors"):
        save_file({"x": torch.ones(2)}, folder / name)
    (note,) = read(folder).notes
    assert note.code == "stale-shards" and "model-00001-of-00002" in note.message and "other-" not in note.message


def test_shards_that_hold_no_dictionary_or_a_whole_tree(tmp_path: Path) -> None:
    saved([torch.ones(2)], tmp_path / "a.bin")
    write_index(tmp_path, {"x": "a.bin"}, name="pytorch_model.bin.index.json")
    refused(Corrupt, tmp_path, lambda: read(tmp_path), "no dictionary of names")
    saved({"state_dict": sharded_state(), "epoch": 3}, tmp_path / "tree.pt")
    ckptool.convert(tmp_path / "tree.pt", tmp_path / "tree.safetensors", all=True)
    write_index(tmp_path, {"x": "tree.safetensors"}, name="whole.safetensors.index.json")
    refused(Unsupported, tmp_path, lambda: read(tmp_path / "whole.safetensors.index.json"), "a whole tree")
    index = {"metadata": {"param_groups": "groups.bin"}, "weight_map": {"0": "a.bin"}}
    (tmp_path / "optim.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(Unsupported, match="an optimizer's state, as ColossalAI"):
        read(tmp_path / "optim.bin.index.json")


def test_shards_of_any_name_belong_to_their_index(tmp_path: Path) -> None:
    for name in ("one.bin", "two.bin"):  # ColossalAI's are pytorch_model-00001.bin
        saved({name: torch.ones(2)}, tmp_path / name)
    write_index(tmp_path, {name: name for name in ("one.bin", "two.bin")}, name="pytorch_model.bin.index.json")
    assert [row.state for row in ckptool.scan(tmp_path).files] == ["good"]


# Dividing a checkpoint into shards ------------------------------------------------------------------------------------


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
