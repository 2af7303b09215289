"""A pickle without its long values: what a reader needs of a large pickle to know everything in it but the data.

`skeleton` walks the opcodes without executing them and copies them, except that each byte string or text of at least
64 KB becomes a private opcode and a stub, which knows where its bytes are. `decode` puts the stubs back onto its
stack, and builders (`_load_from_bytes`, numpy's arrays) make storages of them that are read when they are wanted.
`decode_lazily` decodes a skeleton, and gives every stub that no builder understood its plain value.
A text becomes a stub too: protocol 2 spells bytes as
`_codecs.encode(text, "latin1")`, and the builder of that call gives a stub of bytes (see `encoded`).
Texts in protocol 0, which end with their line, stay where they are, up to 64 MiB each.

Frames are checked here (PEP 3154: no opcode reaches over the end of one, none begins inside another): `decode` goes
over their lengths, which count the long values, when it is given stubs, be it none.
Source of the opcodes: the comments of Lib/pickletools.py.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptool.checkpoint import Data
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.nodes import Global, Object, canonical
from ckptool.checkpoint.numpy_arrays import LazyBytes
from ckptool.checkpoint.strided import subrange
from ckptool.errors import CkptoolError, Corrupt, LimitExceeded, Truncated, Unsupported, counted
from ckptool.pickles.builders import Builder
from ckptool.pickles.decode import Decoded, decode
from ckptool.pickles.machine import REFUSED, STUB
from ckptool.pickles.reader import MAX_INTEGER_BITS
from ckptool.pickles.strings import MAX_STRING, StubbedValue, check_size, whole

Leaf = TypeVar("Leaf")
LONG_VALUE = 1 << 16  # bytes: shorter values are copied
MAX_SKELETON = 1 << 30
_FIRST_WINDOW, _WINDOW = 1 << 16, 1 << 20


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A pickle without its long values.

    data: its opcodes; what was at byte `place(i)` of the file is at byte `i` here.  stubs: its long values, by number.
    end: the byte after its STOP, counted as the offset was that it was read from.
    """

    data: bytes
    stubs: list[StubbedValue]
    end: int
    _spots: list[tuple[int, int]] = field(repr=False)

    def place(self, at: int) -> int:
        """The place of byte `at` of the skeleton in the data that it was read from."""
        here, there = self._spots[max(0, bisect_right(self._spots, (at, 1 << 63)) - 1)]
        return there + at - here


def skeleton(data: Data, offset: int = 0, *, name: str) -> Skeleton:
    """The skeleton of the pickle at byte `offset` of `data`. No long value is read, and nothing after its end.

    name: what to call the pickle in errors. Raises `Truncated`, `Corrupt`, `LimitExceeded` or `Unsupported`, each with
    the byte.
    """
    lexer = _Lexer(data, offset)
    try:
        return lexer.run()
    except CkptoolError as error:
        raise error.within(name) from None


def decode_lazily(
    made: Skeleton,
    persistent: Callable[[Any], Any],
    builders: Mapping[Global, Builder],
    *,
    name: str = "data.pkl",
    file_bytes: int = 0,
    begin: Callable[[], None] = lambda: None,
    finish: Callable[[Decoded], Decoded] = lambda decoded: decoded,
) -> Decoded:
    """The tree of a skeleton (see `decode`), with a plain value for each stub that no builder used.

    It is decoded again with those values in place of the stubs: `begin` is called before each time, `finish` after.
    Raises `LimitExceeded` for such a value of more than 64 MiB, and what `decode` raises.
    """

    def run(stubs: Sequence[Any]) -> Decoded:
        begin()
        return finish(
            decode(made.data, persistent, builders, name=name, file_bytes=file_bytes, stubs=stubs, place=made.place)
        )

    stubs: list[Any] = list(made.stubs)
    decoded = run(stubs)
    for everything in (False, True):
        left = (
            {stub.of or stub for stub in leaves((decoded.root, decoded.discarded), StubbedValue)}
            if made.stubs
            else set()
        )
        if not left:
            return decoded
        chosen = {id(stub) for stub in made.stubs if everything or stub in left}
        _check_total(made, chosen)
        stubs = [whole(stub) if id(stub) in chosen else stub for stub in stubs]
        decoded = run(stubs)
    return decoded


