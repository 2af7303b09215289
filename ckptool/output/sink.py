"""The sink: writes the segments of one file, in order, knowing nothing of what they mean.

Adjacent ranges of one input become one copy; small segments are gathered; checksums of copied ranges are added up by
threads that read the same pages while the kernel copies them; what is only known at the end (`Deferred`) is written at
the end. Below it is how bytes are moved from file to file.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

from ckptool.checkpoint import Computed, Data, FileRange, InlineBytes, Storage
from ckptool.checkpoint.blocks import Checksummed, Crc, Deferred, Segment, blocks, name_of
from ckptool.checkpoint.files import Source
from ckptool.errors import Corrupt

Progress = Callable[[int, int], None]
"""Called with the bytes written so far, and in all."""
Feed = Callable[[int, "bytes | bytearray | memoryview"], None]

SMALL = 64 << 10  # shorter ranges are read and gathered: a system call for each would cost more than the copy
GATHER = 1 << 20
LARGE = 256 << 10  # longer data are written from where they are, without being gathered
VIEW = 2 << 20  # asked of a `view` at once, which is in memory already
BEHIND = 2  # pieces that may wait to be written
COMPUTE = 512 << 10  # asked of a `Computed` at once: what it works on stays in the processor's cache


class Sink:
    """Writes one plan's segments into an open file, from byte `at`. feed: called with all bytes but copied ranges, and
    where they are written; nobody changes them afterwards."""

    def __init__(self, fd: int, at: int, total: int, progress: Progress | None, feed: Feed | None = None) -> None:
        self.fd, self.feed = fd, feed
        self.at = at  # where the next segment goes
        self.total, self.written, self.progress = total, 0, progress  # the bytes of all files, for `progress`
        # What lies before `at` and is not written yet: short segments, or a range of an input that the next may go on.
        self.pending: bytearray | FileRange = bytearray()
        self.late: list[tuple[int, Deferred]] = []
        self.checked: set[int] = set()  # the ids of storages that are summed up on their own
        self.jobs: deque[Future[None]] = deque()  # sums that are being added up
        self.pieces: deque[Future[None]] = deque()  # those that the writer has not written yet
        self.summers = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 2) - 1)), thread_name_prefix="crc")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="write")
        self.cancelled = False

    def write(self, segments: Iterable[Segment], checks: Iterable[Storage] = ()) -> None:
        """Writes everything; raises `Corrupt` if an input does not match its stored checksum."""
        try:
            for storage in checks:
                self._check(storage)
            for segment in segments:
                data, crc = (segment.data, segment.crc) if isinstance(segment, Checksummed) else (segment, None)
                if isinstance(data, FileRange):
                    data.ready()
                    if crc is not None:
                        crc.source = data
                    if not data.file.far:
                        self._copy(data, crc)
                        continue
                    data = Computed(data.length, data.read)  # it is fetched once, and summed up on the way
                if isinstance(data, Computed):
                    self._computed(data, crc)
                elif isinstance(data, InlineBytes):
                    self._take(data.content, crc)
                else:
                    # Made at once if all before it is known; else its place is kept, and it is written at the end; also
                    # if it follows another whose place is kept, as it may be made of what that one adds up.
                    for waiting in (self.jobs, self.pieces):
                        while waiting and waiting[0].done():
                            waiting.popleft().result()
                    is_known = not (self.jobs or self.pieces or self.late)
                    self.late += [] if is_known else [(self.at, data)]
                    self._take(late_bytes(data) if is_known else bytes(data.length))
            self._flush()
            for waiting in (self.jobs, self.pieces):
                while waiting:
                    waiting.popleft().result()
            for at, late in self.late:
                self._write(late_bytes(late), at)
        finally:
            self.cancelled = True
            for threads in (self.summers, self.writer):
                threads.shutdown(wait=True, cancel_futures=True)
            self.jobs.clear()  # an error in one of them refers to this sink, and so to the files that it holds open
            self.pieces.clear()

    def _copy(self, data: FileRange, crc: Crc | None) -> None:
        """Copies a range, with those before it that it continues; a short one alone is read."""
        run = self.pending
        if isinstance(run, FileRange) and run.file is data.file and run.offset + run.length == data.offset:
            run.length += data.length
        elif data.length >= SMALL:
            self._flush()
            self.pending = FileRange(data.file, data.offset, data.length)
        else:
            self._take(data.read(0, data.length), crc)
            return
        self.at += data.length
        if crc is not None:
            self._sum(data, crc)

    def _computed(self, data: Computed, crc: Crc | None) -> None:
        """Computes a segment piece by piece. A large piece is written, and summed up, while the next is computed."""
        for storage in data.inputs:
            self._check(storage)
        offset = 0
        while offset < data.length:
            size = data.length - offset
            part = data.read(offset, min(COMPUTE, size)) if data.view is None else data.view(offset, min(VIEW, size))
            if not part:
                raise Corrupt(f"{data.length:,} bytes were expected, {offset:,} arrived")
            offset += len(part)
            if len(part) >= LARGE and self.feed is None:
                self._flush()
                self.pieces.append(self.writer.submit(self._write, part, self.at, crc))
                self._wait(BEHIND)
                self.at += len(part)
                self._passed(len(part))
            else:
                self._wait()
                self._take(part)
                if crc is not None:
                    crc.update(part)
        if crc is not None and self.pieces:
            self.pieces.append(self.writer.submit(crc.check))
        elif crc is not None:
            crc.check()

    def _wait(self, limit: int = 0) -> None:
        while len(self.pieces) > limit:
            self.pieces.popleft().result()

    def _take(self, data: bytes | memoryview, crc: Crc | None = None) -> None:
        """Takes the next bytes: short ones are gathered, long ones are written from where they are. crc: of these
        bytes, complete."""
        if isinstance(self.pending, FileRange) or len(data) >= LARGE:
            self._flush()
        self.at += len(data)
        if len(data) >= LARGE:
            self._write(data, self.at - len(data))
            self._passed(len(data))
        elif isinstance(self.pending, bytearray):
            self.pending += data
            if len(self.pending) >= GATHER:
                self._flush()
        if crc is not None:
            crc.update(data)
            crc.check()

    def _flush(self) -> None:
        """Writes what is pending, which ends where the next segment goes."""
        pending, self.pending = self.pending, bytearray()
        if isinstance(pending, FileRange):
            place = self.at - pending.length
            copy_range(pending.file, pending.offset, self.fd, place, pending.length, self._passed)
        elif pending:
            self._write(pending, self.at - len(pending))
            self._passed(len(pending))

    def _write(self, data: bytes | bytearray | memoryview, at: int, crc: Crc | None = None) -> None:
        if self.feed is not None:
            self.feed(at, data)
        write_all(self.fd, data, at)
        if len(data) >= SMALL:
            start_writeback(self.fd, at, len(data))
        if crc is not None:
            crc.update(data)

    def _passed(self, size: int) -> None:
        self.written += size
        if self.progress is not None:
            self.progress(self.written, self.total)

    # Checksums ---------------------------------------------------------------------------------------------------

    def _check(self, storage: Storage) -> None:
        """Sums up an input whose bytes reach the output only in part or changed; nested inputs are followed."""
        if id(storage) in self.checked:
            return
        self.checked.add(id(storage))
        if isinstance(storage.data, Computed):
            for source in storage.data.inputs:
                self._check(source)
        if storage.crc is not None:
            self._sum(storage.data, Crc(expected=storage.crc, name=name_of(storage.data)))

    def _sum(self, data: Data, crc: Crc) -> None:
        # Computed data may keep its place in a stream, so no other thread may read it; small data is not worth one.
        if isinstance(data, Computed) or data.length < SMALL:
            self._sum_up(data, crc)
        else:
            self.jobs.append(self.summers.submit(self._sum_up, data, crc))

    def _sum_up(self, data: Data, crc: Crc) -> None:
        for block in blocks(data):
            if self.cancelled:
                return
            crc.update(block)
        crc.check()


def late_bytes(late: Deferred) -> bytes:
    """The bytes of a late segment, which are as many as were planned."""
    data = late.make()
    if len(data) != late.length:
        raise AssertionError(f"{len(data)} bytes where {late.length} were planned")
    return data


# Moving bytes from file to file without looking at them ---------------------------------------------------------------

# Kernel-side where the platform can (`copy_file_range`, at most PIECE a call), with writeback started after each piece:
# that halves the time of the sync at the end. Elsewhere, and between file systems that refuse, through a small buffer.
PIECE = 8 << 20
BUFFER = 256 << 10
PATIENCE, PAUSE = 100, 0.01  # how often, and after how many seconds, a write that took nothing is tried again

# What copy_file_range answers where it cannot: other file systems, old kernels, special mounts.
_CANNOT = {getattr(errno, name) for name in "EXDEV EINVAL ENOSYS EOPNOTSUPP EPERM EBADF ETXTBSY EAGAIN".split()}


def copy_range(source: Source, offset: int, fd: int, at: int, length: int, progress: Callable[[int], None]) -> None:
    """Copies `length` bytes of `source` from `offset` to byte `at` of `fd`; `progress` gets each piece's size."""
    written, in_kernel = 0, hasattr(os, "copy_file_range")
    while written < length:
        copied = 0
        if in_kernel:
            try:
                size, place = min(PIECE, length - written), source.begin + offset + written
                copied = os.copy_file_range(source.descriptor(), fd, size, place, at + written)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
            in_kernel = copied > 0  # some file systems answer 0 instead of an error
        if not copied:
            data = source.read(offset + written, min(BUFFER, length - written))
            write_all(fd, data, at + written)
            copied = len(data)
        start_writeback(fd, at + written, copied)
        written += copied
        progress(copied)


