"""Storages: a file's bytes mapped or read, on their device, and torch's storages as data to write. Tensors of every
kind: plain entries as views of their storages, and the results of torch's rebuild functions."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

from ckptool.checkpoint import NO_FLAGS, Composite, Computed, Data, FileRange, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.blocks import BLOCK, Crc, fill, name_of
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.graph import Of
from ckptool.checkpoint.nodes import Global, Object
from ckptool.commands import FILE, OUT, command
from ckptool.errors import BadTensor, Corrupt, FileChanged, LimitExceeded, Unsupported, UsageError, counted
from ckptool.pickles.plain import expand
from ckptool.pickles.torch_objects import BUILDERS, REBUILD_JAGGED, check_view

if TYPE_CHECKING:
    from ckptool.bridge.to_live import Builder

untyped: Any = torch  # for functions that torch types wrongly or not at all

# Locations ------------------------------------------------------------------------------------------------------------


@cache
def is_absent(location: str) -> bool:
    """True for a device of a type that this machine, or this torch, does not have at all."""
    if location == "cpu":
        return False
    try:
        kind = torch.device(location).type
        return kind != "meta" and not untyped.get_device_module(kind).is_available()
    except (RuntimeError, AttributeError, AssertionError):
        return False


def _moved(storage: torch.UntypedStorage, location: str, saved: str) -> torch.UntypedStorage:
    """The storage on the device that `location` names. saved: where it was saved."""
    if location == "cpu":
        return storage
    try:
        return cast(torch.UntypedStorage, untyped.serialization.default_restore_location(storage, location))
    except (RuntimeError, AttributeError, AssertionError) as error:
        request = f"map_location asks for {location}" if location != saved else f"tensors were saved on {location}"
        what = f"{request}, which this machine or this torch does not have"
        why = str(error).splitlines()[0][:300] if str(error) else ""
        fix = "Put them elsewhere: map_location='cpu'"
        fix += f"; or change the file: {command('remap', FILE, to='cpu', out=OUT)}" if location == saved else ""
        raise Unsupported(what, why, fix) from error


# Bytes ----------------------------------------------------------------------------------------------------------------


class Storages:
    """The torch storage for each storage of the tree, mapped or read on first use, on the device that `map_location`
    names.

    device: of all of them, where it is known.  meta: they have no bytes. Raises `UsageError` for a `map_location` that
    is not a device, dictionary or function.
    """

    def __init__(self, map_location: Any, map_files: bool) -> None:
        if untyped._guards.detect_fake_mode(None) is not None:
            what, why = "nothing is loaded under torch's FakeTensorMode", "Fake tensors have no data."
            raise Unsupported(what, why, "Load it outside that mode; for shapes alone: map_location='meta'")
        self.map_location, self.map_files = map_location, map_files
        self.device: torch.device | None = None
        if isinstance(map_location, (str, bytes, torch.device)):
            device_name = map_location.decode("utf-8", "replace") if isinstance(map_location, bytes) else map_location
            try:
                self.device = torch.device(device_name)
            except RuntimeError:
                what, why = f"{str(map_location)!r} is not a device", "Devices are cpu, cuda, cuda:1, mps, meta."
                raise UsageError(what, why) from None
        elif map_location is not None and not isinstance(map_location, dict) and not callable(map_location):
            what = f"map_location={map_location!r} is not a device, dictionary or function"
            raise UsageError(what, "", "For example: map_location='cpu'")
        self.meta = self.device is not None and self.device.type == "meta"
        self.live: dict[int, torch.UntypedStorage] = {}
        self.maps: dict[Source, torch.UntypedStorage] = {}
        self.mapped: set[int] = set()  # the ids of data

    def restore(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """The storage on the device that `map_location` names. location: where it was saved."""
        if self.device is not None:
            return _moved(storage, str(self.device), location)
        if self.map_location is None:
            return storage if is_absent(location) else _moved(storage, location, location)
        if isinstance(self.map_location, dict):
            return _moved(storage, str(self.map_location.get(location, location)), location)
        result = self.map_location(storage, location)
        return _moved(storage, location, location) if result is None else getattr(result, "_untyped_storage", result)

    def get(self, storage: Storage, itemsize: int) -> torch.UntypedStorage:
        live = self.live.get(id(storage))
        if live is None:
            live = self.live[id(storage)] = self._make(storage, itemsize)
        return live

    def _make(self, storage: Storage, itemsize: int) -> torch.UntypedStorage:
        if self.meta:
            return cast(torch.UntypedStorage, untyped.UntypedStorage(storage.nbytes, device="meta"))
        data = storage.data
        # Of two storages at one place in a file, the second has memory of its own.
        may_map = self.map_files and data.length and id(data) not in self.mapped
        if may_map and isinstance(data, FileRange) and not data.file.far:
            start = data.file.begin + data.offset
            if start % min(itemsize, 8) == 0:
                self.mapped.add(id(data))
                data.ready()
                return self.restore(self._map(data.file)[start : start + data.length], storage.location)
        return self.restore(_read(data, storage.crc), storage.location)

    def _map(self, file: Source) -> torch.UntypedStorage:
        """The whole file, mapped once, copy-on-write; every storage in it keeps the map alive."""
        if file not in self.maps:
            # Torch closes the file again: Python's mmap keeps a descriptor, and a folder may have more files than a
            # process may open.
            file.check_unchanged()
            try:
                fd = file.descriptor()
                self.maps[file] = untyped.UntypedStorage.from_file(f"/dev/fd/{fd}", False, file.begin + file.size)
            except RuntimeError as error:
                what, why = f"{file} cannot be mapped into memory", str(error).splitlines()[0][:300]
                raise FileChanged(what, why, "Read it instead: mmap=False") from error
        return self.maps[file]


def _read(data: Data, crc: int | None) -> torch.UntypedStorage:
    """The bytes in memory of their own; raises `Corrupt` where their checksum is not `crc`."""
    try:
        storage: torch.UntypedStorage = untyped.UntypedStorage(data.length)
    except (RuntimeError, MemoryError) as error:
        what = f"a storage of {data.length:,} bytes does not fit into memory"
        raise LimitExceeded(what, "Not enough memory is free.", "Choose a part of the file: FILE#ADDRESS") from error
    if not data.length:
        return storage
    memory, total = memoryview(cast(Any, _bytes_of(storage).numpy())), Crc(expected=crc, name=name_of(data))
    for offset in range(0, data.length, BLOCK):  # the block is summed while it is in the processor's cache
        block = memory[offset : offset + BLOCK]
        fill(data, offset, block)
        if crc is not None:
            total.update(block)
    total.check("")
    return storage


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def data_of(storage: torch.UntypedStorage) -> Computed:
    """The bytes of a storage, read in place; from another device, piece by piece."""
    size = storage.nbytes()
    if not size:
        return Computed(0, lambda offset, length: b"")
    if storage.device.type == "meta":
        raise Unsupported("a storage on the meta device has no bytes")

    def read(offset: int, length: int) -> bytes:
        part = _bytes_of(storage)[offset : offset + length]
        return part.cpu().numpy().tobytes()

    if storage.device.type != "cpu":
        return Computed(size, read)
    # An array is a buffer, but its type stubs do not say so.
    raw = memoryview(_bytes_of(storage).numpy())  # type: ignore[arg-type]
    return Computed(size, read, view=lambda offset, length: raw[offset : offset + length])


# Tensors --------------------------------------------------------------------------------------------------------------

GET_LAYOUT = Global("torch.serialization", "_get_layout")
SPARSE_CSR = Object(GET_LAYOUT, ("torch.sparse_csr",))

TENSOR_CLASSES: dict[str, Any] = {
    "torch.Tensor": torch.Tensor,
    "torch._tensor.Tensor": torch.Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
}


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's own element type; raises `Unsupported` where this torch is too old for it."""
    result = getattr(torch, dtype.torch, None)
    if not isinstance(result, torch.dtype):
        what = f"this torch ({torch.__version__}) has no type {dtype.torch}"
        raise Unsupported(what, "It was added in a later version.", "pip install --upgrade torch")
    return result


