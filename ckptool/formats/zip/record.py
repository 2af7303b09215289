"""A record of a zip archive: where its bytes are, whether they are really there, and what they inflate to.

The directory says where a record's header is and how large its data. The header stands before the data and repeats most
of it; some readers believe the one, some the other. Here the bytes of a record are used only when both agree.

Sources: PKWARE APPNOTE 6.3.10; caffe2/serialize/inline_container.cc and miniz for what torch writes; Lib/zipfile for
what Python does.
"""

from __future__ import annotations

import re
import struct
import threading
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from ckptool.checkpoint import Computed, Data, FileRange, Note
from ckptool.commands import FILE, OUT, command
from ckptool.errors import Ambiguous, Corrupt, LimitExceeded, counted, listed, printable

if TYPE_CHECKING:
    from ckptool.formats.zip.directory import Archive

LOCAL = struct.Struct("<4s5H3I2H")  # signature, version, flags, method, time, date, crc, stored, size, name, extra
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")  # of END64
DESCRIPTOR, DESCRIPTOR64 = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
FULL = 0xFFFFFFFF
FULL16 = 0xFFFF

_HAS_DESCRIPTOR = 0x0008
_MAY_DIFFER = 0x0806  # between header and directory: UTF-8 names, and how hard it was tried to compress
# Some writers leave the signature out: 12 and 20 bytes.
_UNSIGNED = {12: struct.Struct("<3I"), 20: struct.Struct("<I2Q")}
_SIGNED = {DESCRIPTOR.size: DESCRIPTOR, DESCRIPTOR64.size: DESCRIPTOR64}
_ZIP64_VERSION = 45


class Record:
    """An entry of the directory. Sizes and offsets in bytes; `data_at` is not certain before `confirm`."""

    __slots__ = (
        "_confirmed", "_data", "archive", "central", "crc", "data_at", "descriptor_size", "end", "flags", "header",
        "method", "name", "size", "stored", "zip64",
    )  # fmt: skip

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
        zip64: bool,
    ) -> None:
        """central: the 46 fixed bytes of its entry.  header: the byte of its local header.  zip64: it has 64-bit
        values."""
        self.archive, self.name, self.central, self.flags, self.method = archive, name, central, flags, method
        self.crc, self.stored, self.size, self.header, self.zip64 = crc, stored, size, header, zip64
        # As torch writes it.
        self.descriptor_size = 0 if not flags & _HAS_DESCRIPTOR else DESCRIPTOR64.size if zip64 else DESCRIPTOR.size
        self.data_at = self.end = 0
        self._confirmed = False
        self._data: Data | None = None

    def __str__(self) -> str:
        return printable(self.name)

    @property
    def is_used(self) -> bool:
        """True once somebody has asked for its data."""
        return self._data is not None

    @property
    def data(self) -> Data:
        """The record's contents, inflated if need be, not read yet. Always the same object."""
        if self._data is None:
            source = self.archive.source
            raw = FileRange(source.file, source.start + self.data_at, self.stored, self.confirm)
            self._data = raw if self.method == 0 else inflated(self, raw)
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

    # Where it is -----------------------------------------------------------------------------------------------------

    @property
    def has_usual_descriptor(self) -> bool:
        """False where the directory does not tell the descriptor's size: writers of zip64 may use 64 bits at any
        size."""
        return self.central[6] < _ZIP64_VERSION

    @property
    def is_torch_like(self) -> bool:
        """True if a reader that knows the record's directory entry alone knows how large its descriptor is."""
        return not self.descriptor_size or (self.has_usual_descriptor and self.descriptor_size not in _UNSIGNED)

    def place_by_directory(self, end: int) -> None:
        """Places the data so that it, with the descriptor, ends where the next record begins."""
        self.end = end
        self.data_at = end - self.descriptor_size - self.stored
        if not 0 <= self.data_at - self.header - LOCAL.size - len(self.name.encode()) <= FULL16:
            self._does_not_fit()

    def place_by_local_header(self, end: int) -> None:
        """Places the data behind the record's own header; the descriptor is then what is left until `end`."""
        self.end = end
        if end - self.header < LOCAL.size:
            self._does_not_fit()
        name_size, extra_size = LOCAL.unpack(self.archive.source.read(self.header, LOCAL.size))[-2:]
        self.data_at = self.header + LOCAL.size + name_size + extra_size
        self.descriptor_size = end - self.data_at - self.stored
        if self.descriptor_size not in _SIGNED and self.descriptor_size not in _UNSIGNED:
            self._does_not_fit()

    def has_signed_descriptor(self, end: int) -> bool:
        """True if there is a descriptor with its signature right before `end`."""
        at = end - self.descriptor_size
        return (
            self.header <= at and end <= self.archive.source.size and self.archive.source.read(at, 4) == b"PK\x07\x08"
        )

    def _does_not_fit(self) -> NoReturn:
        if self.header + LOCAL.size <= self.archive.directory:
            self._own_header()  # with a longer or shorter name, it cannot fit
        raise Corrupt(
            f"{self.archive.source}: the record {self} does not fit where the directory puts it (byte {self.header:,})",
            "Records overlap, or there are bytes between them that belong to none.",
        )

    def wrong(self, what: str) -> NoReturn:
        raise Corrupt(f"{self.archive.source}: the record {self} {what}", "The archive is damaged or malicious.")

    # Whether it is there ---------------------------------------------------------------------------------------------

    def confirm(self) -> None:
        """Compares the record's own header and descriptor with the directory; raises `Ambiguous` or `Corrupt`."""
        if self._confirmed:
            return
        flags, method, crc, stored, size, name_size, extra_size = self._own_header()
        if method != self.method or flags & ~_MAY_DIFFER != self.flags & ~_MAY_DIFFER:
            self.wrong("says in its header that it is stored in another way")
        data_at = self.header + LOCAL.size + name_size + extra_size
        if data_at != self.data_at:
            self.wrong(f"begins at byte {data_at:,}, not {self.data_at:,} as the directory has it")
        self._compare(crc, stored, size, extra_size)
        self._confirmed = True

    def _own_header(self) -> tuple[int, int, int, int, int, int, int]:
        """Flags, method, checksum, stored size, size, lengths of name and extra field in a header of the right name."""
        source = self.archive.source
        raw_name = self.name.encode()
        head = source.read(self.header, min(LOCAL.size + len(raw_name), source.size - self.header))
        if len(head) < LOCAL.size or head[:4] != b"PK\x03\x04":
            self.wrong(f"has no header at byte {self.header:,}")
        _, _, flags, method, _, _, crc, stored, size, name_size, extra_size = LOCAL.unpack_from(head)
        if head[LOCAL.size :] != raw_name or name_size != len(raw_name):
            what = f"{source}: the record {self} has another name in its own header"
            raise Ambiguous(what, "Some readers would take one name, some the other, and see two different files.")
        return flags, method, crc, stored, size, name_size, extra_size

    def _compare(self, crc: int, stored: int, size: int, extra_size: int) -> None:
        """Compares checksum and sizes in the header and the descriptor with the directory."""
        expected = self.crc, self.stored, self.size
        if not self.descriptor_size:
            if FULL in (stored, size):
                extra = self.archive.source.read(self.data_at - extra_size, extra_size)
                size, stored, _ = zip64_values(extra, size, stored, 0) or (size, stored, 0)
            if (crc, stored, size) != expected:
                self.wrong("has another size or checksum in its own header than in the directory")
            return
        if crc not in (0, self.crc) or stored not in (0, FULL, self.stored) or size not in (0, FULL, self.size):
            self.wrong("has another size or checksum in its own header than in the directory")
        raw = self.archive.source.read(self.data_at + self.stored, self.descriptor_size)
        if signed := _SIGNED.get(self.descriptor_size):
            signature, *said = signed.unpack(raw)
            if signature != b"PK\x07\x08":
                self.wrong("has no descriptor after its data")
        else:
            said = list(_UNSIGNED[self.descriptor_size].unpack(raw))
        if tuple(said) != expected:
            self.wrong("has another size or checksum in its descriptor than in the directory")


