"""Renders `show` as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckptool.analysis.show import Shown
from ckptool.checkpoint import Composite, TensorEntry
from ckptool.checkpoint.nodes import Object, Set
from ckptool.checkpoint.registry import provides
from ckptool.checkpoint.tree import segment_text, walk
from ckptool.errors import counted, printable
from ckptool.facts import size
from ckptool.pickles.plain.text import to_json
from ckptool.render.json import Json, finite, tensor_json, type_name
from ckptool.render.style import PLAIN, Style, tensor_text, value_text

SHOWN_LINES = 1_000
WIDEST = 10_000  # characters of one value below the one that is shown


@provides("text", Shown)
def show_text(shown: Shown, *, all: bool = False, style: Style = PLAIN) -> str:
    """One entry of a file: a tensor's type, shape and values, or a plain value, with everything below it."""
    entry = shown.entry
    name = printable(shown.address) or printable(shown.file)
    if isinstance(entry, (TensorEntry, Composite)):
        part = f"[{printable(shown.slice)}]" if shown.slice else ""
        head = f"{style.bold(name)}{part}: {tensor_text(entry)}, {size(entry.nbytes)}"
        return f"{head}\n{_array_text(shown, style)}" if shown.values is not None else f"{head}\n"
    return "\n".join(_value_lines(entry, SHOWN_LINES if not all else None)) + "\n"


def _array_text(shown: Shown, style: Style) -> str:
    import numpy

    values = shown.values
    assert values is not None
    limit = 0 if shown.edges else values.size + 1
    edge = 3 if values.ndim <= 2 else 2
    text = numpy.array2string(
        values, threshold=limit, edgeitems=edge, max_line_width=style.width or 120, separator=", "
    )
    return text + "\n" + ("… stands for values that were not read; --all reads them\n" if shown.edges else "")


def _value_lines(value: Any, limit: int | None) -> Iterable[str]:
    from ckptool.checkpoint.numpy_arrays import Array
    from ckptool.pickles.plain.values import plain

    value = plain(value)
    if isinstance(value, str):
        yield from (printable(line) for line in value.split("\n"))
        return
    if isinstance(value, Array):
        yield value_text(value, None)
        items = value.values(limit)
        if items is not None:
            left = value.size - len(items)
            yield ", ".join(value_text(item, None) for item in items) + (f" and {left:,} more" if left else "")
        return
    if not isinstance(value, (dict, list, tuple, Set, Object)) or not value:
        yield value_text(value, None)
        return
    for count, (path, node) in enumerate(walk(value)):
        if limit is not None and count > limit:
            yield "… and more (--all)"
            return
        if path:
            below = isinstance(node, (dict, list, tuple)) and node and not _flat(node)
            if len(path) > 1 and _inside_flat(value, path):
                continue
            label = "  " * (len(path) - 1) + (printable(segment_text(path[-1])) or "''")
            yield f"{label}:" if below else f"{label}: {_entry_text(node, limit)}"


def _entry_text(value: Any, limit: int | None) -> str:
    """A value below the one that is shown; unless everything is wanted, only the size of a text of many lines."""
    if isinstance(value, str) and limit is not None and value.count("\n") > 3:
        return f"a text of {counted(value.count(chr(10)), 'line')}"
    return value_text(value, None if limit is None else WIDEST)


def _flat(node: Any) -> bool:
    """True for a short list of scalars, which is shown in one line."""
    return (
        isinstance(node, (list, tuple))
        and len(node) <= 8
        and all(x is None or isinstance(x, (str, int, float)) for x in node)
    )


def _inside_flat(value: Any, path: Sequence[Any]) -> bool:
    for segment in path[:-1]:
        try:
            value = value[segment]
        except (TypeError, LookupError):
            return False
    return _flat(value)


# JSON -----------------------------------------------------------------------------------------------------------------


@provides("json", Shown)
def show_json(shown: Shown) -> Json:
    """`ckptool.show/1`: a tensor with its values as nested lists (none if only corners were read), or a value."""
    head: Json = {"schema": "ckptool.show/1", "file": shown.file, "address": shown.address}
    entry = shown.entry
    if not isinstance(entry, (TensorEntry, Composite)):
        return head | {"type": type_name(entry), "value": to_json(entry)}
    head |= {"tensor": tensor_json((), entry, None), "slice": shown.slice, "truncated": shown.edges}
    del head["tensor"]["path"], head["tensor"]["storage"]
    return head | {"values": None if shown.values is None or shown.edges else values_json(shown.values)}


def values_json(values: Any) -> Any:
    """A numpy array as nested lists; complex numbers as [real, imaginary], bf16 and float8 as numbers."""
    if values.dtype.kind == "V":
        values = values.astype("f4")
    if values.dtype.kind != "c":
        return finite(values.tolist())
    import numpy

    return finite(numpy.stack([values.real, values.imag], axis=-1).tolist())
