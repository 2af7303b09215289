"""The tree of a damaged checkpoint without its lost tensors, or with those of another checkpoint in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.analysis.compare import same_bytes
from ckptool.checkpoint import Checkpoint, Composite, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.nodes import Set, same_kind
from ckptool.checkpoint.strided import row_major
from ckptool.checkpoint.tree import Path, address, item_at, rebuild
from ckptool.conventions.state_dicts import find_state_dicts, optimizers
from ckptool.formats import marks
from ckptool.formats.damaged import LostTensor, Salvaged


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """A checkpoint that can be written.

    lost: all tensors that the file does not give.  still_lost: those that no other checkpoint gave.
    dropped: addresses of what had to go along with them.  filled: (address, address there).  refused: (address, why).
    """

    checkpoint: Checkpoint
    lost: list[LostTensor]
    still_lost: list[LostTensor]
    dropped: list[str]
    filled: list[tuple[str, str]]
    refused: list[tuple[str, str]]


def restored(done: Salvaged, other: Checkpoint | None) -> Restored:
    """The checkpoint with lost tensors taken from the other one or left out; marked if there are any."""
    checkpoint = done.checkpoint
    lost = done.lost_tensors()
    given = fill(checkpoint, lost, other) if other is not None else Fill()
    still = [item for item in lost if id(item.node) not in given.new]
    tree, dropped = without_lost(checkpoint.tree, lost, given.new) if lost else (checkpoint.tree, [])
    metadata = dict(checkpoint.metadata)
    if lost or done.raw:
        before = str(metadata.get(marks.RECOVERED, ""))
        places = [place for place, _ in given.filled]
        metadata[marks.RECOVERED] = marks.recovered_mark([item.address for item in still], places, before)
    marked = replace(checkpoint, tree=tree, metadata=metadata, origin=None)
    return Restored(marked, lost, still, dropped, given.filled, given.refused)


def without_lost(tree: Any, lost: Sequence[LostTensor], new: Mapping[int, Any]) -> tuple[Any, list[str]]:
    """The tree without what is lost and not in `new` (by the id of the node it replaces), and what had to go along.

    An entry of a dictionary is left out; in a list or tuple, where the others would move up, None stands in its place.
    The state that an optimizer keeps for a parameter goes as a whole: half of it is worse than none.
    """
    gone = {id(item.node) for item in lost if id(item.node) not in new}
    slots, names = _broken_slots(tree, gone)
    replaced: dict[int, Any] = {key: node for key, node in new.items() if isinstance(node, Composite)}
    for node in _containers(tree):
        if isinstance(node, dict):
            kept = {key: value for key, value in node.items() if id(value) not in gone and (id(node), key) not in slots}
            if len(kept) < len(node):
                replaced[id(node)] = same_kind(node, kept)
        elif isinstance(node, Set):
            items = [item for item in node.items if id(item) not in gone]
            replaced |= {id(node): Set(items, node.frozen)} if len(items) < len(node.items) else {}
        elif any(id(item) in gone for item in node):
            replaced[id(node)] = type(node)(None if id(item) in gone else item for item in node)
    return rebuild(tree, lambda node: None if id(node) in gone else new.get(id(node), node), replaced), names


def _containers(tree: Any) -> Iterator[Any]:
    """Every dictionary, list, tuple and set that a tree is made of, once; inside of objects too."""
    return (node for node in visit(tree) if isinstance(node, (dict, list, tuple, Set)))


def _broken_slots(tree: Any, gone: set[int]) -> tuple[set[tuple[int, Any]], list[str]]:
    """The entries of optimizers' states of which something is lost, as (state, key), and their addresses."""
    slots, names = set(), []
    for path, optimizer in optimizers(tree):
        state = optimizer["state"]
        for key, slot in state.items():
            if isinstance(slot, dict) and any(id(value) in gone for value in slot.values()):
                slots.add((id(state), key))
                names.append(address((*path, "state", key)))
    return slots, names


