"""Folders of torch.distributed.checkpoint: read as torch reads them, bit for bit, without torch and without running
anything."""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as save_state

import ckptool
from ckptool.checkpoint import Checkpoint, Computed, FileRange, TensorEntry
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.tree import tensors
from ckptool.errors import (
    Ambiguous,
    CkptoolError,
    Corrupt,
    LimitExceeded,
    NotACheckpoint,
    OnlyAPart,
    Truncated,
    Unsupported,
)
from ckptool.formats import dcp, read
from tests.support.errors import three_parts
from tests.support.files import CORPUS
from tests.support.same import assert_same_objects
from tests.support.two_ranks import save_on_two_ranks


def training_state() -> dict[str, Any]:
    """What a training run saves: a model, an optimizer, lists, objects, and types of all sorts."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict()["state"],
        "list": [torch.ones(2), {"inside": torch.arange(3)}, 7],
        "plain": [1, 2, "three"],
        "epoch": 3,
        "name": "run",
        "nothing": None,
        "half": torch.randn(5, 3).bfloat16(),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "unsigned": torch.arange(4).to(torch.uint16),
        "complex": torch.randn(2, 2, dtype=torch.complex64),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(3, 5).t(),
        "a.b": {"c.d": torch.ones(1)},
    }


def save_dcp(value: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_state(value, checkpoint_id=folder, no_dist=True)
    return folder


def as_torch_reads(folder: Path, out: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dcp(training_state(), tmp_path_factory.mktemp("dcp") / "saved")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "saved"))


def live(found: Checkpoint) -> Any:
    """The tree with torch's tensors, as torch.load gives it."""
    out = Path(found.source.path).parent / "live.pt"  # type: ignore[union-attr]
    ckptool.convert(found.source.path, out, overwrite=True, verify=True)  # type: ignore[union-attr]
    return torch.load(out, weights_only=True)


# Reading -------------------------------------------------------------------------------------------------------------


def test_everything_as_torch_reads_it(folder: Path, tmp_path: Path) -> None:
    found = read(folder)
    assert found.container == "dcp" and found.notes == () and found.discarded == ()
    expected = as_torch_reads(folder, tmp_path / "torch.pt")
    got = live(found)
    assert expected.keys() == got.keys()
    # Views of one storage, and strides of what torch assembles itself, are not kept by torch's own reader.
    assert_same_objects(contiguous(expected), contiguous(got))
    assert got["list"][1]["inside"].tolist() == [0, 1, 2] and got["plain"] == [1, 2, "three"]
    assert list(got["optimizer"]["0"]) == ["step", "exp_avg", "exp_avg_sq"]


def contiguous(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: contiguous(part) for key, part in value.items()}
    return [contiguous(part) for part in value] if isinstance(value, list) else value


def test_tensors_are_ranges_of_the_files(folder: Path) -> None:
    found = read(folder)
    entries = [entry for _, entry in tensors(found.tree) if isinstance(entry, TensorEntry) and entry.nbytes]
    assert all(isinstance(entry.storage.data, FileRange) for entry in entries) and len(entries) > 10
    assert all(entry.storage.crc is not None for entry in entries)
    files = {entry.storage.data.file for entry in entries if isinstance(entry.storage.data, FileRange)}
    assert {Path(file.path).name for file in files} == {p.name for p in folder.glob("*.distcp")}


def test_names_stay_flat_where_no_paths_are_recorded(folder: Path) -> None:
    edit(folder, lambda metadata: setattr(metadata, "planner_data", None))
    found = read(folder)
    assert "model.0.weight" in found.tree and [note.code for note in found.notes] == ["flat-names"]
    edit(folder, lambda metadata: setattr(metadata, "planner_data", {"epoch": ("epoch",)}))
    assert "model.0.weight" in read(folder).tree


def test_requires_grad_is_as_recorded(tmp_path: Path) -> None:
    found = read(save_dcp({"w": torch.nn.Parameter(torch.ones(2)), "x": torch.ones(2)}, tmp_path / "saved"))
    assert found["w"].flags.requires_grad and not found["x"].flags.requires_grad


