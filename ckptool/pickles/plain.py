"""Objects as Python's own values (dates, numbers, paths, containers, configuration), made from their pickles; and
values for people and programs: a line of text, and JSON that is bounded whatever a value refers to.

`pickles.known` says by a word what an object is; this module makes the value of each such object.
Sources: the `__reduce__` methods of the standard library (Python 3.8 to 3.14), torch, numpy 1 and 2, and omegaconf 2.
"""

from __future__ import annotations

import base64
import datetime
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from ckptool.checkpoint import Composite, StorageRef, TensorEntry
from ckptool.checkpoint.graph import COPY, SCALARS, GraphMapper, copy_dict
from ckptool.checkpoint.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set
from ckptool.checkpoint.numpy_arrays import Array, array, array_type
from ckptool.errors import CkptoolError, counted, printable
from ckptool.pickles.known import is_torch_name, kind_of, value_word

Make = Callable[[Object], Any]
"""The value of an object. `NotImplemented`, or one of `_MALFORMED`, for what its class would not have written."""

_MALFORMED = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError)


def plain(value: Any) -> Any:
    """The value with every object that is understood replaced by Python's own; unknown objects and tensors stay.

    Namespaces, configuration, counters become dictionaries, deques lists, `torch.Size` tuples, devices and dtypes
    texts, numpy scalars Python's numbers, numpy arrays an `Array`. Sharing and cycles stay.
    """

    def expanded(node: Object) -> Any:
        result = expand(node)
        return result if isinstance(result, Object) else mapper.handled(result)

    kinds: dict[type, Any] = dict.fromkeys((dict, OrderedDict), partial(copy_dict, put=_put))
    mapper = GraphMapper({**COPY, **kinds, Object: expanded, Global: shown})
    return mapper.map(value)


def _put(target: dict[Any, Any], key: Any, new: Any, item: Any) -> None:
    try:
        target[key if new in target else new] = item
    except TypeError:  # a key became a list or a dictionary
        target[key] = item


def shown(name: Global) -> Any:
    """A name of torch's as text, which says it all; any other stays a name."""
    return str(name) if is_torch_name(name) else name


def expand(node: Object) -> Any:
    """An object as Python's own value (a container's parts are still nodes); the node itself if it is unknown."""
    make = _VALUES.get(value_word(node.fn))
    try:
        value = make(node) if make is not None else node
    except (CkptoolError, *_MALFORMED):
        return node
    return node if value is NotImplemented else value


def is_one_line(node: Any) -> bool:
    """True for an object that a line says all of: a number, a date, a path, an array, at most eight plain items."""
    if not isinstance(node, Object):
        return False
    value = expand(node)
    parts: Any = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return not isinstance(value, Object) and len(parts) <= 8 and all(type(part) in SCALARS for part in parts)


# From their arguments -------------------------------------------------------------------------------------------------


def _from_arguments(node: Object, levels: int = 3) -> Any:
    """What a function of the table makes from an object's arguments, each of one of the listed types.

    Raises `TypeError` for an object that has more than arguments, or more or deeper nested ones than a date has.
    """
    make, *kinds = _FROM_ARGUMENTS[value_word(node.fn)]
    is_bare = node.state is MISSING or node.state is None or node.state == {}
    if not is_bare or node.kwargs or node.items or node.elements is not None or len(node.args) > 10 or not levels:
        raise TypeError("more than its arguments, or too many")
    args = [_from_arguments(part, levels - 1) if isinstance(part, Object) else part for part in node.args]
    if not all(isinstance(arg, tuple(kinds) or object) for arg in args):
        raise TypeError("an argument of an unexpected kind")
    return make(*args)


def _dated(cls: Callable[..., Any], first: Any, *rest: Any) -> Any:
    """Dates and times are pickled as the bytes of their fields; Python 2 wrote those as text."""
    return cls(first.encode("latin-1") if isinstance(first, str) else first, *rest)


def _fraction(*args: Any) -> Any:
    """Fractions are pickled as `numerator/denominator`. An exponent, which Python reads too, could take all memory."""
    if any(type(arg) is str and (len(arg) > 2_500 or not set(arg) <= set("-0123456789/")) for arg in args):
        raise ValueError("not as it is written")
    from fractions import Fraction  # imports decimal, which hardly any file needs

    return Fraction(*args)


def _timezone(*args: Any) -> Any:
    zone = datetime.timezone(*args)
    return datetime.timezone.utc if zone == datetime.timezone.utc and len(args) == 1 else zone


def _device(kind: Any, index: Any = None, *_: Any) -> Any:
    return str(kind) if index is None else f"{kind}:{index}"


