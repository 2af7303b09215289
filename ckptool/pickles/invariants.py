"""What must hold between the parts of a tensor that is made of several, as far as shapes and numbers say without the data.

Source: torch 2.13, aten/src/ATen/native/sparse/ValidateCompressedIndicesCommon.h and SparseTensor.cpp (`_validate_*_args`),
aten/src/ATen/quantized/Quantizer.cpp. The values of indices are not looked at: that would be to read data; torch does when it builds one.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.errors import BadTensor


def check_coordinates(indices: Any, values: Any, size: tuple[int, ...]) -> None:
    """Raises `BadTensor` unless the indices (dimensions, count) and the values (count, …) of a COO tensor fit its size."""
    if not (isinstance(indices, TensorEntry) and isinstance(values, TensorEntry)):
        return
    where, what = indices.shape, values.shape
    if (
        len(where) != 2
        or not what
        or where[1] != what[0]
        or where[0] + len(what) - 1 != len(size)
        or what[1:] != size[where[0] :]
    ):
        raise BadTensor(
            f"a sparse tensor of shape {list(size)} with indices of shape {list(where)} and values of shape {list(what)}"
        )


def check_compressed(layout: str, parts: tuple[Any, ...], size: tuple[int, ...]) -> None:
    """Raises `BadTensor` unless the row (or column) pointers, the indices and the values of a compressed tensor fit its size."""
    if not all(isinstance(part, TensorEntry) for part in parts):
        return
    pointers, indices, values = (part.shape for part in parts)
    kind = layout.removeprefix("sparse ")
    blocked = kind in ("bsr", "bsc")
    batch = len(indices) - 1
    dense = len(values) - len(indices) - 2 * blocked
    fits = batch >= 0 and dense >= 0 and len(pointers) == len(indices) and len(size) == batch + 2 + dense
    fits = fits and pointers[:-1] == indices[:-1] == size[:batch] and values[: batch + 1] == indices
    if fits:
        axis = int(kind in ("csc", "bsc"))
        block = values[batch + 1 : batch + 3] if blocked else (1, 1)
        fits = all(block) and not any(size[batch + i] % block[i] for i in (0, 1))
        fits = fits and pointers[-1] == size[batch + axis] // block[axis] + 1
    if not fits:
        raise BadTensor(
            f"a {layout} tensor of shape {list(size)} with pointers of shape {list(pointers)}, indices of shape {list(indices)} "
            f"and values of shape {list(values)}"
        )


def check_quantization(parameters: Any, shape: tuple[int, ...]) -> None:
    """Raises `BadTensor` for a scale that is no finite number, and for scales and zero points that are not one for each channel."""
    if type(parameters) is not tuple or len(parameters) < 3:
        return
    scale = parameters[1]
    if type(scale) is float and not isfinite(scale):
        raise BadTensor(f"a quantized tensor with the scale {scale}")
    if len(parameters) != 4 or not all(isinstance(part, TensorEntry) for part in parameters[1:3]):
        return
    scales, zeros, axis = (parameters[1].shape, parameters[2].shape, parameters[3])
    channels = shape[axis] if type(axis) is int and 0 <= axis < len(shape) else None
    if channels is None or scales != (channels,) or zeros != (channels,):
        raise BadTensor(
            f"a quantized tensor of shape {list(shape)} with scales of shape {list(scales)} and zero points of shape {list(zeros)} "
            f"along axis {axis!r:.20}"
        )
