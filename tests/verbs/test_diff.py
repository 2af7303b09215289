"""`diff`: what is compared with what, aspect by aspect, and on what evidence the rest is the same."""

from __future__ import annotations

import collections
import datetime
import gc
import itertools
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ckptool
from ckptool.analysis.diff import Diff, diff, diff_of_parts
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.paths import matcher
from ckptool.checkpoint.tree import address, tensors, walk
from ckptool.errors import Conflict, UsageError
from ckptool.formats import read
from fixtures.make import make
from fixtures.traps import DTYPES, TRAPS, batch_norm_model
from tests.support.cli import Run
from tests.support.errors import refused
from tests.support.files import saved, weights
from tests.support.looped import looped
from tests.support.zip_mutants import rezipped_mutant, without_checksums


def test_parts(tmp_path: Path) -> None:
    file = saved({"G": weights("a.w", "b.w"), "D": weights("a.w", "b.w"), "epoch": 1}, tmp_path / "in.pt")
    assert ckptool.diff(f"{file}#G", f"{file}#D").same
    bare = saved(weights("a.w", "b.w"), tmp_path / "bare.pt")
    assert ckptool.diff(f"{file}#D", bare).same and ckptool.diff(bare, f"{file}#G").same
    refused(UsageError, tmp_path, lambda: ckptool.diff(file, bare), "2 sets of model weights")
    one = saved({"net": weights("a.w", "b.w"), "epoch": 3}, tmp_path / "one.pt")
    found = ckptool.diff(f"{file}#D", one)
    assert found.same and found.remarks == (f"compared net of {one}",)
    assert ckptool.diff(one, f"{file}#D").same
    assert not ckptool.diff(f"{file}#epoch", f"{one}#epoch").same
    apart = ckptool.diff(f"{file}#G", f"{file}#epoch")
    assert (apart.left, apart.right, apart.same) == (f"{file}#G", f"{file}#epoch", False)


def test_options(tmp_path: Path) -> None:
    a = saved({"a.w": torch.tensor([1.0, 2.0])}, tmp_path / "a.pt")
    b = saved({"module.a.w": torch.tensor([1.0, 2.001])}, tmp_path / "b.pt")
    assert not ckptool.diff(a, b).same
    assert not ckptool.diff(a, b, ignore=["prefix"]).same
    assert ckptool.diff(a, b, ignore=["prefix"], atol=0.01).same
    (change,) = ckptool.diff(a, b, ignore=["prefix"], stat=False).changed
    assert change.values is None
    (change,) = ckptool.diff(a, b, ignore=["prefix"]).changed
    assert change.values is not None and change.values.changed == 1
    file = make("training.pt", tmp_path)
    ckptool.add_module(file, tmp_path / "out.pt")  # also among the names of parameters that the optimizer keeps
    assert ckptool.diff(file, tmp_path / "out.pt", ignore=["prefix"]).same
    ckptool.edit(file, tmp_path / "set.pt", set={"optimizer_state_dict/param_groups/0/lr": 0.5})
    (change,) = (found := ckptool.diff(file, tmp_path / "set.pt")).changed
    assert change.address == "optimizer_state_dict/param_groups/0/lr" and change.aspects["value"][1] == 0.5
    assert found.remarks == () and found.left == str(file)


def big(path: Path, kind: str) -> Path:
    """A file of a megabyte of numbers that cannot be compared as one range of it: turned, expanded, compressed, in
    another byte order."""
    w = torch.arange(1 << 17, dtype=torch.float32).reshape(256, 512)
    value = {"w": w, "turned": w.t(), "part": w[:, ::2], "array": numpy.asfortranarray(w.numpy()).astype(">f4")}
    if kind == "legacy":
        torch.save(value, path, _use_new_zipfile_serialization=False)
    elif kind == "no checksums":
        path.write_bytes(without_checksums({"w": w, "turned": w.t()}))
    else:
        saved(value, path)
        if kind == "deflated":
            path.write_bytes(rezipped_mutant(path.read_bytes(), zipfile.ZIP_DEFLATED))
    return path


