"""The zip directory, read in one go and believed only where nothing contradicts it.

Python's `zipfile` and torch's reader disagree about archives with duplicate names, two directories or names that differ between
header and directory; such archives are refused here, by name. Where a record's data begins is predicted from the directory
(the next header, less the descriptor, less the size: right for every file that torch writes, and 50,000 seeks cheaper) and confirmed
against the record's own header before its bytes are used.

Sources: PKWARE APPNOTE 6.3.10; caffe2/serialize/inline_container.cc and miniz for what torch writes: stored, flags 0x0808, sizes
and CRC zero in the local header and true in the descriptor (24 bytes where sizes or offsets need 64 bits), extra field `FB` as padding.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NoReturn

from ckptool.checkpoint import Note
from ckptool.checkpoint.commands import FILE, OUT, Advice, command
from ckptool.checkpoint.files import Readable
from ckptool.errors import (
    Ambiguous,
    CkptoolError,
    Corrupt,
    LimitExceeded,
    Truncated,
    Unsupported,
    counted,
    form,
    printable,
)
from ckptool.formats.zip_names import check_attributes, check_names, note_odd_entries, refuse_twins
from ckptool.formats.zip_records import CENTRAL, END, END64, FULL, FULL16, LOCATOR, Record, extra_fields, wide_fields
from ckptool.formats.zip_remnants import check_copy, is_torn_guard, refuse_foreign_tail

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


HEADS = (b"PK\x03\x04", b"PK\x05\x06")


def under_another_head(head: bytes, source: Readable) -> CkptoolError | None:
    """The error for a file that ends as a zip archive and does not begin as one; None for any other."""
    if head[:4] in HEADS or not _ends_as_zip(source):
        return None
    if sum(a == b for a, b in zip(head, HEADS[0], strict=False)) == 3:
        return Corrupt(
            f"{source} is a zip archive whose first bytes were damaged", f"It begins with {head[:4].hex(' ')}."
        )
    return Ambiguous(
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
    """The error for an archive without its end, with what `recover` would get out of it."""
    from ckptool.formats.damaged import whole_records

    again = "Download or copy it again, and compare the sizes."
    found = whole_records(source) if source.size == source.file.size else None
    if found is None:
        return Truncated(what, why, again)
    fix = Advice(
        "Save what is whole: ", command("recover", source.file.path, out=OUT), "; or download or copy it again."
    )
    return Truncated(
        what, f"{why} {found[0]:,} of its {counted(found[1], 'storage')} {form(found[0], 'looks', 'look')} whole.", fix
    )


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