def zip64_values(extra: bytes, size: int, stored: int, header: int) -> tuple[int, int, int] | None:
    """Size, stored size and header with the values of the zip64 extra field where the given ones are full.

    None without such a field, with two, and with one that is too short.
    """
    found = [value for kind, value in extra_fields(extra) if kind == 1]
    if len(found) != 1:
        return None
    values = [value for (value,) in struct.iter_unpack("<Q", found[0][: len(found[0]) // 8 * 8])]
    if len(values) < (size, stored, header).count(FULL):
        return None
    following = iter(values)
    size, stored, header = (next(following) if short == FULL else short for short in (size, stored, header))
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
    """The bytes of a deflated record. Each thread reads at a place of its own: one may read ahead while another checks
    the sum."""
    threads = threading.local()

    def read(offset: int, length: int) -> bytes:
        if not hasattr(threads, "inflater"):
            threads.inflater = _Inflater(record, raw)
        inflater: _Inflater = threads.inflater
        return inflater.read(offset, length)

    return Computed(record.size, read)


class _Inflater:
    """Random access to a deflated record, quickest front to back; going back starts over. For one thread."""

    def __init__(self, record: Record, raw: FileRange) -> None:
        self.record, self.raw = record, raw
        self.whole = False  # it was seen to end where it should
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
        if self.at == self.record.size and not self.whole:
            self._finish()
        return b"".join(parts)

    def _next(self, most: int) -> bytes:
        while True:
            out = self._inflate(most)
            if out:
                self.at += len(out)
                return out
            if self.stream.eof or (not self.pending and self.taken == self.raw.length):
                self._wrong(f"inflates to {self.at:,} bytes, not {self.record.size:,}")

    def _inflate(self, most: int) -> bytes:
        if not self.pending and self.taken < self.raw.length:
            self.pending = self.raw.read(self.taken, 1 << 16)
            self.taken += len(self.pending)
        try:
            out = self.stream.decompress(self.pending, most)
        except zlib.error as error:
            self._wrong(f"cannot be inflated: {error}")
        self.pending = self.stream.unconsumed_tail
        return out

    def _finish(self) -> None:
        """Sees to it that nothing follows the last byte that the directory promises."""
        while not self.stream.eof:
            if self._inflate(1):
                self._wrong(f"inflates to more than {self.record.size:,} bytes")
            ended: bool = self.stream.eof
            if not ended and not self.pending and self.taken == self.raw.length:
                self._wrong("ends in the middle of its compressed data")
        if self.stream.unused_data or self.taken < self.raw.length:
            self._wrong("has bytes after the end of its compressed data")
        self.whole = True

    def _wrong(self, what: str) -> NoReturn:
        raise Corrupt(f"{self.record.archive.source}: {self.record} {what}", "Its compressed data was damaged.")


# Names and attributes ------------------------------------------------------------------------------------------------

_UNICODE_PATH = 0x7075  # Info-ZIP's extra field with another name for the record
_FOLDER, _LINK = 0x10, 0xA  # in the external attributes: a bit of DOS at the bottom, a file type of Unix at the top
# What a program that unpacked the archive might follow out of its folder, or take for a folder.
LEADS_ELSEWHERE = r"(?m)(?:^|[/\\])\.\.(?:[/\\]|$)|^/|\\|^[A-Za-z]:"


def check_attributes(archive: Archive, record: Record, attributes: int) -> None:
    """Looks at what an entry says of the file that the record was; raises `Ambiguous` for a folder with contents."""
    if attributes >> 28 == _LINK:
        archive.links.append(record)
    if attributes & _FOLDER:
        _check_folder(record)


def _check_folder(record: Record) -> None:
    if record.size:
        what = f"{record.archive.source}: the record {record} is marked as a folder and has contents"
        raise Ambiguous(what, "torch would return uninitialized memory for it; other readers read it.")


def bad_entry(archive: Archive, name: str, what: str) -> Corrupt:
    return Corrupt(f"{archive.source}: the record {name} {what}")


def check_spelling(archive: Archive, raw: bytes, extra: bytes) -> None:
    """Raises `Ambiguous` for a name beyond ASCII that is not marked as UTF-8: many readers use a DOS code page."""
    if not any(kind == _UNICODE_PATH and content[5:] == raw for kind, content in extra_fields(extra)):
        what = f"{archive.source}: the record name {raw.decode()} does not say that it is UTF-8"
        raise Ambiguous(what, "torch and others would read two different names.")


def check_extra(archive: Archive, name: str, extra: bytes) -> None:
    """Raises `Corrupt` or `Ambiguous` for an extra field that does not fit, or has another name for the record."""
    fields = extra_fields(extra)
    if len(extra) - sum(4 + len(content) for _, content in fields) >= 4:
        raise bad_entry(archive, name, "has an extra field that is longer than its entry")
    for kind, content in fields:
        if kind == _UNICODE_PATH and content[5:] != name.encode():
            what = f"{archive.source}: the record {name} has another name in its extra field"
            raise Ambiguous(what, "Some readers take one, some the other.")


def check_names(archive: Archive) -> None:
    """Raises `Corrupt` or `Ambiguous` for names that no two readers take alike."""
    if "" in archive.records:
        raise Corrupt(f"{archive.source}: a record has no name")
    together = "\n".join(archive.records) + "\n"
    if "\0" not in together and "/\n" not in together:  # one search, where there are tens of thousands of names
        return
    for name, record in archive.records.items():
        if "\0" in name:
            what = f"{archive.source}: the record name {name} holds a NUL"
            raise Ambiguous(what, "torch reads it up to there, others as a whole.")
        if name.endswith("/"):
            _check_folder(record)


def refuse_equal_but_for_case(archive: Archive) -> None:
    """Raises `Ambiguous` for names that are one to a reader without regard to case, as torch is."""
    if len(set(map(str.lower, archive.records))) == len(archive.records):
        return
    folded: dict[str, str] = {}
    for name in archive.records:
        other = folded.setdefault(name.lower(), name)
        if other != name:
            what = f"{archive.source} has the records {other} and {name}"
            raise Ambiguous(what, "torch takes names without regard to case.")


def odd_entries(archive: Archive) -> Iterator[Note]:
    """Notes what is harmless here, where nothing is unpacked, and should be known before another program unpacks it."""
    if re.search(LEADS_ELSEWHERE, "\n".join(archive.records)):
        names = [name for name in archive.records if re.search(LEADS_ELSEWHERE, name)]
        if names:
            what = "could lead another program out of its folder"
            yield Note("unsafe-record-names", f"{counted(len(names), 'record name')} {what}: {listed(names, 3)}")
    if archive.links:
        what = f"{counted(len(archive.links), 'record is', 'records are')} marked as symbolic links, which is ignored"
        message = f"{what}: {listed(archive.links, 3)}"
        yield Note("symlink-records", message, command("convert", FILE, out=OUT))
