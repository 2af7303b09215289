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


def _plain(name: str, spend: Spend, args: tuple[Any, ...]) -> Any:
    """The value of a call of a type of Python's, or of `_codecs.encode`."""
    match (name, *args):
        case ["OrderedDict"]:
            return OrderedDict()
        case ["OrderedDict", list(pairs)]:  # Python 2 gave the items as a list of pairs
            spend(8 * len(pairs))
            if all(isinstance(p, (list, tuple)) and len(p) == 2 and isinstance(p[0], (str, int, bytes)) for p in pairs):
                check_collisions(pair[0] for pair in pairs)
                made = OrderedDict((key_text(pair[0]), pair[1]) for pair in pairs)
                return made if len(made) == len(pairs) else NotImplemented
        case ["set" | "frozenset", list() | tuple() as items]:
            spend(2 * len(items))
            return Set(list(items), name == "frozenset") if all(map(is_hashable, items)) else NotImplemented
        case ["complex", float(real), float(imag)]:
            return complex(real, imag)
        case ["encode", str(text), "latin1" | "latin-1"]:  # how protocol 2 spells bytes; any other codec stays a call
            spend(len(text))
            try:
                return text.encode("latin-1")
            except UnicodeEncodeError:
                return NotImplemented
        case ["encode", StubbedValue() as stub, "latin1" | "latin-1"]:
            spend(stub.data.length)
            return (encoded(stub) if stub.kind == "text" else None) or NotImplemented
        case ["bytes"]:
            return b""
        case ["bytearray"]:
            return bytearray()
        case ["bytearray", bytes(content)] if type(content) is bytes:
            spend(len(content))
            return bytearray(content)
        case ["bytearray", StubbedValue(kind="bytes") as stub]:
            return StubbedValue(stub.data, "bytearray", stub.of or stub)
        case ["bytearray", text, codec]:
            return _plain("bytearray", spend, (_plain("encode", spend, (text, codec)),))
    return NotImplemented


PLAIN_BUILDERS: dict[Global, Builder] = {
    ORDERED_DICT: PerPickle(partial(_plain, "OrderedDict")),
    Global("_codecs", "encode"): PerPickle(partial(_plain, "encode")),
    **{
        Global(module, name): PerPickle(partial(_plain, name))
        for module in ("builtins", "__builtin__")
        for name in ("set", "frozenset", "complex", "bytes", "bytearray")
    },
}
