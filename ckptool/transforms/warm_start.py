"""The state dict that a warm start writes: the target's keys in its order, each tensor of its type, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ckptool.analysis.targets import Expected, Target
from ckptool.checkpoint import NO_FLAGS, Composite, Flags, Storage, Tensor, TensorEntry
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.tree import map_storages
from ckptool.commands import Slot, arg
from ckptool.errors import Conflict, listed
from ckptool.transforms.casting import compact, converted, first_part, laid_over
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
    own = [name for name in target.values or target.tensors if name not in chosen]
    partly = [name for name, choice in chosen.items() if choice.part is not None and _needs_base(target, name, choice)]
    if target.values is None and (own or partly):
        raise Conflict(
            f"{target.name} has no values, and these names are not all in the checkpoint: {listed(own + partly)}",
            "A spec says names, shapes and types. Nothing was written.",
            f"Name a target that has values: {arg(against=Slot('CHECKPOINT'))} or {arg(against='file.py:factory')}",
        )
    made: dict[str, Tensor] = {}  # by the first name of each tensor
    flagged: dict[tuple[str, int], Tensor] = {}
    items: dict[str, Any] = {}
    for name in target.values or target.tensors:
        expected = target.tensors.get(name)
        if expected is None or name not in chosen:
            items[name] = (target.values or {})[name]
            continue
        first = expected.tied_to or name
        if first not in made:
            made[first] = _loaded(target, expected, chosen[name])
        base = (target.values or {}).get(name)
        place = (first, id(base))  # what is one object in the target stays one
        if place not in flagged:
            flagged[place] = _flagged(made[first], base)
        items[name] = flagged[place]
    attributes = {"_metadata": target.metadata} if target.metadata is not None else None
    tree = map_storages(OrderedDict(_apart(items, target), attributes), _on_cpu)
    return Filled(tree, tuple(own))


def _needs_base(target: Target, name: str, choice: Assignment) -> bool:
    return choice.part != target.tensors[name].shape


def _loaded(target: Target, expected: Expected, choice: Assignment) -> Tensor:
    """A tensor as the target wants it."""
    tensor = choice.tensor
    if isinstance(tensor, Composite) or expected.dtype is None:
        return tensor
    base = (target.values or {}).get(expected.name)
    if choice.part is not None:
        tensor = _partly(first_part(tensor, choice.part), expected.dtype, base, expected)
    else:
        tensor = converted(tensor, expected.dtype)
    return tensor


def _flagged(tensor: Tensor, base: Any) -> Tensor:
    """The tensor with the flags of the target's own; its values may be conjugate or negative views."""
    if isinstance(tensor, Composite):
        return tensor
    flags = base.flags if isinstance(base, TensorEntry) else NO_FLAGS
    return replace(tensor, flags=Flags(flags.requires_grad, flags.parameter, *tensor.flags.lazy))


def _partly(part: TensorEntry, dtype: DType, base: Any, expected: Expected) -> TensorEntry:
    part = converted(compact(part), dtype)
    if part.shape == expected.shape:
        return part
    if not isinstance(base, TensorEntry):
        raise Conflict(
            f"{expected.name} is no plain tensor in the target, so nothing can be laid over it",
            "Nothing was written.",
            f"Keep the target's: {arg(on_mismatch='skip')}",
        )
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
    bases = [(target.values or {}).get(name) for name in names]
    if (
        not all(isinstance(base, TensorEntry) for base in bases)
        or len({id(base.storage) for base in bases if base}) != 1
    ):
        return False
    return all(
        (base.storage.nbytes, base.layout) == (items[name].storage.nbytes, items[name].layout)
        for name, base in zip(names, bases, strict=True)
        if base is not None
    )


def _own(value: TensorEntry) -> TensorEntry:
    """The tensor over a storage that only it has."""
    made = compact(value)
    return replace(made, storage=replace(value.storage)) if made.storage is value.storage else made


def _on_cpu(storage: Storage) -> Storage:
    return storage if storage.location == "cpu" else replace(storage, location="cpu")
