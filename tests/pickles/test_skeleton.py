"""Skeletons of pickles: with the long values left out and put back they decode to what the pickle does, and read no
more than they must."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckptool.checkpoint import FileRange, InlineBytes
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.numpy_arrays import LongValue
from ckptool.errors import CkptoolError, Corrupt, LimitExceeded, Truncated
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles import decode as lexing
from ckptool.pickles.decode import Decoded, Skeleton, decode, decode_lazily, skeleton
from ckptool.pickles.strings import encoded, unstub
from tests.support.looped import examples, looped
from tests.support.own_classes import Thing
from tests.support.pickled_graphs import as_tree, decode_pickle, graphs
from tests.support.processes import soon
from tests.support.same import assert_same_tree

# Frames of protocol 4: whole ones, and such as tear what is in them.


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


PROTOCOLS = range(6)


def decoded(made: Skeleton, builders: Any = BUILDERS) -> Decoded:
    return decode_lazily(made, lambda pid: pid, builders)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and long values of a few bytes: every opcode is cut by a window somewhere."""
    use_tiny(monkeypatch)


def use_tiny(monkeypatch: pytest.MonkeyPatch, window: int = 3, long_value: int = 5) -> None:
    monkeypatch.setattr(lexing, "_FIRST_WINDOW", window)
    monkeypatch.setattr(lexing, "_WINDOW", window)
    monkeypatch.setattr(lexing, "LONG_VALUE", long_value)


# The same as decoding the whole ---------------------------------------------------------------------------------------


@settings(max_examples=examples(120))
@given(graphs(), st.sampled_from(PROTOCOLS), st.integers(1, 30), st.integers(30, 40))  # names are shorter than 30
def test_a_skeleton_with_its_stubs_is_the_pickle(graph: Any, protocol: int, window: int, long_value: int) -> None:
    graph = [graph, "text " * 8, b"bytes" * 8, {"key " * 9: bytearray(39)}]
    data = pickle.dumps(graph, protocol)
    assume(protocol or b"Fnan" not in data)
    with pytest.MonkeyPatch.context() as patch:
        use_tiny(patch, window, long_value)
        made = skeleton(InlineBytes(b"before" + data + b"after"), 6, name="graph")
    assert made.end == 6 + len(data)
    assert_same_tree(decoded(made).root, as_tree(graph))


@pytest.mark.parametrize("protocol", [4, 5])
def test_pythons_frames_with_long_bytes_between_them(protocol: int) -> None:
    """Real framing: the pickler puts what is long outside its frames, in a file and in memory."""
    value = [["x" * 50] * 3_000, os.urandom(100_000), list(range(20_000)), bytearray(200_000), "end"]
    value[0] = [f"{i:050}" for i in range(3_000)]
    into_file = io.BytesIO()
    pickle.Pickler(into_file, protocol).dump(value)
    for data in (into_file.getvalue(), pickle.dumps(value, protocol)):
        assert data.count(b"\x95") >= 2
        made = skeleton(InlineBytes(data), name="frames")
        assert len(made.stubs) == 2
        assert decoded(made).root == value == decode(data, lambda pid: pid, BUILDERS).root


# What builders make of stubs ------------------------------------------------------------------------------------------


def latin1(content: bytes) -> bytes:
    """How protocol 2 spells bytes."""
    text = content.decode("latin-1").encode()
    return b"\x80\x02c_codecs\nencode\nX" + struct.pack("<I", len(text)) + text + b"X\x06\0\0\0latin1\x86R."


@pytest.mark.parametrize("kind", ["noise", "ascii", "high"])
def test_bytes_spelled_as_text_are_read_piece_by_piece(kind: str) -> None:
    content = {"noise": random.Random(2).randbytes(400_000), "ascii": b"a" * 200_000, "high": b"\xff" * 200_000}[kind]
    made = skeleton(InlineBytes(latin1(content)), name="a")
    stub = encoded(made.stubs[0])
    assert stub is not None and stub.data.length == len(content) and stub.of is made.stubs[0]
    rng = random.Random(3)
    for _ in range(100):
        at, length = rng.randrange(len(content) + 10), rng.randrange(150_000)
        assert stub.data.read(at, length) == content[at : at + length]
    assert stub.data.read(0, len(content)) == content
    assert decoded(made).root == content


def test_a_text_that_is_no_latin_1_stays_a_call() -> None:
    text = ("x" * 70_000 + "\u20ac").encode()
    data = b"\x80\x02c_codecs\nencode\nX" + struct.pack("<I", len(text)) + text + b"X\x06\0\0\0latin1\x86R."
    root = decoded(skeleton(InlineBytes(data), name="a")).root
    assert root.name == "_codecs.encode" and root.args[0] == text.decode()


def test_an_array_of_protocol_2_costs_no_memory(tmp_path: Path) -> None:
    array = numpy.arange(1 << 20, dtype=numpy.uint8)
    data = pickle.dumps(array, 2)
    made = skeleton(InlineBytes(data), name="a")
    assert len(made.data) < 400 and len(made.stubs) == 1


