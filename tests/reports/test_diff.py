"""What differs between two trees, aspect by aspect, and on what evidence the rest is the same."""

from __future__ import annotations

import collections
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ckptool
from ckptool.analysis.diff import IGNORABLE, Diff, diff
from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.tree import tensors
from ckptool.errors import Conflict, UsageError
from ckptool.formats import read
from ckptool.transforms.locations import remap
from fixtures.make import PRODUCERS, make
from fixtures.traps import DTYPES, TRAPS, batch_norm_model
from tests.support.files import load, opened, saved, weights
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


@looped("name", [name for name in PRODUCERS if "legacy" not in name])
def test_a_fixture_is_the_same_as_itself(name: str, tmp_path: Path) -> None:
    path = make(name, tmp_path)
    other = tmp_path / f"copy-{name}"
    other.write_bytes(path.read_bytes())
    for options in ({}, {"statistics": False}, {"ignore": IGNORABLE}):
        found = diff(read(path), read(other), **options)
        assert found.same and found.equal == found.tensors


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


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.ones(1, 3, 1), torch.ones(3).as_strided((1, 3, 1), (7, 1, 9))),  # strides of single elements
        (torch.ones(0, 4), torch.ones(4, 0).t()),
        (W, torch.cat([W, W])[:2]),  # what lies around it in the storage
        (W, torch.cat([W, W])[2:]),
        (collections.OrderedDict(a=W), {"a": W}),
        (math.nan, -math.nan),
        ({1, 2, 3}, {3, 2, 1}),
        (numpy.float64(1.5), numpy.float64(1.5)),
    ],
)
def test_what_is_no_difference(left: Any, right: Any, tmp_path: Path) -> None:
    assert compared({"x": left}, {"x": right}, tmp_path).same


def test_keys(tmp_path: Path) -> None:
    found = compared({"a": W, "b": 1, 0: "int", "d": {"x": 1}}, {"a": W, "c": W, "0": "text", "d": {"y": 1}}, tmp_path)
    assert [path for path, _ in found.only_left] == [("b",), (0,), ("d", "x")]
    assert [path for path, _ in found.only_right] == [("c",), ("0",), ("d", "y")]
    assert found.changed == () and not found.same
    assert not compared({1: "a"}, {True: "a"}, tmp_path).same


def test_lists_by_their_places(tmp_path: Path) -> None:
    found = compared({"l": [1, [2, W]]}, {"l": [1, [3, W + 1], 4]}, tmp_path)
    assert changes(found) == {"l/1/0": {"value"}, "l/1/1": {"values"}}
    assert [path for path, _ in found.only_right] == [("l", 2)]


def test_another_order_of_keys_is_a_difference(tmp_path: Path) -> None:
    left, right = {"m": {"a": W, "b": 1, "c": 2}}, {"m": {"b": 1, "a": W, "c": 2}}
    found = compared(left, right, tmp_path)
    assert (found.same, found.order_differs, found.changed) == (False, ("m",), ())
    assert compared(left, right, tmp_path, ignore=["order"]).same
    missing = compared({"a": 1, "b": 1, "c": 1}, {"a": 1, "c": 1}, tmp_path)
    assert missing.order_differs == ()  # those that are in both


def test_devices(tmp_path: Path) -> None:
    value = {"w": W, "s": W.to_sparse(), "u": (W + 1).untyped_storage()}
    checkpoint = opened(value, tmp_path)
    moved = remap(checkpoint, "cuda:1").checkpoint
    assert changes(diff(checkpoint, moved)) == {name: {"device"} for name in value}
    assert diff(checkpoint, moved, ignore=["device"]).same


def test_another_metadata_is_a_difference(tmp_path: Path) -> None:
    new, old = TRAPS["12-metadata"](), TRAPS["12-metadata"]()
    old._metadata["1"]["version"] = 1
    found = compared({"m": new}, {"m": old}, tmp_path)
    assert changes(found) == {"m/_metadata/1/version": {"value"}}
    missing = compared({"m": new}, {"m": dict(new)}, tmp_path)
    assert [path for path, _ in missing.only_left] == [("m", "_metadata")]
    for right in (old, dict(new)):
        assert compared({"m": new}, {"m": right}, tmp_path, ignore=["metadata"]).same
    assert not compared({"_metadata": 1}, {"_metadata": 2}, tmp_path, ignore=["metadata"]).same  # a key of that name


def test_ties_on_one_side_only_are_a_difference(tmp_path: Path) -> None:
    w = torch.ones(3)
    tied, loose = {"a": w, "b": w, "c": w + 1}, {"a": w, "b": w.clone(), "c": w + 1}
    found = compared(tied, loose, tmp_path)
    assert (found.same, found.ties, found.changed) == (False, (("left", ("a", "b")),), ())
    assert compared(loose, tied, tmp_path).ties == (("right", ("a", "b")),)
    assert compared(tied, loose, tmp_path, ignore=["ties"]).same
    assert compared({**tied, "z": w}, tied, tmp_path).ties == ()  # among the names that both have
    prefixed = {f"module.{key}": value for key, value in loose.items()}
    assert compared(tied, prefixed, tmp_path, ignore=["prefix"]).ties == (("left", ("a", "b")),)


def test_prefixes_can_be_ignored(tmp_path: Path) -> None:
    bare = {"model": weights("a.w", "b.w")}
    for names in (("module.a.w", "module.b.w"), ("_orig_mod.a.w", "_orig_mod.b.w"), ("a._orig_mod.w", "b.w")):
        wrapped = {"model": dict(zip(names, bare["model"].values(), strict=True))}
        assert not compared(bare, wrapped, tmp_path).same
        assert compared(bare, wrapped, tmp_path, ignore=["prefix"]).same
        assert compared(wrapped, bare, tmp_path, ignore=["prefix"]).same


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


