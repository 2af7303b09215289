"""How a value of a checkpoint is said: in a line for people, and in JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from ckptool.checkpoint import Composite, Tensor, TensorEntry
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.tree import Path, segment_text
from ckptool.errors import printable
from ckptool.facts import Unit

if TYPE_CHECKING:
    from ckptool.analysis.inspect import PartSummary

Json = dict[str, Any]
FEW = 1_000  # elements up to which all of a tensor is read


def tensor_text(tensor: Tensor, part: PartSummary | None = None) -> str:
    """`f32 [64, 3, 7, 7]`, with what is unusual about it."""
    kind = "" if isinstance(tensor, TensorEntry) else f"{printable(tensor.kind)} "
    shape = "" if tensor.shape is None else str(list(tensor.shape))
    is_odd = tensor.location != "cpu" and (part is None or len(part.locations) > 1)
    text = f"{kind}{tensor.dtype.name if tensor.dtype else '?'} {shape}".rstrip()
    return text + (f", {printable(tensor.location)}" if is_odd else "")


def value_text(value: Any, width: int | None = 60) -> str:
    """A value of a file in one line. Small dictionaries are written out."""
    if value is None or type(value) in (bool, float) or (type(value) is int and value.bit_length() < 1024):
        return str(value)
    from ckptool.pickles.plain import plain, summary

    if isinstance(value, Object):
        value = plain(value)
    if width is not None and isinstance(value, dict) and 0 < len(value) <= 8:
        text = ", ".join(f"{printable(segment_text(key))}: {summary(item, 24)}" for key, item in value.items())
        if len(text) <= width:
            return f"{{{text}}}"
    return summary(value, width or 1_000_000)


def array_text(values: Any, width: int | None, is_cut: bool) -> str:
    """An array as numpy prints it.  is_cut: it is the corners of a larger one."""
    import numpy

    from ckptool.checkpoint.strided import EDGE

    limit, edge = 0 if is_cut else values.size + 1, EDGE if values.ndim <= 2 else 2
    return numpy.array2string(values, threshold=limit, edgeitems=edge, max_line_width=width or 120, separator=", ")


def entry_text(value: Any) -> str:
    """A tensor or another value in one line."""
    return tensor_text(value) if isinstance(value, (TensorEntry, Composite)) else value_text(value)


def type_name(value: Any) -> str:
    """The kind of value of an entry: `int`, `dict`, `argparse.Namespace`."""
    return printable(value.name) if isinstance(value, Object) else type(value).__name__


# JSON -----------------------------------------------------------------------------------------------------------------


def path_json(path: Path) -> list[Any]:
    """A path as a list: texts and integers as they are, other keys as texts."""
    from ckptool.pickles.plain import summary

    return [segment if type(segment) in (str, int) else summary(segment, 1_000) for segment in path]


def value_json(value: Any) -> Any:
    """A value as JSON can say it, bounded; see `pickles.plain.to_json`."""
    from ckptool.pickles.plain import to_json

    return to_json(value)


def tensor_json(tensor: Tensor, storage: int | None = None) -> Json:
    """One tensor: shape, stride and offset count elements; a composite has a `kind` and no stride."""
    fact: Json = {
        "dtype": tensor.dtype.name if tensor.dtype else None,
        "shape": None if tensor.shape is None else list(tensor.shape),
        "stride": None,
        "offset": None,
        "location": tensor.location,
        "storage": storage,
        "nbytes": tensor.nbytes,
    }
    if not isinstance(tensor, TensorEntry):
        return fact | {"kind": tensor.kind}
    fact["stride"], fact["offset"] = list(tensor.stride), tensor.offset
    fact |= {name: True for name, value in tensor.flags._asdict().items() if value} if any(tensor.flags) else {}
    return fact


def optional(schema: Json) -> Json:
    """The schema of what may be null."""
    return {"anyOf": [schema, {"type": "null"}]}


def several(schema: Json) -> Json:
    """The schema of a list."""
    return {"type": "array", "items": schema}


def fields(required: Json, more: Json | None = None) -> Json:
    """The schema of an object.  more: of fields that may be missing."""
    return {"type": "object", "properties": required | (more or {}), "required": list(required)}


INTEGER, TEXT, TRUE = {"type": "integer"}, {"type": "string"}, {"const": True}
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
PATH = several({"anyOf": [TEXT, INTEGER]})
SAID = "plain; bytes, tensors, objects and what is too large are objects with `base64`, `tensor`, `object`, `...`"
VALUE = {"description": SAID}
TENSOR = {
    "dtype": optional(TEXT),
    "shape": optional(several(INTEGER)),
    "stride": optional(several(INTEGER)) | {"description": "in elements; null for what has parts, and a `kind`"},
    "offset": optional(INTEGER) | {"description": "in elements"},
    "location": TEXT | {"description": "device tag"},
    "storage": optional(INTEGER) | {"description": "number of its storage; tied tensors have the same"},
    "nbytes": INTEGER,
}
TENSOR_ALSO = {"kind": TEXT, "conj": TRUE, "neg": TRUE, "requires_grad": TRUE, "parameter": TRUE}
PathFact = Annotated[Path, Unit(json=path_json, schema=PATH)]
Value = Annotated[Any, Unit(json=value_json, schema={}, about=SAID)]
