"""Statistics, judged by torch and by numpy in f64."""

from __future__ import annotations

import itertools
from math import inf, nan
from pathlib import Path

import numpy
import pytest
import torch

from ckptool.analysis.statistics import Statistics, statistics
from ckptool.checkpoint import FileRange, InlineBytes, Storage, TensorEntry, strided
from ckptool.checkpoint.dtypes import DTYPES, by_name
from ckptool.checkpoint.files import Source
from ckptool.errors import Unsupported
from tests.support.entries import entry_of


def assert_as_torch_says(tensor: torch.Tensor) -> None:
    found = statistics(entry_of(tensor))
    values = tensor.resolve_conj().resolve_neg()
    values = values.to(torch.complex128).abs() if values.is_complex() else values.double()
    finite = values[values.isfinite()]
    assert found.count == tensor.numel()
    assert found.zeros == int((values == 0).sum())
    assert found.nans == int(values.isnan().sum())
    assert found.infs == int(values.isinf().sum())
    assert found.min == pytest.approx(finite.min().item(), rel=1e-15)
    assert found.max == pytest.approx(finite.max().item(), rel=1e-15)
    assert found.mean == pytest.approx(finite.mean().item(), rel=1e-12, abs=1e-12)
    assert found.std == pytest.approx(finite.std().item(), rel=1e-12)
    assert found.norm == pytest.approx(torch.linalg.vector_norm(finite).item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_float], ids=str)
def test_floats(dtype: object) -> None:
    kind = getattr(torch, by_name(str(dtype)).torch)
    values = torch.randn(70_001) * 3 + 1
    values[5] = 0
    values[70_000] = -0.0
    assert_as_torch_says(values.to(kind))


@pytest.mark.parametrize("name", ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "bool", "complex64"])
def test_other_types(name: str) -> None:
    kind = getattr(torch, name)
    if kind.is_complex:
        assert_as_torch_says(torch.randn(1000, dtype=kind))
        assert_as_torch_says(torch.randn(1000, dtype=kind).conj())
    else:
        high = 2 if kind == torch.bool else torch.iinfo(kind).max
        assert_as_torch_says(torch.randint(0, high, (1000,)).to(kind))


def test_views_and_expansion() -> None:
    base = torch.randn(40, 50, 6)
    for view in (base.permute(2, 0, 1), base[:, ::2], base[1, 2].expand(7, 6), torch._neg_view(base)):
        assert_as_torch_says(view)


def test_integers_are_exact() -> None:
    found = statistics(entry_of(torch.tensor([2**63 - 1, -(2**63), 0, 2**63 - 3])))
    assert (found.min, found.max) == (-(2**63), 2**63 - 1)
    assert isinstance(found.min, int)
    top = TensorEntry(Storage(InlineBytes(bytes([255] * 8))), by_name("u64"), (), ())
    assert statistics(top).max == 2**64 - 1


def test_bool_is_zero_and_one() -> None:
    found = statistics(entry_of(torch.tensor([True, False, True])))
    assert (found.min, found.max, found.zeros, found.mean) == (0, 1, 1, pytest.approx(2 / 3))
    assert type(found.min) is int


def test_nan_and_infinities_are_counted_and_left_out() -> None:
    found = statistics(entry_of(torch.tensor([nan, inf, 1.0, -inf, nan, 3.0, 0.0])))
    assert (found.nans, found.infs, found.zeros, found.count) == (2, 2, 1, 7)
    assert (found.min, found.max, found.mean) == (0.0, 3.0, pytest.approx(4 / 3))
    parts = statistics(entry_of(torch.tensor([complex(nan, inf), complex(inf, 1), complex(3, 4)])))
    assert (parts.nans, parts.infs, parts.max) == (1, 1, 5.0)


def test_nothing_finite() -> None:
    assert statistics(entry_of(torch.empty(0, 4))) == Statistics(0, None, None, None, None, None, 0, 0, 0)
    assert statistics(entry_of(torch.tensor([nan]))) == Statistics(1, None, None, None, None, None, 0, 1, 0)
    assert statistics(entry_of(torch.tensor(5.0))) == Statistics(1, 5.0, 5.0, 5.0, None, 5.0, 0, 0, 0)


def test_a_large_mean_does_not_hide_the_spread() -> None:
    values = torch.arange(200_000, dtype=torch.float64) % 2 + 1e9
    assert statistics(entry_of(values)).std == pytest.approx(0.5, rel=1e-5)


def test_chunks_merge_exactly() -> None:
    values = torch.cat([torch.full((70_000,), 5.0), torch.randn(70_000), torch.full((100_000,), nan), torch.ones(1)])
    assert_as_torch_says(values)


def test_complex32_and_quantized() -> None:
    half = numpy.array([3, 4, 0, 0], numpy.float16).tobytes()
    found = statistics(TensorEntry(Storage(InlineBytes(half)), by_name("c32"), (2,), (1,)))
    assert (found.min, found.max, found.zeros) == (0.0, 5.0, 1)
    found = statistics(TensorEntry(Storage(InlineBytes(b"\xff\x01")), by_name("qi8"), (2,), (1,)))
    assert (found.min, found.max) == (-1, 1)


@pytest.mark.parametrize("name", ["f4_e2m1fn_x2", "qu4x2", "bits8"])
def test_packed_types_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="no numpy type"):
        statistics(TensorEntry(Storage(InlineBytes(b"1234")), by_name(name), (4,), (1,)))


def test_dense_views_are_read_in_storage_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "values"
    numpy.arange(24, dtype="f4").tofile(path)
    monkeypatch.setattr(strided, "MadeBlocks", None)
    storage = Storage(FileRange(Source(path), 0, 96))
    for order in itertools.permutations(range(3)):
        shape, stride = (2, 3, 4), (12, 4, 1)
        entry = TensorEntry(storage, by_name("f32"), tuple(shape[i] for i in order), tuple(stride[i] for i in order))
        assert statistics(entry).mean == 11.5


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
