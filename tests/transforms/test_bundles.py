"""Bundles as trees: what members share, what is a plain value, what a name may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.tree import walk
from ckptool.errors import Ambiguous, Conflict, UsageError
from ckptool.transforms.bundles import (
    MAX_PLAIN,
    bundled,
    changed,
    check_names,
    is_plain,
    key_of,
    members_of,
    table,
    tied_again,
    ties_across,
)
from ckptool.transforms.slim import equal
from tests.support.files import opened
from tests.support.looped import looped


def tensor(storage: Storage) -> TensorEntry:
    return TensorEntry(storage, by_name("f32"), (storage.nbytes // 4,), (1,))


def stored(fill: int, nbytes: int = 2048, crc: int | None = None) -> Storage:
    return Storage(InlineBytes(bytes([fill]) * nbytes), crc=crc)


# Together and apart --------------------------------------------------------------------------------------------------


def test_members_share_storages_and_nothing_else() -> None:
    entry, inner = tensor(stored(1)), [1, 2]
    state = OrderedDict({"w": entry, "again": entry}, {"_metadata": inner})
    tree = bundled({"a": state, "b": state, "c": inner})
    assert tree["a"]["w"] is tree["a"]["again"] and tree["a"].attributes["_metadata"] == inner
    assert tree["a"]["w"] is not tree["b"]["w"] and tree["a"]["w"].storage is tree["b"]["w"].storage
    nodes: dict[str, set[int]] = {
        name: {id(n) for _, n in walk(tree[name]) if isinstance(n, (dict, list))} for name in tree
    }
    assert not nodes["a"] & nodes["b"] and not nodes["a"] & nodes["c"]


def test_a_bundle_keeps_the_type_of_the_one_it_replaces() -> None:
    like = OrderedDict({}, {"_metadata": 1})
    assert type(bundled({"a": 1}, like)) is OrderedDict and bundled({"a": 1}, like).attributes == {"_metadata": 1}
    assert type(bundled({"a": 1})) is dict


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=5))
def test_what_was_tied_is_tied_again(plan: list[list[int]]) -> None:
    """Members of tensors on a few storages, some of them equal: apart in files of their own, together as before."""
    pool = [stored(number // 2) for number in range(6)]
    tree = bundled({f"m{i}": {f"w{j}": tensor(pool[k]) for j, k in enumerate(ks)} for i, ks in enumerate(plan)})
    ties = ties_across(tree)
    # As from files: every member gets storages of its own.
    fresh = {name: with_own_storages(member) for name, member in tree.items()}
    assert shape_of(tied_again(fresh, ties)) == shape_of(tree)


def with_own_storages(member: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    made: dict[int, Storage] = {}
    for entry in member.values():
        made.setdefault(
            id(entry.storage), Storage(InlineBytes(bytes(entry.storage.data.read(0, entry.storage.nbytes))))
        )
    return {name: tensor(made[id(entry.storage)]) for name, entry in member.items()}


def shape_of(tree: Any) -> list[int]:
    """For each tensor: which storage, numbered as they are met."""
    numbers: dict[int, int] = {}
    entries = (node for _, node in walk(tree) if isinstance(node, TensorEntry))
    return [numbers.setdefault(id(entry.storage), len(numbers)) for entry in entries]


def test_tied_tensors_that_differ_are_refused() -> None:
    one = stored(1)
    alone = {"a": {"w": tensor(one)}, "b": {"w": tensor(one)}}
    ties = ties_across(alone)
    assert ties == (("a/w", "b/w"),)
    for other in (stored(2), stored(1, 4096), Storage(InlineBytes(bytes([1]) * 2048), "cuda:0")):
        with pytest.raises(Conflict, match="a/w, b/w were one tensor"):
            tied_again({**alone, "b": {"w": tensor(other)}}, ties)
    assert tied_again({"a": alone["a"], "b": {}}, ties)["a"]["w"].storage is alone["a"]["w"].storage


def test_equal_storages_are_found_by_their_bytes() -> None:
    same, other = stored(1, crc=7), stored(2, crc=7)
    unknown = stored(1)
    assert list(equal([("", same), ("", other)])) == []
    assert list(equal([("", same), ("", other), ("", unknown)])) == [[same, unknown]]
    assert list(equal([("x", same), ("y", unknown)])) == []
    untouched = Storage(Unreadable(2048), crc=1)
    assert list(equal([("", untouched), ("", Storage(Unreadable(2048), crc=2))])) == [], "their checksums differ"


class Unreadable(InlineBytes):
    """Bytes that nobody should look at."""

    def __init__(self, length: int) -> None:
        super().__init__(bytes(length))

    def read(self, offset: int, length: int) -> bytes:
        raise AssertionError("was read")


# Changes -------------------------------------------------------------------------------------------------------------


def test_changes() -> None:
    members = {"a": 1, "b": 2, 3: 4}
    assert list(changed(members, ["b"], {"a": "x", "3": "b"}).items()) == [("x", 1), ("b", 4)]
    assert changed(members) == members
    with pytest.raises(UsageError, match="no member 'c'"):
        changed(members, ["c"])
    with pytest.raises(Conflict, match="two members are called 'b'"):
        changed(members, [], {"a": "b"})
    with pytest.raises(Ambiguous, match="names 2 members"):
        key_of({0: 1, "0": 2}, "0")


def test_members_of(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(2), "a.bias": torch.ones(2)}
    assert list(members_of(opened({"model": state, "epoch": 1}, tmp_path))) == ["model", "epoch"]
    for tree in (state, [state], torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1).state_dict()):
        with pytest.raises(UsageError, match="is not a bundle"):
            members_of(opened(tree, tmp_path))
    assert members_of(Checkpoint({}, "torch-zip")) == {}


def test_rows_say_what_a_member_is(tmp_path: Path) -> None:
    shared = torch.ones(8)
    parameter = torch.nn.Parameter(torch.ones(1))
    tree = {
        "G": {"a.weight": shared, "b.weight": shared},
        "ema": {"a.weight": torch.ones(8)},
        "training": {"state_dict": {"a.weight": shared}, "optimizer": torch.optim.SGD([parameter], 0.1).state_dict()},
        "fresh": torch.optim.SGD([parameter], 0.1).state_dict(),
        "mask": torch.ones(3),
        "epoch": 3,
        "betas": (0.9, 0.99),
    }
    rows = table(opened(tree, tmp_path).tree, {"G": "G.pt"})
    assert [(row.name, row.kind, row.tensors, row.bytes, row.file) for row in rows] == [
        ("G", "model weights", 2, 32, "G.pt"),
        ("ema", "EMA weights", 1, 32, ""),
        ("training", "model weights, optimizer without state, 1 parameter", 1, 32, ""),
        ("fresh", "optimizer without state, 1 parameter", 0, 0, ""),
        ("mask", "tensor", 1, 12, ""),
        ("epoch", "plain value", 0, 0, "3"),
        ("betas", "plain values", 0, 0, ""),
    ]


# Plain values and names ----------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
    max_leaves=20,
)


@given(JSON)
def test_json_is_plain(value: Any) -> None:
    assert is_plain(value)
    assert repr(json.loads(json.dumps(value))) == repr(value)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
PART = [1]
DEEP: list[Any] = []
for _ in range(100):
    DEEP = [DEEP]


@looped(
    "value",
    [
        (1,),
        b"a",
        float("nan"),
        float("inf"),
        1j,
        "\ud800",
        {1: 2},
        {"a": {"\ud800": 1}},
        OrderedDict(),
        [stored(1)],
        CYCLE,
        [PART, PART],
        DEEP,
        "x" * (MAX_PLAIN + 1),
        ["x" * 1000] * 70,
        [0] * 20_000,
        {"state": {}, "param_groups": []},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain(value: Any) -> None:
    assert not is_plain(value)


@given(st.text(max_size=30))
def test_names_that_pass_are_names_of_files(name: str) -> None:
    try:
        check_names([name])
    except Conflict as error:
        assert all(c.isprintable() or c == "\n" for c in str(error))
        return
    assert name and name not in (".", "..") and not set(name) & set('/\\:\0*?"<>|') and name.isprintable()
    assert len(f"{name}.safetensors".encode()) <= 255
    for other in (name.upper(), name.lower()):
        with pytest.raises(Conflict):
            check_names([name, other])


def test_good_names() -> None:
    check_names(["generator", "modelA_state_dict", "a.b", "na\u00efve", "\u6a21\u578b", "control", "com", 0, 1, "x y"])
