"""Values that a checkpoint may hold beside Python's own: inert, named, never imported, never called.

A tree is made of `None`, bool, int, float, complex, str, bytes, bytearray, list, tuple and dict, of the tensors of
`checkpoint`, and of the nodes here. A node says how a pickle would make the object; it is written back as that. Nodes
are filled while a pickle is decoded (they may refer to themselves) and not changed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from ckptool.errors import LimitExceeded, counted, printable


class Global:
    """A name in a module (`torch.float32`, `argparse.Namespace`). Only a name: it is never looked up.

    Equal names are one object, so a `Global` can be compared with `is` and is hashed by identity.
    """

    __slots__ = ("__weakref__", "module", "name")
    module: str
    name: str

    def __new__(cls, module: str, name: str) -> Global:
        instance = _GLOBALS.get((module, name))
        if instance is None:
            instance = super().__new__(cls)
            instance.module, instance.name = module, name
            _GLOBALS[module, name] = instance
        return instance

    def __reduce__(self) -> tuple[type[Global], tuple[str, str]]:
        return Global, (self.module, self.name)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"<name {printable(str(self))}>"


_GLOBALS: WeakValueDictionary[tuple[str, str], Global] = WeakValueDictionary()


class OrderedDict(dict[Any, Any]):
    """A `collections.OrderedDict`, with the attributes that were set on it (a state dict's `_metadata`)."""

    __slots__ = ("attributes",)

    def __init__(self, items: Any = (), attributes: dict[str, Any] | None = None) -> None:
        if items:
            super().__init__(items)
        self.attributes = attributes

    @property
    def metadata(self) -> dict[str, Any] | None:
        """The state dict's `_metadata`: module path -> {"version": int}; None where there is none."""
        metadata = (self.attributes or {}).get("_metadata")
        return metadata if isinstance(metadata, dict) else None


def same_kind(node: Any, items: dict[Any, Any]) -> dict[Any, Any]:
    """A dictionary with these items, of the type of `node` and with its attributes."""
    return OrderedDict(items, node.attributes) if isinstance(node, OrderedDict) else items


_SCALARS = frozenset({str, bytes, int, float, complex, bool, type(None)})
SHOWN = 100  # items of a set in its `repr`


class Set:
    """A Python set or frozenset, as the ordered list of its items (pickles keep the order of writing)."""

    __slots__ = ("frozen", "items")

    def __init__(self, items: list[Any], frozen: bool = False) -> None:
        self.items = items
        self.frozen = frozen

    def __repr__(self) -> str:
        """Its scalars, and only the type of containers: sets of sets could be written out for ever."""
        shown = [repr(item) if type(item) in _SCALARS else f"<{type(item).__name__}>" for item in self.items[:SHOWN]]
        ellipsis = ["…"] if len(self.items) > SHOWN else []
        return f"{'frozenset' if self.frozen else 'set'}([{', '.join(shown + ellipsis)}])"


class ByteString(bytes):
    """A Python 2 `str` that is not valid UTF-8, so its text is not known."""

    __slots__ = ()


class Object:
    """An object that is not built: what a pickle calls to make it, and what it does to it afterwards.

    how: "call" (`fn(*args)`), "new" (`fn.__new__(fn, *args, **kwargs)`) or "persistent" (`args[0]` is the persistent
    id).
    items: set with `object[key] = value`, in order.  elements: appended, or added where `adds`.
    state: given to `__setstate__` or the object's dictionary; `MISSING` where there was none.
    live: the object in memory that it was read from, which may have changed since; None for one read from a file.
    """

    __slots__ = ("adds", "args", "elements", "fn", "how", "items", "kwargs", "live", "state")

    def __init__(self, fn: Any, args: Any, how: str = "call", kwargs: Any = None) -> None:
        self.fn = fn
        self.args = args
        self.how = how
        self.kwargs = kwargs
        self.items: dict[Any, Any] | None = None
        self.elements: list[Any] | None = None
        self.adds = False
        self.state: Any = MISSING
        self.live: Any = None

    @property
    def name(self) -> str:
        """The name of its class or function, for people: `argparse.Namespace`."""
        return str(self.fn) if type(self.fn) is Global else f"a computed {'class' if self.how == 'new' else 'function'}"

    @property
    def attributes(self) -> dict[Any, Any]:
        """Its instance dictionary, as far as the state says; empty otherwise."""
        state = self.state
        if type(state) is tuple and len(state) == 2 and isinstance(state[1], dict):  # (__dict__, __slots__)
            return {**state[0], **state[1]} if isinstance(state[0], dict) else state[1]
        return state if isinstance(state, dict) else {}

    def __getitem__(self, key: Any) -> Any:
        """An item, an attribute or an element, by its key, name or index. Raises `KeyError`."""
        for parts in (self.items or {}, self.attributes):
            if key in parts:
                return parts[key]
        if self.elements is not None and type(key) is int and 0 <= key < len(self.elements):
            return self.elements[key]
        raise KeyError(key)

    def __repr__(self) -> str:
        return f"<{printable(self.name)}>"


def fields(node: Any) -> dict[Any, Any]:
    """The items of a dictionary or the attributes of an object; none of anything else."""
    if isinstance(node, dict):
        return node
    return node.attributes if isinstance(node, Object) else {}


def inside(node: Any, names: str) -> Any:
    """What a dotted name leads to, through dictionaries and the attributes of objects; None if it leads nowhere."""
    for name in names.split("."):
        node = fields(node).get(name)
    return node


def items(node: Any) -> list[Any] | tuple[Any, ...]:
    """A list or tuple itself; nothing for anything else."""
    return node if isinstance(node, (list, tuple)) else ()


def brief(value: Any, limit: int = 40) -> str:
    """The beginning of a value from a file; of nested containers only the type: written out, they may be endless."""
    begin = value[:limit] if isinstance(value, (list, tuple, str, bytes)) else value
    within = begin if isinstance(begin, (list, tuple)) else (begin,)
    nested = any(isinstance(part, (list, tuple, dict)) for part in within)
    return with_article(type(value).__name__) if nested else repr(begin)[:limit]


def with_article(noun: str) -> str:
    """`a dict`, `an int`."""
    return f"{'an' if noun[0] in 'aeioAEIO' else 'a'} {noun}"


def is_hashable(value: Any) -> bool:
    """True if Python could use what `value` stands for as a key (the parts of a tuple aside)."""
    return not (isinstance(value, (list, dict, bytearray)) or (type(value) is Set and not value.frozen))


MAX_COLLISIONS = 100


def check_collisions(keys: Iterable[Any]) -> None:
    """Raises `LimitExceeded` for keys that were chosen so that looking one up means comparing it with all others.

    Strings do not count: nobody can choose what they are hashed to.
    """
    others = [key for key in keys if type(key) is not str]
    if len(others) > MAX_COLLISIONS and len(set(map(hash, others))) < len(others) - MAX_COLLISIONS:
        raise LimitExceeded(f"{counted(len(others), 'key')}, most of them with the same hash")


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"

    __reduce__ = __repr__  # copies are this one, in other processes, too


MISSING = _Missing()


HOMES = {
    "__builtin__": "builtins",
    "pathlib._local": "pathlib",
    "numpy._core.multiarray": "numpy.core.multiarray",
    "numpy.core._multiarray_umath": "numpy.core.multiarray",
    "numpy._core.numeric": "numpy.core.numeric",
    "numpy._core.records": "numpy.core.records",
    "numpy._core.defchararray": "numpy.core.defchararray",
}


def canonical(name: Any) -> str:
    """A name as the tables here spell it: one home for a module that moved; the empty text for what is no name."""
    return f"{HOMES.get(name.module, name.module)}.{name.name}" if type(name) is Global else ""
