"""The meaning of torch's rebuild functions: their calls become entries, storages and composites.

Each builder takes the arguments of one call and returns the value, or `NotImplemented` where the arguments are not the
ones that torch writes; the call then stays an inert object, shown and not passed on. Source of the signatures:
torch/_utils.py and torch/_tensor.py, torch 0.4 to 2.13.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import isfinite, prod
from typing import Any

from ckptool.checkpoint import MAX_RANK, NO_FLAGS, Composite, Flags, InlineBytes, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import BY_STORAGE, BY_TORCH, DType
from ckptool.checkpoint.nodes import Global, Object, OrderedDict
from ckptool.errors import BadTensor, counted
from ckptool.pickles.builders import ORDERED_DICT, PLAIN_BUILDERS

MOST = (1 << 63) - 1  # what a size, a stride and a number of elements may be

_DAMAGED = "The pickle contradicts itself: it is damaged or malicious."

REBUILD_TENSOR_V2 = Global("torch._utils", "_rebuild_tensor_v2")
REBUILD_TENSOR_V3 = Global("torch._utils", "_rebuild_tensor_v3")
REBUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")
REBUILD_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
JAGGED = "nested jagged"
REBUILD_JAGGED = Global("torch.nested._internal.nested_tensor", "_rebuild_njt")
TENSOR = Global("torch", "Tensor")
UNTYPED_STORAGE = Global("torch.storage", "UntypedStorage")
SIZE = Global("torch", "Size")

_FLAGS = {
    (requires_grad, conj, neg): Flags(requires_grad, False, conj, neg)
    for requires_grad, conj, neg in product((False, True), repeat=3)
}


@dataclass(frozen=True, slots=True, eq=False)
class StorageView:
    """A part of a storage that old files give as a storage: its elements from `offset`; its tensors view the whole.

    Only builders meet it. key: its name in the file.  window: what it would be as a storage of its own.
    """

    key: str
    storage: Storage
    dtype: DType | None
    offset: int
    window: Storage


def dtype_of(name: Any) -> DType | None:
    """The element type that a pickled `torch.float32` names."""
    return BY_TORCH.get(name.name) if type(name) is Global and name.module == "torch" else None


def storage_class(name: Any) -> tuple[bool, DType | None]:
    """True for a name of torch's storage classes, with its element type (None for untyped storages)."""
    if type(name) is not Global or name.module not in ("torch", "torch.cuda", "torch.storage"):
        return False, None
    if name.name in ("UntypedStorage", "_UntypedStorage"):
        return True, None
    dtype = BY_STORAGE.get(name.name)
    return dtype is not None, dtype


def check_view(storage: Storage, dtype: DType, shape: Any, stride: Any, offset: Any) -> None:
    """Raises `BadTensor` unless every element of the view lies inside the storage."""
    if type(shape) is not tuple or type(stride) is not tuple or type(offset) is not int:
        raise BadTensor("a tensor whose sizes, strides or offset are not numbers", _DAMAGED)
    if len(shape) != len(stride):
        raise BadTensor(f"a tensor with {counted(len(shape), 'size')} but {counted(len(stride), 'stride')}", _DAMAGED)
    if len(shape) > MAX_RANK:
        raise BadTensor(f"a tensor with {counted(len(shape), 'dimension')}; torch allows {MAX_RANK}", _DAMAGED)
    last, empty, count = offset, False, 1
    for size, step in zip(shape, stride, strict=True):
        if type(size) is not int or type(step) is not int or not (0 <= size <= MOST and 0 <= step <= MOST):
            raise BadTensor(f"a tensor of shape {list(shape)} with strides {list(stride)}", _DAMAGED)
        empty = empty or size == 0
        last += (size - 1) * step
        count *= size
    if count > MOST:
        raise BadTensor(f"a tensor of shape {list(shape)} has more elements than 64 bits can count", _DAMAGED)
    if offset < 0 or (not empty and (last + 1) * dtype.itemsize > storage.data.length):
        raise BadTensor(
            f"a tensor of shape {list(shape)}, strides {list(stride)} and offset {offset} "
            f"needs {(last + 1) * dtype.itemsize:,} bytes; its storage has {storage.data.length:,}",
            _DAMAGED,
        )