def test_verbs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ckptool.cli import main

    assert main(["inspect", str(folder), "--stats"]) == 0
    assert "dcp" in capsys.readouterr().out
    assert main(["convert", str(folder), "-o", str(tmp_path / "out.pt"), "--verify"]) == 0
    assert main(["diff", f"{folder}#model", f"{tmp_path / 'out.pt'}#model"]) == 0
    assert main(["convert", f"{folder}#model", "-o", str(tmp_path / "out.safetensors")]) == 0
    assert main(["strip-module", str(folder), "-o", str(tmp_path / "clean.pt"), "--at", "model"]) == 0
    assert (tmp_path / "clean.pt").is_file()
    assert main(["strip-module", str(folder), "--in-place"]) == 2
    assert main(["convert", str(folder), "-o", str(tmp_path / "out"), "--to", "dcp"]) == 2


def test_the_corpus() -> None:
    path = CORPUS / "lightning_dcp"
    if not path.is_dir():
        return
    found = read(path)
    entries = [entry for _, entry in tensors(found.tree)]
    assert len(entries) == 4 and {str(entry.dtype) for entry in entries} == {"f32"}
    assert sorted(entry.shape or () for entry in entries) == [(2,), (2, 32), (32,), (32, 32)]
    folder = Folder(path)
    places = dcp._places(folder, dcp._metadata(folder)[0]["storage_data"])
    for name, entry in found["model"].items():
        parts = sorted((key[1], place) for key, place in places.items() if key[0] == f"model.{name}")
        halves = [torch.load(io.BytesIO(raw_bytes(path, place)), weights_only=True) for _, place in parts]
        assert len(halves) == 2 and torch.equal(entry.torch(), torch.cat(halves)), name


def raw_bytes(folder: Path, place: dcp._Place) -> bytes:
    """What torch would be given to load of one chunk."""
    return (folder / place.file).read_bytes()[place.offset : place.offset + place.length]


# Many ranks ----------------------------------------------------------------------------------------------------------

SAVE = """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def save(rank, folder, mesh):
        whole = {
            "rows": torch.randn(7, 5), "columns": torch.randn(4, 9).bfloat16(), "same": torch.arange(6.0),
            "one": torch.randn(1, 8), "deep": torch.randn(3, 4, 5), "bytes": torch.arange(11, dtype=torch.uint8),
        }
        how = {"rows": Shard(0), "columns": Shard(1), "same": Replicate(), "one": Shard(0), "deep": Shard(1),
            "bytes": Shard(0)}
        state = {"model": {n: distribute_tensor(t, mesh, [how[n]]) for n, t in whole.items()}, "step": 5}
        dcp.save(state, checkpoint_id=folder)
        if rank == 0:
            torch.save(whole, folder + ".pt")
"""


def test_tensors_that_two_ranks_saved(tmp_path: Path) -> None:
    save_on_two_ranks(SAVE, tmp_path / "saved", tmp_path)
    whole = torch.load(tmp_path / "saved.pt", weights_only=True)
    found = read(tmp_path / "saved")
    assert (
        set(found["model"]) == set(whole)
        and found["step"] == 5
        and len(list((tmp_path / "saved").glob("*.distcp"))) == 2
    )
    for name, tensor in whole.items():
        entry = found["model"][name]
        assert entry.bytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), name
    assert isinstance(found["model"]["columns"].storage.data, Computed)
    ckptool.convert(tmp_path / "saved", tmp_path / "out.pt", verify=True)
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same_objects(whole, {name: got["model"][name] for name in whole})


