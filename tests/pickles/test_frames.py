"""Frames of protocol 4: read as Python reads them, and refused where an opcode reaches over the end of one."""

from __future__ import annotations

import pickle
import struct
import time

import pytest

from ckptool.errors import Corrupt
from tests.support.decoding import decode_pickle
from tests.support.same import assert_same_tree


def frame(content: bytes, size: int | None = None) -> bytes:
    return b"\x95" + struct.pack("<Q", len(content) if size is None else size) + content


WHOLE_FRAMES = {
    "one up to the end": b"\x80\x04" + frame(b"]."),
    "one before the end": b"\x80\x04" + frame(b"]") + b".",
    "several": b"\x80\x04" + frame(b"](") + frame(b"K\x01K\x02") + b"K\x03" + frame(b"e.") + b"after",
    "an empty one": b"\x80\x04" + frame(b"") + b"](K\x01" + frame(b"") + b"e.",
    "around a memo": b"\x80\x04" + frame(b"]\x94h\x00") + b"\x86" + frame(b"."),
    "around a long text": b"\x80\x04" + frame(b"X\x64\0\0\0" + b"x" * 100) + frame(b"."),
    "ends with the byte that we put behind one": b"\x80\x04" + frame(b"C\x01\xfe") + b".",
}


@pytest.mark.parametrize("data", WHOLE_FRAMES.values(), ids=WHOLE_FRAMES)
def test_frames_are_as_python_reads_them(data: bytes) -> None:
    decoded = decode_pickle(data)
    assert_same_tree(decoded.root, pickle.loads(data))
    assert data[decoded.end - 1 :].startswith(b".") and decoded.end == data.rindex(b".") + 1


TORN_FRAMES = {
    "an argument of one byte": frame(b"](K", 3) + b"\x01e.",
    "an argument of four bytes": frame(b"](J\1\0", 5) + b"\0\0e.",
    "a short text": frame(b"]\x8c\x05ab", 5) + b"cdea.",
    "a text of 40 bytes": frame(b"]X\x28\0\0\0" + b"x" * 20, 26) + b"x" * 20 + b"a.",
    "a text of 100 bytes": frame(b"]X\x64\0\0\0" + b"x" * 20, 26) + b"x" * 80 + b"a.",
    "bytes": frame(b"]B\x64\0\0\0" + b"x" * 20, 26) + b"x" * 80 + b"a.",
    "a name": frame(b"]ccoll", 6) + b"ections\nOrderedDict\na.",
    "the line of a number": frame(b"](I12", 5) + b"34\ne.",
    "the header of a frame": frame(b"]\x95\1\0", 4) + b"\0\0\0\0\0\0.",
    "a recall": frame(b"]\x94(h", 4) + b"\0e.",
    "a frame in a frame": frame(b"](" + frame(b"K\x01") + b"e."),
    "a frame in a frame, of the same end": frame(b"](" + frame(b"K\x01e.")),
    "longer than the pickle": frame(b"].", 3),
    "much longer": frame(b"].", 1 << 63),
    "goes on after the end": frame(b"].K\x01"),
}


@pytest.mark.parametrize("data", TORN_FRAMES.values(), ids=TORN_FRAMES)
def test_frames_that_tear_an_opcode_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_pickle(b"\x80\x04" + data)


def test_a_hundred_thousand_frames_are_read_within_a_second() -> None:
    data = b"\x80\x04](" + frame(b"N") * 100_000 + b"e."
    began = time.process_time()
    assert len(decode_pickle(data).root) == 100_000
    assert time.process_time() - began < 1


@pytest.mark.parametrize("op", [0xFE, 0xFF])
def test_the_opcodes_of_our_own_are_none_in_a_file(op: int) -> None:
    for data in (
        b"%c\0\0\0\0." % op,
        b"\x80\x04" + frame(b"%c\0\0\0\0." % op),
        b"\x80\x04" + frame(b"N%c" % op) + b".",
    ):
        with pytest.raises(Corrupt, match=f"0x{op:02x} is not"):
            decode_pickle(data)
