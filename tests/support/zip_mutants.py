"""Torch zips mutated by their structure, and the judge of what comes out: stock torch and Python's `zipfile`.

`mutant(seed)` takes one of the benign archives (torch's own, re-zipped ones, in-place edits, finished and interrupted)
and takes it apart, puts it together otherwise, splices others into it, and lies in its headers. `verdict` says whether
readers agree about the result.
"""

from __future__ import annotations

import contextlib
import errno
import io
import random
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import ckptool
from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import Source
from ckptool.errors import CkptoolError
from ckptool.formats import read, torch_zip
from ckptool.formats.zip.directory import read_archive
from ckptool.formats.zip.record import CENTRAL, DESCRIPTOR, END, END64, LOCAL, LOCATOR
from ckptool.output.sink import segments_of
from tests.support.files import torch_bytes
from tests.support.same import assert_same_objects

# Benign archives -----------------------------------------------------------------------------------------------------


def tree(tensors: int, salt: int) -> dict[str, Any]:
    """A small checkpoint; the same numbers of tensors give archives of the same lengths, with other values."""
    dtypes = (torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool)
    values = {f"w{n}": (torch.arange(3 + n) + salt).to(dtypes[n % len(dtypes)]) for n in range(tensors)}
    return values | {"epoch": salt, "note": "n" * 20}


def by_torch(value: Any, root: str = "archive") -> bytes:
    """As torch writes it to a file of that name."""
    if root == "archive":
        return torch_bytes(value)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{root}.pt"
        torch.save(value, path)
        return path.read_bytes()


def without_checksums(value: Any) -> bytes:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        return by_torch(value)
    finally:
        torch.serialization.set_crc32_options(before)


class _Pipe:
    """A file that cannot be rewound: `zipfile` puts descriptors behind what it writes there."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self.parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass


def rezipped_mutant(data: bytes, compression: int, *, streamed: bool = False, wide: bool = False) -> bytes:
    """The same records as Python's `zipfile` writes them."""
    out: Any = _Pipe() if streamed else io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w", compression) as again:
        for info in archive.infolist():
            new = zipfile.ZipInfo(info.filename)
            new.compress_type = compression
            with again.open(new, "w", force_zip64=wide) as file:
                file.write(_read(archive, info.filename, has_checksums=False))
    return b"".join(out.parts) if streamed else out.getvalue()


def edited(data: bytes, folder: Path, times: int = 1) -> bytes:
    """The archive after edits in place."""
    for number in range(times):
        data, tail, _ = _edit(data, folder, number)
        data += tail
    return data


def _edit(data: bytes, folder: Path, number: int) -> tuple[bytes, bytes, bytes]:
    """What an edit in place keeps, what it appends, and the guard that it puts behind that until the commit."""
    path = folder / "edited.pt"
    path.write_bytes(data)
    checkpoint = read(path)
    changed = {**checkpoint.tree, f"edit{number}": number}
    plan = torch_zip.append(
        Checkpoint(changed, torch_zip.NAME, checkpoint.metadata, checkpoint.source, checkpoint.origin)
    )
    assert plan is not None
    new = b"".join(_bytes(segment) for segment in segments_of(plan))
    return data[: plan.keep], new, plan.guard


def _bytes(segment: Any) -> bytes:
    data = getattr(segment, "data", segment)
    if hasattr(segment, "make"):
        return segment.make()  # type: ignore[no-any-return]
    raw = data.read(0, data.length)
    if hasattr(segment, "total"):
        segment.total.value = zlib.crc32(raw, segment.total.value)
    return bytes(raw)


def interrupted(data: bytes, folder: Path, rng: random.Random) -> bytes:
    """The archive with an edit in place that stopped somewhere, by a kill or a power cut."""
    before, new, guard = _edit(data, folder, 7)
    stretched = bytearray(before + bytes(len(new)) + guard)
    if rng.random() < 0.3:  # while it was being stretched
        return bytes(stretched[: rng.randint(len(before) + 1, len(stretched))])
    if rng.random() < 0.5:  # a kill: a beginning is there
        written = rng.choice([len(new), rng.randint(0, len(new))])
        stretched[len(before) : len(before) + written] = new[:written]
    else:  # a power cut: any blocks are
        first = -len(before) % 512
        for at in (0, *range(first, len(new), 512)):
            if rng.random() < 0.5:
                end = min(at + 512, len(new)) if at >= first else first
                stretched[len(before) + at : len(before) + end] = new[at:end]
    return bytes(stretched)