@looped(
    ("kind", "options"),
    itertools.product(["plain", "legacy", "no checksums", "deflated"], [{}, {"stat": False}, {"atol": 1.0}]),
)
def test_a_file_is_known_to_be_itself_without_reading_it(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = big(tmp_path / "a.pt", kind)
    os.link(path, tmp_path / "hard.pt")
    (tmp_path / "soft.pt").symlink_to(path)
    read: list[int] = []
    for name in ("read", "read_into"):
        real = getattr(Source, name)

        def counting(self: Source, offset: int, wanted: Any, real: Any = real) -> Any:
            read.append(wanted if isinstance(wanted, int) else len(wanted))
            return real(self, offset, wanted)

        monkeypatch.setattr(Source, name, counting)
    ckptool.open(path)
    tables = sum(read)  # and pickles
    for other in ("a.pt", "hard.pt", "soft.pt"):
        read.clear()
        assert ckptool.diff(path, tmp_path / other, **options).same
        assert sum(read) <= 2 * tables + 10_000, (other, sum(read), tables)


ARRAYS = {
    "torch": saved,
    "legacy": lambda value, path: torch.save(value, path, _use_new_zipfile_serialization=False),
    "pickle": lambda value, path: path.write_bytes(pickle.dumps(value)),
}


@looped(("left", "right", "nested"), itertools.product(ARRAYS, ARRAYS, [False, True]))
def test_an_array_is_no_tensor_where_both_files_can_say_so(left: str, right: str, nested: bool, tmp_path: Path) -> None:
    """Whichever is on the left, and also where one of the files is taken for a bare set of weights and the other is
    not."""
    tensor = {"w": torch.arange(6.0).reshape(2, 3), "v": torch.ones(2, dtype=torch.int64)}
    array = {name: part.numpy() for name, part in tensor.items()}
    wrap = (lambda value: {"model": value, "epoch": 1}) if nested else (lambda value: value)
    a, b, same = tmp_path / "a", tmp_path / "b", tmp_path / "same"
    ARRAYS[left](wrap(array), a)
    ARRAYS[right](wrap(tensor), b)
    ARRAYS[right](wrap(array), same)
    kinds = {"kind": ("numpy array", "tensor")}
    found = ckptool.diff(a, b)
    assert {each.address.rpartition("/")[2]: each.aspects for each in found.changed} == dict.fromkeys(tensor, kinds)
    assert ckptool.diff(b, a).changed[0].aspects == {"kind": ("tensor", "numpy array")}
    assert ckptool.diff(a, same).same


def test_where_a_container_has_no_word_for_arrays_that_is_not_compared(tmp_path: Path) -> None:
    array = saved({"w": numpy.ones(3, numpy.float32)}, tmp_path / "array.pt")
    tensor = saved({"w": torch.ones(3)}, tmp_path / "tensor.pt")
    ckptool.convert(tensor, tmp_path / "t.safetensors")
    found = ckptool.diff(array, tmp_path / "t.safetensors")
    assert found.same and "arrays" in found.not_compared
    assert "arrays" not in ckptool.diff(tensor, tmp_path / "t.safetensors").not_compared
    digests = [ckptool.verify(path, digest=True).digest for path in (array, tensor)]
    assert digests[0].tensors == digests[1].tensors  # which say nothing of that: the report does
    assert "1 numpy array" in digests[0].remark and not digests[1].remark


def test_without_prefixes_names_are_those_of_the_bare_module(tmp_path: Path) -> None:
    left = saved({"module.a.w": torch.ones(2), "module.b.w": torch.ones(1)}, tmp_path / "a.pt")
    right = saved({"a.w": torch.zeros(2)}, tmp_path / "b.pt")
    for one, other, side in ((left, right, "only_left"), (right, left, "only_right")):
        found = ckptool.diff(one, other, ignore="prefix")
        assert [change.address for change in found.changed] == ["a.w"]
        assert [entry.address for entry in getattr(found, side)] == ["b.w"]
    assert (
        ckptool.diff(left, left, ignore="prefix").same and ckptool.diff(left, right, ignore="prefix", only="b.*").only
    )
    assert not ckptool.diff(left, right, only="a.*", ignore="prefix").same


def test_values_of_numpy_dates_and_paths_are_shown_as_such(tmp_path: Path) -> None:
    values = {
        "acc": numpy.float64(0.5),
        "day": datetime.date(2020, 1, 2),
        "at": Path("a/b"),
        "nan": numpy.float64("nan"),
    }
    others = {
        "acc": numpy.float64(0.75),
        "day": datetime.date(2021, 1, 2),
        "at": Path("a/c"),
        "nan": numpy.float64("nan"),
    }
    a, b, wide = (
        saved(values, tmp_path / "a.pt"), saved(others, tmp_path / "b.pt"),
        saved(values | {"acc": numpy.float32(0.5)}, tmp_path / "wide.pt"),
    )  # fmt: skip
    changed = ckptool.diff(a, b).to_dict()["changed"]
    assert {each["address"]: each["aspects"]["value"] for each in changed} == {
        "acc": [0.5, 0.75], "day": ["2020-01-02", "2021-01-02"], "at": ["a/b", "a/c"],
    }  # fmt: skip
    assert ckptool.diff(a, a).same and not ckptool.diff(a, wide).same  # of another type


def test_tensors_on_meta_are_the_same_by_shape_and_type(tmp_path: Path, run: Run) -> None:
    meta, real = torch.ones(2, device="meta"), torch.ones(2)
    paths = [tmp_path / name for name in ("meta.pt", "mixed.pt")]
    for path, value in zip(paths, (meta, real), strict=True):
        torch.save({"a": meta, "b": value}, path)
    assert "same: 2 tensors, by shape and type" in run("diff", paths[0], paths[0]).out
    assert ckptool.diff(paths[1], paths[1]).evidence == "bytes"
    assert "1 tensor on the meta device, without values" in run("diff", paths[1], paths[1]).out
    assert not ckptool.diff(*paths).same


def test_order_and_metadata_count_only_when_strict(tmp_path: Path, run: Run) -> None:
    full = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict()
    made: dict[str, tuple[Any, Any]] = {
        "metadata": ({"model": full}, {"model": dict(full)}),
        "order": ({"model": dict(full), "step": 1}, {"step": 1, "model": dict(reversed(full.items()))}),
        "both": (full, dict(reversed(full.items()))),
    }
    for name, (one, other) in made.items():
        paths = [tmp_path / f"{name}{side}.pt" for side in "ab"]
        for tree, path in zip((one, other), paths, strict=True):
            torch.save(tree, path)
        found, strict = ckptool.diff(*paths), ckptool.diff(*paths, strict=True)
        assert (found.same, strict.same) == (True, False), name
        assert bool(found.metadata_differs) == (name != "order") and bool(found.order_differs) == (name != "metadata")
        said = run("diff", *paths)
        assert said.code == 0 and "--strict" in said.out
        assert ("_metadata differs; this" in said.out) == (name == "both")
        assert run("diff", *paths, "--strict").code == 1
        assert ckptool.diff(*paths, strict=True, ignore="order,metadata").same
    same = ckptool.diff(paths[0], paths[0])
    assert not same.metadata_differs and not same.order_differs


def test_differences_that_are_kept_keep_no_file_open(tmp_path: Path) -> None:
    state = {"a": torch.ones(2, 2)}
    one, two = saved(state, tmp_path / "one.pt"), saved(state, tmp_path / "two.pt")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    kept = [ckptool.diff(one, two) for _ in range(3)]
    gc.collect()
    assert all(each.same for each in kept) and len(os.listdir("/proc/self/fd")) == before


def test_a_part_says_where_it_lies_in_its_file(tmp_path: Path) -> None:
    """Also the state dict of a whole model, which is made when it is asked for: the page of report names it by that."""
    model = nn.Linear(2, 2)
    whole = saved({"model": model, "epoch": 1}, tmp_path / "whole.pt")
    bare = saved(model.state_dict(), tmp_path / "bare.pt")
    nested = saved({"a": {"net": dict(model.state_dict())}, "epoch": 1}, tmp_path / "nested.pt")

    def bases(left: str | Path, right: str | Path) -> tuple[Any, ...]:
        return tuple(part.base for part in diff_of_parts(left, right)[1])

    assert bases(whole, bare) == (("model",), ())
    assert bases(bare, nested) == ((), ("a", "net"))
    assert bases(f"{nested}#a/net", bare) == (("a", "net"), ())
    assert bases(whole, whole) == ((), ())


# `--only` compares what matches and nothing else, and says so.


def trees() -> tuple[dict[str, Any], dict[str, Any]]:
    def tree(number: int) -> dict[str, Any]:
        model = {f"h.{i}.{name}": torch.full((3,), 1.0 + i * number) for i in range(3) for name in ("weight", "bias")}
        state = {i: {"exp_avg": torch.full((3,), float(number)), "step": number} for i in range(3)}
        return {"model": model, "optimizer": {"state": state, "lr": [0.1, number]}, "epoch": number}

    left, right = tree(0), tree(1)
    left["gone"], right["model"]["new"] = {"a": torch.ones(2)}, torch.ones(2)
    return left, right


PATTERNS = (
    *(
        "h.0.*",
        "model",
        "model/h.1.weight",
        "*bias",
        "optimizer/*",
        "lr",
        "state/0",
        "gone/a",
        "new",
        "re:h\\.[12]",
        "*",
    ),
)


@looped("seed", range(30))
def test_it_finds_what_a_whole_diff_finds_in_what_matches(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    only = dice.sample(PATTERNS, dice.randint(1, 3))
    left, right = trees()
    a, b = saved(left, tmp_path / "a.pt"), saved(right, tmp_path / "b.pt")
    whole, part = ckptool.diff(a, b), ckptool.diff(a, b, only=only)

    def is_chosen(path: tuple[Any, ...]) -> bool:
        texts = [address(path[i:j]) for i in range(len(path)) for j in range(i + 1, len(path) + 1) if i == 0 or j]
        return any(matcher(pattern)(text) for pattern in only for text in texts)

    assert [c.address for c in part.changed] == [c.address for c in whole.changed if is_chosen(c.path)]
    for name in ("only_left", "only_right"):
        ends = {address((*path, *rest)) for path, node in getattr(part, name) for rest, _ in walk(node)}
        every = {(*path, *rest) for path, node in getattr(whole, name) for rest, _ in walk(node)}
        assert ends == {address(path) for path in every if is_chosen(path)}
    assert part.only == tuple(only) and part.to_dict()["only"] == only


def test_quiet_prints_nothing(tmp_path: Path, run: Run) -> None:
    a, b = (saved(tree, tmp_path / f"{name}.pt") for name, tree in zip("ab", trees(), strict=True))
    for options in ([], ["--only", "h.0.*"], ["--stat"], ["--all"]):
        for other in (a, b):
            expected = run("diff", a, other, *options).code
            for words in ((*options, "--quiet"), ("-q", *options)):
                assert run("diff", a, other, *words) == (expected, "", "")


@pytest.mark.parametrize("seed", range(12))
def test_tied_are_those_of_which_one_changes_with_the_other(seed: int, tmp_path: Path) -> None:
    """Not slices side by side in one storage, as engines that flatten their parameters leave them."""
    draw, flat = random.Random(seed), torch.arange(1.0, 41.0)
    begins = [draw.randrange(40) for _ in range(5)]
    views = {f"w{number}": flat[begin : begin + draw.randrange(9)] for number, begin in enumerate(begins)}
    apart = saved({name: view.clone() for name, view in views.items()}, tmp_path / "apart.pt")
    changed_by = dict[str, set[str]]()
    for name, view in views.items():
        before = {other: each.clone() for other, each in views.items()}
        view.neg_()
        changed_by[name] = {other for other, each in views.items() if not torch.equal(each, before[other])}
        view.neg_()
    for together in [*changed_by.values()] * 5:  # what is tied to a third is one group
        for name in together:
            changed_by[name] = set().union(together, *(changed_by[other] for other in together))
    tied = {frozenset(names) for names in changed_by.values() if len(names) > 1}
    found = ckptool.diff(saved(views, tmp_path / "views.pt"), apart)
    assert {frozenset(names) for _, names in found.ties} == tied and found.same == (not tied)
    copied = ckptool.convert(tmp_path / "views.pt", tmp_path / "copies.npz").notes
    assert bool(tied) == any(note.code == "ties-copied" for note in copied)


def test_the_second_name_of_a_tied_tensor_is_called_so(tmp_path: Path) -> None:
    weight = torch.ones(3, 2)
    tied = saved({"emb.weight": weight, "fc.weight": torch.ones(2), "head.weight": weight}, tmp_path / "tied.pt")
    bare = saved({"module.emb.weight": weight, "module.fc.weight": torch.ones(2)}, tmp_path / "bare.pt")
    for files in ((tied, bare), (bare, tied)):
        assert ckptool.diff(*files).differs_by_prefix()
        found = ckptool.diff(*files, ignore="prefix")
        assert found.remarks == ("head.weight is tied to emb.weight: a second name for the same values",)
        other = ckptool.diff(*files, ignore=["prefix"], only="fc.weight")
        assert other.same and not other.remarks and not other.differs_by_prefix()


def test_elements_are_counted_under_each_name_as_torch_counts_them(tmp_path: Path) -> None:
    models: list[dict[str, torch.Tensor]] = []
    for shift in (0.0, 1.0):
        weight = torch.arange(10.0) + shift
        models.append({"a": weight, "b": weight, "c": torch.arange(5.0) + shift * torch.tensor([0, 1, 1, 0, 1])})
    found = ckptool.diff(saved(models[0], tmp_path / "a.pt"), saved(models[1], tmp_path / "b.pt"))
    pairs = [(models[0][name], models[1][name]) for name in models[0]]
    assert found.elements == sum(one.numel() for one, _ in pairs) == 25
    assert found.changed_elements == sum(int((one != other).sum()) for one, other in pairs) == 23
    assert "23 of 25 elements changed (92%)" in str(found)
    heads = [model | {"head": torch.ones(n, 3)} for model, n in zip(models, (2, 4), strict=True)]  # of another shape
    assert "23 of 25 elements changed (92%)" in str(ckptool.diff(*heads))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("off", [0.0, 0.01])
@pytest.mark.parametrize("atol", [0.0, 0.1])
def test_the_evidence_is_what_it_went_by(dtype: torch.dtype, off: float, atol: float) -> None:
    left = torch.tensor([0.0, 1.0])
    right = (left + off).to(dtype)
    report = ckptool.diff({"w": left}, {"w": right}, atol=atol, ignore="dtype")
    assert report.same == torch.allclose(left, right.float(), rtol=0, atol=atol)
    if report.same:
        is_equal = dtype is left.dtype and not off
        assert report.evidence == ("bytes" if is_equal else "values within the tolerance" if atol else "values")


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


def test_what_differs_beside_equal_values_is_not_said_of_the_values(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    state = saved({name: each.detach() for name, each in layer.named_parameters()}, tmp_path / "a.pt")
    others = {
        "requires_grad": {name: each.detach().requires_grad_() for name, each in layer.named_parameters()},
        "parameter": dict(layer.named_parameters()),
        "strides": {name: each.detach().t().contiguous().t() for name, each in layer.named_parameters()},
    }
    ckptool.remap(state, to="cuda:0", out=tmp_path / "cuda.pt")
    files = [tmp_path / "cuda.pt"] + [saved(other, tmp_path / f"{name}.pt") for name, other in others.items()]
    for file in files:
        assert "changed other than by value" in ckptool.diff(state, file).summary("a", "b"), file
        moved = {name: each + 1 for name, each in ckptool.load(file, map_location="cpu").items()}
        changed = saved(moved, tmp_path / "moved.pt")
        assert "2 of 2 tensors changed" in ckptool.diff(file, changed).summary("a", "b")
        assert "other than" not in ckptool.diff(file, changed).summary("a", "b")