def _strided(ref: Any, offset: Any, shape: Any, stride: Any, flags: Flags, dtype: DType | None = None) -> Any:
    if type(ref) is not StorageRef and type(ref) is not StorageView:
        return NotImplemented
    dtype = dtype or ref.dtype
    if dtype is None:
        return NotImplemented
    if type(shape) is not tuple:
        shape = _as_sizes(shape)
    if type(ref) is StorageView:
        check_view(ref.window, dtype, shape, stride, offset)
        if dtype.itemsize != (ref.dtype.itemsize if ref.dtype else 1):
            return NotImplemented
        offset += ref.offset
    check_view(ref.storage, dtype, shape, stride, offset)
    return TensorEntry(ref.storage, dtype, shape, stride, offset, flags)


def _no_hooks(hooks: Any) -> bool:
    """True for the empty dictionary of backward hooks that torch writes; a tensor with hooks stays a call."""
    if isinstance(hooks, Object):
        return hooks.fn is ORDERED_DICT and not hooks.items
    return hooks is None or (isinstance(hooks, dict) and not hooks)


def _tensor_flags(requires_grad: Any, metadata: Any = None) -> Flags | None:
    if not metadata:
        return _FLAGS.get((requires_grad, False, False)) if type(requires_grad) is bool else None
    if not isinstance(metadata, dict) or not set(metadata) <= {"conj", "neg"}:
        return None
    key = (requires_grad, metadata.get("conj", False), metadata.get("neg", False))
    return _FLAGS.get(key) if all(type(flag) is bool for flag in key) else None


def _rebuild_tensor(args: tuple[Any, ...]) -> Any:
    return _strided(*args, NO_FLAGS) if len(args) == 4 else NotImplemented


def _rebuild_tensor_v2(args: tuple[Any, ...]) -> Any:
    if len(args) == 6 and args[4] is False and type(args[5]) is OrderedDict and not args[5]:  # nearly all of them
        flags: Flags | None = NO_FLAGS
    elif not 6 <= len(args) <= 7 or not _no_hooks(args[5]):
        return NotImplemented
    else:
        flags = _tensor_flags(args[4], args[6] if len(args) == 7 else None)
    return NotImplemented if flags is None else _strided(args[0], args[1], args[2], args[3], flags)


def _rebuild_tensor_v3(args: tuple[Any, ...]) -> Any:
    if not 7 <= len(args) <= 8 or not _no_hooks(args[5]):
        return NotImplemented
    flags, dtype = _tensor_flags(args[4], args[7] if len(args) == 8 else None), dtype_of(args[6])
    return (
        NotImplemented if flags is None or dtype is None else _strided(args[0], args[1], args[2], args[3], flags, dtype)
    )


def _rebuild_parameter(args: tuple[Any, ...]) -> Any:
    if len(args) != 3 or type(args[1]) is not bool or not _no_hooks(args[2]):
        return NotImplemented
    data = args[0]
    if isinstance(data, Composite):
        made = Object(REBUILD_PARAMETER, args)
        return Composite(made, data.kind, data.dtype, data.shape, _rebuild_parameter)
    if not isinstance(data, TensorEntry) or data.flags.requires_grad or data.flags.parameter:
        return NotImplemented
    flags = Flags(args[1], True, data.flags.conj, data.flags.neg)
    return data.with_flags(flags)


# Before torch 0.4, tensors and parameters were made empty or from one another, and given a state.


def _tensor_class(dtype: DType) -> Callable[[tuple[Any, ...]], Any]:
    """`torch.cuda.FloatTensor()`: an empty tensor, until it is given a state."""

    def build(args: tuple[Any, ...]) -> Any:
        return NotImplemented if args else TensorEntry(Storage(InlineBytes(b"")), dtype, (0,), (1,))

    return build


