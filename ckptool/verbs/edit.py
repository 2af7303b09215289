"""`edit`: entries dropped, plain values set, a tensor's values replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint.commands import several
from ckptool.errors import UsageError, listed, printable
from ckptool.formats.opening import PathLike
from ckptool.reports.save import Written
from ckptool.transforms import edit as edits
from ckptool.verbs._save import ChangeOptions, begin_change

if TYPE_CHECKING:
    from typing_extensions import Unpack


def edit(
    file: PathLike,
    out: PathLike | None = None,
    *,
    drop: str | Sequence[str] = (),
    set: Mapping[str, Any] | None = None,
    tensor: Mapping[str, Any] | None = None,
    at: str | None = None,
    **options: Unpack[ChangeOptions],
) -> Written:
    """Drops entries, sets plain values, replaces the values of tensors.

    drop: patterns for addresses, or for keys of model weights.  set: address -> plain value (JSON's kinds).
    tensor: address -> numpy array or the path of a .npy file; shape and type must be the tensor's.
    at: only there, and everything else is relative to it.
    """
    if not (drop or set or tensor):
        raise UsageError(
            "edit was given nothing to do",
            "",
            "For example: --drop 'optimizer*', --set epoch:=3, --tensor state_dict/fc.bias=bias.npy",
        )
    arrays = {
        place: edits.read_array(array) if isinstance(array, str) else array for place, array in (tensor or {}).items()
    }
    change = begin_change("edit", file, out, at, options)
    done = edits.edit(change.part, several(drop), set, arrays)
    result = change.save(done.checkpoint)
    facts = {"dropped": list(done.dropped), "set": list(done.set), "replaced": list(done.replaced)}
    parts = [
        f"{len(names):,} {word}"
        for word, names in (("dropped", done.dropped), ("set", done.set), ("replaced", done.replaced))
        if names
    ]
    words = (("dropped", done.dropped), ("set", done.set), ("new values for", done.replaced))
    details = tuple(f"{word} {listed([printable(name) for name in names], 8)}" for word, names in words if names)
    summary = f"entries: {', '.join(parts)}"
    return change.written(result, summary, facts=facts, details=details)
