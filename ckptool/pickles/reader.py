"""The bytes of a pickle while the machine runs over them: its place, its frame, and the arguments of opcodes.

Nothing is copied before it is known to be there, and everything raised says at which byte.
"""

from __future__ import annotations

import re
from math import isinf
from typing import Any

from ckptool.errors import Corrupt, LimitExceeded, Truncated, counted
from ckptool.pickles.strings import MAX_STRING, python2_text, python2_unescaped

MAX_INTEGER_BITS = 4_096
# Numbers that all readers take for the same: of a leading zero, C's makes octal up to Python 3.13, and Python's own an
# error.
_NUMBER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)")
_TRUTHS = {"00": False, "+0": False, "-0": False, "01": True, "+1": True}
_FLOAT = re.compile(
    r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|inf(?:inity)?|nan)", re.IGNORECASE
)
FRAME_END = 0xFE  # no opcode of Python's: it stands behind the copy of a frame
DAMAGED = "The pickle is damaged or malicious."


class PickleReader:
    """A pickle and the place `at` in its `data`, which is the pickle or the frame that begins at its byte `base`."""

    __slots__ = ("at", "base", "data", "in_frame", "outer")

    def __init__(self, data: bytes) -> None:
        self.data = self.outer = data
        self.in_frame = False
        self.base = 0
        self.at = 0

    def straddling(self) -> Corrupt:
        """The error where the bytes of a frame run out in the middle of an opcode."""
        return Corrupt(f"an opcode runs past the end of the frame that begins at byte {self.base:,}", DAMAGED)

    def corrupt(self, pos: int, what: str) -> Corrupt:
        """The error about the byte at `pos`."""
        self.at = pos
        return Corrupt(what, DAMAGED)

    def beyond(self, pos: int, what: str, why: str) -> LimitExceeded:
        """The error about more than is read, at the byte at `pos`."""
        self.at = pos
        return LimitExceeded(what, why)

    # Frames: the machine works on a copy of one at a time, with an opcode of our own behind it. Nothing can reach over
    # its end then.

    def enter_frame(self, begin: int, size: int) -> bytes:
        """The bytes to go on with, from their first."""
        if self.in_frame:
            raise self.corrupt(begin, "a frame inside a frame")
        if size > len(self.data) - begin:
            raise self.corrupt(begin, "a frame that is longer than the pickle")
        self.in_frame, self.base, self.outer = True, begin, self.data
        self.data = self.data[begin : begin + size] + bytes([FRAME_END])
        return self.data

    def leave_frame(self) -> bytes:
        """The whole pickle again."""
        self.in_frame, self.base, self.data = False, 0, self.outer
        return self.data

    def stop_in_frame(self, pos: int) -> int:
        """The byte after the end of the pickle; raises `Corrupt` for a frame that goes on."""
        if pos != len(self.data) - 1:
            raise self.corrupt(pos, "a frame that goes on after the end of the pickle")
        pos += self.base
        self.leave_frame()
        return pos

    # Arguments ---------------------------------------------------------------------------------------------------

    def take(self, pos: int, size: int) -> bytes:
        """So many bytes; raises `Truncated` where fewer are left, before any are copied."""
        if size < 0:
            raise self.corrupt(pos, f"a length of {size:,}")
        if size > len(self.data) - pos:
            self.at = pos
            raise Truncated(
                f"{size:,} bytes are expected, {max(0, len(self.data) - pos):,} are there", "The pickle was cut off."
            )
        return self.data[pos : pos + size]

    def text(self, pos: int, size: int) -> str:
        """UTF-8, in which pickles may have lone surrogates."""
        if size > MAX_STRING:
            raise self.beyond(pos, f"a text of {size:,} bytes", f"At most {MAX_STRING:,} are read.")
        raw = self.take(pos, size)
        try:
            return str(raw, "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.corrupt(pos, "text that is not UTF-8") from None

    def integer(self, pos: int, size: int) -> int:
        """A little-endian integer of so many bytes."""
        if size * 8 > MAX_INTEGER_BITS:
            what = f"an integer of {counted(size * 8, 'bit')}"
            raise self.beyond(pos, what, f"At most {MAX_INTEGER_BITS:,} are read.")
        return int.from_bytes(self.take(pos, size), "little", signed=True)

    def raw_line(self, pos: int) -> tuple[bytes, int]:
        """The bytes up to the end of the line, and where the next one begins."""
        end = self.data.find(b"\n", pos)
        if end < 0:
            self.at = pos
            raise Truncated("a line without an end", "The pickle was cut off.")
        if end - pos > MAX_STRING:
            raise self.beyond(pos, f"a text of {end - pos:,} bytes", f"At most {MAX_STRING:,} are read.")
        return self.data[pos:end], end + 1

    def line(self, pos: int) -> tuple[str, int]:
        """The text up to the end of the line, and where the next one begins."""
        raw, end = self.raw_line(pos)
        try:
            return raw.decode(), end
        except UnicodeDecodeError:
            raise self.corrupt(pos, "a name that is not UTF-8") from None

    def unescaped(self, raw: bytes, pos: int) -> str:
        """The text of a Unicode literal without its quotes."""
        try:
            return raw.decode("raw_unicode_escape")
        except UnicodeDecodeError:
            raise self.corrupt(pos, "a text with a broken escape") from None

    def quoted(self, raw: bytes, pos: int) -> Any:
        """The text of a Python 2 literal."""
        raw = raw.strip()
        if len(raw) < 2 or raw[:1] != raw[-1:] or raw[0] not in b"'\"":
            raise self.corrupt(pos, "a text without quotes")
        return python2_text(python2_unescaped(raw[1:-1]))

    def number(self, line: str, pos: int) -> int:
        """The integer that a line spells."""
        if len(line) > MAX_INTEGER_BITS // 4:
            raise self.corrupt(pos, f"an integer of {counted(len(line), 'digit')}")
        if _NUMBER.fullmatch(line) is None:
            raise self.corrupt(pos, f"{line[:40]!r} where a number should be")
        return int(line)

    def scalar(self, op: int, line: str, pos: int) -> Any:
        """The number that a line of protocol 0 spells."""
        if op == 0x49:  # INT, which also spells the booleans of protocol 0: to C's reader, a 0 or 1 of two characters
            return _TRUTHS[line] if line in _TRUTHS else self.number(line, pos)
        if op == 0x4C:  # LONG
            return self.number(line.removesuffix("L"), pos)
        # FLOAT
        if _FLOAT.fullmatch(line) is None or (isinf(float(line)) and "inf" not in line.lower()):
            raise self.corrupt(pos, f"{line[:40]!r} where a number should be")
        return float(line)
