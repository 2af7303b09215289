"""`translate`: rules that split, join, transpose, reorder and rename tensors.

The rules come from `names/`; `apply` finds their keys, carries out their operations and makes the tensors. This module
translates whole checkpoints: what is refused, what the way back would lose, and the optimizers that follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ckptool.analysis.quantization import refuse_quantized
from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.nodes import OrderedDict, same_kind
from ckptool.checkpoint.tree import address, rebuild, walk
from ckptool.commands import arg
from ckptool.conventions.optimizer_keys import NUMBERS, PARAMETER_LISTS, flat_again, nested
from ckptool.conventions.state_dicts import StateDict, optimizers
from ckptool.errors import CkptoolError, Conflict, NoMatch, Unsupported, UsageError, counted, listed, printable
from ckptool.names.rules import Rule, Translation
from ckptool.names.steps import Overs, Step
from ckptool.transforms.optimizers import Slots
from ckptool.transforms.rename import moved_metadata
from ckptool.transforms.translate.apply import KEEP, REFUSE, TranslatedRoot, plan_steps, refuse_unused

Values = tuple[str, ...]
MAX_HOLE = 64  # up to so many missing blocks in a row are still named
WITHOUT = f"Translate the weights alone, by their address: FILE#ADDRESS {arg(extract=True)}"


class TranslatedCheckpoint(NamedTuple):
    """The checkpoint after the rules, each set of weights by the rules, and how many optimizers followed.

    lost: what the way back would not restore, one line each.  lists: addresses of lists of tensors like the weights
    (some averages, master weights), which stay as they are.
    """

    checkpoint: Checkpoint
    roots: tuple[tuple[str, TranslatedRoot], ...]
    optimizers: int
    lost: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()


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
    rule takes.  way_back: the rules that should undo these, by default their inverses.  moments: optimizers follow.
    Raises `NoMatch` for a rule that matches nothing and for refused keys, `Conflict` for two tensors with one
    name and for a step that lacks one of its tensors, `UsageError`, which points at the rule, for a tensor that does
    not fit, `Unsupported` where the parts of a quantized weight would be changed.
    """
    tree = nested(checkpoint.tree)
    nodes = [tree if root.node is checkpoint.tree else root.node for root in roots]
    plans = [plan_steps(translation, node, given, config) for node in nodes]
    refuse_unused(translation, plans)
    for plan in plans:
        _refuse_changed_codes(checkpoint, plan)
    for plan in plans if translation.complete else ():
        _refuse_gaps(plan.steps, translation.rules)
    for plan in plans:
        plan.carry_out(rest)
    plans[0].scope.refuse_unused({name for plan in plans for name in plan.scope.used} | set(translation.variables))
    replaced = dict[int, Any]()
    for plan in plans:
        node: Any = plan.scope.node
        if isinstance(node, OrderedDict) and node.metadata is not None:
            origins = {name: step.keys[0] for step in plan.steps for name in step.outputs}
            moved = {name: origins.get(name, name) for name in plan.items if type(name) is str}
            metadata = moved_metadata(node.metadata, (key for key in node if type(key) is str), moved)
            replaced[id(node)] = OrderedDict(plan.items, {**(node.attributes or {}), "_metadata": metadata})
        else:
            replaced[id(node)] = same_kind(node, plan.items)
    states = list(optimizers(tree)) if moments else []
    for path, optimizer in states:
        place = address((*checkpoint.base, *path))
        replaced[id(optimizer)] = _translated_optimizer(optimizer, place, checkpoint, plans)
    changed = replace(checkpoint, tree=flat_again(rebuild(tree, replaced=replaced), checkpoint.tree))
    lost: dict[str, None] = {}
    try:
        back = (way_back or translation.reversed)()
        lost = dict.fromkeys(line for plan in plans for line in _losses_of(plan, back))
    except CkptoolError as error:
        lost = dict.fromkeys([error.what])
    changing = any(step.rule.chain for plan in plans for step in plan.steps)
    lists = _lists_of_weights(checkpoint, plans) if changing else ()
    by_address = zip([root.address for root in roots], plans, strict=True)
    followed = sum(replaced[id(optimizer)] is not optimizer for _, optimizer in states)
    return TranslatedCheckpoint(changed, tuple(by_address), followed, tuple(lost), tuple(lists))


