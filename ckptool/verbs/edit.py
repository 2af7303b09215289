"""`edit`: entries dropped, plain values set, a tensor's values replaced."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from ckptool.analysis.words import entry_text
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.files import open_regular
from ckptool.checkpoint.paths import file_problem
from ckptool.checkpoint.tree import address, find
from ckptool.commands import arg, repeated, several, verb
from ckptool.errors import MissingKey, UsageError, counted
from ckptool.transforms.edit import with_array, with_value, without
from ckptool.verbs._options import ChangedAt, ChangedFiles, Out, Texts, assignments, pairs
from ckptool.verbs._save import Row, SavePart, Unpack, Written, begin_change, checkpoint_of

Values = Mapping[str, Any] | None
_SET = "Set a plain value: epoch=3. JSON, or else text."
_FILES = pairs("state_dict/fc.bias=bias.npy")


@verb(("ckptool edit model.pt --drop optimizer --set epoch=0 -o edited.pt", "drop and set entries"))
def edit(
    file: ChangedFiles,
    out: Out = None,
    *,
    drop: Annotated[Texts, repeated("--drop PATTERN", "Drop matching entries below the address.")] = (),
    set: Annotated[Values, repeated("--set PATH=VALUE", _SET, parse=assignments)] = None,
    tensor: Annotated[Values, repeated("--tensor PATH=FILE.npy", "Give a tensor new values.", parse=_FILES)] = None,
    at: ChangedAt = None,
    **options: Unpack[SavePart],
) -> Written | Any:
    """Drops entries, sets plain values, replaces the values of tensors.

    set: address -> plain value or tensor.  tensor: address -> array, tensor, entry or the path of a .npy file, of the
    tensor's shape and type. Addresses are relative to `at`.
    """
    if not (drop or set or tensor):
        fix = f"For example: {arg(drop='optimizer*')}, {arg(set={'epoch': 3})}, "
        fix += f"{arg(tensor={'state_dict/fc.bias': 'bias.npy'})}"
        raise UsageError("edit was given nothing to do", "", fix)
    arrays = {place: _array(place, given) for place, given in (tensor or {}).items()}
    plain = {
        place: value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value
        for place, value in (set or {}).items()
    }
    values = checkpoint_of(plain).tree
    change = begin_change("edit", file, out, at, options)
    tree, dropped = without(change.part, several(drop)) if drop else (change.part.tree, ())
    for place, array in arrays.items():
        tree = with_array(tree, place, array)
    for place, value in values.items():
        tree = with_value(tree, place, value)
    above = address(change.part.base)
    named, given = ([f"{above}/{place}" if above else place for place in places] for places in (values, arrays))
    words = (("dropped", dropped), ("set", named), ("replaced", given))
    summary = ", ".join(f"{counted(len(names), 'entry', 'entries')} {word}" for word, names in words if names)
    lines = []
    for place, value in list(values.items())[:9]:
        try:
            lines.append(f"{place}: {entry_text(find(change.part.tree, place)[1])} → {entry_text(value)}")
        except MissingKey:
            lines.append(f"{place}: {entry_text(value)}, a new entry")
    return change.save(replace(change.part, tree=tree)).about(
        summary,
        Row.named("dropped", dropped, "dropped"),
        Row("set", named, lines),
        Row.named("replaced", given, "new values for"),
    )


def _array(place: str, given: Any) -> Any:
    """The array that is given, or that of a .npy file, never unpickled. Raises `FileProblem` or `UsageError`."""
    if isinstance(given, (str, os.PathLike)):
        from numpy.lib import format as npy

        path = os.fspath(given)
        descriptor = open_regular(path, "a .npy file")
        try:
            with open(descriptor, "rb") as file:
                return npy.read_array(file, allow_pickle=False)
        except OSError as error:
            raise file_problem(error, path, "read") from error
        except (ValueError, EOFError, MemoryError) as error:
            why = "A .npy file with one array of numbers was expected."
            raise UsageError(f"{path} is not a numpy array: {error!s}", why) from None
    if hasattr(getattr(given, "dtype", None), "newbyteorder"):
        return given  # numpy's own
    entry = checkpoint_of(given).tree
    if not isinstance(entry, TensorEntry):
        what = f"the values for {place} are of type {type(given).__name__}, and no array"
        raise UsageError(what, "", "Give an array of the tensor's type: numpy.asarray(VALUES, 'float32')")
    return entry.numpy()
