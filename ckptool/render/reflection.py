"""JSON Schemas of reports, reflected from their classes: the types of the fields, and what their docstrings say."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ckptool.checkpoint.dtypes import DType
from ckptool.facts import TEXT, Report, Unit, facts_of, schema_of
from ckptool.render.json import _FACTS, DOCUMENTS, facts_in

Json = dict[str, Any]
NUMBER: Json = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
_PLAIN = {bool: "boolean", int: "integer", str: "string", NoneType: "null"}
# Types whose facts are made by hand: what `schemas.yaml` calls them.
BY_HAND = {"Note": "note", "PartOf": "part", "Diff": "diff"}


def document(kind: Any, used: Json) -> Json:
    """The schema of what is printed of a report; the types that it refers to are added to `used`."""
    schema, names = picked(kind)
    found = _object(kind, names, used) if names is not None else _row(kind, used)
    found["properties"] = {"schema": {"const": f"ckptool.{schema}"}, **found["properties"]}
    return {"description": about(kind), **found, "required": ["schema", *found["required"]]}


def picked(kind: Any) -> tuple[str, str | None]:
    """The name and version of a report's schema, and which facts it prints, where those are not all of its own."""
    named = next(((f"{name}/1", names) for name, (report, names) in DOCUMENTS.items() if report is kind), None)
    return named or (schema_of(kind), None)


def about(kind: type) -> str:
    """The first sentences of a docstring, before it says what its fields are."""
    return " ".join(re.split(r"\n\n|  ?\b[a-z_, ]+: ", _doc(kind), maxsplit=1)[0].split())


def _doc(kind: type) -> str:
    return (kind.__doc__ or "") if not (kind.__doc__ or "").startswith(f"{kind.__name__}(") else ""


_FIELD = re.compile(r"(?:^|  |\n)\s*([a-z_]+(?:, [a-z_]+)*): ")


@cache
def _said(kind: type) -> dict[str, str]:
    """What a docstring says of each field: `damage: what was wrong.  tensors, records: how many there were.`"""
    pieces = _FIELD.split(_doc(kind))
    texts = zip(pieces[1::2], pieces[2::2], strict=True)
    return {name: " ".join(text.split()).rstrip(".") for names, text in texts for name in names.split(", ")}


def _object(kind: Any, names: str, used: Json) -> Json:
    properties: Json = {}
    for key, path, or_null, columns in facts_in(kind, names):
        hint, nullable = kind, bool(or_null)
        for name in path:
            sides = [each for each in _sides(hint) if each is not NoneType]
            nullable |= len(sides) < len(_sides(hint))
            hint = _hint(sides[0], name)
        found = _columns(hint, columns.split(","), used) if columns else _type(hint, used)
        found = {"anyOf": [found, {"type": "null"}]} if nullable else found
        said = _said(kind).get(path[-1]) if len(path) == 1 else None
        properties[key] = found | ({"description": said} if said else {})
    return {"type": "object", "properties": properties, "required": list(properties)}


def _row(kind: Any, used: Json) -> Json:
    """An object with the facts of a report, a row, or a named tuple."""
    properties = {name: _type(fact.kind, used) for name, fact in facts_of(kind).items()}
    for name, said in _said(kind).items():
        if name in properties:
            unit = properties[name].get("description", "")
            properties[name] |= {"description": f"{said}, {unit}" if unit else said}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _sides(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _hint(kind: Any, name: str) -> Any:
    """The type of an attribute: a field, or what a property returns."""
    found = getattr(kind, name, None)
    if isinstance(found, property):
        return get_type_hints(found.fget, _classes(), _classes())["return"]
    return get_type_hints(kind, localns=_classes())[name]


@cache
def _classes() -> dict[str, Any]:
    """Every class of ours by its name: modules import some for checkers of types alone."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("ckptool.")]
    public = {"Any": Any, "Mapping": Mapping}
    return public | {k: v for m in modules for k, v in vars(m).items() if not k.startswith("_") and _is_type(v)}


def _is_type(value: Any) -> bool:
    return isinstance(value, type) or get_origin(value) is not None


def _columns(hint: Any, names: list[str], used: Json) -> Json:
    """Objects with these keys: of pairs, or of the items of a dictionary."""
    kinds = get_args(hint) if issubclass(get_origin(hint), Mapping) else get_args(get_args(hint)[0])
    properties = {name: _type(kind, used) for name, kind in zip(names, kinds, strict=True)}
    return {"type": "array", "items": {"type": "object", "properties": properties, "required": names}}


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
    if kind.__name__ in BY_HAND:
        used.setdefault(BY_HAND[kind.__name__], {})
        return {"$ref": f"#/$defs/{BY_HAND[kind.__name__]}"}
    is_report = issubclass(kind, Report)
    name = picked(kind)[0].partition("/")[0] if is_report else kind.__name__
    if name not in used:
        used[name] = {}  # it may refer to itself
        old = DOCUMENTS.get(name) or kind in _FACTS
        row = _object(kind, "", used) if old else _row(kind, used)
        used[name] |= document(kind, used) if is_report else row | {"description": about(kind)}
    return {"$ref": f"#/$defs/{name}"}
