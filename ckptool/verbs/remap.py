"""`remap`: the devices that a checkpoint says its tensors were on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from ckptool.commands import OUT, arg, option, repeated, verb
from ckptool.errors import Unsupported, UsageError, counted
from ckptool.transforms.locations import remapped
from ckptool.verbs._options import ChangedAt, ChangedFiles, Out, pairs
from ckptool.verbs._save import Row, SavePart, Unpack, Written, begin_change, out_first

Moves = Mapping[Any, Any] | None
_MOVES = pairs("cuda:1=cuda:0")


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
    if change.live and change.original.memory is not None and not change.options["dry_run"]:
        from ckptool.bridge.tensors import is_absent  # only objects of torch are on devices

        if absent := next((new for _, new, _ in changes if is_absent(new)), ""):
            why, fix = "Tensors in memory would be moved there.", f"For a machine that has it: {arg(out=OUT)}"
            raise Unsupported(f"this machine or this torch has no {absent}", why, fix)
    saved = change.save(moved, changes=changed > 0)
    clean = f"already clean: every storage is on {'the devices asked for' if to is None else to}"
    summary = f"{changed:,} of {counted(total, 'storage')} moved" if changed else clean
    table = [{"from": old, "to": new, "storages": count} for old, new, count in changes]
    lines = [f"{old} → {new}: {counted(count, 'storage')}" for old, new, count in changes]
    return saved.about(summary, Row("moves", table, lines), changed=changed, storages=total)
