"""Flattens a state dict for containers of plain tensors, and finds the tensors that would be lost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Composite, Note, StorageRef, TensorEntry
from ckptool.checkpoint.graph import above
from ckptool.checkpoint.nodes import Object, OrderedDict, Set, canonical
from ckptool.checkpoint.paths import selected
from ckptool.checkpoint.tree import Path, address, children, holders, memories, module_attributes, stored_parts, walk
from ckptool.commands import NAME, arg, input_of
from ckptool.conventions.state_dicts import (
    PLAIN,
    StateDict,
    find_state_dicts,
    is_beside,
    is_metadata,
    is_of_training,
    quantized_outside,
    unnamed_tensors,
)
from ckptool.errors import Conflict, Unsupported, counted, listed, printable, quoted
from ckptool.facts import replace, size
from ckptool.formats import Format, marks

MAX_WRITTEN_OUT = 1 << 30  # bytes of a view that repeats what is stored


class Exported(NamedTuple):
    """A flat dictionary of tensors, the addresses left behind, and notes on what the container cannot record."""

    checkpoint: Checkpoint
    left_behind: tuple[str, ...]
    notes: tuple[Note, ...]


def export(
    checkpoint: Checkpoint,
    root: StateDict,
    container: Format,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    copy_ties: bool = False,
) -> Exported:
    """The tensors of `root` whose keys match, as a flat dictionary for a container of tensors.

    copy_ties: write tied tensors once for each name, as always where the container has no ties.
    Raises `Unsupported` naming tensors that are not plain, `Conflict` for an expanded view over `MAX_WRITTEN_OUT`.
    """
    keys = selected(root.names(), only, exclude)
    tensors = {key: value for key, value in root.node.items() if isinstance(value, (TensorEntry, Composite))}
    metadata = getattr(root.node, "metadata", None)
    keep_metadata = container.keeps_metadata and is_metadata(metadata)
    behind = [key for key in root.node if key not in tensors or key not in keys]
    behind += ["_metadata"] if metadata and not keep_metadata else []
    behind = [address((*root.base, *root.path, key)) for key in behind] + around(checkpoint, root)
    refuse_packed(checkpoint, root)
    plain = {key: value for key, value in tensors.items() if key in keys and isinstance(value, TensorEntry)}
    wrong = list[str]()  # composite tensors, and other values that contain tensors
    for key, value in root.node.items():
        if isinstance(value, Composite):
            wrong += [f"{key} ({value.kind})"] if key in keys else []
        elif not isinstance(value, TensorEntry) and (type(key) is not str or key in keys) and not is_beside(key, value):
            word = type(value).__name__ if isinstance(value, (list, tuple)) else "object"
            word = "dictionary" if isinstance(value, dict) else word
            if count := len(lost_tensors(value, [*plain.values()])):
                wrong.append(f"{key!s} (a {word} with {counted(count, 'tensor')})")
    if wrong:
        why = "It holds only plain tensors, each under a name. Nothing was written."
        fix = f"Leave them out: {arg(exclude=NAME)}; or keep everything, which ckptool can restore: {arg(all=True)}"
        raise Unsupported(f"{container.name} cannot hold {listed(wrong)}", why, fix)
    for key, entry in plain.items():
        if entry.nbytes > max(entry.storage.nbytes, MAX_WRITTEN_OUT):
            what = f"{key} is an expanded view: {size(entry.nbytes)} to write, {size(entry.storage.nbytes)} stored"
            why = f"{container.name} has no strides, so every repeated value would be written out."
            raise Conflict(what, why, f"Leave it out: {arg(exclude=NAME)}; or keep it as is: {arg(all=True)}")
    copy_ties = copy_ties or not container.keeps_ties
    notes = lost_views(plain, copy_ties)
    if not container.keeps_ties:
        names: dict[int, list[str]] = {}
        for key, number in memories(plain).items():
            names.setdefault(number, []).append(key)
        groups = [group for group in names.values() if len(group) > 1]
        if tied := [
            (" = " if len({plain[key].view for key in group}) == 1 else " with ").join(group) for group in groups
        ]:
            message = f"{container.name} cannot record ties; tied tensors copied for each name: {listed(tied, 3)}"
            notes.append(Note("ties-copied", message))
    if copy_ties:
        plain = {key: entry.alone() for key, entry in plain.items()}
    tree = OrderedDict(plain, {"_metadata": metadata}) if keep_metadata else plain
    return Exported(replace(checkpoint, tree=tree, tensors_only=True, extras={}), tuple(behind), tuple(notes))


def refuse_packed(checkpoint: Checkpoint, root: StateDict) -> None:
    """Raises `Unsupported` for a module with quantized weights that only its class can put into a state dict."""
    if packed := quantized_outside(root):
        raise Unsupported(
            f"{checkpoint.source or 'the checkpoint'}: {root} keeps {counted(len(packed), 'quantized tensor')} outside "
            f"of its parameters and buffers: {listed(packed, 3)}",
            "Only its class knows their names in a state dict. Nothing was written.",
            "Load it with that class, and save its state_dict().",
        )


def around(checkpoint: Checkpoint, root: StateDict) -> list[str]:
    """The addresses of everything else in the file: unnamed tensors of the root's module, then the root's siblings."""
    beside = [address(root.base + path) for path, _ in unnamed_tensors(root)] if root.module is not None else []
    return beside + siblings(checkpoint.tree, root.path, root.base)


def siblings(tree: Any, path: Path, base: Path = ()) -> list[str]:
    """The addresses of the entries beside a path, and beside everything above it. base: the tree's path in its file."""
    return [
        address((*base, *path[:depth], other))
        for depth, holder in enumerate(holders(tree, path))
        for other, _ in children(holder)
        if other != path[depth]
    ]


