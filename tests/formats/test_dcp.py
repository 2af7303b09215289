"""Folders of torch.distributed.checkpoint: read as torch reads them, bit for bit, however a chunk is stored: in a zip,
in a stream of zstd, in safetensors."""

from __future__ import annotations

import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

import ckptool
from ckptool.checkpoint.files import Folder, Source
from ckptool.checkpoint.tree import tensors
from ckptool.errors import CkptoolError, Corrupt, LimitExceeded, MissingExtra, NotACheckpoint, OnlyAPart, Unsupported
from ckptool.formats import read, torch_zip
from ckptool.formats.dcp import payloads
from ckptool.formats.dcp.tables import Place
from tests.support.cli import Run
from tests.support.engine_folders import edit, placed, save_dcp, training_state
from tests.support.errors import refused, three_parts
from tests.support.files import torch_bytes
from tests.support.looped import looped
from tests.support.ranks import save_on_two_ranks
from tests.support.same import assert_same_objects


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dcp(training_state(), tmp_path_factory.mktemp("dcp") / "saved")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "saved"))


def contiguous(value: Any) -> Any:
    """Views of one storage, and strides of what torch assembles itself, are not kept by torch's own reader."""
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: contiguous(part) for key, part in value.items()}
    return [contiguous(part) for part in value] if isinstance(value, list) else value


def test_everything_as_torch_reads_it(folder: Path, tmp_path: Path) -> None:
    found = read(folder)
    assert found.container == "dcp" and found.notes == () and found.discarded == ()
    assert ckptool.diff(folder / ".metadata", folder).same  # the table stands for its folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, tmp_path / "torch.pt")
    ckptool.convert(folder, tmp_path / "ours.pt", verify=True)
    expected = torch.load(tmp_path / "torch.pt", weights_only=False)
    assert_same_objects(contiguous(expected), contiguous(torch.load(tmp_path / "ours.pt", weights_only=True)))


def test_enums_that_python_pickled_by_name_are_no_unknown_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.11.0 to 3.11.3 did."""
    formats = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(formats, "__reduce_ex__", lambda self, _: (getattr, (type(self), self._name_)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save({"a.weight": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert b"getattr" in (tmp_path / "dcp" / ".metadata").read_bytes()
    found = read(tmp_path / "dcp")
    assert found.notes == found.discarded == () and ckptool.scan(tmp_path).files[0].state == "good"


# Many ranks ----------------------------------------------------------------------------------------------------------


APART = """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def save(rank, folder, mesh):
        whole = {"rows": torch.randn(7, 5), "same": torch.arange(6.0), "one": torch.randn(1, 8), "n": torch.tensor(2)}
        how = {"rows": Shard(0), "same": Replicate(), "one": Shard(0), "n": Replicate()}
        state = {"model": {n: distribute_tensor(t, mesh, [how[n]]) for n, t in whole.items()}, "step": 5, "rank": rank}
        state["buffer"] = torch.full((3,), float(rank))
        dcp.save(state, checkpoint_id=folder, use_collectives=False)
"""


@pytest.fixture(scope="module")
def tables_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("apart")
    save_on_two_ranks(APART, scratch / "saved", scratch)
    return scratch / "saved"


@pytest.fixture
def apart(tables_of_two_ranks: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tables_of_two_ranks, tmp_path / "apart"))


@pytest.mark.parametrize("name", ["model.same", "buffer"])
def test_damage_in_values_that_both_ranks_saved_is_found(name: str, apart: Path) -> None:
    """Rank 0's are taken; those of rank 1 are in no tensor, and read by nothing else."""
    assert ckptool.verify(apart).fine
    table = pickle.loads((apart / "__1.metadata").read_bytes())  # made by this test
    info = next(info for index, info in table.storage_data.items() if index.fqn == name)
    entry = torch_zip.read(Source(apart / "__1_0.distcp").part(info.offset, info.length)).tree
    data = bytearray((apart / "__1_0.distcp").read_bytes())
    data[entry.storage.data.offset + 5] ^= 16
    (apart / "__1_0.distcp").write_bytes(data)
    (problem,) = ckptool.verify(apart).problems
    assert problem.code == "checksum" and "__1_0.distcp" in problem.record and problem.tensors


