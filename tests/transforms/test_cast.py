"""Model weights in another floating type; the bits of each cast are tested in test_dtypes."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptool.checkpoint.dtypes import by_name
from ckptool.conventions.state_dicts import model_state_dicts
from ckptool.errors import Conflict, NoMatch, UsageError
from ckptool.formats import read, torch_zip
from ckptool.transforms.cast import Cast, cast_roots, parse_dtype
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.support.errors import three_parts
from tests.support.files import carry_out, load, opened
from tests.support.looped import looped
from tests.support.same import assert_same_objects, assert_same_tree

FLOATS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2".split()


def casted(checkpoint: Any, target: str, only: Sequence[str] = (), exclude: Sequence[str] = ()) -> Cast:
    return cast_roots(checkpoint, model_state_dicts(checkpoint), by_name(target), only, exclude)


def assert_same_numbers(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits, but for NaN: torch's own payloads differ between the vectorised part of a tensor and its end."""
    numbers = ~wanted.double().isnan()
    assert torch.equal(numbers, ~found.double().isnan())
    zero = torch.zeros((), dtype=wanted.dtype)
    assert bits(torch.where(numbers, found, zero)) == bits(torch.where(numbers, wanted, zero))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", ["bf16", "f16", "f32", "f8_e4m3fn"])
def test_the_bits_of_torch(source: str, target: str, tmp_path: Path) -> None:
    values = torch.cat(
        [torch.randn(200) * 10.0 ** torch.randint(-6, 6, (200,)), torch.tensor([0.0, -0.0, float("inf"), float("nan")])]
    )
    state = {"w": values.to(getattr(torch, source)), "t": values[:200].reshape(10, 20).to(getattr(torch, source)).t()}
    done = casted(opened(state, tmp_path), target)
    out = load(carry_out(torch_zip.write(done.checkpoint), tmp_path / "out.pt"))
    wanted = getattr(torch, by_name(target).torch)
    for key, tensor in state.items():
        assert out[key].dtype is wanted and out[key].stride() == tensor.stride()
        assert_same_numbers(out[key], tensor.to(wanted))


@pytest.mark.parametrize("name", ["training.pt", "training_sgd.pt", "gan.pt", "lightning.ckpt"])
def test_only_the_floats_of_model_roots(name: str, tmp_path: Path) -> None:
    path = make(name, tmp_path)
    checkpoint = read(path)
    roots = {str(root.path[0]) for root in model_state_dicts(checkpoint)}
    out = load(carry_out(torch_zip.write(casted(checkpoint, "bf16").checkpoint), tmp_path / "out.pt"))
    expected = load(path)
    for key in roots:
        for entry, tensor in expected[key].items():
            expected[key][entry] = tensor.bfloat16() if tensor.is_floating_point() else tensor
    assert_same_objects(expected, out)  # `step`, `lr`, counters, random states: bit for bit


def test_ties_stay_ties(tmp_path: Path) -> None:
    done = casted(opened(TRAPS["01-full-tie-of-parameters"](), tmp_path), "bf16")
    a, b = done.checkpoint.tree.values()
    assert a.storage is b.storage and a.dtype.name == "bf16" and (done.tensors, len(done.tallies)) == (2, 1)


@pytest.mark.parametrize(
    "name",
    ["02-partial-overlap", "03-disjoint-views", "04-two-shapes", "05-transposed-tie", "06-expanded", "06-column-slice"],
)
def test_views_of_one_storage_stay_views(name: str, tmp_path: Path) -> None:
    checkpoint = opened(TRAPS[name](), tmp_path)
    tree = casted(checkpoint, "f64").checkpoint.tree
    for key, old in checkpoint.tree.items():
        assert (tree[key].shape, tree[key].stride, tree[key].offset) == (old.shape, old.stride, old.offset)
        assert_same_numbers(tree[key].torch(), old.torch().double())
    assert len({id(entry.storage) for entry in tree.values()}) == len(
        {id(entry.storage) for entry in checkpoint.tree.values()}
    )


def test_the_model_and_its_tied_average_together(tmp_path: Path) -> None:
    done = casted(opened({"model": (w := {"a.w": torch.ones(2)}), "ema": dict(w)}, tmp_path), "f16")
    assert done.checkpoint.tree["model"]["a.w"].storage is done.checkpoint.tree["ema"]["a.w"].storage


def test_one_storage_of_two_types_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Conflict) as caught:
        casted(
            opened({"a.w": (x := torch.zeros(8, dtype=torch.uint16)), "b.w": x.view(torch.float8_e5m2)}, tmp_path),
            "f32",
        )
    assert "shares its storage with a.w, which is not cast" in three_parts(caught.value)[1]
    two = {"a.w": (x := torch.zeros(8, dtype=torch.float8_e4m3fn)), "b.w": x.view(torch.float8_e5m2)}
    with pytest.raises(Conflict, match="seen as two types"):
        casted(opened(two, tmp_path), "f32")


