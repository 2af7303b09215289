"""The zip directory, read in one go and believed only where nothing contradicts it.

Python's `zipfile` and torch's reader disagree about archives with duplicate names, two directories or names that differ
between header and directory; such archives are refused here, by name. Where a record's data begins is computed from the
directory (the next local header, less the data descriptor, less the size: right for every file that torch writes, and
50,000 seeks cheaper) and confirmed against the record's own local header before its bytes are used.

An in-place edit stretches the file, puts a copy of the old end records (the guard) at its very end, and writes the new
records in between (`output/append.py`). A reader that goes by the offset in the copy finds the old archive. One that
looks for a directory right before the copy must find nothing that it could take for one; and only what begins as such
an edit does is ever cut off.

Sources: PKWARE APPNOTE 6.3.10; caffe2/serialize/inline_container.cc and miniz for what torch writes: stored, flags
0x0808, sizes and CRC zero in the local header and true in the data descriptor (24 bytes where sizes or offsets need 64
bits), the extra field `FB` as padding.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from ckptool.checkpoint import Note
from ckptool.checkpoint.files import Readable
from ckptool.commands import FILE, OUT, command
from ckptool.errors import (
    Ambiguous,
    CkptoolError,
    Corrupt,
    LimitExceeded,
    Truncated,
    Unsupported,
    counted,
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
    bad_entry,
    check_attributes,
    check_extra,
    check_names,
    check_spelling,
    odd_entries,
    refuse_equal_but_for_case,
    zip64_values,
)

MAX_ENTRIES = 1_000_000
MAX_DIRECTORY = 256 << 20
MAX_INFLATED = 1 << 30
MAX_EDITS = 100  # in place, one on top of the other; a reader looks at every state
_REFUSED_FLAGS = {0x0001: "encrypted", 0x0020: "patched", 0x0040: "strongly encrypted", 0x2000: "masked"}
_OTHER_METHODS = {9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "zstd", 95: "XZ", 98: "PPMd", 99: "AES encryption"}
_NEEDED, _UTF8 = 63, 0x0800  # the last version of the format; a flag


@dataclass(slots=True, eq=False)
class Archive:
    """A zip archive's directory. Not changed once `read_archive` has returned it.

    directory, end: where the central directory begins, and the byte after the end records.
    records: by name, in the order of the directory.  superseded: bytes that earlier in-place edits left inside.
    edits: how many there were.  links: records that are marked as symbolic links.  notes: what is unusual about it.
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


def read_archive(source: Readable, *, case_matters: bool = False) -> Archive:
    """The archive that `source` is; raises `Truncated`, `Ambiguous`, `Corrupt`, `Unsupported` or `LimitExceeded`.

    case_matters: the readers of this kind of archive tell names apart that differ in case alone.
    """
    archive = _read_directory(source, _find_end(source))
    if not case_matters:
        refuse_equal_but_for_case(archive)
    if archive.end != source.size:
        if not _begins_as_edit(archive) or not _lists_the_same(archive):
            tail = f"{archive.source.size - archive.end:,} bytes behind its zip archive"
            what = f"{archive.source} has {tail} that no in-place edit left there"
            raise Ambiguous(what, "Some readers would see another archive there.")
        left = f"{source.size - archive.end:,} bytes after the archive are not part of it"
        archive.notes.append(Note("interrupted-edit", f"an in-place edit was interrupted; {left}"))
    archive.notes += odd_entries(archive)
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
    what = f"{source} begins as another kind of file and ends as a zip archive"
    raise Ambiguous(what, "Some readers see one, some the other: an accident, or an attempt to mislead.")


def last_end_record(source: Readable, room: int) -> tuple[bytes, int, int]:
    """The last `room` bytes, the byte where they begin, and the place of the last end record in them (-1: none)."""
    begin = max(0, source.size - room)
    tail = source.read(begin, source.size - begin)
    return tail, begin, tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - END.size + 4))


def table(source: Readable, most: int = MAX_DIRECTORY) -> bytes:
    """The bytes of the directory that the last end record points to; none without one, or with more than `most`."""
    _, tail_at, found = last_end_record(source, 1 << 16)
    if found < 0:
        return b""
    end = tail_at + found
    size, at = END.unpack(source.read(end, END.size))[5:7]
    end64 = end - LOCATOR.size - END64.size
    if FULL in (size, at) and end64 >= 0:
        size, at = END64.unpack(source.read(end64, END64.size))[8:10]
    return source.read(at, size) if size <= most and at + size <= source.size else b""


