"""Containers, names and objects of known classes: sizes and devices, numpy's arrays, counters, configuration.

An object becomes what its own pickle would make, by a table of ours; what is in none is refused by name, and never
looked up.
"""

from __future__ import annotations

import argparse
import collections
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from ckptool.bridge.tensors import CONSTANTS, REBUILD, layout_of, torch_dtype
from ckptool.checkpoint.graph import FillLater, FromParts, Of, copy_list, copy_tuple
from ckptool.checkpoint.nodes import MISSING, Global, Object, OrderedDict, Set, canonical
from ckptool.checkpoint.numpy_arrays import Array, ArrayType, array, array_type, scalar
from ckptool.errors import Conflict, Corrupt, Unsupported
from ckptool.pickles.known import value_word
from ckptool.pickles.plain import expand, python_value, summary
from ckptool.pickles.torch_objects import dtype_of, storage_class

if TYPE_CHECKING:
    from ckptool.bridge.to_live import Builder

# Containers ----------------------------------------------------------------------------------------------------------


def dictionary(_: Builder, node: dict[Any, Any]) -> FillLater:
    """A dictionary."""
    made: dict[Any, Any] = {}
    return FillLater(made, lambda of: _set_items(node, made, node, of))


def ordered(_: Builder, node: OrderedDict) -> FillLater:
    """An `OrderedDict`, with the attributes that were set on it (`_metadata` of a state dict)."""
    made: collections.OrderedDict[Any, Any] = collections.OrderedDict()

    def fill_in(of: Of) -> None:
        _set_items(node, made, node, of)
        vars(made).update(_attributes(node.attributes or {}, of))

    return FillLater(made, fill_in)


def _set_items(node: Any, made: Any, items: Mapping[Any, Any], of: Of) -> None:
    """Fills a dictionary; raises `Conflict` where two keys became equal, `Corrupt` for one that is not hashable."""
    count = len(made) + len(items)
    for key, value in items.items():
        try:
            made[of(key)] = of(value)
        except TypeError:
            raise Corrupt(f"a dictionary with a key of type {type(of(key)).__name__}, which is not hashable") from None
    if len(made) != count:
        raise Conflict(f"a dictionary with keys that become equal when loaded ({summary(node)})")


def set_of(_: Builder, node: Set) -> FromParts:
    """A set or frozenset."""
    return FromParts(node.items, lambda parts: _hashed(frozenset if node.frozen else set, parts))


def _hashed(cls: type, parts: list[Any]) -> Any:
    try:
        return cls(parts)
    except TypeError:
        raise Corrupt(f"a {cls.__name__} with unhashable members") from None


def _attributes(items: Mapping[Any, Any], of: Of) -> dict[str, Any]:
    """Attributes with their values made; raises `Corrupt` for names that are no text."""
    if not all(type(key) is str for key in items):
        raise Corrupt("attributes whose names are not strings")
    return {key: of(value) for key, value in items.items()}


# Names ----------------------------------------------------------------------------------------------------------------

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


def named(builder: Builder, name: Global) -> Any:
    """The meaning of a name by itself: a function or class of a table, an element type, a class of storages."""
    found = _meaning(name)
    return builder.refuse(name, f"the function or class {name}") if found is NotImplemented else found


def _meaning(name: Global) -> Any:
    dtype = dtype_of(name)
    if dtype is not None:
        return torch_dtype(dtype)
    found = CONSTANTS.get(str(name), FACTORIES.get(canonical(name)))
    if found is not None:
        return found
    is_storage, of_type = storage_class(name)
    if is_storage:
        return torch.UntypedStorage if of_type is None else getattr(torch, str(of_type.storage))
    return NotImplemented


# Objects --------------------------------------------------------------------------------------------------------------


def known(builder: Builder, node: Object) -> Any:
    """An object of a class that is in a table of ours; any other is refused."""
    if node.how == "persistent" or node.kwargs:
        return builder.refuse(node, f"an object of {node.name}")
    make = _OBJECTS.get(value_word(node.fn))
    if make is not None:
        return make(builder, node)
    if str(node.fn) in REBUILD and node.state is MISSING:
        return builder.refuse(node, f"a call of {node.name} with arguments that torch does not write")
    value = python_value(node)
    return _expanded(builder, node) if value is NotImplemented else value


