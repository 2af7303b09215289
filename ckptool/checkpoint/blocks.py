"""The bytes of data, read in blocks: front to back, or several side by side and ahead; and their checksums."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ckptool.checkpoint import Computed, Data, FileRange, Storage, TensorEntry
from ckptool.checkpoint.numeric import CHUNK, aligned, scratch
from ckptool.commands import FILE, command
from ckptool.errors import Corrupt

if TYPE_CHECKING:
    import hashlib
    from concurrent.futures import Future

    from ckptool.checkpoint.numeric import Array

BLOCK = 512 << 10  # bytes at a time: they stay in the processor's cache until they were worked on
MAX_CHECKED = 64 << 20  # bytes of a storage whose checksum is looked at for any part of it


def fill(data: Data, offset: int, buffer: memoryview) -> None:
    """Fills `buffer` (bytes) with what `data` holds from `offset`, without another copy where it is in a file."""
    if isinstance(data, FileRange):
        data.ready()
        data.file.read_into(data.offset + offset, buffer)
    else:
        buffer[:] = data.read(offset, len(buffer))


def blocks(data: Data, start: int = 0, stop: int | None = None, into: memoryview | None = None) -> Iterator[memoryview]:
    """The bytes of `data` from `start` to `stop`, in order, in one memory filled again, or in their parts of `into`."""
    end = data.length if stop is None else stop
    memory = memoryview(bytearray(max(0, min(BLOCK, end - start)))) if into is None else into
    for place in range(start, end, BLOCK):
        size = min(BLOCK, end - place)
        block = memory[:size] if into is None else memory[place - start :][:size]
        fill(data, place, block)
        yield block


def chunks(data: Data, itemsize: int, name: str, row: int = CHUNK) -> Iterator[Array]:
    """The bytes of `data`, front to back, at most CHUNK elements at a time, as uint8 in the scratch array `name`.

    row: a number of elements of which as many as fit come together; a longer one comes in parts of one size.
    """
    long = row > CHUNK
    step = -(-row // -(-row // CHUNK)) if long else CHUNK - CHUNK % row
    for start in range(0, data.length, row * itemsize if long else max(data.length, 1)):
        stop = min(data.length, start + row * itemsize) if long else data.length
        for place in range(start, stop, step * itemsize):
            raw = scratch(name, "u1", min(step * itemsize, stop - place))
            fill(data, place, raw.data)
            yield raw


def computed(count: int, itemsize: int, chunk: Callable[[int, int], bytes], *inputs: Storage) -> Computed:
    """`count` elements of which `chunk(start, stop)` makes at most CHUNK at a time, from what is in `inputs`."""
    return Computed(count * itemsize, _Chunks(count, itemsize, chunk).read, inputs)


class _Chunks:
    """Elements made a chunk at a time. Not a closure: a checkpoint may have one of these for each of its tensors."""

    __slots__ = ("chunk", "count", "itemsize")

    def __init__(self, count: int, itemsize: int, chunk: Callable[[int, int], bytes]) -> None:
        self.count, self.itemsize, self.chunk = count, itemsize, chunk

    def read(self, offset: int, length: int) -> bytes:
        size = self.itemsize
        stop = min(self.count, -(-(offset + length) // size))
        parts = [self.chunk(place, min(place + CHUNK, stop)) for place in range(offset // size, stop, CHUNK)]
        data, skip = parts[0] if len(parts) == 1 else b"".join(parts), offset % size
        return data if len(data) == length and not skip else data[skip : skip + length]


# Sums ----------------------------------------------------------------------------------------------------------------


def sha256_of(data: Data) -> hashlib._Hash:
    """The running sha256 after all bytes of `data`."""
    import hashlib

    total = hashlib.sha256()
    for block in blocks(data):
        total.update(block)
    return total


def mismatch(name: str, stored: int, found: int) -> str:
    """The message for bytes that do not have the checksum that was stored for them."""
    return f"{name} does not match its checksum (stored {stored:08x}, found {found:08x})"


def name_of(data: Data) -> str:
    """Words for bytes that have no other name."""
    if isinstance(data, FileRange):
        return f"{data.file}: the data at byte {data.offset:,} ({data.length:,} bytes)"
    return f"a record of {data.length:,} bytes"


class Crc:
    """The running CRC-32 of bytes; `expected` is what it must come to, `name` what the bytes are."""

    __slots__ = ("expected", "name", "value")

    def __init__(self, value: int = 0, expected: int | None = None, name: str = "") -> None:
        self.value = value
        self.expected = expected
        self.name = name

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self.value = zlib.crc32(data, self.value)

    def check(self, after: str = "Nothing was written.", advice: str = "") -> None:
        """Raises `Corrupt` when all bytes have passed and the sum is not the expected one."""
        if self.expected is not None and self.value != self.expected:
            what = mismatch(self.name, self.expected, self.value)
            raise Corrupt(what, f"Its bytes were damaged after the file was written. {after}".rstrip(), advice)


def verify(entry: TensorEntry) -> None:
    """Raises `Corrupt` if the storage of a tensor, or one that it is computed from, does not match its checksum.

    Each storage is read once for that; a large one of which the tensor is a small part is not.
    """
    for storage in entry.storage.below():
        if storage.crc is None or storage.intact or storage.nbytes > max(MAX_CHECKED, 4 * entry.nbytes):
            continue
        crc = Crc(expected=storage.crc, name=name_of(storage.data))
        for block in blocks(storage.data):
            crc.update(block)
        crc.check("", f"See what else is damaged: {command('verify', FILE)}")
        storage.intact = True


def check_files(entry: TensorEntry) -> None:
    """Raises `FileChanged` if anyone wrote to a file of the tensor since it was opened: its bytes are others then."""
    for storage in entry.storage.below():
        if isinstance(storage.data, FileRange):
            storage.data.file.file.check_unchanged()


# Ahead ---------------------------------------------------------------------------------------------------------------

T = TypeVar("T")
ROOM = 2 << 20  # bytes of all sources together; with many, blocks are shorter
DEPTH = 4  # blocks read ahead: on a busy machine the two threads would wait for each other with fewer
_LEAST = 4 << 10


class Prefetcher:
    """A thread that reads ahead for the many `BlockReader` of a job, one after another, and the memory for that."""

    def __init__(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")
        self._memory: Array | None = None
        self._last: BlockReader[Any] | None = None
        self._pending: deque[tuple[BlockReader[Any], int, Future[Any]]] = deque()

    def add(self, owner: BlockReader[Any]) -> None:
        """Queues `owner` to be read after the one added before it."""
        if self._last is not None:
            self._last.next = owner
        self._last = owner

    def block(self, owner: BlockReader[T], place: int) -> T:
        """The result of `owner` for its block from `place`."""
        pending = self._pending
        if pending and pending[0][:2] == (owner, place):
            found: T = pending.popleft()[2].result()
        else:
            while pending:  # what nobody wanted is waited for, and forgotten
                unwanted = pending.pop()[2]
                unwanted.cancel() or unwanted.exception()
            found = self._read(owner, place)
        last, at = pending[-1][:2] if pending else (owner, place)
        while len(pending) < DEPTH and (following := last.following(at)) is not None:
            last, at = following
            pending.append((last, at, self._pool.submit(self._read, last, at)))
        return found

    def _read(self, owner: BlockReader[T], place: int) -> T:
        size, count = min(owner.block, owner.length - place), len(owner.sources)
        if self._memory is None or len(self._memory) < count * owner.block:
            self._memory = aligned(max(ROOM, count * owner.block))
        return owner.read(place, [self._memory[number * owner.block :][:size] for number in range(count)])


class BlockReader(Generic[T]):
    """Reads tensors of one length side by side, in blocks; checks whole storages on the way. `unchecked`: the others.

    work: what is made of a block, given the bytes of each source, which are others afterwards, and its place. It runs
    in the thread that reads.
    """

    def __init__(
        self, entries: Sequence[TensorEntry], ahead: Prefetcher, work: Callable[[list[Array], int], T]
    ) -> None:
        self.ahead, self.work = ahead, work
        self.next: BlockReader[Any] | None = None
        self.sources = [_Source(entry) for entry in entries]
        self.length = self.sources[0].data.length
        self.block = min(BLOCK, max(_LEAST, ROOM // len(entries) // _LEAST * _LEAST))
        self.unchecked = tuple(
            entry.storage for entry, source in zip(entries, self.sources, strict=True) if not source.crc
        )
        ahead.add(self)

    def following(self, place: int) -> tuple[BlockReader[Any], int] | None:
        """The block after the one from `place`: of these sources, or of those that come next."""
        if place + self.block < self.length:
            return self, place + self.block
        after = self.next
        while after is not None and not after.length:
            after = after.next
        return (after, 0) if after is not None else None

    def made(self, place: int) -> T:
        """The result of `work` for the block from `place`, a multiple of `block`.

        Raises `Corrupt` if a source has passed and does not match its checksum.
        """
        return self.ahead.block(self, place)

    def read(self, place: int, arrays: list[Array]) -> T:
        for source, array in zip(self.sources, arrays, strict=True):
            source.read(place, array.data)
        return self.work(arrays, place)


class _Source:
    """The values of one tensor in row-major order, with the sum of what has passed."""

    __slots__ = ("crc", "data", "summed")

    def __init__(self, entry: TensorEntry) -> None:
        self.data: Data = entry.row_major()
        self.summed = 0
        whole = isinstance(self.data, FileRange) and self.data.length == entry.storage.nbytes
        checked = whole and entry.storage.crc is not None
        self.crc = Crc(expected=entry.storage.crc, name=name_of(entry.storage.data)) if checked else None

    def read(self, place: int, buffer: memoryview) -> None:
        fill(self.data, place, buffer)
        if self.crc is None:
            return
        for block in blocks(self.data, self.summed, place):  # asked for out of order
            self.crc.update(block)
            self.summed += len(block)
        if place <= self.summed < place + len(buffer):
            self.crc.update(buffer[self.summed - place :])
            self.summed = place + len(buffer)
        if self.summed == self.data.length:
            self.crc.check()