def write_all(fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
    """Writes all of `data` to byte `at`, however many calls that takes."""
    view, patience = memoryview(data), PATIENCE
    while len(view):
        try:
            written = os.pwrite(fd, view, at)
        except BlockingIOError:  # "try again", as some network file systems say
            written = 0
        if not written:
            if not patience:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            patience -= 1
            time.sleep(PAUSE)
        view = view[written:]
        at += written


def start_writeback(fd: int, at: int, length: int) -> None:
    """Tells the kernel to begin writing these pages to disk, and does not wait. Only speed depends on it."""
    call = system_call("sync_file_range")
    if call is not None:
        call(fd, at, length, 2)  # SYNC_FILE_RANGE_WRITE


def reserve(fd: int, length: int) -> None:
    """Reserves the room for a file before it is written: a full disk shows at once, and writing is a third faster.

    Where the file system cannot, nothing is done (the library's own function would write zeros instead). Raises
    `OSError`.
    """
    import ctypes

    call = system_call("fallocate")
    if call is not None and length and call(fd, 0, 0, length):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(number, os.strerror(number))


@cache
def system_call(name: str) -> Callable[..., int] | None:
    """A function of the C library that Python does not offer; None where there is none."""
    if sys.platform != "linux":
        return None
    import ctypes

    arguments = {
        "sync_file_range": (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint),
        "fallocate": (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
        "renameat2": (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint),
    }
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    call.argtypes = arguments[name]
    return call  # type: ignore[no-any-return]
