"""The names, types, shapes and ties that a model is loaded with: of a checkpoint, a module, or a spec file.

    {"schema": "ckptool.spec/1",
     "kinds": "stated",                                    or "by name": a checkpoint does not say what is a parameter
     "tensors": [
      {"name": "fc.weight", "dtype": "f32", "shape": [10, 64], "kind": "parameter"}, …],
     "ties": [["embed.weight", "head.weight"], …]}

A spec is enough to say whether a checkpoint fits a model, on machines that have neither torch nor the model's code. The
order is the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated, Any

from ckptool.checkpoint import Checkpoint, Composite, Tensor, TensorEntry
from ckptool.checkpoint.dtypes import DType, by_name
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.commands import FILE, Slot, command
from ckptool.conventions.state_dicts import one_state_dict
from ckptool.errors import Corrupt, Unsupported, UsageError, counted, printable
from ckptool.facts import LIVE
from ckptool.formats.strict_json import parse_object

PARAMETER, BUFFER = "parameter", "buffer"
CHECKPOINT, MODULE, SPEC = "checkpoint", "module", "spec"
SPEC_SCHEMA, SPEC_VERSION, STATED = "ckptool.spec/", "1", "stated"

# What torch's own modules call their buffers. A checkpoint does not say which of its tensors are parameters.
_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


@dataclass(frozen=True, slots=True)
class Expected:
    """A name of a target. `tied_to`: the first name of the same tensor, where there is one before it."""

    name: str
    dtype: DType | None
    shape: tuple[int, ...] | None
    kind: str = PARAMETER
    tied_to: Annotated[str | None, LIVE] = None

    @property
    def numel(self) -> Annotated[int, LIVE]:
        return 0 if self.shape is None else prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Target:
    """A model to load into: its tensors by name, in order.

    kind: `checkpoint`, `module` or `spec`.  kinds_known: parameters and buffers are told apart by the module itself,
    not by their names.
    values: everything under its name, tensors and the rest, to fill up what another file does not have; None where
    there are none (a spec).
    metadata: the state dict's `_metadata`.  checkpoint: what it was read from.  remarks: choices that were made, in
    words.
    wrapper: the prefix that the wrapper of a live model puts before its names, which are here without it.
    """

    name: str
    kind: str
    tensors: dict[str, Expected]
    kinds_known: bool = False
    values: Mapping[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    checkpoint: Checkpoint | None = None
    remarks: tuple[str, ...] = field(default=())
    wrapper: str = ""

    def __repr__(self) -> str:
        return f"<target {printable(self.name)}: {counted(len(self.tensors), 'name')}>"

    @property
    def as_it_loads(self) -> Target:
        """The same under the names that `load_state_dict` of the wrapped model wants."""
        front, tensors = self.wrapper, {}
        for name, expected in self.tensors.items():
            tied_to = None if expected.tied_to is None else front + expected.tied_to
            tensors[front + name] = replace(expected, name=front + name, tied_to=tied_to)
        values = None if self.values is None else {front + name: value for name, value in self.values.items()}
        return replace(self, tensors=tensors, values=values, wrapper="")

    @property
    def unique(self) -> list[Expected]:
        """Each tensor once, by its first name."""
        return [expected for expected in self.tensors.values() if expected.tied_to is None]


def of_checkpoint(checkpoint: Checkpoint, name: str, at: str | None = None) -> Target:
    """The one set of weights of a checkpoint, or the one at an address. Raises what `one_state_dict` raises."""
    root, remark = one_state_dict(checkpoint, at)
    node = root.node
    values = {key: value for key, value in node.items() if type(key) is str}
    if len(values) != len(node):
        what = f"{root} of {checkpoint.source or name} has keys that are not strings"
        raise UsageError(what, "The keys of a model's state dict are strings.")
    tensors = {key: value for key, value in values.items() if isinstance(value, (TensorEntry, Composite))}
    metadata = node.metadata if isinstance(node, OrderedDict) else None
    remarks = (remark,) if remark else ()
    return Target(name, CHECKPOINT, expected_of(tensors), False, values, metadata, checkpoint, remarks)


def expected_of(tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
    """Names, types, shapes and ties of tensors; what is a parameter and what a buffer by their names and types."""
    first: dict[Any, str] = {}
    made = {}
    for name, tensor in tensors.items():
        tied = first.setdefault(tensor.view, name)
        kind = kind_by_name(name, tensor.dtype)
        made[name] = Expected(name, tensor.dtype, tensor.shape, kind, tied if tied != name else None)
    return made


def kind_by_name(name: str, dtype: DType | None) -> str:
    """`buffer` for what torch's own modules call so, and for what cannot have a gradient; else `parameter`."""
    whole = dtype is not None and dtype.kind in ("int", "uint", "bool")
    return BUFFER if whole or name.rpartition(".")[2] in _BUFFERS else PARAMETER