_FROM_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "datetime": (partial(_dated, datetime.datetime),),
    "date": (partial(_dated, datetime.date),),
    "time": (partial(_dated, datetime.time),),
    "timedelta": (datetime.timedelta, int),
    "timezone": (_timezone,),
    "decimal": (lambda *args: import_module("decimal").Decimal(*args), str),
    "fraction": (_fraction, str, int),
    # a path of the other system's kind cannot be made here and becomes a pure one
    "posix path": (pathlib.Path if os.name == "posix" else pathlib.PurePosixPath, str),
    "windows path": (pathlib.Path if os.name != "posix" else pathlib.PureWindowsPath, str),
    "pure posix path": (pathlib.PurePosixPath, str),
    "pure windows path": (pathlib.PureWindowsPath, str),
    "range": (range, int),
    "slice": (slice, int, float, str, type(None)),
    "int": (int, int),
    "float": (float, float, int),
    "bool": (bool, int),
    "str": (str, str),
    "size": (tuple, tuple, list),
    "device": (_device, str, int, type(None)),
    "layout": (str, str),
}

# Containers, configuration, torch and numpy ---------------------------------------------------------------------------


def _listed_items(node: Object) -> Any:
    """The items that a list, a tuple or a deque was made from, and those appended to it."""
    first = node.args[0] if node.args else []
    return [*first, *(node.elements or ())] if isinstance(first, (list, tuple)) else NotImplemented


def _attribute(name: str, *kinds: type) -> Make:
    """Makes the value from the attribute of this name, in which a wrapper keeps its content."""

    def value(node: Object) -> Any:
        held = node.attributes[name]
        return held if isinstance(held, kinds) else NotImplemented

    return value


def _uuid(node: Object) -> Any:
    number = node.attributes["int"]
    if type(number) is not int or node.args:
        raise TypeError("no number")
    from uuid import UUID

    return UUID(int=number)


def _scalar(node: Object) -> Any:
    scalar = array(node)
    values = scalar.values()
    return scalar if values is None else values[0]


_VALUES: dict[str, Make] = {
    **dict.fromkeys(_FROM_ARGUMENTS, _from_arguments),
    "uuid": _uuid,
    "array": array,
    "array scalar": _scalar,
    "array type": lambda node: str(array_type(node)),
    **dict.fromkeys(
        ("namespace", "attributes"),
        lambda node: NotImplemented if node.items or node.elements else dict(node.attributes),
    ),
    **dict.fromkeys(("defaultdict", "items"), lambda node: dict(node.items or {})),
    "elements": lambda node: list(node.elements or ()),
    "items or attributes": lambda node: dict(node.items if node.items is not None else node.attributes),
    "counter": lambda node: {**(node.args[0] if node.args else {}), **(node.items or {})},
    "dict": lambda node: dict(node.items or {}) if not node.args else NotImplemented,
    **dict.fromkeys(("deque", "list"), _listed_items),
    "tuple": lambda node: NotImplemented if (items := _listed_items(node)) is NotImplemented else tuple(items),
    # None and missing values (`???`) stay as they are
    "omegaconf": _attribute("_content", dict, list, str, type(None)),
    "omegaconf node": _attribute("_val", object),
    "mmengine config": _attribute("_cfg_dict", dict, Object),
    "ml_collections": _attribute("_fields", dict, Object),
}

# One line -------------------------------------------------------------------------------------------------------------


def summary(value: Any, width: int = 60) -> str:
    """A printable line for a value of a tree: `0.001`, `'adam'`, `3 items`, `numpy array f64[3, 4]`."""
    text = _summary(expand(value) if isinstance(value, Object) else value, width)
    return text if len(text) <= width else text[: max(1, width - 1)] + "…"


def _summary(value: Any, width: int) -> str:
    match value:
        case str():
            return f"'{printable(value[: width + 1])}'"
        case bytes() | bytearray():
            kind = "Python 2 text" if isinstance(value, ByteString) else type(value).__name__
            return repr(bytes(value)) if len(value) <= 16 else f"{kind} of {len(value):,}"
        case int() if value.bit_length() >= 1024:
            return f"integer of {counted(value.bit_length(), 'bit')}"
        case None | int() | float() | complex():
            return str(value)
        case dict():
            return counted(len(value), "item") if value else "{}"
        case list():
            return _short_list(value, "list", "[", "]", width)
        case tuple():
            return _short_list(value, "tuple", "(", ",)" if len(value) == 1 else ")", width)
        case Set(items=items):
            name = "frozenset" if value.frozen else "set"
            return _short_list(items, name, "{", "}", width) if items else f"empty {name}"
        case Object():
            parts = {"attribute": value.attributes, "item": value.items, "element": value.elements}
            having = " and ".join(counted(len(part), word) for word, part in parts.items() if part)
            kind = {"new": "unknown class ", "call": "unknown call "}.get(value.how, "persistent ")
            arguments = _few(value.args, "(", ")", width) if value.args else ""
            name = ("" if kind_of(value.fn) else kind) + printable(value.name) + arguments
            return f"<{name} with {having}>" if having else f"<{name}>"
        case Array() if value.size == 1 and not value.shape and (numbers := value.values()):
            return printable(f"numpy {value.type} {numbers[0]}")
        case StorageRef():
            return f"{value.dtype or 'untyped'} storage of {value.storage.nbytes:,} bytes"
        case Global() if is_torch_name(value):
            return printable(str(value))
        case TensorEntry() | Composite() | Global() | Array():
            return printable(repr(value)[1:-1])
    return printable(str(value))


