"""Folders of torch.distributed.checkpoint that are damaged, incomplete or malicious: a named error, nothing written."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex

import ckptool
from ckptool.checkpoint import FileRange
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, LimitExceeded, NotACheckpoint, Truncated, Unsupported
from ckptool.formats import read
from ckptool.formats.dcp import tables, tree_pickle
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
from tests.support.files import saved


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


# Chunks ---------------------------------------------------------------------------------------------------------------


def in_halves(folder: Path) -> Path:
    """A tensor of four rows, of which two ranks saved two each: `w`."""
    whole = torch.arange(12.0).reshape(4, 3)
    (folder / "a").mkdir(parents=True)
    for name, rows in (("w0", whole[:2]), ("w1", whole[2:])):
        save_dcp({name: rows.clone()}, folder / name)
        (folder / name / "__0_0.distcp").rename(folder / "a" / f"__{name[1]}_0.distcp")
    (folder / "w0/.metadata").rename(folder / "a/.metadata")
    return edit(folder / "a", halves((0, 0), (2, 0)))


def halves(*begins: tuple[int, int], sizes: tuple[int, int] = (2, 3), shape: tuple[int, int] = (4, 3)) -> Any:
    def change(metadata: Metadata) -> None:
        described = next(iter(metadata.state_dict_metadata.values()))
        length = next(iter(metadata.storage_data.values())).length
        described.size = torch.Size(shape)
        described.chunks = [ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes)) for begin in begins]
        metadata.state_dict_metadata = {"w": described}
        metadata.planner_data = {"w": ("w",)}
        metadata.storage_data = {
            MetadataIndex("w", torch.Size(begin), rank): _StorageInfo(f"__{rank % 2}_0.distcp", 0, length)
            for rank, begin in enumerate(begins)
        }

    return change


def test_halves_are_joined(tmp_path: Path) -> None:
    assert read(in_halves(tmp_path))["w"].bytes() == torch.arange(12.0).numpy().tobytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (halves((0, 0), (1, 0)), r"rank 0 \(__0_0.distcp\) and rank 1 \(__1_0.distcp\) overlap at \[1, 0\]"),
        (halves((0, 0)), r"6 of its 12 elements are in no file"),
        (halves((0, 0), (3, 0)), r"rank 1 \(__1_0.distcp\) has elements outside of it, \[2, 3\] at \[3, 0\]"),
        (halves((0, 0), (2, 0), shape=(5, 3)), r"3 of its 15 elements are in no file"),
        (halves((0, 0), (2, 0), (4, 0)), r"has elements outside of it"),
        (halves((0, 0), (2, 0), sizes=(2, 2), shape=(4, 2)), r"should be f32\[2, 2\], the file of rank 0"),
        (halves((0, 0), (2, 0), shape=(1 << 40, 1 << 20)), "elements are in no file"),
        (halves((1 << 61, 0), (2, 0)), "has elements outside of it"),
    ],
    ids=["overlap", "gap", "outside", "rows missing", "too many", "other sizes", "huge", "far"],
)
def test_chunks_that_do_not_fill_their_tensor(change: Any, words: str, tmp_path: Path) -> None:
    folder = edit(in_halves(tmp_path), change)
    with pytest.raises(Corrupt, match=words) as caught:
        ckptool.convert(folder, tmp_path / "out.pt")
    three_parts(caught.value)
    assert not (tmp_path / "out.pt").exists()


def test_a_table_of_very_many_chunks_of_one_place(tmp_path: Path) -> None:
    """Each is a chunk of a few bytes in the table; the work is linear, and what they say is found to be wrong."""
    begins = [(2 * row, 0) for row in range(8_000)]
    folder = edit(in_halves(tmp_path), halves(*begins, shape=(15_999, 3)))
    with pytest.raises(Corrupt, match="has elements outside of it"):
        read(folder)


def test_a_table_larger_than_any(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(folder / ".metadata", "ab") as file:
        file.truncate(tables.MAX_METADATA + 1)
    with pytest.raises(LimitExceeded, match="At most"):
        read(folder)


# Pickles that call ----------------------------------------------------------------------------------------------------


class Calls:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", [".metadata", "__0.metadata"])
@pytest.mark.parametrize("field", ["storage_meta", "state_dict_metadata", "planner_data", "storage_data"])
def test_a_table_that_calls_is_not_run(name: str, field: str, folder: Path, tmp_path: Path) -> None:
    edit(folder, lambda metadata: setattr(metadata, field, Calls(tmp_path / "called")))
    (folder / ".metadata").rename(folder / name)
    if field in ("storage_meta", "planner_data"):
        assert read(folder).discarded
        (row,) = ckptool.scan(folder).files
        assert any("mkdir" in str(call) for call in row.calls)
    else:
        with pytest.raises(Corrupt):
            read(folder)
    assert not (tmp_path / "called").exists()


# Empty files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_files_of_0_bytes(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).write_bytes(b"")
    with pytest.raises(CkptoolError) as caught:
        ckptool.convert(folder, tmp_path / "out.pt")
    assert caught.value.code in ("truncated", "corrupt") and name in str(caught.value)
    three_parts(caught.value)
    assert not (tmp_path / "out.pt").exists()


def test_a_rank_of_a_huge_number(folder: Path) -> None:
    (folder / ".metadata").rename(folder / "__9999999.metadata")
    with pytest.raises(Corrupt, match="lacks the tables of 1,000 ranks") as caught:
        read(folder)
    three_parts(caught.value)


def test_an_empty_table_of_a_rank(folder: Path) -> None:
    (folder / ".metadata").rename(folder / "__0.metadata")
    read(folder)
    (folder / "__1.metadata").write_bytes(b"")
    with pytest.raises(CkptoolError, match=r"__1\.metadata"):
        read(folder)


@pytest.mark.parametrize("end", [b"X\1\0\0\0ycos\nsystem\nX\4\0\0\0true\x85Rs", b"cos\nsystem\nX\4\0\0\0true\x85R0"])
def test_a_call_hidden_in_the_pickle_is_seen(end: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tree_pickle.pickle_of
    monkeypatch.setattr(tree_pickle, "pickle_of", lambda *args: made(*args)[:-1] + end + b".")
    ckptool.convert(saved({1: torch.ones(2)}, tmp_path / "in.pt"), tmp_path / "out.dcp")
    with pytest.raises(CkptoolError) as caught:
        ckptool.convert(tmp_path / "out.dcp", tmp_path / "back.pt")
    assert caught.value.code == "unsafe-global" and "os.system" in caught.value.what
