"""Entries dropped, plain values set, one tensor's values replaced."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import Array
from ckptool.checkpoint.nodes import Object, same_kind
from ckptool.checkpoint.paths import matcher
from ckptool.checkpoint.tree import Path, address, find, holders, map_storages, rebuild, tensors, walk
from ckptool.commands import FILE, arg, command
from ckptool.conventions.state_dicts import find_state_dicts
from ckptool.errors import Conflict, NoMatch, UsageError, counted
from ckptool.transforms.flatten import lost_tensors


def edit(
    checkpoint: Checkpoint, drop: Sequence[str], values: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Drops entries that match `drop`, gives tensors the values of numpy `arrays`, sets plain `values`; and the names
    that were dropped, as addresses.

    Raises `NoMatch` for a pattern that matches nothing, `UsageError` for an address that leads nowhere, `Conflict` for
    an array of another shape or type than the tensor's.
    """
    tree, dropped = drop_entries(checkpoint, drop) if drop else (checkpoint.tree, ())
    for place, array in arrays.items():
        tree = _with_array(tree, place, array)
    for place, value in values.items():
        tree = _with_value(tree, place, value)
    return replace(checkpoint, tree=tree), dropped


def drop_entries(checkpoint: Checkpoint, patterns: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """The tree without the entries of dictionaries that match, and their addresses."""
    replaced: dict[int, Any] = {}
    gone, used = dict[Path, str](), set[str]()
    matchers = [(pattern, matcher(pattern)) for pattern in patterns]
    models = {id(root.node) for root in find_state_dicts(checkpoint) if root.is_model}
    for path, node in walk(checkpoint.tree):
        if any(path[:depth] in gone for depth in range(1, len(path) + 1)):
            continue
        for mapping in _mappings(node):
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
        raise NoMatch(
            f"nothing matches {idle[0]!r}",
            "Patterns match whole addresses, or keys of model weights.",
            f"See what is there: {command('inspect', FILE, all=True)}",
        )
    return rebuild(checkpoint.tree, replaced=replaced), tuple(gone.values())


def droppable(tree: Any, path: Path) -> Path:
    """The path itself, or that of the nearest thing around it that can be dropped; empty where there is none."""
    around = holders(tree, path)
    depths = (depth for depth in reversed(range(len(path))) if any(path[depth] in m for m in _mappings(around[depth])))
    return path[: next(depths, -1) + 1]


def _mappings(node: Any) -> list[dict[Any, Any]]:
    """The dictionaries whose entries stand right below a node: itself; the items and attributes of an object."""
    if not isinstance(node, Object):
        return [node] if isinstance(node, dict) else []
    states = node.state if isinstance(node.state, tuple) else (node.state,)
    return [mapping for mapping in (node.items, *states) if isinstance(mapping, dict)]


def parse_assignment(text: str) -> tuple[str, Any]:
    """The address and value of `path=value`: JSON where it parses, else text; after `:=` nothing but JSON.

    Raises `UsageError` where it is neither.
    """
    place, separator, value = text.partition("=")
    place, is_json = place.removesuffix(":"), place.endswith(":")
    if not separator or not place:
        raise UsageError(f"{text!r} is not of the form PATH=VALUE", "", f"For example: {arg(set={'epoch': 3})}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(name for name, _ in pairs)
        if names.total() > len(names):
            raise ValueError(f"the name {names.most_common(1)[0][0]!r} is there twice")
        return dict(pairs)

    try:
        return place, json.loads(value, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and not is_json:
            return place, value
        raise UsageError(
            f"{value!r} is not JSON: {error!s}",
            "A string needs quotes inside the shell's, and an object has each name once.",
            f"For example: '{place}=text'",
        ) from None


def _with_value(tree: Any, place: str, value: Any) -> Any:
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
        key = key.replace("~1", "/").replace("~0", "~")
    if count := len(lost_tensors(old, None)):
        raise UsageError(
            f"{place} holds {counted(count, 'tensor')}, and would become a plain value",
            "Values would be lost. Nothing was written.",
            f"Leave it out: {arg(drop=place)}; or give a tensor new values: {arg(tensor={place: 'values.npy'})}",
        )
    if isinstance(parent, list):
        return rebuild(tree, replaced={id(parent): [value if i == key else old for i, old in enumerate(parent)]})
    return rebuild(tree, replaced={id(parent): same_kind(parent, {**parent, key: value})})


# Tensors -------------------------------------------------------------------------------------------------------------


def read_array(path: str) -> Array:
    """The array of a .npy file, never unpickled. Raises `FileProblem` or `UsageError`."""
    from numpy.lib import format as npy

    from ckptool.checkpoint.files import open_regular
    from ckptool.checkpoint.paths import file_problem

    descriptor = open_regular(path, "a .npy file")
    try:
        with open(descriptor, "rb") as file:
            array: Array = npy.read_array(file, allow_pickle=False)
    except OSError as error:
        raise file_problem(error, path, "read") from error
    except (ValueError, EOFError, MemoryError) as error:
        raise UsageError(
            f"{path} is not a numpy array: {error!s}", "A .npy file with one array of numbers was expected."
        ) from None
    return array


def _with_array(tree: Any, place: str, array: Any) -> Any:
    _, entry = find(tree, place)
    if not isinstance(entry, TensorEntry):
        raise UsageError(f"{place} is not a tensor with plain values", f"It is {entry!r}.")
    data = InlineBytes(_bytes_for(entry, array, place))
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


def _bytes_for(entry: TensorEntry, array: Any, place: str) -> bytes:
    """The array's bytes in row-major little-endian order, where its shape and type are the tensor's."""
    if tuple(array.shape) != entry.shape:
        raise Conflict(
            f"{place} has the shape {list(entry.shape)}, the array {list(array.shape)}",
            "Replacing values does not change shapes.",
        )
    dtype = entry.dtype
    try:
        same = array.dtype.newbyteorder("<") == dtype.to_numpy().newbyteorder("<")
    except KeyError:
        same = False
    # numpy files have no name for bf16 and float8: they come back as void types, or as integers of the same size.
    as_bits = array.dtype.kind in "Vu" and array.dtype.itemsize == dtype.itemsize and dtype.kind not in ("int", "uint")
    if not same and not (as_bits and (dtype.ml or dtype.numpy is None)):
        raise Conflict(
            f"{place} is of type {dtype}, the array {array.dtype}",
            "Values are not converted on the way.",
            f"Convert it: array.astype({dtype.numpy or dtype.name!r})",
        )
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    raw: bytes = array.tobytes()
    return raw
