"""Builders: the meaning of known functions in pickles. Calls of torch's rebuild functions become entries, storages and
composites, those of Python's own types dictionaries, sets, bytes and complex numbers.

Each builder takes the arguments of one call and returns the value, or `NotImplemented` for arguments that neither torch
nor Python writes; the call then stays an inert object, which is shown and not passed on. Source of the
signatures: torch/_utils.py and torch/_tensor.py, torch 0.4 to 2.13; the `__reduce__` methods of Python 2.7 to 3.14, and
Lib/pickle.py (`save_bytes`, `save_set`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from math import isfinite, prod
from typing import Any

from ckptool.checkpoint import MAX_RANK, NO_FLAGS, Composite, Flags, InlineBytes, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import BY_STORAGE, BY_TORCH, DType
from ckptool.checkpoint.nodes import Global, Object, OrderedDict, Set, brief, check_collisions, is_hashable
from ckptool.checkpoint.numpy_arrays import LongValue
from ckptool.errors import BadTensor, LimitExceeded, counted
from ckptool.facts import dataclass, replace
from ckptool.pickles.arguments import no_hooks
from ckptool.pickles.known import rebuild_functions
from ckptool.pickles.strings import encoded, key_text

MOST = (1 << 63) - 1  # the largest size, stride and number of elements

_DAMAGED = "The pickle contradicts itself: it is damaged or malicious."

ORDERED_DICT = Global("collections", "OrderedDict")
REBUILD_TENSOR_V2 = Global("torch._utils", "_rebuild_tensor_v2")
REBUILD_TENSOR_V3 = Global("torch._utils", "_rebuild_tensor_v3")
REBUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")
REBUILD_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
JAGGED = "nested jagged"
REBUILD_JAGGED = Global("torch.nested._internal.nested_tensor", "_rebuild_njt")
TENSOR = Global("torch", "Tensor")
UNTYPED_STORAGE = Global("torch.storage", "UntypedStorage")
SIZE = Global("torch", "Size")


Builder = Callable[[tuple[Any, ...]], Any]
"""Makes the value of a known call from its arguments; returns `NotImplemented` for arguments that it does not know."""


class TakesState:
    """A builder's result for an object without arguments that receives a state (BUILD): a leaf of the tree."""

    __slots__ = ()

    def fill(self, state: Any) -> None:
        raise NotImplementedError


Spend = Callable[[int], None]
"""Accounts for a call that copies what takes at least this many bytes in a file."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PerPickle:
    """A builder whose calls copy their arguments: `build(spend, args)`."""

    build: Callable[[Spend, tuple[Any, ...]], Any]

    def __call__(self, args: tuple[Any, ...]) -> Any:
        return self.build(lambda _: None, args)

    def within(self, budget: int) -> Builder:
        """The builder for one pickle, in which it may copy `budget` bytes; it raises `LimitExceeded` beyond."""

        def spend(amount: int) -> None:
            nonlocal budget
            budget -= amount
            if budget < 0:
                raise LimitExceeded("one value copied over and over")

        return partial(self.build, spend)


# Python's own types ---------------------------------------------------------------------------------------------------


def _ordered_dict(spend: Spend, args: tuple[Any, ...]) -> Any:
    """An empty dictionary, as for the hooks of each tensor, or one from the list of pairs that Python 2 wrote."""
    if not args:
        return OrderedDict()
    match args:
        case (list(pairs),):
            spend(8 * len(pairs))
            if all(isinstance(p, (list, tuple)) and len(p) == 2 and isinstance(p[0], (str, int, bytes)) for p in pairs):
                check_collisions(pair[0] for pair in pairs)
                result = OrderedDict((key_text(pair[0]), pair[1]) for pair in pairs)
                return result if len(result) == len(pairs) else NotImplemented
    return NotImplemented


def _python_value(name: str, spend: Spend, args: tuple[Any, ...]) -> Any:
    """The value of a call of one of Python's types, or of `_codecs.encode`."""
    match (name, *args):
        case ["set" | "frozenset", list() | tuple() as items]:
            spend(2 * len(items))
            return Set(list(items), name == "frozenset") if all(map(is_hashable, items)) else NotImplemented
        case ["complex", float(real), float(imag)]:
            return complex(real, imag)
        case ["encode", str(text), "latin1" | "latin-1"]:  # how protocol 2 writes bytes; any other codec stays a call
            spend(len(text))
            try:
                return text.encode("latin-1")
            except UnicodeEncodeError:
                return NotImplemented
        case ["encode", LongValue() as stub, "latin1" | "latin-1"]:
            spend(stub.data.length)
            return (encoded(stub) if stub.kind == "text" else None) or NotImplemented
        case ["bytes"]:
            return b""
        case ["bytearray"]:
            return bytearray()
        case ["bytearray", bytes(content)] if type(content) is bytes:
            spend(len(content))
            return bytearray(content)
        case ["bytearray", LongValue(kind="bytes") as stub]:
            return LongValue(stub.data, "bytearray", stub.of or stub)
        case ["bytearray", text, codec]:
            return _python_value("bytearray", spend, (_python_value("encode", spend, (text, codec)),))
    return NotImplemented


