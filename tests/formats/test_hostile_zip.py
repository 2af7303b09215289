"""Zip archives that are cut, contradict themselves, cost more than they are worth, or are two things to two readers.

Where the danger is that readers disagree, the test shows what Python's `zipfile` (or torch) makes of the same bytes.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.errors import Ambiguous, CkptoolError, Corrupt, LimitExceeded, NotACheckpoint, Truncated, Unsupported
from ckptool.formats import read, torch_zip
from ckptool.formats.zip.directory import END, LOCAL, LOCATOR
from ckptool.output.sink import Sink
from ckptool.verbs.convert import convert
from tests.support.budget import meets_budget
from tests.support.errors import unreadable
from tests.support.files import torch_bytes, written
from tests.support.looped import looped
from tests.support.zips import (
    DIRECTORY,
    END64_AT,
    END_AT,
    EXPECTED,
    FILE,
    RECORDS,
    Entry,
    Layout,
    Put,
    W,
    accepted,
    at,
    bytes_by_name,
    changed,
    honest,
    python_sees,
    torch_sees,
    with_entry,
    with_more,
)

OTHER = torch_bytes({"w": torch.zeros(3), "v": torch.zeros(2)})
A, B = honest(), changed(honest(), "archive/data/0", content=bytes(12))
FULL = 0xFFFFFFFF

# What is refused -----------------------------------------------------------------------------------------------------

Row = tuple[str, bytes | Layout, Any, str]  # what it is, the file, the error, words of it


def of_all(layout: Layout, **changes: Any) -> Layout:
    return replace(layout, entries=tuple(replace(entry, **changes) for entry in layout.entries))


def long(place: int, value: int) -> bytes:
    """torch's file with a number of 64 bits in its zip64 end records."""
    return at(FILE, END64_AT + place, struct.pack("<Q", value))


def end_records() -> Iterator[Row]:
    yield "no end record", FILE[:END_AT], Truncated, ""
    for place in range(4):
        for bit in range(8):
            flipped = at(FILE, END_AT + place, bytes([FILE[END_AT + place] ^ 1 << bit]))
            yield f"a bit of its signature, {place}.{bit}", flipped, Truncated, ""
    for zip64 in (False, True):
        for count in (0, 1, len(RECORDS) - 1, len(RECORDS) + 1, 60_000):
            yield f"{count} entries", honest(zip64=zip64, count=count), Corrupt, "entr"
        changes: list[dict[str, Any]] = [
            *({"directory_at": place} for place in (0, DIRECTORY * 2, FULL - 1)),
            *({"directory_size": size} for size in (0, 45, 4096, FULL - 1)),
            *({"gap_end": gap} for gap in (b"x", bytes(22))),
            {"gap": b"PK\x01\x02" + bytes(70_000)},
        ]
        yield from ((f"{change}", honest(zip64=zip64, **change), Corrupt, "") for change in changes)
        yield "a disk", honest(disk=1, zip64=zip64), Unsupported, "split"
    yield from (("a short count", at(FILE, END_AT + place, b"\5\0"), Corrupt, "") for place in (8, 10))
    yield from (("a long count", at(FILE, END64_AT + place, b"\5"), Corrupt, "") for place in (24, 32))
    for place in (END_AT, END_AT - LOCATOR.size):
        yield "a gap between the end records", FILE[:place] + bytes(8) + FILE[place:], Corrupt, ""
    full = at(FILE, END_AT + 8, b"\xff" * 12)  # all of it is in the zip64 record
    yield "no locator", full[: END_AT - LOCATOR.size] + full[END_AT:], Corrupt, "zip64"
    for place in (0, 5, DIRECTORY, END64_AT - 1, END64_AT + 1, len(FILE), 1 << 40, (1 << 64) - 1):
        yield f"a locator to {place}", at(FILE, END_AT - 12, struct.pack("<Q", place)), Corrupt, "locator"
    for place, value in ((24, 5), (24, 1 << 63), (32, 5), (40, 10), (48, 0), (48, 1 << 32), (40, 1 << 33)):
        yield f"end records that disagree, {place}", long(place, value), Corrupt, ""
    yield "no zip64 record", at(FILE, END64_AT, b"PK\x06\x05"), Corrupt, ""
    yield "a directory before the file", at(FILE, END_AT - 12, struct.pack("<Q", END64_AT + 64)), Corrupt, ""
    for place, value in ((END64_AT + 16, 1), (END64_AT + 20, 1), (END_AT - 16, 1), (END_AT - 4, 2)):
        yield f"a disk at {place}", at(FILE, place, struct.pack("<I", value)), Unsupported, "split"
    yield from ((f"a disk at {place}", at(FILE, END_AT + place, b"\1\0"), Unsupported, "split") for place in (4, 6))


