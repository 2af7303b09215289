"""Pickles that nobody should send: contradictions, odd values, cycles."""

from __future__ import annotations

from collections.abc import Callable

from ckptool.errors import CkptoolError, Corrupt, LimitExceeded, Truncated, Unsupported
from tests.support.decoys import CALL, MARKER
from tests.support.hostile_inputs import HOOKS, name, pickle_zip, program, state_pickle, storage, tensor, text

LONG = b"1" * 1_000_000


REFUSED: dict[str, tuple[bytes, type[CkptoolError]]] = {
    "57-ordered-dict-with-numbers": (program(HOOKS + b"}K\x01Nsb"), Corrupt),
    "57-ordered-dict-with-a-list": (program(HOOKS + b"](K\x01eb"), Corrupt),
    "57-build-of-a-parameter": (state_pickle({"x": name("torch.nn.parameter", "Parameter") + b")\x81}" + text("data")
        + CALL
        + b"sb"}), Corrupt),
    "57-state-of-a-tensor": (program(tensor((4,), (1,)) + b"}" + text("a") + b"K\x01sb"), Corrupt),
    "57-state-of-a-storage": (program(storage() + b"}" + text("a") + b"K\x01sb"), Corrupt),
    "57-state-of-a-parameter": (program(name("torch._utils", "_rebuild_parameter") + tensor((4,), (1,)) + b"\x88"
        + HOOKS + b"\x87R}b"),
                                Corrupt),
    "61-setitem-on-a-tensor": (program(tensor((4,), (1,)) + b"K\x00K\x01s"), Corrupt),
    "61-setitems-on-a-tensor": (program(tensor((4,), (1,)) + b"(K\x00K\x01u"), Corrupt),
    "61-append-on-a-tensor": (program(tensor((4,), (1,)) + b"Na"), Corrupt),
    "61-setitem-on-a-storage": (program(storage() + b"K\x00K\x01s"), Corrupt),
    "61-setitem-on-a-list": (program(b"]K\x00K\x01s"), Corrupt),
    "61-setitem-on-a-text": (program(text("a") + b"K\x00K\x01s"), Corrupt),
    "61-append-on-a-dict": (program(b"}Na"), Corrupt),
    "61-append-on-an-ordered-dict": (program(HOOKS + b"Na"), Corrupt),
    "61-add-to-a-dict": (program(b"}(N\x90", 4), Corrupt),
    "61-build-on-an-int": (program(b"K\x01}b"), Corrupt),
    "61-build-on-a-list": (program(b"]}b"), Corrupt),
    "61-build-on-a-name": (program(name("torch", "float32") + b"}b"), Corrupt),
    "61-setitem-on-a-name": (program(name("torch", "float32") + b"K\x01Ns"), Corrupt),
    "62-underflow": (program(b"\x86"), Corrupt),
    "62-no-mark": (program(b"K\x01t"), Corrupt),
    "62-stop-alone": (b".", Corrupt),
    "62-empty": (b"", Truncated),
    "62-no-stop": (b"\x80\x02N", Truncated),
    "62-setitem-of-nothing": (program(b"s"), Corrupt),
    "63-two-values": (program(b"NN"), Corrupt),
    "63-a-mark": (program(b"(N"), Corrupt),
    "64-bytes-after-stop": (program(b"N") + b"\0", CkptoolError),
    "64-second-pickle": (program(b"N") + program(CALL), CkptoolError),
    "65-undefined": (program(b"h\x07"), Corrupt),
    "65-undefined-long": (program(b"j\xff\xff\xff\xff"), Corrupt),
    "65-negative": (program(b"Np-1\ng-2\n"), Corrupt),
    "67-text": (program(b"X\xf0\xff\xff\x030123456789"), CkptoolError),
    "67-text-of-4-gb": (program(b"X\xf0\xff\xff\xff0123456789"), LimitExceeded),
    "67-bytes": (program(b"B\xf0\xff\xff\xff0123456789"), Truncated),
    "67-bytes8": (program(b"\x8e" + b"\xff" * 7 + b"\x7f"), Truncated),
    "67-bytes8-of-2-64": (program(b"\x8e" + b"\xff" * 8), Truncated),
    "67-bytearray8": (program(b"\x96" + b"\xff" * 7 + b"\x00", 5), Truncated),
    "67-text8": (program(b"\x8d" + b"\xff" * 8, 4), LimitExceeded),
    "68-binstring": (program(b"T\xff\xff\xff\xff"), Corrupt),
    "68-long4": (program(b"\x8b\xff\xff\xff\xff"), Corrupt),
    "69-long1-of-255-bytes": (program(b"\x8a\xff" + b"\x01" * 254), CkptoolError),
    "69-long4-of-2-31": (program(b"\x8b\xff\xff\xff\x7f"), LimitExceeded),
    "69-long4-of-5000-bits": (program(b"\x8b\x80\x02\0\0" + b"\1" * 640), LimitExceeded),
    "69-long-of-a-million-digits": (program(b"L" + LONG + b"L\n"), CkptoolError),
    "69-int-of-a-million-digits": (program(b"I" + LONG + b"\n"), CkptoolError),
    "69-put-of-a-million-digits": (program(b"Np" + LONG + b"\n"), CkptoolError),
    "69-float-of-a-million-digits": (program(b"F" + LONG + b"e\n"), CkptoolError),
    "76-list-as-key": (program(b"}]Ns"), Corrupt),
    "76-dict-in-a-tuple-as-key": (program(b"}}\x85Ns"), Corrupt),
    "76-set-as-key": (program(b"}\x8fNs", 4), Corrupt),
    "76-nan-as-key": (program(b"}G\x7f\xf8\0\0\0\0\0\0Ns"), Corrupt),
    "76-nan-in-a-tuple": (program(b"}G\x7f\xf8\0\0\0\0\0\0\x85Ns"), Corrupt),
    "77-protocol-6": (program(b"N", 6), Unsupported),
    "77-protocol-42": (program(b"N", 42), Unsupported),
    "77-protocol-42-later": (program(b"N0\x80\x2aN"), Unsupported),
    "80-ext1": (program(b"\x82\x01"), Unsupported),
    "80-ext2": (program(b"\x83\x01\0"), Unsupported),
    "80-ext4": (program(b"\x84\x01\0\0\0"), Unsupported),
    "80-next-buffer": (program(b"\x97", 5), Unsupported),
    "80-readonly-buffer": (program(b"N\x98", 5), Unsupported),
    "81-name-not-utf-8": (program(b"ca\xff\nb\n"), Corrupt),
    "81-name-with-a-zero": (program(name("torch\0", "float32")), Corrupt),
    "81-name-with-an-escape": (program(name("torch", "\x1b[31mfloat32")), Corrupt),
    "81-name-with-a-line-break": (program(b"\x8c\x05tor\nc\x8c\x01a\x93", 4), Corrupt),
    "81-name-with-half-a-pair": (program(b"\x8c\x03\xed\xa0\x80\x8c\x01a\x93", 4), Corrupt),
    "81-text-not-utf-8": (program(b"X\1\0\0\0\xff"), Corrupt),
    "82-persid": (program(b"P0\n"), Corrupt),
    "82-number": (program(b"K\x01Q"), Corrupt),
    "82-none": (program(b"NQ"), Corrupt),
    "82-short": (program(b"(" + text("storage") + b"tQ"), Corrupt),
    "82-long": (program(b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu")
        + b"K\x04NNtQ"), Corrupt),
    "82-module": (program(b"(" + text("module") + MARKER + text("a.py") + text("import os") + b"tQ"), Corrupt),
    "82-call-as-key": (program(b"(" + text("storage") + name("torch", "FloatStorage") + CALL + text("cpu")
        + b"K\x04tQ"), Corrupt),
    "82-call-as-type": (program(b"(" + text("storage") + CALL + text("0") + text("cpu") + b"K\x04tQ"), CkptoolError),
    "82-foreign-type": (program(b"(" + text("storage") + MARKER + text("0") + text("cpu") + b"K\x04tQ"), Unsupported),
}  # fmt: skip


INPUTS: dict[str, bytes | Callable[[], bytes]] = {
    f"row {title}": pickle_zip(pickle) for title, (pickle, _) in REFUSED.items()
}
