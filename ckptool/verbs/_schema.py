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
from typing import Annotated, Any, NamedTuple, get_args

from ckptool import render
from ckptool.checkpoint.registry import provides
from ckptool.commands import VERBS, Command, function_name, module_of
from ckptool.errors import NoMatch
from ckptool.facts import Report, Told, bold
from ckptool.options import argument, nearest, signature_of, verb
from ckptool.render.json import DOCUMENTS
from ckptool.render.reflection import BY_HAND, about, document, picked

Json = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TEXT = {"type": "string"}
_KIND = {"type": "string", "description": "which of the schemas it is"}
_RESULTS = {"type": "array", "items": {"type": "object", "properties": {"schema": _KIND}, "required": ["schema"]}}
# What every command may print, beside its reports.
ANYWHERE: dict[str, Json] = {
    "error": {
        "description": "An error, in place of the answer. `done` is what was finished before it.",
        "type": "object",
        "properties": {
            "schema": {"const": "ckptool.error/2"},
            "code": {**_TEXT, "description": "explained by `ckptool explain CODE`"},
            **dict.fromkeys(("what", "why", "fix"), _TEXT),
            "done": _RESULTS,
        },
        "required": ["schema", "code", "what", "why", "fix"],
    },
    "results": {
        "description": "The answers for several files.",
        "type": "object",
        "properties": {"schema": {"const": "ckptool.results/2"}, "results": _RESULTS},
        "required": ["schema", "results"],
    },
}


class Listed(NamedTuple):
    """A schema. about: what it holds.  verbs: those that print it; none for what every command may print."""

    schema: str
    about: str
    verbs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Schemas(Report):
    """The schemas that there are; with a name, schema prints that one itself."""

    schemas: tuple[Listed, ...]

    def told(self) -> Told:
        for each in self.schemas:
            yield (bold(each.schema),)
            yield f"  {each.about}"
            yield from [f"  printed by: {', '.join(each.verbs)}"] if each.verbs else []


@dataclass(frozen=True, slots=True, repr=False)
class Schema(Report):
    """A JSON Schema."""

    document: Json

    def told(self) -> Told:
        return json.dumps(self.document, indent=2).split("\n")


@provides("json", Schema)
def schema_json(found: Schema) -> Json:
    """The schema itself, which is JSON."""
    return found.document


@verb(
    ("ckptool schema inspect", "what inspect --json prints"),
    ("ckptool schema error", "what any command prints when it fails"),
)
def schema(
    verb: Annotated[
        str, argument("[VERB]", "A command, or a schema such as error or ckptool.diff/1. Without it: list all.")
    ] = "",
) -> Schema | Schemas:
    """The schema of what `VERB --json` prints, or of one kind of output: `error`, `ckptool.diff/1`.

    Raises `NoMatch` where there is no such verb.
    """
    names = _names()
    if not verb:
        return Schemas(tuple(names.values()))
    word = re.sub(r"^ckptool\.|/\d+$", "", verb)
    printed = [name for name, each in names.items() if word in each.verbs] if word in VERBS else []
    if not printed and word not in names:
        meant = nearest(word, {*VERBS, *names})
        advice = f"See all: {Command(('ckptool', 'schema'))}"
        raise NoMatch(f"there is no command or schema {verb!r}", f"Did you mean {meant}?" if meant else "", advice)
    wanted = [*printed, *ANYWHERE] if printed and word == verb else [word]
    used: dict[str, Json] = {}
    for name in wanted:
        _add(name, used)
    references = [{"$ref": f"#/$defs/{name}"} for name in wanted]
    of = {"title": f"ckptool {verb} --json"} if printed else {}
    whole = {"anyOf": references} if len(references) > 1 else references[0]
    return Schema({"$schema": DRAFT, **of, **whole, "$defs": used})


@cache
def _names() -> dict[str, Listed]:
    """Every schema by its name without its version."""
    for module in pkgutil.iter_modules(render.__path__):
        import_module(f"ckptool.render.{module.name}")
    found = {
        name: Listed(f"ckptool.{name}/1", each["about"], tuple(each["verbs"].split(", ")))
        for name, each in _tables()[1].items()
    }
    found |= {name: Listed(f"ckptool.{name}/2", each["description"]) for name, each in ANYWHERE.items()}
    printed = {verb: {*_reports_of(verb)} for verb in VERBS}
    for name, kind in _reports().items():
        verbs = tuple(verb for verb, kinds in printed.items() if kind in kinds)
        found[name] = Listed(f"ckptool.{picked(kind)[0]}", about(kind), verbs)
    return found


@cache
def _reports() -> dict[str, Any]:
    """The classes of the reports that verbs give, by the names of their schemas."""
    kinds = {
        kind for verb in VERBS for kind in _reports_of(verb) if isinstance(kind, type) and issubclass(kind, Report)
    }
    told = {kind for kind in kinds if kind.told is not Report.told} - {Schema}
    return {name: kind for name, (kind, _) in DOCUMENTS.items()} | {
        picked(kind)[0].partition("/")[0]: kind for kind in sorted(told, key=picked)
    }


def _reports_of(verb: str) -> Iterator[Any]:
    """The classes of the reports that a verb gives."""
    function = getattr(import_module(module_of(verb)), function_name(verb))
    for each in (function, function.verb.words, function.verb.instead):
        kind = signature_of(each).return_annotation if each is not None else None
        yield from get_args(kind) or (kind,)
    for module, _, name in (each.rpartition(".") for each in function.verb.also):
        yield getattr(import_module(module), name)


def _add(name: str, used: dict[str, Json]) -> None:
    """Adds a schema or type to those that are used, and all that it refers to."""
    if name in used:
        return
    used[name] = ANYWHERE.get(name, {})  # it may refer to itself
    if name in _reports():
        used[name] |= document(_reports()[name], used)
        for each in [each for each in BY_HAND.values() if used.get(each) == {}]:  # what is left to the table
            del used[each]
            _add(each, used)
    elif name not in ANYWHERE:
        _add_by_hand(name, used)


# What is not reflected yet --------------------------------------------------------------------------------------------

_SIMPLE: dict[str, Json] = {
    "any": {},
    "text": {"type": "string"},
    "int": {"type": "integer"},
    "bool": {"type": "boolean"},
    "null": {"type": "null"},
    "object": {"type": "object"},
    "number": {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]},
}


@cache
def _tables() -> tuple[Json, dict[str, Json]]:
    """Of what functions make: the types, and the schemas by name, `inspect` of `ckptool.inspect/1`."""
    import yaml

    text = Path(__file__).with_name("schemas.yaml").read_text(encoding="utf-8")
    tables = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tables["types"], tables["schemas"]


def _add_by_hand(name: str, used: dict[str, Json]) -> None:
    types, schemas = _tables()
    if name in schemas:
        fields = {"schema": "", **schemas[name].get("fields", {})}
        used[name] |= {"description": schemas[name]["about"], **_object(fields, used)}
        used[name]["properties"]["schema"] = {"const": f"ckptool.{name}/1"}
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
