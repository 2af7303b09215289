"""The tree of a damaged checkpoint without its lost tensors, and the mark that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.nodes import Set, same_kind
from ckptool.checkpoint.tree import address, rebuild
from ckptool.conventions.state_dicts import optimizers
from ckptool.formats import marks
from ckptool.formats.damaged import LostTensor, Salvaged


def restored(done: Salvaged) -> tuple[Checkpoint, list[LostTensor], list[str]]:
    """The checkpoint without what is lost, marked if anything is; what that is, and the addresses of what had to go
    along with it."""
    checkpoint, lost = done.checkpoint, done.lost_tensors()
    tree, dropped = without_lost(checkpoint.tree, lost) if lost else (checkpoint.tree, [])
    metadata = dict(checkpoint.metadata)
    if lost:
        before = str(metadata.get(marks.RECOVERED, ""))
        metadata[marks.RECOVERED] = marks.recovered_mark([item.address for item in lost], before)
    return replace(checkpoint, tree=tree, metadata=metadata, origin=None), lost, dropped


def without_lost(tree: Any, lost: Sequence[LostTensor]) -> tuple[Any, list[str]]:
    """The tree without what is lost, and the addresses of what had to go along.
    An entry of a dictionary is left out; in a list or tuple, where the others would move up, None stands in its place.
    The state that an optimizer keeps for a parameter goes as a whole: half of it is worse than none."""
    gone = {id(item.node) for item in lost}
    slots, names = set(), []
    for path, optimizer in optimizers(tree):
        state = optimizer["state"]
        for key, slot in state.items():
            if isinstance(slot, dict) and any(id(value) in gone for value in slot.values()):
                slots.add((id(state), key))
                names.append(address((*path, "state", key)))
    replaced: dict[int, Any] = {}
    for node in visit(tree):  # inside of objects too
        if isinstance(node, dict):
            kept = {key: value for key, value in node.items() if id(value) not in gone and (id(node), key) not in slots}
            if len(kept) < len(node):
                replaced[id(node)] = same_kind(node, kept)
        elif isinstance(node, Set) and any(id(item) in gone for item in node.items):
            replaced[id(node)] = Set([item for item in node.items if id(item) not in gone], node.frozen)
        elif isinstance(node, (list, tuple)) and any(id(item) in gone for item in node):
            replaced[id(node)] = type(node)(None if id(item) in gone else item for item in node)
    return rebuild(tree, lambda node: None if id(node) in gone else node, replaced), names