_PYTHON_BUILDERS: dict[Global, Builder] = {
    ORDERED_DICT: PerPickle(_ordered_dict),
    Global("_codecs", "encode"): PerPickle(partial(_python_value, "encode")),
    **{
        Global(module, name): PerPickle(partial(_python_value, name))
        for module in ("builtins", "__builtin__")
        for name in ("set", "frozenset", "complex", "bytes", "bytearray")
    },
}


# Tensors --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StorageView:
    """A part of a storage that old files treat as a storage: `nbytes` bytes from element `offset` on; its tensors
    view the whole storage. Only builders see it."""

    storage: Storage
    dtype: DType | None
    offset: int
    nbytes: int


def dtype_of(name: Any) -> DType | None:
    """The element type that a pickled `torch.float32` names."""
    return BY_TORCH.get(name.name) if type(name) is Global and name.module == "torch" else None


def storage_class(name: Any) -> tuple[bool, DType | None]:
    """True for a name of torch's storage classes, with its element type (None for untyped storages)."""
    if type(name) is not Global or name.module not in ("torch", "torch.cuda", "torch.storage"):
        return False, None
    dtype = BY_STORAGE.get(name.name)
    return dtype is not None or name.name in ("UntypedStorage", "_UntypedStorage"), dtype


def check_view(nbytes: int, dtype: DType, shape: Any, stride: Any, offset: Any) -> None:
    """Raises `BadTensor` unless every element of the view lies inside a storage of `nbytes` bytes."""
    if type(shape) is not tuple or type(stride) is not tuple or type(offset) is not int:
        raise BadTensor("a tensor whose sizes, strides or offset are not numbers", _DAMAGED)
    if len(shape) != len(stride):
        raise BadTensor(f"a tensor with {counted(len(shape), 'size')} but {counted(len(stride), 'stride')}", _DAMAGED)
    if len(shape) > MAX_RANK:
        raise BadTensor(f"a tensor with {counted(len(shape), 'dimension')}; torch allows {MAX_RANK}", _DAMAGED)
    last, empty, count = offset, False, 1
    for size, step in zip(shape, stride, strict=True):
        if type(size) is not int or type(step) is not int or not (0 <= size <= MOST and 0 <= step <= MOST):
            shown = [", ".join(map(brief, numbers)) for numbers in (shape, stride)]
            raise BadTensor(f"a tensor of shape [{shown[0]}] with strides [{shown[1]}]", _DAMAGED)
        empty = empty or size == 0
        last += (size - 1) * step
        count *= size
    if count > MOST:
        raise BadTensor(f"a tensor of shape {list(shape)} has more elements than 64 bits can count", _DAMAGED)
    if offset < 0 or (not empty and (last + 1) * dtype.itemsize > nbytes):
        what = f"a tensor of shape {list(shape)}, strides {list(stride)} and offset {offset} needs "
        raise BadTensor(f"{what}{(last + 1) * dtype.itemsize:,} bytes; its storage has {nbytes:,}", _DAMAGED)


def _strided(ref: Any, offset: Any, shape: Any, stride: Any, flags: Flags, dtype: DType | None = None) -> Any:
    if type(ref) is not StorageRef and type(ref) is not StorageView:
        return NotImplemented
    dtype = dtype or ref.dtype
    if dtype is None:
        return NotImplemented
    if type(shape) is not tuple:
        shape = _as_sizes(shape)
    if type(ref) is StorageView:
        check_view(ref.nbytes, dtype, shape, stride, offset)
        if dtype.itemsize != (ref.dtype.itemsize if ref.dtype else 1):
            return NotImplemented
        offset += ref.offset
    check_view(ref.storage.data.length, dtype, shape, stride, offset)
    return TensorEntry(ref.storage, dtype, shape, stride, offset, flags)


