"""Containers, made empty and filled when their parts are made: dictionaries, lists and sets; and what is filled as they are."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from ckptool.bridge.builder import Builder
from ckptool.checkpoint.graph import After, Empty, Made, Of
from ckptool.checkpoint.nodes import OrderedDict, Set
from ckptool.errors import Conflict, Corrupt, printable
from ckptool.pickles import plain


def dictionary(_: Builder, node: dict[Any, Any]) -> Made:
    """A dictionary."""
    made: dict[Any, Any] = {}
    return Empty(made, lambda of: set_items(node, made, node, of))


def ordered(_: Builder, node: OrderedDict) -> Made:
    """An `OrderedDict`, with the attributes that were set on it (`_metadata` of a state dict)."""
    made: collections.OrderedDict[Any, Any] = collections.OrderedDict()

    def fill_in(of: Of) -> None:
        set_items(node, made, node, of)
        vars(made).update(attributes(node.attributes or {}, of))

    return Empty(made, fill_in)


def set_items(node: Any, made: Any, items: Mapping[Any, Any], of: Of) -> None:
    """Fills the dictionary `made`; raises `Conflict` where two keys of `node` have become one, `Corrupt` for a key that cannot be one."""
    count = len(made) + len(items)
    for key, value in items.items():
        try:
            made[of(key)] = of(value)
        except TypeError:
            raise Corrupt(f"a dictionary with a key of type {type(of(key)).__name__}, which cannot be one") from None
    if len(made) != count:
        raise Conflict(
            f"a dictionary with keys that are the same once they are made ({printable(plain.summary(node))})"
        )


def list_of(_: Builder, node: list[Any]) -> Made:
    """A list."""
    made: list[Any] = []
    return Empty(made, lambda of: made.extend(map(of, node)))


def set_of(_: Builder, node: Set) -> Made:
    """A set or frozenset."""
    return After(node.items, lambda parts: _hashed(frozenset if node.frozen else set, parts))


def _hashed(cls: type, parts: list[Any]) -> Any:
    try:
        return cls(parts)
    except TypeError:
        raise Corrupt(f"a {cls.__name__} with unhashable members") from None


def attributes(items: Mapping[Any, Any], of: Of) -> dict[str, Any]:
    """Attributes with their values made; raises `Corrupt` for names that are no text."""
    if not all(type(key) is str for key in items):
        raise Corrupt("attributes whose names are no text")
    return {key: of(value) for key, value in items.items()}
