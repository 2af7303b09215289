"""Containers, names and objects of known classes: sizes and devices, numpy's arrays, counters, configuration.

An object becomes what its own pickle would make; what is in none of our tables is refused by name, and never looked up.
"""

from __future__ import annotations

import argparse
import collections
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from ckptool.bridge.tensors import TENSOR_CLASSES, layout_of, torch_dtype
from ckptool.checkpoint.graph import FillLater, FromParts, Of, copy_list, copy_tuple
from ckptool.checkpoint.nodes import MISSING, Global, Object, OrderedDict, Set, canonical
from ckptool.checkpoint.numpy_arrays import Array, ArrayType, array, array_type, scalar
from ckptool.errors import Conflict, Corrupt, Unsupported
from ckptool.pickles.known import value_word
from ckptool.pickles.plain import expand, python_value, summary
from ckptool.pickles.torch_objects import BUILDERS, dtype_of, storage_class

if TYPE_CHECKING:
    from ckptool.bridge.to_live import Builder

# Containers ----------------------------------------------------------------------------------------------------------


def dictionary(_: Builder, node: dict[Any, Any]) -> FillLater:
    """A dictionary; an `OrderedDict` with the attributes that were set on it (`_metadata` of a state dict)."""
    if isinstance(node, OrderedDict):
        return _filled(collections.OrderedDict(), node, node.attributes)
    return _filled({}, node)


def _filled(made: Any, items: Mapping[Any, Any] | None, attributes: Mapping[Any, Any] | None = None) -> FillLater:
    """What is empty until its items and attributes are made themselves.

    Raises `Conflict` where two keys became equal, `Corrupt` for a key that is not hashable, and for names of attributes
    that are no texts.
    """

    def fill_in(of: Of) -> None:
        for key, value in (items or {}).items():
            try:
                made[of(key)] = of(value)
            except TypeError:
                what = f"a dictionary with a key of type {type(of(key)).__name__}, which is not hashable"
                raise Corrupt(what) from None
        if items and len(made) != len(items):
            raise Conflict(f"a dictionary with keys that become equal when loaded ({summary(items)})")
        if attributes and not all(type(key) is str for key in attributes):
            raise Corrupt("attributes whose names are not strings")
        if attributes:
            vars(made).update((key, of(value)) for key, value in attributes.items())

    return FillLater(made, fill_in)


def set_of(_: Builder, node: Set) -> FromParts:
    """A set or frozenset."""
    cls = frozenset if node.frozen else set

    def make(parts: list[Any]) -> Any:
        try:
            return cls(parts)
        except TypeError:
            raise Corrupt(f"a {cls.__name__} with unhashable members") from None

    return FromParts(node.items, make)


# Names ----------------------------------------------------------------------------------------------------------------

NAMES: dict[str, Any] = {
    **{
        f"builtins.{cls.__name__}": cls
        for cls in (list, dict, set, frozenset, tuple, int, float, bool, str, bytes, bytearray, complex)
    },
    "builtins.unicode": str,
    "builtins.long": int,
    "builtins.Ellipsis": ...,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": collections.Counter,
    "collections.deque": collections.deque,
    **TENSOR_CLASSES,
}


def named(builder: Builder, name: Global) -> Any:
    """The meaning of a name by itself: an element type or other constant of torch, or a class of a table."""
    dtype = dtype_of(name)
    if dtype is not None:
        return torch_dtype(dtype)
    is_storage, of_type = storage_class(name)
    if is_storage:
        return torch.UntypedStorage if of_type is None else getattr(torch, str(of_type.storage))
    constant = vars(torch).get(name.name) if name.module == "torch" else None
    if isinstance(constant, (torch.qscheme, torch.memory_format)):
        return constant
    return NAMES[canonical(name)] if canonical(name) in NAMES else builder.refuse(name, f"the function or class {name}")


# Objects --------------------------------------------------------------------------------------------------------------


def known(builder: Builder, node: Object) -> Any:
    """An object of a class that is in a table of ours; any other is refused."""
    word, args = value_word(node.fn), node.args
    if node.how == "persistent" or node.kwargs:
        return builder.refuse(node, f"an object of {node.name}")
    if word == "layout":
        return layout_of(node)
    if word == "array type":
        return _numpy_type(array_type(node))
    if word in ("array", "array scalar"):
        try:
            found = array(node) if word == "array" else scalar(node)
        except Unsupported as error:
            return builder.refuse(node, error.what)
        if found is not NotImplemented:
            return _numpy_array(found) if word == "array" else _numpy_array(found)[()]
    if word == "uninitialized" and node.state is MISSING and all(type(arg) is bool for arg in args):
        return builder.guarded(node, lambda: getattr(torch.nn.parameter, node.fn.name)(*args))
    if (value := python_value(node)) is not NotImplemented:
        return value
    is_torch = type(node.fn) is Global and node.fn in BUILDERS and node.fn.module.startswith("torch")
    if is_torch and node.state is MISSING:
        return builder.refuse(node, f"a call of {node.name} with arguments that torch does not write")
    value = expand(node)
    if value is node:
        return builder.refuse(node, f"an object of {node.name}{' with other contents than it writes' if word else ''}")
    match word:
        case "namespace":
            made = argparse.Namespace() if canonical(node.fn) == "argparse.Namespace" else types.SimpleNamespace()
            return _filled(made, {}, value)
        case "counter":
            return _filled(collections.Counter(), value)
        case "defaultdict":
            factory = NAMES.get(canonical(args[0])) if args else None
            if len(args) > 1 or not (isinstance(factory, type) or args in ((), (None,))):
                return builder.refuse(node, f"a defaultdict of {args[0]}")
            return _filled(collections.defaultdict(factory), value)
        case "deque":
            size = args[1] if len(args) > 1 else None
            if size is not None and not (type(size) is int and size >= 0):
                return builder.refuse(node, f"a deque of the length {size!r:.60}")
            deque: Any = collections.deque(maxlen=size)
            return FillLater(deque, lambda of: deque.extend(map(of, value)))
        case "size" | "device":
            if word == "size" and not all(type(size) is int for size in value):
                return builder.refuse(node, "a torch.Size of something other than numbers")
            return builder.guarded(node, lambda: torch.Size(value) if word == "size" else torch.device(value))
    # Configuration becomes the dictionaries and lists that it is made of.
    if isinstance(value, dict):
        return dictionary(builder, value)
    if isinstance(value, list):
        return copy_list(value)
    return copy_tuple(value) if type(value) is tuple else FromParts((value,), lambda parts: parts[0])


def _numpy_array(found: Array) -> Any:
    """A new array, in the byte order that it was saved in; there are no Python objects in it."""
    import numpy

    kind = _numpy_type(found.type)
    order: Literal["F", "C"] = "F" if found.fortran else "C"
    if not found.data:
        return numpy.zeros(found.shape, kind, order=order)
    return numpy.frombuffer(bytearray(bytes(found.data)), kind).reshape(found.shape, order=order)


def _numpy_type(kind: ArrayType) -> Any:
    import numpy

    if kind.fields:
        names, kinds, offsets = zip(*kind.fields, strict=True)
        formats = [_numpy_type(part) for part in kinds]
        fields: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": kind.itemsize}
        return numpy.dtype(fields)
    order = "" if kind.order == "|" else kind.order
    unit = f"[{kind.unit[1]}{kind.unit[0]}]" if kind.unit and kind.unit[0] != "generic" else ""
    return numpy.dtype(f"{order}{kind.code}{unit}")
