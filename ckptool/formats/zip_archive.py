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
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from ckptool.checkpoint import Computed, Data, FileRange, Note
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, LimitExceeded, Truncated, Unsupported, printable
from ckptool.files import Source

LOCAL = struct.Struct("<4s5H3I2H")  # signature, version, flags, method, time, date, crc, stored, size, name, extra
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")
DESCRIPTOR, DESCRIPTOR64 = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
FULL = 0xFFFFFFFF
FULL16 = 0xFFFF

MAX_ENTRIES = 1_000_000
MAX_DIRECTORY = 256 << 20
MAX_INFLATED = 1 << 30
MAX_EDITS = 100  # in place, one on top of the other; a reader looks at every state
_HAS_DESCRIPTOR = 0x0008
_REFUSED_FLAGS = {0x0001: "encrypted", 0x0020: "patched", 0x0040: "strongly encrypted", 0x2000: "masked"}


class Record:
    """One entry of the directory. Sizes and offsets in bytes; `data_at` is predicted until `confirm` has looked."""

    __slots__ = (
        "_confirmed",
        "_data",
        "archive",
        "central",
        "crc",
        "data_at",
        "end",
        "flags",
        "header",
        "method",
        "name",
        "size",
        "stored",
        "wide",
    )

    def __init__(
        self,
        archive: Archive,
        name: str,
        central: bytes,
        flags: int,
        method: int,
        crc: int,
        stored: int,
        size: int,
        header: int,
        wide: bool,
    ) -> None:
        self.archive = archive
        self.name = name
        self.central = central  # the 46 fixed bytes, kept to write the entry back as it was
        self.flags = flags
        self.method = method
        self.crc = crc
        self.stored = stored
        self.size = size
        self.header = header
        self.wide = wide  # 64-bit sizes in its descriptor
        self.data_at = self.end = 0
        self._confirmed = False
        self._data: Data | None = None

    @property
    def descriptor_size(self) -> int:
        if not self.flags & _HAS_DESCRIPTOR:
            return 0
        return DESCRIPTOR64.size if self.wide else DESCRIPTOR.size

    def __str__(self) -> str:
        return printable(self.name)

    def confirm(self) -> None:
        """Compares the record's own header and descriptor with the directory; raises `Ambiguous` or `Corrupt`."""
        if self._confirmed:
            return
        source = self.archive.source
        raw_name = self.name.encode()
        head = source.read(self.header, min(LOCAL.size + len(raw_name), source.size - self.header))
        if len(head) < LOCAL.size or head[:4] != b"PK\x03\x04":
            self._wrong(f"has no header at byte {self.header:,}")
        _, _, flags, method, _, _, crc, stored, size, name_size, extra_size = LOCAL.unpack_from(head)
        if head[LOCAL.size :] != raw_name or name_size != len(raw_name):
            raise Ambiguous(
                f"{source}: the record {self} has another name in its own header",
                "Some readers would take one name, some the other, and see two different files.",
            )
        if method != self.method or flags & ~0x0806 != self.flags & ~0x0806:
            self._wrong("says in its header that it is stored in another way")
        data_at = self.header + LOCAL.size + name_size + extra_size
        if data_at != self.data_at:
            self._wrong(f"begins at byte {data_at:,}, not {self.data_at:,} as the directory has it")
        if flags & _HAS_DESCRIPTOR:
            crc, stored, size = self._descriptor()
        if stored == FULL or size == FULL:  # zip64: the true sizes are in the extra field, which the directory repeats
            stored, size = self.stored, self.size
        if (crc, stored, size) != (self.crc, self.stored, self.size):
            self._wrong("has another size or checksum in its own header than in the directory")
        self._confirmed = True

    def _descriptor(self) -> tuple[int, int, int]:
        layout = DESCRIPTOR64 if self.wide else DESCRIPTOR
        signature, crc, stored, size = layout.unpack(self.archive.source.read(self.data_at + self.stored, layout.size))
        if signature != b"PK\x07\x08":
            self._wrong("has no descriptor after its data")
        return crc, stored, size

    def _wrong(self, what: str) -> NoReturn:
        raise Corrupt(
            f"{self.archive.source}: the record {self} {what}", "The archive was damaged, or put together to mislead."
        )

    @property
    def is_used(self) -> bool:
        """True once somebody has asked for its data."""
        return self._data is not None

    @property
    def data(self) -> Data:
        """The record's contents, inflated if need be, not read yet. Always the same object."""
        if self._data is None:
            raw = FileRange(self.archive.source, self.data_at, self.stored, self.confirm)
            self._data = raw if self.method == 0 else Computed(self.size, _Inflater(self, raw).read)
        return self._data

    def contents(self, limit: int) -> bytes:
        """All of a small record, its checksum verified (unless the archive has none)."""
        if self.size > limit:
            raise LimitExceeded(
                f"{self.archive.source}: {self} is {self.size:,} bytes when unpacked; at most {limit:,} are read",
                "No record of this kind is so large; it is built to exhaust its reader.",
            )
        data = self.data.read(0, self.size)
        if self.archive.has_checksums and zlib.crc32(data) != self.crc:
            self._wrong("does not match its checksum")
        return data


