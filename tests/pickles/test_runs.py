"""Runs of plain tensors are read as the machine reads them, opcode by opcode: the same tree, notes and errors."""

from __future__ import annotations

import pickletools
import random
import re
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest

from ckptool.checkpoint import InlineBytes, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.graph import structural_parts, visit
from ckptool.errors import CkptoolError, Corrupt
from ckptool.pickles import decode as decoding
from ckptool.pickles.runs import _PUTS as PUTS
from ckptool.pickles.runs import _TENSOR as TENSOR
from ckptool.pickles.runs import Runs
from ckptool.pickles.torch_objects import BUILDERS, REBUILD_TENSOR_V2, storage_class
from tests.support.hostile_inputs import name, text

ONE_BY_ONE = {**BUILDERS, REBUILD_TENSOR_V2: lambda args: BUILDERS[REBUILD_TENSOR_V2](args)}
KINDS = ("FloatStorage", "HalfStorage", "LongStorage", "QInt8Storage", "UntypedStorage", "NoStorage")


class Writer:
    """Writes a random state dict as torch does, mostly: storages that are shared, missing or too small; numbers in the
    memo that collide; tensors, names and hooks that stand again in other places."""

    def __init__(self, seed: int) -> None:
        self.random, self.body, self.next = random.Random(seed), b"", 0
        self.neat = self.chance(0.6)
        self.odd = 0 if self.neat else 0.01

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def put(self) -> bytes:
        self.next += 1
        number = self.random.choice((1, 2, 3, 4, 5, max(self.next - 2, 0))) if self.chance(self.odd) else self.next
        return b"r" + number.to_bytes(4, "little")

    def get(self, number: int) -> bytes:
        short = number < 256 and (self.neat or self.chance(0.9))
        return b"h" + bytes([number]) if short else b"j" + number.to_bytes(4, "little")

    def number(self, value: int) -> bytes:
        value = min(value, (1 << 31) - 1)
        if 0 <= value < 256 and not (not self.neat and self.chance(0.05)):
            return b"K" + bytes([value])
        return (
            b"M" + value.to_bytes(2, "little")
            if 0 <= value < 65536
            else b"J" + value.to_bytes(4, "little", signed=True)
        )

    def numbers(self, values: list[int]) -> bytes:
        written, few = b"".join(map(self.number, values)), len(values) <= 3
        return (
            (written + bytes([0x84 + len(values)]) if few else b"(" + written + b"t") + self.put() if values else b")"
        )

    def tensor(self, shape: list[int]) -> bytes:
        stride = [prod(shape[at + 1 :]) for at in range(len(shape))]
        stride = [self.random.choice((1, 1, 0, 3, -1, 70_000)) for _ in shape] if self.chance(0.01) else stride
        key = str(self.random.choice((7, 9) if self.chance(0.005) else (0, 1, 2, 5, 123, 12345)))
        numel = self.random.choice((8, 8, 8, 8, 4, 300))
        begin = self.get(1) + b"((" + self.get(2) + self.get(self.random.choice(self.classes)) + text(key) + self.put()
        begin += self.get(4) + self.number(numel) + b"t" + self.put() + b"Q" + self.number(self.chance(0.01))
        begin += self.numbers(shape) + self.numbers(stride) + (b"\x88" if self.chance(0.05) else b"\x89")
        return begin + self.get(5) + b")R" + self.put() + b"t" + self.put() + b"R" + self.put()

    def again(self) -> bytes:
        """A value of the memo once more; hooks that are filled later."""
        number = self.get(self.random.randrange(1, self.next + 1 + (not self.neat)))
        return number + (text("late") + b"Ns" if self.chance(0.1) else b"")

    def pickle(self) -> bytes:
        names = [
            name("torch._utils", "_rebuild_tensor_v2"),
            text("storage"),
            name("torch", "FloatStorage"),
            text("cpu"),
        ]
        names += [name("collections", "OrderedDict"), *(name("torch", kind) for kind in KINDS)]
        body = b"".join(each + self.put() + b"0" for each in names)
        self.classes: list[int] = [3] if self.neat else [3, 3, 3, *self.random.sample(range(6, 12), 3)]
        self.next = self.random.choice((20, 250, 1 << 20))
        shapes = [[self.random.choice((0, 1, 2)) for _ in range(self.random.randrange(5))] for _ in range(3)]
        shapes += [[300, 1]] if self.chance(0.1) else []
        shapes += [[2, 2]] * self.random.randrange(9)
        for batch in range(self.random.randrange(1, 4)):
            body += b"}(" if batch == 0 else b"("
            for at in range(self.random.randrange(1, 30)):
                long = self.random.choice(("", "x" * self.random.randrange(52, 70)) if self.chance(0.1) else ("",))
                body += text(f"layers.{batch}.{at}{long}") + (b"\x94" if self.chance(self.odd) else self.put())
                body += self.again() if self.chance(0.05) else self.tensor(self.random.choice(shapes))
            body += b"u"
        frame = b"\x95" + len(body).to_bytes(8, "little") if self.chance(0.3) else b""
        whole = b"\x80" + bytes([self.random.randrange(2, 6)]) + frame + body + b"."
        if self.chance(0.2):
            ends = [match.end() + 3 for match in re.finditer(b"R(?=r)", whole)] + [self.random.randrange(len(whole))]
            whole = whole[: self.random.choice(ends)]
        for _ in range(self.random.choice((0, 0, 0, 1, 3))):
            at = self.random.randrange(max(1, len(whole)))
            whole = whole[:at] + bytes([self.random.randrange(256)]) + whole[at + 1 :]
        return whole


