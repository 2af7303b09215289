"""Statistics, judged by torch and by numpy in f64."""

from __future__ import annotations

from math import inf, nan

import numpy
import pytest
import torch

from ckptool.analysis.values import Statistics, statistics
from ckptool.checkpoint import InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.errors import Unsupported
from tests.support.files import entry_of


def test_nothing_finite() -> None:
    assert statistics(entry_of(torch.empty(0, 4))) == Statistics(0, None, None, None, None, None, 0, 0, 0)
    assert statistics(entry_of(torch.tensor([nan]))) == Statistics(1, None, None, None, None, None, 0, 1, 0)
    assert statistics(entry_of(torch.tensor(5.0))) == Statistics(1, 5.0, 5.0, 5.0, None, 5.0, 0, 0, 0)
    large = statistics(entry_of(torch.tensor([1e300, 3e300], dtype=torch.float64)))  # too large to be squared
    assert (large.mean, large.std, large.norm) == (2e300, inf, inf)


@pytest.mark.parametrize("name", ["f4_e2m1fn_x2", "qu4x2", "bits8"])
def test_packed_types_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="no numpy type"):
        statistics(TensorEntry(Storage(InlineBytes(b"1234")), by_name(name), (4,), (1,)))


def test_statistics_of_a_terabyte_behind_four_bytes_take_no_time() -> None:
    base = numpy.array([1.0, 0.0, nan, 2.0], dtype="<f4")
    storage = Storage(InlineBytes(base.tobytes()))
    entry = TensorEntry(storage, by_name("f32"), (1 << 38, 4), (0, 1))
    found = statistics(entry)
    times = 1 << 38
    assert (found.count, found.zeros, found.nans) == (4 * times, times, times)
    assert found.mean == 1.0 and found.norm == pytest.approx((5 * times) ** 0.5)
    small = statistics(TensorEntry(storage, by_name("f32"), (3, 4), (0, 1)))
    repeated = statistics(TensorEntry(Storage(InlineBytes(base.tobytes() * 3)), by_name("f32"), (3, 4), (4, 1)))
    assert small == repeated