def _rebuild_tensor_v2(args: tuple[Any, ...], dtype: DType | None = None) -> Any:
    if len(args) == 6 and args[4] is False and type(args[5]) is OrderedDict and not args[5]:  # nearly all of them
        return _strided(args[0], args[1], args[2], args[3], NO_FLAGS, dtype)
    if not 6 <= len(args) <= 7 or not no_hooks(args[5]):
        return NotImplemented
    metadata = (args[6] if len(args) == 7 else None) or {}
    if not isinstance(metadata, dict) or not set(metadata) <= {"conj", "neg"}:
        return NotImplemented
    if type(args[4]) is not bool:
        return NotImplemented
    flags = Flags(args[4], False, "conj" in metadata, "neg" in metadata)  # torch takes the names, whatever they have
    return _strided(args[0], args[1], args[2], args[3], flags, dtype)


def _rebuild_tensor_v3(args: tuple[Any, ...]) -> Any:
    """Like v2, with the element type between the hooks and what may follow them."""
    dtype = dtype_of(args[6]) if len(args) > 6 else None
    return NotImplemented if dtype is None else _rebuild_tensor_v2(args[:6] + args[7:], dtype)


def _rebuild_parameter(args: tuple[Any, ...]) -> Any:
    if len(args) != 3 or type(args[1]) is not bool or not no_hooks(args[2]):
        return NotImplemented
    data = args[0]
    if isinstance(data, Composite):
        return Composite(Object(REBUILD_PARAMETER, args), data.kind, data.dtype, data.shape, _rebuild_parameter)
    if not isinstance(data, TensorEntry) or data.flags.requires_grad or data.flags.parameter:
        return NotImplemented
    return data.with_flags(data.flags._replace(requires_grad=args[1], parameter=True))


# Before torch 0.4, tensors and parameters were made empty or from one another, and then received a state.


def _empty(dtype: DType, args: tuple[Any, ...] = ()) -> Any:
    """`torch.cuda.FloatTensor()`: an empty tensor, until it receives a state."""
    return NotImplemented if args else TensorEntry(Storage(InlineBytes(b"")), dtype, (0,), (1,))


_LISTED = {"f64": "d", "f32": "f", "f16": "e", "i64": "q", "i32": "i", "i16": "h", "i8": "b", "u8": "B"}


def _listed_storage(dtype: DType, location: str, args: tuple[Any, ...]) -> Any:
    """`torch.DoubleStorage([1.0, 2.0])`: the data as a list, as plain pickles of torch before 0.4 hold it."""
    if len(args) != 1 or type(args[0]) is not list:
        return NotImplemented
    try:
        content = struct.pack(f"<{len(args[0])}{_LISTED[dtype.name]}", *args[0])
    except (struct.error, OverflowError):
        return NotImplemented
    return StorageRef(Storage(InlineBytes(content), location), dtype)


def _variable(parameter: bool, args: tuple[Any, ...]) -> Any:
    """`Parameter(tensor)` and `Variable(tensor)`; without arguments they are empty, until they receive a state."""
    data = args[0] if args else _empty(BY_TORCH["float32"])
    if len(args) > 1 or type(data) is not TensorEntry or data.flags.parameter:
        return NotImplemented
    return data.with_flags(data.flags._replace(requires_grad=parameter, parameter=parameter))


def set_tensor_state(entry: TensorEntry, state: Any) -> bool:
    """Sets the state that old pickles have for a tensor; returns False for anything else.

    `(storage, offset, sizes, strides)`; for variables and parameters `(requires_grad, volatile, hooks)`, or with their
    tensor `(tensor, gradient, hooks, requires_grad, volatile)`. Source: torch/_tensor.py (`__setstate__`).
    """
    data, requires_grad, hooks = entry, entry.flags.requires_grad, None
    match state:
        case tuple((ref, offset, shape, stride)):
            data = _strided(ref, offset, shape, stride, entry.flags)
            if data is NotImplemented or data.dtype is not entry.dtype:
                return False
        case tuple((TensorEntry() as data, _, hooks, bool(requires_grad), _)):
            pass
        case tuple((bool(requires_grad), _, hooks)):
            pass
        case _:
            return False
    if not no_hooks(hooks):
        return False
    for name in ("storage", "dtype", "shape", "stride", "offset"):
        setattr(entry, name, getattr(data, name))
    entry.flags = entry.flags._replace(requires_grad=requires_grad)
    return True


def _newobj(args: tuple[Any, ...]) -> Any:
    """`copyreg.__newobj__(cls, *args)`: how protocols 0 and 1 make an object without calling its class."""
    if not args or type(args[0]) is not Global:
        return NotImplemented
    builder = _TENSOR_CLASSES.get(args[0])
    value = NotImplemented if builder is None else builder(args[1:])
    return Object(args[0], args[1:], "new") if value is NotImplemented else value


