"""Objects as Python's own values: dates, numbers, paths, containers, configuration, made of what their pickles say.

`pickles.known` says by a word what an object is; here stands how the value of each such object is made.
Sources: the `__reduce__` methods of the standard library (Python 3.8 to 3.14), torch, numpy 1 and 2, and omegaconf 2.
"""

from __future__ import annotations

import datetime
import os
import pathlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ckptool.checkpoint.graph import COPY, FillLater, GraphMapper, Of
from ckptool.checkpoint.nodes import MISSING, Global, Object, OrderedDict
from ckptool.checkpoint.numpy_arrays import array, array_type, element, scalar
from ckptool.errors import CkptoolError, Corrupt
from ckptool.pickles.known import is_torch_name, value_word

Make = Callable[[Object], Any]
"""The value of an object. `NotImplemented`, or one of `_NOT_WRITTEN_SO`, where its class would not have written
that."""

_NOT_WRITTEN_SO = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError)


def plain(value: Any) -> Any:
    """The value with every object that is understood replaced by Python's own; unknown objects and tensors stay.

    Namespaces, configuration, counters become dictionaries, deques lists, `torch.Size` tuples, devices and dtypes
    texts, numpy scalars Python's numbers, numpy arrays an `Array`. Sharing and cycles stay.
    """

    def expanded(node: Object) -> Any:
        found = expand(node)
        return found if isinstance(found, Object) else mapper.handled(found)

    mapper = GraphMapper({**COPY, dict: _dict, OrderedDict: _dict, Object: expanded, Global: shown})
    return mapper.map(value)


def _dict(node: dict[Any, Any]) -> FillLater:
    made: dict[Any, Any] = OrderedDict() if isinstance(node, OrderedDict) else {}

    def fill(of: Of) -> None:
        for key, item in node.items():
            new = of(key)
            try:
                made[key if new in made else new] = of(item)
            except TypeError:  # it became a list or a dictionary, which no key can be
                made[key] = of(item)
        if isinstance(node, OrderedDict) and isinstance(made, OrderedDict):
            made.attributes = of(node.attributes)

    return FillLater(made, fill)


def shown(name: Global) -> Any:
    """A name of torch's as text, which says all there is to say; any other stays a name."""
    return str(name) if is_torch_name(name) else name


def expand(node: Object) -> Any:
    """An object as Python's own value (of a container, the parts are still nodes); the node itself if it is unknown."""
    make = _VALUES.get(value_word(node.fn))
    try:
        value = make(node) if make is not None else node
    except (CkptoolError, *_NOT_WRITTEN_SO):
        return node
    return node if value is NotImplemented else value


def is_known(node: Object) -> bool:
    """True if objects of its class have a value here."""
    return value_word(node.fn) in _VALUES


def python_value(node: Any) -> Any:
    """The date, number, path, UUID, range or slice that an object stands for; `NotImplemented` for anything else.

    Raises `Corrupt` where the class is known and its arguments are not what it writes.
    """
    make = _PYTHON.get(value_word(node.fn)) if isinstance(node, Object) else None
    if make is None or node.kwargs or node.items or node.elements is not None:
        return NotImplemented
    try:
        _check_arguments(node)
        return make(node)
    except _NOT_WRITTEN_SO:
        raise Corrupt(
            f"{node.name} with arguments that it never writes", "The pickle is damaged or malicious."
        ) from None


def _check_arguments(node: Object, levels: int = 3) -> None:
    """Raises `TypeError` for more arguments than these classes have, or nested deeper than a time zone in a date."""
    if not levels or type(node.args) is not tuple or len(node.args) > 10:
        raise TypeError("more arguments than it has")
    for part in node.args:
        if isinstance(part, Object):
            _check_arguments(part, levels - 1)


def _stateless(node: Object) -> tuple[Any, ...]:
    """The arguments of an object that has no state; raises `TypeError` for one that has."""
    if node.state is not MISSING and node.state is not None and node.state != {}:
        raise TypeError("a state")
    args = tuple(python_value(part) if isinstance(part, Object) else part for part in node.args)
    if any(arg is NotImplemented for arg in args):
        raise TypeError("an argument of another kind")
    return args


# Python's own classes -------------------------------------------------------------------------------------------------


def _of_bytes(cls: Callable[..., Any]) -> Make:
    """Dates and times are pickled as the bytes of their fields; Python 2 wrote those as text."""

    def make(node: Object) -> Any:
        first, *rest = _stateless(node)
        return cls(first.encode("latin-1") if isinstance(first, str) else first, *rest)

    return make


def _of_arguments(cls: Callable[..., Any], *kinds: type) -> Make:
    def make(node: Object) -> Any:
        args = _stateless(node)
        if not all(isinstance(arg, kinds) for arg in args):
            raise TypeError("an argument of another kind")
        return cls(*args)

    return make


