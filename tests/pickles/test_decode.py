"""The decoder against Python's own pickler, opcode by opcode, and what it makes of calls."""

from __future__ import annotations

import collections
import pickle
import pickletools
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckptool.checkpoint import InlineBytes, Storage, StorageRef
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import ByteString, Global, Object, OrderedDict
from ckptool.errors import BadTensor, Corrupt, LimitExceeded, Unsupported
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.calls import uses
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
from ckptool.pickles.objects import MAX_NAMES
from fixtures.traps import TRAPS
from tests.support.files import rewritten, torch_bytes, written
from tests.support.hostile_inputs import HOOKS
from tests.support.looped import examples, looped
from tests.support.own_classes import Thing
from tests.support.pickled_graphs import as_tree, decode_pickle, decodes_to, graphs
from tests.support.processes import soon
from tests.support.same import assert_same_objects, assert_same_tree

PROTOCOLS = range(6)
F = b"ca\nf\n"


# Against Python -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(graphs(), st.sampled_from(PROTOCOLS))
def test_what_python_pickles_is_decoded_as_the_same_graph(graph: Any, protocol: int) -> None:
    data = pickle.dumps(graph, protocol)
    assume(protocol or b"Fnan" not in data)  # protocol 0 spells floats as text, without a NaN's payload
    decodes_to(data, as_tree(graph))
    assert decode_pickle(data + b"\x80\x02K\x01.").end == len(data), "what comes after the end is not read"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@looped("size", [0, 1, 2, 999, 1000, 1001, 2000, 2001])
def test_long_containers_and_their_batches(size: int, protocol: int) -> None:
    thing = Thing(0)
    thing.__dict__.update({f"a{i}": i for i in range(size)})
    ordered = collections.OrderedDict((i, str(i)) for i in range(size))
    numbers = range(size)
    value = [list(numbers), dict.fromkeys(numbers), set(numbers), tuple(numbers), ordered, thing, "é" * size]
    data = pickle.dumps(value, protocol)
    decodes_to(data, as_tree(value))
    assert protocol != 2 or to_bytes(as_tree(value)) == data


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_texts_bytes_and_numbers(protocol: int) -> None:
    value = ["x" * 300, "x" * 70_000, b"y" * 300, b"y" * 70_000, bytearray(b"z" * 300), bytearray(70_000)]
    value += [b"\xff\0a", b"", bytearray(b"\xfe"), bytearray(), b"plain", 0.0, -0.0, float("inf"), 1e-310, float("nan")]
    sizes = (*range(1, 70), 255, 2039, 2040, 2047, 2048, 3000)
    value += [sign * (1 << bits) + d for bits in sizes for sign in (1, -1) for d in (-1, 0, 1)]
    data = pickle.dumps(value, protocol)
    decodes_to(data, as_tree(value))
    assert protocol != 2 or to_bytes(as_tree(value)) == data


# Opcode by opcode -----------------------------------------------------------------------------------------------------


def made(name: str, *args: Any, how: str = "call", kwargs: Any = None, **fields: Any) -> Object:
    node = Object(Global("a", name), args, how, kwargs)
    for field, value in fields.items():
        setattr(node, field, value)
    return node


