"""`show`: the values of one tensor, or any other entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from ckptool.analysis.show import Shown
from ckptool.checkpoint import Checkpoint, Composite, TensorEntry
from ckptool.checkpoint.files import unchanged
from ckptool.checkpoint.numpy_arrays import array_entry
from ckptool.checkpoint.strided import slice_view, to_numpy
from ckptool.checkpoint.tree import address, find
from ckptool.errors import UsageError
from ckptool.formats.opening import open_file
from ckptool.options import option, verb
from ckptool.verbs._options import At, File

WHOLE = 1_000  # elements up to which all of a tensor is read
EDGE = 3


@verb(
    ("ckptool show model.pt#epoch", "a value"),
    ("ckptool show model.pt#state_dict/module.fc.weight --slice '0:2,:5'", "a part of a tensor"),
)
def show(
    file: File,
    *,
    at: At = None,
    slice: Annotated[str | None, option("--slice SLICE", "Show only this slice of a tensor: '0:4,:'.")] = None,
    all: Annotated[bool, option("--all", "Show all of it, however large.")] = False,
) -> Shown:
    """The entry at an address of `file`: a tensor with its values (or a slice, `'0:4,:'`), a plain value, a dictionary.

    Of a tensor with more than 1,000 elements only the corners are read, unless `all`. Raises `UsageError` for an
    address that leads nowhere, a slice that does not fit, or a slice of something else.
    """
    opened = open_file(file, at)
    path, node = find(_holder(opened.checkpoint, opened.at or ""), opened.at or "")
    array = array_entry(node)
    if array is not None and (slice is not None or array.numel > WHOLE):
        node = array  # of a few values, all are shown as they stand
    if not isinstance(node, TensorEntry):
        if slice is not None:
            kind = "a composite tensor" if isinstance(node, Composite) else f"of type {type(node).__name__}"
            raise UsageError(f"{address(path) or 'the whole file'} cannot be sliced: it is {kind}")
        return Shown(opened.name, address(path), node, None, None, False)
    view = slice_view(node, slice) if slice is not None else node
    edges = not all and view.numel > WHOLE
    with unchanged(opened.checkpoint.source):
        values = _corners(view) if edges else to_numpy(view)
    return Shown(opened.name, address(path), node, slice, values, edges)


def _holder(checkpoint: Checkpoint, at: str) -> Any:
    """The tree; for an address that leads to something beside it (the code of a program), that."""
    name = at.strip("/").partition("/")[0]
    return {name: checkpoint.extras[name]()} if name in checkpoint.extras else checkpoint.tree


def _corners(entry: TensorEntry) -> Any:
    """The first and last three along every axis, and between them one that printing leaves out."""
    import numpy

    spans: list[Sequence[str]] = [
        [":"] if size <= 2 * EDGE + 1 else [f":{EDGE + 1}", f"{size - EDGE}:"] for size in entry.shape
    ]

    def block(chosen: tuple[str, ...], axis: int) -> Any:
        if axis == len(spans):
            return to_numpy(slice_view(entry, ",".join(chosen)))
        return numpy.concatenate([block((*chosen, span), axis + 1) for span in spans[axis]], axis=axis)

    return block((), 0)
