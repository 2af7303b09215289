"""A checkpoint without optimizer state, bytes behind views and (on request) second copies of equal weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Computed, Data, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.blocks import sha256_of
from ckptool.checkpoint.nodes import same_kind
from ckptool.checkpoint.strided import row_major, subrange
from ckptool.checkpoint.tree import Path, address, item_at, map_storages, rebuild, storages, stored_parts, walk
from ckptool.commands import arg
from ckptool.conventions.state_dicts import find_state_dicts, optimizers
from ckptool.errors import UsageError

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
    """Drops optimizer state and bytes that no tensor shows; with `dedup`, ties equal storages of one set of weights.

    kept: storages that are used elsewhere as well, and stay as they are.
    Reads tensor data only to look for equal storages. Raises `UsageError` for a file that is nothing but an optimizer.
    """
    tree = checkpoint.tree
    others = frozenset(map(id, kept))
    before = _bytes(tree, others)
    tree, dropped = (tree, ()) if keep_optimizer else _without_optimizers(tree, checkpoint.base)
    without = _bytes(tree, others)
    tree, compacted = _compact(tree, others)
    dense = _bytes(tree, others)
    changed = replace(checkpoint, tree=tree)
    tree, tied, tied_bytes = _tied(changed, others) if dedup else (tree, 0, 0)
    changed = replace(changed, tree=tree)
    return Slimmed(changed, dropped, before - without, compacted, without - dense, tied, tied_bytes)


def _bytes(tree: Any, others: Collection[int]) -> int:
    return sum(storage.nbytes for storage in storages(tree) if id(storage) not in others)


# Optimizers ----------------------------------------------------------------------------------------------------------


def _without_optimizers(tree: Any, base: Path) -> tuple[Any, tuple[str, ...]]:
    found = [path for path, _ in optimizers(tree)]
    if () in found:
        raise UsageError(
            f"{address(base) or 'the whole file'} is the state of an optimizer",
            "Without it nothing would be left.",
            f"Drop only what views leave behind: {arg(keep_optimizer=True)}",
        )
    gone: dict[int, tuple[Any, set[Any]]] = {}
    for path in found:
        parent = item_at(tree, path[:-1])
        gone.setdefault(id(parent), (parent, set()))[1].add(path[-1])
    replaced = {number: _left(parent, keys) for number, (parent, keys) in gone.items()}
    return (rebuild(tree, replaced=replaced) if replaced else tree), tuple(address(base + path) for path in found)


def _left(parent: Any, keys: set[Any]) -> Any:
    if isinstance(parent, dict):
        return same_kind(parent, {key: value for key, value in parent.items() if key not in keys})
    return type(parent)(value for index, value in enumerate(parent) if index not in keys)


# Waste behind views --------------------------------------------------------------------------------------------------


def _compact(tree: Any, kept: Collection[int]) -> tuple[Any, int]:
    """The tree with every storage cut down to what its tensors show. Views that overlap go on sharing."""
    views = _plain_views(tree, kept)
    entries: dict[int, TensorEntry] = {}  # id of an entry -> the entry in its place
    count = 0
    for group in views.values():
        moved = _moved(group)
        entries.update(moved)
        count += bool(moved)
    if not entries:
        return tree, 0
    return rebuild(tree, lambda node: entries.get(id(node), node)), count


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
    """The entries of one storage as views of a smaller one; nothing where there is nothing to save."""
    storage = group[0].storage
    shown = [entry for entry in group if entry.numel]
    if not shown:
        return _placed(group, Storage(InlineBytes(b""), storage.location), {}) if storage.nbytes else {}
    kinds = {entry.layout for entry in shown}
    first = shown[0]
    begin, end = first.span()
    if len(kinds) == 1 and first.nbytes < end - begin:  # gaps inside one view: its values in row-major order have none
        data = Computed(first.nbytes, row_major(first).read, (storage,))
        dense = Storage(data, storage.location)
        strides = row_major_strides(first.shape)
        return {id(e): replace(e, storage=dense, stride=strides if e.numel else e.stride, offset=0) for e in group}
    pieces = _packed([(*entry.span(), entry.dtype.itemsize) for entry in shown])
    width = max(entry.dtype.itemsize for entry in group)
    size = pieces[-1][1] + pieces[-1][2]
    size += -size % width
    if size >= storage.nbytes:
        return {}
    return _placed(group, _cut(storage, pieces, size), {begin: at - begin for begin, at, _ in pieces})


def _packed(spans: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The ranges that (begin, end, item size) spans cover, one behind the other: (old begin, new begin, length)."""
    merged: list[list[int]] = []
    for begin, end, width in sorted(spans):
        if merged and begin < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
            merged[-1][2] = max(merged[-1][2], width)
        else:
            merged.append([begin, end, width])
    pieces, at = [], 0
    for begin, end, width in merged:
        at += (begin - at) % width  # item sizes are powers of two: what was aligned stays so
        pieces.append((begin, at, end - begin))
        at += end - begin
    return pieces


def _cut(storage: Storage, pieces: Sequence[tuple[int, int, int]], size: int) -> Storage:
    parts: list[tuple[int, Data]] = [(at, subrange(storage.data, begin, length)) for begin, at, length in pieces]

    def read(offset: int, length: int) -> bytes:
        end = min(offset + length, size)
        out = bytearray(end - offset)
        for at, part in parts:
            low, high = max(offset, at), min(end, at + part.length)
            if low < high:
                out[low - offset : high - offset] = part.read(low - at, high - low)
        return bytes(out)

    return Storage(Computed(size, read, (storage,)), storage.location)


def _placed(group: Sequence[TensorEntry], storage: Storage, shifts: dict[int, int]) -> dict[int, TensorEntry]:
    """The entries on their new storage. shifts: where each piece began -> the bytes that it moved by."""
    moved = {}
    for entry in group:
        offset = 0
        if entry.numel:
            start = entry.span()[0]
            begin = max(place for place in shifts if place <= start)
            offset = (start + shifts[begin]) // entry.dtype.itemsize
        moved[id(entry)] = replace(entry, storage=storage, offset=offset)
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
        for storage in group:
            if len(group) > 1 and (sums[storage.crc] > 1 or None in sums):
                same[sha256_of(storage.data).digest()].append(storage)
        yield from (equals for equals in same.values() if len(equals) > 1)
