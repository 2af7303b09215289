"""A whole value with every object that is understood replaced by Python's own."""

from __future__ import annotations

from typing import Any

from ckptool.checkpoint.graph import After, Done, Empty, Made, Of, Remake
from ckptool.checkpoint.nodes import Global, Object, OrderedDict, Set
from ckptool.pickles.plain.names import shown
from ckptool.pickles.plain.objects import expand


def plain(value: Any) -> Any:
    """The value with every object that is understood replaced by Python's own; unknown objects and tensors stay.

    Namespaces, configuration, counters become dictionaries, deques lists, `torch.Size` tuples, devices and dtypes texts, numpy scalars
    Python's numbers, numpy arrays an `Array`. Sharing and cycles stay.
    """
    return Remake(_begin).run(value)


def _begin(value: Any) -> Made:
    if isinstance(value, Object):
        value = expand(value)
    if isinstance(value, Global):
        return Done(shown(value))
    if isinstance(value, dict):
        return _dict(value)
    if type(value) is list:
        made: list[Any] = []
        return Empty(made, lambda of, items=value: made.extend(map(of, items)))  # type: ignore[misc]
    if type(value) is tuple:
        return After(value, tuple)
    if isinstance(value, Set):
        items = Set([], value.frozen)
        return Empty(items, lambda of, old=value: items.items.extend(map(of, old.items)))  # type: ignore[misc]
    return Done(value)


def _dict(value: dict[Any, Any]) -> Made:
    made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}

    def fill(of: Of) -> None:
        for key, item in value.items():
            new = of(key)
            made[new if _hashable(new) and new not in made else key] = of(item)
        if isinstance(value, OrderedDict) and isinstance(made, OrderedDict):
            made.attributes = of(value.attributes)

    return Empty(made, fill)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
