"""Dividing a checkpoint into shards, and the plan of their files; see `sharded`, which reads them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, InlineBytes, Note, Storage, TensorEntry
from ckptool.checkpoint.plan import Plan, Segment
from ckptool.checkpoint.tree import storages
from ckptool.commands import arg
from ckptool.errors import Unsupported, UsageError
from ckptool.formats import marks, safetensors, whole_tree
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
    """How a checkpoint is divided: as its shards were read, else anew, at most `limit` bytes of tensors to a shard.

    stem: the beginning of the names of new files.  index, shards: those that were read; ties: of their names, across
    shards, which are recorded anew when they are written.  pickled: they are torch's own files, which are only read.
    """

    limit: int = DEFAULT_SIZE
    stem: str = "model"
    index: str = ""
    shards: Mapping[str, Checkpoint] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    pickled: bool = False

    def metadata(self, file: str) -> dict[str, Any]:
        """What a shard that was read says beside its tensors."""
        read = self.shards[file].metadata if file in self.shards and not self.pickled else {}
        return {key: value for key, value in read.items() if key not in self.ties}

    def files(self, stored: Mapping[str, TensorEntry], ties: Mapping[str, str]) -> dict[str, list[str]]:
        """The names of what is stored, by the file that it goes to. ties: for other names, the one that is stored.

        What came from a shard stays in it, by its storage, else by its name; what is new goes with what stands before
        it. Anew: in order, as many as fit; one that is too large has a shard of its own, as with the hub's savers.
        """
        if self.shards:
            groups = self._as_before(stored, ties)
            if not self.pickled and stem_of(self.shards) == self.stem and all(groups):
                return dict(zip(self.shards, groups, strict=True))
            groups = [*filter(None, groups)] or [[]]
        else:
            groups, current, size = [], list[str](), 0
            for name, entry in stored.items():
                if entry.nbytes > self.limit:
                    groups.append([name])
                    continue
                if size + entry.nbytes > self.limit:
                    groups.append(current)
                    current, size = [], 0
                current.append(name)
                size += entry.nbytes
            groups += [current] if current or not groups else []
        count = len(groups)
        if count == 1:
            return {f"{self.stem}.safetensors": groups[0]}
        return {f"{self.stem}-{n:05d}-of-{count:05d}.safetensors": names for n, names in enumerate(groups, 1)}

    def _as_before(self, stored: Mapping[str, TensorEntry], ties: Mapping[str, str]) -> list[list[str]]:
        by_name = {name: file for file, shard in self.shards.items() for name in shard.tree}
        by_storage = {id(each): file for file, shard in self.shards.items() for each in storages(shard.tree)}
        tied = defaultdict(list)
        for name, kept in ties.items():
            tied[kept].append(name)
        groups: dict[str, list[str]] = {file: [] for file in self.shards}
        before = next(iter(groups))
        for name, entry in stored.items():
            known = (by_name[each] for each in (name, *tied[name]) if each in by_name)
            before = by_storage.get(id(entry.storage)) or next(known, before)
            groups[before].append(name)
        return [*groups.values()]


def stem_of(files: Iterable[str]) -> str:
    """The beginning of the names of shards."""
    found = next(filter(None, map(NUMBERED.fullmatch, files)), None)
    return found["stem"] if found else "model"


def divided(checkpoint: Checkpoint, shard_size: int | str | None, stem: str) -> Checkpoint:
    """The checkpoint, to be written in shards of at most this size, which counts the bytes of tensors.

    Without a size, a division that it was read from stays, under these names. Raises `UsageError` for what is no size.
    """
    if shard_size is None and isinstance(checkpoint.origin, Division):
        return replace(checkpoint, origin=replace(checkpoint.origin, stem=stem))
    return replace(checkpoint, origin=Division(DEFAULT_SIZE if shard_size is None else size_in_bytes(shard_size), stem))


def write(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
    """The plan of a folder: shards, and their index; of one shard, `model.safetensors` without an index.

    A checkpoint that was read from shards keeps its division; any other is divided in the order of its keys, at most
    5 GB of tensors to a shard (a single tensor may be larger). Ties stay together and are recorded. Raises
    `Unsupported` naming everything that cannot be kept.
    """
    if marks.PICKLE in checkpoint.metadata:
        what = f"a whole tree (convert {arg(all=True)}) is one safetensors file, and is not divided into shards"
        fix = f"Write it as one: {arg(container='safetensors')}; or only its weights: without {arg(all=True)}"
        raise Unsupported(what, "The pickle that leads back to it is in that file.", fix)
    division = checkpoint.origin if isinstance(checkpoint.origin, Division) else Division()
    stored, ties = safetensors.without_ties(safetensors.holdable(checkpoint))
    shards = division.files(stored, ties)
    place = {name: file for file, names in shards.items() for name in names}
    trees: dict[str, dict[str, Any]] = {file: {} for file in shards}
    for name, entry in checkpoint.tree.items():
        trees[place[ties.get(name, name)]][name] = entry
    first = next(iter(shards))
    numbered = NUMBERED.fullmatch(first)
    is_alone = len(shards) == 1 and not numbered
    set_on = whole_tree.set_on(checkpoint.tree)
    files: dict[str, Iterable[Segment]] = {}
    checks: list[Storage] = []
    for file, tree in trees.items():
        metadata = division.metadata(file) | (set_on if is_alone else {})
        plan = safetensors.write(Checkpoint(tree, safetensors.NAME, metadata, tensors_only=True))
        (files[file],) = plan.files.values()
        checks += plan.checks
    if not is_alone:
        index = division.index if first in division.shards else ""
        if not index and numbered:
            index = f"{numbered['stem']}{numbered['suffix']}.index.json"
        # The names that are really in the shards, in the tree's order; the others are recorded as ties of these.
        weight_map = {name: place[name] for name in checkpoint.tree if name in place}
        metadata = dict(checkpoint.metadata) if checkpoint.container == "sharded" else {}
        if mark := checkpoint.metadata.get(marks.RECOVERED):
            metadata[marks.RECOVERED] = mark
        metadata |= set_on
        metadata["total_size"] = sum(entry.nbytes for entry in stored.values())
        if "total_parameters" in metadata:
            metadata["total_parameters"] = sum(stored[name].numel for name in weight_map)
        content = json.dumps(
            {"metadata": metadata, "weight_map": weight_map}, indent=2, ensure_ascii=False, allow_nan=False
        )
        files[index] = [InlineBytes(content.encode() + b"\n")]
    kept = f"{whole_tree.KEY} keeps the _metadata of the state dict, and ckptool gives it back"
    return Plan(files, checks, notes=(Note(whole_tree.KEPT, kept),) if set_on else ())