class _Inflater:
    """Random access to a deflated record, quickest front to back; going back starts over."""

    def __init__(self, record: Record, raw: FileRange) -> None:
        self.record, self.raw = record, raw
        self._restart()

    def _restart(self) -> None:
        self.at = self.taken = 0
        self.stream = zlib.decompressobj(-15)
        self.pending = b""

    def read(self, offset: int, length: int) -> bytes:
        if offset < self.at:
            self._restart()
        while self.at < offset:
            self._next(min(offset - self.at, 1 << 18))
        parts = []
        left = min(length, self.record.size - offset)
        while left:
            part = self._next(left)
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _next(self, most: int) -> bytes:
        while True:
            if not self.pending and self.taken < self.raw.length:
                self.pending = self.raw.read(self.taken, 1 << 16)
                self.taken += len(self.pending)
            try:
                out = self.stream.decompress(self.pending, most)
            except zlib.error as error:
                raise Corrupt(f"{self.record.archive.source}: {self.record} cannot be inflated: {error}") from error
            self.pending = self.stream.unconsumed_tail
            if out:
                self.at += len(out)
                return out
            if self.stream.eof or (not self.pending and self.taken == self.raw.length):
                raise Corrupt(
                    f"{self.record.archive.source}: {self.record} inflates to {self.at:,} bytes, not {self.record.size:,}"
                )


@dataclass(slots=True, eq=False)
class Archive:
    """A zip archive's directory. Not changed once `read_archive` has returned it.

    directory, end: where the central directory begins, and the byte after the end records.
    records: by name, in the order of the directory.
    superseded: bytes that earlier in-place edits left inside, edits: how many there were.  notes: what is unusual about the archive.
    """

    source: Source
    directory: int
    end: int
    end_records: bytes
    records: dict[str, Record] = field(default_factory=dict)
    has_checksums: bool = True
    superseded: int = 0
    edits: int = 0
    notes: list[Note] = field(default_factory=list)

    def by_offset(self) -> list[Record]:
        return sorted(self.records.values(), key=lambda record: record.header)


def read_archive(source: Source) -> Archive:
    """The archive that `source` is; raises `Truncated`, `Ambiguous`, `Corrupt`, `Unsupported` or `LimitExceeded`."""
    at = _find_end(source)
    archive = _read_directory(source, at)
    if archive.end != source.size:
        archive.notes.append(
            Note(
                "interrupted-edit",
                f"an in-place edit was interrupted; {source.size - archive.end:,} bytes after the archive are not part of it",
            )
        )
    _place_records(archive)
    return archive


def _find_end(source: Source) -> int:
    """Where the end record is, the last of its kind; nothing may follow it but what a torn in-place edit leaves, not even a comment."""
    tail_at = max(0, source.size - 2 * END.size - LOCATOR.size - FULL16)
    tail = source.read(tail_at, source.size - tail_at)
    found = tail.rfind(b"PK\x05\x06", 0, len(tail) - END.size + 4)
    if found < 0:
        raise Truncated(
            f"{source} is a zip archive whose directory is missing",
            "The file was cut off: a torch file keeps its directory at the end.",
            "Download or copy it again, and compare the sizes.",
        )
    if not _is_torn_guard(tail[found + END.size :], tail[: found + END.size]):
        raise Ambiguous(
            f"{source} has {len(tail) - found - END.size:,} bytes after the end of its zip archive",
            "Some readers would see another archive there.",
        )
    return tail_at + found


