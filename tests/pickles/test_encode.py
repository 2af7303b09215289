"""The encoder against Python's own unpickler and against the pickles that torch writes."""

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

from ckptool.checkpoint.nodes import ByteString, Global, Object
from ckptool.errors import Unsupported
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
from fixtures.traps import TRAPS
from tests.support.files import rewritten, torch_bytes, written
from tests.support.looped import examples, looped
from tests.support.own_classes import Thing
from tests.support.pickled_graphs import as_tree, graphs
from tests.support.same import assert_same_objects, assert_same_tree


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


@pytest.mark.parametrize("size", [0, 1, 2, 999, 1000, 1001, 2000, 2001])
def test_batches_are_pythons(size: int) -> None:
    thing = Thing(0)
    thing.__dict__.update({f"a{i}": i for i in range(size)})
    ordered = collections.OrderedDict((i, str(i)) for i in range(size))
    value = [list(range(size)), dict.fromkeys(range(size)), set(range(size)), tuple(range(size)), ordered, thing]
    assert to_bytes(as_tree(value)) == pickle.dumps(value, 2)


def test_numbers_are_pythons() -> None:
    value = [
        sign * (1 << bits) + d
        for bits in (*range(1, 70), 255, 2039, 2040, 2047, 2048, 3000)
        for sign in (1, -1)
        for d in (-1, 0, 1)
    ]
    value += [0.0, -0.0, float("inf"), float("nan"), 1e-310]
    assert to_bytes(value) == pickle.dumps(value, 2)


def test_bytes_and_bytearrays_are_pythons() -> None:
    value = [b"\xff\0a", b"", bytearray(b"\xfe"), bytearray(), b"plain"]
    assert to_bytes(as_tree(value)) == pickle.dumps(value, 2)


def test_byte_strings_of_python_2_stay_bytes() -> None:
    data = to_bytes({ByteString(b"\xe9"): ByteString(b"\xe8")})
    assert pickle.loads(data, encoding="bytes") == {b"\xe9": b"\xe8"}
    assert pickle.loads(data, encoding="latin-1") == {"é": "è"}
    assert_same_tree(back(data), {"é": ByteString(b"\xe8")})  # keys are read as text (docs/formats.md)


def test_keyword_arguments_need_protocol_4() -> None:
    made = Object(Global("collections", "Counter"), (), "new", {"k": 1})
    data = to_bytes([made])
    assert data[:2] == b"\x80\x04"
    assert_same_tree(back(data), [made])


def test_an_object_that_adds_needs_protocol_4() -> None:
    made = Object(Global("a", "B"), (), "new")
    made.elements, made.adds = [1, 2], True
    data = to_bytes([made])
    assert data[:2] == b"\x80\x04"
    assert_same_tree(back(data), [made])


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
