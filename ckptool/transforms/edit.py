"""Entries dropped, plain values set, the values of tensors replaced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.nodes import Object, same_kind
from ckptool.checkpoint.paths import matcher
from ckptool.checkpoint.tree import Path, address, find, map_storages, rebuild, tensors, walk
from ckptool.commands import FILE, arg, command
from ckptool.conventions.state_dicts import find_state_dicts
from ckptool.errors import CkptoolError, Conflict, NoMatch, UsageError, counted
from ckptool.transforms.flatten import lost_tensors, mappings


def without(checkpoint: Checkpoint, patterns: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """The tree without the entries of dictionaries that match, and their addresses.

    Raises `NoMatch` for a pattern that matches nothing.
    """
    replaced: dict[int, Any] = {}
    gone, used = dict[Path, str](), set[str]()
    matchers = [(pattern, matcher(pattern)) for pattern in patterns]
    models = {id(root.node) for root in find_state_dicts(checkpoint) if root.is_model}
    for path, node in walk(checkpoint.tree):
        if any(path[:depth] in gone for depth in range(1, len(path) + 1)):
            continue
        for mapping in mappings(node):
            out = set()
            for key in mapping:
                here, keys = address((*path, key)), [str(key)] if id(node) in models else []
                if hits := [pattern for pattern, matches in matchers if any(map(matches, [here, *keys]))]:
                    used.update(hits)
                    out.add(key)
                    gone[(*path, key)] = address((*checkpoint.base, *path, key))
            if out:
                left = replaced.get(id(mapping), mapping).items()
                replaced[id(mapping)] = same_kind(mapping, {key: value for key, value in left if key not in out})
    if idle := [pattern for pattern in patterns if pattern not in used]:
        why, name = "Patterns match whole addresses, or keys of model weights.", idle[0]
        begins = any(f"/{name}." in f"/{address(path)}" for path, _ in walk(checkpoint.tree))
        see = f"Everything below it: {arg(drop=f'{name}.*')}" if begins else ""
        raise NoMatch(
            f"nothing matches {name!r}", why, see or f"See what is there: {command('inspect', FILE, all=True)}"
        )
    return rebuild(checkpoint.tree, replaced=replaced), tuple(gone.values())


def with_value(tree: Any, place: str, value: Any) -> Any:
    """The tree with a value at an address, that of an entry or of a new one.

    Raises `UsageError` for an address that leads nowhere, names no entry or has dots where one has slashes, and where
    tensors would be lost.
    """
    key: Any  # an existing key as it is, else a text
    above, _, key = place.strip("/").rpartition("/")
    if not key:
        why = "A value is set at an address in it."
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
        meant, found = place.replace(".", "/"), None
        if meant != place:
            with suppress(CkptoolError):
                found = find(tree, meant)
        if found is not None:
            what = f"there is no {place}, but there is {meant}"
            raise UsageError(what, "Addresses have slashes.", f"Set that: {arg(set={meant: value})}") from None
        key = key.replace("~1", "/").replace("~0", "~")
    if count := len(lost_tensors(old, None)):
        what = f"{place} holds {counted(count, 'tensor')}, and would become a plain value"
        fix = f"Leave it out: {arg(drop=place)}; or give a tensor new values: {arg(tensor={place: 'values.npy'})}"
        raise UsageError(what, "Values would be lost. Nothing was written.", fix)
    if isinstance(parent, list):
        return rebuild(tree, replaced={id(parent): [value if i == key else old for i, old in enumerate(parent)]})
    return rebuild(tree, replaced={id(parent): same_kind(parent, {**parent, key: value})})


# Tensors -------------------------------------------------------------------------------------------------------------


def with_array(tree: Any, place: str, array: Any) -> Any:
    """The tree with the values of an array in a tensor, and in those that are tied to it.

    Raises `UsageError` for an address that leads to no plain tensor, `Conflict` for an array of another shape or type,
    and where a part of another tensor's storage would change.
    """
    _, entry = find(tree, place)
    if not isinstance(entry, TensorEntry):
        raise UsageError(f"{place} is not a tensor with plain values", f"It is {entry!r}.")
    if tuple(array.shape) != entry.shape:
        what = f"{place} has the shape {list(entry.shape)}, the array {list(array.shape)}"
        raise Conflict(what, "Replacing values does not change shapes.")
    dtype = entry.dtype
    try:
        same = array.dtype.newbyteorder("<") == dtype.to_numpy().newbyteorder("<")
    except KeyError:
        same = False
    # numpy files have no name for bf16 and float8: they come back as void types, or as integers of the same size.
    as_bits = array.dtype.kind in "Vu" and array.dtype.itemsize == dtype.itemsize and dtype.kind not in ("int", "uint")
    if not same and not (as_bits and (dtype.ml or dtype.numpy is None)):
        what, fix = f"{place} is of type {dtype}, the array {array.dtype}", dtype.numpy or dtype.name
        raise Conflict(what, "Values are not converted on the way.", f"Convert it: array.astype({fix!r})")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    data = InlineBytes(array.tobytes())
    whole = entry.is_contiguous and entry.nbytes == entry.storage.nbytes
    others = (
        path
        for path, other in tensors(tree)
        if other is not entry and isinstance(other, TensorEntry) and other.storage is entry.storage
    )
    if not whole and (shared := next(others, None)) is not None:
        what = f"{place} shares its storage with {address(shared)}, and covers only a part of it"
        raise Conflict(what, "Writing it would change the other in parts.")
    if entry.flags.conj or entry.flags.neg:
        raise Conflict(f"{place} is a conjugated or negated view", "Its stored values are not the ones it shows.")
    if whole:  # every name that is tied to it sees the new values, as it would in torch
        fresh = Storage(data, entry.location)
        return map_storages(tree, lambda storage: fresh if storage is entry.storage else storage)
    return rebuild(tree, lambda node: entry.with_values(data) if node is entry else node)
