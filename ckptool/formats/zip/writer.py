"""A new zip archive: records laid out one after the other, all places known before a byte is written.

Records are stored, with the headers and descriptors that torch would write.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence

from ckptool.checkpoint import Data, InlineBytes, Storage
from ckptool.checkpoint.blocks import Crc
from ckptool.checkpoint.plan import Deferred, Plan, Segment
from ckptool.formats.checksums import checksummed, crc_combine
from ckptool.formats.zip.record import (
    CENTRAL,
    DESCRIPTOR,
    DESCRIPTOR64,
    END,
    END64,
    FULL,
    FULL16,
    LOCAL,
    LOCATOR,
    Record,
)


class ZipLayout:
    """The records of an archive in the making. `at`: where the next one goes.

    checksums=False: the new records have none either.
    """

    def __init__(self, alignment: int, begin: int = 0, checksums: bool = True) -> None:
        self.alignment, self.at, self.checksums = alignment, begin, checksums
        self._segments: list[Segment | _NewRecord] = []
        self._entries: list[bytes | _NewRecord] = []  # of the directory
        self._directory_size = 0

    def add(self, name: str, data: Data, crc: int | None = None, head: bytes = b"") -> None:
        """A record of our own: `head`, then `data`, whose checksum `crc`, if it is known, is checked on the way."""
        if isinstance(data, InlineBytes):
            head, data = head + data.content, InlineBytes(b"")
        total = Crc(zlib.crc32(head), name=name)
        if crc is not None and data.length:
            total.expected = crc_combine(total.value, crc, data.length)
        self._append(_NewRecord(self, name, head, data, self.at, total))

    def add_late(self, name: str, length: int, make: Callable[[Sequence[int]], bytes]) -> None:
        """Adds `length` bytes that `make` gives when the records before have passed, from their checksums in order."""
        before = [part.total for part in self._segments if isinstance(part, _NewRecord)]
        self._append(_LateRecord(self, name, length, self.at, lambda: make([total.value for total in before])))

    def _append(self, record: _NewRecord) -> None:
        self._segments.append(record)
        self._enter(record)
        self.at += sum(segment.length for segment in record.segments())

    def add_copy(self, record: Record, data: Data) -> None:
        """A record of another archive as it is, header and all: `data` is where it stands there."""
        self._segments.append(data)
        self.enter_moved(record, self.at)
        self.at += data.length

    def enter_moved(self, record: Record, at: int) -> None:
        """The directory's line for a record of the old file, which is (or will be) at byte `at`."""
        self._enter(moved_entry(record, at))

    def _enter(self, line: bytes | _NewRecord) -> None:
        self._entries.append(line)
        self._directory_size += len(line if isinstance(line, bytes) else line.entry())

    def finish(self, checks: Sequence[Storage] = ()) -> Plan:
        """The plan of everything that was added, the directory and the end records. checks: see `Plan`."""
        entries, size = self._entries, self._directory_size

        def directory() -> bytes:
            return b"".join(entry if isinstance(entry, bytes) else entry.entry() for entry in entries)

        self._segments.append(Deferred(size, directory))
        self._segments.append(InlineBytes(end_records(len(entries), self.at, size)))
        return Plan({"": _Segments(self._segments)}, list(checks))


class _NewRecord:
    """A new record. Headers are made when they are asked for: a layout may have 50,000 records."""

    __slots__ = ("at", "data", "head", "layout", "name", "total")

    def __init__(self, layout: ZipLayout, name: str, head: bytes, data: Data, at: int, total: Crc) -> None:
        self.layout, self.name, self.head, self.data, self.at, self.total = layout, name, head, data, at, total

    @property
    def size(self) -> int:
        return len(self.head) + self.data.length

    @property
    def crc(self) -> int:
        return self.total.value if self.layout.checksums else 0

    def segments(self) -> Iterator[Segment]:
        """Header, data and descriptor; the last can only be made when the data has passed."""
        yield InlineBytes(local_header(self.name, self.at, self.size, self.layout.alignment))
        if self.head:
            yield InlineBytes(self.head)
        if self.data.length:
            yield from checksummed(self.data, self.total)
            yield Deferred(len(self.descriptor()), self.descriptor)
        else:
            yield InlineBytes(self.descriptor())

    def descriptor(self) -> bytes:
        return descriptor(self.crc, self.size, self.at)

    def entry(self) -> bytes:
        """Its line in the directory."""
        return central_entry(self.name, self.crc, self.size, self.at)


