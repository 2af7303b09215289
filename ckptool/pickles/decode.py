"""The pickle machine over names: opcodes in, a tree out; nothing is imported, resolved or called.

One loop over the bytes with the opcodes in order of their frequency in torch files: the simplest arrangement that is fast
(a table of methods takes twice as long). It never recurses and allocates nothing larger than the bytes that remain.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from ckptool.checkpoint import Blob, TensorEntry
from ckptool.errors import (
    CkptoolError,
    Conflict,
    Corrupt,
    LimitExceeded,
    Truncated,
    UnsafeObject,
    Unsupported,
    printable,
)
from ckptool.nodes import (
    MISSING,
    ByteString,
    Global,
    Object,
    OrderedDict,
    Set,
    check_collisions,
    check_depth,
    is_hashable,
    structural_parts,
)
from ckptool.pickles.builders import Builder, PerPickle, purse
from ckptool.pickles.known import is_known_call
from ckptool.pickles.texts import MAX_STRING, key_text, python2_text, python2_unescaped, whole

# What a file of any size may ask for (in opcodes); a larger file may ask for one per byte.
FREE_OPCODES = 1_000_000
FREE_BYTES = 1 << 15  # that builders may copy of the smallest pickle, and twice the bytes of larger ones
MAX_INTEGER_BITS = 4_096
MAX_KEY_DEPTH = 4
BLOB = 0xFF  # no opcode of Python's: in a skeleton, the number of a value that was left in the file follows
_FRAME_END = 0xFE  # nor this one


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded pickle. `discarded`: unknown calls that it makes and throws away. `end`: the byte after its STOP.

    byte_strings: how many texts of Python 2 in it are not UTF-8.
    """

    root: Any
    discarded: tuple[Object, ...]
    protocol: int
    end: int
    byte_strings: int = 0


def decode(
    data: bytes,
    persistent: Callable[[Any], Any],
    builders: Mapping[Global, Builder],
    *,
    name: str = "data.pkl",
    file_bytes: int = 0,
    blobs: Sequence[Any] | None = None,
    place: Callable[[int], int] = int,
) -> Decoded:
    """The tree that the pickle at the start of `data` describes.

    persistent: gives the value for a persistent id.  builders: known functions and what their calls mean.
    name: what to call the pickle in errors.  file_bytes: the size of the file it came from, which bounds the work.
    blobs: for a skeleton (of which the frames were checked), the values that its opcode 0xFF stands for.
    place: where in the file a byte of `data` is.
    Raises `Corrupt`, `Truncated`, `LimitExceeded`, `Unsupported` or `Conflict`; each names the byte.
    """
    left_out = sum(blob.data.length if type(blob) is Blob else len(blob) for blob in blobs or ())
    budget = 2 * max(len(data) + left_out, file_bytes, FREE_BYTES)
    builders = {fn: made.make(purse(budget)) if type(made) is PerPickle else made for fn, made in builders.items()}
    machine = _Machine(data, persistent, builders, max(FREE_OPCODES, file_bytes), blobs)
    try:
        root = machine.run()
        check_depth(root, max(len(data), file_bytes))
    except CkptoolError as error:
        if machine.frame and type(error) is Truncated:
            error = machine.straddling()
        raise error.within(f"{name} at byte {place(machine.base + machine.at):,}") from None
    except (IndexError, struct.error) as error:
        if str(error) in ("list index out of range", "pop from empty list"):
            raise machine.underflow().within(name) from None
        if machine.frame:
            raise machine.straddling().within(name) from None
        raise Truncated(
            f"{name}: the pickle ends at byte {place(len(data)):,}, before its STOP", "The file was cut off."
        ) from None
    except KeyError as error:
        raise Corrupt(f"{name} refers to value {error}, which was not stored", _DAMAGED) from None
    except UnicodeDecodeError:
        raise Corrupt(f"{name} holds text that is not UTF-8", _DAMAGED) from None
    return Decoded(root, machine.discarded(root), machine.protocol, machine.at, machine.byte_strings)


_DAMAGED = "The pickle was damaged, or made to mislead."