def test_requires_grad_and_strides_can_be_ignored(tmp_path: Path) -> None:
    left, right = {"a": W, "b": W.clone()}, {"a": nn.Parameter(W), "b": W.t().contiguous().t()}
    assert changes(compared(left, right, tmp_path)) == {"a": {"parameter", "requires_grad"}, "b": {"strides"}}
    assert compared(left, right, tmp_path, ignore=["strides", "requires_grad"]).same


def test_dtypes_can_be_ignored(tmp_path: Path) -> None:
    exact, lossy = torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.1])
    assert compared({"w": exact}, {"w": exact.bfloat16()}, tmp_path, ignore=["dtype"]).same
    found = compared({"w": lossy}, {"w": lossy.bfloat16()}, tmp_path, ignore=["dtype"])
    assert changes(found) == {"w": {"values"}} and found.changed[0].values.changed == 1
    assert compared({"w": lossy}, {"w": lossy.bfloat16()}, tmp_path, ignore=["dtype"], rtol=0.01).same


def test_nothing_else_can_be_ignored() -> None:
    empty = Checkpoint({}, "live")
    for word in ("devices", "", "values"):
        with pytest.raises(UsageError, match="unknown kind of difference") as caught:
            diff(empty, empty, ignore=[word])
        assert "device, dtype, order, prefix" in caught.value.why


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


def test_nan_is_the_same_as_itself(tmp_path: Path) -> None:
    value = {"w": torch.tensor([math.nan, 1.0]), "z": torch.tensor([complex(math.nan, 1)]), "x": math.nan}
    assert compared(value, value, tmp_path).same
    other = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    # Another payload: other bytes.
    assert changes(compared(value, {**value, "w": other}, tmp_path)) == {"w": {"values"}}


def test_tolerances(tmp_path: Path) -> None:
    left, right = {"w": torch.tensor([1.0, 100.0]), "n": 1.0}, {"w": torch.tensor([1.05, 101.0]), "n": 1.0}
    assert not compared(left, right, tmp_path).same
    assert not compared(left, right, tmp_path, atol=0.1).same
    for tolerance in ({"atol": 1.5}, {"rtol": 0.06}, {"atol": 0.1, "rtol": 0.01}):
        found = compared(left, right, tmp_path, **tolerance)
        assert found.same and found.equal == 1
    assert compared({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])}, tmp_path, atol=1e-9).same


# Evidence ------------------------------------------------------------------------------------------------------------


def test_a_file_against_a_part_of_itself_reads_nothing(tmp_path: Path) -> None:
    path = saved({"model": {"a.w": torch.ones(3)}}, tmp_path / "a.pt")
    checkpoint = read(path)
    Path(path).unlink()
    assert diff(checkpoint, dataclasses.replace(checkpoint, tree=dict(checkpoint.tree))).same


# Across containers ---------------------------------------------------------------------------------------------------


def test_safetensors_against_torch(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    path = saved(model.state_dict(), tmp_path / "a.pt")
    ckptool.convert(path, tmp_path / "a.safetensors")
    found = diff(read(path), read(tmp_path / "a.safetensors"))
    assert found.same and found.not_compared == ("order", "ties", "device", "strides", "requires_grad", "metadata")
    fewer = diff(read(path), read(tmp_path / "a.safetensors"), ignore=["device", "order"])
    assert fewer.not_compared == ("ties", "strides", "requires_grad", "metadata") and fewer.ignored == (
        "device",
        "order",
    )
    state = load(path)
    state["0.bias"] = state["0.bias"] + 1
    assert changes(diff(read(saved(state, tmp_path / "b.pt")), read(tmp_path / "a.safetensors"))) == {
        "0.bias": {"values"}
    }


def test_what_safetensors_cannot_say_is_not_held_against_it(tmp_path: Path) -> None:
    w = torch.arange(6.0).reshape(2, 3)
    state = collections.OrderedDict({"b": nn.Parameter(w), "a": w.t(), "c": w})
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    path = saved(state, tmp_path / "a.pt")
    ckptool.remap(path, tmp_path / "cuda.pt", to="cuda:0")
    ckptool.convert(tmp_path / "cuda.pt", tmp_path / "a.safetensors")
    assert diff(read(path), read(tmp_path / "a.safetensors")).same


def test_names_are_told_apart_by_type(tmp_path: Path) -> None:
    found = compared({"x": {1: W}}, {"x": {"1": W}}, tmp_path)
    assert len(found.only_left) == len(found.only_right) == 1


def test_objects(tmp_path: Path) -> None:
    from fixtures.traps import Plain, Settings

    left = {"args": Plain(lr=0.1, w=W), "s": Settings(a=1)}
    right = {"args": Plain(lr=0.2, w=W + 1), "s": Settings(a=1, b=2)}
    found = compared(left, right, tmp_path)
    assert changes(found) == {"args/lr": {"value"}, "args/w": {"values"}}
    assert [path for path, _ in found.only_right] == [("s", "b")]
    assert not compared({"args": Plain(lr=0.1)}, {"args": Settings(lr=0.1)}, tmp_path).same
    assert compared(left, left, tmp_path).same


def test_cycles_end(tmp_path: Path) -> None:
    assert compared(TRAPS["18-cyclic-dict"](), TRAPS["18-cyclic-dict"](), tmp_path).same
    assert not compared(TRAPS["18-cyclic-list"](), {"ring": [W, [W]]}, tmp_path).same
