"""Pickles that are damaged or built to exhaust the decoder: a tree or an error of ours, and soon."""

from __future__ import annotations

import pytest

from ckptool.checkpoint.nodes import ByteString, OrderedDict
from ckptool.errors import CkptoolError, Corrupt, LimitExceeded, Truncated, Unsupported
from ckptool.pickles.decode import decode
from ckptool.pickles.objects import MAX_NAMES
from tests.support.decoding import HOOKS, F, decode_pickle, decodes_to
from tests.support.looped import looped
from tests.support.processes import soon


def nested(depth: int, opener: bytes = b"]", closer: bytes = b"a") -> bytes:
    return opener * depth + b"N" + closer * depth + b"."


HOSTILE: dict[str, tuple[bytes, type[CkptoolError]]] = {
    "61 SETITEM on a tensor-like": (b"K\x01K\x02Ns.", Corrupt),
    "61 SETITEM on a list": (b"]K\x02Ns.", Corrupt),
    "61 APPEND on a dict": (b"}Na.", Corrupt),
    "61 APPEND on a tuple": (b")Na.", Corrupt),
    "61 ADDITEMS on a list": (b"](N\x90.", Corrupt),
    "61 BUILD on an int": (b"K\x01}b.", Corrupt),
    "61 BUILD on a dict": (b"}}b.", Corrupt),
    "61 BUILD twice": (b"ca\nB\n)\x81}b}b.", Corrupt),
    "57 BUILD of an OrderedDict with numbers": (HOOKS + b"}K\x01Nsb.", Corrupt),
    "62 empty": (b"", Truncated),
    "62 STOP alone": (b".", Corrupt),
    "62 underflow": (b"\x86.", Corrupt),
    "62 no mark": (b"Nt.", Corrupt),
    "62 POP of nothing": (b"0.", Corrupt),
    "62 BINPUT of nothing": (b"q\0N.", Corrupt),
    "62 REDUCE without a tuple": (F + b"NR.", Corrupt),
    "62 OBJ of nothing": (b"(o.", Corrupt),
    "63 two values left": (b"NN.", Corrupt),
    "63 a mark left": (b"(N.", Corrupt),
    "65 GET of nothing": (b"h\0.", Corrupt),
    "65 GET of no number": (b"gx\n.", Corrupt),
    "67 a text of 4 GB": (b"X\xf0\xff\xff\xff0123456789.", LimitExceeded),
    "67 a text longer than the file": (b"X\xf0\xff\0\x000123456789.", Truncated),
    "67 bytes longer than the file": (b"B\xf0\xff\xff\xff0123456789.", Truncated),
    "67 a BINBYTES8 of 2^63": (b"\x8e" + b"\xff" * 7 + b"\x7f.", Truncated),
    "68 a negative BINSTRING": (b"T\xff\xff\xff\xff.", Corrupt),
    "68 a negative LONG4": (b"\x8b\xff\xff\xff\xff.", Corrupt),
    "69 a LONG4 of 2^31 bytes": (b"\x8b\xff\xff\xff\x7f.", LimitExceeded),
    "69 a LONG4 of 5000 bits": (b"\x8b\x80\x02\0\0" + b"\x01" * 640 + b".", LimitExceeded),
    "69 a LONG of a million digits": (b"L" + b"1" * 1_000_000 + b"L\n.", Corrupt),
    "69 INT of no number": (b"Iabc\n.", Corrupt),
    "69 FLOAT of no number": (b"Fabc\n.", Corrupt),
    "70 333000 lists": (nested(333_000), LimitExceeded),
    "70 2000 lists": (nested(2_000), LimitExceeded),
    "70 2000 tuples": (nested(2_000, b"", b"\x85"), LimitExceeded),
    "70 2000 calls": (F * 2_000 + b")" + b"R\x85" * 2_000 + b".", LimitExceeded),
    "71 marks": (b"(" * 2_000_000, LimitExceeded),
    "74 tuples as a key": (b"}" + b")" + b"\x85" * 8 + b"Ns.", LimitExceeded),
    "74 billion laughs as a key": (b"})" + b"2\x86" * 32 + b"Ns.", LimitExceeded),
    "76 a list as a key": (b"}]Ns.", Corrupt),
    "76 a list in a tuple as a key": (b"}]\x85Ns.", Corrupt),
    "76 a set as a key": (b"}\x8fNs.", Corrupt),
    "76 a bytearray as a key": (b"}\x96\0\0\0\0\0\0\0\0Ns.", Corrupt),
    "76 a list in a set": (b"\x8f(]\x90.", Corrupt),
    "76 a set in itself": (b"\x8fq\0(h\0\x90.", Corrupt),
    "76 a list in a frozenset": (b"(]\x91.", Corrupt),
    "76 NaN as a key": (b"}G\x7f\xf8\0\0\0\0\0\0Ns.", Corrupt),
    "76 a key without a value": (b"}(K\x01u.", Corrupt),
    "77 protocol 6": (b"\x80\x06N.", Unsupported),
    "77 protocol 42": (b"\x80\x2aN.", Unsupported),
    "79 a frame longer than the pickle": (b"\x80\x04\x95\x10\0\0\0\0\0\0\0N.", Corrupt),
    "81 a name that is not UTF-8": (b"c\xff\nx\n.", Corrupt),
    "81 a text that is not UTF-8": (b"X\1\0\0\0\xff.", Corrupt),
    "55 a name that is computed": (b"K\x01K\x02\x93.", Corrupt),
    "62 not an opcode": (b"\xff.", Corrupt),
    "62 a broken escape": (b"V\\u12\n.", Corrupt),
    "62 STRING without quotes": (b"Sabc\n.", Corrupt),
    "62 STRING of one quote": (b"S'\n.", Corrupt),
}


