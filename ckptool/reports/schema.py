"""JSON Schemas of what `--json` prints, from `schemas.yaml`, which says it in short."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ckptool.checkpoint.commands import VERBS, Advice, Command, nearest
from ckptool.checkpoint.registry import Report
from ckptool.errors import NoMatch

Json = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
ANYWHERE = ("error", "results")  # schemas that every command may print
_PLAIN: dict[str, Json] = {
    "any": {},
    "text": {"type": "string"},
    "int": {"type": "integer"},
    "bool": {"type": "boolean"},
    "null": {"type": "null"},
    "object": {"type": "object"},
    "number": {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]},
}


@dataclass(frozen=True, slots=True, repr=False)
class SchemaReport(Report):
    """A JSON Schema; without a verb those that there are: name -> what it holds, and the verbs that print it."""

    document: Json
    names: Mapping[str, tuple[str, tuple[str, ...]]]


@cache
def _tables() -> tuple[Json, dict[str, Json]]:
    """The types, and the schemas by name: `inspect`, of `ckptool.inspect/1`."""
    import yaml

    text = Path(__file__).with_name("schemas.yaml").read_text(encoding="utf-8")
    tables = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tables["types"], tables["schemas"]


def schema(verb: str = "") -> SchemaReport:
    """The schema of what `VERB --json` prints, or of one kind of output: `error`, `ckptool.diff/1`.

    Raises `NoMatch` where there is no such verb.
    """
    _, schemas = _tables()
    names = {name: (each["about"], tuple(each.get("verbs", "").split(", "))) for name, each in schemas.items()}
    if not verb:
        return SchemaReport({}, names)
    word = re.sub(r"^ckptool\.|/\d+$", "", verb)
    printed = [name for name, (_, verbs) in names.items() if word in verbs] if word in VERBS else []
    if not printed and word not in names:
        meant = nearest(word, {*VERBS, *names})
        why = f"Did you mean {meant}?" if meant else ""
        raise NoMatch(f"there is no command or schema {verb!r}", why, _ALL)
    wanted = [*printed, *ANYWHERE] if printed and word == verb else [word]
    used: dict[str, Json] = {}
    for name in wanted:
        _add(name, used)
    of = {"title": f"ckptool {verb} --json"} if printed else {}
    return SchemaReport({"$schema": DRAFT, **of, **_one_of(wanted), "$defs": used}, names)


_ALL = Advice("See all: ", Command(("ckptool", "schema")))


def _one_of(names: list[str]) -> Json:
    references = [{"$ref": f"#/$defs/{name}"} for name in names]
    return {"anyOf": references} if len(references) > 1 else references[0]


def _add(name: str, used: dict[str, Json]) -> None:
    """Adds a schema or type of the tables to those that are used, and all that it refers to."""
    if name in used:
        return
    types, schemas = _tables()
    if name in schemas:
        used[name] = {}  # it may refer to itself
        fields = {"schema": "", **schemas[name].get("fields", {})}
        used[name] |= {"description": schemas[name]["about"], **_object(fields, used)}
        used[name]["properties"]["schema"] = {"const": f"ckptool.{name}/1"}
    else:
        used[name] = {}
        used[name] |= _object(types[name], used) if isinstance(types[name], dict) else _type(types[name], used)


def _object(fields: Mapping[str, str | Mapping[str, Any]], used: dict[str, Json]) -> Json:
    """An object with these fields: `name?` may be missing. A field with fields of its own is an object."""
    kinds = {name: kind for names, kind in fields.items() for name in names.split()}
    properties = {
        name.rstrip("?"): _object(kind, used) if isinstance(kind, Mapping) else _type(kind, used)
        for name, kind in kinds.items()
    }
    required = [name for name in kinds if not name.endswith("?")]
    return {"type": "object", "properties": properties, "required": required}


def _type(text: str, used: dict[str, Json]) -> Json:
    """`TYPE`, `list of TYPE`, `map of TYPE`, `TYPE or TYPE`, `'word'`; a description follows after ` -- `."""
    text, _, about = text.partition(" -- ")
    described = {"description": about} if about else {}
    alternatives = text.split(" or ")
    if len(alternatives) > 1:
        return {"anyOf": [_type(each, used) for each in alternatives], **described}
    if text.startswith("list of "):
        return {"type": "array", "items": _type(text[8:], used), **described}
    if text.startswith("map of "):
        return {"type": "object", "additionalProperties": _type(text[7:], used), **described}
    if text.startswith("'"):
        return {"const": json.loads(text.replace("'", '"')), **described}
    if text in _PLAIN or not text:
        return _PLAIN.get(text, {}) | described
    _add(text, used)
    return {"$ref": f"#/$defs/{text}", **described}
