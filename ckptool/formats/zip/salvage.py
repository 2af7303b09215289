"""The records of a damaged zip, and what proves them.

A record's own header stands before its data and, in what torch writes, its size and checksum behind it; so the records
of a file that lost its directory can be walked one after the other. The pickle is the first of them: it says which
storages there are and how large each is, and with that the walk jumps from header to header and reads no data. It ends
where no header follows: what lies behind a hole is lost. Nothing is believed but what is proven: the data by its
checksum, the name by the directory or by the place in the order in which torch writes records (no checksum covers a
name). A zip inside of a tensor is never mistaken for the file itself.

Work is bounded: every byte is summed once, and searching ends after `BUDGET` times the size of the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from ckptool.checkpoint import Computed, Data, Storage, StorageRef
from ckptool.checkpoint.files import Readable
from ckptool.errors import CkptoolError, Corrupt
from ckptool.formats.checksums import checksums
from ckptool.formats.nested_streams import BUILDERS
from ckptool.formats.torch_zip import inflated_limit
from ckptool.formats.zip import directory, writer
from ckptool.formats.zip.directory import Archive
from ckptool.formats.zip.record import (
    CENTRAL,
    DESCRIPTOR,
    DESCRIPTOR64,
    END,
    END64,
    FULL,
    LOCAL,
    LOCATOR,
    Record,
    extra_fields,
    zip64_values,
)
from ckptool.pickles.decode import decode
from ckptool.pickles.torch_objects import storage_class

BUDGET = 4
FREE = 1 << 20
_CHUNK = 1 << 20
_WINDOW = 4 << 10
_STEP = 256  # what one step of a search costs, in bytes of reading
_MAX_NAME = 4_096
_PADDING = 0x4246  # "FB"
# Extra fields: padding, 64-bit sizes, and the times, owners and names that Info-ZIP writes.
_EXTRAS = frozenset((_PADDING, 0x0001, 0x000A, 0x5455, 0x5855, 0x7075, 0x7855, 0x7875))
SMALL = ("data.pkl", ".format_version", ".storage_alignment", "byteorder", "version", ".data/serialization_id")

CUT = "the file ends before it does"
DAMAGED = "its data does not match its checksum"
HEADER = "its header is damaged"
NO_SUM = "its checksum is damaged or cut off"
NO_NAME = "its name cannot be proven: its header or the directory is damaged"
TWICE = "two different records have its name"


@dataclass(slots=True, eq=False)
class Remnant:
    """A record, or the rest of one. Places and sizes in bytes.

    claims: what its header, descriptor or directory say is its CRC-32.  named: its name is proven.
    why: what is wrong with it, if anything.
    """

    name: str
    header: int
    data_at: int = 0
    stored: int = 0
    size: int = 0
    method: int = 0
    end: int = 0
    claims: tuple[int, ...] = ()
    named: bool = False
    why: str = ""
    crc: int = 0


@dataclass(slots=True, eq=False)
class Sizes:
    """The storages that a pickle names, by record, with their sizes, and the orders that they may have in a file."""

    root: str = ""
    of: dict[str, int] = field(default_factory=dict)
    orders: list[list[str]] = field(default_factory=list)
    places: list[dict[str, int]] = field(default_factory=list)

    def learn(self, root: str, sizes: dict[str, int]) -> None:
        """Adds what a pickle says. The orders are that of the pickle, which torch writes, and that of the numbers."""
        self.root = root
        self.of |= sizes
        self.orders = [list(self.of)]
        by_number = sorted(self.of, key=lambda name: (len(name), name))
        self.orders += [by_number] if by_number != self.orders[0] else []
        self.places = [{name: place for place, name in enumerate(order)} for order in self.orders]

    def follows(self, last: str | None, name: str) -> bool:
        """True if `name` is the next after `last` in one of the orders."""
        return any(at[name] == (at[last] + 1 if last else 0) for at in self.places)

    def after(self, last: str | None) -> str | None:
        """The next after `last`, as torch would write it."""
        at = self.places[0][last] + 1 if last and self.places else 0
        return self.orders[0][at] if self.orders and at < len(self.orders[0]) else None


class Walk:
    """Goes through a file from header to header, and ends where there is none. pieces: the records.

    states: the ends of complete archives inside it.  mentions: what directories say, by the place of a record's header.
    budget: bytes that may be searched.  most: records.
    """

    def __init__(self, source: Readable, budget: int, most: int = directory.MAX_ENTRIES) -> None:
        self.source, self.budget, self.most = source, budget, most
        self.pieces: list[Remnant] = []
        self.states: list[int] = []
        self.mentions: dict[int, tuple[str, int, int]] = {}
        self.sizes = Sizes()
        self.last: str | None = None  # the storage met last
        self.doubted: Remnant | None = None
        self.astray = False  # out of the order of storages, and no pickle is known
        self.tries = 0  # to read an archive inside the file
        self.chunk_at, self.chunk = 0, b""

    def run(self) -> Walk:
        at: int | None = 0
        while at is not None and at + LOCAL.size <= self.source.size and len(self.pieces) < self.most:
            piece = self._header(at)
            if piece is None:
                at = self._past_directory(at)
            else:
                at = self._measure(piece)
                self._meet(piece)
        if self.doubted is not None:
            self.doubted.named = False
        return self

    def _peek(self, at: int, length: int) -> bytes:
        """Up to `length` bytes, fewer at the end of the file."""
        if at >= self.source.size:
            return b""
        begin = at - self.chunk_at
        if begin < 0 or begin + length > len(self.chunk):
            self.chunk_at = at
            self.chunk = self.source.read(at, min(max(length, _WINDOW), self.source.size - at))
            begin = 0
        return self.chunk[begin : begin + length]

    def _header(self, at: int) -> Remnant | None:
        """The record with its header at `at`, not measured yet; None for a header that no usual writer makes."""
        raw = self._peek(at, LOCAL.size)
        if raw[:4] != b"PK\x03\x04" or len(raw) < LOCAL.size:
            return None
        _, _, flags, method, _, _, crc, stored, size, name_size, extra_size = LOCAL.unpack(raw)
        if flags & 0x2061 or method not in (0, 8) or not 0 < name_size <= _MAX_NAME:
            return None
        tail = self._peek(at + LOCAL.size, name_size + extra_size)
        try:
            name = tail[:name_size].decode()
        except UnicodeDecodeError:
            return None
        if "\0" in name or len(tail) < name_size or not _is_extra(tail[name_size:], extra_size):
            return None
        if FULL in (stored, size):
            size, stored, _ = zip64_values(tail[name_size:], size, stored, 0) or (size, stored, 0)
        claims = () if flags & 8 and not crc and not stored else (crc,)
        return Remnant(name, at, at + LOCAL.size + name_size + extra_size, stored, size, method, claims=claims)

    def _measure(self, piece: Remnant) -> int | None:
        """Finds out how long a record is; returns where the next one begins, None where that cannot be told."""
        known = self.sizes.of.get(piece.name)
        if piece.claims:
            if known not in (None, piece.size) or (not piece.method and piece.stored != piece.size):
                piece.why = HEADER
                return None
            return self._measured(piece, piece.stored)
        if known is None or piece.method:
            return self._search(piece)
        piece.stored = piece.size = known
        return self._measured(piece, known)

    def _measured(self, piece: Remnant, stored: int) -> int | None:
        """The offset of the next record after one of `stored` bytes; takes its checksum from its descriptor."""
        end = piece.end = piece.data_at + stored
        if end > self.source.size:
            piece.why = CUT
            return self.source.size
        if piece.claims and self._peek(end, 4) != b"PK\x07\x08":
            if stored or self._peek(end, 2) in (b"PK", b""):
                return end
            piece.why = HEADER  # nothing proves that there is nothing
            return None
        raw = self._peek(end, DESCRIPTOR64.size + 2)
        found = [layout for layout in (DESCRIPTOR, DESCRIPTOR64) if _describes(raw, layout, stored, bool(piece.method))]
        # The descriptor of an empty record may fit both layouts.
        found.sort(key=lambda layout: raw[layout.size : layout.size + 2] != b"PK")
        if found:
            _, crc, _, size = found[0].unpack_from(raw)
            piece.claims, piece.size, piece.end = (crc,), size, end + found[0].size
            return piece.end
        if piece.claims:
            return end
        piece.why = NO_SUM
        return end + len(writer.descriptor(0, stored, piece.header))

    def _search(self, piece: Remnant) -> int | None:
        """Looks for the descriptor of a record whose size nobody knows: the one that says that it is where it is."""
        at = piece.data_at
        while at + DESCRIPTOR.size <= self.source.size and self.budget > 0:
            if not self.chunk_at <= at or self.chunk_at + len(self.chunk) < at + 4:
                self.chunk_at = at
                self.chunk = self.source.read(at, min(_CHUNK, self.source.size - at))
            found = self.chunk.find(b"PK\x07\x08", at - self.chunk_at)
            stop = self.chunk_at + (found if found >= 0 else len(self.chunk) - 3)
            self.budget -= stop - at + _STEP
            if found >= 0:
                stored, raw = stop - piece.data_at, self._peek(stop, DESCRIPTOR64.size)
                if any(_describes(raw, layout, stored, bool(piece.method)) for layout in (DESCRIPTOR, DESCRIPTOR64)):
                    piece.stored = piece.size = stored
                    return self._measured(piece, stored)
                stop += 1
            at = stop
        piece.why = CUT
        return None

    def _meet(self, piece: Remnant) -> None:
        """Enters a record, and decides by the order whether its name can be right."""
        self.pieces.append(piece)
        if not piece.why and is_pickle(piece.name):
            # An in-place edit puts a new one behind the directory; any other is of a zip in one of the records.
            names = (before.name for before in self.pieces[:-1])
            if self.tries if self.sizes.root else not any(is_pickle(name) or "/data/" in name for name in names):
                self.learn(piece)
            else:
                self.astray = True
        inner = piece.name.removeprefix(self.sizes.root) if self.sizes.root else piece.name.partition("/")[2]
        if piece.name in self.sizes.of:
            self._take_in_order(piece)
        elif self.sizes.root:
            piece.named = True  # no tensor is behind it
            if inner[:1] != "." and inner not in SMALL and self.sizes.after(self.last):
                self._take_in_order(piece)  # a storage of which the name is damaged
        else:
            number = inner.removeprefix("data/")
            if number != inner and not self.astray:
                self.astray = number != str(int(self.last or -1) + 1)  # as torch numbers storages
                if self.astray and self.last is not None:
                    self.pieces[-2].named = False  # as in _take_in_order
                self.last = number if not self.astray else self.last
            piece.named = not self.astray

    def _take_in_order(self, piece: Remnant) -> None:
        """Believes the name that comes next. Where another comes, the record before is in doubt as well.

        Bytes that are missing from the middle of a file put the data of one record behind the header of another.
        """
        piece.named = piece.name in self.sizes.of and self.sizes.follows(self.last, piece.name)
        if self.doubted is not None and not piece.named:
            self.doubted.named = False
        before = self.pieces[-2] if len(self.pieces) > 1 else None
        self.doubted = before if not piece.named and before is not None and before.name == self.last else None
        self.last = piece.name if piece.named else self.sizes.after(self.last) or self.last

    def learn(self, piece: Remnant) -> None:
        """Reads the pickle for the sizes of the storages. A damaged one teaches nothing."""
        record = record_of(Archive(self.source, 0, 0, b""), piece)
        if piece.size > inflated_limit(piece.stored):
            return
        (total,) = checksums([record.data])
        if total != piece.claims[0] != 0:
            return
        root = piece.name.removesuffix("data.pkl")
        self.sizes.learn(root, sizes_in(record.data, f"{root}data/", self.source))
        self.last = self.last if self.last in self.sizes.of else None

    def _past_directory(self, at: int) -> int | None:
        """Reads the directory at `at` and the end records behind it, as far as they are good; None if there is none."""
        begin = at
        while (raw := self._peek(at, CENTRAL.size))[:4] == b"PK\x01\x02" and len(raw) == CENTRAL.size:
            *_, crc, _, size, n, m, k, _, _, _, header = CENTRAL.unpack(raw)
            extra = self._peek(at + CENTRAL.size, n + m)
            if FULL in (size, header):
                size, _, header = zip64_values(extra[n:], size, 0, header) or (size, 0, header)
            self.mentions[header] = (extra[:n].decode("utf-8", "replace"), crc, size)
            at += CENTRAL.size + n + m + k
        for signature, layout in ((b"PK\x06\x06", END64), (b"PK\x06\x07", LOCATOR), (b"PK\x05\x06", END)):
            if self._peek(at, 4) == signature:
                at += layout.size
                if layout is END and at <= self.source.size and self._is_state(at):
                    self.states.append(at)
        return min(at, self.source.size) if at > begin else None

    def _is_state(self, end: int) -> bool:
        self.tries += 1
        if self.tries > directory.MAX_EDITS:
            return False
        try:
            directory.read_archive(self.source.file.part(self.source.start, end))
        except CkptoolError:
            return False
        return True


def is_pickle(name: str) -> bool:
    return name.endswith("/data.pkl") and name.count("/") == 1


def _describes(raw: bytes, layout: struct.Struct, stored: int, deflated: bool) -> bool:
    """True if `raw` begins with a descriptor of data that is stored in so many bytes."""
    if len(raw) < layout.size:
        return False
    signature, _, one, other = layout.unpack_from(raw)
    return bool(signature == b"PK\x07\x08" and one == stored and (deflated or other == stored))


def _is_extra(extra: bytes, size: int) -> bool:
    """True for an extra field of a writer of checkpoints: a wrong length would lead to another record's data."""
    fields = extra_fields(extra)
    whole = len(extra) == size == sum(4 + len(content) for _, content in fields)
    return whole and all(
        kind in _EXTRAS and (kind != _PADDING or not content.strip(b"Z\0")) for kind, content in fields
    )


