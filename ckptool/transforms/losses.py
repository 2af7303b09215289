"""The tensors of one tree that another one, made from it, does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, StorageRef, TensorEntry
from ckptool.checkpoint.nodes import Object, Set
from ckptool.checkpoint.pickled_modules import module_attributes
from ckptool.checkpoint.tree import Path, address, stored_parts, walk
from ckptool.errors import Unsupported, counted, listed, printable
from ckptool.pickles.plain import canonical

# What is a tensor or its data, but was left as the call that would make it: `torch.DoubleStorage([…])`, a rebuild that is not known.
_MADE_OF_TORCH = re.compile(r"torch\.([\w.]+\.)?(\w*(Storage|Tensor)|_rebuild\w*|_load_from_bytes|ScriptObject)")


Lost = list[tuple[Path, str]]


def lost_tensors(before: Any, after: Any) -> Lost:
    """The path and kind of every tensor of `before` that is not in `after` with the same view of the same data.

    Not those that a module itself says are not to be saved (`register_buffer(…, persistent=False)`).
    """
    kept = {view for _, node in walk(after) for view in _views(node)}
    kept |= {view for _, node in transient(before) for view in _views(node)}
    storages = {view[0] for view in kept}
    found: Lost = []
    covered: set[Path] = set()
    for path, node in walk(before):
        if any(path[:depth] in covered for depth in range(len(path))):
            continue
        if any(view not in kept and (len(view) > 1 or view[0] not in storages) for view in _views(node)):
            found.append((path, _kind(node)))
        elif _is_left_as_a_call(node, kept):
            found.append((path, printable(node.name)))
            covered.add(path)
    return found


def _views(node: Any) -> list[tuple[Any, ...]]:
    """Keys by which a node's tensors are found again in another tree; a tensor without any data is its own."""
    if isinstance(node, Composite):
        return [_view(part) for part in node.parts()] or [(id(node.made),)]
    return [_view(part) for part in stored_parts(node)]


def _view(part: TensorEntry | StorageRef) -> tuple[Any, ...]:
    if isinstance(part, StorageRef):
        return (id(part.storage),)
    return id(part.storage), part.dtype, part.shape, part.stride, part.offset


def _kind(node: Any) -> str:
    if isinstance(node, Composite):
        return node.kind
    return "a storage" if isinstance(node, StorageRef) else "a tensor"


def _is_left_as_a_call(node: Any, kept: set[tuple[Any, ...]]) -> bool:
    """True for what torch makes a tensor of, unless all tensors that it was given are there; an object of a program only if it has some."""
    if not isinstance(node, Object) or not _MADE_OF_TORCH.fullmatch(canonical(node.fn)):
        return False
    within = [view for _, part in walk(node) for view in _views(part)]
    return any(view not in kept for view in within) or not (within or node.name.endswith("ScriptObject"))


def transient(tree: Any) -> Iterator[tuple[Path, Any]]:
    """The buffers of whole modules that they do not save themselves, with their paths."""
    for path, node in walk(tree):
        attributes = module_attributes(node)
        names = attributes.get("_non_persistent_buffers_set") if attributes else None
        if attributes and isinstance(names, Set):
            buffers = attributes["_buffers"]
            yield from (((*path, "_buffers", name), buffers[name]) for name in names.items if name in buffers)


def refuse_lost(checkpoint: Checkpoint, found: Lost, why: str, advice: str) -> None:
    """Raises `Unsupported` where tensors would be lost, naming them."""
    if found:
        names = [f"{printable(address((*checkpoint.base, *path))) or 'the top'} ({kind})" for path, kind in found]
        source = checkpoint.source or "the checkpoint"
        raise Unsupported(
            f"{counted(len(found), 'tensor')} of {source} would be lost: {listed(names, 6)}",
            f"{why} Nothing was written.",
            advice,
        )
