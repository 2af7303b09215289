"""A new zip archive: records laid out one after the other, so that each one's place, and the directory, is known before a byte is written.

Records are stored, with the headers and descriptors that torch would write; `zip_parts` has those.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

from ckptool.checkpoint import Data, InlineBytes, Storage
from ckptool.checkpoint.plan import Checksummed, Crc, Deferred, Plan, Segment
from ckptool.formats import zip_parts
from ckptool.formats.sums import joined_sum
from ckptool.formats.zip_records import Record


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
            total.expected = joined_sum(total.value, crc, data.length)
        record = _NewRecord(self, name, head, data, self.at, total)
        self._segments.append(record)
        self._enter(record)
        self.at += sum(segment.length for segment in record.segments())

    def add_late(self, name: str, length: int, make: Callable[[Sequence[int]], bytes]) -> None:
        """A record of `length` bytes that `make` gives when those before it have passed, from their checksums in order."""
        before = [part.total for part in self._segments if isinstance(part, _NewRecord)]
        record = _LateRecord(self, name, length, self.at, lambda: make([total.value for total in before]))
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
        self._enter(zip_parts.moved_entry(record, at))

    def _enter(self, line: bytes | _NewRecord) -> None:
        self._entries.append(line)
        self._directory_size += len(line if isinstance(line, bytes) else line.entry())

    def finish(self, checks: Sequence[Storage] = ()) -> Plan:
        """The plan of everything that was added, the directory and the end records. checks: see `Plan`."""
        entries, size = self._entries, self._directory_size

        def directory() -> bytes:
            return b"".join(entry if isinstance(entry, bytes) else entry.entry() for entry in entries)

        self._segments.append(Deferred(size, directory))
        self._segments.append(InlineBytes(zip_parts.end_records(len(entries), self.at, size)))
        return Plan({"": _Segments(self._segments)}, list(checks))


class _NewRecord:
    """A record of our own. What stands around its data is made when it is asked for: a layout may have 50,000 of them."""

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
        yield InlineBytes(zip_parts.local_header(self.name, self.at, self.size, self.layout.alignment))
        if self.head:
            yield InlineBytes(self.head)
        if self.data.length:
            yield Checksummed(self.data, self.total)
            yield Deferred(len(self.descriptor()), self.descriptor)
        else:
            yield InlineBytes(self.descriptor())

    def descriptor(self) -> bytes:
        return zip_parts.descriptor(self.crc, self.size, self.at)

    def entry(self) -> bytes:
        """Its line in the directory."""
        return zip_parts.central_entry(self.name, self.crc, self.size, self.at)


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
        yield InlineBytes(zip_parts.local_header(self.name, self.at, self.size, self.layout.alignment))
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
