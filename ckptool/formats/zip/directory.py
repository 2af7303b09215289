"""The zip directory, read in one go and believed only where nothing contradicts it.

Python's `zipfile` and torch's reader disagree about archives with duplicate names, two directories or names that differ
between header and directory; such archives are refused here, by name. Where a record's data begins is computed from the
directory (the next local header, less the data descriptor, less the size: right for every file that torch writes, and
50,000 seeks cheaper) and confirmed against the record's own local header before its bytes are used: that repeats most
of what the directory says, and some readers believe the one, some the other.

An in-place edit stretches the file, puts a copy of the old end records (the guard) at its very end, and writes the new
records in between (`output/edits.py`). A reader that goes by the offset in the copy finds the old archive. One that
looks for a directory right before the copy must find nothing that it could take for one; and only what begins as such
an edit does is ever cut off.

Sources: PKWARE APPNOTE 6.3.10; caffe2/serialize/inline_container.cc and miniz for what torch writes: stored, flags
0x0808, sizes and CRC zero in the local header and true in the data descriptor (24 bytes where sizes or offsets need 64
bits), the extra field `FB` as padding.
"""

from __future__ import annotations

import re
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from typing import NoReturn

from ckptool.checkpoint import Computed, Data, FileRange, Note
from ckptool.checkpoint.files import Readable, unchanged
from ckptool.commands import FILE, OUT, command
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, LimitExceeded, Truncated, Unsupported, counted
from ckptool.facts import dataclass, field
from ckptool.formats.marks import noted

LOCAL = struct.Struct("<4s5H3I2H")  # signature, version, flags, method, time, date, crc, stored, size, name, extra
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")  # of END64
END_RECORDS = ((b"PK\x06\x06", END64), (b"PK\x06\x07", LOCATOR), (b"PK\x05\x06", END))  # in their order
DESCRIPTOR, DESCRIPTOR64 = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
# Data descriptors by their size: checksum, stored size, size. Some writers leave the signature before them out.
DESCRIPTORS = {form.size: form for form in (DESCRIPTOR, DESCRIPTOR64, struct.Struct("<3I"), struct.Struct("<I2Q"))}
FULL = 0xFFFFFFFF
FULL16 = 0xFFFF

MAX_ENTRIES = 1_000_000
MAX_DIRECTORY = 256 << 20
MAX_INFLATED = 1 << 30
MAX_EDITS = 100  # in place, one on top of the other; a reader looks at every state
_WINDOW = 8 << 10  # bytes: a system call for every header would take longer than the rest
SECTOR = 512  # bytes that a disk writes or loses together
_ENCRYPTED = 0x2061  # flags: in one of three ways, or a patch of another file
_OTHER_METHODS = (9, 12, 14, 93, 95, 98, 99)  # Deflate64, bzip2, LZMA, zstd, XZ, PPMd, AES
_NEEDED, ZIP64_VERSION = 63, 45  # versions of the format: the last one; the first with 64 bits
_HAS_DESCRIPTOR, _UTF8 = 0x0008, 0x0800  # flags
_UNICODE_PATH = 0x7075  # Info-ZIP's extra field with another name for the record
_OF_TENSORS = r"/(?:data|constants)/"  # in the names of records
_FOLDER, LINK = 0x10, 0xA  # in the external attributes: a bit of DOS at the bottom, a file type of Unix at the top
# What a program that unpacked the archive might follow out of its folder, or take for a folder.
LEADS_ELSEWHERE = r"(?m)(?:^|[/\\])\.\.(?:[/\\]|$)|^/|\\|^[A-Za-z]:"
_MAY_DIFFER = 0x0806  # between header and directory: UTF-8 names, and the level of compression
_INFLATED = 1 << 18  # bytes at a time
DATA = "/data/"  # in the names of the records of tensors


@dataclass(slots=True, eq=False, repr=False)
class Headers:
    """What the records of an archive need of it. They do not refer to the archive, which refers to them: such a cycle
    would keep the file open after its last use.

    has_checksums: any of the records has one.  has_data_sums: any of those of tensors has one.
    """

    source: Readable
    has_checksums: bool = True
    has_data_sums: bool = True
    _window: tuple[int, bytes] = (0, b"")  # what was read last, and where

    def peek(self, at: int, length: int) -> bytes:
        """Bytes of headers, read with what follows, as the next header is often near. Raises as `source.read` does."""
        begin, window = self._window
        if not begin <= at <= at + length <= begin + len(window):
            readahead = 0 if self.source.file.far else min(_WINDOW, self.source.size - at)
            window = self.source.read(at, max(length, readahead))
            begin, self._window = at, (at, window)
        return window[at - begin : at - begin + length]


