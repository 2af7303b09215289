"""What a name in a file means here: torch's types, layouts and constants, and the classes that are made by their own call.

Whatever is not in a table here is not known, and never looked up.
"""

from __future__ import annotations

import collections
from functools import cache
from typing import Any

import torch

from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.nodes import Global, Object
from ckptool.errors import Unsupported, printable
from ckptool.pickles import plain
from ckptool.pickles.torch_objects import dtype_of, storage_class

untyped: Any = torch  # for the functions that torch gives no types, or wrong ones

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

# Classes whose pickle is a call of the class itself.
OBJECT_CLASSES: dict[str, Any] = {
    "torch.nn.parameter.UninitializedParameter": torch.nn.parameter.UninitializedParameter,
    "torch.nn.parameter.UninitializedBuffer": torch.nn.parameter.UninitializedBuffer,
}

CONSTANTS: dict[str, Any] = {
    **{
        f"torch.{name}": getattr(torch, name)
        for name in (
            "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric", "per_channel_affine_float_qparams",
            "contiguous_format", "channels_last", "channels_last_3d", "preserve_format",
        )
    },
    "__builtin__.Ellipsis": ...,
    "builtins.Ellipsis": ...,
    "torch.Tensor": torch.Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
}  # fmt: skip

FACTORIES: dict[str, Any] = {
    **{
        f"builtins.{cls.__name__}": cls
        for cls in (list, dict, set, frozenset, tuple, int, float, bool, str, bytes, bytearray, complex)
    },
    "builtins.unicode": str,
    "builtins.long": int,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": collections.Counter,
    "collections.deque": collections.deque,
}


def meaning(name: Global) -> Any:
    """The type, class, function or constant that a name by itself stands for; `NotImplemented` for an unknown one."""
    dtype = dtype_of(name)
    if dtype is not None:
        return torch_dtype(dtype)
    found = CONSTANTS.get(str(name), FACTORIES.get(plain.canonical(name)))
    if found is not None:
        return found
    known, of_type = storage_class(name)
    if known:
        return torch.UntypedStorage if of_type is None else getattr(torch, str(of_type.storage))
    return NotImplemented


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's own element type; raises `Unsupported` where this torch is too old for it."""
    found = getattr(torch, dtype.torch, None)
    if not isinstance(found, torch.dtype):
        raise Unsupported(
            f"this torch ({torch.__version__}) has no type {dtype.torch}",
            "It came with a later version.",
            "pip install --upgrade torch",
        )
    return found


def layout_of(node: Any) -> torch.layout:
    """The layout that a call of torch's `_get_layout` names; raises `Unsupported` for any other."""
    name = plain.expand(node) if isinstance(node, Object) else None
    found = getattr(torch, name.removeprefix("torch."), None) if type(name) is str and name in _LAYOUTS else None
    if not isinstance(found, torch.layout):
        raise Unsupported(f"the tensor layout {printable(str(name))} is not known")
    return found
