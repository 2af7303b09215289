"""Live Python objects as the values of a tree: what a pickle of them would say, without pickle.

Each object says how it would be pickled (`__reduce_ex__`, as Python's pickler calls it); the answer becomes an inert
node. Needs no torch: `bridge` adds torch's own objects.
Source of the conventions: PEP 307 and Modules/_pickle.c (save_reduce, save_global).
"""

from __future__ import annotations

import collections
import copyreg
import sys
import types
from _compat_pickle import REVERSE_IMPORT_MAPPING, REVERSE_NAME_MAPPING
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint, Composite, Computed, Storage, StorageRef, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import DTYPES
from ckptool.checkpoint.graph import (
    SCALARS,
    FillLater,
    GraphMapper,
    Of,
    ReadOnlyDict,
    ReadOnlyList,
    ReadOnlyOrderedDict,
    copy_list,
    copy_object,
    copy_tuple,
    same,
    structural_parts,
    visit,
)
from ckptool.checkpoint.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set, with_article
from ckptool.checkpoint.numpy_arrays import LongValue
from ckptool.checkpoint.tree import address, walk
from ckptool.errors import Unsupported, listed
from ckptool.pickles.known import kind_of

if TYPE_CHECKING:
    import numpy

_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
# Classes that cannot be imported by name: that of their only object.
_TYPES_OF: dict[Any, Any] = {
    type(None): None,
    type(...): Global("__builtin__", "Ellipsis"),
    type(NotImplemented): Global("__builtin__", "NotImplemented"),
}


def from_live(tree: Any, *, arrays_as_tensors: bool = False, keep_unknown: bool = False) -> Any:
    """The tree of nodes for live values: plain values, numpy arrays, entries. Nothing is copied, nothing is changed.

    arrays_as_tensors: numpy arrays become tensors instead of pickled arrays.
    keep_unknown: objects of unknown classes are kept as `pickle` would write them.
    Raises `Unsupported`, naming every object that no checkpoint should hold and where it is.
    """
    return LiveReader(arrays_as_tensors, keep_unknown).read(tree)