@dataclass(slots=True, eq=False, repr=False)
class Archive:
    """A zip archive's directory. Not changed once `read_archive` has returned it.

    directory, end: where the central directory begins, and the byte after the end records.
    records: by name, in the order of the directory.  superseded: bytes that earlier in-place edits left inside.
    edits: how many there were.  notes: what is unusual about it.
    """

    headers: Headers
    directory: int
    end: int
    end_records: bytes
    records: dict[str, Record] = field(default_factory=dict)
    superseded: int = 0
    edits: int = 0
    notes: list[Note] = field(default_factory=list)

    @property
    def source(self) -> Readable:
        return self.headers.source

    def by_offset(self) -> list[Record]:
        return sorted(self.records.values(), key=attrgetter("header"))

    def confirm(self) -> None:
        """Confirms each record, see `Record.confirm`; of a file elsewhere none, as each would be a request."""
        for record in self.records.values() if not self.source.file.far else ():
            record.confirm()


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """An entry of the directory. Sizes and offsets in bytes; `data_at` is not certain before `confirm`.

    central: the 46 fixed bytes of its entry.  header: the byte of its local header.  zip64: it has 64-bit values.
    end: the byte after its descriptor.  is_used: somebody has asked for its data.
    stand_in: what takes the place of data that is lost.
    """

    headers: Headers
    name: str
    central: bytes
    flags: int
    method: int
    crc: int
    stored: int
    size: int
    header: int
    zip64: bool = False
    descriptor_size: int = 0
    data_at: int = 0
    end: int = 0
    is_used: bool = False
    is_confirmed: bool = False
    stand_in: Data | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def sum(self) -> int | None:
        """Its checksum; None where the archive has none, or none of what torch's `skip_data` leaves to be filled in."""
        headers = self.headers
        is_stored = headers.has_checksums and (headers.has_data_sums or not self.size or DATA not in self.name)
        return self.crc if is_stored else None

    @property
    def data(self) -> Data:
        """The record's contents, inflated if need be, not read yet: a new object each time, whose record `record_of`
        finds."""
        self.is_used = True
        if self.stand_in is not None:
            return self.stand_in
        source = self.headers.source
        raw = FileRange(source.file, source.start + self.data_at, self.stored, self.confirm)
        return Computed(self.size, _Inflated(self, raw).read) if self.method else raw

    def contents(self, limit: int) -> bytes:
        """All of a small record, its checksum verified (unless the archive has none)."""
        if self.size > limit:
            raise LimitExceeded(f"{self.headers.source}: {self} is {self.size:,} bytes; the limit is {limit:,}")
        data = self.data.read(0, self.size)
        if self.sum not in (None, zlib.crc32(data)):
            self.wrong("does not match its checksum")
        return data

    def confirm(self, *, name_alone: bool = False) -> None:
        """Compares the record's own header and descriptor with the directory; raises `Ambiguous` or `Corrupt`."""
        if self.is_confirmed:
            return
        source, peek, name = self.headers.source, self.headers.peek, self.name.encode()
        head = peek(self.header, min(LOCAL.size + len(name), source.size - self.header))
        if len(head) < LOCAL.size or head[:4] != b"PK\x03\x04":
            self.wrong(f"has no header at byte {self.header:,}")
        _, _, flags, method, _, _, crc, stored, size, name_size, extra_size = LOCAL.unpack_from(head)
        if head[LOCAL.size :] != name or name_size != len(name):
            raise Ambiguous(f"{source}: the record {self} has a different name in its own header")
        if name_alone:
            return
        if method != self.method or flags & ~_MAY_DIFFER != self.flags & ~_MAY_DIFFER:
            self.wrong("is stored in a different way according to its own header")
        data_at = self.header + LOCAL.size + name_size + extra_size
        if data_at != self.data_at:
            self.wrong(f"begins at byte {data_at:,}, not {self.data_at:,} as the directory has it")
        expected = (self.crc, self.stored, self.size)
        if layout := DESCRIPTORS.get(self.descriptor_size):
            agrees = crc in (0, self.crc) and stored in (0, FULL, self.stored) and size in (0, FULL, self.size)
        else:
            if FULL in (stored, size):
                extra = peek(data_at - extra_size, extra_size)
                size, stored, _ = zip64_values(extra, size, stored, 0) or (size, stored, 0)
            agrees = (crc, stored, size) == expected
        if not agrees:
            self.wrong("has a different size or checksum in its own header than in the directory")
        if layout:
            *signature, crc, stored, size = layout.unpack(peek(data_at + self.stored, layout.size))
            if signature not in ([], [b"PK\x07\x08"]):
                self.wrong("has no descriptor after its data")
            if (crc, stored, size) != expected:
                self.wrong("has a different size or checksum in its descriptor than in the directory")
        self.is_confirmed = True

    def wrong(self, what: str) -> NoReturn:
        raise Corrupt(f"{self.headers.source}: the record {self} {what}", "The archive is damaged or malicious.")


