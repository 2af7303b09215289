"""Whole modules, as `torch.save(model)` pickles them: their state dict, without their class.

A pickled `nn.Module` is its dictionary of attributes: `_parameters`, `_buffers` and `_modules` hold what `state_dict()`
returns, whatever the class is called and wherever its source is. Source: torch/nn/modules/module.py (`state_dict`,
`_save_to_state_dict`), torch 0.1.12 to 2.13. What only the class knows stays out: versions (`_metadata`), what
`get_extra_state` would return, an own `state_dict()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckptool.checkpoint import Composite, Flags, Tensor, TensorEntry
from ckptool.checkpoint.nodes import Object, OrderedDict, Set
from ckptool.errors import LimitExceeded

MAX_NAMES = 32 << 20  # characters of all names together, and 64 for each module that is met
_PARTS = ("_parameters", "_buffers", "_modules")


def module_attributes(node: Any) -> dict[Any, Any] | None:
    """The attributes of a pickled module, with its `_parameters`, `_buffers` and `_modules`; None for anything else."""
    if type(node) is not Object:
        return None
    attributes: Any = node.attributes
    if not attributes and node.how == "call" and node.args:
        if node.name.endswith(".reduce_graph_module"):  # torch.fx: the attributes, and imports for its source
            attributes = node.args[0]
        elif node.name.endswith(".OptimizedModule"):  # torch.compile: called with the module that it wraps
            attributes = {"_parameters": {}, "_buffers": {}, "_modules": {"_orig_mod": node.args[0]}}
    if not isinstance(attributes, dict) or not all(isinstance(attributes.get(part), dict) for part in _PARTS):
        return None
    return attributes if all(type(name) is str for part in _PARTS for name in attributes[part]) else None


def module_state_dict(node: Any) -> OrderedDict | None:
    """The `state_dict()` of a pickled module in torch's order: parameters, persistent buffers, then each submodule's.

    A submodule that stands in two places gives its tensors under both names, on one storage. None for what is no
    module, and for one whose names would fill the memory.
    """
    if module_attributes(node) is None:
        return None
    names = OrderedDict()
    try:
        for prefix, attributes in walk_modules(node, module_attributes, lambda found: found["_modules"]):
            left_out = attributes.get("_non_persistent_buffers_set")
            transient = set(left_out.items) if isinstance(left_out, Set) else set()
            for name, value in (*attributes["_parameters"].items(), *attributes["_buffers"].items()):
                if name not in transient and (tensor := detached(value)) is not None:
                    names[prefix + name] = tensor
    except LimitExceeded:
        return None
    return names


Attributes = dict[Any, Any]


def walk_modules(
    top: Any, attributes_of: Callable[[Any], Attributes | None], below: Callable[[Attributes], Attributes]
) -> Iterator[tuple[str, Attributes]]:
    """The attributes of a module and of all below it, parents first, each with the prefix of its names (`layer1.0.`).

    attributes_of: None for what is no module.  below: the things in it that may be modules, by name.
    A module that stands in two places comes twice, one within itself once. Raises `LimitExceeded` for names without
    end.
    """
    attributes = attributes_of(top)
    if attributes is None:
        return
    yield "", attributes
    spent, inside = 0, {id(top)}
    stack = [("", id(top), iter(below(attributes).items()))]
    while stack:
        prefix, own, parts = stack[-1]
        for name, node in parts:
            attributes = None if id(node) in inside else attributes_of(node)
            if attributes is None:
                continue
            here = f"{prefix}{name}."
            # At most so many names its own tensors have.
            parts_of_it = (attributes[part] for part in _PARTS if isinstance(attributes.get(part), dict))
            spent += 64 + len(here) * (1 + len(attributes) + sum(map(len, parts_of_it)))
            if spent > MAX_NAMES:
                raise LimitExceeded("modules whose names together are too long", "The file is probably malicious.")
            yield here, attributes
            inside.add(id(node))
            stack.append((here, id(node), iter(below(attributes).items())))
            break
        else:
            stack.pop()
            inside.discard(own)


_WRAPPERS = ("torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch.autograd.variable.Variable")
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")


def detached(value: Any) -> Tensor | None:
    """The tensor in a parameter or buffer as a state dict has it: no parameter, no gradient. None for none."""
    if isinstance(value, Composite) and value.made.name in _PARAMETERS:
        value = value.made.args[0]
    elif type(value) is Object and value.name in _WRAPPERS and value.args:  # before torch 0.4
        value = value.args[0]
    if not isinstance(value, TensorEntry):
        return value if isinstance(value, Composite) else None
    flags = Flags(conj=value.flags.conj, neg=value.flags.neg)
    return value.with_flags(flags)
