"""A whole tree inside a safetensors file: there and back again, whatever it is made of, or refused by name."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open

import ckptool
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import ByteString, Global, Object, OrderedDict, Set
from ckptool.errors import CkptoolError, Corrupt, Unsupported
from ckptool.formats import read, safetensors, torch_zip
from ckptool.formats.tree_record.packing import pack
from fixtures.traps import TRAPS, values
from tests.formats import contract
from tests.support.deduplicated import deduplicated
from tests.support.files import carry_out, torch_bytes, written
from tests.support.looped import examples, looped
from tests.support.pickled_graphs import as_tree, graphs
from tests.support.same import assert_same_tree

REFUSED = {
    "11-wrapper-subclass": "fixtures.traps.classes.Wrapper",
    "20-defaultdict-of-unknown": "fixtures.traps.classes.Settings",
    "20-dict-subclass": "fixtures.traps.classes.Settings",
    "20-unknown-object": "fixtures.traps.classes.Plain",
    "20-unknown-call": "fixtures.traps.classes.add_up",
}


def carry(checkpoint: Checkpoint, out: Path) -> Checkpoint:
    carry_out(safetensors.write(pack(checkpoint)), out)
    return read(out)


def in_memory(tree: Any) -> Checkpoint:
    return Checkpoint(tree, "torch-zip")


@looped("name", TRAPS, here=1 / 3)
def test_every_trap_comes_back_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    original = contract.vector(name, tmp_path)
    checkpoint = read(original)
    error = contract.refusal(lambda: pack(checkpoint))
    assert (error is not None) is (name in REFUSED), error
    if error is not None:
        assert REFUSED[name] in error.what
        return
    back = carry(checkpoint, tmp_path / "a.safetensors")
    assert_same_tree(checkpoint, back)
    assert_same_tree(back, carry(back, tmp_path / "b.safetensors"))
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    carry_out(torch_zip.write(back, keep_unknown=name in contract.UNKNOWN_CALLS), tmp_path / "back.pt")
    contract.same_for_torch(original, tmp_path / "back.pt", mmap=True)


@looped("name", [n for n in TRAPS if n not in REFUSED], here=1 / 3)
def test_safetensors_opens_it_and_sees_the_values(name: str, tmp_path: Path) -> None:
    carry(read(contract.vector(name, tmp_path)), tmp_path / "a.safetensors")
    value = TRAPS[name]()
    with safe_open(tmp_path / "a.safetensors", "pt") as stock:
        assert stock.metadata()["format"] == "pt"
        shown = {key: stock.get_tensor(key) for key in stock.keys()}  # noqa: SIM118
    if not isinstance(value, dict):
        return
    for key, tensor in shown.items():
        meant = value.get(key)
        if isinstance(meant, torch.Tensor) and meant.layout is torch.strided and tensor.dtype == meant.dtype:
            assert tensor.shape == meant.shape
            resolved = meant.detach().resolve_conj().resolve_neg().contiguous()
            assert bytes(tensor.reshape(-1).view(torch.uint8).numpy()) == bytes(
                resolved.reshape(-1).view(torch.uint8).numpy()
            )


@settings(max_examples=examples(200))
@given(graph=graphs())
def test_any_graph_comes_back(graph: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    tree = _known(as_tree(graph))
    back = carry(in_memory(tree), tmp_path_factory.mktemp("graph") / "a.safetensors")
    assert_same_tree(tree, back.tree)


def _known(tree: list[Any]) -> list[Any]:
    """The same with a class that is known in place of the tests' own."""
    for node in tree:
        if isinstance(node, Object):
            node.fn = Global("argparse", "Namespace")
    return tree


def test_floats_keep_every_bit(tmp_path: Path) -> None:
    bits = [
        b"\x7f\xf8" + bytes(6),
        b"\xff\xf8" + bytes(6),
        b"\x7f\xf8\0\0\0\0\0\7",
        b"\xff\xf0" + bytes(6),
        b"\x80" + bytes(7),
        b"\0" * 7 + b"\1",
    ]
    floats = [struct.unpack(">d", raw)[0] for raw in bits]
    tree = {"floats": floats, "complex": [complex(a, b) for a in floats for b in floats], "keys": {-0.0: 1}}
    assert_same_tree(tree, carry(in_memory(tree), tmp_path / "a.safetensors").tree)


