"""Names of nested classes, and numbers of protocol 0: what stock readers make of what is written, and of what is
read."""

from __future__ import annotations

import pickle
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from ckptool.checkpoint.nodes import Global, Set
from ckptool.errors import CkptoolError
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode


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
    names = [
        ("__builtin__", "set"),
        ("__builtin__", "xrange"),
        ("__builtin__", "unicode"),
        ("copy_reg", "_reconstructor"),
    ]
    names += [("itertools", "imap"), ("Queue", "Queue"), ("collections", "OrderedDict"), ("exceptions", "ValueError")]
    given = [Global(*name) for name in names]
    expected = [pickle.loads(b"\x80\x02c%b\n%b\n." % (module.encode(), name.encode())) for module, name in names]
    nested = Global(__name__, "Outer.Inner")
    assert pickle.loads(encode(given, str)) == expected
    assert pickle.loads(encode([*given, nested, Set([1])], str)) == [*expected, Outer.Inner, {1}]
    assert encode([nested], str)[:2] == b"\x80\x04" and encode(given, str)[:2] == b"\x80\x02"


# Protocol 0 -----------------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    ["", "+", "-", "0", "1", "00", "01", "7", "10", "9", "x", "_", " ", "L", "e", ".", "inf", "nan", "\t", "0x"]
)


def read_by_us(data: bytes) -> Any:
    return decode(data, lambda _: None, {}).root


@given(opcode=st.sampled_from("ILF"), parts=st.lists(PIECES, max_size=5))
@example("I", ["-", "0"])
@example("I", ["+", "1"])
@example("I", ["0", "10"])
@example("F", ["1", "e", "9", "9", "9"])
def test_numbers_of_protocol_0_are_those_of_pythons_reader_or_refused(opcode: str, parts: list[str]) -> None:
    data = f"{opcode}{''.join(parts)}\n.".encode()
    try:
        ours = read_by_us(data)
    except CkptoolError:
        return
    theirs = pickle.loads(data)
    assert type(ours) is type(theirs) and (ours == theirs or ours != ours)


@given(st.one_of(st.integers(), st.booleans(), st.floats()))
def test_numbers_that_python_writes_in_protocol_0_are_read(number: Any) -> None:
    found = read_by_us(pickle.dumps(number, 0))
    assert type(found) is type(number) and (found == number or number != number)
