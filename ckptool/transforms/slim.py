"""A tree without optimizer state, without bytes that no tensor shows, and with equal storages tied."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.nodes import fields
from ckptool.checkpoint.strided import apart, row_major
from ckptool.checkpoint.tree import Path, address, map_storages, storages, stored_parts, tensors, walk
from ckptool.commands import arg
from ckptool.conventions.optimizer_keys import flat_keys, nested
from ckptool.conventions.state_dicts import find_state_dicts, optimizers
from ckptool.errors import UsageError
from ckptool.transforms.bundles import equal
from ckptool.transforms.edit import without_entries

# A record of its own costs a zip a few hundred bytes; and counters that are equal today (`num_batches_tracked`) go on
# counting separately.
MIN_SHARED = 1024


def without_optimizers(tree: Any, base: Path) -> tuple[Any, tuple[str, ...]]:
    """The tree without optimizer state, and its addresses. Raises `UsageError` where no tensor would be left."""
    flat, paths = flat_keys(tree), {path: None for path, _ in optimizers(nested(tree))}
    parts = {"param_groups", "state", "fast_state"}  # of an optimizer, also of Lookahead, and of one pickled as it is
    states = {id(node) for node in visit(tree) if {"param_groups"} < parts & fields(node).keys()}

    def is_dropped(holder: Any, path: Path) -> bool:
        # Of a flattened one each key has the name of the weights before it: `optimizer.state.NAME.KEY`.
        return path in paths or id(holder[path[-1]]) in states or (len(path) == 1 and path[0] in flat)

    lean, dropped = without_entries(tree, is_dropped) if states or paths else (tree, [])
    if id(tree) in states or (dropped and not any(True for _ in tensors(lean))):
        what = f"{address(base) or 'the whole file'} holds only optimizer state"
        fix = f"Drop only unused bytes: {arg(keep_optimizer=True)}"
        raise UsageError(what, "Without it no tensor would be left.", fix)
    paths |= {path: None for path in dropped if path[0] not in flat}
    return lean, tuple(address(base + path) for path in paths)


# Waste behind views --------------------------------------------------------------------------------------------------


def plain_views(tree: Any, reserved: Collection[int] = ()) -> dict[int, list[TensorEntry]]:
    """The tensors of each storage that only plain tensors use, each once. reserved: ids of storages with more users."""
    views: dict[int, dict[int, TensorEntry]] = defaultdict(dict)
    excluded = set(reserved)
    for _, node in walk(tree):
        if isinstance(node, TensorEntry):
            views[id(node.storage)][id(node)] = node
        else:
            excluded.update(id(part.storage) for part in stored_parts(node))
    return {number: list(group.values()) for number, group in views.items() if number not in excluded}


def cut_down(group: Sequence[TensorEntry]) -> dict[int, TensorEntry]:
    """The entries of one storage as views of smaller ones, by the ids of the old entries; empty where nothing is saved.

    Views that overlap still share a storage."""
    storage = group[0].storage
    shown = [entry for entry in group if entry.numel]
    if not shown:
        empty = Storage(InlineBytes(b""), storage.location)
        return {id(entry): replace(entry, storage=empty, offset=0) for entry in group} if storage.nbytes else {}
    first, kinds = shown[0], {entry.layout for entry in shown}
    begin, end = first.span()
    if len(kinds) == 1 and first.nbytes < end - begin:  # gaps inside one view: in row-major order there are none
        dense = Storage(row_major(first), storage.location)
        strides = row_major_strides(first.shape)
        return {id(e): replace(e, storage=dense, stride=strides if e.numel else e.stride, offset=0) for e in group}
    # The ranges that are shown, in whole elements of the widest type, so that every view stays aligned.
    width = max(entry.dtype.itemsize for entry in group)
    ranges: list[list[int]] = []
    for begin, end in sorted(entry.span() for entry in shown):
        begin, end = begin - begin % width, end + -end % width
        if ranges and begin <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], end)
        else:
            ranges.append([begin, end])
    if sum(end - begin for begin, end in ranges) >= storage.nbytes:
        return {}
    flat = TensorEntry(storage, by_name("u8"), (storage.nbytes,), (1,))
    copies = [apart(flat.narrow(0, begin, min(end, storage.nbytes) - begin)).storage for begin, end in ranges]
    views = {}
    for entry in group:
        begin = entry.span()[0] if entry.numel else ranges[0][0]
        number = bisect_right([start for start, _ in ranges], begin) - 1
        offset = (begin - ranges[number][0]) // entry.dtype.itemsize
        views[id(entry)] = replace(entry, storage=copies[number], offset=offset)
    return views


# Equal bytes ---------------------------------------------------------------------------------------------------------


def tied_storages(checkpoint: Checkpoint, reserved: Collection[int]) -> tuple[Any, int, int]:
    """The tree with equal storages of one set of weights tied; how many storages, and bytes, that saves.
    Equal storages of two sets (a model and its average) stay two: they are to differ tomorrow."""
    users: dict[int, set[Path | None]] = defaultdict(set)
    for root in find_state_dicts(checkpoint):
        for storage in storages(root.node):
            users[id(storage)].add(root.path if root.is_model else None)
    candidates: list[tuple[Any, Storage]] = []
    for group in plain_views(checkpoint.tree, reserved).values():
        storage = group[0].storage
        classes, roots = {entry.dtype.storage for entry in group}, users[id(storage)]
        if len(classes) == len(roots) == 1 and None not in roots and storage.nbytes >= MIN_SHARED:
            candidates.append(((storage.nbytes, storage.location, *classes, *roots), storage))
    twins: dict[int, Storage] = {}
    count = nbytes = 0
    for equals in equal(candidates):
        twins |= dict.fromkeys(map(id, equals), equals[0].alone())
        count, nbytes = count + len(equals) - 1, nbytes + (len(equals) - 1) * equals[0].nbytes
    tree = map_storages(checkpoint.tree, lambda storage: twins.get(id(storage), storage)) if twins else checkpoint.tree
    return tree, count, nbytes