class _LateRecord(_NewRecord):
    """A record that can only be made when those before it have passed."""

    __slots__ = ("length", "make")

    def __init__(self, layout: ZipLayout, name: str, length: int, at: int, make: Callable[[], bytes]) -> None:
        super().__init__(layout, name, b"", InlineBytes(b""), at, Crc(name=name))
        self.length, self.make = length, make

    @property
    def size(self) -> int:
        return self.length

    def segments(self) -> Iterator[Segment]:
        yield InlineBytes(local_header(self.name, self.at, self.size, self.layout.alignment))
        yield Deferred(self.length, self._made)
        yield Deferred(len(self.descriptor()), self.descriptor)

    def _made(self) -> bytes:
        made = self.make()
        self.total.value = zlib.crc32(made)
        return made


class _Segments:
    """The segments of a layout, those of new records made in passing."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Segment | _NewRecord]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Segment]:
        for part in self.parts:
            if isinstance(part, _NewRecord):
                yield from part.segments()
            else:
                yield part


def local_header(name: str, at: int, size: int, alignment: int) -> bytes:
    """The header of a record of `size` bytes at byte `at`, as torch writes it: padded so that the data is aligned."""
    raw = name.encode()
    extra = zip64_extra(size, at)
    start = at + LOCAL.size + len(raw) + len(extra) + 4
    padding = -start % alignment
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return LOCAL.pack(b"PK\x03\x04", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(raw), len(extra)) + raw + extra


def needs_zip64(size: int, at: int) -> bool:
    return size >= FULL or at >= FULL


def zip64_extra(size: int, at: int) -> bytes:
    values = ([size, size] if size >= FULL else []) + ([at] if at >= FULL else [])
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def descriptor(crc: int, size: int, at: int) -> bytes:
    return (DESCRIPTOR64 if needs_zip64(size, at) else DESCRIPTOR).pack(b"PK\x07\x08", crc, size, size)


def central_entry(name: str, crc: int, size: int, at: int) -> bytes:
    """The directory's entry for a record of our own."""
    raw = name.encode()
    extra = zip64_extra(size, at)
    short = min(size, FULL)
    fixed = CENTRAL.pack(
        b"PK\x01\x02", 0, 0, 0x0808, 0, 0, 0, crc, short, short, len(raw), len(extra), 0, 0, 0, 0, min(at, FULL)
    )
    return fixed + raw + extra


_LINK = 0xA  # the file type of Unix, at the top of the external attributes


def moved_entry(record: Record, at: int) -> bytes:
    """The directory's entry for a record that was copied whole to byte `at`, as a file if it was a symbolic link."""
    stored, size = struct.unpack_from("<2I", record.central, 20)  # Python's zipfile goes to 64 bits at 2 GiB already
    offset = FULL if at >= FULL or record.zip64 else at
    values = [value for short, value in ((size, record.size), (stored, record.stored), (offset, at)) if short == FULL]
    extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    raw = record.name.encode()
    return (
        record.central[:28]
        + struct.pack("<3H", len(raw), len(extra), 0)
        + record.central[34:38]
        + (bytes(4) if record.central[41] >> 4 == _LINK else record.central[38:42])
        + struct.pack("<I", offset)
        + raw
        + extra
    )


def end_records(count: int, directory_at: int, directory_size: int) -> bytes:
    """The zip64 end record, its locator and the end record, as torch writes them (98 bytes)."""
    end64 = END64.pack(b"PK\x06\x06", END64.size - 12, 0x031E, 45, 0, 0, count, count, directory_size, directory_at)
    locator = LOCATOR.pack(b"PK\x06\x07", 0, directory_at + directory_size, 1)
    n, size, at = min(count, FULL16), min(directory_size, FULL), min(directory_at, FULL)
    return end64 + locator + END.pack(b"PK\x05\x06", 0, 0, n, n, size, at, 0)