def _reconstructor(args: tuple[Any, ...]) -> Any:
    """`copyreg._reconstructor(cls, object, None)`: the same, without arguments."""
    match args:
        case [_, Global(name="object"), None]:
            return _newobj(args[:1])
    return NotImplemented


_TENSOR_CLASSES: dict[Global, Callable[[tuple[Any, ...]], Any]] = {
    **{
        Global(module, str(dtype.storage).replace("Storage", "Tensor")): partial(_empty, dtype)
        for module in ("torch", "torch.cuda")
        for dtype in BY_STORAGE.values()
        if dtype.kind != "quantized"
    },
    **{
        Global(module, str(dtype.storage)): partial(_listed_storage, dtype, location)
        for module, location in (("torch", "cpu"), ("torch.cuda", "cuda:0"))
        for dtype in BY_STORAGE.values()
        if dtype.name in _LISTED
    },
    Global("torch.nn.parameter", "Parameter"): partial(_variable, True),
    Global("torch.autograd.variable", "Variable"): partial(_variable, False),
}


# Calls that are kept as they are; their kind, element type and shape are read from the arguments.


def _composite(fn: Global, args: tuple[Any, ...]) -> Any:
    facts = _tensor_facts(fn.name, args)
    if facts is None:
        return NotImplemented
    kind, dtype, shape = facts
    if kind == JAGGED:
        return jagged(fn, dtype, args)
    sizes = _as_sizes(shape) if shape is not None else None
    return Composite(Object(fn, args), kind, dtype, sizes, partial(_composite, fn))


def _tensor_facts(name: str, args: tuple[Any, ...]) -> tuple[str, DType | None, Any] | None:
    """The kind, element type and shape of a rebuild call's tensor; None for arguments that torch does not write."""
    match (name, *args):
        case ["_rebuild_parameter_with_state", TensorEntry() | Composite() as data, _, hooks, _] if no_hooks(hooks):
            return "parameter with attributes", data.dtype, data.shape
        case ["_rebuild_device_tensor_from_cpu_tensor", TensorEntry() | Composite() as data, _, _, _]:
            return "device", data.dtype, data.shape
        case ["_rebuild_device_tensor_from_numpy" | "_rebuild_xla_tensor", Object(state=state), dtype, _, _]:
            return "device", dtype_of(dtype), state[1] if type(state) is tuple and len(state) == 5 else None
        case ["_rebuild_meta_tensor_no_storage", dtype, shape, _, _] if dtype_of(dtype):
            return "meta", dtype_of(dtype), shape
        case ["_rebuild_wrapper_subclass", Global() as cls, dtype, shape, _, _, _, _, *_]:
            return str(cls), dtype_of(dtype), shape
        case ["_rebuild_nested_tensor", TensorEntry() as values, _, _, _]:
            return "nested", values.dtype, None
        case ["_rebuild_qtensor", StorageRef(dtype=DType() as dtype) as ref, at, shape, stride, scheme, _, hooks] if (
            no_hooks(hooks)
        ):
            if dtype.name not in ("qu4x2", "qu2x4"):  # packed types count several elements to a byte
                check_view(ref.storage.data.length, dtype, shape, stride, at)
            check_quantization(scheme, _as_sizes(shape))
            return "quantized", dtype, shape
        case ["_rebuild_sparse_csr_tensor", tuple((_, _, TensorEntry() as values, size)) as parts]:
            check_compressed("sparse csr", parts[:3], _as_sizes(size))
            return "sparse csr", values.dtype, size
        case ["_rebuild_sparse_tensor", Object(args=(str(named),)), tuple(parts)]:
            layout = named.removeprefix("torch.").replace("_", " ")
            match parts:
                case [indices, TensorEntry() as values, size, *_] if "coo" in layout:
                    check_coordinates(indices, values, _as_sizes(size))
                    return layout, values.dtype, size
                case [_, _, TensorEntry() as values, size, *_] if "coo" not in layout:
                    check_compressed(layout, parts[:3], _as_sizes(size))
                    return layout, values.dtype, size
        case ["_rebuild_from_type" | "_rebuild_from_type_v2", fn, Global() as cls, tuple(inner), *rest] if (
            len(rest) < 2
        ):
            # another rebuild call, the class to view its result as, and attributes
            if fn is REBUILD_JAGGED:  # `_rebuild_njt({"values": …, "offsets": …, …})`
                part = inner[0].get("values") if len(inner) == 1 and isinstance(inner[0], dict) else None
                return (JAGGED, part.dtype, None) if isinstance(part, (TensorEntry, Composite)) else None
            builder = BUILDERS.get(fn) if type(fn) is Global and fn.module == "torch._utils" else None
            tensor = builder(inner) if builder is not None else None
            if isinstance(tensor, (TensorEntry, Composite)):
                return ("with attributes" if str(cls) in _PLAIN_CLASSES else str(cls)), tensor.dtype, tensor.shape
    return None


