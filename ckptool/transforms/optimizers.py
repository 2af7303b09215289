"""An optimizer's state by the names of its parameters, by their numbers, or by flattened keys.

`Optimizer.state_dict()` numbers its slots in the order in which the optimizer was given its parameters, through all
groups (torch/optim/optimizer.py); engines that shard them write names (`state[name]`), and torchtitan flattens those.
Which name a number means is known from `param_names`, which newer versions write; or where the weights beside it are in
the order of the model, and have as many parameters with the shapes of the slots one by one: of several groups, only one
can continue with each parameter. Otherwise it cannot be known and is refused: a momentum on the wrong weight trains,
and nobody notices.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ckptool.analysis.targets import PARAMETER, Target, kind_by_name
from ckptool.checkpoint import Checkpoint, Composite, TensorEntry
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.nodes import fields, items
from ckptool.checkpoint.tree import address, holders, replaced_at, tensors
from ckptool.commands import FILE, OUT, arg, command
from ckptool.conventions.optimizer_keys import FACTORS, RESTORED, flattened, nested, with_numbers
from ckptool.conventions.state_dicts import WEIGHTS, find_state_dicts, optimizers, without_wrappers
from ckptool.errors import CkptoolError, Conflict, NoMatch, Unsupported, UsageError, counted, listed, printable
from ckptool.formats import members

NAMES, IDS, FLAT = "names", "ids", "flat"
FORMS = (NAMES, IDS, FLAT)
OPTION = arg("optimizer_as")
ADVICE = f"name the model, or a spec of it, for the order of its parameters: {arg(against='model.py:build')}"

Shapes = Mapping[str, tuple[int, ...]]


# Forms ---------------------------------------------------------------------------------------------------------------


def with_optimizers(
    part: Checkpoint, form: str, whole: Checkpoint, target: Target | None = None
) -> tuple[Checkpoint, list[str]]:
    """The part with every optimizer's slots by name or number, or flattened, and a line for each optimizer.

    whole: the checkpoint that contains the part; the names are looked for among its weights.  target: the model to take
    the names from where these do not tell, and in whose order slots are numbered.
    Raises `UsageError` for a form that does not exist, `NoMatch` where there is no optimizer, `Conflict` where it is
    not certain which parameter a number stands for, `Unsupported` for state that is not by single parameters.
    """
    if form not in FORMS:
        raise UsageError(f"unknown {OPTION} {form!r}", f"Available: {', '.join(FORMS)}.")
    tree = nested(part.tree)
    states = list(optimizers(tree))
    if not states:
        what = f"{part.source or 'the checkpoint'} has no optimizer state"
        why = "It would be a dictionary with `state` and `param_groups`. Nothing was written."
        raise NoMatch(what, why, _member_command(whole, form) or f"Go without: omit {OPTION}")
    lines = [] if tree is part.tree else ["flattened keys of the optimizer are nested again"]
    for path, optimizer in states:
        place = address((*part.base, *path))
        slots = Slots(optimizer, place)
        slots = slots.renamed(slots.names(whole, target)) if form == IDS and target is not None else slots
        count, changed = counted(len(slots.slots), "parameter"), slots.tree
        if form == IDS and not any(type(slot) is str for slot in slots.slots):
            line = f"numbers as keys, {count}"
        elif form == IDS:
            numbered = {*slots.slots}
            if strange := [slot for slot in slots.tree["state"] if slot not in numbered]:
                what = f"{place} has state for {listed(strange, 3)}"
                raise Conflict(what, "No group has that parameter, so it has no number. Nothing was written.")
            changed, line = slots.numbered(target), f"{count} by number"
        else:
            line = f"{count} by name"
            if not slots.is_named:
                slots.refuse_joint(f"Keep its numbers: omit {OPTION}")
                line += "" if slots.own_names() is not None else ", known by order"
                changed = slots.renamed(slots.names(whole, target)).tree
            if form == FLAT:
                changed, line = flattened(changed), f"{line}, flattened"
        if changed is not optimizer:
            tree = replaced_at(tree, path, changed)
        as_it_was = "" if changed is not optimizer else ", as it was"
        lines.append(f"{printable(place) or 'the optimizer'}: {line}{as_it_was}")
    return replace(part, tree=tree, notes=tuple(note for note in part.notes if note.code != RESTORED)), lines


def _member_command(whole: Checkpoint, form: str) -> str:
    """The command for the optimizer's own file or folder beside the weights of a folder: `optimizer.pt`, accelerate's
    `optimizer_0`, or DeepSpeed's tag beside a Trainer's weights."""
    name = next((name for name in members.beside(whole) if name.startswith(("optimizer", "global_step"))), None)
    if name is None or whole.source is None:
        return ""
    folder = whole.source.path if isinstance(whole.source, Folder) else os.path.dirname(whole.source.path)
    member = os.path.join(folder, name)
    model = "MODEL" if form != IDS and name.startswith("optimizer.") else ""  # a file that only has numbers
    return f"It lies beside the weights: {command('convert', member, optimizer_as=form, against=model, out=OUT)}"


# Which slot is whose -------------------------------------------------------------------------------------------------


class Slots:
    """An optimizer's state dict, with the slots of all its groups in order. place: its address.

    Raises `Conflict` for groups that do not list parameters by number or name.
    """

    def __init__(self, optimizer: dict[str, Any], place: str) -> None:
        self.place, self.called = place, place or "the optimizer"
        for group in optimizer["param_groups"]:
            if not isinstance(group, dict) or not isinstance(group.get("params"), (list, tuple)):
                raise Conflict(f"{place} has a group without parameters", "No optimizer writes that.")
            if not all(type(slot) in (int, str) for slot in group["params"]):
                raise Conflict(f"{place} has a slot that is neither a number nor a name")
        self.tree = with_numbers(optimizer)
        self.groups: list[dict[str, Any]] = self.tree["param_groups"]
        self.slots = [slot for group in self.groups for slot in group["params"]]
        self.is_named = all(type(slot) is str for slot in self.slots)
        if len(set(self.slots)) != len(self.slots):
            raise Conflict(f"{self.called} has a parameter in two groups", "No optimizer writes that.")

    def renamed(self, new: Mapping[Any, Any]) -> Slots:
        """The slots under other keys. Raises `Unsupported` where they are keys elsewhere, too (Lookahead's)."""
        if others := [key for key, part in self.tree.items() if key != "state" and {*self.slots} & {*fields(part)}]:
            fix = f"Go without: {command('slim', FILE, out=OUT)}"
            raise Unsupported(f"{self.called} has more for its parameters in {listed(others)}", "", fix)
        state = {new.get(slot, slot): value for slot, value in self.tree["state"].items()}
        groups = [{**group, "params": [new[slot] for slot in group["params"]]} for group in self.groups]
        return Slots({**self.tree, "state": state, "param_groups": groups}, self.place)

    def numbered(self, target: Target | None = None) -> dict[str, Any]:
        """The state dict with numbers for its named slots, and the names beside them. target: the model in whose order
        those of each group are. Raises `Conflict` for a parameter that it does not have."""
        order = {name: number for number, name in enumerate(self.slots if target is None else target.tensors)}
        if absent := [slot for slot in self.slots if slot not in order]:
            what = f"{self.called} has state for {listed(absent, 3)}, and the model has no such parameter"
            raise Conflict(what, "Its slots cannot be numbered as in the model. Nothing was written.")
        names = [sorted(group["params"], key=order.__getitem__) for group in self.groups]
        numbers = {slot: number for number, slot in enumerate(slot for slots in names for slot in slots)}
        pairs = zip(self.groups, names, strict=True)
        groups = [{**group, "params": ordered, "param_names": ordered} for group, ordered in pairs]
        return Slots({**self.tree, "param_groups": groups}, self.place).renamed(numbers).tree

    def refuse_joint(self, fix: str, weights: Mapping[Any, Any] | None = None) -> None:
        """Raises `Unsupported` for LBFGS, and for factors: state of other shapes than these weights."""
        what, weights = "", weights or {}
        for path, tensor in tensors({name: slot for name, slot in self.tree["state"].items() if name in weights}):
            if tensor.numel > 1 and tensor.shape != getattr(weights[path[0]], "shape", tensor.shape):
                field = next((key for key in reversed(path) if type(key) is str), path[-1])
                what = f"{self.called}: {field} of {path[0]} does not have one value for each of its elements"
        if any("history_size" in group and "line_search_fn" in group for group in self.groups):
            what = f"{self.called} is LBFGS, whose vectors cover all parameters together"
        if what:
            raise Unsupported(what, "It cannot follow single parameters. Nothing was written.", fix)

    def shapes(self) -> dict[Any, list[tuple[int, ...]]]:
        """The shapes of the tensors in each slot; numbers say nothing. One without tensors fits every shape."""
        shapes: dict[Any, list[tuple[int, ...]]] = {}
        for path, tensor in tensors(self.tree["state"]):
            if type(path[-1]) is str and path[-1] not in FACTORS:
                shapes.setdefault(path[0], []).append(tensor.shape or ())
        return shapes

    def own_names(self) -> dict[Any, str] | None:
        """The name of each slot, as the groups give them; None where they do not."""
        if self.is_named:
            return {slot: slot for slot in self.slots}
        names: list[Any] = []
        for group in self.groups:
            own = group.get("param_names")
            names += own if isinstance(own, (list, tuple)) and len(own) == len(group["params"]) else group["params"]
        are_names = all(type(name) is str for name in names) and len(set(names)) == len(names)
        return dict(zip(self.slots, names, strict=True)) if are_names else None

    def names(
        self, whole: Checkpoint, target: Target | None, advice: str = ADVICE, buffers: Collection[str] = ()
    ) -> dict[Any, str]:
        """The name of every slot: as the groups give them, else by the order of the only set of weights beside it that
        fits, or else by that of the model's parameters.

        advice: what to do where that is not known.  buffers: keys that are not parameters, skipped where there are too
        many.
        """
        roots = [root for root in find_state_dicts(replace(whole, tree=nested(whole.tree))) if root.is_model]
        roots = [root for root in roots if root.kind == WEIGHTS] or roots  # no optimizer trains an average
        if (named := self.own_names()) is not None:  # maybe as DDP calls them, beside the weights of its module
            bare = {slot: without_wrappers(name) for slot, name in named.items()}
            beside = [names for names in (named, bare) if any({*names.values()} <= root.node.keys() for root in roots)]
            return beside[0] if beside else named
        fitting: dict[tuple[Any, ...], dict[Any, str]] = {}
        first_error: CkptoolError | None = None
        for root in roots:
            # DeepSpeed lists the names of buffers, which no optimizer has, beside the weights.
            holder = holders(whole.tree, root.path)[-1] if root.path and root.module is None else None
            buffer_names = {name for name in items(fields(holder).get("buffer_names")) if type(name) is str}
            texts = {k: v for k, v in root.node.items() if type(k) is str and isinstance(v, (TensorEntry, Composite))}
            first_names = {texts[key].view: key for key in reversed(texts)}  # of each tensor
            entries = {k: v for k, v in texts.items() if first_names[v.view] == k and k not in buffer_names}
            shapes = {k: v.shape or () for k, v in entries.items() if kind_by_name(k, v.dtype) == PARAMETER}
            if len(shapes) > len(self.slots):
                shapes = {name: shape for name, shape in shapes.items() if name not in buffers}
            try:
                names = self._names_in_order(shapes, advice, _in_model_order(root.node))
            except Conflict as error:
                first_error = first_error or error
            else:
                fitting.setdefault(tuple(names.items()), names)
        if len(fitting) == 1:
            return next(iter(fitting.values()))
        if target is not None:
            parameters = {tensor.name: tensor.shape or () for tensor in target.unique if tensor.kind == PARAMETER}
            return self._names_in_order(parameters, advice, _in_model_order(target.tensors))
        if first_error is not None and not fitting:
            raise first_error
        fits = f"{listed(roots, 4)} all fit" if fitting else f"{whole.source or 'the checkpoint'} holds no weights"
        why = "Only the weights that it was made for tell which parameter a number stands for."
        fix = f"{advice[:1].upper()}{advice[1:]}"
        raise Conflict(f"the parameters of {self.called} are numbered, and {fits}", f"{why} Nothing was written.", fix)

    def _names_in_order(self, parameters: Shapes, advice: str, ordered: bool) -> dict[Any, str]:
        """The name of each slot by the order of the parameters. ordered: that is the model's order.

        Raises `Conflict` where that is not known: a count or a shape differs, or two groups might continue.
        """
        remaining, shapes = [list(reversed(group["params"])) for group in self.groups], self.shapes()
        names: dict[Any, str] = {}
        for name, shape in parameters.items() if ordered and len(self.slots) == len(parameters) else ():
            fits = [queue for queue in remaining if queue and shape in (shapes.get(queue[-1]) or [shape])]
            if len(fits) != 1:
                break
            names[fits[0].pop()] = name
        if ordered and len(names) == len(self.slots) == len(parameters):
            return names
        slots, groups = counted(len(self.slots), "slot"), counted(len(self.groups), "group")
        count = f"{slots} in {groups}, {counted(len(parameters), 'parameter')}"
        raise Conflict(
            f"it is unclear which slots of {self.called} belong to which parameters ({count})",
            "They are numbered, not named, and neither their count nor their shapes identify them. "
            + ("" if ordered else "The weights are sorted by name, as safetensors are, not as in the model. ")
            + "Nothing was changed.",
            "Save names along: torch.optim.X(model.named_parameters(), …) of torch 2.6 and later; or " + advice,
        )


def _in_model_order(tensors: Mapping[Any, Any]) -> bool:
    """False for weights sorted by element size and name, as safetensors sorts them: no model has that order, since it
    has a weight before its bias."""
    dtypes = {name: getattr(value, "dtype", None) for name, value in tensors.items() if type(name) is str}
    names = [(-dtype.itemsize, name) for name, dtype in dtypes.items() if dtype is not None]
    return len(names) < 3 or names != sorted(names)
