"""A pickle decoded: opcodes in, a tree of names, values and tensors out; nothing is imported, resolved or called.

`decode` sets the limits, runs the machine (`machine`) and turns whatever goes wrong into errors that name the byte. For
a large pickle `skeleton` returns all but its long values, and `decode_lazily` decodes that.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from ckptool.checkpoint import Composite, Data, FileRange, InlineBytes, Note
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.graph import alike, check_depth, structural_parts, visit
from ckptool.checkpoint.nodes import Global, Object, canonical
from ckptool.checkpoint.numpy_arrays import LongValue
from ckptool.commands import FILE, OUT, command
from ckptool.errors import (
    Ambiguous,
    CkptoolError,
    Conflict,
    Corrupt,
    LimitExceeded,
    Truncated,
    UnsafeObject,
    Unsupported,
    counted,
    form,
    listed,
)
from ckptool.facts import dataclass, field
from ckptool.pickles.calls import is_inert
from ckptool.pickles.machine import REFUSED, STUB, Machine
from ckptool.pickles.objects import DAMAGED, MAX_INTEGER_BITS, ObjectMaker, PickleReader
from ckptool.pickles.runs import Runs
from ckptool.pickles.strings import MAX_STRING, check_size, unstub
from ckptool.pickles.torch_objects import BUILDERS, COMPOSED, ORDERED_DICT, REBUILD_TENSOR_V2, Builder, PerPickle

# What a file of any size may ask for (in opcodes); a larger file may ask for one per byte.
FREE_OPCODES = 1_000_000
NESTED_NAMES = 4  # the first protocol in which a dot in a name leads into a class
OLD_GRADIENTS, REPEATED_KEY = "old-gradients", "repeated-key"  # codes of notes
MAX_REPEATED = 100  # keys given twice whose values are compared
FREE_PARTS = 1 << 18  # of composites, counted once for each that uses it; a larger file may have one per byte
FREE_BYTES = 1 << 15  # that builders may copy in the smallest pickle; of a larger one, twice its bytes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Decoded:
    """A decoded pickle. `discarded`: what is not inert and not in its tree: made or imported, and discarded.

    end: the byte after its STOP.  notes: what is unusual about it.
    """

    root: Any
    discarded: tuple[Any, ...]
    protocol: int
    end: int
    notes: tuple[Note, ...] = ()

    def aside(self) -> tuple[Any, ...]:
        """Everything that is not inert, for a pickle of which only the value is used."""
        return self.discarded if is_inert(self.root) else (*self.discarded, self.root)


def decode(
    data: bytes,
    persistent: Callable[[Any], Any],
    builders: Mapping[Global, Builder],
    *,
    name: str = "data.pkl",
    file_bytes: int = 0,
    stubs: Sequence[Any] | None = None,
    place: Callable[[int], int] = int,
) -> Decoded:
    """The tree that the pickle at the start of `data` describes.

    persistent: returns the value of a persistent id.  builders: known functions and what their calls mean.
    name: of the pickle, for errors.  file_bytes: the size of the file it came from, which bounds the work.
    stubs: for a skeleton (whose frames were checked), the values that its opcode 0xFF stands for.
    place: maps a byte of `data` to its byte in the file.
    Raises `Corrupt`, `Truncated`, `LimitExceeded`, `Unsupported` or `Conflict`; each names the byte.
    """
    if stubs is None and data[:1] == b"\x80" and data[1:2] >= b"\4":  # it may have frames
        skeleton(InlineBytes(data), name=name)
        stubs = ()
    left_out = sum(map(len, stubs or ()))
    budget = 2 * max(len(data) + left_out, file_bytes, FREE_BYTES)
    has_tensors = all(builders.get(fn) is BUILDERS[fn] for fn in (REBUILD_TENSOR_V2, ORDERED_DICT))
    builders = {fn: build.within(budget) if type(build) is PerPickle else build for fn, build in builders.items()}
    limit = max(FREE_OPCODES, file_bytes)
    reader = PickleReader(data)
    objects = ObjectMaker(reader, builders, limit, bool(stubs))
    runs = Runs(reader, persistent) if has_tensors else None
    machine = Machine(reader, objects, persistent, limit, stubs, runs)
    try:
        root = machine.run()
        check_depth(root, max(len(data), file_bytes))
        parts_left, has_composites = max(FREE_PARTS, file_bytes), not objects.names.keys().isdisjoint(COMPOSED)
        for node in visit(root) if has_composites else ():
            if isinstance(node, Composite) and (parts_left := parts_left - node.settle()) < 0:
                raise LimitExceeded("tensors that share parts", "Checking it would take too long.")
    except CkptoolError as error:
        raise error.within(f"{name} at byte {place(reader.at):,}") from None
    except (IndexError, struct.error) as error:
        if str(error) in ("list index out of range", "pop from empty list"):
            what = "the pickle pops from an empty stack"
            raise Corrupt(what, "It is damaged, or not a pickle at all.").within(name) from None
        raise Truncated(f"{name}: the pickle ends at byte {place(len(data)):,}, before its STOP") from None
    except KeyError as error:
        raise Corrupt(f"{name} refers to value {error}, which was never stored", DAMAGED) from None
    except UnicodeDecodeError:
        raise Corrupt(f"{name} holds a string that is not UTF-8", DAMAGED) from None
    return Decoded(root, objects.discarded(root), machine.protocol, reader.at, (*_notes(objects, machine.protocol),))


def decode_all(
    data: bytes, persistent: Callable[[Any], Any], builders: Mapping[Global, Builder], *, name: str, file_bytes: int
) -> Decoded:
    """The same for bytes that are one pickle and nothing else. Raises `Ambiguous` for more behind it."""
    decoded = decode(data, persistent, builders, name=name, file_bytes=file_bytes)
    if decoded.end != len(data):
        what = f"{name} has {len(data) - decoded.end:,} bytes after its end"
        raise Ambiguous(what, "A second pickle may be hidden there.")
    return decoded


def _notes(objects: ObjectMaker, protocol: int) -> Iterator[Note]:
    """What is unusual about a pickle."""
    if count := objects.byte_strings:
        what = f"{counted(count, 'text')} of Python 2 {form(count, 'is', 'are')} not UTF-8: keys among them "
        yield Note("python2-text", f"{what}were read as latin-1, values kept as bytes")
    nested = [name for name in objects.names if "." in name.name] if protocol < NESTED_NAMES else []
    if count := len(nested):
        names = f"{form(count, 'the name', 'the names')} {listed(nested, 1)}"
        what = f"{names} {form(count, 'has a dot', 'have dots')}, which pickles below protocol 4 cannot express"
        yield Note("nested-name", f"{what}: torch.load fails there", command("convert", FILE, out=OUT))
    if count := objects.gradients:  # saved by torch before 0.2
        what = f"{counted(count, 'gradient') if count > 1 else 'a gradient'} inside of parameters"
        why = "as torch once saved them: no later torch reads them, and rewriting the file drops them"
        yield Note(OLD_GRADIENTS, f"{what}, {why}")
    # Keys given twice whose values differ or are too large to compare.
    replaced = [
        str(key)[:80]
        for number, (key, old, new) in enumerate(objects.repeated)
        if number >= MAX_REPEATED or not alike(old, new, 1_000)
    ]
    if count := len(replaced):
        what = f"{form(count, 'the key', 'the keys')} {listed(replaced, 3)} {form(count, 'was', 'were')} given twice"
        yield Note(REPEATED_KEY, f"{what}, with different values: the last one counts, as in every reader")


def _has_bytes(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, bytearray) and bool(value))


def protocol_notes(decoded: Decoded) -> list[Note]:
    """A note on a pickle of protocol 4 or 5, or on bytes in protocol 3: torch/_weights_only_unpickler.py knows none of
    their opcodes."""
    protocol = decoded.protocol
    if protocol < 3 or (protocol == 3 and not any(map(_has_bytes, visit(decoded.root)))):
        return []
    subject = "bytes of " if protocol == 3 else ""
    what = f"pickled with {subject}protocol {protocol}, which torch.load(weights_only=True) does not read"
    return [Note("pickle-protocol", what, command("convert", FILE, out=OUT))]


def no_storage(pid: Any) -> Any:
    """The `persistent` of a pickle that has no storages."""
    raise Corrupt("a persistent id in a table that has no storages", "It is a different kind of file.")


# Without the long values ----------------------------------------------------------------------------------------------

# `skeleton` walks the opcodes without executing them and copies them, except that each byte string or text of at least
# 64 KB becomes a private opcode and a stub, which knows where its bytes are. `decode` pushes the stubs onto its stack,
# and builders (`_load_from_bytes`, numpy's arrays) turn them into storages that are read on demand. `decode_lazily`
# decodes a skeleton, and replaces every stub that no builder used by its plain value. A text becomes a stub too:
# protocol 2 writes bytes as `_codecs.encode(text, "latin1")`, whose builder returns a stub of bytes (see `encoded`).
# Texts in protocol 0, which end with their line, stay where they are, up to 64 MiB each.
#
# Frames are checked here (PEP 3154: no opcode extends past the end of one, none begins inside another), also for
# pickles that are decoded at once: `decode` skips their lengths, which count the long values.
# Source of the opcodes: the comments of Lib/pickletools.py.

LONG_VALUE = 1 << 16  # bytes: shorter values are copied
MAX_SKELETON = 1 << 30
_FIRST_WINDOW, _WINDOW = 1 << 16, 1 << 20


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Skeleton:
    """A pickle without its long values.

    data: its opcodes; what was at byte `place(i)` of the file is at byte `i` here.  stubs: its long values, by number.
    end: the byte after its STOP, counted as the offset at which reading began.
    """

    data: bytes
    stubs: list[LongValue]
    end: int
    _spots: list[tuple[int, int]] = field(repr=False)

    def place(self, at: int) -> int:
        """The byte of the original data that byte `at` of the skeleton came from."""
        begin, place = self._spots[max(0, bisect_right(self._spots, (at, 1 << 63)) - 1)]
        return place + at - begin


def skeleton(data: Data, offset: int = 0, *, name: str) -> Skeleton:
    """The skeleton of the pickle at byte `offset` of `data`. No long value is read, and nothing after its end.

    name: of the pickle, for errors. Raises `Truncated`, `Corrupt`, `LimitExceeded` or `Unsupported`, each with
    the byte.
    """
    try:
        return _Lexer(data, offset).run()
    except CkptoolError as error:
        raise error.within(name) from None


def decode_lazily(
    pickled: Skeleton,
    persistent: Callable[[Any], Any],
    builders: Mapping[Global, Builder],
    *,
    name: str = "data.pkl",
    file_bytes: int = 0,
    arrays: bool = False,
) -> Decoded:
    """The tree of a skeleton (see `decode`), with a plain value for each stub that no builder used.

    arrays: numpy arrays keep stubs as their data. The skeleton is decoded again with plain values in place of the
    unused stubs, and then, if need be, of all. Raises `LimitExceeded` for one over 64 MiB, and what `decode` raises.
    """
    plain: set[LongValue] = set()
    while True:
        total = len(pickled.data)
        for stub in pickled.stubs:
            if stub in plain:
                check_size(stub)
                total += stub.data.length
        if total > MAX_SKELETON:
            raise _too_long(total)
        stubs = [unstub(stub) if stub in plain else stub for stub in pickled.stubs]
        decoded = decode(
            pickled.data, persistent, builders, name=name, file_bytes=file_bytes, stubs=stubs, place=pickled.place
        )
        if len(plain) == len(stubs):
            return decoded
        nodes = visit((decoded.root, decoded.discarded), _beside_arrays if arrays else structural_parts)
        unread = {stub.of or stub for stub in nodes if isinstance(stub, LongValue)}
        if not unread:
            return decoded
        plain = set(pickled.stubs) if plain else unread


def _too_long(size: int) -> LimitExceeded:
    what = f"a pickle of {size:,} bytes beside the data of its tensors"
    return LimitExceeded(what, f"ckptool reads at most {MAX_SKELETON:,}.")


def _beside_arrays(node: Any) -> Iterable[Any]:
    """The parts of a node (see `visit`), except the data of an array that stays in the file."""
    match node:
        case Object(state=tuple((*rest, LongValue(kind=kind)))) if kind != "text":
            if canonical(node.fn) == "numpy.core.multiarray._reconstruct":
                return node.args, *rest
        case Object(args=tuple((LongValue(kind=kind), *rest))) if kind != "text":
            if canonical(node.fn) == "numpy.core.numeric._frombuffer":
                return rest
    return structural_parts(node)


# The lexer -----------------------------------------------------------------------------------------------------------

_FIXED = {  # opcode -> the bytes of its argument
    **dict.fromkeys(b"()012NQRabdelostu]}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94", 0),
    **dict.fromkeys(b"Kqh\x80", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jrj", 4),
    **dict.fromkeys(b"G", 8),
}
_LINES = {**dict.fromkeys(b"ILFpgPSV", 1), **dict.fromkeys(b"ci", 2)}
# opcode -> the width of its length field, whether that is signed, and the kind of its value
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


@cache
def _run_of_opcodes() -> re.Pattern[bytes]:
    """Matches opcodes with arguments of fixed width or in short lines, thousands at a time (a match remembers each)."""
    widths: dict[int, list[int]] = {}
    for opcode, width in _FIXED.items():
        widths.setdefault(width, []).append(opcode)
    kinds = [b"[" + re.escape(bytes(opcodes)) + b"]" + b"." * width for width, opcodes in widths.items()]
    lines = rb"[ILFpgPSV][^\n]{0,99}\n|[ci][^\n]{0,99}\n[^\n]{0,99}\n"
    return re.compile(b"(?:" + b"|".join([*kinds, lines]) + b"){0,4096}", re.DOTALL)


class _Lexer:
    """Walks the opcodes through a window: `buffer` begins at byte `base` of the data; the next opcode is at `pos`."""

    __slots__ = ("base", "buffer", "data", "frame", "parts", "pos", "size", "spots", "stubs")

    def __init__(self, data: Data, offset: int) -> None:
        self.data = data
        self.frame = -1  # the end of the current frame
        self.parts: list[bytes] = []  # the skeleton up to the window
        self.size = 0
        self.spots: list[tuple[int, int]] = []
        self.stubs: list[LongValue] = []
        self.base, self.pos, self.buffer = offset, 0, b""
        self._move(offset, _FIRST_WINDOW)

    def run(self) -> Skeleton:
        while (op := self._skip()) != _STOP:
            if op in _SIZED:
                self._sized_value(op)
            elif op >= 0:
                self._other_opcode(op)
            elif self.base + self.pos == self.frame:
                self.frame = -1
            else:
                self._ensure(1)
        end = self.base + self.pos + 1
        if self.frame not in (-1, end):
            self.pos += 1
            raise self._error("a frame that goes on after the end of the pickle")
        self._keep(self.buffer[: self.pos + 1], self.base)
        return Skeleton(b"".join(self.parts), self.stubs, end, self.spots)

    def _skip(self) -> int:
        """Skips short values; returns the next opcode, or -1 where the window or the frame ends."""
        pos, buffer, run_of_opcodes = self.pos, self.buffer, _run_of_opcodes().match
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

    def _sized_value(self, op: int) -> None:
        """Skips a value with a length in front; replaces a long one by a stub."""
        width, signed, kind = _SIZED[op]
        self._ensure(1 + width)
        size = int.from_bytes(self.buffer[self.pos + 1 : self.pos + 1 + width], "little", signed=signed)
        if size < 0:
            raise self._error(f"a length of {size:,}")
        if kind == "integer" and size * 8 > MAX_INTEGER_BITS:
            what = f"an integer of {counted(size * 8, 'bit')}"
            raise self._error(what, LimitExceeded, f"ckptool reads at most {MAX_INTEGER_BITS:,}.")
        if size < LONG_VALUE or kind == "integer":
            self._ensure(1 + width + size)
            self.pos += 1 + width + size
            return
        from ckptool.checkpoint.strided import subrange

        self._check_room(1 + width + size)
        offset = self.base + self.pos
        begin = offset + 1 + width
        self._move(begin + size, _FIRST_WINDOW)
        self._keep(bytes([STUB]) + len(self.stubs).to_bytes(4, "little"), offset)
        self.stubs.append(LongValue(subrange(self.data, begin, size), kind))

    def _other_opcode(self, op: int) -> None:
        if op in _FIXED:
            self._ensure(1 + _FIXED[op])
            self.pos += 1 + _FIXED[op]
        elif op in _LINES:
            for _ in range(_LINES[op]):
                self._line()
            self.pos += 1
        elif op == _FRAME:
            self._ensure(9)
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
        """Moves to the line break after the next byte."""
        self.pos += 1
        while True:
            end = self.buffer.find(b"\n", self.pos, len(self.buffer) if self.frame < 0 else self.frame - self.base)
            length = (end if end >= 0 else len(self.buffer)) - self.pos
            if length > MAX_STRING:
                raise self._error(f"a string of more than {MAX_STRING:,} bytes", LimitExceeded, "That is the limit.")
            if end >= 0:
                self.pos = end
                return
            self._ensure(length + 1, 2 * length + _FIRST_WINDOW)

    # The window ---------------------------------------------------------------------------------------------------

    def _ensure(self, length: int, window: int = 0) -> None:
        """Ensures that the window holds this many bytes from here."""
        self._check_room(length)
        if self.pos + length > len(self.buffer):
            self._move(self.base + self.pos, max(length, window, _WINDOW))

    def _check_room(self, length: int) -> None:
        end = self.base + self.pos + length
        if 0 <= self.frame < end:
            raise self._error("an opcode that runs past the end of its frame")
        if end > self.data.length:
            what = f"{length:,} bytes are expected, {self.data.length - self.base - self.pos:,} are there"
            raise self._error(what, Truncated, "")

    def _move(self, offset: int, length: int) -> None:
        """Keeps what was passed, and continues at another place in the data."""
        self._keep(self.buffer[: self.pos], self.base)
        self.buffer = self.data.read(offset, min(length, self.data.length - offset))
        self.base, self.pos = offset, 0

    def _keep(self, part: bytes, offset: int) -> None:
        self.spots.append((self.size, offset))
        self.parts.append(part)
        self.size += len(part)
        if self.size > MAX_SKELETON:
            raise _too_long(self.size)

    def _error(self, what: str, kind: type[CkptoolError] = Corrupt, why: str = DAMAGED) -> CkptoolError:
        return kind(f"{what} (at byte {self.base + self.pos:,})", why)


# Bytes that need not be a pickle --------------------------------------------------------------------------------------


class _NoCall(dict[Global, Builder]):
    """The builders for finding calls: each call raises `UnsafeObject`."""

    def get(self, fn: Any, default: Any = None) -> Any:
        raise UnsafeObject(f"a call of {fn}")


def reaches_a_call(source: Source) -> bool:
    """True if pickle, reading from the first byte, reaches a call before anything that it cannot read: whatever else
    the bytes are, `torch.load` makes that call."""
    lexer = _Lexer(FileRange(source, 0, source.size), 0)
    try:
        with suppress(Corrupt, Truncated, Unsupported):  # what comes before the error is run
            lexer.run()
        reader = PickleReader(b"".join([*lexer.parts, lexer.buffer[: lexer.pos]]))
        objects = ObjectMaker(reader, _NoCall(), FREE_OPCODES, True)
        with suppress(Corrupt, Truncated, Unsupported, Conflict, LookupError, struct.error, UnicodeDecodeError):
            Machine(reader, objects, lambda _: None, FREE_OPCODES, lexer.stubs).run()
        return bool(objects.objects)
    except (UnsafeObject, LimitExceeded):  # or reaches a text of many megabytes, which pickle would read
        return True
