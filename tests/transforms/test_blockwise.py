"""Tensors that are computed while they are read: any part of them, in any order, is what numpy has of the whole."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from ckptool.checkpoint import InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.transforms import blockwise
from ckptool.transforms.blockwise import TensorValues, computed_rows, computed_tensor

SHAPE = (37, 19)


def transposed(array: numpy.ndarray) -> TensorEntry:
    """An entry whose values are those of the array, stored column by column."""
    return TensorEntry(Storage(InlineBytes(array.T.tobytes())), by_name("f32"), array.shape, (1, array.shape[0]))


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "f8_e4m3fn"])
@pytest.mark.parametrize("make", [computed_tensor, computed_rows])
def test_parts_are_those_of_the_whole(make, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "ROWS", 100)
    array = numpy.random.default_rng(0).normal(size=SHAPE).astype("f4")
    source = TensorValues(entry := transposed(array))
    read = source.rows if make is computed_rows else source.read
    made = make(by_name(dtype), SHAPE, lambda start, stop: read(start, stop) * 3, [entry])
    wanted = (torch.from_numpy(array) * 3).to(getattr(torch, made.dtype.torch)).view(torch.uint8).numpy().tobytes()
    assert made.bytes() == wanted
    rng = random.Random(0)
    for _ in range(50):
        start = rng.randrange(len(wanted))
        length = rng.randrange(len(wanted) - start + 1)
        assert made.storage.data.read(start, length) == wanted[start : start + length]


def test_inputs_are_checked_and_nothing_is_read_of_an_empty_one() -> None:
    entry = transposed(numpy.ones(SHAPE, "f4"))
    entry.storage.crc = 1
    doubled = computed_tensor(entry.dtype, SHAPE, TensorValues(entry).read, [entry])
    with pytest.raises(Exception, match="checksum"):
        doubled.bytes()
    assert computed_rows(entry.dtype, (0, 3), TensorValues(entry).rows, [entry]).bytes() == b""
