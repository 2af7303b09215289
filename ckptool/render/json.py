"""Reports as JSON: one object with a versioned schema, strictly valid, stable from run to run.

NaN and infinities are texts; what is not ASCII is escaped, so no control character of a file passes raw. Keys are in
the order below.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from ckptool.checkpoint import Note, PartOf, Tensor, TensorEntry
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.tree import Path
from ckptool.errors import printable
from ckptool.pickles.plain.text import summary

Json = dict[str, Any]


def dumps(value: Any) -> str:
    """The one way in which everything here is written."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


def finite(value: Any) -> Any:
    """Plain facts with NaN and infinities as the texts "NaN", "Infinity", "-Infinity", and tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def fields_json(value: Any, names: str = "") -> Json:
    """The attributes of these names, else all fields of a dataclass, as plain facts."""
    return {name: finite(getattr(value, name)) for name in names.split() or [field.name for field in fields(value)]}


def tensor_json(path: Path, tensor: Tensor, storage: int | None) -> Json:
    """One tensor: shape, stride and offset count elements; a composite has a `kind` and no stride."""
    fact: Json = {
        "path": path_json(path),
        "dtype": tensor.dtype.name if tensor.dtype else None,
        "shape": None if tensor.shape is None else list(tensor.shape),
    }
    if isinstance(tensor, TensorEntry):
        fact |= {
            "stride": list(tensor.stride),
            "offset": tensor.offset,
            "location": tensor.location,
            "storage": storage,
        }
        fact |= {"nbytes": tensor.nbytes}
        fact |= {name: True for name, value in tensor.flags._asdict().items() if value} if any(tensor.flags) else {}
        return fact
    parts = {"stride": None, "offset": None, "location": tensor.location, "storage": None}
    return fact | parts | {"nbytes": tensor.nbytes, "kind": tensor.kind}


def path_json(path: Path) -> list[Any]:
    """A path as a list: texts and integers as they are, other keys as texts."""
    return [segment if type(segment) in (str, int) else summary(segment, 1_000) for segment in path]


def notes_json(notes: Iterable[Note]) -> list[Json]:
    return [{"code": note.code, "message": note.message, "fix": list(note.fix)} for note in notes]


def part_json(part: PartOf | None) -> Json | None:
    """Of what a checkpoint is only a part: None for a whole one."""
    if part is None:
        return None
    return {
        "kind": part.kind.value,
        "label": printable(part.label),
        "meaning": part.meaning,
        "number": part.number,
        "count": part.count,
        "whole": part.whole or None,
    }


def type_name(value: Any) -> str:
    """The kind of value of an entry: `int`, `dict`, `argparse.Namespace`."""
    return printable(value.name) if isinstance(value, Object) else type(value).__name__


def results_json(results: Sequence[Json]) -> Json:
    """One result as it is; several as `ckptool.results/1`."""
    return results[0] if len(results) == 1 else {"schema": "ckptool.results/1", "results": list(results)}
