"""`strip-module`: wrapper prefixes off the keys of model weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from ckptool.analysis.save import Written
from ckptool.checkpoint import Note
from ckptool.checkpoint.state_dicts import model_state_dicts, optimizers
from ckptool.checkpoint.tree import address
from ckptool.commands import several
from ckptool.errors import counted, listed, printable
from ckptool.options import option, verb
from ckptool.transforms.rename import Renamed, strip
from ckptool.verbs._change import FileChange, begin_change
from ckptool.verbs._options import ChangedAt, ChangedFiles, Out, Texts
from ckptool.verbs._save import ChangeOptions, Unpack


@verb(("ckptool strip-module model.pt -o clean.pt", "module.fc.weight becomes fc.weight"))
def strip_module(
    file: ChangedFiles,
    out: Out = None,
    *,
    at: ChangedAt = None,
    prefix: Annotated[
        Texts, option("--prefix PREFIX", "Remove this instead of the wrappers' prefixes. Repeatable.", several=True)
    ] = (),
    partial: Annotated[bool, option("--partial", "Go ahead where only some keys have module.")] = False,
    **options: Unpack[ChangeOptions],
) -> Written | Any:
    """Takes the prefixes of DataParallel, DDP, torch.compile, FSDP and DeepSpeed off the keys of all model weights.

    at: only there.  prefix: take these off instead.  partial: also where only some keys have `module.`.
    A file without such prefixes is copied as it is. Raises `Conflict` where two keys would become one or only some
    carry the prefix, `NoMatch` where a named prefix is on no key.
    """
    change = begin_change("strip-module", file, out, at, options)
    roots = model_state_dicts(change.part, named=change.named)
    renamed = strip(change.part, roots, several(prefix), partial=partial)
    return renamed_file(change, renamed, clean="already clean: no wrapper prefix on any key")


def renamed_file(change: FileChange, renamed: Renamed, clean: str) -> Written | Any:
    """Saves a renaming and reports it: what all verbs on keys do last."""
    result = change.save(renamed.checkpoint, changes=renamed.changed > 0)
    roots = [{"root": root, "changed": changed, "keys": keys} for root, changed, keys in renamed.roots]
    facts = {"changed": renamed.changed, "keys": renamed.total, "roots": roots}
    summary = f"{renamed.changed:,} of {counted(renamed.total, 'key')} renamed" if renamed.changed else clean
    details = [
        f"{printable(root) or 'the whole file'}: {changed:,} of {counted(keys, 'key')}"
        for root, changed, keys in renamed.roots
        if len(renamed.roots) > 1
    ]
    details += [f"{printable(old)} → {printable(new)}" for old, new in renamed.examples]
    more = len(renamed.names) - len(renamed.examples)
    details += [f"… {more:,} more"] if more else []
    return change.written(result, summary, facts=facts, details=details, notes=_old_names(change, renamed))


def _old_names(change: FileChange, renamed: Renamed) -> Iterator[Note]:
    """The optimizers outside of the part that was changed, which call its parameters by their old names."""
    old = renamed.names.keys()
    for path, optimizer in optimizers(change.outside):
        groups = [group for group in optimizer["param_groups"] if isinstance(group, dict)]
        lists = [group[field] for group in groups for field in ("params", "param_names") if field in group]
        names = [name for each in (*lists, optimizer["state"]) if isinstance(each, (list, dict)) for name in each]
        if told := list(dict.fromkeys(name for name in names if type(name) is str and name in old)):
            message = f"{address(path)} is outside what was changed, and has the old names: "
            yield Note("old-names", message + listed(told, 3))
