"""The zip directory: where it puts the data is confirmed before any is used, and what would cost more than it is worth
is refused. What else it refuses: `test_hostile_zip`."""

from __future__ import annotations

import random
import struct
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.checkpoint import Computed, FileRange, InlineBytes, blocks
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.tree import walk
from ckptool.errors import Ambiguous, CkptoolError, Conflict, Corrupt, FileChanged, NotACheckpoint, Truncated
from ckptool.formats import checksums as module
from ckptool.formats import read, torch_zip
from ckptool.formats.checksums import checksums, crc_combine
from ckptool.formats.zip import directory
from ckptool.formats.zip.directory import CENTRAL, END, END64, LOCAL, LOCATOR, Headers, Record
from ckptool.formats.zip.writer import end_records, moved_entry
from ckptool.output.sink import Sink
from fixtures.make import make_all
from tests.support.budget import meets_budget
from tests.support.errors import refused, unreadable
from tests.support.files import torch_bytes, written
from tests.support.zip_mutants import (
    Tally,
    behind_a_guard,
    benign,
    by_torch,
    disagreement,
    interrupted,
    mutant,
    rezipped_mutant,
    tree,
    two_in_one,
)
from tests.support.zips import Entry, Layout, Put, with_entry, with_record

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


@pytest.mark.parametrize("name", ["archive/é", "archive/データ", "archive/plain"])
def test_a_name_that_is_not_said_to_be_utf8_is_refused_where_readers_differ(name: str, tmp_path: Path) -> None:
    path = with_record(written(torch_bytes({"a": torch.ones(2)}), tmp_path / "a.pt"), tmp_path / "b.pt", name, b"x")
    assert list(read(path).tree) == ["a"]
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        if data[at : at + 4] in (b"PK\x01\x02", b"PK\x03\x04"):
            data[at + (9 if data[at + 2] == 1 else 7)] &= ~8  # the flag 0x800
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        is_misread = name not in archive.namelist()  # a code page of DOS
    if is_misread:
        refused(Ambiguous, tmp_path, lambda: read(path), "does not say that it is UTF-8")
    assert is_misread is not name.isascii() and (is_misread or list(read(path).tree) == ["a"])


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
    headers = Headers(Source(written(b"x", tmp_path / "a")))
    record = Record(headers, "r", fixed, 0, 8, 7, stored, size, header, full in narrow)
    for place in (64, 6 << 30):
        raw = moved_entry(record, place)
        file = Source(written(raw + end_records(1, 0, len(raw)), tmp_path / "b"))
        found = directory._read_directory(file, file.size - END.size).records["r"]
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


# Mutated by structure: whatever is read, torch and zipfile read alike -------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutants")


def judged(seeds: range, folder: Path) -> Tally:
    tally = Tally()
    for seed in seeds:
        tally.add(*mutant(seed, folder), folder / "mutant.pt")
    return tally


def test_readers_agree_about_whatever_is_read(folder: Path) -> None:
    tally = judged(range(600), folder)
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.read > 60 and sum(tally.refused.values()) > 300, tally


@pytest.mark.soak
@pytest.mark.parametrize("part", range(20))
def test_soak_readers_agree_about_whatever_is_read(part: int, folder: Path) -> None:
    tally = judged(range(1000 + 1000 * part, 2000 + 1000 * part), folder)
    assert not tally.wrong, "\n".join(tally.wrong)


# What must not be refused ---------------------------------------------------------------------------------------------


def kinds(path: Path) -> list[str]:
    """What is in a file, shortly."""
    return [f"{value!r:.60}" for _, value in walk(read(path).tree)]


def test_every_fixture_is_read_however_it_was_zipped_again(folder: Path) -> None:
    seen = 0
    for path in make_all(folder / "fixtures").values():
        if not path.is_file() or not zipfile.is_zipfile(path):
            continue
        expected, data = kinds(path), path.read_bytes()
        for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            again = written(rezipped_mutant(data, compression), folder / "again.pt")
            assert kinds(again) == expected, path.name
        seen += 1
    assert seen > 5


