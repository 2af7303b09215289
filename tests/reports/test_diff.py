"""What differs between two trees, aspect by aspect, and on what evidence the rest is the same."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ckptool.analysis.diff import Diff, diff
from ckptool.checkpoint.tree import tensors
from ckptool.errors import Conflict
from ckptool.formats import read
from fixtures.traps import DTYPES, TRAPS, batch_norm_model
from tests.support.files import saved
from tests.support.looped import looped


def compared(left: Any, right: Any, folder: Path, **options: Any) -> Diff:
    return diff(read(saved(left, folder / "left.pt")), read(saved(right, folder / "right.pt")), **options)


def changes(found: Diff) -> dict[str, set[str]]:
    return {change.address: set(change.aspects) for change in found.changed}


# The same ------------------------------------------------------------------------------------------------------------


@looped("name", TRAPS, here=1 / 3)
def test_two_files_of_one_value_are_the_same(name: str, tmp_path: Path) -> None:
    found = compared(TRAPS[name](), TRAPS[name](), tmp_path)
    assert found.same and not (
        found.changed or found.only_left or found.only_right or found.ties or found.order_differs
    )
    rows = sum(1 for _ in tensors(read(tmp_path / "left.pt").tree))
    shared = name == "18-shared-list"  # a container that stands twice is compared once
    assert found.equal == found.tensors and (found.tensors < rows if shared else found.tensors == rows)
    assert found.evidence == "bytes" and found.not_compared == ()


# One aspect at a time ------------------------------------------------------------------------------------------------

W = torch.arange(6.0).reshape(2, 3)
ASPECTS: dict[str, tuple[Any, Any, set[str]]] = {
    "values": (W, W + 1, {"values"}),
    "shape": (W, W.reshape(3, 2), {"shape"}),
    "one element and 0-dim": (torch.ones(1), torch.ones(()), {"shape"}),
    "empty shapes": (torch.ones(0, 4), torch.ones(0), {"shape"}),
    "dtype": (W, W.double(), {"dtype"}),
    "dtype and values": (W, W.half() + 1, {"dtype", "values"}),
    "types of one size": (W.int(), W.int().view(torch.float32), {"dtype", "values"}),
    "strides": (W, W.t().contiguous().t(), {"strides"}),
    "requires_grad": (W, W.clone().requires_grad_(), {"requires_grad"}),
    "a parameter": (W, nn.Parameter(W), {"parameter", "requires_grad"}),
    "a frozen parameter": (W, nn.Parameter(W, requires_grad=False), {"parameter"}),
    "negative zero": (torch.tensor([0.0]), torch.tensor([-0.0]), {"values"}),
    "sparse against dense": (W, W.to_sparse(), {"kind"}),
    "sparse values": (W.to_sparse(), (W * 2).to_sparse(), {"values"}),
    "sparse layouts": (TRAPS["11-sparse-csr"]()["w"], TRAPS["11-sparse-csc"]()["w"], {"values"}),
    "quantized values": (TRAPS["09-qint8-per-tensor"]()["w"], TRAPS["09-quantized-parameter"]()["w"].data, {"values"}),
    "a lazy view": (torch._neg_view(W), W, {"values"}),
    "a plain value": (3, 4, {"value"}),
    "int and float": (3, 3.0, {"value"}),
    "int and bool": (1, True, {"value"}),
    "text and bytes": ("a", b"a", {"value"}),
    "negative zero, plain": (0.0, -0.0, {"value"}),
    "complex": (1 + 0j, complex(1, -0.0), {"value"}),
    "list and tuple": ([1], (1,), {"value"}),
    "tensor and value": (W, 3, {"value"}),
    "numpy scalars": (numpy.float32(1), numpy.float32(2), {"value"}),
    "dtypes": (torch.float32, torch.float64, {"value"}),
    "sizes of sets": ({1}, {1, 2}, {"value"}),
    "a storage": (W.untyped_storage(), (W + 1).untyped_storage(), {"values"}),
}


@looped("name", ASPECTS)
def test_one_difference(name: str, tmp_path: Path) -> None:
    left, right, aspects = ASPECTS[name]
    found = compared({"x": left, "n": 1}, {"x": right, "n": 1}, tmp_path)
    places = changes(found)
    assert not found.same and all(place == "x" or place.startswith("x/") for place in places)
    assert set().union(*places.values()) == aspects
    assert diff(*(read(tmp_path / f"{side}.pt") for side in ("left", "left"))).same


def test_keys(tmp_path: Path) -> None:
    found = compared({"a": W, "b": 1, 0: "int", "d": {"x": 1}}, {"a": W, "c": W, "0": "text", "d": {"y": 1}}, tmp_path)
    assert [path for path, _ in found.only_left] == [("b",), (0,), ("d", "x")]
    assert [path for path, _ in found.only_right] == [("c",), ("0",), ("d", "y")]
    assert found.changed == () and not found.same
    assert not compared({1: "a"}, {True: "a"}, tmp_path).same


@pytest.mark.parametrize("name", ["14-dp-of-compile", "14-compile-of-dp", "12-metadata-below-a-prefix", "12-metadata"])
def test_versions_of_wrapped_modules_are_compared_without_prefixes(name: str, tmp_path: Path) -> None:
    wrapped = TRAPS[name]()
    bare = collections.OrderedDict(zip(batch_norm_model().state_dict(), wrapped.values(), strict=True))
    bare._metadata = batch_norm_model().state_dict()._metadata  # type: ignore[attr-defined]
    assert compared(bare, wrapped, tmp_path, ignore=["prefix"]).same
    bare._metadata["1"] = {"version": 1}  # type: ignore[attr-defined]
    assert not compared(bare, wrapped, tmp_path, ignore=["prefix"]).same


def test_names_that_are_equal_without_prefixes_are_a_conflict(tmp_path: Path) -> None:
    for left in ({"a": W, "module.a": W + 1}, {"module.a": W + 1, "a": W}):
        with pytest.raises(Conflict, match="are both 'a'"):
            compared(left, {"a": W}, tmp_path, ignore=["prefix"])


# Values --------------------------------------------------------------------------------------------------------------


@looped("name", [name for name in DTYPES if name != "float4_e2m1fn_x2"])
def test_one_bit_differs_in_every_dtype(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(48, dtype=torch.uint8) % 2 if dtype is torch.bool else torch.arange(48, dtype=torch.uint8)
    other = raw.clone()
    other[-16] ^= 1
    found = compared({"w": raw.view(dtype)}, {"w": other.view(dtype)}, tmp_path)
    (change,) = found.changed
    assert set(change.aspects) == {"values"} and change.values is not None
    assert (change.values.changed, change.values.total) == (1, raw.view(dtype).numel())
    quiet = compared({"w": raw.view(dtype)}, {"w": other.view(dtype)}, tmp_path, statistics=False)
    assert not quiet.same and quiet.changed[0].values is None
