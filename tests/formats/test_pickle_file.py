"""`pickle`: bare pickles of every protocol read alike; nothing in them is run, imported or loaded before it is asked
for."""

from __future__ import annotations

import collections
import io
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.nodes import MISSING, Object
from ckptool.checkpoint.numpy_arrays import LongValue, array, array_entry, with_tensors
from ckptool.checkpoint.tree import tensors
from ckptool.conventions.state_dicts import array_state_dicts
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, NotACheckpoint, Truncated, Unsupported
from ckptool.formats import read
from ckptool.pickles.calls import uses_of
from ckptool.pickles.plain import plain
from tests.support.errors import refused
from tests.support.files import torch_bytes, written
from tests.support.looped import looped
from tests.support.memory import LIMIT, peak_of
from tests.support.processes import soon
from tests.support.zips import arrays_model, each, pickle_to, same_bits

# Every protocol ------------------------------------------------------------------------------------------------------


@each
def test_arrays_bit_for_bit(protocol: int, tmp_path: Path) -> None:
    given = {"model": arrays_model(), "author": "me", "step": 3}
    file = pickle_to(given, tmp_path / "a.pkl", protocol)
    checkpoint = read(file)
    assert checkpoint.container == "pickle" and not checkpoint.tensors_only and not checkpoint.discarded
    assert list(checkpoint.tree) == list(given) and not list(tensors(checkpoint.tree))
    found = with_tensors(checkpoint.tree["model"])
    assert list(found) == list(given["model"])
    assert all(same_bits(found[name].numpy(), expected) for name, expected in given["model"].items())
    assert found["tied.weight"] is found["bytes.weight"]
    assert found["fortran.weight"].stride == (1, 200)
    if protocol:  # texts of protocol 0 end with their line: they have to be read to know where
        large = array(checkpoint.tree["model"]["large.weight"])
        assert isinstance(large.data, LongValue)


@each
def test_arrays_come_back_from_a_torch_file(protocol: int, tmp_path: Path) -> None:
    given = arrays_model()
    file, out = pickle_to({"model": given}, tmp_path / "a.pkl", protocol), tmp_path / "a.pt"
    ckptool.convert(file, out, verify=True)
    again = torch.load(out, weights_only=False)["model"]  # a file of our own
    for name, expected in given.items():
        assert again[name].tolist() == expected.tolist() and again[name].flags.writeable
        assert again[name].flags.f_contiguous == expected.flags.f_contiguous
    assert again["tied.weight"] is again["bytes.weight"]
    assert ckptool.diff(file, out).same
    loaded = ckptool.load(file)["model"]
    for name, expected in given.items():
        assert loaded[name].dtype == expected.dtype and loaded[name].tobytes() == expected.tobytes()


@each
def test_tensors_are_streams_inside_of_the_pickle(protocol: int, tmp_path: Path) -> None:
    shared = torch.arange(100_000.0)
    given = {"a": shared, "b": torch.tensor([[1.5, -2.5]], dtype=torch.float16).t(), "c": torch.tensor(3)}
    given |= {"e": torch.zeros(0), "p": torch.nn.Parameter(torch.ones(2))}
    file = pickle_to(given, tmp_path / "a.pkl", protocol)
    tree = read(file).tree
    assert list(tree) == list(given) and all(isinstance(value, TensorEntry) for value in tree.values())
    for name, expected in given.items():
        assert torch.equal(tree[name].torch(), expected.detach()) and tree[name].stride == expected.stride()
    assert tree["p"].flags.parameter and tree["p"].flags.requires_grad
    ckptool.convert(file, tmp_path / "a.pt")
    again = torch.load(tmp_path / "a.pt", weights_only=True)
    assert all(torch.equal(again[name], expected) for name, expected in given.items())


@each
def test_all_protocols_give_one_tree(protocol: int, tmp_path: Path) -> None:
    given = {
        "text": "ключ\n\0\\", "bytes": b"\0\xff\n", "none": None, "float": [1.5, float("nan"), float("-inf"), -0.0],
        "int": [0, -1, 255, 65536, 2**31, -(2**63), 2**100], "tuple": ((), (1,), (1, 2, 3, 4)), "set": {1},
        "frozen": frozenset({2}), "ordered": collections.OrderedDict(a=1, b=2), "bool": [True, False],
        "bytearray": bytearray(b"ab"), "complex": 1 + 2j, "range": range(3), 7: "seven", (1, "x"): "pair",
        "counter": collections.Counter("abca"), "scalar": np.float64(2.5), "labels": np.array(["a", "bc"]),
    }  # fmt: skip
    found = plain(read(pickle_to(given, tmp_path / "a.pkl", protocol)).tree)
    expected = plain(read(pickle_to(given, tmp_path / "b.pkl", 2)).tree)
    assert list(found) == list(given) == list(expected)
    assert repr(found) == repr(expected)
    assert found["int"] == given["int"] and found["text"] == given["text"] and found["bytes"] == given["bytes"]
    assert found["bytearray"] == given["bytearray"] and type(found["bytearray"]) is bytearray