def _expanded(builder: Builder, node: Object) -> Any:
    """Configuration becomes the dictionaries and lists that it is made of."""
    value = expand(node)
    if value is node or isinstance(value, Array):
        return builder.refuse(node, f"an object of {node.name}")
    if type(value) is tuple:
        return copy_tuple(value)
    if isinstance(value, dict):
        return dictionary(builder, value)
    if isinstance(value, list):
        return copy_list(value)
    return FromParts((value,), lambda parts: parts[0])


def _namespace(_: Builder, node: Object) -> FillLater:
    made = argparse.Namespace() if canonical(node.fn) == "argparse.Namespace" else types.SimpleNamespace()
    return FillLater(made, lambda of: vars(made).update(_attributes(node.attributes, of)))


def _default(builder: Builder, node: Object) -> Any:
    factory = node.args[0] if node.args else None
    if len(node.args) > 1 or (factory is not None and canonical(factory) not in FACTORIES):
        return builder.refuse(node, f"a defaultdict of {factory}")
    made: Any = collections.defaultdict(None if factory is None else FACTORIES[canonical(factory)])
    return FillLater(made, lambda of: _set_items(node, made, node.items or {}, of))


def _counter(builder: Builder, node: Object) -> Any:
    items = expand(node)
    if items is node:
        return builder.refuse(node, "a Counter of something other than a dictionary")
    made: Any = collections.Counter()
    return FillLater(made, lambda of: _set_items(node, made, items, of))


def _deque(builder: Builder, node: Object) -> Any:
    items, size = expand(node), node.args[1] if len(node.args) > 1 else None
    if items is node or not (size is None or (type(size) is int and size >= 0)):
        return builder.refuse(node, "a deque of something other than a list")
    made: Any = collections.deque(maxlen=size)
    return FillLater(made, lambda of: made.extend(map(of, items)))


def _size(builder: Builder, node: Object) -> Any:
    sizes = expand(node)
    if sizes is node or not all(type(size) is int for size in sizes):
        return builder.refuse(node, "a torch.Size of something other than numbers")
    return torch.Size(sizes)


def _device(builder: Builder, node: Object) -> Any:
    kinds = [type(arg) for arg in node.args]
    if kinds not in ([str], [str, int]):
        return builder.refuse(node, "a torch.device that is not a name and a number")
    return builder.guarded(node, lambda: torch.device(*node.args))


def _uninitialized(builder: Builder, node: Object) -> Any:
    if node.state is not MISSING or not all(type(arg) is bool for arg in node.args):
        return builder.refuse(node, f"a {node.name} with arguments that torch does not write")
    return builder.guarded(node, lambda: _UNINITIALIZED[node.fn.name](*node.args))


_UNINITIALIZED: dict[str, Callable[..., Any]] = {
    cls.__name__: cls for cls in (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)
}


def _array(builder: Builder, node: Object) -> Any:
    try:
        found = array(node)
    except Unsupported as error:
        return builder.refuse(node, error.what)
    if found is NotImplemented:
        return builder.refuse(node, f"a numpy array made by {node.name}")
    return _numpy_array(found)


def _scalar(builder: Builder, node: Object) -> Any:
    found = scalar(node)
    if found is NotImplemented:
        return builder.refuse(node, "a numpy scalar that numpy does not write")
    return _numpy_array(found)[()]


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


# The word for what an object is (see `pickles.known`) -> what makes it.
_OBJECTS: dict[str, Callable[[Builder, Object], Any]] = {
    "namespace": _namespace,
    "defaultdict": _default,
    "counter": _counter,
    "deque": _deque,
    "size": _size,
    "device": _device,
    "layout": lambda _, node: layout_of(node),
    "uninitialized": _uninitialized,
    "array": _array,
    "array scalar": _scalar,
    "array type": lambda _, node: _numpy_type(array_type(node)),
}
