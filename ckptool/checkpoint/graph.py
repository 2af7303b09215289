"""Walking a graph of values, and mapping it to another; sharing, cycles and order are kept, and nothing recurses.

Trees may hold one list twice, or contain themselves; so may the trees that they are mapped to.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from ckptool.checkpoint.nodes import MISSING, Object, OrderedDict, Set
from ckptool.errors import Corrupt, LimitExceeded, MissingKey, counted

SCALARS = frozenset({str, int, float, bool, type(None)})


def structural_parts(node: Any) -> Sequence[Any]:
    """The parts of `node`, keys and the call of a composite included; nothing for scalars and tensors."""
    if isinstance(node, dict):
        parts = [*node.keys(), *node.values()]
        if isinstance(node, OrderedDict) and node.attributes is not None:
            parts.append(node.attributes)
        return parts
    if isinstance(node, (list, tuple)):
        return node
    if isinstance(node, Set):
        return node.items
    if isinstance(node, Object):
        return node.fn, node.args, node.kwargs, node.items, node.elements, node.state
    return (node.made,) if hasattr(type(node), "made") else ()  # a `Composite`


def visit(root: Any, parts: Callable[[Any], Iterable[Any]] = structural_parts) -> Iterator[Any]:
    """Every object that can be reached from `root`, once, in order and parents first; scalars are left out.

    parts: the objects to go on to from an object; called after that object was yielded.
    """
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if type(node) in SCALARS or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        children = tuple(parts(node))
        if not SCALARS.issuperset(map(type, children)):
            stack.extend(reversed(children))


def above(root: Any, wanted: Callable[[Any], bool]) -> set[int]:
    """The ids of all objects from which one that is `wanted` is reached, and its own; they hold while `root` lives."""
    holders: dict[int, list[int]] = {}
    stack = list[int]()
    for node in visit(root):
        for part in structural_parts(node):
            if type(part) not in SCALARS:
                holders.setdefault(id(part), []).append(id(node))
        if wanted(node):
            stack.append(id(node))
    reaching: set[int] = set()
    while stack:
        if (at := stack.pop()) not in reaching:
            reaching.add(at)
            stack += holders.get(at, ())
    return reaching


def _equal(one: Any, other: Any) -> bool:
    """True for equal values without parts of their own; NaN equals NaN."""
    if hasattr(one, "storage"):
        return all(getattr(one, name) == getattr(other, name) for name in one.__slots__)
    return bool(one == other or one != one or type(one) is Set)


def alike(one: Any, other: Any, limit: int | None = None, equal: Callable[[Any, Any], bool] = _equal) -> bool:
    """True for two graphs of equal values with the same views of the same storages; False beyond `limit` pairs.

    equal: compares two values of one type that have no parts.
    """
    seen: set[tuple[int, int]] = set()
    stack = [(one, other)]
    while stack:
        one, other = stack.pop()
        if one is other or (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        if limit is not None and len(seen) > limit:
            return False
        ours, theirs = tuple(structural_parts(one)), tuple(structural_parts(other))
        if type(one) is not type(other) or len(ours) != len(theirs) or not (ours or equal(one, other)):
            return False
        stack += zip(ours, theirs, strict=True)
    return True


# Limits ---------------------------------------------------------------------------------------------------------------

MAX_DEPTH = 1_000

# The characters that all addresses in a tree may have together, if they were written out: a fixed number, and so many
# more for each node.
FREE_TEXT = 16 << 20
TEXT_PER_NODE = 256
# How many values objects may hold, each counted for every object that holds it: a fixed number, and more for each node.
FREE_HELD = 100_000
HELD_PER_NODE = 8
# How many containers a file may hold: a fixed number, and one more for every few bytes. torch's own protocol takes at
# least that many bytes for each, and twice as many for an object.
FREE_CONTAINERS = 50_000
BYTES_PER_CONTAINER = 6
_CONTAINERS = frozenset({dict, list, tuple, OrderedDict, Set, Object})


def check_depth(root: Any, nbytes: int | None = None) -> None:
    """Raises `LimitExceeded` for trees that are too deep, have too many parts, or addresses too long in total.

    nbytes: of the file, which bounds the number of containers. Visits each node where `tree.walk` first meets it. Not
    written with `visit`, as each step carries its depth, and every file goes through it.
    """
    limit = FREE_CONTAINERS + nbytes // BYTES_PER_CONTAINER if nbytes is not None else 1 << 62
    seen: set[int] = set()
    nodes = text = objects = held = 0
    stack: list[tuple[Any, int, int]] = [(root, 0, 0)]  # a node, how deep it is, and the length of its address
    while stack:
        node, depth, length = stack.pop()
        if id(node) in seen or type(node) not in _CONTAINERS:
            continue
        seen.add(id(node))
        if type(node) is Object:
            objects += 1
            slots = node.state if type(node.state) is tuple and len(node.state) == 2 else (node.state,)
            owned = (node.args, node.items, node.elements, *slots)
            held += sum([len(part) for part in owned if isinstance(part, (dict, list, tuple))])
        elif type(node) is OrderedDict and node.attributes:
            held += len(node.attributes)
        if len(seen) + objects > limit:
            raise LimitExceeded(f"more than {counted(limit, 'container')} in {nbytes:,} bytes")
        if depth > MAX_DEPTH:
            raise LimitExceeded(f"values nested more than {MAX_DEPTH:,} deep")
        # The containers in it, how many parts it has, and how long their names are.
        deeper, longer, names = depth + 1, length + 8, 0
        if isinstance(node, dict):
            size = len(node)
            names = sum([len(key) for key in node if type(key) is str])
            children = [
                (value, deeper, longer + len(key) if type(key) is str else longer)
                for key, value in node.items()
                if type(value) in _CONTAINERS
            ]
            if isinstance(node, OrderedDict) and node.attributes is not None:
                children.append((node.attributes, deeper, longer))
            # No address leads there.
            children += [(key, deeper, longer) for key in node if type(key) is not str and type(key) in _CONTAINERS]
        else:
            parts = structural_parts(node)
            size = len(parts)
            children = [(part, deeper, longer) for part in parts if type(part) in _CONTAINERS]
        nodes += size
        text += length * size + names
        stack += reversed(children)
    if held > FREE_HELD + HELD_PER_NODE * nodes:
        raise LimitExceeded(f"{counted(objects, 'object')} that share {counted(held, 'value')}")
    if text > FREE_TEXT + TEXT_PER_NODE * nodes:
        raise LimitExceeded(f"{counted(nodes, 'value')} whose addresses have {counted(text, 'character')}")


@contextmanager
def no_collection() -> Iterator[None]:
    """Pauses the garbage collector: it would search hundreds of thousands of new objects, and find nothing."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


