"""Folders of torch.distributed.checkpoint that are damaged, incomplete or malicious: a named error, nothing written.

What befalls a file as a whole (cut, empty, gone, another's) is in tests/test_engine_folders.py.
"""

from __future__ import annotations

import os
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
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, LimitExceeded, NotACheckpoint, Truncated, Unsupported
from ckptool.formats import read
from ckptool.formats.dcp import tables, tree_pickle
from tests.support.engine_folders import chunk, chunks, edit, place_of, placed, save_dcp, training_state
from tests.support.errors import refused, three_parts
from tests.support.files import saved
from tests.support.looped import looped
from tests.support.processes import soon


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dcp(training_state(), tmp_path_factory.mktemp("dcp") / "saved")


# What the table says -------------------------------------------------------------------------------------------------


def without_place(metadata: Metadata) -> None:
    del metadata.storage_data[place_of(metadata)[0]]


def swapped_places(metadata: Metadata) -> None:
    (a, one), (b, other) = place_of(metadata, "half"), place_of(metadata, "scalar")
    metadata.storage_data[a], metadata.storage_data[b] = other, one


def moved(name: str, *path: str | int) -> Callable[[Any], None]:
    """Gives a tensor another name and path."""

    def change(metadata: Metadata) -> None:
        index, info = place_of(metadata)
        del metadata.storage_data[index]
        metadata.storage_data[MetadataIndex(name, index.offset, index.index)] = info
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop("half")
        del metadata.planner_data["half"]
        metadata.planner_data[name] = path

    return change


TABLES: list[tuple[Callable[[Any], Any], type[CkptoolError], str | None]] = [
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
    (chunk(lambda t: setattr(t, "size", torch.Size((3, 5)))), Corrupt, "reaches outside of it"),
    (chunk(lambda t: setattr(t, "size", "big")), Corrupt, "nothing of the shape"),
    (chunk(lambda t: setattr(t.properties, "dtype", torch.float16)), Corrupt, "should be f16"),
    (lambda m: m.state_dict_metadata.update(half=BytesStorageMetadata()), Corrupt, "does not say where half is"),
    (lambda m: m.state_dict_metadata.update(half=3), Corrupt, "describes half as int"),
    (lambda m: m.state_dict_metadata.update({5: BytesStorageMetadata()}), Corrupt, "no table of names"),
    (lambda m: setattr(m, "state_dict_metadata", None), Corrupt, "no table of names"),
    (lambda m: setattr(m, "storage_data", None), Corrupt, "where its values are"),
    (lambda m: m.storage_data.update({"x": "y"}), Corrupt, "without a place"),
    (moved("list", "list"), Corrupt, "one path for two values"),
    (moved("epoch.x", "epoch", "x"), Corrupt, "leads through another value"),
    (moved("list.x", "list", "x"), Corrupt, "leads through another value"),
    (moved("list.1000000000", "list", 10**9), Corrupt, "a list with an element"),
    (moved("list.-1", "list", -1), Corrupt, "a list with an element"),
    (moved("half", "halt"), Corrupt, "not made of the names and numbers"),
    (moved("half", "scalar"), Corrupt, "not made of the names and numbers"),
    (lambda m: m.planner_data.update(half=()), Corrupt, "no path for half"),
    (lambda m: m.planner_data.update(half=(0,)), Corrupt, "no path for half"),
    (lambda m: m.planner_data.update(half=("a", 1.5)), Corrupt, "not made of the names and numbers"),
    (lambda m: m.planner_data.update(half=("a",) * 5_000), LimitExceeded, "nested 5,000 deep"),
]


# What is done to the folder ------------------------------------------------------------------------------------------


def renamed(new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / ".metadata").rename(folder / new)


