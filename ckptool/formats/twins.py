"""Storages that are equal but not tied: stored once, and given back as the separate storages that they are.

Torch knows no such thing, so a record that it does not read says which tensors belong to which storage:
`[[["a", "b"], ["c"]], …]`, for each piece of data the storages on it, each as the addresses of its tensors.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from ckptool.checkpoint import Note, Storage, TensorEntry
from ckptool.checkpoint.tree import address, rebuild, walk
from ckptool.errors import Corrupt, counted

MAX_RECORD = 64 << 20


def record_of(tree: Any) -> bytes:
    """The record for a tree; empty where no storages are twins."""
    groups: dict[tuple[int, str], dict[int, list[str]]] = defaultdict(dict)
    for path, node in walk(tree):
        if isinstance(node, TensorEntry) and node.storage.deduplicated:
            storage = node.storage
            groups[id(storage.data), storage.location].setdefault(id(storage), []).append(address(path))
    shared = [list(storages.values()) for storages in groups.values() if len(storages) > 1]
    return json.dumps(shared, separators=(",", ":")).encode() if shared else b""


def separated(tree: Any, record: bytes) -> tuple[Any, list[Note]]:
    """The tree in which the storages that a record names are separate again, and a note that says so.

    Raises `Corrupt` for a record of another shape. Addresses that lead to no tensor are passed over: the tensor is gone.
    """
    owner = {place: (number, index) for number, index, place in _places(record)}
    storages: dict[tuple[int, int, int], Storage] = {}
    entries: dict[int, TensorEntry] = {}
    for path, node in walk(tree):
        if isinstance(node, TensorEntry) and (found := owner.get(address(path))) is not None:
            old = node.storage
            storage = storages.setdefault(
                (id(old), *found), Storage(old.data, old.location, old.crc, deduplicated=True)
            )
            entries.setdefault(
                id(node), TensorEntry(storage, node.dtype, node.shape, node.stride, node.offset, node.flags)
            )
    if not entries:
        return tree, []
    note = Note(
        "new-ties",
        f"{counted(len(storages), 'storage is', 'storages are')} stored as "
        f"{len({old for old, _, _ in storages}):,}, being equal: ckptool keeps them apart, "
        "stock torch.load ties them",
    )
    return rebuild(tree, lambda node: entries.get(id(node), node)), [note]


def _places(record: bytes) -> list[tuple[int, int, str]]:
    try:
        groups = json.loads(record)
        places = [
            (number, index, place)
            for number, storages in enumerate(groups)
            for index, names in enumerate(storages)
            for place in names
        ]
    except (ValueError, TypeError, RecursionError) as error:
        raise Corrupt("its record of twin storages is damaged", "It is not the text that ckptool writes.") from error
    if not all(type(place) is str for _, _, place in places):
        raise Corrupt(
            "its record of twin storages is damaged", "It names tensors by something else than their addresses."
        )
    return places
