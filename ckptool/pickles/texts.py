"""Texts and byte strings of pickles: what Python 2 meant by its own, and the long ones that were left in the file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.commands import FILE, OUT, command
from ckptool.checkpoint.nodes import ByteString, Global
from ckptool.errors import Corrupt, LimitExceeded, counted, form, listed, printable
from ckptool.pickles.builders import StubbedValue

MAX_STRING = 64 << 20


def check_size(blob: StubbedValue) -> None:
    """Raises `LimitExceeded` for a blob that is too long to be a plain value."""
    size, kind = blob.data.length, "text of Python 2" if blob.kind == "string" else blob.kind
    if size > MAX_STRING:
        raise LimitExceeded(
            f"a {kind} of {size:,} bytes that belongs to no tensor", f"At most {MAX_STRING:,} are read into memory."
        )


def whole(value: Any) -> Any:
    """The plain value of a blob, read into memory; anything else as it is. Raises `LimitExceeded` above 64 MiB."""
    if not isinstance(value, StubbedValue):
        return value
    check_size(value)
    content = value.data.read(0, value.data.length)
    if value.kind == "text":
        try:
            return str(content, "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise Corrupt("a text that is not UTF-8", "The pickle was damaged, or made to mislead.") from None
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
    """A Python 2 `str`: text where its bytes are valid UTF-8, as torch's own default reads it; else bytes of their own kind."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ByteString(raw)


def key_text(key: Any) -> Any:
    """A key that Python 2 wrote as bytes as the text that it stands for: latin-1 where it is not UTF-8."""
    return key.decode("latin-1") if type(key) is ByteString else key


def protocol_notes(protocol: int) -> list[Note]:
    """A note on a pickle of protocol 4 or 5: torch/_weights_only_unpickler.py knows none of their opcodes."""
    if protocol < 4:
        return []
    what = f"pickled with protocol {protocol}, which torch.load(weights_only=True) does not read"
    return [Note("pickle-protocol", what, command("convert", FILE, out=OUT))]


def python2_notes(count: int) -> list[Note]:
    """A note on so many texts of Python 2 that are not UTF-8."""
    if not count:
        return []
    what = (
        f"{counted(count, 'text')} of Python 2 {form(count, 'is', 'are')} not UTF-8: keys among them "
        f"were read as latin-1, values are kept as bytes"
    )
    return [Note("python2-text", what)]


LEFT_BEHIND = "old-gradients"


def gradient_notes(count: int) -> list[Note]:
    """A note on gradients that torch before 0.2 saved inside of parameters; no torch since then reads them."""
    if not count:
        return []
    what = counted(count, "gradient") if count > 1 else "a gradient"
    said = f"{what} inside of parameters, as torch once saved them: no later torch reads them, and a rewritten file leaves them out"
    return [Note(LEFT_BEHIND, said)]


def nested_name_notes(names: Sequence[Global]) -> list[Note]:
    """A note on names of nested classes in a pickle whose protocol cannot spell them."""
    if not names:
        return []
    named = listed([printable(str(name)) for name in names], 1)
    what = (
        f"{form(len(names), 'the name', 'the names')} {named} {form(len(names), 'has a dot', 'have dots')}, "
        "which pickles below protocol 4 cannot spell: torch.load fails there"
    )
    return [Note("nested-name", what, command("convert", FILE, out=OUT))]
