"""Entries dropped, values set, tensors given new values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.errors import Conflict, FileProblem, NoMatch, UsageError
from ckptool.formats import read
from ckptool.transforms.edit import edit, parse_assignment, read_array
from fixtures.make import make
from fixtures.traps import TRAPS, batch_norm_model
from tests.support.errors import three_parts
from tests.support.files import opened, weights
from tests.support.looped import looped
from tests.support.same import assert_same_tree

TRAINING = {
    "model": weights("enc.a", "enc.b", "head.a"),
    "optimizer": {
        "state": {0: {"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    },
    "epoch": 3,
    "history": [{"loss": 1.0}, {"loss": 0.5}],
}


def edited(value: Any, folder: Path, **what: Any) -> Any:
    return edit(opened(value, folder), **what).checkpoint.tree


# Dropping ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "gone"),
    [
        (["optimizer"], ("optimizer",)),
        (["optimizer*"], ("optimizer",)),
        (["enc.*"], ("model/enc.a", "model/enc.b")),  # a key of model weights
        (["model/enc.a"], ("model/enc.a",)),
        (["*.a"], ("model/enc.a", "model/head.a")),
        (["re:^(epoch|history)$"], ("epoch", "history")),
        (["history/*/loss"], ("history/0/loss", "history/1/loss")),
        (["optimizer/state/0/exp_avg"], ("optimizer/state/0/exp_avg",)),
        (["epoch", "epo*"], ("epoch",)),
    ],
)
def test_drop(patterns: list[str], gone: tuple[str, ...], tmp_path: Path) -> None:
    checkpoint = opened(TRAINING, tmp_path)
    done = edit(checkpoint, patterns)
    assert done.dropped == gone
    before, after = ({place for place, _ in addresses(c.tree)} for c in (checkpoint, done.checkpoint))
    assert before - after == {place for place in before if any(place == g or place.startswith(f"{g}/") for g in gone)}
    assert after <= before


def addresses(tree: Any) -> list[tuple[str, Any]]:
    from ckptool.checkpoint.tree import address, walk

    return [(address(path), node) for path, node in walk(tree)]


@pytest.mark.parametrize("pattern", ["nothing", "exp_avg", "enc", "history/2", "0"])
def test_drop_nothing(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(NoMatch) as caught:
        edited(TRAINING, tmp_path, drop=["epoch", pattern])
    code, what = three_parts(caught.value)
    assert (code, what, caught.value.exit_code) == ("no-match", f"nothing matches {pattern!r}", 1)


def test_drop_keeps_the_kind_and_the_versions(tmp_path: Path) -> None:
    tree = edited(batch_norm_model().state_dict(), tmp_path, drop=["*.num_batches_tracked"])
    assert type(tree) is OrderedDict and tree.metadata is not None and "1" in tree.metadata


def test_drop_in_an_unknown_object(tmp_path: Path) -> None:
    from ckptool.checkpoint.nodes import Global, Object

    checkpoint = opened(TRAINING, tmp_path)
    made = Object(Global("a", "Settings"), (), "new")
    made.items = {"lr": 1, "seed": 2}
    checkpoint.tree["config"] = made
    tree = edit(checkpoint, ["config/seed"]).checkpoint.tree
    assert tree["config"].items == {"lr": 1} and made.items == {"lr": 1, "seed": 2}


def test_the_rest_stays_the_same_graph(tmp_path: Path) -> None:
    value = TRAPS["01-full-tie-three-roots"]()
    tree = edited({**value, "more": 1}, tmp_path, drop=["more"])
    assert_same_tree(opened(value, tmp_path).tree, tree)


# Setting -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("epoch:=3", ("epoch", 3)),
        ('a/b:="x:=y"', ("a/b", "x:=y")),
        ("a:=[1, null, true]", ("a", [1, None, True])),
        ('a:={"b": 1.5}', ("a", {"b": 1.5})),
    ],
)
def test_assignment(text: str, parsed: tuple[str, Any]) -> None:
    assert parse_assignment(text) == parsed


@pytest.mark.parametrize("text", ["epoch=3", "epoch", ":=3", "", "a:=text", "a:={", "a:="])
def test_not_an_assignment(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_assignment(text)
    assert caught.value.fix.startswith("For example: ") and ":=" in caught.value.fix


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("epoch", 4),
        ("new", {"a": [1, None]}),
        ("optimizer/param_groups/0/lr", 0.01),
        ("history/1", {"loss": 0.25}),
        ("history/0/loss", 2),
        ("a~1b", 1),
    ],
)
def test_set(place: str, value: Any, tmp_path: Path) -> None:
    checkpoint = opened(TRAINING, tmp_path)
    tree = edit(checkpoint, values={place: value}).checkpoint.tree
    after, before = dict(addresses(tree)), dict(addresses(checkpoint.tree))
    assert after[place] == value
    untouched = {p for p in before if not p.startswith(place.partition("/")[0]) and p}
    assert (
        untouched <= after.keys()
        and list(after)[: list(before).index("epoch")] == list(before)[: list(before).index("epoch")]
    )


def test_an_integer_key_stays_one(tmp_path: Path) -> None:
    tree = edited(TRAINING, tmp_path, drop=["optimizer/state/0/*"], values={"optimizer/state/0": {}})
    assert list(tree["optimizer"]["state"]) == [0] and type(next(iter(tree["optimizer"]["state"]))) is int


@pytest.mark.parametrize("place", ["model/enc.a", "model", "optimizer/state/0", "optimizer"])
def test_no_plain_value_takes_the_place_of_tensors(place: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="would become a plain value") as caught:
        edited(TRAINING, tmp_path, values={place: 3})
    assert re.search(f"drop[ =]'?{place}", caught.value.fix)
    assert ("tensor" in caught.value.fix) == (place == "model/enc.a")


@pytest.mark.parametrize("text", ['a:={"x": 1, "x": 2}', 'a:=[{"b": {"x": 1, "y": 2, "x": 1}}]'])
def test_a_name_stands_once_in_an_object(text: str) -> None:
    with pytest.raises(UsageError, match="'x' is there twice"):
        parse_assignment(text)


def test_two_values_and_the_order_of_keys(tmp_path: Path) -> None:
    tree = edited(TRAINING, tmp_path, values={"epoch": 9, "history/0": None, "z": 1, "z2/": 2})
    assert list(tree) == [*TRAINING, "z", "z2"] and (tree["epoch"], tree["history"][0]) == (9, None)


def test_settings_of_a_namespace(tmp_path: Path) -> None:
    tree = edited(TRAPS["20-namespace"](), tmp_path, values={"args/lr": 0.5})
    assert tree["args"].attributes["lr"] == 0.5


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("", "the whole file cannot be set"),
        ("/", "the whole file cannot be set"),
        ("epoch/x", "epoch cannot have entries set"),
        ("nowhere/x", "there is no nowhere at the top"),
        ("history/7", "there is no 7 in history"),
        ("history/x/y", "there is no x in history"),
    ],
)
def test_an_address_that_cannot_be_set(place: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        edited(TRAINING, tmp_path, values={place: 1})


# Tensors -------------------------------------------------------------------------------------------------------------


@looped(
    ("tensor", "array"),
    [
        (torch.zeros(2, 3), numpy.arange(6, dtype="f4").reshape(2, 3)),
        (torch.zeros(2, 3), numpy.arange(6, dtype=">f4").reshape(2, 3)),
        (torch.zeros(2, 3), numpy.asfortranarray(numpy.arange(6, dtype="f4").reshape(2, 3))),
        (torch.zeros(2, dtype=torch.bfloat16), numpy.array([1.5, -2], ml_dtypes.bfloat16)),
        (torch.zeros(2, dtype=torch.float8_e5m2), numpy.array([1.5, -2], ml_dtypes.float8_e5m2)),
        (torch.zeros((), dtype=torch.int64), numpy.array(7)),
        (torch.zeros(0, 4), numpy.zeros((0, 4), "f4")),
        (torch.zeros(3, dtype=torch.bool), numpy.array([True, False, True])),
        (torch.zeros(2, dtype=torch.complex64), numpy.array([1j, 2], "c8")),
        (torch.zeros(2, dtype=torch.uint64), numpy.array([2**64 - 1, 0], "u8")),
        (torch.zeros(4, 3).t(), numpy.arange(12, dtype="f4").reshape(3, 4)),  # strided: its own storage, in rows
        (torch.zeros(9)[2:4], numpy.ones(2, "f4")),
        (torch.zeros(1, 3).expand(2, 3), numpy.arange(6, dtype="f4").reshape(2, 3)),
    ],
)
def test_new_values(tensor: torch.Tensor, array: numpy.ndarray[Any, Any], tmp_path: Path) -> None:
    tree = edited({"w": tensor, "other": torch.ones(2)}, tmp_path, arrays={"w": array})
    assert tree["w"].numpy().tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes()
    assert tree["w"].shape == tuple(tensor.shape) and tree["other"].numpy().tolist() == [1, 1]


def test_bits_for_types_that_npy_files_do_not_know(tmp_path: Path) -> None:
    path = tmp_path / "w.npy"
    numpy.save(path, numpy.array([1.5, -2], ml_dtypes.bfloat16))
    array = read_array(str(path))
    assert array.dtype.kind == "V"
    tree = edited({"w": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path, arrays={"w": array})
    assert tree["w"].numpy().tolist() == [1.5, -2.0]


def test_parameters_stay_parameters(tmp_path: Path) -> None:
    tree = edited({"w": torch.nn.Parameter(torch.zeros(2))}, tmp_path, arrays={"w": numpy.ones(2, "f4")})
    assert tree["w"].flags.parameter and tree["w"].flags.requires_grad


def test_devices_stay(tmp_path: Path) -> None:
    tree = edit(read(make("cuda.pt", tmp_path)), arrays={"fc2.bias": numpy.ones(4, "f4")}).checkpoint.tree
    assert tree["fc2.bias"].location == "cuda:0"


def test_tied_tensors_get_the_values_together(tmp_path: Path) -> None:
    tree = edited(TRAPS["01-full-tie-three-roots"](), tmp_path, arrays={"ema/w": numpy.arange(4, dtype="f4")})
    tied: list[TensorEntry] = [tree["model"]["w"], tree["ema"]["w"], *tree["list"]]
    assert len({id(entry.storage) for entry in tied}) == 1 and tied[0].numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["02-partial-overlap", "03-disjoint-views", "05-transposed-tie"])
def test_new_values_for_a_part_of_a_shared_storage_are_a_conflict(name: str, tmp_path: Path) -> None:
    checkpoint = opened(TRAPS[name](), tmp_path)
    refused = 0
    for key, entry in checkpoint.tree.items():
        if entry.nbytes == entry.storage.nbytes and entry.is_contiguous:
            continue
        with pytest.raises(Conflict, match="shares its storage with"):
            edit(checkpoint, arrays={key: numpy.zeros(entry.shape, "f4")})
        refused += 1
    assert refused


@pytest.mark.parametrize("name", ["08-conj", "08-neg"])
def test_new_values_for_lazy_views_are_a_conflict(name: str, tmp_path: Path) -> None:
    checkpoint = opened({k: v for k, v in TRAPS[name]().items() if k != "same"}, tmp_path)
    ((key, entry),) = checkpoint.tree.items()
    with pytest.raises(Conflict, match="conjugated or negated view"):
        edit(checkpoint, arrays={key: numpy.zeros(entry.shape, entry.dtype.to_numpy())})


@pytest.mark.parametrize(
    ("tensor", "array", "says"),
    [
        (torch.zeros(2), numpy.zeros(3, "f4"), r"shape \[2\], the array \[3\]"),
        (torch.zeros(1), numpy.zeros((), "f4"), r"shape \[1\], the array \[\]"),
        (torch.zeros(2), numpy.zeros(2, "f8"), "of type f32, the array float64"),
        (torch.zeros(2), numpy.zeros(2, "u4"), "of type f32"),
        (torch.zeros(2), numpy.zeros(2, "V4"), "of type f32"),
        (torch.zeros(2, dtype=torch.int8), numpy.zeros(2, "u1"), "of type i8"),
        (torch.zeros(2, dtype=torch.uint8), numpy.zeros(2, "i1"), "of type u8"),
        (torch.zeros(2, dtype=torch.bfloat16), numpy.zeros(2, "f2"), "of type bf16"),
        (torch.zeros(2, dtype=torch.bfloat16), numpy.zeros(2, ml_dtypes.float8_e5m2), "of type bf16"),
        (torch.zeros(2, dtype=torch.bool), numpy.zeros(2, "u1"), "of type bool"),
    ],
)
def test_another_shape_or_type(tensor: torch.Tensor, array: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(Conflict, match=says) as caught:
        edited({"w": tensor}, tmp_path, arrays={"w": array})
    three_parts(caught.value)


@pytest.mark.parametrize(
    ("place", "says"), [("q", "is not a tensor"), ("epoch", "is not a tensor"), ("nope", "there is no nope")]
)
def test_no_tensor(place: str, says: str, tmp_path: Path) -> None:
    value = {"q": TRAPS["09-qint8-per-tensor"]()["w"], "epoch": 1}
    with pytest.raises(UsageError, match=says):
        edited(value, tmp_path, arrays={place: numpy.zeros(1)})


def test_arrays_from_files(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    numpy.save(path, numpy.arange(3))
    assert read_array(str(path)).tolist() == [0, 1, 2]
    numpy.savez(tmp_path / "several.npz", a=1)
    numpy.save(tmp_path / "object.npy", numpy.array([{"a": 1}], dtype=object), allow_pickle=True)
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "text.npy").write_text("text")
    (tmp_path / "short.npy").write_bytes(path.read_bytes()[:-1])
    for name in ("several.npz", "object.npy", "empty.npy", "text.npy", "short.npy"):
        with pytest.raises(UsageError, match="is not a numpy array"):
            read_array(str(tmp_path / name))
    with pytest.raises(FileProblem):
        read_array(str(tmp_path / "missing.npy"))
    with pytest.raises(UsageError, match="is a folder"):
        read_array(str(tmp_path))
