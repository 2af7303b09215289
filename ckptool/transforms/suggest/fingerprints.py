"""Fingerprints of tensors: a number that is the same whatever the order of the values, and that adds up over parts.

Each value becomes a 64-bit number, and a tensor's is their sum. So a transposed tensor has that of the first one, and
three tensors together that of the one they were cut from. Whatever it suggests is confirmed by bytes.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import fold
from ckptool.checkpoint.numeric import Array

HEAD = 64


class Fingerprint(NamedTuple):
    """digest: of type and bytes, in order.  total: of all values.  head: the first bytes of the first row."""

    digest: int
    total: int
    head: bytes


def fingerprint(entry: TensorEntry) -> Fingerprint:
    """The fingerprint of a tensor. Reads it once."""
    digest, total, head = blake2b(entry.dtype.name.encode(), digest_size=8), 0, b""

    def add(_: int, raw: Array) -> None:
        nonlocal total, head
        digest.update(raw.data)
        head = head or raw[:HEAD].tobytes()
        total += int(_mixed(raw.view(f"u{min(8, entry.dtype.itemsize)}")).sum())

    fold(add, entry)
    row = entry.nbytes // (entry.shape or (1,))[0] if entry.numel else 0
    return Fingerprint(int.from_bytes(digest.digest(), "little"), total % 2**64, head[:row])


def _mixed(values: Array) -> Array:
    """A 64-bit number for each value: the finalizer of splitmix64."""
    import numpy

    numbers = values.astype(numpy.uint64)
    numbers += numpy.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers ^= numbers >> numpy.uint64(shift)
        numbers *= numpy.uint64(factor)
    numbers ^= numbers >> numpy.uint64(31)
    return numbers