def _primitive(cls: Callable[..., Any], *kinds: type) -> Make:
    def make(node: Object) -> Any:
        args = _stateless(node)
        if len(args) > 1 or not all(type(arg) in kinds for arg in args):
            return NotImplemented
        return cls(*args)

    return make


def _fraction(node: Object) -> Any:
    """Fractions are pickled as `numerator/denominator`. An exponent, which Python reads too, could take all memory."""
    args = _stateless(node)
    if any(type(arg) is str and (len(arg) > 2_500 or not set(arg) <= set("-0123456789/")) for arg in args):
        raise ValueError("not as it is written")
    from fractions import Fraction  # with decimal, which next to no file needs

    return _of_arguments(Fraction, str, int)(node)


def _timezone(node: Object) -> Any:
    zone = datetime.timezone(*_stateless(node))
    return datetime.timezone.utc if zone == datetime.timezone.utc and len(node.args) == 1 else zone


def _uuid(node: Object) -> Any:
    number = node.attributes["int"]
    if type(number) is not int or node.args:
        raise TypeError("no number")
    from uuid import UUID

    return UUID(int=number)


def _path(posix: bool, pure: bool) -> Make:
    """A path of the other system's kind cannot be made here, and is a pure one."""
    native = not pure and posix == (os.name == "posix")
    cls = pathlib.Path if native else pathlib.PurePosixPath if posix else pathlib.PureWindowsPath
    return _of_arguments(cls, str)


_PYTHON: dict[str, Make] = {
    "datetime": _of_bytes(datetime.datetime),
    "date": _of_bytes(datetime.date),
    "time": _of_bytes(datetime.time),
    "timedelta": _of_arguments(datetime.timedelta, int),
    "timezone": _timezone,
    "decimal": lambda node: _of_arguments(import_module("decimal").Decimal, str)(node),
    "fraction": _fraction,
    "uuid": _uuid,
    "posix path": _path(posix=True, pure=False),
    "windows path": _path(posix=False, pure=False),
    "pure posix path": _path(posix=True, pure=True),
    "pure windows path": _path(posix=False, pure=True),
    "range": _of_arguments(range, int),
    "slice": _of_arguments(slice, int, float, str, type(None)),
    "int": _primitive(int, int),
    "float": _primitive(float, float, int),
    "bool": _primitive(bool, bool, int),
    "str": _primitive(str, str),
}

# Containers, configuration, torch and numpy ---------------------------------------------------------------------------


def _attributes(node: Object) -> Any:
    return NotImplemented if node.items or node.elements else dict(node.attributes)


def _counter(node: Object) -> Any:
    first = node.args[0] if node.args else {}
    return {**first, **(node.items or {})} if isinstance(first, dict) else NotImplemented


def _list(node: Object) -> Any:
    """The items that a list, a tuple or a deque was made of, and those appended to it."""
    first = node.args[0] if node.args else []
    return [*first, *(node.elements or ())] if isinstance(first, (list, tuple)) else NotImplemented


def _omegaconf(node: Object) -> Any:
    """A DictConfig or ListConfig: what its `_content` holds. None and missing values (`???`) stay those."""
    content = node.attributes["_content"]
    return content if isinstance(content, (dict, list, str, type(None))) else NotImplemented


def _inner(name: str) -> Make:
    """The dictionary that a wrapper has as its attribute of this name."""

    def find(node: Object) -> Any:
        value = node.attributes.get(name)
        return value if isinstance(value, (dict, Object)) else NotImplemented

    return find


def _size(node: Object) -> Any:
    (sizes,) = _stateless(node)
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else NotImplemented


def _device(node: Object) -> Any:
    kind, *index = _stateless(node)
    return f"{kind}:{index[0]}" if index and index[0] is not None else str(kind)


def _layout(node: Object) -> Any:
    (name,) = _stateless(node)
    return name if type(name) is str else NotImplemented


def _scalar(node: Object) -> Any:
    found = scalar(node)
    value = element(found.type, found.data) if found is not NotImplemented else found
    return found if value is NotImplemented else value


_VALUES: dict[str, Make] = {
    **_PYTHON,
    "array": array,
    "array scalar": _scalar,
    "array type": lambda node: str(array_type(node)),
    **dict.fromkeys(("namespace", "attributes"), _attributes),
    **dict.fromkeys(("defaultdict", "items"), lambda node: dict(node.items or {})),
    "elements": lambda node: list(node.elements or ()),
    "items or attributes": lambda node: dict(node.items if node.items is not None else node.attributes),
    "counter": _counter,
    "dict": lambda node: dict(node.items or {}) if not node.args else NotImplemented,
    **dict.fromkeys(("deque", "list"), _list),
    "tuple": lambda node: NotImplemented if (items := _list(node)) is NotImplemented else tuple(items),
    "size": _size,
    "device": _device,
    "layout": _layout,
    "omegaconf": _omegaconf,
    "omegaconf node": lambda node: node.attributes.get("_val", NotImplemented),
    "mmengine config": _inner("_cfg_dict"),
    "ml_collections": _inner("_fields"),
}