def two_places(folder: Path) -> None:
    def change(metadata: Metadata) -> None:
        index, info = place_of(metadata)
        metadata.storage_data[MetadataIndex(index.fqn, torch.Size((9, 9)))] = info

    raw = (edit(folder, change) / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(raw.replace(b"K\x09K\x09\x86", b"K\x00K\x00\x86"))


def of_another(folder: Path) -> None:
    other = save_dcp(training_state() | {"half": torch.zeros(3, 5).bfloat16()}, folder / "other")
    (other / ".metadata").replace(folder / ".metadata")


def too_large(folder: Path) -> None:
    os.truncate(folder / ".metadata", tables.MAX_METADATA + 1)


def as_a_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    (folder / ".metadata").mkdir(parents=True)


def an_empty_one_beside(folder: Path) -> None:
    renamed("__0.metadata")(folder)
    (folder / "__1.metadata").touch()


def flipped(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[read(folder)["half"].storage.data.offset] ^= 1  # type: ignore[union-attr]
    path.write_bytes(data)


FOLDERS: dict[str, tuple[Callable[[Path], object], type[CkptoolError], str | None]] = {
    "two places for a name": (two_places, Ambiguous, "two places for half"),
    "the table of another": (of_another, CkptoolError, None),
    "no table": (lambda folder: (folder / ".metadata").unlink(), Truncated, r"no \.metadata"),
    "not renamed": (renamed(".metadata.tmp"), Truncated, r"holds \.metadata\.tmp and no \.metadata"),
    "another program's": (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({"a": 1})), NotACheckpoint,
        r"not that of torch\.distributed\.checkpoint"),
    "a folder by the name of a table": (as_a_folder, NotACheckpoint, None),
    "more behind the table": (lambda f: (f / ".metadata").write_bytes((f / ".metadata").read_bytes() + b"more"),
        Ambiguous, "4 bytes after its end"),
    "a table larger than any": (too_large, LimitExceeded, "at most"),
    "a rank of a huge number": (renamed("__9999999.metadata"), Corrupt, "lacks the tables of 1,000 ranks"),
    "an empty table of a rank": (an_empty_one_beside, CkptoolError, r"__1\.metadata"),
    "another checkpoint in it": (lambda folder: torch.save(training_state()["model"], folder / "pytorch_model.bin"),
        Ambiguous, "holds 2 checkpoints"),
    "damaged values": (flipped, Corrupt, "checksum"),
}  # fmt: skip


ROWS = {f"table {number}": (lambda f, do=do: edit(f, do), *row) for number, (do, *row) in enumerate(TABLES)} | FOLDERS


@looped("kind", ROWS)
def test_a_folder_that_contradicts_itself(kind: str, made: Path, tmp_path: Path) -> None:
    change, error, words = ROWS[kind]
    change(folder := Path(shutil.copytree(made, tmp_path / "saved")))
    with pytest.raises(error, match=words) as caught:
        ckptool.convert(folder, tmp_path / "out.pt")
    assert "\x1b" not in str(caught.value) and not (tmp_path / "out.pt").exists()
    three_parts(caught.value)


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


HALVES: list[tuple[Any, str]] = [
    (halves((0, 0), (1, 0)), r"rank 0 \(__0_0.distcp\) and rank 1 \(__1_0.distcp\) overlap at \[1, 0\]"),
    (halves((0, 0)), r"6 of its 12 elements are in no file"),
    (halves((0, 0), (3, 0)), r"rank 1 \(__1_0.distcp\) reaches outside of it: \[2, 3\] at \[3, 0\]"),
    (halves((0, 0), (2, 0), shape=(5, 3)), r"3 of its 15 elements are in no file"),
    (halves((0, 0), (2, 0), (4, 0)), r"reaches outside of it"),
    (halves((0, 0), (2, 0), sizes=(2, 2), shape=(4, 2)), r"should be f32\[2, 2\], the file of rank 0"),
    (halves((0, 0), (2, 0), shape=(1 << 40, 1 << 20)), "elements are in no file"),
    (halves((1 << 61, 0), (2, 0)), "reaches outside of it"),
    # Each is a chunk of a few bytes in the table; the work is linear, and what they say is found to be wrong.
    (halves(*((2 * row, 0) for row in range(8_000)), shape=(15_999, 3)), "reaches outside of it"),
]


@looped(("change", "words"), HALVES)
def test_chunks_that_do_not_fill_their_tensor(change: Any, words: str, tmp_path: Path) -> None:
    folder = in_halves(tmp_path)
    assert read(folder)["w"].bytes() == torch.arange(12.0).numpy().tobytes()
    with pytest.raises(Corrupt, match=words) as caught:
        ckptool.convert(edit(folder, change), tmp_path / "out.pt")
    three_parts(caught.value)
    assert not (tmp_path / "out.pt").exists()


def test_an_object_that_many_names_have_is_read_once(tmp_path: Path) -> None:
    def change(metadata: Metadata) -> None:
        _, info = place_of(metadata, "many")
        for name in (f"many{number}" for number in range(2_000)):
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(name)] = info
            metadata.planner_data[name] = (name,)

    folder = edit(save_dcp({"w": torch.ones(2), "many": list(range(20_000))}, tmp_path / "saved"), change)
    with soon(2):
        assert read(folder)["many1999"] == list(range(20_000))


# Pickles that call ----------------------------------------------------------------------------------------------------


class Calls:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", [".metadata", "__0.metadata"])
@pytest.mark.parametrize("field", ["storage_meta", "state_dict_metadata", "planner_data", "storage_data"])
def test_a_table_that_calls_is_not_run(name: str, field: str, made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "saved"))
    edit(folder, lambda metadata: setattr(metadata, field, Calls(tmp_path / "called")))
    (folder / ".metadata").rename(folder / name)
    if field in ("storage_meta", "planner_data"):
        assert read(folder).discarded
        (row,) = ckptool.scan(folder).files
        assert any("mkdir" in str(call) for call in row.calls)
    else:
        refused(Corrupt, tmp_path, lambda: read(folder))
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("end", [b"X\1\0\0\0ycos\nsystem\nX\4\0\0\0true\x85Rs", b"cos\nsystem\nX\4\0\0\0true\x85R0"])
def test_a_call_hidden_in_the_pickle_is_seen(end: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tree_pickle.pickle_of
    monkeypatch.setattr(tree_pickle, "pickle_of", lambda *args: made(*args)[:-1] + end + b".")
    ckptool.convert(saved({1: torch.ones(2)}, tmp_path / "in.pt"), tmp_path / "out.dcp")
    with pytest.raises(CkptoolError) as caught:
        ckptool.convert(tmp_path / "out.dcp", tmp_path / "back.pt")
    assert caught.value.code == "unsafe-global" and "os.system" in caught.value.what
