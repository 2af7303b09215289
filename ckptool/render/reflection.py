"""JSON Schemas of reports, reflected from their classes: the types of the fields, and what their docstrings say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ckptool.analysis.words import NUMBER
from ckptool.checkpoint.dtypes import DType
from ckptool.facts import TEXT, Report, Unit, facts_of, schema_of

Json = dict[str, Any]
_PLAIN = {bool: "boolean", int: "integer", str: "string", NoneType: "null"}


def document(kind: Any, used: Json) -> Json:
    """The schema of what is printed of a report; the types that it refers to are added to `used`."""
    row = _row(kind, used)
    properties = {"schema": {"const": f"ckptool.{schema_of(kind)}"}, **row["properties"]}
    return {"description": about(kind), "type": "object", "properties": properties, "required": list(properties)}


def about(kind: type) -> str:
    """The first sentences of a docstring, before it says what its fields are."""
    return " ".join(re.split(r"\n\n|  ?\b[a-z_, ]+: ", _doc(kind), maxsplit=1)[0].split())


def _doc(kind: type) -> str:
    return (kind.__doc__ or "") if not (kind.__doc__ or "").startswith(f"{kind.__name__}(") else ""


_FIELD = re.compile(r"(?:^|  |\n)\s*([a-z_]+(?:, [a-z_]+)*): ")


def _row(kind: Any, used: Json) -> Json:
    """An object with the facts of a report, a row, or a named tuple."""
    properties = {name: _type(fact.kind, used) for name, fact in facts_of(kind).items()}
    # What a docstring says of each field: `damage: what was wrong.  tensors, records: how many there were.`
    pieces = _FIELD.split(_doc(kind))
    for names, text in zip(pieces[1::2], pieces[2::2], strict=True):
        said = " ".join(text.split()).rstrip(".")
        for name in properties.keys() & names.split(", "):
            unit = properties[name].get("description", "")
            properties[name] |= {"description": f"{said}, {unit}" if unit else said}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _type(hint: Any, used: Json) -> Json:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        unit = next((each for each in inner[1:] if isinstance(each, Unit)), TEXT)
        schema = dict(unit.schema) if unit.schema is not None else _type(inner[0], used)
        return schema | ({"description": unit.about} if unit.about else {})
    if origin in (Union, UnionType):
        return {"anyOf": [_type(each, used) for each in inner]}
    if origin is Literal:
        return {"enum": list(inner)}
    if not isinstance(origin, type) or origin in (Any, object):
        return {}
    if origin in _PLAIN:
        return {"type": _PLAIN[origin]}
    if origin is float:
        return NUMBER
    if issubclass(origin, (str, DType)):
        return {"type": "string"}
    if issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _type(inner[1], used) if inner else {}}
    if is_dataclass(origin) or hasattr(origin, "_fields"):
        return _named(origin, used)
    if issubclass(origin, Enum):
        return {"enum": [each.value for each in origin]}
    items = _type(inner[0], used) if inner and (len(inner) == 1 or inner[1] is ...) else {}
    return {"type": "array", "items": {"type": "string"} if issubclass(origin, tuple) and not inner else items}


def _named(kind: type, used: Json) -> Json:
    """A reference to a type, which is added to those that are used."""
    is_report = issubclass(kind, Report)
    name = schema_of(kind).partition("/")[0] if is_report else kind.__name__
    if name not in used:
        used[name] = {}  # it may refer to itself
        used[name] |= document(kind, used) if is_report else _row(kind, used) | {"description": about(kind)}
    return {"$ref": f"#/$defs/{name}"}
