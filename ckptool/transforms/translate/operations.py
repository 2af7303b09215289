"""The operations of rules: what becomes of tensors between their old names and their new ones.

An operation takes a list of tensors, in the order of the names, and gives one. Everything stays lazy: views of the
storages where strides can say it, else bytes made while they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import TensorValues, computed_tensor, resolved
from ckptool.errors import CkptoolError, UsageError, counted
from ckptool.formats.pieces import Piece, assembled
from ckptool.names.arithmetic import Arithmetic, parse_arithmetic
from ckptool.names.chain import END, Operation
from ckptool.names.scope import Number
from ckptool.transforms.cast import parse_dtype
from ckptool.transforms.casting import conversion, converted
from ckptool.transforms.resize import parse_resize, resized
from ckptool.transforms.views import UNFIT, joined, padded, reshaped, woven

Tensors = list[TensorEntry]
Apply = Callable[["Operation", Any, Number], Any]
"""The function of an operation: from each tensor to one, or from the list of all to another."""

MAX_GROWTH, LARGE = 256, 1 << 30  # times that padding and repeating may enlarge a tensor, to more bytes than this


def _axis(tensor: TensorEntry, axis: Arithmetic, number: Number, more: int = 0) -> int:
    """The number of a dimension, counted from the end where it is negative. more: dimensions that are added."""
    value, rank = number(axis), len(tensor.shape) + more
    if not -rank <= value < rank:
        raise UsageError(f"{list(tensor.shape)} has no dimension {value}", UNFIT)
    return value % rank


def _sizes(given: Sequence[Arithmetic], number: Number, total: int, combine: Callable[[list[int]], int]) -> list[int]:
    """The sizes, with what is left in the place of -1. combine: how they come to `total` (sum, prod)."""
    values = [number(size) for size in given]
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


# Shapes --------------------------------------------------------------------------------------------------------------


def _transpose(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    first, second = (_axis(tensor, axis, number) for axis in op.numbers or _LAST)
    order = list(range(len(tensor.shape)))
    order[first], order[second] = second, first
    return tensor.permute(order)


_LAST = (parse_arithmetic("-2"), parse_arithmetic("-1"))


def _permute(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    order = [_axis(tensor, axis, number) for axis in op.numbers]
    if sorted(order) != list(range(len(tensor.shape))):
        raise UsageError(f"{order} is not an order of the dimensions of {list(tensor.shape)}", UNFIT)
    return tensor.permute(order)


def _reshape(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    shape, *before = op.lists
    if before and [*tensor.shape] != _sizes(before[0], number, tensor.numel, prod):
        raise UsageError(f"{list(tensor.shape)} is not the shape that the rule names", UNFIT)
    return reshaped(tensor, _sizes(shape, number, tensor.numel, prod))


def _unflatten(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    axis, shape = _axis(tensor, op.numbers[0], number), tensor.shape
    return reshaped(tensor, (*shape[:axis], *_sizes(op.lists[0], number, shape[axis], prod), *shape[axis + 1 :]))


def _flatten(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    shape, count = tensor.shape, len(op.lists[0])
    axis = _axis(tensor, op.numbers[0], number, 1 - count)  # of the tensor after it, as that before `unflatten`
    found = shape[axis : axis + count]
    if list(found) != _sizes(op.lists[0], number, prod(found), prod):
        raise UsageError(f"{list(found)} of {list(shape)} is not {op}", UNFIT)
    return reshaped(tensor, (*shape[:axis], prod(found), *shape[axis + count :]))


def _unsqueeze(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    axis = _axis(tensor, op.numbers[0], number, 1)
    return reshaped(tensor, (*tensor.shape[:axis], 1, *tensor.shape[axis:]))


def _squeeze(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    axis = _axis(tensor, op.numbers[0], number)
    if tensor.shape[axis] != 1:
        raise UsageError(f"dimension {axis} of {list(tensor.shape)} is not of size 1", UNFIT)
    return reshaped(tensor, (*tensor.shape[:axis], *tensor.shape[axis + 1 :]))


def _weave(op: Operation, tensor: TensorEntry, number: Number, *, apart: bool) -> TensorEntry:
    return woven(tensor, _axis(tensor, op.numbers[0], number), 1, number(op.numbers[1]), apart=apart)


def _rope(op: Operation, tensor: TensorEntry, number: Number, *, apart: bool) -> TensorEntry:
    """Queries or keys whose rotary pairs are neighbours (Meta's Llama) as two halves of each head (transformers)."""
    return woven(tensor, 0, _heads(op, tensor, number), 2, apart=apart)


def _heads(op: Operation, tensor: TensorEntry, number: Number) -> int:
    """The number of heads, if the tensor has the rows of so many of the size that is named."""
    heads, size = number(op.numbers[0]), [number(each) for each in op.numbers[1:]]
    if size and tensor.shape[:1] != (heads * size[0],):
        raise UsageError(
            f"{list(tensor.shape)} does not have the rows of {counted(heads, 'head')} of {size[0]:,}", UNFIT
        )
    return heads


# Parts ---------------------------------------------------------------------------------------------------------------


def _split(op: Operation, tensors: Tensors, number: Number) -> Tensors:
    (tensor,) = _only_one(op, tensors)
    axis = _axis(tensor, op.numbers[0], number)
    size = tensor.shape[axis]
    if op.lists:
        sizes = _sizes(op.lists[0], number, size, sum)
    elif op.parts < 1 or size % op.parts:
        raise UsageError(f"{size:,} cannot be split into {op.parts} equal parts", UNFIT)
    else:
        sizes = [size // op.parts] * op.parts
    return [tensor.narrow(axis, at, n) for at, n in zip(accumulate(sizes, initial=0), sizes, strict=False)]


def _only_one(op: Operation, tensors: Tensors) -> Tensors:
    if len(tensors) != 1:
        raise UsageError(f"{op.name} takes one tensor, not {len(tensors)}")
    return tensors


def _cat(op: Operation, tensors: Tensors, number: Number) -> Tensors:
    axis = _axis(tensors[0], op.numbers[0], number)
    _refuse_unlike(tensors, axis)
    lengths = [tensor.shape[axis] for tensor in tensors]
    if op.lists and (wanted := _sizes(op.lists[0], number, sum(lengths), sum)) != lengths:
        raise UsageError(f"the parts are of {lengths}, and {wanted} are named", UNFIT)
    return [joined(tensors, axis)]


def _refuse_unlike(tensors: Tensors, axis: int | None = None) -> None:
    """Raises `UsageError` for tensors of several types, or of shapes that differ elsewhere than along the axis."""
    first = tensors[0]
    for tensor in tensors:
        shapes = [[size for at, size in enumerate(each.shape) if at != axis] for each in (first, tensor)]
        if tensor.dtype is not first.dtype or len(tensor.shape) != len(first.shape) or shapes[0] != shapes[1]:
            what = f"{first.dtype}{list(first.shape)} and {tensor.dtype}{list(tensor.shape)} cannot be put together"
            raise UsageError(what, UNFIT)


def _stack(op: Operation, tensors: Tensors, number: Number) -> Tensors:
    axis = _axis(tensors[0], op.numbers[0], number, 1)
    _refuse_unlike(tensors)
    return [joined([reshaped(each, (*each.shape[:axis], 1, *each.shape[axis:])) for each in tensors], axis)]


def _unstack(op: Operation, tensors: Tensors, number: Number) -> Tensors:
    (tensor,) = _only_one(op, tensors)
    axis = _axis(tensor, op.numbers[0], number)
    if not tensor.shape[axis]:
        raise UsageError(f"dimension {axis} of {list(tensor.shape)} is empty: it would become no tensor", UNFIT)
    parts = [tensor.narrow(axis, index, 1) for index in range(tensor.shape[axis])]
    return [part.permute([at for at in range(len(part.shape)) if at != axis]) for part in parts]


# Values --------------------------------------------------------------------------------------------------------------


def _slice(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    axis = _axis(tensor, op.numbers[0], number)
    size, (begin, end) = _size_before(op, tensor, axis, number), op.lists[0]
    start, stop = number(begin), size if end is END else number(end)
    start, stop = (start + size * (start < 0), stop + size * (stop < 0))
    if not 0 <= start <= stop <= size:
        raise UsageError(f"{start:,}:{stop:,} is outside of a dimension of {size:,}", UNFIT)
    return tensor.narrow(axis, start, stop - start)


def _size_before(op: Operation, tensor: TensorEntry, axis: int, number: Number) -> int:
    """The size of a dimension, if it is that which the operation names."""
    size = tensor.shape[axis]
    if op.of is not None and number(op.of) != size:
        raise UsageError(f"{list(tensor.shape)} is not of the size that `{op}` names, {number(op.of):,}", UNFIT)
    return size


def _pad(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    axis, wanted = _axis(tensor, op.numbers[0], number), number(op.numbers[1])
    if wanted < _size_before(op, tensor, axis, number):
        raise UsageError(f"{tensor.shape[axis]:,} cannot be padded to {wanted:,}, which is less", UNFIT)
    refuse_growth(tensor, (*tensor.shape[:axis], wanted, *tensor.shape[axis + 1 :]))
    return padded(tensor, axis, wanted)


def _repeat(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    """Every index of a dimension several times in a row, as `torch.repeat_interleave`."""
    axis, times = _axis(tensor, op.numbers[0], number), number(op.numbers[1])
    if times < 1:
        raise UsageError(f"a tensor cannot be repeated {counted(times, 'time')}", UNFIT)
    refuse_growth(tensor, (*tensor.shape, times))
    shape, stride = ((*v[: axis + 1], n, *v[axis + 1 :]) for v, n in ((tensor.shape, times), (tensor.stride, 0)))
    expanded = TensorEntry(tensor.storage, tensor.dtype, shape, stride, tensor.offset, tensor.flags)
    return reshaped(expanded, (*shape[:axis], shape[axis] * times, *shape[axis + 2 :]))


def _unrepeat(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    """The first of each few that have to be equal, which is verified when they are read."""
    axis, times = _axis(tensor, op.numbers[0], number), number(op.numbers[1])
    if times < 1 or tensor.shape[axis] % times:
        raise UsageError(f"{tensor.shape[axis]:,} is not a multiple of {times:,}", UNFIT)
    if not tensor.numel or times == 1:
        return tensor.narrow(axis, 0, tensor.shape[axis] // times)
    shape = (*tensor.shape[:axis], -1, times, *tensor.shape[axis + 1 :])
    apart = reshaped(tensor, [tensor.shape[axis] // times if size == -1 else size for size in shape])
    order = [at for at in range(len(shape)) if at != axis + 1]
    first, *others = (
        Piece(resolved(apart.narrow(axis + 1, n, 1).permute(order)), (0,) * len(order), f"copy {n}")
        for n in range(times)
    )
    return assembled(first.entry.shape, [replace(first, replicas=tuple(others))], "repeated rows")


def refuse_growth(tensor: TensorEntry, shape: Sequence[int]) -> None:
    """Raises `UsageError` for a shape that no tensor has, or that is far larger than this one."""
    size = prod(shape) * tensor.dtype.itemsize
    if min(shape, default=0) < 0 or size > max(LARGE, MAX_GROWTH * tensor.nbytes):
        what = f"{tensor!r} would become {list(shape)}, {size:,} bytes"
        raise UsageError(what, "That is no shape, or more than a rule may make of a tensor.")


def _add(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    """A whole number added to every value, computed in f32: norms that store w - 1."""
    if not tensor.dtype.is_float:
        raise UsageError(f"{tensor!r} is of no floating type", UNFIT)
    by, values = number(op.numbers[0]), TensorValues(tensor)
    if not by:
        return tensor
    return computed_tensor(tensor.dtype, tensor.shape, lambda start, stop: values.read(start, stop) + by, [tensor])


def _cast(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    dtype = parse_dtype(op.words)
    if conversion(tensor.dtype, dtype) is None:
        raise UsageError(f"{tensor!r} cannot be cast to {dtype}", UNFIT)
    return converted(tensor, dtype)


def _resize(op: Operation, tensor: TensorEntry, number: Number) -> TensorEntry:
    """The tensor in another size, as `warm-start --resize` makes it; -1 is a dimension that stays."""
    sizes = [number(size) for size in op.lists[0]]
    if len(sizes) != len(tensor.shape) or any(size < -1 for size in sizes):
        raise UsageError(f"{list(tensor.shape)} cannot become {sizes}", UNFIT)
    shape = tuple(old if new == -1 else new for old, new in zip(tensor.shape, sizes, strict=True))
    refuse_growth(tensor, shape)
    try:
        return resized(tensor, shape, parse_resize(op.words), "the tensor")
    except CkptoolError as error:
        raise type(error)(error.what, error.why) from None  # its advice is for warm-start


FUNCTIONS: dict[str, Apply] = {
    "transpose": _transpose,
    "permute": _permute,
    "reshape": _reshape,
    "unflatten": _unflatten,
    "flatten": _flatten,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "interleave": partial(_weave, apart=False),
    "deinterleave": partial(_weave, apart=True),
    "rope": partial(_rope, apart=True),
    "unrope": partial(_rope, apart=False),
    "split": _split,
    "cat": _cat,
    "stack": _stack,
    "unstack": _unstack,
    "slice": _slice,
    "pad": _pad,
    "repeat": _repeat,
    "unrepeat": _unrepeat,
    "add": _add,
    "resize": _resize,
    "cast": _cast,
}


def applied(op: Operation, tensors: Tensors, number: Number) -> Tensors:
    """The tensors after an operation. Raises `UsageError` where they do not fit."""
    function = FUNCTIONS[op.name]
    if op.kind.each:
        return [function(op, tensor, number) for tensor in tensors]
    after: Tensors = function(op, tensors, number)
    return after


def losses(op: Operation, before: Tensors, after: Tensors) -> str:
    """Why `--reverse` would not give these tensors back; empty where it would."""
    if op.inverse() is None or op.name == "slice":
        return "" if [each.layout for each in before] == [each.layout for each in after] else f"{op} cannot be undone"
    if op.name == "add" and before != after:
        return f"{op} rounds, so the way back may give other values"
    if op.name == "cat" and not op.lists:
        axis = _axis(before[0], op.numbers[0], lambda axis: axis.value(lambda name: None))
        sizes = [tensor.shape[axis] for tensor in before]
        if len(set(sizes)) > 1:
            return f"{op} of unequal parts cannot be undone without their sizes: {op} {sizes}"
    return ""