def read_archive(source: Readable, *, case_matters: bool = False, confirm: bool = True) -> Archive:
    """The archive in `source`; raises `Truncated`, `Ambiguous`, `Corrupt`, `Unsupported` or `LimitExceeded`.

    case_matters: the readers of this kind of archive tell names apart that differ in case alone.  confirm: looks at the
    headers of the first and the last record.
    """
    # The last end record; only what a torn in-place edit leaves may follow it, not even a comment.
    tail, tail_at, place = last_end_record(source, 2 * END.size + LOCATOR.size + FULL16)
    trailing = tail[place + END.size :]
    if place < 0 or trailing[:4] == b"PK\x03\x04":
        appended = " to which something was appended, and" if place >= 0 else ""
        why = "The file was cut off, or its end is damaged: a zip keeps its directory at the end."
        if (zeros := len(tail) - len(tail.rstrip(b"\0"))) >= SECTOR:
            why = f"{why} Its last {zeros:,} bytes are zero."
        what = f"{source} is a zip archive{appended} whose directory is missing"
        raise Truncated(what, why, "Download or copy it again, and compare the sizes.")
    at = -1
    while (at := tail.find(b"PK\x05\x06", at + 1, place)) >= 0:
        comment = int.from_bytes(tail[at + END.size - 2 : at + END.size], "little")
        if comment and at + END.size + comment == len(tail):
            raise Ambiguous(f"{source} has the end of one zip archive in the comment of another")
    # The beginning of one more copy of the end records may follow, behind the hole that it was to protect.
    copy = trailing.lstrip(b"\0")
    if copy and (len(copy) >= END.size + LOCATOR.size or not guard(tail[: place + END.size]).startswith(copy)):
        raise Ambiguous(f"{source} has {len(trailing):,} bytes after the end of its zip archive")
    archive = _read_directory(source, tail_at + place)
    names: dict[str, str] = {}
    if not case_matters and len({name.lower() for name in archive.records}) < len(archive.records):
        one, other = next(
            (one, name) for name in archive.records if (one := names.setdefault(name.lower(), name)) != name
        )
        raise Ambiguous(f"{source} has the records {one} and {other}", "torch ignores case in names.")
    if archive.end != source.size:
        excess = f"{source.size - archive.end:,} bytes"
        if not _is_torn_edit(archive):
            raise Ambiguous(f"{source} has {excess} after its zip archive that no in-place edit left there")
        message = f"an in-place edit was interrupted; {excess} after the archive are not part of it"
        archive.notes.append(Note("interrupted-edit", message))
    # Harmless here, where nothing is unpacked; to be known before another program unpacks it.
    together = "\n".join(["", *archive.records])  # a quick look at 50,000 names
    seems_unsafe = any(sign in together for sign in ("..", "\\", ":", "\n/"))
    unsafe = [name for name in archive.records if re.search(LEADS_ELSEWHERE, name)] if seems_unsafe else []
    about = "could lead another program out of its folder"
    archive.notes += noted("unsafe-record-names", unsafe, "record name", "record names", about)
    # The highest byte of the external attributes.
    links = (record for record in archive.records.values() if record.central[41] >> 4 == LINK)
    words = "record is", "records are", "marked as symbolic links, which is ignored"
    archive.notes += noted("symlink-records", links, *words, command("convert", FILE, out=OUT))
    _place_records(archive)
    if confirm and (records := archive.by_offset()):
        records[0].confirm()  # whatever the file begins with could be another file's head
        records[-1].confirm()  # and what stands before the directory another archive's end
    return archive


# Without believing it ------------------------------------------------------------------------------------------------


def last_end_record(source: Readable, room: int) -> tuple[bytes, int, int]:
    """The last `room` bytes, the byte where they begin, and the place of the last end record in them (-1: none)."""
    begin = max(0, source.size - room)
    tail = source.read(begin, source.size - begin)
    return tail, begin, tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - END.size + 4))


