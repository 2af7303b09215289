"""The zip directory: where it puts the data is confirmed before any is used, and what would cost more than it is worth
is refused. What else it refuses: `test_hostile_zip`."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptool.checkpoint.files import Source
from ckptool.errors import Ambiguous, CkptoolError, Conflict, Corrupt, NotACheckpoint
from ckptool.formats import read, torch_zip
from ckptool.formats.zip import directory
from ckptool.formats.zip.directory import Archive
from ckptool.formats.zip.record import CENTRAL, END, END64, LOCAL, LOCATOR, Record
from ckptool.formats.zip.writer import moved_entry
from ckptool.output.sink import Sink
from tests.support.budget import meets_budget
from tests.support.errors import unreadable
from tests.support.files import torch_bytes, written
from tests.support.zip_layouts import Entry, Layout, Put, with_entry

FILE = torch_bytes({"w": torch.arange(3.0), "v": torch.ones(2)})
LOCAL_AT = FILE.index(b"archive/data/0") - LOCAL.size
DESCRIPTOR_AT = FILE.index(b"PK\x07\x08", LOCAL_AT)

# Predicted, then confirmed --------------------------------------------------------------------------------------------

UNCONFIRMED: dict[str, tuple[int, bytes, type[CkptoolError]]] = {
    "another name": (LOCAL_AT + LOCAL.size, b"archive/data/7", Ambiguous),
    "a longer name": (LOCAL_AT + 26, b"\x0f\0", Ambiguous),
    "another method": (LOCAL_AT + 8, b"\x08\0", Corrupt),
    "another place": (LOCAL_AT + 28, b"\0\0", Corrupt),
    "another size": (DESCRIPTOR_AT + 8, b"\x08", Corrupt),
    "another checksum": (DESCRIPTOR_AT + 4, b"xxxx", Corrupt),
    "no header": (LOCAL_AT, b"PX", Corrupt),
}


@pytest.mark.parametrize("name", UNCONFIRMED)
def test_a_local_header_is_checked_before_its_data_is_used(name: str, tmp_path: Path) -> None:
    at, new, error = UNCONFIRMED[name]
    checkpoint = read(written(FILE[:at] + new + FILE[at + len(new) :], tmp_path / "a.pt"))  # looks at no header of data
    data = checkpoint.tree["w"].storage.data
    with pytest.raises(error):
        data.read(0, 4)
    with pytest.raises(error):
        data.ready()
    with pytest.raises(error):
        checkpoint.tree["w"].numpy()
    assert checkpoint.tree["v"].bytes() == struct.pack("<2f", 1, 1)


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


# Limits --------------------------------------------------------------------------------------------------------------


def test_a_zip_bomb_is_not_inflated(put: Put) -> None:
    packer, unit = zlib.compressobj(9, zlib.DEFLATED, -15), b"N0" * (1 << 20)
    raw = packer.compress(b"\x80\x02") + b"".join(packer.compress(unit) for _ in range(150)) + packer.flush()
    assert len(raw) < 1 << 20
    for size in (150 << 21, 1000):  # what it is, what it might be, and lies
        layout = with_entry("data.pkl", method=8, content=raw, packed=True, size=size, size_local=size)
        outcome = meets_budget(layout.build())
        assert outcome.code == ("limit-exceeded" if size > 16 * len(raw) else "corrupt"), outcome
        assert outcome.megabytes < 64
    for record in ("version", "byteorder", ".storage_alignment"):
        bomb = put(with_entry(record, method=8, content=bytes(1 << 20)))
        assert meets_budget(bomb.read_bytes()).megabytes < 64


def many(count: int, zip64: bool, path: Path) -> Path:
    """An archive of empty records, and nothing else."""
    local = LOCAL.pack(b"PK\x03\x04", 20, 0x0800, 0, 0, 0, 0, 0, 0, 8, 0)
    fixed = CENTRAL.pack(b"PK\x01\x02", 20, 20, 0x0800, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0)[:-4]
    names = [b"a/%06x" % n for n in range(count)]
    body = b"".join([local + name for name in names])
    directory = b"".join([fixed + (n * 38).to_bytes(4, "little") + name for n, name in enumerate(names)])
    tail = END.pack(b"PK\x05\x06", 0, 0, count & 0xFFFF, count & 0xFFFF, len(directory), len(body), 0)
    if zip64:
        wide = END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), len(body))
        narrow = END.pack(b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, len(directory), len(body), 0)
        tail = wide + LOCATOR.pack(b"PK\x06\x07", 0, len(body) + len(directory), 1) + narrow
    return written(body + directory + tail, path)


def test_more_entries_than_the_end_record_can_count_are_corrupt(tmp_path: Path) -> None:
    # As Python writes it, all are there and none is a pickle.
    for count, zip64, error in (
        (65_536, False, Corrupt),
        (65_537, False, Corrupt),
        (65_535, False, NotACheckpoint),
        (70_000, True, NotACheckpoint),
    ):
        unreadable(many(count, zip64, tmp_path / "a.pt"), error)


def test_many_entries_are_read_or_refused_within_the_budget(tmp_path: Path) -> None:
    outcome = meets_budget(many(1_000_001, True, tmp_path / "a.pt"))
    assert outcome.code == "limit-exceeded" and outcome.megabytes < 64
    assert meets_budget(many(11_000, False, tmp_path / "a.pt").read_bytes()).code == "not-a-checkpoint"
    assert meets_budget(Layout((Entry(b"archive/x", b"", listed=18_000),)).build()).code == "ambiguous"


@pytest.mark.soak
def test_just_under_a_million_entries_are_read_within_the_budget(tmp_path: Path) -> None:
    outcome = meets_budget(many(999_999, True, tmp_path / "a.pt"), seconds=20, megabytes=64 + 2 * 1000)
    assert outcome.code == "not-a-checkpoint"
