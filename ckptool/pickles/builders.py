"""Builders: the meaning of a known function in pickles, as a function from the arguments of a call to its value.

Here are those of Python's own types, by which pickles make dictionaries, sets, bytes and complex numbers.
Source: the `__reduce__` methods of Python 2.7 to 3.14, and Lib/pickle.py (`save_bytes`, `save_set`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint.nodes import Global, OrderedDict, Set, check_collisions, is_hashable
from ckptool.errors import LimitExceeded
from ckptool.pickles.strings import StubbedValue, encoded, key_text

Builder = Callable[[tuple[Any, ...]], Any]
"""Makes the value of a known call from its arguments; returns `NotImplemented` for arguments that it does not know."""


@dataclass(frozen=True, slots=True)
class PerPickle:
    """A builder whose calls copy what they are given. It is made anew for each pickle: `make(spend)`.

    `spend(n)` says that a call copies what takes at least `n` bytes in a file; it raises `LimitExceeded` when that is
    more than the file can have: the same value is copied again and again.
    """

    make: Callable[[Callable[[int], None]], Builder]

    def __call__(self, args: tuple[Any, ...]) -> Any:
        return self.make(lambda _: None)(args)


def purse(left: int) -> Callable[[int], None]:
    """The `spend` of a builder that may copy so many bytes."""

    def spend(amount: int) -> None:
        nonlocal left
        left -= amount
        if left < 0:
            raise LimitExceeded(
                "one value made into others again and again",
                "It would fill the memory; the file is probably malicious.",
            )

    return spend


ORDERED_DICT = Global("collections", "OrderedDict")


def _ordered_dict(spend: Callable[[int], None]) -> Callable[[tuple[Any, ...]], Any]:
    def build(args: tuple[Any, ...]) -> Any:
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

    return build


def _set(frozen: bool) -> Callable[[Callable[[int], None]], Callable[[tuple[Any, ...]], Any]]:
    def make(spend: Callable[[int], None]) -> Callable[[tuple[Any, ...]], Any]:
        def build(args: tuple[Any, ...]) -> Any:
            if len(args) != 1 or not isinstance(args[0], (list, tuple)):
                return NotImplemented
            spend(2 * len(args[0]))
            return Set(list(args[0]), frozen) if all(map(is_hashable, args[0])) else NotImplemented

        return build

    return make


def _complex(args: tuple[Any, ...]) -> Any:
    return complex(*args) if len(args) == 2 and all(type(a) is float for a in args) else NotImplemented


def _latin1_bytes(spend: Callable[[int], None]) -> Callable[[tuple[Any, ...]], Any]:
    """`_codecs.encode(text, "latin1")`: how protocol 2 spells bytes. Any other codec stays a call."""

    def build(args: tuple[Any, ...]) -> Any:
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

    return build


def _bytes(args: tuple[Any, ...]) -> Any:
    return NotImplemented if args else b""


def _bytearray(spend: Callable[[int], None]) -> Callable[[tuple[Any, ...]], Any]:
    encode = _latin1_bytes(spend)

    def build(args: tuple[Any, ...]) -> Any:
        if not args:
            return bytearray()
        data = args[0] if len(args) == 1 else encode(args)
        if type(data) is StubbedValue:
            return StubbedValue(data.data, "bytearray", data.of or data) if data.kind == "bytes" else NotImplemented
        if type(data) is not bytes:
            return NotImplemented
        spend(len(data))
        return bytearray(data)

    return build


PLAIN_BUILDERS: dict[Global, Builder | PerPickle] = {
    ORDERED_DICT: PerPickle(_ordered_dict),
    Global("_codecs", "encode"): PerPickle(_latin1_bytes),
    **{Global(module, "set"): PerPickle(_set(False)) for module in ("builtins", "__builtin__")},
    **{Global(module, "frozenset"): PerPickle(_set(True)) for module in ("builtins", "__builtin__")},
    **{Global(module, "complex"): _complex for module in ("builtins", "__builtin__")},
    **{Global(module, "bytes"): _bytes for module in ("builtins", "__builtin__")},
    **{Global(module, "bytearray"): PerPickle(_bytearray) for module in ("builtins", "__builtin__")},
}