def sizes_in(data: Data, prefix: str, source: Readable) -> dict[str, int]:
    """The records that a pickle names, with their sizes in bytes; none where it cannot be read."""
    sizes: dict[str, int] = {}

    def load(pid: Any) -> StorageRef:
        try:
            _, cls, key, location, numel = pid[:5]
            known, dtype = storage_class(cls)
        except (TypeError, ValueError):
            raise Corrupt("a persistent id that names no storage") from None
        if not (known and type(key) is str and type(location) is str and type(numel) is int and 0 <= numel < 1 << 62):
            raise Corrupt("a persistent id that names no storage")
        length = sizes.setdefault(prefix + key, numel * (dtype.itemsize if dtype else 1))
        return StorageRef(Storage(Computed(length, _nothing), location), dtype)

    try:
        decode(data.read(0, data.length), load, BUILDERS, file_bytes=source.size)
    except CkptoolError:
        return {}
    return sizes


def _nothing(offset: int, length: int) -> bytes:
    raise Corrupt("a record that is not in the file", "Its data is lost.")


def record_of(archive: Archive, piece: Remnant) -> Record:
    """The record that a piece is, taken as it is: its header and the directory are not compared any more."""
    record = Record(archive, piece.name, b"", 0, piece.method, piece.crc, piece.stored, piece.size, piece.header, False)
    record.data_at, record.end = piece.data_at, piece.end
    record.is_confirmed = True
    return record