def test_large_objects_of_ranks_are_not_said_to_differ(apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "SMALL", 8)
    notes = {note.code: note.message for note in read(apart).notes}
    assert "rank" in notes["replicas-not-compared"] and "that of rank 0" not in notes["replicas-differ"]


def test_places_that_overlap_are_not_compared_without_end(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(bytes(1 << 20))
    found = payloads.Payloads(Folder(tmp_path))
    first, *others = (Place("__0_0.distcp", at, 1 << 18) for at in range(9))
    assert [found.same(first, other) for other in others] == [True] * 4 + [None] * 4


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_is_refused_as_such(tmp_path: Path) -> None:
    saved = {"q": torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.quint8), "w": torch.ones(2)}
    save_state(saved, checkpoint_id=tmp_path / "a", no_dist=True)
    empty = {"q": torch.quantize_per_tensor(torch.zeros(2, 2), 0.1, 0, torch.quint8), "w": torch.zeros(2)}
    load_state(empty, checkpoint_id=tmp_path / "a", no_dist=True)
    assert empty["q"].equal(saved["q"])  # nothing is damaged
    refused(Unsupported, tmp_path, lambda: ckptool.inspect(tmp_path / "a"), "q is a quantized tensor")


def test_tables_of_ranks_that_lack_one(apart: Path) -> None:
    (apart / "__1.metadata").rename(apart / "other")
    assert "15 of its 35 elements are in no file" in refused("corrupt", apart, lambda: read(apart)).what
    (apart / "__1.metadata.tmp").write_bytes(b"")
    assert "lacks the tables of 1 rank: __1.metadata" in refused("corrupt", apart, lambda: read(apart)).what
    (apart / "__1.metadata.tmp").unlink()
    (apart / "other").rename(apart / "__2.metadata")
    assert "lacks the tables of 1 rank: __1.metadata" in refused("corrupt", apart, lambda: read(apart)).what


# What engines and versions write -----------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("w", "bias"), ("w", "a.bias")])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_without_paths_are_said_to_be_flat_where_they_may_be(names: tuple[str, ...], tmp_path: Path) -> None:
    save_state({name: torch.ones(2) for name in names}, checkpoint_id=tmp_path / "a", no_dist=True)
    read_back = read(edit(tmp_path / "a", lambda metadata: setattr(metadata, "planner_data", {})))
    assert set(read_back.tree) == {*names}
    assert [note.code for note in read_back.notes] == ["flat-names"] * any("." in name for name in names)


