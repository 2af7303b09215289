"""Which tensors of a tree are stored as themselves: those that cover their storage, under which name, in which type."""

from __future__ import annotations

from typing import Any

from ckptool.checkpoint import Computed, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.strided import in_storage_order, row_major
from ckptool.checkpoint.tree import address, walk
from ckptool.errors import Unsupported, is_text, printable
from ckptool.formats.carried.record import RESERVED, STAND_INS
from ckptool.formats.signs import flipped


def covers(tree: Any) -> dict[int, TensorEntry]:
    """For each storage the first tensor that covers it: every element once, none outside, of a type that can be stored."""
    found: dict[int, TensorEntry] = {}
    for _, node in walk(tree):
        if isinstance(node, TensorEntry) and id(node.storage) not in found and _is_cover(node):
            found[id(node.storage)] = node
    return found


def _is_cover(entry: TensorEntry) -> bool:
    if entry.nbytes != entry.storage.nbytes or entry.offset or not entry.nbytes:
        return False
    if entry.dtype.safetensors is None and entry.dtype.name not in STAND_INS:
        return False
    if entry.dtype.name == "f4_e2m1fn_x2" and (not entry.shape or not entry.is_contiguous):
        return False
    return entry.is_contiguous or in_storage_order(entry) is not None


def axes_of(entry: TensorEntry) -> list[int] | None:
    """The axes from the widest stride to the narrowest, as they lie in the storage; None for row-major."""
    if entry.is_contiguous:
        return None
    return sorted(range(len(entry.shape)), key=lambda axis: (-entry.stride[axis], -entry.shape[axis], axis))


def same_view(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether two tensors see the same elements of a storage in the same way."""
    return (a.dtype, a.shape, a.stride, a.offset) == (b.dtype, b.shape, b.stride, b.offset)


def stand_in(entry: TensorEntry) -> TensorEntry:
    """The tensor as safetensors can hold it; conjugate and negative bits stay flags, for the writer to resolve."""
    if entry.dtype.safetensors is not None:
        return entry
    name, width = STAND_INS[entry.dtype.name]
    data = row_major(entry)
    if entry.flags.conj or entry.flags.neg:
        data = flipped(data, entry.dtype, entry.flags.conj, entry.flags.neg, entry.storage)
    whole = data is not entry.storage.data and isinstance(data, Computed)
    storage = Storage(
        data, entry.location, None if whole else entry.storage.crc, deduplicated=entry.storage.deduplicated
    )
    shape = (*entry.shape, width) if width > 1 else entry.shape
    stride = (*(s * width for s in row_major_strides(entry.shape)), 1) if width > 1 else row_major_strides(entry.shape)
    return TensorEntry(storage, by_name(name), shape, stride)


def names_of(tree: Any) -> dict[int, str]:
    """A name for each tensor: its key where the tree is a dictionary of tensors, else its address."""
    flat = isinstance(tree, dict) and any(isinstance(value, TensorEntry) for value in tree.values())
    names: dict[int, str] = {}
    taken: set[str] = set()
    entries = [(path, node) for path, node in walk(tree) if isinstance(node, TensorEntry)]
    # Keys that are text come first: of 0 and '0' the latter gets the plain name.
    for path, node in sorted(entries, key=lambda found: not all(type(part) is str for part in found[0])):
        if id(node) in names:
            continue
        name = path[0] if flat and len(path) == 1 and type(path[0]) is str else address(path)
        if not is_text(name):
            raise Unsupported(
                f"the tensor {printable(name)} has a name that is not Unicode text",
                "No other program could read it.",
                "Rename it first.",
            )
        name = f"_{name}" if name.startswith(RESERVED) or name == "__metadata__" else name
        while name in taken:
            name += f"~{type(path[-1]).__name__ if path else 'tensor'}"
        taken.add(name)
        names[id(node)] = name
    return names