def test_texts_that_are_not_unicode(tmp_path: Path) -> None:
    tree = {"\ud800": "a\udfffb", "é": ["\0\n"]}
    assert_same_tree(tree, carry(in_memory(tree), tmp_path / "a.safetensors").tree)
    with pytest.raises(Unsupported, match="not Unicode"):
        pack(in_memory({"\ud800": TensorEntry(Storage(InlineBytes(bytes(4))), by_name("f32"), (1,), (1,))}))


def test_values_of_every_kind(tmp_path: Path) -> None:
    shared = Object(Global("argparse", "Namespace"), (), "new")
    shared.state = {"self": shared, "size": Object(Global("torch", "Size"), ((1, 2),))}
    made = Object(Global("collections", "Counter"), ({"b": 2},), "call")
    made.items = {"a": shared}
    added = Object(Global("builtins", "set"), ([1],), "call")
    added.elements, added.adds = [added, 2], True
    tree = [
        shared,
        made,
        added,
        Set([1, (2, shared)], frozen=True),
        OrderedDict({1: 2}, {"_metadata": OrderedDict()}),
        ByteString(b"\xff"),
        bytearray(b"a"),
        Global("torch", "float32"),
    ]
    tree += [
        (tree,),
        {True: 1, None: 2, (1, "a"): 3, b"k": 4, 1.5: 5},
        2**4000,
        -(2**4000),
        Object(Global("uuid", "SafeUUID"), (0,), "call"),
    ]
    assert_same_tree(tree, carry(in_memory(tree), tmp_path / "a.safetensors").tree)


def entries(base: torch.Tensor, **views: torch.Tensor) -> Any:
    return {"base": base, **views}


