"""A model's names, shapes, types, ties and kinds without its values, as JSON: `ckptool.spec/1`.

    {"schema": "ckptool.spec/1",
     "kinds": "stated",                                    or "by name": a checkpoint does not say what is a parameter
     "tensors": [
      {"name": "fc.weight", "dtype": "f32", "shape": [10, 64], "kind": "parameter"}, …],
     "ties": [["embed.weight", "head.weight"], …]}

It is enough to say whether a checkpoint fits a model, on machines that have neither torch nor the model's code. The
order is the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptool.analysis.targets import BUFFER, PARAMETER, SPEC, Expected, Target, tie_groups
from ckptool.checkpoint.dtypes import DType, by_name
from ckptool.checkpoint.registry import Report
from ckptool.errors import Corrupt, Unsupported
from ckptool.formats.strict_json import parse_object

SCHEMA = "ckptool.spec/"
VERSION = "1"
STATED, BY_NAME = "stated", "by name"


def spec_of(target: Target) -> dict[str, Any]:
    """The spec of a target, as plain values."""
    return {
        "schema": SCHEMA + VERSION,
        "kinds": STATED if target.kinds_known else BY_NAME,
        "tensors": [_tensor_json(expected) for expected in target.tensors.values()],
        "ties": list(tie_groups(target.tensors.values()).values()),
    }


def _tensor_json(expected: Expected) -> dict[str, Any]:
    if expected.dtype is None or expected.shape is None:
        raise Unsupported(
            f"{expected.name} has no dtype and shape to record",
            "Only torch knows this kind of tensor.",
        )
    facts = {"name": expected.name, "dtype": expected.dtype.name, "shape": list(expected.shape)}
    return {**facts, "kind": expected.kind}


def is_spec(raw: bytes) -> bool:
    """True if bytes that begin a file begin a spec, of whatever version."""
    head = raw.lstrip()[:1]
    return head == b"{" and b'"' + SCHEMA.encode() in raw[:4096]


def parse_spec(raw: bytes, name: str) -> Target:
    """The target that a spec describes. name: the file, for messages.

    Raises `Unsupported` for a spec of another version, `Corrupt` for one that contradicts itself.
    """
    try:
        facts = parse_object(raw, name)
    except Corrupt as error:
        raise Corrupt(error.what, error.why, "Make it again: ckptool spec TARGET -o FILE") from None
    schema = facts.get("schema")
    if schema != SCHEMA + VERSION:
        raise Unsupported(
            f"{name} is a spec of another version: {str(schema)[:60]}",
            f"This ckptool reads {SCHEMA}{VERSION}.",
            "Make it again with this version: ckptool spec TARGET -o FILE",
        )
    tensors: dict[str, Expected] = {}
    for number, fact in enumerate(_list(facts, "tensors", name)):
        expected = _expected(fact, f"{name}: tensor {number}")
        if expected.name in tensors:
            raise Corrupt(f"{name} has {expected.name!r} twice", "A state dict has each name once.")
        tensors[expected.name] = expected
    for names in _list(facts, "ties", name):
        _tie(tensors, names, name)
    return Target(name, SPEC, tensors, kinds_known=facts.get("kinds") == STATED)


def _list(facts: dict[str, Any], key: str, where: str) -> list[Any]:
    value = facts.get(key)
    if not isinstance(value, list):
        raise Corrupt(f"{where} has no list of {key}", "It is not what ckptool spec writes.")
    return value


def _expected(fact: Any, where: str) -> Expected:
    if not isinstance(fact, dict) or type(fact.get("name")) is not str:
        raise Corrupt(f"{where} has no name", "It is not what ckptool spec writes.")
    shape, kind = fact.get("shape"), fact.get("kind")
    where = f"{where} ({fact['name'][:80]})"
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
        raise Corrupt(f"{where} has no shape", "A shape is a list of sizes.")
    if kind not in (PARAMETER, BUFFER):
        raise Corrupt(f"{where} is neither a parameter nor a buffer")
    return Expected(fact["name"], _dtype(fact.get("dtype"), where), tuple(shape), kind)


def _dtype(name: Any, where: str) -> DType:
    try:
        return by_name(name if type(name) is str else "")
    except KeyError:
        raise Corrupt(f"{where} has the unknown dtype {str(name)[:40]!r}") from None


def _tie(tensors: dict[str, Expected], names: Any, where: str) -> None:
    """Marks names as one tensor. Names stand in the order of the tensors."""
    if (
        not isinstance(names, list)
        or not all(type(name) is str and name in tensors for name in names)
        or len(names) < 2
    ):
        raise Corrupt(f"{where} ties names that it does not have", "It is not what ckptool spec writes.")
    first = tensors[names[0]]
    for name in names[1:]:
        other = tensors[name]
        if (
            (other.dtype, other.shape) != (first.dtype, first.shape)
            or other.tied_to
            or name == names[0]
            or first.tied_to
        ):
            raise Corrupt(f"{where}: {name} cannot be the same tensor as {names[0]}")
        tensors[name] = Expected(name, other.dtype, other.shape, other.kind, names[0])


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Spec(Report):
    """A target, and the file that its spec was written to (empty where it was not)."""

    target: Target
    output: str = ""
    dry_run: bool = False
