"""Comparing two stretches of data byte by byte, in little memory."""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING

from ckptool.checkpoint import Data, FileRange, InlineBytes
from ckptool.checkpoint.blocks import fill

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_READ = 128 << 10  # bytes of each side compared at a time; both stay in the cache
_WORTH_A_THREAD = 2 << 20


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
