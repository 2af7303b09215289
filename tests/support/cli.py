"""The program run in this process."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Ran(NamedTuple):
    """What a command line printed, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


def command_lines(text: str) -> list[str]:
    """The command lines of a text: bars and ends of lines part them."""
    return [line.strip() for line in re.split(r"[|\n]", text) if line.strip()]


def done(ran: Ran) -> str:
    assert (ran.code, ran.err) == (0, ""), ran
    return ran.out


def strict(node: Any) -> Any:
    """A schema without room for fields that it does not name."""
    if isinstance(node, list):
        return [strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    closed = {"additionalProperties": False} if "properties" in node else {}
    return {**{key: strict(value) for key, value in node.items()}, **closed}


def judge(document: dict[str, Any], value: Any) -> Iterator[str]:
    """What jsonschema has against an answer in JSON, and each answer in it, by the strict schema of its own name."""
    import jsonschema

    name = re.fullmatch(r"ckptool\.([\w-]+)/\d+", value["schema"])
    assert name is not None
    for each in (*value.get("results", ()), *value.get("done", ())):
        yield from judge(document, each)
    own = {**value, **{key: [] for key in ("results", "done") if key in value}}
    of_kind = {"$ref": f"#/$defs/{name[1]}", "$defs": strict(document["$defs"])}
    for error in jsonschema.Draft202012Validator(of_kind).iter_errors(own):
        yield f"{error.json_path}: {error.message[:200]}"
