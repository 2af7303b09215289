"""One root's tensors, as a container of plain tensors can hold them: what goes along, what stays behind, what is only said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Note, TensorEntry
from ckptool.checkpoint.patterns import selected
from ckptool.checkpoint.state_dicts import StateDict, unnamed_tensors
from ckptool.checkpoint.tree import Path, address, children, holders
from ckptool.errors import Conflict, Unsupported, counted, listed, printable
from ckptool.transforms.losses import lost_tensors


@dataclass(frozen=True, slots=True)
class Exported:
    """A flat dictionary of tensors, the addresses that stay behind, and notes on what the container cannot say."""

    checkpoint: Checkpoint
    left_behind: tuple[str, ...]
    notes: tuple[Note, ...]


def export(
    checkpoint: Checkpoint,
    root: StateDict,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    copy_ties: bool = False,
    materialize: bool = False,
    container: str = "safetensors",
) -> Exported:
    """The tensors of `root` whose keys match, as a flat dictionary.

    copy_ties: write tied tensors once for each name.  materialize: also write out views that are larger than their storage.
    container: where they go, for the messages.
    Raises `Unsupported` naming tensors that are no plain ones, `Conflict` for expanded views unless `materialize`.
    """
    keys = selected([key for key in root.node if type(key) is str], only, exclude)
    chosen = {
        key: value for key, value in root.node.items() if key in keys and isinstance(value, (TensorEntry, Composite))
    }
    here = root.base + root.path
    behind = [address((*here, key)) for key in root.node if key not in chosen]
    behind += [address((*here, "_metadata"))] if getattr(root.node, "metadata", None) else []
    behind += around(checkpoint, root)
    refuse_packed(checkpoint, root)
    if wrong := list(_not_plain(root.node, keys)):
        raise Unsupported(
            f"{container} cannot hold {listed(wrong)}",
            "It has plain tensors only, each under its name. Nothing was written.",
            "Leave them out: --exclude NAME; or keep everything, to be restored by ckptool: --all",
        )
    plain = {key: value for key, value in chosen.items() if isinstance(value, TensorEntry)}
    if not materialize:
        _refuse_expanded(plain, container)
    if copy_ties:
        plain = {key: replace(entry, storage=replace(entry.storage)) for key, entry in plain.items()}
    return Exported(
        replace(checkpoint, tree=plain, tensors_only=True, extras={}),
        tuple(behind),
        tuple(_notes(plain, copy_ties)),
    )


def _not_plain(node: dict[Any, Any], keys: set[str]) -> Iterator[str]:
    """The entries of a root that are tensors of several parts, or hold tensors, with what they are."""
    written = [value for key, value in node.items() if type(key) is str and key in keys and type(value) is TensorEntry]
    for key, value in node.items():
        if isinstance(value, Composite) and key in keys:
            yield f"{printable(key)} ({value.kind})"
            continue
        if isinstance(value, (TensorEntry, Composite)) or (type(key) is str and key not in keys):
            continue
        if count := len(lost_tensors(value, written)):
            yield f"{printable(str(key))} (a {_word(value)} with {counted(count, 'tensor')})"


def _word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return type(value).__name__
    return "dictionary" if isinstance(value, dict) else "object"


def packed(root: StateDict) -> list[str]:
    """The quantized weights of a whole module of which only its class makes a state dict."""
    beside = unnamed_tensors(root) if root.module is not None else []
    return [address(path) for path, tensor in beside if "quantized" in getattr(tensor, "kind", "")]


def refuse_packed(checkpoint: Checkpoint, root: StateDict) -> None:
    """Raises `Unsupported` for a whole module that keeps quantized weights where only its class makes a state dict of them."""
    if found := packed(root):
        raise Unsupported(
            f"{checkpoint.source or 'the checkpoint'}: {root} keeps {counted(len(found), 'quantized tensor')} outside of its "
            f"parameters and buffers: {listed([printable(place) for place in found], 3)}",
            "Only its class knows their names in a state dict. Nothing was written.",
            "Load it with that class, and save its state_dict().",
        )


def lost_ties(node: dict[Any, Any], exported: Exported, container: str) -> list[Note]:
    """What to know of tied tensors that go into a container which has no ties."""
    names: dict[int, list[str]] = {}
    for key in exported.checkpoint.tree:
        if isinstance(entry := node[key], TensorEntry):
            names.setdefault(id(entry.storage), []).append(printable(key))
    tied = [" = ".join(group) for group in names.values() if len(group) > 1]
    message = f"{container} has no ties: written once for each name: {listed(tied, 3)}"
    return [Note("ties-copied", message)] if tied else []


def around(checkpoint: Checkpoint, root: StateDict) -> list[str]:
    """The addresses of all else in a file: tensors of the root's module without a name in a state dict, then everything beside it."""
    beside = [address(root.base + path) for path, _ in unnamed_tensors(root)] if root.module is not None else []
    return beside + siblings(checkpoint.tree, root.path, root.base)


def siblings(tree: Any, path: Path, base: Path = ()) -> list[str]:
    """The entries beside what is at a path, and beside everything above it. base: where the tree is in its file."""
    return [
        address((*base, *path[:depth], other))
        for depth, holder in enumerate(holders(tree, path))
        for other, _ in children(holder)
        if other != path[depth]
    ]


def _refuse_expanded(tensors: dict[str, TensorEntry], container: str) -> None:
    for key, entry in tensors.items():
        if entry.nbytes > entry.storage.nbytes:
            raise Conflict(
                f"{printable(key)} is an expanded view: {entry.nbytes:,} bytes to write, {entry.storage.nbytes:,} stored",
                f"{container} has no strides, so every repeated value would be written out.",
                "Write it out: --materialize; leave it out: --exclude NAME; or keep it as it is: --all",
            )


def _notes(tensors: dict[str, TensorEntry], copy_ties: bool) -> list[Note]:
    views: dict[int, dict[Any, tuple[str, TensorEntry]]] = {}
    for key, entry in tensors.items():
        view = (entry.dtype, entry.shape, entry.stride, entry.offset, entry.flags)
        views.setdefault(id(entry.storage), {}).setdefault(view, (key, entry))
    shared = [
        name
        for group in views.values()
        if _overlap([entry for _, entry in group.values()])
        for name, _ in group.values()
    ]
    notes = []
    if shared and not copy_ties:
        names = listed([printable(name) for name in shared], 4)
        notes.append(
            Note(
                "sharing-lost",
                f"different views of one storage are written separately and no longer share memory: {names}",
            )
        )
    resolved = [key for key, entry in tensors.items() if entry.flags.conj or entry.flags.neg]
    if resolved:
        notes.append(
            Note(
                "resolved-views",
                f"conjugated or negated views are written as their values: {listed([printable(k) for k in resolved], 4)}",
            )
        )
    return notes


def _overlap(entries: list[TensorEntry]) -> bool:
    spans = sorted(entry.span() for entry in entries)
    return any(before[1] > after[0] for before, after in pairwise(spans))