def table(source: Readable, limit: int = MAX_DIRECTORY) -> bytes:
    """The bytes of the directory that the last end record points to; none without one, or with more than `limit`."""
    _, tail_at, place = last_end_record(source, 1 << 16)
    size, at = directory_by(source, tail_at + place) if place >= 0 else (0, 0)
    return source.read(at, size) if size <= limit and at + size <= source.size else b""


def directory_by(source: Readable, end: int) -> tuple[int, int]:
    """The size and the place of the directory, as the end record at `end` or the 64-bit one before it has them."""
    size, at = END.unpack(source.read(end, END.size))[5:7]
    if FULL in (size, at) and (end64 := end - LOCATOR.size - END64.size) >= 0:
        size, at = END64.unpack(source.read(end64, END64.size))[8:10]
    return size, at


def refuse_zip_behind(head: bytes, source: Readable) -> None:
    """Raises `Corrupt` or `Ambiguous` for a file that does not begin as a zip archive, but ends in the directory of
    one: some readers look nowhere else."""
    if not ends_as_zip(source):
        return
    is_zeroed = not any(head[:4]) and table(source)[42:46] == bytes(4)  # its first entry is of a record there
    if is_zeroed or sum(a == b for a, b in zip(head, b"PK\x03\x04", strict=False)) == 3:
        raise Corrupt(f"{source} is a zip archive that begins with {head[:4].hex(' ')}: its first bytes were damaged")
    raise Ambiguous(f"{source} begins like a different kind of file and ends like a zip archive")


def ends_as_zip(source: Readable) -> bool:
    """True for a file that ends in the directory of a zip archive, whatever it begins with."""
    tail, tail_at, place = last_end_record(source, END.size + FULL16)
    *_, size, _, comment = END.unpack_from(tail, place) if place >= 0 else (0, 0, 0)
    if place < 0 or place + END.size + comment != len(tail):
        return False
    ends = (tail_at + place, tail_at + place - LOCATOR.size - END64.size)
    if size == FULL:
        return tail[max(0, place - LOCATOR.size) : place][:4] == b"PK\x06\x07"
    return any(size and end >= size and source.read(end - size, 4) == b"PK\x01\x02" for end in ends)


# The end records -----------------------------------------------------------------------------------------------------


