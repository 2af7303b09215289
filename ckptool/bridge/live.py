"""State dicts and modules in the place of files, and the way back to torch's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckptool.bridge.from_live import TorchReader
from ckptool.bridge.storages import restorer
from ckptool.bridge.to_live import Builder, Unknown
from ckptool.checkpoint import Checkpoint, StorageRef
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.nodes import MISSING
from ckptool.formats import LIVE
from ckptool.formats.in_memory import Memory, holds_containers


class TorchMemory(Memory, TorchReader):
    """Reads torch's objects, and modules by their state dicts."""

    def contents(self, given: Any) -> Any:
        return given.state_dict() if isinstance(given, torch.nn.Module) else super().contents(given)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        self.of_torch = True
        return super()._tensor(tensor)

    def _ref(self, storage: torch.UntypedStorage, dtype: DType | None) -> StorageRef:
        ref = super()._ref(storage, dtype)
        self.memories[id(ref.storage)] = storage
        return ref

    def objects(self, tree: Any) -> Any:
        """The tree as torch's objects. Storages stay where they are; new ones are on the device of their tag.

        Raises `UnsafeObject` for objects of unknown classes in which something changed.
        """
        builder = _LiveBuilder(tree, self)
        made = builder.mapper.map(tree)
        builder.mapper.handlers = {}  # they refer to the builder: without them the tensors live no longer than wanted
        if builder.unknown:
            raise builder.refusal()
        return made


class _LiveBuilder(Builder):
    """Makes objects of a tree, but those that are in memory already."""

    def __init__(self, tree: Any, memory: Memory) -> None:
        super().__init__(Checkpoint(tree, LIVE), restorer(None), map_files=True)
        self.memory = memory
        self.storages.made.update(memory.memories)

    def _handle(self, handler: Callable[[Builder, Any], Any], node: Any) -> Any:
        found = self.memory.known(node)
        if found is not MISSING and not holds_containers(node):
            return found
        made = super()._handle(handler, node)
        if found is MISSING or not isinstance(made, Unknown):
            return made
        self.unknown.pop()  # no copy can be made, and none is needed
        return found


def torch_memory(_: Memory) -> Memory:
    """A reader that knows torch's objects."""
    return TorchMemory()