def test_tables_of_megatron_name_other_classes(folder: Path) -> None:
    """By hand, after megatron_core 0.16.1: `MCoreMetadata` in a module of its own, and no paths."""
    expected = set(read(edit(folder, lambda metadata: setattr(metadata, "planner_data", {}))).tree)
    path = folder / ".metadata"
    old = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    data = pickle.dumps(pickle.loads(path.read_bytes()), protocol=2)  # made by this test
    path.write_bytes(data.replace(old, b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"))
    found = read(folder)
    assert set(found.tree) == expected and [note.code for note in found.notes] == ["flat-names"]
    path.write_bytes(data.replace(old, b"cmegatron.other\nMetadata\n"))
    with pytest.raises(NotACheckpoint):
        read(folder)


def test_what_is_no_model_by_itself_is_said(folder: Path, tmp_path: Path, run: Run) -> None:
    """Parameters that FSDP flattened; one rank's file; what no value of the table is in."""
    flat = save_dcp({"model": {"_flat_param": torch.randn(63), "1.mean": torch.ones(5)}}, tmp_path / "flat")
    done = run("convert", str(flat), "-o", str(tmp_path / "out.safetensors"))
    assert done.code == 2 and "LOCAL_STATE_DICT" in done.err and not (tmp_path / "out.safetensors").exists()
    (rank,) = folder.glob("*.distcp")
    error = refused(OnlyAPart, tmp_path, lambda: ckptool.open(rank), "is what one rank saved")
    assert str(folder) in error.fix
    (folder / "__3_0.distcp").write_bytes(b"old")
    (folder / "__4_0.distcp").touch()  # as torch writes one for a rank that has nothing to save
    notes = read(edit(folder, lambda metadata: metadata.state_dict_metadata.pop("half") and None)).notes
    assert [note.code for note in notes] == ["unused-record", "stale-shards"] and "1 file is" in notes[1].message
    assert "half" in notes[0].message and "__3_0.distcp" in notes[1].message


# Zips that are alike -------------------------------------------------------------------------------------------------


def written(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_state(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def values(folder: Path) -> dict[Any, bytes]:
    return {path: entry.bytes() for path, entry in tensors(read(folder).tree)}


def outcome(folder: Path, most: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payloads, "MOST_TEMPLATES", most)
        try:
            return values(folder)
        except CkptoolError as error:
            return str(error)


def test_a_zip_that_differs_in_any_byte_is_read_in_full(tmp_path: Path) -> None:
    """Every byte around the values, changed in one zip of many: what the reader of zips says of it is what is said."""
    folder = written({f"w{i}": torch.arange(6.0) + i for i in range(3)}, tmp_path / "saved")
    (rank,) = folder.glob("*.distcp")
    whole, size = rank.read_bytes(), len(rank.read_bytes()) // 3
    expected = values(folder)
    for at in range(size, 2 * size, 7):
        rank.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        (quick, full) = (outcome(folder, most) for most in (payloads.MOST_TEMPLATES, 0))
        assert quick == full, at
        assert isinstance(quick, str) or quick.keys() == expected.keys()


def test_values_that_hold_the_end_of_another_zip_are_refused_where_they_were(tmp_path: Path) -> None:
    """An end record with all that follows for its comment: what readers of zips see there differs."""
    folder = written({f"w{i}": torch.zeros(64, dtype=torch.uint8) for i in range(3)}, tmp_path / "saved")
    (rank,) = folder.glob("*.distcp")
    data = bytearray(rank.read_bytes())
    size = len(data) // 3
    at = read(folder)["w1"].storage.data.offset  # type: ignore[union-attr]
    end = 2 * size if at < 2 * size else 3 * size
    data[at : at + 22] = b"PK\5\6" + bytes(16) + (end - at - 22).to_bytes(2, "little")
    rank.write_bytes(data)
    assert outcome(folder, payloads.MOST_TEMPLATES) == outcome(folder, 0)
    assert "comment of another" in outcome(folder, 0)


# zstd ----------------------------------------------------------------------------------------------------------------


def zstd() -> list[Any]:
    pytest.importorskip("zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    return [ZStandard()]


def test_compressed_payloads_are_read_as_others(tmp_path: Path) -> None:
    state = {**training_state(), "large": torch.randn(700, 600).round(decimals=1)}
    plain, packed = written(state, tmp_path / "plain"), written(state, tmp_path / "zstd", _extensions=zstd())
    assert values(plain) == values(packed)
    verified = ckptool.verify(packed)
    assert verified.fine and verified.checksums != "none"
    ckptool.convert(packed, tmp_path / "out.pt", verify=True)
    assert ckptool.diff(tmp_path / "out.pt", plain, ignore=["strides"]).same


def test_no_more_inflated_chunks_are_kept_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{number}": torch.randn(1024) for number in range(5)}
    found = read(written(state, tmp_path / "saved", _extensions=zstd())).tree
    begun: list[Any] = []
    made = payloads.inflate
    monkeypatch.setattr(payloads, "inflate", lambda part, most: begun.append(part) or made(part, most))
    for most, times in ((10_000, 5), (10_000, 10), (1 << 20, 15), (1 << 20, 15)):
        monkeypatch.setattr(payloads, "MOST_KEPT", most)
        for name, value in state.items():
            assert bytes(found[name].storage.data.read(0, 4096)) == value.numpy().tobytes()
        assert times - 2 <= len(begun) <= times  # two may still be there


def test_payloads_that_cannot_be_unpacked_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written({"w": torch.ones(3)}, tmp_path / "saved")
    with pytest.raises(Unsupported, match=r"w is packed by stream\.other/2"):
        read(edit(folder, placed("w", transform_descriptors=["stream.other/2"])))
    folder = written({"w": torch.ones(3)}, tmp_path / "zstd", _extensions=zstd())
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtra, match=r"needs the package zstandard") as caught:
        read(folder)
    three_parts(caught.value)
    assert "pip install 'ckptool[zstd]'" in caught.value.fix


def bomb(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(bytes(1 << 24))[: len(data)].ljust(len(data), b"\0")


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], type[CkptoolError]]] = {
    "damaged": (lambda data: data[:40] + bytes([data[40] ^ 255]) + data[41:], CkptoolError),
    "cut": (lambda data: data[: len(data) // 2].ljust(len(data), b"\0"), CkptoolError),
    "zeros": (lambda data: bytes(len(data)), Corrupt),
    "bomb": (bomb, LimitExceeded),
}


@looped("kind", DAMAGED)
def test_compressed_payloads_that_are_damaged(kind: str, tmp_path: Path) -> None:
    change, error = DAMAGED[kind]
    folder = written({"w": torch.randn(500)}, tmp_path / "saved", _extensions=zstd())
    (rank,) = folder.glob("*.distcp")
    rank.write_bytes(change(rank.read_bytes()))
    assert [problem.tensors for problem in ckptool.verify(folder, finite=True).problems] == [("w",)]
    with pytest.raises(error) as caught:
        ckptool.convert(folder, tmp_path / "out.pt")
    three_parts(caught.value)
    assert not (tmp_path / "out.pt").exists()


OTHERS: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "an object cut early": ("object", lambda plain: plain[:100], "truncated"),
    "an object cut late": ("object", lambda plain: plain[:450], "truncated"),
    "another value": ("w", lambda plain: plain.replace(torch.ones(5).numpy().tobytes(), bytes(20)), "corrupt"),
    "another shape": ("w", lambda plain: torch_bytes(torch.ones(5, 1)), "corrupt"),
}


@looped("kind", OTHERS)
def test_what_is_compressed_is_damaged_itself(kind: str, tmp_path: Path) -> None:
    """In a stream that inflates without an error."""
    import zstandard

    name, change, code = OTHERS[kind]
    folder = written({"w": torch.ones(5), "object": {"a", "b"}}, tmp_path / "saved", _extensions=zstd())
    (rank,) = folder.glob("*.distcp")
    table = pickle.loads((folder / ".metadata").read_bytes())  # made by this test
    place = next(info for index, info in table.storage_data.items() if index.fqn == name)
    data = bytearray(rank.read_bytes())
    plain = zstandard.ZstdDecompressor().stream_reader(bytes(data[place.offset :][: place.length])).read()
    changed = zstandard.ZstdCompressor().compress(change(plain))
    rank.write_bytes(data + changed)
    edit(folder, placed(name, offset=len(data), length=len(changed)))
    (problem,) = ckptool.verify(folder).problems
    assert problem.code == code


def test_a_safetensors_that_has_other_chunks_than_the_table_says(tmp_path: Path) -> None:
    folder = written({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "saved",
                     serialization_format=SerializationFormat.SAFETENSORS)  # fmt: skip
    (rank,) = folder.glob("*.distcp")
    data = rank.read_bytes()
    for old, new in ((b'"b":{"dtype"', b'"c":{"dtype"'), (b'saved_offsets\\": [0]', b'saved_offsets\\": [1]')):
        rank.write_bytes(data.replace(old, new))
        refused(Corrupt, tmp_path, lambda: read(folder), r"no chunk of [ab] at \[0\]")
