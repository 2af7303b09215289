"""A record of a zip archive: where its bytes are, whether they are really there, and what they inflate to.

The directory says where a record's header is and how large its data. The header stands before the data and repeats most
of it; some readers believe the one, some the other. Here the bytes of a record are used only when both agree.

Sources: PKWARE APPNOTE 6.3.10; caffe2/serialize/inline_container.cc and miniz for what torch writes; Lib/zipfile for
what Python does.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from ckptool.checkpoint import Computed, Data, FileRange
from ckptool.errors import Ambiguous, Corrupt, LimitExceeded, printable
from ckptool.facts import dataclass

if TYPE_CHECKING:
    from ckptool.formats.zip.directory import Archive

LOCAL = struct.Struct("<4s5H3I2H")  # signature, version, flags, method, time, date, crc, stored, size, name, extra
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")  # of END64
DESCRIPTOR, DESCRIPTOR64 = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
# Data descriptors by their size: checksum, stored size, size. Some writers leave the signature before them out.
DESCRIPTORS = {each.size: each for each in (DESCRIPTOR, DESCRIPTOR64, struct.Struct("<3I"), struct.Struct("<I2Q"))}
FULL = 0xFFFFFFFF
FULL16 = 0xFFFF

_MAY_DIFFER = 0x0806  # between header and directory: UTF-8 names, and how hard it was tried to compress
_INFLATED = 1 << 18  # bytes at a time


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """An entry of the directory. Sizes and offsets in bytes; `data_at` is not certain before `confirm`.

    central: the 46 fixed bytes of its entry.  header: the byte of its local header.  zip64: it has 64-bit values.
    end: the byte after its descriptor.  is_used: somebody has asked for its data.
    """

    archive: Archive
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
    _data: Data | None = None

    def __str__(self) -> str:
        return printable(self.name)

    @property
    def data(self) -> Data:
        """The record's contents, inflated if need be, not read yet. Always the same object."""
        if self._data is None:
            source = self.archive.source
            raw = FileRange(source.file, source.start + self.data_at, self.stored, self.confirm)
            self._data, self.is_used = inflated(self, raw) if self.method else raw, True
        return self._data

    def contents(self, limit: int) -> bytes:
        """All of a small record, its checksum verified (unless the archive has none)."""
        if self.size > limit:
            what = f"{self.archive.source}: {self} is {self.size:,} bytes when unpacked; at most {limit:,} are read"
            raise LimitExceeded(what, "Real records of this kind are never this large; the file is probably malicious.")
        data = self.data.read(0, self.size)
        if self.archive.has_checksums and zlib.crc32(data) != self.crc:
            self.wrong("does not match its checksum")
        return data

    def place(self, end: int, by_header: bool) -> None:
        """Places the data so that it, with its descriptor, ends where the next record begins.

        by_header: behind the record's own header instead; the descriptor is then what is left until `end`.
        """
        self.end = end
        self.data_at = end - self.descriptor_size - self.stored
        if by_header and (fits := end - self.header >= LOCAL.size):
            name_size, extra_size = LOCAL.unpack(self.archive.source.read(self.header, LOCAL.size))[-2:]
            self.data_at = self.header + LOCAL.size + name_size + extra_size
            self.descriptor_size = end - self.data_at - self.stored
            fits = self.descriptor_size in DESCRIPTORS
        elif not by_header:
            fits = 0 <= self.data_at - self.header - LOCAL.size - len(self.name.encode()) <= FULL16
        if not fits:
            if self.header + LOCAL.size <= self.archive.directory:
                self.confirm(name_alone=True)  # with a longer or shorter name, it cannot fit
            what = f"the record {self} does not fit where the directory puts it (byte {self.header:,})"
            why = "Records overlap, or there are bytes between them that belong to none."
            raise Corrupt(f"{self.archive.source}: {what}", why)

    def confirm(self, *, name_alone: bool = False) -> None:
        """Compares the record's own header and descriptor with the directory; raises `Ambiguous` or `Corrupt`."""
        if self.is_confirmed:
            return
        source, peek, name = self.archive.source, self.archive.peek, self.name.encode()
        head = peek(self.header, min(LOCAL.size + len(name), source.size - self.header))
        if len(head) < LOCAL.size or head[:4] != b"PK\x03\x04":
            self.wrong(f"has no header at byte {self.header:,}")
        _, _, flags, method, _, _, crc, stored, size, name_size, extra_size = LOCAL.unpack_from(head)
        if head[LOCAL.size :] != name or name_size != len(name):
            what = f"{source}: the record {self} has another name in its own header"
            raise Ambiguous(what, "Some readers would take one name, some the other, and see two different files.")
        if name_alone:
            return
        if method != self.method or flags & ~_MAY_DIFFER != self.flags & ~_MAY_DIFFER:
            self.wrong("says in its header that it is stored in another way")
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
            self.wrong("has another size or checksum in its own header than in the directory")
        if layout:
            *signature, crc, stored, size = layout.unpack(peek(data_at + self.stored, layout.size))
            if signature not in ([], [b"PK\x07\x08"]):
                self.wrong("has no descriptor after its data")
            if (crc, stored, size) != expected:
                self.wrong("has another size or checksum in its descriptor than in the directory")
        self.is_confirmed = True

    def wrong(self, what: str) -> NoReturn:
        raise Corrupt(f"{self.archive.source}: the record {self} {what}", "The archive is damaged or malicious.")


