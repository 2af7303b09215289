"""`slim`: a checkpoint without optimizer state and without bytes that no tensor shows."""

from __future__ import annotations

from typing import Annotated, Any

from ckptool.analysis.save import Written
from ckptool.checkpoint import Note
from ckptool.errors import UsageError, listed, printable
from ckptool.formats import named
from ckptool.options import option, verb
from ckptool.transforms import slim as slimming
from ckptool.verbs._change import begin_change
from ckptool.verbs._options import ChangedAt, ChangedFiles, Out
from ckptool.verbs._save import ChangeOptions, Unpack


@verb(("ckptool slim model.pt -o small.pt", "without optimizer state"))
def slim(
    file: ChangedFiles,
    out: Out = None,
    *,
    dedup: Annotated[
        bool, option("--dedup", "Store equal tensors once; ckptool separates them again on load.")
    ] = False,
    keep_optimizer: Annotated[bool, option("--keep-optimizer", "Drop only bytes that no tensor uses.")] = False,
    at: ChangedAt = None,
    **options: Unpack[ChangeOptions],
) -> Written | Any:
    """Writes the checkpoint without optimizer state, and without the bytes behind views that no tensor shows.

    dedup: store storages with equal bytes once; `ckptool.load` gives each its own memory again, stock `torch.load` ties
    them.  keep_optimizer: only the waste goes.  at: only there.
    Raises `UsageError` for `in_place` (the old bytes would stay) and for a file of optimizer state only.
    """
    if options.get("in_place"):
        raise UsageError(
            "slim writes a new file", "In place, the dropped bytes would stay in the file.", "For example: -o small.pt"
        )
    change = begin_change("slim", file, out, at, options)
    done = slimming.slim(change.part, dedup=dedup, keep_optimizer=keep_optimizer, kept=change.kept)
    unused = [note for note in change.part.notes if note.code in ("unused-record", "superseded-pickle")]
    result = change.save(done.checkpoint, changes=done.changed or bool(unused))
    source = change.original.source
    saved = (source.size if source else 0) - result.file_bytes
    summary = _summary(saved, _left_out(done, bool(unused)), result.container)
    facts = {
        "saved_bytes": saved,
        "dropped": list(done.dropped),
        "optimizer_bytes": done.optimizer_bytes,
        "waste_bytes": done.waste_bytes,
        "waste_storages": done.compacted,
        "twin_bytes": done.shared_bytes,
        "twin_storages": done.shared,
    }
    details = (f"dropped {listed([printable(name) for name in done.dropped], 8)}",) if done.dropped else ()
    notes = (new_ties(done.shared, result.container),) if done.shared else ()
    return change.written(result, summary, facts=facts, details=details, notes=notes)


def _left_out(done: slimming.Slimmed, unused: bool) -> str:
    parts = [
        f"{done.optimizer_bytes:,} bytes of optimizer state" if done.dropped else "",
        f"{done.waste_bytes:,} bytes behind views" if done.compacted else "",
        f"{done.shared_bytes:,} bytes stored twice" if done.shared else "",
        "unused records" if unused else "",
    ]
    return ", ".join(part for part in parts if part)


def _summary(saved: int, left_out: str, container: str) -> str:
    """Says how much smaller the file became, if it did: a new container has tables and alignment of its own."""
    if not left_out:
        return "nothing to drop"
    if saved > 0:
        return f"{saved:,} bytes smaller, without {left_out}"
    size = "no smaller" if not saved else f"{-saved:,} bytes larger"
    return f"without {left_out}, but {size}: {container} takes more room for its own tables and alignment"


def new_ties(count: int, container: str) -> Note:
    """The note on a file in which so many storages are deduplicated."""
    others = (
        "other readers of safetensors find only one name of each"
        if named(container).tensors_only and named(container).keeps_ties
        else "stock torch.load ties them, so that training one would train the other"
    )
    what = f"{count:,} storage{' is' if count == 1 else 's are'} not stored again, but as an equal one"
    return Note("new-ties", f"{what}: ckptool.load gives each its own memory; {others}")
