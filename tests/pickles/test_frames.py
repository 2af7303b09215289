"""Frames of protocol 4: read as Python reads them, and refused where an opcode reaches over the end of one."""

from __future__ import annotations

import pickle

import pytest

from ckptool.errors import Corrupt
from tests.support.decoding import decode_pickle
from tests.support.looped import looped
from tests.support.pickle_frames import TORN_FRAMES, WHOLE_FRAMES, frame
from tests.support.processes import soon
from tests.support.same import assert_same_tree


@pytest.mark.parametrize("data", WHOLE_FRAMES.values(), ids=WHOLE_FRAMES)
def test_frames_are_as_python_reads_them(data: bytes) -> None:
    decoded = decode_pickle(data)
    assert_same_tree(decoded.root, pickle.loads(data))
    assert data[decoded.end - 1 :].startswith(b".") and decoded.end == data.rindex(b".") + 1


@looped("data", TORN_FRAMES.values(), ids=TORN_FRAMES)
def test_frames_that_tear_an_opcode_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_pickle(b"\x80\x04" + data)


def test_a_hundred_thousand_frames_are_read_within_a_second() -> None:
    data = b"\x80\x04](" + frame(b"N") * 100_000 + b"e."
    with soon(1):
        assert len(decode_pickle(data).root) == 100_000


@pytest.mark.parametrize("op", [0xFE, 0xFF])
def test_the_opcodes_of_our_own_are_none_in_a_file(op: int) -> None:
    for data in (
        b"%c\0\0\0\0." % op,
        b"\x80\x04" + frame(b"%c\0\0\0\0." % op),
        b"\x80\x04" + frame(b"N%c" % op) + b".",
    ):
        with pytest.raises(Corrupt, match=f"0x{op:02x} is not"):
            decode_pickle(data)
