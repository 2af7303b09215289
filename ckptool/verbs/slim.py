"""`slim`: a checkpoint without optimizer state and without bytes that no tensor uses."""

from __future__ import annotations

from typing import Annotated, Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.tree import storages
from ckptool.commands import arg, option, verb
from ckptool.errors import UsageError, counted
from ckptool.facts import size
from ckptool.transforms import slim as slimming
from ckptool.verbs._options import ChangedAt, ChangedFiles, Out
from ckptool.verbs._save import Row, SavePart, Unpack, Written, begin_change


@verb(("ckptool slim model.pt -o small.pt", "without optimizer state"))
def slim(
    file: ChangedFiles,
    out: Out = None,
    *,
    dedup: Annotated[
        bool, option("--dedup", "Tie equal tensors of one set of weights: they are stored once, and stay tied.")
    ] = False,
    keep_optimizer: Annotated[bool, option("--keep-optimizer", "Drop only bytes that no tensor uses.")] = False,
    at: ChangedAt = None,
    **options: Unpack[SavePart],
) -> Written | Any:
    """Writes the checkpoint without optimizer state, and without the bytes behind views that no tensor uses.

    Raises `UsageError` for `in_place` (the old bytes would stay) and for a file of optimizer state only.
    """
    if options.get("in_place"):
        what = "slim writes a new file"
        why = "In place, the dropped bytes would stay in the file."
        raise UsageError(what, why, f"For example: {arg(out='small.pt')}")
    change = begin_change("slim", file, out, at, options)
    done = slimming.slim(change.part, dedup=dedup, keep_optimizer=keep_optimizer, kept=tuple(storages(change.outside)))
    unused = any(note.code in ("unused-record", "superseded-pickle") for note in change.part.notes)
    written = change.save(done.checkpoint, changes=done.changed or unused)
    saved = (change.original.source.size if change.original.source else 0) - written.file_bytes
    parts = (
        f"{size(done.optimizer_bytes)} of optimizer state" if done.dropped else "",
        f"{size(done.waste_bytes)} that no tensor uses" if done.compacted else "",
        f"{size(done.tied_bytes)} stored twice" if done.tied else "",
        "unused records" if unused else "",
    )
    without = f"without {', '.join(filter(None, parts))}"
    if saved > 0:
        summary = f"{size(saved)} smaller, {without}"
    else:  # a new container has tables and alignment of its own
        room = "no smaller" if not saved else f"{size(-saved)} larger"
        summary = f"{without}, but {room}: {written.container} needs more for its own tables and alignment"
    tied = f"{counted(done.tied, 'storage is', 'storages are')} one with an equal one of the same weights now: "
    tied += "training one trains the other"
    return written.about(
        summary if any(parts) else "nothing to drop",
        Row.named("dropped", done.dropped, "dropped"),
        notes=[Note("new-ties", tied)] if done.tied else [],
        saved_bytes=saved,
        optimizer_bytes=done.optimizer_bytes,
        waste_bytes=done.waste_bytes,
        waste_storages=done.compacted,
        twin_bytes=done.tied_bytes,
        twin_storages=done.tied,
    )
