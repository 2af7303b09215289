"""Whether the way back gives what there was: it is planned on the new names, and every key and tie is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.errors import CkptoolError, listed, printable
from ckptool.transforms.translate.apply import KEEP, REFUSE, TranslatedRoot, carry_out, plan_steps
from ckptool.transforms.translate.scope import Scope
from ckptool.transforms.translate.translation import Translation


def losses_of(
    node: Mapping[Any, Any], done: TranslatedRoot, there: Translation, back: Translation, scope: Scope
) -> Iterator[str]:
    """What applying the rules `back` to the new items would not restore, a line each. Reads nothing.

    node: the weights before the rules `there`.  scope: of the numbers for these.
    """
    yield from dict.fromkeys(step.lost for step in done.steps if step.lost)
    items = {name: value for name, value in done.items.items() if name not in done.filled}
    back = replace(back, unfill=(), tied=())
    scope = replace(scope, variables=back.variables, node=items, used=set(), _found={})
    try:
        plan = plan_steps(back, items, scope)
        again = carry_out(back, plan, items, scope, KEEP if done.kept else REFUSE)
    except CkptoolError as error:
        yield error.what
        return
    numbers = {id(rule): number for rules in (there.rules, back.rules) for number, rule in enumerate(rules)}
    before = {tuple(sorted(step.outputs)): (numbers[id(step.rule)], step.keys) for step in done.steps}
    for step in again.steps:
        number, keys = before.get(tuple(sorted(step.keys)), (-1, []))
        if number != numbers[id(step.rule)] or sorted(keys) != sorted(step.outputs):
            names = [listed([printable(name) for name in each], 2) for each in (step.keys, step.outputs, keys)]
            yield f"{names[0]} would become {names[1]}, not {names[2] or 'what it was made of'}"
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
