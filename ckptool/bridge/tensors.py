"""Tensors of every kind: a plain entry over its storage, and the results of torch's rebuild functions."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

from ckptool.bridge.storages import untyped
from ckptool.checkpoint import NO_FLAGS, Composite, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.graph import Of
from ckptool.checkpoint.nodes import Global, Object
from ckptool.errors import BadTensor, Corrupt, Unsupported, counted
from ckptool.pickles.plain import expand
from ckptool.pickles.torch_objects import BUILDERS, REBUILD_JAGGED, check_view

if TYPE_CHECKING:
    from ckptool.bridge.to_live import Builder

# Names ----------------------------------------------------------------------------------------------------------------

GET_LAYOUT = Global("torch.serialization", "_get_layout")
_LAYOUTS = frozenset(
    f"torch.{name}"
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn")
)

TENSOR_CLASSES: dict[str, Any] = {
    "torch.Tensor": torch.Tensor,
    "torch._tensor.Tensor": torch.Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
}

CONSTANTS: dict[str, Any] = {
    **{
        f"torch.{name}": getattr(torch, name)
        for name in (
            "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric",
            "per_channel_affine_float_qparams", "contiguous_format", "channels_last", "channels_last_3d",
            "preserve_format",
        )
    },
    "__builtin__.Ellipsis": ...,
    "builtins.Ellipsis": ...,
    "torch.Tensor": torch.Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
}  # fmt: skip


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's own element type; raises `Unsupported` where this torch is too old for it."""
    found = getattr(torch, dtype.torch, None)
    if not isinstance(found, torch.dtype):
        raise Unsupported(
            f"this torch ({torch.__version__}) has no type {dtype.torch}",
            "It was added in a later version.",
            "pip install --upgrade torch",
        )
    return found


def layout_of(node: Any) -> torch.layout:
    """The layout that a call of torch's `_get_layout` names; raises `Unsupported` for any other."""
    name = expand(node) if isinstance(node, Object) else None
    found = getattr(torch, name.removeprefix("torch."), None) if type(name) is str and name in _LAYOUTS else None
    if not isinstance(found, torch.layout):
        raise Unsupported(f"the tensor layout {name!s} is not known")
    return found


# Tensors --------------------------------------------------------------------------------------------------------------

_JAGGED = "torch.nested._internal.nested_tensor.NestedTensor"
_JAGGED_PARTS = {"values", "offsets", "lengths", "_ragged_idx", "_metadata_cache", "requires_grad"}


def strided(builder: Builder, entry: TensorEntry) -> Any:
    """A plain tensor: a view of its storage."""
    return builder.guarded(entry, lambda: _strided(builder, entry))


def _strided(builder: Builder, entry: TensorEntry) -> torch.Tensor:
    check_view(entry.storage, entry.dtype, entry.shape, entry.stride, entry.offset)
    storage = builder.storages.get(entry.storage, entry.dtype.itemsize)
    made = torch.empty(0, dtype=torch_dtype(entry.dtype), device=storage.device)
    made.set_(storage, entry.offset, entry.shape, entry.stride)
    if builder.storages.faking and (device := getattr(storage, "_fake_device", None)) is not None:
        cast(Any, made).fake_device = device
    flags = entry.flags
    if flags is NO_FLAGS:
        return made
    if flags.conj or flags.neg:
        untyped._utils.set_tensor_metadata(made, {name: True for name in ("conj", "neg") if getattr(flags, name)})
    if flags.parameter:
        return torch.nn.Parameter(made, flags.requires_grad)
    if flags.requires_grad:
        made.requires_grad = True
    return made


def composite(builder: Builder, node: Composite) -> Any:
    """A tensor that is made of other tensors: quantized, sparse, nested, of a subclass."""
    # A call of one of torch's rebuild functions: its arguments are made first, then it is done as `REBUILD` says.
    do = REBUILD.get(f"{node.made.fn}")
    if do is None:
        return builder.refuse(node, f"a tensor of {node.made.fn}")
    return do(builder, node, node.made.args)


