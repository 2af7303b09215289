"""What holds for every pickle program: a tree or an error of ours, for plain values Python's own, and the same again
when written."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import re
import resource
import struct
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptool.checkpoint import InlineBytes, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.graph import structural_parts, visit
from ckptool.checkpoint.nodes import Global, Set
from ckptool.errors import CkptoolError, Corrupt
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles import decode as decoding
from ckptool.pickles.decode import Decoded, decode
from ckptool.pickles.encode import encode
from ckptool.pickles.runs import _PUTS as PUTS
from ckptool.pickles.runs import _TENSOR as TENSOR
from ckptool.pickles.runs import Runs
from ckptool.pickles.torch_objects import BUILDERS as TORCH_BUILDERS
from ckptool.pickles.torch_objects import REBUILD_TENSOR_V2, storage_class
from tests.support.hostile_inputs import HOOKS, integer, name, storage, tensor, text
from tests.support.pickled_graphs import as_tree
from tests.support.processes import soon
from tests.support.same import assert_same_tree

# Programs -------------------------------------------------------------------------------------------------------------

SCALARS = (
    *(b"N", b"\x88", b"\x89", b"I01\n", b"I-7\n", b"L5L\n", b"L99999999999999999999L\n", b"F-0.5\n", b"K\x05"),
    *(integer(value) for value in (-1, 300, 70_000, -(1 << 80), 1 << 80)),
    *(b"G" + struct.pack(">d", value) for value in (0.0, -0.0, 1e300)),
    *(text(value) for value in ("", "a", "é")),
    *(b"\x8c\x02ab", b"Vline\n", b"S'it'\n", b"U\x01x", b"C\x01\xff", b"B\x02\0\0\0ab", b"\x96\1\0\0\0\0\0\0\0z"),
)
# Opcodes of Python's own values: containers, marks and what closes them, the memo.
PLAIN = (
    *(b"]", b"}", b")", b"\x85", b"\x86", b"\x87", b"2", b"a", b"s", b"(", b"t", b"l", b"d", b"e", b"u", b"1", b"0"),
    *(b"q\0", b"q\1", b"h\0", b"h\1", b"p2\n", b"g2\n", b"r\0\1\0\0", b"j\0\1\0\0", b"\x94", b"\x80\x04"),
    *(b"\x95\2\0\0\0\0\0\0\0N0", b"](K\x01K\x02e", b"}(K\x01N" + text("k") + b")u", b"(K\x01K\x02t", b"]2\x86"),
)
KNOWN = (
    "OrderedDict _rebuild_tensor_v2 _rebuild_parameter _rebuild_sparse_tensor FloatStorage float32 Size set bytearray"
)
KNOWN += " encode dtype _reconstruct scalar Namespace Fraction datetime PosixPath _reconstructor defaultdict Parameter"
KNOWN += " _load_from_bytes"
PYTHON_2 = ("__builtin__", "copy_reg")  # whose names are written as Python 3's above protocol 2
LIVELY = (
    *(name(key.module, key.name) for key in BUILDERS if key.name in KNOWN.split() and key.module not in PYTHON_2),
    *(
        name(*each)
        for each in (("argparse", "Namespace"), ("fractions", "Fraction"), ("numpy", "dtype"), ("os", "system"))
    ),
    *(
        name(*each)
        for each in (("ckptool_marker", "run"), ("models", "Net"), ("a.b", "c.__d__"), ("torch", "hub.load"))
    ),
    *(b"\x8f", b"R", b"R", b"b", b"\x81", b"\x92", b"Q", b"\x93", b"\x90", b"\x91", b"o", b"ickptool_marker\nrun\n"),
    *(HOOKS, tensor((2, 2), (2, 1)), storage(), storage(key="7"), b"Pkey\n", b")R", b")\x81", b"}b"),
)
TENSORS = (
    b"\x80\x02}(" + text("w") + tensor((2, 2), (2, 1)) + text("t") + tensor((2, 2), (1, 2)) + text("e") + b"K\x03u."
)
REAL = (
    TENSORS,
    *(
        pickle.dumps(value, protocol)
        for protocol in range(6)
        for value in (
            {"a": [1, 2.5, None, True, (1, 2), "é", b"\xff", 1 << 70], "b": {1: "x"}, 3: ()},
            [[], {}, "long" * 30, -1, [1] * 5],
        )
    ),
)


def programs(rng: random.Random, count: int, parts: tuple[bytes, ...]) -> Iterator[bytes]:
    """Random opcodes in any order, and real pickles with some bytes changed, cut out or doubled."""
    for number in range(count):
        if number % 2:
            yield b"(" + b"".join(rng.choices((*SCALARS, *parts), k=rng.randrange(1, 16))) + rng.choice((b"t.", b"l."))
            continue
        data = bytearray(rng.choice(REAL))
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(data) or 1)
            cut = slice(at, at + rng.randrange(1, 9))
            data[cut] = rng.choice((b"", bytes(data[cut]) * 2, rng.randbytes(1) + data[cut][1:], rng.randbytes(4)))
        yield bytes(data)


def decoded_program(data: bytes) -> Decoded:
    storages: dict[str, StorageRef] = {}

    def persistent(pid: Any) -> Any:
        if not (type(pid) is tuple and len(pid) == 5 and type(pid[2]) is str):
            raise Corrupt("a persistent id that names no storage")
        return storages.setdefault(pid[2], StorageRef(Storage(InlineBytes(bytes(range(16)))), by_name("f32")))

    return decode(data, persistent, BUILDERS)


def again(decoded: Decoded) -> Any:
    """The tree that is read of what is written of it."""
    refs: dict[str, Storage] = {}

    def key_of(found: Storage) -> str:
        key = next((key for key, known in refs.items() if known is found), str(len(refs)))
        refs[key] = found
        return key

    data = encode(decoded.root, key_of)
    types = {"FloatStorage": "f32", "UntypedStorage": None}

    def persistent(pid: Any) -> StorageRef:
        dtype = types[pid[1].name]
        return StorageRef(refs[pid[2]], by_name(dtype) if dtype else None)

    return decode(data, persistent, BUILDERS).root


@pytest.mark.parametrize("count", [4_000, pytest.param(200_000, marks=pytest.mark.soak)])
def test_any_program_gives_a_tree_or_an_error_of_ours_soon(count: int) -> None:
    trees = 0
    for data in programs(random.Random(1), count, (*PLAIN, *LIVELY)):
        with soon(2):
            try:
                decoded = decoded_program(data)
            except CkptoolError as error:
                assert error.what
                continue
            trees += 1
            try:
                found = again(decoded)
            except CkptoolError as error:
                assert error.code in ("conflict", "unsupported", "limit-exceeded", "bad-tensor"), error
            else:
                assert_same_tree(decoded.root, found)
    assert trees > count / 20


class Restricted(pickle.Unpickler):
    """Python's own machine, with nothing to name."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


