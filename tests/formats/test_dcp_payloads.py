"""The ways in which torch's writers store a chunk: zips, many alike; zstd streams; safetensors."""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.state_dict_saver import save as save_state

import ckptool
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.tree import tensors
from ckptool.errors import CkptoolError, Corrupt, LimitExceeded, MissingExtra, Unsupported
from ckptool.formats import read
from ckptool.formats.dcp import compressed, templates
from tests.support.dcp_folders import edit, placed, training_state
from tests.support.errors import three_parts


def written(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_state(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def zstd() -> list[Any]:
    pytest.importorskip("zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    return [ZStandard()]


def values(folder: Path) -> dict[Any, bytes]:
    return {path: entry.bytes() for path, entry in tensors(read(folder).tree)}


# Zips that are alike -------------------------------------------------------------------------------------------------


def many(count: int = 40) -> dict[str, Any]:
    torch.manual_seed(1)
    layers = {f"layers.{i}.weight": torch.randn(4, 6) for i in range(count)}
    layers |= {f"layers.{i}.bias": torch.randn(6, 4) for i in range(count)}  # of the same size, and another shape
    return {**layers, **{f"layers.{i}.big": torch.randn(300, 200) for i in range(4)}}


def test_a_zip_that_differs_in_any_byte_is_read_in_full(tmp_path: Path) -> None:
    """Every byte around the values, changed in one zip of many: what the reader of zips says of it is what is said."""
    folder = written({f"w{i}": torch.arange(6.0) + i for i in range(3)}, tmp_path / "saved")
    (rank,) = folder.glob("*.distcp")
    whole, size = rank.read_bytes(), len(rank.read_bytes()) // 3
    expected = values(folder)
    for at in range(size, 2 * size, 7):
        rank.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        (quick, full) = (outcome(folder, most) for most in (templates.MOST, 0))
        assert quick == full, at
        assert isinstance(quick, str) or quick.keys() == expected.keys()


def outcome(folder: Path, most: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "MOST", most)
        try:
            return values(folder)
        except CkptoolError as error:
            return str(error)


def test_values_that_hold_the_end_of_another_zip_are_refused_where_they_were(tmp_path: Path) -> None:
    """An end record with all that follows for its comment: what readers of zips see there differs."""
    folder = written({f"w{i}": torch.zeros(64, dtype=torch.uint8) for i in range(3)}, tmp_path / "saved")
    (rank,) = folder.glob("*.distcp")
    data = bytearray(rank.read_bytes())
    size = len(data) // 3
    found = read(folder)["w1"]
    at = found.storage.data.offset  # type: ignore[union-attr]
    end = 2 * size if at < 2 * size else 3 * size
    record = b"PK\5\6" + bytes(16) + (end - at - 22).to_bytes(2, "little")
    data[at : at + 22] = record
    rank.write_bytes(data)
    assert outcome(folder, templates.MOST) == outcome(folder, 0)
    assert "comment of another" in outcome(folder, 0)


# zstd ----------------------------------------------------------------------------------------------------------------


def test_compressed_payloads_are_read_as_others(tmp_path: Path) -> None:
    state = {**training_state(), "large": torch.randn(700, 600).round(decimals=1), "many": many(3)}
    plain, packed = written(state, tmp_path / "plain"), written(state, tmp_path / "zstd", _extensions=zstd())
    assert values(plain) == values(packed)
    verified = ckptool.verify(packed)
    assert verified.fine and verified.checksums != "none"
    ckptool.convert(packed, tmp_path / "out.pt", verify=True)
    assert ckptool.diff(tmp_path / "out.pt", plain, ignore=["strides"]).same
    (rank,) = packed.glob("*.distcp")
    assert ckptool.open(rank)["large"].shape == (700, 600)


def test_no_more_inflated_chunks_are_kept_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{number}": torch.randn(1024) for number in range(5)}
    found = read(written(state, tmp_path / "saved", _extensions=zstd())).tree
    begun: list[Any] = []
    made = compressed.inflated
    monkeypatch.setattr(compressed, "inflated", lambda part, most: begun.append(part) or made(part, most))
    for most, times in ((10_000, 5), (10_000, 10), (1 << 20, 15), (1 << 20, 15)):
        monkeypatch.setattr(compressed, "MOST_KEPT", most)
        for name, value in state.items():
            assert bytes(found[name].storage.data.read(0, 4096)) == value.numpy().tobytes()
        assert times - 2 <= len(begun) <= times  # two may still be there


def test_compressed_payloads_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written({"w": torch.ones(3)}, tmp_path / "saved", _extensions=zstd())
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtra, match=r"needs the package zstandard") as caught:
        read(folder)
    three_parts(caught.value)
    assert "pip install 'ckptool[zstd]'" in caught.value.fix


def damaged(data: bytes) -> bytes:
    return data[:40] + bytes([data[40] ^ 255]) + data[41:]


def bomb(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(bytes(1 << 24))[: len(data)].ljust(len(data), b"\0")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (damaged, CkptoolError),
        (lambda data: data[: len(data) // 2].ljust(len(data), b"\0"), CkptoolError),
        (lambda data: bytes(len(data)), Corrupt),
        (bomb, LimitExceeded),
    ],
    ids=["damaged", "cut", "zeros", "bomb"],
)
def test_compressed_payloads_that_are_damaged(
    change: Callable[[bytes], bytes], error: type[CkptoolError], tmp_path: Path
) -> None:
    folder = written({"w": torch.randn(500)}, tmp_path / "saved", _extensions=zstd())
    (rank,) = folder.glob("*.distcp")
    rank.write_bytes(change(rank.read_bytes()))
    verified = ckptool.verify(folder, finite=True)
    assert [problem.tensors for problem in verified.problems] == [("w",)]
    with pytest.raises(error) as caught:
        ckptool.convert(folder, tmp_path / "out.pt")
    three_parts(caught.value)
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("keep", [100, 450])
def test_a_compressed_object_that_is_cut_off_is_damaged(keep: int, tmp_path: Path) -> None:
    import zstandard

    folder = written({"w": torch.randn(5), "object": {"a", "b"}}, tmp_path / "saved", _extensions=zstd())
    (rank,) = folder.glob("*.distcp")
    table = pickle.loads((folder / ".metadata").read_bytes())  # made by this test
    place = next(info for index, info in table.storage_data.items() if index.fqn == "object")
    data = bytearray(rank.read_bytes())
    plain = zstandard.ZstdDecompressor().stream_reader(bytes(data[place.offset :][: place.length])).read()
    cut = zstandard.ZstdCompressor().compress(plain[:keep])
    rank.write_bytes(data + cut)
    edit(folder, placed("object", offset=len(data), length=len(cut)))
    (problem,) = ckptool.verify(folder).problems
    assert problem.code == "truncated"


def test_other_extensions_are_named(tmp_path: Path) -> None:
    folder = written({"w": torch.ones(3)}, tmp_path / "saved")
    with pytest.raises(Unsupported, match=r"w is packed by stream\.other/2"):
        read(edit(folder, placed("w", transform_descriptors=["stream.other/2"])))


# safetensors ---------------------------------------------------------------------------------------------------------


def test_a_safetensors_that_has_other_chunks_than_the_table_says(tmp_path: Path) -> None:
    folder = written({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "saved",
                     serialization_format=SerializationFormat.SAFETENSORS)  # fmt: skip
    (rank,) = folder.glob("*.distcp")
    data = rank.read_bytes()
    rank.write_bytes(data.replace(b'"b":{"dtype"', b'"c":{"dtype"'))
    with pytest.raises(Corrupt, match=r"no chunk of b at \[0\]"):
        read(folder)
    rank.write_bytes(data.replace(b'saved_offsets\\": [0]', b'saved_offsets\\": [1]'))
    with pytest.raises(Corrupt, match=r"no chunk of [ab] at \[0\]"):
        read(folder)
    assert Folder(folder).names == [".metadata", "__0_0.distcp"]
