"""`schema`: the JSON Schema of what a command prints with `--json`."""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args

from ckptool import render
from ckptool.checkpoint.registry import provides
from ckptool.commands import VERBS, Advice, Command, function_name, module_of, nearest
from ckptool.errors import NoMatch
from ckptool.facts import Report, schema_of
from ckptool.options import argument, signature_of, verb
from ckptool.render.json import DOCUMENTS
from ckptool.render.reflection import BY_HAND, about, document, picked
from ckptool.render.style import PLAIN, Style

Json = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
ANYWHERE = ("error", "results")  # schemas that every command may print
_ALL = Advice("See all: ", Command(("ckptool", "schema")))
_SIMPLE: dict[str, Json] = {
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


@verb(
    ("ckptool schema inspect", "what inspect --json prints"),
    ("ckptool schema error", "what any command prints when it fails"),
)
def schema(
    verb: Annotated[
        str, argument("[VERB]", "A command, or a schema such as error or ckptool.diff/1. Without it: list all.")
    ] = "",
) -> SchemaReport:
    """The schema of what `VERB --json` prints, or of one kind of output: `error`, `ckptool.diff/1`.

    Raises `NoMatch` where there is no such verb.
    """
    names = _names()
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
    references = [{"$ref": f"#/$defs/{name}"} for name in wanted]
    of = {"title": f"ckptool {verb} --json"} if printed else {}
    whole = {"anyOf": references} if len(references) > 1 else references[0]
    return SchemaReport({"$schema": DRAFT, **of, **whole, "$defs": used}, names)


@cache
def _names() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Every schema: what it holds, and the verbs that print it."""
    for module in pkgutil.iter_modules(render.__path__):
        import_module(f"ckptool.render.{module.name}")
    found = {name: (each["about"], tuple(each.get("verbs", "").split(", "))) for name, each in _tables()[1].items()}
    printed = {verb: {*_reports_of(verb)} for verb in VERBS}
    for name, kind in _reports().items():
        found[name] = about(kind), tuple(verb for verb, kinds in printed.items() if kind in kinds)
    return found


@cache
def _reports() -> dict[str, Any]:
    """The classes of the reports that verbs give, by the names of their schemas."""
    kinds = {
        kind for verb in VERBS for kind in _reports_of(verb) if isinstance(kind, type) and issubclass(kind, Report)
    }
    told = {kind for kind in kinds if kind.told is not Report.told}
    return {name: kind for name, (kind, _) in DOCUMENTS.items()} | {
        schema_of(kind).partition("/")[0]: kind for kind in sorted(told, key=schema_of)
    }


def _version(name: str) -> str:
    """The schema with its version: `ckptool.scan/2`."""
    if name in _reports():
        return f"ckptool.{picked(_reports()[name])[0]}"
    return f"ckptool.{name}/{_tables()[1][name].get('version', 1)}"


def _reports_of(verb: str) -> Iterator[Any]:
    """The classes of the reports that a verb gives."""
    function = getattr(import_module(module_of(verb)), function_name(verb))
    for each in (function, function.verb.words, function.verb.instead):
        kind = signature_of(each).return_annotation if each is not None else None
        yield from get_args(kind) or (kind,)
    for module, _, name in (each.rpartition(".") for each in function.verb.also):
        yield getattr(import_module(module), name)


@cache
def _tables() -> tuple[Json, dict[str, Json]]:
    """Of what functions make: the types, and the schemas by name, `inspect` of `ckptool.inspect/1`."""
    import yaml

    text = Path(__file__).with_name("schemas.yaml").read_text(encoding="utf-8")
    tables = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tables["types"], tables["schemas"]


def _add(name: str, used: dict[str, Json]) -> None:
    """Adds a schema or type to those that are used, and all that it refers to."""
    if name in used:
        return
    types, schemas = _tables()
    used[name] = {}  # it may refer to itself
    if name in _reports():
        used[name] |= document(_reports()[name], used)
        for each in [each for each in BY_HAND.values() if used.get(each) == {}]:  # what is left to the table
            del used[each]
            _add(each, used)
    elif name in schemas:
        fields = {"schema": "", **schemas[name].get("fields", {})}
        used[name] |= {"description": schemas[name]["about"], **_object(fields, used)}
        used[name]["properties"]["schema"] = {"const": _version(name)}
    else:
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
    text, _, said = text.partition(" -- ")
    described = {"description": said} if said else {}
    alternatives = text.split(" or ")
    if len(alternatives) > 1:
        return {"anyOf": [_type(each, used) for each in alternatives], **described}
    if text.startswith("list of "):
        return {"type": "array", "items": _type(text[8:], used), **described}
    if text.startswith("map of "):
        return {"type": "object", "additionalProperties": _type(text[7:], used), **described}
    if text.startswith("'"):
        return {"const": json.loads(text.replace("'", '"')), **described}
    if text in _SIMPLE or not text:
        return _SIMPLE.get(text, {}) | described
    _add(text, used)
    return {"$ref": f"#/$defs/{text}", **described}


@provides("text", SchemaReport)
def schema_text(found: SchemaReport, *, style: Style = PLAIN) -> str:
    """The schema as JSON; of a list, each name with its commands and what it holds."""
    if found.document:
        return json.dumps(found.document, indent=2, ensure_ascii=True) + "\n"
    lines = []
    for name, (what, verbs) in found.names.items():
        lines += [style.bold(_version(name)), *style.prose(f"  {what}")]
        lines += style.prose(f"  printed by: {', '.join(verbs)}", "    ") if verbs[0] else []
    return "\n".join(lines) + "\n"


@provides("json", SchemaReport)
def schema_json(found: SchemaReport) -> Json:
    """The schema itself, which is JSON; of a list `ckptool.schemas/1`."""
    listed = [
        {"schema": _version(name), "about": what, "verbs": [verb for verb in verbs if verb]}
        for name, (what, verbs) in found.names.items()
    ]
    return found.document or {"schema": "ckptool.schemas/1", "schemas": listed}
