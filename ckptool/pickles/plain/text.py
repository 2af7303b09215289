"""Values for people and programs: a line of text, and JSON that is bounded whatever a value refers to."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.checkpoint import Composite, StorageRef, TensorEntry
from ckptool.checkpoint.nodes import ByteString, Global, Object, Set
from ckptool.checkpoint.numpy_arrays import Array
from ckptool.errors import counted, printable
from ckptool.pickles.known import is_torch_name
from ckptool.pickles.plain.values import expand, is_known, plain, shown

# One line -------------------------------------------------------------------------------------------------------------


def summary(value: Any, width: int = 60) -> str:
    """A printable line that says what a value of a tree is: `0.001`, `'adam'`, `3 items`, `numpy array f64[3, 4]`."""
    text = _summary(expand(value) if isinstance(value, Object) else value, width)
    return text if len(text) <= width else text[: max(1, width - 1)] + "…"


def _summary(value: Any, width: int) -> str:
    if isinstance(value, str):
        return f"'{printable(value[: width + 1])}'"
    if isinstance(value, (bytes, bytearray)):
        kind = "Python 2 text" if isinstance(value, ByteString) else type(value).__name__
        return repr(bytes(value)) if len(value) <= 16 else f"{kind} of {len(value):,}"
    if value is None or isinstance(value, (bool, float, complex)):
        return str(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() < 1024 else f"integer of {counted(value.bit_length(), 'bit')}"
    if isinstance(value, (dict, list, tuple, Set)):
        return _container(value, width)
    if isinstance(value, Object):
        return _object(value)
    if isinstance(value, (TensorEntry, Composite)):
        return printable(repr(value)[1:-1])
    if isinstance(value, StorageRef):
        return f"{value.dtype or 'untyped'} storage of {value.storage.nbytes:,} bytes"
    if isinstance(value, Global):
        return printable(shown(value) if is_torch_name(value) else repr(value)[1:-1])
    if isinstance(value, Array):
        found = value.values() if value.size == 1 and not value.shape else None
        return printable(f"numpy {value.type} {found[0]}" if found else repr(value)[1:-1])
    return printable(str(value))


_FLAT = (str, int, float, bool, type(None))


def _container(value: Any, width: int) -> str:
    items = value.items if isinstance(value, Set) else value
    if isinstance(value, dict):
        return counted(len(items), "item") if items else "{}"
    name, begin, end = ("tuple", "(", ")") if isinstance(value, tuple) else ("list", "[", "]")
    if isinstance(value, Set):
        name, begin, end = "frozenset" if value.frozen else "set", "{", "}"
    if not items:
        return f"empty {name}" if isinstance(value, Set) else begin + end
    if len(items) <= 8 and all(isinstance(item, _FLAT) for item in items):
        comma = "," if isinstance(value, tuple) and len(items) == 1 else ""
        text = f"{begin}{', '.join(_summary(item, width) for item in items)}{comma}{end}"
        if len(text) <= width:
            return text
    return f"{name} of {counted(len(items), 'item')}"


def _object(node: Object) -> str:
    counts = (
        (len(node.attributes), "attribute"),
        (len(node.items or ()), "item"),
        (len(node.elements or ()), "element"),
    )
    having = " and ".join(counted(count, word) for count, word in counts if count)
    kind = "" if is_known(node) else {"new": "unknown class ", "call": "unknown call "}.get(node.how, "persistent ")
    return f"<{kind}{printable(node.name)}{' with ' + having if having else ''}>"


# JSON -----------------------------------------------------------------------------------------------------------------

MAX_JSON_DEPTH = 100
MAX_JSON_NODES = 100_000
MAX_JSON_BYTES = 4_096
MAX_JSON_REPEATED = 4 << 20  # characters of what stands there already
SHORT = 256


def to_json(value: Any) -> Any:
    """The value as JSON can say it: keys are texts, NaN and infinities the texts "NaN", "Infinity", "-Infinity".

    Bounded, whatever the value refers to: below 100 levels, and after 100,000 values, an object `{"...": what}` stands
    for the rest. Bytes are `{"base64": …}` (`{"bytes": n}` beyond 4 KiB), tensors `{"tensor": dtype, "shape": …}`,
    unknown objects `{"object": name, …}`.
    """
    return to_jsons([value])[0]


def to_jsons(values: Sequence[Any]) -> list[Any]:
    """The same for several values, which are bounded together."""
    writer = _Json(MAX_JSON_NODES + 4 * len(values))
    return [writer.value(plain(value), 0) for value in values]


class _Json:
    def __init__(self, left: int) -> None:
        self.left = left
        self.repeated = MAX_JSON_REPEATED
        self.written: dict[int, Any] = {}  # long texts and numbers, by id (and kept alive for it)

    def _affordable(self, value: Any, size: int) -> bool:
        """False for a long text or number that was written before, once such repetitions have come to too much."""
        if size <= SHORT:
            return True
        if id(value) in self.written:
            self.repeated -= size
        self.written[id(value)] = value
        return self.repeated >= 0

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
        self.left -= kind is not str and kind is not int
        if kind is str or kind is int or depth >= MAX_JSON_DEPTH or self.left < 0:
            return {"...": summary(value)}
        match value:
            case dict():
                return {self._key(key, value): self.value(item, depth + 1) for key, item in self._some(value.items())}
            case list() | tuple() | Set():
                items = value.items if isinstance(value, Set) else value
                return [self.value(item, depth + 1) for item in self._some(items)]
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
                    facts |= {"order": "F"} if value.fortran else {}
                return facts
            case Object(args=args, items=items, elements=elements, attributes=state):
                parts = {"args": args, "items": items, "elements": elements, "state": state}
                said = {name: self.value(part, depth + 1) for name, part in parts.items() if part}
                return {"object": printable(value.name), **said}
            case StorageRef():
                return summary(value)
        return printable(str(value))

    def _some(self, values: Any) -> Iterator[Any]:
        for value in values:
            if self.left < 0:
                return
            self.left -= 1
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
    """Lone surrogates cannot be written as UTF-8: they become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
