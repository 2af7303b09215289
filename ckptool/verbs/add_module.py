"""`add-module`: a wrapper's prefix onto the keys of model weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool.errors import UsageError
from ckptool.prefixes import PEELED
from ckptool.roots import model_roots
from ckptool.transforms.rename import add
from ckptool.verbs.opening import PathLike, open_to_change
from ckptool.verbs.saving import SaveOptions, Written
from ckptool.verbs.strip_module import renamed_file

if TYPE_CHECKING:
    from typing_extensions import Unpack


def add_module(
    file: PathLike,
    out: PathLike | None = None,
    *,
    at: str | None = None,
    prefix: str = PEELED,
    **options: Unpack[SaveOptions],
) -> Written:
    """Puts `module.` (or `prefix`) before every key of all model weights in `file`, as DataParallel does: what `strip_module` undoes."""
    if not prefix:
        raise UsageError("the prefix is empty", "There would be nothing to add.")
    opened = open_to_change(file, at)
    renamed = add(opened.checkpoint, model_roots(opened.checkpoint, opened.at), prefix)
    return renamed_file("add-module", opened.checkpoint, renamed, out, options, clean="no keys to rename")
