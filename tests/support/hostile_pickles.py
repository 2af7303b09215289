"""Pickles that nobody should send: they would call something, contradict themselves, or exhaust their reader."""

from collections.abc import Callable

from ckptool.errors import CkptoolError, Corrupt, LimitExceeded, Truncated, UnsafeObject, Unsupported
from tests.support.hostile_inputs import (
    CALL,
    HOOKS,
    MARKER,
    ORDERED,
    REBUILD,
    W,
    integer,
    name,
    pickle_zip,
    program,
    state_pickle,
    storage,
    text,
    x,
)  # fmt: skip

# What would call a marker that leaves a trace.


def pops(value: bytes) -> bytes:
    """A dictionary with one entry; before it, a value that is made and discarded."""
    return program(value + b"0}" + text("w") + W + b"s")


CALLS: dict[str, bytes] = {
    "53-global": x(CALL),
    "53-stack-global": program(b"\x8c\x0eckptool_marker\x8c\x03run\x93" + text("trace") + b"\x85R", 4),
    "53-inst": program(b"(" + text("trace") + b"ickptool_marker\nrun\n"),
    "53-obj": program(b"(" + MARKER + text("trace") + b"o"),
    "53-build": program(MARKER + b")R}" + text("a") + b"K\x01sb"),
    "53-nested-in-a-tensor-key": program(b"}" + CALL + W + b"s"),
    "53-as-the-function-of-a-call": program(CALL + b")R"),
    "53-in-metadata": program(HOOKS + b"}" + text("_metadata") + CALL + b"sb"),
    "53-in-a-set": program(b"\x8f(" + CALL + b"\x90", 4),
    "53-as-an-argument": program(name("collections", "deque") + b"]" + CALL + b"a\x85R"),
    "54-dotted": x(program(b"\x8c\x0eckptool_marker\x8c\x0crun.__call__\x93)R", 4)[2:-1]),
    "54-dotted-torch": x(name("torch", "_utils.os.system") + text("trace") + b"\x85R"),
    "54-dotted-known": x(name("collections", "OrderedDict.fromkeys") + b"]\x85R"),
    "58-hooks": x(REBUILD + b"(" + storage() + b"K\x00K\x04\x85K\x01\x85\x89}K\x01" + MARKER + b"stR"),
    "58-hooks-called": x(REBUILD + b"(" + storage() + b"K\x00K\x04\x85K\x01\x85\x89" + CALL + b"tR"),
    "59-from-type": x(name("torch._tensor", "_rebuild_from_type_v2") + b"(" + MARKER + name("torch", "Tensor")
        + text("trace") + b"\x85}tR"),
    "59-from-type-of-a-foreign-class": x(name("torch._tensor", "_rebuild_from_type_v2") + b"(" + REBUILD + MARKER
        + b"(" + storage() + b"K\x00K\x04\x85K\x01\x85\x89" + HOOKS + b"t}tR"),
    "60-pop": pops(CALL),
    "60-pop-mark": program(b"(" + CALL + b"1}" + text("w") + W + b"s"),
    "60-memo": pops(CALL + b"q\x07"),
    "60-overwritten-memo": program(CALL + b"q\x000Nq\x000h\x00"),
    "60-swallowed-by-a-known-call": x(ORDERED + b"((" + text("k") + CALL + b"lNl\x85R"),
    "60-swallowed-by-a-set": x(name("builtins", "frozenset") + b"](" + CALL + b"e\x85R"),
    "85-codec": x(name("_codecs", "encode") + text("trace") + text("rot13") + b"\x86R"),
    "85-codec-computed": x(name("_codecs", "encode") + text("trace") + CALL + b"\x86R"),
    "85-decode": x(name("_codecs", "decode") + b"C\x05trace" + text("unicode_escape") + b"\x86R"),
    "getattr": x(name("builtins", "getattr") + MARKER + text("__call__") + b"\x86R"),
    "eval": x(name("builtins", "eval") + text("__import__('ckptool_marker').run()") + b"\x85R"),
    "map": x(name("builtins", "list") + name("builtins", "map") + MARKER + b"](K\x01e\x86R\x85R"),
    "apply": x(name("functools", "partial") + MARKER + b"\x85R"),
    "load-from-bytes-elsewhere": x(name("torch.storage", "_load_from_file") + b"C\x05trace\x85R"),
    "bit-generator": x(name("numpy.random._pickle", "__generator_ctor") + MARKER + b"\x85R"),
}  # fmt: skip

