"""A pickle without its long values: what a reader needs of a large pickle to know everything in it but the data.

`skeleton` walks the opcodes without executing them and copies them, except that each byte string or text of at least
64 KB becomes a private opcode and a stub, which knows where its bytes are. `decode` puts the stubs back onto its
stack, and builders (`_load_from_bytes`, numpy's arrays) make storages of them that are read when they are wanted.
`decode_lazily` decodes a skeleton, and gives every stub that no builder understood its plain value. A text becomes a
stub too: protocol 2 spells bytes as `_codecs.encode(text, "latin1")`, and the builder of that call gives a stub of
bytes (see `encoded`). Texts in protocol 0, which end with their line, stay where they are, up to 64 MiB each.

Frames are checked here (PEP 3154: no opcode reaches over the end of one, none begins inside another). `decode` passes
over their lengths, which count the long values, whenever it is given a list of stubs, even an empty one.
Source of the opcodes: the comments of Lib/pickletools.py.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptool.checkpoint import Data
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.nodes import Global, Object, canonical
from ckptool.checkpoint.numpy_arrays import LazyBytes
from ckptool.checkpoint.strided import subrange
from ckptool.errors import CkptoolError, Corrupt, LimitExceeded, Truncated, Unsupported, counted
from ckptool.pickles.decode import Decoded, decode
from ckptool.pickles.machine import REFUSED, STUB
from ckptool.pickles.objects import DAMAGED, MAX_INTEGER_BITS
from ckptool.pickles.strings import MAX_STRING, StubbedValue, check_size, whole
from ckptool.pickles.torch_objects import Builder

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
    try:
        return _Lexer(data, offset).run()
    except CkptoolError as error:
        raise error.within(name) from None


def decode_lazily(
    made: Skeleton,
    persistent: Callable[[Any], Any],
    builders: Mapping[Global, Builder],
    *,
    name: str = "data.pkl",
    file_bytes: int = 0,
    finish: Callable[[Decoded], Decoded] = lambda decoded: decoded,
) -> Decoded:
    """The tree of a skeleton (see `decode`), with a plain value for each stub that no builder used.

    It is decoded again with those values in place of the stubs, and then, if it must be, with those of all; `finish` is
    called after each time. Raises `LimitExceeded` for such a value of more than 64 MiB, and what
    `decode` raises.
    """
    plain: set[StubbedValue] = set()
    while True:
        total = len(made.data)
        for stub in made.stubs:
            if stub in plain:
                check_size(stub)
                total += stub.data.length
        if total > MAX_SKELETON:
            raise _too_long(total)
        stubs = [whole(stub) if stub in plain else stub for stub in made.stubs]
        decoded = finish(
            decode(made.data, persistent, builders, name=name, file_bytes=file_bytes, stubs=stubs, place=made.place)
        )
        if len(plain) == len(stubs):
            return decoded
        left = {stub.of or stub for stub in leaves((decoded.root, decoded.discarded), StubbedValue)}
        if not left:
            return decoded
        plain = set(made.stubs) if plain else left


def _too_long(size: int) -> LimitExceeded:
    what = f"a pickle of {size:,} bytes beside the data of its tensors"
    return LimitExceeded(what, f"At most {MAX_SKELETON:,} are read.")


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
    """Walks the opcodes through a window: `buffer` begins at byte `base` of the data; the next opcode is at `pos`."""

    run_of_opcodes = _RUN
    __slots__ = ("base", "buffer", "data", "frame", "parts", "pos", "size", "spots", "stubs")

    def __init__(self, data: Data, offset: int) -> None:
        self.data = data
        self.frame = -1  # where the frame ends that we are in
        self.parts: list[bytes] = []  # the skeleton up to the window
        self.size = 0
        self.spots: list[tuple[int, int]] = []
        self.stubs: list[StubbedValue] = []
        self.base, self.pos, self.buffer = offset, 0, b""
        self._move(offset, _FIRST_WINDOW)

    def run(self) -> Skeleton:
        while (op := self._skip()) != _STOP:
            if op in _SIZED:
                self._value(op)
            elif op >= 0:
                self._other(op)
            elif self.base + self.pos == self.frame:
                self.frame = -1
            else:
                self._need(1)
        end = self.base + self.pos + 1
        if self.frame not in (-1, end):
            self.pos += 1
            raise self._error("a frame that goes on after the end of the pickle")
        self._keep(self.buffer[: self.pos + 1], self.base)
        return Skeleton(b"".join(self.parts), self.stubs, end, self.spots)

    def _skip(self) -> int:
        """Goes over what is short; the next opcode, or -1 where the window or the frame ends."""
        pos, buffer, run_of_opcodes = self.pos, self.buffer, self.run_of_opcodes.match
        limit = min(len(buffer), self.frame - self.base) if self.frame >= 0 else len(buffer)
        while True:
            run = run_of_opcodes(buffer, pos, limit)
            self.pos = pos = run.end() if run else pos
            op = buffer[pos] if pos < limit else -1
            width = 4 if op == 0x58 else 1 if op in _SHORT else 0
            begin = pos + 1 + width
            size = int.from_bytes(buffer[pos + 1 : begin], "little")
            if not width or size >= LONG_VALUE or begin + size > limit:
                return op
            pos = begin + size

    # One opcode ---------------------------------------------------------------------------------------------------

    def _value(self, op: int) -> None:
        """Goes over a value with its length in front of it; leaves it out where it is long."""
        width, signed, kind = _SIZED[op]
        self._need(1 + width)
        size = int.from_bytes(self.buffer[self.pos + 1 : self.pos + 1 + width], "little", signed=signed)
        if size < 0:
            raise self._error(f"a length of {size:,}")
        if kind == "integer" and size * 8 > MAX_INTEGER_BITS:
            what = f"an integer of {counted(size * 8, 'bit')}"
            raise self._error(what, LimitExceeded, f"At most {MAX_INTEGER_BITS:,} are read.")
        if size < LONG_VALUE or kind == "integer":
            self._need(1 + width + size)
            self.pos += 1 + width + size
            return
        self._check_room(1 + width + size)
        place = self.base + self.pos
        begin = place + 1 + width
        self._move(begin + size, _FIRST_WINDOW)
        self._keep(bytes([STUB]) + len(self.stubs).to_bytes(4, "little"), place)
        self.stubs.append(StubbedValue(subrange(self.data, begin, size), kind))

    def _other(self, op: int) -> None:
        if op in _FIXED:
            self._need(1 + _FIXED[op])
            self.pos += 1 + _FIXED[op]
        elif op in _LINES:
            for _ in range(_LINES[op]):
                self._line()
            self.pos += 1
        elif op == _FRAME:
            self._need(9)
            if self.frame >= 0:
                raise self._error("a frame inside a frame")
            size = int.from_bytes(self.buffer[self.pos + 1 : self.pos + 9], "little")
            begin = self.base + self.pos + 9
            if begin + size > self.data.length:
                what = f"a frame of {size:,} bytes, where {self.data.length - begin:,} are left"
                raise self._error(what, Corrupt, "The file is truncated or malicious.")
            self.frame = begin + size
            self.pos += 9
        elif op in REFUSED:
            raise self._error(f"opcode {REFUSED[op]} is not read", Unsupported, "No PyTorch file uses it.")
        else:
            raise self._error(f"0x{op:02x} is not a pickle opcode")

    def _line(self) -> None:
        """Goes to the line break after the next byte."""
        self.pos += 1
        while True:
            end = self.buffer.find(b"\n", self.pos, len(self.buffer) if self.frame < 0 else self.frame - self.base)
            seen = (end if end >= 0 else len(self.buffer)) - self.pos
            if seen > MAX_STRING:
                raise self._error(f"a text of more than {MAX_STRING:,} bytes", LimitExceeded, "No more are read.")
            if end >= 0:
                self.pos = end
                return
            self._need(seen + 1, 2 * seen + _FIRST_WINDOW)

    # The window ---------------------------------------------------------------------------------------------------

    def _need(self, length: int, window: int = 0) -> None:
        """Makes sure that so many bytes from here are in the window."""
        self._check_room(length)
        if self.pos + length > len(self.buffer):
            self._move(self.base + self.pos, max(length, window, _WINDOW))

    def _check_room(self, length: int) -> None:
        end = self.base + self.pos + length
        if 0 <= self.frame < end:
            raise self._error("an opcode that runs past the end of its frame")
        if end > self.data.length:
            what = f"{length:,} bytes are expected, {self.data.length - self.base - self.pos:,} are there"
            raise self._error(what, Truncated, "The pickle was cut off.")

    def _move(self, place: int, length: int) -> None:
        """Keeps what was passed, and goes on at another place of the data."""
        self._keep(self.buffer[: self.pos], self.base)
        self.buffer = self.data.read(place, min(length, self.data.length - place))
        self.base, self.pos = place, 0

    def _keep(self, part: bytes, place: int) -> None:
        self.spots.append((self.size, place))
        self.parts.append(part)
        self.size += len(part)
        if self.size > MAX_SKELETON:
            raise _too_long(self.size)

    def _error(self, what: str, kind: type[CkptoolError] = Corrupt, why: str = DAMAGED) -> CkptoolError:
        return kind(f"{what} (at byte {self.base + self.pos:,})", why)


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

    def _other(self, op: int) -> None:
        if op in b"ci":
            self._need(min(403, self.data.length - self.base - self.pos))
            names = _NAMES.match(self.buffer, self.pos + 1)
            if names is None:
                raise self._error("a line that is no name")
            self.named = True
            if op == ord("i"):
                raise _Reached
            self.pos = names.end()
            return
        if op in _LINES and op != ord("V"):
            raise self._error("a line that is no value")
        if op in _CALLS and self.named:
            raise _Reached
        self.named |= op == _STACK_GLOBAL
        super()._other(op)


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
        if not isinstance(node, Object):
            continue
        match canonical(node.fn), node.state, node.args:
            case "numpy.core.multiarray._reconstruct", tuple((*rest, StubbedValue() as stub)), _ if stub.kind != "text":
                node.state = (*rest, LazyBytes(stub.data, stub.kind == "bytearray"))
            case "numpy.core.numeric._frombuffer", _, tuple((StubbedValue() as stub, *rest)) if stub.kind != "text":
                node.args = (LazyBytes(stub.data, stub.kind == "bytearray"), *rest)
    return decoded