# Mapping --------------------------------------------------------------------------------------------------------------

Of = Callable[[Any], Any]


class FromParts(NamedTuple):
    """A result that cannot be changed once it exists (a tuple, a date): `make` gets the results for its parts."""

    parts: Sequence[Any]
    make: Callable[[list[Any]], Any]


class FillLater(NamedTuple):
    """A result that is empty at first; `fill` gets the function that gives the result for a part."""

    result: Any
    fill: Callable[[Of], None]


Handler = Callable[[Any], Any]
"""The result for a value of one type: the result itself, or `FromParts`, or `FillLater`."""


class GraphMapper:
    """Maps a graph of values to another: each object is handed once to the handler of its type.

    handlers: by exact type; that of `object` is for all others.
    replaced: id of an object -> the one to map in its place.
    """

    def __init__(self, handlers: Mapping[type, Handler], replaced: Mapping[int, Any] | None = None) -> None:
        self.handlers, self.default = handlers, handlers[object]
        self.replaced = replaced or {}
        self.results: dict[int, Any] = {}
        self.alive: list[Any] = []  # the values whose ids are in `results`, so that no id is given again
        self.unfilled: list[Callable[[Of], None]] = []

    def map(self, root: Any) -> Any:
        """The result for `root`, filled to the bottom.

        A mapper maps once, and then forgets everything: its handlers may refer to its owner, and such a cycle would
        keep files open and tensors in memory.
        """
        try:
            with no_collection():
                result = self.of(root)
                while self.unfilled:
                    self.unfilled.pop()(self.of)
                return result
        finally:
            del self.handlers, self.default, self.replaced, self.results, self.alive, self.unfilled

    def later(self, fill: Callable[[Of], None]) -> None:
        """Calls `fill` once all results that need their parts first exist."""
        self.unfilled.append(fill)

    def of(self, value: Any) -> Any:
        """The result for one value; it may not be filled yet."""
        kind = type(value)
        if kind in SCALARS:
            return value
        key = id(value)
        if key in self.results:
            return self.results[key]
        result = self.handled(value)
        return self._from_parts(value, result) if type(result) is FromParts else self._keep(value, result)

    def handled(self, value: Any) -> Any:
        """What the handler of a value's type gives for it."""
        if self.replaced:
            value = self.replaced.get(id(value), value)
        return self.handlers.get(type(value), self.default)(value)

    def _keep(self, value: Any, result: Any) -> Any:
        if type(result) is FillLater:
            self.unfilled.append(result.fill)
            result = result.result
        self.results[id(value)] = result
        self.alive.append(value)
        return result

    def _from_parts(self, value: Any, from_parts: FromParts) -> Any:
        stack = [(value, from_parts, iter(from_parts.parts))]
        ancestors = {id(value)}
        while stack:
            value, from_parts, parts = stack[-1]
            for part in parts:
                if type(part) in SCALARS or id(part) in self.results:
                    continue
                if id(part) in ancestors:
                    what = "a value that contains itself in an impossible way"
                    raise Corrupt(what, "No program writes this; the file is probably malicious.")
                result = self.handled(part)
                if type(result) is FromParts:
                    stack.append((part, result, iter(result.parts)))
                    ancestors.add(id(part))
                    break
                self._keep(part, result)
            else:
                stack.pop()
                ancestors.discard(id(value))
                self._keep(value, from_parts.make(list(map(self.of, from_parts.parts))))
        return self.results[id(value)]


