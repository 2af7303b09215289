"""Objects as Python's own values: dates, numbers, paths, containers, configuration, made of what their pickles say.

`pickles.known` says by a word what an object is; here stands how the value of each such object is made.
Sources: the `__reduce__` methods of the standard library (Python 3.8 to 3.14), torch, numpy 1 and 2, and omegaconf 2.
"""

from __future__ import annotations

import datetime
import os
import pathlib
from collections.abc import Callable
from functools import partial
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


def _of(make: Callable[..., Any], *kinds: type) -> Make:
    """What a function makes of the arguments of an object that has no state, each of one of these kinds."""

    def value(node: Object) -> Any:
        args = _stateless(node)
        if not all(isinstance(arg, kinds or object) for arg in args):
            raise TypeError("an argument of another kind")
        return make(*args)

    return value


def _primitive(cls: Callable[..., Any], *kinds: type) -> Make:
    def value(node: Object) -> Any:
        args = _stateless(node)
        return cls(*args) if len(args) <= 1 and all(type(arg) in kinds for arg in args) else NotImplemented

    return value


def _dated(cls: Callable[..., Any], first: Any, *rest: Any) -> Any:
    """Dates and times are pickled as the bytes of their fields; Python 2 wrote those as text."""
    return cls(first.encode("latin-1") if isinstance(first, str) else first, *rest)


def _fraction(*args: Any) -> Any:
    """Fractions are pickled as `numerator/denominator`. An exponent, which Python reads too, could take all memory."""
    if any(type(arg) is str and (len(arg) > 2_500 or not set(arg) <= set("-0123456789/")) for arg in args):
        raise ValueError("not as it is written")
    from fractions import Fraction  # with decimal, which next to no file needs

    return Fraction(*args)


def _timezone(*args: Any) -> Any:
    zone = datetime.timezone(*args)
    return datetime.timezone.utc if zone == datetime.timezone.utc and len(args) == 1 else zone


def _uuid(node: Object) -> Any:
    number = node.attributes["int"]
    if type(number) is not int or node.args:
        raise TypeError("no number")
    from uuid import UUID

    return UUID(int=number)


_PYTHON: dict[str, Make] = {
    "datetime": _of(partial(_dated, datetime.datetime)),
    "date": _of(partial(_dated, datetime.date)),
    "time": _of(partial(_dated, datetime.time)),
    "timedelta": _of(datetime.timedelta, int),
    "timezone": _of(_timezone),
    "decimal": _of(lambda *args: import_module("decimal").Decimal(*args), str),
    "fraction": _of(_fraction, str, int),
    "uuid": _uuid,
    # a path of the other system's kind cannot be made here, and is a pure one
    "posix path": _of(pathlib.Path if os.name == "posix" else pathlib.PurePosixPath, str),
    "windows path": _of(pathlib.Path if os.name != "posix" else pathlib.PureWindowsPath, str),
    "pure posix path": _of(pathlib.PurePosixPath, str),
    "pure windows path": _of(pathlib.PureWindowsPath, str),
    "range": _of(range, int),
    "slice": _of(slice, int, float, str, type(None)),
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


def _attribute(name: str, *kinds: type) -> Make:
    """The attribute of this name, in which a wrapper has what it holds."""

    def value(node: Object) -> Any:
        held = node.attributes[name]
        return held if isinstance(held, kinds) else NotImplemented

    return value


def _device(kind: Any, index: Any = None, *_: Any) -> Any:
    return str(kind) if index is None else f"{kind}:{index}"


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
    "size": _of(lambda sizes: tuple(sizes), tuple, list),
    "device": _of(_device),
    "layout": _of(lambda name: name, str),
    # None and missing values (`???`) stay those
    "omegaconf": _attribute("_content", dict, list, str, type(None)),
    "omegaconf node": _attribute("_val", object),
    "mmengine config": _attribute("_cfg_dict", dict, Object),
    "ml_collections": _attribute("_fields", dict, Object),
}