_LISTED = {"f64": "d", "f32": "f", "f16": "e", "i64": "q", "i32": "i", "i16": "h", "i8": "b", "u8": "B"}


def _listed_storage(dtype: DType, location: str) -> Callable[[tuple[Any, ...]], Any]:
    """`torch.DoubleStorage([1.0, 2.0])`: the data as a list, as plain pickles of torch before 0.4 hold it."""

    def build(args: tuple[Any, ...]) -> Any:
        if len(args) != 1 or type(args[0]) is not list:
            return NotImplemented
        try:
            content = struct.pack(f"<{len(args[0])}{_LISTED[dtype.name]}", *args[0])
        except (struct.error, OverflowError):
            return NotImplemented
        return StorageRef(Storage(InlineBytes(content), location), dtype)

    return build


def _variable(parameter: bool) -> Callable[[tuple[Any, ...]], Any]:
    """`Parameter(tensor)` and `Variable(tensor)`; without arguments they are empty, until they are given a state."""

    def build(args: tuple[Any, ...]) -> Any:
        args = args or (TensorEntry(Storage(InlineBytes(b"")), BY_TORCH["float32"], (0,), (1,)),)
        if len(args) != 1 or type(args[0]) is not TensorEntry or args[0].flags.parameter:
            return NotImplemented
        data, flags = args[0], args[0].flags._replace(requires_grad=parameter, parameter=parameter)
        return data.with_flags(flags)

    return build


def set_tensor_state(entry: TensorEntry, state: Any) -> bool:
    """Gives a tensor the state that old pickles have for it; False where it is none.

    `(storage, offset, sizes, strides)`; of variables and parameters `(requires_grad, volatile, hooks)`, or with their
    tensor `(tensor, gradient, hooks, requires_grad, volatile)`. Source: torch/_tensor.py (`__setstate__`).
    """
    if type(state) is not tuple:
        return False
    if len(state) == 4:
        value = _strided(*state, entry.flags)
        return isinstance(value, TensorEntry) and value.dtype is entry.dtype and _set_tensor(entry, value)
    if len(state) == 5:
        if type(state[0]) is not TensorEntry or not _set_tensor(entry, state[0]):
            return False
        state = (state[3], state[4], state[2])
    if len(state) != 3 or type(state[0]) is not bool or not _no_hooks(state[2]):
        return False
    entry.flags = entry.flags._replace(requires_grad=state[0])
    return True


def _set_tensor(entry: TensorEntry, value: TensorEntry) -> bool:
    for name in ("storage", "dtype", "shape", "stride", "offset"):
        setattr(entry, name, getattr(value, name))
    return True


def _newobj(args: tuple[Any, ...]) -> Any:
    """`copyreg.__newobj__(cls, *args)`: how protocols 0 and 1 spell the opcode of that name."""
    if not args or type(args[0]) is not Global:
        return NotImplemented
    return _made_new(args[0], args[1:])


def _made_new(cls: Global, args: tuple[Any, ...]) -> Any:
    builder = _TENSOR_CLASSES.get(cls)
    value = NotImplemented if builder is None else builder(args)
    return Object(cls, args, "new") if value is NotImplemented else value


_TENSOR_CLASSES: dict[Global, Callable[[tuple[Any, ...]], Any]] = {
    **{
        Global(module, str(dtype.storage).replace("Storage", "Tensor")): _tensor_class(dtype)
        for module in ("torch", "torch.cuda")
        for dtype in BY_STORAGE.values()
        if dtype.kind != "quantized"
    },
    **{
        Global(module, str(dtype.storage)): _listed_storage(dtype, location)
        for module, location in (("torch", "cpu"), ("torch.cuda", "cuda:0"))
        for dtype in BY_STORAGE.values()
        if dtype.name in _LISTED
    },
    Global("torch.nn.parameter", "Parameter"): _variable(parameter=True),
    Global("torch.autograd.variable", "Variable"): _variable(parameter=False),
}


