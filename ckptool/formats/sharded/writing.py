"""Dividing a checkpoint into shards, and the plan of their files; see `sharded`, which reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.plan import Plan, Segment
from ckptool.checkpoint.tree import storages
from ckptool.commands import arg
from ckptool.errors import Unsupported, UsageError
from ckptool.formats import marks, safetensors, sidecar, tree_record
from ckptool.formats.folder import NUMBERED

DEFAULT_SIZE = 5_000_000_000  # of a shard, in bytes, as the hub's savers have it

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


LEAST_BARE = 1_000_000  # bytes, of a size without a unit


def size_in_bytes(size: int | str) -> int:
    """The number of bytes in a text like `5GB` (10^9), `5GiB` (2^30), `500MB` or `24B`. Raises `UsageError`.

    A number without a unit is at least a million: `5` was meant to be 5 GB.
    """
    found = re.fullmatch(r"([0-9]{1,15})(\.[0-9]{1,9})?\s*([kmgt]?)(i?)(b?)", str(size).strip().lower())
    if found is not None and (found[3] or not (found[2] or found[4])):
        scale: int = (1024 if found[4] else 1000) ** _UNITS[found[3]]
        count = int(found[1]) * scale + int(float(found[2] or 0) * scale)
        if count >= (1 if found[3] or found[5] else LEAST_BARE):
            return count
    what = f"{str(size)[:40]!r} is not a shard size"
    why = f"Give a number with a unit (5GB), or a number of bytes, {LEAST_BARE:,} or more."
    raise UsageError(what, why, "For example: 5GB, 500MB, 2GiB")


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A new division of a checkpoint: at most `limit` bytes of tensors to a shard.

    stem: the beginning of the names of files.
    """

    limit: int
    stem: str = "model"


@dataclass(frozen=True, slots=True, eq=False)
class DivisionOrigin:
    """The division that a checkpoint was read from: the files, and what was in which.

    pickled: the shards are torch's own files, which are only read.  metadata: what each shard says beside its tensors.
    renamed: the names that they get, where those are others.
    """

    index: str
    pickled: bool
    metadata: dict[str, dict[str, Any]]
    by_name: dict[Any, str]
    by_storage: dict[int, str]
    alive: tuple[Storage, ...]  # so that no other storage gets the `id` of one of these
    renamed: Division | None = None

    @classmethod
    def of(cls, index: str, pickled: bool, shards: Mapping[str, Checkpoint], ties: Mapping[str, str]) -> DivisionOrigin:
        """The division of these shards; `ties` across them are recorded anew when they are written."""
        alive = {id(storage): (storage, file) for file, shard in shards.items() for storage in storages(shard.tree)}
        return cls(
            index,
            pickled,
            {file: {k: v for k, v in shard.metadata.items() if k not in ties} for file, shard in shards.items()},
            {name: file for file, shard in shards.items() for name in shard.tree},
            {key: file for key, (_, file) in alive.items()},
            tuple(storage for storage, _ in alive.values()),
        )

    @property
    def stem(self) -> str:
        """The beginning of the names of its shards."""
        found = next(filter(None, map(NUMBERED.fullmatch, self.metadata)), None)
        return found["stem"] if found else "model"

    def file_of(self, names: Iterable[Any], value: Any) -> str | None:
        """The shard that a tensor came from: by its storage, else by its name; None for a new one."""
        for storage in storages(value):
            if found := self.by_storage.get(id(storage)):
                return found
        return next((self.by_name[name] for name in names if name in self.by_name), None)


def divided(checkpoint: Checkpoint, shard_size: int | str | None, stem: str) -> Checkpoint:
    """The checkpoint, to be written in shards of at most this size, which counts the bytes of tensors.

    Without a size, a division that it was read from stays, under these names. Raises `UsageError` for what is no size.
    """
    division = Division(DEFAULT_SIZE if shard_size is None else size_in_bytes(shard_size), stem)
    old = checkpoint.origin
    if shard_size is not None or not isinstance(old, DivisionOrigin):
        return replace(checkpoint, origin=division)
    stays = not old.pickled and old.stem == division.stem
    return checkpoint if stays else replace(checkpoint, origin=replace(old, renamed=division))


