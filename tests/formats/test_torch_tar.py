"""Tar files of before 0.1.10 against torch's own reader, and archives that nobody should send."""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.checkpoint import FileRange, TensorEntry
from ckptool.checkpoint.nodes import Global
from ckptool.checkpoint.tree import tensors
from ckptool.errors import Corrupt, Truncated, Unsupported
from ckptool.formats import read, torch_zip
from fixtures.torch_tar import SYS_INFO, save_tar, tar_bytes, tar_members
from tests.support.files import carry_out, load
from tests.support.legacy_streams import (
    EVIL,
    WRONG,
    Pid,
    block,
    by_hand,
    count,
    four,
    opened_tar,
    pickle_bytes,
    place,
    tar_refused,
    triple,
    with_member,
)
from tests.support.looped import looped
from tests.support.processes import soon
from tests.support.same import assert_same_objects


def values() -> dict[str, Any]:
    """What a checkpoint of that time could hold, and what came after it."""
    torch.manual_seed(0)
    weight = torch.randn(3, 4)
    return {
        "weight": weight,
        "tied": weight,
        "rows": weight[1:],
        "transposed": weight.t(),
        "long": torch.arange(5),
        "half": torch.randn(2).half(),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "zero-dim": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "nested": OrderedDict(x=[1, 2.5, None, "é"]),
        "storage": torch.arange(4).float().storage(),
    }


@pytest.fixture
def members() -> dict[str, bytes]:
    return tar_members({"w": torch.arange(6.0).reshape(2, 3), "b": torch.arange(2)})


# Against torch --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_torch_loads_the_same_from_the_tar_and_from_the_zip_made_of_it(protocol: int, tmp_path: Path) -> None:
    file = save_tar(values(), tmp_path / "old.pth.tar", protocol)
    checkpoint = read(file)
    assert checkpoint.container == "torch-tar" and checkpoint.metadata["protocol_version"] == "1000"
    assert checkpoint.tree["weight"] is checkpoint.tree["tied"]
    assert checkpoint.tree["rows"].storage is checkpoint.tree["transposed"].storage is checkpoint.tree["weight"].storage
    out = carry_out(torch_zip.write(checkpoint), tmp_path / "out.pt")
    before = load(file, weights_only=False)
    assert_same_objects(before, load(out, weights_only=False))
    assert torch.equal(before["rows"], values()["rows"])  # so the maker of these files keeps to torch's layout


