"""An optimizer's state for another model: slots go where their parameters go, by name.

`Optimizer.state_dict()` numbers its slots by the order in which the optimizer was given its parameters
(torch/optim/optimizer.py). Which name a number means is known from `param_names`, which newer versions write; or where
the weights beside it have as many parameters, and there is one way only in which each group has its own in the order of
the model, with the same shapes; or where no two of those have one shape. Else it cannot be known, and is refused: a
momentum on the wrong weight trains, and nobody sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ckptool.analysis.targets import PARAMETER, Target, kind_by_name
from ckptool.analysis.warm_start import LeftOut, OptimizerReport
from ckptool.checkpoint import Checkpoint, Composite, TensorEntry
from ckptool.checkpoint.optimizer_keys import with_numbers
from ckptool.checkpoint.state_dicts import StateDict, optimizers, without_wrappers
from ckptool.checkpoint.tree import address
from ckptool.commands import ADDRESS, FILE, OUT, arg, command
from ckptool.errors import Conflict, NoMatch, UsageError, counted, listed
from ckptool.transforms.warm_start_plan import Assignment

Shapes = Mapping[str, tuple[int, ...]]
MAX_STATES = 4_096  # of ways in which groups may be divided, that are followed
BY_NAMES, BY_ORDER, BY_SHAPES = "names", "order", "shapes"


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """State by the names of the target, the groups of the names, and the report with the names without state."""

    state: dict[str, Any]
    groups: list[dict[str, Any]]  # as saved, without `params` and `param_names`
    group_of: dict[str, int]
    report: OptimizerReport


def carried(
    checkpoint: Checkpoint, root: StateDict, target: Target, chosen: Mapping[str, Assignment], parameters: Sequence[str]
) -> Carried:
    """The optimizer state of a checkpoint by the parameter names of a target.

    parameters: the target's, in order.  Raises `NoMatch` where there is no optimizer, `UsageError` where there are
    several, `Conflict` where it cannot be known which slot belongs to which parameter.
    """
    place, optimizer = _only_one(checkpoint)
    first = _first_names(root)
    told = target.tensors if target.kinds_known else {}
    kinds = {first[choice.source]: told[name].kind for name, choice in chosen.items() if name in told}
    names, known_by = slot_names(optimizer, parameters_of(root, kinds), place, ordered=in_model_order(root.node))
    goes_to = _destinations(first, target, chosen, parameters)
    state: dict[str, Any] = {}
    group_of: dict[str, int] = {}
    left: list[LeftOut] = []
    for number, group in enumerate(optimizer["param_groups"]):
        for slot in group["params"]:
            name = names.get(slot)
            goal, why = goes_to.get(name, ("", "its parameter is not loaded")) if name is not None else ("", "no name")
            if goal:
                group_of[goal] = number
                if not why and slot in optimizer["state"]:
                    state[goal] = optimizer["state"][slot]
            if why:
                left.append(LeftOut(name or str(slot), why))
    fresh = tuple(name for name in parameters if name not in state)
    report = OptimizerReport(place, known_by, tuple(name for name in parameters if name in state), fresh, tuple(left))
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer["param_groups"]
    ]
    return Carried(state, groups, group_of, report)


def as_state_dict(found: Carried, parameters: Sequence[str]) -> dict[str, Any]:
    """The argument of `Optimizer.load_state_dict` for an optimizer with the target's parameters, group by group.

    Raises `Conflict` where a parameter without state belongs to one of several groups, and nothing says to which.
    """
    members: list[list[str]] = [[] for _ in found.groups]
    unknown = []
    for name in parameters:
        number = found.group_of.get(name, 0 if len(found.groups) == 1 else -1)
        if number < 0:
            unknown.append(name)
        else:
            members[number].append(name)
    if unknown:
        raise Conflict(
            f"the optimizer has {counted(len(found.groups), 'group')} of parameters, and it is unclear "
            f"which of them {listed(unknown)} belong to",
            "The learning rate and weight decay would be a guess. Nothing was written.",
            "Load it in Python, into your own optimizer: ckptool.load_into(model, FILE, optimizer=optimizer)",
        )
    order = {name: number for number, name in enumerate(name for group in members for name in group)}
    groups = [
        {**group, "params": [order[name] for name in names], "param_names": list(names)}
        for group, names in zip(found.groups, members, strict=True)
    ]
    return {"state": {order[name]: found.state[name] for name in order if name in found.state}, "param_groups": groups}


def _only_one(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    found = list(optimizers(checkpoint.tree))
    where = checkpoint.source or "the checkpoint"
    if not found:
        raise NoMatch(
            f"{where} has no optimizer state",
            "It would be a dictionary with `state` and `param_groups`. Nothing was changed.",
            f"Go without it: omit {arg(optimizer=True)}",
        )
    if len(found) > 1:
        raise UsageError(
            f"{where} has {counted(len(found), 'optimizer')}: {listed([address(path) for path, _ in found])}",
            "Which one belongs to these weights is not known.",
            f"Keep only one in a copy: {command('edit', FILE, drop=ADDRESS, out=OUT)}",
        )
    path, optimizer = found[0]
    check_groups(address(path), optimizer)
    return address(path), with_numbers(optimizer)


def check_groups(place: str, optimizer: Mapping[str, Any]) -> None:
    """Raises `Conflict` for groups that are not of parameters, by number or name."""
    for group in optimizer["param_groups"]:
        if not isinstance(group, dict) or not isinstance(group.get("params"), (list, tuple)):
            raise Conflict(f"{place} has a group without parameters", "No optimizer writes that.")
        if not all(type(slot) in (int, str) for slot in group["params"]):
            raise Conflict(f"{place} has a slot that is neither a number nor a name")


def _first_names(root: StateDict) -> dict[str, str]:
    """Each key of the weights with the first key of the same tensor."""
    first: dict[Any, str] = {}
    tensors = {key: value for key, value in root.node.items() if isinstance(value, (TensorEntry, Composite))}
    return {key: first.setdefault(value.view, key) for key, value in tensors.items() if type(key) is str}


def parameters_of(root: StateDict, kinds: Mapping[str, str] = MappingProxyType({})) -> Shapes:
    """The parameters among the weights of a checkpoint, each tensor once, with their shapes.

    kinds: of keys of which it is known whether they are parameters; of the others it is told by name.
    """
    own = [key for key, name in _first_names(root).items() if key == name]
    return {
        key: root.node[key].shape or ()
        for key in own
        if kinds.get(key, kind_by_name(key, root.node[key].dtype)) == PARAMETER
    }


def _destinations(
    first: Mapping[str, str], target: Target, chosen: Mapping[str, Assignment], parameters: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """Name in the checkpoint -> name in the target, and why its state does not go along where it does not."""
    taken = set(parameters)
    found = {}
    for name, choice in chosen.items():
        goal = name if name in taken else target.tensors[name].tied_to
        if goal in taken:
            why = "" if choice.part is None else "only a part of its parameter is loaded"
            why = "its parameter is resized" if choice.resized else why
            found[first[choice.source]] = (goal, why)
    return found


def slot_names(
    optimizer: Mapping[str, Any],
    parameters: Shapes,
    place: str,
    advice: str = f"go on without {arg(optimizer=True)}",
    *,
    ordered: bool = True,
) -> tuple[dict[Any, str], str]:
    """The name of each slot among `parameters`, and how that is known. Raises `Conflict` where it is not.

    advice: what to do then.  ordered: the parameters are in the order of the model.
    """
    groups = optimizer["param_groups"]
    slots = [slot for group in groups for slot in group["params"]]
    if len(set(slots)) != len(slots):
        raise Conflict(f"{place or 'the optimizer'} has a parameter in two groups", "No optimizer writes that.")
    said = said_names(groups, slots)
    if said is not None:
        bare = {without_wrappers(name): name for name in parameters}
        found = {slot: name if name in parameters else bare.get(without_wrappers(name)) for slot, name in said.items()}
        return {slot: name for slot, name in found.items() if name is not None}, BY_NAMES
    shapes = {slot: _shapes_in(optimizer["state"].get(slot)) for slot in slots}
    in_order = _by_order([group["params"] for group in groups], shapes, parameters) if ordered else None
    if in_order is not None and len(groups) == 1:
        return in_order, BY_ORDER
    by_shape = _by_shape(shapes, parameters)
    if by_shape is not None:
        return by_shape, BY_SHAPES
    if in_order is not None:
        return in_order, BY_ORDER
    count = f"{counted(len(slots), 'slot')} in {counted(len(groups), 'group')}, {counted(len(parameters), 'parameter')}"
    raise Conflict(
        f"it cannot be known which slots of {place or 'the optimizer'} belong to which parameters ({count})",
        "They are numbered, not named, and neither their count nor their shapes identify them. "
        + ("" if ordered else "The weights are sorted by name, as safetensors are, not as in the model. ")
        + "Nothing was changed.",
        "Save names along: torch.optim.X(model.named_parameters(), …) of torch 2.6 and later; or " + advice,
    )


def said_names(groups: Sequence[Any], slots: Sequence[Any]) -> dict[Any, str] | None:
    """The name of each slot, as the groups give them; None where they do not."""
    if all(type(slot) is str for slot in slots):
        return {slot: slot for slot in slots}
    names: list[Any] = []
    for group in groups:
        own = group.get("param_names")
        if not isinstance(own, (list, tuple)) or len(own) != len(group["params"]):
            return None
        names += own
    if not all(type(name) is str for name in names) or len(set(names)) != len(names):
        return None
    return dict(zip(slots, names, strict=True))


def _shapes_in(slot: Any) -> set[tuple[int, ...]]:
    """The shapes of a slot's tensors; the step, a number, says nothing."""
    values = slot.items() if isinstance(slot, dict) else ()
    return {value.shape for key, value in values if isinstance(value, TensorEntry) and key != "step"}