def several() -> Iterator[Row]:
    """Two archives, and bytes around one."""
    wide, other = replace(A, zip64=True), replace(B, zip64=True)
    for name, data in {
        "two": A.build() + B.build(),
        "two, offsets corrected": A.build() + replace(B, shift=len(A.build())).build(),
        "two of torch's": FILE + OTHER,
        "twice the same": FILE + FILE,
        "two with zip64": wide.build() + other.build(),
        "two with zip64, corrected": wide.build() + replace(other, shift=len(wide.build())).build(),
        "two writers": FILE + B.build(),
        "a comment that is cut": replace(A, comment=bytes(100)).build()[:-50],
    }.items():
        yield name, data, Ambiguous, ""
    for comment in (b"hello", B.build(), b"PK\x05\x06" + bytes(18), bytes(0xFFFF)):
        yield f"a comment, {comment[:9]!r}", replace(A, comment=comment), Ambiguous, ""
    for prefix in (bytes(16), b"#!/bin/sh 123456", b"PK\3\4", b"PK\3\4" + bytes(26), b"\x89PNG\r\n\x1a\n", b"X"):
        for data in (prefix + FILE, *(replace(A, prefix=prefix, shift=by).build() for by in (0, -len(prefix)))):
            assert python_sees(data, "archive/data/0") == W  # zipfile does not mind
            yield f"before it, {prefix[:9]!r}", data, Ambiguous, ""
    for trailing in (b"0123456789abcdef", b"X", b"PK\x01\x02", bytes(70_000) + b"X"):
        error = Ambiguous if len(trailing) < 65_535 else (Ambiguous, Truncated)  # as far away as no reader looks
        yield f"behind it, {trailing[:9]!r}", FILE + trailing, error, ""
        yield f"behind it, {trailing[:9]!r}", replace(A, trailing=trailing), error, ""


def names() -> Iterator[Row]:
    yield "a record listed twice", with_entry("data/0", listed=2), Ambiguous, ""
    # Python's zipfile takes the last, torch the first.
    other = RECORDS["archive/data.pkl"].replace(b"w", b"x")
    for name, content in ((b"archive/data.pkl", other), (b"archive/data/0", bytes(12))):
        yield f"two of {name!r}", with_more(Entry(name, content)), Ambiguous, "two records"
    yield "no data.pkl, which torch takes", with_entry("data.pkl", name=b"archive/DATA.PKL"), Ambiguous, "DATA.PKL"
    yield "a name in another case", with_more(Entry(b"archive/DATA.PKL", b"\x80\x02N.")), Ambiguous, "case"
    yield "a root in another case", with_more(Entry(b"ARCHIVE/data/0", bytes(12))), Ambiguous, "case"
    for name in (b"archive/data/0\0.txt", b"archive/data.pkl\0", b"\0", b"archive/\0"):
        yield f"a NUL, {name!r}", with_more(Entry(name, bytes(12))), Ambiguous, "NUL"
    for record in ("data.pkl", "data/0", "byteorder", "version"):
        for name in (b"archive/data/7", b"archive/data.pkx", b"a", b"archive/" + b"n" * 300, b""):
            yield f"{record} is {name[:20]!r}", with_entry(record, name_local=name), Ambiguous, "a different name"
    body = struct.pack("<BI", 1, zlib.crc32(b"archive/data/0")) + b"archive/data/7"
    field = struct.pack("<2H", 0x7075, len(body)) + body
    yield "a Unicode path", with_entry("data/0", extra=field), Ambiguous, "a different name"
    yield "no name", with_more(Entry(b"", b"")), Corrupt, "no name"
    for name in (b"archive/\xff\xfe", b"archive/data/\x80", b"archive/\xed\xa0\x80", b"\xc0\xaf"):
        yield f"no UTF-8, {name!r}", with_more(Entry(name, b"")), Corrupt, "directory"
    flat, other = (
        tuple(replace(entry, name=entry.name.replace(b"archive/", root)) for entry in A.entries)
        for root in (b"", b"model/")
    )
    yield "no folder", Layout(flat), NotACheckpoint, ""
    yield "two checkpoints", Layout((*A.entries, *other)), Ambiguous, "two checkpoints"
    for name in (b"model/data/0", b"readme.txt", *(name for name in ELSEWHERE if not name.startswith(b"archive/"))):
        yield f"outside, {name!r}", with_more(Entry(name, W)), Ambiguous, "outside its folder"
    for record in ("data/0", "data.pkl", "byteorder"):  # torch (2.13) reads uninitialised memory for it
        yield f"{record} is a folder", with_entry(record, attributes=0x10), Ambiguous, "folder"
    yield "a folder with contents", with_more(Entry(b"archive/data/", b"contents")), Ambiguous, "folder"


