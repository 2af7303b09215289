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
from ckptool import bridge
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import Global, Object
from ckptool.errors import BadTensor, Conflict, Corrupt, UnsafeObject
from ckptool.formats import read, torch_zip
from ckptool.pickles.calls import uses_of
from ckptool.pickles.torch_objects import rebuilt
from tests.support.files import saved

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


def built(tree: Any) -> Any:
    return bridge.build(Checkpoint(tree, "test"))


def layout(name: str) -> Object:
    return Object(Global("torch.serialization", "_get_layout"), (f"torch.{name}",))


def test_sparse_indices_that_point_outside_are_refused() -> None:
    tensor = composite("_rebuild_sparse_tensor", layout("sparse_coo"), (matrix([[0, 99]]), entry([1, 2]), (4,)))
    with pytest.raises(Corrupt, match="torch cannot create"):
        built(tensor)
    tensor = composite("_rebuild_sparse_tensor", layout("sparse_csr"), (entry([0, 1]), entry([99]), entry([1]), (1, 2)))
    with pytest.raises(Corrupt, match="torch cannot create"):
        built(tensor)


def test_nested_parts_that_lie_outside_are_refused() -> None:
    for size, stride, offset in (
        ([[9]], [[1]], [0]),
        ([[2]], [[1 << 60]], [0]),
        ([[1]], [[1]], [4]),
        ([[-1]], [[1]], [0]),
    ):
        tensor = composite(
            "_rebuild_nested_tensor", entry([1, 2, 3], "f32"), matrix(size), matrix(stride), entry(offset)
        )
        with pytest.raises(BadTensor):
            built(tensor)


def test_views_that_lie_outside_are_refused() -> None:
    with pytest.raises(BadTensor):
        built(TensorEntry(Storage(InlineBytes(bytes(8))), by_name("f32"), (3,), (1,)))


def test_attributes_that_would_change_the_class_are_refused() -> None:
    inner = entry([1])
    args = (inner.storage, 0, (1,), (1,), False, {})
    func = Global("torch._utils", "_rebuild_tensor_v2")
    call = (StorageRef(inner.storage, by_name("i64")), *args[1:])
    for state in ({"__class__": Global("torch.nn.parameter", "Parameter")}, (None, {"__dict__": {}})):
        made = Object(Global("torch._tensor", "_rebuild_from_type_v2"), (func, Global("torch", "Tensor"), call, state))
        with pytest.raises(Corrupt, match="attributes"):
            built(rebuilt(made))


def test_a_rebuild_call_of_anything_else_is_refused() -> None:
    call = Object(
        Global("torch._tensor", "_rebuild_from_type_v2"),
        (Global("os", "system"), Global("torch", "Tensor"), ("true",), None),
    )
    with pytest.raises(UnsafeObject):
        built([call])
    with pytest.raises(UnsafeObject, match=r"os\.system"):
        built([Object(Global("collections", "defaultdict"), (Global("os", "system"),))])
    with pytest.raises(UnsafeObject, match=r"os\.system"):
        built({"f": Global("os", "system")})


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
        bridge.build(checkpoint)


def test_numpy_arrays_whose_sizes_disagree_are_refused() -> None:
    kind = Object(Global("numpy", "dtype"), ("f8", False, True))
    kind.state = (3, "<", None, None, None, -1, -1, 0)
    array = Object(Global("numpy.core.multiarray", "_reconstruct"), (Global("numpy", "ndarray"), (0,), b"b"))
    array.state = (1, (1 << 40,), kind, False, bytes(8))
    with pytest.raises(Corrupt, match="8 bytes"):
        built({"a": array})


def test_keys_that_become_the_same_are_refused() -> None:
    kind = Object(Global("numpy", "dtype"), ("i8", False, True))
    one = Object(Global("numpy.core.multiarray", "scalar"), (kind, (1).to_bytes(8, "little")))
    with pytest.raises(Conflict):
        built({1: "a", one: "b"})
    with pytest.raises(Corrupt):
        built({(1, Object(Global("argparse", "Namespace"), (), "new")): "b"})


def test_of_a_whole_model_the_weights_are_offered(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3), tmp_path / "model.pt")
    with pytest.raises(UnsafeObject) as refused:
        ckptool.load(tmp_path / "model.pt")
    assert f"Take its weights: ckptool convert {tmp_path / 'model.pt'} -o OUT.safetensors" in refused.value.fix