def _ends_as_zip(source: Readable) -> bool:
    """True if the file ends in the directory of a zip archive: some readers look nowhere else."""
    tail, tail_at, found = last_end_record(source, END.size + FULL16)
    if found < 0:
        return False
    *_, size, _, comment = END.unpack_from(tail, found)
    if found + END.size + comment != len(tail):
        return False
    if size == FULL:
        return tail[max(0, found - LOCATOR.size) : found][:4] == b"PK\x06\x07"
    ends = (tail_at + found, tail_at + found - LOCATOR.size - END64.size)
    return any(size and end >= size and source.read(end - size, 4) == b"PK\x01\x02" for end in ends)


def _find_end(source: Readable) -> int:
    """The byte of the last end record; only what a torn in-place edit leaves may follow it, not even a comment."""
    tail, tail_at, found = last_end_record(source, 2 * END.size + LOCATOR.size + FULL16)
    if found < 0:
        why = "The file was cut off: a torch file keeps its directory at the end."
        raise _cut(f"{source} is a zip archive whose directory is missing", why, source)
    if _has_comment(tail, found):
        what = f"{source} has the end of one zip archive in the comment of another"
        raise Ambiguous(what, "Some readers see one, some the other.")
    after = tail[found + END.size :]
    if after[:4] == b"PK\x03\x04":
        what = f"{source} is a zip archive to which something was added, and whose directory is missing"
        end = f"an archive ends at byte {tail_at + found + END.size:,}, but a record follows it"
        raise _cut(what, f"The file was cut off: {end}.", source)
    # The beginning of one more copy of the end records may follow, behind the hole that it was to protect.
    copy = after.lstrip(b"\0")
    if len(copy) >= END.size + LOCATOR.size or not guard(tail[: found + END.size]).startswith(copy):
        what = f"{source} has {len(after):,} bytes after the end of its zip archive"
        raise Ambiguous(what, "Some readers would see another archive there.")
    return tail_at + found


def _cut(what: str, why: str, source: Readable) -> Truncated:
    """The error for an archive without its end."""
    error = Truncated(what, why, "Download or copy it again, and compare the sizes.")
    error.cut_archive = source.file if source.size == source.file.size else None
    return error


def _has_comment(tail: bytes, last: int) -> bool:
    """True if an end record before the last one has all that follows it for a comment."""
    at = -1
    while (at := tail.find(b"PK\x05\x06", at + 1, last)) >= 0:
        comment = int.from_bytes(tail[at + END.size - 2 : at + END.size], "little")
        if comment and at + END.size + comment == len(tail):
            return True
    return False


class _Counts(NamedTuple):
    """The directory by an end record: entries in this file, entries in all, its size in bytes, its offset."""

    here: int
    entries: int
    size: int
    offset: int


def _read_directory(source: Readable, end_at: int) -> Archive:
    """The archive whose end record is at `end_at`, its records not placed yet."""
    _, disk, directory_disk, *fields, comment = END.unpack(source.read(end_at, END.size))
    counts = _Counts(*fields)
    if comment:
        what = f"{source} is cut off inside the comment of its zip archive, or hides something there"
        raise Ambiguous(what, "torch writes no comments.")
    directory_end, records_end = end_at, end_at + END.size
    locator = source.read(end_at - LOCATOR.size, LOCATOR.size) if end_at >= LOCATOR.size else b""
    behind = counts.offset + counts.size
    if locator[:4] == b"PK\x06\x07":
        directory_end, counts = _zip64_end_record(source, end_at, locator, counts)
        records_end = directory_end + END64.size + LOCATOR.size + END.size
    elif FULL in (counts.size, counts.offset):
        raise Corrupt(f"{source}: the archive needs a zip64 end record and has none")
    elif behind < end_at and source.read(behind, END.size) == source.read(end_at, END.size):
        directory_end, records_end = behind, behind + END.size
    end_records = source.read(directory_end, records_end - directory_end)
    if records_end != end_at + END.size:
        _check_copy(source, end_at, records_end, end_records, counts.size)
    if disk or directory_disk:
        raise _split(source)
    _check_counts(source, counts, directory_end)
    archive = Archive(source, counts.offset, records_end, end_records)
    _read_entries(archive, source.read(counts.offset, counts.size), counts.entries)
    return archive


def _check_counts(source: Readable, counts: _Counts, directory_end: int) -> None:
    entries, behind = counted(counts.entries, "entry", "entries"), counts.offset + counts.size
    if counts.here != counts.entries:
        raise Corrupt(f"{source}: the zip directory should have {entries}, {counts.here:,} of them in this file")
    if behind != directory_end:
        what = f"the zip directory should end at byte {behind:,}, but its end record is at {directory_end:,}"
        raise _misplaced(source, directory_end - behind, f"{source}: {what}")
    if counts.entries > MAX_ENTRIES or counts.size > MAX_DIRECTORY:
        what = f"{source}: a zip directory of {entries} and {counts.size:,} bytes"
        raise LimitExceeded(what, f"At most {MAX_ENTRIES:,} entries and {MAX_DIRECTORY:,} bytes are read.")