@cache
def benign(folder: Path) -> tuple[bytes, ...]:
    """Healthy archives of all kinds, small."""
    made = []
    for tensors in range(5):
        plain = by_torch(tree(tensors, 1))
        made += [plain, rezipped_mutant(plain, zipfile.ZIP_STORED), rezipped_mutant(plain, zipfile.ZIP_DEFLATED)]
    plain = by_torch(tree(2, 1))
    made += [
        by_torch(tree(3, 2), "m"),
        without_checksums(tree(2, 3)),
        rezipped_mutant(plain, zipfile.ZIP_STORED, streamed=True),
        rezipped_mutant(plain, zipfile.ZIP_DEFLATED, streamed=True),
        rezipped_mutant(plain, zipfile.ZIP_STORED, wide=True),
        rezipped_mutant(plain, zipfile.ZIP_DEFLATED, streamed=True, wide=True),
        edited(plain, folder),
        edited(plain, folder, 3),
        edited(rezipped_mutant(plain, zipfile.ZIP_STORED), folder, 2),
        edited(rezipped_mutant(plain, zipfile.ZIP_DEFLATED), folder),
        by_torch({"inner": torch.frombuffer(bytearray(plain), dtype=torch.uint8), "w": torch.ones(2)}),
    ]
    return tuple(made)


# Taken apart and put together ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pieces:
    """An archive: its records with headers and descriptors, and its directory: lines, and which record each is of."""

    records: tuple[bytes, ...]
    lines: tuple[tuple[bytes, int], ...]
    wide: bool
    before: bytes = b""
    gap: bytes = b""  # before the directory
    comment: bytes = b""

    def build(self, begin: int = 0) -> bytes:
        """The archive, every offset right for a place `begin` bytes into a file."""
        body, places = bytearray(self.before), []
        for record in self.records:
            places.append(begin + len(body))
            body += record
        body += self.gap
        at = begin + len(body)
        lines = b"".join(line[:42] + struct.pack("<I", places[of]) + line[46:] for line, of in self.lines)
        count = len(self.lines)
        body += lines
        if self.wide:
            end64 = END64.pack(b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, len(lines), at)
            body += end64 + LOCATOR.pack(b"PK\x06\x07", 0, at + len(lines), 1)
        body += END.pack(b"PK\x05\x06", 0, 0, count, count, len(lines), at, len(self.comment))
        return bytes(body) + self.comment


def apart(data: bytes) -> Pieces:
    """The pieces of a benign archive; records that an edit in place left behind belong to the one before them."""
    size, at = END.unpack_from(data, len(data) - END.size)[5:7]
    lines, place = [], at
    while place < at + size:
        n, m, k = struct.unpack_from("<3H", data, place + 28)
        lines.append(data[place : place + CENTRAL.size + n + m + k])
        place += len(lines[-1])
    offsets = sorted(int.from_bytes(line[42:46], "little") for line in lines)
    ends = [*offsets[1:], at]
    records = tuple(data[a:b] for a, b in zip(offsets, ends, strict=True))
    wide = data[len(data) - END.size - LOCATOR.size :][:4] == b"PK\x06\x07"
    return Pieces(records, tuple((line, offsets.index(int.from_bytes(line[42:46], "little"))) for line in lines), wide)


def record(name: bytes, content: bytes, flags: int = 0x0800) -> tuple[bytes, bytes]:
    """A stored record and its line, whatever its name."""
    crc, size = zlib.crc32(content), len(content)
    local = LOCAL.pack(b"PK\x03\x04", 20, flags, 0, 0, 0, crc, size, size, len(name), 0) + name + content
    line = CENTRAL.pack(b"PK\x01\x02", 20, 20, flags, 0, 0, 0, crc, size, size, len(name), 0, 0, 0, 0, 0, 0) + name
    return local, line


# Mutations of the pieces ---------------------------------------------------------------------------------------------

Rng = random.Random
Mutation = Callable[[Pieces, Rng], Pieces]


