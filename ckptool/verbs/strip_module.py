"""`strip-module`: wrapper prefixes off the keys of model weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptool.checkpoint import Checkpoint
from ckptool.errors import printable
from ckptool.given import several
from ckptool.roots import model_roots
from ckptool.transforms.rename import Renamed, strip
from ckptool.verbs.opening import PathLike, open_to_change
from ckptool.verbs.saving import SaveOptions, Written, save, written

if TYPE_CHECKING:
    from typing_extensions import Unpack


def strip_module(
    file: PathLike,
    out: PathLike | None = None,
    *,
    at: str | None = None,
    prefix: str | Sequence[str] = (),
    partial: bool = False,
    **options: Unpack[SaveOptions],
) -> Written:
    """Takes the prefixes of DataParallel, DDP, torch.compile, FSDP and DeepSpeed off the keys of all model weights in `file`.

    at: only in the dictionary at this address.  prefix: take these off instead.  partial: also where only some keys have `module.`.
    A file without such prefixes is copied as it is. Raises `Conflict` where two keys would become one or only some carry the prefix,
    `NoMatch` where a named prefix is on no key.
    """
    opened = open_to_change(file, at)
    renamed = strip(
        opened.checkpoint,
        model_roots(opened.checkpoint, opened.at),
        several(prefix),
        partial=partial,
    )
    return renamed_file(
        "strip-module", opened.checkpoint, renamed, out, options, clean="already clean: no wrapper prefix on any key"
    )


def renamed_file(
    verb: str, original: Checkpoint, renamed: Renamed, out: PathLike | None, options: SaveOptions, clean: str
) -> Written:
    """Saves a renaming and reports it: what all verbs on keys do last."""
    result = save(verb, original, renamed.checkpoint, out, options, changes=renamed.changed > 0)
    roots = [{"root": root, "changed": changed, "keys": keys} for root, changed, keys in renamed.roots]
    facts = {"changed": renamed.changed, "keys": renamed.total, "roots": roots}
    summary = f"{renamed.changed:,} of {renamed.total:,} keys renamed" if renamed.changed else clean
    details = [
        f"{printable(root) or 'the whole file'}: {changed:,} of {keys:,} keys"
        for root, changed, keys in renamed.roots
        if len(renamed.roots) > 1
    ]
    details += [f"{printable(old)} → {printable(new)}" for old, new in renamed.examples]
    return written(verb, original, result, options, summary, facts=facts, details=tuple(details))
