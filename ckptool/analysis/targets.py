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

from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import Annotated, Any

from ckptool.checkpoint import Checkpoint, Composite, TensorEntry
from ckptool.checkpoint.dtypes import DType, by_name
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.commands import FILE, OUT, Command, Slot, command
from ckptool.conventions.state_dicts import EXTRA_STATE, one_state_dict
from ckptool.errors import Corrupt, Unsupported, UsageError, counted, printable
from ckptool.facts import LIVE, dataclass, field, replace
from ckptool.formats.strict_json import parse_object

PARAMETER, BUFFER, STATE = "parameter", "buffer", "extra state"
CHECKPOINT, MODULE, SPEC = "checkpoint", "module", "spec"
SPEC_SCHEMA, SPEC_VERSION, STATED = "ckptool.spec/", "1", "stated"

COUNTER = "num_batches_tracked"  # of BatchNorm and InstanceNorm, since version 2 (torch 0.4.1)
_WEIGHT_NORM = {"original0": "_g", "original1": "_v"}  # of `parametrizations.weight` -> of torch before 2.1
# Of the `bn` that QAT fuses with a convolution -> beside that, before torch 1.6.
_FUSED = {"weight": "gamma", "bias": "beta"} | {name: name for name in ("running_mean", "running_var", COUNTER)}
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
        """The same target under the names that `load_state_dict` of the wrapped model expects."""
        prefix, tensors = self.wrapper, {}
        for name, expected in self.tensors.items():
            tied_to = None if expected.tied_to is None else prefix + expected.tied_to
            tensors[prefix + name] = replace(expected, name=prefix + name, tied_to=tied_to)
        values = None if self.values is None else {prefix + name: value for name, value in self.values.items()}
        return replace(self, tensors=tensors, values=values, wrapper="")

    @property
    def states(self) -> list[str]:
        """The names of its extra states."""
        return extra_states(self.values or (), self.tensors)

    @property
    def unique(self) -> list[Expected]:
        """Each tensor once, by its first name."""
        return [expected for expected in self.tensors.values() if expected.tied_to is None]

    def plus_adapter(self, file: str) -> Command:
        """The command that adds an adapter to it; it takes a checkpoint of the model."""
        return command("lora merge", self.name if self.kind == CHECKPOINT else Slot("BASE"), file, out=OUT)


def of_checkpoint(checkpoint: Checkpoint, name: str, at: str | None = None) -> Target:
    """The one set of weights of a checkpoint, or the one at an address. Raises what `one_state_dict` raises."""
    root, remark = one_state_dict(checkpoint, at)
    node = root.node
    values = {key: value for key, value in node.items() if type(key) is str}
    if len(values) != len(node):
        what = f"{root} of {checkpoint.source or name} has keys that are not strings"
        raise UsageError(what, "The keys of a model's state dict are strings.")
    first: dict[Any, str] = {}
    tensors = dict[str, Expected]()
    for key, value in values.items():
        if isinstance(value, (TensorEntry, Composite)):
            tied, kind = first.setdefault(value.view, key), kind_by_name(key, value.dtype)
            tensors[key] = Expected(key, value.dtype, value.shape, kind, tied if tied != key else None)
    metadata = node.metadata if isinstance(node, OrderedDict) else None
    return Target(name, CHECKPOINT, tensors, False, values, metadata, checkpoint, (remark,) if remark else ())


def extra_states(names: Iterable[Any], tensors: Collection[str]) -> list[str]:
    """Those of the names that modules use for what is no parameter or buffer (`get_extra_state`), and no tensor."""
    return [name for name in names if type(name) is str and name.endswith(EXTRA_STATE) and name not in tensors]


def kind_by_name(name: str, dtype: DType | None) -> str:
    """`buffer` for the names of buffers in torch's own modules, and for what has no gradient; else `parameter`."""
    is_integer = dtype is not None and dtype.kind in ("int", "uint", "bool")
    return BUFFER if is_integer or name.rpartition(".")[2] in _BUFFERS else PARAMETER


def tie_groups(tensors: Iterable[Expected]) -> dict[str, list[str]]:
    """First name -> all names of each tensor that has several."""
    groups: dict[str, list[str]] = {}
    for expected in tensors:
        groups.setdefault(expected.tied_to or expected.name, []).append(expected.name)
    return {name: names for name, names in groups.items() if len(names) > 1}


def is_spec(raw: bytes) -> bool:
    """True if these first bytes of a file begin a spec, of any version."""
    return raw.lstrip()[:1] == b"{" and b'"' + SPEC_SCHEMA.encode() in raw[:4096]


