"""Rules applied to sets of weights: which keys go into which step, and the tensors that come out of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class TranslatedRoot:
    """A set of weights by the rules. kept: keys that no rule takes.  dropped: those that are left out.

    tied: those of the dropped that are second names of tensors.  unfilled: tensors of zeros that are left out.
    items, filled: the new tensors, and the names of those of zeros, once the steps are carried out.
    """

    translation: Translation
    scope: Scope
    steps: list[Step]
    kept: list[str]
    dropped: list[str]
    tied: list[str]
    unfilled: list[str]
    items: dict[Any, Any] = field(default_factory=dict)
    filled: list[str] = field(default_factory=list)

    def carry_out(self, rest: str) -> None:
        """Makes the new items. Reads nothing yet. rest: `refuse`, `keep` or `drop` keys that no rule takes.

        Raises `Conflict` for two keys that become one, `NoMatch` for keys that are refused, `UsageError`, which points
        at the rule, where a tensor does not fit.
        """
        if self.kept and rest == REFUSE:
            what = f"no rule takes {counted(len(self.kept), 'key')}: {listed(self.kept, 6)}"
            fix = f"Keep them as they are: {arg(rest='keep')}; leave them out: {arg(rest='drop')}"
            raise NoMatch(what, "Nothing was written.", fix)
        if rest == DROP:
            self.dropped, self.kept = [*self.dropped, *self.kept], []
        made: dict[Any, dict[Any, TensorEntry]] = {}
        owners: dict[str, str] = {}

        def own(name: str, owner: str, key: str) -> None:
            if name in owners:
                what = f"two tensors would be {name!r}: by {owners[name]}; and by {owner}, from {key}"
                raise Conflict(what, "Only one of them could stay. Nothing was written.")
            if not name:
                raise Conflict(f"the key {key} would become empty", "Nothing was written.")
            owners[name] = f"{owner}, from {key}"

        produced: dict[str, list[tuple[str, Any]]] = {}  # by the first key of a step
        for step in self.steps:
            try:
                results = list(self.results(step, self.scope.node, made))
            except CkptoolError as error:
                raise step.rule.within(error, step.keys) from None
            place, rule = step.rule.origin
            for name, _ in results:
                own(name, f"{place}: {rule!r}" if place else repr(rule), step.keys[0])
            step.outputs = [name for name, _ in results]
            produced[step.keys[0]] = results
        remaining = {*self.kept}
        for key, value in self.scope.node.items():
            if key in produced:
                self.items |= produced[key]
            elif type(key) is not str or key in remaining:
                if type(key) is str:
                    own(key, "a key that no rule takes", key)
                self.items[key] = value
        ties = self.translation.ties
        self.items |= {n: self.items[other] for n, other in ties if other in self.items and n not in self.items}
        self._fill()

    def results(
        self, step: Step, values: Mapping[Any, Any], made: dict[Any, dict[Any, TensorEntry]]
    ) -> Iterator[tuple[str, Any]]:
        """The new names of a step with what the rule makes of values by old names. made: what was made before."""
        rule = step.rule
        columns = {overs: [values[key] for key in keys] for overs, keys in sorted(step.inputs.items())}
        if not rule.chain:
            (olds,) = columns.values()
            yield from zip(self._names(step, step.groups), olds, strict=True)
            return
        inputs = [values[key] for key in step.keys]
        for key, value in zip(step.keys, inputs, strict=True):
            if not isinstance(value, TensorEntry):
                kind = getattr(value, "kind", type(value).__name__)
                raise UsageError(f"{key} is not a plain tensor ({kind})", "Only plain tensors can be rearranged.")
        step.shapes = tuple(each.shape for each in inputs)
        numbers = tuple(step.groups.get(f"v_{name}") for name in rule.names)
        chain = tuple((str(op), op.parts) for op in rule.chain)
        same = made.setdefault((chain, numbers, tuple((each.view, each.flags) for each in inputs)), {})
        tensors, step.lost = after_chain(rule.chain, columns, self.scope.number(step.groups))
        for overs, entries in tensors.items():
            names = self._names(step, step.with_numbers(overs))
            for place, (name, entry) in enumerate(zip(names, entries, strict=True)):
                if (overs, place) not in same:
                    same[overs, place] = finished(entry, inputs)
                yield name, same[overs, place]

    def _names(self, step: Step, groups: Groups) -> list[str]:
        return [name.fill(groups, self.scope.lookup) for name in step.rule.new]

    def _fill(self) -> None:
        """Adds the tensors of zeros that the new side has in addition."""
        node = self.scope.node
        tensors = {key: value for key, value in node.items() if type(key) is str and isinstance(value, TensorEntry)}
        for fill in self.translation.fill:
            for step in steps_of([fill], tensors, self.scope)[0]:
                value, (op,) = tensors[step.keys[0]], fill.chain
                try:
                    (name,) = self._names(step, step.groups)
                    sizes = {f"v_d{axis}": str(size) for axis, size in enumerate(value.shape)}
                    shape = tuple(map(self.scope.number({**step.groups, **sizes}), op.numbers))
                    refuse_growth(value, shape)
                except UsageError as error:
                    raise fill.within(error) from None
                if name not in self.items:
                    self.items[name] = finished(zeros(value, shape), [value])
                    self.filled.append(name)


def plan_steps(
    translation: Translation, node: Mapping[Any, Any], given: Mapping[str, int] = {}, config: Mapping[str, Any] = {}
) -> TranslatedRoot:
    """Which keys of a set of weights go into which steps. given: numbers for variables.  config: of the model.

    Reads nothing but the zeros that are to be left out. Raises `Conflict` for a step of which a key is missing.
    """
    scope = Scope(given, translation.variables, config, node)
    tied = _tied(translation, node)
    unfilled = [
        key
        for fill in translation.unfill
        for key, value in node.items()
        if type(key) is str and isinstance(value, TensorEntry) and fill.new[0].pattern.fullmatch(key)
    ]
    if any(any(node[key].bytes()) for key in unfilled):  # all that it would have filled in, or none
        unfilled = []
    left_out = {*tied, *unfilled}
    gone, keys = steps_of(translation.drop, (key for key in node if type(key) is str and key not in left_out))
    steps, rest = steps_of(translation.rules, keys, scope, ranges=scope.ranges(translation.ranges), there=node)
    dropped = [*tied, *(key for step in gone for key in step.keys)]
    return TranslatedRoot(translation, scope, steps, rest, dropped, tied, unfilled)


def refuse_unused(translation: Translation, roots: Iterable[TranslatedRoot]) -> None:
    """Raises `NoMatch` for a rule that matches no key of any set of weights, unless it is optional."""
    used = {step.rule.origin for root in roots for step in root.steps}
    idle = (rule for rule in translation.rules if not rule.group and rule.origin not in used)
    refuse_idle(idle, TAKEN_BEFORE, WHOLE_KEY)


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


# Tensors -------------------------------------------------------------------------------------------------------------


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
