"""A whole tree inside a safetensors file: there and back again, whatever it is made of, or refused by name."""

from __future__ import annotations

import base64
import collections
import contextlib
import importlib
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import ByteString, Global, Object, OrderedDict, Set
from ckptool.errors import CkptoolError, Conflict, Unsupported
from ckptool.formats import read, safetensors, torch_zip
from ckptool.formats.whole_tree import pack
from ckptool.pickles import decode
from fixtures.traps import TRAPS, values
from tests.formats import contract
from tests.support.cli import Run
from tests.support.files import carry_out, torch_bytes, written
from tests.support.looped import examples, looped
from tests.support.pickled_graphs import as_tree, graphs
from tests.support.same import assert_same_objects, assert_same_tree

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
    stock = load_file(tmp_path / "a.safetensors")
    for key, meant in value.items() if isinstance(value := TRAPS[name](), dict) else ():
        plain = isinstance(meant, torch.Tensor) and meant.layout is torch.strided
        if plain and key in stock and (shown := stock[key]).dtype == meant.dtype:
            meant = meant.detach().resolve_conj().resolve_neg().contiguous()
            one, other = (each.reshape(-1).view(torch.uint8) for each in (shown, meant))
            assert shown.shape == meant.shape and one.equal(other), key
    assert_same_tree(back, carry(back, tmp_path / "b.safetensors"))
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    carry_out(torch_zip.write(back, keep_unknown=name in contract.UNKNOWN_CALLS), tmp_path / "back.pt")
    contract.same_for_torch(original, tmp_path / "back.pt", mmap=True)


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
    tree: list[Any] = [shared, made, Set([1, (2, Global("torch", "float16"))], frozen=True), ByteString(b"\xff")]
    tree += [OrderedDict({1: 2}, {"_metadata": OrderedDict()}), bytearray(b"a"), Global("torch", "float32"), (tree,)]
    tree += [{True: 1, None: 2, (1, "a"): 3, b"k": 4, 1.5: 5}, 2**4000, -(2**4000)]
    tree += [Object(Global("uuid", "SafeUUID"), (0,), "call")]
    assert_same_tree(tree, carry(in_memory(tree), tmp_path / "a.safetensors").tree)


KEYED: dict[str, Callable[[], Any]] = {
    "state by parameter": lambda: {torch.nn.Parameter(torch.ones(2)): {"step": 1}},
    "a tuple with a tensor": lambda: {(torch.zeros(3), 1): 2, (frozenset({torch.ones(1)}),): 3},
    "a view and its base": lambda: {"a": (w := torch.arange(6.0)), w[2:]: 1, w: 2, torch.ones(2).t(): w.view(2, 3)},
    "in a set": lambda: [{torch.ones(2)}, frozenset({torch.ones(1, dtype=torch.bfloat16)})],
}


@pytest.mark.parametrize("suffix", [".safetensors", ".dcp", ".pt"])
@looped("title", KEYED)
def test_tensors_that_are_keys_come_back(title: str, suffix: str, tmp_path: Path) -> None:
    file, out, back = tmp_path / "a.pt", tmp_path / f"out{suffix}", tmp_path / "back.pt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "x": KEYED[title]()}, file)
    ckptool.convert(file, out, all=True)
    ckptool.convert(out, back, all=True)
    one, other = (torch.load(each, weights_only=False) for each in (file, back))
    assert_same_objects(one, other, storages=False)


def test_every_tensor_that_safetensors_can_hold_is_there_for_others(tmp_path: Path) -> None:
    tensors = {f"{dtype}.{shape}": torch.zeros(shape, dtype=dtype) for shape in [(), (0,), (2, 0, 3), (2, 3)]
               for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.uint64)}  # fmt: skip
    torch.save(tensors, tmp_path / "a.pt")
    ckptool.convert(tmp_path / "a.pt", tmp_path / "a.safetensors", all=True)
    stock = load_file(tmp_path / "a.safetensors")
    assert {(name, t.dtype, t.shape) for name, t in stock.items()} == {
        (n, t.dtype, t.shape) for n, t in tensors.items()
    }