def _line_with(pieces: Pieces, number: int, line: bytes) -> Pieces:
    lines = list(pieces.lines)
    lines[number] = (line, lines[number][1])
    return replace(pieces, lines=tuple(lines))


def _some(pieces: Pieces, rng: Rng) -> int:
    return rng.randrange(len(pieces.lines)) if pieces.lines else -1


def _name(line: bytes) -> bytes:
    return line[CENTRAL.size : CENTRAL.size + int.from_bytes(line[28:30], "little")]


def line_again(pieces: Pieces, rng: Rng) -> Pieces:
    at = rng.randint(0, len(pieces.lines))
    return replace(pieces, lines=(*pieces.lines[:at], rng.choice(pieces.lines), *pieces.lines[at:]))


def line_gone(pieces: Pieces, rng: Rng) -> Pieces:
    at = _some(pieces, rng)
    return replace(pieces, lines=(*pieces.lines[:at], *pieces.lines[at + 1 :]))


def lines_in_another_order(pieces: Pieces, rng: Rng) -> Pieces:
    return replace(pieces, lines=tuple(rng.sample(pieces.lines, len(pieces.lines))))


def lines_of_each_other(pieces: Pieces, rng: Rng) -> Pieces:
    """A line that leads to another record."""
    at = _some(pieces, rng)
    lines = list(pieces.lines)
    lines[at] = (lines[at][0], rng.randrange(len(pieces.records)))
    return replace(pieces, lines=tuple(lines))


def records_in_another_order(pieces: Pieces, rng: Rng) -> Pieces:
    order = rng.sample(range(len(pieces.records)), len(pieces.records))
    records = tuple(pieces.records[i] for i in order)
    return replace(pieces, records=records, lines=tuple((line, order.index(of)) for line, of in pieces.lines))


def record_again(pieces: Pieces, rng: Rng) -> Pieces:
    """A second record of a name, its values others: first or last in the file, first or last in the directory, or in
    neither."""
    at = _some(pieces, rng)
    line, of = pieces.lines[at]
    local, twin = record(_name(line), pieces.records[of][-40:])
    records = (*pieces.records, local)
    entry = (twin, len(records) - 1)
    where = rng.randrange(3)
    lines = (entry, *pieces.lines) if where == 0 else (*pieces.lines, entry) if where == 1 else pieces.lines
    return replace(pieces, records=records, lines=lines)


def record_gone(pieces: Pieces, rng: Rng) -> Pieces:
    at = rng.randrange(len(pieces.records))
    records = tuple(b"" if i == at else part for i, part in enumerate(pieces.records))
    return replace(pieces, records=records)


NAMES = (
    b"archive/data.pkl", b"archive/DATA.PKL", b"archive/data/0", b"archive/data/00", b"archive/data/1",
    b"archive/version",
    b"archive/byteorder",
    b"archive/data.pkl\0", b"archive/data.pkl\0x", b"archive\\data.pkl", b"./archive/data.pkl", b"/archive/data.pkl",
    b"archive//data.pkl",
    b"other/data.pkl", b"archive/data.pkl/", b"", b"archive/", b"archive/\xff\xfe", b"archive/constants.pkl",
    b"archive/code/x.py",
    "archive/däta.pkl".encode(), b"archive/.data/version", b"archive/data/0/", b"archive/.format_version", b"a" * 300,
)  # fmt: skip


def renamed(pieces: Pieces, rng: Rng) -> Pieces:
    """Another name in the directory, in the record's own header, or in both."""
    at = _some(pieces, rng)
    line, of = pieces.lines[at]
    name, old = rng.choice([*NAMES, *(_name(other) for other, _ in pieces.lines)]), _name(line)
    where = rng.randrange(3)
    if where != 0:
        head = pieces.records[of]
        own = head[:26] + struct.pack("<H", len(name)) + head[28 : LOCAL.size] + name + head[LOCAL.size + len(old) :]
        pieces = replace(pieces, records=tuple(own if i == of else part for i, part in enumerate(pieces.records)))
    if where != 1:
        line = (
            line[:28] + struct.pack("<H", len(name)) + line[30 : CENTRAL.size] + name + line[CENTRAL.size + len(old) :]
        )
    return _line_with(pieces, at, line)


