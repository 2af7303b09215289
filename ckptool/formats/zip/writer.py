"""A new zip archive: records laid out one after the other, all places known before a byte is written.

Records are stored, with the headers and descriptors that torch would write.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ckptool.checkpoint import Data, FileRange, InlineBytes
from ckptool.checkpoint.blocks import Crc, Deferred, Segment
from ckptool.facts import dataclass
from ckptool.formats.checksums import checksummed, crc_combine
from ckptool.formats.zip.directory import (
    CENTRAL,
    DESCRIPTOR,
    DESCRIPTOR64,
    END,
    END64,
    FULL,
    FULL16,
    LINK,
    LOCAL,
    LOCATOR,
    Record,
)


@dataclass(slots=True, eq=False)
class NewRecord:
    """A record of our own, at byte `at`: `head`, then `data`. Its headers are made when they are asked for.

    summed: they have its checksum, which is known when it was written.
    """

    name: str
    at: int
    size: int
    head: bytes
    data: Data | Deferred
    total: Crc
    summed: bool

    def descriptor(self) -> bytes:
        layout = DESCRIPTOR64 if max(self.size, self.at) >= FULL else DESCRIPTOR
        return layout.pack(b"PK\x07\x08", self.total.value if self.summed else 0, self.size, self.size)

    def entry(self) -> bytes:
        """Its line of the directory."""
        crc, short, place = self.total.value if self.summed else 0, min(self.size, FULL), min(self.at, FULL)
        fields = [b"PK\x01\x02", 0, 0, 0x0808, 0, 0, 0, crc, short, short, 0, 0, 0, 0, 0, 0, place]
        return _entry(fields, self.name, (self.size, self.size, self.at))


class ZipLayout:
    """The records of an archive in the making; its segments, the directory and the end records last.

    at: where the next record goes.  sums: of the new records.  checksums=False: they are written without.
    """

    def __init__(self, alignment: int, begin: int = 0, checksums: bool = True) -> None:
        self.alignment, self.at, self.checksums = alignment, begin, checksums
        self.sums: list[Crc] = []
        self._parts: list[FileRange | NewRecord] = []
        self._together: list[Record] = []  # the old records that the last of the parts is, if it is a range
        self._lines: list[bytes | NewRecord] = []  # of the directory: a layout may have 50,000
        self._directory_size = 0

    def add(self, name: str, data: Data | Deferred, crc: int | None = None, head: bytes = b"") -> None:
        """A record of our own: `head`, then `data`, whose checksum `crc`, if it is known, is checked on the way."""
        if isinstance(data, InlineBytes):
            head, data = head + data.content, InlineBytes(b"")
        total, size = Crc(zlib.crc32(head), name=name), len(head) + data.length
        if crc is not None and data.length:
            total.expected = crc_combine(total.value, crc, data.length) if head else crc
        record = NewRecord(name, self.at, size, head, data, total, self.checksums)
        self.sums.append(total)
        self._parts.append(record)
        self._lines.append(record)
        self._directory_size += len(record.entry())
        self.at += len(local_header(name, self.at, size, self.alignment)) + size + len(record.descriptor())

    def add_old(self, record: Record, *, copied: bool) -> None:
        """A record of another archive as it is, header and all: copied to here, or left where it stands there."""
        line = moved_entry(record, self.at if copied else record.header)
        self._lines.append(line)
        self._directory_size += len(line)
        if not copied:
            return
        source, length = record.archive.source, record.end - record.header
        file, begin, before = source.file, source.start + record.header, self._parts[-1] if self._parts else None
        follows = isinstance(before, FileRange) and before.file is file and before.offset + before.length == begin
        if isinstance(before, FileRange) and follows and not file.far:
            self._together.append(record)  # thousands of small records are one range
            before.length += length
        else:
            self._together = [record]
            self._parts.append(FileRange(file, begin, length, partial(_confirm, self._together)))
        self.at += length

    def __iter__(self) -> Iterator[Segment]:
        for part in self._parts:
            if isinstance(part, FileRange):
                yield part
                continue
            yield InlineBytes(local_header(part.name, part.at, part.size, self.alignment))
            if part.head:
                yield InlineBytes(part.head)
            if isinstance(part.data, Deferred):
                yield Deferred(part.size, partial(_summed, part.data, part.total))
            elif part.data.length:
                yield from checksummed(part.data, part.total)
            yield Deferred(len(part.descriptor()), part.descriptor)
        yield Deferred(self._directory_size, self._directory)
        yield InlineBytes(end_records(len(self._lines), self.at, self._directory_size))

    def _directory(self) -> bytes:
        return b"".join(line if isinstance(line, bytes) else line.entry() for line in self._lines)


def _confirm(records: Sequence[Record]) -> None:
    for record in records:
        record.confirm()


def _summed(data: Deferred, total: Crc) -> bytes:
    made = data.make()
    total.value = zlib.crc32(made)
    return made


# What torch writes ---------------------------------------------------------------------------------------------------


def zip64_extra(size: int, stored: int, at: int, short: Sequence[int] = (0, 0, 0)) -> bytes:
    """The extra field with the values that do not fit into 32 bits, or stand nowhere else, as `short` has them full."""
    if max(size, stored, at, *short) < FULL:
        return b""
    wide = [value for value, each in zip((size, stored, at), short, strict=True) if value >= FULL or each == FULL]
    return struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide)


def local_header(name: str, at: int, size: int, alignment: int) -> bytes:
    """The header of a record of `size` bytes at byte `at`: padded so that the data is aligned."""
    raw, extra = name.encode(), zip64_extra(size, size, at)
    padding = -(at + LOCAL.size + len(raw) + len(extra) + 4) % alignment
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return LOCAL.pack(b"PK\x03\x04", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(raw), len(extra)) + raw + extra


def moved_entry(record: Record, at: int) -> bytes:
    """The directory's entry for a record that was copied whole to byte `at`, as a file if it was a symbolic link."""
    old = record.central
    if at < FULL and not record.zip64 and not any(old[30:34]) and old[41] >> 4 != LINK:  # as nearly all are
        return old[:42] + at.to_bytes(4, "little") + record.name.encode()
    fields = [*CENTRAL.unpack(old)]
    fields[15] = 0 if fields[15] >> 28 == LINK else fields[15]
    fields[16] = FULL if at >= FULL or record.zip64 else at
    return _entry(fields, record.name, (record.size, record.stored, at))


def _entry(fields: list[Any], name: str, values: tuple[int, int, int]) -> bytes:
    raw, extra = name.encode(), zip64_extra(*values, short=(fields[9], fields[8], fields[16]))
    fields[10:13] = len(raw), len(extra), 0
    return CENTRAL.pack(*fields) + raw + extra


def end_records(count: int, directory_at: int, directory_size: int) -> bytes:
    """The zip64 end record, its locator and the end record (98 bytes)."""
    end64 = END64.pack(b"PK\x06\x06", END64.size - 12, 0x031E, 45, 0, 0, count, count, directory_size, directory_at)
    locator = LOCATOR.pack(b"PK\x06\x07", 0, directory_at + directory_size, 1)
    n, size, at = min(count, FULL16), min(directory_size, FULL), min(directory_at, FULL)
    return end64 + locator + END.pack(b"PK\x05\x06", 0, 0, n, n, size, at, 0)
