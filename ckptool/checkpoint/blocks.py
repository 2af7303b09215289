"""The bytes of data, read in blocks, front to back; comparing it; checksums; and plans of files to write."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from ckptool.checkpoint import Computed, Data, FileRange, InlineBytes, Note, Storage, TensorEntry
from ckptool.checkpoint.files import Source, unchanged
from ckptool.checkpoint.progress import passes
from ckptool.commands import FILE, command
from ckptool.errors import Corrupt
from ckptool.facts import dataclass, field

if TYPE_CHECKING:
    import hashlib
    from concurrent.futures import ThreadPoolExecutor

BLOCK = 512 << 10  # bytes at a time: they stay in the processor's cache while they are worked on
_READ = 128 << 10  # bytes of each side compared at a time; both stay in the cache
_WORTH_A_THREAD = 2 << 20
MAX_CHECKED = 64 << 20  # bytes of a storage whose checksum is verified when any part of it is read


def fill(data: Data, offset: int, buffer: memoryview) -> None:
    """Fills `buffer` (bytes) with what `data` holds from `offset`, without another copy where it is in a file."""
    if isinstance(data, FileRange):
        data.ready()
        data.file.read_into(data.offset + offset, buffer)
        if passes:
            passes[-1].counted += len(buffer)
        return
    filled, view = 0, data.view if isinstance(data, Computed) else None
    while missing := len(buffer) - filled:
        part = data.read(offset + filled, min(BLOCK, missing)) if view is None else view(offset + filled, missing)
        if not part:
            raise Corrupt(f"{data.length:,} bytes were expected, {offset + filled:,} arrived")
        buffer[filled : filled + len(part)] = part
        filled += len(part)


def blocks(data: Data, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
    """The bytes of `data` from `start` to `stop`, in order, in one buffer that is filled again for each block."""
    end = data.length if stop is None else stop
    memory = memoryview(bytearray(max(0, min(BLOCK, end - start))))
    for offset in range(start, end, BLOCK):
        block = memory[: end - offset]
        fill(data, offset, block)
        yield block


# Comparing ------------------------------------------------------------------------------------------------------------


def same_bytes(a: Data, b: Data) -> bool:
    """True if both hold the same bytes; stops at the first difference."""
    if a is b:
        return True
    if a.length != b.length:
        return False
    if isinstance(a, FileRange) and isinstance(b, FileRange) and a.offset == b.offset and a.file.is_same(b.file):
        return True
    if isinstance(a, InlineBytes) and isinstance(b, InlineBytes):
        return a.content == b.content
    differences: list[int] = []  # places at which either half differs: the other half then stops
    if a.length < _WORTH_A_THREAD or not (isinstance(a, FileRange) and isinstance(b, FileRange)):
        return _same_part(a, b, 0, a.length, differences)
    # Nearly all of the time goes into copying from the page cache, which two cores do faster than one.
    half = a.length // 2
    later = _second_reader().submit(_same_part, a, b, half, a.length, differences)
    return _same_part(a, b, 0, half, differences) & later.result()


@cache
def _second_reader() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="compare")


class _Buffers(threading.local):
    """Two for each thread, kept: fresh memory costs more than the comparison."""

    def __init__(self) -> None:
        self.pair = bytearray(_READ), bytearray(_READ)


_buffers = _Buffers()


def _same_part(a: Data, b: Data, start: int, stop: int, differences: list[int]) -> bool:
    # Two reused bytearrays: comparing memoryviews, or fresh bytes, takes five times as long.
    left, right = _buffers.pair
    for offset in range(start, stop, _READ):
        if stop - offset < _READ:
            left, right = bytearray(stop - offset), bytearray(stop - offset)
        fill(a, offset, memoryview(left))
        fill(b, offset, memoryview(right))
        if left != right:
            differences.append(offset)
        if differences:
            return False
    return True


# Sums ----------------------------------------------------------------------------------------------------------------


def sha256_of(data: Data) -> hashlib._Hash:
    """The running sha256 after all bytes of `data`."""
    import hashlib

    total = hashlib.sha256()
    for block in blocks(data):
        total.update(block)
    return total


def mismatch(name: str, stored: int, computed: int) -> str:
    """The message for bytes that do not match their stored checksum."""
    return f"{name} does not match its checksum (stored {stored:08x}, found {computed:08x})"


def name_of(data: Data) -> str:
    """A description of bytes that have no other name."""
    if isinstance(data, FileRange):
        return f"{data.file}: the data at byte {data.offset:,} ({data.length:,} bytes)"
    return f"a record of {data.length:,} bytes"


class Crc:
    """The running CRC-32 of bytes; `expected` is what it must come to, `name` says what the bytes are, `source` where
    they are read from."""

    __slots__ = ("expected", "name", "source", "value")

    def __init__(self, value: int = 0, expected: int | None = None, name: str = "") -> None:
        self.value = value
        self.expected = expected
        self.name = name
        self.source: Data | None = None

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self.value = zlib.crc32(data, self.value)

    def check(self, after: str = "Nothing was written.", advice: str = "") -> None:
        """Raises `Corrupt` when all bytes have passed and the sum is not the expected one."""
        if self.expected is not None and self.value != self.expected:
            what = mismatch(self.name, self.expected, self.value)
            error = Corrupt(what, f"Its bytes were damaged after the file was written. {after}".rstrip(), advice)
            raise error.within(str(self.source.file)) if isinstance(self.source, FileRange) else error


def verify(entry: TensorEntry) -> None:
    """Raises `Corrupt` if the storage of a tensor, or one that it is computed from, does not match its checksum.

    Each storage is read once for that, but not a large one of which the tensor is a small part.
    """
    for storage in entry.storage.below():
        if storage.crc is None or storage.intact or storage.nbytes > max(MAX_CHECKED, 4 * entry.nbytes):
            continue
        crc = Crc(expected=storage.crc, name=name_of(storage.data))
        for block in blocks(storage.data):
            crc.update(block)
        with unchanged(*(files_of(entry) if crc.value != crc.expected else ())):
            crc.check("", f"See what else is damaged: {command('verify', FILE)}")
        storage.intact = True


def files_of(entry: TensorEntry) -> Iterator[Source]:
    """The files that hold values of a tensor. If anyone wrote to one since it was opened, its bytes may be new ones."""
    for storage in entry.storage.below():
        if isinstance(storage.data, FileRange):
            yield storage.data.file.file


# Plans: the files that a format wants written, as segments; `output/` carries them out --------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Checksummed:
    """Data whose CRC-32 is wanted: the sink updates `crc` while the bytes pass."""

    data: Data
    crc: Crc

    @property
    def length(self) -> int:
        return self.data.length


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Deferred:
    """`length` bytes that can only be made when everything before them has passed (a checksum, a directory)."""

    length: int
    make: Callable[[], bytes]


Segment = InlineBytes | FileRange | Computed | Checksummed | Deferred


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """Files to write: names (`""` for a single file) to segments, in order, which are iterated more than once.

    checks: storages of which only a part is read, whose checksums are verified as a whole.
    notes: what the user should know about how the container holds the tree.
    keep > 0: append to a file after its first `keep` bytes instead. `guard` is then what has to come last in the file
    for readers to find the old state, and `guard_every` the distance within which they search for it.
    """

    files: Mapping[str, Iterable[Segment]]
    checks: list[Storage] = field(default_factory=list)
    keep: int = 0
    guard: bytes = b""
    guard_every: int = 0
    notes: tuple[Note, ...] = ()
    nbytes: int = field(init=False)  # to be written, all files together

    def __post_init__(self) -> None:
        total = sum(segment.length for segments in self.files.values() for segment in segments)
        object.__setattr__(self, "nbytes", total)