def _short_list(items: Sequence[Any], name: str, begin: str, end: str, width: int) -> str:
    """The items if they are few and short, else how many there are."""
    return _few(items, begin, end, width) or f"{name} of {counted(len(items), 'item')}"


def _few(items: Sequence[Any], begin: str, end: str, width: int) -> str:
    """The items if they are few, plain and short, else nothing."""
    is_plain = len(items) <= 8 and all(isinstance(item, (str, int, float, bool, type(None))) for item in items)
    text = f"{begin}{', '.join(_summary(item, width) for item in items)}{end}" if is_plain else ""
    return text if len(text) <= width or not items else ""


# JSON -----------------------------------------------------------------------------------------------------------------

MAX_JSON_DEPTH = 100
MAX_JSON_NODES = 100_000
MAX_JSON_BYTES = 4_096
SHORT = 128  # characters: a text counts as one value for every so many


def to_json(value: Any) -> Any:
    """The value as JSON can say it: keys are texts, NaN and infinities the texts "NaN", "Infinity", "-Infinity".

    Bounded, whatever the value refers to: below 100 levels, and after 100,000 values (a long text counts as several),
    an object `{"...": what}` stands for the rest. Bytes are `{"base64": …}` (`{"bytes": n}` beyond 4 KiB), tensors
    `{"tensor": dtype, "shape": …}`, unknown objects `{"object": name, …}`.
    """
    return to_jsons([value])[0]


def to_jsons(values: Sequence[Any]) -> list[Any]:
    """The same for several values, which are bounded together."""
    writer = _Json(MAX_JSON_NODES + 4 * len(values))
    return [writer.value(plain(value), 0) for value in values]


class _Json:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.long: dict[int, Any] = {}  # by id: what was charged before, and costs more in its other places

    def _affordable(self, value: Any, size: int) -> bool:
        """Charges the cost of a text to the budget; False where that is less."""
        cost = size // (SHORT // 32 if id(value) in self.long else SHORT)
        if cost:
            self.long[id(value)] = value
        if cost > max(0, self.budget):
            return False
        self.budget -= cost
        return True

    def value(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool or (kind is int and value.bit_length() < 1024):
            return value
        if kind is float:
            return value if math.isfinite(value) else _NOT_FINITE.get(value, "NaN")
        if kind is str and self._affordable(value, len(value)):
            return _without_surrogates(value)
        if kind is int and self._affordable(value, value.bit_length() // 4):
            return hex(value)
        self.budget -= kind is not str and kind is not int
        if kind is str or kind is int or depth >= MAX_JSON_DEPTH or self.budget < 0:
            return {"...": summary(value)}
        match value:
            case dict():
                return {self._key(key, value): self.value(item, depth + 1) for key, item in self._capped(value.items())}
            case list() | tuple() | Set():
                items = value.items if isinstance(value, Set) else value
                return [self.value(item, depth + 1) for item in self._capped(items)]
            case bytes() | bytearray():
                small = len(value) <= MAX_JSON_BYTES and self._affordable(value, len(value))
                return {"base64": base64.b64encode(value).decode()} if small else {"bytes": len(value)}
            case complex(real=real, imag=imag):
                return [self.value(real, depth), self.value(imag, depth)]
            case TensorEntry(dtype=dtype, shape=shape) | Composite(dtype=dtype, shape=shape):
                return {"tensor": dtype.name if dtype else None, "shape": None if shape is None else list(shape)}
            case Array(shape=shape):
                facts = {"numpy": str(value.type), "shape": list(shape)}
                numbers = value.values() if value.size <= 64 else None
                if numbers is not None:
                    facts["values"] = self.value(numbers, depth + 1)
                    if value.fortran:
                        facts["order"] = "F"
                return facts
            case Object(args=args, items=items, elements=elements, attributes=state):
                parts = {"args": args, "items": items, "elements": elements, "state": state}
                fields = {name: self.value(part, depth + 1) for name, part in parts.items() if part}
                return {"object": printable(value.name), **fields}
            case StorageRef():
                return summary(value)
        return printable(str(value))

    def _capped(self, values: Any) -> Iterator[Any]:
        for value in values:
            if self.budget < 0:
                return
            self.budget -= 1
            yield value

    def _key(self, key: Any, owner: dict[Any, Any]) -> str:
        if type(key) is str:
            return _without_surrogates(key) if self._affordable(key, len(key)) else summary(key, SHORT)
        text = summary(key, 200) if not isinstance(key, (int, float)) or isinstance(key, bool) else str(key)
        while text in owner:  # 0 beside '0'
            text = f"{text} ({type(key).__name__})"
        return text


_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


def _without_surrogates(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot hold, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
