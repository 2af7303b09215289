"""The pickle machine: one loop over the opcodes that moves values on a stack; nothing is imported, resolved or called.

The opcodes are in the order of their frequency in torch files: the simplest arrangement that is fast (a table of
methods takes twice as long). It never recurses and allocates nothing larger than the bytes that remain. What takes more
than a line to read is read by the `PickleReader`, and what takes more to make is made by the `ObjectMaker`.
Source of the opcodes: the comments of Lib/pickletools.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import islice, repeat
from operator import length_hint
from typing import Any

from ckptool.checkpoint.nodes import ByteString, Global, Set
from ckptool.errors import LimitExceeded, Unsupported, counted
from ckptool.pickles.objects import ObjectMaker, PickleReader
from ckptool.pickles.runs import Memo, Runs
from ckptool.pickles.strings import python2_text

STUB = 0xFF  # no opcode of Python's: in a skeleton, before the number of a value that stays in the file

_INT = struct.Struct("<i").unpack_from
_UINT = struct.Struct("<I").unpack_from
_SHORT = struct.Struct("<H").unpack_from
_FLOAT = struct.Struct(">d").unpack_from


class Machine:
    """Runs one pickle. `persistent`, `limit` (in opcodes) and `stubs` are those of `decode`.

    runs: reads the opcodes of plain tensors, many at once.
    """

    __slots__ = ("limit", "objects", "persistent", "protocol", "reader", "runs", "stubs")

    def __init__(
        self,
        reader: PickleReader,
        objects: ObjectMaker,
        persistent: Callable[[Any], Any],
        limit: int,
        stubs: Sequence[Any] | None,
        runs: Runs | None = None,
    ) -> None:
        self.reader, self.objects = reader, objects
        self.persistent = persistent
        self.limit = limit
        self.stubs = stubs
        self.runs = runs
        self.protocol = 0

    def run(self) -> Any:
        """The value that the pickle leaves on the stack."""
        reader, objects, stubs, runs = self.reader, self.objects, self.stubs, self.runs
        data, persistent, builders = reader.data, self.persistent, objects.builders
        stack: list[Any] = []
        marks: list[list[Any]] = []
        memo = Memo()
        pos = 0
        steps = repeat(None, self.limit)
        for _ in steps:
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
                    str(data[pos : pos + size], "utf-8", "surrogatepass") if size < 64 else reader.text(pos, size)
                )
                pos += size
                # A tensor begins with two marks, after the memo index of its name and its function (h. or j....).
                if runs is not None and b"((" in (data[pos + 7 : pos + 9], data[pos + 10 : pos + 12]):
                    pos, count = runs.read(data, pos, stack, memo, length_hint(steps))
                    next(islice(steps, count, count), None)
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
                    raise reader.corrupt(pos, "a call without an argument tuple")
                reader.at = pos
                value = builder(args) if builder is not None else NotImplemented
                stack[-1] = objects.call(fn, args, "call") if value is NotImplemented else value
            elif op == 0x51:  # BINPERSID
                reader.at = pos
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
                objects.set_items(stack[-1], items, pos)
            elif op == 0x73:  # SETITEM
                value, key = stack.pop(), stack.pop()
                objects.set_items(stack[-1], [key, value], pos)
            elif op == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif op == 0x65:  # APPENDS
                items, stack = stack, self._unmark(marks, pos)
                objects.append(stack[-1], items, pos)
            elif op == 0x61:  # APPEND
                value = stack.pop()
                objects.append(stack[-1], [value], pos)
            elif op == 0x47:  # BINFLOAT
                stack.append(_FLOAT(data, pos)[0])
                pos += 8
            elif op == 0x63:  # GLOBAL
                module, pos = reader.line(pos)
                attribute, pos = reader.line(pos)
                stack.append(objects.name(module, attribute, pos))
            elif op == 0x62:  # BUILD
                state = stack.pop()
                objects.set_state(stack[-1], state, pos)
            elif op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x8C:  # SHORT_BINUNICODE
                size = data[pos]
                stack.append(reader.text(pos + 1, size))
                pos += 1 + size
            elif op == 0x8A:  # LONG1
                size = data[pos]
                stack.append(reader.integer(pos + 1, size))
                pos += 1 + size
            elif op == 0x2E:  # STOP
                reader.at = pos
                if marks or len(stack) != 1:
                    left = counted(len(stack) + sum(map(len, marks)), "value is", "values are")
                    raise reader.corrupt(pos, f"{left} left on the stack instead of one")
                return stack[0]
            elif op == 0x93:  # STACK_GLOBAL
                attribute, module = stack.pop(), stack.pop()
                if type(attribute) is not str or type(module) is not str:
                    raise objects.computed(module, attribute, pos)
                stack.append(objects.name(module, attribute, pos))
            elif op == 0x81:  # NEWOBJ
                args = stack.pop()
                stack[-1] = objects.new(stack[-1], args, None, pos)
            elif op == 0x92:  # NEWOBJ_EX
                kwargs, args = stack.pop(), stack.pop()
                stack[-1] = objects.new(stack[-1], args, kwargs, pos)
            elif op == 0x80:  # PROTO
                self.protocol = data[pos]
                if self.protocol > 5:
                    what = f"byte {pos:,}: unknown pickle protocol {self.protocol}"
                    raise Unsupported(what, "Protocols 0 to 5 exist.")
                pos += 1
            elif op == 0x95:  # FRAME
                if stubs is None:  # nobody looked whether an opcode runs past the end of one
                    raise reader.corrupt(pos, "a frame in a pickle of a protocol below 4")
                pos += 8
            elif op in _SIZED_BYTES:
                kind, width = _SIZED_BYTES[op]
                size = int.from_bytes(reader.take(pos, width), "little", signed=op == 0x54)
                pos += width
                value = reader.text(pos, size) if kind is str else kind(reader.take(pos, size))
                objects.byte_strings += type(value) is ByteString
                stack.append(value)
                pos += size
            elif op == 0x8F:  # EMPTY_SET
                stack.append(Set([]))
            elif op == 0x90:  # ADDITEMS
                items, stack = stack, self._unmark(marks, pos)
                objects.add(stack[-1], items, pos)
            elif op == 0x91:  # FROZENSET
                items, stack = stack, self._unmark(marks, pos)
                stack.append(Set([], frozen=True))
                objects.add(stack[-1], items, pos)
            elif op == 0x6C:  # LIST
                items, stack = stack, self._unmark(marks, pos)
                stack.append(items)
            elif op == 0x64:  # DICT
                items, stack = stack, self._unmark(marks, pos)
                stack.append({})
                objects.set_items(stack[-1], items, pos)
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
                stack.append(reader.integer(pos + 4, size))
                pos += 4 + size
            elif op == 0x69:  # INST
                module, pos = reader.line(pos)
                attribute, pos = reader.line(pos)
                items, stack = stack, self._unmark(marks, pos)
                stack.append(objects.instance(objects.name(module, attribute, pos), tuple(items)))
            elif op == 0x6F:  # OBJ
                items, stack = stack, self._unmark(marks, pos)
                stack.append(objects.instance(items[0], tuple(items[1:])))
            elif op == 0x56:  # UNICODE
                raw, pos = reader.raw_line(pos)
                stack.append(reader.unescaped(raw, pos))
            elif op == 0x53:  # STRING
                raw, pos = reader.raw_line(pos)
                value = reader.quoted(raw, pos)
                objects.byte_strings += type(value) is ByteString
                stack.append(value)
            elif op in _TEXT_OPCODES:
                line, pos = reader.line(pos)
                if op == 0x70:  # PUT
                    memo[reader.number(line, pos)] = stack[-1]
                elif op == 0x67:  # GET
                    stack.append(memo[reader.number(line, pos)])
                elif op == 0x50:  # PERSID
                    reader.at = pos
                    stack.append(persistent(line))
                else:
                    stack.append(reader.scalar(op, line, pos))
            elif op == STUB and stubs:
                stack.append(stubs[_UINT(data, pos)[0]])
                pos += 4
            elif op in REFUSED:
                what = f"opcode {REFUSED[op]} at byte {pos - 1:,} is not read"
                raise Unsupported(what, "No PyTorch file uses it.")
            else:
                raise reader.corrupt(pos, f"0x{op:02x} is not a pickle opcode")
        reader.at = pos
        raise LimitExceeded(f"more than {counted(self.limit, 'opcode')}")

    def _unmark(self, marks: list[list[Any]], pos: int) -> list[Any]:
        if not marks:
            raise self.reader.corrupt(pos, "the end of a group (MARK) that was never begun")
        return marks.pop()


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