def droppable(tree: Any, path: Path) -> Path:
    """The path, or that of the nearest enclosing entry that can be dropped; empty where there is none."""
    around = holders(tree, path)
    depths = (depth for depth in reversed(range(len(path))) if any(path[depth] in m for m in mappings(around[depth])))
    return path[: next(depths, -1) + 1]


def mappings(node: Any) -> list[dict[Any, Any]]:
    """The dictionaries whose entries are right below a node: the node itself, or its items and attributes."""
    parts: tuple[Any, ...] = (node, getattr(node, "attributes", None))
    if isinstance(node, Object):
        parts = (node.items, *(node.state if isinstance(node.state, tuple) else (node.state,)))
    return [mapping for mapping in parts if isinstance(mapping, dict)]


def lost_views(tensors: dict[str, TensorEntry], copy_ties: bool) -> list[Note]:
    """Notes on views that a container without strides writes as their values."""
    views: dict[Any, str] = {}  # the first name of each
    for key, entry in tensors.items():
        views.setdefault(entry.view, key)
    numbers = memories({key: tensors[key] for key in views.values()})
    count = Counter(numbers.values())
    shared = [key for key, number in numbers.items() if count[number] > 1]
    resolved = [key for key, entry in tensors.items() if entry.flags.conj or entry.flags.neg]
    expanded = [key for key, entry in tensors.items() if entry.nbytes > entry.storage.nbytes]
    apart = "different views of one storage are written separately and no longer share memory"
    notes = (
        ("sharing-lost", apart, [] if copy_ties else shared),
        ("resolved-views", "conjugated or negated views are written as their values", resolved),
        ("resolved-views", "expanded views are written with every repeated value", expanded),
    )
    return [Note(code, f"{text}: {listed(names, 4)}") for code, text, names in notes if names]


# A tensor, or its data, left as the call that would build it: `torch.DoubleStorage([…])`, an unknown rebuild.
_MADE_OF_TORCH = re.compile(r"torch\.([\w.]+\.)?(\w*(Storage|Tensor)|_rebuild\w*|_load_from_bytes|ScriptObject)")


Lost = list[tuple[Path, str]]


def lost_tensors(before: Any, after: Any) -> Lost:
    """The path and kind of every tensor of `before` that is not in `after` with the same view of the same data.

    Except those that the module itself does not save (`register_buffer(…, persistent=False)`).
    """
    if before is after:
        return []
    held = {id(node): node for _, node in chain(walk(after), transient(before))}  # once each, wherever it is
    kept_views = {view for node in held.values() for view in _views(node)}
    storages = {view[0] for view in kept_views}

    @cache  # calls may share what they hold
    def holding(is_kept: bool) -> set[int]:
        return above(before, lambda part: any((view in kept_views) is is_kept for view in _views(part)))

    lost: Lost = []
    covered: set[Path] = set()
    intact: dict[int, Any] = {}  # by id, and held so that no other object gets the id
    for path, node in walk(before):
        if id(node) in intact or (covered and any(path[:depth] in covered for depth in range(len(path)))):
            continue
        if any(view not in kept_views and (len(view) > 1 or view[0] not in storages) for view in _views(node)):
            kind = "a storage" if isinstance(node, StorageRef) else getattr(node, "kind", "a tensor")
            lost.append((path, kind))
        elif _would_build_a_tensor(node) and (
            id(node) in holding(False) or not (id(node) in holding(True) or node.name.endswith("ScriptObject"))
        ):
            lost.append((path, node.name))
            covered.add(path)
        else:
            intact[id(node)] = node
    return lost


def _views(node: Any) -> list[tuple[Any, ...]]:
    """Keys that identify a node's tensors in another tree; a tensor without data is identified by itself."""
    if isinstance(node, Composite):
        return [_view(part) for part in node.parts()] or [(id(node.made),)]
    return [_view(part) for part in stored_parts(node)]


def _view(part: TensorEntry | StorageRef) -> tuple[Any, ...]:
    return part.view if isinstance(part, TensorEntry) else (id(part.storage),)


def _would_build_a_tensor(node: Any) -> bool:
    """True for a call that would build a torch tensor: it is in what is kept if all tensors among its arguments are."""
    return isinstance(node, Object) and _MADE_OF_TORCH.fullmatch(canonical(node.fn)) is not None


