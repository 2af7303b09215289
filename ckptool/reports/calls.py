"""What loading a checkpoint with `pickle` would call and import, name by name.

There is no list of bad names: whatever is outside of the tiers that ckptool understands is named. To resolve a name, pickle imports its
module, so a class that is only mentioned runs code too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite
from ckptool.nodes import MISSING, Global, Object, OrderedDict, Set
from ckptool.pickles.known import is_known_call, is_torch_name
from ckptool.tree import Path, address

CALLED, MADE, NAMED = "called", "made", "named"


@dataclass(frozen=True, slots=True)
class Call:
    """One name that is not understood. how: `called` (a function or class), `made` (an object of the class), `named` (imported only).

    places: addresses in the tree, the first of `count`.
    """

    name: str
    how: str
    places: tuple[str, ...]
    count: int


MAX_PLACES = 5


def unknown_names(checkpoint: Checkpoint) -> list[Call]:
    """Every name that is outside of the known tiers, with how it would be used and where; the most dangerous use first."""
    found: dict[tuple[str, str], list[str]] = {}
    counts: dict[tuple[str, str], int] = {}
    for how, name, place in _uses(checkpoint):
        kind = (name, how)
        counts[kind] = counts.get(kind, 0) + 1
        places = found.setdefault(kind, [])
        if len(places) < MAX_PLACES and place not in places:
            places.append(place)
    calls = [Call(name, how, tuple(places), counts[name, how]) for (name, how), places in found.items()]
    return sorted(calls, key=lambda call: (CALLED, MADE, NAMED).index(call.how))


def _uses(checkpoint: Checkpoint) -> Iterator[tuple[str, str, str]]:
    for place, node in _nodes(checkpoint.tree):
        yield from _use(node, place)
    for call in checkpoint.discarded:
        yield CALLED, call.name, "(made and thrown away)"


def _use(node: Any, place: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(node, Global):
        if not (is_known_call(node) or is_torch_name(node)):
            yield NAMED, str(node), place
    elif isinstance(node, Object):
        made = node.how == "new"
        if not is_known_call(node.fn, node.args) and not (made and is_torch_name_of(node)):
            yield MADE if made else CALLED, node.name, place


def is_torch_name_of(node: Object) -> bool:
    """True for an object of one of torch's own value types."""
    return type(node.fn) is Global and is_torch_name(node.fn)


def _nodes(tree: Any) -> Iterator[tuple[str, Any]]:
    """Everything that can hold a name, each object once, with the address of the nearest place that has one."""
    seen: set[int] = set()
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        if not isinstance(node, (dict, list, tuple, Set, Object, Composite, Global)):
            continue
        if isinstance(node, Global):
            yield address(path), node
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Object):
            yield address(path), node
        stack.extend(reversed(list(_below(path, node))))


def _below(path: Path, node: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, dict):
        yield from ((path, key) for key in node if isinstance(key, (tuple, Global, Object)))
        yield from (((*path, key), value) for key, value in node.items())
        if isinstance(node, OrderedDict) and node.attributes:
            yield from _below(path, node.attributes)
    elif isinstance(node, (list, tuple)):
        yield from (((*path, index), value) for index, value in enumerate(node))
    elif isinstance(node, Set):
        yield from ((path, value) for value in node.items)
    elif isinstance(node, Composite):
        # The function itself is one of ours; only what it is given may be somebody else's.
        yield from ((path, part) for part in node.made.args)
    elif isinstance(node, Object):
        yield from _of_object(path, node)


def _of_object(path: Path, node: Object) -> Iterator[tuple[Path, Any]]:
    if not isinstance(node.fn, Global):
        yield path, node.fn
    yield path, node.args
    yield path, node.kwargs
    yield from _below(path, node.items or {})
    yield from (((*path, index), value) for index, value in enumerate(node.elements or ()))
    if isinstance(node.state, dict):
        yield from _below(path, node.state)
    elif node.state is not MISSING:
        yield path, node.state