# What Python's own machine reads, which is the judge.
PYTHONS = (
    b"I-12\n.", b"I01\n.", b"I00\n.", b"J\xff\xff\xff\xff.", b"K\xff.", b"M\x01\x02.", b"L123456789012345678901L\n.",
    b"L5\n.", b"\x8a\x02\x00\xff.", b"\x8a\x00.", b"\x8b\x02\x00\x00\x00\x00\x01.", b"S'a\\'\\n\\x41\\\\\\101\\q'\n.",
    b'S"it\'s"\n.', b"T\x02\x00\x00\x00ab.", b"U\x02\xc3\xa9.", b"B\x02\x00\x00\x00a\xff.", b"C\x01\xff.",
    b"\x8e\x01\0\0\0\0\0\0\0\xff.", b"\x96\x01\0\0\0\0\0\0\0\xff.", b"N.", b"\x88.", b"\x89.",
    b"V\\u20ac \xe9 \\U0001f600 \\n\n.", b"\x8c\x02\xc3\xa9.", b"X\x03\0\0\0\xed\xa0\x80.", b"\x8d\x01\0\0\0\0\0\0\0a.",
    b"F-0.5\n.", b"Fnan\n.", b"G\xff\xf8\x00\x00\x00\x00\x00\x07.", b"].", b"]K\x01a.", b"](K\x01K\x02e.",
    b"(K\x01K\x02l.", b").", b"(K\x01K\x02K\x03K\x04t.", b"K\x01\x85.", b"K\x01K\x02\x86.", b"K\x01K\x02K\x03\x87.",
    b"}.", b"(K\x01K\x02K\x03Nd.", b"}K\x01Ns.", b"}(K\x01NK\x02Nu.", b"\x8f.", b"\x8f(K\x01K\x02\x90.", b"(K\x01\x91.",
    b"K\x01K\x020.", b"K\x01(0.", b"]2\x86.", b"((l(lt.", b"K\x01(K\x02K\x031.", b"]p5\ng5\n\x86.", b"]q\x05h\x05\x86.",
    b"]r\0\0\1\0j\0\0\1\0\x86.", b"]p0\n]p0\ng0\n\x87.", b"N]q\x00h\x00\x87.", b"N]r\0\0\0\0h\x00\x87.",
    b"]\x94]\x94h\x00h\x01\x86\x87.", b"\x80\x05N.", b"\x80\x04\x95\x02\0\0\0\0\0\0\0N.",
)  # fmt: skip
TWICE = (lambda x: (x, x))([])
# What is of names, objects and this reader.
OPCODES: tuple[tuple[bytes, Any], ...] = (
    (b"S'\\xe9'\n.", ByteString(b"\xe9")), (b"U\x01\xe9.", ByteString(b"\xe9")),
    (b"]r\xff\xff\xff\xffj\xff\xff\xff\xff\x86.", TWICE),
    (b"]p99999999999999999999\ng99999999999999999999\n\x86.", TWICE),
    (F + b"(tR(K\x01K\x02e.", made("f", elements=[1, 2])), (F + b"(tR(K\x01Nu.", made("f", items={1: None})),
    (F + b")R(K\x01\x90.", made("f", elements=[1], adds=True)), (b"ctorch\nfloat32\n.", Global("torch", "float32")),
    (b"\x8c\x01a\x8c\x03b.c\x93.", Global("a", "b.c")), (F + b"K\x01\x85R.", made("f", 1)),
    (b"ca\nB\nK\x01\x85\x81}b.", made("B", 1, how="new", state={})), (b"(K\x01ia\nf\n.", made("f", 1)),
    (b"(ia\nB\n.", made("B")), (b"(iuuid\nUUID\n.", Object(Global("uuid", "UUID"), (), "new")),
    (b"(ca\nf\nK\x01o.", made("f", 1)), (b"ca\nB\nK\x01\x85\x81.", made("B", 1, how="new")),
    (b"ca\nB\nK\x01\x85}X\1\0\0\0kK\x02s\x92.", made("B", 1, how="new", kwargs={"k": 2})),
    (b"Pkey\n.", ("persistent", "key")), (b"(K\x01K\x02K\x03K\x04tQ.", ("persistent", (1, 2, 3, 4))),
)  # fmt: skip
REFUSED = (b"\x82\x01.", b"\x83\x01\0.", b"\x84\x01\0\0\0.", b"\x97.", b"N\x98.")  # of extensions, and buffers


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@looped("data", PYTHONS, at_once=100)
def test_an_opcode_is_what_python_says(data: bytes) -> None:
    decodes_to(data, as_tree([pickle.loads(data, encoding="utf-8")])[0])