def layout_of(node: Any) -> torch.layout:
    """The layout that a call of torch's `_get_layout` names; raises `Unsupported` for any other."""
    name = expand(node) if isinstance(node, Object) else None
    layout = vars(torch).get(name.removeprefix("torch.")) if type(name) is str else None
    if not isinstance(layout, torch.layout):
        raise Unsupported(f"the tensor layout {name!s} is not known")
    return layout


def typed_storage(builder: Builder, ref: StorageRef) -> Any:
    """A storage by itself."""
    dtype = torch.uint8 if ref.dtype is None else torch_dtype(ref.dtype)
    storage = builder.storages.get(ref.storage, ref.dtype.itemsize if ref.dtype else 8)
    return untyped.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def strided(builder: Builder, entry: TensorEntry) -> torch.Tensor:
    """A plain tensor: a view of its storage."""
    check_view(entry.storage.nbytes, entry.dtype, entry.shape, entry.stride, entry.offset)
    storage = builder.storages.get(entry.storage, entry.dtype.itemsize)
    tensor = torch.empty(0, dtype=torch_dtype(entry.dtype), device=storage.device)
    tensor.set_(storage, entry.offset, entry.shape, entry.stride)
    flags = entry.flags
    if flags is NO_FLAGS:
        return tensor
    if flags.conj or flags.neg:
        untyped._utils.set_tensor_metadata(tensor, {name: True for name in ("conj", "neg") if getattr(flags, name)})
    if flags.parameter:
        return torch.nn.Parameter(tensor, flags.requires_grad)
    if flags.requires_grad:
        tensor.requires_grad = True
    return tensor


