"""Texts and byte strings in pickles: those of Python 2, and long ones that stay in the file."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from codecs import utf_8_decode
from typing import Any

from ckptool.checkpoint import Computed
from ckptool.checkpoint.nodes import ByteString
from ckptool.checkpoint.numpy_arrays import LongValue
from ckptool.errors import Corrupt, LimitExceeded

MAX_STRING = 64 << 20


def check_size(stub: LongValue) -> None:
    """Raises `LimitExceeded` for a stub that is too long to be a plain value."""
    size, kind = stub.data.length, "Python 2 string" if stub.kind == "string" else stub.kind
    if size > MAX_STRING:
        what = f"a {kind} of {size:,} bytes that belongs to no tensor"
        raise LimitExceeded(what, f"ckptool reads at most {MAX_STRING:,} into memory.")


def unstub(value: Any) -> Any:
    """The plain value of a stub, read into memory; anything else as it is. Raises `LimitExceeded` above 64 MiB."""
    if not isinstance(value, LongValue):
        return value
    check_size(value)
    content = value.data.read(0, value.data.length)
    if value.kind == "text":
        try:
            return str(content, "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise Corrupt("a string that is not UTF-8", "The pickle is damaged or malicious.") from None
    return (
        bytearray(content) if value.kind == "bytearray" else content if value.kind == "bytes" else python2_text(content)
    )


def python2_unescaped(raw: bytes) -> bytes:
    """The bytes that a Python 2 string literal means; what is not an escape stays as it is."""

    def one(match: re.Match[bytes]) -> bytes:
        code = match[1]
        if code[:1] == b"x":
            return bytes([int(code[1:], 16)])
        if code.isdigit():
            return bytes([int(code, 8) & 0xFF])
        return _ESCAPES.get(code, match[0])

    return re.sub(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", one, raw)


_ESCAPES = {escape.encode(): char.encode() for escape, char in zip("\\'\"nrtabfv", "\\'\"\n\r\t\a\b\f\v", strict=True)}


def python2_text(raw: bytes) -> Any:
    """A Python 2 `str`: text if its bytes are UTF-8, as torch reads it; else bytes of a type of their own."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ByteString(raw)


def key_text(key: Any) -> Any:
    """A key as text: one that Python 2 wrote as bytes that are not UTF-8 is read as latin-1."""
    return key.decode("latin-1") if type(key) is ByteString else key


def encoded(text: LongValue) -> LongValue | None:
    """The bytes of `_codecs.encode(text, "latin1")` for a long text; None where latin-1 lacks a character.

    The text is read once, in pieces, to learn where each of its bytes is.
    """
    data = text.data

    def piece(at: int) -> tuple[bytes, int]:
        """The characters from byte `at` on as latin-1, and where the next piece begins."""
        raw = data.read(at, min(_PIECE, data.length - at))
        chars, used = utf_8_decode(raw, "strict", at + len(raw) == data.length)
        return chars.encode("latin-1"), at + used

    counts, at = [0], 0  # characters before each piece
    begins = [0]
    try:
        while at < data.length:
            chars, at = piece(at)
            counts.append(counts[-1] + len(chars))
            begins.append(at)
    except UnicodeError:
        return None

    def read(offset: int, length: int) -> bytes:
        first, last = bisect_right(counts, offset) - 1, bisect_left(counts, offset + length)
        content = b"".join(piece(at)[0] for at in begins[first:last] if at < data.length)
        return content[offset - counts[first] :][:length]

    return LongValue(Computed(counts[-1], read), "bytes", text)


_PIECE = 1 << 16