_INT = struct.Struct("<i").unpack_from
_UINT = struct.Struct("<I").unpack_from
_ULONG = struct.Struct("<Q").unpack_from
_SHORT = struct.Struct("<H").unpack_from
_FLOAT = struct.Struct(">d").unpack_from


class _Machine:
    __slots__ = (
        "at",
        "base",
        "blobs",
        "builders",
        "byte_strings",
        "calls",
        "data",
        "frame",
        "hashed",
        "limit",
        "outer",
        "persistent",
        "protocol",
    )

    def __init__(
        self,
        data: bytes,
        persistent: Callable[[Any], Any],
        builders: Mapping[Global, Builder],
        limit: int,
        blobs: Sequence[Any] | None,
    ) -> None:
        self.data = self.outer = data
        self.frame = False
        self.base = 0  # where in the pickle `data` begins
        self.blobs = blobs
        self.byte_strings = 0
        self.persistent = persistent
        self.builders = builders
        self.limit = limit
        self.at = 0
        self.protocol = 0
        self.calls: list[Object] = []
        self.hashed = 0  # parts of keys so far

    def run(self) -> Any:
        data, persistent, builders = self.data, self.persistent, self.builders
        stack: list[Any] = []
        marks: list[list[Any]] = []
        memo: dict[int, Any] = {}
        pos = 0
        for _ in repeat(None, self.limit):
            op = data[pos]
            pos += 1
            if op == 0x72:  # LONG_BINPUT
                memo[_UINT(data, pos)[0]] = stack[-1]
                pos += 4
            elif op == 0x68:  # BINGET
                stack.append(memo[data[pos]])
                pos += 1
            elif op == 0x4B:  # BININT1
                stack.append(data[pos])
                pos += 1
            elif op == 0x28:  # MARK
                marks.append(stack)
                stack = []
            elif op == 0x58:  # BINUNICODE
                size = _UINT(data, pos)[0]
                pos += 4
                stack.append(
                    str(data[pos : pos + size], "utf-8", "surrogatepass") if size < 64 else self._text(pos, size)
                )
                pos += size
            elif op == 0x71:  # BINPUT
                memo[data[pos]] = stack[-1]
                pos += 1
            elif op == 0x74:  # TUPLE
                items, stack = stack, self._unmark(marks, pos)
                stack.append(tuple(items))
            elif op == 0x52:  # REDUCE
                args = stack.pop()
                fn = stack[-1]
                builder = builders.get(fn) if type(fn) is Global else None
                if type(args) is not tuple:
                    raise self._corrupt(pos, "a call without an argument tuple")
                self.at = pos
                value = builder(args) if builder is not None else NotImplemented
                stack[-1] = self._call(fn, args, "call") if value is NotImplemented else value
            elif op == 0x51:  # BINPERSID
                self.at = pos
                stack[-1] = persistent(stack[-1])
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[_UINT(data, pos)[0]])
                pos += 4
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif op == 0x89:  # NEWFALSE
                stack.append(False)
            elif op == 0x4D:  # BININT2
                stack.append(_SHORT(data, pos)[0])
                pos += 2
            elif op == 0x4A:  # BININT
                stack.append(_INT(data, pos)[0])
                pos += 4
            elif op == 0x87:  # TUPLE3
                last = stack.pop()
                middle = stack.pop()
                stack[-1] = (stack[-1], middle, last)
            elif op == 0x88:  # NEWTRUE
                stack.append(True)
            elif op == 0x4E:  # NONE
                stack.append(None)
            elif op == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif op == 0x75:  # SETITEMS
                items, stack = stack, self._unmark(marks, pos)
                self._set_items(stack[-1], items, pos)
            elif op == 0x73:  # SETITEM
                value, key = stack.pop(), stack.pop()
                self._set_items(stack[-1], [key, value], pos)
            elif op == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif op == 0x65:  # APPENDS
                items, stack = stack, self._unmark(marks, pos)
                self._append(stack[-1], items, pos)
            elif op == 0x61:  # APPEND
                value = stack.pop()
                self._append(stack[-1], [value], pos)
            elif op == 0x47:  # BINFLOAT
                stack.append(_FLOAT(data, pos)[0])
                pos += 8
            elif op == 0x63:  # GLOBAL
                module, pos = self._line(pos)
                attribute, pos = self._line(pos)
                stack.append(self._name(module, attribute, pos))
            elif op == 0x62:  # BUILD
                state = stack.pop()
                self._set_state(stack[-1], state, pos)
            elif op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x8C:  # SHORT_BINUNICODE
                size = data[pos]
                stack.append(self._text(pos + 1, size))
                pos += 1 + size
            elif op == 0x8A:  # LONG1
                size = data[pos]
                stack.append(self._integer(pos + 1, size))
                pos += 1 + size
            elif op == 0x2E:  # STOP
                if self.frame:
                    pos = self._stop_in_frame(pos)
                self.at = pos
                if marks or len(stack) != 1:
                    raise self._corrupt(
                        pos, f"{len(stack) + sum(map(len, marks)):,} values are left on the stack instead of one"
                    )
                return stack[0]
            elif op == 0x93:  # STACK_GLOBAL
                attribute, module = stack.pop(), stack.pop()
                if type(attribute) is not str or type(module) is not str:
                    raise self._computed(module, attribute, pos)
                stack.append(self._name(module, attribute, pos))
            elif op == 0x81:  # NEWOBJ
                args = stack.pop()
                stack[-1] = self._new(stack[-1], args, None, pos)
            elif op == 0x92:  # NEWOBJ_EX
                kwargs, args = stack.pop(), stack.pop()
                stack[-1] = self._new(stack[-1], args, kwargs, pos)
            elif op == 0x80:  # PROTO
                self.protocol = data[pos]
                if self.protocol > 5:
                    raise Unsupported(
                        f"pickle protocol {self.protocol} is not known", "Protocols 0 to 5 exist."
                    ).within(f"byte {pos:,}")
                pos += 1
            elif op == 0x95:  # FRAME
                if self.blobs is None:
                    data, pos = self._frame(pos + 8, _ULONG(data, pos)[0]), 0
                else:
                    pos += 8
            elif op in _SIZED_BYTES:
                kind, width = _SIZED_BYTES[op]
                size = int.from_bytes(self._take(pos, width), "little", signed=op == 0x54)
                pos += width
                value = self._text(pos, size) if kind is str else kind(self._take(pos, size))
                self.byte_strings += type(value) is ByteString
                stack.append(value)
                pos += size
            elif op == 0x8F:  # EMPTY_SET
                stack.append(Set([]))
            elif op == 0x90:  # ADDITEMS
                items, stack = stack, self._unmark(marks, pos)
                self._add(stack[-1], items, pos)
            elif op == 0x91:  # FROZENSET
                items, stack = stack, self._unmark(marks, pos)
                stack.append(Set([], frozen=True))
                self._add(stack[-1], items, pos)
            elif op == 0x6C:  # LIST
                items, stack = stack, self._unmark(marks, pos)
                stack.append(items)
            elif op == 0x64:  # DICT
                items, stack = stack, self._unmark(marks, pos)
                stack.append({})
                self._set_items(stack[-1], items, pos)
            elif op == 0x30:  # POP
                if stack:
                    stack.pop()
                else:
                    stack = self._unmark(marks, pos)
            elif op == 0x31:  # POP_MARK
                stack = self._unmark(marks, pos)
            elif op == 0x32:  # DUP
                stack.append(stack[-1])
            elif op == 0x8B:  # LONG4
                size = _INT(data, pos)[0]
                stack.append(self._integer(pos + 4, size))
                pos += 4 + size
            elif op == 0x69:  # INST
                module, pos = self._line(pos)
                attribute, pos = self._line(pos)
                items, stack = stack, self._unmark(marks, pos)
                stack.append(self._instance(self._name(module, attribute, pos), tuple(items)))
            elif op == 0x6F:  # OBJ
                items, stack = stack, self._unmark(marks, pos)
                stack.append(self._instance(items[0], tuple(items[1:])))
            elif op == 0x56:  # UNICODE
                raw, pos = self._raw_line(pos)
                stack.append(self._unescaped(raw, pos))
            elif op == 0x53:  # STRING
                raw, pos = self._raw_line(pos)
                stack.append(self._quoted(raw, pos))
            elif op in _TEXT_OPCODES:
                line, pos = self._line(pos)
                if op == 0x70:  # PUT
                    memo[self._number(line, pos)] = stack[-1]
                elif op == 0x67:  # GET
                    stack.append(memo[self._number(line, pos)])
                elif op == 0x50:  # PERSID
                    self.at = pos
                    stack.append(persistent(line))
                else:
                    stack.append(self._scalar(op, line, pos))
            elif op == BLOB and self.blobs:
                stack.append(self.blobs[_UINT(data, pos)[0]])
                pos += 4
            elif op == _FRAME_END and pos == len(data) and self.frame:
                pos += self.base - 1
                data = self._leave_frame()
            elif op in REFUSED:
                raise Unsupported(
                    f"opcode {REFUSED[op]} at byte {self.base + pos - 1:,} is not read", "No PyTorch file uses it."
                )
            else:
                raise self._corrupt(pos, f"0x{op:02x} is not a pickle opcode")
        self.at = pos
        raise LimitExceeded(
            f"more than {self.limit:,} opcodes",
            "A pickle this long cannot come from a file of this size; it is built to exhaust its reader.",
        )

    # Frames: the machine works on a copy of one at a time, with an opcode of our own behind it. Nothing can reach over its end then.

    def _frame(self, begin: int, size: int) -> bytes:
        if self.frame:
            raise self._corrupt(begin, "a frame inside of a frame")
        if size > len(self.data) - begin:
            raise self._corrupt(begin, "a frame that is longer than the pickle")
        self.frame, self.base, self.outer = True, begin, self.data
        self.data = self.data[begin : begin + size] + bytes([_FRAME_END])
        return self.data

    def _leave_frame(self) -> bytes:
        self.frame, self.base, self.data = False, 0, self.outer
        return self.data

    def _stop_in_frame(self, pos: int) -> int:
        if pos != len(self.data) - 1:
            raise self._corrupt(pos, "a frame that goes on after the end of the pickle")
        pos += self.base
        self._leave_frame()
        return pos

    # What the opcodes need ---------------------------------------------------------------------------------------

    def straddling(self) -> Corrupt:
        return Corrupt(f"an opcode reaches over the end of the frame that begins at byte {self.base:,}", _DAMAGED)

    def underflow(self) -> Corrupt:
        return Corrupt("the pickle takes a value that is not there", "It was damaged, or is not a pickle at all.")

    def _corrupt(self, pos: int, what: str) -> Corrupt:
        self.at = pos
        return Corrupt(what, _DAMAGED)

    def _take(self, pos: int, size: int) -> bytes:
        if size < 0:
            raise self._corrupt(pos, f"a length of {size:,}")
        if size > len(self.data) - pos:
            self.at = pos
            raise Truncated(
                f"{size:,} bytes are promised, {max(0, len(self.data) - pos):,} are there", "The pickle was cut off."
            )
        return self.data[pos : pos + size]

    def _text(self, pos: int, size: int) -> str:
        if size > MAX_STRING:
            self.at = pos
            raise LimitExceeded(f"a text of {size:,} bytes", f"At most {MAX_STRING:,} are read.")
        raw = self._take(pos, size)
        try:
            return str(raw, "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self._corrupt(pos, "text that is not UTF-8") from None

    def _integer(self, pos: int, size: int) -> int:
        if size * 8 > MAX_INTEGER_BITS:
            self.at = pos
            raise LimitExceeded(f"an integer of {size * 8:,} bits", f"At most {MAX_INTEGER_BITS:,} are read.")
        return int.from_bytes(self._take(pos, size), "little", signed=True)

    def _raw_line(self, pos: int) -> tuple[bytes, int]:
        end = self.data.find(b"\n", pos)
        if end < 0:
            self.at = pos
            raise Truncated("a line without an end", "The pickle was cut off.")
        if end - pos > MAX_STRING:
            self.at = pos
            raise LimitExceeded(f"a text of {end - pos:,} bytes", f"At most {MAX_STRING:,} are read.")
        return self.data[pos:end], end + 1

    def _line(self, pos: int) -> tuple[str, int]:
        raw, end = self._raw_line(pos)
        try:
            return raw.decode(), end
        except UnicodeDecodeError:
            raise self._corrupt(pos, "a name that is not UTF-8") from None

    def _name(self, module: str, attribute: str, pos: int) -> Global:
        if not (module.isprintable() and attribute.isprintable()):
            raise self._corrupt(pos, f"the name {printable(module)[:200]}.{printable(attribute)[:200]}")
        return Global(module, attribute)

    def _computed(self, module: Any, attribute: Any, pos: int) -> CkptoolError:
        if isinstance(module, Object) or isinstance(attribute, Object):
            self.at = pos
            return UnsafeObject(
                "a name is computed", "What would be called is decided by calling something else first."
            )
        return self._corrupt(pos, "a name is computed, not text")

    def _unescaped(self, raw: bytes, pos: int) -> str:
        try:
            return raw.decode("raw_unicode_escape")
        except UnicodeDecodeError:
            raise self._corrupt(pos, "a text with a broken escape") from None

    def _quoted(self, raw: bytes, pos: int) -> Any:
        raw = raw.strip()
        if len(raw) < 2 or raw[:1] != raw[-1:] or raw[0] not in b"'\"":
            raise self._corrupt(pos, "a text without quotes")
        text = python2_text(python2_unescaped(raw[1:-1]))
        self.byte_strings += type(text) is ByteString
        return text

    def _number(self, line: str, pos: int) -> int:
        if len(line) > MAX_INTEGER_BITS // 4:
            raise self._corrupt(pos, f"an integer of {len(line):,} digits")
        try:
            return int(line)
        except ValueError:
            raise self._corrupt(pos, f"{printable(line[:40])!r} where a number should be") from None

    def _scalar(self, op: int, line: str, pos: int) -> Any:
        if op == 0x49:  # INT, which also spells the booleans of protocol 0
            return line == "01" if line in ("00", "01") else self._number(line, pos)
        if op == 0x4C:  # LONG
            return self._number(line.removesuffix("L"), pos)
        if op == 0x46:  # FLOAT
            try:
                return float(line)
            except ValueError:
                raise self._corrupt(pos, f"{printable(line[:40])!r} where a number should be") from None
        raise AssertionError(op)

    def _unmark(self, marks: list[list[Any]], pos: int) -> list[Any]:
        if not marks:
            raise self._corrupt(pos, "the end of a group that was not begun")
        return marks.pop()

    def _call(self, fn: Any, args: tuple[Any, ...], how: str, kwargs: Any = None) -> Object:
        made = Object(fn, args, how, kwargs)
        if how == "call" and not is_known_call(fn, args):
            self.calls.append(made)
        return made

    def _new(self, cls: Any, args: Any, kwargs: Any, pos: int) -> Any:
        if type(args) is not tuple or not (kwargs is None or isinstance(kwargs, dict)):
            raise self._corrupt(pos, "an object without an argument tuple")
        builder = self.builders.get(cls) if type(cls) is Global and not kwargs else None
        value = builder(args) if builder is not None else NotImplemented
        return self._call(cls, args, "new", kwargs or None) if value is NotImplemented else value

    def _instance(self, cls: Any, args: tuple[Any, ...]) -> Any:
        """INST and OBJ call the class when there are arguments, and only make the object when there are none."""
        return self._call(cls, args, "call") if args else self._new(cls, (), None, self.at)

    def _set_items(self, target: Any, items: list[Any], pos: int) -> None:
        if isinstance(target, dict):
            mapping = target
        elif type(target) is Object:
            mapping = target.items = {} if target.items is None else target.items
        else:
            raise self._corrupt(pos, f"items set on a {_kind(target)}")
        if len(items) % 2:
            raise self._corrupt(pos, "a key without a value")
        keys = items[::2] if not self.blobs and not self.byte_strings else [key_text(whole(key)) for key in items[::2]]
        for key in keys:
            if type(key) is not str and type(key) is not int:
                self._check_key(key, pos)
        size = len(mapping)
        if (size + len(keys)).bit_length() > max(7, size.bit_length()):  # now and then, so that it costs nothing
            self.at = pos
            check_collisions(chain(mapping, keys))
        mapping.update(zip(keys, items[1::2], strict=True))
        if len(mapping) != size + len(keys):
            self.at = pos
            raise Conflict(
                "a dictionary with the same key twice",
                "One of the two values would be lost; which one depends on the reader.",
            )

    def _check_key(self, key: Any, pos: int, depth: int = 0) -> None:
        if type(key) is tuple:
            if depth == MAX_KEY_DEPTH:
                self.at = pos
                raise LimitExceeded("a dictionary key of tuples within tuples", "Hashing it could take for ever.")
            self.hashed += len(key)
            if self.hashed > self.limit:
                self.at = pos
                raise LimitExceeded(
                    f"dictionary keys of more than {self.limit:,} parts", "Hashing them could take for ever."
                )
            for part in key:
                self._check_key(part, pos, depth + 1)
        elif not is_hashable(key) or key != key:
            raise self._corrupt(pos, f"a {_kind(key)} as a dictionary key")

    def _append(self, target: Any, items: list[Any], pos: int) -> None:
        if type(target) is list:
            target.extend(items)
        elif type(target) is Object:
            self._extend(target, items)
        else:
            raise self._corrupt(pos, f"values appended to a {_kind(target)}")

    @staticmethod
    def _extend(target: Object, items: list[Any]) -> None:
        if target.elements is None:
            target.elements = []
        target.elements.extend(items)

    def _add(self, target: Any, items: list[Any], pos: int) -> None:
        if type(target) is Set:
            if not all(map(is_hashable, items)):
                raise self._corrupt(pos, "a set of values that can be changed")
            target.items.extend(items)
        elif type(target) is Object:
            self._extend(target, items)
            target.adds = True
        else:
            raise self._corrupt(pos, f"values added to a {_kind(target)}")

    def _set_state(self, target: Any, state: Any, pos: int) -> None:
        if type(target) is Object and target.state is MISSING:
            target.state = state
        elif (
            type(target) is OrderedDict
            and target.attributes is None
            and type(state) is dict
            and all(type(k) is str for k in state)
        ):
            target.attributes = state
        elif not self._set_tensor(target, state):
            raise self._corrupt(pos, f"a state set on a {_kind(target)}")

    @staticmethod
    def _set_tensor(target: Any, state: Any) -> bool:
        if type(target) is not TensorEntry:
            return False
        from ckptool.pickles.torch_objects import set_tensor_state

        return set_tensor_state(target, state)

    def discarded(self, root: Any) -> tuple[Object, ...]:
        """The unknown calls that do not end up in the tree: they would have run all the same."""
        if not self.calls:
            return ()
        seen: set[int] = set()
        stack = [root]
        while stack:
            node = stack.pop()
            if id(node) not in seen:
                seen.add(id(node))
                stack.extend(structural_parts(getattr(node, "made", node)))
        return tuple(call for call in self.calls if id(call) not in seen)


def _kind(value: Any) -> str:
    return value.name if isinstance(value, Object) else type(value).__name__


# opcode -> what it makes of its bytes, and the width of its length field
_SIZED_BYTES: dict[int, tuple[Callable[[bytes], Any], int]] = {
    0x43: (bytes, 1),  # SHORT_BINBYTES
    0x42: (bytes, 4),  # BINBYTES
    0x8E: (bytes, 8),  # BINBYTES8
    0x96: (bytearray, 8),  # BYTEARRAY8
    0x8D: (str, 8),  # BINUNICODE8
    0x55: (python2_text, 1),  # SHORT_BINSTRING
    0x54: (python2_text, 4),  # BINSTRING
}
# INT, LONG, FLOAT, PUT, GET, PERSID: an argument up to the end of the line
_TEXT_OPCODES = frozenset(b"ILFpgP")
REFUSED = {0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 0x97: "NEXT_BUFFER", 0x98: "READONLY_BUFFER"}
