"""The parts of a zip archive as torch writes them, byte for byte; `zip_archive` says where they are documented."""

from __future__ import annotations

import struct

from ckptool.formats.zip_records import (
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
    narrow = min(size, FULL)
    fixed = CENTRAL.pack(
        b"PK\x01\x02", 0, 0, 0x0808, 0, 0, 0, crc, narrow, narrow, len(raw), len(extra), 0, 0, 0, 0, min(at, FULL)
    )
    return fixed + raw + extra


_LINK = 0xA  # the file type of Unix, at the top of the external attributes


def moved_entry(record: Record, at: int) -> bytes:
    """The directory's entry for a record that was copied whole to byte `at`; one that was marked as a symbolic link is a file there."""
    stored, size = struct.unpack_from("<2I", record.central, 20)  # Python's zipfile goes to 64 bits at 2 GiB already
    narrow = FULL if at >= FULL or record.wide else at
    values = [wide for short, wide in ((size, record.size), (stored, record.stored), (narrow, at)) if short == FULL]
    extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    raw = record.name.encode()
    return (
        record.central[:28]
        + struct.pack("<3H", len(raw), len(extra), 0)
        + record.central[34:38]
        + (bytes(4) if record.central[41] >> 4 == _LINK else record.central[38:42])
        + struct.pack("<I", narrow)
        + raw
        + extra
    )


def end_records(count: int, directory_at: int, directory_size: int) -> bytes:
    """The zip64 end record, its locator and the end record, as torch writes them (98 bytes)."""
    end64 = END64.pack(b"PK\x06\x06", END64.size - 12, 0x031E, 45, 0, 0, count, count, directory_size, directory_at)
    locator = LOCATOR.pack(b"PK\x06\x07", 0, directory_at + directory_size, 1)
    n, size, at = min(count, FULL16), min(directory_size, FULL), min(directory_at, FULL)
    return end64 + locator + END.pack(b"PK\x05\x06", 0, 0, n, n, size, at, 0)