def record_more(pieces: Pieces, rng: Rng) -> Pieces:
    """One more record, which may hold an archive, or be of an odd name; its line may be missing."""
    contents = (
        b"",
        b"x" * 16,
        b"\x80\x02N.",
        other(rng),
        other(rng)[-200:],
        END.pack(b"PK\x05\x06", 0, 0, 0, 0, 0, 0, 0),
    )
    local, line = record(rng.choice(NAMES), rng.choice(contents), rng.choice([0, 0x0800, 0x0801, 0x0808]))
    at = rng.randint(0, len(pieces.records))
    records = (*pieces.records[:at], local, *pieces.records[at:])
    lines = [(entry, of + (of >= at)) for entry, of in pieces.lines]
    if rng.random() < 0.8:
        lines.insert(rng.randint(0, len(lines)), (line, at))
    return replace(pieces, records=records, lines=tuple(lines))


def bytes_between(pieces: Pieces, rng: Rng) -> Pieces:
    """Bytes that belong to no record: before the first, behind one, or before the directory."""
    extra = rng.choice(
        [b"\0", bytes(22), b"PK\x03\x04", other(rng), other(rng)[-150:], rng.randbytes(rng.randint(1, 80))]
    )
    where = rng.randrange(3)
    if where == 0:
        return replace(pieces, before=extra)
    if where == 1:
        return replace(pieces, gap=extra)
    of = rng.randrange(len(pieces.records))
    return replace(pieces, records=tuple(part + extra * (i == of) for i, part in enumerate(pieces.records)))


def extra_in_line(pieces: Pieces, rng: Rng) -> Pieces:
    """An extra field or a comment in the directory: another name, other sizes, another archive."""
    at = _some(pieces, rng)
    line, _ = pieces.lines[at]
    name = rng.choice(NAMES)
    n, m, k = struct.unpack_from("<3H", line, 28)
    size = struct.unpack_from("<I", line, 24)[0]
    path = struct.pack("<BI", 1, zlib.crc32(_name(line))) + name
    wide = struct.pack("<3Q", *(rng.choice([size, 0, 1, size + 4, 1 << 33]) for _ in range(3)))[
        : rng.choice([0, 8, 16, 24, 20])
    ]
    hidden = other(rng)
    fields = (
        struct.pack("<2H", 0x7075, len(path)) + path,
        struct.pack("<2H", 1, len(wide)) + wide,
        struct.pack("<2H", 0x4246, len(hidden)) + hidden,
        struct.pack("<2H", 1, 60000),
        b"x",
    )
    middle = CENTRAL.size + n + m
    if rng.random() < 0.6:
        more = rng.choice(fields)
        line = line[:30] + struct.pack("<H", m + len(more)) + line[32:middle] + more + line[middle:]
        if rng.random() < 0.4:  # and what it would widen, full
            for place in rng.sample([20, 24], rng.randint(1, 2)):
                line = line[:place] + b"\xff" * 4 + line[place + 4 :]
        return _line_with(pieces, at, line)
    more = rng.choice(
        [
            b"comment",
            hidden,
            hidden[-120:],
            END.pack(b"PK\x05\x06", 0, 0, 0, 0, 0, 0, 0),
            LOCATOR.pack(b"PK\x06\x07", 0, 0, 1),
        ]
    )
    return _line_with(pieces, at, line[:32] + struct.pack("<H", k + len(more)) + line[34:] + more)


def extra_in_record(pieces: Pieces, rng: Rng) -> Pieces:
    """An extra field in a record's own header."""
    of = rng.randrange(len(pieces.records))
    head = pieces.records[of]
    if len(head) < LOCAL.size:
        return pieces
    n, m = struct.unpack_from("<2H", head, 26)
    hidden = other(rng)
    wide = struct.pack("<2Q", *(rng.choice([0, 1, 12, 1 << 33]) for _ in range(2)))
    more = rng.choice(
        [
            struct.pack("<2H", 0x4246, len(hidden)) + hidden,
            struct.pack("<2H", 1, 16) + wide,
            struct.pack("<2H", 0x7075, 7) + b"\1\0\0\0\0ab",
            b"x",
        ]
    )
    middle = LOCAL.size + n + m
    own = head[:28] + struct.pack("<H", m + len(more)) + head[30:middle] + more + head[middle:]
    return replace(pieces, records=tuple(own if i == of else part for i, part in enumerate(pieces.records)))


