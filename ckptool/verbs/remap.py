"""`remap`: the devices that a checkpoint says its tensors were on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from ckptool.checkpoint import Checkpoint, Composite, Storage
from ckptool.checkpoint.tree import map_storages, rebuild, storages, walk
from ckptool.commands import arg, option, repeated, verb
from ckptool.errors import NoMatch, UsageError, counted
from ckptool.verbs._options import ChangedAt, ChangedFiles, Out, pairs
from ckptool.verbs._save import Row, SavePart, Unpack, Written, begin_change, out_first

Moves = Mapping[Any, Any] | None
_MOVES = pairs("cuda:1=cuda:0")
# The device types that torch knows a loader for (torch/serialization.py, _package_registry); those with an index write
# it.
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|mtia|npu|xla|ipu|privateuseone)(?::([0-9]{1,3}))?")
_UNNUMBERED = {"cpu", "mps"}
_ON_DEVICE = ("_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_xla_tensor")


@verb(
    ("ckptool remap model.pt --to cpu -o cpu.pt", "loads on any machine"),
    ("ckptool remap model.pt --map cuda:0=cuda:1 -o moved.pt", "from one GPU to another"),
)
def remap(
    file: ChangedFiles,
    out: Out = None,
    to: Annotated[object, option("--to DEVICE", "Device for everything: cpu, cuda:0, …")] = None,
    *,
    moves: Annotated[Moves, repeated("--map OLD=NEW", "Move only what is on OLD: cuda:1=cuda:0.", parse=_MOVES)] = None,
    at: ChangedAt = None,
    **options: Unpack[SavePart],
) -> Written | Any:
    """Tags every storage with the device `to`, as `torch.load(map_location=…)` would, or by `moves`, old to new.

    Devices are names, or torch's own. The result loads without `map_location` on a machine that has the new device.
    Tensors in memory are moved there.
    Raises `UsageError` for a device that makes no sense, `NoMatch` where nothing is on a device of `moves`.
    """
    out, to = out_first(out, to)
    if to is None and not moves:
        fix = f"For example: {arg(to='cpu')}, or {arg(moves={'cuda:1': 'cuda:0'})}"
        raise UsageError("remap needs a device", "", fix)
    change = begin_change("remap", file, out, at, options)
    moved, present, changes = remapped(change.part, to, moves)
    changed, total = sum(count for *_, count in changes), present.total()
    saved = change.save(moved, changes=changed > 0)
    where = to if to is not None else "the devices asked for"
    return saved.about(
        f"{changed:,} of {counted(total, 'storage')} moved"
        if changed
        else f"already clean: every storage is on {where}",
        Row(
            "moves",
            [{"from": old, "to": new, "storages": count} for old, new, count in changes],
            [f"{old} → {new}: {counted(count, 'storage')}" for old, new, count in changes],
        ),
        changed=changed,
        storages=total,
    )


def remapped(
    checkpoint: Checkpoint, to: object, moves: Moves
) -> tuple[Checkpoint, Counter[str], list[tuple[str, str, int]]]:
    """The checkpoint on other devices, how many storages were on which, and each move with its count.
    A tensor that has no storage, but a device in the call that makes it (XLA, HPU), counts as one."""
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
    if missing := [old for old in table if old not in map(_normal, present)]:
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
    changes = sorted((old, new, present[old]) for old, new in moved.items() if new != old)
    return replace(checkpoint, tree=tree), present, changes


def parse_device(given: object) -> str:
    """The location tag for a device, torch's own or as people write it: `cuda` is `cuda:0`, `cpu:0` is `cpu`.
    Raises `UsageError` for a device that torch has no loader for, or that cannot exist."""
    match = _DEVICE.fullmatch(str(given).strip().lower())
    if match is None or (match[1] in _UNNUMBERED and match[2] not in (None, "0")):
        why = "A device is cpu, mps, or a name with a number, such as cuda:0."
        raise UsageError(f"{str(given)!r} is not a device", why, f"For example: {arg(to='cpu')}")
    return match[1] if match[1] in _UNNUMBERED else f"{match[1]}:{int(match[2] or 0)}"


def _normal(location: str) -> str:
    try:
        return parse_device(location)
    except UsageError:
        return location
