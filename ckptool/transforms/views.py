"""Views of tensors, and tensors put together: what the operations of rules are made of. Nothing is read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

from ckptool.checkpoint import InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.arrays import resolved
from ckptool.errors import UsageError
from ckptool.formats.boxes import Piece
from ckptool.formats.pieces import assembled
from ckptool.names.arithmetic import MAX_NUMBER

UNFIT = "The rule does not fit this tensor, or a variable is of another model. Nothing was written."


def reshaped(tensor: TensorEntry, shape: Sequence[int]) -> TensorEntry:
    """The elements in another shape: a view where the strides allow it, as in torch."""
    if prod(size or 1 for size in shape) > MAX_NUMBER:  # of an empty tensor
        raise UsageError(f"the shape {list(shape)} is too large", "No tensor has such a size.")
    strides = _view_strides(tensor, shape)
    if strides is None:
        return tensor.reshape(tuple(shape))
    return TensorEntry(tensor.storage, tensor.dtype, tuple(shape), strides, tensor.offset, tensor.flags)


def _view_strides(tensor: TensorEntry, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of the same elements in another shape; None where there are none."""
    if not tensor.numel:
        return row_major_strides(tuple(shape))
    blocks: list[list[int]] = []  # sizes and steps of dimensions that continue each other
    for size, step in zip(tensor.shape, tensor.stride, strict=True):
        if blocks and blocks[-1][1] == size * step:
            blocks[-1] = [blocks[-1][0] * size, step]
        elif size != 1:
            blocks.append([size, step])
    strides: list[int] = []
    place = 0
    for size, step in blocks:
        end = place
        while prod(shape[place:end]) < size and end < len(shape):
            end += 1
        if prod(shape[place:end]) != size:
            return None
        strides += [step * inner for inner in row_major_strides(tuple(shape[place:end]))]
        place = end
    return (*strides, *[1] * (len(shape) - place))


def woven(tensor: TensorEntry, axis: int, groups: int, parts: int, *, apart: bool) -> TensorEntry:
    """Interleaves the parts of each group of a dimension; with `apart`, the inverse."""
    shape = tensor.shape
    if not shape or parts < 1 or groups < 1 or shape[axis] % (parts * groups):
        size = f"{shape[axis]:,}" if shape else "a single value"
        raise UsageError(f"{size} is not a multiple of {groups} x {parts}", UNFIT)
    inner = shape[axis] // parts // groups
    sizes = (inner, parts) if apart else (parts, inner)
    divided = reshaped(tensor, (*shape[:axis], groups, *sizes, *shape[axis + 1 :]))
    order = list(range(len(divided.shape)))
    order[axis + 1 : axis + 3] = axis + 2, axis + 1
    return reshaped(divided.permute(order), shape)


def joined(tensors: Sequence[TensorEntry], axis: int) -> TensorEntry:
    """Tensors of one type, and of one shape but for the axis, one after the other."""
    plain = [resolved(tensor) for tensor in tensors]
    first = plain[0]
    begins = list(accumulate((tensor.shape[axis] for tensor in plain), initial=0))
    shape = (*first.shape[:axis], begins[-1], *first.shape[axis + 1 :])
    chunks = [
        Piece(tensor, tuple(begin * (each == axis) for each in range(len(shape))))
        for tensor, begin in zip(plain, begins, strict=False)
        if tensor.numel
    ]
    return assembled(shape, chunks).with_flags(first.flags) if chunks else _empty(first, shape)


def _empty(like: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    storage = Storage(InlineBytes(b""), like.location)
    return TensorEntry(storage, like.dtype, shape, row_major_strides(shape), 0, like.flags)


def zeros(like: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """A tensor of zeros of the type of another one: one zero, expanded."""
    storage = Storage(InlineBytes(bytes(like.dtype.itemsize)), like.location)
    return TensorEntry(storage, like.dtype, shape, (0,) * len(shape))


def padded(tensor: TensorEntry, axis: int, size: int) -> TensorEntry:
    """The tensor with zeros appended along an axis, up to this size."""
    more = size - tensor.shape[axis]
    shape = (*tensor.shape[:axis], more, *tensor.shape[axis + 1 :])
    return joined([tensor, zeros(tensor, shape)], axis) if more else tensor