def descriptor_otherwise(pieces: Pieces, rng: Rng) -> Pieces:
    """A descriptor more, less, or of another width behind a record."""
    of = rng.randrange(len(pieces.records))
    whole = pieces.records[of]
    crc, stored, size = struct.unpack_from("<3I", next((line for line, i in pieces.lines if i == of), bytes(46)), 16)
    narrow, wide = (
        DESCRIPTOR.pack(b"PK\x07\x08", crc, stored, size),
        struct.pack("<4sI2Q", b"PK\x07\x08", crc, stored, size),
    )
    base = whole[: -DESCRIPTOR.size] if whole[-DESCRIPTOR.size :][:4] == b"PK\x07\x08" else whole
    whole = base + rng.choice([b"", narrow, wide, narrow[4:], wide[4:], narrow + narrow, narrow[:8] + bytes(8)])
    return replace(pieces, records=tuple(whole if i == of else part for i, part in enumerate(pieces.records)))


def comment(pieces: Pieces, rng: Rng) -> Pieces:
    return replace(
        pieces,
        comment=rng.choice(
            [b"c", other(rng), other(rng)[-120:], bytes(22), END.pack(b"PK\x05\x06", 0, 0, 0, 0, 0, 0, 0)]
        ),
    )


def ends_otherwise(pieces: Pieces, rng: Rng) -> Pieces:
    return replace(pieces, wide=not pieces.wide)


OF_PIECES: tuple[Mutation, ...] = (
    line_again, line_gone, lines_in_another_order, lines_of_each_other, records_in_another_order, record_again,
    record_gone, renamed,
    record_more, bytes_between, extra_in_line, extra_in_record, descriptor_otherwise, comment, ends_otherwise,
)  # fmt: skip


# Splices of two archives ---------------------------------------------------------------------------------------------


@cache
def _others() -> tuple[bytes, ...]:
    return tuple(
        made
        for tensors in range(5)
        for plain in (by_torch(tree(tensors, 50)),)
        for made in (plain, rezipped_mutant(plain, zipfile.ZIP_STORED), rezipped_mutant(plain, zipfile.ZIP_DEFLATED))
    )


def other(rng: Rng) -> bytes:
    """Another benign archive, with other values."""
    return rng.choice(_others())


def odd(pieces: Pieces, rng: Rng) -> Pieces:
    """The pieces with one thing in one line that a strict reader refuses, and a lenient one may not."""
    at = _some(pieces, rng)
    line, _ = pieces.lines[at]
    n = int.from_bytes(line[28:30], "little")
    change = rng.randrange(7)
    if change == 0:
        line = line[:8] + struct.pack("<H", rng.choice([0x0801, 0x0820, 0x0840, 0x2800, 0x0809])) + line[10:]
    elif change == 1:
        line = line[: CENTRAL.size + n - 1] + b"\xff" + line[CENTRAL.size + n :]
    elif change == 2:
        line = line[:20] + struct.pack("<I", rng.choice([0, 1, 1 << 31, 0xFFFFFFFF])) + line[24:]
    elif change == 3:
        line = line[:10] + struct.pack("<H", rng.choice([1, 9, 12, 99])) + line[12:]
    elif change == 4:
        line = line[:34] + b"\1\0" + line[36:]
    elif change == 5:
        line = line[: CENTRAL.size] + b"\0" + line[CENTRAL.size + 1 :]
    else:
        return replace(pieces, lines=(*pieces.lines, pieces.lines[at]))
    return _line_with(pieces, at, line)


def two_in_one(data: bytes, rng: Rng) -> bytes:
    """Two archives, one before, behind, inside or in the comment of the other, offsets corrected or not."""
    second = apart(other(rng))
    if rng.random() < 0.5:
        second = odd(second, rng)
    way = rng.randrange(6)
    if way == 0:
        return data + second.build()
    if way == 1:
        return data + second.build(len(data))
    if way == 2:
        return second.build() + apart(data).build(len(second.build()))
    pieces = apart(data)
    if way == 3:
        return replace(pieces, gap=second.build(rng.choice([0, sum(map(len, pieces.records))]))).build()
    if way == 4:
        return replace(pieces, comment=second.build(rng.choice([0, len(data)]))).build()
    directory = sum(map(len, pieces.records)) + sum(len(line) for line, _ in pieces.lines)
    return data[:directory] + second.build(rng.choice([0, directory])) + data[directory:]