ELSEWHERE = (
    b"../evil", b"archive/../../evil", b"archive/data/../../../etc/cron.d/x", b"/etc/passwd", b"C:\\Windows\\x",
    b"archive\\data\\0", b"archive/..\\..\\x", b"c:evil", b"archive/..", b"..",
)  # fmt: skip


def headers() -> Iterator[Row]:
    """Header, descriptor and directory of a record contradict each other."""
    for record in ("data.pkl", "data/0", "byteorder"):
        for method in ({"method_local": 8}, {"method": 8, "method_local": 0}):
            yield f"{record}, {method}", with_entry(record, **method), Corrupt, "stored in a different way"
        data = FILE.index(RECORDS["archive/" + record], FILE.index(("archive/" + record).encode()))
        place = FILE.index(b"PK\x07\x08", data)
        yield f"{record} without a descriptor", at(FILE, place, b"PKxx"), Corrupt, "descriptor"
        yield from ((f"{record}, a size", at(FILE, place + n, b"\x99"), Corrupt, "") for n in (8, 12))
        yield f"{record}, none there", with_entry(record, flags=0x0808, flags_local=0x0808), Corrupt, ""
        yield f"{record}, none told", with_entry(record, descriptor="signed", flags_local=0x0800), Corrupt, ""
    for record in ("data.pkl", "data/0"):
        yield f"{record} of method 99", with_entry(record, method=8, method_local=99), Corrupt, ""
        for descriptor in ("none", "signed", "bare", "wide"):
            for field in ("crc_local", "stored_local", "size_local"):
                lie: Any = {field: 77}
                yield f"{record}, {field}, {descriptor}", with_entry(record, descriptor=descriptor, **lie), Corrupt, ""
        for bit in (0x1, 0x20, 0x40, 0x2000):
            yield (
                f"{record} with {bit:#x}",
                with_entry(record, flags=0x0800 | bit),
                Unsupported,
                "encrypted, or a patch",
            )
            own = with_entry(record, flags=0x0800, flags_local=0x0800 | bit)
            yield f"{record} says {bit:#x}", own, Corrupt, "a different way"
    for descriptor in ("signed", "bare", "wide", "wide-bare"):
        yield descriptor, with_entry("data/0", descriptor=descriptor, crc_descriptor=77), Corrupt, "descriptor"
    wide = struct.pack("<2H2Q", 1, 16, 13, 13)
    for extra in (b"", wide):
        layout = with_entry("data/0", stored_local=FULL, size_local=FULL, extra_local=extra)
        yield "zip64 sizes in the header", layout, Corrupt, ""
    far = struct.pack("<2HQ", 1, 8, (1 << 64) - 64)
    yield "a header before the file", with_entry("data/0", at=FULL, extra=far), Corrupt, ""
    yield "a disk", with_entry("data/0", disk=1), Unsupported, "split"
    for method in (9, 12, 14, 93, 95, 99, 1, 7, 77, 0xFFFF):
        error = Unsupported if method in (9, 12, 14, 93, 95, 99) else Corrupt
        yield f"method {method}", with_entry("data/0", method=method), error, f"method {method}"
    for record in ("data.pkl", "data/0", "byteorder", "version"):
        for by in (-1, 1, 1000):
            size = len(RECORDS["archive/" + record]) + by
            stored: Any = {"stored": size, "stored_local": size}
            both: Any = {"size": size, "size_local": size}
            for what in (both, stored, {**both, **stored}, {**both, "method": 8}):
                yield f"{record}, {by} bytes, {len(what)}", with_entry(record, **what), Corrupt, ""
        place = FILE.index(b"archive/" + record.encode()) - LOCAL.size
        for offset in range(4):
            flipped = at(FILE, place + offset, bytes([FILE[place + offset] ^ 0x20]))
            yield f"{record} without its signature", flipped, Corrupt, ""
    for offset in range(12):
        place = FILE.index(W) + offset
        yield f"data, byte {offset}", at(FILE, place, bytes([FILE[place] ^ 1])), Corrupt, "checksum"