class LiveReader:
    """Reads one tree of live objects. `special` says what an object becomes; subclasses know more kinds."""

    def __init__(self, arrays_as_tensors: bool, keep_unknown: bool) -> None:
        self.arrays_as_tensors, self.keep_unknown = arrays_as_tensors, keep_unknown
        self.mapper = GraphMapper({**_HANDLERS, object: self.special})
        # its stand-in in the tree, its name, how to save it after all
        self.refused: list[tuple[Object, str, str]] = []
        self.name_of = cache(name_of)  # a lookup may have to search all modules

    def read(self, tree: Any) -> Any:
        result = self.mapper.map(tree.tree if isinstance(tree, Checkpoint) else tree)
        if self.refused:
            raise self._refusal(result)
        return result

    def _refusal(self, tree: Any) -> Unsupported:
        names_of = {id(node): name for node, name, _ in self.refused}
        places = places_in(tree, names_of)
        names = [f"{name} at {places[key]}" for key, name in names_of.items() if key in places]
        fix = "Save its contents as plain values: vars(object), dict(object), str(object)."
        fix = next((fix for _, _, fix in self.refused if fix), fix)
        why = "Loading the file would run code of its class, and fail where that class is missing."
        return Unsupported(f"cannot save {listed(names)}", why, fix)

    def special(self, value: Any) -> Any:
        """The result for an object that is neither a scalar nor a container."""
        if value is Ellipsis or value is NotImplemented:
            return Global("__builtin__", str(value))
        if isinstance(value, _NAMED):
            if value in _TYPES_OF:
                return Object(Global("__builtin__", "type"), (_TYPES_OF[value],))
            name = self.name_of(value)
            # a C method, such as `torch.relu`, is pickled as an attribute of its owner
            if name is not None or not isinstance(value, types.BuiltinFunctionType):
                return name or self.refuse(value, "a function or class that cannot be imported by name")
        if self.arrays_as_tensors and _is_array(value):
            return array_entry(value)
        return self.reduced(value)

    def reduced(self, value: Any) -> Any:
        """The node for an object as its own `__reduce_ex__` says."""
        registered = copyreg.dispatch_table.get(type(value))
        try:
            answer = registered(value) if registered is not None else value.__reduce_ex__(2)
        except Exception:  # noqa: BLE001 (a class may refuse in any way)
            return self.refuse(value)
        if isinstance(answer, str):
            name = Global(getattr(value, "__module__", None) or type(value).__module__, answer)
            return name if _looked_up(name.module, name.name) is value else self.refuse(value)
        return self.called(value, *answer) if isinstance(answer, tuple) and len(answer) > 1 else self.refuse(value)

    def called(self, value: Any, function: Any, args: tuple[Any, ...], *after: Any) -> Any:
        """A call of `function` and what is then set on its result; refused where the function is not known."""
        parts: tuple[Any, ...] = (*after, None, None, None, None)
        state, elements, items, setter = parts[:4]
        how, kwargs = "call", None
        if function.__name__ == "__newobj__":
            how, function, args = "new", args[0], args[1:]
        elif function.__name__ == "__newobj_ex__":
            how, function, args, kwargs = "new", args[0], args[1], args[2]
        name = self.name_of(function)
        kind = kind_of(name)
        plain = kind is not None and kind.called is not None and not kind.custom
        # with no other classes or functions as its arguments
        plain = plain and all(kind_of(self.name_of(arg)) for arg in args if isinstance(arg, _NAMED))
        if name is None or setter is not None or not (plain or self.keep_unknown):
            return self.refuse(value)
        node = Object(name, (), how)

        def fill(of: Of) -> None:
            node.args = of(args)
            node.kwargs = of(kwargs) if kwargs else None
            node.elements = [of(element) for element in elements] if elements is not None else None
            node.items = {of(key): of(item) for key, item in items} if items is not None else None
            node.state = of(state) if state is not None else MISSING

        return FillLater(node, fill)

    def refuse(self, value: Any, name: str = "", fix: str = "") -> Any:
        """Marks an object that cannot be saved; all of them are named at the end."""
        kind = type(value)
        name = name or with_article(f"{kind.__module__}.{kind.__qualname__}")
        stand_in = Object(Global(kind.__module__, kind.__qualname__), (object.__repr__(value),))  # like no other
        if not fix and callable(getattr(value, "state_dict", None)):
            fix = "Save its .state_dict() instead."
        self.refused.append((stand_in, name, fix))
        return stand_in


def places_in(tree: Any, ids: Collection[int]) -> dict[int, str]:
    """The first address of each node, by id; for what was set on a tensor, and for keys, the address of their
    container."""
    places, seen = dict[int, str](), set[int]()

    def once(node: Any) -> Iterable[Any]:  # even if many tensors refer to it
        if id(node) in seen:
            return ()
        seen.add(id(node))
        return structural_parts(node)

    for path, node in walk(tree):
        inside = visit(node, once) if isinstance(node, Composite) else node if isinstance(node, dict) else ()
        for part in (node, *inside):
            if id(part) in ids:
                places.setdefault(id(part), address(path) or "the top")
    return places


def _dict(value: dict[Any, Any]) -> Any:
    plain = type(value) in (dict, ReadOnlyDict)
    result: dict[Any, Any] = {} if plain else OrderedDict()
    attributes = None if plain else value.attributes if isinstance(value, OrderedDict) else vars(value) or None

    if plain and len(value) <= 2 and all(type(part) in SCALARS for item in value.items() for part in item):
        result.update(value)  # complete at once, as what is made from it (a tensor's `{"conj": True}`) may look inside
        return result

    def fill(of: Of) -> None:
        result.update((of(key), of(item)) for key, item in value.items())
        if isinstance(result, OrderedDict):
            result.attributes = of(attributes)

    return FillLater(result, fill)


