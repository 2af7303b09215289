"""`schema`: the JSON Schema of what a command prints with `--json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NamedTuple, get_args

from ckptool.commands import VERBS, Command, argument, function_name, module_of, nearest, signature_of, verb
from ckptool.errors import NoMatch
from ckptool.facts import Report, Told, bold, schema_of
from ckptool.render.reflection import about, document

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

    def to_dict(self) -> Json:
        """The schema itself, which is JSON."""
        return self.document


@verb(
    ("ckptool schema inspect", "what inspect --json prints"),
    ("ckptool schema error", "what any command prints when it fails"),
)
def schema(
    verb: Annotated[
        str, argument("[VERB]", "A command, or a schema such as error or ckptool.diff/2. Without it: list all.")
    ] = "",
) -> Schema | Schemas:
    """The schema of what `VERB --json` prints, or of one kind of output: `error`, `ckptool.diff/2`.

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
    used = {name: ANYWHERE.get(name, {}) for name in wanted}  # a schema may refer to itself
    for name in wanted:
        used[name] |= document(_reports()[name], used) if name not in ANYWHERE else {}
    references = [{"$ref": f"#/$defs/{name}"} for name in wanted]
    of = {"title": f"ckptool {verb} --json"} if printed else {}
    whole = {"anyOf": references} if len(references) > 1 else references[0]
    return Schema({"$schema": DRAFT, **of, **whole, "$defs": used})


@cache
def _names() -> dict[str, Listed]:
    """Every schema by its name without its version."""
    found = {name: Listed(f"ckptool.{name}/2", each["description"]) for name, each in ANYWHERE.items()}
    printed = {verb: {*_reports_of(verb)} for verb in VERBS}
    for name, kind in _reports().items():
        verbs = tuple(verb for verb, kinds in printed.items() if kind in kinds)
        found[name] = Listed(f"ckptool.{schema_of(kind)}", about(kind), verbs)
    return found


@cache
def _reports() -> dict[str, Any]:
    """The classes of the reports that verbs give, by the names of their schemas."""
    kinds = {
        kind for verb in VERBS for kind in _reports_of(verb) if isinstance(kind, type) and issubclass(kind, Report)
    }
    return {schema_of(kind).partition("/")[0]: kind for kind in sorted(kinds - {Schema}, key=schema_of)}


def _reports_of(verb: str) -> Iterator[Any]:
    """The classes of the reports that a verb gives."""
    function = getattr(import_module(module_of(verb)), function_name(verb))
    for each in (function, function.verb.words, function.verb.instead):
        kind = signature_of(each).return_annotation if each is not None else None
        yield from get_args(kind) or (kind,)
    for module, _, name in (each.rpartition(".") for each in function.verb.also):
        yield getattr(import_module(module), name)