def contents() -> Iterator[Row]:
    def texts(record: str, *values: bytes) -> Iterator[Row]:
        for value in values:
            yield f"{record}: {value[:9]!r}", changed(A, f"archive/{record}", content=value), Corrupt, record

    yield from texts("version", b"999", b"three", b"", b"-1", b"3.0", b"0", b"9" * 5000, b"\xd9\xa3")
    yield from texts("byteorder", b"middle", b"LITTLE", b"", b"little\0", b" little", b"big\n", b"\x1b[31m")
    yield from texts(".storage_alignment", b"-1", b"0", b"64k", b"99999999999", b"", b"9" * 5000)
    without = replace(A, entries=tuple(entry for entry in A.entries if entry.name != b"archive/version"))
    yield "no version", without, Corrupt, "version"
    for record in ("version", "byteorder", ".storage_alignment"):
        yield f"a bomb as {record}", with_entry(record, method=8, content=bytes(1 << 20)), LimitExceeded, ""
    own: Any = {"size": 12, "size_local": 12, "crc": zlib.crc32(W), "crc_local": zlib.crc32(W)}
    longer = with_entry("data/0", content=W + bytes(1 << 20), method=8, **own)
    assert python_sees(longer.build(), "archive/data/0") == W  # cut short, without a word
    yield "more than its size", longer, Corrupt, "more than 12 bytes"
    for content in (W[:8], b""):
        yield "less", with_entry("data/0", content=content, method=8, size=12, size_local=12), Corrupt, "inflates to"
    for options in ({"comment": b"x"}, {"prefix": b"X"}, {"trailing": b"X"}, {"zip64": True}):
        yield "nothing in it", Layout((), **options), CkptoolError, ""


REFUSED = [row for rows in (end_records, several, names, headers, contents) for row in rows()]


@looped(("title", "data", "error", "word"), REFUSED)
def test_what_contradicts_itself_is_refused_as_what_it_is(
    title: str, data: bytes | Layout, error: Any, word: str, tmp_path: Path
) -> None:
    path = written(data if isinstance(data, bytes) else data.build(), tmp_path / "a.pt")
    if isinstance(error, tuple):
        with pytest.raises(error):
            read(path)
        return
    assert "\x1b" not in str(unreadable(path, error, *filter(None, [word])))


def test_what_the_rows_start_from_is_read(put: Put) -> None:
    for data in (FILE, honest(), honest(zip64=True), at(FILE, END_AT + 8, b"\xff" * 12)):
        accepted(put(data))
    wide = struct.pack("<2H2Q", 1, 16, 12, 12)
    accepted(put(with_entry("data/0", stored_local=FULL, size_local=FULL, extra_local=wide)))
    for text in (b"1", b"2", b"3\n", b"4", b"10"):
        accepted(put(changed(A, "archive/version", content=text + b" ")))
    accepted(put(of_all(A, crc=0, crc_local=0)), "no-checksums")
    checkpoint = read(put(Layout(())))  # `numpy.savez` writes such a file of no arrays; torch does not
    assert checkpoint.tree == {} and checkpoint.container == "npz"


