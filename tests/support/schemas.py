"""Answers in JSON, judged by their schemas, which have no room for what they do not name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jsonschema


def strict(node: Any) -> Any:
    """The schema without room for fields that it does not name."""
    if isinstance(node, list):
        return [strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    closed = {"additionalProperties": False} if "properties" in node else {}
    return {**{key: strict(value) for key, value in node.items()}, **closed}


def judge(document: dict[str, Any], value: Any) -> Iterator[str]:
    """What the library has against a value, and each answer in it, by the strict schema of its own name."""
    name = re.fullmatch(r"ckptool\.([\w-]+)/\d+", value["schema"])
    assert name is not None
    inner = [*value.get("results", ()), *value.get("done", ())]
    for each in inner:
        yield from judge(document, each)
    own = {**value, **{key: [] for key in ("results", "done") if key in value}}
    of_kind = {"$ref": f"#/$defs/{name[1]}", "$defs": strict(document["$defs"])}
    for error in jsonschema.Draft202012Validator(of_kind).iter_errors(own):
        yield f"{error.json_path}: {error.message[:200]}"