def _zip64_end_record(source: Readable, end_at: int, locator: bytes, counts: _Counts) -> tuple[int, _Counts]:
    """The byte of the zip64 end record, and its counts. counts: those of the other end record."""
    _, disk, at, disks = LOCATOR.unpack(locator)
    raw = source.read(at, END64.size) if at + END64.size <= end_at else b""
    if raw[:4] != b"PK\x06\x06":
        beside = end_at - LOCATOR.size - END64.size
        moved = beside - at if beside >= 0 and source.read(beside, 4) == b"PK\x06\x06" else 0
        what = f"{source}: the zip64 locator points to byte {at:,}, where there is no end record"
        raise _misplaced(source, moved, what)
    _, length, _, _, disk64, directory_disk, *fields = END64.unpack(raw)
    if disk or disks != 1 or disk64 or directory_disk:
        raise _split(source)
    if length != END64.size - 12:
        raise Corrupt(f"{source}: the zip64 end record at byte {at:,} is damaged")
    for short, long, full in zip(counts, fields, (FULL16, FULL16, FULL, FULL), strict=True):
        if short not in (full, long):
            what = f"{source}: the two end records of the archive disagree ({short:,} and {long:,})"
            raise Corrupt(what, "Readers would see two archives.")
    return at, _Counts(*fields)


def _split(source: Readable) -> Unsupported:
    return Unsupported(f"{source} is one part of a split zip archive", "All parts would be needed.")


def _misplaced(source: Readable, by: int, what: str) -> CkptoolError:
    """The error for a directory that is `by` bytes behind its place."""
    if 0 < by <= source.size - 4 and source.read(by, 4) == b"PK\x03\x04":
        why = f"{by:,} bytes, or another archive, were put in front of the archive; readers disagree about such a file."
        return Ambiguous(what, why)
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
                check_spelling(archive, raw, directory[name_at + n : name_at + n + m])
            zip64 = FULL in (stored, size, header)
            if m or zip64:
                extra = directory[name_at + n : name_at + n + m]
                check_extra(archive, name, extra)
                if zip64:
                    if (found := zip64_values(extra, size, stored, header)) is None:
                        raise bad_entry(archive, name, "lacks its 64-bit sizes, or has them twice")
                    size, stored, header = found
            if size != stored and not method:
                raise bad_entry(archive, name, f"is stored as it is, but in {stored:,} bytes instead of {size:,}")
            if name in records:
                what = f"{archive.source} has two records named {name}"
                raise Ambiguous(what, "torch reads the first, Python's zipfile the last.")
            records[name] = record = Record(
                archive, name, directory[at : at + fixed], flags, method, crc, stored, size, header, zip64
            )
            if attributes:
                check_attributes(archive, record, attributes)
            at = name_at + n + m + k
    except (struct.error, UnicodeDecodeError):
        raise Corrupt(f"{archive.source}: entry {len(records):,} of the zip directory is damaged") from None
    if at != len(directory):
        entries = f"the {counted(count, 'entry', 'entries')} of the zip directory"
        raise Corrupt(f"{archive.source}: {entries} take {at:,} bytes, not {len(directory):,}")
    check_names(archive)
    archive.has_checksums = any(record.crc for record in records.values())


def _refuse_entry(archive: Archive, signature: bytes, flags: int, method: int, disk: int, name: bytes) -> NoReturn:
    record = f"{archive.source}: the record {name.decode('utf-8', 'replace')}"
    if signature != b"PK\x01\x02":
        raise Corrupt(f"{archive.source}: entry {len(archive.records):,} of the zip directory is damaged")
    for bit, word in _REFUSED_FLAGS.items():
        if flags & bit:
            raise Unsupported(f"{record} is {word}", "PyTorch files never are.")
    if disk:
        raise _split(archive.source)
    why = "Stored and deflated records are read."
    if method in _OTHER_METHODS:
        raise Unsupported(f"{record} is compressed with method {method} ({_OTHER_METHODS[method]})", why)
    if method not in (0, 8):
        raise Corrupt(f"{record} is stored by the unknown method {method}", why)
    raise Unsupported(f"{record} needs a newer version of the zip format", "PyTorch files never do.")


# Where the data is ---------------------------------------------------------------------------------------------------