def tie_groups(tensors: Iterable[Expected]) -> dict[str, list[str]]:
    """First name -> all names of each tensor that has several."""
    groups: dict[str, list[str]] = {}
    for expected in tensors:
        groups.setdefault(expected.tied_to or expected.name, []).append(expected.name)
    return {name: names for name, names in groups.items() if len(names) > 1}


def is_spec(raw: bytes) -> bool:
    """True if bytes that begin a file begin a spec, of whatever version."""
    return raw.lstrip()[:1] == b"{" and b'"' + SPEC_SCHEMA.encode() in raw[:4096]


def of_spec(raw: bytes, name: str) -> Target:
    """The target that a spec describes. name: the file, for messages.

    Raises `Unsupported` for a spec of another version, `Corrupt` for one that contradicts itself.
    """
    odd = "It is not what ckptool spec writes."
    again = command("spec", Slot("TARGET"), out=FILE)
    try:
        facts = parse_object(raw, name)
    except Corrupt as error:
        raise Corrupt(error.what, error.why, f"Make it again: {again}") from None
    if (schema := facts.get("schema")) != SPEC_SCHEMA + SPEC_VERSION:
        what = f"{name} is a spec of another version: {str(schema)[:60]}"
        why = f"This ckptool reads {SPEC_SCHEMA}{SPEC_VERSION}."
        raise Unsupported(what, why, f"Make it again with this version: {again}")
    for key in ("tensors", "ties"):
        if not isinstance(facts.get(key), list):
            raise Corrupt(f"{name} has no list of {key}", odd)
    tensors: dict[str, Expected] = {}
    for number, fact in enumerate(facts["tensors"]):
        if not isinstance(fact, dict) or type(fact.get("name")) is not str:
            raise Corrupt(f"{name}: tensor {number} has no name", odd)
        expected = _expected(fact, f"{name}: tensor {number} ({fact['name'][:80]})")
        if expected.name in tensors:
            raise Corrupt(f"{name} has {expected.name!r} twice", "A state dict has each name once.")
        tensors[expected.name] = expected
    for names in facts["ties"]:
        known = isinstance(names, list) and all(type(each) is str and each in tensors for each in names)
        if not known or len(names) < 2:
            raise Corrupt(f"{name} ties names that it does not have", odd)
        first = tensors[names[0]]
        for tied in names[1:]:
            other = tensors[tied]
            alike = (other.dtype, other.shape) == (first.dtype, first.shape)
            if not alike or other.tied_to or first.tied_to or tied == first.name:
                raise Corrupt(f"{name}: {tied} cannot be the same tensor as {first.name}")
            tensors[tied] = replace(other, tied_to=first.name)
    return Target(name, SPEC, tensors, kinds_known=facts.get("kinds") == STATED)


def _expected(fact: Mapping[str, Any], where: str) -> Expected:
    name, dtype, shape, kind = map(fact.get, ("name", "dtype", "shape", "kind"))
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
        raise Corrupt(f"{where} has no shape", "A shape is a list of sizes.")
    if kind not in (PARAMETER, BUFFER):
        raise Corrupt(f"{where} is neither a parameter nor a buffer")
    try:
        return Expected(str(name), by_name(dtype if type(dtype) is str else ""), tuple(shape), kind)
    except KeyError:
        raise Corrupt(f"{where} has the unknown dtype {str(dtype)[:40]!r}") from None


def names_code(text: str) -> bool:
    """True for a text of the form `file.py:NAME` or `module:NAME`."""
    place, separator, attribute = text.rpartition(":")
    return bool(separator and place and attribute.isidentifier())