def behind_a_guard(data: bytes, rng: Rng) -> bytes:
    """As if an in-place edit had been interrupted: another archive's records and directory, then a copy of the first
    one's end records.

    A reader that looks for the directory right before the end record finds the second, one that goes by its offset the
    first.
    """
    first = apart(data)
    names = [_name(line) for line, _ in first.lines]
    second = _with_the_same_names(first, rng)
    if rng.random() < 0.8:
        second = odd(second, rng)
    if rng.random() < 0.2:  # a directory that reaches over its own end records
        line, _ = second.lines[-1]
        second = _line_with(
            second, len(second.lines) - 1, line[:32] + struct.pack("<H", rng.choice([20, 42, 76, 98, 118])) + line[34:]
        )
    assert names
    begin = len(data) + rng.choice([0, 0, 1, 64])
    inner = second.build(begin)
    tail = END.size + (LOCATOR.size + END64.size if second.wide else 0)
    guard = data[-END.size - LOCATOR.size :] if first.wide else data[-END.size :]
    keep = rng.choice([inner[:-tail], inner[:-tail], inner, inner[:-tail] + inner[-tail:][: END64.size]])
    return data + bytes(begin - len(data)) + keep + guard


def _with_the_same_names(pieces: Pieces, rng: Rng) -> Pieces:
    """An archive with a directory of the same size, and other values."""
    made = [
        record(_name(line), rng.choice([b"\x80\x02}q\0.", bytes(12), b"little", b"3\n", b"x"]))
        for line, _ in pieces.lines
    ]
    lines = tuple(
        (new + bytes(len(old) - len(new)) if len(old) == len(new) else _padded(new, len(old)), number)
        for number, ((old, _), (_, new)) in enumerate(zip(pieces.lines, made, strict=True))
    )
    return replace(pieces, records=tuple(local for local, _ in made), lines=lines, wide=rng.random() < 0.3)


def _padded(line: bytes, size: int) -> bytes:
    missing = size - len(line)
    return line[:32] + struct.pack("<H", missing) + line[34:] + bytes(missing)


def around(data: bytes, rng: Rng) -> bytes:
    """Bytes before or behind the archive, or some of it again."""
    guard = data[-END.size - LOCATOR.size :]
    more = rng.choice(
        [
            *(b"\0", bytes(rng.randint(1, 70_000)), b"\n", rng.randbytes(16), b"PK\x05\x06", data[-END.size :]),
            *(
                guard,
                guard[: rng.randint(1, 41)],
                bytes(rng.randint(1, 200)) + guard,
                bytes(100) + guard[: rng.randint(1, 41)],
            ),
            *(data[-rng.randint(1, len(data)) :], other(rng)[:-22]),
        ]
    )
    return more + data if rng.random() < 0.3 else data + more


# Lies in the fields --------------------------------------------------------------------------------------------------

