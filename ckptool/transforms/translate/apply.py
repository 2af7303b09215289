"""Rules applied to sets of weights: which keys go into which step, and the tensors that come out of it.

An operation takes a list of tensors, in the order of the names, and returns a list. Everything stays lazy: views of the
storages where strides can express it, else bytes computed while they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import elementwise, is_same, resolved
from ckptool.checkpoint.dtypes import numbers
from ckptool.checkpoint.strided import apart
from ckptool.commands import arg
from ckptool.conventions.state_dicts import is_beside
from ckptool.errors import CkptoolError, Conflict, NoMatch, UsageError, counted, listed
from ckptool.facts import dataclass, field
from ckptool.names.pattern import MAX_NUMBER
from ckptool.names.rules import END, TAKEN_BEFORE, WHOLE_KEY, Operation, Translation, refuse_idle
from ckptool.names.steps import Number, Overs, Scope, Step, steps_of
from ckptool.transforms.views import UNFIT, joined, woven, zeros

REFUSE, KEEP, DROP = "refuse", "keep", "drop"
MAX_GROWTH, LARGE = 256, 1 << 30  # padding may enlarge a tensor so many times, or to so many bytes

Tensors = list[TensorEntry]


@dataclass(slots=True, eq=False)
class TranslatedRoot:
    """A set of weights by the rules. kept: keys that no rule takes.  dropped: keys that are left out.

    tied: second names of tensors, among the dropped keys.  unfilled: keys of zero tensors, left out too.
    items, filled: the new items, and the names of new zero tensors, once the steps are carried out.
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
            what = f"no rule matches {counted(len(self.kept), 'key')}: {listed(self.kept, 6)}"
            fix = f"Keep them as they are: {arg(rest='keep')}; leave them out: {arg(rest='drop')}"
            raise NoMatch(what, "Nothing was written.", fix)
        if rest == DROP:
            self.dropped, self.kept = [*self.dropped, *self.kept], []
        cache: dict[Any, dict[Any, TensorEntry]] = {}
        owners: dict[str, str] = {}

        def claim(name: str, owner: str, key: str) -> None:
            if name in owners:
                what = f"two tensors would be {name!r}: by {owners[name]}; and by {owner}, from {key}"
                raise Conflict(what, "Only one of them could be kept. Nothing was written.")
            if not name:
                raise Conflict(f"the key {key} would become empty", "Nothing was written.")
            owners[name] = f"{owner}, from {key}"

        produced: dict[str, list[tuple[str, Any]]] = {}  # by the first key of each step
        for step in self.steps:
            try:
                results = list(self.results(step, self.scope.node, cache))
            except CkptoolError as error:
                raise step.rule.within(error, step.keys) from None
            place, rule = step.rule.origin
            for name, _ in results:
                claim(name, f"{place}: {rule!r}" if place else repr(rule), step.keys[0])
            step.outputs = [name for name, _ in results]
            produced[step.keys[0]] = results
        remaining = {*self.kept}
        for key, value in self.scope.node.items():
            if key in produced:
                self.items |= produced[key]
            elif type(key) is not str or key in remaining or is_beside(key, value):
                if type(key) is str:
                    claim(key, "a key that no rule matches", key)
                self.items[key] = value
        ties = self.translation.ties
        self.items |= {n: self.items[other] for n, other in ties if other in self.items and n not in self.items}
        node = self.scope.node
        tensors = {key: value for key, value in node.items() if type(key) is str and isinstance(value, TensorEntry)}
        for fill in self.translation.fill:  # zero tensors that only the new side has
            for step in steps_of([fill], tensors, self.scope)[0]:
                value, (op,) = tensors[step.keys[0]], fill.chain
                try:
                    (name,) = step.names(self.scope.lookup)
                    sizes = {f"v_d{axis}": str(size) for axis, size in enumerate(value.shape)}
                    shape = tuple(map(self.scope.number({**step.groups, **sizes}), op.numbers))
                    refuse_growth(value, shape)
                except UsageError as error:
                    raise fill.within(error) from None
                if name not in self.items:
                    self.items[name] = finished(zeros(value, shape), [value])
                    self.filled.append(name)

    def results(
        self, step: Step, values: Mapping[Any, Any], cache: dict[Any, dict[Any, TensorEntry]]
    ) -> Iterator[tuple[str, Any]]:
        """The new names of a step, with what the rule makes of values by old names. cache: tensors made before."""
        rule = step.rule
        columns = {overs: [values[key] for key in keys] for overs, keys in sorted(step.inputs.items())}
        if not rule.chain:
            (olds,) = columns.values()
            yield from zip(step.names(self.scope.lookup), olds, strict=True)
            return
        inputs = [values[key] for key in step.keys]
        for key, value in zip(step.keys, inputs, strict=True):
            if not isinstance(value, TensorEntry):
                kind = getattr(value, "kind", type(value).__name__)
                raise UsageError(f"{key} is not a plain tensor ({kind})", "Only plain tensors can be rearranged.")
        step.shapes = tuple(tensor.shape for tensor in inputs)
        numbers = tuple(step.groups.get(f"v_{name}") for name in rule.names)
        chain = tuple((str(op), op.parts) for op in rule.chain)
        same = cache.setdefault((chain, numbers, tuple((tensor.view, tensor.flags) for tensor in inputs)), {})
        tensors, step.lost = after_chain(rule.chain, columns, self.scope.number(step.groups))
        for overs, entries in tensors.items():
            names = step.names(self.scope.lookup, overs)
            for index, (name, entry) in enumerate(zip(names, entries, strict=True)):
                if (overs, index) not in same:
                    same[overs, index] = finished(entry, inputs)
                yield name, same[overs, index]