def test_nothing_is_loaded_and_nothing_extracted(
    members: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = opened_tar(tar_bytes(members), tmp_path)
    for _, entry in tensors(checkpoint.tree):
        assert isinstance(entry, TensorEntry) and isinstance(entry.storage.data, FileRange)
        assert entry.storage.data.file is checkpoint.source
    assert os.listdir(tmp_path) == ["old.pth.tar"]


# Older than any torch that installs -----------------------------------------------------------------------------------


def tar_entry(data: bytes, folder: Path) -> TensorEntry:
    entry = opened_tar(data, folder).tree["w"]
    assert isinstance(entry, TensorEntry)
    return entry


def test_storages_that_are_views_of_larger_ones(tmp_path: Path) -> None:
    given = {key: value for key, value in values().items() if isinstance(value, torch.Tensor)}
    file = save_tar(given, tmp_path / "old.pth.tar", views=True)
    found, loaded = dict(tensors(read(file).tree)), load(file, weights_only=False)
    assert all(torch.equal(found[(key,)].torch(), loaded[key]) for key in given)


def test_storages_without_locations_are_refused(tmp_path: Path) -> None:
    """torch reads none."""
    error = tar_refused(by_hand(storages=count(1) + triple(7, "FloatStorage") + four()), tmp_path)
    assert isinstance(error, Corrupt) and "storage 0" in error.what


def test_what_had_no_dimensions_was_empty(tmp_path: Path) -> None:
    nothing = count(1) + triple(8, 7, "FloatTensor") + place((), (), 0)
    empty = count(1) + triple(7, "cpu", "FloatStorage") + block(b"", 0) + pickle_bytes([])
    assert tar_entry(by_hand(tensors=nothing, storages=empty), tmp_path).shape == (0,)
    without = count(1) + triple(8, None, "DoubleTensor") + place((), (), 0)
    entry = tar_entry(by_hand(tensors=without), tmp_path)
    assert entry.shape == (0,) and entry.dtype.name == "f64"


def test_a_module_pickled_whole(tmp_path: Path) -> None:
    module = pickle_bytes({"net": Pid((torch.nn.Linear, "net.py", "class Linear: ...\n")), "w": Pid("8")})
    checkpoint = opened_tar(by_hand(pickle=module), tmp_path)
    assert checkpoint.tree["net"] is Global("torch.nn.modules.linear", "Linear")


def test_an_archive_of_a_big_endian_machine_is_refused(tmp_path: Path) -> None:
    big = by_hand(sys_info=pickle_bytes({**SYS_INFO, "little_endian": False}))
    assert isinstance(tar_refused(big, tmp_path), Unsupported)


# Hostile archives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", EVIL.values(), ids=EVIL)
def test_an_archive_with_other_members_is_corrupt_and_nothing_is_extracted(
    fields: dict[str, Any], members: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    error = tar_refused(with_member(members, **fields), tmp_path)
    assert isinstance(error, Corrupt)
    assert os.listdir(tmp_path / "in") == [] and sorted(os.listdir(tmp_path)) == ["in", "old.pth.tar"]


@pytest.mark.parametrize(
    "gone", [("storages",), ("tensors",), ("storages", "tensors"), ("pickle",), ("sys_info",)], ids=str
)
def test_a_missing_member_is_refused(gone: tuple[str, ...], members: dict[str, bytes], tmp_path: Path) -> None:
    error = tar_refused(tar_bytes({name: content for name, content in members.items() if name not in gone}), tmp_path)
    assert isinstance(error, Corrupt) and all(name in error.what for name in gone)


@looped("changes", WRONG.values(), ids=WRONG)
def test_members_that_contradict_each_other_are_refused(changes: dict[str, bytes], tmp_path: Path) -> None:
    assert isinstance(tar_refused(by_hand(**changes), tmp_path), (Corrupt, Truncated, Unsupported))


def test_what_is_hidden_behind_the_tables_is_noted(tmp_path: Path) -> None:
    storages = count(1) + triple(7, "cpu", "FloatStorage") + four() + pickle_bytes([]) + b"hidden"
    notes = {note.code: note.message for note in opened_tar(by_hand(storages=storages), tmp_path).notes}
    assert "6 bytes" in notes["unused-bytes"] and "no-checksums" in notes
    notes = {note.code: note.message for note in opened_tar(by_hand() + b"\0" * 511 + b"x", tmp_path).notes}
    assert "trailing-bytes" in notes


def headers(data: bytes) -> Iterator[int]:
    """The places of the headers of an archive without attributes."""
    at = 0
    while data[at]:
        yield at
        at += 512 + -(-int(data[at + 124 : at + 135], 8) // 512) * 512


def test_a_wrong_header_checksum_is_refused(members: dict[str, bytes], tmp_path: Path) -> None:
    data = tar_bytes(members, pax=False)
    found = list(headers(data))
    assert len(found) == 4
    for at in found:
        for place_in in (100, 140, 150, 300):
            bad = bytearray(data)
            bad[at + place_in] ^= 1
            error = tar_refused(bytes(bad), tmp_path)
            assert isinstance(error, Truncated) and "checksum" in error.what


def test_a_cut_last_block_is_refused_or_read_as_tar_does(members: dict[str, bytes], tmp_path: Path) -> None:
    data = tar_bytes(members, pax=False)
    for cut in (1, 100, 511):
        assert isinstance(tar_refused(data[:-cut], tmp_path), Truncated)
    whole = len(data.rstrip(b"\0"))
    end = whole + -whole % 512
    for length in (end, end + 512, end + 1000):  # without the blocks of zeros that end an archive
        assert isinstance(tar_refused(data[:length], tmp_path), Truncated)
    assert list(opened_tar(data[: end + 1024], tmp_path).tree) == ["w", "b"]


def test_many_tiny_tensors_in_bounded_time(tmp_path: Path) -> None:
    number = 8_000
    tensor = b"".join(
        b"\x80\x02(M" + struct.pack("<H", 100 + i) + b"K\x07Nt." + place((4,), (1,), 0) for i in range(number)
    )
    with soon(1):
        checkpoint = opened_tar(by_hand(tensors=count(number) + tensor, pickle=pickle_bytes(Pid(100))), tmp_path)
    assert isinstance(checkpoint.tree, TensorEntry)


def test_calls_in_the_pickles_are_not_made(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    call = b"cos\nmkdir\n(V" + str(mark).encode() + b"\ntR"
    data = by_hand(
        storages=b"\x80\x02" + call + b"0" + count(1)[2:] + triple(7, "cpu", "FloatStorage") + four() + pickle_bytes([])
    )
    assert [node.name for node in opened_tar(data, tmp_path).discarded] == ["os.mkdir"]
    assert isinstance(tar_refused(by_hand(storages=b"\x80\x02" + call + b"."), tmp_path), Corrupt)
    assert not mark.exists()