@looped(
    "shape_and_stride",
    [
        ((1, 3), (7, 1)),
        ((3, 1), (1, 99)),
        ((3, 1, 2), (2, 5, 1)),
        ((2, 3), (1, 2)),
        ((2, 1, 3), (3, 1, 1)),
        ((1,), (9,)),
        ((1, 1), (3, 8)),
        ((2, 3, 4), (1, 8, 2)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.complex32, torch.complex64])
def test_strides_that_cover_the_storage_are_kept(shape_and_stride: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    shape, stride = shape_and_stride
    base = values(torch.Size(shape).numel(), dtype=dtype)
    tree = {"w": base.as_strided(shape, stride)}
    if dtype.is_complex:
        tree["c"] = values(torch.Size(shape).numel(), dtype=dtype).as_strided(shape, stride).conj()
    checkpoint = read(written(torch_bytes(tree), tmp_path / "a.pt"))
    back = carry(checkpoint, tmp_path / "a.safetensors")
    assert_same_tree(checkpoint, back)


def test_locations_and_flags_come_back(tmp_path: Path) -> None:
    storage = Storage(InlineBytes(bytes(range(16))), "cuda:1")
    one = TensorEntry(storage, by_name("f32"), (4,), (1,))
    two = TensorEntry(storage, by_name("f32"), (4,), (1,), 0, one.flags._replace(requires_grad=True, parameter=True))
    part = TensorEntry(storage, by_name("f32"), (2,), (1,), 2, one.flags._replace(neg=True))
    other = TensorEntry(storage, by_name("i16"), (8,), (1,))
    tree = {"one": one, "same": one, "two": two, "part": part, "other": other}
    assert_same_tree(tree, carry(in_memory(tree), tmp_path / "a.safetensors").tree)


@pytest.mark.parametrize("keys", [(0, "0"), ("0", 0), (0, "0", "0~int"), ("~storage/0", "__metadata__")])
def test_keys_that_look_the_same_or_reserved_come_back(keys: tuple[Any, ...], tmp_path: Path) -> None:
    tree = {
        key: TensorEntry(Storage(InlineBytes(bytes([n] * 4))), by_name("f32"), (1,), (1,)) for n, key in enumerate(keys)
    }
    packed = pack(in_memory(tree))
    assert len(packed.tree) == len(keys)
    assert_same_tree(tree, carry(in_memory(tree), tmp_path / "a.safetensors").tree)


# The record under attack ----------------------------------------------------------------------------------------------


def record_of(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return header, json.loads(header["__metadata__"]["ckptool"]), data[8 + size :]


def with_record(path: Path, header: dict[str, Any], record: Any, data: bytes) -> Path:
    header["__metadata__"]["ckptool"] = record if isinstance(record, str) else json.dumps(record)
    raw = json.dumps(header).encode()
    return written(len(raw).to_bytes(8, "little") + raw + data, path)


def sample(folder: Path) -> Path:
    """A carried file with a bit of everything in it."""
    x = values(8)
    tree = {
        "a": x,
        "b": x[:4],
        "t": values(2, 3).t(),
        "sparse": torch.eye(3).to_sparse(),
        "q": TRAPS["09-qint8-per-tensor"]()["w"],
    }
    tree |= {
        "z": values(2, dtype=torch.complex128).conj(),
        "n": [1, (2.5, None)],
        "s": {1},
        "nan": float("nan"),
        "by": b"\0",
        5: {"o": TRAPS["12-metadata"]()},
    }
    carry(read(written(torch_bytes(tree), folder / "sample.pt")), folder / "sample.safetensors")
    return folder / "sample.safetensors"


def test_a_file_that_another_program_changed_is_refused(tmp_path: Path) -> None:
    header, record, data = record_of(sample(tmp_path))
    for change in ("renamed", "removed"):
        other = dict(header)
        other["c"] = other.pop("a")
        if change == "removed":
            record = {**record, "storages": record["storages"][1:]}
        with pytest.raises(CkptoolError) as caught:
            read(with_record(tmp_path / "b.safetensors", other, record, data))
        assert caught.value.code in ("conflict", "corrupt")


@pytest.mark.parametrize(
    "record",
    ["", "{}", "[]", "null", "1", '{"schema": "ckptool.tree/2"}', '{"schema": "ckptool.tree/1"}', "[" * 100_000],
)
def test_a_record_that_is_none(record: str, tmp_path: Path) -> None:
    header, _, data = record_of(sample(tmp_path))
    with pytest.raises((Corrupt, Unsupported)):
        read(with_record(tmp_path / "b.safetensors", header, record, data))


@pytest.mark.parametrize("many", [400, pytest.param(1500, marks=pytest.mark.soak)])
def test_any_damage_to_the_record_gives_an_error_of_ours_or_a_tree(many: int, tmp_path: Path) -> None:
    header, record, data = record_of(sample(tmp_path))
    chosen = random.Random(3)
    odd = [
        None,
        -1,
        10**6,
        "x",
        [],
        {},
        {"n": 0},
        {"n": 10**6},
        {"n": -1},
        {"t": 0},
        {"s": [0, None]},
        {"f": "zz"},
        {"b": 5},
        {"g": []},
        True,
        2.5,
        [0],
    ]
    refused = 0
    for _ in range(many):
        changed = json.loads(json.dumps(record))
        node: Any = changed
        while isinstance(node, (dict, list)) and node:
            key = chosen.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], (dict, list)) or not node[key] or chosen.random() < 0.2:
                node[key] = chosen.choice(odd)
                break
            node = node[key]
        path = with_record(tmp_path / "b.safetensors", json.loads(json.dumps(header)), changed, data)
        try:
            read(path)
        except CkptoolError:
            refused += 1
    assert refused > many * 0.45


def test_twins_are_carried_and_are_no_ties(tmp_path: Path) -> None:
    """What 0.1.0 stored once stays stored once, and every tensor gets memory of its own again."""
    one = torch.randn(64, 64)
    tree = {
        "model": {"a.weight": one, "t.weight": one.t()},
        "ema": {"a.weight": one.clone()},
        "s": one.clone()[1:],
        "epoch": 3,
    }
    torch.save(tree, tmp_path / "in.pt")
    assert deduplicated(tmp_path / "in.pt", tmp_path / "slim.pt")
    out = tmp_path / "out.safetensors"
    ckptool.convert(tmp_path / "slim.pt", out, all=True, verify=True)
    assert out.stat().st_size < 2.5 * one.nbytes
    ours = ckptool.load(out)
    ours["model"]["a.weight"].zero_()
    assert not ours["model"]["t.weight"].any() and torch.equal(ours["ema"]["a.weight"], one)
    ckptool.convert(out, tmp_path / "back.pt")
    assert (tmp_path / "back.pt").stat().st_size < 2.5 * one.nbytes
    assert ckptool.diff(tmp_path / "back.pt", tmp_path / "in.pt").same