def plan_steps(
    translation: Translation, node: Mapping[Any, Any], given: Mapping[str, int] = {}, config: Mapping[str, Any] = {}
) -> TranslatedRoot:
    """Which keys of a set of weights go into which steps. given: numbers for variables.  config: the model's.

    Reads nothing but the zeros that are to be left out. Raises `Conflict` for a step that lacks a key, and for a second
    name whose tensor has values of its own.
    """
    scope = Scope(given, translation.variables, config, node)
    tied = list[str]()  # second names of tensors, which are left out
    for name, other in ((name, other) for name, other in translation.tied if name in node and other in node):
        second, first = node[name], node[other]
        are_tensors = isinstance(second, TensorEntry) and isinstance(first, TensorEntry)
        if second is not first and not (are_tensors and (second.view == first.view or is_same(second, first))):
            what = f"{name} is not {other}: they are tied in the other layout"
            raise Conflict(what, "One of the two would be lost. Nothing was written.")
        tied.append(name)
    unfilled = [
        key
        for fill in translation.unfill
        for key, value in node.items()
        if type(key) is str and isinstance(value, TensorEntry) and fill.new[0].pattern.fullmatch(key)
    ]
    if any(any(node[key].bytes()) for key in unfilled):  # all tensors that a fill would have made, or none
        unfilled = []
    left_out = {*tied, *unfilled}
    names = (
        key for key, value in node.items() if type(key) is str and key not in left_out and not is_beside(key, value)
    )
    drop_steps, keys = steps_of(translation.drop, names)
    steps, kept = steps_of(translation.rules, keys, scope, ranges=scope.ranges(translation.ranges), all_names=node)
    dropped = [*tied, *(key for step in drop_steps for key in step.keys)]
    return TranslatedRoot(translation, scope, steps, kept, dropped, tied, unfilled)


def refuse_unused(translation: Translation, roots: Iterable[TranslatedRoot]) -> None:
    """Raises `NoMatch` for a rule that matches no key of any set of weights, unless it is optional."""
    used = {step.rule.origin for root in roots for step in root.steps}
    idle = (rule for rule in translation.rules if not rule.group and rule.origin not in used)
    refuse_idle(idle, TAKEN_BEFORE, WHOLE_KEY)


# Tensors -------------------------------------------------------------------------------------------------------------