def _set(value: Any) -> Any:
    """A set, sorted if its items are plain: Python orders texts differently in each run, but the same set must give the
    same bytes."""
    items: Iterable[Any] = value.items if isinstance(value, Set) else value
    if not isinstance(value, Set):
        with suppress(TypeError):
            items = sorted(items, key=_sort_key)
    result = Set([], value.frozen if isinstance(value, Set) else isinstance(value, frozenset))
    return FillLater(result, lambda of: result.items.extend(map(of, items)))


def _sort_key(item: Any) -> tuple[str, Any]:
    """By the type, then by the value. Raises `TypeError` for what has no order of its own."""
    if type(item) in (tuple, frozenset):
        keys = [_sort_key(part) for part in item]
        return type(item).__name__, keys if type(item) is tuple else sorted(keys)
    if type(item) not in (str, int, float, bool, bytes, type(None)):
        raise TypeError
    return type(item).__name__, item


_HANDLERS: dict[type, Any] = {
    **dict.fromkeys(
        (complex, bytes, bytearray, ByteString, Global, TensorEntry, StorageRef, Composite, LongValue), same
    ),
    **dict.fromkeys((dict, OrderedDict, collections.OrderedDict, ReadOnlyDict, ReadOnlyOrderedDict), _dict),
    **dict.fromkeys((list, ReadOnlyList), copy_list),
    **dict.fromkeys((set, frozenset, Set), _set),
    tuple: copy_tuple,
    Object: copy_object,
}


# Names ---------------------------------------------------------------------------------------------------------------


def name_of(value: Any) -> Global | None:
    """The name by which a pickle refers to a class or function; None if its module does not have it."""
    name: str = getattr(value, "__qualname__", "") or getattr(value, "__name__", "")
    module: str = getattr(value, "__module__", "") or next(
        (
            module
            for module in list(sys.modules)
            if _looked_up(module, name) is value and module not in ("__main__", "__mp_main__")
        ),
        "",
    )
    if _looked_up(module, name) is not value:
        return None
    if (module, name) in REVERSE_NAME_MAPPING:
        return Global(*REVERSE_NAME_MAPPING[module, name])
    return Global(REVERSE_IMPORT_MAPPING.get(module, module), name)


def _looked_up(module: str, name: str) -> Any:
    """What a name in a module refers to, also within classes (`Outer.Inner`); None if nothing."""
    try:
        return attrgetter(name)(sys.modules.get(module)) if name else None
    except Exception:  # noqa: BLE001 (a module may compute its names)
        return None


# numpy ---------------------------------------------------------------------------------------------------------------


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return False
    masked = sys.modules.get("numpy.ma")
    return masked is None or not isinstance(value, masked.MaskedArray)  # a tensor has no mask


def array_entry(value: Any) -> TensorEntry:
    """A numpy array or scalar as a tensor on its own memory; copied unless it is row-major and little-endian."""
    import numpy

    source = numpy.asarray(value)
    dtype = next((dtype for dtype in DTYPES if dtype.numpy == source.dtype.name and dtype.kind != "quantized"), None)
    if dtype is None:
        what, fix = f"a numpy array of type {source.dtype} is no tensor", "Convert it first: array.astype('float32')."
        raise Unsupported(what, "Tensors hold numbers and booleans.", fix)
    array = numpy.ascontiguousarray(source, source.dtype.newbyteorder("<")).reshape(source.shape)
    return TensorEntry(Storage(memory(array)), dtype, array.shape, row_major_strides(array.shape))


def memory(array: numpy.ndarray[Any, Any]) -> Computed:
    """The bytes of a row-major array, read in place; they keep the array alive."""
    import numpy

    raw = array.reshape(-1).view(numpy.uint8) if array.size else numpy.empty(0, numpy.uint8)
    return Computed(raw.size, lambda offset, length: raw[offset : offset + length].tobytes())
