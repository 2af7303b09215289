"""The zip directory, read in one go and believed only where nothing contradicts it.

Python's `zipfile` and torch's reader disagree about archives with duplicate names, two directories or names that differ between
header and directory; such archives are refused here, by name. Where a record's data begins is predicted from the directory
(the next header, less the descriptor, less the size: right for every file that torch writes, and 50,000 seeks cheaper) and confirmed
against the record's own header before its bytes are used.

Sources: PKWARE APPNOTE 6.3.10; caffe2/serialize/inline_container.cc and miniz for what torch writes: stored, flags 0x0808, sizes
and CRC zero in the local header and true in the descriptor (24 bytes where sizes or offsets need 64 bits), extra field `FB` as padding.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import NoReturn

from ckptool.checkpoint import Note
from ckptool.checkpoint.commands import FILE, OUT, command
from ckptool.checkpoint.files import Readable
from ckptool.errors import (
    Ambiguous,
    CkptoolError,
    Corrupt,
    LimitExceeded,
    Truncated,
    Unsupported,
    counted,
    listed,
    printable,
)
from ckptool.formats.zip.record import (
    CENTRAL,
    END,
    END64,
    FULL,
    FULL16,
    LOCAL,
    LOCATOR,
    Record,
    extra_fields,
    wide_fields,
)

MAX_ENTRIES = 1_000_000
MAX_DIRECTORY = 256 << 20
MAX_INFLATED = 1 << 30
MAX_EDITS = 100  # in place, one on top of the other; a reader looks at every state
_REFUSED_FLAGS = {0x0001: "encrypted", 0x0020: "patched", 0x0040: "strongly encrypted", 0x2000: "masked"}
_OTHER_METHODS = {9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "zstd", 95: "XZ", 98: "PPMd", 99: "AES encryption"}
_NEEDED, _UTF8 = 63, 0x0800  # the last version of the format; a flag
_UNICODE_PATH = 0x7075  # Info-ZIP's extra field with another name for the record


@dataclass(slots=True, eq=False)
class Archive:
    """A zip archive's directory. Not changed once `read_archive` has returned it.

    directory, end: where the central directory begins, and the byte after the end records.
    records: by name, in the order of the directory.
    superseded: bytes that earlier in-place edits left inside, edits: how many there were.  links: records that are
    marked as symbolic links.  notes: what is unusual about the archive.
    """

    source: Readable
    directory: int
    end: int
    end_records: bytes
    records: dict[str, Record] = field(default_factory=dict)
    has_checksums: bool = True
    superseded: int = 0
    edits: int = 0
    links: list[Record] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def by_offset(self) -> list[Record]:
        return sorted(self.records.values(), key=lambda record: record.header)


def read_archive(source: Readable, *, twins: bool = False) -> Archive:
    """The archive that `source` is; raises `Truncated`, `Ambiguous`, `Corrupt`, `Unsupported` or `LimitExceeded`.

    twins: names may be equal but for case, as they are no twins to the readers of this kind of archive.
    """
    at = _find_end(source)
    archive = _read_directory(source, at)
    if not twins:
        refuse_twins(archive)
    if archive.end != source.size:
        refuse_foreign_tail(archive)
        archive.notes.append(
            Note(
                "interrupted-edit",
                f"an in-place edit was interrupted; {source.size - archive.end:,} bytes after the archive are not part of it",
            )
        )
    note_odd_entries(archive)
    _place_records(archive)
    if records := archive.by_offset():
        records[0].confirm()  # whatever the file begins with could be another file's head
        records[-1].confirm()  # and what stands before the directory another archive's end
    return archive


def refuse_zip_behind(head: bytes, source: Readable) -> None:
    """Raises `Corrupt` or `Ambiguous` for a file that does not begin as a zip archive, but ends as one."""
    if not _ends_as_zip(source):
        return
    if sum(a == b for a, b in zip(head, b"PK\x03\x04", strict=False)) == 3:
        raise Corrupt(
            f"{source} is a zip archive whose first bytes were damaged", f"It begins with {head[:4].hex(' ')}."
        )
    raise Ambiguous(
        f"{source} begins as another kind of file and ends as a zip archive",
        "Some readers see the one, some the other: it was put together by accident, or to mislead.",
    )


def _ends_as_zip(source: Readable) -> bool:
    """True if the file ends in the directory of a zip archive: some readers look nowhere else to tell what a file is."""
    tail_at = max(0, source.size - END.size - FULL16)
    tail = source.read(tail_at, source.size - tail_at)
    found = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - END.size + 4))
    if found < 0:
        return False
    *_, size, _, comment = END.unpack_from(tail, found)
    if found + END.size + comment != len(tail):
        return False
    if size == FULL:
        return tail[max(0, found - LOCATOR.size) : found][:4] == b"PK\x06\x07"
    for end in (tail_at + found, tail_at + found - LOCATOR.size - END64.size):
        if size and end >= size and source.read(end - size, 4) == b"PK\x01\x02":
            return True
    return False


def _find_end(source: Readable) -> int:
    """Where the end record is, the last of its kind; nothing may follow it but what a torn in-place edit leaves, not even a comment."""
    tail_at = max(0, source.size - 2 * END.size - LOCATOR.size - FULL16)
    tail = source.read(tail_at, source.size - tail_at)
    found = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - END.size + 4))
    if found < 0:
        raise _cut(
            f"{source} is a zip archive whose directory is missing",
            "The file was cut off: a torch file keeps its directory at the end.",
            source,
        )
    if _has_comment(tail, found):
        raise Ambiguous(
            f"{source} has the end of one zip archive in the comment of another",
            "Some readers see the one, some the other.",
        )
    after = tail[found + END.size :]
    if after[:4] == b"PK\x03\x04":
        raise _cut(
            f"{source} is a zip archive to which something was added, and whose directory is missing",
            f"The file was cut off: an archive ends at byte {tail_at + found + END.size:,}, but a record follows it.",
            source,
        )
    if not is_torn_guard(after, tail[: found + END.size]):
        raise Ambiguous(
            f"{source} has {len(after):,} bytes after the end of its zip archive",
            "Some readers would see another archive there.",
        )
    return tail_at + found


def _cut(what: str, why: str, source: Readable) -> Truncated:
    """The error for an archive without its end."""
    error = Truncated(what, why, "Download or copy it again, and compare the sizes.")
    error.cut_archive = source.file if source.size == source.file.size else None
    return error


def _has_comment(tail: bytes, last: int) -> bool:
    """True if an end record before the last one has all that follows it for a comment."""
    at = tail.find(b"PK\x05\x06", 0, last)
    while at >= 0:
        comment = int.from_bytes(tail[at + END.size - 2 : at + END.size], "little")
        if comment and at + END.size + comment == len(tail):
            return True
        at = tail.find(b"PK\x05\x06", at + 1, last)
    return False


def _read_directory(source: Readable, end_at: int) -> Archive:
    """The archive whose end record is at `end_at`, its records not placed yet."""
    _, disk, directory_disk, here, count, size, offset, comment = END.unpack(source.read(end_at, END.size))
    if comment:
        raise Ambiguous(
            f"{source} is cut off inside the comment of its zip archive, or hides something there",
            "torch writes no comments.",
        )
    directory_end, records_end = end_at, end_at + END.size
    locator = source.read(end_at - LOCATOR.size, LOCATOR.size) if end_at >= LOCATOR.size else b""
    if locator[:4] == b"PK\x06\x07":
        directory_end, (here, count, size, offset) = _end64(source, end_at, locator, (here, count, size, offset))
        records_end = directory_end + END64.size + LOCATOR.size + END.size
    elif FULL in (size, offset):
        raise Corrupt(f"{source}: the archive needs a zip64 end record and has none")
    elif offset + size < end_at and source.read(offset + size, END.size) == source.read(end_at, END.size):
        directory_end, records_end = offset + size, offset + size + END.size
    end_records = source.read(directory_end, records_end - directory_end)
    if records_end != end_at + END.size:
        check_copy(source, end_at, records_end, end_records, size)
    if disk or directory_disk:
        raise _split(source)
    if here != count:
        raise Corrupt(
            f"{source}: the zip directory should have {counted(count, 'entry', 'entries')}, {here:,} of them in this file"
        )
    if offset + size != directory_end:
        what = f"{source}: the zip directory should end at byte {offset + size:,}, but its end record is at {directory_end:,}"
        raise _misplaced(source, directory_end - offset - size, what)
    if count > MAX_ENTRIES or size > MAX_DIRECTORY:
        raise LimitExceeded(
            f"{source}: a zip directory of {counted(count, 'entry', 'entries')} and {size:,} bytes",
            f"At most {MAX_ENTRIES:,} entries and {MAX_DIRECTORY:,} bytes are read.",
        )
    archive = Archive(source, offset, records_end, end_records)
    _read_entries(archive, source.read(offset, size), count)
    return archive


_Counts = tuple[int, int, int, int]  # entries in this file, entries, size of the directory, its offset


def _end64(source: Readable, end_at: int, locator: bytes, narrow: _Counts) -> tuple[int, _Counts]:
    """Where the zip64 end record is, and what it says; `narrow` is what the other end record says."""
    _, disk, at, disks = LOCATOR.unpack(locator)
    raw = source.read(at, END64.size) if at + END64.size <= end_at else b""
    if raw[:4] != b"PK\x06\x06":
        beside = end_at - LOCATOR.size - END64.size
        moved = beside - at if beside >= 0 and source.read(beside, 4) == b"PK\x06\x06" else 0
        what = f"{source}: the zip64 locator points to byte {at:,}, where there is no end record"
        raise _misplaced(source, moved, what)
    _, length, _, _, disk64, directory_disk, *wide = END64.unpack(raw)
    if disk or disks != 1 or disk64 or directory_disk:
        raise _split(source)
    if length != END64.size - 12:
        raise Corrupt(f"{source}: the zip64 end record at byte {at:,} is damaged")
    for short, long, full in zip(narrow, wide, (FULL16, FULL16, FULL, FULL), strict=True):
        if short not in (full, long):
            raise Corrupt(
                f"{source}: the two end records of the archive disagree ({short:,} and {long:,})",
                "Readers would see two archives.",
            )
    here, count, size, offset = wide
    return at, (here, count, size, offset)


def _split(source: Readable) -> Unsupported:
    return Unsupported(f"{source} is one part of a split zip archive", "All parts would be needed.")


def _misplaced(source: Readable, by: int, what: str) -> CkptoolError:
    """The error for a directory that is `by` bytes behind its place."""
    if 0 < by <= source.size - 4 and source.read(by, 4) == b"PK\x03\x04":
        return Ambiguous(
            what,
            f"{by:,} bytes were put before the archive, or another archive; readers disagree about what such a file holds.",
        )
    return Corrupt(what, "Bytes were put into the archive or are missing from it, or its tables were damaged.")


def _read_entries(archive: Archive, directory: bytes, count: int) -> None:
    unpack, fixed, records, at = CENTRAL.unpack_from, CENTRAL.size, archive.records, 0
    try:
        for _ in range(count):
            sig, _, needed, flags, method, _, _, crc, stored, size, n, m, k, disk, _, attributes, header = unpack(
                directory, at
            )
            name_at = at + fixed
            raw = directory[name_at : name_at + n]
            if sig != b"PK\x01\x02" or disk or flags & 0x2061 or method not in (0, 8) or needed & 0xFF > _NEEDED:
                _refuse_entry(archive, sig, flags, method, disk, raw)
            name = str(raw, "utf-8")
            if not flags & _UTF8 and not raw.isascii():
                _check_spelling(archive, raw, directory[name_at + n : name_at + n + m])
            wide = FULL in (stored, size, header)
            if m or wide:
                extra = directory[name_at + n : name_at + n + m]
                size, stored, header = _widened(archive, name, extra, size, stored, header, wide)
            if size != stored and not method:
                raise Corrupt(
                    f"{archive.source}: the record {printable(name)} is stored as it is, but in {stored:,} bytes instead of {size:,}"
                )
            if name in records:
                raise Ambiguous(
                    f"{archive.source} has two records named {printable(name)}",
                    "torch reads the first, Python's zipfile the last.",
                )
            records[name] = record = Record(
                archive, name, directory[at : at + fixed], flags, method, crc, stored, size, header, wide
            )
            if attributes:
                check_attributes(archive, record, attributes)
            at = name_at + n + m + k
    except (struct.error, UnicodeDecodeError):
        raise Corrupt(f"{archive.source}: entry {len(records):,} of the zip directory is damaged") from None
    if at != len(directory):
        raise Corrupt(
            f"{archive.source}: the {counted(count, 'entry', 'entries')} of the zip directory take {at:,} bytes, not {len(directory):,}"
        )
    check_names(archive)
    archive.has_checksums = any(record.crc for record in records.values())


def _refuse_entry(archive: Archive, signature: bytes, flags: int, method: int, disk: int, name: bytes) -> NoReturn:
    record = f"{archive.source}: the record {printable(name.decode('utf-8', 'replace'))}"
    if signature != b"PK\x01\x02":
        raise Corrupt(f"{archive.source}: entry {len(archive.records):,} of the zip directory is damaged")
    for bit, word in _REFUSED_FLAGS.items():
        if flags & bit:
            raise Unsupported(f"{record} is {word}", "PyTorch files never are.")
    if disk:
        raise _split(archive.source)
    if method in _OTHER_METHODS:
        raise Unsupported(
            f"{record} is compressed with method {method} ({_OTHER_METHODS[method]})",
            "Stored and deflated records are read.",
        )
    if method not in (0, 8):
        raise Corrupt(f"{record} is stored by the unknown method {method}", "Stored and deflated records are read.")
    raise Unsupported(f"{record} asks for a reader of a later zip format", "PyTorch files never do.")


def _check_spelling(archive: Archive, raw: bytes, extra: bytes) -> None:
    """Raises `Ambiguous` for a name beyond ASCII that does not say that it is UTF-8: many readers take it for a DOS code page."""
    if not any(kind == _UNICODE_PATH and content[5:] == raw for kind, content in extra_fields(extra)):
        raise Ambiguous(
            f"{archive.source}: the record name {printable(raw.decode())} does not say that it is UTF-8",
            "torch and others would read two different names.",
        )


def _widened(
    archive: Archive, name: str, extra: bytes, size: int, stored: int, header: int, wide: bool
) -> tuple[int, int, int]:
    """Size, stored size and header with what an entry's extra field says of them."""
    fields = extra_fields(extra)
    if len(extra) - sum(4 + len(content) for _, content in fields) >= 4:
        raise Corrupt(
            f"{archive.source}: the record {printable(name)} has an extra field that is longer than its entry"
        )
    for kind, content in fields:
        if kind == _UNICODE_PATH and content[5:] != name.encode():
            raise Ambiguous(
                f"{archive.source}: the record {printable(name)} has another name in its extra field",
                "Some readers take the one, some the other.",
            )
    found = wide_fields(extra, size, stored, header) if wide else (size, stored, header)
    if found is None:
        raise Corrupt(f"{archive.source}: the record {printable(name)} lacks its 64-bit sizes, or has them twice")
    return found


