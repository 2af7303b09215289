"""What `train --init` and `--schema` give: a configuration with every key explained, a run to begin with, a schema."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ckptool.checkpoint.paths import file_problem
from ckptool.commands import command
from ckptool.errors import OutputExists, printable
from ckptool.training.config import Config, is_named, keys_of, section_in
from ckptool.training.store import write_text

# What --init prints: a configuration that is a good example. Where a value is not the default, the line says what is.
_EXAMPLE: dict[str, Any] = {
    "run": "runs/digits",
    "seed": 7,
    "models": {"main": {"args": {"hidden": [64, 64], "dropout": 0.1}}},
    "optim": {"main": {"args": {"weight_decay": 0.01}}},
    "train": {"steps": 2000},
    "eval": {"metric": "val_acc", "mode": "max"},
}
# What --init DIR writes beside its model.py.
_OWN = {
    "run": "runs/first",
    "train": {"steps": 500},
    "data": {"name": "model.py:Points"},
    "models": {"main": {"name": "model.py:Net", "args": {"width": 32}}},
    "optim": {"main": {"args": {"weight_decay": 0.01}, "schedule": {"name": "model.py:warmup"}}},
}
_HEAD = """\
# A run of ckptool's training harness, with every key. One left out has the value below, or the default in its comment.
# Start it: ckptool train run.yaml    Resume it: ckptool resume {run}    Prove it: ckptool prove run.yaml
"""
_COMMENTS = 30  # the column in which comments begin


def schema_text() -> str:
    """The JSON Schema of a configuration, for editors."""
    return json.dumps(Config.model_json_schema(by_alias=True), indent=2) + "\n"


def example(**other: Any) -> str:
    """A configuration with every key explained. other: sections in the place of the example's."""
    values = Config.model_validate(_EXAMPLE | other).dumped()
    del values["train"]["epochs"]
    return _HEAD.format(run=values["run"]) + "".join(f"{line}\n" for line in _explained(Config, values, ""))


def begun(folder: str) -> str:
    """Writes a run.yaml, and a model.py that it names, into a folder; what was written, and what to type next.

    Raises `OutputExists` where one of them is there.
    """
    model, run = os.path.join(folder, "model.py"), os.path.join(folder, "run.yaml")
    if there := [path for path in (model, run) if os.path.lexists(path)]:
        raise OutputExists(f"{there[0]} exists already", "Nothing was written.", "Name another folder.")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise file_problem(error, folder, "make the folder") from error
    write_text(model, Path(__file__).with_name("model.py.txt").read_text(encoding="utf-8"))
    write_text(run, example(**_OWN))
    return f"wrote {printable(model)} and {printable(run)}\ntrain it: {command('train', run)}\n"


def _explained(section: type[BaseModel], values: dict[str, Any], indent: str) -> Iterator[str]:
    """A line for each key that has a value, or for each of its own keys."""
    for key, field in keys_of(section).items():
        words, below = field.description or "", section_in(field.annotation)
        if key not in values:
            continue
        if words or below is None:
            line = indent + _flow({key: values[key]})
            yield f"{line.ljust(_COMMENTS - 2)}  # {words}{_default_note(field, values[key])}"
            continue
        yield f"{indent}{key}:"
        named = is_named(field)
        for name, each in (values[key] if named else {"": values[key]}).items():
            if named:
                yield f"{indent}  {name}:"
            yield from _explained(below, each, indent + "  " * (1 + named))


def _flow(values: dict[str, Any]) -> str:
    """Values on one line."""
    text: str = yaml.safe_dump(values, sort_keys=False, default_flow_style=True, width=1000)
    return text.strip()[1:-1]


def _default_note(field: FieldInfo, value: Any) -> str:
    if field.is_required() or isinstance(field.default, BaseModel) or field.default in (value, None):
        return ""
    return f" (default: {_flow({'': field.default}).partition(': ')[2]})"
