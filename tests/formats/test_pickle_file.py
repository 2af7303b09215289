"""`pickle`: bare pickles of every protocol read alike; nothing in them is run, imported or loaded before it is asked
for."""

from __future__ import annotations

import io
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.checkpoint.nodes import MISSING, Object
from ckptool.checkpoint.numpy_arrays import LongValue, array, array_entry, with_tensors
from ckptool.checkpoint.tree import tensors
from ckptool.errors import Corrupt, Truncated, Unsupported
from ckptool.formats import read
from ckptool.pickles.calls import uses_of
from tests.support.files import written
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


# What is a pickle, and what is not -----------------------------------------------------------------------------------


def test_persistent_ids_are_unsupported_by_name(tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return "there" if isinstance(value, complex) else None

    for protocol in (0, 2):
        buffer = io.BytesIO()
        Pickler(buffer, protocol).dump({"a": 1j})
        with pytest.raises(Unsupported, match=r"by a persistent id \(there\)"):
            read(written(buffer.getvalue(), tmp_path / "a.pkl"))


def test_joblib_is_named(tmp_path: Path) -> None:
    """As joblib writes it: behind the wrapper's opcodes, the raw array."""
    data = (
        b"\x80\x04\x95\x40\0\0\0\0\0\0\0\x8c\x13joblib.numpy_pickle\x94\x8c\x11NumpyArrayWrapper\x94\x93\x94)\x81\x94"
    )
    data += bytes(200)
    with pytest.raises(Unsupported, match="was written by joblib"):
        read(written(data, tmp_path / "a.pkl"))


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
