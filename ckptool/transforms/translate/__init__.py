"""`translate`: rules that change tensors: split, joined, transposed, reordered, under new names.

`translation` reads the rules, `apply` finds their keys and makes the tensors, `operations` are what rules do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptool.analysis.quantization import refuse_quantized
from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.nodes import OrderedDict, same_kind
from ckptool.checkpoint.tree import address, rebuild
from ckptool.conventions.optimizer_keys import nested
from ckptool.conventions.state_dicts import StateDict, optimizers
from ckptool.errors import CkptoolError
from ckptool.names.rules import Translation
from ckptool.transforms.rename import module_names
from ckptool.transforms.translate.apply import KEEP, TranslatedRoot, plan_steps, refuse_unused
from ckptool.transforms.translate.completeness import losses_of, refuse_gaps
from ckptool.transforms.translate.moments import translated_optimizer


@dataclass(frozen=True, slots=True)
class TranslatedCheckpoint:
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
        refuse_gaps(each.steps, translation.rules)
    for each in done:
        each.carry_out(rest)
    done[0].scope.refuse_unused({name for each in done for name in each.scope.used} | set(translation.variables))
    replaced: dict[int, Any] = {id(each.scope.node): _with_metadata(each) for each in done}
    tree = nested(checkpoint.tree)
    found = list(optimizers(tree)) if moments else []
    for path, optimizer in found:
        place = address((*checkpoint.base, *path))
        replaced[id(optimizer)] = translated_optimizer(optimizer, place, checkpoint, done)
    changed = replace(checkpoint, tree=rebuild(tree, replaced=replaced))
    lost: dict[str, None] = {}
    try:
        back = (way_back or translation.reversed)()
        lost = dict.fromkeys(line for each in done for line in losses_of(each, back))
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


def _with_metadata(done: TranslatedRoot) -> Any:
    """The new items with the `_metadata` of their modules: each module's is that of the first tensor's old one.

    A module without tensors goes where the nearest module around it that has one new name goes.
    """
    node: Any = done.scope.node
    before = node.metadata if isinstance(node, OrderedDict) else None
    if before is None:
        return same_kind(node, done.items)
    origins = {name: step.keys[0] for step in done.steps for name in step.outputs}
    modules: dict[str, Any] = {"": before.get("", {"version": 1})}
    for name in done.items:
        if type(name) is not str:
            continue
        parts = name.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:depth]), {"version": 1})
        if parts and (found := before.get(origins.get(name, name).rpartition(".")[0])) is not None:
            modules[".".join(parts)] = found
    renamed = module_names({step.keys[0]: step.outputs[0] for step in done.steps if len(step.outputs) == 1})
    around = {key[:at] for step in done.steps for key in step.keys for at, letter in enumerate(key) if letter == "."}
    for path, value in before.items():
        if type(path) is str and path not in around:  # no tensor is in it
            above = path
            while above and above not in renamed:
                above = above.rpartition(".")[0]
            modules.setdefault((renamed[above] + path[len(above) :]).lstrip(".") if above else path, value)
    return OrderedDict(done.items, {**(node.attributes or {}), "_metadata": same_kind(before, modules)})