# From another checkpoint ---------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Fill:
    """Tensors of another checkpoint, by the id of the lost one; (address, address there), (address, why not)."""

    new: dict[int, Any] = field(default_factory=dict)
    filled: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


def fill(checkpoint: Checkpoint, lost: Sequence[LostTensor], other: Checkpoint) -> Fill:
    """Tensors of `other` for those that are lost: the same key, dtype and shape, tied where they were tied.

    A key is looked for under its whole address; where that leads nowhere, in the one set of model weights of `other`.
    """
    result = Fill()
    roots = [part.path for part in find_state_dicts(checkpoint) if part.is_model]
    there = [part for part in find_state_dicts(other) if part.is_model]

    def look_up(path: Path) -> tuple[Path, Any]:
        node = item_at(other.tree, path)
        root = next((root for root in roots if path[: len(root)] == root), None)
        if node is None and root is not None and len(there) == 1:
            rest = path[len(root) :]
            return (*there[0].path, *rest), item_at(there[0].node, rest)
        return path, node

    groups: dict[int, list[LostTensor]] = {}
    for item in lost:
        groups.setdefault(id(item.storage), []).append(item)
    for group in groups.values():
        found = [look_up(item.path) for item in group]
        why = _why_not(group, [node for _, node in found])
        if why:
            result.refused += [(item.address, why) for item in group]
            continue
        made: dict[int, Storage] = {}
        one_view = _is_one_view([item.node for item in group])
        for item, (place, node) in zip(group, found, strict=True):
            result.new[id(item.node)] = _in_place_of(item, found[0][1] if one_view else node, made)
            result.filled.append((item.address, address(place)))
    return result


def _why_not(group: Sequence[LostTensor], found: Sequence[Any]) -> str:
    """The reason why tensors of one storage cannot be taken from there; empty if they can."""
    for item, node in zip(group, found, strict=True):
        if node is None:
            return "the other checkpoint has none of that name"
        if isinstance(item.node, StorageRef) or type(node) is not type(item.node):
            return "it is another kind of value there"
        if node.dtype is not item.node.dtype or node.shape != item.node.shape:
            return f"it is {_type_of(node)} there, not {_type_of(item.node)}"
        if isinstance(node, Composite) and node.kind != item.node.kind:  # type: ignore[union-attr]
            return f"it is a {node.kind} tensor there"
    views: list[Any] = [item.node for item in group]
    if len(group) == 1 or all(isinstance(node, Composite) for node in found):
        return ""
    if any(isinstance(node, Composite) for node in found):
        return "it shares its storage with a tensor of another kind"
    if _is_one_view(views):
        return "" if all(_is_same(found[0], node) for node in found[1:]) else "it was tied, and is not there"
    same = all(a.same_view(b) and b.storage is found[0].storage for a, b in zip(views, found, strict=True))
    return "" if same else "it was a view of a storage that others share, and is not there"


def _type_of(node: TensorEntry | Composite) -> str:
    return f"{node.dtype} {list(node.shape or ())}"


def _is_one_view(nodes: Sequence[Any]) -> bool:
    return all(isinstance(node, TensorEntry) and node.same_view(nodes[0]) for node in nodes)


def _is_same(a: TensorEntry, b: TensorEntry) -> bool:
    return a.view == b.view or (a.flags.lazy == b.flags.lazy and same_bytes(row_major(a), row_major(b)))


def _in_place_of(item: LostTensor, node: Any, made: dict[int, Storage]) -> Any:
    """The other checkpoint's tensor with the device and flags of the lost one."""
    if not isinstance(node, TensorEntry):
        return node
    old: Any = item.node
    storage = made.setdefault(id(node.storage), replace(node.storage, location=item.storage.location))
    return replace(node, storage=storage, flags=old.flags._replace(conj=node.flags.conj, neg=node.flags.neg))
