"""`edit`: entries dropped, values set, those of tensors, too; and all of that together."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckptool
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.tree import address, walk
from ckptool.errors import CkptoolError, Conflict, NoMatch, UsageError
from fixtures.traps import TRAPS, batch_norm_model
from tests.support.cli import Run
from tests.support.errors import refused
from tests.support.files import load, opened, saved
from tests.support.looped import looped
from tests.support.same import assert_same_tree

MOMENTS = {"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}
TRAINING = {
    "model": {key: torch.ones(2) for key in ("enc.a", "enc.b", "head.a")},
    "optimizer": {"state": {0: MOMENTS}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    "epoch": 3,
    "history": [{"loss": 1.0}, {"loss": 0.5}],
}


HOLDERS = (dict, list, Object, TensorEntry)


def addresses(tree: Any) -> dict[str, Any]:
    return {address(path): node for path, node in walk(tree)}


def edited(value: Any, folder: Path, **what: Any) -> Any:
    """What comes of a file with this value, opened."""
    ckptool.edit(saved(value, folder / "in.pt"), folder / "out.pt", overwrite=True, **what)
    return ckptool.open(folder / "out.pt").tree


@looped(
    ("what", "error", "says"),
    [
        ({}, UsageError, "edit was given nothing to do"),
        *[({"drop": ["epoch", each]}, NoMatch, f"nothing matches '{each}'") for each in ("exp_avg", "history/2", "0")],
        ({"drop": ["head"]}, NoMatch, "drop='head.*'"),
        ({"drop": ["optimiser"]}, NoMatch, "Did you mean optimizer?"),
        ({"set": {"": 1}}, UsageError, "the whole file cannot be set"),
        ({"set": {"/": 1}}, UsageError, "the whole file cannot be set"),
        ({"set": {"epoch/x": 1}}, UsageError, "epoch cannot have entries set"),
        ({"set": {"nowhere/x": 1}}, UsageError, "there is no nowhere at the top"),
        ({"set": {"history/7": 1}}, UsageError, "there is no 7 in history"),
        ({"set": {"history.0": 1}}, UsageError, "there is no history.0, but there is history/0"),
        ({"set": {"history/x/y": 1}}, UsageError, "there is no x in history"),
        ({"set": {"optimizer.param_groups/0": 1}}, UsageError, "there is no optimizer.param_groups at the top"),
        ({"set": {"dotted.fc.weight": 1}}, UsageError, "there is no dotted.fc.weight, but there is dotted/fc.weight"),
    ],
)
def test_refusals(what: dict[str, Any], error: type[Exception], says: str, tmp_path: Path) -> None:
    value = TRAINING | {"q": TRAPS["09-qint8-per-tensor"]()["w"], "dotted": {"fc.weight": torch.ones(2)}}
    file = saved(value, tmp_path / "in.pt")
    refused(error, tmp_path, lambda: ckptool.edit(file, tmp_path / "out.pt", **what), says)


def test_what_is_left_keeps_its_kind_its_versions_and_its_ties(tmp_path: Path) -> None:
    shared = {"x": 1, "y": 2, "z": 3}
    tree = edited({"a": shared, "b": shared}, tmp_path, drop=["a/x", "b/y"])
    assert tree["a"] == tree["b"] == {"z": 3}
    tree = edited(batch_norm_model().state_dict(), tmp_path, drop=["*.num_batches_tracked"])
    assert tree.metadata is not None and "1" in tree.metadata
    value = TRAPS["01-full-tie-three-roots"]()
    assert_same_tree(opened(value, tmp_path).tree, edited({**value, "more": 1}, tmp_path, drop=["more"]))


def test_several_values_keys_that_are_numbers_and_settings_of_a_namespace(tmp_path: Path) -> None:
    made = ckptool.edit(TRAINING, set={"epoch": 9, "history/0": None, "z": 1, "z2/": 2})
    assert list(made) == [*TRAINING, "z", "z2"] and (made["epoch"], made["history"][0]) == (9, None)
    made = ckptool.edit(TRAINING, drop=["optimizer/state/0/*"], set={"optimizer/state/0": {}})
    assert made["optimizer"]["state"] == {0: {}}
    tree = edited(TRAPS["20-namespace"](), tmp_path, set={"args/lr": 0.5})
    assert tree["args"].attributes["lr"] == 0.5


def test_every_entry_is_set_and_dropped_as_python_would_and_nothing_else(tmp_path: Path) -> None:
    """Of dictionaries, their attributes (`_metadata`), lists, and settings in a namespace."""
    model = batch_norm_model().state_dict()
    value = TRAINING | {"model": model, "args": TRAPS["20-namespace"]()["args"]}
    before = addresses(opened(value, tmp_path).tree)
    places = [place for place, node in before.items() if place and not isinstance(node, HOLDERS)]
    assert {"model/_metadata/1/version", "history/1/loss", "args/lr", "optimizer/param_groups/0/params/0"} <= {*places}
    for place in places:
        after = addresses(edited(value, tmp_path, set={place: "new"}))
        assert list(after) == list(before) and after[place] == "new", place
        assert [name for name in places if after[name] != before[name]] == [place]
    for place in [*places, "model/_metadata", "model/_metadata/1", "model/1.weight"]:
        if isinstance(before[place.rpartition("/")[0]], list):  # only whole
            continue
        after = addresses(edited(value, tmp_path, drop=[place]))
        assert list(after) == [name for name in before if not f"{name}/".startswith(f"{place}/")], place
        above = place.split("/")[0]
        for both in ([place, above], [above, place]):  # what goes along with another need not be there alone
            assert list(addresses(edited(value, tmp_path, drop=both))) == [
                name for name in before if name.split("/")[0] != above
            ]


@pytest.mark.parametrize("place", ["model/enc.a", "model", "optimizer/state/0", "optimizer"])
def test_no_plain_value_takes_the_place_of_tensors(place: str) -> None:
    with pytest.raises(UsageError, match="would become a plain value") as caught:
        ckptool.edit(TRAINING, set={place: 3})
    assert re.search(f"drop[ =]'?{place}", caught.value.fix)
    assert caught.value.why.startswith("It " if place == "model/enc.a" else "They ")


@looped(
    ("word", "place", "value"),
    [
        ("epoch:=4", "epoch", 4),
        ("epoch=4", "epoch", 4),
        ("epoch=four = 4", "epoch", "four = 4"),
        ("epoch=", "epoch", ""),
        ('a/b="4"', "a/b", "4"),
        ("a=[1, null, true]", "a", [1, None, True]),
        ("a=[1, None]", "a", "[1, None]"),
        ('a/b:="x:=y"', "a/b", "x:=y"),
        ("a:=[1, null, true]", "a", [1, None, True]),
        ('a:={"b": 1.5}', "a", {"b": 1.5}),
    ],
)
def test_words_of_the_command_line(word: str, place: str, value: Any, tmp_path: Path, run: Run) -> None:
    file = saved({"epoch": 3, "a": {"b": 1}}, tmp_path / "in.pt")
    assert run("edit", file, "--set", word, "-o", tmp_path / "out.pt", "-f").code == 0
    assert addresses(load(tmp_path / "out.pt"))[place] == value


@looped(
    ("word", "says"),
    [
        *[(each, "not of the form PATH=VALUE") for each in ("epoch", "=3", ":=3", "")],
        *[(each, "is not JSON") for each in ("a:=text", "a:={", "a:=")],
        *[(each, "'x' is there twice") for each in ('a={"x": 1, "x": 2}', 'a:=[{"b": {"x": 1, "y": 2, "x": 1}}]')],
    ],
)
def test_words_that_are_no_assignment(word: str, says: str, tmp_path: Path, run: Run) -> None:
    done = run("edit", saved({"epoch": 3}, tmp_path / "in.pt"), "--set", word, "-o", tmp_path / "out.pt")
    assert done.code == 2 and says in done.err and "For example: " in done.err


@looped(
    ("tensor", "array"),
    [
        (torch.zeros(2, 3), numpy.arange(6, dtype="f4").reshape(2, 3)),
        (torch.zeros(2, 3), numpy.arange(6, dtype=">f4").reshape(2, 3)),
        (torch.zeros(2, 3), numpy.asfortranarray(numpy.arange(6, dtype="f4").reshape(2, 3))),
        (torch.zeros(0, 4), numpy.zeros((0, 4), "f4")),
        (torch.zeros(()), numpy.array(2, "f4")),
        (torch.zeros(3, dtype=torch.bool), numpy.array([True, False, True])),
        (torch.zeros(2, dtype=torch.complex64), numpy.array([1j, 2], "c8")),
        (torch.zeros(2, dtype=torch.uint64), numpy.array([2**64 - 1, 0], "u8")),
        (torch.zeros(4, 3).t(), numpy.arange(12, dtype="f4").reshape(3, 4)),  # strided: its own storage, in rows
        (torch.zeros(9)[2:4], numpy.ones(2, "f4")),
        (torch.zeros(1, 3).expand(2, 3), numpy.arange(6, dtype="f4").reshape(2, 3)),
    ],
)
def test_new_values(tensor: torch.Tensor, array: numpy.ndarray[Any, Any], tmp_path: Path) -> None:
    tree = edited({"w": tensor, "other": torch.ones(2)}, tmp_path, set={"w": array})
    assert tree["w"].numpy().tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes()
    assert tree["w"].shape == tuple(tensor.shape) and tree["other"].numpy().tolist() == [1, 1]


@looped("name", ["02-partial-overlap", "03-disjoint-views", "05-transposed-tie", "08-conj", "08-neg"])
def test_new_values_for_a_part_of_a_storage_or_a_lazy_view_are_a_conflict(name: str, tmp_path: Path) -> None:
    checkpoint = opened({key: value for key, value in TRAPS[name]().items() if key != "same"}, tmp_path)
    parts = {k: e for k, e in checkpoint.tree.items() if e.nbytes < e.storage.nbytes or not e.is_contiguous}
    says = "conjugated or negated view" if name.startswith("08") else "shares its storage with"
    for key, entry in parts.items() or checkpoint.tree.items():
        new = {key: numpy.zeros(entry.shape, entry.dtype.to_numpy())}
        refused(Conflict, tmp_path, partial(ckptool.edit, checkpoint, tmp_path / "out.pt", set=new), says)
    assert parts or name.startswith("08")


@looped(
    ("tensor", "array", "says"),
    [
        (torch.zeros(2), numpy.zeros(3, "f4"), r"f32\[2\].* f32\[3\]"),
        (torch.zeros(1), numpy.zeros((), "f4"), r"f32\[1\].* f32\[\]"),
        (torch.zeros(1), numpy.float32(1), "would become a plain value"),
        (torch.zeros(2), numpy.zeros(2, "f8"), r"f32\[2\].* f64"),
        (torch.zeros(2), numpy.zeros(2, "u4"), "f32"),
        (torch.zeros(2, dtype=torch.int8), numpy.zeros(2, "u1"), "i8"),
        (torch.zeros(2, dtype=torch.uint8), numpy.zeros(2, "i1"), "u8"),
        (torch.zeros(2, dtype=torch.bfloat16), numpy.zeros(2, "f2"), "bf16"),
        (torch.zeros(2, dtype=torch.bool), numpy.zeros(2, "u1"), "bool"),
    ],
)
def test_another_shape_or_type(tensor: torch.Tensor, array: Any, says: str, tmp_path: Path) -> None:
    file = saved({"w": tensor}, tmp_path / "in.pt")
    refused(CkptoolError, tmp_path, lambda: ckptool.edit(file, tmp_path / "out.pt", set={"w": array}), says)


def test_tensors_are_given_as_torch_has_them() -> None:
    for new in (torch.ones(3).bfloat16(), torch.tensor(2), torch.tensor([2j, 1]).conj(), torch.ones(3)[1:].float().t()):
        made = ckptool.edit({"w": torch.zeros_like(new)}, set={"w": new})
        assert torch.equal(made["w"], new) and made["w"].dtype is new.dtype
    with pytest.raises(UsageError, match="would become a plain value"):
        ckptool.edit({"w": torch.zeros(3)}, set={"w": [1, 2, 3]})