def _is_torn_guard(after: bytes, before: bytes) -> bool:
    """True for the beginning of one more copy of the end records, behind the hole that it was to protect; true for nothing at all."""
    copy = after.lstrip(b"\0")
    return len(copy) < END.size + LOCATOR.size and guard(before).startswith(copy)


def _read_directory(source: Source, end_at: int) -> Archive:
    _, disk, directory_disk, here, count, size, offset, comment = END.unpack(source.read(end_at, END.size))
    if comment:
        raise Ambiguous(
            f"{source} is cut off inside the comment of its zip archive, or hides something there",
            "torch writes no comments.",
        )
    directory_end, records_end = end_at, end_at + END.size
    first = source.read(end_at - LOCATOR.size, LOCATOR.size) if end_at >= LOCATOR.size else b""
    if first[:4] == b"PK\x06\x07":
        _, _, end64_at, disks = LOCATOR.unpack(first)
        if end64_at + END64.size > end_at:
            raise Corrupt(f"{source}: the zip64 locator points to byte {end64_at:,}, where there is no end record")
        signature, length, _, _, disk64, _, here64, count64, size64, offset64 = END64.unpack(
            source.read(end64_at, END64.size)
        )
        if signature != b"PK\x06\x06" or length != END64.size - 12 or disks > 1 or disk64:
            raise Corrupt(f"{source}: the zip64 end record at byte {end64_at:,} is damaged")
        for narrow, wide, full in (
            (here, here64, FULL16),
            (count, count64, FULL16),
            (size, size64, FULL),
            (offset, offset64, FULL),
        ):
            if narrow not in (full, wide):
                raise Ambiguous(
                    f"{source}: the two end records of the archive disagree ({narrow:,} and {wide:,})",
                    "Readers would see two archives.",
                )
        here, count, size, offset = here64, count64, size64, offset64
        directory_end, records_end = end64_at, end64_at + END64.size + LOCATOR.size + END.size
    elif FULL in (size, offset) or count == FULL16:
        raise Corrupt(f"{source}: the archive needs a zip64 end record and has none")
    elif offset + size < end_at and source.read(offset + size, END.size) == source.read(end_at, END.size):
        directory_end, records_end = offset + size, offset + size + END.size
    end_records = source.read(directory_end, records_end - directory_end)
    _check_end(source, end_at, records_end, end_records)
    if records_end != end_at + END.size and _ends_another(source, end_at, count, size):
        raise Ambiguous(
            f"{source} is two zip archives, one behind the other", "Some readers take the first, some the second."
        )
    if disk or directory_disk or here != count:
        raise Unsupported(f"{source} is one part of a split zip archive", "All parts would be needed.")
    if offset + size != directory_end:
        raise Ambiguous(
            f"{source}: the zip directory should end at byte {offset + size:,}, but its end record is at {directory_end:,}",
            "Bytes were put before or into the archive; readers disagree about what such a file holds.",
        )
    if count > MAX_ENTRIES or size > MAX_DIRECTORY:
        raise LimitExceeded(f"{source}: a zip directory of {count:,} entries and {size:,} bytes")
    archive = Archive(source, offset, records_end, end_records)
    _read_entries(archive, source.read(offset, size), count)
    return archive


def _check_end(source: Source, end_at: int, records_end: int, end_records: bytes) -> None:
    """The end records stand right behind the directory, or are the copy that an interrupted in-place edit put at the very end."""
    if records_end == end_at + END.size:
        return
    tail = end_records[-LOCATOR.size - END.size :]
    if records_end > end_at or source.read(end_at + END.size - len(tail), len(tail)) != tail:
        raise Ambiguous(
            f"{source} has bytes between its zip directory and the end record",
            "Two archives may have been put together; readers disagree.",
        )


def _ends_another(source: Source, end_at: int, count: int, size: int) -> bool:
    """True if the last end record, taken for a copy of the one before, has a directory of its own right before it."""
    end64_at = end_at - LOCATOR.size - END64.size
    if end64_at >= 0 and source.read(end64_at, 4) == b"PK\x06\x06":
        return True
    if count > MAX_ENTRIES or size > min(end_at, MAX_DIRECTORY):
        return False
    try:
        _read_entries(Archive(source, 0, 0, b""), source.read(end_at - size, size), count)
    except CkptoolError:
        return False
    return True


