"""A zip archive taken apart into its lines and records, put together otherwise."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptool.formats.zip.record import CENTRAL, DESCRIPTOR, END, END64, LOCAL, LOCATOR
from tests.support.zip_benign import Rng, other


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


Mutation = Callable[[Pieces, Rng], Pieces]


def line_with(pieces: Pieces, number: int, line: bytes) -> Pieces:
    lines = list(pieces.lines)
    lines[number] = (line, lines[number][1])
    return replace(pieces, lines=tuple(lines))


def some_of(pieces: Pieces, rng: Rng) -> int:
    return rng.randrange(len(pieces.lines)) if pieces.lines else -1


def name_of(line: bytes) -> bytes:
    return line[CENTRAL.size : CENTRAL.size + int.from_bytes(line[28:30], "little")]


def line_again(pieces: Pieces, rng: Rng) -> Pieces:
    at = rng.randint(0, len(pieces.lines))
    return replace(pieces, lines=(*pieces.lines[:at], rng.choice(pieces.lines), *pieces.lines[at:]))


def line_gone(pieces: Pieces, rng: Rng) -> Pieces:
    at = some_of(pieces, rng)
    return replace(pieces, lines=(*pieces.lines[:at], *pieces.lines[at + 1 :]))


def lines_in_another_order(pieces: Pieces, rng: Rng) -> Pieces:
    return replace(pieces, lines=tuple(rng.sample(pieces.lines, len(pieces.lines))))


def lines_of_each_other(pieces: Pieces, rng: Rng) -> Pieces:
    """A line that leads to another record."""
    at = some_of(pieces, rng)
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
    at = some_of(pieces, rng)
    line, of = pieces.lines[at]
    local, twin = record(name_of(line), pieces.records[of][-40:])
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
    at = some_of(pieces, rng)
    line, of = pieces.lines[at]
    name, old = rng.choice([*NAMES, *(name_of(other) for other, _ in pieces.lines)]), name_of(line)
    where = rng.randrange(3)
    if where != 0:
        head = pieces.records[of]
        own = head[:26] + struct.pack("<H", len(name)) + head[28 : LOCAL.size] + name + head[LOCAL.size + len(old) :]
        pieces = replace(pieces, records=tuple(own if i == of else part for i, part in enumerate(pieces.records)))
    if where != 1:
        line = (
            line[:28] + struct.pack("<H", len(name)) + line[30 : CENTRAL.size] + name + line[CENTRAL.size + len(old) :]
        )
    return line_with(pieces, at, line)


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
    at = some_of(pieces, rng)
    line, _ = pieces.lines[at]
    name = rng.choice(NAMES)
    n, m, k = struct.unpack_from("<3H", line, 28)
    size = struct.unpack_from("<I", line, 24)[0]
    path = struct.pack("<BI", 1, zlib.crc32(name_of(line))) + name
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
        return line_with(pieces, at, line)
    more = rng.choice(
        [
            b"comment",
            hidden,
            hidden[-120:],
            END.pack(b"PK\x05\x06", 0, 0, 0, 0, 0, 0, 0),
            LOCATOR.pack(b"PK\x06\x07", 0, 0, 1),
        ]
    )
    return line_with(pieces, at, line[:32] + struct.pack("<H", k + len(more)) + line[34:] + more)


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