@pytest.mark.parametrize("exclude", [["b.w"], ["re:b"]])
def test_a_storage_that_is_cast_in_part_is_refused(exclude: list[str], tmp_path: Path) -> None:
    w = torch.ones(3)
    with pytest.raises(Conflict, match=r"a\.w shares its storage with b\.w, which is not cast") as caught:
        casted(opened({"a.w": w, "b.w": w}, tmp_path), "f16", exclude=exclude)
    assert "--exclude" in caught.value.fix
    optimizer = {"state": {0: {"exp_avg": w, "exp_avg_sq": w}}, "param_groups": []}
    with pytest.raises(Conflict, match="optimizer/state/0/exp_avg, which is not cast"):
        casted(opened({"model": {"a.w": w}, "optimizer": optimizer}, tmp_path), "f16")


def test_only_and_exclude(tmp_path: Path) -> None:
    state = {"a.w": torch.ones(1), "a.norm": torch.ones(1), "b.w": torch.ones(1), "n": torch.tensor(1)}
    checkpoint = opened(state, tmp_path)

    def names(done: Any) -> list[str]:
        return [key for key, entry in done.checkpoint.tree.items() if entry.dtype.name == "bf16"]

    assert names(casted(checkpoint, "bf16", exclude=["*.norm"])) == ["a.w", "b.w"]
    assert names(casted(checkpoint, "bf16", only=["a.*"], exclude=["*norm"])) == ["a.w"]
    for options in ({"only": ["c.*"]}, {"exclude": ["c.*"]}):
        with pytest.raises(NoMatch, match=r"'c\.\*' matches no key"):
            casted(checkpoint, "bf16", **options)


UNTOUCHED = (
    "int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex32 complex64 complex128 bits8 float4_e2m1fn_x2"
).split()


@looped("name", UNTOUCHED)
def test_other_dtypes_are_not_cast(name: str, tmp_path: Path) -> None:
    checkpoint = opened(TRAPS[f"09-{name}"](), tmp_path)
    done = casted(checkpoint, "bf16")
    assert (done.tensors, done.tallies, done.skipped) == (0, (), ())
    assert_same_tree(checkpoint, done.checkpoint)


@pytest.mark.parametrize(
    "name", ["09-qint8-per-tensor", "11-sparse-coo", "11-nested", "11-subclass", "11-parameter-with-attributes"]
)
def test_composites_are_not_cast_and_are_named(name: str, tmp_path: Path) -> None:
    checkpoint = opened(TRAPS[name](), tmp_path)
    done = casted(checkpoint, "bf16")
    assert [place for place, _ in done.skipped] == ["w"] and done.tensors == 0
    assert_same_tree(checkpoint, done.checkpoint)


def test_parameters_metadata_devices_and_order_stay(tmp_path: Path) -> None:
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict(keep_vars=True)
    tree = casted(opened(state, tmp_path), "f16").checkpoint.tree
    assert list(tree) == list(state) and tree.metadata == state._metadata
    assert tree["0.weight"].flags.parameter and tree["0.weight"].flags.requires_grad
    assert tree["1.num_batches_tracked"].dtype.name == "i64"
    cuda = casted(read(make("cuda.pt", tmp_path)), "f16").checkpoint.tree
    assert {entry.location for entry in cuda.values()} == {"cuda:0"}


def test_the_tally(tmp_path: Path) -> None:
    state = {"exact": torch.tensor([1.0, 2.0]), "w": torch.tensor([1.0, 1e6, 1e-12, float("inf")]), "tied": None}
    state["tied"] = state["w"]
    done = casted(opened(state, tmp_path), "f16")
    assert (done.tensors, done.bytes_before, done.bytes_after) == (3, 24, 12)
    carry_out(torch_zip.write(done.checkpoint), tmp_path / "out.pt")
    tallies = {name: tally for name, _, tally in done.tallies}
    assert list(tallies) == ["exact", "w"]
    assert (tallies["exact"].elements, tallies["exact"].changed) == (2, 0)
    found = tallies["w"]
    assert (found.elements, found.changed, found.overflowed, found.underflowed) == (4, 2, 1, 1)


def test_what_has_the_type_already_is_left_alone(tmp_path: Path) -> None:
    state = collections.OrderedDict({"a.w": torch.ones(2).half(), "b.w": torch.ones(2)})
    done = casted(opened(state, tmp_path), "f16")
    assert done.tensors == 1 and [name for name, _, _ in done.tallies] == ["b.w"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bf16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("float16", "f16"),
        ("half", "f16"),
        ("fp32", "f32"),
        ("float8_e4m3fn", "f8_e4m3fn"),
    ],
)
def test_names_of_types(text: str, name: str) -> None:
    assert parse_dtype(text).name == name


@pytest.mark.parametrize(
    "text", ["int8", "bool", "complex64", "qint8", "", "float99", "bits8", "f4_e2m1fn_x2", "x\x1b[m"]
)
def test_no_floating_type(text: str) -> None:
    with pytest.raises(UsageError, match="is not a floating-point dtype") as caught:
        parse_dtype(text)
    assert "\x1b" not in str(caught.value) and "bf16" in caught.value.fix