@looped(("data", "expected"), OPCODES)
def test_an_opcode_of_names_and_objects(data: bytes, expected: Any) -> None:
    decodes_to(data, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_opcode_of_python_is_tested() -> None:
    for data in REFUSED:
        with pytest.raises(Unsupported):
            decode_pickle(data)
    rows = (*PYTHONS, *(data for data, _ in OPCODES[1:]), *REFUSED)  # `genops` takes STRING for ASCII
    tested = {opcode.name for data in rows for opcode, _, _ in pickletools.genops(data)}
    assert {opcode.name for opcode in pickletools.opcodes} == tested


# Torch's calls --------------------------------------------------------------------------------------------------------


def storage(nbytes: int = 16, dtype: str | None = "f32") -> StorageRef:
    return StorageRef(Storage(InlineBytes(bytes(nbytes))), by_name(dtype) if dtype else None)


def rebuilt(arguments: bytes, ref: StorageRef, name: bytes = b"_rebuild_tensor_v2") -> Any:
    data = b"\x80\x02ctorch._utils\n" + name + b"\n(" + arguments + b"tR."
    return decode(data, lambda pid: ref, BUILDERS).root


def test_a_tensor_outside_its_storage_is_refused() -> None:
    assert rebuilt(b"NQK\x00K\x04\x85K\x01\x85\x89" + HOOKS, storage()).shape == (4,)
    for arguments in (
        b"NQK\x00K\x05\x85K\x01\x85\x89",  # too long
        b"NQK\x01K\x04\x85K\x01\x85\x89",  # offset
        b"NQJ\xff\xff\xff\xffK\x01\x85K\x01\x85\x89",  # negative offset
        b"NQK\x00K\x02\x85J\xff\xff\xff\xff\x85\x89",  # negative stride
        b"NQK\x00J\xff\xff\xff\xff\x85K\x01\x85\x89",  # negative size
        b"NQK\x00K\x02K\x02\x86K\x01\x85\x89",  # rank
        b"NQK\x00\x8a\x09\0\0\0\0\0\0\0\0\1\x85K\x01\x85\x89",  # 2^64
        b"NQK\x00\x88\x85K\x01\x85\x89",  # a bool as size
        b"NQK\x00(" + b"K\x01" * 65 + b"t(" + b"K\x01" * 65 + b"t\x89",  # rank 65
    ):
        with pytest.raises(BadTensor):
            rebuilt(arguments + HOOKS, storage())


@pytest.mark.parametrize(
    "arguments",
    [
        b"NK\x00K\x04\x85K\x01\x85\x89" + HOOKS,  # not a storage
        b"NQK\x00K\x04\x85K\x01\x85\x89",  # arity
        b"NQK\x00K\x04\x85K\x01\x85K\x01" + HOOKS,  # requires_grad is a number
        b"NQK\x00K\x04\x85K\x01\x85\x89}K\x01Ns",  # hooks
        b"NQK\x00K\x04\x85K\x01\x85\x89ccollections\nOrderedDict\n]]K\x01K\x02\x86aNaa\x85R",  # by a tuple
        b"NQK\x00K\x04\x85K\x01\x85\x89" + HOOKS + b"}X\3\0\0\0foo\x88s",  # unknown metadata
    ],
)
def test_arguments_that_torch_does_not_write_stay_a_call(arguments: bytes) -> None:
    found = rebuilt(arguments, storage())
    assert isinstance(found, Object) and found.name == "torch._utils._rebuild_tensor_v2"


# What would run -------------------------------------------------------------------------------------------------------


ORDERED = b"ccollections\nOrderedDict\n"


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (F + b")R0N.", ["a.f"]), (b"(" + F + b")R1N.", ["a.f"]), (F + b")Rq\x000N.", ["a.f"]),
        (b"}" + F + b")RNs.", []),  # a key
        (b"ca\nB\n)\x81" + F + b")Rb.", []),  # a state
        (ORDERED + b")R0ca\nB\n)\x810N.", ["a.B"]), (ORDERED + b"0ca\nB\n0N.", ["a.B"]), (ORDERED + b")R0N.", []),
    ],
)  # fmt: skip
def test_discarded_calls_are_reported(data: bytes, names: list[str]) -> None:
    found = decode_pickle(data).discarded
    assert [str(each) if type(each) is Global else each.name for each in found] == names


def test_an_unknown_call_swallowed_by_a_known_one_is_reported() -> None:
    hooks = ORDERED + F + b")R\x85R"
    tensor = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NQK\x00K\x04\x85K\x01\x85\x89" + hooks + b"tR."
    decoded = decode(tensor, lambda pid: storage(), BUILDERS)
    assert "a.f" in {use.name for use in uses([decoded.root, decoded.discarded])}


@pytest.mark.parametrize("args", [
    b"X\1\0\0\0aX\5\0\0\0rot13\x86", b"X\1\0\0\0aX\3\0\0\0hex\x86", b"K\x01X\6\0\0\0latin1\x86",
    b"X\2\0\0\0\xc4\x80X\6\0\0\0latin1\x86",
])  # fmt: skip
def test_other_codecs_stay_unknown_calls(args: bytes) -> None:
    decoded = decode_pickle(b"c_codecs\nencode\n" + args + b"R.")
    assert isinstance(decoded.root, Object)
    assert decode_pickle(b"c_codecs\nencode\n" + args + b"R0N.").discarded


# Hostile pickles, beside those in files (`test_hostile_pickle`) -------------------------------------------------------


def nested(depth: int, opener: bytes = b"]", closer: bytes = b"a") -> bytes:
    return opener * depth + b"N" + closer * depth + b"."


