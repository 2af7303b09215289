"""Reports as JSON: one object with a versioned schema, strictly valid, stable from run to run.

NaN and infinities are texts; what is not ASCII is escaped, so no control character of a file passes raw. Keys are in
the order of the fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

from ckptool.checkpoint.dtypes import DType
from ckptool.errors import CkptoolError, without_secrets
from ckptool.facts import Report, facts_of

Json = dict[str, Any]


def dumps(value: Any) -> str:
    """The JSON text of a value; everything here is written by this."""
    return without_secrets(json.dumps(value, ensure_ascii=True, allow_nan=False))


def finite(value: Any) -> Any:
    """Plain facts with NaN and infinities as the texts "NaN", "Infinity", "-Infinity", and tuples as lists.
    A report as it prints itself, any other dataclass by its fields."""
    if type(value) in (str, int, bool):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return facts_json(value) if hasattr(value, "_fields") else [finite(item) for item in value]
    if isinstance(value, Report):
        return value.to_dict()
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Enum):
        return value.value
    return facts_json(value) if is_dataclass(value) else value


def facts_json(value: Any) -> Json:
    """The facts of a report or row: its fields and properties, in their unit's own JSON form where it has one."""
    return {
        name: finite(fact) if unit.json is None or fact is None else unit.json(fact)
        for name, (_, unit) in facts_of(type(value)).items()
        for fact in (getattr(value, name),)
    }


def error_json(error: CkptoolError, results: Sequence[Json] = ()) -> Json:
    """`ckptool.error/2`: the three parts and the code; and the results that were finished before, as `done`."""
    facts = {"schema": "ckptool.error/2", "code": error.code, "what": error.what, "why": error.why, "fix": error.fix}
    return facts | ({"done": list(results)} if results else {})


def results_json(results: Sequence[Json]) -> Json:
    """One result as it is; several as `ckptool.results/2`."""
    return results[0] if len(results) == 1 else {"schema": "ckptool.results/2", "results": list(results)}
