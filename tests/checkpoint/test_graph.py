"""What stands in two places stays one when a tree is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.checkpoint import InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.graph import alike, check_depth
from ckptool.checkpoint.nodes import Set
from ckptool.errors import LimitExceeded
from tests.support.files import load, saved


def test_a_tensor_in_a_tuple_within_a_tuple_stays_one(tmp_path: Path) -> None:
    for number, tensor in enumerate((torch.ones(2).to_sparse(), torch.ones(2), torch.nn.Buffer(torch.ones(2)))):
        path = saved({"w": torch.ones(1), "t": (1, tensor, (tensor, (tensor,)))}, tmp_path / f"{number}.pt")
        ckptool.remap(path, tmp_path / f"{number}.away.pt", to="cuda:0", verify=True)
        ckptool.remap(tmp_path / f"{number}.away.pt", tmp_path / f"{number}.back.pt", to="cpu", verify=True)
        found = load(tmp_path / f"{number}.back.pt", weights_only=False)["t"]
        assert found[1] is found[2][0] is found[2][1][0]


def test_sets_in_sets_and_as_keys(tmp_path: Path) -> None:
    tree = {"s": {frozenset({1}), 2}, frozenset({"a", (3, frozenset())}): [{4}]}
    found = ckptool.open(saved({"w": torch.ones(1), "t": tree}, tmp_path / "a.pt")).tree["t"]
    assert [type(key).__name__ for key in found] == ["str", "Set"] and type(found["s"]) is Set
    ckptool.edit(tmp_path / "a.pt", tmp_path / "b.pt", set={"x": 1}, verify=True)
    assert load(tmp_path / "b.pt", weights_only=False)["t"] == tree


def test_what_graphs_are_alike() -> None:
    storage = Storage(InlineBytes(bytes(16)))

    def tree(value: Any = 0.5, offset: int = 0) -> Any:
        view = TensorEntry(storage, by_name("f32"), (2,), (1,), offset)
        return {"w": [view, (value, float("nan"), Set([]))], "name": "".join(["a", "b"])}

    assert alike(tree(), tree()) and alike(tree(), tree(), most=100)
    assert not alike(tree(), tree(), most=3)
    for other in (tree(offset=1), tree(0.75), tree(1), tree(None), {**tree(), "more": 1}):
        assert not alike(tree(), other) and not alike(other, tree())


def test_addresses_that_come_to_too_much_text_are_refused() -> None:
    """Few names, each of which stands in the address of everything below it."""

    def deep(letters: int, values: int) -> Any:
        tree: Any = [0] * values
        for level in range(100):
            tree = {f"{level:0{letters}}": tree}
        return tree

    check_depth(deep(letters=4, values=10_000))
    with pytest.raises(LimitExceeded, match="whose addresses have"):
        check_depth(deep(letters=40, values=10_000))


class Bag(dict):  # type: ignore[type-arg]
    """A dictionary with attributes."""


def test_an_item_and_an_attribute_of_one_name_are_told_apart(tmp_path: Path) -> None:
    bag = Bag(a=1)
    bag.a = 2  # type: ignore[attr-defined]
    path = saved({"w": torch.ones(1), "bag": bag}, tmp_path / "a.pt")
    ckptool.edit(path, tmp_path / "b.pt", set={"x": 1}, verify=True, keep_unknown=True)
    found = load(tmp_path / "b.pt", weights_only=False)["bag"]
    assert (found["a"], found.a) == (1, 2)
    bag.a = 3  # type: ignore[attr-defined]
    assert not ckptool.diff(path, saved({"w": torch.ones(1), "bag": bag}, tmp_path / "c.pt")).same
