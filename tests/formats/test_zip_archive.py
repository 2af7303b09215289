"""The zip directory: where it puts the data is confirmed before any is used. What it refuses: `test_hostile_zip`."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptool.checkpoint.files import Source
from ckptool.errors import Ambiguous, CkptoolError, Corrupt
from ckptool.formats import read
from ckptool.formats.zip import directory
from ckptool.formats.zip.directory import Archive
from ckptool.formats.zip.record import CENTRAL, LOCAL, Record
from ckptool.formats.zip.writer import moved_entry
from tests.support.files import torch_bytes, written

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