def from_type(builder: Builder, node: Any, args: tuple[Any, ...]) -> Any:
    """`_rebuild_from_type_v2(func, type, args, state)`: another rebuild call, with a class and attributes."""
    if args[0] is REBUILD_JAGGED and str(args[1]) == _JAGGED:
        return _jagged(builder, node, args[2][0])
    cls = TENSOR_CLASSES.get(str(args[1]))
    if cls is None:
        return builder.refuse(node, f"a tensor of the class {args[1]}")
    call = BUILDERS.get(args[0])
    inner = call(args[2]) if call is not None else NotImplemented

    def make(made: Any) -> Any:
        made = made if type(made) is cls else made.as_subclass(cls)
        return _with_attributes(builder, made, *args[3:])

    return builder.parts(node, (inner,), make)


def _jagged(builder: Builder, node: Any, given: dict[Any, Any]) -> Any:
    """A nested tensor of the jagged layout, from its values, the offsets of its parts and torch's cache."""
    kept = given.get("_metadata_cache") or {}
    if not isinstance(kept, dict) or not set(given) <= _JAGGED_PARTS:
        return builder.refuse(node, "a jagged nested tensor with arguments that torch does not write")
    parts = [_bare(part) for part in (*(given.get(name) for name in ("values", "offsets", "lengths")), *kept.values())]

    def make(values: Any, offsets: Any, lengths: Any, *more: Any) -> Any:
        from torch.nested._internal.nested_tensor import NestedTensor

        rest = {name: given[name] for name in ("_ragged_idx", "requires_grad") if name in given}
        cache = dict(zip(kept, more, strict=True))
        return cast(Any, NestedTensor)(values, offsets, lengths=lengths, _metadata_cache=cache, **rest)

    return builder.parts(node, tuple(parts), make)


def _bare(part: Any) -> Any:
    """A tensor without its attributes, which on parts of a nested tensor are notes of torch's compiler."""
    if isinstance(part, Composite) and REBUILD.get(str(part.made.fn)) is from_type:
        return BUILDERS[part.made.args[0]](part.made.args[2])
    return part


def _with_attributes(builder: Builder, made: Any, state: Any = None) -> Any:
    """Sets the attributes that were set on a tensor, once they are made themselves."""
    found = [part for part in (state if type(state) is tuple else (state,)) if isinstance(part, dict)]
    attributes = [(key, value) for part in found for key, value in part.items()]
    if any(type(key) is not str or key.startswith("__") for key, _ in attributes):
        raise Corrupt(
            "a tensor with attributes that have no plain names", "Setting them could change what the tensor is."
        )

    def later(of: Of) -> None:
        for key, value in attributes:
            builder.guarded(key, lambda key=key, value=value: setattr(made, key, of(value)))  # type: ignore[misc]

    builder.mapper.later(later)
    return made


def _parameter(builder: Builder, node: Any, args: tuple[Any, ...]) -> Any:
    """A parameter, with what was set on it where that is the fourth argument."""

    def make(data: Any) -> Any:
        return _with_attributes(builder, torch.nn.Parameter(data, args[1]), *args[3:])

    return builder.parts(node, (args[0],), make)


def _quantized(builder: Builder, node: Any, args: tuple[Any, ...]) -> Any:
    ref, offset, shape, stride, params, requires_grad, _ = args
    scheme, *numbers = params
    _check_packed(ref, offset, shape, stride)
    torch_params = (
        CONSTANTS.get(str(scheme)),
        *(list(part) if isinstance(part, list) else part for part in numbers),
    )
    tensors = [part for part in torch_params if isinstance(part, TensorEntry)]

    def make(*made: torch.Tensor) -> Any:
        given = iter(made)
        ready = tuple(next(given) if isinstance(part, TensorEntry) else part for part in torch_params)
        storage = _typed(builder, ref)
        return untyped._utils._rebuild_qtensor(
            storage, offset, shape, stride, ready, requires_grad, collections.OrderedDict()
        )

    return builder.parts(node, tuple(tensors), make)


def _sparse(builder: Builder, node: Any, args: tuple[Any, ...]) -> Any:
    layout = layout_of(args[0])
    *tensors, size = args[1][:3] if layout is torch.sparse_coo else args[1]
    coalesced = args[1][3] if layout is torch.sparse_coo and len(args[1]) > 3 else None
    shape = node.shape if isinstance(node, Composite) and node.shape is not None else size

    def make(*made: torch.Tensor) -> Any:
        # torch.load does not check, and indices that point outside are followed all the same. On meta there is nothing
        # to check.
        check = not builder.storages.restorer.meta
        if layout is torch.sparse_coo:
            return untyped.sparse_coo_tensor(*made, shape, check_invariants=check, is_coalesced=coalesced)
        return untyped.sparse_compressed_tensor(*made, shape, layout=layout, check_invariants=check)

    return builder.parts(node, tuple(tensors), make)