def _read_directory(source: Readable, end_at: int) -> Archive:
    """The archive whose end record is at `end_at`, its records not placed yet."""
    _, disk, directory_disk, *counts, comment = END.unpack(source.read(end_at, END.size))
    if comment:
        raise Ambiguous(f"{source} is cut off inside the comment of its zip archive, or hides something there")
    directory_end, records_end = end_at, end_at + END.size
    locator = source.read(end_at - LOCATOR.size, LOCATOR.size) if end_at >= LOCATOR.size else b""
    after_directory = counts[2] + counts[3]
    if locator[:4] == b"PK\x06\x07":
        _, locator_disk, directory_end, disks = LOCATOR.unpack(locator)
        raw = source.read(directory_end, END64.size) if directory_end + END64.size <= end_at else b""
        if raw[:4] != b"PK\x06\x06":
            adjacent = end_at - LOCATOR.size - END64.size
            moved = adjacent - directory_end if adjacent >= 0 and source.read(adjacent, 4) == b"PK\x06\x06" else 0
            what = f"{source}: the zip64 locator points to byte {directory_end:,}, where there is no end record"
            raise _misplaced(source, moved, what)
        _, length, _, _, *disks64, on_disk, entries, size, offset = END64.unpack(raw)
        if (locator_disk, disks, *disks64) != (0, 1, 0, 0):
            raise _split(source)
        counts64 = [on_disk, entries, size, offset]
        pairs = zip(counts, counts64, (FULL16, FULL16, FULL, FULL), strict=True)
        if length != END64.size - 12 or any(short not in (full, value) for short, value, full in pairs):
            raise Corrupt(f"{source}: the two end records of the archive disagree, or one is damaged")
        counts, records_end = counts64, directory_end + END64.size + LOCATOR.size + END.size
    elif FULL in counts[2:]:
        raise Corrupt(f"{source}: the archive needs a zip64 end record and has none")
    elif after_directory < end_at and source.read(after_directory, END.size) == source.read(end_at, END.size):
        directory_end, records_end = after_directory, after_directory + END.size
    on_disk, count, size, offset = counts
    end_records = source.read(directory_end, records_end - directory_end)
    if records_end != end_at + END.size:
        _check_copy(source, end_at, records_end, end_records, size)
    if disk or directory_disk:
        raise _split(source)
    entries = counted(count, "entry", "entries")
    if on_disk != count:
        raise Corrupt(f"{source}: the zip directory should have {entries}, {on_disk:,} of them in this file")
    if offset + size != directory_end:
        place = f"end at byte {offset + size:,}, but its end record is at {directory_end:,}"
        raise _misplaced(source, directory_end - offset - size, f"{source}: the zip directory should {place}")
    if count > MAX_ENTRIES or size > MAX_DIRECTORY:
        what = f"{source}: a zip directory of {entries} and {size:,} bytes"
        raise LimitExceeded(what, f"At most {MAX_ENTRIES:,} entries and {MAX_DIRECTORY:,} bytes are read.")
    archive = Archive(headers := Headers(source), offset, records_end, end_records)
    directory = source.read(offset, size)
    unpack, fixed, records, at = CENTRAL.unpack_from, CENTRAL.size, archive.records, 0
    try:
        for _ in range(count):
            sig, _, needed, flags, method, _, _, crc, stored, size, n, m, k, disk, _, attributes, header = unpack(
                directory, at
            )
            name_at = at + fixed
            raw, extra = directory[name_at : name_at + n], directory[name_at + n : name_at + n + m]
            if sig != b"PK\x01\x02" or disk or flags & _ENCRYPTED or method not in (0, 8) or needed & 0xFF > _NEEDED:
                _refuse_entry(archive, sig, flags, method, disk, raw)
            name = str(raw, "utf-8")
            if m or not (flags & _UTF8 or raw.isascii()):
                _check_extra(archive, name, extra, flags)
            if zip64 := FULL in (stored, size, header):
                if (values := zip64_values(extra, size, stored, header)) is None:
                    raise Corrupt(f"{source}: the record {name} lacks its 64-bit sizes, or has them twice")
                size, stored, header = values
            if size != stored and not method:
                what = f"is stored uncompressed, but in {stored:,} bytes instead of {size:,}"
                raise Corrupt(f"{source}: the record {name} {what}")
            if name in records:
                raise Ambiguous(f"{source} has two records named {name}")
            descriptor = 0
            if flags & _HAS_DESCRIPTOR:  # as torch writes it
                descriptor = DESCRIPTOR64.size if zip64 else DESCRIPTOR.size
            central = directory[at:name_at]
            records[name] = Record(headers, name, central, flags, method, crc, stored, size, header, zip64, descriptor)
            if size and (attributes & _FOLDER or name.endswith("/")):
                raise Ambiguous(f"{source}: the record {name} is marked as a folder but has contents")
            at = name_at + n + m + k
    except (struct.error, UnicodeDecodeError):
        raise Corrupt(f"{source}: entry {len(records):,} of the zip directory is damaged") from None
    if at != len(directory):
        entries = f"the {counted(count, 'entry', 'entries')} of the zip directory"
        raise Corrupt(f"{source}: {entries} take {at:,} bytes, not {len(directory):,}")
    if "" in records:
        raise Corrupt(f"{source}: a record has no name")
    if nul := next((name for name in records if "\0" in name), ""):
        raise Ambiguous(f"{source}: the record name {nul} holds a NUL")
    headers.has_checksums = any(record.crc for record in records.values())
    headers.has_data_sums = any(record.crc for record in records.values() if DATA in record.name)
    return archive


def _split(source: Readable) -> Unsupported:
    return Unsupported(f"{source} is one part of a split zip archive", "All parts would be needed.")


def _misplaced(source: Readable, by: int, what: str) -> CkptoolError:
    """The error for a directory that is `by` bytes behind its place."""
    if 0 < by <= source.size - 4 and source.read(by, 4) == b"PK\x03\x04":
        why = f"{by:,} bytes, or another archive, were put in front of the archive; readers disagree about such files."
        return Ambiguous(what, why)
    return Corrupt(what, "Bytes were inserted or are missing, or the tables are damaged.")


# The entries ---------------------------------------------------------------------------------------------------------


