"""The state dict that a warm start writes: the target's keys in its order, each tensor of its type, on the CPU; and
an optimizer's state for it, in which slots go where their parameters go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptool.analysis.targets import Expected, Target
from ckptool.analysis.warm_start import RESIZED, LeftOut, OptimizerReport
from ckptool.checkpoint import NO_FLAGS, Checkpoint, Composite, Flags, Storage, Tensor, TensorEntry
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.tree import address, map_storages
from ckptool.commands import ADDRESS, FILE, OUT, Slot, arg, command
from ckptool.conventions.state_dicts import StateDict, optimizers
from ckptool.errors import Conflict, NoMatch, UsageError, counted, listed
from ckptool.transforms.casting import compact, converted, first_part, laid_over
from ckptool.transforms.optimizers import Slots, first_names, in_model_order, parameters_of
from ckptool.transforms.warm_start_plan import Assignment


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A whole state dict for a target, and the names whose values are the target's own."""

    state_dict: OrderedDict
    taken: tuple[str, ...]


def filled(target: Target, chosen: dict[str, Assignment]) -> Filled:
    """Every key of the target with a value: what was chosen from the checkpoint, the rest from the target itself.

    Raises `Conflict` naming what a target without values (a spec) cannot fill up.
    """
    values, order = target.values or {}, target.values or target.tensors
    own = [name for name in order if name not in chosen]
    partly = [name for name, choice in chosen.items() if choice.part not in (None, target.tensors[name].shape)]
    if target.values is None and (own or partly):
        raise Conflict(
            f"{target.name} has no values, and these names are not all in the checkpoint: {listed(own + partly)}",
            "A spec says names, shapes and types. Nothing was written.",
            f"Name a target that has values: {arg(against=Slot('CHECKPOINT'))} or {arg(against='file.py:factory')}",
        )
    made: dict[str, Tensor] = {}  # by the first name of each tensor
    flagged: dict[tuple[str, int], Tensor] = {}
    items: dict[str, Any] = {}
    for name in order:
        expected, base = target.tensors.get(name), values.get(name)
        if expected is None or name not in chosen:
            items[name] = base
            continue
        first = expected.tied_to or name
        if first not in made:
            made[first] = _loaded(chosen[name], expected, base)
        place = (first, id(base))  # what is one object in the target stays one
        if place not in flagged:
            flagged[place] = tensor = made[first]
            if isinstance(tensor, TensorEntry):  # whose values may be conjugate or negative views
                flags = base.flags if isinstance(base, TensorEntry) else NO_FLAGS
                flags = Flags(flags.requires_grad, flags.parameter, *tensor.flags.lazy)
                flagged[place] = replace(tensor, flags=flags)
        items[name] = flagged[place]
    attributes = {"_metadata": target.metadata} if target.metadata is not None else None

    def on_cpu(storage: Storage) -> Storage:
        return storage if storage.location == "cpu" else replace(storage, location="cpu")

    return Filled(map_storages(OrderedDict(_apart(items, target), attributes), on_cpu), tuple(own))


def _loaded(choice: Assignment, expected: Expected, base: Any) -> Tensor:
    """A tensor as the target wants it. base: the target's own."""
    tensor = choice.tensor
    if isinstance(tensor, Composite) or expected.dtype is None:
        return tensor
    if choice.part is None:
        return converted(tensor, expected.dtype)
    part = converted(compact(first_part(tensor, choice.part)), expected.dtype)
    if part.shape == expected.shape:
        return part
    if not isinstance(base, TensorEntry):
        what = f"{expected.name} is no plain tensor in the target, so nothing can be laid over it"
        raise Conflict(what, "Nothing was written.", f"Keep the target's: {arg(on_mismatch='skip')}")
    return laid_over(base, part)


def _apart(items: dict[str, Any], target: Target) -> dict[str, Any]:
    """Tensors that are two in the target get storages of their own, without what else was in the checkpoint's.

    Where the target's lie in one storage just so (views that overlap), so do these.
    """
    holders: dict[int, list[str]] = {}
    for name, value in items.items():
        if isinstance(value, TensorEntry) and name in target.tensors:
            holders.setdefault(id(value.storage), []).append(name)
    made: dict[str, TensorEntry] = {}
    again: dict[int, TensorEntry] = {}
    apart = dict(items)
    for names in holders.values():
        if _laid_out_alike(names, items, target):
            continue
        alone = len({target.tensors[name].tied_to or name for name in names}) == 1
        for name in names:
            value, first = items[name], target.tensors[name].tied_to or name
            if value is (target.values or {}).get(name):
                continue
            if first not in made:
                own = alone and value.span() == (0, value.storage.nbytes)
                made[first] = value if own else _own(value)
            if id(value) not in again:
                again[id(value)] = replace(made[first], flags=value.flags)
            apart[name] = again[id(value)]
    return apart


def _laid_out_alike(names: list[str], items: dict[str, Any], target: Target) -> bool:
    """True if the target's tensors of these names see one storage of the same size in the same way."""
    bases = [base for name in names if isinstance(base := (target.values or {}).get(name), TensorEntry)]
    if len(bases) < len(names) or len({id(base.storage) for base in bases}) != 1:
        return False
    return all(
        (base.storage.nbytes, base.layout) == (items[name].storage.nbytes, items[name].layout)
        for name, base in zip(names, bases, strict=True)
    )


def _own(value: TensorEntry) -> TensorEntry:
    """The tensor over a storage that only it has."""
    made = compact(value)
    return replace(made, storage=replace(value.storage)) if made.storage is value.storage else made


# The optimizer -------------------------------------------------------------------------------------------------------


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
    slots = _only_one(checkpoint)
    first = first_names(root)
    told = target.tensors if target.kinds_known else {}
    kinds = {first[choice.source]: told[name].kind for name, choice in chosen.items() if name in told}
    names, known_by = slots.among(parameters_of(root, kinds), ordered=in_model_order(root.node))
    goes_to = _destinations(first, target, chosen, parameters)
    state: dict[str, Any] = {}
    group_of: dict[str, int] = {}
    left: list[LeftOut] = []
    for number, group in enumerate(slots.groups):
        for slot in group["params"]:
            name = names.get(slot)
            goal, why = goes_to.get(name, ("", "its parameter is not loaded")) if name is not None else ("", "no name")
            if goal:
                group_of[goal] = number
                if not why and slot in slots.tree["state"]:
                    state[goal] = slots.tree["state"][slot]
            if why:
                left.append(LeftOut(name or str(slot), why))
    fresh = tuple(name for name in parameters if name not in state)
    kept = tuple(name for name in parameters if name in state)
    report = OptimizerReport(slots.place, known_by, kept, fresh, tuple(left))
    without = ("params", "param_names")
    groups = [{key: value for key, value in group.items() if key not in without} for group in slots.groups]
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
    named = [{**group, "params": names} for group, names in zip(found.groups, members, strict=True)]
    state = {name: found.state[name] for names in members for name in names if name in found.state}
    return Slots({"state": state, "param_groups": named}, "").numbered()


def _only_one(checkpoint: Checkpoint) -> Slots:
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
    ((path, optimizer),) = found
    return Slots(optimizer, address(path))


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
            why = "its parameter is resized" if choice.how == RESIZED else why
            found[first[choice.source]] = (goal, why)
    return found
