"""CRC-32 of many stretches of data at once: read in pieces by a few threads, in bounded memory.

A long stretch is cut into pieces whose sums are joined afterwards, so that one large record is read by all threads too.
Source of the arithmetic: `crc32_combine` of zlib 1.2.12 (polynomials over two elements, modulo the CRC's own).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate, groupby

from ckptool.checkpoint import Computed, Data
from ckptool.checkpoint.blocks import Checksummed, Crc, Deferred, Segment, blocks, name_of
from ckptool.checkpoint.progress import reading
from ckptool.errors import CkptoolError, Corrupt, FileChanged

PIECE = 32 << 20  # bytes read of one stretch at a time, at most
BATCH = 8 << 20  # bytes of short ones that are handed out together, at most
BATCHED = 512
ALONE = 1 << 20  # not worth a thread

Sum = int | CkptoolError
Piece = tuple[int, int, int]  # which stretch, from where, how many bytes


def checksums(stretches: Sequence[Data]) -> list[Sum]:
    """The CRC-32 of each stretch, or the error where it cannot be read. Raises `FileChanged`."""
    pieces = list[Piece]()
    for index, data in enumerate(stretches):
        # What is computed may keep its place in a stream: one thread reads all of it.
        step = max(data.length, 1) if isinstance(data, Computed) else PIECE
        pieces += ((index, at, min(step, data.length - at)) for at in range(0, max(data.length, 1), step))
    ends = accumulate(max(length, BATCH // BATCHED) for _, _, length in pieces)
    groups = groupby(zip(pieces, ends, strict=True), lambda pair: pair[1] // BATCH)

    def sums_of(batch: list[Piece]) -> list[tuple[int, int, Sum]]:
        results: list[tuple[int, int, Sum]] = []
        for index, at, length in batch:
            value = 0
            try:
                for block in blocks(stretches[index], at, at + length):
                    value = zlib.crc32(block, value)
                results.append((index, length, value))
            except FileChanged:
                raise
            except CkptoolError as error:
                results.append((index, length, error))
            except ValueError:  # fewer bytes came than were expected
                what = f"it ends before its {stretches[index].length:,} bytes"
                results.append((index, length, Corrupt(what, "What it is made from is damaged.")))
        return results

    sums: list[Sum] = [0] * len(stretches)
    nbytes = sum(data.length for data in stretches)
    # Most of the time goes into copying from the page cache.
    with reading(nbytes), ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 2)), thread_name_prefix="crc") as pool:
        batches = ([piece for piece, _ in numbered] for _, numbered in groups)
        for batch in (map if nbytes < ALONE else pool.map)(sums_of, batches):
            for index, length, added in batch:
                total = sums[index]
                if not isinstance(total, CkptoolError):
                    sums[index] = added if isinstance(added, CkptoolError) else crc_combine(total, added, length)
    return sums


def checksummed(data: Data, total: Crc) -> Iterator[Segment]:
    """The segments of data whose sum is added to `total`; concatenated storages are summed each by itself."""
    if not isinstance(data, Computed) or not data.concatenated or total.expected is not None:
        yield Checksummed(data, total)
        return
    crcs = [Crc(expected=storage.crc, name=name_of(storage.data)) for storage in data.inputs]
    yield from (Checksummed(storage.data, crc) for storage, crc in zip(data.inputs, crcs, strict=True))

    def add_up() -> bytes:
        for storage, crc in zip(data.inputs, crcs, strict=True):
            total.value = crc_combine(total.value, crc.value, storage.nbytes)
        return b""

    yield Deferred(0, add_up)


_POLYNOMIAL = 0xEDB88320  # bits reversed: the highest is the constant
_ONE = 1 << 31


def crc_combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two byte strings, one after the other; `length` is the second's.

    Adding is its own inverse: from the sum of both and that of the first, this gives the second's.
    """
    return _times(_power(8 * length), first) ^ second if first else second


@lru_cache(maxsize=4096)
def _power(exponent: int) -> int:
    """x to the power of `exponent`."""
    if exponent < 2:
        return _ONE >> exponent
    half = _power(exponent // 2)
    return _times(_times(half, half), _ONE >> exponent % 2)


def _times(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
