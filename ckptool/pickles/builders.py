"""Builders: the meaning of a known function in pickles, as a function from the arguments of a call to its value.

Here are those of Python's own types, by which pickles make dictionaries, sets, bytes and complex numbers.
Source: the `__reduce__` methods of Python 2.7 to 3.14, and Lib/pickle.py (`save_bytes`, `save_set`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptool.checkpoint.nodes import Global, OrderedDict, Set, check_collisions, is_hashable
from ckptool.errors import LimitExceeded
from ckptool.pickles.strings import StubbedValue, encoded, key_text

Builder = Callable[[tuple[Any, ...]], Any]
"""Makes the value of a known call from its arguments; returns `NotImplemented` for arguments that it does not know."""


class TakesState:
    """What a builder makes of an object without arguments, to be given its state (BUILD): a leaf of the tree."""

    __slots__ = ()

    def fill(self, state: Any) -> None:
        raise NotImplementedError


Spend = Callable[[int], None]
"""Says that a call copies what takes at least so many bytes in a file; see `purse`."""


@dataclass(frozen=True, slots=True)
class PerPickle:
    """A builder whose calls copy what they are given: `build(spend, args)`, with a purse of its own for each pickle."""

    build: Callable[[Spend, tuple[Any, ...]], Any]

    def __call__(self, args: tuple[Any, ...]) -> Any:
        return self.build(lambda _: None, args)


def purse(left: int) -> Spend:
    """The `spend` of a builder that may copy so many bytes; it raises `LimitExceeded` for more than a file can have."""

    def spend(amount: int) -> None:
        nonlocal left
        left -= amount
        if left < 0:
            raise LimitExceeded(
                "one value copied over and over", "The copies would fill the memory; the file is probably malicious."
            )

    return spend


ORDERED_DICT = Global("collections", "OrderedDict")


def _ordered_dict(spend: Spend, args: tuple[Any, ...]) -> Any:
    if not args:
        return OrderedDict()
    pairs = args[0]  # Python 2 gave the items as a list of pairs
    if len(args) != 1 or not isinstance(pairs, list):
        return NotImplemented
    spend(8 * len(pairs))
    if not all(isinstance(p, (list, tuple)) and len(p) == 2 and isinstance(p[0], (str, int, bytes)) for p in pairs):
        return NotImplemented
    check_collisions(pair[0] for pair in pairs)
    made = OrderedDict((key_text(pair[0]), pair[1]) for pair in pairs)
    return made if len(made) == len(pairs) else NotImplemented


def _set(spend: Spend, args: tuple[Any, ...], frozen: bool = False) -> Any:
    if len(args) != 1 or not isinstance(args[0], (list, tuple)):
        return NotImplemented
    spend(2 * len(args[0]))
    return Set(list(args[0]), frozen) if all(map(is_hashable, args[0])) else NotImplemented


def _complex(args: tuple[Any, ...]) -> Any:
    return complex(*args) if len(args) == 2 and all(type(a) is float for a in args) else NotImplemented


def _latin1_bytes(spend: Spend, args: tuple[Any, ...]) -> Any:
    """`_codecs.encode(text, "latin1")`: how protocol 2 spells bytes. Any other codec stays a call."""
    if len(args) != 2 or type(args[0]) not in (str, StubbedValue) or args[1] not in ("latin1", "latin-1"):
        return NotImplemented
    if type(args[0]) is StubbedValue:
        spend(args[0].data.length)
        return (encoded(args[0]) if args[0].kind == "text" else None) or NotImplemented
    spend(len(args[0]))
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        return NotImplemented


def _bytes(args: tuple[Any, ...]) -> Any:
    return NotImplemented if args else b""


def _bytearray(spend: Spend, args: tuple[Any, ...]) -> Any:
    if not args:
        return bytearray()
    data = args[0] if len(args) == 1 else _latin1_bytes(spend, args)
    if type(data) is StubbedValue:
        return StubbedValue(data.data, "bytearray", data.of or data) if data.kind == "bytes" else NotImplemented
    if type(data) is not bytes:
        return NotImplemented
    spend(len(data))
    return bytearray(data)


_BUILTINS: dict[str, Builder] = {
    "set": PerPickle(_set),
    "frozenset": PerPickle(partial(_set, frozen=True)),
    "complex": _complex,
    "bytes": _bytes,
    "bytearray": PerPickle(_bytearray),
}
PLAIN_BUILDERS: dict[Global, Builder] = {
    ORDERED_DICT: PerPickle(_ordered_dict),
    Global("_codecs", "encode"): PerPickle(_latin1_bytes),
    **{Global(module, name): made for module in ("builtins", "__builtin__") for name, made in _BUILTINS.items()},
}