def _composite(
    name: str,
    understand: Callable[[tuple[Any, ...]], tuple[str, DType | None, Any] | None],
    module: str = "torch._utils",
) -> Any:
    """A builder that keeps the call whole and reads its kind, element type and shape off the arguments."""
    fn = Global(module, name)

    def build(args: tuple[Any, ...]) -> Any:
        understood = understand(args)
        if understood is None:
            return NotImplemented
        kind, dtype, shape = understood
        if kind == JAGGED:
            return jagged(fn, dtype, args)
        return Composite(Object(fn, args), kind, dtype, _as_sizes(shape) if shape is not None else None, build)

    return fn, build


def _as_sizes(value: Any) -> tuple[int, ...]:
    """The numbers of a shape, given as a tuple, a list or a `torch.Size`."""
    if isinstance(value, Object) and value.fn is SIZE and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, (list, tuple)) and len(value) <= MAX_RANK and all(type(n) is int and n >= 0 for n in value):
        if prod(value) > MOST:
            raise BadTensor(f"a tensor of shape {list(value)} has more elements than 64 bits can count", _DAMAGED)
        return tuple(value)
    raise BadTensor("a tensor whose shape is not a list of numbers", _DAMAGED)


def _tensor_like(value: Any) -> bool:
    return isinstance(value, (TensorEntry, Composite))


def _parameter_with_state(args: tuple[Any, ...]) -> Any:
    if len(args) != 4 or not _tensor_like(args[0]) or not _no_hooks(args[2]):
        return None
    return "parameter with attributes", args[0].dtype, args[0].shape


def _from_type(args: tuple[Any, ...]) -> Any:
    """`_rebuild_from_type_v2(func, type, args, state)`: another rebuild call, and the class to view its result as."""
    if len(args) not in (3, 4) or type(args[1]) is not Global or type(args[2]) is not tuple:
        return None
    if args[0] is REBUILD_JAGGED:
        # `_rebuild_njt({"values": …, "offsets": …, …})`: a nested tensor of the jagged layout.
        values = args[2][0].get("values") if len(args[2]) == 1 and isinstance(args[2][0], dict) else None
        return (JAGGED, values.dtype, None) if isinstance(values, (TensorEntry, Composite)) else None
    builder = BUILDERS.get(args[0]) if type(args[0]) is Global and args[0].module == "torch._utils" else None
    inner = builder(args[2]) if builder is not None else NotImplemented
    if not _tensor_like(inner):
        return None
    plain = str(args[1]) in (
        "torch.Tensor",
        "torch._tensor.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.nn.parameter.Buffer",
    )
    return ("with attributes" if plain else f"{args[1]}"), inner.dtype, inner.shape


def jagged(fn: Global, dtype: DType | None, args: tuple[Any, ...]) -> Composite:
    """A nested tensor of the jagged layout; its parts are in a dictionary that may not be filled yet."""
    return Composite(Object(fn, args), JAGGED, dtype, None, partial(jagged, fn, dtype))


def _with_grad(args: tuple[Any, ...]) -> Any:
    """The tensor that `_rebuild_from_type_v2` makes, where its only attribute is that it requires gradients.

    So are those written whose own call cannot say it (torch 2.13: "a leaf Variable that requires grad is being used in
    place").
    """
    if (
        len(args) != 4
        or args[1] is not TENSOR
        or args[3] != {"requires_grad": True}
        or args[0] is not REBUILD_TENSOR_V3
    ):
        return _FROM_TYPE[1](args)
    made = _rebuild_tensor_v3(args[2]) if type(args[2]) is tuple else NotImplemented
    return replace(made, flags=made.flags._replace(requires_grad=True)) if type(made) is TensorEntry else made


def _quantized(args: tuple[Any, ...]) -> Any:
    if len(args) != 7 or type(args[0]) is not StorageRef or args[0].dtype is None or not _no_hooks(args[6]):
        return None
    if args[0].dtype.name not in ("qu4x2", "qu2x4"):  # packed types count several elements to a byte
        check_view(args[0].storage, args[0].dtype, args[2], args[3], args[1])
    check_quantization(args[4], _as_sizes(args[2]))
    return "quantized", args[0].dtype, args[2]


