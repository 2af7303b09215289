"""The size of a sparse patch: how much of a checkpoint would have to be sent to somebody who has the other one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Composite, TensorEntry
from ckptool.checkpoint.tree import tensors

if TYPE_CHECKING:
    from ckptool.reports.diff import Difference

_OF_DATA = {"values", "shape", "dtype", "kind"}
_SMALL = 1 << 32  # elements that four bytes can count


def sparse_patch(changed: Iterable[Difference], new: Iterable[Any]) -> tuple[int, int] | None:
    """The number of elements that differ, and the bytes of a patch; None where elements were not counted.

    For each tensor: changed elements × (bytes of an element + bytes of its index: 4, or 8 where it has more than 2^32
    elements); all of its bytes where that is less, where its shape or type changed, and where it is new. What stands
    under several names counts once.
    """
    elements, size = 0, sum(tensor.nbytes for node in new for _, tensor in tensors(node))
    for change in _once(changed):
        values, whole = change.values, change.right.nbytes
        if values is None:
            if "shape" not in change.aspects and isinstance(change.left, TensorEntry):
                return None
            size += whole
            continue
        elements += values.changed
        sparse = values.changed * (change.right.dtype.itemsize + (4 if values.total <= _SMALL else 8))
        size += whole if "dtype" in change.aspects else min(whole, sparse)
    return elements, size


def _once(changed: Iterable[Difference]) -> Iterator[Difference]:
    """The tensors whose data differ, each storage's view once."""
    seen: set[Any] = set()
    for change in changed:
        tensor = change.right
        if isinstance(tensor, (TensorEntry, Composite)) and not _OF_DATA.isdisjoint(change.aspects):
            view: Any = id(tensor)
            if isinstance(tensor, TensorEntry):
                view = id(tensor.storage), tensor.shape, tensor.stride, tensor.offset
            if view not in seen:
                seen.add(view)
                yield change