def _read_entries(archive: Archive, directory: bytes, count: int) -> None:
    unpack, fixed, records, at = CENTRAL.unpack_from, CENTRAL.size, archive.records, 0
    try:
        for _ in range(count):
            sig, _, _, flags, method, _, _, crc, stored, size, n, m, k, disk, _, _, header = unpack(directory, at)
            name_at = at + fixed
            if sig != b"PK\x01\x02" or disk or flags & 0x2061 or method not in (0, 8):
                _refuse_entry(archive, sig, flags, method, directory[name_at : name_at + n])
            name = str(directory[name_at : name_at + n], "utf-8")
            wide = FULL in (stored, size, header)
            if wide:
                stored, size, header = _zip64(
                    archive, name, directory[name_at + n : name_at + n + m], stored, size, header
                )
            if name in records:
                raise Ambiguous(
                    f"{archive.source} has two records named {printable(name)}",
                    "torch reads the first, Python's zipfile the last.",
                )
            records[name] = Record(
                archive, name, directory[at : at + fixed], flags, method, crc, stored, size, header, wide
            )
            at = name_at + n + m + k
    except (struct.error, UnicodeDecodeError):
        raise Corrupt(f"{archive.source}: entry {len(records):,} of the zip directory is damaged") from None
    if at != len(directory):
        raise Corrupt(
            f"{archive.source}: the zip directory has {len(directory) - at:,} bytes more than its {count:,} entries"
        )
    _check_names(archive)
    archive.has_checksums = any(record.crc for record in records.values())


def _check_names(archive: Archive) -> None:
    folded: dict[str, str] = {}
    for name in archive.records:
        if "\0" in name:
            raise Ambiguous(
                f"{archive.source}: the record name {printable(name)} holds a NUL",
                "torch reads it up to there, others as a whole.",
            )
        twin = folded.setdefault(name.lower(), name)
        if twin != name:
            raise Ambiguous(
                f"{archive.source} has the records {printable(twin)} and {printable(name)}",
                "torch takes names without regard to case.",
            )


def _refuse_entry(archive: Archive, signature: bytes, flags: int, method: int, name: bytes) -> NoReturn:
    shown = printable(name.decode("utf-8", "replace"))
    for bit, word in _REFUSED_FLAGS.items():
        if signature == b"PK\x01\x02" and flags & bit:
            raise Unsupported(f"{archive.source}: the record {shown} is {word}", "PyTorch files never are.")
    if signature == b"PK\x01\x02" and method not in (0, 8):
        raise Unsupported(
            f"{archive.source}: the record {shown} is compressed with method {method}",
            "Stored and deflated records are read.",
        )
    raise Corrupt(f"{archive.source}: entry {len(archive.records):,} of the zip directory is damaged")


def _zip64(archive: Archive, name: str, extra: bytes, stored: int, size: int, header: int) -> tuple[int, int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values: Iterator[int] = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            try:
                size = next(values) if size == FULL else size
                stored = next(values) if stored == FULL else stored
                header = next(values) if header == FULL else header
            except StopIteration:
                break
            return stored, size, header
        at += 4 + length
    raise Corrupt(f"{archive.source}: the record {printable(name)} lacks its 64-bit sizes")


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
        archive.notes.append(Note("superseded-pickle", message, ("ckptool", "convert", "{file}", "-o", "{out}")))
    if records and records[0].header != begins:
        raise Ambiguous(
            f"{archive.source} has {records[0].header - begins:,} bytes before its first record",
            "Some readers would see another file there.",
        )
    for record, after in zip(records, [*(r.header for r in records[1:]), archive.directory], strict=True):
        record.end = after
        record.data_at = after - record.descriptor_size - record.stored
        if not 0 <= record.data_at - record.header - LOCAL.size - len(record.name.encode()) <= FULL16:
            raise Corrupt(
                f"{archive.source}: the record {record} does not fit where the directory puts it (byte {record.header:,})",
                "Records overlap, or there are bytes between them that belong to none.",
            )


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
    if len(pickles) != 1 or pickles[0].header < END.size:
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


def guard(records: bytes) -> bytes:
    """What of an archive's end records has to be the last thing in a file for readers to find the archive (22 or 42 bytes)."""
    located = records[-LOCATOR.size - END.size :]
    return located if located[:4] == b"PK\x06\x07" else records[-END.size :]