# The results of torch's rebuild functions, given the arguments of their calls -----------------------------------------


def composite(builder: Builder, node: Composite) -> Any:
    """A tensor made from other tensors: quantized, sparse, nested, of a subclass. Those are made first."""
    return _REBUILD[node.made.fn.name](builder, node, *node.made.args)


def _from_type(builder: Builder, node: Any, function: Any, class_name: Any, args: Any, *state: Any) -> Any:
    """The result of another rebuild call, with a class and attributes."""
    if function is REBUILD_JAGGED and str(class_name) == "torch.nested._internal.nested_tensor.NestedTensor":
        return _jagged(builder, node, args[0])
    cls = TENSOR_CLASSES.get(str(class_name))
    if cls is None:
        return builder.refuse(node, f"a tensor of the class {class_name}")

    def make(tensor: Any) -> Any:
        return _with_attributes(builder, tensor if type(tensor) is cls else tensor.as_subclass(cls), *state)

    return builder.parts(node, (BUILDERS[function](args),), make)


def _with_attributes(builder: Builder, tensor: Any, state: Any = None) -> Any:
    """Sets the attributes that a tensor had, once their values are made."""
    states = [part for part in (state if type(state) is tuple else (state,)) if isinstance(part, dict)]
    attributes = [(key, value) for part in states for key, value in part.items()]
    if any(type(key) is not str or key.startswith("__") for key, _ in attributes):
        what, why = "a tensor whose attribute names are not identifiers", "They could change what it is."
        raise Corrupt(what, why)

    def later(of: Of) -> None:
        for key, value in attributes:
            builder.guarded(key, lambda key=key, value=value: setattr(tensor, key, of(value)))  # type: ignore[misc]

    builder.mapper.later(later)
    return tensor


def _jagged(builder: Builder, node: Any, arguments: dict[str, Any]) -> Any:
    """A nested tensor of the jagged layout, from its values, the offsets of its parts and torch's cache."""
    cache = arguments.get("_metadata_cache") or {}
    tensors, options = {"values", "offsets", "lengths"}, {"_ragged_idx", "_metadata_cache", "requires_grad"}
    if not isinstance(cache, dict) or not set(arguments) <= tensors | options:
        return builder.refuse(node, "a jagged nested tensor with arguments that torch never writes")
    parts = {name: _without_attributes(arguments[name]) for name in arguments if name in tensors}

    def make(*built: Any) -> Any:
        from torch.nested._internal.nested_tensor import NestedTensor

        live = arguments | dict(zip(parts, built, strict=False))
        live["_metadata_cache"] = dict(zip(cache, built[len(parts) :], strict=True))
        return cast(Any, NestedTensor)(**live)

    return builder.parts(node, (*parts.values(), *map(_without_attributes, cache.values())), make)


def _without_attributes(part: Any) -> Any:
    """A tensor without its attributes; on parts of a nested tensor they are notes of torch's compiler."""
    if isinstance(part, Composite) and is_from_type(part):
        return BUILDERS[part.made.args[0]](part.made.args[2])
    return part


def is_from_type(node: Composite) -> bool:
    """True for the result of another rebuild call, with a class and attributes."""
    return str(node.made.fn.name).startswith("_rebuild_from_type")


def _parameter(builder: Builder, node: Any, data: Any, requires_grad: bool, hooks: Any, *state: Any) -> Any:
    def make(tensor: Any) -> Any:
        return _with_attributes(builder, torch.nn.Parameter(tensor, requires_grad), *state)

    return builder.parts(node, (data,), make)


