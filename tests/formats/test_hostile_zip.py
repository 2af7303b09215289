"""Zip archives that are cut, contradict themselves, or are two things to two readers.

Where the danger is that readers disagree, the test shows what Python's `zipfile` (or torch) makes of the same bytes.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings

from ckptool.errors import Ambiguous, CkptoolError, Corrupt, NotACheckpoint, Truncated
from ckptool.formats import read, torch_zip
from ckptool.formats.zip.record import LOCATOR
from tests.support.errors import unreadable
from tests.support.files import torch_bytes, written
from tests.support.looped import examples
from tests.support.zip_layouts import RECORDS, Entry, Layout, Put, changed, honest, layouts, with_entry, with_more
from tests.support.zips import (
    DIRECTORY,
    END64_AT,
    END_AT,
    EXPECTED,
    FILE,
    W,
    accepted,
    at,
    bytes_by_name,
    python_sees,
    torch_sees,
)

OTHER = torch_bytes({"w": torch.zeros(3), "v": torch.zeros(2)})


def test_what_the_rows_start_from_is_read(put: Put) -> None:
    accepted(put(FILE))
    accepted(put(honest()))
    accepted(put(honest(zip64=True)))


# Cut, and the end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [FILE, honest().build()], ids=["torch", "python"])
def test_an_archive_cut_at_any_byte_is_truncated(data: bytes, tmp_path: Path) -> None:
    path = written(data, tmp_path / "a.pt")
    for size in reversed(range(len(data))):
        os.truncate(path, size)
        with pytest.raises(CkptoolError) as caught:
            read(path)
        assert type(caught.value) is (NotACheckpoint if 0 < size < 4 else Truncated), (size, caught.value)


def test_an_edited_archive_that_is_cut_is_not_taken_for_its_old_state(tmp_path: Path) -> None:
    """The state before the edit stands whole inside, and is not taken for the file."""
    path = written(FILE, tmp_path / "a.pt")
    checkpoint = read(path)
    plan = torch_zip.append(replace(checkpoint, tree={**checkpoint.tree, "n": 1}))
    assert plan is not None
    from ckptool.output.sink import Sink

    with path.open("r+b") as file:
        Sink(file.fileno(), plan.keep, plan.nbytes, None).write(plan.files[""])
    data = path.read_bytes()
    assert read(path).tree["n"] == 1
    for size in reversed(range(len(FILE) + 4, len(data))):
        os.truncate(path, size)
        with pytest.raises(Truncated):
            read(path)


def test_an_archive_without_its_end_record_is_truncated(put: Put) -> None:
    unreadable(put(FILE[:END_AT]), Truncated)
    for place in range(4):
        for bit in range(8):
            flipped = at(FILE, END_AT + place, bytes([FILE[END_AT + place] ^ 1 << bit]))
            unreadable(put(flipped), Truncated)
            with pytest.raises(zipfile.BadZipFile):
                zipfile.ZipFile(io.BytesIO(flipped))


@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize("count", [0, 1, len(RECORDS) - 1, len(RECORDS) + 1, 60_000])
def test_a_wrong_count_of_entries_is_corrupt(count: int, zip64: bool, put: Put) -> None:
    unreadable(put(honest(zip64=zip64, count=count)), Corrupt, "entr")


def test_a_wrong_count_in_only_one_end_record_is_corrupt(put: Put) -> None:
    for place in (8, 10):
        unreadable(put(at(FILE, END_AT + place, b"\5\0")), Corrupt)
    for place in (24, 32):
        unreadable(put(at(FILE, END64_AT + place, b"\5")), Corrupt)
    unreadable(put(at(FILE, END64_AT + 24, struct.pack("<Q", 1 << 63))), Corrupt)


@pytest.mark.parametrize(
    "changes",
    [
        {"directory_at": 0},
        {"directory_at": DIRECTORY * 2},
        {"directory_at": 0xFFFFFFFE},
        {"directory_size": 0},
        {"directory_size": 45},
        {"directory_size": 4096},
        {"directory_size": 0xFFFFFFFE},
        {"gap_end": b"x"},
        {"gap_end": bytes(22)},
        {"gap": b"PK\x01\x02" + bytes(70_000)},
    ],
    ids=str,
)
@pytest.mark.parametrize("zip64", [False, True])
def test_a_wrong_place_or_size_of_the_central_directory_is_corrupt(
    changes: dict[str, Any], zip64: bool, put: Put
) -> None:
    unreadable(put(honest(zip64=zip64, **changes)), Corrupt)


def test_a_gap_between_the_end_records_is_corrupt(put: Put) -> None:
    unreadable(put(FILE[:END_AT] + bytes(8) + FILE[END_AT:]), Corrupt)
    unreadable(put(FILE[: END_AT - LOCATOR.size] + bytes(8) + FILE[END_AT - LOCATOR.size :]), Corrupt)


def test_a_missing_or_misplaced_zip64_locator_is_corrupt(put: Put) -> None:
    full = at(FILE, END_AT + 8, b"\xff" * 12)  # all of it is in the zip64 record
    accepted(put(full))
    gone = full[: END_AT - LOCATOR.size] + full[END_AT:]
    unreadable(put(gone), Corrupt, "zip64")
    for place in (0, 5, DIRECTORY, END64_AT - 1, END64_AT + 1, len(FILE), 1 << 40, (1 << 64) - 1):
        unreadable(put(at(FILE, END_AT - 12, struct.pack("<Q", place))), Corrupt, "locator")


def test_end_records_that_disagree_are_corrupt(put: Put) -> None:
    for place, value in ((24, 5), (32, 5), (40, 10), (48, 0), (48, 1 << 32), (40, 1 << 33)):
        unreadable(put(at(FILE, END64_AT + place, struct.pack("<Q", value))), Corrupt)
    unreadable(put(at(FILE, END64_AT, b"PK\x06\x05")), Corrupt)


# Two archives, and bytes around one ----------------------------------------------------------------------------------


def rebased(layout: Layout, by: int) -> bytes:
    return replace(layout, shift=by).build()


A, B = honest(), changed(honest(), "archive/data/0", content=bytes(12))


@pytest.mark.parametrize(
    "data",
    [
        A.build() + B.build(),
        A.build() + rebased(B, len(A.build())),
        FILE + OTHER,
        FILE + FILE,
        replace(A, zip64=True).build() + replace(B, zip64=True).build(),
        replace(A, zip64=True).build() + rebased(replace(B, zip64=True), len(replace(A, zip64=True).build())),
        FILE + B.build(),
    ],
    ids=["plain", "offsets corrected", "torch", "twice the same", "zip64", "zip64, corrected", "mixed"],
)
def test_two_archives_in_one_file_are_ambiguous(data: bytes, put: Put) -> None:
    unreadable(put(data), Ambiguous)


def test_other_readers_disagree_about_two_archives_in_one_file(put: Put) -> None:
    data = A.build() + B.build()
    assert python_sees(data, "archive/data/0") == bytes(12)  # the second
    assert data[: len(A.build())] == A.build() and python_sees(A.build(), "archive/data/0") == W  # the first is whole


@pytest.mark.parametrize("comment", [b"hello", B.build(), b"PK\x05\x06" + bytes(18), bytes(0xFFFF)])
def test_an_archive_comment_is_ambiguous(comment: bytes, put: Put) -> None:
    unreadable(put(replace(A, comment=comment)), Ambiguous)


def test_a_truncated_comment_is_ambiguous(put: Put) -> None:
    unreadable(put(replace(A, comment=bytes(100)).build()[:-50]), Ambiguous)


@pytest.mark.parametrize(
    "prefix", [bytes(16), b"#!/bin/sh 123456", b"PK\x03\x04" + bytes(26), b"\x89PNG\r\n\x1a\n", b"X"]
)
@pytest.mark.parametrize("corrected", [False, True])
def test_bytes_before_the_archive_are_ambiguous(prefix: bytes, corrected: bool, put: Put) -> None:
    for data in (replace(A, prefix=prefix, shift=0 if corrected else -len(prefix)).build(), prefix + FILE):
        assert python_sees(data, "archive/data/0") == W  # zipfile does not mind
        unreadable(put(data), Ambiguous)


@pytest.mark.parametrize("trailing", [b"0123456789abcdef", b"X", b"PK\x01\x02", bytes(70_000) + b"X"])
def test_bytes_after_the_archive_are_ambiguous_or_hide_its_end(trailing: bytes, put: Put) -> None:
    for data in (FILE + trailing, replace(A, trailing=trailing).build()):
        with pytest.raises((Ambiguous, Truncated)) as caught:
            read(put(data))
        assert isinstance(caught.value, Ambiguous) or len(trailing) > 65_535  # as far away as no reader looks


# Names ---------------------------------------------------------------------------------------------------------------


def test_two_pickles_of_one_name_are_ambiguous(put: Put) -> None:
    other = RECORDS["archive/data.pkl"].replace(b"w", b"x")
    data = with_more(Entry(b"archive/data.pkl", other)).build()
    assert python_sees(data, "archive/data.pkl") == other  # the last
    assert list(torch_sees(put(data))) == ["w", "v"]  # the first
    unreadable(put(data), Ambiguous, "two records")


def test_two_storages_of_one_name_are_ambiguous(put: Put) -> None:
    data = with_more(Entry(b"archive/data/0", bytes(12))).build()
    assert python_sees(data, "archive/data/0") == bytes(12) and data.index(W) < data.index(bytes(12))
    unreadable(put(data), Ambiguous, "two records")


def test_a_record_listed_twice_is_ambiguous(put: Put) -> None:
    unreadable(put(with_entry("data/0", listed=2)), Ambiguous)


def test_names_that_differ_only_in_case_are_ambiguous(put: Put) -> None:
    unreadable(put(with_more(Entry(b"archive/DATA.PKL", b"\x80\x02N."))), Ambiguous, "case")
    unreadable(put(with_more(Entry(b"ARCHIVE/data/0", bytes(12)))), Ambiguous, "case")
    path = put(with_entry("data.pkl", name=b"archive/DATA.PKL"))
    assert torch_sees(path) == EXPECTED  # though there is no data.pkl
    unreadable(path, Ambiguous, "DATA.PKL")


def test_a_nul_in_a_record_name_is_ambiguous(put: Put) -> None:
    for name in (b"archive/data/0\0.txt", b"archive/data.pkl\0", b"\0", b"archive/\0"):
        unreadable(put(with_more(Entry(name, bytes(12)))), Ambiguous, "NUL")


@pytest.mark.parametrize("record", ["data.pkl", "data/0", "byteorder", "version"])
@pytest.mark.parametrize("name", [b"archive/data/7", b"archive/data.pkx", b"a", b"archive/" + b"n" * 300, b""])
def test_another_name_in_the_local_header_is_ambiguous(record: str, name: bytes, put: Put) -> None:
    unreadable(put(with_entry(record, name_local=name)), Ambiguous, "another name")


def test_another_name_in_the_unicode_path_field_is_ambiguous(put: Put) -> None:
    raw = b"archive/data/7"
    body = struct.pack("<BI", 1, zlib.crc32(b"archive/data/0")) + raw
    unreadable(put(with_entry("data/0", extra=struct.pack("<2H", 0x7075, len(body)) + body)), Ambiguous, "another name")


def test_a_record_without_a_name_is_corrupt(put: Put) -> None:
    unreadable(put(with_more(Entry(b"", b""))), Corrupt, "no name")


# Any layout ----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts())
def test_any_layout_is_refused_or_read_as_others_read_it(
    layout: Layout, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = written(layout.build(), folder / "layout.pt")
    try:
        ours = bytes_by_name(read(path))
    except CkptoolError:
        return
    try:
        assert ours == torch_sees(path)
    except RuntimeError:
        event("torch refuses it")
    else:
        event("torch agrees")
    for name, content in zip(ours, ("archive/data/0", "archive/data/1"), strict=True):
        assert python_sees(path.read_bytes(), content) == ours[name]
