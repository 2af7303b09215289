"""The devices that a checkpoint says its tensors were on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Storage
from ckptool.checkpoint.tree import map_storages, rebuild, storages, walk
from ckptool.commands import arg
from ckptool.errors import NoMatch, UsageError

# The device types that torch has a loader for (torch/serialization.py, _package_registry), with an index where torch
# writes one.
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|mtia|npu|xla|ipu|privateuseone)(?::([0-9]{1,3}))?")
_UNNUMBERED = {"cpu", "mps"}
_ON_DEVICE = ("_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_xla_tensor")


def remapped(
    checkpoint: Checkpoint, to: object, moves: Mapping[Any, Any] | None
) -> tuple[Checkpoint, Counter[str], list[tuple[str, str, int]]]:
    """The checkpoint on other devices, how many storages were on which, and each move with its count.
    A tensor without a storage whose rebuilding call names a device (XLA, HPU) counts as one.

    Raises `NoMatch` where a device that `moves` names has no storage, `UsageError` for an impossible device.
    """
    target = parse_device(to) if to is not None else None
    table = {parse_device(old): parse_device(new) for old, new in (moves or {}).items()}
    calls = {
        id(node): node
        for _, node in walk(checkpoint.tree)
        if isinstance(node, Composite)
        and getattr(node.made.fn, "name", "") in _ON_DEVICE
        and type(node.made.args[2]) is str
    }
    present = Counter(storage.location for storage in storages(checkpoint.tree))
    present.update(call.made.args[2] for call in calls.values())
    if missing := [old for old in table if old not in map(_normalized, present)]:
        devices = ", ".join(sorted(present)) or "none"
        raise NoMatch(f"no storage is on {missing[0]}", f"The devices in the file: {devices}.")
    moved = {location: table.get(_normalized(location), target or location) for location in present}

    def move(storage: Storage) -> Storage:
        new = moved[storage.location]
        return storage if new == storage.location else replace(storage, location=new)

    moved_calls = {}
    for number, call in calls.items():
        first, second, location, *rest = call.made.args
        moved_calls[number] = call.with_arguments((first, second, moved[location], *rest))
    tree = map_storages(rebuild(checkpoint.tree, replaced=moved_calls) if calls else checkpoint.tree, move)
    changes = sorted((old, new, present[old]) for old, new in moved.items() if new != old)
    return replace(checkpoint, tree=tree), present, changes


def parse_device(value: object) -> str:
    """The location tag for a device, in torch's form or as people write it: `cuda` is `cuda:0`, `cpu:0` is `cpu`.
    Raises `UsageError` for a device that torch has no loader for, or that cannot exist."""
    match = _DEVICE.fullmatch(str(value).strip().lower())
    if match is None or (match[1] in _UNNUMBERED and match[2] not in (None, "0")):
        why = "A device is cpu, mps, or a name with a number, such as cuda:0."
        raise UsageError(f"{str(value)!r} is not a device", why, f"For example: {arg(to='cpu')}")
    return match[1] if match[1] in _UNNUMBERED else f"{match[1]}:{int(match[2] or 0)}"


def _normalized(location: str) -> str:
    try:
        return parse_device(location)
    except UsageError:
        return location