def transient(tree: Any) -> Iterator[tuple[Path, Any]]:
    """The buffers of pickled modules that the modules do not save themselves, with their paths."""
    for path, node in walk(tree):
        attributes = module_attributes(node)
        names = attributes.get("_non_persistent_buffers_set") if attributes else None
        if attributes and isinstance(names, Set):
            buffers = attributes["_buffers"]
            yield from (((*path, "_buffers", name), buffers[name]) for name in names.items if name in buffers)


def refuse_lost(checkpoint: Checkpoint, lost: Lost, why: str, advice: str) -> None:
    """Raises `Unsupported` where tensors would be lost, naming them."""
    if lost:
        names = [f"{address((*checkpoint.base, *path)) or 'the top'} ({kind})" for path, kind in lost]
        what = f"{counted(len(lost), 'tensor')} of {checkpoint.source or 'the checkpoint'} would be lost"
        raise Unsupported(f"{what}: {listed(names, 6)}", f"{why} Nothing was written.", advice)


class Behind(NamedTuple):
    """The entries that an output lacks. weighing, plain: those with tensors, and the others except `_metadata`, which
    containers of tensors never have.  facts: the addresses of all, and the sums of their tensors."""

    weighing: list[str]
    plain: list[str]
    facts: dict[str, Any]

    @property
    def lines(self) -> list[str]:
        return [f"left out (the input keeps it): {listed(names, 9)}" for names in (self.weighing, self.plain) if names]


def left_behind(checkpoint: Checkpoint, names: Sequence[str], written: Any, *, chosen: bool) -> Behind:
    """What stays behind of a file whose tensors go into the tree `written`. names: the addresses of those entries.

    chosen: the user named what is written, by an address or patterns. If not, raises `Unsupported` where tensors that
    are of no optimizer, average, random state or other set of weights, with more bytes than are written, stay behind.
    """
    tree = checkpoint.tree
    constants = checkpoint.extras["constants"]() if "constants" in checkpoint.extras else None
    if any(True for _, node in walk(constants) for _ in stored_parts(node)):  # weights of a frozen program
        tree, names = {**tree, "constants": constants}, (*names, "constants")
    sizes: dict[str, list[int]] = {name: [] for name in names}
    if not sizes:
        return Behind([], [], {"left_behind": [], "left_behind_tensors": 0, "left_behind_bytes": 0})
    roots = {root.path for root in find_state_dicts(checkpoint) if root.kind != PLAIN}
    candidates: dict[tuple[Any, ...], tuple[str, bool, int]] = {}
    kept_views = {view for _, node in transient(tree) for view in _views(node)}
    inside: dict[Path, tuple[str, bool]] = {}  # what stays behind: in which entry, and whether that is expected
    for path, node in walk(tree):
        entry, expected = inside.get(path[:-1], ("", False))
        if not entry and (place := address(path)) in sizes:
            entry = place
        if entry:
            inside[path] = entry, expected or path in roots or is_of_training(path[-1])
            candidates.update({_view(part): (*inside[path], _nbytes(part)) for part in stored_parts(node)})
        else:
            kept_views.update(_views(node))
    behind = [row for view, row in candidates.items() if view not in kept_views]
    for entry, _, nbytes in behind:
        sizes[entry].append(nbytes)
    lost = [nbytes for _, expected, nbytes in behind if not expected]
    unexpected = dict.fromkeys(entry for entry, expected, _ in behind if not expected)
    total = sum({_view(part): _nbytes(part) for _, node in walk(written) for part in stored_parts(node)}.values())
    weighing = [f"{printable(name)} ({_sum(group)})" for name, group in sizes.items() if group]
    plain = [printable(name) for name, group in sizes.items() if not group and name.split("/")[-1] != "_metadata"]
    if not chosen and sum(lost) > total:
        odd = listed([f"{name} ({_sum(sizes[name])})" for name in unexpected], 3)
        raise Unsupported(
            f"{checkpoint.source or 'the checkpoint'}: {_sum(lost)} would be left out, more than the {size(total)} "
            f"to be written: {odd}",
            "They belong to no optimizer, average or random state, and may be the model. Nothing was written.",
            f"Name the part that you want: {quoted(input_of(checkpoint.source, 'ADDRESS'))}",
        )
    facts = {"left_behind_tensors": len(behind), "left_behind_bytes": sum(nbytes for *_, nbytes in behind)}
    return Behind(weighing, plain, {"left_behind": list(sizes), **facts})


def _sum(sizes: Sequence[int]) -> str:
    return size(sum(sizes)) if len(sizes) == 1 else f"{counted(len(sizes), 'tensor')} of {size(sum(sizes))}"


def _nbytes(part: TensorEntry | StorageRef) -> int:
    return part.storage.nbytes if isinstance(part, StorageRef) else part.nbytes


def weights_alone(original: Checkpoint, tree: Any, parts: Iterable[tuple[Mapping[str, Any], Path]]) -> Checkpoint:
    """The checkpoint with only a tree of weights, built from these parts, each with its metadata."""
    metadata = {key: value for key, value in original.metadata.items() if key != marks.RECOVERED}
    for part, path in parts:
        metadata |= marks.recovered(part, path, before=metadata)
    return replace(original, tree=tree, metadata=metadata, extras={}, discarded=())
