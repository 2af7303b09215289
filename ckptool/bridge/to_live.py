"""The way from a tree to live objects: one tensor, or all that `torch.load` would give."""

from __future__ import annotations

from typing import Any

import torch

from ckptool.bridge import containers, objects, tensors
from ckptool.bridge.builder import Builder, Kinds
from ckptool.bridge.devices import restorer
from ckptool.checkpoint import Checkpoint, Composite, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.graph import After, Done
from ckptool.checkpoint.nodes import ByteString, Global, Object, OrderedDict, Set
from ckptool.checkpoint.registry import provides
from ckptool.checkpoint.strided import subrange, verify


@provides("torch", TensorEntry, Composite)
def to_torch(entry: TensorEntry | Composite, device: Any = "cpu") -> torch.Tensor:
    """A new tensor with the entry's bytes, type, strides, flags and class, on `device`. Its bytes are read, nothing is mapped.

    Of a plain entry only the part of the storage that it spans is read. Raises `UnsafeObject` for a subclass that is not torch's own.
    """
    if isinstance(entry, TensorEntry):
        verify(entry)
        start, stop = entry.span()
        part = Storage(subrange(entry.storage.data, start, stop - start), entry.location)
        entry = TensorEntry(part, entry.dtype, entry.shape, entry.stride, 0, entry.flags)
    made: torch.Tensor = Builder(Checkpoint(entry, ""), restorer(device), _KINDS, map_files=False).build()
    return made


def build(checkpoint: Checkpoint, map_location: Any = "cpu", *, mmap: bool = True) -> Any:
    """What `torch.load` would give for this tree, without running anything that the file names.

    map_location: as `torch.load` takes it (a device, a dictionary, a function; None: where the tensors were saved).
    mmap: map the file (privately: writes to the tensors do not reach it) instead of reading it, as `torch.load(mmap=True)` does. Nothing is
    read until it is used, checksums are not checked, and the file must not be cut short or overwritten while the tensors live.
    Raises `UnsafeObject` naming every object of an unknown class and where it is, `Unsupported` for a device that is not there.
    """
    return Builder(checkpoint, restorer(map_location), _KINDS, map_files=mmap).build()


_KINDS: Kinds = {
    TensorEntry: tensors.strided,
    Composite: tensors.composite,
    StorageRef: tensors.storage_ref,
    dict: containers.dictionary,
    OrderedDict: containers.ordered,
    list: containers.list_of,
    tuple: lambda _, node: After(node, tuple),
    Set: containers.set_of,
    bytearray: lambda _, node: Done(bytearray(node)),
    ByteString: lambda _, node: Done(bytes(node)),
    Global: objects.named,
    Object: objects.known,
}
