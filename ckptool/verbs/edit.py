"""`edit`: entries dropped, and values set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from ckptool.analysis.words import entry_text
from ckptool.checkpoint.tree import address, find
from ckptool.commands import arg, repeated, several, verb
from ckptool.errors import MissingKey, UsageError, counted
from ckptool.transforms.edit import with_value, without
from ckptool.verbs._options import ChangedAt, ChangedFiles, Out, Texts, assignments
from ckptool.verbs._save import Row, SavePart, Unpack, Written, begin_change, checkpoint_of

Values = Mapping[str, Any] | None
_SET = "Set a plain value: epoch=3. JSON, or else text."


@verb(("ckptool edit model.pt --drop optimizer --set epoch=0 -o edited.pt", "drop and set entries"))
def edit(
    file: ChangedFiles,
    out: Out = None,
    *,
    drop: Annotated[Texts, repeated("--drop PATTERN", "Drop matching entries below the address.")] = (),
    set: Annotated[Values, repeated("--set PATH=VALUE", _SET, parse=assignments)] = None,
    at: ChangedAt = None,
    **options: Unpack[SavePart],
) -> Written | Any:
    """Drops entries, sets values.

    set: address -> plain value, tensor or array; a tensor takes one of its shape and dtype. Addresses are relative to
    `at`.
    """
    if not (drop or set):
        fix = f"For example: {arg(drop='optimizer*')}, {arg(set={'epoch': 3})}"
        raise UsageError("edit was given nothing to do", "", fix)
    # Numbers of numpy's are plain ones; an array without dimensions is one where no tensor is.
    plain = {
        place: value.item() if type(value).__module__ == "numpy" and not hasattr(type(value), "__setitem__") else value
        for place, value in (set or {}).items()
    }
    values = checkpoint_of(plain).tree
    change = begin_change("edit", file, out, at, options)
    tree, dropped = without(change.part, several(drop)) if drop else (change.part.tree, ())
    for place, value in values.items():
        tree = with_value(tree, place, value)
    base = address(change.part.base)
    addresses = [f"{base}/{place}" if base else place for place in values]
    words = (("dropped", dropped), ("set", addresses))
    summary = ", ".join(f"{counted(len(names), 'entry', 'entries')} {word}" for word, names in words if names)
    lines = []
    for place, value in list(values.items())[:9]:
        try:
            lines.append(f"{place}: {entry_text(find(change.part.tree, place)[1])} → {entry_text(value)}")
        except MissingKey:
            lines.append(f"{place}: {entry_text(value)}, a new entry")
    return change.save(replace(change.part, tree=tree)).about(
        summary, Row.named("dropped", dropped, "dropped"), Row("set", addresses, lines)
    )
