"""The sink: writes the segments of one file, in order, knowing nothing of what they mean.

Adjacent ranges of one input become one copy; small segments are gathered; checksums of copied ranges are added up by
threads that read the same pages while the kernel copies them; what is only known at the end (`Deferred`) is written at
the end.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from ckptool.checkpoint import Computed, Data, FileRange, InlineBytes, Storage
from ckptool.checkpoint.blocks import Crc, blocks, name_of
from ckptool.checkpoint.plan import Checksummed, Deferred, Plan, Segment
from ckptool.errors import Corrupt
from ckptool.output.copying import copy_range, start_writeback, write_all
from ckptool.output.hashing import StreamingSha256

Progress = Callable[[int, int], None]
"""Told the bytes written so far, and in all."""

SMALL = 64 << 10  # shorter ranges are read and gathered: a system call for each would cost more than the copy
GATHER = 1 << 20
LARGE = 256 << 10  # written from where it is, without being gathered
VIEW = 2 << 20  # of what is in memory
BEHIND = 2  # pieces that may wait to be written
COMPUTE = 512 << 10  # asked of a `Computed` at once: what it works on stays in the processor's cache


class Sink:
    """Writes one plan's segments into an open file, from byte `at`. digest: fed with all but copied ranges."""

    def __init__(
        self, fd: int, at: int, total: int, progress: Progress | None, digest: StreamingSha256 | None = None
    ) -> None:
        self.fd, self.digest = fd, digest
        self.at = at  # where the next segment goes
        self.total, self.done, self.progress = total, 0, progress
        self.gathered = bytearray()
        self.gathered_at = at
        self.run: tuple[FileRange, int] | None = None  # a range not copied yet, and how far it goes by now
        self.late: list[tuple[int, Deferred]] = []
        self.jobs: list[Future[None]] = []
        self.pool: ThreadPoolExecutor | None = None
        self.writer: ThreadPoolExecutor | None = None
        self.pieces: deque[Future[None]] = deque()  # that the writer has not written yet
        self.cancelled = False

    def write(self, segments: Iterable[Segment], checks: Iterable[Storage] = ()) -> None:
        """Writes everything; raises `Corrupt` if an input does not match its stored checksum."""
        checked: set[int] = set()
        try:
            for storage in checks:
                self._check(storage, checked)
            for segment in segments:
                self._segment(segment, checked)
            self._flush_run()
            self._flush_gathered()
            for job in (*self.jobs, *self.pieces):
                job.result()
            for at, late in self.late:
                self._write(made(late), at)
        finally:
            self.cancelled = True
            for threads in (self.pool, self.writer):
                if threads is not None:
                    threads.shutdown(wait=True, cancel_futures=True)

    # Segments ----------------------------------------------------------------------------------------------------

    def _segment(self, segment: Segment, checked: set[int]) -> None:
        if isinstance(segment, Deferred):
            self._late(segment)
            return
        data, crc = (segment.data, segment.crc) if isinstance(segment, Checksummed) else (segment, None)
        if isinstance(data, InlineBytes):
            self._gather(data.content, crc)
        elif isinstance(data, FileRange):
            self._range(data, crc)
        else:
            self._computed(data, crc, checked)
        if crc is not None and isinstance(data, InlineBytes):
            crc.check()

    def _late(self, late: Deferred) -> None:
        """Made at once if all sums before it are known; else its place is kept, and it is written at the end.

        So it is, too, after another one whose place is kept: it may be made of what that one adds up.
        """
        while self.jobs and self.jobs[0].done():
            self.jobs.pop(0).result()
        while self.pieces and self.pieces[0].done():
            self.pieces.popleft().result()
        if self.jobs or self.pieces or self.late:
            self.late.append((self.at, late))
            self._gather(bytes(late.length), None)
        else:
            self._gather(made(late), None)

    def _range(self, data: FileRange, crc: Crc | None) -> None:
        data.ready()
        if data.length < SMALL and not self._continues(data):
            self._gather(data.file.read(data.offset, data.length), crc)
            if crc is not None:
                crc.check()
            return
        if crc is not None:
            self._sum(data, crc)
        if self._continues(data) and self.run is not None:
            self.run = (self.run[0], self.run[1] + data.length)
        else:
            self._flush_run()
            self._flush_gathered()
            self.run = (data, data.length)
        self.at += data.length
        self.gathered_at = self.at

    def _continues(self, data: FileRange) -> bool:
        return (
            self.run is not None and self.run[0].file is data.file and self.run[0].offset + self.run[1] == data.offset
        )

    def _computed(self, data: Computed, crc: Crc | None, checked: set[int]) -> None:
        for storage in data.inputs:
            self._check(storage, checked)
        done = 0
        while done < data.length:
            size = data.length - done
            part = data.read(done, min(COMPUTE, size)) if data.view is None else data.view(done, min(VIEW, size))
            if not part:
                raise Corrupt(f"{data.length:,} bytes were expected, {done:,} came")
            done += len(part)
            if len(part) >= LARGE and self.digest is None:
                self._write_behind(part, crc, last=done == data.length)
            else:
                self._wait_for_pieces()
                self._gather(part, crc)
                if crc is not None and done == data.length:
                    crc.check()

    def _write_behind(self, data: bytes | memoryview, crc: Crc | None, last: bool) -> None:
        """Writes a piece, and sums it up, in a thread while the next is computed.

        It is one of the jobs, so that what is made of sums waits for it. last: of its segment, whose sum is known then.
        """
        self._flush_run()
        self._flush_gathered()
        if self.writer is None:
            self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="write")
        at = self.at

        def write() -> None:
            write_all(self.fd, data, at)
            start_writeback(self.fd, at, len(data))
            if crc is not None:
                crc.update(data)
                if last:
                    crc.check()

        self.pieces.append(self.writer.submit(write))
        self._wait_for_pieces(BEHIND)
        self.at += len(data)
        self.gathered_at = self.at
        self._passed(len(data))

    def _wait_for_pieces(self, most: int = 0) -> None:
        while len(self.pieces) > most:
            self.pieces.popleft().result()

    def _gather(self, data: bytes | memoryview, crc: Crc | None) -> None:
        self._flush_run()
        if crc is not None:
            crc.update(data)
        if len(data) >= LARGE:
            self._flush_gathered()
            self._write(data, self.at)
            start_writeback(self.fd, self.at, len(data))
            self.gathered_at = self.at + len(data)
            self._passed(len(data))
        else:
            self.gathered += data
        self.at += len(data)
        if len(self.gathered) >= GATHER:
            self._flush_gathered()

    def _flush_run(self) -> None:
        if self.run is not None:
            data, length = self.run
            self.run = None
            copy_range(data.file, data.offset, self.fd, self.at - length, length, self._passed)

    def _flush_gathered(self) -> None:
        if self.gathered:
            self._write(self.gathered, self.gathered_at)
            if len(self.gathered) >= SMALL:
                start_writeback(self.fd, self.gathered_at, len(self.gathered))
            self._passed(len(self.gathered))
            self.gathered_at += len(self.gathered)
            self.gathered = bytearray()

    def _write(self, data: bytes | bytearray | memoryview, at: int) -> None:
        if self.digest is not None:
            self.digest.feed(at, data)
        write_all(self.fd, data, at)

    def _passed(self, size: int) -> None:
        self.done += size
        if self.progress is not None:
            self.progress(self.done, self.total)

    # Checksums ---------------------------------------------------------------------------------------------------

    def _check(self, storage: Storage, checked: set[int]) -> None:
        """Sums up an input whose bytes reach the output only in part or changed; nested inputs are followed."""
        if id(storage) in checked:
            return
        checked.add(id(storage))
        if isinstance(storage.data, Computed):
            for below in storage.data.inputs:
                self._check(below, checked)
        if storage.crc is not None:
            self._sum(storage.data, Crc(expected=storage.crc, name=name_of(storage.data)))

    def _sum(self, data: Data, crc: Crc) -> None:
        # What is computed may keep its place in a stream, so nobody else reads it; what is small is not worth a thread.
        if isinstance(data, Computed) or data.length < SMALL:
            self._sum_up(data, crc)
            return
        if self.pool is None:
            self.pool = ThreadPoolExecutor(
                max_workers=max(1, min(4, (os.cpu_count() or 2) - 1)), thread_name_prefix="crc"
            )
        self.jobs.append(self.pool.submit(self._sum_up, data, crc))

    def _sum_up(self, data: Data, crc: Crc) -> None:
        for block in blocks(data):
            if self.cancelled:
                return
            crc.update(block)
        crc.check()


def made(late: Deferred) -> bytes:
    """The bytes of a late segment, which are as many as were planned."""
    data = late.make()
    if len(data) != late.length:
        raise AssertionError(f"{len(data)} bytes where {late.length} were planned")
    return data


def segments_of(plan: Plan) -> Iterable[Segment]:
    """The segments of a plan for a single file."""
    (segments,) = plan.files.values()
    return segments
