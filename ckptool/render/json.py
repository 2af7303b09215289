"""Reports as JSON: one object with a versioned schema, strictly valid, stable from run to run.

NaN and infinities are texts; what is not ASCII is escaped, so no control character of a file passes raw. Keys are in
the order below.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from ckptool.checkpoint import PartOf
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.registry import Report, provides
from ckptool.errors import printable
from ckptool.facts import facts_of, schema_of

Json = dict[str, Any]


def dumps(value: Any) -> str:
    """The one way in which everything here is written."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


def finite(value: Any) -> Any:
    """Plain facts with NaN and infinities as the texts "NaN", "Infinity", "-Infinity", and tuples as lists.

    Of a report what it prints itself, of any other dataclass its fields.
    """
    if type(value) in (str, int, bool):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return facts_json(value) if hasattr(value, "_fields") else [finite(item) for item in value]
    if isinstance(value, Report):
        return value.to_dict()
    if isinstance(value, PartOf):
        return part_json(value)
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Enum):
        return value.value
    told = _FACTS.get(type(value), "")
    if told:
        return told(value) if callable(told) else fields_json(value)
    return facts_json(value) if is_dataclass(value) else value


def facts_json(value: Any) -> Json:
    """The facts of a report or row: its fields and properties, those of a unit with its own JSON in that form."""
    return {
        name: finite(fact) if unit.json is None or fact is None else unit.json(fact)
        for name, (_, unit) in facts_of(type(value)).items()
        for fact in (getattr(value, name),)
    }


@provides("json", Report)
def report_json(report: Report) -> Json:
    """What `--json` prints: the schema, then the facts."""
    return {"schema": f"ckptool.{schema_of(type(report))}", **facts_json(report)}


class Pick(NamedTuple):
    key: str
    names: list[str]
    or_null: str
    columns: str


_FACTS: dict[type, str | Callable[[Any], Json]] = {}  # of types whose facts are not all of their fields
DOCUMENTS: dict[str, tuple[type, str]] = {}  # schema -> the report, and the names of its facts
_FACT = re.compile(r"(?:(\w+)=)?([\w.]+)(\??)(?::([\w,]+))?")


def fields_json(value: Any, names: str = "") -> Json:
    """The attributes of these names, else all fields of a dataclass, as plain facts.

    `key=name` has another key; `key=name.name` is an attribute of an attribute, null where that is none; `name?` is
    null where it is empty; `name:key,key` are objects with the values of each pair; `*` stands for all fields.
    """
    found: Json = {}
    kind: Any = type(value)
    for key, path, or_null, columns in facts_in(kind, names):
        fact = value
        for name in path:
            fact = None if fact is None else getattr(fact, name)
        if columns:
            rows = fact.items() if isinstance(fact, dict) else fact
            found[key] = [dict(zip(columns.split(","), finite(row), strict=True)) for row in rows]
        else:
            found[key] = finite(fact or None if or_null else fact)
    return found


@cache
def facts_in(kind: Any, names: str = "") -> tuple[Pick, ...]:
    """The facts that are printed of a type, by these names, as `fields_json` takes them, or by those said for it."""
    text = str(names or _FACTS.get(kind, "*")).replace("*", " ".join(field.name for field in fields(kind)))
    matches = [match for word in text.split() if (match := _FACT.fullmatch(word))]
    return tuple(Pick(match[1] or match[2], match[2].split("."), match[3], match[4] or "") for match in matches)


def picked_of(kind: type, facts: str | Callable[[Any], Json]) -> None:
    """Says which facts of values of a type are printed, wherever they stand: names as `fields_json` takes them, or what
    a function gives."""
    _FACTS[kind] = facts


def document(kind: type, schema: str, names: str = "") -> None:
    """Says what `--json` prints for a report: the schema, and facts of these names, as `fields_json` takes them."""
    DOCUMENTS[schema] = kind, names
    provides("json", kind)(lambda found: {"schema": f"ckptool.{schema}/1", **fields_json(found, names)})


def part_json(part: PartOf | None) -> Json | None:
    """Of what a checkpoint is only a part: None for a whole one."""
    if part is None:
        return None
    facts = fields_json(part, "meaning number count whole?")
    return {"kind": part.kind.value, "label": printable(part.label), **facts}


def results_json(results: Sequence[Json]) -> Json:
    """One result as it is; several as `ckptool.results/2`."""
    return results[0] if len(results) == 1 else {"schema": "ckptool.results/2", "results": list(results)}