def _place_records(archive: Archive, depth: int = 0) -> None:
    """Predicts where each record's data is; refuses records that overlap, and bytes that belong to none."""
    records = archive.by_offset()
    earlier = _edited_in_place(archive, depth)
    begins = 0
    if earlier is not None:
        records = _placed_as_before(archive, earlier, records)
        begins = archive.superseded = earlier.end
        archive.edits = earlier.edits + 1
        message = f"earlier in-place edits left {_dead_bytes(archive):,} bytes of old pickles and directories inside"
        archive.notes.append(Note("superseded-pickle", message, command("convert", FILE, out=OUT)))
    first = records[0].header if records else archive.directory
    if first > begins:
        raise Ambiguous(
            f"{archive.source} has {first - begins:,} bytes before its first record",
            "Some readers would see another file there.",
        )
    ends = [*(record.header for record in records[1:]), archive.directory]
    bare = _lacks_signatures(records, ends)
    for record, end in zip(records, ends, strict=False):  # no record: an end without one
        if record.descriptor_size and (bare or not record.is_predictable):
            record.look(end)
        else:
            record.predict(end)


def _lacks_signatures(records: list[Record], ends: list[int]) -> bool:
    """True if the first descriptor of the archive is not where torch would have it: then each is looked for."""
    for record, end in zip(records, ends, strict=False):
        if record.descriptor_size and record.is_predictable:
            return not record.has_signed_descriptor(end)
    return False


