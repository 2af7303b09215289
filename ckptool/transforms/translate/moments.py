"""An optimizer's moments through the rules of its parameters: what is split or transposed there is so here.

Slots keep being named, or numbered: then their numbers follow the order of the new keys, group by group, and the names
are written beside them (`param_names`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.commands import arg
from ckptool.errors import Conflict, Unsupported
from ckptool.names.steps import Step
from ckptool.transforms.optimizers import Slots
from ckptool.transforms.translate.apply import TranslatedRoot

WITHOUT = f"Translate the weights alone, by their address: FILE#ADDRESS {arg(extract=True)}"


def translated_optimizer(
    optimizer: dict[str, Any], place: str, whole: Checkpoint, roots: Sequence[TranslatedRoot]
) -> dict[str, Any]:
    """The state dict of an optimizer for the new parameters. Raises `Conflict` where parameters that become one have
    state that differs beside their moments or are of two groups, `Unsupported` for state of other shapes."""
    slots = Slots(optimizer, place)
    is_named = slots.is_named
    if not is_named:
        buffers = {name for root in roots for name in root.dropped}  # keys that the rules leave out may be some
        advice = f"translate{WITHOUT.removeprefix('Translate')}"
        slots = slots.renamed(slots.names(whole, None, advice, buffers)[0])
    optimizer, keys = slots.tree, {*slots.slots}
    taken = ({key for step in root.steps for key in step.keys} | {*root.kept, *root.dropped} for root in roots)
    root = next((each for each, own in zip(roots, taken, strict=True) if keys & own), roots[0])
    by_name = {slot: value for slot, value in optimizer["state"].items() if slot in keys}
    beside = {slot: value for slot, value in optimizer["state"].items() if slot not in keys}
    state, renamed = _through_steps(by_name, keys, root, place)
    order = {name: number for number, name in enumerate(root.items)}
    groups = []
    for group in slots.groups:
        new = dict.fromkeys(one for slot in group["params"] for one in renamed[slot])
        groups.append({**group, "params": sorted(new, key=lambda name: order.get(name, len(order)))})
    members = [name for group in groups for name in group["params"]]
    if len(set(members)) != len(members):
        again = next(name for name in members if members.count(name) > 1)
        what = f"{place}: {again} is made of parameters of two groups"
        raise Conflict(what, "It could be in only one of them.", WITHOUT)
    if not is_named:
        state = {name: state[name] for name in members if name in state}
    made = {**optimizer, "state": {**state, **beside}, "param_groups": groups}
    return made if is_named else Slots(made, place).numbered()


def _through_steps(
    state: Mapping[str, Any], keys: set[str], root: TranslatedRoot, place: str
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The state by new names, and the new names of each old one."""
    found: dict[str, Any] = {name: state[name] for name in root.kept if name in state}
    renamed = {name: [name] for name in root.kept} | {name: [] for name in (*root.dropped, *root.unfilled)}
    for step in root.steps:
        for key in step.keys:
            renamed[key] = step.outputs
        inside = [key for key in step.keys if key in keys]
        if not inside:
            continue
        if lacking := [key for key in step.keys if (key in state) != (inside[0] in state) or key not in keys]:
            what = f"{place} has state for {inside[0]} and none for {lacking[0]}"
            raise Conflict(what, "They become one parameter, half of whose moments would be invented.", WITHOUT)
        if inside[0] in state:
            found |= _slots(step, state, root, place)
    for key in keys:
        renamed.setdefault(key, [key])
        if key in state and renamed[key] == [key]:
            found.setdefault(key, state[key])
    return found, renamed


def _slots(step: Step, state: Mapping[str, Any], root: TranslatedRoot, place: str) -> dict[str, dict[Any, Any]]:
    """The slots of the parameters that a step makes."""
    slots = [state[key] for key in step.keys]
    if any(op.name == "resize" for op in step.rule.chain):
        what = f"{place}: the moments of {step.keys[0]} cannot be resized"
        raise Unsupported(what, "Squares that are interpolated may be negative.", WITHOUT)
    moving = tuple(op for op in step.rule.chain if op.name not in ("add", "cast"))  # which change the weights alone
    step = replace(step, rule=replace(step.rule, chain=moving))
    if not moving:
        return dict(zip(step.outputs, slots, strict=True))
    if not all(isinstance(slot, dict) and slot.keys() == slots[0].keys() for slot in slots):
        what = f"{place}: the state of {step.keys[0]} and of others have different fields"
        raise Conflict(what, "They become one parameter.", WITHOUT)
    made: dict[str, dict[Any, Any]] = {name: {} for name in step.outputs}
    for field in slots[0]:
        values = [slot[field] for slot in slots]
        if all(
            isinstance(value, TensorEntry) and value.shape == shape
            for value, shape in zip(values, step.shapes, strict=True)
        ):
            moments = dict(root.results(step, dict(zip(step.keys, values, strict=True)), {}))
            for name in step.outputs:
                made[name][field] = moments[name]
        elif all(_is_number_in_both(value, values[0]) for value in values):
            for name in step.outputs:
                made[name][field] = values[0]
        else:
            what = f"{place}: {field!s} of {step.keys[0]} is not of its shape"
            raise Unsupported(what, "How the rules would apply to it is not known.", WITHOUT)
    return made


def _is_number_in_both(one: Any, other: Any) -> bool:
    """True for the same number, or another plain value, that may be a tensor of one element."""
    if isinstance(one, TensorEntry) and isinstance(other, TensorEntry):
        return one.numel == 1 and one.dtype is other.dtype and (one is other or one.bytes() == other.bytes())
    return type(one) is type(other) and not isinstance(one, (dict, list, tuple)) and bool(one == other)
