"""A checkpoint without optimizer state, bytes behind views and (on request) second copies of equal weights."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ckptool.checkpoint import Checkpoint, Computed, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.blocks import sha256_of
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import same_kind
from ckptool.checkpoint.progress import over
from ckptool.checkpoint.strided import row_major
from ckptool.checkpoint.tree import Path, address, item_at, map_storages, rebuild, storages, stored_parts, walk
from ckptool.commands import arg
from ckptool.conventions.state_dicts import find_state_dicts, optimizers
from ckptool.errors import UsageError
from ckptool.transforms.views import joined, padded

# A record of its own costs a zip a few hundred bytes; and counters that are equal today (`num_batches_tracked`) count
# on their own.
MIN_SHARED = 1024


@dataclass(frozen=True, slots=True)
class Slimmed:
    """The parts that were left out, and the bytes that each way saved.

    dropped: addresses of the optimizers.  compacted: storages that lost bytes behind views.
    tied: storages that are one with an equal one now.
    """

    checkpoint: Checkpoint
    dropped: tuple[str, ...]
    optimizer_bytes: int
    compacted: int
    waste_bytes: int
    tied: int
    tied_bytes: int

    @property
    def changed(self) -> bool:
        return bool(self.dropped or self.compacted or self.tied)


def slim(
    checkpoint: Checkpoint, *, dedup: bool = False, keep_optimizer: bool = False, kept: Iterable[Storage] = ()
) -> Slimmed:
    """Drops optimizer state and bytes that no tensor uses; with `dedup`, ties equal storages of one set of weights.

    kept: storages that are used elsewhere as well, and stay as they are.
    Reads tensor data only to look for equal storages. Raises `UsageError` for a file that is nothing but an optimizer.
    """
    others = frozenset(map(id, kept))

    def size(tree: Any) -> int:
        return sum(storage.nbytes for storage in storages(tree) if id(storage) not in others)

    whole = checkpoint.tree
    lean, dropped = (whole, ()) if keep_optimizer else _without_optimizers(whole, checkpoint.base)
    # Every storage is cut down to what its tensors show; views that overlap go on sharing.
    moved = [*filter(None, map(_moved, _plain_views(lean, others).values()))]
    smaller = {old: entry for group in moved for old, entry in group.items()}
    dense = rebuild(lean, lambda node: smaller.get(id(node), node)) if moved else lean
    tree, tied, tied_bytes = _tied(replace(checkpoint, tree=dense), others) if dedup else (dense, 0, 0)
    before, without, after = map(size, (whole, lean, dense))
    changed = replace(checkpoint, tree=tree)
    return Slimmed(changed, dropped, before - without, len(moved), without - after, tied, tied_bytes)


# Optimizers ----------------------------------------------------------------------------------------------------------


def _without_optimizers(tree: Any, base: Path) -> tuple[Any, tuple[str, ...]]:
    found = [path for path, _ in optimizers(tree)]
    if () in found:
        raise UsageError(
            f"{address(base) or 'the whole file'} is the state of an optimizer",
            "Without it nothing would be left.",
            f"Drop only what views leave behind: {arg(keep_optimizer=True)}",
        )
    replaced: dict[int, Any] = {}
    for path in found:
        parent = item_at(tree, path[:-1])
        if isinstance(parent, dict):
            left = {key: value for key, value in parent.items() if (*path[:-1], key) not in found}
            replaced[id(parent)] = same_kind(parent, left)
        else:
            items = (value for index, value in enumerate(parent) if (*path[:-1], index) not in found)
            replaced[id(parent)] = type(parent)(items)
    return (rebuild(tree, replaced=replaced) if replaced else tree), tuple(address(base + path) for path in found)


# Waste behind views --------------------------------------------------------------------------------------------------


def _plain_views(tree: Any, kept: Collection[int] = ()) -> dict[int, list[TensorEntry]]:
    """The tensors of each storage that only plain tensors use, each once. kept: storages that others use, too."""
    views: dict[int, dict[int, TensorEntry]] = defaultdict(dict)
    others = set(kept)
    for _, node in walk(tree):
        if isinstance(node, TensorEntry):
            views[id(node.storage)][id(node)] = node
        else:
            others.update(id(part.storage) for part in stored_parts(node))
    return {number: list(group.values()) for number, group in views.items() if number not in others}


def _moved(group: Sequence[TensorEntry]) -> dict[int, TensorEntry]:
    """The entries of one storage as views of a smaller one, by the ids of the old; none where nothing is saved."""
    storage = group[0].storage
    shown = [entry for entry in group if entry.numel]
    if not shown:
        empty = Storage(InlineBytes(b""), storage.location)
        return {id(entry): replace(entry, storage=empty, offset=0) for entry in group} if storage.nbytes else {}
    first, kinds = shown[0], {entry.layout for entry in shown}
    begin, end = first.span()
    if len(kinds) == 1 and first.nbytes < end - begin:  # gaps inside one view: its values in row-major order have none
        dense = Storage(Computed(first.nbytes, row_major(first).read, (storage,)), storage.location)
        strides = row_major_strides(first.shape)
        return {id(e): replace(e, storage=dense, stride=strides if e.numel else e.stride, offset=0) for e in group}
    # What is shown, in whole elements of the widest type, so that every view stays aligned.
    width = max(entry.dtype.itemsize for entry in group)
    ranges: list[list[int]] = []
    for begin, end in sorted(entry.span() for entry in shown):
        begin, end = begin - begin % width, end + -end % width
        if ranges and begin <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], end)
        else:
            ranges.append([begin, end])
    places = [0, *accumulate(end - begin for begin, end in ranges)]
    if places[-1] >= storage.nbytes:
        return {}
    flat = TensorEntry(storage, by_name("u8"), (storage.nbytes,), (1,))
    kept = [(begin, min(end, storage.nbytes) - begin, end - begin) for begin, end in ranges]
    smaller = joined([padded(flat.narrow(0, begin, there), 0, size) for begin, there, size in kept], 0).storage
    moved = {}
    for entry in group:
        number = bisect_right(ranges, [entry.span()[0], sys.maxsize]) - 1 if entry.numel else 0
        begin = entry.span()[0] - ranges[number][0] + places[number] if entry.numel else 0
        moved[id(entry)] = replace(entry, storage=smaller, offset=begin // entry.dtype.itemsize)
    return moved


# Equal bytes ---------------------------------------------------------------------------------------------------------


def _tied(checkpoint: Checkpoint, kept: Collection[int]) -> tuple[Any, int, int]:
    """The tree with equal storages of one set of weights tied; how many of them, and their bytes, are not stored.

    What is equal today in two sets (a model and its average) stays two: they are to differ tomorrow.
    """
    users: dict[int, set[Path | None]] = defaultdict(set)
    for root in find_state_dicts(checkpoint):
        for storage in storages(root.node):
            users[id(storage)].add(root.path if root.is_model else None)
    candidates: list[tuple[Any, Storage]] = []
    for group in _plain_views(checkpoint.tree, kept).values():
        storage = group[0].storage
        classes, roots = {entry.dtype.storage for entry in group}, users[id(storage)]
        if len(classes) == len(roots) == 1 and None not in roots and storage.nbytes >= MIN_SHARED:
            candidates.append(((storage.nbytes, storage.location, *classes, *roots), storage))
    one: dict[int, Storage] = {}
    count = nbytes = 0
    for equals in equal(candidates):
        one |= dict.fromkeys(map(id, equals), equals[0].alone())
        count, nbytes = count + len(equals) - 1, nbytes + (len(equals) - 1) * equals[0].nbytes
    tree = map_storages(checkpoint.tree, lambda storage: one.get(id(storage), storage)) if one else checkpoint.tree
    return tree, count, nbytes


def equal(candidates: Sequence[tuple[Any, Storage]]) -> Iterator[list[Storage]]:
    """Groups of storages of one kind with the same sha256; those that no checksum equals are not read."""
    alike: dict[Any, list[Storage]] = defaultdict(list)
    for kind, storage in candidates:
        alike[kind].append(storage)
    for group in alike.values():
        sums = Counter(storage.crc for storage in group)  # None: the container has no checksums
        same: dict[bytes, list[Storage]] = defaultdict(list)
        for storage in over(group, lambda each: each.nbytes):
            if len(group) > 1 and (sums[storage.crc] > 1 or None in sums):
                same[sha256_of(storage.data).digest()].append(storage)
        yield from (equals for equals in same.values() if len(equals) > 1)