def _placed_as_before(archive: Archive, earlier: Archive, records: list[Record]) -> list[Record]:
    """Places the records that an earlier state already had; returns the new ones, by offset."""
    fresh = []
    for record in records:
        before = earlier.records.get(record.name)
        if before is None or record.name.endswith("/data.pkl"):
            fresh.append(record)
        elif _same_record(record, before):
            record.data_at, record.end = before.data_at, before.end
        else:
            raise Ambiguous(f"{archive.source}: the record {record} differs from its earlier state inside the file")
    return fresh


def _dead_bytes(archive: Archive) -> int:
    return archive.superseded - sum(record.end - record.header for record in archive.records.values() if record.end)


def _same_record(a: Record, b: Record) -> bool:
    return (a.crc, a.stored, a.size, a.method, a.header) == (b.crc, b.stored, b.size, b.method, b.header)


def _edited_in_place(archive: Archive, depth: int) -> Archive | None:
    """The complete archive that stands before a `data.pkl` which an in-place edit appended; None where there was no edit."""
    pickles = [
        record
        for record in archive.records.values()
        if record.name.count("/") == 1 and record.name.endswith("/data.pkl")
    ]
    if len(pickles) != 1 or not END.size <= pickles[0].header < archive.directory:
        return None
    end_at = pickles[0].header - END.size
    if archive.source.read(end_at, 4) != b"PK\x05\x06":
        return None
    if depth == MAX_EDITS:
        raise LimitExceeded(
            f"{archive.source} was edited in place more than {MAX_EDITS} times",
            "Each of its old states would have to be read.",
        )
    earlier = _read_directory(archive.source, end_at)
    if earlier.end != end_at + END.size:
        raise Ambiguous(f"{archive.source}: the archive before the record {pickles[0]} is not complete")
    _place_records(earlier, depth + 1)
    if any(name not in archive.records for name in earlier.records) or pickles[0].name not in earlier.records:
        raise Ambiguous(
            f"{archive.source} holds two archives that are not two states of one",
            "Readers would disagree which of them it is.",
        )
    return earlier


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


