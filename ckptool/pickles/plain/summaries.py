"""One line that says what a value of a tree is."""

from __future__ import annotations

from typing import Any

from ckptool.checkpoint import Composite, StorageRef, TensorEntry
from ckptool.checkpoint.nodes import ByteString, Global, Object, Set
from ckptool.checkpoint.numpy_arrays import Array
from ckptool.errors import counted, printable
from ckptool.pickles.known import is_torch_name
from ckptool.pickles.plain.names import shown
from ckptool.pickles.plain.objects import expand, is_known


def summary(value: Any, width: int = 60) -> str:
    """One printable line that says what a value of a tree is: `0.001`, `'adam'`, `3 items`, `numpy array f64[3, 4]`."""
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
        return _counted(items) if items else "{}"
    name, begin, end = _brackets(value)
    if not items:
        return f"empty {name}" if isinstance(value, Set) else begin + end
    if len(items) <= 8 and all(isinstance(item, _FLAT) for item in items):
        comma = "," if isinstance(value, tuple) and len(items) == 1 else ""
        text = f"{begin}{', '.join(_summary(item, width) for item in items)}{comma}{end}"
        if len(text) <= width:
            return text
    return f"{name} of {_counted(items)}"


def _brackets(value: Any) -> tuple[str, str, str]:
    if isinstance(value, Set):
        return ("frozenset" if value.frozen else "set"), "{", "}"
    return ("tuple", "(", ")") if isinstance(value, tuple) else ("list", "[", "]")


def _counted(items: Any) -> str:
    return counted(len(items), "item")


def _object(node: Object) -> str:
    named = is_known(node)
    counts = (
        (len(node.attributes), "attribute"),
        (len(node.items or ()), "item"),
        (len(node.elements or ()), "element"),
    )
    having = " and ".join(counted(count, word) for count, word in counts if count)
    kind = (
        ""
        if named
        else "unknown class "
        if node.how == "new"
        else "unknown call "
        if node.how == "call"
        else "persistent "
    )
    return f"<{kind}{printable(node.name)}{' with ' + having if having else ''}>"