# What other readers make of it ----------------------------------------------------------------------------------------


def test_an_edited_archive_that_is_cut_is_not_taken_for_its_old_state(tmp_path: Path) -> None:
    """The state before the edit stands whole inside, and is not taken for the file."""
    path = written(FILE, tmp_path / "a.pt")
    checkpoint = read(path)
    plan = torch_zip.append(replace(checkpoint, tree={**checkpoint.tree, "n": 1}))
    assert plan is not None
    with path.open("r+b") as file:
        Sink(file.fileno(), plan.keep, plan.nbytes, None).write(plan.files[""])
    assert read(path).tree["n"] == 1
    for size in reversed(range(len(FILE) + 4, path.stat().st_size)):
        os.truncate(path, size)
        with pytest.raises(Truncated):
            read(path)


# Checksums -----------------------------------------------------------------------------------------------------------


def test_a_wrong_checksum_of_the_pickle_is_found_on_opening(put: Put) -> None:
    for value in (1, zlib.crc32(RECORDS["archive/data.pkl"]) ^ 1, 0):
        path = put(with_entry("data.pkl", crc=value, crc_local=value))
        with pytest.raises(Corrupt, match="checksum"):
            read(path)  # when it is opened
        assert torch_sees(path) == EXPECTED  # torch does not look


def test_a_wrong_checksum_of_a_storage_is_found_on_reading_it(put: Put, tmp_path: Path) -> None:
    path = put(with_entry("data/0", crc=77, crc_local=77))
    assert torch_sees(path) == EXPECTED
    tree = read(path).tree
    assert tree["v"].bytes() == EXPECTED["v"]
    for use in (tree["w"].bytes, tree["w"].numpy, tree["w"].torch):
        with pytest.raises(Corrupt, match="checksum"):
            use()
    for out in ("b.pt", "b.safetensors"):
        with pytest.raises(Corrupt, match="checksum"):
            convert(path, tmp_path / out)
        assert not (tmp_path / out).exists()


def test_views_of_a_damaged_storage_are_refused_too(put: Put) -> None:
    base = torch.arange(100.0)
    tree = {"part": base[10:12], "turned": base.view(10, 10).t(), "whole": base}
    data = torch_bytes(tree)
    damaged = read(put(at(data, data.index(bytes(base.numpy())) + 399, b"\xff")))
    intact = read(put(data, "b.pt"))
    for name, tensor in tree.items():
        with pytest.raises(Corrupt, match="checksum"):
            damaged.tree[name].numpy()
        assert intact.tree[name].numpy().tolist() == tensor.tolist()


# Compression, places -------------------------------------------------------------------------------------------------


def test_damaged_deflated_data_is_corrupt(put: Put) -> None:
    layout = with_entry("data/0", method=8)
    accepted(put(layout), "deflated")
    raw = next(entry.raw for entry in layout.entries if entry.method == 8)
    data = layout.build()
    place, refused_bits = data.index(raw), 0
    for offset in range(len(raw)):
        for bit in range(8):
            path = put(at(data, place + offset, bytes([data[place + offset] ^ 1 << bit])))
            try:
                assert bytes_by_name(read(path)) == EXPECTED  # a bit of the padding at the end
            except Corrupt:
                refused_bits += 1
    assert refused_bits > 8 * len(raw) - 8


def test_overlapping_records_are_refused(put: Put) -> None:
    names, whole = [entry.name for entry in A.entries], A.build()
    for place, name in enumerate(names):
        header = whole.index(names[max(1, place) - (place > 0)]) - LOCAL.size
        unreadable(put(changed(A, name.decode(), at=header)), Corrupt if place else Ambiguous)


