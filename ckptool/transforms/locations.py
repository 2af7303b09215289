"""Location tags of storages: which device a checkpoint says its tensors were on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Storage
from ckptool.checkpoint.tree import map_storages, rebuild, storages, walk
from ckptool.commands import arg
from ckptool.errors import NoMatch, UsageError

# The device types that torch knows a loader for (torch/serialization.py, _package_registry); those with an index write
# it.
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|mtia|npu|xla|ipu|privateuseone)(?::([0-9]{1,3}))?")
_UNNUMBERED = {"cpu", "mps"}
_ON_DEVICE = ("_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_xla_tensor")


@dataclass(frozen=True, slots=True)
class Remapped:
    """A remapped checkpoint, how many storages moved of how many, and each move with its count.

    (A tensor that has no storage, but a device in the call that makes it, counts as one.)
    """

    checkpoint: Checkpoint
    changed: int
    total: int
    moves: tuple[tuple[str, str, int], ...]


def parse_device(given: object) -> str:
    """The location tag for a device, torch's own or as people write it: `cuda` is `cuda:0`, `cpu:0` is `cpu`.

    Raises `UsageError` for a device that torch has no loader for, or that cannot exist.
    """
    text = str(given)
    match = _DEVICE.fullmatch(text.strip().lower())
    if match is None or (match[1] in _UNNUMBERED and match[2] not in (None, "0")):
        raise UsageError(
            f"{text!r} is not a device",
            "A device is cpu, mps, or a name with a number, such as cuda:0.",
            f"For example: {arg(to='cpu')}",
        )
    return match[1] if match[1] in _UNNUMBERED else f"{match[1]}:{int(match[2] or 0)}"


def remap(checkpoint: Checkpoint, to: object = None, moves: Mapping[Any, Any] | None = None) -> Remapped:
    """Tags every storage of the file with the device `to`, or those on one device of `moves` with its other.

    Raises `NoMatch` where a device that `moves` names has no storage, `UsageError` for an impossible device.
    """
    target = parse_device(to) if to is not None else None
    table = {parse_device(old): parse_device(new) for old, new in (moves or {}).items()}
    # Tensors that name their device in the call that makes them instead of a storage's tag (XLA, HPU), each once.
    calls = {
        id(node): node
        for _, node in walk(checkpoint.tree)
        if isinstance(node, Composite)
        and getattr(node.made.fn, "name", "") in _ON_DEVICE
        and type(node.made.args[2]) is str
    }
    present = Counter(storage.location for storage in storages(checkpoint.tree))
    present.update(call.made.args[2] for call in calls.values())
    known = set(map(_normal, present))
    if missing := [old for old in table if old not in known]:
        there = ", ".join(sorted(present)) or "none"
        raise NoMatch(f"no storage is on {missing[0]}", f"The devices in the file: {there}.")
    moved = {location: table.get(_normal(location), target or location) for location in present}

    def move(storage: Storage) -> Storage:
        new = moved[storage.location]
        return storage if new == storage.location else replace(storage, location=new)

    elsewhere = {}
    for number, call in calls.items():
        first, second, location, *rest = call.made.args
        elsewhere[number] = call.with_arguments((first, second, moved[location], *rest))
    tree = map_storages(rebuild(checkpoint.tree, replaced=elsewhere) if calls else checkpoint.tree, move)
    facts = tuple(sorted((old, new, present[old]) for old, new in moved.items() if new != old))
    return Remapped(replace(checkpoint, tree=tree), sum(count for *_, count in facts), present.total(), facts)


def _normal(location: str) -> str:
    try:
        return parse_device(location)
    except UsageError:
        return location