def after_chain(
    chain: Sequence[Operation], values: Mapping[Overs, Tensors], number: Number
) -> tuple[dict[Overs, Tensors], str]:
    """The tensors after all operations of a rule, and what undoing them would lose."""
    lost = ""
    state = {overs: [resolved(tensor) for tensor in tensors] for overs, tensors in values.items()}
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
                if len(set(map(len, columns))) > 1:
                    sizes = listed([str(len(column)) for column in columns])
                    raise UsageError(f"{op}: the tensors have sizes {sizes} in that dimension")
                for index, row in enumerate(zip(*columns, strict=True)):
                    after[(*overs, (op.over, index))] = list(row)
        else:
            for overs, tensors in state.items():
                after[overs] = applied(op, tensors, number)
                lost = lost or losses(op, tensors, after[overs])
        state = after
    return state, lost


def finished(entry: TensorEntry, inputs: Sequence[TensorEntry]) -> TensorEntry:
    """The tensor on a storage of its own, in row-major order; reading it verifies the checksums of the inputs."""
    flags = inputs[0].flags._replace(conj=False, neg=False)
    if any(entry.storage is source.storage and entry.layout == source.layout for source in inputs):
        return entry.with_flags(flags)  # unchanged, with the storage that it shares
    return apart(entry).with_flags(flags)