_FOLDER, _LINK = 0x10, 0xA  # in the external attributes: a bit of DOS at the bottom, a file type of Unix at the top
# What a program that unpacked the archive might follow out of its folder, or take for a folder.
_ELSEWHERE = re.compile(r"(?:^|[/\\])\.\.(?:[/\\]|$)|^/|\\|^[A-Za-z]:", re.MULTILINE)


def check_attributes(archive: Archive, record: Record, attributes: int) -> None:
    """Looks at what a directory entry says of the file that the record was; raises `Ambiguous` for a folder with contents."""
    if attributes >> 28 == _LINK:
        archive.links.append(record)
    if attributes & _FOLDER:
        _check_folder(record)


def _check_folder(record: Record) -> None:
    if record.size:
        raise Ambiguous(
            f"{record.archive.source}: the record {record} is marked as a folder and has contents",
            "torch takes nothing from it, but whatever the memory held before; others read it.",
        )


def check_names(archive: Archive) -> None:
    """Raises `Corrupt` or `Ambiguous` for names that no two readers take alike."""
    if "" in archive.records:
        raise Corrupt(f"{archive.source}: a record has no name")
    together = "\n".join(archive.records) + "\n"
    if "\0" not in together and "/\n" not in together:  # one search, where there are tens of thousands of names
        return
    for name, record in archive.records.items():
        if "\0" in name:
            raise Ambiguous(
                f"{archive.source}: the record name {printable(name)} holds a NUL",
                "torch reads it up to there, others as a whole.",
            )
        if name.endswith("/"):
            _check_folder(record)


