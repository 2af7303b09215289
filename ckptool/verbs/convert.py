"""`convert`: from one container to another, and to a compact file of the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint, Note
from ckptool.commands import OUT, Advice, command
from ckptool.errors import UsageError, printable
from ckptool.formats import Format, by_name, carried, for_output, keeps_ties, sharded, tensors_only
from ckptool.formats.parts import refuse_placeholders
from ckptool.given import several
from ckptool.modules import module_attributes
from ckptool.nodes import OrderedDict
from ckptool.roots import Root, beside_names, find_roots, one_root
from ckptool.transforms.export import export, lost_ties, siblings
from ckptool.transforms.select import selected
from ckptool.transforms.weights_only import weights_only as plain_values
from ckptool.tree import address, find, tensors
from ckptool.verbs.opening import Opened, PathLike, open_whole
from ckptool.verbs.saving import SaveOptions, Written, check_options, save, written

if TYPE_CHECKING:
    from typing_extensions import Unpack

TIES = ("record", "copy")


def convert(
    file: PathLike,
    out: PathLike | None = None,
    *,
    at: str | None = None,
    all: bool = False,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    ties: str = "record",
    materialize: bool = False,
    weights_only: bool = False,
    shard_size: int | str | None = None,
    part: bool = False,
    **options: Unpack[SaveOptions],
) -> Written:
    """Writes a checkpoint in the container that `out`'s suffix stands for (or `container`).

    To safetensors: one set of weights, naming what stays behind; or the whole tree (`all`), which converting back restores bit for bit.
    To `.pt`: everything, in a compact file (records that nothing uses, and what in-place edits left, are gone). Of a whole module that
    `at` names, and of TorchScript, the state dict.
    at: one part.  only, exclude: patterns for keys.  ties: `record` stores tied tensors once, `copy` once for each name.
    materialize: write out expanded views.  weights_only: plain values in place of what `torch.load(weights_only=True)` refuses, each named.
    shard_size: write a folder of safetensors files of at most this many bytes of tensors (`5GB`, `500MiB`), and their index.
    part: take also what is only a part of a checkpoint (a rank's share, one shard of several).
    Raises `Unsupported` naming what the container cannot hold, `OnlyAPart`.
    """
    if ties not in TIES:
        raise UsageError(f"there is no way {printable(ties)!r} to treat ties", f"There are: {', '.join(TIES)}.")
    if out is None:
        raise UsageError("convert needs an output", "It writes a new file.", "For example: -o model.safetensors")
    check_options("convert", options)
    only, exclude = several(only), several(exclude)
    opened = open_whole(file, at, part=part)
    made_plain: tuple[str, ...] = ()
    if weights_only:
        opened, made_plain = _plain(opened)
    if shard_size is not None:
        options["container"] = _in_shards(out, options)
    name = options.get("container")
    container = by_name(name) if name else for_output(out, opened.checkpoint.container)
    if tensors_only(container):
        expected = _part(opened) if all else None
        copies = ties == "copy" or not keeps_ties(container)
        changed, summary, behind, notes = _to_tensors(opened, container, all, only, exclude, copies, materialize)
    else:
        expected = None
        changed, summary, behind, notes = _to_pickle(opened, only, exclude)
    if shard_size is not None:
        changed = sharded.divided(changed, shard_size)
    result = save("convert", opened.checkpoint, changed, out, options, expected=expected)
    facts = {"tensors": sum(1 for _ in tensors(changed.tree)), "left_behind": behind}
    details = made_plain + tuple(f"left behind: {printable(name)}" for name in behind)
    return written("convert", opened.checkpoint, result, options, summary, facts=facts, details=details, notes=notes)


def _in_shards(out: PathLike, options: SaveOptions) -> str:
    """The container of an output that a size of shards was given for; raises `UsageError` where another was asked for."""
    named = options.get("container") or for_output(out, sharded.NAME).NAME
    if named != sharded.NAME:
        raise UsageError(
            f"--shard-size writes a folder of safetensors files, and {printable(os.fspath(out))} was to be {named}",
            "A file is not divided.",
            "For example: -o DIR --shard-size 5GB",
        )
    return named


Outcome = tuple[Checkpoint, str, list[str], tuple[Note, ...]]


def _plain(opened: Opened) -> tuple[Opened, tuple[str, ...]]:
    """The part that was asked for with plain values only, and a line for each value that was changed or dropped."""
    plain = plain_values(_part(opened))
    changed = [f"converted {printable(place) or 'the top'}: {word}" for place, word in plain.converted]
    dropped = [f"dropped {printable(place) or 'the top'}: {word}" for place, word in plain.dropped]
    return Opened(plain.checkpoint, None, opened.path), (*changed, *dropped)


def _to_tensors(
    opened: Opened,
    container: Format,
    whole: bool,
    only: Sequence[str],
    exclude: Sequence[str],
    copy_ties: bool,
    materialize: bool,
) -> Outcome:
    """What a container of tensors alone gets: one set of weights, or the whole tree as safetensors can carry it."""
    checkpoint = opened.checkpoint
    if whole and container.NAME != "safetensors":
        raise UsageError(
            f"--all writes safetensors, not {container.NAME}",
            "The whole tree is carried in the metadata of one safetensors file.",
            "For example: -o model.safetensors",
        )
    if whole:
        if only or exclude:
            raise UsageError(
                "--all keeps everything; --only and --exclude leave something out",
                "",
                Advice("Drop entries first: ", command("edit", opened.path, drop="ADDRESS", out=OUT)),
            )
        part = _part(opened)
        packed = replace(carried.pack(part), beside=part.beside)  # what is beside cannot go along: `save` says so
        return packed, f"the whole tree, {len(packed.tree):,} tensors; converting it back restores it", [], ()
    if checkpoint.tensors_only and opened.at is None and isinstance(checkpoint.tree, dict):
        root, remark = Root((), checkpoint.tree, "model weights"), ""
    else:
        root, remark = one_root(checkpoint, opened.at)
    exported = export(
        checkpoint, root, only, exclude, copy_ties=copy_ties, materialize=materialize, container=container.NAME
    )
    of = f" of {printable(root.address)}" if root.path else ""
    summary = f"{len(exported.checkpoint.tree):,} tensors{of}" + (f" ({remark})" if remark else "")
    notes = (
        exported.notes if keeps_ties(container) else (*exported.notes, *lost_ties(root.node, exported, container.NAME))
    )
    return exported.checkpoint, summary, list(exported.left_behind), notes


def _part(opened: Opened) -> Checkpoint:
    return (
        opened.checkpoint
        if opened.at is None
        else replace(opened.checkpoint, tree=find(opened.checkpoint.tree, opened.at)[1])
    )


def _to_pickle(opened: Opened, only: Sequence[str], exclude: Sequence[str]) -> Outcome:
    checkpoint = _part(opened)
    weights_only = bool(checkpoint.beside) and opened.at is None  # of a program, only its weights can be written
    module = opened.at is not None and module_attributes(checkpoint.tree) is not None
    if opened.at is not None:
        refuse_placeholders(checkpoint, ((address(path), value) for path, value in tensors(checkpoint.tree)))
    if not (only or exclude or weights_only or module):
        return checkpoint, "everything, in a compact file", [], _module_notes(opened)
    root, _ = one_root(opened.checkpoint, opened.at)
    keys = selected([key for key in root.node if type(key) is str], only, exclude)
    behind = [printable(str(key)) for key in root.node if key not in keys]
    if root.module is not None:
        behind += [printable(address(path)) for path, _ in beside_names(root)]
    elif weights_only:
        behind += siblings(checkpoint.tree, root)
    what = "a TorchScript module, without its program" if weights_only else f"a {root.detail}, without its class"
    summary = f"the {len(keys):,} tensors of {what}" if module or weights_only else "everything, in a compact file"
    return replace(checkpoint, tree=_kept(root.node, keys), beside={}), summary, behind, ()


def _module_notes(opened: Opened) -> tuple[Note, ...]:
    """What to type where whole modules were written as they were."""
    found = [root for root in find_roots(_part(opened)) if root.module is not None]
    if not found:
        return ()
    message = f"{found[0]} stays an object of its class; by the address of a module its weights alone are written"
    place = address(found[0].path) or "/"
    return (Note("whole-module", message, command("convert", f"{opened.path}#{place}", out="weights.pt")),)


def _kept(node: dict[Any, Any], keys: set[str]) -> dict[Any, Any]:
    items = {key: value for key, value in node.items() if key in keys}
    return OrderedDict(items, node.attributes) if isinstance(node, OrderedDict) else items