def _agrees(shapes: set[tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    return not shapes or shape in shapes


def in_model_order(tensors: Mapping[Any, Any]) -> bool:
    """False for weights that are sorted by size of element and name, as safetensors sorts them: that is no model's
    order, as a weight stands before its bias there."""
    dtypes = {name: getattr(value, "dtype", None) for name, value in tensors.items() if type(name) is str}
    names = [(-dtype.itemsize, name) for name, dtype in dtypes.items() if dtype is not None]
    return len(names) < 3 or names != sorted(names)


def _by_order(
    groups: Sequence[Sequence[Any]], shapes: Mapping[Any, set[tuple[int, ...]]], parameters: Shapes
) -> dict[Any, str] | None:
    """Slots by the only way in which every group has its parameters in the order of the model and all shapes agree;
    None where there is no such way, or several."""
    if sum(map(len, groups)) != len(parameters):
        return None
    # How many slots of each group have a name -> in how many ways (2: several), and the last pair of one of them.
    states: dict[tuple[int, ...], tuple[int, Any]] = {(0,) * len(groups): (1, None)}
    for name, shape in parameters.items():
        after: dict[tuple[int, ...], tuple[int, Any]] = {}
        for place, (ways, pairs) in states.items():
            for number, slots in enumerate(groups):
                if place[number] < len(slots) and _agrees(shapes[slots[place[number]]], shape):
                    goal = (*place[:number], place[number] + 1, *place[number + 1 :])
                    before = after.get(goal, (0, None))[0]
                    after[goal] = (min(2, before + ways), (slots[place[number]], name, pairs))
        if len(after) > MAX_STATES:
            return None
        states = after
    ways, pairs = states.get(tuple(map(len, groups)), (0, None))
    found: dict[Any, str] = {}
    while pairs is not None:
        slot, name, pairs = pairs
        found[slot] = name
    return found if ways == 1 else None


def _by_shape(shapes: Mapping[Any, set[tuple[int, ...]]], parameters: Shapes) -> dict[Any, str] | None:
    """Slots by shapes that only one parameter and one slot have; None unless that tells all slots."""
    counts = Counter(parameters.values())
    only = {shape: name for name, shape in parameters.items() if counts[shape] == 1}
    found: dict[Any, str] = {}
    for slot, seen in shapes.items():
        fits = {only[shape] for shape in seen if shape in only}
        known = {shape for shape in seen if counts[shape]}
        if len(fits) != 1 or len(known) != 1:
            return None
        found[slot] = fits.pop()
    return found if len(set(found.values())) == len(found) else None
