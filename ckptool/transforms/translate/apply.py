"""Rules applied to sets of weights: which keys go into which step, and the tensors that come out of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.checkpoint import Computed, FileRange, InlineBytes, TensorEntry
from ckptool.checkpoint.arrays import resolved
from ckptool.checkpoint.blocks import same_bytes
from ckptool.commands import arg
from ckptool.errors import CkptoolError, Conflict, NoMatch, UsageError, counted, listed
from ckptool.names.chain import Operation
from ckptool.names.pattern import Groups
from ckptool.names.rules import TAKEN_BEFORE, WHOLE_KEY, Translation, refuse_idle
from ckptool.names.scope import Number, Scope
from ckptool.names.steps import Overs, Step, steps_of
from ckptool.transforms.translate.operations import Tensors, applied, losses, refuse_growth
from ckptool.transforms.views import zeros

REFUSE, KEEP, DROP = "refuse", "keep", "drop"
REST = (REFUSE, KEEP, DROP)


@dataclass(frozen=True, slots=True)
class TranslatedRoot:
    """A set of weights by the rules. kept: keys that no rule takes.  dropped: those that are left out.

    tied: those of the dropped that are second names of tensors.  unfilled: tensors of zeros that are left out.
    items, filled: the new tensors, and the names of those of zeros, once the steps are carried out.
    """

    steps: list[Step]
    kept: list[str]
    dropped: list[str]
    tied: list[str]
    unfilled: list[str]
    items: dict[Any, Any] = field(default_factory=dict)
    filled: list[str] = field(default_factory=list)


def plan_steps(translation: Translation, node: Mapping[Any, Any], scope: Scope) -> TranslatedRoot:
    """Which keys of a set of weights go into which steps. Reads nothing but the zeros that are to be left out.

    Raises `Conflict` for a step of which a key is missing.
    """
    tied, unfilled = _tied(translation, node), _unfilled(translation, node)
    left_out = {*tied, *unfilled}
    gone, keys = steps_of(translation.drop, (key for key in node if type(key) is str and key not in left_out))
    steps, rest = steps_of(translation.rules, keys, scope, ranges=scope.ranges(translation.ranges), there=node)
    return TranslatedRoot(steps, rest, [*tied, *(key for step in gone for key in step.keys)], tied, unfilled)


def refuse_unused(translation: Translation, steps: Iterable[Step]) -> None:
    """Raises `NoMatch` for a rule that matches no key of any set of weights, unless it is optional."""
    used = {step.rule.origin for step in steps}
    idle = (rule for rule in translation.rules if not rule.group and rule.origin not in used)
    refuse_idle(idle, TAKEN_BEFORE, WHOLE_KEY)


# Tensors -------------------------------------------------------------------------------------------------------------


def carry_out(
    translation: Translation, plan: TranslatedRoot, node: Mapping[Any, Any], scope: Scope, rest: str
) -> TranslatedRoot:
    """The new items of a set of weights. Reads nothing yet.

    Raises `Conflict` for two keys that become one and, unless they are kept or dropped, for keys that no rule takes;
    `UsageError`, which points at the rule, where a tensor does not fit.
    """
    if plan.kept and rest == REFUSE:
        what = f"no rule takes {counted(len(plan.kept), 'key')}: {listed(plan.kept, 6)}"
        raise NoMatch(
            what,
            "Nothing was written.",
            f"Keep them as they are: {arg(rest='keep')}; leave them out: {arg(rest='drop')}",
        )
    made: dict[Any, dict[Any, TensorEntry]] = {}
    owners: dict[str, str] = {}
    produced: dict[str, list[tuple[str, Any]]] = {}  # by the first key of a step
    for step in plan.steps:
        try:
            results = list(results_of(step, node, scope, made))
        except CkptoolError as error:
            raise step.rule.within(error, step.keys) from None
        place, rule = step.rule.origin
        rule = f"{place}: {rule!r}" if place else repr(rule)
        for name, _ in results:
            _refuse_second(owners, name, rule, step.keys[0])
        step.outputs = [name for name, _ in results]
        produced[step.keys[0]] = results
    items: dict[Any, Any] = {}
    remaining = {*plan.kept} if rest == KEEP else set[str]()
    for key, value in node.items():
        if key in produced:
            items |= produced[key]
        elif type(key) is not str or key in remaining:
            if type(key) is str:
                _refuse_second(owners, key, "a key that no rule takes", key)
            items[key] = value
    items |= {name: items[other] for name, other in translation.ties if other in items and name not in items}
    filled = [*_filled(translation, node, items, scope)]
    dropped = [*plan.dropped, *(plan.kept if rest == DROP else [])]
    return replace(plan, items=items, kept=plan.kept if rest == KEEP else [], dropped=dropped, filled=filled)


def _refuse_second(owners: dict[str, str], name: str, owner: str, key: str) -> None:
    whole = f"{owner}, from {key}"
    if name in owners:
        what = f"two tensors would be {name!r}: by {owners[name]}; and by {whole}"
        raise Conflict(what, "Only one of them could stay. Nothing was written.")
    if not name:
        raise Conflict(f"the key {key} would become empty", "Nothing was written.")
    owners[name] = whole


def results_of(
    step: Step, node: Mapping[Any, Any], scope: Scope, made: dict[Any, dict[Any, TensorEntry]]
) -> Iterator[tuple[str, Any]]:
    """The new names of a step with their values."""
    rule = step.rule
    values = {overs: [node[key] for key in keys] for overs, keys in sorted(step.inputs.items())}
    if not rule.chain:
        (olds,) = values.values()
        yield from zip(_new_names(step, step.groups, scope), olds, strict=True)
        return
    for key in step.keys:
        if not isinstance(node[key], TensorEntry):
            kind = getattr(node[key], "kind", type(node[key]).__name__)
            raise UsageError(f"{key} is not a plain tensor ({kind})", "Only plain tensors can be rearranged.")
    inputs = [node[key] for key in step.keys]
    step.shapes = tuple(each.shape for each in inputs)
    numbers = scope.number(step.groups)
    values_of = tuple(step.groups.get(f"v_{name}") for name in rule.names)
    chain = tuple((str(op), op.parts) for op in rule.chain)
    same = made.setdefault((chain, values_of, tuple((each.view, each.flags) for each in inputs)), {})
    tensors, step.lost = after_chain(rule.chain, values, numbers)
    for overs, entries in tensors.items():
        names = _new_names(step, step.with_numbers(overs), scope)
        for place, (name, entry) in enumerate(zip(names, entries, strict=True)):
            if (overs, place) not in same:
                same[overs, place] = finished(entry, inputs)
            yield name, same[overs, place]


def _new_names(step: Step, groups: Groups, scope: Scope) -> list[str]:
    return [name.fill(groups, scope.lookup) for name in step.rule.new]


def after_chain(
    chain: Sequence[Operation], values: Mapping[Overs, Tensors], number: Number
) -> tuple[dict[Overs, Tensors], str]:
    """The tensors after all operations of a rule, and what undoing them would lose."""
    lost = ""
    state = {overs: [resolved(each) for each in tensors] for overs, tensors in values.items()}
    for op in chain:
        after: dict[Overs, Tensors] = {}
        if op.over and op.name == "stack":
            gathered: dict[Overs, list[Tensors]] = {}
            for overs, tensors in state.items():
                gathered.setdefault(tuple(pair for pair in overs if pair[0] != op.over), []).append(tensors)
            for overs, lists in gathered.items():
                after[overs] = [applied(op, [*column], number)[0] for column in zip(*lists, strict=True)]
        elif op.over:
            for overs, tensors in state.items():
                columns = [applied(op, [tensor], number) for tensor in tensors]
                if len({len(column) for column in columns}) > 1:
                    raise UsageError(
                        f"{op}: the tensors are of {listed([str(len(c)) for c in columns])} in that dimension"
                    )
                for index, row in enumerate(zip(*columns, strict=True)):
                    after[(*overs, (op.over, index))] = list(row)
        else:
            for overs, tensors in state.items():
                after[overs] = applied(op, tensors, number)
                lost = lost or losses(op, tensors, after[overs])
        state = after
    return state, lost


def finished(entry: TensorEntry, inputs: Sequence[TensorEntry]) -> TensorEntry:
    """The tensor on a storage of its own, in row-major order; the checksums of the inputs are verified on the way.

    A range of a file without checksums stays one, which the kernel copies.
    """
    flags = inputs[0].flags._replace(conj=False, neg=False)
    if any(entry.storage is each.storage and entry.layout == each.layout for each in inputs):
        return entry.with_flags(flags)  # as it was, with what it shares
    if not entry.nbytes:
        return entry.with_values(InlineBytes(b"")).with_flags(flags)
    data = entry.row_major()
    storages = tuple({id(each.storage): each.storage for each in inputs}.values())
    if isinstance(data, FileRange) and all(each.crc is None for storage in storages for each in storage.below()):
        return entry.with_values(data).with_flags(flags)
    view = data.view if isinstance(data, Computed) else None
    return entry.with_values(Computed(data.length, data.read, storages, view)).with_flags(flags)


def _tied(translation: Translation, node: Mapping[Any, Any]) -> list[str]:
    """The keys that are left out, being second names of tensors. Raises `Conflict` for one with values of its own."""
    names = [(name, other) for name, other in translation.tied if name in node and other in node]
    for name, other in names:
        one, first = node[name], node[other]
        tensors = isinstance(one, TensorEntry) and isinstance(first, TensorEntry)
        if one is first or (tensors and one.view == first.view):
            continue
        alike = tensors and (one.dtype, one.shape) == (first.dtype, first.shape)
        if not alike or not same_bytes(one.row_major(), first.row_major()):
            what = f"{name} is not {other}: they are tied in the other layout"
            raise Conflict(what, "One of the two would be lost. Nothing was written.")
    return [name for name, _ in names]


# Zeros ---------------------------------------------------------------------------------------------------------------


def _filled(translation: Translation, node: Mapping[Any, Any], items: dict[Any, Any], scope: Scope) -> Iterator[str]:
    """Adds the tensors of zeros that the new side has in addition; their names."""
    tensors = {key: value for key, value in node.items() if type(key) is str and isinstance(value, TensorEntry)}
    for fill in translation.fill:
        for step in steps_of([fill], tensors, scope)[0]:
            value, (op,) = tensors[step.keys[0]], fill.chain
            try:
                (name,) = _new_names(step, step.groups, scope)
                sizes = {f"v_d{axis}": str(size) for axis, size in enumerate(value.shape)}
                shape = tuple(map(scope.number({**step.groups, **sizes}), op.numbers))
                refuse_growth(value, shape)
            except UsageError as error:
                raise fill.within(error) from None
            if name not in items:
                items[name] = finished(zeros(value, shape), [value])
                yield name


def _unfilled(translation: Translation, node: Mapping[Any, Any]) -> list[str]:
    """The keys that a translation back leaves out: all that it would have filled in, if all of them are zeros."""
    names = [
        key
        for fill in translation.unfill
        for key, value in node.items()
        if type(key) is str and isinstance(value, TensorEntry) and fill.new[0].pattern.fullmatch(key)
    ]
    return names if all(not any(node[key].bytes()) for key in names) else []
