"""Zip archives that would cost more than they are worth: bombs, and millions of entries."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from ckptool.errors import Corrupt, LimitExceeded, NotACheckpoint
from ckptool.formats.zip.record import CENTRAL, END, END64, LOCAL, LOCATOR
from tests.support.budget import meets_budget
from tests.support.errors import unreadable
from tests.support.files import written
from tests.support.zip_layouts import Entry, Layout, Put, with_entry


def bomb() -> bytes:
    """A pickle of 300 MB, deflated: 0.3 MB."""
    packer, unit = zlib.compressobj(9, zlib.DEFLATED, -15), b"N0" * (1 << 20)
    return packer.compress(b"\x80\x02") + b"".join(packer.compress(unit) for _ in range(150)) + packer.flush()


def test_a_zip_bomb_is_not_inflated() -> None:
    raw = bomb()
    assert len(raw) < 1 << 20
    for size in (150 << 21, 1000):  # what it is, what it might be, and lies
        layout = with_entry("data.pkl", method=8, content=raw, packed=True, size=size, size_local=size)
        outcome = meets_budget(layout.build())
        assert outcome.code == ("limit-exceeded" if size > 16 * len(raw) else "corrupt"), outcome
        assert outcome.megabytes < 64


def test_a_zip_bomb_in_the_small_records_is_refused(put: Put) -> None:
    for record in ("version", "byteorder", ".storage_alignment"):
        path = put(with_entry(record, method=8, content=bytes(1 << 20)))
        unreadable(path, LimitExceeded)
        assert meets_budget(path.read_bytes()).megabytes < 64


def many(count: int, zip64: bool, path: Path) -> Path:
    """An archive of empty records, and nothing else."""
    local = LOCAL.pack(b"PK\x03\x04", 20, 0x0800, 0, 0, 0, 0, 0, 0, 8, 0)
    fixed = CENTRAL.pack(b"PK\x01\x02", 20, 20, 0x0800, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0)[:-4]
    names = [b"a/%06x" % n for n in range(count)]
    body = b"".join([local + name for name in names])
    directory = b"".join([fixed + (n * 38).to_bytes(4, "little") + name for n, name in enumerate(names)])
    tail = END.pack(b"PK\x05\x06", 0, 0, count & 0xFFFF, count & 0xFFFF, len(directory), len(body), 0)
    if zip64:
        at_end = len(body) + len(directory)
        tail = (
            END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), len(body))
            + LOCATOR.pack(b"PK\x06\x07", 0, at_end, 1)
            + END.pack(b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, len(directory), len(body), 0)
        )
    return written(body + directory + tail, path)


def test_more_entries_than_the_end_record_can_count_are_corrupt(tmp_path: Path) -> None:
    unreadable(many(65_536, False, tmp_path / "a.pt"), Corrupt)
    unreadable(many(65_537, False, tmp_path / "a.pt"), Corrupt)
    # As Python writes it: all are there, none is a pickle.
    unreadable(many(65_535, False, tmp_path / "a.pt"), NotACheckpoint)
    unreadable(many(70_000, True, tmp_path / "a.pt"), NotACheckpoint)


def test_more_than_a_million_entries_exceed_the_limit(tmp_path: Path) -> None:
    path = many(1_000_001, True, tmp_path / "a.pt")
    outcome = meets_budget(path)
    assert outcome.code == "limit-exceeded" and outcome.megabytes < 64


@pytest.mark.soak
def test_just_under_a_million_entries_are_read_within_the_budget(tmp_path: Path) -> None:
    path = many(999_999, True, tmp_path / "a.pt")
    outcome = meets_budget(path, seconds=20, megabytes=64 + 2 * 1000)
    assert outcome.code == "not-a-checkpoint"


def test_a_megabyte_of_entries_is_read_within_the_budget(tmp_path: Path) -> None:
    assert meets_budget(many(11_000, False, tmp_path / "a.pt").read_bytes()).code == "not-a-checkpoint"
    entry = Entry(b"archive/x", b"", listed=18_000)
    assert meets_budget(Layout((entry,)).build()).code == "ambiguous"
