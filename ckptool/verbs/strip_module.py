"""`strip-module`: wrapper prefixes off the keys of model weights."""

from __future__ import annotations

from typing import Annotated, Any

from ckptool.commands import option, repeated, several, verb
from ckptool.conventions.state_dicts import model_state_dicts
from ckptool.transforms.rename import strip
from ckptool.verbs._options import ChangedAt, ChangedFiles, Out, Texts
from ckptool.verbs._save import SavePart, Unpack, Written, begin_change, renamed_file


@verb(("ckptool strip-module model.pt -o clean.pt", "module.fc.weight becomes fc.weight"))
def strip_module(
    file: ChangedFiles,
    out: Out = None,
    *,
    at: ChangedAt = None,
    prefix: Annotated[Texts, repeated("--prefix PREFIX", "Remove this instead of the wrappers' prefixes.")] = (),
    partial: Annotated[bool, option("--partial", "Remove it even if only some keys have it.")] = False,
    **options: Unpack[SavePart],
) -> Written | Any:
    """Takes the prefixes of DataParallel, DDP, torch.compile, FSDP and DeepSpeed off the keys of all model weights.

    A file without such prefixes is copied as it is. Raises `Conflict` where two keys would become one or only some
    carry the prefix, `NoMatch` where a named prefix is on no key.
    """
    change = begin_change("strip-module", file, out, at, options)
    renamed = strip(change.part, model_state_dicts(change.part, named=change.named), several(prefix), partial=partial)
    return renamed_file(change, renamed, clean="already clean: no wrapper prefix on any key")
