"""`slim`: a checkpoint without optimizer state and without bytes that no tensor uses."""

from __future__ import annotations

from typing import Annotated, Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.tree import rebuild, storages
from ckptool.commands import option, verb
from ckptool.errors import counted
from ckptool.facts import replace, size
from ckptool.transforms.slim import cut_down, plain_views, tied_storages, without_optimizers
from ckptool.verbs._options import ChangedAt, ChangedFiles, Extract, Out
from ckptool.verbs._save import Row, Save, Unpack, Written, begin_change


@verb(("ckptool slim model.pt -o small.pt", "without optimizer state"), one_output="New files: -o OUT, or -d DIR")
def slim(
    file: ChangedFiles,
    out: Out = None,
    *,
    dedup: Annotated[bool, option("--dedup", "Tie equal tensors of one set of weights; they stay tied.")] = False,
    keep_optimizer: Annotated[bool, option("--keep-optimizer", "Drop only bytes that no tensor uses.")] = False,
    at: ChangedAt = None,
    extract: Extract = False,
    **options: Unpack[Save],
) -> Written | Any:
    """Writes the checkpoint without optimizer state, and without the bytes behind views that no tensor uses.

    Raises `UsageError` for a file of optimizer state only. In place, the dropped bytes would stay in the file.
    """
    asked: Any = {**options, "extract": extract}
    change = begin_change("slim", file, out, at, asked, in_place=False)
    before, outside = change.part.tree, frozenset(map(id, storages(change.outside)))
    lean, dropped = (before, ()) if keep_optimizer else without_optimizers(before, change.part.base)
    # Every storage is cut down to what its tensors show; views that overlap go on sharing.
    moved = [*filter(None, map(cut_down, plain_views(lean, outside).values()))]
    smaller = {old: entry for group in moved for old, entry in group.items()}
    dense = rebuild(lean, lambda node: smaller.get(id(node), node)) if moved else lean
    tree, twins, twin_bytes = tied_storages(replace(change.part, tree=dense), outside) if dedup else (dense, 0, 0)
    sizes = [sum(item.nbytes for item in storages(tree) if id(item) not in outside) for tree in (before, lean, dense)]
    optimizer_bytes, waste_bytes = sizes[0] - sizes[1], sizes[1] - sizes[2]
    unused = any(note.code in ("unused-record", "superseded-pickle") for note in change.part.notes)
    written = change.save(replace(change.part, tree=tree), changes=bool(dropped or moved or twins or unused))
    saved = (change.original.source.size if change.original.source else 0) - written.file_bytes
    parts = (
        f"{size(optimizer_bytes)} of optimizer state" if dropped else "",
        f"{size(waste_bytes)} that no tensor uses" if moved else "",
        f"{size(twin_bytes)} stored twice" if twins else "",
        "unused records" if unused else "",
    )
    without = f"without {', '.join(filter(None, parts))}"
    if saved > 0:
        summary = f"{size(saved)} smaller, {without}"
    else:  # a new container has tables and alignment of its own
        how = "no smaller" if not saved else f"{size(-saved)} larger"
        summary = f"{without}, but {how}: {written.container} needs more for its own tables and alignment"
    message = f"{counted(twins, 'storage is', 'storages are')} now shared with an equal one of the same weights: "
    message += "training one trains the other"
    return written.about(
        summary if any(parts) else "nothing to drop",
        Row.named("dropped", dropped, "dropped"),
        notes=[Note("new-ties", message)] if twins else [],
        saved_bytes=saved,
        optimizer_bytes=optimizer_bytes,
        waste_bytes=waste_bytes,
        waste_storages=len(moved),
        twin_bytes=twin_bytes,
        twin_storages=twins,
    )
