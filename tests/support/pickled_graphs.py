"""Random graphs of plain Python values and the tree that a decoder should make of them; a pickle decoded alone."""

import collections
from typing import Any

from hypothesis import strategies as st

from ckptool.checkpoint.nodes import Global, Object, OrderedDict, Set
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.decode import Decoded, decode
from tests.support.own_classes import Thing
from tests.support.same import assert_same_tree

INTEGERS = st.one_of(st.integers(-300, 70_000), st.integers(-(2**40), 2**40), st.integers(-(2**600), 2**600))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    INTEGERS,
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=6),  # surrogates too
    st.binary(max_size=6),
    st.complex_numbers(),
)
KEYS = st.one_of(
    st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.binary(max_size=3),
    st.tuples(st.text(max_size=2), st.integers(0, 3)), st.floats(allow_nan=False),
)  # fmt: skip
KINDS = ("list", "dict", "ordered", "ordered with attributes", "thing", "tuple", "set", "frozenset", "bytearray")


@st.composite
def graphs(draw: st.DrawFn) -> list[Any]:
    """A list of containers that refer to each other, to themselves and to scalars in any way that Python allows."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=7))
    nodes: list[Any] = [_empty(kind, number) for number, kind in enumerate(kinds)]
    hashable: list[Any] = [node for node in nodes if isinstance(node, Thing)]
    for place, kind in enumerate(kinds):
        if kind == "tuple":  # refers to what can be changed, and to tuples before it
            there = [node for node in nodes if node is not None]
            nodes[place] = tuple(draw(st.lists(_one_of(there), max_size=5)))
        elif kind == "frozenset":
            nodes[place] = frozenset(draw(st.lists(_one_of(hashable), max_size=4)))
            hashable.append(nodes[place])
    for node, kind in zip(nodes, kinds, strict=True):
        _fill(draw, node, kind, nodes, hashable)
    return nodes


def _empty(kind: str, number: int) -> Any:
    makers = {"list": list, "dict": dict, "set": set}
    if kind in makers:
        return makers[kind]()
    if kind.startswith("ordered"):
        return collections.OrderedDict()
    return Thing(number) if kind == "thing" else bytearray(b"\xff\0a"[: number % 4]) if kind == "bytearray" else None


def _one_of(nodes: list[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(SCALARS, st.sampled_from(nodes)) if nodes else SCALARS


def _fill(draw: st.DrawFn, node: Any, kind: str, nodes: list[Any], hashable: list[Any]) -> None:
    values = _one_of(nodes)
    if kind == "list":
        node.extend(draw(st.lists(values, max_size=5)))
    elif isinstance(node, dict):
        node.update(draw(st.dictionaries(KEYS, values, max_size=4)))
        if kind == "ordered with attributes":
            node._metadata = draw(values)
    elif kind == "thing":
        node.part = draw(values)
    elif kind == "set":
        node.update(draw(st.lists(_one_of(hashable), max_size=4)))


def as_tree(value: Any) -> Any:
    """The tree that stands for `value`: the same graph, with our nodes for what Python has classes for."""
    return _Treed().of(value)


class _Treed:
    def __init__(self) -> None:
        self.known: dict[int, Any] = {}
        self.alive: list[Any] = []

    def of(self, value: Any) -> Any:
        if id(value) in self.known:
            return self.known[id(value)]
        self.alive.append(value)
        if isinstance(value, tuple) and value:
            parts = tuple(self.of(part) for part in value)
            return self.known.setdefault(id(value), parts)  # reached through itself: made on the way
        if isinstance(value, (dict, list, set, frozenset, Thing, bytearray)):
            return self._container(value)
        return value

    def _container(self, value: Any) -> Any:
        made: Any
        if isinstance(value, collections.OrderedDict):
            made = self.known[id(value)] = OrderedDict()
            made.update((self.of(k), self.of(v)) for k, v in value.items())
            made.attributes = self.of(vars(value)) if vars(value) else None
        elif isinstance(value, dict):
            made = self.known[id(value)] = {}
            made.update((self.of(k), self.of(v)) for k, v in value.items())
        elif isinstance(value, list):
            made = self.known[id(value)] = []
            made.extend(map(self.of, value))
        elif isinstance(value, (set, frozenset)):
            made = self.known[id(value)] = Set([], isinstance(value, frozenset))
            made.items.extend(map(self.of, value))
        elif isinstance(value, bytearray):
            made = self.known[id(value)] = bytearray(value)
        else:
            made = self.known[id(value)] = Object(Global(Thing.__module__, "Thing"), (), "new")
            made.state = self.of(vars(value))
        return made


def decode_pickle(data: bytes, **options: Any) -> Decoded:
    return decode(data, lambda pid: ("persistent", pid), BUILDERS, **options)


def decodes_to(data: bytes, expected: Any) -> None:
    decoded = decode_pickle(data)
    assert decoded.end == len(data)
    assert_same_tree(decoded.root, expected)