_LOCAL = ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2))
_CENTRAL = (*((at + 2, width) for at, width in _LOCAL), (32, 2), (34, 2), (36, 2), (38, 4), (42, 4), (4, 2))
_FIELDS = {
    b"PK\x03\x04": _LOCAL,
    b"PK\x01\x02": _CENTRAL,
    b"PK\x07\x08": ((4, 4), (8, 4), (12, 4), (8, 8), (16, 8)),
    b"PK\x06\x06": ((4, 8), (12, 2), (14, 2), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\x06\x07": ((4, 4), (8, 8), (16, 4)),
    b"PK\x05\x06": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
}


def structures(data: bytes) -> list[int]:
    """Where anything with a signature is."""
    found, at = [], data.find(b"PK")
    while at >= 0:
        if data[at : at + 4] in _FIELDS:
            found.append(at)
        at = data.find(b"PK", at + 2)
    return found


def lie(data: bytes, rng: Rng) -> bytes:
    """Another value in one field of one header."""
    places = structures(data)
    if not places:
        return data
    ends = [place for place in places if data[place : place + 3] != b"PK\x03"]
    place = rng.choice(ends if rng.random() < 0.5 and ends else places)
    at, width = rng.choice(_FIELDS[data[place : place + 4]])
    at += place
    if at + width > len(data):
        return data
    old = int.from_bytes(data[at : at + width], "little")
    near = [old + rng.choice([-1, 1]) * step for step in (1, 2, 4, 8, 16, 22, 30, 42, 46, 56, 60, 62, 64, 76, 98)]
    values = [
        *near, 0, 1, 8, 0x800, 0x808, 0xFFFF, 0xFFFFFFFF, (1 << 8 * width) - 1, old ^ 1 << rng.randrange(8 * width),
        len(data),
        rng.choice(places), rng.choice(places),
        *(int.from_bytes(data[p + 16 : p + 20], "little") for p in rng.sample(places, 1)),
    ]  # fmt: skip
    new = rng.choice(values) % (1 << 8 * width)
    return data[:at] + new.to_bytes(width, "little") + data[at + width :]


def mutant(seed: int, folder: Path) -> tuple[str, bytes]:
    """What was done, and the archive; the same for the same seed."""
    rng = random.Random(seed)
    data = rng.choice(benign(folder))
    done = []
    if rng.random() < 0.25:
        data = interrupted(data, folder, rng)
        done.append("interrupted")
    elif rng.random() < 0.6:
        pieces = apart(data)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            mutation = rng.choice(OF_PIECES)
            if pieces.lines and pieces.records:
                pieces = mutation(pieces, rng)
            done.append(mutation.__name__)
        data = pieces.build()
    splice = rng.random()
    if splice < 0.35:
        whole: Callable[[bytes, Rng], bytes] = rng.choice([two_in_one, behind_a_guard, behind_a_guard, around])
        with contextlib.suppress(struct.error, ValueError, AssertionError, IndexError):  # no longer to be taken apart
            data = whole(data, rng)
            done.append(whole.__name__)
    for _ in range(rng.choice([0, 0, 1, 1, 2]) if done else rng.choice([0, 1, 2, 3])):
        data = lie(data, rng)
        done.append("lie")
    return f"{seed}: {', '.join(done) or 'nothing'}", data


# The judge -----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """How many archives were read and how many refused, by code; and what readers disagreed about."""

    read: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, what: str, data: bytes, path: Path) -> None:
        path.write_bytes(data)
        try:
            ours = ckptool.load(path, mmap=False)
        except CkptoolError as error:
            self.refused[error.code] = self.refused.get(error.code, 0) + 1
            return
        self.read += 1
        if problem := disagreement(path, ours):
            self.wrong.append(f"{what}: {problem}")


def disagreement(path: Path, ours: Any) -> str:
    """What torch or `zipfile` makes of an archive otherwise than ckptool did; empty where all agree."""
    archive = read_archive(Source(path))
    torn = any(note.code == "interrupted-edit" for note in archive.notes)
    try:
        theirs = torch.load(path, map_location="cpu", weights_only=False)
    except (
        OSError
    ) as error:  # in an archive of less than 4 KB with a long hole behind it, torch seeks to before its beginning
        return "" if torn and error.errno == errno.EINVAL else f"torch cannot read it ({error!s:.120})"
    except Exception as error:  # noqa: BLE001
        return f"torch cannot read it ({error!s:.120})"
    try:
        assert_same_objects(ours, theirs)
    except AssertionError as error:
        return f"torch reads other values ({error!s:.200})"
    try:
        reading = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError) as error:
        return "" if torn else f"zipfile cannot read it ({error!s:.120})"  # of a torn edit it sees that it is torn
    with reading:
        if sorted(reading.namelist()) != sorted(archive.records):
            return f"zipfile sees other records: {reading.namelist()}"
        for name, mine in archive.records.items():
            try:
                contents = mine.contents(1 << 20)
            except CkptoolError:
                continue  # a record that nothing uses, and that is refused when it is
            try:
                data = _read(reading, name, archive.has_checksums)
            except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError) as error:
                return f"zipfile cannot read {name} ({error!s:.120})"
            if data != contents:
                return f"zipfile reads other bytes of {name}"
    return ""


def _read(archive: zipfile.ZipFile, name: str, has_checksums: bool) -> bytes:
    with archive.open(name) as file:
        if not has_checksums:
            file._expected_crc = None  # type: ignore[attr-defined]
        return file.read()
