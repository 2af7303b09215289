"""`torch-zip` files beyond 4 GiB, as sparse files: ZIP64 is read, kept and written, and torch opens it."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.tree import tensors
from ckptool.formats import read, torch_zip
from fixtures.sparse import crc_of_zeros
from tests.support.files import load, rewritten, torch_bytes, written
from tests.support.same import assert_same_objects
from tests.support.small_zips import tied_state


def sparse(path: Path, sizes: list[int]) -> Checkpoint:
    """A torch zip with zeros for data, almost all of them holes, written by our own layout; torch reads it like its
    own."""
    shapes = {f"w{i}": size for i, size in enumerate(sizes)}
    source = path.with_suffix(".zeros")
    with source.open("wb") as file:
        file.truncate(max(sizes))
    from ckptool.checkpoint import FileRange
    from ckptool.checkpoint.files import Source

    zeros = Source(source)
    tree = {
        name: TensorEntry(Storage(FileRange(zeros, 0, size), "cpu", crc_of_zeros(size)), by_name("u8"), (size,), (1,))
        for name, size in shapes.items()
    }
    return Checkpoint(tree, torch_zip.NAME)


def write_with_holes(checkpoint: Checkpoint, path: Path) -> Path:
    """Carries out a plan, leaving holes where whole storages of zeros go; their checksums are known."""
    from ckptool.checkpoint.plan import Checksummed, Deferred

    plan = torch_zip.write(checkpoint)
    late: list[tuple[int, Deferred]] = []
    at = 0
    with path.open("wb") as file:
        for segment in plan.files[""]:
            file.seek(at)
            if isinstance(segment, Deferred):
                late.append((at, segment))
            elif isinstance(segment, Checksummed) and segment.crc.expected is not None:
                segment.crc.value = segment.crc.expected
            elif isinstance(segment, InlineBytes):
                file.write(segment.content)
            else:
                raise AssertionError(segment)
            at += segment.length
        for place, segment in late:
            file.seek(place)
            file.write(segment.make())
        file.truncate(plan.nbytes)
    return path


@pytest.mark.parametrize(
    "sizes", [[(1 << 32) + 5, 64], [(1 << 31) + 7, (1 << 31), 64, 0, 3], [0xFFFFFFFF, 1], [0xFFFFFFFE]]
)
def test_records_beyond_4_gib_are_written_as_zip64(sizes: list[int], tmp_path: Path) -> None:
    path = write_with_holes(sparse(tmp_path / "a.pt", sizes), tmp_path / "a.pt")
    checkpoint = read(path)
    assert [entry.shape[0] for _, entry in tensors(checkpoint.tree)] == sizes
    for _, entry in tensors(checkpoint.tree):
        entry.storage.data.ready()
        assert entry.storage.data.offset % 64 == 0
    stock = load(path, mmap=True)
    assert [len(tensor) for tensor in stock.values()] == sizes
    assert all(int(tensor[-1]) == 0 for tensor in stock.values() if len(tensor))
    with zipfile.ZipFile(path) as archive:
        assert [archive.getinfo(f"archive/data/{i}").file_size for i in range(len(sizes))] == sizes
    (tmp_path / "a.zeros").unlink()
    path.unlink()


def test_records_pushed_across_4_gib_by_a_longer_pickle_stay_readable(tmp_path: Path) -> None:
    """The header of a record that ends up beyond 4 GiB needs 64-bit offsets, and so another descriptor: it is written
    anew."""
    path = write_with_holes(sparse(tmp_path / "a.pt", [(1 << 32) - 10_000, 64, 64]), tmp_path / "a.pt")
    checkpoint = read(path)
    plan = torch_zip.write(replace(checkpoint, tree={**checkpoint.tree, "note": "x" * 20_000}))
    places = _places(plan)
    assert max(places.values()) > 1 << 32 > min(places.values())
    assert {key for key, place in places.items() if place >= 0xFFFFFFFF} == {"data/1", "data/2"} | {
        k for k in places if k.startswith((".data", "version"))
    }
    (tmp_path / "a.zeros").unlink()
    path.unlink()


def _places(plan: Any) -> dict[str, int]:
    """Where each record's header goes, by reading the plan's directory."""
    from ckptool.checkpoint import FileRange
    from ckptool.checkpoint.plan import Deferred
    from ckptool.formats.zip.record import CENTRAL

    segments = plan.files[""]
    directory = [s for s in segments if isinstance(s, Deferred)][-1].make()
    places, at = {}, 0
    while at < len(directory):
        fields = CENTRAL.unpack_from(directory, at)
        n, m, offset = fields[10], fields[11], fields[16]
        name = directory[at + 46 : at + 46 + n].decode()
        extra = directory[at + 46 + n : at + 46 + n + m]
        places[name.removeprefix("archive/")] = int.from_bytes(extra[-8:], "little") if offset == 0xFFFFFFFF else offset
        at += 46 + n + m
    assert any(isinstance(s, FileRange) for s in segments)
    return places


def test_stock_torch_loads_from_memory_what_is_written(tmp_path: Path) -> None:
    rewritten(written(torch_bytes(tied_state()), tmp_path / "a.pt"), tmp_path / "b.pt")
    assert_same_objects(torch.load(io.BytesIO((tmp_path / "b.pt").read_bytes()), weights_only=True), tied_state())