CORRUPT = {
    "SETITEM on a number": b"K\x01K\x02Ns.", "APPEND on a tuple": b")Na.", "ADDITEMS on a list": b"](N\x90.",
    "BUILD on a dict": b"}}b.", "BUILD twice": b"ca\nB\n)\x81}b}b.", "POP of nothing": b"0.",
    "BINPUT of nothing": b"q\0N.", "REDUCE without a tuple": F + b"NR.", "OBJ of nothing": b"(o.",
    "GET of no number": b"gx\n.", "no INT": b"Iabc\n.", "no FLOAT": b"Fabc\n.",
    "a bytearray as a key": b"}\x96\0\0\0\0\0\0\0\0Ns.", "a list in a set": b"\x8f(]\x90.",
    "a set in itself": b"\x8fq\0(h\0\x90.", "a list in a frozenset": b"(]\x91.", "a key without a value": b"}(K\x01u.",
    "a frame longer than the pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0N.", "a name that is not UTF-8": b"c\xff\nx\n.",
    "a string that is not UTF-8": b"X\1\0\0\0\xff.",
    "a name that is computed": b"K\x01K\x02\x93.", "no opcode": b"\xff.",
    "a broken escape": b"V\\u12\n.", "STRING without quotes": b"Sabc\n.", "STRING of one quote": b"S'\n.",
}  # fmt: skip
BEYOND = {
    "333000 lists": nested(333_000), "2000 lists": nested(2_000), "2000 tuples": nested(2_000, b"", b"\x85"),
    "2000 calls": F * 2_000 + b")" + b"R\x85" * 2_000 + b".", "marks": b"(" * 2_000_000,
    "tuples as a key": b"}" + b")" + b"\x85" * 8 + b"Ns.", "billion laughs as a key": b"})" + b"2\x86" * 32 + b"Ns.",
}  # fmt: skip


@looped("name", [*CORRUPT, *BEYOND], at_once=10, here=30)
def test_a_hostile_pickle_is_refused_quickly(name: str) -> None:
    with soon(5), pytest.raises(Corrupt if name in CORRUPT else LimitExceeded) as caught:
        decode_pickle(CORRUPT.get(name) or BEYOND[name])
    assert "data.pkl" in caught.value.what


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


# Encoding -------------------------------------------------------------------------------------------------------------
# The encoder against Python's own unpickler and against the pickles that torch writes.


def to_bytes(tree: Any) -> bytes:
    return encode(tree, lambda storage: "0")


def back(data: bytes) -> Any:
    return decode(data, lambda pid: pid, BUILDERS).root


@settings(max_examples=examples(200))
@given(graphs())
def test_what_is_encoded_python_loads_as_the_same_graph(graph: Any) -> None:
    tree = as_tree(graph)
    data = to_bytes(tree)
    assert_same_tree(back(data), tree)
    assert_same_objects(pickle.loads(data), graph)


@settings(max_examples=examples(100))
@given(graphs())
def test_the_same_tree_gives_the_same_bytes_again_and_again(graph: Any) -> None:
    data = to_bytes(as_tree(graph))
    assert to_bytes(back(data)) == data
    assert to_bytes(back(pickle.dumps(graph, 4))) == to_bytes(back(pickle.dumps(graph, 4)))


@settings(max_examples=examples(150))
@given(graphs())
def test_opcodes_are_those_of_pythons_pickler_at_protocol_2(graph: Any) -> None:
    """Up to equal texts and bytes, which Python recalls when they are one object, and the encoder always; and up to
    graphs in which something refers to itself before it is complete: Python then makes it twice."""
    theirs, ours = pickle.dumps(graph, 2), to_bytes(as_tree(graph))
    assume("POP" not in {opcode.name for opcode, _, _ in pickletools.genops(theirs)})
    assume(len(spelled := _bytes_in(graph)) == len(set(spelled)))
    assert without_recalled_texts(ours) == without_recalled_texts(theirs)


def _bytes_in(graph: list[Any]) -> list[bytes]:
    found: list[Any] = []
    for node in graph:
        if isinstance(node, bytearray):
            found.append(bytes(node))
        elif isinstance(node, Thing):
            found.append(node.part)
        else:
            found += [
                *node,
                *(node.values() if isinstance(node, dict) else ()),
                *getattr(node, "__dict__", {}).values(),
            ]
    return [part for part in found if isinstance(part, bytes)]


