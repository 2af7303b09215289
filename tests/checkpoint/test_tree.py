"""Walking, finding and copying trees."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.checkpoint import Checkpoint, Composite, InlineBytes, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import Global, Object, OrderedDict, Set
from ckptool.checkpoint.tree import (
    address,
    children,
    find,
    holders,
    map_storages,
    rebuild,
    replaced_at,
    segment_text,
    storages,
    stored_parts,
    tensors,
    walk,
)
from ckptool.errors import Ambiguous, UnsafeObject, UsageError
from ckptool.pickles.calls import refuse_unknown, uses_of
from fixtures.traps import TRAPS
from tests.support.files import opened
from tests.support.looped import looped
from tests.support.same import assert_same_tree

F32 = by_name("f32")


def entry(nbytes: int = 8, storage: Storage | None = None) -> TensorEntry:
    storage = storage or Storage(InlineBytes(bytes(range(nbytes))))
    return TensorEntry(storage, F32, (storage.nbytes // 4,), (1,))


# Walking -------------------------------------------------------------------------------------------------------------


def test_parents_first_in_order_and_with_attributes() -> None:
    w = entry()
    tree = OrderedDict({"b": [w, (1, w)], "a": Set(["x"])}, {"_metadata": {"": 1}})
    paths = [path for path, _ in walk(tree)]
    assert paths == [
        (),
        ("b",),
        ("b", 0),
        ("b", 1),
        ("b", 1, 0),
        ("b", 1, 1),
        ("a",),
        ("a", 0),
        ("_metadata",),
        ("_metadata", ""),
    ]
    assert [path for path, _ in tensors(tree)] == [("b", 0), ("b", 1, 1)]
    assert list(storages(tree)) == [w.storage]
    assert list(walk(w)) == [((), w)]


def test_what_stands_twice_is_met_twice_and_what_holds_itself_once() -> None:
    shared: list[Any] = [entry()]
    tree: dict[str, Any] = {"a": shared, "b": shared}
    tree["self"] = tree
    assert [path for path, _ in walk(tree)] == [(), ("a",), ("a", 0), ("b",), ("b", 0), ("self",)]


def test_sharing_that_would_double_at_every_level_ends() -> None:
    node: list[Any] = [1]
    for _ in range(60):
        node = [node, node]
    assert sum(1 for _ in walk(node)) < 1_000_000


def test_parts_of_objects_have_paths() -> None:
    made = Object(Global("argparse", "Namespace"), (1,))
    made.items, made.elements, made.state = {"k": 2}, [3], {"lr": 4}
    assert dict(walk({"o": made})) | {} == {
        (): {"o": made},
        ("o",): made,
        ("o", "(args)"): (1,),
        ("o", "(args)", 0): 1,
        ("o", "k"): 2,
        ("o", 0): 3,
        ("o", "lr"): 4,
    }
    assert [made[key] for key in ("k", 0, "lr")] == [2, 3, 4]
    for missing in (1, -1, False, "(args)"):
        with pytest.raises(KeyError):
            made[missing]
    opaque = Object(Global("a", "b"), ())
    opaque.state = [5]
    assert [path for path, _ in walk(opaque)] == [(), ("(state)",), ("(state)", 0)]


def test_a_composite_is_one_tensor_of_several_parts(tmp_path: Path) -> None:
    tree = opened(TRAPS["11-sparse-csr"](), tmp_path).tree
    ((path, found),) = tensors(tree)
    assert path == ("w",) and isinstance(found, Composite)
    parts = list(stored_parts(found))
    assert len(parts) == 3 and [part.storage for part in parts] == list(storages(tree))


def test_a_storage_by_itself_counts() -> None:
    alone = StorageRef(Storage(InlineBytes(b"1234")), None)
    assert list(storages([alone])) == [alone.storage] and list(stored_parts(alone)) == [alone]
    assert list(stored_parts(7)) == []


# Addresses -----------------------------------------------------------------------------------------------------------

TREE: dict[Any, Any] = {
    "state_dict": {"fc.weight": 1, "a/b": 2, "~": 3, "": 4},
    "list": [10, [11]],
    5: "five",
    None: "none",
    (1, 2): "pair",
    "mixed": {0: "int", "0": "text"},
}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", ()),
        ("/", ()),
        ("state_dict", ("state_dict",)),
        ("state_dict/", ("state_dict",)),
        ("/state_dict/fc.weight", ("state_dict", "fc.weight")),
        ("state_dict/a~1b", ("state_dict", "a/b")),
        ("state_dict/~0", ("state_dict", "~")),
        ("list/1/0", ("list", 1, 0)),
        ("5", (5,)),
        ("None", (None,)),
        ("(1, 2)", ((1, 2),)),
    ],
)
def test_find(text: str, path: tuple[Any, ...]) -> None:
    node: Any = TREE
    for segment in path:
        node = node[segment]
    assert find(TREE, text) == (path, node)


def test_what_is_not_there() -> None:
    with pytest.raises(UsageError) as caught:
        find(TREE, "state_dict/fc.wieght")
    assert caught.value.what == "there is no fc.wieght in state_dict"
    assert "fc.weight" in caught.value.why and caught.value.fix == "Did you mean fc.weight?"
    with pytest.raises(UsageError, match="there is no x at the top"):
        find(TREE, "x")
    with pytest.raises(UsageError, match="There is nothing below it"):
        find(TREE, "5/x")
    with pytest.raises(UsageError) as caught:
        find({"\x1b[31m": 1}, "\x1b[32m")
    assert "\x1b" not in str(caught.value)


def test_two_keys_of_one_spelling_are_ambiguous() -> None:
    with pytest.raises(Ambiguous, match="0 names 2 entries of mixed: 0, '0'"):
        find(TREE, "mixed/0")


keys = st.text("ab/~.0é", min_size=1, max_size=4) | st.integers(-2, 3) | st.none() | st.booleans()


@given(st.lists(keys, min_size=1, max_size=4))
def test_every_address_leads_back(path: list[Any]) -> None:
    tree: Any = "leaf"
    for key in reversed(path):
        tree = {key: tree, "other": 0}
    assert find(tree, address(tuple(path))) == (tuple(path), "leaf")


def test_addresses_of_one_file_are_distinct() -> None:
    assert address(("a/b", "c")) != address(("a", "b/c")) and segment_text("~1") == "~01"


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


def test_the_original_is_not_touched() -> None:
    inner: dict[str, Any] = {"w": entry()}
    tree = {"model": inner, "again": inner, "list": [inner]}
    copy = rebuild(tree, replaced={id(inner): {"v": inner["w"], "more": inner}})
    assert list(inner) == ["w"] and list(copy["model"]) == ["v", "more"]
    assert copy["model"] is copy["again"] is copy["list"][0] is copy["model"]["more"]


def test_leaves_are_asked_once() -> None:
    w, v, asked = entry(), entry(4), []
    alone = StorageRef(w.storage, None)

    def leaf(node: Any) -> Any:
        asked.append(node)
        return node

    rebuild({"a": w, "b": [w, (v, w)], "s": alone}, leaf)
    assert sorted(map(id, asked)) == sorted(map(id, (w, v, alone)))


def test_map_storages_keeps_ties_and_what_did_not_change() -> None:
    shared, other = Storage(InlineBytes(bytes(8))), Storage(InlineBytes(bytes(4)))
    a, b, c = entry(storage=shared), entry(storage=shared), entry(storage=other)
    tree = {"a": a, "b": b, "c": c, "s": StorageRef(shared, F32)}
    moved = map_storages(
        tree, lambda storage: dataclasses.replace(storage, location="cuda:0") if storage is shared else storage
    )
    assert moved["a"].storage is moved["b"].storage is moved["s"].storage is not shared
    assert moved["c"] is c and moved["s"].dtype is F32 and shared.location == "cpu"


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


def test_unknown_calls_are_named_with_their_place() -> None:
    evil, known = Object(Global("os", "system"), ("true",)), Object(Global("collections", "Counter"), ({},))
    checkpoint = Checkpoint({"a": [evil], "b": known}, "live")
    assert [(use.name, use.how, place) for use, place in uses_of(checkpoint)] == [("os.system", "called", "a/0")]
    with pytest.raises(UnsafeObject, match=r"os\.system at a/0") as caught:
        refuse_unknown(checkpoint, keep_unknown=False)
    assert "--keep-unknown" in caught.value.fix
    refuse_unknown(checkpoint, keep_unknown=True)
    refuse_unknown(Checkpoint({"b": known}, "live"), keep_unknown=False)


def test_calls_that_are_thrown_away_cannot_be_kept() -> None:
    gone = Checkpoint({}, "live", discarded=(Object(Global("os", "system"), ()),))
    for keep in (False, True):
        with pytest.raises(UnsafeObject, match="made and thrown away"):
            refuse_unknown(gone, keep_unknown=keep)