def outcome(data: bytes, builders: Any) -> list[Any]:
    """What a pickle is decoded to: every node with the numbers of its parts, the notes; or the error."""
    refs: dict[Any, StorageRef] = {}
    asked: list[Any] = []

    def load(pid: Any) -> StorageRef:
        said = re.sub("0x[0-9a-f]+", "", repr(pid))
        if said not in asked[-1:]:  # twice of a tensor that a run leaves to the machine
            asked.append(said)
        if type(pid) is not tuple or len(pid) != 5 or pid[2] == "7":
            raise Corrupt("no such storage")
        size = 16 if pid[2] == "9" else 64
        made = StorageRef(Storage(InlineBytes(bytes(size)), str(pid[2])[:99]), storage_class(pid[1])[1])
        return refs.setdefault(str(pid[2])[:99], made)

    try:
        decoded = decoding.decode(data, load, builders)
    except CkptoolError as error:
        return [type(error), str(error), asked]
    numbers: dict[int, int] = {}
    nodes = list(visit((decoded.root, decoded.discarded)))
    for node in nodes:
        numbers[id(node)] = len(numbers)
    seen: list[Any] = [asked, decoded.notes, decoded.protocol, decoded.end]
    for node in nodes:
        parts = [numbers.get(id(part), part) for part in structural_parts(node)]
        own = (node.storage.location, node.layout, node.flags) if isinstance(node, TensorEntry) else str(node)[:0]
        seen.append((type(node), own, parts))
    return seen


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many opcodes were read in runs."""
    counts: list[int] = []
    read = Runs.read

    def counted(self: Any, data: bytes, pos: int, *rest: Any) -> tuple[int, int]:
        end, count = read(self, data, pos, *rest)
        between = [op for op, _, _ in pickletools.genops(data[pos:end] + b".")][:-1]
        assert count == len(between), "the opcodes are counted"
        counts.append(count)
        return end, count

    monkeypatch.setattr(Runs, "read", counted)
    yield counts


@pytest.mark.parametrize("group", range(4))
def test_runs_of_tensors_are_what_the_machine_makes_of_them(
    group: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(group * 300, group * 300 + 300):
        data = Writer(seed).pickle()
        limit = random.Random(seed).choice((1_000_000, 1_000_000, random.Random(seed).randrange(1, 800)))
        monkeypatch.setattr(decoding, "FREE_OPCODES", limit)
        assert outcome(data, BUILDERS) == outcome(data, ONE_BY_ONE), seed
    assert sum(taken) > 20_000, "else this tests nothing"


@pytest.mark.parametrize("first", [(1 << 32) - 30, *range((1 << 32) - 9, 1 << 32)])
def test_the_highest_memo_indices_carry_into_no_opcode(first: int) -> None:
    """The bytes of a run's tensors are compared as one number, with the indices added to it."""
    writer = Writer(0)
    writer.neat, writer.odd, writer.classes, writer.next = True, 0, [3], 100
    names = ["torch._utils", "storage", "torch", "cpu", "collections"]
    head = b"".join(
        (text(each) if at in (1, 3) else name(each, ("_rebuild_tensor_v2", "FloatStorage", "OrderedDict")[at // 2]))
        + b"r"
        + (at + 1).to_bytes(4, "little")
        + b"0"
        for at, each in enumerate(names)
    )
    one = text("one") + writer.put() + writer.tensor([2, 2])
    match = re.search(TENSOR, one, re.DOTALL)
    assert match is not None
    step = sum(1 << 8 * match.start(group) for group in PUTS if match[group] is not None)

    def moved(index: int) -> bytes:
        number = int.from_bytes(one, "little") + (index - int.from_bytes(match[1], "little")) * step
        return number.to_bytes(len(one) + 1, "little")[: len(one)]

    data = b"\x80\x02" + head + b"}(" + one + moved(200) + moved(first) + b"u."
    assert outcome(data, BUILDERS) == outcome(data, ONE_BY_ONE)
