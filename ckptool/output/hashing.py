"""The sha256 of a file, added up in a thread while the file is written."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

LARGE = 1 << 20  # what is smaller is not worth a thread
AHEAD = 8  # pieces in memory of their own that may wait: the writer is held up rather than keep more

Bytes = bytes | bytearray | memoryview


class StreamingSha256:
    """Fed with what is written, in order. A file that was written in another order is read again at the end."""

    def __init__(self) -> None:
        self._total = hashlib.sha256()
        self._at: int | None = 0  # how far it has come; None after something out of order
        self._pool: ThreadPoolExecutor | None = None
        self._kept: deque[Future[None]] = deque()  # those of pieces that live until they are summed

    def feed(self, at: int, data: Bytes) -> None:
        """Takes what is written at byte `at`, which nobody changes afterwards."""
        if self._at is None or at != self._at:
            self._at = None
            return
        self._at += len(data)
        if self._pool is None and self._at < LARGE:
            self._total.update(data)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sha256")
        if len(self._kept) >= AHEAD:
            self._kept.popleft().result()
        job = self._pool.submit(self._total.update, data)
        if not isinstance(data, memoryview):  # a view of tensors takes no memory, and may wait while the file is synced
            self._kept.append(job)

    def result(self, path: str) -> str:
        """The digest of the file at `path`, in hexadecimal. Raises `OSError` where it cannot be read again."""
        self.close()
        if self._at == os.stat(path).st_size:
            return self._total.hexdigest()
        return digest_of(path)

    def close(self) -> None:
        """Waits for what was begun; more is not taken."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)


def digest_of(path: str) -> str:
    """The sha256 of a file, in hexadecimal. Raises `OSError`."""
    total = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for part in iter(lambda: file.read(LARGE), b""):
            total.update(part)
    return total.hexdigest()
