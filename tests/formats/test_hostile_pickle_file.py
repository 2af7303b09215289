"""Bare pickles that nobody should send: nothing runs, whatever does not fit stays opaque, and every cut is named."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.checkpoint.nodes import MISSING, Object
from ckptool.checkpoint.numpy_arrays import array_entry
from ckptool.errors import CkptoolError, Corrupt, LimitExceeded, Truncated, Unsupported
from ckptool.formats import read
from ckptool.pickles.calls import uses_of
from tests.support.files import torch_bytes, written
from tests.support.looped import looped
from tests.support.npz_files import each, pickle_to
from tests.support.processes import soon


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


def stream(value: Any) -> bytes:
    return torch_bytes(value, _use_new_zipfile_serialization=False)


def test_streams_nested_in_streams_are_refused_beyond_a_depth(tmp_path: Path) -> None:
    """`_load_from_bytes` of a stream that holds `_load_from_bytes` of a stream …"""

    class Nested:
        def __init__(self, data: bytes) -> None:
            self.data = data

        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (self.data,)

    data = stream(torch.arange(3.0).untyped_storage())
    refused = 0
    for _ in range(6):
        file = pickle_to({"w": Nested(data)}, tmp_path / "a.pkl")
        with soon(1):
            try:
                read(file)
            except CkptoolError as error:
                assert isinstance(error, (LimitExceeded, Unsupported, Corrupt)), error
                refused += 1
        data = stream(Nested(data))
    assert refused >= 2


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