def _sparse(args: tuple[Any, ...]) -> Any:
    """`(layout, (indices, values, size[, is_coalesced]))`, or `(layout, (compressed, plain, values, size))`."""
    if len(args) != 2 or not isinstance(args[0], Object) or type(args[1]) is not tuple or len(args[1]) < 3:
        return None
    layout = str(args[0].args[0]).removeprefix("torch.").replace("_", " ") if args[0].args else "sparse"
    at = 1 if "coo" in layout else 2
    values, size = args[1][at : at + 2] if len(args[1]) > at + 1 else (None, None)
    if not isinstance(values, TensorEntry):
        return None
    if at == 1:
        check_coordinates(args[1][0], values, _as_sizes(size))
    else:
        check_compressed(layout, args[1][:3], _as_sizes(size))
    return layout, values.dtype, size


def _sparse_csr(args: tuple[Any, ...]) -> Any:
    if len(args) != 1 or type(args[0]) is not tuple or len(args[0]) != 4 or not isinstance(args[0][2], TensorEntry):
        return None
    check_compressed("sparse csr", args[0][:3], _as_sizes(args[0][3]))
    return "sparse csr", args[0][2].dtype, args[0][3]


def _nested(args: tuple[Any, ...]) -> Any:
    return ("nested", args[0].dtype, None) if len(args) == 4 and isinstance(args[0], TensorEntry) else None


def _meta(args: tuple[Any, ...]) -> Any:
    return ("meta", dtype_of(args[0]), args[1]) if len(args) == 4 and dtype_of(args[0]) else None


def _wrapper(args: tuple[Any, ...]) -> Any:
    return (str(args[0]), dtype_of(args[1]), args[2]) if len(args) >= 7 and type(args[0]) is Global else None


def _device_numpy(args: tuple[Any, ...]) -> Any:
    if len(args) != 4 or not isinstance(args[0], Object):
        return None
    state = args[0].state
    shape = state[1] if type(state) is tuple and len(state) == 5 else None
    return "device", dtype_of(args[1]), shape


def _device_cpu_tensor(args: tuple[Any, ...]) -> Any:
    return ("device", args[0].dtype, args[0].shape) if len(args) == 4 and _tensor_like(args[0]) else None


# Checks of their parts, as far as shapes and numbers go: the values of indices are not read. Source: torch 2.13,
# aten/src/ATen/native/sparse/{ValidateCompressedIndicesCommon.h,SparseTensor.cpp}, ATen/quantized/Quantizer.cpp.


def check_coordinates(indices: Any, values: Any, size: tuple[int, ...]) -> None:
    """Raises `BadTensor` unless the indices (dimensions, count) and values (count, …) of a COO tensor fit its size."""
    if not (isinstance(indices, TensorEntry) and isinstance(values, TensorEntry)):
        return
    where, what = indices.shape, values.shape
    if (
        len(where) != 2
        or not what
        or where[1] != what[0]
        or where[0] + len(what) - 1 != len(size)
        or what[1:] != size[where[0] :]
    ):
        raise BadTensor(
            f"a sparse tensor of shape {list(size)} with indices of shape {list(where)} "
            f"and values of shape {list(what)}"
        )


def check_compressed(layout: str, parts: tuple[Any, ...], size: tuple[int, ...]) -> None:
    """Raises `BadTensor` unless the pointers, the indices and the values of a compressed tensor fit its size."""
    if not all(isinstance(part, TensorEntry) for part in parts):
        return
    pointers, indices, values = (part.shape for part in parts)
    kind = layout.removeprefix("sparse ")
    blocked = kind in ("bsr", "bsc")
    batch = len(indices) - 1
    dense = len(values) - len(indices) - 2 * blocked
    fits = batch >= 0 and dense >= 0 and len(pointers) == len(indices) and len(size) == batch + 2 + dense
    fits = fits and pointers[:-1] == indices[:-1] == size[:batch] and values[: batch + 1] == indices
    if fits:
        axis = int(kind in ("csc", "bsc"))
        block = values[batch + 1 : batch + 3] if blocked else (1, 1)
        fits = all(block) and not any(size[batch + i] % block[i] for i in (0, 1))
        fits = fits and pointers[-1] == size[batch + axis] // block[axis] + 1
    if not fits:
        raise BadTensor(
            f"a {layout} tensor of shape {list(size)} with pointers of shape {list(pointers)}, "
            f"indices of shape {list(indices)} and values of shape {list(values)}"
        )


