"""Walking, finding and copying trees."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptool
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.graph import alike
from ckptool.checkpoint.nodes import Global, Object, Set
from ckptool.checkpoint.tree import address, children, find, holders, map_storages, rebuild, replaced_at, walk
from ckptool.errors import UnsafeObject
from ckptool.pickles.calls import refuse_unknown
from fixtures.traps import TRAPS
from tests.support.files import load, opened, saved
from tests.support.looped import looped
from tests.support.same import assert_same_tree

F32 = by_name("f32")


def entry(nbytes: int = 8, storage: Storage | None = None) -> TensorEntry:
    storage = storage or Storage(InlineBytes(bytes(range(nbytes))))
    return TensorEntry(storage, F32, (storage.nbytes // 4,), (1,))


# Walking -------------------------------------------------------------------------------------------------------------


def test_parts_of_objects_have_paths() -> None:
    made = Object(Global("argparse", "Namespace"), (1,))
    made.items, made.elements, made.state = {"k": 2}, [3], {"lr": 4}
    assert dict(walk({"o": made})) | {} == {
        (): {"o": made}, ("o",): made, ("o", "(args)"): (1,), ("o", "(args)", 0): 1, ("o", "k"): 2, ("o", 0): 3,
        ("o", "lr"): 4,
    }  # fmt: skip
    assert [made[key] for key in ("k", 0, "lr")] == [2, 3, 4]
    for missing in (1, -1, False, "(args)"):
        with pytest.raises(KeyError):
            made[missing]
    opaque = Object(Global("a", "b"), ())
    opaque.state = [5]
    assert [path for path, _ in walk(opaque)] == [(), ("(state)",), ("(state)", 0)]


# Addresses -----------------------------------------------------------------------------------------------------------


keys = st.text("ab/~.0é", min_size=1, max_size=4) | st.integers(-2, 3) | st.none() | st.booleans()


@given(st.lists(keys, min_size=1, max_size=4))
def test_every_address_leads_back(path: list[Any]) -> None:
    tree: Any = "leaf"
    for key in reversed(path):
        tree = {key: tree, "other": 0}
    assert find(tree, address(tuple(path))) == (tuple(path), "leaf")


@looped("name", TRAPS)
def test_another_node_at_any_place_leaves_the_others(name: str, tmp_path: Path) -> None:
    tree, other = opened(TRAPS[name](), tmp_path).tree, object()
    places = list(walk(tree))
    for path, _ in places[1 :: len(places) // 10 + 1]:
        made = replaced_at(tree, path, other)
        for before, after, segment in zip(holders(tree, path), holders(made, path), path, strict=True):
            assert type(after) is type(before) and after is not before
            there, here = ([each for each in children(one) if each[0] != segment] for one in (before, after))
            assert [(key, id(part)) for key, part in here] == [(key, id(part)) for key, part in there]
        assert dict(children(after))[path[-1]] is other


# Copies --------------------------------------------------------------------------------------------------------------


@looped("name", TRAPS)
def test_a_copy_is_the_same_graph(name: str, tmp_path: Path) -> None:
    tree = opened(TRAPS[name](), tmp_path).tree
    assert_same_tree(tree, rebuild(tree))
    assert_same_tree(tree, map_storages(tree, dataclasses.replace))  # other storages, tied as before


def test_deep_tuples_and_cycles_do_not_recurse() -> None:
    deep: Any = (entry(),)
    for _ in range(4_000):
        deep = (deep,)
    ring: list[Any] = [deep]
    ring.append(ring)
    copy = rebuild({"ring": ring}, lambda node: entry())
    assert copy["ring"][1] is copy["ring"] is not ring
    assert sum(1 for _ in walk(copy["ring"][0])) > 4_000


# Unknown calls -------------------------------------------------------------------------------------------------------


def test_calls_that_are_thrown_away_cannot_be_kept() -> None:
    gone = Checkpoint({}, "live", discarded=(Object(Global("os", "system"), ()),))
    for keep in (False, True):
        with pytest.raises(UnsafeObject, match="created and discarded"):
            refuse_unknown(gone, keep_unknown=keep)


# Graphs ---------------------------------------------------------------------------------------------------------------


def test_what_graphs_are_alike() -> None:
    storage = Storage(InlineBytes(bytes(16)))

    def tree(value: Any = 0.5, offset: int = 0) -> Any:
        view = TensorEntry(storage, by_name("f32"), (2,), (1,), offset)
        return {"w": [view, (value, float("nan"), Set([]))], "name": "".join(["a", "b"])}

    assert alike(tree(), tree()) and alike(tree(), tree(), limit=100)
    assert not alike(tree(), tree(), limit=3)
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