def zip64_values(extra: bytes, size: int, stored: int, header: int) -> tuple[int, int, int] | None:
    """Size, stored size and header with the values of the zip64 extra field where the given ones are full.

    None without such a field, with two, and with one that is too short.
    """
    found = [value for kind, value in extra_fields(extra) if kind == 1]
    short = (size, stored, header)
    if len(found) != 1 or len(found[0]) // 8 < short.count(FULL):
        return None
    following = struct.iter_unpack("<Q", found[0][: len(found[0]) // 8 * 8])
    size, stored, header = (next(following)[0] if value == FULL else value for value in short)
    return size, stored, header


def extra_fields(extra: bytes) -> list[tuple[int, bytes]]:
    """The fields of an entry that are whole: kind and contents."""
    found, at = [], 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if at + 4 + length > len(extra):
            break
        found.append((kind, extra[at + 4 : at + 4 + length]))
        at += 4 + length
    return found


def inflated(record: Record, raw: FileRange) -> Computed:
    """The bytes of a deflated record, quickest front to back; going back starts over.

    Each thread reads at a place of its own: one may read ahead while another checks the sum.
    """
    threads = threading.local()

    def read(offset: int, length: int) -> bytes:
        at, rest, chunks = threads.__dict__.pop("place", (0, memoryview(b""), None))
        if chunks is None or offset < at:
            at, rest, chunks = 0, memoryview(b""), _chunks(record, raw)
        parts, end = [], min(offset + length, record.size)
        while at < end:
            rest = rest or memoryview(next(chunks))
            taken = min(len(rest), end - at)
            parts.append(rest[max(0, offset - at) : taken])
            at, rest = at + taken, rest[taken:]
        if at == record.size:
            next(chunks, None)  # sees to it that nothing follows
        threads.place = at, rest, chunks
        return b"".join(parts)

    return Computed(record.size, read)


def _chunks(record: Record, raw: FileRange) -> Iterator[bytes]:
    """A deflated record piece by piece; raises `Corrupt` unless it has the promised size and nothing behind it."""

    def wrong(what: str) -> NoReturn:
        raise Corrupt(f"{record.archive.source}: {record} {what}", "Its compressed data was damaged.")

    stream, packed, taken, given = zlib.decompressobj(-15), b"", 0, 0
    while not stream.eof:
        if not packed and taken < raw.length:
            packed = raw.read(taken, 1 << 16)
            taken += len(packed)
        try:
            chunk = stream.decompress(packed, min(_INFLATED, record.size - given) or 1)
        except zlib.error as error:
            wrong(f"cannot be inflated: {error}")
        packed = stream.unconsumed_tail
        given += len(chunk)
        if given > record.size:
            wrong(f"inflates to more than {record.size:,} bytes")
        if chunk:
            yield chunk
        elif not packed and taken == raw.length:
            break
    if given < record.size:
        wrong(f"inflates to {given:,} bytes, not {record.size:,}")
    if not stream.eof:
        wrong("ends in the middle of its compressed data")
    if stream.unused_data or taken < raw.length:
        wrong("has bytes after the end of its compressed data")