def _lists_of_weights(checkpoint: Checkpoint, plans: Sequence[TranslatedRoot]) -> Iterator[str]:
    """The addresses of the lists in which all are tensors with the shapes of weights."""
    weights = [Counter(getattr(value, "shape", None) for value in plan.scope.node.values()) for plan in plans]
    for path, node in walk(checkpoint.tree):
        parts = [part for part in node if isinstance(part, TensorEntry)] if isinstance(node, (list, tuple)) else []
        counts = Counter(part.shape for part in parts)
        if parts and len(parts) == len(node) and any(counts <= shapes for shapes in weights):
            yield address((*checkpoint.base, *path))


def translated_items(checkpoint: Checkpoint, translation: Translation, node: Mapping[Any, Any]) -> dict[Any, Any]:
    """The items of a set of weights after the rules; keys that no rule takes stay. Reads nothing yet. Raises as
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
    """Raises `NoMatch` for missing keys, in a translation whose rules all have to match.

    Names of a group of rules with the same numbered variables have the same numbers: if `blocks.{n}.norm.bias` has 0
    and 2, it has 1, and so has `blocks.{n}.mlp.bias`. Of an optional group all rules match, or none. A tensor is joined
    from as many tensors as elsewhere.
    """
    families: dict[Any, dict[Any, tuple[Step, set[Values]]]] = {}
    matched = {(rule.place, rule.text, rule.old) for rule in (step.rule for step in steps)}
    for step in steps:
        counted_by = _block_numbers(step)
        texts = tuple(sorted(step.groups.items() - counted_by.items()))
        family = families.setdefault((step.rule.group, *counted_by), {})
        family.setdefault((id(step.rule), texts), (step, set()))[1].add(tuple(counted_by.values()))
    missing = list[str]()
    for members in (family.values() for family in families.values()):
        all_values = set[Values]().union(*(values for _, values in members))
        if all(len(values) == 1 and values[0].isdigit() for values in all_values):  # blocks are numbered without gaps
            numbers = {int(values[0]) for values in all_values}
            if max(numbers) < 2 * len(numbers) + MAX_HOLE:
                all_values |= {(str(number),) for number in range(min(numbers), max(numbers))}
        for step, values in members:  # the names that some members of a family lack
            for lacking in sorted(all_values - values):
                groups = {**step.groups, **dict(zip(_block_numbers(step), lacking, strict=True))}
                names = [name.fill(groups) for name in step.rule.old if set(name.variables) <= set(groups)]
                missing += names or [step.rule.text]
    stacked: dict[int, set[Overs]] = {}  # that the uses of a rule join: each use has all of them
    for step in steps:
        stacked.setdefault(id(step.rule), set()).update(step.inputs)
    missing += [
        name.fill(step.with_numbers(overs))
        for step in steps
        for overs in sorted(stacked[id(step.rule)] - step.inputs.keys())
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


def _block_numbers(step: Step) -> dict[str, str]:
    """The variables that number blocks: those with numbers, and `*`."""
    counters = {name: text for name, text in sorted(step.groups.items()) if text.isdigit() or not name.startswith("v_")}
    return {name: str(int(text)) if text.isascii() and text.isdigit() else text for name, text in counters.items()}


# The way back --------------------------------------------------------------------------------------------------------


def _losses_of(plan: TranslatedRoot, back: Translation) -> Iterator[str]:
    """What the rules `back` would not restore from the new items, one line each. Reads nothing."""
    translation, node = plan.translation, plan.scope.node
    yield from dict.fromkeys(step.lost for step in plan.steps if step.lost)
    second_names = {name for name, other in translation.ties if plan.items.get(name) is plan.items.get(other)}
    items = {name: value for name, value in plan.items.items() if name not in plan.filled and name not in second_names}
    try:
        undo = plan_steps(replace(back, unfill=(), tied=()), items, plan.scope.given, plan.scope.config)
        undo.carry_out(KEEP if plan.kept else REFUSE)
    except CkptoolError as error:
        yield error.what
        return
    numbers = {
        id(rule): number for rules in (translation.rules, undo.translation.rules) for number, rule in enumerate(rules)
    }
    before = {tuple(sorted(step.outputs)): (numbers[id(step.rule)], step.keys) for step in plan.steps}
    for step in undo.steps:
        number, keys = before.get(tuple(sorted(step.keys)), (-1, []))
        if number != numbers[id(step.rule)] or sorted(keys) != sorted(step.outputs):
            names = [listed([printable(name) for name in keys], 2) for keys in (step.keys, step.outputs, keys)]
            yield f"{names[0]} would become {names[1]}, not {names[2] or 'what it was made of'}"
            return
    for name in sorted({name for step in undo.steps for name in step.rule.names}):
        with suppress(UsageError):
            values = [side.scope.lookup(name) for side in (plan, undo)]
            if None not in values and values[0] != values[1]:
                yield f"{printable(name)} is {values[0]:,}, and would be {values[1]:,} on the way back: --set it there"
                return
    left_out = {*plan.dropped, *plan.unfilled, *(name for name, _ in translation.tied)}
    expected = {key: value for key, value in node.items() if key not in left_out}
    if lacking := [printable(key) for key in expected if key not in undo.items]:
        yield f"{listed(lacking, 2)} would not be made"
    elif changed := [printable(key) for key, value in expected.items() if _tags(value) != _tags(undo.items[key])]:
        yield f"the device or requires_grad of {listed(changed, 2)}"
    elif _first_keys(expected) != _first_keys({key: undo.items[key] for key in expected}):
        yield "tensors that share a storage are written apart"
    elif list(expected) != [key for key in undo.items if key in expected]:
        yield "the order of the keys"


def _tags(value: Any) -> Any:
    return (value.location, value.flags[:2]) if isinstance(value, TensorEntry) else None


def _first_keys(items: Mapping[Any, Any]) -> list[Any]:
    """For each tensor, the first key of those on its storage."""
    first = dict[int, Any]()
    return [first.setdefault(id(t.storage), key) for key, t in items.items() if isinstance(t, TensorEntry) and t.numel]


# Optimizers ----------------------------------------------------------------------------------------------------------


def _translated_optimizer(
    optimizer: dict[str, Any], place: str, whole: Checkpoint, roots: Sequence[TranslatedRoot]
) -> dict[str, Any]:
    """The state dict of an optimizer for the new parameters. Raises `Conflict` where parameters that become one are of
    two groups or have state besides their moments that differs, `Unsupported` for state of other shapes."""
    slots, before = Slots(optimizer, place), optimizer
    is_named = slots.is_named
    changing = {id(root) for root in roots if any(step.rule.chain for step in root.steps)}
    if not is_named:
        buffers = {name for root in roots for name in root.dropped}  # keys that the rules drop may be buffers
        advice = f"translate{WITHOUT.removeprefix('Translate')}"
        try:
            slots = slots.renamed(slots.names(whole, None, advice, buffers))
        except (Conflict, Unsupported):
            if changing or any(root.dropped or root.unfilled for root in roots):
                raise
            return before  # other names change no number
    optimizer, keys, shapes = slots.tree, {*slots.slots}, slots.shapes()

    def fit(root: TranslatedRoot) -> tuple[int, int]:  # of several with these names, the weights with these shapes
        present = {key: getattr(root.scope.node[key], "shape", None) for key in keys if key in root.scope.node}
        return sum(shape in shapes.get(key, ()) for key, shape in present.items()), len(present)

    root = max(roots, key=fit)
    by_name = {slot: value for slot, value in optimizer["state"].items() if slot in keys}
    unknown = [name for name in by_name if name not in root.scope.node]
    if unknown and id(root) in changing:
        what = f"{place} has state for {listed(unknown, 3)}, which no weights are called"
        raise Conflict(what, "It is unknown which of its moments the rules are for.", WITHOUT)
    if keys.isdisjoint(root.scope.node):
        return before
    if id(root) in changing:
        slots.refuse_joint(WITHOUT, root.scope.node)
    beside = {slot: value for slot, value in optimizer["state"].items() if slot not in keys}
    state = dict[Any, Any]()
    renamed: dict[Any, list[Any]] = {name: [] for name in (*root.dropped, *root.unfilled)}
    places = {slot: number for number, slot in enumerate(slots.slots)}  # by which torch knows them, not by name
    order = dict(places)
    for step in root.steps:
        renamed |= dict.fromkeys(step.keys, step.outputs)
        first = next((key for key in step.keys if key in keys), None)
        if first is None:
            continue
        order |= dict.fromkeys(step.outputs, places[first])
        if lacking := [key for key in step.keys if (key in by_name) != (first in by_name) or key not in keys]:
            what = f"{place} has state for {first} and none for {lacking[0]}"
            raise Conflict(what, "They become one parameter; half of its moments would be made up.", WITHOUT)
        state |= _step_slots(step, by_name, root, place) if first in by_name else {}
    for key in keys:
        if renamed.setdefault(key, [key]) == [key] and key in by_name:
            state.setdefault(key, by_name[key])
    groups = []
    for group in slots.groups:
        new = dict.fromkeys(name for slot in group["params"] for name in renamed[slot])
        params = sorted(new, key=order.__getitem__)
        groups.append({**group, **{field: [*params] for field in PARAMETER_LISTS & group.keys()}})
    members = [name for group in groups for name in group["params"]]
    if len(set(members)) != len(members):
        repeated = next(name for name in members if members.count(name) > 1)
        what = f"{place}: {repeated} is made of parameters of two groups"
        raise Conflict(what, "It could be in only one of them.", WITHOUT)
    state = {name: state[name] for name in members if name in state}
    state_dict = {**optimizer, "state": {**state, **beside}, "param_groups": groups}
    return state_dict if is_named else Slots(state_dict, place).numbered()


def _step_slots(step: Step, state: Mapping[str, Any], root: TranslatedRoot, place: str) -> dict[str, dict[Any, Any]]:
    """The slots of the parameters that a step produces."""
    slots = [state[key] for key in step.keys]
    moving = tuple(op for op in step.rule.chain if op.name != "add")  # which changes only the weights
    step = replace(step, rule=replace(step.rule, chain=moving))
    if not moving:
        return dict(zip(step.outputs, slots, strict=True))
    if not all(isinstance(slot, dict) and slot.keys() == slots[0].keys() for slot in slots):
        what = f"{place}: the states of {step.keys[0]} and others have different fields"
        raise Conflict(what, "They become one parameter.", WITHOUT)
    new_slots: dict[str, dict[Any, Any]] = {name: {} for name in step.outputs}
    for field in slots[0]:
        values = [slot[field] for slot in slots]
        kinds = {value.dtype.kind if isinstance(value, TensorEntry) else type(value).__name__ for value in values}
        # Others are computed from the whole parameter, as NovoGrad's norms: no part of it has the same.
        is_count = field in NUMBERS or "float" not in kinds or len(step.keys) == len(step.outputs) == 1
        if field not in NUMBERS and all(
            isinstance(value, TensorEntry) and value.shape == shape
            for value, shape in zip(values, step.shapes, strict=True)
        ):
            moments = dict(root.results(step, dict(zip(step.keys, values, strict=True)), {}))
            for name in step.outputs:
                new_slots[name][field] = moments[name]
        elif is_count and all(_is_number_in_both(value, values[0]) for value in values):
            for name in step.outputs:  # one for each, as torch counts steps in place
                new_slots[name][field] = values[0].alone() if isinstance(values[0], TensorEntry) else values[0]
        else:
            what = f"{place}: {field!s} of {step.keys[0]} does not have one value for each of its elements"
            raise Unsupported(what, "It is unknown how the rules would apply to it.", WITHOUT)
    return new_slots


def _is_number_in_both(one: Any, other: Any) -> bool:
    """True for equal plain values or equal tensors of one element."""
    if isinstance(one, TensorEntry) and isinstance(other, TensorEntry):
        return one.numel == 1 and one.dtype is other.dtype and (one is other or one.bytes() == other.bytes())
    return type(one) is type(other) and not isinstance(one, (dict, list, tuple)) and bool(one == other)
