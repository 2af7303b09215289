"""The keys of an optimizer's state: flattened ones, as FSDP and torchtitan write them, and numbers that became text.

Source: torch/distributed/checkpoint/state_dict.py (`flatten_optimizer_state_dict`): `state.NAME.KEY` for every entry of
a parameter's state, of which dictionaries are flattened as well, and `param_groups.NAME.OPTION` for every option of its
group; torchtitan stores those below `optimizer.`. torch.distributed.checkpoint writes the keys of dictionaries as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.errors import Corrupt

# What torch's optimizers keep of a parameter in one number, whatever shape that has (torch/optim/{adam,nadam,asgd}.py).
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
_GROUPS = "param_groups."
_SMALL = 1 << 10  # bytes of an option that is a tensor, as a learning rate may be
MAX_PLACES = 16  # prefixes of flattened optimizers in one dictionary
MAX_LEVELS = 16  # of dictionaries in the state of one parameter; Shampoo has three


def nested(tree: Any) -> Any:
    """The tree with flattened optimizers as `state` by name and `param_groups`, below their prefix; else the same tree.

    They are looked for at the top and one level below. Raises `Corrupt` for a key that leads through a plain value.
    """
    if not isinstance(tree, dict):
        return tree
    children = {key: _unflattened(value) for key, value in tree.items() if isinstance(value, dict)}
    if any(children[key] is not tree[key] for key in children):
        tree = {key: children.get(key, value) for key, value in tree.items()}
    return _unflattened(tree)


def _unflattened(node: dict[Any, Any]) -> dict[Any, Any]:
    """The dictionary with `state` and `param_groups` in place of the flattened keys that begin with each prefix."""
    options: dict[str, dict[str, dict[str, Any]]] = {}
    for key in node:
        if type(key) is not str or _GROUPS not in key:
            continue
        prefix, _, rest = key.partition(_GROUPS)
        name, _, option = rest.rpartition(".")
        if name and option and (not prefix or prefix.endswith(".")):
            options.setdefault(prefix, {}).setdefault(name, {})[option] = node[key]
    new_keys = {name for place in options for name in ([place[:-1]] if place else ["state", "param_groups"])}
    if not options or len(options) > MAX_PLACES or not new_keys.isdisjoint(node):
        return node  # there are none, or what they would become is there already
    result: dict[Any, Any] = {}
    for key, value in node.items():
        text = key if type(key) is str else ""
        place = next((start for start in options if text.startswith((f"{start}state.", start + _GROUPS))), None)
        if place is None:
            result[key] = value
            continue
        parent = result.setdefault(place[:-1], {}) if place else result
        state = parent.setdefault("state", {})
        parent.setdefault("param_groups", [])
        if text.startswith(f"{place}state."):
            # NAME.KEY…: the name is the longest of the groups' names that it begins with, else all but the last part.
            name, _, leaf = text.removeprefix(f"{place}state.").rpartition(".")
            levels, parameter = [leaf], name
            while parameter not in options[place] and len(levels) < MAX_LEVELS and "." in parameter:
                parameter, _, part = parameter.rpartition(".")
                levels.append(part)
            if parameter not in options[place]:
                parameter, levels = name, [leaf]
            for part in (parameter, *levels[:0:-1]):
                state = state.setdefault(part, {})
                if not isinstance(state, dict):
                    shown = text.removeprefix(f"{place}state.")[:200]
                    raise Corrupt(f"an optimizer's key {shown} leads through another value", "It was damaged.")
            state[leaf] = value
    for place, names in options.items():
        (result[place[:-1]] if place else result)["param_groups"] += _groups(names)
    return result


def _groups(options: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameter groups: names with the same options, in the order in which they come."""
    groups: dict[Any, dict[str, Any]] = {}
    numbers: dict[int | str, int] = {}  # the same for equal values, by their ids and by their texts
    for name, values in options.items():
        for value in values.values():
            if id(value) in numbers:
                continue
            parts = value if isinstance(value, (list, tuple)) else (value,)
            text = f"<{id(value)}>"  # plain values, and lists of them, have the same if they are equal
            if isinstance(value, TensorEntry):
                text = repr((value.dtype, value.shape, value.bytes() if value.nbytes <= _SMALL else value.view))
            elif all(part is None or type(part) in (str, int, float, bool) for part in parts):
                text = repr(value)
            numbers[id(value)] = numbers.setdefault(text, len(numbers))
        key = tuple(sorted((option, numbers[id(value)]) for option, value in values.items()))
        groups.setdefault(key, {**values, "params": []})["params"].append(name)
    return list(groups.values())


def flattened(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The same with `state.NAME.KEY` and `param_groups.NAME.OPTION`; its state must be keyed by name."""
    flat: dict[str, Any] = {}
    for name, slot in optimizer["state"].items():
        flat.update(_flat(f"state.{name}", slot))
    for group in optimizer["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        flat |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in options.items()}
    return flat


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for inner, child in value.items():
            yield from _flat(f"{key}.{inner}", child)
    else:
        yield key, value


def with_numbers(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The optimizer with numbers as keys of its state where they became text: `"0"`, where a group names 0."""
    groups = [group.get("params") for group in optimizer["param_groups"] if isinstance(group, dict)]
    slots = {slot for group in groups if isinstance(group, (list, tuple)) for slot in group if type(slot) in (int, str)}
    numbers = {str(slot): slot for slot in slots if type(slot) is int and str(slot) not in slots}
    state = optimizer["state"]
    if not any(type(key) is str and key in numbers and numbers[key] not in state for key in state):
        return optimizer
    return {**optimizer, "state": {numbers.get(key, key): value for key, value in state.items()}}
