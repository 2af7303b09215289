"""Bytes behind an archive: those that an interrupted in-place edit leaves, and anybody else's.

An edit stretches the file, puts a copy of the old end records (the guard) at its very end, and writes the new records in between
(`output/append.py`). A reader that goes by the offset in the copy finds the old archive. One that looks for a directory right before the
copy must find nothing that it could take for one; and only what begins as such an edit does is ever cut off.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from ckptool.errors import Ambiguous, CkptoolError, Corrupt
from ckptool.formats.zip_records import CENTRAL, END, END64, FULL, LOCAL, LOCATOR

if TYPE_CHECKING:
    from ckptool.checkpoint.files import Readable
    from ckptool.formats.zip_archive import Archive

SECTOR = 512  # bytes that a disk writes or loses together


def guard(records: bytes) -> bytes:
    """The end records that have to be the last thing in a file for readers to find the archive (22 or 42 bytes)."""
    located = records[-LOCATOR.size - END.size :]
    return located if located[:4] == b"PK\x06\x07" else records[-END.size :]


def is_torn_guard(after: bytes, before: bytes) -> bool:
    """True for the beginning of one more copy of the end records, behind the hole that it was to protect; true for nothing at all."""
    copy = after.lstrip(b"\0")
    return len(copy) < END.size + LOCATOR.size and guard(before).startswith(copy)


def check_copy(source: Readable, end_at: int, records_end: int, end_records: bytes, size: int) -> None:
    """Raises `Ambiguous` or `Corrupt` unless the end record at `end_at` is the copy that an interrupted edit put at the very end."""
    tail = guard(end_records)
    seems_two = any(ends_another(source, end_at, wide) for wide in (size, min(size, FULL)))
    if seems_two and not _is_finished_edit(source, end_at + END.size - len(tail), records_end):
        raise Ambiguous(
            f"{source} is two zip archives, one behind the other", "Some readers take the first, some the second."
        )
    if records_end > end_at or source.read(end_at + END.size - len(tail), len(tail)) != tail:
        raise Corrupt(
            f"{source} has bytes between its zip directory and the end record",
            "Bytes were put into the archive, or its tables were damaged.",
        )


def ends_another(source: Readable, end_at: int, size: int) -> bool:
    """True if some reader would take what stands before the last end record, a copy of an earlier one, for its directory.

    However odd its entries are, another reader may be content with them: one signature is enough.
    """
    end64_at = end_at - LOCATOR.size - END64.size
    if end64_at >= 0 and source.read(end64_at, 4) == b"PK\x06\x06":
        return True
    return 0 < size <= end_at and source.read(end_at - size, 4) == b"PK\x01\x02"


def _is_finished_edit(source: Readable, end: int, begin: int) -> bool:
    """True if the bytes from `begin` to `end` make a whole new state of the archive before them.

    Then it is by accident that a line of its directory stands where a second archive's would begin.
    """
    from ckptool.formats.zip_archive import read_archive  # which needs this module

    try:
        return read_archive(source.file.part(source.start, end)).superseded == begin
    except CkptoolError:
        return False


def refuse_foreign_tail(archive: Archive) -> None:
    """Raises `Ambiguous` unless what is behind the archive could be of an in-place edit of it: then it may be cut off."""
    if not _begins_as_edit(archive) or not _lists_the_same(archive):
        raise Ambiguous(
            f"{archive.source} has {archive.source.size - archive.end:,} bytes behind its zip archive that no in-place edit left there",
            "Some readers would see another archive there.",
        )


def _begins_as_edit(archive: Archive) -> bool:
    """True for a hole (a power cut may have lost what was in it), and for the header of a new pickle, or what of it was written."""
    source, names = archive.source, [name for name in archive.records if name.endswith("/data.pkl")]
    if len(names) != 1:
        return False  # no checkpoint of torch's: nothing else is edited in place
    name = names[0].encode()
    head = source.read(archive.end, min(LOCAL.size + len(name), source.size - archive.end))
    extra = int.from_bytes(head[LOCAL.size - 2 : LOCAL.size], "little")
    ours = LOCAL.pack(b"PK\x03\x04", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(name), extra) + name
    if ours.startswith(head.rstrip(b"\0")) and head.rstrip(b"\0"):
        return True
    sector = source.read(archive.end, min(-archive.end % SECTOR or SECTOR, source.size - archive.end))
    return guard(archive.end_records).startswith(sector.lstrip(b"\0")[: END.size])


def _lists_the_same(archive: Archive) -> bool:
    """True unless there is a new directory, or the beginning of one, which has another place for a record of the archive."""
    source = archive.source
    end_at = source.size - len(guard(archive.end_records)) - END.size
    if end_at < archive.end or source.read(end_at, 4) != b"PK\x05\x06":
        return True  # no end records are there that would say where a directory is
    size, at = END.unpack(source.read(end_at, END.size))[5:7]
    if FULL in (size, at) and end_at >= END64.size + LOCATOR.size:
        size, at = END64.unpack(source.read(end_at - LOCATOR.size - END64.size, END64.size))[8:10]
    if at < archive.end:
        return True  # the same guard, once more
    end = min(at + size, end_at)
    while at + CENTRAL.size <= end:
        line = source.read(at, CENTRAL.size)
        if line[:4] != b"PK\x01\x02":
            break
        lengths = struct.unpack_from("<3H", line, 28)
        name = source.read(at + CENTRAL.size, min(lengths[0], end - at - CENTRAL.size)).decode("utf-8", "replace")
        if not name or "\0" in name:
            break  # a power cut took it
        header = int.from_bytes(line[42:46], "little")
        known = archive.records.get(name)
        if header != FULL and (
            header < archive.end if known is None or name.endswith("/data.pkl") else header != known.header
        ):
            return False
        at += CENTRAL.size + sum(lengths)
    return True
