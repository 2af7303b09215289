"""`translate`: rules that change tensors: split, joined, transposed, reordered, under new names.

The rules come from `names/`; `apply` finds their keys, carries out their operations and makes the tensors. Here whole
checkpoints are translated: what is refused, what the way back would lose, and the optimizers that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ckptool.analysis.quantization import refuse_quantized
from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.nodes import OrderedDict, same_kind
from ckptool.checkpoint.tree import address, rebuild
from ckptool.commands import arg
from ckptool.conventions.optimizer_keys import nested
from ckptool.conventions.state_dicts import StateDict, optimizers
from ckptool.errors import CkptoolError, Conflict, NoMatch, Unsupported, UsageError, counted, listed, printable
from ckptool.names.rules import Rule, Translation
from ckptool.names.steps import Overs, Step
from ckptool.transforms.optimizers import Slots
from ckptool.transforms.rename import moved_metadata
from ckptool.transforms.translate.apply import KEEP, REFUSE, TranslatedRoot, plan_steps, refuse_unused

Values = tuple[str, ...]
MAX_HOLE = 64  # blocks that may be missing in a row and are still named
WITHOUT = f"Translate the weights alone, by their address: FILE#ADDRESS {arg(extract=True)}"


class TranslatedCheckpoint(NamedTuple):
    """The checkpoint after the rules, what became of each set of weights, and how many optimizers followed.

    lost: what the way back would not restore, a line each.
    """

    checkpoint: Checkpoint
    roots: tuple[tuple[str, TranslatedRoot], ...]
    optimizers: int
    lost: tuple[str, ...] = ()


def translate_roots(
    checkpoint: Checkpoint,
    roots: Sequence[StateDict],
    translation: Translation,
    *,
    given: Mapping[str, int],
    config: Mapping[str, Any],
    rest: str = "refuse",
    way_back: Callable[[], Translation] | None = None,
    moments: bool = True,
) -> TranslatedCheckpoint:
    """Applies rules to sets of weights, their `_metadata`, and the optimizers of the checkpoint. Reads nothing yet.

    given: numbers for variables.  config: the model's configuration.  rest: `refuse`, `keep` or `drop` keys that no
    rule takes.  way_back: the rules that should undo it, else their inverses.  moments: optimizers follow.
    Raises `NoMatch` for a rule that matches nothing and for such keys, `Conflict` for two tensors of one
    name and for a step that lacks one of its tensors, `UsageError`, which points at the rule, for what does not fit,
    `Unsupported` where the parts of a quantized weight would be changed.
    """
    done = [plan_steps(translation, root.node, given, config) for root in roots]
    refuse_unused(translation, done)
    for each in done:
        _refuse_changed_codes(checkpoint, each)
    for each in done if translation.complete else ():
        _refuse_gaps(each.steps, translation.rules)
    for each in done:
        each.carry_out(rest)
    done[0].scope.refuse_unused({name for each in done for name in each.scope.used} | set(translation.variables))
    replaced = dict[int, Any]()
    for each in done:
        node: Any = each.scope.node
        if isinstance(node, OrderedDict) and node.metadata is not None:
            origins = {name: step.keys[0] for step in each.steps for name in step.outputs}
            moved = {name: origins.get(name, name) for name in each.items if type(name) is str}
            metadata = moved_metadata(node.metadata, (key for key in node if type(key) is str), moved)
            replaced[id(node)] = OrderedDict(each.items, {**(node.attributes or {}), "_metadata": metadata})
        else:
            replaced[id(node)] = same_kind(node, each.items)
    tree = nested(checkpoint.tree)
    found = list(optimizers(tree)) if moments else []
    for path, optimizer in found:
        place = address((*checkpoint.base, *path))
        replaced[id(optimizer)] = _translated_optimizer(optimizer, place, checkpoint, done)
    changed = replace(checkpoint, tree=rebuild(tree, replaced=replaced))
    lost: dict[str, None] = {}
    try:
        back = (way_back or translation.reversed)()
        lost = dict.fromkeys(line for each in done for line in _losses_of(each, back))
    except CkptoolError as error:
        lost = dict.fromkeys([error.what])
    addresses = [root.address for root in roots]
    return TranslatedCheckpoint(changed, tuple(zip(addresses, done, strict=True)), len(found), tuple(lost))


def translated_items(checkpoint: Checkpoint, translation: Translation, node: Mapping[Any, Any]) -> dict[Any, Any]:
    """The items of a set of weights after rules; keys that none takes stay. Reads nothing yet. Raises as
    `translate_roots`."""
    root = plan_steps(translation, node)
    refuse_unused(translation, [root])
    _refuse_changed_codes(checkpoint, root)
    root.carry_out(KEEP)
    return root.items


def _refuse_changed_codes(checkpoint: Checkpoint, root: TranslatedRoot) -> None:
    keys = {key for step in root.steps if step.rule.chain for key in step.keys}
    refuse_quantized(checkpoint, [root.scope.node], "Changed", keys)


# Keys that are missing -----------------------------------------------------------------------------------------------


def _refuse_gaps(steps: Sequence[Step], rules: Sequence[Rule]) -> None:
    """Raises `NoMatch` for keys that are missing, where all rules have to match alike.

    Names of a group of rules with the same numbered variables have the same numbers: what `blocks.{n}.norm.bias` has
    for 0 and 2, it has for 1, and `blocks.{n}.mlp.bias` has it too. Of a group that is optional all rules match, or
    none. What is put together to one tensor is of as many as elsewhere.
    """
    families: dict[Any, dict[Any, tuple[Step, set[Values]]]] = {}
    matched = {(each.place, each.text, each.old) for each in (step.rule for step in steps)}
    for step in steps:
        counted_by = _counted_by(step)
        texts = tuple(sorted(step.groups.items() - counted_by.items()))
        family = families.setdefault((step.rule.group, *counted_by), {})
        family.setdefault((id(step.rule), texts), (step, set()))[1].add(tuple(counted_by.values()))
    missing = list[str]()
    for members in (family.values() for family in families.values()):
        every = set[Values]().union(*(values for _, values in members))
        if all(len(values) == 1 and values[0].isdigit() for values in every):  # blocks are counted without a hole
            numbers = {int(values[0]) for values in every}
            if max(numbers) < 2 * len(numbers) + MAX_HOLE:
                every |= {(str(number),) for number in range(min(numbers), max(numbers))}
        for step, values in members:  # the names that some members of a family lack
            for lacking in sorted(every - values):
                groups = {**step.groups, **dict(zip(_counted_by(step), lacking, strict=True))}
                filled = [name.fill(groups) for name in step.rule.old if set(name.variables) <= set(groups)]
                missing += filled or [step.rule.text]
    together: dict[int, set[Overs]] = {}  # that the uses of a rule put together: each use has all of them
    for step in steps:
        together.setdefault(id(step.rule), set()).update(step.inputs)
    missing += [
        name.fill(step.with_numbers(overs))
        for step in steps
        for overs in sorted(together[id(step.rule)] - step.inputs.keys())
        for name in step.rule.old
    ]
    used = {step.rule.group for step in steps}
    for rule in rules:
        if rule.group in used and (rule.place, rule.text, rule.old) not in matched:
            missing += [name.text for name in rule.old]
    if missing:
        count = counted(len(missing), "tensor is", "tensors are")
        what = f"{count} missing: {listed(missing, 4)}"
        raise NoMatch(what, "The layout has them, and the rest of it is there. Nothing was written.")


def _counted_by(step: Step) -> dict[str, str]:
    """The variables that count blocks: numbers, and `*`."""
    found = {name: text for name, text in sorted(step.groups.items()) if text.isdigit() or not name.startswith("v_")}
    return {name: str(int(text)) if text.isascii() and text.isdigit() else text for name, text in found.items()}


# The way back --------------------------------------------------------------------------------------------------------


def _losses_of(done: TranslatedRoot, back: Translation) -> Iterator[str]:
    """Lines on what the rules `back` would not restore from the new items. Reads nothing."""
    there, node = done.translation, done.scope.node
    yield from dict.fromkeys(step.lost for step in done.steps if step.lost)
    second = {name for name, other in there.ties if done.items.get(name) is done.items.get(other)}
    items = {name: value for name, value in done.items.items() if name not in done.filled and name not in second}
    try:
        again = plan_steps(replace(back, unfill=(), tied=()), items, done.scope.given, done.scope.config)
        again.carry_out(KEEP if done.kept else REFUSE)
    except CkptoolError as error:
        yield error.what
        return
    numbers = {
        id(rule): number for rules in (there.rules, again.translation.rules) for number, rule in enumerate(rules)
    }
    before = {tuple(sorted(step.outputs)): (numbers[id(step.rule)], step.keys) for step in done.steps}
    for step in again.steps:
        number, keys = before.get(tuple(sorted(step.keys)), (-1, []))
        if number != numbers[id(step.rule)] or sorted(keys) != sorted(step.outputs):
            names = [listed([printable(name) for name in each], 2) for each in (step.keys, step.outputs, keys)]
            yield f"{names[0]} would become {names[1]}, not {names[2] or 'what it was made of'}"
            return
    for name in sorted({name for step in again.steps for name in step.rule.names}):
        with suppress(UsageError):
            values = [each.scope.lookup(name) for each in (done, again)]
            if None not in values and values[0] != values[1]:
                yield f"{printable(name)} is {values[0]:,}, and would be {values[1]:,} on the way back: --set it there"
                return
    left_out = {*done.dropped, *done.unfilled, *(name for name, _ in there.tied)}
    kept = {key: value for key, value in node.items() if key not in left_out}
    if lacking := [printable(key) for key in kept if key not in again.items]:
        yield f"{listed(lacking, 2)} would not be made"
    elif others := [printable(key) for key, value in kept.items() if _tags(value) != _tags(again.items[key])]:
        yield f"the device or requires_grad of {listed(others, 2)}"
    elif _ties(kept) != _ties({key: again.items[key] for key in kept}):
        yield "tensors that share a storage are written apart"
    elif list(kept) != [key for key in again.items if key in kept]:
        yield "the order of the keys"


def _tags(value: Any) -> Any:
    return (value.location, value.flags[:2]) if isinstance(value, TensorEntry) else None


def _ties(items: Mapping[Any, Any]) -> list[list[Any]]:
    """The keys of the tensors that share a storage with others."""
    found: dict[int, list[Any]] = {}
    for key, value in items.items():
        if isinstance(value, TensorEntry) and value.numel:
            found.setdefault(id(value.storage), []).append(key)
    return sorted((sorted(map(str, keys)) for keys in found.values() if len(keys) > 1), key=str)


# Optimizers ----------------------------------------------------------------------------------------------------------


def _translated_optimizer(
    optimizer: dict[str, Any], place: str, whole: Checkpoint, roots: Sequence[TranslatedRoot]
) -> dict[str, Any]:
    """The state dict of an optimizer for the new parameters. Raises `Conflict` where parameters that become one have
    state that differs beside their moments or are of two groups, `Unsupported` for state of other shapes."""
    slots = Slots(optimizer, place)
    is_named = slots.is_named
    if not is_named:
        buffers = {name for root in roots for name in root.dropped}  # keys that the rules leave out may be some
        advice = f"translate{WITHOUT.removeprefix('Translate')}"
        slots = slots.renamed(slots.names(whole, None, advice, buffers))
    optimizer, keys = slots.tree, {*slots.slots}
    taken = ({key for step in root.steps for key in step.keys} | {*root.kept, *root.dropped} for root in roots)
    root = next((each for each, own in zip(roots, taken, strict=True) if keys & own), roots[0])
    by_name = {slot: value for slot, value in optimizer["state"].items() if slot in keys}
    beside = {slot: value for slot, value in optimizer["state"].items() if slot not in keys}
    state = {name: by_name[name] for name in root.kept if name in by_name}
    renamed = {name: [name] for name in root.kept} | {name: [] for name in (*root.dropped, *root.unfilled)}
    for step in root.steps:
        renamed |= dict.fromkeys(step.keys, step.outputs)
        first = next((key for key in step.keys if key in keys), None)
        if first is None:
            continue
        if lacking := [key for key in step.keys if (key in by_name) != (first in by_name) or key not in keys]:
            what = f"{place} has state for {first} and none for {lacking[0]}"
            raise Conflict(what, "They become one parameter; half of its moments would be made up.", WITHOUT)
        state |= _slots(step, by_name, root, place) if first in by_name else {}
    for key in keys:
        if renamed.setdefault(key, [key]) == [key] and key in by_name:
            state.setdefault(key, by_name[key])
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


def _slots(step: Step, state: Mapping[str, Any], root: TranslatedRoot, place: str) -> dict[str, dict[Any, Any]]:
    """The slots of the parameters that a step makes."""
    slots = [state[key] for key in step.keys]
    moving = tuple(op for op in step.rule.chain if op.name != "add")  # which changes the weights alone
    step = replace(step, rule=replace(step.rule, chain=moving))
    if not moving:
        return dict(zip(step.outputs, slots, strict=True))
    if not all(isinstance(slot, dict) and slot.keys() == slots[0].keys() for slot in slots):
        what = f"{place}: the states of {step.keys[0]} and others have different fields"
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
            what = f"{place}: {field!s} of {step.keys[0]} does not have its shape"
            raise Unsupported(what, "It is unknown how the rules would apply to it.", WITHOUT)
    return made


def _is_number_in_both(one: Any, other: Any) -> bool:
    """True for the same number, or another plain value, that may be a tensor of one element."""
    if isinstance(one, TensorEntry) and isinstance(other, TensorEntry):
        return one.numel == 1 and one.dtype is other.dtype and (one is other or one.bytes() == other.bytes())
    return type(one) is type(other) and not isinstance(one, (dict, list, tuple)) and bool(one == other)