# Operations ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of an operation, with the values of its expressions there. Each operation is the method of its name."""

    op: Operation
    number: Number

    def _axis(self, tensor: TensorEntry, index: int = 0, added: int = 0) -> int:
        """The dimension that the operation names; negative ones count from the end. added: dimensions that it adds."""
        value, rank = self.number(self.op.numbers[index]), len(tensor.shape) + added
        if not -rank <= value < rank:
            raise UsageError(f"{list(tensor.shape)} has no dimension {value}", UNFIT)
        return value % rank

    def _number(self, index: int = 1) -> int:
        return self.number(self.op.numbers[index])

    def _sizes(self, total: int, combine: Callable[[list[int]], int], index: int = 0) -> list[int]:
        """The sizes of a list, with the remainder in place of -1. combine: how they make up `total` (sum, prod)."""
        values = [self.number(size) for size in self.op.lists[index]]
        fixed = [value for value in values if value != -1]
        if len(fixed) < len(values) - 1 or any(value < 0 for value in fixed):
            raise UsageError(f"the sizes {values} have more than one -1, or a negative one")
        subtotal = combine(fixed)
        if len(fixed) < len(values):
            values[values.index(-1)] = total - subtotal if combine is sum else total // subtotal if subtotal else 0
        if min(values) < 0 or combine(values) != total:
            shown = [f"{value:,}" for value in fixed] + ["?"] * (len(values) - len(fixed))
            raise UsageError(f"{total:,} is not {(' + ' if combine is sum else ' x ').join(shown)}", UNFIT)
        return values

    def _size_before(self, tensor: TensorEntry, axis: int) -> int:
        """The size of a dimension. Raises `UsageError` where the operation names another size."""
        if self.op.of is not None and self.number(self.op.of) != tensor.shape[axis]:
            expected = f"the size that `{self.op}` names, {self.number(self.op.of):,}"
            raise UsageError(f"{list(tensor.shape)} is not of {expected}", UNFIT)
        return tensor.shape[axis]

    # Shapes ----

    def transpose(self, tensor: TensorEntry) -> TensorEntry:
        if not self.op.numbers and len(tensor.shape) < 2:
            raise UsageError(f"{list(tensor.shape)} has no dimension -2", UNFIT)
        first, second = (self._axis(tensor, 0), self._axis(tensor, 1)) if self.op.numbers else (-2, -1)
        order = list(range(len(tensor.shape)))
        order[first], order[second] = order[second], order[first]
        return tensor.permute(order)

    def permute(self, tensor: TensorEntry) -> TensorEntry:
        order = [self._axis(tensor, at) for at in range(len(self.op.numbers))]
        if sorted(order) != list(range(len(tensor.shape))):
            raise UsageError(f"{order} is not an order of the dimensions of {list(tensor.shape)}", UNFIT)
        return tensor.permute(order)

    def reshape(self, tensor: TensorEntry) -> TensorEntry:
        if len(self.op.lists) > 1 and [*tensor.shape] != self._sizes(tensor.numel, prod, 1):
            raise UsageError(f"{list(tensor.shape)} is not the shape that the rule names", UNFIT)
        return _with_sizes(tensor, 0, len(tensor.shape), *self._sizes(tensor.numel, prod))

    def unflatten(self, tensor: TensorEntry) -> TensorEntry:
        axis = self._axis(tensor)
        return _with_sizes(tensor, axis, 1, *self._sizes(tensor.shape[axis], prod))

    def flatten(self, tensor: TensorEntry) -> TensorEntry:
        shape, count = tensor.shape, len(self.op.lists[0])
        axis = self._axis(tensor, added=1 - count)  # of the tensor after it, as `unflatten` names that before
        sizes = shape[axis : axis + count]
        if list(sizes) != self._sizes(prod(sizes), prod):
            raise UsageError(f"{list(sizes)} of {list(shape)} is not {self.op}", UNFIT)
        return _with_sizes(tensor, axis, count, prod(sizes))

    def unsqueeze(self, tensor: TensorEntry) -> TensorEntry:
        return _with_sizes(tensor, self._axis(tensor, added=1), 0, 1)

    def squeeze(self, tensor: TensorEntry) -> TensorEntry:
        axis = self._axis(tensor)
        if tensor.shape[axis] != 1:
            raise UsageError(f"dimension {axis} of {list(tensor.shape)} is not of size 1", UNFIT)
        return _with_sizes(tensor, axis, 1)

    def weave(self, tensor: TensorEntry) -> TensorEntry:
        return woven(tensor, self._axis(tensor), 1, self._number(), apart=self.op.name == "deinterleave")

    def rope(self, tensor: TensorEntry) -> TensorEntry:
        """Queries or keys whose rotary pairs are neighbours (Meta's Llama) as two halves of each head (transformers).

        Where the operation names a head size, the tensor must have the rows of that many heads of that size."""
        heads, size = self._number(0), [self.number(expression) for expression in self.op.numbers[1:]]
        if size and tensor.shape[:1] != (heads * size[0],):
            rows = f"the rows of {counted(heads, 'head')} of {size[0]:,}"
            raise UsageError(f"{list(tensor.shape)} does not have {rows}", UNFIT)
        return woven(tensor, 0, heads, 2, apart=self.op.name == "rope")

    # Parts ----

    def split(self, tensors: Tensors) -> Tensors:
        tensor = self._only_one(tensors)
        axis, parts = self._axis(tensor), self.op.parts
        size = tensor.shape[axis]
        if not self.op.lists and (parts < 1 or size % parts):
            raise UsageError(f"{size:,} cannot be split into {parts} equal parts", UNFIT)
        sizes = self._sizes(size, sum) if self.op.lists else [size // parts] * parts
        return [tensor.narrow(axis, at, n) for at, n in zip(accumulate(sizes, initial=0), sizes, strict=False)]

    def _only_one(self, tensors: Tensors) -> TensorEntry:
        if len(tensors) != 1:
            raise UsageError(f"{self.op.name} takes one tensor, not {len(tensors)}")
        return tensors[0]

    def cat(self, tensors: Tensors) -> Tensors:
        axis = self._axis(tensors[0])
        _refuse_unlike(tensors, axis)
        lengths = [tensor.shape[axis] for tensor in tensors]
        if self.op.lists and (named := self._sizes(sum(lengths), sum)) != lengths:
            raise UsageError(f"the parts have sizes {lengths}, but the rule says {named}", UNFIT)
        return [joined(tensors, axis)]

    def stack(self, tensors: Tensors) -> Tensors:
        axis = self._axis(tensors[0], added=1)
        _refuse_unlike(tensors)
        return [joined([_with_sizes(tensor, axis, 0, 1) for tensor in tensors], axis)]

    def unstack(self, tensors: Tensors) -> Tensors:
        tensor = self._only_one(tensors)
        axis = self._axis(tensor)
        if not tensor.shape[axis]:
            raise UsageError(f"dimension {axis} of {list(tensor.shape)} is empty: it would become no tensor", UNFIT)
        return [_with_sizes(tensor.narrow(axis, index, 1), axis, 1) for index in range(tensor.shape[axis])]

    # Values ----

    def slice(self, tensor: TensorEntry) -> TensorEntry:
        axis = self._axis(tensor)
        size, (begin, end) = self._size_before(tensor, axis), self.op.lists[0]
        start, stop = self.number(begin), size if end is END else self.number(end)
        start, stop = (start + size * (start < 0), stop + size * (stop < 0))
        if not 0 <= start <= stop <= size:
            raise UsageError(f"{start:,}:{stop:,} is outside of a dimension of {size:,}", UNFIT)
        return tensor.narrow(axis, start, stop - start)

    def pad(self, tensor: TensorEntry) -> TensorEntry:
        axis, padded = self._axis(tensor), self._number()
        if padded < self._size_before(tensor, axis):
            raise UsageError(f"{tensor.shape[axis]:,} cannot be padded to {padded:,}, which is less", UNFIT)
        before, size, after = tensor.shape[:axis], tensor.shape[axis], tensor.shape[axis + 1 :]
        refuse_growth(tensor, (*before, padded, *after))
        return joined([tensor, zeros(tensor, (*before, padded - size, *after))], axis) if padded > size else tensor

    def add(self, tensor: TensorEntry) -> TensorEntry:
        """Adds an integer to every value, computed in f32: for norms that store w - 1."""
        if not tensor.dtype.is_float:
            raise UsageError(f"{tensor!r} is not of a floating-point type", UNFIT)
        by = self._number(0)
        if not by:
            return tensor
        return elementwise(lambda _, raw: numbers(raw, tensor.dtype) + by, tensor, dtype=tensor.dtype)

    interleave = deinterleave = weave
    unrope = rope


def _with_sizes(tensor: TensorEntry, axis: int, count: int, *sizes: int) -> TensorEntry:
    """The tensor with these sizes in place of `count` dimensions from `axis` on."""
    shape = (*tensor.shape[:axis], *sizes, *tensor.shape[axis + count :])
    if prod(size or 1 for size in shape) > MAX_NUMBER:  # empty tensors, too
        raise UsageError(f"the shape {list(shape)} is too large", "No tensor has such a size.")
    return tensor.reshape(shape)


def applied(op: Operation, tensors: Tensors, number: Number) -> Tensors:
    """The tensors after an operation. Raises `UsageError` where they do not fit."""
    function = getattr(_Use(op, number), op.name)
    return [function(tensor) for tensor in tensors] if op.kind.each else list(function(tensors))


def _refuse_unlike(tensors: Tensors, axis: int | None = None) -> None:
    """Raises `UsageError` for tensors of several types, or of shapes that differ other than along the axis."""
    first = tensors[0]
    for tensor in tensors:
        shapes = [[size for at, size in enumerate(entry.shape) if at != axis] for entry in (first, tensor)]
        if tensor.dtype is not first.dtype or len(tensor.shape) != len(first.shape) or shapes[0] != shapes[1]:
            what = f"{first.dtype}{list(first.shape)} and {tensor.dtype}{list(tensor.shape)} cannot be joined"
            raise UsageError(what, UNFIT)


def refuse_growth(tensor: TensorEntry, shape: Sequence[int]) -> None:
    """Raises `UsageError` for a negative size, or a shape that is far larger than the tensor."""
    size = prod(shape) * tensor.dtype.itemsize
    if min(shape, default=0) < 0 or size > max(LARGE, MAX_GROWTH * tensor.nbytes):
        what = f"{tensor!r} would become {list(shape)}, {size:,} bytes"
        raise UsageError(what, "That is not a shape, or is more than a rule may make of a tensor.")


def losses(op: Operation, before: Tensors, after: Tensors) -> str:
    """Why `--reverse` would not restore these tensors; empty where it would."""
    if op.inverse() is None or op.name == "slice":
        return "" if [t.layout for t in before] == [t.layout for t in after] else f"{op} cannot be undone"
    if op.name == "add" and before != after:
        return f"{op} rounds, so the way back may give other values"
    if op.name == "cat" and not op.lists:
        axis = op.numbers[0].value(lambda name: None)
        sizes = [tensor.shape[axis] for tensor in before]
        if len(set(sizes)) > 1:
            return f"{op} of unequal parts cannot be undone without their sizes: {op} {sizes}"
    return ""
