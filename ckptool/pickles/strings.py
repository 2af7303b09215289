"""Texts and byte strings of pickles: what Python 2 meant by its own, and the long ones that were left in the file."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Computed, Data
from ckptool.checkpoint.nodes import ByteString
from ckptool.errors import Corrupt, LimitExceeded

MAX_STRING = 64 << 20


def check_size(stub: StubbedValue) -> None:
    """Raises `LimitExceeded` for a stub that is too long to be a plain value."""
    size, kind = stub.data.length, "text of Python 2" if stub.kind == "string" else stub.kind
    if size > MAX_STRING:
        raise LimitExceeded(
            f"a {kind} of {size:,} bytes that belongs to no tensor", f"At most {MAX_STRING:,} are read into memory."
        )


def whole(value: Any) -> Any:
    """The plain value of a stub, read into memory; anything else as it is. Raises `LimitExceeded` above 64 MiB."""
    if not isinstance(value, StubbedValue):
        return value
    check_size(value)
    content = value.data.read(0, value.data.length)
    if value.kind == "text":
        try:
            return str(content, "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise Corrupt("a text that is not UTF-8", "The pickle is damaged or malicious.") from None
    return (
        bytearray(content) if value.kind == "bytearray" else content if value.kind == "bytes" else python2_text(content)
    )


def python2_unescaped(raw: bytes) -> bytes:
    """The bytes that a Python 2 string literal spells; what is no escape stays as it is."""

    def one(match: re.Match[bytes]) -> bytes:
        code = match[1]
        if code[:1] == b"x":
            return bytes([int(code[1:], 16)])
        if code.isdigit():
            return bytes([int(code, 8) & 0xFF])
        return _ESCAPES.get(code, match[0])

    return re.sub(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", one, raw)


_ESCAPES = {
    b"\\": b"\\",
    b"'": b"'",
    b'"': b'"',
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"v": b"\v",
}


def python2_text(raw: bytes) -> Any:
    """A Python 2 `str`: text where its bytes are UTF-8, as torch reads it; else bytes of a type of their own."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ByteString(raw)


def key_text(key: Any) -> Any:
    """A key that Python 2 wrote as bytes as the text that it stands for: latin-1 where it is not UTF-8."""
    return key.decode("latin-1") if type(key) is ByteString else key


def encoded(text: StubbedValue) -> StubbedValue | None:
    """The bytes of `_codecs.encode(text, "latin1")` for a long text; None where latin-1 lacks a character.

    The text is read through once, in pieces, to learn where each byte of it is.
    """
    places = [0]  # the number of characters before each piece
    data = text.data
    for at in range(0, data.length, _PIECE):
        chars = _latin1(data, at)
        if chars is None:
            return None
        places.append(places[-1] + len(chars))

    def read(offset: int, length: int) -> bytes:
        end = min(offset + length, places[-1])
        first = bisect_right(places, offset) - 1
        got = []
        for piece in range(first, len(places) - 1):
            if places[piece] >= end:
                break
            got.append(_latin1(data, piece * _PIECE) or b"")
        return b"".join(got)[offset - places[first] : end - places[first]] if got else b""

    return StubbedValue(Computed(places[-1], read), "bytes", text)


_PIECE = 1 << 16


def _latin1(data: Data, at: int) -> bytes | None:
    """The characters that begin in the piece of UTF-8 at byte `at`, as latin-1."""
    raw = data.read(at, min(_PIECE + 1, data.length - at))
    if len(raw) > _PIECE and not _continues(raw[-1]):
        raw = raw[:-1]
    if at and _continues(raw[0]):
        raw = raw[1:]
    try:
        return raw.decode("utf-8").encode("latin-1")
    except UnicodeError:
        return None


def _continues(byte: int) -> bool:
    """True for the later bytes of a character in UTF-8."""
    return byte & 0xC0 == 0x80


@dataclass(slots=True, eq=False)
class StubbedValue:
    """A long value of a pickle that was left where it is: `data` are its bytes as the pickle spells them.

    Only builders meet it, while a pickle is decoded (see `pickles/skeleton.py`); there is none in an opened checkpoint.
    kind: what the pickle makes of the bytes: `bytes`, `bytearray`, `string` (of Python 2) or `text` (`data` is its
    UTF-8).
    of: the stub that it was made from, if another.
    """

    data: Data
    kind: str
    of: StubbedValue | None = None

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.data.length:,} bytes>"
