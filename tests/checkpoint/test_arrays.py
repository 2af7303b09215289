"""Tensors that are computed while they are read: any part of them, in any order, is what numpy has of the whole."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest
import torch

from ckptool.checkpoint import InlineBytes, Storage, TensorEntry, arrays
from ckptool.checkpoint.arrays import TensorValues, computed_rows, computed_tensor, each, fold
from ckptool.checkpoint.dtypes import by_name
from ckptool.formats import read

SHAPE = (37, 19)


def transposed(array: numpy.ndarray) -> TensorEntry:
    """An entry whose values are those of the array, stored column by column."""
    return TensorEntry(Storage(InlineBytes(array.T.tobytes())), by_name("f32"), array.shape, (1, array.shape[0]))


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "f8_e4m3fn"])
@pytest.mark.parametrize("make", [computed_tensor, computed_rows])
def test_parts_are_those_of_the_whole(make, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "ROWS", 100)
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


@pytest.mark.parametrize("count", [1, 2, 40, 1000])
def test_arrays_are_read_side_by_side(count: int, tmp_path: Path) -> None:
    array = numpy.random.default_rng(1).normal(size=(300, 301)).astype("f4")
    torch.save({"w": torch.from_numpy(array)}, tmp_path / "w.pt")
    in_file, seen = read(tmp_path / "w.pt").tree["w"], 0
    sides = [in_file if count > 40 else (transposed(array), in_file)[number % 2] for number in range(count)]

    def take(place: int, *blocks: numpy.ndarray) -> bool:
        nonlocal seen
        assert len(blocks) == count and len({block.tobytes() for block in blocks}) == 1 and place == seen
        assert sum(block.nbytes for block in blocks) <= 4 << 20
        seen += len(blocks[0]) // 4
        return count == 1000

    fold(take, *sides)
    assert seen == (524 if count == 1000 else array.size)

    def total(place: int, *blocks: numpy.ndarray) -> numpy.ndarray:
        return sum(block.view("f4").astype("f8") for block in blocks) + place * 0

    made = each(total, *sides[:40], dtype=by_name("f64"))
    wanted = array.astype("f8") * min(count, 40)
    assert numpy.allclose(each(lambda _, x: x.view("f8") * 2, made, dtype=by_name("f64")).numpy(), wanted * 2)


def test_views_of_what_is_computed_of_views() -> None:
    """Both gather: the one reads run by run while the other makes the runs."""
    array = numpy.random.default_rng(1).normal(size=(20, 300, 1000)).astype("f4")
    stored = Storage(InlineBytes(array.transpose(0, 2, 1).tobytes()))
    entry = TensorEntry(stored, by_name("f32"), array.shape, (300_000, 1, 300))
    made = each(lambda _, x: x.view("f4") + 1, entry, dtype=entry.dtype)
    assert (made[:, :1, 3:5] == array[:, :1, 3:5] + 1).all()
    assert (made[::-7, 2, -3::-400] == (array + 1)[::-7, 2, -3::-400]).all()
