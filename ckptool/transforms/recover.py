"""The tree of a damaged checkpoint without its lost tensors, or with those of another in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Composite, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.compare import same_bytes
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.nodes import Set, same_kind
from ckptool.checkpoint.strided import row_major
from ckptool.checkpoint.tree import address, item_at, rebuild
from ckptool.conventions.state_dicts import find_state_dicts, optimizers
from ckptool.formats import marks
from ckptool.formats.damaged import LostTensor, Salvaged


class FilledIn(NamedTuple):
    """A lost tensor that another checkpoint gave.  there: its address in that."""

    address: str
    there: str


class NotFilled(NamedTuple):
    """A lost tensor that the other checkpoint could not give, and why."""

    address: str
    why: str


class Restored(NamedTuple):
    """A checkpoint that can be written.
    lost: all tensors that the file does not give.  still_lost: those that no other checkpoint gave.
    dropped: addresses of what had to go along with them."""

    checkpoint: Checkpoint
    lost: list[LostTensor]
    still_lost: list[LostTensor]
    dropped: list[str]
    filled: list[FilledIn]
    refused: list[NotFilled]


def restored(done: Salvaged, other: Checkpoint | None) -> Restored:
    """The checkpoint with lost tensors taken from the other one or left out; marked if there are any.
    Taken is the same key, dtype and shape, tied where it was tied. A key is looked for under its whole address; where
    that leads nowhere, in the one set of model weights of the other."""
    checkpoint, lost = done.checkpoint, done.lost_tensors()
    new: dict[int, Any] = {}  # by the id of the node that it replaces
    filled = list[FilledIn]()
    refused = list[NotFilled]()
    groups: dict[int, list[LostTensor]] = {}
    for item in lost if other is not None else ():
        groups.setdefault(id(item.storage), []).append(item)
    roots = [part.path for part in find_state_dicts(checkpoint) if part.is_model] if groups else []
    there = [part for part in find_state_dicts(other) if part.is_model] if groups and other is not None else []
    for group in groups.values():
        places, nodes = [], []
        for item in group:
            place, node = item.path, item_at(other.tree, item.path) if other is not None else None
            root = next((root for root in roots if place[: len(root)] == root), None)
            if node is None and root is not None and len(there) == 1:
                rest = place[len(root) :]
                place, node = (*there[0].path, *rest), item_at(there[0].node, rest)
            places.append(place)
            nodes.append(node)
        if why := _why_not(group, nodes):
            refused += [NotFilled(item.address, why) for item in group]
            continue
        made: dict[int, Storage] = {}
        one_view = _is_one_view([item.node for item in group])
        for item, place, node in zip(group, places, [nodes[0]] * len(nodes) if one_view else nodes, strict=True):
            filled.append(FilledIn(item.address, address(place)))
            new[id(item.node)] = node
            if isinstance(node, TensorEntry) and isinstance(item.node, TensorEntry):  # on the device of the lost one
                moved = replace(node.storage, location=item.storage.location)
                storage = made.setdefault(id(node.storage), moved)
                flags = item.node.flags._replace(conj=node.flags.conj, neg=node.flags.neg)
                new[id(item.node)] = replace(node, storage=storage, flags=flags)
    still = [item for item in lost if id(item.node) not in new]
    tree, dropped = without_lost(checkpoint.tree, lost, new) if lost else (checkpoint.tree, [])
    metadata = dict(checkpoint.metadata)
    if lost or done.raw or done.unlisted:
        before, taken = str(metadata.get(marks.RECOVERED, "")), [place for place, _ in filled]
        metadata[marks.RECOVERED] = marks.recovered_mark([item.address for item in still], taken, before)
    marked = replace(checkpoint, tree=tree, metadata=metadata, origin=None)
    return Restored(marked, lost, still, dropped, filled, refused)


def without_lost(tree: Any, lost: Sequence[LostTensor], new: Mapping[int, Any]) -> tuple[Any, list[str]]:
    """The tree without what is lost and not in `new` (by the id of the node it replaces), and what had to go along.
    An entry of a dictionary is left out; in a list or tuple, where the others would move up, None stands in its place.
    The state that an optimizer keeps for a parameter goes as a whole: half of it is worse than none."""
    gone = {id(item.node) for item in lost if id(item.node) not in new}
    slots, names = set(), []
    for path, optimizer in optimizers(tree):
        state = optimizer["state"]
        for key, slot in state.items():
            if isinstance(slot, dict) and any(id(value) in gone for value in slot.values()):
                slots.add((id(state), key))
                names.append(address((*path, "state", key)))
    replaced: dict[int, Any] = {key: node for key, node in new.items() if isinstance(node, Composite)}
    for node in visit(tree):  # inside of objects too
        if isinstance(node, dict):
            kept = {key: value for key, value in node.items() if id(value) not in gone and (id(node), key) not in slots}
            if len(kept) < len(node):
                replaced[id(node)] = same_kind(node, kept)
        elif isinstance(node, Set) and any(id(item) in gone for item in node.items):
            replaced[id(node)] = Set([item for item in node.items if id(item) not in gone], node.frozen)
        elif isinstance(node, (list, tuple)) and any(id(item) in gone for item in node):
            replaced[id(node)] = type(node)(None if id(item) in gone else item for item in node)
    return rebuild(tree, lambda node: None if id(node) in gone else new.get(id(node), node), replaced), names


def _why_not(group: Sequence[LostTensor], found: Sequence[Any]) -> str:
    """The reason why tensors of one storage cannot be taken from there; empty if they can."""
    for item, node in zip(group, found, strict=True):
        if node is None:
            return "the other checkpoint has none of that name"
        if isinstance(item.node, StorageRef) or type(node) is not type(item.node):
            return "it is another kind of value there"
        if node.dtype is not item.node.dtype or node.shape != item.node.shape:
            here, there = (f"{each.dtype} {list(each.shape or ())}" for each in (item.node, node))
            return f"it is {there} there, not {here}"
        if isinstance(node, Composite) and isinstance(item.node, Composite) and node.kind != item.node.kind:
            return f"it is a {node.kind} tensor there"
    views: list[Any] = [item.node for item in group]
    if len(group) == 1 or all(isinstance(node, Composite) for node in found):
        return ""
    if any(isinstance(node, Composite) for node in found):
        return "it shares its storage with a tensor of another kind"
    if _is_one_view(views):
        one = found[0]
        same = all(
            one.view == node.view or (one.flags.lazy == node.flags.lazy and same_bytes(row_major(one), row_major(node)))
            for node in found[1:]
        )
        return "" if same else "it was tied, and is not there"
    same = all(a.same_view(b) and b.storage is found[0].storage for a, b in zip(views, found, strict=True))
    return "" if same else "it was a view of a storage that others share, and is not there"


def _is_one_view(nodes: Sequence[Any]) -> bool:
    return all(isinstance(node, TensorEntry) and node.same_view(nodes[0]) for node in nodes)
