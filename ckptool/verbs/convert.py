"""`convert`: from one container to another, and to a compact file of the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint, Note
from ckptool.errors import UsageError, printable
from ckptool.formats import by_name, carried, for_output
from ckptool.nodes import OrderedDict
from ckptool.roots import Root, one_root
from ckptool.transforms.export import export
from ckptool.transforms.select import selected
from ckptool.tree import find, tensors
from ckptool.verbs.opening import Opened, PathLike, open_file
from ckptool.verbs.saving import SaveOptions, Written, save, written

if TYPE_CHECKING:
    from typing_extensions import Unpack

TIES = ("record", "copy")


def convert(
    file: PathLike,
    out: PathLike | None = None,
    *,
    at: str | None = None,
    all: bool = False,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    ties: str = "record",
    materialize: bool = False,
    **options: Unpack[SaveOptions],
) -> Written:
    """Writes a checkpoint in the container that `out`'s suffix stands for (or `container`).

    To safetensors: one set of weights, naming what stays behind; or the whole tree (`all`), which converting back restores bit for bit.
    To `.pt`: everything, in a compact file (records that nothing uses, and what in-place edits left, are gone).
    at: one part.  only, exclude: patterns for keys.  ties: `record` stores tied tensors once, `copy` once for each name.
    materialize: write out expanded views.  Raises `Unsupported` naming what the container cannot hold.
    """
    if ties not in TIES:
        raise UsageError(f"there is no way {printable(ties)!r} to treat ties", f"There are: {', '.join(TIES)}.")
    if out is None:
        raise UsageError("convert needs an output", "It writes a new file.", "For example: -o model.safetensors")
    only, exclude = ([only] if isinstance(only, str) else only), ([exclude] if isinstance(exclude, str) else exclude)
    opened = open_file(file, at)
    name = options.get("container")
    container = by_name(name) if name else for_output(out, opened.checkpoint.container)
    if container.NAME == "safetensors":
        expected = _part(opened) if all else None
        changed, summary, behind, notes = _to_safetensors(opened, all, only, exclude, ties, materialize)
    else:
        expected = None
        changed, summary, behind, notes = _to_pickle(opened, only, exclude)
    result = save("convert", opened.checkpoint, changed, out, options, expected=expected)
    facts = {"tensors": sum(1 for _ in tensors(changed.tree)), "left_behind": behind}
    details = tuple(f"left behind: {printable(name)}" for name in behind)
    return written("convert", opened.checkpoint, result, options, summary, facts=facts, details=details, notes=notes)


Outcome = tuple[Checkpoint, str, list[str], tuple[Note, ...]]


def _to_safetensors(
    opened: Opened, whole: bool, only: Sequence[str], exclude: Sequence[str], ties: str, materialize: bool
) -> Outcome:
    checkpoint = opened.checkpoint
    if whole:
        if only or exclude:
            raise UsageError(
                "--all keeps everything; --only and --exclude leave something out",
                "",
                "Drop entries first: ckptool edit --drop",
            )
        part = _part(opened)
        packed = carried.pack(part)
        return packed, f"the whole tree, {len(packed.tree):,} tensors; converting it back restores it", [], ()
    if checkpoint.container == "safetensors" and opened.at is None and isinstance(checkpoint.tree, dict):
        root, remark = Root((), checkpoint.tree, "model weights"), ""
    else:
        root, remark = one_root(checkpoint, opened.at)
    exported = export(checkpoint, root, only, exclude, copy_ties=ties == "copy", materialize=materialize)
    of = f" of {printable(root.address)}" if root.path else ""
    summary = f"{len(exported.checkpoint.tree):,} tensors{of}" + (f" ({remark})" if remark else "")
    return exported.checkpoint, summary, list(exported.left_behind), exported.notes


def _part(opened: Opened) -> Checkpoint:
    return (
        opened.checkpoint
        if opened.at is None
        else replace(opened.checkpoint, tree=find(opened.checkpoint.tree, opened.at)[1])
    )


def _to_pickle(opened: Opened, only: Sequence[str], exclude: Sequence[str]) -> Outcome:
    checkpoint = _part(opened)
    behind: list[str] = []
    if only or exclude:
        root, _ = one_root(opened.checkpoint, opened.at)
        keys = selected([key for key in root.node if type(key) is str], only, exclude)
        behind = [printable(str(key)) for key in root.node if key not in keys]
        checkpoint = replace(checkpoint, tree=_kept(root.node, keys))
    return checkpoint, "everything, in a compact file", behind, ()


def _kept(node: dict[Any, Any], keys: set[str]) -> dict[Any, Any]:
    items = {key: value for key, value in node.items() if key in keys}
    return OrderedDict(items, node.attributes) if isinstance(node, OrderedDict) else items
