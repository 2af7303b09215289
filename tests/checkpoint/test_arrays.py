"""Tensors that are computed while they are read: any part of them, in any order, is what numpy has of the whole."""

from __future__ import annotations

import numpy
import pytest

from ckptool.checkpoint import InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.arrays import TensorValues, computed_rows, computed_tensor
from ckptool.checkpoint.dtypes import by_name

SHAPE = (37, 19)


def transposed(array: numpy.ndarray) -> TensorEntry:
    """An entry whose values are those of the array, stored column by column."""
    return TensorEntry(Storage(InlineBytes(array.T.tobytes())), by_name("f32"), array.shape, (1, array.shape[0]))


def test_inputs_are_checked_and_nothing_is_read_of_an_empty_one() -> None:
    entry = transposed(numpy.ones(SHAPE, "f4"))
    entry.storage.crc = 1
    doubled = computed_tensor(entry.dtype, SHAPE, TensorValues(entry).read, [entry])
    with pytest.raises(Exception, match="checksum"):
        doubled.bytes()
    assert computed_rows(entry.dtype, (0, 3), TensorValues(entry).rows, [entry]).bytes() == b""
