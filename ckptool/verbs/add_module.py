"""`add-module`: a wrapper's prefix onto the keys of model weights."""

from __future__ import annotations

from typing import Annotated, Any

from ckptool.commands import option, verb
from ckptool.conventions.state_dicts import PEELED, model_state_dicts
from ckptool.errors import UsageError
from ckptool.transforms.rename import add
from ckptool.verbs._options import ChangedAt, ChangedFiles, Out
from ckptool.verbs._save import SavePart, Unpack, Written, begin_change, renamed_file


@verb(("ckptool add-module model.pt --at ema_state_dict -o wrapped.pt", "for a wrapped model"))
def add_module(
    file: ChangedFiles,
    out: Out = None,
    *,
    at: ChangedAt = None,
    prefix: Annotated[str, option("--prefix PREFIX", "The prefix to add to every key.")] = PEELED,
    **options: Unpack[SavePart],
) -> Written | Any:
    """Puts `module.` (or `prefix`) before every key of all model weights in `file`, as DataParallel does.

    Undone by `strip_module`.
    """
    if not prefix:
        raise UsageError("the prefix is empty", "There would be nothing to add.")
    change = begin_change("add-module", file, out, at, options)
    renamed = add(change.part, model_state_dicts(change.part, named=change.named), prefix)
    return renamed_file(change, renamed, clean="no keys to rename")