def of_spec(raw: bytes, name: str) -> Target:
    """The target that a spec describes. name: the file, for messages.
    Raises `Unsupported` for a spec of another version, `Corrupt` for one that contradicts itself."""
    meaning = "It was not written by ckptool spec."
    remake = command("spec", Slot("TARGET"), out=FILE)
    try:
        facts = parse_object(raw, name)
    except Corrupt as error:
        raise Corrupt(error.what, error.why, f"Make it again: {remake}") from None
    if (schema := facts.get("schema")) != SPEC_SCHEMA + SPEC_VERSION:
        what = f"{name} is a spec of an unsupported version: {str(schema)[:60]}"
        why = f"This ckptool reads {SPEC_SCHEMA}{SPEC_VERSION}."
        raise Unsupported(what, why, f"Make it again with this version: {remake}")
    for section in ("tensors", "ties"):
        if not isinstance(facts.get(section), list):
            raise Corrupt(f"{name} has no list of {section}", meaning)
    tensors: dict[str, Expected] = {}
    for number, fact in enumerate(facts["tensors"]):
        if not isinstance(fact, dict) or type(fact.get("name")) is not str:
            raise Corrupt(f"{name}: tensor {number} has no name", meaning)
        entry_name, where = fact["name"], f"{name}: tensor {number} ({fact['name'][:80]})"
        dtype, shape, kind = map(fact.get, ("dtype", "shape", "kind"))
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
            raise Corrupt(f"{where} has no shape", "A shape is a list of sizes.")
        if kind not in (PARAMETER, BUFFER):
            raise Corrupt(f"{where} is neither a parameter nor a buffer")
        if entry_name in tensors:
            raise Corrupt(f"{name} has {entry_name!r} twice", "Names in a state dict are unique.")
        try:
            tensors[entry_name] = Expected(entry_name, by_name(dtype if type(dtype) is str else ""), tuple(shape), kind)
        except KeyError:
            raise Corrupt(f"{where} has the unknown dtype {str(dtype)[:40]!r}") from None
    for names in facts["ties"]:
        are_known = isinstance(names, list) and all(type(text) is str and text in tensors for text in names)
        if not are_known or len(names) < 2:
            raise Corrupt(f"{name} ties names that it does not list", meaning)
        first = tensors[names[0]]
        for tied in names[1:]:
            other = tensors[tied]
            agrees = (other.dtype, other.shape) == (first.dtype, first.shape)
            if not agrees or other.tied_to or first.tied_to or tied == first.name:
                raise Corrupt(f"{name}: {tied} cannot be tied to {first.name}")
            tensors[tied] = replace(other, tied_to=first.name)
    return Target(name, SPEC, tensors, kinds_known=facts.get("kinds") == STATED)


def names_code(text: str) -> bool:
    """True for a text of the form `file.py:NAME` or `module:NAME`."""
    place, separator, attribute = text.rpartition(":")
    return bool(separator and place and attribute.isidentifier())


def accepted(
    pairs: Mapping[str, str], missing: Collection[str], free: Mapping[str, str], metadata: Any
) -> tuple[dict[str, str], list[str], list[str]]:
    """Names that a model misses in an older state dict -> keys that torch renames to them; names that it supplies; and
    keys that it takes out.

    Source: the `_load_from_state_dict` and load hooks of torch 2.13 (nn/modules/batchnorm.py,
    nn/utils/parametrizations.py, nn/utils/spectral_norm.py, ao/nn/intrinsic/qat/modules/conv_fused.py,
    ao/quantization/observer.py). A module tells the version of what it loads by `_metadata`; a state dict without it
    (safetensors, a plain dictionary) is of the oldest. Modules are known by the names of their parameters and buffers.
    pairs: name of the model -> the checkpoint's key that it gets.  free: names without a counterpart -> their keys.
    metadata: the state dict's `_metadata`, None where it has none.
    """
    renamed, supplied, dropped = dict[str, str](), list[str](), list[str]()
    for name in missing:
        *outer, last = name.split(".")
        old, module = ".".join([*outer[:-2], *outer[-1:]]), name.removesuffix(f"bn.{last}")
        gamma, mean = free.get(f"{module}gamma") if outer[-1:] == ["bn"] else None, _mean_beside(name)
        is_norm = last in _WEIGHT_NORM and outer[-2:-1] == ["parametrizations"]
        if is_norm and f"{old}_g" in free and f"{old}_v" in free:
            renamed[name] = free[old + _WEIGHT_NORM[last]]
        elif gamma and f"{module}{_FUSED.get(last, '?')}" in free and _version(metadata, gamma) < 2:
            renamed[name] = free[module + _FUSED[last]]
        elif last == COUNTER and (key := renamed.get(mean) or pairs.get(mean)) and _version(metadata, key) < 2:
            # The fused module around a `bn`, of version 1, misses the counter before the BatchNorm supplies it.
            quantizer = pairs.get(f"{module}weight_fake_quant.scale", "")
            supplied += [name] if not quantizer or _version(metadata, quantizer.removesuffix(".scale")) >= 2 else []
        elif last == "eps" and (low := pairs.get(".".join([*outer, "min_val"]))) and _version(metadata, low) < 2:
            supplied.append(name)  # of an observer
        elif {f"{name[:-2]}_orig", f"{name[:-2]}_u"} <= pairs.keys() and name[:-2] in free and last.endswith("_v"):
            # The second vector of `nn.utils.spectral_norm`: torch before 1.0 saved the weight itself instead.
            supplied.append(name)
            dropped.append(free[name[:-2]])
    return renamed, supplied, dropped


def also_newer(extra: Collection[str], target_names: Collection[str], metadata: Any) -> list[str]:
    """Names that a checkpoint of the model lacks because it is older: the counters of BatchNorms."""
    counters = [name for name in extra if name.rpartition(".")[2] == COUNTER and _mean_beside(name) in target_names]
    return [name for name in counters if _version(metadata, _mean_beside(name)) < 2]


def _mean_beside(counter: str) -> str:
    return counter.removesuffix(COUNTER) + "running_mean"


def _version(metadata: Any, key: str) -> int:
    """The version of a key's module when it was saved; 0 where it is not recorded."""
    facts = metadata.get(key.rpartition(".")[0]) if isinstance(metadata, Mapping) else None
    version = facts.get("version") if isinstance(facts, Mapping) else None
    return version if type(version) is int else 0
