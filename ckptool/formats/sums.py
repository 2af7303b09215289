"""CRC-32 of joined and of parted bytes, without the bytes.

A record of an `.npz` is a header and an array; the archive has the sum of both together. With these, the array keeps a sum of its own,
which goes along when it is copied, and the record's is known before it is written.
Source: zlib's crc32.c (`crc32_combine`): the sum after n more zero bytes is the sum times x to the 8n, modulo the polynomial.
"""

from __future__ import annotations

from functools import cache, lru_cache

_POLYNOMIAL = 0xEDB88320  # bits reversed: the highest is the constant
_ONE = 1 << 31


def joined_sum(first: int, second: int, length: int) -> int:
    """The CRC-32 of two byte strings, one after the other; `length` is the second's."""
    return _times(_power(length), first) ^ second if first else second


def sum_of_rest(whole: int, first: int, length: int) -> int:
    """The CRC-32 of what follows: `whole` is that of everything, `first` that of what goes before; `length` of the rest."""
    return joined_sum(first, whole, length)  # what is added is taken away by adding it again


@lru_cache(maxsize=1024)
def _power(length: int) -> int:
    """x to the power of `8 * length`."""
    result, place = _ONE, 0
    while length:
        if length & 1:
            result = _times(_square(place), result)
        length >>= 1
        place += 1
    return result


@cache
def _square(place: int) -> int:
    """x to the power of `8 * 2**place`."""
    if place == 0:
        return _ONE >> 8
    half = _square(place - 1)
    return _times(half, half)


def _times(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
