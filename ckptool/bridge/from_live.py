"""From live objects to a tree: torch's tensors and objects become the entries and inert nodes that they reduce to."""

from __future__ import annotations

import types
from typing import Any, cast

import torch

from ckptool.bridge.storages import data_of, untyped
from ckptool.bridge.tensors import GET_LAYOUT, REBUILD, TENSOR_CLASSES, from_type
from ckptool.checkpoint import Composite, Storage, StorageRef
from ckptool.checkpoint.dtypes import BY_TORCH, DType
from ckptool.checkpoint.graph import FromParts
from ckptool.checkpoint.nodes import Global, Object
from ckptool.errors import Conflict
from ckptool.pickles.reduce import LiveReader
from ckptool.pickles.torch_objects import BUILDERS, SIZE


def from_torch(tree: Any, *, arrays_as_tensors: bool = False, keep_unknown: bool = False) -> Any:
    """The tree of nodes for live values: tensors, entries, whatever `torch.save` would write. No tensor is copied.

    Tensors that share a storage share it in the result. CUDA tensors keep their tag, and are copied to the CPU piece by
    piece when they are written.
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
        if isinstance(value, torch.Size):
            return FromParts((tuple(value),), lambda parts: Object(SIZE, tuple(parts)))
        if isinstance(value, torch.layout):
            return Object(GET_LAYOUT, (str(value),))
        if isinstance(value, torch.device):
            return Object(Global("torch", "device"), value.__reduce__()[1])
        if isinstance(value, torch.qscheme):
            return Global("torch", str(value).removeprefix("torch."))
        return super().special(value)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        """The entry or composite for a tensor, from the call by which torch pickles it."""
        answer: tuple[Any, ...] = cast(Any, tensor).__reduce_ex__(2)
        function, args = answer[:2]
        builder = self._builder(function)
        if builder is None or len(answer) > 2 or not isinstance(args, tuple):
            return self.called(tensor, *answer)
        if (
            args
            and isinstance(args[0], types.FunctionType)
            and self._builder(args[0]) is None
            and not self.keep_unknown
        ):
            return self._refused_tensor(tensor)  # its parts need not be looked at

        def make(parts: list[Any]) -> Any:
            made = builder(parts[0])
            return self._refused_tensor(tensor) if made is NotImplemented or not self._loadable(made) else made

        return FromParts((args,), make)

    def _builder(self, function: Any) -> Any:
        name = self.name_of(function)
        return BUILDERS.get(name) if name is not None else None

    def _loadable(self, made: Any) -> bool:
        """False for a tensor of a class that only its own code could make again."""
        if self.keep_unknown or not isinstance(made, Composite):
            return True
        called, args = str(made.made.fn), made.made.args
        return called != "torch._utils._rebuild_wrapper_subclass" and (
            REBUILD.get(called) is not from_type or str(args[1]) in TENSOR_CLASSES
        )

    def _refused_tensor(self, tensor: torch.Tensor) -> Any:
        cls = type(tensor)
        return self.refuse(tensor, f"a tensor of the class {cls.__module__}.{cls.__qualname__}", _AS_PLAIN)

    def _ref(self, storage: torch.UntypedStorage, dtype: DType | None) -> StorageRef:
        """The storage, once for each of torch's. A file gives a storage one element type for all its views."""
        key = storage._cdata
        found = self.storages.get(key)
        if found is None:
            found = self.storages[key] = Storage(data_of(storage), untyped.serialization.location_tag(storage))
            self.mapper.alive.append(storage)
            self.dtypes[key] = dtype
        elif found.nbytes and (self.dtypes[key] or _BYTES) is not (dtype or _BYTES):
            names = [kind.torch if kind else "an untyped storage" for kind in (self.dtypes[key], dtype)]
            raise Conflict(
                f"two tensors view one storage as {names[0]} and as {names[1]}",
                "A torch file gives each storage one type; torch.save refuses this too.",
                "Save a copy of one of them: tensor.clone()",
            )
        return StorageRef(found, dtype)


_BYTES = BY_TORCH["uint8"]  # what torch takes an untyped storage for
_AS_PLAIN = "Save it as a plain tensor: tensor.as_subclass(torch.Tensor), or its parts."
