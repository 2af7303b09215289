"""Trees that nobody should send to torch: views, indices and calls that do not fit are refused before torch sees
them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from numpy.random._pickle import __bit_generator_ctor as bit_generator_ctor
from numpy.random._pickle import __generator_ctor as generator_ctor

import ckptool
from ckptool.bridge.to_live import build
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import MISSING, Global, Object, OrderedDict
from ckptool.errors import BadTensor, CkptoolError, Conflict, Corrupt, UnsafeObject
from ckptool.formats import read, torch_zip
from ckptool.pickles.calls import uses_of
from ckptool.pickles.torch_objects import rebuilt
from tests.support.files import saved
from tests.support.looped import looped

# Torch warns of features in beta and going away; the library adds none.
pytestmark = pytest.mark.filterwarnings("ignore")


def entry(values: list[int], dtype: str = "i64") -> TensorEntry:
    raw = numpy.array(values, by_name(dtype).to_numpy()).tobytes()
    return TensorEntry(Storage(InlineBytes(raw)), by_name(dtype), (len(values),), (1,))


def matrix(values: list[list[int]]) -> TensorEntry:
    flat = entry([value for row in values for value in row])
    return replace(flat, shape=(len(values), len(values[0])), stride=(len(values[0]), 1))


def composite(name: str, *args: Any) -> Any:
    return rebuilt(Object(Global("torch._utils", name), args))


def call(module: str, name: str, *args: Any, state: Any = MISSING) -> Object:
    made = Object(Global(module, name), args)
    made.state = state
    return made


def from_type(function: Global, args: Any, state: Any) -> Object:
    return call("torch._tensor", "_rebuild_from_type_v2", function, Global("torch", "Tensor"), args, state)


def layout(name: str) -> Object:
    return call("torch.serialization", "_get_layout", f"torch.{name}")


def numpy_type(code: str, *state: Any) -> Object:
    return call("numpy", "dtype", code, False, True, state=state or MISSING)


SYSTEM = Global("os", "system")
INNER = StorageRef(entry([1]).storage, by_name("i64")), 0, (1,), (1,), False, {}
TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
ARRAY = ("numpy.core.multiarray", "_reconstruct", Global("numpy", "ndarray"), (0,), b"b")
NESTED = [([[9]], [[1]], [0]), ([[2]], [[1 << 60]], [0]), ([[1]], [[1]], [4]), ([[-1]], [[1]], [0])]
# What a tree has in it, and how it is refused.
HOSTILE: list[tuple[Any, type[CkptoolError], str]] = [
    (composite("_rebuild_sparse_tensor", layout("sparse_coo"), (matrix([[0, 99]]), entry([1, 2]), (4,))),
     Corrupt, "torch cannot create"),
    (composite("_rebuild_sparse_tensor", layout("sparse_csr"), (entry([0, 1]), entry([99]), entry([1]), (1, 2))),
     Corrupt, "torch cannot create"),
    *((composite("_rebuild_nested_tensor", entry([1, 2, 3], "f32"), matrix(size), matrix(step), entry(offset)),
       BadTensor, "nested tensor") for size, step, offset in NESTED),
    (TensorEntry(Storage(InlineBytes(bytes(8))), by_name("f32"), (3,), (1,)), BadTensor, ""),
    (composite("_rebuild_qtensor", StorageRef(Storage(InlineBytes(bytes(8))), by_name("qu4x2")), 0, (17,), (1,),
               (Global("torch", "per_tensor_affine"), 1.0, 0), False, OrderedDict()), BadTensor, "quantized tensor"),
    (rebuilt(from_type(TENSOR, INNER, {"__class__": Global("torch.nn.parameter", "Parameter")})),
     Corrupt, "attribute names"),
    (rebuilt(from_type(TENSOR, INNER, (None, {"__dict__": {}}))), Corrupt, "attribute names"),
    (from_type(SYSTEM, ("true",), None), UnsafeObject, ""),
    (call("collections", "defaultdict", SYSTEM), UnsafeObject, r"os\.system"),
    (SYSTEM, UnsafeObject, r"os\.system"),
    (call(*ARRAY, state=(1, (1 << 40,), numpy_type("f8", 3, "<", None, None, None, -1, -1, 0), False, bytes(8))),
     UnsafeObject, "other data than its type and shape take"),
    ({1: "a", call("numpy.core.multiarray", "scalar", numpy_type("i8"), (1).to_bytes(8, "little")): "b"}, Conflict, ""),
    ({(1, Object(Global("argparse", "Namespace"), (), "new")): "b"}, Corrupt, "not hashable"),
]  # fmt: skip


@looped("number", range(len(HOSTILE)))
def test_what_does_not_fit_is_refused_before_torch_sees_it(number: int) -> None:
    tree, error, words = HOSTILE[number]
    with pytest.raises(error, match=words):
        build(Checkpoint({"x": tree}, "test"))


class CanBeCalled:
    """An object of an unknown class, made without a call, that could be called."""

    def __init__(self, x: str) -> None:
        self.x = x


class CallsWhatItIsGiven:
    """Pickled as the call of a known function, which calls an unknown one."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "call",
    [
        (torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, ("true",), None),
        (generator_ctor, "true", os.system),
        (torch._tensor._rebuild_from_type_v2, generator_ctor, torch.Tensor, ("true", os.system), None),
        (bit_generator_ctor, subprocess.Popen),
        (generator_ctor, "true", CanBeCalled("true")),
    ],
    ids=["from-type", "generator", "both", "bit-generator", "callable-object"],
)
def test_a_known_function_that_calls_an_unknown_one_is_unknown(call: Any, tmp_path: Path) -> None:
    checkpoint = read(saved({"x": CallsWhatItIsGiven(*call)}, tmp_path / "x.pt"))
    assert {place.partition("/")[0] for _, place in uses_of(checkpoint)} == {"x"}
    with pytest.raises(UnsafeObject):
        torch_zip.write(checkpoint)
    with pytest.raises(UnsafeObject):
        build(checkpoint)


@pytest.mark.parametrize(
    ("tree", "offer"),
    [
        (torch.nn.Linear(2, 3), "Take its weights: ckptool convert m.pt -o OUT.safetensors"),
        ({"hyp": {"lr": 1}, "net": torch.nn.Linear(2, 3)}, "Take its weights: ckptool convert 'm.pt#net' -o"),
        ({"kwargs": {"n": 1}, "state": {"w.w": torch.ones(2)}, "klass": CanBeCalled}, "ckptool.load('m.pt#state')"),
        ({"kwargs": {"n": 1}, "klass": CanBeCalled}, "ckptool.load('m.pt#kwargs')"),
    ],
)
def test_the_weights_are_offered(tree: Any, offer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsafeObject) as refused:
        ckptool.load(saved(tree, Path("m.pt")))
    assert offer in refused.value.fix
