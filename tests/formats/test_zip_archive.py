"""The zip directory: where it puts the data is confirmed before any is used. What it refuses: `test_hostile_zip`."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptool.checkpoint.files import Source
from ckptool.errors import Ambiguous, CkptoolError, Corrupt
from ckptool.formats import read
from ckptool.formats.zip import directory
from ckptool.formats.zip.directory import Archive, read_archive
from ckptool.formats.zip.record import CENTRAL, END, END64, LOCAL, LOCATOR, Record
from ckptool.formats.zip.writer import moved_entry
from tests.support.files import torch_bytes, written
from tests.support.zips import record_starts

Edit = Callable[[bytes], bytes]
FILE = torch_bytes({"w": torch.arange(3.0), "v": torch.ones(2)})
END_AT = len(FILE) - END.size
END64_AT = END_AT - LOCATOR.size - END64.size
DIRECTORY = struct.unpack_from("<Q", FILE, END64_AT + 48)[0]


def put(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def central(name: str) -> int:
    """Where the directory's entry for a record is."""
    return FILE.index(name.encode(), DIRECTORY) - CENTRAL.size


def local(name: str) -> int:
    return FILE.index(name.encode()) - LOCAL.size


def renamed(old: bytes, new: bytes, places: str) -> Edit:
    def edit(data: bytes) -> bytes:
        head, tail = data[:DIRECTORY], data[DIRECTORY:]
        return (head.replace(old, new) if "local" in places else head) + (
            tail.replace(old, new) if "central" in places else tail
        )

    return edit


def patched(record: str, where: str, offset: int, new: bytes) -> Edit:
    return lambda data: put(data, (central if where == "central" else local)(record) + offset, new)


W = "archive/data/0"


# Predicted, then confirmed --------------------------------------------------------------------------------------------

UNCONFIRMED: dict[str, tuple[Edit, type[CkptoolError]]] = {
    "30 another name": (renamed(b"archive/data/0", b"archive/data/7", "local"), Ambiguous),
    "30 a longer name": (lambda d: put(d, local(W) + 26, struct.pack("<H", 15)), Ambiguous),
    "31 another method": (patched(W, "local", 8, b"\x08\0"), Corrupt),
    "32 another place": (lambda d: put(d, local(W) + 28, struct.pack("<H", 0)), Corrupt),
    "32 another size": (lambda d: put(d, d.index(b"PK\x07\x08", local(W)) + 8, b"\x08"), Corrupt),
    "32 another checksum": (lambda d: put(d, d.index(b"PK\x07\x08", local(W)) + 4, b"xxxx"), Corrupt),
    "44 no header": (patched(W, "local", 0, b"PX"), Corrupt),
}


@pytest.mark.parametrize("name", UNCONFIRMED)
def test_a_local_header_is_checked_before_its_data_is_used(name: str, tmp_path: Path) -> None:
    edit, error = UNCONFIRMED[name]
    checkpoint = read(written(edit(FILE), tmp_path / "a.pt"))  # opening looks at no header of data
    data = checkpoint.tree["w"].storage.data
    with pytest.raises(error):
        data.read(0, 4)
    with pytest.raises(error):
        data.ready()
    with pytest.raises(error):
        checkpoint.tree["w"].numpy()
    assert checkpoint.tree["v"].bytes() == struct.pack("<2f", 1, 1)


def test_predicted_places_are_right_for_every_record(tmp_path: Path) -> None:
    path = written(FILE, tmp_path / "a.pt")
    archive = read_archive(Source(path))
    assert {name: record.data_at for name, record in archive.records.items()} == record_starts(path)
    for record in archive.records.values():
        record.confirm()


def test_predicted_places_in_an_archive_of_python(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for n, method in enumerate((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)):
            with archive.open(zipfile.ZipInfo(f"archive/é{n}"), "w", force_zip64=True) as file:
                file.write(b"x" * 1000)
            archive.writestr(f"archive/{n}", b"y" * 70_000, method)
    found = read_archive(Source(tmp_path / "a.zip"))
    for record in found.records.values():
        record.confirm()
        assert record.contents(100_000) in (b"x" * 1000, b"y" * 70_000)


def test_a_stream_of_python_with_descriptors(tmp_path: Path) -> None:
    class Pipe:
        def __init__(self, path: Path) -> None:
            self.file = path.open("wb")

        def write(self, data: bytes) -> int:
            return self.file.write(data)

        def flush(self) -> None:
            self.file.flush()

    pipe = Pipe(tmp_path / "a.zip")
    with zipfile.ZipFile(pipe, "w") as archive:  # type: ignore[arg-type]
        archive.writestr("archive/a", b"a" * 100)
        archive.writestr("archive/b", b"b" * 10_000, zipfile.ZIP_DEFLATED)
    pipe.file.close()
    found = read_archive(Source(tmp_path / "a.zip"))
    assert [record.contents(100_000) for record in found.records.values()] == [b"a" * 100, b"b" * 10_000]


@pytest.mark.parametrize(
    "wide", [(3 << 30, 3 << 30, 0), (5 << 30, 3 << 30, 100), (100, 100, 3 << 30), (5 << 30, 5 << 30, 5 << 30)]
)
def test_zip64_sizes_that_would_fit_32_bits_keep_their_fields(wide: tuple[int, int, int], tmp_path: Path) -> None:
    """An entry with 64-bit sizes that would have fitted into 32 keeps all of them when the record moves."""
    size, stored, header = wide
    full = 0xFFFFFFFF
    narrow = [full if value > (1 << 31) - 1 else value for value in (stored, size, header)]
    fixed = CENTRAL.pack(b"PK\x01\x02", 45, 45, 0, 8, 0, 0, 7, narrow[0], narrow[1], 1, 0, 0, 0, 0, 0, narrow[2])
    archive = Archive(Source(written(b"x", tmp_path / "a")), 0, 0, b"")
    record = Record(archive, "r", fixed, 0, 8, 7, stored, size, header, full in narrow)
    for place in (64, 6 << 30):
        raw = moved_entry(record, place) + b""
        again = Archive(archive.source, 0, 0, b"")
        directory._read_entries(again, raw, 1)
        found = again.records["r"]
        assert (found.size, found.stored, found.header, found.crc) == (size, stored, place, 7)


def test_edits_in_place_are_counted_and_bounded(tmp_path: Path) -> None:
    """Each state inside the file is looked at by the reader: a file with more than a hundred is refused, without
    recursion's own error."""
    from ckptool.errors import Conflict
    from ckptool.formats import torch_zip
    from ckptool.output.sink import Sink

    path = written(FILE, tmp_path / "a.pt")
    for edits in range(directory.MAX_EDITS):
        checkpoint = read(path)
        assert checkpoint.origin.archive.edits == edits
        plan = torch_zip.append(replace(checkpoint, tree={**checkpoint.tree, "n": edits}))
        assert plan is not None
        with path.open("r+b") as file:
            Sink(file.fileno(), plan.keep, plan.nbytes, None).write(plan.files[""])
    checkpoint = read(path)
    assert checkpoint.tree["n"] == directory.MAX_EDITS - 1
    with pytest.raises(Conflict, match="edited in place 100 times"):
        torch_zip.append(checkpoint)
    assert torch.load(path, weights_only=True)["n"] == directory.MAX_EDITS - 1
