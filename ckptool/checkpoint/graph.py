"""One graph of values into another: sharing, cycles and order are kept, and nothing recurses.

Trees may hold one list twice and themselves; so do the trees that are made of them. What cannot be changed once it is made (a tuple, a
date, a tensor) is made after its parts; what can (a dictionary, a list) is made empty, known by then to all that refer to it,
and filled later.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ckptool.checkpoint.nodes import OrderedDict
from ckptool.errors import Corrupt

Of = Callable[[Any], Any]


class Done(NamedTuple):
    """A value that is made at once."""

    value: Any


class After(NamedTuple):
    """A value that is made of the results for its parts."""

    parts: Sequence[Any]
    make: Callable[[list[Any]], Any]


class Empty(NamedTuple):
    """A value that is made now and filled later; `fill` gets what gives the result for a part."""

    value: Any
    fill: Callable[[Of], None]


Made = Done | After | Empty

SCALARS = frozenset({str, int, float, bool, type(None)})


class Remake:
    """Makes the results for a graph of values; `begin` says how one is made, and is asked once for each object."""

    def __init__(self, begin: Callable[[Any], Made]) -> None:
        self.begin = begin
        self.results: dict[int, Any] = {}
        self.alive: list[Any] = []  # whatever has an id in `results` keeps it
        self.unfilled: list[Callable[[Of], None]] = []

    def run(self, root: Any) -> Any:
        """The result for `root`, filled to the bottom."""
        collecting = gc.isenabled()
        gc.disable()  # a million live objects make the collector run again and again, and find nothing
        try:
            result = self.of(root)
            while self.unfilled:
                self.unfilled.pop()(self.of)
        finally:
            if collecting:
                gc.enable()
        return result

    def later(self, fill: Callable[[Of], None]) -> None:
        """Has `fill` called when what is made after its parts is done."""
        self.unfilled.append(fill)

    def of(self, value: Any) -> Any:
        """The result for one value; it may not be filled yet."""
        if type(value) in SCALARS:
            return value
        if id(value) in self.results:
            return self.results[id(value)]
        made = self._begin(value)
        return self._after(value, made) if made is not None else self.results[id(value)]

    def _begin(self, value: Any) -> After | None:
        """Makes what can be made at once, and says what the rest is made of."""
        made = self.begin(value)
        if isinstance(made, After):
            return made
        self._keep(value, made.value)
        if isinstance(made, Empty):
            self.unfilled.append(made.fill)
        return None

    def _keep(self, value: Any, result: Any) -> None:
        self.results[id(value)] = result
        self.alive.append(value)

    def _after(self, value: Any, made: After) -> Any:
        stack = [(value, made, iter(made.parts))]
        inside = {id(value)}
        while stack:
            value, made, parts = stack[-1]
            for part in parts:
                if type(part) in SCALARS or id(part) in self.results:
                    continue
                if id(part) in inside:
                    raise Corrupt(
                        "a value that contains itself where it cannot",
                        "No program writes it; the file was made to mislead.",
                    )
                below = self._begin(part)
                if below is not None:
                    stack.append((part, below, iter(below.parts)))
                    inside.add(id(part))
                    break
            else:
                stack.pop()
                inside.discard(id(value))
                self._keep(
                    value, made.make([part if type(part) in SCALARS else self.results[id(part)] for part in made.parts])
                )
        return self.results[id(value)]


# Read-only copies ----------------------------------------------------------------------------------------------------


def _refuse(self: Any, *_: Any, **__: Any) -> Any:
    raise TypeError(
        "what ckptool.open gives is read-only: change a copy (dict(...), list(...)) and ckptool.save that, or use ckptool.edit"
    )


_DICT_CHANGES = "__setitem__ __delitem__ __ior__ clear pop popitem setdefault update".split()
_LIST_CHANGES = "__setitem__ __delitem__ __iadd__ __imul__ append clear extend insert pop remove reverse sort".split()


class ReadOnlyDict(dict[Any, Any]):
    """A dictionary of an opened checkpoint; `copy.copy` and `copy.deepcopy` of it can be changed."""

    __slots__ = ()

    def __reduce_ex__(self, _: Any) -> Any:
        return dict, (), None, None, iter(self.items())


class ReadOnlyOrderedDict(OrderedDict):
    """An `OrderedDict` of an opened checkpoint, with its `metadata`."""

    __slots__ = ()

    def __reduce_ex__(self, _: Any) -> Any:
        return OrderedDict, ((), self.attributes), None, None, iter(self.items())


class ReadOnlyList(list[Any]):
    """A list of an opened checkpoint."""

    __slots__ = ()

    def __reduce_ex__(self, _: Any) -> Any:
        return list, (), None, iter(self)


for _cls, _changes in (
    (ReadOnlyDict, _DICT_CHANGES),
    (ReadOnlyOrderedDict, _DICT_CHANGES),
    (ReadOnlyList, _LIST_CHANGES),
):
    for _name in _changes:
        setattr(_cls, _name, _refuse)


def read_only(tree: Any) -> Any:
    """The tree with dictionaries and lists that refuse to be changed; tensors and objects are the same. Sharing and cycles stay."""
    return Remake(_begin_read_only).run(tree)


def _begin_read_only(value: Any) -> Made:
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        made: dict[Any, Any] = ReadOnlyDict() if kind is dict else ReadOnlyOrderedDict((), value.attributes)
        return Empty(made, lambda of: dict.update(made, ((key, of(item)) for key, item in value.items())))
    if kind is list:
        items = ReadOnlyList()
        return Empty(items, lambda of: list.extend(items, map(of, value)))
    return After(value, tuple) if kind is tuple else Done(value)