def _refuse_entry(archive: Archive, signature: bytes, flags: int, method: int, disk: int, name: bytes) -> NoReturn:
    record, never = f"{archive.source}: the record {name.decode('utf-8', 'replace')}", "PyTorch never writes that."
    if signature != b"PK\x01\x02":
        raise Corrupt(f"{archive.source}: entry {len(archive.records):,} of the zip directory is damaged")
    if disk:
        raise _split(archive.source)
    if flags & _ENCRYPTED:
        raise Unsupported(f"{record} is encrypted, or a patch to another file", never)
    if method not in (0, 8):
        kind = Unsupported if method in _OTHER_METHODS else Corrupt
        raise kind(f"{record} is compressed by method {method}", "ckptool reads stored and deflated records.")
    raise Unsupported(f"{record} needs a newer version of the zip format", never)


def _check_extra(archive: Archive, name: str, extra: bytes, flags: int) -> None:
    """Raises for an extra field that does not fit, or has another name for the record, and for a name beyond ASCII
    that is not marked as UTF-8: many readers use a DOS code page."""
    fields, record = extra_fields(extra), f"{archive.source}: the record {name}"
    names = {content[5:] for kind, content in fields if kind == _UNICODE_PATH}
    if not flags & _UTF8 and not name.isascii() and name.encode() not in names:
        raise Ambiguous(f"{archive.source}: the record name {name} does not say that it is UTF-8")
    if len(extra) - sum(4 + len(content) for _, content in fields) >= 4:
        raise Corrupt(f"{record} has an extra field that is longer than its entry")
    if names - {name.encode()}:
        raise Ambiguous(f"{record} has a different name in its extra field", "Some readers take one, some the other.")


