"""Several storages read side by side, front to back: the next block of each is read and summed up while the last one is worked on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckptool.checkpoint import Crc, Data, FileRange, Storage, TensorEntry
from ckptool.gather import fill
from ckptool.values import aligned

if TYPE_CHECKING:
    from ckptool.values import Array

BLOCK = 512 << 10  # bytes of each source at a time
ROOM = 2 << 20  # of all sources together; with many, blocks are shorter
DEPTH = 4  # blocks read ahead: on a busy machine the two threads would wait for each other with fewer
_LEAST = 4 << 10


class Ahead:
    """One thread that reads ahead, and the memory it reads into, for the many `Abreast` of a job. They are read one after another."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")
        self._memory: list[Array] = []
        self._turn = 0
        self._pending: deque[tuple[Abreast, int, Future[list[Array]]]] = deque()

    def block(self, owner: Abreast, place: int) -> list[Array]:
        """The block of `owner` from `place`, which stays as it is until the next is asked for."""
        pending = self._pending
        if pending and pending[0][:2] == (owner, place):
            found = pending.popleft()[2].result()
        else:
            while pending:  # what nobody wanted is waited for, and forgotten
                unwanted = pending.pop()[2]
                unwanted.cancel() or unwanted.exception()
            found = owner.read(place, self._arrays(owner, place))
        after = (pending[-1][1] if pending else place) + owner.block
        while len(pending) < DEPTH and after < owner.length:
            pending.append((owner, after, self._pool.submit(owner.read, after, self._arrays(owner, after))))
            after += owner.block
        return found

    def _arrays(self, owner: Abreast, place: int) -> list[Array]:
        size, count = min(owner.block, owner.length - place), len(owner.sources)
        if not self._memory or len(self._memory[0]) < count * owner.block:
            self._memory = [aligned(max(ROOM, count * owner.block)) for _ in range(DEPTH + 1)]
        self._turn = (self._turn + 1) % len(self._memory)
        memory = self._memory[self._turn]
        return [memory[number * owner.block :][:size] for number in range(count)]


class Abreast:
    """Sources of one length. What is a whole storage with a checksum is summed up in passing; `unchecked`: the storages of the others."""

    def __init__(self, entries: Sequence[TensorEntry], ahead: Ahead) -> None:
        self.ahead = ahead
        self.sources = [_Source(entry) for entry in entries]
        self.length = self.sources[0].data.length
        self.block = min(BLOCK, max(_LEAST, ROOM // len(entries) // _LEAST * _LEAST))
        self.unchecked = tuple(
            entry.storage for entry, source in zip(entries, self.sources, strict=True) if not source.crc
        )

    def blocks(self, place: int) -> list[Array]:
        """The bytes of each source from `place`, which is a multiple of `block`: as many as that, fewer at the end.

        Raises `Corrupt` if a source has passed and does not match its checksum.
        """
        return self.ahead.block(self, place)

    def read(self, place: int, arrays: list[Array]) -> list[Array]:
        for source, array in zip(self.sources, arrays, strict=True):
            source.read(place, array.data)
        return arrays


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
    return f"{data.file}: the {data.length:,} bytes from {data.offset:,}" if isinstance(data, FileRange) else ""