def check_quantization(parameters: Any, shape: tuple[int, ...]) -> None:
    """Raises `BadTensor` for a scale that is not finite, or scales and zero points that are not one per channel."""
    if type(parameters) is not tuple or len(parameters) < 3:
        return
    scale = parameters[1]
    if type(scale) is float and not isfinite(scale):
        raise BadTensor(f"a quantized tensor with the scale {scale}")
    if len(parameters) != 4 or not all(isinstance(part, TensorEntry) for part in parameters[1:3]):
        return
    scales, zeros, axis = parameters[1].shape, parameters[2].shape, parameters[3]
    channels = shape[axis] if type(axis) is int and 0 <= axis < len(shape) else None
    if channels is None or scales != (channels,) or zeros != (channels,):
        raise BadTensor(
            f"a quantized tensor of shape {list(shape)} with scales of shape {list(scales)} "
            f"and zero points of shape {list(zeros)} along axis {axis!r:.20}"
        )


# All together --------------------------------------------------------------------------------------------------------


def _reconstructor(args: tuple[Any, ...]) -> Any:
    """`copyreg._reconstructor(cls, object, None)`: how protocols 0 and 1 make an object without calling its class."""
    if len(args) != 3 or type(args[0]) is not Global or args[2] is not None:
        return NotImplemented
    return _made_new(args[0], ()) if isinstance(args[1], Global) and args[1].name == "object" else NotImplemented


_FROM_TYPE = _composite("_rebuild_from_type_v2", _from_type, "torch._tensor")

BUILDERS: dict[Global, Callable[[tuple[Any, ...]], Any]] = {
    Global("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    REBUILD_TENSOR_V2: _rebuild_tensor_v2,
    REBUILD_TENSOR_V3: _rebuild_tensor_v3,
    REBUILD_PARAMETER: _rebuild_parameter,
    **PLAIN_BUILDERS,
    **_TENSOR_CLASSES,
    **{Global(module, "__newobj__"): _newobj for module in ("copyreg", "copy_reg")},
    **dict(
        (
            _composite("_rebuild_parameter_with_state", _parameter_with_state),
            (_FROM_TYPE[0], _with_grad),
            _composite("_rebuild_from_type_v2", _from_type, "torch.tensor"),
            _composite("_rebuild_from_type", _from_type, "torch._tensor"),
            _composite("_rebuild_from_type", _from_type, "torch.tensor"),
            _composite("_rebuild_qtensor", _quantized),
            _composite("_rebuild_sparse_tensor", _sparse),
            _composite("_rebuild_sparse_csr_tensor", _sparse_csr),
            _composite("_rebuild_nested_tensor", _nested),
            _composite("_rebuild_meta_tensor_no_storage", _meta),
            _composite("_rebuild_wrapper_subclass", _wrapper),
            _composite("_rebuild_device_tensor_from_numpy", _device_numpy),
            _composite("_rebuild_xla_tensor", _device_numpy),
            _composite("_rebuild_device_tensor_from_cpu_tensor", _device_cpu_tensor),
        )
    ),
    **{Global(module, "_reconstructor"): _reconstructor for module in ("copyreg", "copy_reg")},
}


def rebuilt(made: Object) -> Composite:
    """The composite of a rebuild call. Raises `BadTensor` where its arguments make no tensor."""
    value = BUILDERS[made.fn](made.args)
    if not isinstance(value, Composite):
        raise BadTensor(f"{made.name}: its arguments do not make a tensor")
    return value