def zip64_values(extra: bytes, size: int, stored: int, header: int) -> tuple[int, int, int] | None:
    """Size, stored size and header with the values of the zip64 extra field where the given ones are full.

    None without such a field, with two, and with one that is too short.
    """
    fields = [value for kind, value in extra_fields(extra) if kind == 1]
    short = (size, stored, header)
    if len(fields) != 1 or len(fields[0]) // 8 < short.count(FULL):
        return None
    following = struct.iter_unpack("<Q", fields[0][: len(fields[0]) // 8 * 8])
    size, stored, header = (next(following)[0] if value == FULL else value for value in short)
    return size, stored, header


def extra_fields(extra: bytes) -> list[tuple[int, bytes]]:
    """The fields of an entry that are whole: kind and contents."""
    fields, at = [], 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if at + 4 + length > len(extra):
            break
        fields.append((kind, extra[at + 4 : at + 4 + length]))
        at += 4 + length
    return fields


# Where the data is ---------------------------------------------------------------------------------------------------


def _place_records(archive: Archive, depth: int = 0) -> None:
    """Computes where each record's data is; refuses records that overlap, and bytes that belong to none."""
    records, begins = archive.by_offset(), 0
    ends = [*(record.header for record in records[1:]), archive.directory]
    pickles = [record for record in records if record.name.count("/") == 1 and record.name.endswith("/data.pkl")]
    if pickles and archive.source.file.far:  # all but tensors is read
        small = (place for place in zip(records, ends, strict=False) if not re.search(_OF_TENSORS, place[0].name))
        archive.source.expect((record.header, end) for record, end in small)
    end_at = pickles[0].header - END.size if len(pickles) == 1 else -1
    if 0 <= end_at < archive.directory - END.size and archive.source.read(end_at, 4) == b"PK\x05\x06":
        records = _place_earlier_state(archive, pickles[0], records, depth)
        begins = archive.superseded
    first = records[0].header if records else archive.directory
    if first > begins:
        raise Ambiguous(f"{archive.source} has {first - begins:,} bytes before its first record")
    ends = [*(record.header for record in records[1:]), archive.directory][: len(records)]
    # Where the first descriptor is not as torch would have it, each record's local header is read. Writers of zip64 may
    # use 64 bits at any size: the directory does not tell the size of theirs at all.
    is_usual = False
    for record, end in zip(records, ends, strict=True):
        if record.descriptor_size and record.central[6] < ZIP64_VERSION:
            at = end - record.descriptor_size
            fits = record.header <= at and end <= archive.source.size
            is_usual = fits and archive.source.read(at, 4) == b"PK\x07\x08"
            break
    for record, end in zip(records, ends, strict=True):
        # The data, with its descriptor, ends where the next record begins; or it begins behind the record's own header,
        # and the descriptor is what is left.
        record.end, record.data_at = end, end - record.descriptor_size - record.stored
        if not record.descriptor_size or (is_usual and record.central[6] < ZIP64_VERSION):
            fits = 0 <= record.data_at - record.header - LOCAL.size - len(record.name.encode()) <= FULL16
        elif fits := end - record.header >= LOCAL.size:
            name_size, extra_size = LOCAL.unpack(archive.source.read(record.header, LOCAL.size))[-2:]
            record.data_at = record.header + LOCAL.size + name_size + extra_size
            record.descriptor_size = end - record.data_at - record.stored
            fits = record.descriptor_size in DESCRIPTORS
        if not fits:
            if record.header + LOCAL.size <= archive.directory:
                record.confirm(name_alone=True)  # with a longer or shorter name, it cannot fit
            what = f"the record {record} does not fit where the directory places it (byte {record.header:,})"
            raise Corrupt(f"{archive.source}: {what}", "Records overlap, or bytes between them belong to none.")


# In-place edits ------------------------------------------------------------------------------------------------------


def _place_earlier_state(archive: Archive, pickle: Record, records: list[Record], depth: int) -> list[Record]:
    """Places the records of the complete archive that stands before a `data.pkl` which an in-place edit appended;
    returns the new ones, by offset."""
    source, end_at = archive.source, pickle.header - END.size
    if depth == MAX_EDITS:
        raise LimitExceeded(f"{source} was edited in place more than {MAX_EDITS} times")
    earlier = _read_directory(source, end_at)
    if earlier.end != end_at + END.size:
        raise Ambiguous(f"{source}: the archive before the record {pickle} is not complete")
    _place_records(earlier, depth + 1)
    if not earlier.records.keys() <= archive.records.keys() or pickle.name not in earlier.records:
        raise Ambiguous(f"{source} holds two archives that are not states of the same one")
    fresh = []
    for record in records:
        old = earlier.records.get(record.name)
        if old is None or record.name.endswith("/data.pkl"):
            fresh.append(record)
        elif any(getattr(record, name) != getattr(old, name) for name in _KEPT):
            raise Ambiguous(f"{source}: the record {record} differs from its earlier state inside the file")
        else:
            record.data_at, record.end = old.data_at, old.end
    archive.superseded, archive.edits = earlier.end, earlier.edits + 1
    leftover = earlier.end - sum(record.end - record.header for record in archive.records.values() if record.end)
    message = f"earlier in-place edits left {leftover:,} bytes of old pickles and directories inside"
    archive.notes.append(Note("superseded-pickle", message, command("convert", FILE, out=OUT)))
    return fresh


_KEPT = ("crc", "stored", "size", "method", "header")  # what an in-place edit keeps of a record


def guard(records: bytes) -> bytes:
    """The end records that have to be the last thing in a file for readers to find the archive (22 or 42 bytes)."""
    located = records[-LOCATOR.size - END.size :]
    return located if located[:4] == b"PK\x06\x07" else records[-END.size :]


def _check_copy(source: Readable, end_at: int, records_end: int, end_records: bytes, size: int) -> None:
    """Raises `Ambiguous` or `Corrupt` unless the end record at `end_at` is the copy that an interrupted edit made.

    size: of the directory. Would some reader find a directory right before the copy? However odd its entries are,
    another reader may be content with them: one signature is enough. Only where all the bytes up to there make a whole
    new state of the archive is it by accident that a line of its directory stands there.
    """
    tail = guard(end_records)
    end64_at, copy_at = end_at - LOCATOR.size - END64.size, end_at + END.size - len(tail)
    seems_two = end64_at >= 0 and source.read(end64_at, 4) == b"PK\x06\x06"
    for length in (size, min(size, FULL)):
        seems_two = seems_two or (0 < length <= end_at and source.read(end_at - length, 4) == b"PK\x01\x02")
    if seems_two:
        with suppress(CkptoolError):
            seems_two = read_archive(source.file.part(source.start, copy_at)).superseded != records_end
    if seems_two:
        raise Ambiguous(f"{source} is two zip archives, one after the other")
    if records_end > end_at or source.read(copy_at, len(tail)) != tail:
        raise Corrupt(f"{source} has bytes between its zip directory and the end record")


def _is_torn_edit(archive: Archive) -> bool:
    """True if the bytes behind an archive begin as those of an in-place edit, and list no record in another place.

    They begin with a hole (a power cut may have lost what was in it) or the beginning of a new pickle's header. Of a
    new directory, a power cut may have taken a part.
    """
    source, begin = archive.source, archive.end
    names = [name for name in archive.records if name.endswith("/data.pkl")]
    if len(names) != 1:
        return False  # no checkpoint of torch's: nothing else is edited in place
    name, tail = names[0].encode(), guard(archive.end_records)
    head = source.read(begin, min(LOCAL.size + len(name), source.size - begin))
    extra = int.from_bytes(head[LOCAL.size - 2 : LOCAL.size], "little")
    expected = LOCAL.pack(b"PK\x03\x04", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(name), extra) + name
    if not (head.rstrip(b"\0") and expected.startswith(head.rstrip(b"\0"))):
        sector = source.read(begin, min(-begin % SECTOR or SECTOR, source.size - begin))
        if not tail.startswith(sector.lstrip(b"\0")[: END.size]):
            return False
    end_at = source.size - len(tail) - END.size
    if end_at < begin or source.read(end_at, 4) != b"PK\x05\x06":
        return True  # no end records are there that would say where a directory is
    size, at = directory_by(source, end_at)
    end = min(at + size, end_at) if at >= begin else 0  # else: the same guard, once more
    while at + CENTRAL.size <= end:
        sig, *_, n, m, k, _, _, _, header = CENTRAL.unpack(source.read(at, CENTRAL.size))
        listed_name = source.read(at + CENTRAL.size, min(n, end - at - CENTRAL.size)).decode("utf-8", "replace")
        if sig != b"PK\x01\x02" or not listed_name or "\0" in listed_name:
            break  # a power cut took it
        record = None if listed_name.endswith("/data.pkl") else archive.records.get(listed_name)
        if header != FULL and (header < begin if record is None else header != record.header):
            return False
        at += CENTRAL.size + n + m + k
    return True


# Inflating -----------------------------------------------------------------------------------------------------------


class _Inflated:
    """The bytes of a deflated record, quickest front to back; going back starts over.

    Each thread reads at a place of its own: one may read ahead while another checks the sum.
    """

    def __init__(self, record: Record, raw: FileRange) -> None:
        self.record, self.raw, self.threads = record, raw, threading.local()

    def __reduce__(self) -> tuple[type, tuple[Record, FileRange]]:
        return _Inflated, (self.record, self.raw)  # another process, and a copy, has places of its own

    def read(self, offset: int, length: int) -> bytes:
        at, rest, chunks = self.threads.__dict__.pop("place", (0, memoryview(b""), None))
        if chunks is None or offset < at:
            at, rest, chunks = 0, memoryview(b""), _chunks(self.record, self.raw)
        blocks, end = [], min(offset + length, self.record.size)
        with unchanged(self.raw.file.file):
            while at < end:
                rest = rest or memoryview(next(chunks))
                taken = min(len(rest), end - at)
                blocks.append(rest[max(0, offset - at) : taken])
                at, rest = at + taken, rest[taken:]
            if at == self.record.size:
                next(chunks, None)  # sees to it that nothing follows
        self.threads.place = at, rest, chunks
        return b"".join(blocks)


def record_of(data: Data) -> Record | None:
    """The record of which this is all the data, as `Record.data` gives it: its methods read or confirm the data."""
    if not isinstance(data, FileRange):
        reader = getattr(data.read, "__self__", None)
        return reader.record if isinstance(reader, _Inflated) else None
    record = getattr(data.confirm, "__self__", None)
    if not isinstance(record, Record):
        return None
    place = record.headers.source.start + record.data_at, record.stored
    return record if (data.offset, data.length) == place else None


def _chunks(record: Record, raw: FileRange) -> Iterator[bytes]:
    """A deflated record piece by piece; raises `Corrupt` unless it has the promised size and nothing behind it."""

    def wrong(what: str) -> NoReturn:
        raise Corrupt(f"{record.headers.source}: {record} {what}", "Its compressed data was damaged.")

    stream, packed, consumed, produced = zlib.decompressobj(-15), b"", 0, 0
    while not stream.eof:
        if not packed and consumed < raw.length:
            packed = raw.read(consumed, 1 << 16)
            consumed += len(packed)
        try:
            chunk = stream.decompress(packed, min(_INFLATED, record.size - produced) or 1)
        except zlib.error as error:
            wrong(f"cannot be inflated: {error}")
        packed = stream.unconsumed_tail
        produced += len(chunk)
        if produced > record.size:
            wrong(f"inflates to more than {record.size:,} bytes")
        if chunk:
            yield chunk
        elif not packed and consumed == raw.length:
            break
    if produced < record.size:
        wrong(f"inflates to {produced:,} bytes, not {record.size:,}")
    if not stream.eof:
        wrong("ends in the middle of its compressed data")
    if stream.unused_data or consumed < raw.length:
        wrong("has bytes after the end of its compressed data")
