"""Several storages read side by side, front to back: the next blocks are read, summed up and worked on while the last one is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ckptool.checkpoint import Data, FileRange, Storage, TensorEntry
from ckptool.checkpoint.numeric import aligned
from ckptool.checkpoint.plan import Crc
from ckptool.checkpoint.strided import fill

if TYPE_CHECKING:
    from ckptool.checkpoint.numeric import Array

T = TypeVar("T")
BLOCK = 512 << 10  # bytes of each source at a time
ROOM = 2 << 20  # of all sources together; with many, blocks are shorter
DEPTH = 4  # blocks read ahead: on a busy machine the two threads would wait for each other with fewer
_LEAST = 4 << 10


class Prefetcher:
    """One thread that works ahead, and the memory it reads into, for the many `BlockReader` of a job. They are read one after another."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")
        self._memory: Array | None = None
        self._last: BlockReader[Any] | None = None
        self._pending: deque[tuple[BlockReader[Any], int, Future[Any]]] = deque()

    def add(self, owner: BlockReader[Any]) -> None:
        """Takes it that `owner` is wanted after the one that was added before it."""
        if self._last is not None:
            self._last.next = owner
        self._last = owner

    def block(self, owner: BlockReader[T], place: int) -> T:
        """What `owner` makes of its block from `place`."""
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
        return owner.read(place, self._arrays(owner, place))

    def _arrays(self, owner: BlockReader[Any], place: int) -> list[Array]:
        size, count = min(owner.block, owner.length - place), len(owner.sources)
        if self._memory is None or len(self._memory) < count * owner.block:
            self._memory = aligned(max(ROOM, count * owner.block))
        return [self._memory[number * owner.block :][:size] for number in range(count)]


class BlockReader(Generic[T]):
    """Sources of one length. What is a whole storage with a checksum is summed up in passing; `unchecked`: the storages of the others.

    work: what is made of a block, given the bytes of each source, which are others afterwards. It runs in the thread that reads.
    """

    def __init__(self, entries: Sequence[TensorEntry], ahead: Prefetcher, work: Callable[[list[Array]], T]) -> None:
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
        """What `work` makes of the block from `place`, a multiple of `block`: of as many bytes of each source as that, fewer at the end.

        Raises `Corrupt` if a source has passed and does not match its checksum.
        """
        return self.ahead.block(self, place)

    def read(self, place: int, arrays: list[Array]) -> T:
        for source, array in zip(self.sources, arrays, strict=True):
            source.read(place, array.data)
        return self.work(arrays)


class _Source:
    """The values of one tensor in row-major order, with the sum of what has passed."""

    __slots__ = ("crc", "data", "summed")

    def __init__(self, entry: TensorEntry) -> None:
        self.data: Data = entry.row_major()
        self.summed = 0
        whole = isinstance(self.data, FileRange) and self.data.length == entry.storage.nbytes
        self.crc = (
            Crc(expected=entry.storage.crc, name=_name(entry.storage))
            if whole and entry.storage.crc is not None
            else None
        )

    def read(self, place: int, buffer: memoryview) -> None:
        fill(self.data, place, buffer)
        if self.crc is None:
            return
        while self.summed < place:  # asked for out of order
            self.crc.update(part := self.data.read(self.summed, min(BLOCK, place - self.summed)))
            self.summed += len(part)
        if place <= self.summed < place + len(buffer):
            self.crc.update(buffer[self.summed - place :])
            self.summed = place + len(buffer)
        if self.summed == self.data.length:
            self.crc.check()


def _name(storage: Storage) -> str:
    data = storage.data
    return (
        f"{data.file}: the data at byte {data.offset:,} ({data.length:,} bytes)" if isinstance(data, FileRange) else ""
    )
