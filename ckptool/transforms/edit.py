"""Entries dropped and set: plain values, and in place of a tensor the values of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ckptool.checkpoint import Checkpoint, Storage, TensorEntry
from ckptool.checkpoint.arrays import resolved
from ckptool.checkpoint.nodes import same_kind
from ckptool.checkpoint.numpy_arrays import array_entry
from ckptool.checkpoint.paths import matcher
from ckptool.checkpoint.tree import Path, address, children, find, map_storages, rebuild, tensors, walk, with_part
from ckptool.commands import FILE, arg, command, nearest
from ckptool.conventions.state_dicts import find_state_dicts
from ckptool.errors import CkptoolError, Conflict, NoMatch, UsageError, counted, form
from ckptool.transforms.flatten import lost_tensors, mappings


def without(checkpoint: Checkpoint, patterns: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """The tree without the dictionary entries that match, and their addresses.

    Raises `NoMatch` for a pattern that matches nothing.
    """
    used = set[str]()
    matchers = [(pattern, matcher(pattern)) for pattern in patterns]
    models = {id(root.node) for root in find_state_dicts(checkpoint) if root.is_model}

    def is_dropped(holder: Any, path: Path) -> bool:
        texts = [address(path), *([str(path[-1])] if id(holder) in models else [])]
        hits = [pattern for pattern, matches in matchers if any(map(matches, texts))]
        used.update(hits if isinstance(holder, dict) else ())
        return bool(hits) and isinstance(holder, dict)

    tree, dropped = without_entries(checkpoint.tree, is_dropped)
    if unmatched := [pattern for pattern in patterns if pattern not in used]:
        why, name = "Patterns match whole addresses, or keys of model weights.", unmatched[0]
        begins = any(f"/{name}." in f"/{address(path)}" for path, _ in walk(checkpoint.tree))
        fix = f"See what is in it: {command('inspect', FILE, all=True)}"
        if begins:
            fix = f"Everything below it: {arg(drop=f'{name}.*')}"
        elif meant := nearest(name, (address(path) for path, node in walk(checkpoint.tree) if isinstance(node, dict))):
            fix = f"Did you mean {meant}? {fix}"
        raise NoMatch(f"nothing matches {name!r}", why, fix)
    return tree, tuple(address((*checkpoint.base, *path)) for path in dropped)


def without_entries(tree: Any, is_dropped: Callable[[Any, Path], bool]) -> tuple[Any, list[Path]]:
    """The tree without the entries that `is_dropped(holder, path)` chooses, and their paths.

    holder: the dictionary (of items or attributes), list or tuple that an entry is in.
    """
    dropped = dict[Path, None]()
    removed: dict[int, tuple[Any, set[Any]]] = {}  # the holders by id, which may be in several places
    for path, node in walk(tree):
        is_gone = any(path[:depth] in dropped for depth in range(1, len(path) + 1))
        for holder in [node] if isinstance(node, (list, tuple)) else mappings(node):
            entries = holder if isinstance(holder, dict) else range(len(holder))
            chosen = [key for key in entries if is_dropped(holder, (*path, key))]
            if chosen and not is_gone:
                dropped |= dict.fromkeys((*path, key) for key in chosen)
                removed.setdefault(id(holder), (holder, set()))[1].update(chosen)
    replaced: dict[int, Any] = {}
    for number, (holder, keys) in removed.items():
        if isinstance(holder, dict):
            replaced[number] = same_kind(holder, {key: value for key, value in holder.items() if key not in keys})
        else:
            replaced[number] = type(holder)(value for index, value in enumerate(holder) if index not in keys)
    return (rebuild(tree, replaced=replaced) if replaced else tree), [*dropped]


def with_value(tree: Any, place: str, value: Any) -> Any:
    """The tree with a value at an address, that of an entry or of a new one.

    A tensor is replaced by the values of a tensor or array of its shape and type. Raises `UsageError` for an address
    that leads nowhere, names no entry or has dots in place of slashes, and where tensors would be lost; `Conflict` for
    values that the tensor cannot have, or where a part of another tensor's storage would change.
    """
    key: Any  # an existing key itself, else a text
    above, _, key = place.strip("/").rpartition("/")
    if not key:
        why = "Set a value at an address in it."
        raise UsageError("the whole file cannot be set", why, f"For example: {arg(set={'epoch': 3})}")
    _, parent = find(tree, above)
    parent = next(iter(mappings(parent)), parent)
    if not isinstance(parent, (dict, list)):
        raise UsageError(f"{above or 'the top'} cannot have entries set", f"It is of type {type(parent).__name__}.")
    old: Any = None
    try:
        (key, *_), old = find(parent, key)
    except UsageError:
        if isinstance(parent, list):
            find(tree, place)  # says where
        for meant in (place.replace(".", "/", count + 1) for count in range(place.count("."))):
            try:
                find(tree, meant)
            except CkptoolError:
                continue
            what = f"there is no {place}, but there is {meant}"
            raise UsageError(what, "Addresses use slashes.", f"Set that: {arg(set={meant: value})}") from None
        key = key.replace("~1", "/").replace("~0", "~")
    new = value if isinstance(value, TensorEntry) else array_entry(value)
    if isinstance(old, TensorEntry) and new is not None:  # the new values, also in those that are tied to it
        if (new.dtype, new.shape) != (old.dtype, old.shape):
            raise Conflict(f"{place} is {old!r}, but the value is {new!r}", "Dtype and shape have to agree.")
        if any(old.flags.lazy):
            raise Conflict(f"{place} is a conjugated or negated view", "Its stored values differ from those it shows.")
        data = resolved(new).row_major()
        if old.is_contiguous and old.nbytes == old.storage.nbytes:  # every tied name sees them, as it would in torch
            replacement = Storage(data, old.location)
            return map_storages(tree, lambda storage: replacement if storage is old.storage else storage)
        for path, other in tensors(tree):
            if other is not old and isinstance(other, TensorEntry) and other.storage is old.storage:
                what = f"{place} shares its storage with {address(path)}, and covers only part of it"
                raise Conflict(what, "Writing it would change part of the other.")
        return rebuild(tree, lambda node: old.with_values(data) if node is old else node)
    if new is not None and not new.shape and not isinstance(value, TensorEntry):
        value = new.numpy().item()
    if count := len(lost_tensors(old, None)):
        what = f"{place} holds {counted(count, 'tensor')}, but would become a plain value"
        fix = f"Leave it out: {arg(drop=place)}; in Python a tensor can be set to another of its shape and type."
        raise UsageError(what, f"{form(count, 'It', 'They')} would be lost. Nothing was written.", fix)
    if isinstance(parent, dict) and key not in dict(children(parent)):
        return rebuild(tree, replaced={id(parent): same_kind(parent, {**parent, key: value})})
    return rebuild(tree, replaced={id(parent): with_part(parent, key, value)})