@pytest.mark.parametrize("count", [6_000, pytest.param(200_000, marks=pytest.mark.soak)])
def test_plain_values_are_what_python_says(count: int, request: pytest.FixtureRequest) -> None:
    """Where both read a program, they read the same; what only Python reads are the cases that are refused on
    purpose."""
    seen, limits = 0, resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, limits[1]))  # Python makes room for any number of a memo
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_DATA, limits))
    for data in programs(random.Random(2), count, PLAIN):
        try:
            expected = Restricted(io.BytesIO(data), encoding="utf-8", errors="strict").load()
        except Exception:  # noqa: BLE001 (Python's own refusals are of many kinds)
            continue
        try:
            decoded = decoded_program(data)
        except CkptoolError as error:
            assert error.code in ("conflict", "corrupt", "limit-exceeded", "unsupported"), error
            continue
        seen += 1
        assert_same_tree(decoded.root, as_tree(expected))
    assert seen > count / 20


# Names of nested classes, and numbers of protocol 0 -------------------------------------------------------------------


class Outer:
    class Inner: ...


def test_names_of_python_2_are_those_of_python_3_where_the_protocol_is_raised() -> None:
    """Readers translate `__builtin__` up to protocol 2; above it they look for a module of that name."""
    names = [("__builtin__", name) for name in ("set", "xrange", "unicode")]
    names += [("copy_reg", "_reconstructor"), ("itertools", "imap"), ("Queue", "Queue")]
    names += [("collections", "OrderedDict"), ("exceptions", "ValueError")]
    globals_ = [Global(*name) for name in names]
    expected = [pickle.loads(b"\x80\x02c%b\n%b\n." % (module.encode(), name.encode())) for module, name in names]
    nested = Global(__name__, "Outer.Inner")
    assert pickle.loads(encode(globals_, str)) == expected
    assert pickle.loads(encode([*globals_, nested, Set([1])], str)) == [*expected, Outer.Inner, {1}]
    assert encode([nested], str)[:2] == b"\x80\x04" and encode(globals_, str)[:2] == b"\x80\x02"


PIECES = st.sampled_from(
    ["", "+", "-", "0", "1", "00", "01", "7", "10", "9", "x", "_", " ", "L", "e", ".", "inf", "nan", "\t", "0x"]
)


@given(opcode=st.sampled_from("ILF"), parts=st.lists(PIECES, max_size=5))
@example("I", ["-", "0"])
@example("I", ["+", "1"])
@example("I", ["0", "10"])
@example("F", ["1", "e", "9", "9", "9"])
def test_numbers_of_protocol_0_are_those_of_pythons_reader_or_refused(opcode: str, parts: list[str]) -> None:
    data = f"{opcode}{''.join(parts)}\n.".encode()
    try:
        ours = decode(data, lambda _: None, {}).root
    except CkptoolError:
        return
    theirs = pickle.loads(data)
    assert type(ours) is type(theirs) and (ours == theirs or ours != ours)


@given(st.one_of(st.integers(), st.booleans(), st.floats()))
def test_numbers_that_python_writes_in_protocol_0_are_read(number: Any) -> None:
    found = decode(pickle.dumps(number, 0), lambda _: None, {}).root
    assert type(found) is type(number) and (found == number or number != number)


# Runs -----------------------------------------------------------------------------------------------------------------
# Runs of plain tensors are read as the machine reads them, opcode by opcode: the same tree, notes and errors.


ONE_BY_ONE = {**TORCH_BUILDERS, REBUILD_TENSOR_V2: lambda args: TORCH_BUILDERS[REBUILD_TENSOR_V2](args)}
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


@pytest.mark.parametrize("group", [0, *(pytest.param(number, marks=pytest.mark.soak) for number in range(1, 4))])
def test_runs_of_tensors_are_what_the_machine_makes_of_them(
    group: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(group * 300, group * 300 + 300):
        data = Writer(seed).pickle()
        limit = random.Random(seed).choice((1_000_000, 1_000_000, random.Random(seed).randrange(1, 800)))
        monkeypatch.setattr(decoding, "FREE_OPCODES", limit)
        assert outcome(data, TORCH_BUILDERS) == outcome(data, ONE_BY_ONE), seed
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
    assert outcome(data, TORCH_BUILDERS) == outcome(data, ONE_BY_ONE)