def test_an_interrupted_edit_is_read_and_undone(folder: Path) -> None:
    rng, path = random.Random(5), folder / "torn.pt"
    for data in benign(folder):
        whole = written(data, path)
        before = ckptool.load(whole, mmap=False)
        torn = written(interrupted(data, folder, rng), path)
        assert disagreement(torn, ckptool.load(torn, mmap=False)) == ""
        ckptool.edit(torn, set={"mark": 1}, in_place=True)
        assert path.read_bytes()[: len(data)] == data
        after = torch.load(path, weights_only=True)
        assert after.pop("mark") == 1 and list(after) == list(before)


# What must ------------------------------------------------------------------------------------------------------------


def test_a_second_directory_however_odd_is_refused_and_nothing_is_cut_off(folder: Path) -> None:
    rng, path = random.Random(6), folder / "two.pt"
    plain = by_torch(tree(2, 1))
    for number in range(150):
        data = (behind_a_guard if number % 3 else two_in_one)(plain, rng)
        written(data, path)
        for write in (
            lambda: ckptool.remap(path, to="cpu", in_place=True),
            lambda: ckptool.edit(path, set={"mark": 1}, in_place=True),
        ):
            with pytest.raises(CkptoolError) as caught:
                write()
            assert path.read_bytes() == data, number
        assert number % 3 == 0 or type(caught.value) is Ambiguous, (number, caught.value)


def test_bytes_of_others_behind_the_archive_are_refused_and_not_cut_off(folder: Path) -> None:
    """They end in what an interrupted edit leaves at the very end, and do not begin as one."""
    plain = by_torch(tree(2, 1))
    for middle in (
        b"notes of mine, " * 9,
        b"PK\x03\x04\x14" + bytes(60),
        b"\0" * 3 + b"x" * 80,
        by_torch(tree(1, 9), "m")[:-200],
    ):
        path = written(plain + middle + plain[-42:], folder / "notes.pt")
        with pytest.raises(Ambiguous):
            ckptool.edit(path, set={"mark": 1}, in_place=True)
        assert path.read_bytes() == plain + middle + plain[-42:]


# Checksums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 31, 1000, 70_001])
def test_joined(length: int) -> None:
    chosen = random.Random(length)
    a, b = chosen.randbytes(77), chosen.randbytes(length)
    assert crc_combine(zlib.crc32(a), zlib.crc32(b), length) == zlib.crc32(a + b)
    assert crc_combine(0, zlib.crc32(b), length) == zlib.crc32(b)
    assert crc_combine(zlib.crc32(a), zlib.crc32(a + b), length) == zlib.crc32(b)  # and parted


@pytest.mark.parametrize("alone", [0, 1 << 30])
def test_of_files_and_of_what_is_computed(alone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALONE", alone)
    monkeypatch.setattr(module, "PIECE", 1000)
    monkeypatch.setattr(blocks, "BLOCK", 300)
    monkeypatch.setattr(module, "BATCH", 2000)
    data = random.Random(1).randbytes(100_000)
    path = tmp_path / "data"
    path.write_bytes(data)
    source = Source(path)
    sizes = [0, 1, 299, 300, 301, 999, 1000, 1001, 5000, 40_000, *[7] * 600]
    ranges, at = [], 0
    for size in sizes:
        ranges.append(FileRange(source, at, size))
        at += size
    lazy = Computed(5000, lambda offset, n: data[offset : offset + n])
    sums = checksums([*ranges, lazy, InlineBytes(b"abc")])
    expected = [zlib.crc32(data[part.offset : part.offset + part.length]) for part in ranges]
    assert sums == [*expected, zlib.crc32(data[:5000]), zlib.crc32(b"abc")]


def test_what_cannot_be_read_stands_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    source = Source(path)

    def broken(offset: int, length: int) -> bytes:
        raise Corrupt("broken")

    good, bad, short = checksums([InlineBytes(b"x"), Computed(4, broken), Computed(4, lambda offset, n: b"")])
    assert good == zlib.crc32(b"x") and isinstance(bad, Corrupt) and isinstance(short, Corrupt)
    path.write_bytes(b"")
    with pytest.raises((FileChanged, Truncated)):
        checksums([FileRange(source, 0, 3)])