# Damaged, and built to mislead ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("small", [False, True])
def test_cut_off_at_every_byte(protocol: int, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:
        use_tiny(monkeypatch)
    value = [{"a": (1, 2.5, None, True, "é", b"\xff" * 40, {1}), 300: [2**70, -1]}, "text" * 5, Thing(7)]
    data = pickle.dumps(value, protocol)
    for size in range(len(data)):
        with pytest.raises((Truncated, Corrupt)) as caught:
            skeleton(InlineBytes(data[:size]), name="cut")
        assert type(caught.value) is Truncated or "frame" in caught.value.what
        assert caught.value.what.startswith("cut: ")
        with pytest.raises((Truncated, Corrupt)):
            decode_pickle(data[:size])


@looped("data", WHOLE_FRAMES.values(), ids=WHOLE_FRAMES)
def test_frames_are_as_python_reads_them(data: bytes, tiny: None) -> None:
    expected, found = pickle.loads(data), decode_pickle(data)
    assert data[found.end - 1 :].startswith(b".") and found.end == data.rindex(b".") + 1
    for root in (found.root, decoded(skeleton(InlineBytes(data), name="a")).root):
        assert_same_tree(root, expected)


@pytest.mark.parametrize("small", [False, True])
@looped("data", TORN_FRAMES.values(), ids=TORN_FRAMES)
def test_frames_that_tear_an_opcode_are_corrupt(data: bytes, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:
        use_tiny(monkeypatch)
    with pytest.raises(Corrupt):
        skeleton(InlineBytes(b"\x80\x04" + data), name="a")
    with pytest.raises(Corrupt):
        decode_pickle(b"\x80\x04" + data)


def test_a_hundred_thousand_frames_are_read_within_a_second() -> None:
    data = b"\x80\x04](" + frame(b"N") * 100_000 + b"e."
    with soon(1):
        assert len(decode_pickle(data).root) == 100_000


def test_a_skeleton_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexing, "MAX_SKELETON", 100_000)
    with pytest.raises(LimitExceeded, match="beside the data"):
        skeleton(InlineBytes(b"](" + b"K\x01" * 200_000 + b"e."), name="a")
    value = [bytes(70_000), bytes(70_000)]
    with pytest.raises(LimitExceeded, match="beside the data"):
        decoded(skeleton(InlineBytes(pickle.dumps(value, 3)), name="a"))


def sparse(path: Path, head: bytes, zeros: int, tail: bytes) -> FileRange:
    with path.open("wb") as file:
        file.write(head)
        file.seek(zeros, os.SEEK_CUR)
        file.write(tail)
    source = Source(path)
    return FileRange(source, 0, source.size)


def test_a_value_of_4_gb_is_not_read(tmp_path: Path) -> None:
    size = 4 << 30
    data = sparse(tmp_path / "big.pkl", b"\x80\x04](\x8e" + struct.pack("<Q", size), size, b"K\x07e.")
    tracemalloc.start()
    with soon(0.5):
        made = skeleton(data, name="big")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert made.stubs[0].data.length == size and made.end == data.length
    with pytest.raises(LimitExceeded, match="4,294,967,296 bytes"):
        decoded(made)


@pytest.mark.parametrize(("kind", "opcode"), [("bytes", b"B"), ("text", b"X"), ("Python 2 string", b"T")])
def test_a_value_of_65_mib_is_refused_by_name(kind: str, opcode: bytes, tmp_path: Path) -> None:
    size = 65 << 20
    data = sparse(tmp_path / "big.pkl", b"\x80\x03" + opcode + struct.pack("<I", size), size, b".")
    with pytest.raises(LimitExceeded, match=f"a {kind} of 68,157,440 bytes"):
        decoded(skeleton(data, name="big"))


def test_a_line_of_65_mib_is_refused(tmp_path: Path) -> None:
    data = sparse(tmp_path / "big.pkl", b"V", 65 << 20, b"\n.")
    with pytest.raises(LimitExceeded, match="string of more than"):
        skeleton(data, name="big")


HOSTILE = {
    "texts": b"X\0\0\0\0" * 200_000, "one opcode": b"N" * 1_000_000, "short lines": b"I1\n" * 330_000,
    "names": b"ca\nb\n" * 200_000, "long names": (b"c" + b"a" * 200 + b"\nb\n") * 4_900,
    "frames": frame(b"N") * 100_000, "empty frames": frame(b"") * 110_000, "no line break": b"c" + b"a" * 1_000_000,
    "values that are just long": (b"B" + struct.pack("<I", 1 << 16) + bytes(1 << 16)) * 15,
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_megabyte_takes_less_than_a_second(data: bytes) -> None:
    with soon(1), contextlib.suppress(CkptoolError):
        skeleton(InlineBytes(b"\x80\x04" + data + b"."), name="a")
    tracemalloc.start()
    with contextlib.suppress(CkptoolError):
        skeleton(InlineBytes(b"\x80\x04" + data[:200_000] + b"."), name="a")
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_errors_name_the_byte_of_the_file() -> None:
    data = b"\x80\x03](B" + struct.pack("<I", 70_000) + bytes(70_000) + b"K\x01R"
    made = skeleton(InlineBytes(b"12345" + data + b"e."), 5, name="a")
    with pytest.raises(Corrupt, match=f"at byte {5 + len(data):,}"):
        decoded(made)


def test_whole_leaves_other_values_alone() -> None:
    assert unstub(3) == 3 and unstub("x") == "x"
    assert (
        unstub(LongValue(InlineBytes(b"\xe9"), "string")) == b"\xe9"
        and unstub(LongValue(InlineBytes(b"e"), "string")) == "e"
    )
    with pytest.raises(Corrupt):
        unstub(LongValue(InlineBytes(b"\xff"), "text"))