# What is refused -----------------------------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[Any], Any]) -> Path:
    """The folder with another table, written by torch's own classes."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # made by this test
    replaced = change(metadata)
    path.write_bytes(pickle.dumps(replaced if isinstance(replaced, Metadata) else metadata))
    return folder


def place(metadata: Metadata, name: str = "half") -> tuple[MetadataIndex, _StorageInfo]:
    return next((index, info) for index, info in metadata.storage_data.items() if index.fqn == name)


def placed(**changes: Any) -> Callable[[Any], None]:
    """Changes where one tensor is."""

    def change(metadata: Metadata) -> None:
        index, info = place(metadata)
        for name, value in changes.items():
            setattr(info, name, value)
        assert metadata.storage_data[index] is info

    return change


def chunk(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda metadata: change(metadata.state_dict_metadata["half"])


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    parts = [ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes)) for begin, sizes in boxes]
    return chunk(lambda tensor: setattr(tensor, "chunks", parts))


def without_place(metadata: Metadata) -> None:
    del metadata.storage_data[place(metadata)[0]]


def swapped_places(metadata: Metadata) -> None:
    (a, one), (b, other) = place(metadata, "half"), place(metadata, "scalar")
    metadata.storage_data[a], metadata.storage_data[b] = other, one


def both_paths(metadata: Metadata) -> None:
    metadata.planner_data["half"] = ("scalar",)


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
        (lambda m: placed(offset=place(m)[1].offset + 1)(m), Corrupt, "no torch zip"),
        (lambda m: placed(length=place(m)[1].length - 1)(m), CkptoolError, None),
        (swapped_places, Corrupt, "should be bf16"),
        (without_place, Corrupt, "does not say where the chunk of half at"),
        (chunks(((0, 0), (4, 3))), Corrupt, "overlap, leave gaps"),
        (chunks(((0, 0), (5, 4))), Corrupt, "overlap, leave gaps"),
        (chunks(((0, 0), (5, 3)), ((0, 0), (5, 3))), Corrupt, "overlap, leave gaps"),
        (chunks(((0, 0), (2, 3)), ((2, 0), (3, 3))), Corrupt, "should be"),
        (chunks(((0,), (15,))), Corrupt, "overlap, leave gaps"),
        (chunks(), Corrupt, "overlap, leave gaps"),
        (chunk(lambda t: setattr(t, "size", torch.Size((3, 5)))), Corrupt, "overlap, leave gaps"),
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
        index, info = place(metadata)
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


def test_a_file_of_a_rank_is_what_that_rank_saved(folder: Path) -> None:
    (rank,) = folder.glob("*.distcp")
    found = ckptool.open(rank)
    whole = dict(tensors(read(folder).tree))
    assert {entry.bytes() for _, entry in tensors(found.tree)} == {entry.bytes() for entry in whole.values()}
    (note,) = found.notes
    assert (
        note.code == "part"
        and found.part is not None
        and found.part.label == "rank 0 of 1"
        and note.fix == ("ckptool", "inspect", str(folder))
    )
    (folder / "__3_0.distcp").write_bytes(rank.read_bytes())
    with pytest.raises(Unsupported, match=r"no value of \.metadata is in"):
        ckptool.inspect(folder / "__3_0.distcp")
    (folder / ".metadata").unlink()
    with pytest.raises(OnlyAPart, match="without the table"):
        ckptool.inspect(rank)
    with pytest.raises(Truncated, match=r"no \.metadata"):
        ckptool.inspect(folder)


def test_the_table_stands_for_its_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_objects(ckptool.load(folder / ".metadata"), ckptool.load(folder))
    monkeypatch.chdir(folder)
    assert ckptool.inspect(".metadata").listing.container == "dcp"
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / ".metadata", alone)
    assert ckptool.inspect(alone / ".metadata").listing.container == "pickle"


def test_what_nothing_uses_is_noted(folder: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata.pop("half")

    (folder / "__3_0.distcp").write_bytes(b"old")
    found = read(edit(folder, change))
    assert [note.code for note in found.notes] == ["unused-record", "stale-shards"]
    assert "half" in found.notes[0].message and "__3_0.distcp" in found.notes[1].message


def test_a_dcp_folder_with_another_checkpoint_in_it(folder: Path) -> None:
    torch.save(training_state()["model"], folder / "pytorch_model.bin")
    with pytest.raises(Ambiguous, match="holds 2 checkpoints"):
        read(folder)


def test_safetensors_folders_are_named(folder: Path) -> None:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "model.distcp.safetensors"

    (rank,) = folder.glob("*.distcp")
    rank.rename(folder / "model.distcp.safetensors")
    with pytest.raises(Unsupported, match="as safetensors"):
        read(edit(folder, change))
