"""What holds for every pickle program: a tree or an error of ours, for plain values Python's own, and the same again
when written."""

from __future__ import annotations

import io
import pickle
import random
import resource
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptool.checkpoint import InlineBytes, Storage, StorageRef
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import Global, Set
from ckptool.errors import CkptoolError, Corrupt
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.decode import Decoded, decode
from ckptool.pickles.encode import encode
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
    class Inner:
        class Innermost:
            pass

        def __eq__(self, other: object) -> bool:
            return type(other) is Outer.Inner

        __hash__ = None  # type: ignore[assignment]

    @staticmethod
    def function() -> None:
        pass


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
