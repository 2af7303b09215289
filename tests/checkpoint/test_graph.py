"""What stands in two places stays one when a tree is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import ckptool
from ckptool.checkpoint import InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.graph import alike
from ckptool.checkpoint.nodes import Set
from tests.support.files import load, saved


def test_what_graphs_are_alike() -> None:
    storage = Storage(InlineBytes(bytes(16)))

    def tree(value: Any = 0.5, offset: int = 0) -> Any:
        view = TensorEntry(storage, by_name("f32"), (2,), (1,), offset)
        return {"w": [view, (value, float("nan"), Set([]))], "name": "".join(["a", "b"])}

    assert alike(tree(), tree()) and alike(tree(), tree(), most=100)
    assert not alike(tree(), tree(), most=3)
    for other in (tree(offset=1), tree(0.75), tree(1), tree(None), {**tree(), "more": 1}):
        assert not alike(tree(), other) and not alike(other, tree())


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
