"""Runs of plain tensors whose opcodes differ only in their names, their storages and memo indices.

Torch writes about thirty opcodes for each tensor of a state dict. The first of a mould is matched by a pattern; where
the next one has the same bytes (those that may not differ), the machine would do the same, and the values are made at
once. Anything else is left to the machine.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import islice
from math import prod
from operator import itemgetter
from typing import Any

from ckptool.checkpoint import MAX_RANK, NO_FLAGS, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.facts import dataclass
from ckptool.pickles.objects import PickleReader
from ckptool.pickles.torch_objects import MOST, ORDERED_DICT, REBUILD_TENSOR_V2, storage_class

_GET, _NUMBER = b"(h.|j....)", b"(?:K.|M..|J....)"
_NUMBERS = b"(\\)|(?:#\x85|##\x86|###\x87|\\((?:#){4,64}t)r(....))"  # sizes, or strides
# What follows a name: `_rebuild_tensor_v2(storage, offset, sizes, strides, False, OrderedDict())`.
_TENSOR = b"r(....)@\\(\\(@@X(.)\0\0\0([0-9]{1,19})r(....)@(#)tr(....)Q(#)%b%b\x89@\\)Rr(....)tr(....)Rr(....)"
_TENSOR = (_TENSOR % (_NUMBERS, _NUMBERS)).replace(b"@", _GET).replace(b"#", _NUMBER)
_PUTS = (1, 7, 10, 13, 15, 17, 18, 19)  # the groups with the memo indices of new values, in order
_GETS = (2, 3, 4, 8, 16)  # and of the function, "storage", its class, its location, `OrderedDict`
_OPCODES = 23  # of a tensor without dimensions
MOST_MOULDS = 256


@dataclass(slots=True, eq=False)
class Mould:
    """What the bytes of all tensors from one mould have in common.

    size: how many bytes.  mask, bits: which bits may not differ, and their values, as integers, where the first new
    memo index is 0; `indices` is what each further one adds to `bits`.  opcodes: their number.
    gets: looks up in the memo what must be `values`.  first: where the first new index stands.  count: of new indices.
    key: where the name of the storage begins and ends.  id_front, id_back: what comes before and after that name in
    the persistent id, which ends at `id_end`.  needs: bytes that the storage must have.  after: the mould that last
    followed this one.
    """

    size: int
    mask: int
    bits: int
    indices: int
    opcodes: int
    gets: Callable[[Any], tuple[Any, ...]]
    values: tuple[Any, ...]
    first: int
    count: int
    key: tuple[int, int]
    id_end: int
    id_front: tuple[str, Any]
    id_back: tuple[str, int]
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: DType
    needs: int
    after: Mould | None = None

    def index(self, data: bytes, pos: int) -> int:
        """The first new memo index of the tensor whose bytes begin at `pos`; -1 for one from another mould."""
        raw = data[pos : pos + self.size]
        index = int.from_bytes(raw[self.first : self.first + 4], "little")
        # The last index is at the very end: where one is too large for its four bytes, so is the number on the right.
        is_alike = int.from_bytes(raw, "little") & self.mask == self.bits + index * self.indices
        return index if is_alike and len(raw) == self.size else -1


class Memo(dict[int, Any]):
    """A pickle's memo. The values of runs are made when one of their indices is looked up, which hardly ever happens.

    runs: of each tensor its first index, its mould, its name, the name of its storage, the storage, and the tensor.
    highest: the highest index in runs, and among the first `looked_at` others.
    """

    __slots__ = ("highest", "looked_at", "runs")

    def __init__(self) -> None:
        self.runs: list[tuple[int, Mould, str, str, Any, Any]] = []
        self.highest, self.looked_at = -1, 0

    def top(self) -> int:
        """The highest index, -1 if there is none."""
        count = super().__len__()
        self.highest = max([self.highest, *islice(reversed(self), count - self.looked_at)])
        self.looked_at = count
        return self.highest

    def __missing__(self, number: int) -> Any:
        index = bisect_right(self.runs, number, key=itemgetter(0))
        if index:
            self._make(*self.runs[index - 1])
        if number not in self:
            raise KeyError(number)
        return self[number]

    def __len__(self) -> int:
        while self.runs:
            self._make(*self.runs.pop())
        return super().__len__()

    def _make(self, first: int, mould: Mould, name: str, key: str, ref: Any, value: Any) -> None:
        shape, stride, hooks = (*mould.shape,), (*mould.stride,), OrderedDict()  # objects of its own
        args = ref, mould.offset, shape, stride, False, hooks
        pid = *mould.id_front, key, *mould.id_back
        values = name, key, pid, *((shape, stride) if shape else ()), hooks, args, value
        for number, item in enumerate(values, first):
            self.setdefault(number, item)  # the index may have been reused since


class Runs:
    """Reads runs of plain tensors for a machine whose reader it shares."""

    def __init__(self, reader: PickleReader, persistent: Callable[[Any], Any]) -> None:
        self.reader, self.persistent = reader, persistent
        self.moulds: dict[tuple[int, int], Mould] = {}
        self.last: Mould | None = None

    def read(self, data: bytes, pos: int, stack: list[Any], memo: Memo, budget: int) -> tuple[int, int]:
        """Pushes the tensors that follow a name, which is on the stack, and the names between them. Returns the
        position after them, and how many opcodes they took. budget: opcodes that may be read."""
        reader, before, total, highest = self.reader, self.last, 0, memo.top()
        trusted = set[Mould]()  # whose values the memo has: nothing here puts an index that it has already
        while True:
            mould = before.after if before is not None else None
            if mould is None or (first := mould.index(data, pos)) < 0:
                mould = self._mould(data, pos, memo)
                if mould is None:
                    break
                first = mould.index(data, pos)
                if before is not None:
                    before.after = mould
            if first <= highest or total + mould.opcodes > budget:
                break
            if mould not in trusted and mould.gets(memo) != mould.values:
                break
            trusted.add(mould)
            begin, end = mould.key
            key = str(data[pos + begin : pos + end], "utf-8", "surrogatepass")
            reader.at = pos + mould.id_end
            ref = self.persistent((*mould.id_front, key, *mould.id_back))
            if type(ref) is not StorageRef or ref.dtype is not mould.dtype or ref.storage.data.length < mould.needs:
                break
            value = TensorEntry(ref.storage, mould.dtype, mould.shape, mould.stride, mould.offset, NO_FLAGS)
            memo.runs.append((first, mould, stack[-1], key, ref, value))
            highest = first + mould.count - 1
            stack.append(value)
            pos += mould.size
            reader.at = pos - 5  # after the call, before the tensor is memoized
            total += mould.opcodes
            before = mould
            size = int.from_bytes(data[pos + 1 : pos + 5], "little")
            # A long or truncated name is left to the machine, which checks it.
            if data[pos : pos + 1] != b"X" or size >= 64 or pos + 5 + size >= len(data) or total == budget:
                break
            stack.append(str(data[pos + 5 : pos + 5 + size], "utf-8", "surrogatepass"))
            pos += 5 + size
            total += 1
        self.last, memo.highest = before, highest
        return pos, total

    def _mould(self, data: bytes, pos: int, memo: Memo) -> Mould | None:
        """The mould of the tensor whose bytes begin at `pos`; None for one that is left to the machine."""
        match = re.compile(_TENSOR, re.DOTALL).match(data, pos)
        if match is None:
            return None
        stores = [group for group in _PUTS if match[group] is not None]
        puts = [int.from_bytes(match[group], "little") for group in stores]
        if puts != [*range(puts[0], puts[0] + len(puts))]:  # unlike any pickler's
            return None
        size, begin, end = match.end() - pos, match.start(6) - pos, match.end(6) - pos
        mask = int.from_bytes(b"\xff" * begin + bytes(end - begin) + b"\xff" * (size - end), "little")
        indices = sum(1 << 8 * (match.start(group) - pos) for group in stores)
        bits = (int.from_bytes(match[0], "little") & mask) - puts[0] * indices
        if (size, bits) in self.moulds:
            return self.moulds[size, bits]
        gets = tuple(int.from_bytes(match[group][1:], "little") for group in _GETS)
        values: tuple[Any, ...] = tuple(memo.get(number) for number in gets)
        function, word, cls, location, hooks = values
        dtype = storage_class(cls)[1]
        # The number of an opcode, or the numbers of a memoized tuple.
        raw = (field[:-6] if field[-5:-4] == b"r" else field for field in match.group(9, 11, 12, 14))
        (numel,), (offset,), shape, stride = (
            tuple(
                int.from_bytes(text[1:], "little", signed=text[:1] == b"J") for text in re.findall(_NUMBER, part, re.S)
            )
            for part in raw
        )
        if not (
            (function, hooks, type(word), type(location)) == (REBUILD_TENSOR_V2, ORDERED_DICT, str, str)
            and dtype is not None
            and end - begin == match[5][0]
            and len(shape) == len(stride) <= MAX_RANK
            and min(offset, *shape, *stride, 0) == 0
            and prod(shape) <= MOST
            and len(self.moulds) < MOST_MOULDS
        ):
            return None
        last = offset + sum([(count - 1) * step for count, step in zip(shape, stride, strict=True)])
        needs = 0 if 0 in shape else (last + 1) * dtype.itemsize
        opcodes = _OPCODES + 2 * (len(shape) + 2 + (len(shape) > 3) if shape else 1)
        memo_use = opcodes, itemgetter(*gets), values, match.start(stores[0]) - pos, len(stores)
        storage_id = (begin, end), match.end(10) + 1 - pos, (word, cls), (location, numel)
        mould = Mould(size, mask, bits, indices, *memo_use, *storage_id, offset, shape, stride, dtype, needs)
        return self.moulds.setdefault((size, bits), mould)
