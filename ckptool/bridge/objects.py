"""Names and objects of known classes: torch's sizes and devices, numpy's arrays, counters, namespaces, configuration.

An object becomes what its own pickle would make, by a table of ours; what is in none is refused by name.
"""

from __future__ import annotations

import argparse
import collections
import types
from collections.abc import Callable
from typing import Any

import torch

from ckptool.bridge.builder import Builder
from ckptool.bridge.containers import attributes, dictionary, list_of, set_items
from ckptool.bridge.names import FACTORIES, OBJECT_CLASSES, layout_of, meaning
from ckptool.bridge.numpy_arrays import numpy_array, numpy_type
from ckptool.bridge.tensors import REBUILD
from ckptool.checkpoint.graph import After, Done, Empty, Made
from ckptool.checkpoint.nodes import MISSING, Global, Object
from ckptool.errors import Unsupported
from ckptool.pickles import plain


def named(builder: Builder, name: Global) -> Made:
    """What a name by itself stands for: a function or class of a table, an element type, a class of storages."""
    found = meaning(name)
    return builder.refuse(name, f"the function or class {name}") if found is NotImplemented else Done(found)


def known(builder: Builder, node: Object) -> Made:
    """An object of a class that is in a table of ours; any other is refused."""
    if node.how == "persistent" or node.kwargs:
        return builder.refuse(node, f"an object of {node.name}")
    called = plain.canonical(node.fn)
    make = _OBJECTS.get(called)
    if make is not None:
        return make(builder, node)
    if called in REBUILD and node.state is MISSING:
        return builder.refuse(node, f"a call of {node.name} with arguments that torch does not write")
    value = plain.python_value(node)
    if value is not NotImplemented:
        return Done(value)
    return _expanded(builder, node)


def _expanded(builder: Builder, node: Object) -> Made:
    """Configuration becomes the dictionaries and lists that it is made of."""
    value = plain.expand(node)
    if value is node or isinstance(value, plain.Array):
        return builder.refuse(node, f"an object of {node.name}")
    if type(value) is tuple:
        return After(value, tuple)
    if isinstance(value, dict):
        return dictionary(builder, value)
    if isinstance(value, list):
        return list_of(builder, value)
    return After((value,), lambda parts: parts[0])


def _namespace(builder: Builder, node: Object) -> Made:
    made = argparse.Namespace() if plain.canonical(node.fn) == "argparse.Namespace" else types.SimpleNamespace()
    return Empty(made, lambda of: vars(made).update(attributes(node.attributes, of)))


def _default(builder: Builder, node: Object) -> Made:
    factory = node.args[0] if node.args else None
    if len(node.args) > 1 or (factory is not None and plain.canonical(factory) not in FACTORIES):
        return builder.refuse(node, f"a defaultdict of {factory}")
    made: Any = collections.defaultdict(None if factory is None else FACTORIES[plain.canonical(factory)])
    return Empty(made, lambda of: set_items(node, made, node.items or {}, of))


def _counter(builder: Builder, node: Object) -> Made:
    items = plain.expand(node)
    if items is node:
        return builder.refuse(node, "a Counter of something else than a dictionary")
    made: Any = collections.Counter()
    return Empty(made, lambda of: set_items(node, made, items, of))


def _deque(builder: Builder, node: Object) -> Made:
    items, size = plain.expand(node), node.args[1] if len(node.args) > 1 else None
    if items is node or not (size is None or (type(size) is int and size >= 0)):
        return builder.refuse(node, "a deque of something else than a list")
    made: Any = collections.deque(maxlen=size)
    return Empty(made, lambda of: made.extend(map(of, items)))


def _size(builder: Builder, node: Object) -> Made:
    sizes = plain.expand(node)
    if sizes is node or not all(type(size) is int for size in sizes):
        return builder.refuse(node, "a torch.Size that is not of numbers")
    return Done(torch.Size(sizes))


def _device(builder: Builder, node: Object) -> Made:
    if (
        not 1 <= len(node.args) <= 2
        or type(node.args[0]) is not str
        or (len(node.args) == 2 and type(node.args[1]) is not int)
    ):
        return builder.refuse(node, "a torch.device that is not a name and a number")
    return Done(builder.guarded(node, lambda: torch.device(*node.args)))


def _get_layout(builder: Builder, node: Object) -> Made:
    return Done(layout_of(node))


def _uninitialized(builder: Builder, node: Object) -> Made:
    cls = OBJECT_CLASSES[str(node.fn)]
    if node.state is not MISSING or not all(type(arg) is bool for arg in node.args):
        return builder.refuse(node, f"a {node.name} with arguments that torch does not write")
    return Done(builder.guarded(node, lambda: cls(*node.args)))


def _array(builder: Builder, node: Object) -> Made:
    try:
        found = plain.array(node)
    except Unsupported as error:
        return builder.refuse(node, error.what)
    if found is NotImplemented:
        return builder.refuse(node, f"a numpy array made by {node.name}")
    return Done(numpy_array(found))


def _scalar(builder: Builder, node: Object) -> Made:
    found = plain.scalar(node)
    if found is NotImplemented:
        return builder.refuse(node, "a numpy scalar that numpy does not write")
    return Done(numpy_array(found)[()])


def _dtype(builder: Builder, node: Object) -> Made:
    return Done(numpy_type(plain.array_type(node)))


_OBJECTS: dict[str, Callable[[Builder, Object], Made]] = {
    "argparse.Namespace": _namespace,
    "types.SimpleNamespace": _namespace,
    "collections.defaultdict": _default,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _get_layout,
    "torch.nn.parameter.UninitializedParameter": _uninitialized,
    "torch.nn.parameter.UninitializedBuffer": _uninitialized,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy.core.numeric._frombuffer": _array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.dtype": _dtype,
}
