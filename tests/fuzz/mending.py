"""Checksums set right after a change, so that a fuzzer gets behind them."""

from __future__ import annotations

import struct
import zlib


def mended_zip(data: bytes) -> bytes:
    """The archive with the CRC of every stored record in its directory (and descriptor) as its bytes are now."""
    out = bytearray(data)
    at = out.find(b"PK\1\2")
    while 0 <= at <= len(out) - 46:
        method, size, header = _entry(out, at)
        if not method and header + 30 <= len(out) and out[header : header + 4] == b"PK\3\4":
            names = sum(struct.unpack_from("<2H", out, header + 26))
            begin = header + 30 + names
            crc = zlib.crc32(out[begin : begin + size])
            old = out[at + 16 : at + 20]
            struct.pack_into("<L", out, at + 16, crc)
            for place in (header + 14, begin + size + 4):
                if place + 4 <= len(out) and out[place : place + 4] == old and any(old):
                    struct.pack_into("<L", out, place, crc)
        at = out.find(b"PK\1\2", at + 46)
    return bytes(out)


def _entry(data: bytearray, at: int) -> tuple[int, int, int]:
    method, size, header = (
        struct.unpack_from(code, data, at + place)[0] for code, place in (("<H", 10), ("<L", 20), ("<L", 42))
    )
    return method, size, header


def mended_tar(data: bytes) -> bytes:
    """The archive with the checksum of each header as the header is now."""
    out = bytearray(data)
    for at in range(0, len(out) - 511, 512):
        if out[at + 257 : at + 262] == b"ustar":
            out[at + 148 : at + 156] = b" " * 8
            out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + 512])
    return bytes(out)


MENDERS = {"zip": mended_zip, "tar": mended_tar}
