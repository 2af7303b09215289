"""`pickle`: bare pickles of every protocol read alike; nothing in them is run, imported or loaded before it is asked for."""

from __future__ import annotations

import ast
import collections
import io
import pickle
import pickletools
import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.arrays import array_entry, with_tensors
from ckptool.checkpoint import LongBytes, TensorEntry
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, LimitExceeded, NotACheckpoint, Truncated, Unsupported
from ckptool.formats import pickle_file, read
from ckptool.nodes import MISSING, Object
from ckptool.plain import array, plain
from ckptool.tree import tensors, unknown_calls
from tests.helpers import torch_bytes, written

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
PROTOCOLS = range(6)
each = pytest.mark.parametrize("protocol", PROTOCOLS)
LIMIT = 64_000_000


def pickled(value: Any, path: Path, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def model() -> dict[str, np.ndarray[Any, Any]]:
    """Arrays below and above the size from which they stay in the file, of several kinds."""
    rng = np.random.default_rng(0)
    large = rng.integers(0, 256, 300_000, dtype="u1")
    return {
        "small.weight": rng.standard_normal((3, 4), dtype="f4"),
        "large.weight": rng.standard_normal((200, 300)),
        "fortran.weight": np.asfortranarray(rng.standard_normal((200, 300), dtype="f4")),
        "turned.weight": np.arange(50_000, dtype=">i4"),
        "bytes.weight": large,
        "tied.weight": large,
        "zeros.weight": np.zeros(100_000, "f2"),
        "scalar": np.array(1.5),
        "empty": np.zeros((0, 5), "i8"),
        "truths": np.array([True, False]),
        "complex": np.array([1 + 2j]),
    }


def same(found: Any, expected: Any) -> bool:
    native = expected.astype(expected.dtype.newbyteorder("="))
    return found.dtype == native.dtype and found.shape == native.shape and found.tobytes() == native.tobytes()


# Every protocol ------------------------------------------------------------------------------------------------------


@each
def test_arrays_bit_for_bit(protocol: int, tmp_path: Path) -> None:
    given = {"model": model(), "author": "me", "step": 3}
    file = pickled(given, tmp_path / "a.pkl", protocol)
    checkpoint = read(file)
    assert checkpoint.container == "pickle" and not checkpoint.tensors_only and not checkpoint.discarded
    assert list(checkpoint.tree) == list(given) and not list(tensors(checkpoint.tree))
    found = with_tensors(checkpoint.tree["model"])
    assert list(found) == list(given["model"])
    assert all(same(found[name].numpy(), expected) for name, expected in given["model"].items())
    assert found["tied.weight"] is found["bytes.weight"]
    assert found["fortran.weight"].stride == (1, 200)
    if protocol:  # texts of protocol 0 end with their line: they have to be read to know where
        large = array(checkpoint.tree["model"]["large.weight"])
        assert isinstance(large.data, LongBytes)


@each
def test_arrays_come_back_from_a_torch_file(protocol: int, tmp_path: Path) -> None:
    given = model()
    file, out = pickled({"model": given}, tmp_path / "a.pkl", protocol), tmp_path / "a.pt"
    ckptool.convert(file, out, verify=True)
    again = torch.load(out, weights_only=False)["model"]  # a file of our own
    for name, expected in given.items():
        assert again[name].tolist() == expected.tolist() and again[name].flags.writeable
        assert again[name].flags.f_contiguous == expected.flags.f_contiguous
    assert again["tied.weight"] is again["bytes.weight"]
    assert ckptool.diff(file, out).same
    loaded = ckptool.load(file)["model"]
    assert all(same(loaded[name], expected) for name, expected in given.items())


@each
def test_tensors_are_streams_inside_of_the_pickle(protocol: int, tmp_path: Path) -> None:
    shared = torch.arange(100_000.0)
    given = {
        "a": shared,
        "b": torch.tensor([[1.5, -2.5]], dtype=torch.float16).t(),
        "c": torch.tensor(3),
        "e": torch.zeros(0),
        "p": torch.nn.Parameter(torch.ones(2)),
    }
    file = pickled(given, tmp_path / "a.pkl", protocol)
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
    found = plain(read(pickled(given, tmp_path / "a.pkl", protocol)).tree)
    expected = plain(read(pickled(given, tmp_path / "b.pkl", 2)).tree)
    assert list(found) == list(given) == list(expected)
    assert repr(found) == repr(expected)
    assert found["int"] == given["int"] and found["text"] == given["text"] and found["bytes"] == given["bytes"]
    assert found["bytearray"] == given["bytearray"] and type(found["bytearray"]) is bytearray


@each
@pytest.mark.parametrize("optimized", [False, True], ids=["as it is", "optimized"])
@pytest.mark.parametrize(
    "value",
    [{}, [], {"a": 1}, [1, 2], (1, 2), ("a", {}), ((1,), 2), {"a": [1]}, collections.OrderedDict(), [[[]]], ([],)],
    ids=repr,
)
def test_small_values_are_told_from_texts(value: Any, optimized: bool, protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps(value, protocol)
    data = pickletools.optimize(data) if optimized else data
    if len(data) < pickle_file.SMALLEST:
        return
    checkpoint = read(written(data, tmp_path / "a.pkl"))
    assert checkpoint.container == "pickle" and checkpoint.tree == value


def test_pickles_of_python_2(tmp_path: Path) -> None:
    """Written by hand: `cPickle.dump({"w": numpy.arange(3, dtype="u1")}, f, 2)`, with bytes that are and are not UTF-8."""
    for content in (b"abc", b"\xc3\xa9\x80", "éé".encode(), b"\xff\xfe\xfd\xfc"):
        dtype = b"cnumpy\ndtype\nq\x04U\x02u1q\x05K\x00K\x01\x87q\x06Rq\x07(K\x03U\x01|q\x08NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\tb"
        data = (
            b"\x80\x02}q\x01U\x01wq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\nK\x00\x85q\x0bU\x01bq\x0c\x87q\rRq\x0e(K\x01K"
            + bytes([len(content)])
            + b"\x85q\x0f"
            + dtype
            + b"\x89U"
            + bytes([len(content)])
            + content
            + b"q\x10tq\x11bs."
        )
        tree = read(written(data, tmp_path / "a.pkl")).tree
        assert array_entry(tree["w"]).bytes() == content
        assert pickle.loads(data, encoding="latin1")["w"].tobytes() == content  # written above


# What is a pickle, and what is not -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"(This is a text that begins with a bracket.)\n" * 20,
        b"(despite all that)\n" * 30,
        b"config\nname\nvalue: 3\n" * 30,
        b"class Net:\n    pass\n" * 30,
        b"c\n" * 300,
        b"]] a text\n" * 60,
        b"} // the end of something\n" * 30,
        b"(Some text)" * 60,
        b"(I1 am)" * 100,
        b"(Very long text without the end of a line " * 30,
        b"copyright\nsomebody\n(c) 2020\n" * 30,
        b"(dp0",
        b"}q\0",
    ],
)
def test_texts_are_not_pickles(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        read(written(text, tmp_path / "a.pkl"))


def test_row_002_files_of_a_few_bytes(tmp_path: Path) -> None:
    for data in (b"\x80", b"\x80\x02", b"\x80\x02.", b"(", b"(d.", b"].", b"N.", b"I1"):
        with pytest.raises(NotACheckpoint):
            read(written(data, tmp_path / "a.pkl"))


def test_torch_files_are_not_taken_for_pickles(tmp_path: Path) -> None:
    legacy = torch_bytes({"w": torch.ones(2)}, _use_new_zipfile_serialization=False)
    assert read(written(legacy, tmp_path / "a.pt")).container == "torch-legacy"
    assert read(written(torch_bytes({"w": torch.ones(2)}), tmp_path / "b.pt")).container == "torch-zip"


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_several_pickles_in_one_file_are_not_the_first_alone(protocol: int, tmp_path: Path) -> None:
    first, second = pickle.dumps({"epoch": 1}, protocol), pickle.dumps({"w": np.ones(3)}, protocol)
    file = written(first + second, tmp_path / "a.pkl")
    with pytest.raises(Ambiguous, match=f"{len(second)} bytes after the end") as caught:
        read(file)
    assert "pickle.dump was called several times" in caught.value.why and caught.value.fix.startswith(
        f"Take the first by itself: head -c {len(first)} "
    )
    command = caught.value.fix.partition(": ")[2].replace("first.pkl", str(tmp_path / "first.pkl"))
    subprocess.run(["/bin/sh", "-c", command], check=True)
    assert read(tmp_path / "first.pkl").tree == {"epoch": 1}


def test_row_064_bytes_after_the_end(tmp_path: Path) -> None:
    with pytest.raises(Ambiguous) as caught:
        read(written(pickle.dumps({"a": 1}) + b"hidden", tmp_path / "a.pkl"))
    assert "something may be hidden there" in caught.value.why


def test_row_082_persistent_ids_are_refused_by_name(tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return "there" if isinstance(value, complex) else None

    for protocol in (0, 2):
        buffer = io.BytesIO()
        Pickler(buffer, protocol).dump({"a": 1j})
        with pytest.raises(Unsupported, match=r"by a persistent id \(there\)"):
            read(written(buffer.getvalue(), tmp_path / "a.pkl"))


def test_the_pickle_out_of_a_torch_zip(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(written(torch_bytes({"w": torch.ones(2)}), tmp_path / "a.pt")) as archive:
        data = archive.read("archive/data.pkl")
    with pytest.raises(Unsupported, match=r"the data\.pkl of a torch zip, taken out of it"):
        read(written(data, tmp_path / "data.pkl"))


def test_joblib_is_named(tmp_path: Path) -> None:
    """As joblib writes it: behind the wrapper's opcodes, the raw array."""
    data = (
        b"\x80\x04\x95\x40\0\0\0\0\0\0\0\x8c\x13joblib.numpy_pickle\x94\x8c\x11NumpyArrayWrapper\x94\x93\x94)\x81\x94"
        + bytes(200)
    )
    with pytest.raises(Unsupported, match="was written by joblib"):
        read(written(data, tmp_path / "a.pkl"))


# Arrays as weights ---------------------------------------------------------------------------------------------------


def weights() -> dict[str, np.ndarray[Any, Any]]:
    return {name: given for name, given in model().items() if name.endswith("weight")}


def test_arrays_are_weights_where_there_are_no_others(tmp_path: Path) -> None:
    given = {"model": weights(), "__author__": "me", "matching_heuristics": True}
    file = pickled(given, tmp_path / "a.pkl")
    found = ckptool.inspect(file)
    assert found.listing.tensors == ()
    (note,) = found.notes
    assert note.code == "numpy-weights" and "7 numpy arrays at model" in note.message
    assert note.fix == ("ckptool", "convert", str(file), "-o", str(tmp_path / "a.new.safetensors"))
    for out in ("a.safetensors", "a.npz"):
        done = ckptool.convert(file, tmp_path / out, verify=True)
        assert done.facts == {"tensors": 7, "left_behind": ["__author__", "matching_heuristics"]}
        tree = read(tmp_path / out).tree
        assert all(same(tree[name].numpy(), expected) for name, expected in given["model"].items())
        for left in (file, f"{file}#model"):
            assert ckptool.diff(left, tmp_path / out).same
            assert ckptool.diff(tmp_path / out, left).tensors == 7
    other = pickled({"model": weights() | {"small.weight": np.ones((3, 4), "f4")}}, tmp_path / "b.pkl", 2)
    changed = ckptool.diff(other, tmp_path / "a.npz")
    assert [change.address for change in changed.changed] == ["model/small.weight"[6:]] and changed.equal == 6


def test_ties_of_arrays_are_ties_of_tensors(tmp_path: Path) -> None:
    file = pickled({"model": weights()}, tmp_path / "a.pkl")
    ckptool.convert(file, tmp_path / "a.safetensors")
    tree = read(tmp_path / "a.safetensors").tree
    assert tree["tied.weight"].storage is tree["bytes.weight"].storage


@pytest.mark.parametrize(
    ("tree", "addresses"),
    [
        ({"blobs": {"conv1_w": np.ones(2), "conv1_b": np.ones(1)}, "cfg": "…"}, ["blobs"]),
        ({"w": np.ones(2), "b": np.ones(1)}, [""]),
        ({"model": {"a.w": np.ones(2)}, "ema": {"a.w": np.ones(2)}}, ["model", "ema"]),
        ({"mean": np.ones(3), "std": np.ones(3), "net": {f"l{n}.w": np.ones(2) for n in range(3)}}, ["net"]),
        ({"deep": [{"x": {"w.w": np.ones(2)}}]}, ["deep/0/x"]),
        ({"optimizer": {"a": np.ones(2)}}, []),
        ({"history": [np.ones(2)]}, []),
        ({1: np.ones(2), 2: np.ones(2)}, []),
        ({"a": np.ones(1), "b": 1, "c": 2, "d": 3}, []),
        ({"labels": np.array(["a"]), "rows": np.zeros(1, [("a", "f4")])}, []),
    ],
)
def test_which_dictionaries_of_arrays_are_weights(tree: Any, addresses: list[str], tmp_path: Path) -> None:
    from ckptool.roots import array_roots

    file = pickled(tree, tmp_path / "a.pkl")
    assert [root.address for root in array_roots(read(file).tree)] == addresses
    if not addresses:
        with pytest.raises(CkptoolError, match="no dictionary that looks like model weights"):
            ckptool.convert(file, tmp_path / "a.npz")


def test_tensors_win_over_arrays(tmp_path: Path) -> None:
    file = pickled({"state": {"a.weight": torch.ones(2)}, "stats": {"mean": np.ones(3)}}, tmp_path / "a.pkl")
    assert list(ckptool.convert(file, tmp_path / "a.npz").facts["left_behind"]) == ["stats"]


def test_verbs_on_keys_ask_for_tensors_first(tmp_path: Path) -> None:
    file = pickled({"model": {"module.w": np.ones(2)}}, tmp_path / "a.pkl")
    with pytest.raises(CkptoolError) as caught:
        ckptool.strip_module(file, tmp_path / "b.pt")
    assert caught.value.fix == f"Make tensors of its 1 numpy array: ckptool convert {file} -o weights.safetensors"


def test_large_arrays_are_shown_in_part(tmp_path: Path) -> None:
    file = pickled({"model": weights()}, tmp_path / "a.pkl")
    shown = ckptool.show(file, at="model/large.weight")
    assert shown.edges and shown.entry.shape == (200, 300)
    cut = ckptool.show(file, at="model/large.weight", slice="0,:2")
    assert cut.values.tolist() == weights()["large.weight"][0, :2].tolist()


@pytest.mark.parametrize("verb", ["pickle", "header"])
def test_arrays_that_are_too_large_to_be_pickled_again(verb: str, tmp_path: Path) -> None:
    file = pickled({"model": {"a.w": np.zeros(40 << 20, "u1")}}, tmp_path / "a.pkl")
    with pytest.raises(Unsupported, match="41,943,040 bytes cannot be pickled again") as caught:
        if verb == "pickle":
            ckptool.convert(file, tmp_path / "a.pt")
        else:
            ckptool.convert(file, tmp_path / "a.safetensors", all=True)
    assert "-o OUT.safetensors" in caught.value.fix
    ckptool.convert(file, tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_size > 40 << 20


def test_the_whole_tree_goes_into_safetensors_and_back(tmp_path: Path) -> None:
    file = pickled({"model": model(), "step": 3}, tmp_path / "a.pkl", 5)
    ckptool.convert(file, tmp_path / "a.safetensors", all=True, verify=True)
    ckptool.convert(tmp_path / "a.safetensors", tmp_path / "b.pt", verify=True)
    assert ckptool.diff(file, tmp_path / "b.pt").same


# Hostile -------------------------------------------------------------------------------------------------------------


class Ran:
    """Leaves a trace if it is ever made."""

    traces: list[str] = []  # noqa: RUF012

    def __init__(self, text: str) -> None:
        self.traces.append(text)

    def __reduce__(self) -> Any:
        return Ran, ("it ran",)


@each
def test_nothing_is_run_or_imported(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"a": Ran.__new__(Ran), "w": np.ones(3)}, protocol)
    decoy = "q" * len(Ran.__module__)
    (tmp_path / f"{decoy}.py").write_text("raise SystemExit('it was imported')")
    checkpoint = read(written(data.replace(Ran.__module__.encode(), decoy.encode()), tmp_path / "a.pkl"))
    assert not Ran.traces and decoy not in sys.modules
    (call,) = unknown_calls(checkpoint)
    assert call[0] == "a" and call[1].name == f"{decoy}.Ran"


def stream(value: Any) -> bytes:
    return torch_bytes(value, _use_new_zipfile_serialization=False)


def test_row_083_streams_inside_of_streams_end(tmp_path: Path) -> None:
    """`_load_from_bytes` of a stream that holds `_load_from_bytes` of a stream …"""

    class Nested:
        def __init__(self, data: bytes) -> None:
            self.data = data

        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (self.data,)

    data = stream(torch.arange(3.0).untyped_storage())
    refused = 0
    for _ in range(6):
        file = pickled({"w": Nested(data)}, tmp_path / "a.pkl")
        start = time.perf_counter()
        try:
            read(file)
        except CkptoolError as error:
            assert isinstance(error, (LimitExceeded, Unsupported, Corrupt)), error
            refused += 1
        assert time.perf_counter() - start < 1
        data = stream(Nested(data))
    assert refused >= 2


@pytest.mark.parametrize("kind", ["bytes", "hex", "base64"])
def test_row_083_a_pickle_inside_of_a_value_is_a_value(kind: str, tmp_path: Path) -> None:
    import base64

    inner = pickle.dumps(Ran.__new__(Ran))
    value = {"bytes": inner, "hex": inner.hex(), "base64": base64.b64encode(inner)}[kind]
    checkpoint = read(pickled({"payload": value}, tmp_path / "a.pkl"))
    assert checkpoint.tree == {"payload": value} and not unknown_calls(checkpoint) and not Ran.traces


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


@pytest.mark.parametrize(
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
def test_row_084_odd_arrays_stay_opaque(value: Any, tmp_path: Path) -> None:
    file = pickled({"model": {"a.weight": value}}, tmp_path / "a.pkl")
    start = time.perf_counter()
    node = read(file).tree["model"]["a.weight"]
    assert isinstance(node, Object) and node.state is not MISSING and array_entry(node) is None
    assert not ckptool.inspect(file).listing.tensors
    str(ckptool.inspect(file))
    assert time.perf_counter() - start < 2


def test_row_016_right_magic_wrong_sequel(tmp_path: Path) -> None:
    for data in (b"\x80\x04" + bytes(50), b"\x80\x02}q\x01", b"\x80\x04\x95" + b"\xff" * 8 + b"}.", b"\x80\x02(.ab"):
        with pytest.raises((Corrupt, Truncated)):
            read(written(data, tmp_path / "a.pkl"))


@each
def test_every_truncation_is_named(protocol: int, tmp_path: Path) -> None:
    whole = pickle.dumps({"model": {"a.w": np.arange(3), "t": torch.ones(2)}}, protocol)
    for length in range(8, len(whole), 1 if len(whole) < 500 else 3):
        with pytest.raises((Truncated, Corrupt, NotACheckpoint)):
            read(written(whole[:length], tmp_path / "a.pkl"))


@each
def test_no_flipped_byte_crashes(protocol: int, tmp_path: Path) -> None:
    whole = pickle.dumps({"model": {"a.w": np.arange(3), "t": torch.ones(2)}, "x": [1.5, "a", b"b"]}, protocol)
    rng = random.Random(protocol)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        try:
            str(ckptool.inspect(written(bytes(damaged), tmp_path / "a.pkl")))
        except CkptoolError as error:
            assert error.what


# Memory --------------------------------------------------------------------------------------------------------------


_ARRAY = (  # the opcodes before and behind the data of an array of f4, without a memo
    (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01J%b\x85cnumpy\ndtype\nX\x02\0\0\0f4\x89\x88\x87R"
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


def test_the_sparse_pickle_is_one(tmp_path: Path) -> None:
    found = pickle.loads(sparse_pickle(tmp_path / "a.pkl", 800, 2).read_bytes())["model"]  # written above
    assert [(name, given.shape, given.dtype.name) for name, given in found.items()] == [
        ("layer0.weight", (100,), "float32"),
        ("layer1.weight", (100,), "float32"),
    ]


def peak(program: str) -> int:
    """The most memory, in bytes, that a process took which ran `program`."""
    program = f"""
import resource, sys, ckptool
{program}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""
    # A shell between: a process begins with the peak of the one that it was forked from.
    done = subprocess.run(
        ["/bin/sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(ast.literal_eval(done.stdout))


@pytest.mark.parametrize("nbytes", [200_000_000, pytest.param(2_000_000_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("verb", ["inspect", "convert to safetensors", "convert to npz", "diff"])
def test_a_large_pickle_takes_little_memory(verb: str, nbytes: int, tmp_path: Path) -> None:
    file = sparse_pickle(tmp_path / "a.pkl", nbytes, 20)
    found = peak(
        {
            "inspect": f"ckptool.inspect({str(file)!r})",
            "convert to safetensors": f"ckptool.convert({str(file)!r}, {str(tmp_path / 'a.safetensors')!r})",
            "convert to npz": f"ckptool.convert({str(file)!r}, {str(tmp_path / 'a.npz')!r})",
            "diff": f"assert ckptool.diff({str(file)!r}, {str(file)!r}).same",
        }[verb]
    )
    assert found <= LIMIT, f"{found:,}"


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickles_of_20_mb_take_little_memory(protocol: int, tmp_path: Path) -> None:
    given = {"model": {f"{n}.w": np.full(1_250_000, n, "f4") for n in range(4)}}
    file = pickled(given, tmp_path / "a.pkl", protocol)
    assert peak(f"ckptool.inspect({str(file)!r})") <= LIMIT
    assert peak(f"ckptool.convert({str(file)!r}, {str(tmp_path / 'a.npz')!r})") <= LIMIT
    with np.load(tmp_path / "a.npz") as again:
        assert all(np.array_equal(again[f"{n}.w"], given["model"][f"{n}.w"]) for n in range(4))


@pytest.mark.soak
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickles_of_300_mb_take_little_memory(protocol: int, tmp_path: Path) -> None:
    given = {"model": {f"{n}.w": np.zeros(25_000_000, "f4") for n in range(3)}}
    file = pickled(given, tmp_path / "a.pkl", protocol)
    assert peak(f"ckptool.inspect({str(file)!r})") <= LIMIT
    assert peak(f"ckptool.convert({str(file)!r}, {str(tmp_path / 'a.npz')!r})") <= LIMIT


# Files of other people -----------------------------------------------------------------------------------------------


def test_corpus() -> None:
    if not (file := CORPUS / "skorch__net_cuda.pkl").exists():
        return
    before = set(sys.modules)
    checkpoint = read(file)
    assert checkpoint.container == "pickle" and not list(tensors(checkpoint.tree))
    assert not {module for module in set(sys.modules) - before if not module.startswith("ckptool")}