def _nested(builder: Builder, node: Any, args: tuple[Any, ...]) -> Any:
    def make(buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor) -> Any:
        if not builder.storages.restorer.meta:
            _check_nested(buffer, sizes, strides, offsets)
        return untyped._nested_view_from_buffer(buffer, sizes, strides, offsets)

    return builder.parts(node, args, make)


def _meta(builder: Builder, node: Any, args: tuple[Any, ...]) -> Any:
    dtype, size, stride, requires_grad = args
    return builder.parts(
        node,
        (dtype,),
        lambda made: torch.empty_strided(
            tuple(size), tuple(stride), dtype=made, device="meta", requires_grad=requires_grad
        ),
    )


def _device_tensor(builder: Builder, node: Any, args: tuple[Any, ...]) -> Any:
    """A tensor that was on a device without storages, saved as numbers and the name of the device."""
    data, dtype, location, requires_grad = args

    def make(made: Any, kind: torch.dtype) -> Any:
        here = made if isinstance(made, torch.Tensor) else torch.from_numpy(made)
        here = here.to(kind).contiguous()
        there = builder.storages.restorer.restore(here.untyped_storage(), str(location))
        moved = torch.empty(0, dtype=kind, device=there.device).set_(
            there, here.storage_offset(), here.shape, here.stride()
        )
        moved.requires_grad = requires_grad
        return moved

    return builder.parts(node, (data, dtype), make)


def _typed(builder: Builder, ref: StorageRef) -> Any:
    dtype = torch.uint8 if ref.dtype is None else torch_dtype(ref.dtype)
    storage = builder.storages.get(ref.storage, ref.dtype.itemsize if ref.dtype else 8)
    return untyped.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def storage_ref(builder: Builder, ref: StorageRef) -> Any:
    """A storage by itself."""
    return _typed(builder, ref)


def _check_packed(ref: StorageRef, offset: Any, shape: Any, stride: Any) -> None:
    """Raises `BadTensor` for a view of packed quantized elements that reaches outside of its storage."""
    if ref.dtype is None or ref.dtype.name not in ("qu4x2", "qu2x4"):
        return
    per_byte = 2 if ref.dtype.name == "qu4x2" else 4
    numbers = (offset, *shape, *stride)
    if (
        not all(type(number) is int and number >= 0 for number in numbers)
        or math.prod(shape) > ref.storage.nbytes * per_byte
    ):
        raise BadTensor(f"a quantized tensor of shape {list(shape)} in a storage of {ref.storage.nbytes:,} bytes")


def _check_nested(buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor) -> None:
    """Raises `BadTensor` unless every part of a nested tensor lies inside its buffer; torch itself does not look."""
    if sizes.shape != strides.shape or sizes.dim() != 2 or offsets.shape != sizes.shape[:1]:
        raise BadTensor("a nested tensor whose sizes, strides and offsets do not match")
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        numbers = (*size, *stride, offset)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise BadTensor("a nested tensor whose sizes, strides or offsets are not numbers")
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if 0 not in size and last >= buffer.numel():
            raise BadTensor(
                f"a part of shape {size} of a nested tensor lies outside of its {counted(buffer.numel(), 'element')}"
            )


Rebuild = Callable[["Builder", Any, tuple[Any, ...]], Any]

REBUILD: dict[str, Rebuild] = {
    **{
        f"{module}.{name}": from_type
        for module in ("torch._tensor", "torch.tensor")
        for name in ("_rebuild_from_type_v2", "_rebuild_from_type")
    },
    **dict.fromkeys(("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"), _parameter),
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_sparse_csr_tensor": lambda builder, node, args: _sparse(
        builder, node, (Object(GET_LAYOUT, ("torch.sparse_csr",)), args[0])
    ),
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_wrapper_subclass": lambda builder, node, args: builder.refuse(
        node, f"a tensor of the class {args[0]}"
    ),
    **{
        f"torch._utils._rebuild_{name}": _device_tensor
        for name in ("device_tensor_from_numpy", "xla_tensor", "device_tensor_from_cpu_tensor")
    },
}