def _quantized(
    builder: Builder, node: Any, ref: StorageRef, offset: Any, shape: Any, stride: Any, parameters: Any, *rest: Any
) -> Any:
    per_byte = {"qu4x2": 2, "qu2x4": 4}.get(ref.dtype.name if ref.dtype else "")
    numbers = all(type(number) is int and number >= 0 for number in (offset, *shape, *stride))
    if per_byte is not None and not (numbers and math.prod(shape) <= ref.storage.nbytes * per_byte):
        raise BadTensor(f"a quantized tensor of shape {list(shape)} in a storage of {ref.storage.nbytes:,} bytes")
    tensors = [part for part in parameters if not isinstance(part, list)]

    def make(storage: Any, *built: Any) -> Any:
        live = iter(built)
        scheme = tuple(list(part) if isinstance(part, list) else next(live) for part in parameters)  # lists of numbers
        no_hooks: Any = collections.OrderedDict()
        return untyped._utils._rebuild_qtensor(storage, offset, shape, stride, scheme, rest[0], no_hooks)

    return builder.parts(node, (ref, *tensors), make)


def _sparse(builder: Builder, node: Any, layout: Any, parts: Any) -> Any:
    # torch.load does not check, and indices that point outside are followed nevertheless. On meta there is nothing to
    # check.
    check, layout = not builder.storages.meta, layout_of(layout)

    def make(*tensors: torch.Tensor) -> Any:
        if layout is torch.sparse_coo:
            coalesced = parts[3] if len(parts) > 3 else None
            return untyped.sparse_coo_tensor(*tensors, node.shape, check_invariants=check, is_coalesced=coalesced)
        return untyped.sparse_compressed_tensor(*tensors, node.shape, layout=layout, check_invariants=check)

    return builder.parts(node, parts[: 2 if layout is torch.sparse_coo else 3], make)


def _nested(builder: Builder, node: Any, *args: Any) -> Any:
    def make(*tensors: torch.Tensor) -> Any:
        if not builder.storages.meta:
            _check_nested(*tensors)
        return untyped._nested_view_from_buffer(*tensors)

    return builder.parts(node, args, make)


def _meta(builder: Builder, node: Any, dtype: Any, *rest: Any) -> Any:
    return builder.parts(node, (dtype,), lambda live: untyped._utils._rebuild_meta_tensor_no_storage(live, *rest))


def _device_tensor(builder: Builder, node: Any, data: Any, dtype: Any, location: Any, requires_grad: Any) -> Any:
    """A tensor of a device without storages, which was saved as numbers and the device's name."""

    def make(source: Any, kind: torch.dtype) -> Any:
        tensor = (source if isinstance(source, torch.Tensor) else torch.from_numpy(source)).to(kind).contiguous()
        storage = builder.storages.restore(tensor.untyped_storage(), str(location))
        moved = torch.empty(0, dtype=kind, device=storage.device)
        moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return moved.requires_grad_(requires_grad)

    return builder.parts(node, (data, dtype), make)


def _check_nested(buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor) -> None:
    """Raises `BadTensor` unless every part of a nested tensor lies inside its buffer; torch itself does not check."""
    if sizes.shape != strides.shape or sizes.dim() != 2 or offsets.shape != sizes.shape[:1]:
        raise BadTensor("a nested tensor whose sizes, strides and offsets do not match")
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        numbers = (*size, *stride, offset)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise BadTensor("a nested tensor whose sizes, strides or offsets are not numbers")
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if 0 not in size and last >= buffer.numel():
            elements = counted(buffer.numel(), "element")
            raise BadTensor(f"a part of shape {size} of a nested tensor lies outside its {elements}")


_REBUILD: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("_rebuild_from_type", "_rebuild_from_type_v2"), _from_type),
    **dict.fromkeys(("_rebuild_parameter", "_rebuild_parameter_with_state"), _parameter),
    "_rebuild_qtensor": _quantized,
    "_rebuild_sparse_tensor": _sparse,
    "_rebuild_sparse_csr_tensor": lambda builder, node, parts: _sparse(builder, node, SPARSE_CSR, parts),
    "_rebuild_nested_tensor": _nested,
    "_rebuild_meta_tensor_no_storage": _meta,
    "_rebuild_wrapper_subclass": lambda builder, node, cls, *_: builder.refuse(node, f"a tensor of the class {cls}"),
    **dict.fromkeys(
        ("_rebuild_device_tensor_from_numpy", "_rebuild_xla_tensor", "_rebuild_device_tensor_from_cpu_tensor"),
        _device_tensor,
    ),
}