_PLAIN_CLASSES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


def _from_type(args: tuple[Any, ...]) -> Any:
    """`_rebuild_from_type_v2(function, class, arguments, state)`: a plain tensor, if its state is only `requires_grad`.

    `encode` writes that for tensors whose own call cannot express it (torch 2.13: "a leaf Variable that requires grad
    is being used in place").
    """
    if len(args) == 4 and args[:2] == (REBUILD_TENSOR_V3, TENSOR) and args[3] == {"requires_grad": True}:
        value = _rebuild_tensor_v3(args[2]) if type(args[2]) is tuple else NotImplemented
        return replace(value, flags=value.flags._replace(requires_grad=True)) if type(value) is TensorEntry else value
    return _composite(REBUILD_FROM_TYPE, args)


def jagged(fn: Global, dtype: DType | None, args: tuple[Any, ...]) -> Composite:
    """A nested tensor of the jagged layout; its parts are in a dictionary that may still be unfilled."""
    return Composite(Object(fn, args), JAGGED, dtype, None, partial(jagged, fn, dtype))


def _as_sizes(value: Any) -> tuple[int, ...]:
    """The numbers of a shape, given as a tuple, a list or a `torch.Size`."""
    if isinstance(value, Object) and value.fn is SIZE and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, (list, tuple)) and len(value) <= MAX_RANK and all(type(n) is int and n >= 0 for n in value):
        if prod(value) > MOST:
            raise BadTensor(f"a tensor of shape {list(value)} has more elements than 64 bits can count", _DAMAGED)
        return tuple(value)
    raise BadTensor("a tensor whose shape is not a list of numbers", _DAMAGED)


# Checks of composites' parts by their shapes and numbers: the values of indices are not read. Source: torch 2.13,
# aten/src/ATen/native/sparse/{ValidateCompressedIndicesCommon.h,SparseTensor.cpp}, ATen/quantized/Quantizer.cpp.


def check_coordinates(indices: Any, values: Any, size: tuple[int, ...]) -> None:
    """Raises `BadTensor` unless the indices (dimensions, count) and values (count, …) of a COO tensor fit its size."""
    if not (isinstance(indices, TensorEntry) and isinstance(values, TensorEntry)):
        return
    i_shape, v_shape = indices.shape, values.shape
    if len(i_shape) != 2 or v_shape[:1] != i_shape[1:] or i_shape[0] > len(size) or v_shape[1:] != size[i_shape[0] :]:
        parts = f"indices of shape {list(i_shape)} and values of shape {list(v_shape)}"
        raise BadTensor(f"a sparse tensor of shape {list(size)} with {parts}")


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
        shapes = f"indices of shape {list(indices)} and values of shape {list(values)}"
        raise BadTensor(f"a {layout} tensor of shape {list(size)} with pointers of shape {list(pointers)}, {shapes}")


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
        shapes = f"scales of shape {list(scales)} and zero points of shape {list(zeros)} along axis {brief(axis)}"
        raise BadTensor(f"a quantized tensor of shape {list(shape)} with {shapes}")


BUILDERS: dict[Global, Callable[[tuple[Any, ...]], Any]] = {
    **{fn: partial(_composite, fn) for fn in rebuild_functions()},
    Global("torch._utils", "_rebuild_tensor"): lambda args: (
        _strided(*args, NO_FLAGS) if len(args) == 4 else NotImplemented
    ),
    REBUILD_TENSOR_V2: _rebuild_tensor_v2,
    REBUILD_TENSOR_V3: _rebuild_tensor_v3,
    REBUILD_PARAMETER: _rebuild_parameter,
    **_PYTHON_BUILDERS,
    **_TENSOR_CLASSES,
    REBUILD_FROM_TYPE: _from_type,
    **{Global(module, "__newobj__"): _newobj for module in ("copyreg", "copy_reg")},
    **{Global(module, "_reconstructor"): _reconstructor for module in ("copyreg", "copy_reg")},
}


# The functions that may return a composite, alone or inside another.
COMPOSED = frozenset(fn for fn in rebuild_functions() if type(BUILDERS[fn]) is partial) | {REBUILD_FROM_TYPE}


def rebuilt(call: Object) -> Composite:
    """The composite for a rebuild call. Raises `BadTensor` where its arguments make no tensor."""
    value = BUILDERS[call.fn](call.args)
    if not isinstance(value, Composite):
        raise BadTensor(f"{call.name}: its arguments do not form a tensor")
    return value