def test_pickles_of_python_2(tmp_path: Path) -> None:
    """Written by hand: `cPickle.dump({"w": numpy.arange(3, dtype="u1")}, f, 2)`, with bytes that are and are not
    UTF-8."""
    for content in (b"abc", b"\xc3\xa9\x80", "éé".encode(), b"\xff\xfe\xfd\xfc"):
        dtype = (
            b"cnumpy\ndtype\nq\x04U\x02u1q\x05K\x00K\x01\x87q\x06Rq\x07"
            b"(K\x03U\x01|q\x08NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\tb"
        )
        data = (
            b"\x80\x02}q\x01U\x01wq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03"
            b"cnumpy\nndarray\nq\nK\x00\x85q\x0bU\x01bq\x0c\x87q\rRq\x0e(K\x01K%c\x85q\x0f%b\x89U%c%bq\x10tq\x11bs."
        ) % (len(content), dtype, len(content), content)
        tree = read(written(data, tmp_path / "a.pkl")).tree
        assert array_entry(tree["w"]).bytes() == content
        assert pickle.loads(data, encoding="latin1")["w"].tobytes() == content  # written above


# What is a pickle, and what is not -----------------------------------------------------------------------------------


def test_files_of_a_few_bytes_are_no_checkpoints(tmp_path: Path) -> None:
    for data in (b"\x80", b"\x80\x02", b"\x80\x02.", b"(", b"(d.", b"].", b"N.", b"I1"):
        with pytest.raises(NotACheckpoint):
            read(written(data, tmp_path / "a.pkl"))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_several_pickles_in_one_file_are_not_the_first_alone(protocol: int, tmp_path: Path) -> None:
    first, second = pickle.dumps({"epoch": 1}, protocol), pickle.dumps({"w": np.ones(3)}, protocol)
    file = written(first + second, tmp_path / "a.pkl")
    error = refused(Ambiguous, tmp_path, lambda: read(file), f"{len(second)} bytes after the end")
    assert "pickle.dump was called several times" in error.why and error.fix.startswith(
        f"Take the first by itself: head -c {len(first)} "
    )
    command = error.fix.partition(": ")[2].replace("first.pkl", str(tmp_path / "first.pkl"))
    subprocess.run(["/bin/sh", "-c", command], check=True)
    assert read(tmp_path / "first.pkl").tree == {"epoch": 1}


def test_bytes_after_the_end_of_the_pickle_are_ambiguous(tmp_path: Path) -> None:
    with pytest.raises(Ambiguous) as caught:
        read(written(pickle.dumps({"a": 1}) + b"hidden", tmp_path / "a.pkl"))
    assert "something may be hidden there" in caught.value.why