def write(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
    """The plan of a folder: shards, and their index; of one shard, `model.safetensors` without an index.

    A checkpoint that was read from shards keeps its division; any other is divided in the order of its keys, at most
    5 GB of tensors to a shard (a single tensor may be larger). Ties stay together and are recorded. Raises
    `Unsupported` naming everything that cannot be kept.
    """
    if tree_record.KEY in checkpoint.metadata:
        what = f"a whole tree (convert {arg(all=True)}) is one safetensors file, and is not divided into shards"
        why = "The record that leads back to it is in that file."
        raise Unsupported(
            what, why, f"Write it as one: {arg(container='safetensors')}; or only its weights: without {arg(all=True)}"
        )
    origin = checkpoint.origin if isinstance(checkpoint.origin, DivisionOrigin) else None
    division = checkpoint.origin if isinstance(checkpoint.origin, Division) else Division(DEFAULT_SIZE)
    if origin is not None:
        stem = "model" if origin.pickled and origin.stem == "pytorch_model" else origin.stem
        division = origin.renamed or Division(0, stem)
    stored, ties = safetensors.without_ties(safetensors.holdable(checkpoint))
    by_name = {name: _Unit([name], entry.nbytes) for name, entry in stored.items()}
    for dropped, kept in ties.items():
        by_name[kept].names.append(dropped)
    units = list(by_name.values())
    if origin is not None:
        shards = _as_before(origin, division, units, checkpoint.tree)
    else:
        shards = _named(_split(units, division.limit), division)
    return _plan(checkpoint, origin, division, shards)


# Dividing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """Names that stay in one shard, since they share their bytes; the first of them has them. `size` in bytes."""

    names: list[Any]
    size: int


def _split(units: list[_Unit], limit: int) -> list[list[_Unit]]:
    """The units in order, as many to a shard as fit; one that is too large has its own, as with the hub's savers."""
    shards: list[list[_Unit]] = []
    current: list[_Unit] = []
    size = 0
    for unit in units:
        if unit.size > limit:
            shards.append([unit])
            continue
        if size + unit.size > limit:
            shards.append(current)
            current, size = [], 0
        current.append(unit)
        size += unit.size
    return [*shards, current] if current or not shards else shards


def _as_before(
    origin: DivisionOrigin, division: Division, units: list[_Unit], tree: dict[Any, Any]
) -> dict[str, list[_Unit]]:
    """Every unit in the shard that it came from; what is new goes with what stands before it."""
    shards: dict[str, list[_Unit]] = {file: [] for file in origin.metadata}
    before = next(iter(shards))
    for unit in units:
        before = origin.file_of(unit.names, tree[unit.names[0]]) or before
        shards[before].append(unit)
    if origin.renamed is None and not origin.pickled and all(shards.values()):
        return shards
    return _named([found for found in shards.values() if found] or [[]], division)


def _named(shards: list[list[_Unit]], division: Division) -> dict[str, list[_Unit]]:
    stem, count = division.stem, len(shards)
    if count == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{number:05d}-of-{count:05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


# The plan ------------------------------------------------------------------------------------------------------------


def _plan(
    checkpoint: Checkpoint,
    origin: DivisionOrigin | None,
    division: Division,
    shards: dict[str, list[_Unit]],
) -> Plan:
    files: dict[str, Iterable[Segment]] = {}
    checks: list[Storage] = []
    shard_of = {name: file for file, units in shards.items() for unit in units for name in unit.names}
    # A dictionary for each shard, of the tree's kind; what is set on the tree (`_metadata`) goes with the first.
    parts: dict[str, dict[Any, Any]] = {file: {} for file in shards}
    if isinstance(checkpoint.tree, OrderedDict):
        first_attributes = (checkpoint.tree.attributes, *(None for _ in shards))
        parts = {file: OrderedDict((), kept) for file, kept in zip(shards, first_attributes, strict=False)}
    for name, value in checkpoint.tree.items():
        parts[shard_of[name]][name] = value
    for file, tree in parts.items():
        metadata = origin.metadata.get(file, {}) if origin is not None and not origin.pickled else {}
        plan = safetensors.write(Checkpoint(tree, safetensors.NAME, metadata, tensors_only=True))
        (files[file],) = plan.files.values()
        checks += plan.checks
    first = next(iter(shards))
    if len(shards) > 1 or NUMBERED.fullmatch(first):
        # The names that are really in the shards, in the tree's order; the others are recorded as ties of these.
        places = {unit.names[0]: file for file, units in shards.items() for unit in units}
        weight_map = {name: places[name] for name in checkpoint.tree if name in places}
        total = sum(unit.size for units in shards.values() for unit in units)
        name = origin.index if origin is not None and first in origin.metadata else ""
        if not name and (found := NUMBERED.fullmatch(first)):
            name = f"{found['stem']}{found['suffix']}.index.json"
        files[name] = [InlineBytes(_index(checkpoint, weight_map, total))]
    if isinstance(checkpoint.tree, OrderedDict) and sidecar.holds(modules := checkpoint.tree.metadata):
        files[sidecar.NAME] = [sidecar.written({sidecar.METADATA: modules})]
    return Plan(files, checks)


def _index(checkpoint: Checkpoint, weight_map: dict[str, str], total: int) -> bytes:
    metadata = dict(checkpoint.metadata) if checkpoint.container == "sharded" else {}
    if mark := checkpoint.metadata.get(marks.RECOVERED):
        metadata[marks.RECOVERED] = mark
    metadata["total_size"] = total
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(
            value.numel for name in weight_map if isinstance(value := checkpoint.tree[name], TensorEntry)
        )
    index = {"metadata": metadata, "weight_map": weight_map}
    return json.dumps(index, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"
