"""What `train --init` and `--schema` print: a configuration with every key explained, and its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ckptool.training.config import Config, is_named, keys_of, section_in


def schema_text() -> str:
    """The JSON Schema of a configuration, for editors."""
    return json.dumps(Config.model_json_schema(by_alias=True), indent=2) + "\n"


# What --init prints: a configuration that is a good example. Where a value is not the default, the line says what is.
_EXAMPLE: dict[str, Any] = {
    "run": "runs/digits",
    "seed": 7,
    "models": {"main": {"args": {"hidden": [64, 64], "dropout": 0.1}}},
    "optim": {"main": {"args": {"weight_decay": 0.01}}},
    "train": {"steps": 2000},
    "eval": {"metric": "val_acc", "mode": "max"},
}
_EXAMPLE_HEAD = """\
# A run of ckptool's training harness, with every key. One left out has the value below, or the default in its comment.
# Start it: ckptool train run.yaml    Resume it: ckptool resume runs/digits    Prove it: ckptool prove run.yaml
"""
_COMMENTS = 30  # the column in which comments begin


def example() -> str:
    """A configuration with every key explained."""
    values = Config.model_validate(_EXAMPLE).dumped()
    del values["train"]["epochs"]
    return _EXAMPLE_HEAD + "".join(f"{line}\n" for line in _explained(Config, values, ""))


def _explained(section: type[BaseModel], values: dict[str, Any], indent: str) -> Iterator[str]:
    """A line for each key that has a value, or for each of its own keys."""
    for key, field in keys_of(section).items():
        words, below = field.description or "", section_in(field.annotation)
        if key not in values:
            continue
        if words or below is None:
            yield _commented(indent + _flow({key: values[key]}), words + _default_note(field, values[key]))
            continue
        yield f"{indent}{key}:"
        several = values[key] if is_named(field) else {}
        for name, each in several.items():
            yield f"{indent}  {name}:"
            yield from _explained(below, each, indent + "    ")
        if not several:
            yield from _explained(below, values[key], indent + "  ")


def _flow(values: dict[str, Any]) -> str:
    """Values on one line."""
    text: str = yaml.safe_dump(values, sort_keys=False, default_flow_style=True, width=1000)
    return text.strip()[1:-1]


def _commented(line: str, words: str) -> str:
    return f"{line.ljust(_COMMENTS) if len(line) < _COMMENTS else line + '  '}# {words}"


def _default_note(field: FieldInfo, value: Any) -> str:
    if field.is_required() or isinstance(field.default, BaseModel) or field.default in (value, None):
        return ""
    return f" (default: {_flow({'': field.default}).partition(': ')[2]})"