# Shown and kept, though they are not calls: nothing happens until somebody makes the class's object.
INERT: dict[str, bytes] = {
    "59-wrapper-of-a-foreign-class": x(name("torch._utils", "_rebuild_wrapper_subclass") + b"(" + MARKER
        + name("torch", "float32") + b"K\x04\x85K\x01\x85K\x00" + name("torch", "strided") + text("cpu") + b"\x89tR"),
    "53-newobj": x(MARKER + text("trace") + b"\x85\x81"),
    "53-newobj-ex": x(MARKER + text("trace") + b"\x85}\x92"),
    "53-name-alone": x(MARKER),
    "57-build-of-a-device": x(name("torch", "device") + text("cpu") + b"\x85R}" + text("__class__") + MARKER + b"sb"),
    "57-build-of-a-list-subclass": x(MARKER + b")\x81](K\x01K\x02eb"),
    "57-slots-state": x(MARKER + b")\x81N}" + text("__reduce__") + MARKER + b"s\x86b"),
}  # fmt: skip

# Contradictions, odd values, cycles.
LONG = b"1" * 1_000_000
REFUSED: dict[str, tuple[bytes, type[CkptoolError]]] = {
    "57-ordered-dict-with-numbers": (program(HOOKS + b"}K\x01Nsb"), Corrupt),
    "57-ordered-dict-with-a-list": (program(HOOKS + b"](K\x01eb"), Corrupt),
    "57-build-of-a-parameter": (x(name("torch.nn.parameter", "Parameter") + b")\x81}" + text("data") + CALL
        + b"sb"), Corrupt),
    "57-state-of-a-tensor": (program(W + b"}" + text("a") + b"K\x01sb"), Corrupt),
    "57-state-of-a-storage": (program(storage() + b"}" + text("a") + b"K\x01sb"), Corrupt),
    "57-state-of-a-parameter": (program(name("torch._utils", "_rebuild_parameter") + W + b"\x88" + HOOKS
        + b"\x87R}b"), Corrupt),
    "61-setitem-on-a-tensor": (program(W + b"K\x00K\x01s"), Corrupt),
    "61-setitems-on-a-tensor": (program(W + b"(K\x00K\x01u"), Corrupt),
    "61-append-on-a-tensor": (program(W + b"Na"), Corrupt),
    "61-setitem-on-a-storage": (program(storage() + b"K\x00K\x01s"), Corrupt),
    "61-setitem-on-a-list": (program(b"]K\x00K\x01s"), Corrupt),
    "61-setitem-on-a-text": (program(text("a") + b"K\x00K\x01s"), Corrupt),
    "61-append-on-a-dict": (program(b"}Na"), Corrupt),
    "61-append-on-an-ordered-dict": (program(HOOKS + b"Na"), Corrupt),
    "61-add-to-a-dict": (program(b"}(N\x90", 4), Corrupt),
    "61-build-on-an-int": (program(b"K\x01}b"), Corrupt),
    "61-build-on-a-list": (program(b"]}b"), Corrupt),
    "61-build-on-a-name": (program(name("torch", "float32") + b"}b"), UnsafeObject),
    "61-setitem-on-a-name": (program(name("torch", "float32") + b"K\x01Ns"), UnsafeObject),
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
    "67-text8": (program(b"\x8d" + b"\xff" * 8, 4), Truncated),
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

# What costs its reader more than it is.


def endless(user: bytes) -> Callable[[], bytes]:
    """A use of a list that would take for ever to write out, under memo 99."""
    return lambda: x(laughs(90, b"]", lambda get: b"](" + get * 10 + b"e")[2:-1] + b"q\x630" + user)


def sharing(user: bytes, shared: bytes, count: int = 2_000) -> Callable[[], bytes]:
    """Many of one kind that share one large value, under memo 0."""
    return lambda: program(b"}(" + text("of") + shared + b"q\x00" + b"".join(text(f"{i}.w")
        + user for i in range(count)) + b"u", 4)  # fmt: skip


def dtensor(spec: bytes) -> bytes:
    """A DTensor whose placements, mesh and order are one value."""
    of = name("torch.distributed.tensor", "DTensor")
    facts = name("torch.distributed.tensor._dtensor_spec", "DTensorSpec") + b")\x81}("
    facts += b"".join(text(each) + spec for each in ("mesh", "placements", "shard_order")) + b"ub"
    inner = b"(" + of + name("torch", "float32") + b"K\x04\x85K\x01\x85K\0Ntq\x010h\x01"
    call = name("torch._tensor", "_rebuild_from_type_v2") + b"(" + name("torch._utils", "_rebuild_wrapper_subclass")
    return call + of + inner + b"}(" + text("_spec") + facts + text("_local_tensor") + W + b"utR"


MANY_KEYS = b"(" + b"".join(text(f"k{i}") + b"N" for i in range(2_000)) + b"u"
OWN = name("own.module", "Own")


def laughs(levels: int, begin: bytes, made: Callable[[bytes], bytes], protocol: int = 2) -> bytes:
    """A value that refers to one below it ten times, which does so too."""
    body = begin + b"q\x00"
    for level in range(levels):
        body += b"0" + made(b"h" + bytes([level])) + b"q" + bytes([level + 1])
    return program(body, protocol)


def keys(get: bytes) -> bytes:
    return b"}(" + b"".join(text(f"k{i}") + get for i in range(10)) + b"u"


def hashed(number: int) -> bytes:
    """Integers that all have the hash 0."""
    return b"\x8a\x0a" + (number * ((1 << 61) - 1)).to_bytes(10, "little")


BOMBS: dict[str, Callable[[], bytes]] = {
    "70-million-lists": lambda: program(b"]" * 1_000_000),
    "70-500000-lists": lambda: program(b"]" * 500_000 + b"a" * 499_999),
    "70-999-lists": lambda: program(b"]" * 999 + b"a" * 998),
    "70-999-dicts": lambda: program((b"}" + text("k")) * 990 + b"N" + b"s" * 990),
    "70-990-tuples": lambda: program(b"N" + b"\x85" * 990),
    "70-300-calls": lambda: program(MARKER * 300 + b")" + b"R\x85" * 299 + b"R"),
    "70-fractions-of-fractions": lambda: program(name("fractions", "Fraction") * 300 + b"K\x01" + b"\x85R" * 300),
    "70-deep-then-wide": lambda: program(b"]" * 980 + b"](" + b"K\x01" * 200_000 + b"e" + b"a" * 980),
    "70-deep-then-wide-dict": lambda: program((b"}" + text("k" * 40)) * 900 + b"}(" + b"".join(text(f"{i}")
        + b"N" for i in range(50_000)) + b"u" + b"s" * 900),
    "70-deep-then-many-tensors": lambda: program((b"}" + text("k" * 40)) * 900 + W + b"q\x000}("
        + b"".join(text(f"{i}") + b"h\x00" for i in range(40_000)) + b"u" + b"s" * 900),
    "71-million-marks": lambda: b"\x80\x02" + b"(" * 1_000_000,
    "71-marks-and-pops": lambda: program(b"(0" * 499_000 + b"N"),
    "71-tuples": lambda: program(b"(" * 300_000 + b"t" * 300_000),
    "71-memo": lambda: program(b"N" + b"".join(b"r" + i.to_bytes(4, "little") for i in range(190_000))),
    "71-empty-lists": lambda: program(b"](" + b"]" * 900_000 + b"e"),
    "71-empty-dicts": lambda: program(b"](" + b"}" * 900_000 + b"e"),
    "71-empty-sets": lambda: program(b"](" + b"\x8f" * 900_000 + b"e", 4),
    "71-small-tuples": lambda: program(b"](" + b"N\x85" * 450_000 + b"e"),
    "71-calls": lambda: program(MARKER + b"q\x000](" + b"h\x00)R" * 240_000 + b"e"),
    "71-known-calls": lambda: program(ORDERED + b"q\x000](" + b"h\x00)R" * 240_000 + b"e"),
    "71-few-calls": lambda: program(MARKER + b"q\x000](" + b"h\x00)R" * 90_000 + b"e"),
    "71-few-objects": lambda: program(MARKER + b"q\x000](" + b"h\x00)\x81}" * 60_000 + b"e"),
    "71-few-tuples": lambda: program(b"](" + b"N\x85" * 110_000 + b"e"),
    "71-weights": lambda: program(b"}(" + W + b"q\x000" + b"".join(text(f"{i}") + b"}" + text("a.w")
        + b"h\x00s" for i in range(40_000)) + b"u"),
    "71-models-that-differ": lambda: program(b"}(" + W + b"q\x000" + b"".join(text(f"{i}") + b"}" + text(f"a.w{i}")
        + b"h\x00s" for i in range(30_000)) + b"u"),
    "71-names": lambda: program(b"](" + b"".join(b"ca\n%x\n" % i for i in range(110_000)) + b"e"),
    "71-tensors": lambda: program(W + b"q\x000](" + b"h\x00" * 480_000 + b"e"),
    "72-lists": lambda: laughs(100, b"]", lambda get: b"](" + get * 10 + b"e"),
    "72-tuples": lambda: laughs(100, b"N", lambda get: b"(" + get * 10 + b"t"),
    "72-dicts": lambda: laughs(60, b"N", keys),
    "72-dup": lambda: program(b"]" + b"2\x86" * 300),
    "72-tensors": lambda: laughs(30, W, keys),
    "72-objects": lambda: laughs(60, b"N", lambda get: MARKER + b"(" + get * 10 + b"tR"),
    "72-states": lambda: laughs(60, b"N", lambda get: MARKER + b")\x81" + keys(get) + b"b"),
    "72-namespaces": lambda: laughs(60, b"N", lambda get: name("argparse", "Namespace") + b")\x81" + keys(get) + b"b"),
    "72-sets": lambda: laughs(60, b"N", lambda get: b"(" + get * 10 + b"\x91", 4),
    "72-sizes": lambda: laughs(60, b"K\x01", lambda get: name("torch", "Size") + b"(" + get * 10 + b"t\x85R"),
    "72-texts": lambda: program(text("x" * 100_000) + b"q\x000](" + b"h\x00" * 100_000 + b"e"),
    "72-bytes": lambda: program(b"B\xa0\x86\1\0" + bytes(100_000) + b"q\x000](" + b"h\x00" * 100_000 + b"e"),
    "72-integers": lambda: program(b"\x8b\0\2\0\0" + b"\x7f" * 512 + b"q\x000](" + b"h\x00" * 100_000 + b"e"),
    "72-long-keys": lambda: program((text("k" * 100_000) + b"q\x000") + b"}q\x01" * 1 + (b"0}h\x00h\x01sq\x01") * 900),
    "72-modules": lambda: laughs(60, b"N", lambda get: MARKER + b")\x81}(" + text("_modules") + keys(get)
        + text("_parameters") + b"}" + text("_buffers") + b"}ub"),
    "72-endless-shape": endless(REBUILD + b"(" + storage() + b"K\x00hc\x85K\x01\x85\x89" + HOOKS + b"tR"),
    "72-endless-stride": endless(REBUILD + b"(" + storage() + b"K\x00K\x04\x85hc\x85\x89" + HOOKS + b"tR"),
    "72-endless-dtype": endless(name("numpy", "dtype") + b"hc\x85R"),
    "72-endless-device": endless(name("torch", "device") + b"hc\x85R"),
    "72-endless-layout": endless(name("torch._utils", "_rebuild_sparse_tensor")
        + name("torch.serialization", "_get_layout") + b"hc\x85R(" + W + W + b"K\x04\x85t\x86R"),
    "72-endless-deque": endless(name("collections", "deque") + b"]hc\x86R"),
    "72-dtensors-that-share": sharing(dtensor(b"h\x00"), b"](" + b"]" * 3_000 + b"e"),
    "72-states-that-are-shared": sharing(OWN + b")\x81h\x00b", b"}" + MANY_KEYS),
    "72-slots-that-are-shared": sharing(OWN + b")\x81Nh\x00\x86b", b"}" + MANY_KEYS),
    "72-metadata-that-is-shared": sharing(HOOKS + b"h\x00b", b"}" + MANY_KEYS),
    "72-sets-that-are-shared": sharing(b"h\x00", b"\x8f(" + b"M\x01\x01" * 3_000 + b"\x90"),
    "72-attributes-that-are-shared": sharing(b"h\x00\x85", HOOKS + b"}" + MANY_KEYS + b"b"),
    "72-arguments-that-are-shared": sharing(name("torch", "_TypedStorage") + b"h\x00\x85R", b"]" + b"\x85" * 400),
    "72-objects-that-are-shared": sharing(OWN + b"h\x00\x85R", OWN + b")\x81}" + MANY_KEYS + b"b"),
    "73-list": lambda: program(b"]q\x00h\x00a"),
    "73-dict": lambda: program(b"}q\x00" + text("me") + b"h\x00s"),
    "73-tuple": lambda: program(b"]q\x00h\x00\x85q\x01ah\x01"[:-2]),
    "73-state": lambda: program(MARKER + b")\x81q\x00}" + text("me") + b"h\x00sb"),
    "73-namespace": lambda: program(name("argparse", "Namespace") + b")\x81q\x00}" + text("me") + b"h\x00sb"),
    "73-object-in-its-arguments": lambda: program(b"]q\x00" + MARKER + b"h\x00\x85Rq\x01a"[:-1] + b"q\x02ah\x02"[:-2]
        + b""),
    "73-metadata": lambda: program(HOOKS + b"q\x00}" + text("_metadata") + b"h\x00sb"),
    "73-optimizer": lambda: program(b"}q\x00(" + text("state") + b"h\x00" + text("param_groups") + b"]q\x01h\x01au"),
    "73-weights": lambda: program(b"}q\x00(" + text("a.weight") + W + text("me") + b"h\x00u"),
    "73-module": lambda: program(MARKER + b")\x81q\x00}(" + text("_modules") + b"}" + text("me") + b"h\x00s"
        + text("_parameters") + b"}" + text("w") + W + b"s" + text("_buffers") + b"}ub"),
    "73-counter": lambda: program(b"}q\x00" + text("me") + name("collections", "Counter") + b"h\x00\x85Rs"),
    "74-tuples-as-a-key": lambda: program(b"})" + b"2\x86" * 32 + b"Ns"),
    "74-five-levels": lambda: program(b"}N" + b"\x85" * 5 + b"Ns"),
    "74-wide-and-shared": lambda: program(b"}(" + b"N" * 5_000 + b"tq\x00" + b"0(" + b"h\x00" * 5_000 + b"tq\x00"
        + b"Ns"),
    "74-frozensets": lambda: program(b"}(\x91q\x00" + b"0(h\x00h\x00\x91q\x00" * 40 + b"Ns", 4),
    "75-colliding": lambda: program(b"}(" + b"".join(hashed(i) + b"N" for i in range(1, 30_001)) + b"u"),
    "75-colliding-tuples": lambda: program(b"}(" + b"".join(hashed(i) + b"\x85N" for i in range(1, 20_001)) + b"u"),
    "75-colliding-floats": lambda: program(b"}(" + b"".join(integer(i * ((1 << 61) - 1))
        + b"N" for i in range(1, 60_001)) + b"u"),
    "75-colliding-one-by-one": lambda: program(b"}" + b"".join(hashed(i) + b"Ns" for i in range(1, 30_001))),
    "75-colliding-pairs": lambda: program(ORDERED + b"(" + b"".join(hashed(i) + b"N\x86" for i in range(1, 30_001))
        + b"l\x85R"),
    "75-a-little-colliding": lambda: program(b"](" + b"".join(b"}(" + b"".join(hashed(i)
        + b"N" for i in range(1, 90)) + b"u" for _ in range(700)) + b"e"),
    "fraction-of-a-long-exponent": lambda: x(name("fractions", "Fraction") + text("1e999999999") + b"\x85R"),
    "fraction-of-a-long-text": lambda: x(name("fractions", "Fraction") + text("1" * 500_000) + b"\x85R"),
    "decimal-of-a-long-exponent": lambda: x(name("decimal", "Decimal") + text("1e999999999999999") + b"\x85R"),
    "decimal-of-a-long-text": lambda: x(name("decimal", "Decimal") + text("1" * 900_000) + b"\x85R"),
    "range-of-everything": lambda: x(name("builtins", "range") + integer(1 << 200) + b"\x85R"),
    "size-of-many": lambda: x(name("torch", "Size") + b"(" + b"K\x01" * 400_000 + b"t\x85R"),
    "texts-of-control-characters": lambda: program(b"](" + (text("\x1b[31m\u202e" * 10) * 9_000) + b"e"),
    "long-text-of-control-characters": lambda: program(text("\x1b" * 990_000)),
    "many-long-numbers": lambda: program(b"](" + integer(1 << 2000) * 3_900 + b"e"),
    "many-dotted-keys": lambda: program(b"}(" + W + b"q\x00" + b"0" + b"".join(text(".".join("ab" * 20) + str(i))
        + b"h\x00" for i in range(9_000)) + b"u"),
    "one-key-of-many-dots": lambda: state_pickle({"." * 450_000: W, "." * 450_000 + "a": W}),
    "one-key-of-many-slashes": lambda: state_pickle({"/" * 900_000: W}),
    "keys-like-one-another": lambda: program(b"}(" + W + b"q\x000" + b"".join(text("a." * depth + "w")
        + b"h\x00" for depth in range(1, 900)) + b"u"),
}  # fmt: skip

INPUTS: dict[str, bytes | Callable[[], bytes]] = {
    **{f"row {title}": pickle_zip(pickle) for title, pickle in (CALLS | INERT).items()},
    **{f"row {title}": pickle_zip(pickle) for title, (pickle, _) in REFUSED.items()},
    **{f"row {title}": lambda make=make: pickle_zip(make()) for title, make in BOMBS.items()},  # type: ignore[misc]
}