def test_a_pickle_may_have_as_many_opcodes_as_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "FREE_OPCODES", 1_000)
    torch.save({"w": torch.ones(1), 5: list(range(5_000))}, tmp_path / "a.pt")
    for out in ("a.safetensors", "a.dcp"):
        ckptool.convert(tmp_path / "a.pt", tmp_path / out, **({"all": True} if out == "a.safetensors" else {}))
        back = read(tmp_path / out)
        assert back.tree[5] == list(range(5_000)) and not back.notes


@pytest.mark.parametrize("keys", [(0, "0"), ("0", 0), (0, "0", "0~int"), ("~storage/0", "__metadata__")])
def test_keys_that_look_the_same_or_reserved_come_back(keys: tuple[Any, ...], tmp_path: Path) -> None:
    data = (InlineBytes(bytes([n] * 4)) for n in range(len(keys)))
    tree = {key: TensorEntry(Storage(each), by_name("f32"), (1,), (1,)) for key, each in zip(keys, data, strict=True)}
    packed = pack(in_memory(tree))
    assert len(packed.tree) == len(keys)
    assert_same_tree(tree, carry(in_memory(tree), tmp_path / "a.safetensors").tree)


# The pickle under attack ----------------------------------------------------------------------------------------------


def parts_of(path: Path) -> tuple[dict[str, Any], bytes, bytes]:
    """The header of a file, the pickle in it, and the data."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return header, base64.b64decode(header["__metadata__"]["ckptool.pickle"]), data[8 + size :]


def with_pickle(path: Path, header: dict[str, Any], content: bytes | str, data: bytes) -> Path:
    text = content if isinstance(content, str) else base64.b64encode(content).decode()
    header = {**header, "__metadata__": {**header["__metadata__"], "ckptool.pickle": text}}
    raw = json.dumps(header).encode()
    return written(len(raw).to_bytes(8, "little") + raw + data, path)


def sample(folder: Path) -> Path:
    """A carried file with a bit of everything in it."""
    x = values(8)
    tree = {"a": x, "b": x[:4], "t": values(2, 3).t(), "sparse": torch.eye(3).to_sparse(), "n": [1, (2.5, None)]}
    tree |= {"q": TRAPS["09-qint8-per-tensor"]()["w"], "z": values(2, dtype=torch.complex128).conj(), "s": {1}}
    carry(read(written(torch_bytes(tree), folder / "sample.pt")), folder / "sample.safetensors")
    return folder / "sample.safetensors"


@pytest.mark.parametrize("change", ["bfloat16", "transposed", "flattened", "grown", "shrunk"])
@pytest.mark.parametrize("name", ["w", "t"])
def test_a_tensor_that_another_program_changed_and_wrote_with_the_old_metadata_is_refused(
    name: str, change: str, tmp_path: Path
) -> None:
    tree = {"w": values(2, 3, dtype=torch.float16), "t": values(3, 2, dtype=torch.float16).t(), "step": 3}
    carry(read(written(torch_bytes(tree), tmp_path / "a.pt")), tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as stock:
        metadata, tensors = stock.metadata(), {key: stock.get_tensor(key) for key in stock.keys()}  # noqa: SIM118
    value = tensors[name]
    changed = {"bfloat16": value.bfloat16(), "transposed": value.t().contiguous(), "flattened": value.flatten()}
    changed |= {"grown": torch.cat([value, value]), "shrunk": value[:1]}
    save_file({**tensors, name: changed[change]}, tmp_path / "b.safetensors", metadata)
    with pytest.raises(Conflict):
        read(tmp_path / "b.safetensors")
    save_file({**tensors, name: value + 1}, tmp_path / "c.safetensors", metadata)
    with safe_open(tmp_path / "c.safetensors", "np") as stock:
        assert read(tmp_path / "c.safetensors").tree[name].numpy().tobytes() == stock.get_tensor(name).tobytes()


def test_a_call_in_the_pickle_is_not_run_and_is_seen(tmp_path: Path, run: Run) -> None:
    """A pickle of another program in the metadata: `scan` judges it as any, and no writer passes it on."""
    save_file({}, tmp_path / "a.safetensors", {"format": "pt"})
    data = (tmp_path / "a.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for call in (Call("os.system", f"touch {tmp_path / 'ran'}"), Call("fixtures.traps.classes.add_up", 1)):
        path = with_pickle(tmp_path / "b.safetensors", header, pickle.dumps({"x": call}), b"")
        found = json.loads(run("scan", path, "--json").out)["files"][0]
        assert (found["state"], len(found["calls"])) == ("unsafe-global", 1)
        assert run("scan", path).code == 1
        for out in ("b.pt", "c.safetensors"):
            assert run("edit", path, "--set", "y=1", "-o", tmp_path / out).code == 2, out
        assert not (tmp_path / "ran").exists()


def test_a_call_beside_the_metadata_of_a_state_dict_is_seen(tmp_path: Path, run: Run) -> None:
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "a.pt")
    hidden: Any = collections.OrderedDict()
    hidden._metadata, hidden.more = {}, Call("os.system", "true")
    text = base64.b64encode(pickle.dumps(hidden)).decode()
    ckptool.convert(tmp_path / "a.pt", tmp_path / "one", container="sharded")
    header, _, data = parts_of(tmp_path / "one" / "model.safetensors")
    with_pickle(tmp_path / "one" / "model.safetensors", header, text, data)
    ckptool.convert(tmp_path / "a.pt", tmp_path / "two", shard_size="8B")
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    index["metadata"]["ckptool.pickle"] = text
    (tmp_path / "two" / "model.safetensors.index.json").write_text(json.dumps(index))
    for folder in ("one", "two"):
        assert run("inspect", tmp_path / folder).code == 0
        assert run("scan", tmp_path / folder).code == 1, folder


class Call:
    """Pickles as the call of a function, whatever it is."""

    def __init__(self, name: str, argument: Any) -> None:
        self.name, self.argument = name, argument

    def __reduce__(self) -> Any:
        module, _, name = self.name.rpartition(".")
        return getattr(importlib.import_module(module), name), (self.argument,)


@pytest.mark.parametrize("many", [400, pytest.param(1500, marks=pytest.mark.soak)])
def test_any_damage_to_the_pickle_gives_an_error_of_ours_or_a_tree(many: int, tmp_path: Path) -> None:
    header, content, data = parts_of(sample(tmp_path))
    chosen = random.Random(3)
    for _ in range(many):
        damaged = bytearray(content)
        for _ in range(chosen.randint(1, 3)):
            damaged[chosen.randrange(len(damaged))] = chosen.choice(b'\x00\x80.0(}]tuNKc:[,"#q' + content[:40])
        path = with_pickle(tmp_path / "b.safetensors", header, bytes(damaged), data)
        with contextlib.suppress(CkptoolError):
            read(path)


# What 0.1.0 wrote -----------------------------------------------------------------------------------------------------


FILES = Path(__file__).parents[2] / "fixtures" / "0.1.0"
WHOLE = FILES / "whole.safetensors"


@pytest.mark.parametrize("name", ["whole", "twins"])
def test_whole_trees_of_0_1_0(name: str, tmp_path: Path) -> None:
    old = FILES / f"{name}.safetensors"
    assert_same_tree(read(FILES / f"{name}.pt"), read(old))
    ckptool.convert(old, tmp_path / "new.safetensors", all=True, verify=True)
    assert "ckptool.tree/1" not in (tmp_path / "new.safetensors").read_bytes().decode("latin-1")
    assert_same_tree(read(old), read(tmp_path / "new.safetensors"))


# The record under attack ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [250, pytest.param(1500, marks=pytest.mark.soak)])
def test_any_damage_to_the_record_gives_an_error_of_ours_or_a_tree(many: int, tmp_path: Path) -> None:
    raw = WHOLE.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    record = json.loads(header["__metadata__"]["ckptool"])
    chosen = random.Random(3)
    odd: list[Any] = [None, -1, 10**6, "x", [], {}, {"n": 0}, {"n": 10**6}, {"n": -1}, {"t": 0}, {"s": [0, None]}]
    odd += [{"f": "zz"}, {"b": 5}, {"g": []}, True, 2.5, [0]]
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
        about = {**header["__metadata__"], "ckptool": json.dumps(changed)}
        raw = json.dumps({**header, "__metadata__": about}).encode()
        try:
            ckptool.inspect(written(len(raw).to_bytes(8, "little") + raw + data, tmp_path / "b.safetensors"))
        except CkptoolError:
            refused += 1
    assert refused > many * 0.45
