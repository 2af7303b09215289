"""`schema`: the JSON Schema of what a command prints with `--json`, reflected from the classes of its reports."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from ckptool.analysis.words import NUMBER
from ckptool.checkpoint.dtypes import DType
from ckptool.commands import VERBS, Command, argument, function_of, nearest, signature_of, verb
from ckptool.errors import NoMatch
from ckptool.facts import TEXT, Report, Told, Unit, bold, dataclass, facts_of, schema_of

Json = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TEXT = {"type": "string"}
_PLAIN = {bool: "boolean", int: "integer", str: "string", NoneType: "null"}
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
        for entry in self.schemas:
            yield (bold(entry.schema),)
            yield f"  {entry.about}"
            yield f"  printed by: {', '.join(entry.verbs)}" if entry.verbs else None


@dataclass(frozen=True, slots=True, repr=False)
class Schema(Report):
    """A JSON Schema."""

    document: Json

    def told(self) -> Told:
        return json.dumps(self.document, indent=2).split("\n")

    def to_dict(self) -> Json:
        """The schema itself, which is JSON."""
        return self.document


@verb(
    ("ckptool schema inspect", "what inspect --json prints"),
    ("ckptool schema error", "what any command prints when it fails"),
)
def schema(
    verb: Annotated[str, argument("[VERB]", "A command or schema: error, ckptool.diff/2. Without it: list all.")] = "",
) -> Schema | Schemas:
    """The schema of what `VERB --json` prints, or of one kind of output: `error`, `ckptool.diff/2`.

    Raises `NoMatch` where there is no such verb.
    """
    names = {name: Listed(f"ckptool.{name}/2", entry["description"]) for name, entry in ANYWHERE.items()}
    for name, (kind, verbs) in _reports().items():
        names[name] = Listed(f"ckptool.{schema_of(kind)}", about(kind), verbs)
    if not verb:
        return Schemas(tuple(names.values()))
    word = re.sub(r"^ckptool\.|/\d+$", "", verb)
    printed = [name for name, entry in names.items() if word in entry.verbs] if word in VERBS else []
    if not printed and word not in names:
        closest = nearest(word, {*VERBS, *names})
        advice = f"See all: {Command(('ckptool', 'schema'))}"
        raise NoMatch(f"there is no command or schema {verb!r}", f"Did you mean {closest}?" if closest else "", advice)
    selected = [*printed, *ANYWHERE] if printed and word == verb else [word]
    defs = {name: ANYWHERE.get(name, {}) for name in selected}  # a schema may refer to itself
    for name in selected:
        defs[name] |= document(_reports()[name][0], defs) if name not in ANYWHERE else {}
    references = [{"$ref": f"#/$defs/{name}"} for name in selected]
    title = {"title": f"ckptool {verb} --json"} if printed else {}
    body = {"anyOf": references} if len(references) > 1 else references[0]
    return Schema({"$schema": DRAFT, **title, **body, "$defs": defs})


@cache
def _reports() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """The classes of the verbs' reports, by the names of their schemas, each with the verbs that print it."""
    verbs: dict[Any, list[str]] = {}
    for name in VERBS:
        function = function_of(name)
        hooks = filter(None, (function, function.verb.from_words, function.verb.first_try))
        answers = [signature_of(hook).return_annotation for hook in hooks]
        kinds = [kind for answer in answers for kind in get_args(answer) or (answer,)]
        others = (path.rpartition(".") for path in function.verb.other_reports)
        kinds += [getattr(import_module(module), kind) for module, _, kind in others]
        for kind in dict.fromkeys(kinds):
            if isinstance(kind, type) and issubclass(kind, Report) and kind is not Schema:
                verbs.setdefault(kind, []).append(name)
    kinds = sorted(verbs, key=schema_of)
    return {schema_of(kind).partition("/")[0]: (kind, tuple(verbs[kind])) for kind in kinds}


def document(kind: Any, defs: Json) -> Json:
    """The schema of a report's JSON; the types that it refers to are added to `defs`."""
    row = _row(kind, defs)
    properties = {"schema": {"const": f"ckptool.{schema_of(kind)}"}, **row["properties"]}
    return {"description": about(kind), "type": "object", "properties": properties, "required": list(properties)}


def about(kind: type) -> str:
    """The first sentences of a docstring, before its descriptions of fields."""
    return _words(_described(kind)[0])


def _described(kind: type) -> list[str]:
    """A docstring cut at its descriptions of fields: what is before them, and of each the names and the text.

    They are written like `damage: what was wrong.  tensors, records: how many there were.`
    """
    doc = (kind.__doc__ or "") if not (kind.__doc__ or "").startswith(f"{kind.__name__}(") else ""
    name = "|".join(name for name in {*dir(kind), *getattr(kind, "__annotations__", ())} if name[0] != "_")
    return re.split(rf"(?<!\S)((?:{name})(?:,\s+(?:{name}))*):\s", doc)


def _words(text: str) -> str:
    """A description up to an empty line, as JSON has its values."""
    return re.sub(r"\bNone\b", "null", " ".join(text.partition("\n\n")[0].split()))


def _row(kind: Any, defs: Json) -> Json:
    """An object with the facts of a report, a row, or a named tuple."""
    properties = {name: _type(fact.kind, defs) for name, fact in facts_of(kind).items()}
    pieces = _described(kind)
    for names, text in zip(pieces[1::2], pieces[2::2], strict=True):
        meaning = _words(text).rstrip(".;")
        for name in properties.keys() & {*re.split(r",\s+", names)}:
            unit = properties[name].get("description", "")
            properties[name] = properties[name] | {"description": f"{meaning}, {unit}" if unit else meaning}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _type(hint: Any, defs: Json) -> Json:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        unit = next((annotation for annotation in inner[1:] if isinstance(annotation, Unit)), TEXT)
        schema = dict(unit.schema) if unit.schema is not None else _type(inner[0], defs)
        return schema | ({"description": unit.about} if unit.about else {})
    if origin in (Union, UnionType):
        return {"anyOf": [_type(hint, defs) for hint in inner]}
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
        return {"type": "object", "additionalProperties": _type(inner[1], defs) if inner else {}}
    if is_dataclass(origin) or hasattr(origin, "_fields"):  # a reference to a type, which is added to `defs`
        name = schema_of(origin).partition("/")[0] if issubclass(origin, Report) else origin.__name__
        if name not in defs:
            defs[name] = {}  # it may refer to itself
            is_report = issubclass(origin, Report)
            defs[name] |= document(origin, defs) if is_report else _row(origin, defs) | {"description": about(origin)}
        return {"$ref": f"#/$defs/{name}"}
    if issubclass(origin, Enum):
        return {"enum": [member.value for member in origin]}
    items = _type(inner[0], defs) if inner and (len(inner) == 1 or inner[1] is ...) else {}
    return {"type": "array", "items": {"type": "string"} if issubclass(origin, tuple) and not inner else items}
