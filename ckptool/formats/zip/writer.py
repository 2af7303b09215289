"""A new zip archive: records laid out one after the other, all places known before a byte is written.

Records are stored, with the headers and descriptors that torch would write.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import partial

from ckptool.checkpoint import Computed, Data, FileRange, InlineBytes
from ckptool.checkpoint.blocks import Checksummed, Crc, Deferred, Segment
from ckptool.formats.zip import directory
from ckptool.formats.zip.directory import CENTRAL, DESCRIPTOR, DESCRIPTOR64, END, END64, FULL, LOCAL, LOCATOR, Record


class ZipLayout:
    """The records of an archive in the making; its segments, the directory and the end records last.

    at: where the next record goes.  sums: of the new records.  checksums=False: they are written without.
    """

    def __init__(self, alignment: int, begin: int = 0, checksums: bool = True) -> None:
        self.alignment, self.at, self.checksums = alignment, begin, checksums
        self.sums: list[Crc] = []
        self._segments: list[Segment] = []
        self._together: list[Record] = []  # the old records in the last segment, if that is a range
        self._lines: list[tuple[bytes, Crc | None]] = []  # of the directory; a new record's lacks the checksum
        self._directory_size = 0

    def add(self, name: str, data: Data | Deferred, crc: int | None = None, head: bytes = b"") -> None:
        """A record of our own, as torch would write it: `head`, then `data`, aligned in the file. crc: of the data, if
        it is known; it is checked on the way."""
        if isinstance(data, InlineBytes):
            head, data = head + data.content, InlineBytes(b"")
        raw, size, total = name.encode(), len(head) + data.length, Crc(zlib.crc32(head), name=name)
        if crc is not None and data.length:
            if head:
                from ckptool.formats.checksums import crc_combine  # few files need it
            total.expected = crc_combine(total.value, crc, data.length) if head else crc
        wide = zip64_extra((size, size, self.at)) if max(size, self.at) >= FULL else b""
        padding = -(self.at + LOCAL.size + len(raw) + len(wide) + 4) % self.alignment
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        header = LOCAL.pack(b"PK\x03\x04", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(raw), len(extra)) + raw + extra
        layout = DESCRIPTOR64 if max(size, self.at) >= FULL else DESCRIPTOR
        descriptor, short, at = layout.pack(b"PK\x07\x08", 0, size, size), min(size, FULL), min(self.at, FULL)
        lengths = len(raw), len(wide), 0
        line = CENTRAL.pack(b"PK\x01\x02", 0, 0, 0x0808, 0, 0, 0, 0, short, short, *lengths, 0, 0, 0, at) + raw + wide
        self.sums.append(total)
        self._segments.append(InlineBytes(header + head))
        if isinstance(data, Deferred):
            self._segments.append(Deferred(data.length, partial(_summed, data, total)))
        elif isinstance(data, Computed) and data.concatenated:
            from ckptool.formats.checksums import checksummed  # few files need it

            self._segments += checksummed(data, total)
        elif data.length:
            self._segments.append(Checksummed(data, total))
        self._segments.append(Deferred(len(descriptor), partial(_with_sum, descriptor, 4, total, self.checksums)))
        self._lines.append((line, total))
        self._directory_size += len(line)
        self.at += len(header) + size + len(descriptor)

    def add_old(self, record: Record, *, copied: bool) -> None:
        """A record of another archive as it is, header and all: copied to here, or left where it stands there."""
        line = moved_entry(record, self.at if copied else record.header)
        self._lines.append((line, None))
        self._directory_size += len(line)
        if not copied:
            return
        source, length = record.headers.source, record.end - record.header
        file, begin, last = source.file, source.start + record.header, self._segments[-1] if self._segments else None
        follows = isinstance(last, FileRange) and last.file is file and last.offset + last.length == begin
        if isinstance(last, FileRange) and follows and not file.far:
            self._together.append(record)  # thousands of small records are one range
            last.length += length
        else:
            self._together = [record]
            self._segments.append(FileRange(file, begin, length, partial(_confirm, self._together)))
        self.at += length

    def __iter__(self) -> Iterator[Segment]:
        yield from self._segments
        yield Deferred(self._directory_size, self._directory)
        yield InlineBytes(end_records(len(self._lines), self.at, self._directory_size))

    def _directory(self) -> bytes:
        stored = self.checksums
        return b"".join(line if total is None else _with_sum(line, 16, total, stored) for line, total in self._lines)


def _with_sum(raw: bytes, at: int, total: Crc, stored: bool) -> bytes:
    """Not a method: a layout that its own segments hold keeps the tensors alive until garbage is collected."""
    return raw[:at] + (total.value if stored else 0).to_bytes(4, "little") + raw[at + 4 :]


def _confirm(records: Sequence[Record]) -> None:
    for record in records:
        record.confirm()


def _summed(data: Deferred, total: Crc) -> bytes:
    content = data.make()
    total.value = zlib.crc32(content)
    return content


def zip64_extra(values: tuple[int, int, int], short: Sequence[int] = (0, 0, 0)) -> bytes:
    """The extra field with those of size, stored size and place that do not fit into 32 bits, or that stand nowhere
    else, since their field in `short` is full."""
    wide = [value for value, field in zip(values, short, strict=True) if value >= FULL or field == FULL]
    return struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""


def moved_entry(record: Record, at: int) -> bytes:
    """The directory's entry for a record that was copied whole to byte `at`, as a file if it was a symbolic link."""
    old, raw = record.central, record.name.encode()
    if at < FULL and not record.zip64 and not any(old[30:34]) and old[41] >> 4 != directory.LINK:  # as nearly all are
        return old[:42] + at.to_bytes(4, "little") + raw
    fields = [*CENTRAL.unpack(old)]
    fields[15] = 0 if fields[15] >> 28 == directory.LINK else fields[15]
    fields[16] = FULL if at >= FULL or record.zip64 else at
    extra = zip64_extra((record.size, record.stored, at), (fields[9], fields[8], fields[16]))
    fields[10:13] = len(raw), len(extra), 0
    return CENTRAL.pack(*fields) + raw + extra


def end_records(count: int, directory_at: int, directory_size: int) -> bytes:
    """The zip64 end record, its locator and the end record (98 bytes)."""
    end64 = END64.pack(b"PK\x06\x06", END64.size - 12, 0x031E, 45, 0, 0, count, count, directory_size, directory_at)
    locator = LOCATOR.pack(b"PK\x06\x07", 0, directory_at + directory_size, 1)
    n, size, at = min(count, directory.FULL16), min(directory_size, FULL), min(directory_at, FULL)
    return end64 + locator + END.pack(b"PK\x05\x06", 0, 0, n, n, size, at, 0)
