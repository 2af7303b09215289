"""What a translation would lose: tensors that one of a layout's blocks lacks, and what the way back would not restore.

The way back is planned on the new names, and every key and tie is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.errors import CkptoolError, NoMatch, UsageError, counted, listed, printable
from ckptool.names.rules import Rule, Translation
from ckptool.names.steps import Overs, Step
from ckptool.transforms.translate.apply import KEEP, REFUSE, TranslatedRoot, plan_steps

Values = tuple[str, ...]


def refuse_gaps(steps: Sequence[Step], rules: Sequence[Rule]) -> None:
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
    missing = [name for family in families.values() for name in _missing(list(family.values()))]
    every: dict[int, set[Overs]] = {}  # that the uses of a rule put together: each use has all of them
    for step in steps:
        every.setdefault(id(step.rule), set()).update(step.inputs)
    missing += [
        name.fill(step.with_numbers(overs))
        for step in steps
        for overs in sorted(every[id(step.rule)] - step.inputs.keys())
        for name in step.rule.old
    ]
    used = {step.rule.group for step in steps}
    for rule in rules:
        if rule.group in used and (rule.place, rule.text, rule.old) not in matched:
            missing += [name.text for name in rule.old]
    if missing:
        count = counted(len(missing), "tensor is", "tensors are")
        what = f"{count} missing: {listed(missing, 4)}"
        raise NoMatch(what, "The layout has them, and so does the rest of the weights. Nothing was written.")


def _counted_by(step: Step) -> dict[str, str]:
    """The variables that count blocks: numbers, and `*`."""
    found = {name: text for name, text in sorted(step.groups.items()) if text.isdigit() or not name.startswith("v_")}
    return {name: str(int(text)) if text.isascii() and text.isdigit() else text for name, text in found.items()}


def _missing(members: Sequence[tuple[Step, set[Values]]]) -> Iterator[str]:
    """The names that some members of a family lack."""
    every = set[Values]().union(*(values for _, values in members))
    if all(len(values) == 1 and values[0].isdigit() for values in every):  # blocks are counted without a hole
        numbers = {int(values[0]) for values in every}
        if max(numbers) < 2 * len(numbers) + MAX_HOLE:
            every |= {(str(number),) for number in range(min(numbers), max(numbers))}
    for step, values in members:
        for lacking in sorted(every - values):
            groups = {**step.groups, **dict(zip(_counted_by(step), lacking, strict=True))}
            filled = [name.fill(groups) for name in step.rule.old if set(name.variables) <= set(groups)]
            yield from filled or [step.rule.text]


MAX_HOLE = 64  # blocks that may be missing in a row and are still named


# The way back --------------------------------------------------------------------------------------------------------


def losses_of(done: TranslatedRoot, back: Translation) -> Iterator[str]:
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
