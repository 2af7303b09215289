"""Folders of torch.distributed.checkpoint that are damaged, incomplete or malicious: a named error, nothing written."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

import ckptool
from ckptool.checkpoint import FileRange
from ckptool.errors import (
    Ambiguous,
    CkptoolError,
    Corrupt,
    LimitExceeded,
    NotACheckpoint,
    Truncated,
    Unsupported,
)
from ckptool.formats import read
from tests.support.dcp_folders import (
    both_paths,
    chunk,
    chunks,
    edit,
    place_of,
    placed,
    save_dcp,
    swapped_places,
    training_state,
    without_place,
)
from tests.support.errors import three_parts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dcp(training_state(), tmp_path_factory.mktemp("dcp") / "saved")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "saved"))


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (placed(relative_path="../__0_0.distcp"), Corrupt, "outside its folder"),
        (placed(relative_path="/etc/passwd"), Corrupt, "outside its folder"),
        (placed(relative_path=""), Corrupt, "outside its folder"),
        (placed(relative_path="__7_0.distcp"), Corrupt, "lacks 1 of its files: __7_0"),
        (placed(relative_path=7), Corrupt, "without a place"),
        (placed(offset=10**9), Truncated, "were expected"),
        (placed(offset=-1), Truncated, "were expected"),
        (placed(length=10**9), Truncated, "were expected"),
        (placed(length=-5), Truncated, "were expected"),
        (placed(length=0), Corrupt, "no torch zip"),
        (placed(length=True), Corrupt, "without a place"),
        (placed(transform_descriptors=["zstd\x1b"]), Unsupported, r"packed by zstd\\x1b"),
        (lambda m: placed(offset=place_of(m)[1].offset + 1)(m), Corrupt, "no torch zip"),
        (lambda m: placed(length=place_of(m)[1].length - 1)(m), CkptoolError, None),
        (swapped_places, Corrupt, "should be bf16"),
        (without_place, Corrupt, "does not say where the chunk of half at"),
        (chunks(((0, 0), (4, 3))), Corrupt, r"rank 0 \(__0_0.distcp\) has <tensor bf16\[5, 3\]>"),
        (chunks(((0, 0), (5, 4))), Corrupt, "should be"),
        (chunks(((0, 0), (5, 3)), ((0, 0), (5, 3))), Corrupt, "twice: they overlap"),
        (chunks(((0, 0), (2, 3)), ((2, 0), (3, 3))), Corrupt, r"does not say where the chunk of half at \[2, 0\]"),
        (chunks(((0,), (15,))), Corrupt, "without offsets and sizes"),
        (chunks(), Corrupt, "15 of its 15 elements are in no file"),
        (chunk(lambda t: setattr(t, "size", torch.Size((3, 5)))), Corrupt, "has elements outside of it"),
        (chunk(lambda t: setattr(t, "size", "big")), Corrupt, "nothing of the shape"),
        (chunk(lambda t: setattr(t.properties, "dtype", torch.float16)), Corrupt, "should be f16"),
        (lambda m: m.state_dict_metadata.update(half=BytesStorageMetadata()), Corrupt, "does not say where half is"),
        (lambda m: m.state_dict_metadata.update(half=3), Corrupt, "says of half that it is a int"),
        (lambda m: m.state_dict_metadata.update({5: BytesStorageMetadata()}), Corrupt, "no table of names"),
        (lambda m: setattr(m, "state_dict_metadata", None), Corrupt, "no table of names"),
        (lambda m: setattr(m, "storage_data", None), Corrupt, "where its values are"),
        (lambda m: m.storage_data.update({"x": "y"}), Corrupt, "without a place"),
        (both_paths, Corrupt, "one path for two values"),
        (lambda m: m.planner_data.update(half=("scalar", "x")), Corrupt, "one path for two values"),
        (lambda m: m.planner_data.update(half=("epoch", "x")), Corrupt, "goes through another value"),
        (lambda m: m.planner_data.update(half=("list", "x")), Corrupt, "goes through another value"),
        (lambda m: m.planner_data.update(half=("list", 10**9)), Corrupt, "a list with an element"),
        (lambda m: m.planner_data.update(half=("list", -1)), Corrupt, "a list with an element"),
        (lambda m: m.planner_data.update(half=()), Corrupt, "no path for half"),
        (lambda m: m.planner_data.update(half=(0,)), Corrupt, "no path for half"),
        (lambda m: m.planner_data.update(half=("a", 1.5)), Corrupt, "not of names and numbers"),
        (lambda m: m.planner_data.update(half=("a",) * 5_000), LimitExceeded, "nested 5,000 deep"),
    ],
)
def test_a_table_that_contradicts_itself_or_the_files(
    change: Callable[[Any], Any], error: type[CkptoolError], words: str | None, folder: Path
) -> None:
    with pytest.raises(error, match=words) as caught:
        read(edit(folder, change))
    assert "\x1b" not in str(caught.value)
    three_parts(caught.value)


def test_two_places_for_one_name(folder: Path) -> None:
    def change(metadata: Metadata) -> None:
        index, info = place_of(metadata)
        metadata.storage_data[MetadataIndex(index.fqn, torch.Size((9, 9)))] = info

    with_two = edit(folder, change)
    raw = (with_two / ".metadata").read_bytes()
    (with_two / ".metadata").write_bytes(raw.replace(b"K\x09K\x09\x86", b"K\x00K\x00\x86"))
    with pytest.raises(Ambiguous, match="two places for half"):
        read(with_two)


def test_files_of_two_checkpoints(folder: Path, tmp_path: Path) -> None:
    other = training_state()
    other["half"] = torch.zeros(3, 5).bfloat16()
    save_dcp(other, tmp_path / "other")
    shutil.copy(tmp_path / "other/.metadata", folder / ".metadata")
    with pytest.raises(CkptoolError) as caught:
        read(folder)
    assert caught.value.code in ("corrupt", "truncated", "ambiguous")


def test_a_save_that_was_stopped(folder: Path) -> None:
    (folder / ".metadata").unlink()
    with pytest.raises(Truncated, match=r"no \.metadata") as caught:
        read(folder)
    three_parts(caught.value)


def test_a_folder_with_another_programs_metadata_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(NotACheckpoint, match=r"not that of torch\.distributed\.checkpoint"):
        read(tmp_path)
    (tmp_path / ".metadata").unlink()
    (tmp_path / ".metadata").mkdir()
    with pytest.raises(NotACheckpoint):
        read(tmp_path)


@pytest.mark.parametrize("cut_at", [0.2, 0.5, 0.9, 0.999])
def test_a_table_that_is_cut_off(cut_at: float, folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[: int(len(data) * cut_at)])
    with pytest.raises(CkptoolError) as caught:
        read(folder)
    assert caught.value.code in ("truncated", "corrupt")
    (folder / ".metadata").write_bytes(data + b"more")
    with pytest.raises(Ambiguous, match="4 bytes after its end"):
        read(folder)


def test_a_file_of_a_rank_that_is_cut_off_or_damaged(folder: Path) -> None:
    (rank,) = folder.glob("*.distcp")
    data = rank.read_bytes()
    rank.write_bytes(data[:-10])
    with pytest.raises(Truncated):
        read(folder)
    rank.write_bytes(data)
    entry = read(folder)["half"]
    assert isinstance(entry.storage.data, FileRange)
    at = entry.storage.data.offset
    rank.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(Corrupt, match="checksum"):
        ckptool.convert(folder, folder.parent / "out.pt")
    assert not (folder.parent / "out.pt").exists()


def test_a_dcp_folder_with_another_checkpoint_in_it(folder: Path) -> None:
    torch.save(training_state()["model"], folder / "pytorch_model.bin")
    with pytest.raises(Ambiguous, match="holds 2 checkpoints"):
        read(folder)
