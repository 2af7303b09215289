"""From live objects to a tree: torch's tensors and objects become the entries and inert nodes that they reduce to; and
back to objects, where they were given in place of a file."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

import torch

from ckptool.bridge.tensors import GET_LAYOUT, TENSOR_CLASSES, Storages, data_of, is_from_type, untyped
from ckptool.bridge.to_live import Builder, Unknown
from ckptool.checkpoint import Checkpoint, Composite, Storage, StorageRef
from ckptool.checkpoint.dtypes import BY_TORCH, DType
from ckptool.checkpoint.graph import FromParts
from ckptool.checkpoint.nodes import MISSING, Object
from ckptool.errors import Conflict
from ckptool.formats import LIVE
from ckptool.formats.in_memory import Memory, holds_containers
from ckptool.pickles.reduce import LiveReader
from ckptool.pickles.torch_objects import BUILDERS, SIZE


def from_torch(tree: Any, *, arrays_as_tensors: bool = False, keep_unknown: bool = False) -> Any:
    """The tree of nodes for live values: tensors, entries, whatever `torch.save` would write. No tensor is copied.

    Tensors that share a storage share it in the result. CUDA tensors keep their tag, and are copied to the CPU piece by
    piece as they are written.
    Raises `Unsupported`, naming every object that no checkpoint should hold, `Conflict` for one storage under two
    types.
    """
    values = tree.state_dict() if isinstance(tree, torch.nn.Module) else tree
    return TorchReader(arrays_as_tensors, keep_unknown).read(values)


class TorchReader(LiveReader):
    """Reads one tree of live objects, torch's among them."""

    def __init__(self, arrays_as_tensors: bool, keep_unknown: bool) -> None:
        super().__init__(arrays_as_tensors, keep_unknown)
        self.storages: dict[int, Storage] = {}
        self.dtypes: dict[int, DType | None] = {}

    def special(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.storage.TypedStorage):
            return self._ref(value._untyped_storage, BY_TORCH[str(value.dtype).removeprefix("torch.")])
        if isinstance(value, torch.UntypedStorage):
            return self._ref(value, None)
        if isinstance(value, torch.Size):  # complete at once, as its container may look inside
            return FromParts((tuple(value),), lambda parts: Object(SIZE, tuple(parts)))
        if isinstance(value, torch.layout):
            return Object(GET_LAYOUT, (str(value),))
        return super().special(value)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        """The entry or composite for a tensor, from the call by which torch pickles it."""
        try:
            answer: tuple[Any, ...] = cast(Any, tensor).__reduce_ex__(2)
        except RuntimeError as error:  # it has no memory of its own: of oneDNN, inside of `torch.vmap`
            return self.refuse(tensor, f"a tensor that torch cannot save ({error})", "Save it as tensor.to_dense()")
        function, args = answer[:2]
        builder = self._builder(function)
        if builder is None or len(answer) > 2 or not isinstance(args, tuple):
            return self.called(tensor, *answer)
        first = args[0] if args else None
        if isinstance(first, types.FunctionType) and self._builder(first) is None and not self.keep_unknown:
            return self._refused_tensor(tensor)  # its parts need not be looked at

        def make(parts: list[Any]) -> Any:
            result = builder(parts[0])
            if isinstance(result, Composite) and not self.keep_unknown:
                # A class that only its own code could rebuild.
                cls = str(result.made.args[1]) if is_from_type(result) else "torch.Tensor"
                needs_own_code = cls not in TENSOR_CLASSES or result.made.fn.name == "_rebuild_wrapper_subclass"
                return self._refused_tensor(tensor) if needs_own_code else result
            return self._refused_tensor(tensor) if result is NotImplemented else result

        return FromParts((args,), make)

    def _builder(self, function: Any) -> Any:
        name = self.name_of(function)
        return BUILDERS.get(name) if name is not None else None

    def _refused_tensor(self, tensor: torch.Tensor) -> Any:
        cls, fix = type(tensor), "Save it as a plain tensor: tensor.as_subclass(torch.Tensor), or its parts."
        return self.refuse(tensor, f"a tensor of the class {cls.__module__}.{cls.__qualname__}", fix)

    def _ref(self, storage: torch.UntypedStorage, dtype: DType | None) -> StorageRef:
        """The node for a torch storage, one for each. In a file a storage has one element type for all its views."""
        key = storage._cdata
        node = self.storages.get(key)
        if node is None:
            node = self.storages[key] = Storage(data_of(storage), untyped.serialization.location_tag(storage))
            self.mapper.alive.append(storage)
            self.dtypes[key] = dtype
        elif node.nbytes and (self.dtypes[key] or _BYTES) is not (dtype or _BYTES):
            names = [kind.torch if kind else "an untyped storage" for kind in (self.dtypes[key], dtype)]
            what = f"two tensors view one storage as {names[0]} and as {names[1]}"
            why = "In a torch file each storage has one type; torch.save refuses this, too."
            raise Conflict(what, why, "Save a copy of one of them: tensor.clone()")
        return StorageRef(node, dtype)


_BYTES = BY_TORCH["uint8"]  # how torch treats an untyped storage


class TorchMemory(Memory, TorchReader):
    """State dicts and modules in place of files."""

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
        """The tree as torch's objects. Storages stay where they are; new ones go to the device of their tag.

        Raises `UnsafeObject` for changed objects of unknown classes.
        """
        return _LiveBuilder(tree, self).build(is_own=True)


class _LiveBuilder(Builder):
    """Makes the objects of a tree, except those that are in memory already."""

    def __init__(self, tree: Any, memory: Memory) -> None:
        super().__init__(Checkpoint(tree, LIVE), Storages(None, map_files=True))
        self.memory = memory
        self.storages.live.update(memory.memories)

    def _handle(self, handler: Callable[[Builder, Any], Any], node: Any) -> Any:
        live = self.memory.known(node)
        if live is not MISSING and not holds_containers(node):
            return live
        result = super()._handle(handler, node)
        if live is MISSING or not isinstance(result, Unknown):
            return result
        self.unknown.pop()  # no copy can be made, and none is needed
        return live


def torch_memory(_: Memory) -> Memory:
    """A reader that knows torch's objects."""
    return TorchMemory()