def _place_records(archive: Archive, depth: int = 0) -> None:
    """Computes where each record's data is; refuses records that overlap, and bytes that belong to none."""
    records = archive.by_offset()
    earlier = _edited_in_place(archive, depth)
    begins = 0
    if earlier is not None:
        records = _placed_as_before(archive, earlier, records)
        begins = archive.superseded = earlier.end
        archive.edits = earlier.edits + 1
        kept = sum(record.end - record.header for record in archive.records.values() if record.end)
        message = f"earlier in-place edits left {begins - kept:,} bytes of old pickles and directories inside"
        archive.notes.append(Note("superseded-pickle", message, command("convert", FILE, out=OUT)))
    first = records[0].header if records else archive.directory
    if first > begins:
        what = f"{archive.source} has {first - begins:,} bytes before its first record"
        raise Ambiguous(what, "Some readers would see another file there.")
    ends = [*(record.header for record in records[1:]), archive.directory]
    # If the first data descriptor is not where torch would have it, each record's local header is read.
    usual = ((record, end) for record, end in zip(records, ends, strict=False) if record.descriptor_size)
    first_usual = next(((record, end) for record, end in usual if record.has_usual_descriptor), None)
    unusual = first_usual is not None and not first_usual[0].has_signed_descriptor(first_usual[1])
    for record, end in zip(records, ends, strict=False):  # no record: an end without one
        if record.descriptor_size and (unusual or not record.has_usual_descriptor):
            record.place_by_local_header(end)
        else:
            record.place_by_directory(end)


# In-place edits ------------------------------------------------------------------------------------------------------


def _placed_as_before(archive: Archive, earlier: Archive, records: list[Record]) -> list[Record]:
    """Places the records that an earlier state already had; returns the new ones, by offset."""
    fresh = []
    for record in records:
        before = earlier.records.get(record.name)
        if before is None or record.name.endswith("/data.pkl"):
            fresh.append(record)
        elif any(
            getattr(record, name) != getattr(before, name) for name in ("crc", "stored", "size", "method", "header")
        ):
            raise Ambiguous(f"{archive.source}: the record {record} differs from its earlier state inside the file")
        else:
            record.data_at, record.end = before.data_at, before.end
    return fresh


def _edited_in_place(archive: Archive, depth: int) -> Archive | None:
    """The complete archive that stands before a `data.pkl` which an in-place edit appended; None without an edit."""
    names = [name for name in archive.records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(names) != 1 or not END.size <= archive.records[names[0]].header < archive.directory:
        return None
    pickle = archive.records[names[0]]
    end_at = pickle.header - END.size
    if archive.source.read(end_at, 4) != b"PK\x05\x06":
        return None
    if depth == MAX_EDITS:
        what = f"{archive.source} was edited in place more than {MAX_EDITS} times"
        raise LimitExceeded(what, "Each of its old states would have to be read.")
    earlier = _read_directory(archive.source, end_at)
    if earlier.end != end_at + END.size:
        raise Ambiguous(f"{archive.source}: the archive before the record {pickle} is not complete")
    _place_records(earlier, depth + 1)
    if any(name not in archive.records for name in earlier.records) or pickle.name not in earlier.records:
        what = f"{archive.source} holds two archives that are not two states of one"
        raise Ambiguous(what, "Readers would disagree about which of them it is.")
    return earlier


SECTOR = 512  # bytes that a disk writes or loses together


def guard(records: bytes) -> bytes:
    """The end records that have to be the last thing in a file for readers to find the archive (22 or 42 bytes)."""
    located = records[-LOCATOR.size - END.size :]
    return located if located[:4] == b"PK\x06\x07" else records[-END.size :]


def _check_copy(source: Readable, end_at: int, records_end: int, end_records: bytes, size: int) -> None:
    """Raises `Ambiguous` or `Corrupt` unless the end record at `end_at` is the copy that an interrupted edit made."""
    tail = guard(end_records)
    seems_two = any(_ends_another(source, end_at, each) for each in (size, min(size, FULL)))
    if seems_two and not _is_finished_edit(source, end_at + END.size - len(tail), records_end):
        what = f"{source} is two zip archives, one behind the other"
        raise Ambiguous(what, "Some readers take the first, some the second.")
    if records_end > end_at or source.read(end_at + END.size - len(tail), len(tail)) != tail:
        what = f"{source} has bytes between its zip directory and the end record"
        raise Corrupt(what, "Bytes were put into the archive, or its tables were damaged.")


def _ends_another(source: Readable, end_at: int, size: int) -> bool:
    """True if some reader would find a directory before the last end record, which is a copy of an earlier one.

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


def _begins_as_edit(archive: Archive) -> bool:
    """True for a hole (a power cut may have lost what was in it), and for the beginning of a new pickle's header."""
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
    """True unless there is a new directory, or the beginning of one, that has another place for a record."""
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
