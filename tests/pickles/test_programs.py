"""What holds for every pickle program: a tree or an error of ours, for plain values Python's own, and the same again
when written."""

from __future__ import annotations

import io
import pickle
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptool.checkpoint import InlineBytes, Storage, StorageRef
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import Global, Set
from ckptool.errors import CkptoolError, Corrupt
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.decode import Decoded, decode
from ckptool.pickles.encode import encode
from tests.support.looped import examples
from tests.support.pickle_programs import mutations, walks
from tests.support.pickled_graphs import as_tree
from tests.support.processes import soon
from tests.support.same import assert_same_tree

modest = settings(
    max_examples=examples(400),
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


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


@modest
@given(st.one_of(walks(), mutations()))
def test_any_program_gives_a_tree_or_an_error_of_ours_soon(data: bytes) -> None:
    with soon(2):
        try:
            decoded = decoded_program(data)
        except CkptoolError as error:
            assert error.what
        else:
            try:
                found = again(decoded)
            except CkptoolError as error:
                assert error.code in ("conflict", "unsupported", "limit-exceeded", "bad-tensor"), error
            else:
                assert_same_tree(decoded.root, found)


class Restricted(pickle.Unpickler):
    """Python's own machine, with nothing to name."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


@modest
@given(st.one_of(walks(plain=True), mutations()))
def test_plain_values_are_what_python_says(data: bytes) -> None:
    """Where both read a program, they read the same; what only Python reads are the cases that are refused on
    purpose."""
    try:
        expected = Restricted(io.BytesIO(data), encoding="utf-8", errors="strict").load()
    except Exception:  # noqa: BLE001 (Python's own refusals are of many kinds)
        return
    try:
        decoded = decoded_program(data)
    except CkptoolError as error:
        assert error.code in ("conflict", "corrupt", "limit-exceeded", "unsupported"), error
        return
    assert_same_tree(decoded.root, as_tree(expected))


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
