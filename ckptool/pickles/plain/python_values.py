"""Values of Python's own classes: dates, numbers, paths, UUIDs, ranges and slices, made of what their pickles say.

Source: their `__reduce__` methods in the standard library, Python 3.8 to 3.14.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import os
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

from ckptool.checkpoint.nodes import MISSING, Object, canonical
from ckptool.errors import Corrupt, printable


def python_value(node: Any) -> Any:
    """The date, number, path, UUID, range or slice that an object stands for; `NotImplemented` for anything else.

    Raises `Corrupt` where the class is known and its arguments are not what it writes.
    """
    make = VALUES.get(canonical(node.fn)) if isinstance(node, Object) else None
    if make is None or node.kwargs or node.items or node.elements is not None:
        return NotImplemented
    try:
        _check_arguments(node)
        return make(node)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
        raise Corrupt(
            f"{printable(node.name)} with arguments that it never writes", "The pickle was damaged, or made to mislead."
        ) from None


def _check_arguments(node: Object, levels: int = 3) -> None:
    """Raises `TypeError` for more arguments than these classes have, or arguments in arguments deeper than a time zone in a date."""
    if not levels or type(node.args) is not tuple or len(node.args) > 10:
        raise TypeError("more arguments than it has")
    for part in node.args:
        if isinstance(part, Object):
            _check_arguments(part, levels - 1)


def stateless(node: Object) -> tuple[Any, ...]:
    """The arguments of an object that has no state; raises `TypeError` for one that has."""
    if node.state is not MISSING and node.state is not None and node.state != {}:
        raise TypeError("a state")
    return tuple(_argument(part) for part in node.args)


def _argument(part: Any) -> Any:
    value = python_value(part) if isinstance(part, Object) else part
    if value is NotImplemented:
        raise TypeError("an argument of another kind")
    return value


def _of_bytes(cls: Callable[..., Any]) -> Callable[[Object], Any]:
    """Dates and times are pickled as the bytes of their fields; Python 2 wrote those as text."""

    def make(node: Object) -> Any:
        first, *rest = stateless(node)
        return cls(first.encode("latin-1") if isinstance(first, str) else first, *rest)

    return make


def _of_arguments(cls: Callable[..., Any], *kinds: type) -> Callable[[Object], Any]:
    def make(node: Object) -> Any:
        args = stateless(node)
        if not all(isinstance(arg, kinds) for arg in args):
            raise TypeError("an argument of another kind")
        return cls(*args)

    return make


def _fraction(node: Object) -> Any:
    """Fractions are pickled as `numerator/denominator`. An exponent, which Python would also read, could take all memory."""
    args = stateless(node)
    if any(type(arg) is str and (len(arg) > 2_500 or not set(arg) <= set("-0123456789/")) for arg in args):
        raise ValueError("not as it is written")
    return _of_arguments(fractions.Fraction, str, int)(node)


def _timezone(node: Object) -> Any:
    zone = datetime.timezone(*stateless(node))
    return datetime.timezone.utc if zone == datetime.timezone.utc and len(node.args) == 1 else zone


def _uuid(node: Object) -> Any:
    number = node.attributes["int"]
    if type(number) is not int or node.args:
        raise TypeError("no number")
    return uuid.UUID(int=number)


def _path(posix: bool, pure: bool) -> Callable[[Object], Any]:
    """A path of the other system's kind cannot be made here, and is a pure one."""
    native = not pure and posix == (os.name == "posix")
    cls = pathlib.Path if native else pathlib.PurePosixPath if posix else pathlib.PureWindowsPath
    return _of_arguments(cls, str)


def _primitive(cls: Callable[..., Any], *kinds: type) -> Callable[[Object], Any]:
    def make(node: Object) -> Any:
        args = stateless(node)
        if len(args) > 1 or not all(type(arg) in kinds for arg in args):
            return NotImplemented
        return cls(*args)

    return make


VALUES: dict[str, Callable[[Object], Any]] = {
    "datetime.datetime": _of_bytes(datetime.datetime),
    "datetime.date": _of_bytes(datetime.date),
    "datetime.time": _of_bytes(datetime.time),
    "datetime.timedelta": _of_arguments(datetime.timedelta, int),
    "datetime.timezone": _timezone,
    "decimal.Decimal": _of_arguments(decimal.Decimal, str),
    "fractions.Fraction": _fraction,
    "uuid.UUID": _uuid,
    "pathlib.PosixPath": _path(posix=True, pure=False),
    "pathlib.WindowsPath": _path(posix=False, pure=False),
    "pathlib.PurePosixPath": _path(posix=True, pure=True),
    "pathlib.PureWindowsPath": _path(posix=False, pure=True),
    "builtins.range": _of_arguments(range, int),
    "builtins.xrange": _of_arguments(range, int),
    "builtins.slice": _of_arguments(slice, int, float, str, type(None)),
    "builtins.int": _primitive(int, int),
    "builtins.long": _primitive(int, int),
    "builtins.float": _primitive(float, float, int),
    "builtins.bool": _primitive(bool, bool, int),
    "builtins.str": _primitive(str, str),
    "builtins.unicode": _primitive(str, str),
    "torch.torch_version.TorchVersion": _primitive(str, str),
}