@looped("name", HOSTILE, at_once=10, here=30)
def test_a_hostile_pickle_is_refused_quickly(name: str) -> None:
    data, error = HOSTILE[name]
    with soon(5), pytest.raises(error) as caught:
        decode_pickle(data)
    assert "data.pkl" in caught.value.what


def test_bytes_after_the_end_are_not_read() -> None:
    assert decode_pickle(b"N.\x80\x02K\x01.").end == 2


def test_colliding_integer_keys_exceed_the_limit() -> None:
    step = (1 << 61) - 1
    keys = [b"\x8a\x0a" + (i * step).to_bytes(10, "little") + b"N" for i in range(1, 8_000)]
    with soon(5):
        for pickle_ in (b"}(" + b"".join(keys) + b"u.", b"}" + b"".join(key + b"s" for key in keys) + b"."):
            with pytest.raises(LimitExceeded, match="same hash"):
                decode_pickle(pickle_)
    assert len(decode_pickle(b"}(" + b"".join(keys[:90]) + b"u.").root) == 90
    spread = b"".join(b"\x8a\x0a" + (i * step + i * i).to_bytes(10, "little") + b"N" for i in range(1, 8_000))
    assert len(decode_pickle(b"}(" + spread + b"u.").root) == 7_999


def test_pickles_of_python_2_are_read() -> None:
    ordered = b"ccollections\nOrderedDict\nq\x04]q\x05(]q\x06(U\x01aK\x01e]q\x07(U\x01bK\x02ee\x85q\x08Rq\t"
    data = b"\x80\x02}q\x01(U\x06weightq\x02K\x01U\x02\xe9\xe8q\x03K\x02U\x01d" + ordered + b"u."
    decodes_to(data, {"weight": 1, "\xe9\xe8": 2, "d": OrderedDict({"a": 1, "b": 2})})
    assert [note.code for note in decode_pickle(data).notes] == ["python2-text"]
    decodes_to(b"\x80\x02}U\x01\xe9U\x01\xe8s.", {"\xe9": ByteString(b"\xe8")})  # keys become text, values stay bytes
    pairs = b"ccollections\nOrderedDict\n](](U\x01\xe9K\x01ee\x85R."
    decodes_to(pairs, OrderedDict({"\xe9": 1}))


def test_more_classes_than_any_checkpoint_names() -> None:
    names = b"](" + b"".join(b"cown%d\nNet\n" % number for number in range(MAX_NAMES + 1)) + b"e."
    with pytest.raises(LimitExceeded, match="different classes and functions"):
        decode(names, lambda pid: pid, {})
    with pytest.raises(LimitExceeded, match="1,600,003 characters"):
        decode(b"cown\n" + b"Network." * 200_000 + b"\n.", lambda pid: pid, {})
    again = b"](" + b"cown\nNet\n" * (2 * MAX_NAMES) + b"e."
    assert len(decode(again, lambda pid: pid, {}).root) == 2 * MAX_NAMES