# Copies ---------------------------------------------------------------------------------------------------------------


def same(value: Any) -> Any:
    """The value itself."""
    return value


Put = Callable[[dict[Any, Any], Any, Any, Any], None]
"""Puts a result into a dictionary: called with it, the old key, and the results for key and value."""


def copy_dict(
    node: dict[Any, Any], plain: type = dict, ordered: type[OrderedDict] = OrderedDict, put: Put | None = None
) -> FillLater:
    """A dictionary of the results for its keys, values and attributes; of type `ordered` if it is an `OrderedDict`."""
    copy: dict[Any, Any] = ordered() if isinstance(node, OrderedDict) else plain()

    def fill(of: Of) -> None:
        if put is None:
            dict.update(copy, ((key if type(key) is str else of(key), of(value)) for key, value in node.items()))
        else:
            for key, value in node.items():
                put(copy, key, of(key), of(value))
        if isinstance(copy, OrderedDict):
            copy.attributes = of(node.attributes)  # type: ignore[attr-defined]

    return FillLater(copy, fill)


def copy_list(node: list[Any], plain: type[list[Any]] = list) -> FillLater:
    copy = plain()
    return FillLater(copy, lambda of: list.extend(copy, map(of, node)))


def copy_tuple(node: tuple[Any, ...]) -> FromParts:
    return FromParts(node, tuple)


def copy_set(node: Set) -> FillLater:
    copy = Set([], node.frozen)
    return FillLater(copy, lambda of: copy.items.extend(map(of, node.items)))


def copy_object(node: Object) -> FillLater:
    # With the old arguments until it is filled: a composite that it is an argument of looks at them.
    copy = Object(node.fn, node.args, node.how)
    copy.adds, copy.live = node.adds, node.live

    def fill(of: Of) -> None:
        for name in ("fn", "args", "kwargs", "items", "elements", "state"):
            part = getattr(node, name)
            setattr(copy, name, part if part is MISSING else of(part))

    return FillLater(copy, fill)


COPY: Mapping[type, Handler] = {
    dict: copy_dict,
    OrderedDict: copy_dict,
    list: copy_list,
    tuple: copy_tuple,
    Set: copy_set,
    Object: copy_object,
    object: same,
}

# Read-only copies -----------------------------------------------------------------------------------------------------


def _refuse(self: Any, *_: Any, **__: Any) -> Any:
    how = "change a copy (dict(...), list(...)) and ckptool.save that, or use ckptool.edit"
    raise TypeError(f"what ckptool.open gives is read-only: {how}")


class ReadOnlyDict(dict[Any, Any]):
    """A dictionary of an opened checkpoint; `copy.copy` and `copy.deepcopy` of it can be changed."""

    __slots__ = ()

    def __missing__(self, key: Any) -> Any:
        raise MissingKey.among(str(key), lambda: list(map(str, self)), "in this dictionary")

    def __reduce_ex__(self, _: Any) -> Any:
        return dict, (), None, None, iter(self.items())


class ReadOnlyOrderedDict(OrderedDict):
    """An `OrderedDict` of an opened checkpoint, with its `metadata`."""

    __slots__ = ()
    __missing__ = ReadOnlyDict.__missing__

    def __reduce_ex__(self, _: Any) -> Any:
        return OrderedDict, ((), self.attributes), None, None, iter(self.items())


class ReadOnlyList(list[Any]):
    """A list of an opened checkpoint."""

    __slots__ = ()

    def __reduce_ex__(self, _: Any) -> Any:
        return list, (), None, iter(self)


_CHANGES = """
    __setitem__ __delitem__ __ior__ clear pop popitem setdefault update
    __iadd__ __imul__ append extend insert remove reverse sort"""
for _kind in (ReadOnlyDict, ReadOnlyOrderedDict, ReadOnlyList):
    for _change in _CHANGES.split():
        if hasattr(_kind, _change):
            setattr(_kind, _change, _refuse)


def read_only(tree: Any) -> Any:
    """The tree with dictionaries and lists that refuse to be changed. Sharing and cycles stay."""
    read_only_dict = partial(copy_dict, plain=ReadOnlyDict, ordered=ReadOnlyOrderedDict)
    read_only_list = partial(copy_list, plain=ReadOnlyList)
    kinds: dict[type, Handler] = {dict: read_only_dict, OrderedDict: read_only_dict, list: read_only_list}
    return GraphMapper({**kinds, tuple: copy_tuple, object: same}).map(tree)
