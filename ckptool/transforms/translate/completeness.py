"""Whether a set of weights has all that a layout translates: a tensor that one of its blocks lacks is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.errors import NoMatch, counted, listed, printable
from ckptool.transforms.translate.apply import Step
from ckptool.transforms.translate.translation import TranslationRule

Values = tuple[str, ...]


def refuse_gaps(steps: Sequence[Step], rules: Sequence[TranslationRule]) -> None:
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
    missing += [
        name
        for rule in {id(step.rule): step.rule for step in steps if step.rule.over}.values()
        for name in _fewer([step for step in steps if step.rule is rule])
    ]
    used = {step.rule.group for step in steps}
    for rule in rules:
        if rule.group in used and (rule.place, rule.text, rule.old) not in matched:
            missing += [name.text for name in rule.old]
    if missing:
        count = counted(len(missing), "tensor is", "tensors are")
        what = f"{count} missing: {listed([printable(name) for name in missing], 4)}"
        raise NoMatch(what, "The layout has them, and the rest of the weights says so. Nothing was written.")


def _fewer(steps: Sequence[Step]) -> Iterator[str]:
    """The names that some uses of a rule that puts tensors together lack, and others have."""
    every = {overs for step in steps for overs in step.inputs}
    for step in steps:
        for overs in sorted(every - step.inputs.keys()):
            groups = {**step.groups, **{f"v_{name}": str(number) for name, number in overs}}
            yield from (name.fill(groups) for name in step.rule.old)


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