def without_recalled_texts(data: bytes) -> list[Any]:
    """The opcodes with memo numbers counted over everything but texts, and texts and bytes spelled out each time."""
    memo: dict[Any, Any] = {}
    numbered: dict[Any, int] = {}
    out: list[Any] = []
    text = None
    for opcode, arg, _ in pickletools.genops(data):
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[arg] = text if text is not None else ("object", numbered.setdefault(arg, len(numbered)))
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            out.append(memo[arg])
        else:
            text = ("text", arg) if opcode.name == "BINUNICODE" else None
            out.append(text or (opcode.name, repr(arg)))  # the text of a float, as NaN is not itself
            continue
        text = None
    return out


def test_byte_strings_of_python_2_stay_bytes() -> None:
    data = to_bytes({ByteString(b"\xe9"): ByteString(b"\xe8")})
    assert pickle.loads(data, encoding="bytes") == {b"\xe9": b"\xe8"}
    assert pickle.loads(data, encoding="latin-1") == {"é": "è"}
    assert_same_tree(back(data), {"é": ByteString(b"\xe8")})  # keys are read as text (docs/formats.md)


def test_keyword_arguments_and_objects_that_add_need_protocol_4() -> None:
    for value in (made("B", how="new", kwargs={"k": 1}), made("B", how="new", elements=[1, 2], adds=True)):
        data = to_bytes([value])
        assert data[:2] == b"\x80\x04"
        assert_same_tree(back(data), [value])


def test_a_set_that_its_items_refer_to() -> None:
    things = [Thing(i) for i in range(3)]
    family = set(things)
    for thing in things:
        thing.family = family
    tree = as_tree([family, *things])
    assert_same_tree(back(to_bytes(tree)), tree)
    assert_same_objects(pickle.loads(to_bytes(tree)), [family, *things])


def test_a_set_that_only_protocol_4_could_say_is_refused() -> None:
    """A call with the set as its argument, in the set: protocol 2 makes a set after its items, these after the set."""
    loop = back(b"\x8fq\x00(ca\nf\nh\x00\x85R\x90.")
    assert loop.items[0].args[0] is loop
    with pytest.raises(Unsupported, match="set that contains itself"):
        to_bytes(loop)


def test_what_no_checkpoint_holds_is_refused() -> None:
    for value in (torch.zeros(1), range(3), {1, 2}, object()):
        with pytest.raises(Unsupported, match=type(value).__name__):
            to_bytes([value])


# Torch's pickles ------------------------------------------------------------------------------------------------------


def pickle_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


@looped("name", TRAPS)
def test_every_traps_pickle_comes_back_as_torch_wrote_it(name: str, tmp_path: Path) -> None:
    """Byte for byte but for equal texts: where torch's pickle wrote one twice, ours recalls it."""
    original = written(torch_bytes(TRAPS[name]()), tmp_path / "a.pt")
    again = rewritten(original, tmp_path / "b.pt", keep_unknown=True)
    theirs, ours = pickle_of(original), pickle_of(tmp_path / "b.pt")
    texts = [arg for opcode, arg, _ in pickletools.genops(theirs) if opcode.name == "BINUNICODE"]
    if len(texts) == len(set(texts)):
        assert ours == theirs
    assert without_recalled_texts(ours) == without_recalled_texts(theirs)
    assert again.discarded == ()


@looped("seed", range(8))
def test_many_tensors_are_written_as_torch_writes_each(seed: int, tmp_path: Path) -> None:
    """Of few shapes, as in models, among ties, views, parameters, gradients, and texts that are keys of storages."""
    rng = random.Random(seed)
    made = [torch.zeros(0), torch.zeros(3, 4)]
    value: list[Any] = []
    for number in range(600):
        kind = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.uint16])
        tensor = torch.zeros(rng.choice([(4,), (4,), (3, 4), (), (0,)]), dtype=kind)
        other = rng.choice(made)
        odd = [other, other[1:], tensor.t() if tensor.dim() == 2 else tensor, torch.nn.Parameter(torch.ones(4))]
        odd += [torch.ones(4, requires_grad=True), str(number), {str(number + 1): number}, torch.zeros(7)[2:6]]
        new = rng.choice(odd) if rng.random() < 0.3 else tensor
        made += [new] if type(new) is torch.Tensor and new.dim() else []
        value.append(new)
    original = written(torch_bytes(value), tmp_path / f"{seed}.pt")
    rewritten(original, tmp_path / f"{seed}b.pt")
    assert without_recalled_texts(pickle_of(tmp_path / f"{seed}b.pt")) == without_recalled_texts(pickle_of(original))