def refuse_twins(archive: Archive) -> None:
    """Raises `Ambiguous` for names that are one to a reader without regard to case, as torch is."""
    if len(set(map(str.lower, archive.records))) == len(archive.records):
        return
    folded: dict[str, str] = {}
    for name in archive.records:
        twin = folded.setdefault(name.lower(), name)
        if twin != name:
            raise Ambiguous(
                f"{archive.source} has the records {printable(twin)} and {printable(name)}",
                "torch takes names without regard to case.",
            )


def leads_elsewhere(name: str) -> bool:
    """True for a record name that a program which unpacks archives might follow out of its folder. Nothing here ever does."""
    return _ELSEWHERE.search(name) is not None


def note_odd_entries(archive: Archive) -> None:
    """Notes what is harmless here, where nothing is unpacked, and should be known before another program unpacks the archive."""
    fix = command("convert", FILE, out=OUT)
    if _ELSEWHERE.search("\n".join(archive.records)):
        names = [printable(name) for name in archive.records if leads_elsewhere(name)]
        if names:
            message = (
                f"{counted(len(names), 'record name')} could lead another program out of its folder: {listed(names, 3)}"
            )
            archive.notes.append(Note("unsafe-record-names", message))
    if archive.links:
        message = (
            f"{counted(len(archive.links), 'record is', 'records are')} marked as symbolic links, "
            f"which is ignored: {listed(archive.links, 3)}"
        )
        archive.notes.append(Note("symlink-records", message, fix))
