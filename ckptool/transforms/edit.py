"""Entries dropped and set: plain values, and in place of a tensor the values of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptool.checkpoint import Checkpoint, Storage, TensorEntry
from ckptool.checkpoint.arrays import resolved
from ckptool.checkpoint.nodes import Object, same_kind
from ckptool.checkpoint.numpy_arrays import array_entry
from ckptool.checkpoint.paths import matcher
from ckptool.checkpoint.tree import Path, address, find, map_storages, rebuild, tensors, walk
from ckptool.commands import FILE, arg, command, nearest
from ckptool.conventions.state_dicts import find_state_dicts
from ckptool.errors import CkptoolError, Conflict, NoMatch, UsageError, counted
from ckptool.transforms.flatten import lost_tensors, mappings


def without(checkpoint: Checkpoint, patterns: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """The tree without the dictionary entries that match, and their addresses.

    Raises `NoMatch` for a pattern that matches nothing.
    """
    replaced: dict[int, Any] = {}
    dropped, used = dict[Path, str](), set[str]()
    matchers = [(pattern, matcher(pattern)) for pattern in patterns]
    models = {id(root.node) for root in find_state_dicts(checkpoint) if root.is_model}
    for path, node in walk(checkpoint.tree):
        if any(path[:depth] in dropped for depth in range(1, len(path) + 1)):
            continue
        for mapping in mappings(node):
            removed = set()
            for key in mapping:
                place, keys = address((*path, key)), [str(key)] if id(node) in models else []
                if hits := [pattern for pattern, matches in matchers if any(map(matches, [place, *keys]))]:
                    used.update(hits)
                    removed.add(key)
                    dropped[(*path, key)] = address((*checkpoint.base, *path, key))
            if removed:
                items = replaced.get(id(mapping), mapping).items()
                replaced[id(mapping)] = same_kind(mapping, {key: value for key, value in items if key not in removed})
    if unmatched := [pattern for pattern in patterns if pattern not in used]:
        why, name = "Patterns match whole addresses, or keys of model weights.", unmatched[0]
        begins = any(f"/{name}." in f"/{address(path)}" for path, _ in walk(checkpoint.tree))
        fix = f"See what is in it: {command('inspect', FILE, all=True)}"
        if begins:
            fix = f"Everything below it: {arg(drop=f'{name}.*')}"
        elif meant := nearest(name, (address(path) for path, node in walk(checkpoint.tree) if isinstance(node, dict))):
            fix = f"Did you mean {meant}? {fix}"
        raise NoMatch(f"nothing matches {name!r}", why, fix)
    return rebuild(checkpoint.tree, replaced=replaced), tuple(dropped.values())


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
    if isinstance(parent, Object) and parent.items is not None:
        parent = parent.items
    if isinstance(parent, Object) and isinstance(parent.state, dict):
        parent = parent.state
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
        raise UsageError(what, "They would be lost. Nothing was written.", fix)
    if isinstance(parent, list):
        return rebuild(tree, replaced={id(parent): [value if i == key else old for i, old in enumerate(parent)]})
    return rebuild(tree, replaced={id(parent): same_kind(parent, {**parent, key: value})})
