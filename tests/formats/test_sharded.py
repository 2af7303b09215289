"""Checkpoints in shards: index and shards agree on every name, or are refused; what is written, stock safetensors
reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
)
from ckptool.formats import read, sharded
from tests.support.errors import three_parts
from tests.support.files import saved, written
from tests.support.looped import looped
from tests.support.sharded_folders import INDEX, assert_values, bins, hub, index_of, sharded_state, write_index

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
    save_file(sharded_state(), folder / "model.safetensors")
    assert_values(read(folder), sharded_state())  # an index is worth more than a file beside it
    shutil.copy(folder / INDEX, folder / "other.safetensors.index.json")
    with pytest.raises(Ambiguous, match="holds 2 checkpoints"):
        read(folder)
    assert_values(read(folder / INDEX), sharded_state())
    save_file(sharded_state(), tmp_path / "model.safetensors")
    saved(sharded_state(), tmp_path / "pytorch_model.bin")
    with pytest.raises(Ambiguous, match=r"pytorch_model\.bin"):
        read(tmp_path)


def test_shards_without_their_index(tmp_path: Path) -> None:
    folder = hub(tmp_path / "model")
    (folder / INDEX).unlink()
    with pytest.raises(OnlyAPart, match="holds shards and no index"):
        read(folder)
    for path in list(folder.iterdir()):
        path.rename(folder / f"shard-00001-{path.name}")
    with pytest.raises(Corrupt, match="does not say where its piece of"):
        read(folder)


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


@looped(
    ("name", "words"),
    [
        ("../model-00001-of-00003.safetensors", "outside its folder"),
        ("/etc/passwd", "outside its folder"),
        ("..", "outside its folder"),
        (".", "outside its folder"),
        ("", "outside its folder"),
        ("sub/model.safetensors", "outside its folder"),
        ("..\\model.safetensors", "outside its folder"),
        ("nul\0", "outside its folder"),
        ("C:model.safetensors", "outside its folder"),
        ("x\x1b.safetensors", r"missing: x\\x1b\.safetensors"),
        ("missing.safetensors", "1 of its 4 shards is missing: missing.safetensors"),
        (INDEX, "names an index as a shard"),
        ("other.safetensors.index.json", "names an index as a shard"),
    ],
)
def test_shard_names_that_lead_elsewhere_are_corrupt(name: str, words: str, tmp_path: Path) -> None:
    hub(tmp_path / "model")
    folder = changed(hub(tmp_path / "model"), pointed(name))
    shutil.copy(folder / INDEX, folder / "other.safetensors.index.json")
    with pytest.raises(Corrupt, match=words) as caught:
        read(folder / INDEX)
    three_parts(caught.value)


@pytest.mark.parametrize("said", [1, 10**12, -5, 0.5, "many", [1], True])
def test_a_wrong_total_size_is_only_noted(said: Any, tmp_path: Path) -> None:
    """Many writers get it wrong, and no tensor depends on it: a note."""
    folder = changed(hub(tmp_path / "model"), lambda index: index["metadata"].update({"total_size": said}))
    found = read(folder)
    assert [note.code for note in found.notes] == ["total-size"]
    assert_values(found, sharded_state())


@looped(
    ("text", "error"),
    [
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', Ambiguous),
        (b'{"weight_map": {}, "weight_map": {}}', Ambiguous),
        (b'{"weight_map": {}}', Corrupt),
        (b'{"weight_map": []}', Corrupt),
        (b'{"weight_map": {"a": 1}}', Corrupt),
        (b'{"weight_map": {"a": ["x.safetensors"]}}', Corrupt),
        (b'{"weight_map": {"a": "x.safetensors"}, "metadata": []}', Corrupt),
        (b'{"weight_map": {"a": "x.safetensors"}, "n": NaN}', Corrupt),
        (b'{"weight_map": {"a": "\xff"}}', Corrupt),
        (b'{"weight_map": {"\\ud800": "x.safetensors"}}', Corrupt),
        (b'{"weight_map": {"a": "x.safetensors"}', Corrupt),
        (b'{"weight_map": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", Corrupt),
        (b'{"weight_map": ' + b"9" * 100_000 + b"}", Corrupt),
        (b'{"error": "Repository not found"}', NotACheckpoint),
        (b"<!doctype html>", NotACheckpoint),
        (b"[]", NotACheckpoint),
    ],
)
def test_an_index_of_another_form_is_refused(text: bytes, error: type[CkptoolError], tmp_path: Path) -> None:
    with pytest.raises(error) as caught:
        read(written(text, tmp_path / INDEX))
    assert str(tmp_path) in caught.value.what
    three_parts(caught.value) if error is not Corrupt else None


def test_an_index_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = written(b'{"weight_map": {', tmp_path / INDEX)
    with path.open("r+b") as file:
        file.truncate(sharded.MAX_INDEX + 1)
    with pytest.raises(LimitExceeded, match=r"100,000,001"):
        read(path)


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
    "one shard under two names": (twin, "is in two shards"),
    "a tensor that the index does not list": (
        lambda folder: changed(folder, lambda index: index["weight_map"].pop("norm") and None),
        r"1 tensor of shards is not in it \(norm in model-00003",
    ),
    "a name that no shard has": (
        lambda folder: changed(
            folder, lambda index: index["weight_map"].update(gone="model-00001-of-00003.safetensors")
        ),
        r"1 of its names are not in their shards \(gone\)",
    ),
    "a tensor in another shard": (lambda folder: changed(folder, pointed(FIRST)), "do not belong together"),
    "one name in two shards": (in_two_shards, "norm is in two shards"),
    "a shard of another run": (of_another_run, "do not belong together"),
    "names of fewer": (
        lambda folder: renamed(folder, "-of-00003", "-of-00002"),
        "names 3 shards, whose names say that they are of 2",
    ),
    "names of more": (
        lambda folder: renamed(folder, "-of-00003", "-of-00004"),
        "names 3 shards, whose names say that they are of 4",
    ),
    "two divisions": (lambda folder: renamed(folder, "00002-of-00003", "00002-of-00004"), "of 3 and of 4"),
    "two containers": (of_two_containers, "safetensors and of torch"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_an_index_and_shards_that_do_not_fit_are_a_conflict(name: str, tmp_path: Path) -> None:
    change, words = CONFLICTS[name]
    folder = hub(tmp_path / "model")
    change(folder)
    with pytest.raises(Conflict, match=words) as caught:
        read(folder)
    three_parts(caught.value)


def test_stale_shards_are_noted(tmp_path: Path) -> None:
    folder = hub(tmp_path / "model")
    for name in ("model-00001-of-00002.safetensors", "other-00001-of-00002.safetensors"):
        save_file({"x": torch.ones(2)}, folder / name)
    (note,) = read(folder).notes
    assert note.code == "stale-shards" and "model-00001-of-00002" in note.message and "other-" not in note.message


def test_shards_that_hold_no_dictionary_or_a_whole_tree(tmp_path: Path) -> None:
    saved([torch.ones(2)], tmp_path / "a.bin")
    write_index(tmp_path, {"x": "a.bin"}, name="pytorch_model.bin.index.json")
    with pytest.raises(Corrupt, match="no dictionary of names"):
        read(tmp_path)
    saved({"state_dict": sharded_state(), "epoch": 3}, tmp_path / "tree.pt")
    ckptool.convert(tmp_path / "tree.pt", tmp_path / "tree.safetensors", all=True)
    write_index(tmp_path, {"x": "tree.safetensors"}, name="whole.safetensors.index.json")
    with pytest.raises(Unsupported, match="a whole tree"):
        read(tmp_path / "whole.safetensors.index.json")