def test_a_record_that_quotes_the_next_ones_header_is_corrupt(put: Put) -> None:
    """One record's data is all the others, headers included: a small file that unpacks to a large one."""
    inner = A.build()
    records = inner[: struct.unpack_from("<I", inner, len(inner) - 6)[0]]
    outer = Entry(b"archive/data/9", records, at=0)
    header = LOCAL.size + len(outer.name)
    quoted = tuple(replace(entry, at=header + inner.index(entry.name) - LOCAL.size) for entry in A.entries)
    full = Layout((outer, *quoted)).build()
    size, offset = struct.unpack_from("<2I", full, len(full) - END.size + 12)
    body = Layout((outer,)).build()[: header + len(records)]
    end = at(full[-END.size :], 16, struct.pack("<I", len(body)))
    data = body + full[offset : offset + size] + end
    assert python_sees(data, "archive/data/0") == W
    with suppress(zipfile.BadZipFile):  # newer Pythons refuse what overlaps
        assert python_sees(data, "archive/data/9") == records
    unreadable(put(data), Corrupt, "does not fit")


@pytest.mark.parametrize("record", ["data.pkl", "data/0", "data/1", "version"])
def test_a_local_header_that_is_elsewhere_is_refused(record: str, put: Put) -> None:
    data = A.build()
    directory = struct.unpack_from("<I", data, len(data) - 6)[0]
    for place in (len(data), len(data) + 10_000, FULL - 1, directory, directory + 4, directory - 1, len(data) - 22):
        with pytest.raises((Corrupt, Ambiguous)) as caught:
            bytes_by_name(read(put(with_entry(record, at=place))))
        assert type(caught.value) is Corrupt or "before its first record" in caught.value.what


# What is noted -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ELSEWHERE if name.startswith(b"archive/")])
def test_record_names_that_lead_elsewhere_are_noted(name: bytes, put: Put, tmp_path: Path) -> None:
    path = put(with_more(Entry(name, b"evil")))
    accepted(path, "unsafe-record-names", *["unused-record"] * name.startswith(b"archive/data/"))
    before = sorted(tmp_path.rglob("*"))
    convert(path, tmp_path / "b.pt")
    assert sorted(tmp_path.rglob("*")) == [*before, tmp_path / "b.pt"]  # nothing was unpacked anywhere
    assert torch_sees(tmp_path / "b.pt") == EXPECTED
    meets_budget(path)


def test_names_and_links_that_are_noted_and_those_that_are_not(put: Put) -> None:
    for root in (b"..", b"C:"):
        entries = tuple(replace(entry, name=entry.name.replace(b"archive", root)) for entry in A.entries)
        accepted(put(Layout(entries)), "unsafe-record-names")
    for name in (b"archive/data/a..b", b"archive/...", b"archive/..data", b"archive/a:b"):
        notes = read(put(with_more(Entry(name, b"fine")))).notes
        assert "unsafe-record-names" not in {note.code for note in notes}
    for record in ("data/0", "data.pkl"):
        accepted(put(with_entry(record, attributes=0o120777 << 16, made=0x031E)), "symlink-records")
    accepted(put(with_entry("data/0", attributes=0o100644 << 16, made=0x031E)))


# Archives of other programs are read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("descriptor", ["none", "signed", "bare", "wide", "wide-bare"])
@pytest.mark.parametrize("method", [0, 8])
@pytest.mark.parametrize("needed", [20, 45])
def test_what_other_programs_zip_is_read(descriptor: str, method: int, needed: int, put: Put, tmp_path: Path) -> None:
    """Descriptors with and without signature, of 32 and 64 bits; rewritten, all of them are as torch has them."""
    unix, short = struct.pack("<2HB2I", 0x5455, 9, 3, 0, 0), struct.pack("<2HBI", 0x5455, 5, 3, 0)
    folders = tuple(Entry(name, b"", attributes=0x10) for name in (b"archive/", b"archive/data/"))
    layout = of_all(A, descriptor=descriptor, method=method, needed=needed, extra=short, extra_local=unix, note=b"n")
    path = put(replace(layout, entries=(*folders, *layout.entries)))
    assert python_sees(path.read_bytes(), "archive/data/0") == W
    accepted(path, *["deflated"] * (method == 8))
    convert(path, tmp_path / "b.pt")
    assert torch_sees(tmp_path / "b.pt") == EXPECTED
    accepted(tmp_path / "b.pt")
