"""The keys of an optimizer's state: flattened ones, as FSDP and torchtitan write them, and numbers that became text.

Source: torch/distributed/checkpoint/state_dict.py (`flatten_optimizer_state_dict`): `state.NAME.KEY` for every entry of
a parameter's state, of which dictionaries are flattened as well, and `param_groups.NAME.OPTION` for every option of its
group; torchtitan stores those below `optimizer.`. torch.distributed.checkpoint writes the keys of dictionaries as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.errors import Corrupt, printable

_GROUP_KEY = re.compile(r"(?P<place>(?:[^.]+\.)*?)param_groups\.(?P<name>.+)\.(?P<option>[^.]+)")
_SMALL = 1 << 10  # bytes of an option that is a tensor, as a learning rate may be


def nested(tree: Any) -> Any:
    """The tree with flattened optimizers as `state` by name and `param_groups`, below their prefix; else the same tree.

    They are looked for at the top and one level below. Raises `Corrupt` for keys that run through each other.
    """
    if not isinstance(tree, dict):
        return tree
    below = {key: _unflattened(value) for key, value in tree.items() if isinstance(value, dict)}
    if any(below[key] is not tree[key] for key in below):
        tree = {key: below.get(key, value) for key, value in tree.items()}
    return _unflattened(tree)


def _unflattened(node: dict[Any, Any]) -> dict[Any, Any]:
    """The dictionary with `state` and `param_groups` in place of the flattened keys that begin with each prefix."""
    options: dict[str, dict[str, dict[str, Any]]] = {}
    for key in node:
        if type(key) is str and "param_groups." in key and (found := _GROUP_KEY.fullmatch(key)):
            group = options.setdefault(found["place"], {}).setdefault(found["name"], {})
            group[found["option"]] = node[key]
    if not options:
        return node
    made: dict[Any, Any] = {}
    for key, value in node.items():
        place = next((place for place in options if _belongs(key, place)), None)
        if place is None:
            made[key] = value
            continue
        inside = made if not place else made.setdefault(place[:-1], {})
        state = inside.setdefault("state", {})
        inside.setdefault("param_groups", [])
        if key.startswith(f"{place}state."):
            _add(state, key.removeprefix(f"{place}state."), value, options[place])
    for place, names in options.items():
        (made if not place else made[place[:-1]])["param_groups"] += _groups(names)
    return made


def _belongs(key: Any, place: str) -> bool:
    return type(key) is str and key.startswith((f"{place}state.", f"{place}param_groups."))


def _add(state: dict[str, Any], key: str, value: Any, names: Mapping[str, Any]) -> None:
    """Puts `NAME.KEY…` into the state; the name is the longest of a group's that it begins with, else all but the
    last part."""
    parts = key.split(".")
    cut = next((n for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in names), len(parts) - 1)
    node = state
    for part in (".".join(parts[:cut]), *parts[cut:-1]):
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise Corrupt(f"an optimizer's key {printable(key)[:200]} runs through another value", "It was damaged.")
    node[parts[-1]] = value


def _groups(options: Mapping[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The parameter groups: names with the same options, in the order in which they come."""
    groups: dict[str, dict[str, Any]] = {}
    for name, values in options.items():
        key = repr(sorted((option, _comparable(value)) for option, value in values.items()))
        groups.setdefault(key, {**values, "params": []})["params"].append(name)
    yield from groups.values()


def _comparable(value: Any) -> str:
    if isinstance(value, TensorEntry):
        return repr((value.dtype, value.shape, value.bytes() if value.nbytes <= _SMALL else value.view))
    return repr(value)


def flattened(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The same with `state.NAME.KEY` and `param_groups.NAME.OPTION`; its slots must be by name."""
    made: dict[str, Any] = {}
    for name, slot in optimizer["state"].items():
        made.update(_flat(f"state.{name}", slot))
    for group in optimizer["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        made |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in options.items()}
    return made


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for inner, below in value.items():
            yield from _flat(f"{key}.{inner}", below)
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
