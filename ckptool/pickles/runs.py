"""Runs of plain tensors, of which a pickle says the same but for their names, their storages and numbers in the memo.

Torch writes about thirty opcodes for each tensor of a state dict. The first of a mould is matched by a pattern; where
the bytes of the next one are the same (all that may not differ), the machine would do the same with them, and the
values are made at once. Whatever is not quite so is left to the machine.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from itertools import pairwise
from math import prod
from operator import itemgetter
from typing import Any

from ckptool.checkpoint import MAX_RANK, NO_FLAGS, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.facts import dataclass
from ckptool.pickles.objects import ObjectMaker, PickleReader
from ckptool.pickles.torch_objects import MOST, ORDERED_DICT, REBUILD_TENSOR_V2, Builder, storage_class

_GET, _NUMBER = b"(h.|j....)", b"(?:K.|M..|J....)"
_NUMBERS = b"(\\)|(?:#\x85|##\x86|###\x87|\\((?:#){4,64}t)r(....))"  # sizes, or strides
# What stands behind a name: `_rebuild_tensor_v2(storage, offset, sizes, strides, False, OrderedDict())`.
_TENSOR = b"r(....)@\\(\\(@@X(.)\0\0\0([0-9]{1,19})r(....)@(#)tr(....)Q(#)%b%b\x89@\\)Rr(....)tr(....)Rr(....)"
_TENSOR = (_TENSOR % (_NUMBERS, _NUMBERS)).replace(b"@", _GET).replace(b"#", _NUMBER)
_PUTS = (1, 7, 10, 13, 15, 17, 18, 19)  # the groups of the memo's numbers for what is made, in order
_GETS = (2, 3, 4, 8, 16)  # and for the function, "storage", its class, its location, `OrderedDict`
_OPCODES = 23  # of a tensor without dimensions
MOST_MOULDS = 256


@dataclass(slots=True, eq=False)
class Mould:
    """What the bytes of a tensor say that are the same for all from one mould.

    size: how many they are.  mask, bits: which of them may not differ, and those, as integers.  opcodes: their number.
    gets: the numbers that are looked up in the memo, which `look` does, for `values`.  puts: reads those for what is
    made.  key: where the name of its storage is.  of, where: what stands before and behind that, in the persistent id
    that ends at `named`.  needs: bytes of the storage.  after: what came behind the last tensor from this mould.
    """

    size: int
    mask: int
    bits: int
    opcodes: int
    gets: frozenset[int]
    look: Callable[[Any], tuple[Any, ...]]
    values: tuple[Any, ...]
    puts: Callable[[bytes, int], tuple[int, ...]]
    key: tuple[int, int]
    named: int
    of: tuple[str, Any]
    where: tuple[str, int]
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: DType
    needs: int
    after: Mould | None = None


class Runs:
    """Reads runs of plain tensors for a machine, whose parts it shares. builder: that of `_rebuild_tensor_v2`."""

    def __init__(
        self, reader: PickleReader, objects: ObjectMaker, persistent: Callable[[Any], Any], builder: Builder
    ) -> None:
        self.reader, self.objects, self.persistent, self.builder = reader, objects, persistent, builder
        self.moulds: dict[tuple[int, int], Mould] = {}
        self.last: Mould | None = None

    def read(self, data: bytes, pos: int, stack: list[Any], memo: dict[int, Any], left: int) -> tuple[int, int]:
        """Puts the tensors behind a name, which is on the stack, there, and the names between them. left: opcodes that
        may be read. Gives the place behind them, and how many opcodes these were."""
        reader, before, total = self.reader, self.last, 0
        while True:
            mould = before.after if before is not None else None
            raw = data[pos : pos + mould.size] if mould is not None else b""
            if mould is None or len(raw) < mould.size or int.from_bytes(raw, "little") & mould.mask != mould.bits:
                mould = self._mould(data, pos, memo)
                if mould is None:
                    break
                if before is not None:
                    before.after = mould
            puts = mould.puts(data, pos)
            if mould.look(memo) != mould.values or total + mould.opcodes > left or not mould.gets.isdisjoint(puts):
                break
            begin, end = mould.key
            key = str(data[pos + begin : pos + end], "utf-8", "surrogatepass")
            pid = *mould.of, key, *mould.where
            reader.at = pos + mould.named
            ref = self.persistent(pid)
            pos += mould.size
            reader.at = pos - 5  # behind the call: then it is stored
            hooks = OrderedDict()
            shape, stride = (*mould.shape,), (*mould.stride,)  # each its own, as the memo may give them out again
            args = ref, mould.offset, shape, stride, False, hooks
            if type(ref) is StorageRef and ref.dtype is mould.dtype and ref.storage.data.length >= mould.needs:
                value: Any = TensorEntry(ref.storage, mould.dtype, mould.shape, mould.stride, mould.offset, NO_FLAGS)
            elif (value := self.builder(args)) is NotImplemented:
                value = self.objects.call(REBUILD_TENSOR_V2, args, "call")
            memo[puts[0]], memo[puts[1]], memo[puts[2]] = stack[-1], key, pid
            if mould.shape:
                memo[puts[3]], memo[puts[4]] = shape, stride
            memo[puts[-3]], memo[puts[-2]], memo[puts[-1]] = hooks, args, value
            stack.append(value)
            total += mould.opcodes
            before = mould
            size = int.from_bytes(data[pos + 1 : pos + 5], "little")
            if data[pos : pos + 1] != b"X" or size >= 64 or pos + 5 + size >= len(data) or total == left:
                break
            stack.append(str(data[pos + 5 : pos + 5 + size], "utf-8", "surrogatepass"))
            pos += 5 + size
            total += 1
        self.last = before
        return pos, total

    def _mould(self, data: bytes, pos: int, memo: dict[int, Any]) -> Mould | None:
        """The mould of the tensor whose bytes begin here; None for one that is left to the machine."""
        match = re.compile(_TENSOR, re.DOTALL).match(data, pos)
        if match is None:
            return None
        size, mask = match.end() - pos, bytearray(b"\xff") * (match.end() - pos)
        stores = [match.start(group) - pos for group in _PUTS if match[group] is not None]
        key = match.start(6) - pos, match.end(6) - pos
        for begin, end in (key, *((at, at + 4) for at in stores)):
            mask[begin:end] = bytes(end - begin)
        fixed = int.from_bytes(mask, "little")
        bits = int.from_bytes(match[0], "little") & fixed
        if (size, bits) in self.moulds:
            return self.moulds[size, bits]
        gets = tuple(int.from_bytes(match[group][1:], "little") for group in _GETS)
        values: tuple[Any, ...] = tuple(memo.get(number) for number in gets)
        function, word, of, location, hooks = values
        dtype = storage_class(of)[1]
        # The number of an opcode, or those of a tuple that is stored.
        raw = (each[:-6] if each[-5:-4] == b"r" else each for each in match.group(9, 11, 12, 14))
        (numel,), (offset,), shape, stride = (
            tuple(
                int.from_bytes(each[1:], "little", signed=each[:1] == b"J") for each in re.findall(_NUMBER, part, re.S)
            )
            for part in raw
        )
        if not (
            (function, hooks, type(word), type(location)) == (REBUILD_TENSOR_V2, ORDERED_DICT, str, str)
            and dtype is not None
            and key[1] - key[0] == match[5][0]
            and len(shape) == len(stride) <= MAX_RANK
            and min(offset, *shape, *stride, 0) == 0
            and prod(shape) <= MOST
            and len(self.moulds) < MOST_MOULDS
        ):
            return None
        last = offset + sum([(count - 1) * step for count, step in zip(shape, stride, strict=True)])
        needs = 0 if 0 in shape else (last + 1) * dtype.itemsize
        opcodes = _OPCODES + 2 * (len(shape) + 2 + (len(shape) > 3) if shape else 1)
        puts = struct.Struct("<" + "".join(f"{at - end - 4}xI" for end, at in pairwise([-4, *stores]))).unpack_from
        memo_uses = opcodes, frozenset(gets), itemgetter(*gets), values, puts
        pid = key, match.end(10) + 1 - pos, (word, of), (location, numel)
        mould = Mould(size, fixed, bits, *memo_uses, *pid, offset, shape, stride, dtype, needs)
        return self.moulds.setdefault((size, bits), mould)