def test_persistent_ids_are_unsupported_by_name(tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return "there" if isinstance(value, complex) else None

    for protocol in (0, 2):
        buffer = io.BytesIO()
        Pickler(buffer, protocol).dump({"a": 1j})
        with pytest.raises(Unsupported, match=r"by a persistent id \(there\)"):
            read(written(buffer.getvalue(), tmp_path / "a.pkl"))


def test_the_pickle_out_of_a_torch_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(written(torch_bytes({"w": torch.ones(2)}), tmp_path / "a.pt")) as archive:
        data = archive.read("archive/data.pkl")
    with pytest.raises(Unsupported, match=r"the data\.pkl of a torch zip, extracted"):
        read(written(data, tmp_path / "data.pkl"))


def test_joblib_is_named(tmp_path: Path) -> None:
    """As joblib writes it: behind the wrapper's opcodes, the raw array."""
    data = (
        b"\x80\x04\x95\x40\0\0\0\0\0\0\0\x8c\x13joblib.numpy_pickle\x94\x8c\x11NumpyArrayWrapper\x94\x93\x94)\x81\x94"
    )
    data += bytes(200)
    with pytest.raises(Unsupported, match="was written by joblib"):
        read(written(data, tmp_path / "a.pkl"))


# Files of other people -----------------------------------------------------------------------------------------------


# As weights: which dictionaries are a model --------------------------------------------------------------------------


def weight_arrays() -> dict[str, np.ndarray[Any, Any]]:
    return {name: given for name, given in arrays_model().items() if name.endswith("weight")}


@pytest.mark.parametrize(
    ("tree", "addresses"),
    [
        ({"stubs": {"conv1_w": np.ones(2), "conv1_b": np.ones(1)}, "cfg": "…"}, ["stubs"]),
        ({"w": np.ones(2), "b": np.ones(1)}, [""]),
        ({"model": {"a.w": np.ones(2)}, "ema": {"a.w": np.ones(2)}}, ["model", "ema"]),
        ({"mean": np.ones(3), "std": np.ones(3), "net": {f"l{n}.w": np.ones(2) for n in range(3)}}, ["", "net"]),
        ({"deep": [{"x": {"w.w": np.ones(2)}}]}, ["deep/0/x"]),
        ({"optimizer": {"a": np.ones(2)}}, []),
        ({"history": [np.ones(2)]}, []),
        ({1: np.ones(2), 2: np.ones(2)}, []),
        ({"a": np.ones(1), "b": 1, "c": 2, "d": 3}, []),
        ({"labels": np.array(["a"]), "rows": np.zeros(1, [("a", "f4")])}, []),
    ],
)
def test_which_dictionaries_of_arrays_are_weights(tree: Any, addresses: list[str], tmp_path: Path) -> None:
    file = pickle_to(tree, tmp_path / "a.pkl")
    assert [root.address for root in array_state_dicts(read(file).tree)] == addresses
    if not addresses:
        with pytest.raises(CkptoolError, match="no dictionary that looks like model weights"):
            ckptool.convert(file, tmp_path / "a.npz")


def test_large_arrays_are_shown_in_part(tmp_path: Path) -> None:
    file = pickle_to({"model": weight_arrays()}, tmp_path / "a.pkl")
    shown = ckptool.show(file, at="model/large.weight")
    assert shown.truncated and shown.entry.shape == (200, 300)
    cut = ckptool.show(file, at="model/large.weight", slice=":1,:2")
    assert cut.values.tolist() == weight_arrays()["large.weight"][:1, :2].tolist()


@pytest.mark.parametrize("verb", ["pickle", "header"])
def test_arrays_that_are_too_large_to_be_pickled_again(verb: str, tmp_path: Path) -> None:
    file = pickle_to({"model": {"a.w": np.zeros(40 << 20, "u1")}}, tmp_path / "a.pkl")
    with pytest.raises(Unsupported, match="41,943,040 bytes cannot be pickled again") as caught:
        if verb == "pickle":
            ckptool.convert(file, tmp_path / "a.pt")
        else:
            ckptool.convert(file, tmp_path / "a.safetensors", all=True)
    assert "-o OUT.safetensors" in caught.value.fix
    ckptool.convert(file, tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_size > 40 << 20


# Large ones: their arrays stay in the file ----------------------------------------------------------------------------

_ARRAY = (  # the opcodes before and behind the data of an array of f4, without a memo
    (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
        b"(K\x01J%b\x85cnumpy\ndtype\nX\x02\0\0\0f4\x89\x88\x87R"
        b"(K\x03X\x01\0\0\0<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89B%b"
    ),
    b"tb",
)


def sparse_pickle(path: Path, size: int, count: int) -> Path:
    """A pickle of `count` arrays of zeros, together of `size` bytes, that are holes in the file."""
    numel = size // count // 4
    with path.open("wb") as file:
        file.write(b"\x80\x03}(X\x05\0\0\0model}(")
        for number in range(count):
            name = f"layer{number}.weight".encode()
            file.write(b"X" + struct.pack("<I", len(name)) + name)
            file.write(_ARRAY[0] % (struct.pack("<i", numel), struct.pack("<I", 4 * numel)))
            file.seek(4 * numel, 1)
            file.write(_ARRAY[1])
        file.write(b"uu.")
    return path


@pytest.mark.parametrize("nbytes", [200_000_000, pytest.param(2_000_000_000, marks=pytest.mark.soak)])
def test_a_large_pickle_takes_little_memory(nbytes: int, tmp_path: Path) -> None:
    file = str(sparse_pickle(tmp_path / "a.pkl", nbytes, 20))
    lines = [f"ckptool.inspect({file!r})", f"assert ckptool.diff({file!r}, {file!r}).same"]
    lines += [f"ckptool.convert({file!r}, {file + suffix!r})" for suffix in (".safetensors", ".npz")]
    assert (found := peak_of("; ".join(lines), tmp_path)) <= LIMIT, f"{found:,}"


@pytest.mark.parametrize("numel", [1_250_000, pytest.param(25_000_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickles_of_arrays_take_little_memory(protocol: int, numel: int, tmp_path: Path) -> None:
    given = {"model": {f"{n}.w": np.full(numel, n, "f4") for n in range(4)}}
    file = pickle_to(given, tmp_path / "a.pkl", protocol)
    line = f"ckptool.inspect({str(file)!r}); ckptool.convert({str(file)!r}, {str(tmp_path / 'a.npz')!r})"
    assert peak_of(line, tmp_path) <= LIMIT
    with np.load(tmp_path / "a.npz") as again:
        assert all(np.array_equal(again[f"{n}.w"], given["model"][f"{n}.w"]) for n in range(4))


# Pickles that nobody should send --------------------------------------------------------------------------------------


class Traced:
    """Leaves a trace if it is ever made."""

    traces: list[str] = []  # noqa: RUF012

    def __init__(self, text: str) -> None:
        self.traces.append(text)

    def __reduce__(self) -> Any:
        return Traced, ("it ran",)


@each
def test_nothing_is_run_or_imported(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"a": Traced.__new__(Traced), "w": np.ones(3)}, protocol)
    decoy = "q" * len(Traced.__module__)
    (tmp_path / f"{decoy}.py").write_text("raise SystemExit('it was imported')")
    checkpoint = read(written(data.replace(Traced.__module__.encode(), decoy.encode()), tmp_path / "a.pkl"))
    assert not Traced.traces and decoy not in sys.modules
    ((use, place),) = uses_of(checkpoint)
    assert place == "a" and use.name == f"{decoy}.Traced"


@pytest.mark.parametrize("kind", ["bytes", "hex", "base64"])
def test_a_pickle_inside_a_value_stays_a_value(kind: str, tmp_path: Path) -> None:
    import base64

    inner = pickle.dumps(Traced.__new__(Traced))
    value = {"bytes": inner, "hex": inner.hex(), "base64": base64.b64encode(inner)}[kind]
    checkpoint = read(pickle_to({"payload": value}, tmp_path / "a.pkl"))
    assert checkpoint.tree == {"payload": value} and not list(uses_of(checkpoint)) and not Traced.traces


class Fake:
    """Is pickled as an array of the type, with the state that one gives it."""

    def __init__(self, dtype: Any, shape: Any, data: Any, fortran: Any = False) -> None:
        self.state = (1, shape, dtype, fortran, data)

    def __reduce__(self) -> Any:
        return np.zeros(0).__reduce__()[0], (np.ndarray, (0,), b"b"), self.state


class FakeType:
    def __init__(self, code: Any, *state: Any) -> None:
        self.code, self.state = code, state

    def __reduce__(self) -> Any:
        return (np.dtype, (self.code, False, True), self.state) if self.state else (np.dtype, (self.code, False, True))


PLAIN_STATE = (3, "<", None, None, None, -1, -1, 0)


@looped(
    "value",
    [
        np.array([{"a": 1}, None], dtype=object),
        np.zeros(2, [("a", "f4"), ("b", object)]),
        Fake(FakeType("f4," * 100_000), (1,), bytes(4)),
        Fake(FakeType("(2,)f4"), (1,), bytes(4)),
        Fake(FakeType("f4", *PLAIN_STATE), (1 << 62, 1 << 62), bytes(4)),
        Fake(FakeType("f4", *PLAIN_STATE), (-1,), bytes(4)),
        Fake(FakeType("f4", *PLAIN_STATE), (2.0,), bytes(8)),
        Fake(FakeType("f4", *PLAIN_STATE), (2,), bytes(7)),
        Fake(FakeType("f4", *PLAIN_STATE), (20_000,), bytes(80_001)),
        Fake(FakeType("f4", *PLAIN_STATE), (1,) * 65, bytes(4)),
        Fake(FakeType("O8", 3, "|", None, None, None, -1, -1, 63), (10_000,), bytes(80_000)),
        Fake(FakeType("f4", 3, "<", (np.dtype("f4"), (2,)), None, None, -1, -1, 0), (1,), bytes(8)),
        Fake(FakeType("V8", 3, "|", None, ("a",), {"a": (np.dtype("f8"), 4)}, 8, 1, 16), (1,), bytes(8)),
        Fake(FakeType("f4"), (1,), "a text"),
        Fake("f4", (1,), bytes(4)),
        Fake(None, None, None),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_object_arrays_and_odd_arrays_stay_opaque(value: Any, tmp_path: Path) -> None:
    file = pickle_to({"model": {"a.weight": value}}, tmp_path / "a.pkl")
    with soon(2):
        node = read(file).tree["model"]["a.weight"]
        assert isinstance(node, Object) and node.state is not MISSING and array_entry(node) is None
        assert not ckptool.inspect(file).tensors
        str(ckptool.inspect(file))


def test_a_right_start_with_a_wrong_sequel_is_refused(tmp_path: Path) -> None:
    for data in (b"\x80\x04" + bytes(50), b"\x80\x02}q\x01", b"\x80\x04\x95" + b"\xff" * 8 + b"}.", b"\x80\x02(.ab"):
        with pytest.raises((Corrupt, Truncated)):
            read(written(data, tmp_path / "a.pkl"))