def _check_total(made: Skeleton, chosen: set[int]) -> None:
    total = len(made.data)
    for stub in made.stubs:
        if id(stub) in chosen:
            check_size(stub)
            total += stub.data.length
    if total > MAX_SKELETON:
        raise _too_long(total)


def _too_long(size: int) -> LimitExceeded:
    return LimitExceeded(
        f"a pickle of {size:,} bytes beside the data of its tensors", f"At most {MAX_SKELETON:,} are read."
    )


def leaves(root: Any, kind: type[Leaf]) -> set[Leaf]:
    """Every value of a kind to which the values refer; also those in the calls of composites."""
    return {node for node in visit(root) if isinstance(node, kind)}


# The lexer -----------------------------------------------------------------------------------------------------------

_FIXED = {  # opcode -> the bytes of its argument
    **dict.fromkeys(b"()012NQRabdelostu]}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94", 0),
    **dict.fromkeys(b"Kqh\x80", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jrj", 4),
    **dict.fromkeys(b"G", 8),
}
_LINES = {**dict.fromkeys(b"ILFpgPSV", 1), **dict.fromkeys(b"ci", 2)}
# opcode -> the width of its length field, whether that is signed, and what its value is when it is long
_SIZED: dict[int, tuple[int, bool, str]] = {
    0x58: (4, False, "text"),  # BINUNICODE
    0x8C: (1, False, "text"),  # SHORT_BINUNICODE
    0x8D: (8, False, "text"),  # BINUNICODE8
    0x43: (1, False, "bytes"),  # SHORT_BINBYTES
    0x42: (4, False, "bytes"),  # BINBYTES
    0x8E: (8, False, "bytes"),  # BINBYTES8
    0x96: (8, False, "bytearray"),  # BYTEARRAY8
    0x55: (1, False, "string"),  # SHORT_BINSTRING
    0x54: (4, True, "string"),  # BINSTRING
    0x8A: (1, False, "integer"),  # LONG1
    0x8B: (4, True, "integer"),  # LONG4
}
_SHORT = frozenset(op for op, (width, _, _) in _SIZED.items() if width == 1)
_FRAME, _STOP = 0x95, 0x2E


def _run_of_opcodes(lines: bytes, but: bytes = b"") -> re.Pattern[bytes]:
    """Matches opcodes with short arguments of fixed width or in lines, thousands at a time (a match remembers each)."""
    widths: dict[int, list[int]] = {}
    for opcode, width in _FIXED.items():
        if opcode not in but:
            widths.setdefault(width, []).append(opcode)
    kinds = [b"[" + re.escape(bytes(opcodes)) + b"]" + b"." * width for width, opcodes in widths.items()]
    return re.compile(b"(?:" + b"|".join([*kinds, lines]) + b"){0,4096}", re.DOTALL)


_RUN = _run_of_opcodes(rb"[ILFpgPSV][^\n]{0,99}\n|[ci][^\n]{0,99}\n[^\n]{0,99}\n")


class _Lexer:
    """Walks the opcodes through a window: `buffer` begins at byte `base` of the data, and is copied up to `start`."""

    run_of_opcodes = _RUN
    __slots__ = ("base", "buffer", "data", "frame", "limit", "parts", "size", "spots", "start", "stubs")

    def __init__(self, data: Data, offset: int) -> None:
        self.data = data
        self.base = offset
        self.frame = -1  # where the frame ends that we are in
        self.parts: list[bytes] = []
        self.size = 0
        self.spots: list[tuple[int, int]] = []
        self.stubs: list[StubbedValue] = []
        self.start = 0
        self.buffer = b""
        self._move(offset, _FIRST_WINDOW)

    def run(self) -> Skeleton:
        pos, buffer, limit, run_of_opcodes = 0, self.buffer, self.limit, self.run_of_opcodes.match
        while True:
            run = run_of_opcodes(buffer, pos, limit)
            pos = run.end() if run else pos
            op = buffer[pos] if pos < limit else -1
            width = 4 if op == 0x58 else 1 if op in _SHORT else 0
            begin = pos + 1 + width
            if width and begin <= limit:
                size = int.from_bytes(buffer[pos + 1 : begin], "little")
                if size < LONG_VALUE and begin + size <= limit:
                    pos = begin + size
                    continue
            if op == _STOP:
                return self._finished(pos + 1)
            pos = self._slowly(op, pos)
            buffer, limit = self.buffer, self.limit

    def _slowly(self, op: int, pos: int) -> int:
        """Goes over an opcode that is rare, or moves the window where it or a frame cuts the opcode."""
        if op < 0:
            # Goes on where the window or the frame ends.
            if self.base + pos == self.frame:
                self.frame = -1
                self._set_limit()
                return pos
            return self._have(pos, 1)
        return self._value(op, pos) if op in _SIZED else self._other(op, pos)

    def _finished(self, pos: int) -> Skeleton:
        end = self.base + pos
        if self.frame not in (-1, end):
            raise self._corrupt(pos, "a frame that goes on after the end of the pickle")
        self._copy(pos)
        return Skeleton(b"".join(self.parts), self.stubs, end, self.spots)

    # One opcode ---------------------------------------------------------------------------------------------------

    def _value(self, op: int, pos: int) -> int:
        """Goes over a value with its length in front of it; leaves it out where it is long."""
        width, signed, kind = _SIZED[op]
        pos = self._have(pos, 1 + width)
        size = int.from_bytes(self.buffer[pos + 1 : pos + 1 + width], "little", signed=signed)
        if size < 0:
            raise self._corrupt(pos, f"a length of {size:,}")
        if kind == "integer" and size * 8 > MAX_INTEGER_BITS:
            raise self._error(
                LimitExceeded,
                pos,
                f"an integer of {counted(size * 8, 'bit')}",
                f"At most {MAX_INTEGER_BITS:,} are read.",
            )
        self._check_room(pos, 1 + width + size)
        if size < LONG_VALUE or kind == "integer":
            return self._have(pos, 1 + width + size) + 1 + width + size
        begin = self.base + pos + 1 + width
        self._copy(pos)
        self._add(bytes([STUB]) + len(self.stubs).to_bytes(4, "little"), self.base + pos)
        self.stubs.append(StubbedValue(subrange(self.data, begin, size), kind))
        return self._move(begin + size, _FIRST_WINDOW)

    def _other(self, op: int, pos: int) -> int:
        if op in _LINES:
            for _ in range(_LINES[op]):
                pos = self._line(pos + 1)
            return pos + 1
        if op in _FIXED:
            return self._have(pos, 1 + _FIXED[op]) + 1 + _FIXED[op]
        if op == _FRAME:
            return self._enter_frame(pos)
        if op in REFUSED:
            raise self._error(Unsupported, pos, f"opcode {REFUSED[op]} is not read", "No PyTorch file uses it.")
        raise self._corrupt(pos, f"0x{op:02x} is not a pickle opcode")

    def _line(self, pos: int) -> int:
        """The place of the line break at or after `pos`."""
        while True:
            end = self.buffer.find(b"\n", pos, self.limit)
            seen = (end if end >= 0 else len(self.buffer)) - pos
            if seen > MAX_STRING:
                raise self._error(LimitExceeded, pos, f"a text of more than {MAX_STRING:,} bytes", "No more are read.")
            if end >= 0:
                return end
            self._check_room(pos, seen + 1)
            pos = self._move_keeping(pos, 2 * seen + _FIRST_WINDOW)

    def _enter_frame(self, pos: int) -> int:
        pos = self._have(pos, 9)
        if self.frame >= 0:
            raise self._corrupt(pos, "a frame inside a frame")
        begin = self.base + pos + 9
        self.frame = begin + int.from_bytes(self.buffer[pos + 1 : pos + 9], "little")
        if self.frame > self.data.length:
            what = f"a frame of {self.frame - begin:,} bytes, where {self.data.length - begin:,} are left"
            raise self._error(Corrupt, pos, what, "The file is truncated or malicious.")
        self._set_limit()
        return pos + 9

    # The window ---------------------------------------------------------------------------------------------------

    def _have(self, pos: int, length: int) -> int:
        """Makes sure that `length` bytes from `pos` are in the window; gives the new `pos`."""
        self._check_room(pos, length)
        if pos + length <= len(self.buffer):
            return pos
        return self._move_keeping(pos, length)

    def _check_room(self, pos: int, length: int) -> None:
        end = self.base + pos + length
        if 0 <= self.frame < end:
            raise self._corrupt(pos, "an opcode that runs past the end of its frame")
        if end > self.data.length:
            what = f"{length:,} bytes are expected, {self.data.length - self.base - pos:,} are there"
            raise self._error(Truncated, pos, what, "The pickle was cut off.")

    def _move_keeping(self, pos: int, length: int) -> int:
        self._copy(pos)
        return self._move(self.base + pos, max(length, _WINDOW))

    def _move(self, place: int, length: int) -> int:
        self.buffer = self.data.read(place, min(length, self.data.length - place))
        self.base, self.start = place, 0
        self._set_limit()
        return 0

    def _set_limit(self) -> None:
        self.limit = min(len(self.buffer), self.frame - self.base) if self.frame >= 0 else len(self.buffer)

    def _copy(self, pos: int) -> None:
        if pos > self.start:
            self._add(self.buffer[self.start : pos], self.base + self.start)
            self.start = pos

    def _add(self, part: bytes, place: int) -> None:
        self.spots.append((self.size, place))
        self.parts.append(part)
        self.size += len(part)
        if self.size > MAX_SKELETON:
            raise _too_long(self.size)

    def _corrupt(self, pos: int, what: str) -> CkptoolError:
        return self._error(Corrupt, pos, what, "The pickle is damaged or malicious.")

    def _error(self, kind: type[CkptoolError], pos: int, what: str, why: str) -> CkptoolError:
        return kind(f"{what} (at byte {self.base + pos:,})", why)


# Bytes that need not be a pickle --------------------------------------------------------------------------------------

_NAMES = re.compile(rb"[\w.]{1,200}\n[\w.]{1,200}\n")
_STACK_GLOBAL, _CALLS = 0x93, b"Rob\x81\x92"  # REDUCE, OBJ, BUILD, NEWOBJ, NEWOBJ_EX
_STRICT_RUN = _run_of_opcodes(
    rb"[pgI]-?\d{1,18}\n|[LF][-+.\deL]{1,30}\n|S'[^\n\\]{0,99}'\n|V[^\n]{0,99}\n", bytes([_STACK_GLOBAL]) + _CALLS
)


class _Reached(Exception):
    """The walk came to a call."""


class _CallFinder(_Lexer):
    """Stops at the first call of what was named, and at a line that pickle would not take."""

    __slots__ = ("named",)
    run_of_opcodes = _STRICT_RUN

    def _other(self, op: int, pos: int) -> int:
        if op in b"ci":
            pos = self._have(pos, min(403, self.data.length - self.base - pos))
            names = _NAMES.match(self.buffer, pos + 1)
            if names is None:
                raise self._corrupt(pos, "a line that is no name")
            self.named = True
            if op == ord("i"):
                raise _Reached
            return names.end()
        if op in _LINES and op != ord("V"):
            raise self._corrupt(pos, "a line that is no value")
        if op in _CALLS and self.named:
            raise _Reached
        self.named |= op == _STACK_GLOBAL
        return super()._other(op, pos)


def reaches_a_call(data: Data) -> bool:
    """True where pickle, reading from the first byte, comes to a call before it comes to what it cannot read: whatever
    else the bytes are, `torch.load` makes that call."""
    finder = _CallFinder(data, 0)
    finder.named = False
    try:
        finder.run()
    except (_Reached, LimitExceeded):  # or to a text of many megabytes, which pickle would read
        return True
    except CkptoolError:
        pass
    return False


def left_in_file(decoded: Decoded) -> Decoded:
    """The decoded pickle with the data of large arrays as `LazyBytes` instead of a skeleton's stubs."""
    for node in visit((decoded.root, decoded.discarded)):
        if isinstance(node, Object):
            _leave_data(node)
    return decoded


def _leave_data(node: Object) -> None:
    called, state, args = canonical(node.fn), node.state, node.args
    if (
        called == "numpy.core.multiarray._reconstruct"
        and type(state) is tuple
        and state
        and isinstance(state[-1], StubbedValue)
    ):
        node.state = (*state[:-1], _long(state[-1]))
    elif (
        called == "numpy.core.numeric._frombuffer"
        and type(args) is tuple
        and args
        and isinstance(args[0], StubbedValue)
    ):
        node.args = (_long(args[0]), *args[1:])


def _long(stub: StubbedValue) -> StubbedValue | LazyBytes:
    """A text is no array's data, and stays what it is."""
    return stub if stub.kind == "text" else LazyBytes(stub.data, stub.kind == "bytearray")
