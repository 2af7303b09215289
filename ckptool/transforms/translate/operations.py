"""The operations of rules: what becomes of tensors between their old names and their new ones.

An operation takes a list of tensors, in the order of the names, and gives one. Everything stays lazy: views of the
storages where strides can say it, else bytes made while they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import TensorValues, computed_tensor, resolved
from ckptool.errors import CkptoolError, UsageError, counted
from ckptool.formats.pieces import assembled
from ckptool.formats.placements import Piece
from ckptool.names.chain import END, Operation
from ckptool.names.scope import Number
from ckptool.transforms.casting import conversion, converted, parse_dtype
from ckptool.transforms.resize import parse_resize, resized
from ckptool.transforms.views import UNFIT, joined, padded, reshaped, woven

Tensors = list[TensorEntry]

MAX_GROWTH, LARGE = 256, 1 << 30  # times that padding and repeating may enlarge a tensor, to more bytes than this


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of an operation: with the numbers that its expressions have there. A method for each, by its name."""

    op: Operation
    number: Number

    def _axis(self, tensor: TensorEntry, at: int = 0, more: int = 0) -> int:
        """The dimension that it names, counted from the end where it is negative. more: dimensions that are added."""
        value, rank = self.number(self.op.numbers[at]), len(tensor.shape) + more
        if not -rank <= value < rank:
            raise UsageError(f"{list(tensor.shape)} has no dimension {value}", UNFIT)
        return value % rank

    def _number(self, at: int = 1) -> int:
        return self.number(self.op.numbers[at])

    def _sizes(self, total: int, combine: Callable[[list[int]], int], at: int = 0) -> list[int]:
        """The sizes of a list, with what is left in the place of -1. combine: how they come to `total` (sum, prod)."""
        values = [self.number(size) for size in self.op.lists[at]]
        others = [value for value in values if value != -1]
        if len(others) < len(values) - 1 or any(value < 0 for value in others):
            raise UsageError(f"the sizes {values} have more than one -1, or a negative one")
        known = combine(others)
        if len(others) < len(values):
            values[values.index(-1)] = total - known if combine is sum else total // known if known else 0
        if min(values) < 0 or combine(values) != total:
            shown = [f"{value:,}" for value in others] + ["?"] * (len(values) - len(others))
            raise UsageError(f"{total:,} is not {(' + ' if combine is sum else ' x ').join(shown)}", UNFIT)
        return values

    def _size_before(self, tensor: TensorEntry, axis: int) -> int:
        """The size of a dimension, if it is that which the operation names."""
        if self.op.of is not None and self.number(self.op.of) != tensor.shape[axis]:
            wanted = f"the size that `{self.op}` names, {self.number(self.op.of):,}"
            raise UsageError(f"{list(tensor.shape)} is not of {wanted}", UNFIT)
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
        return reshaped(tensor, self._sizes(tensor.numel, prod))

    def unflatten(self, tensor: TensorEntry) -> TensorEntry:
        axis, shape = self._axis(tensor), tensor.shape
        return reshaped(tensor, (*shape[:axis], *self._sizes(shape[axis], prod), *shape[axis + 1 :]))

    def flatten(self, tensor: TensorEntry) -> TensorEntry:
        shape, count = tensor.shape, len(self.op.lists[0])
        axis = self._axis(tensor, more=1 - count)  # of the tensor after it, as that before `unflatten`
        found = shape[axis : axis + count]
        if list(found) != self._sizes(prod(found), prod):
            raise UsageError(f"{list(found)} of {list(shape)} is not {self.op}", UNFIT)
        return reshaped(tensor, (*shape[:axis], prod(found), *shape[axis + count :]))

    def unsqueeze(self, tensor: TensorEntry) -> TensorEntry:
        axis = self._axis(tensor, more=1)
        return reshaped(tensor, (*tensor.shape[:axis], 1, *tensor.shape[axis:]))

    def squeeze(self, tensor: TensorEntry) -> TensorEntry:
        axis = self._axis(tensor)
        if tensor.shape[axis] != 1:
            raise UsageError(f"dimension {axis} of {list(tensor.shape)} is not of size 1", UNFIT)
        return reshaped(tensor, (*tensor.shape[:axis], *tensor.shape[axis + 1 :]))

    def weave(self, tensor: TensorEntry) -> TensorEntry:
        return woven(tensor, self._axis(tensor), 1, self._number(), apart=self.op.name == "deinterleave")

    def rope(self, tensor: TensorEntry) -> TensorEntry:
        """Queries or keys whose rotary pairs are neighbours (Meta's Llama) as two halves of each head (transformers).

        The tensor has to have the rows of so many heads of the size that is named."""
        heads, size = self._number(0), [self.number(each) for each in self.op.numbers[1:]]
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
        if self.op.lists and (wanted := self._sizes(sum(lengths), sum)) != lengths:
            raise UsageError(f"the parts are of {lengths}, and {wanted} are named", UNFIT)
        return [joined(tensors, axis)]

    def stack(self, tensors: Tensors) -> Tensors:
        axis = self._axis(tensors[0], more=1)
        _refuse_unlike(tensors)
        return [joined([reshaped(each, (*each.shape[:axis], 1, *each.shape[axis:])) for each in tensors], axis)]

    def unstack(self, tensors: Tensors) -> Tensors:
        tensor = self._only_one(tensors)
        axis = self._axis(tensor)
        if not tensor.shape[axis]:
            raise UsageError(f"dimension {axis} of {list(tensor.shape)} is empty: it would become no tensor", UNFIT)
        parts = [tensor.narrow(axis, index, 1) for index in range(tensor.shape[axis])]
        return [part.permute([at for at in range(len(part.shape)) if at != axis]) for part in parts]

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
        axis, wanted = self._axis(tensor), self._number()
        if wanted < self._size_before(tensor, axis):
            raise UsageError(f"{tensor.shape[axis]:,} cannot be padded to {wanted:,}, which is less", UNFIT)
        refuse_growth(tensor, (*tensor.shape[:axis], wanted, *tensor.shape[axis + 1 :]))
        return padded(tensor, axis, wanted)

    def repeat(self, tensor: TensorEntry) -> TensorEntry:
        """Every index of a dimension several times in a row, as `torch.repeat_interleave`."""
        axis, times = self._axis(tensor), self._number()
        if times < 1:
            raise UsageError(f"a tensor cannot be repeated {counted(times, 'time')}", UNFIT)
        refuse_growth(tensor, (*tensor.shape, times))
        shape, stride = ((*v[: axis + 1], n, *v[axis + 1 :]) for v, n in ((tensor.shape, times), (tensor.stride, 0)))
        expanded = TensorEntry(tensor.storage, tensor.dtype, shape, stride, tensor.offset, tensor.flags)
        return reshaped(expanded, (*shape[:axis], shape[axis] * times, *shape[axis + 2 :]))

    def unrepeat(self, tensor: TensorEntry) -> TensorEntry:
        """The first of each few that have to be equal, which is verified when they are read."""
        axis, times = self._axis(tensor), self._number()
        if times < 1 or tensor.shape[axis] % times:
            raise UsageError(f"{tensor.shape[axis]:,} is not a multiple of {times:,}", UNFIT)
        if not tensor.numel or times == 1:
            return tensor.narrow(axis, 0, tensor.shape[axis] // times)
        shape = (*tensor.shape[:axis], tensor.shape[axis] // times, times, *tensor.shape[axis + 1 :])
        apart, order = reshaped(tensor, shape), [at for at in range(len(shape)) if at != axis + 1]
        first, *others = (
            Piece(resolved(apart.narrow(axis + 1, n, 1).permute(order)), (0,) * len(order), f"copy {n}")
            for n in range(times)
        )
        return assembled(first.entry.shape, [replace(first, replicas=tuple(others))], "repeated rows")

    def add(self, tensor: TensorEntry) -> TensorEntry:
        """A whole number added to every value, computed in f32: norms that store w - 1."""
        if not tensor.dtype.is_float:
            raise UsageError(f"{tensor!r} is of no floating type", UNFIT)
        by, values = self._number(0), TensorValues(tensor)
        if not by:
            return tensor
        return computed_tensor(tensor.dtype, tensor.shape, lambda start, stop: values.read(start, stop) + by, [tensor])

    def cast(self, tensor: TensorEntry) -> TensorEntry:
        dtype = parse_dtype(self.op.words)
        if conversion(tensor.dtype, dtype) is None:
            raise UsageError(f"{tensor!r} cannot be cast to {dtype}", UNFIT)
        return converted(tensor, dtype)

    def resize(self, tensor: TensorEntry) -> TensorEntry:
        """The tensor in another size, as `warm-start --resize` makes it; -1 is a dimension that stays."""
        sizes = [self.number(size) for size in self.op.lists[0]]
        if len(sizes) != len(tensor.shape) or any(size < -1 for size in sizes):
            raise UsageError(f"{list(tensor.shape)} cannot become {sizes}", UNFIT)
        shape = tuple(old if new == -1 else new for old, new in zip(tensor.shape, sizes, strict=True))
        refuse_growth(tensor, shape)
        try:
            return resized(tensor, shape, parse_resize(self.op.words), "the tensor")
        except CkptoolError as error:
            raise type(error)(error.what, error.why) from None  # its advice is for warm-start

    interleave = deinterleave = weave
    unrope = rope


def applied(op: Operation, tensors: Tensors, number: Number) -> Tensors:
    """The tensors after an operation. Raises `UsageError` where they do not fit."""
    function = getattr(_Use(op, number), op.name)
    return [function(tensor) for tensor in tensors] if op.kind.each else list(function(tensors))


def _refuse_unlike(tensors: Tensors, axis: int | None = None) -> None:
    """Raises `UsageError` for tensors of several types, or of shapes that differ elsewhere than along the axis."""
    first = tensors[0]
    for tensor in tensors:
        shapes = [[size for at, size in enumerate(each.shape) if at != axis] for each in (first, tensor)]
        if tensor.dtype is not first.dtype or len(tensor.shape) != len(first.shape) or shapes[0] != shapes[1]:
            what = f"{first.dtype}{list(first.shape)} and {tensor.dtype}{list(tensor.shape)} cannot be put together"
            raise UsageError(what, UNFIT)


def refuse_growth(tensor: TensorEntry, shape: Sequence[int]) -> None:
    """Raises `UsageError` for a shape that no tensor has, or that is far larger than this one."""
    size = prod(shape) * tensor.dtype.itemsize
    if min(shape, default=0) < 0 or size > max(LARGE, MAX_GROWTH * tensor.nbytes):
        what = f"{tensor!r} would become {list(shape)}, {size:,} bytes"
        raise UsageError(what, "That is no shape, or more than a rule may make of a tensor.")


def losses(op: Operation, before: Tensors, after: Tensors) -> str:
    """Why `--reverse` would not give these tensors back; empty where it would."""
    if op.inverse() is None or op.name == "slice":
        return "" if [each.layout for each in before] == [each.layout for each in after] else f"{op} cannot be undone"
    if op.name == "add" and before != after:
        return f"{op} rounds, so the way back may give other values"
    if op.name == "cat" and not op.lists:
        axis = op.numbers[0].value(lambda name: None)
        sizes = [tensor.shape[axis] for tensor in before]
        if len(set(sizes)) > 1:
            return f"{op} of unequal parts cannot be undone without their sizes: {op} {sizes}"
    return ""
