"""Comparisons of values, exact where numbers are."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from math import inf, nan
from pathlib import Path
from unittest.mock import patch

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.analysis.values import (
    BINS,
    QUANTILES,
    Statistics,
    TensorPicture,
    ValueDifference,
    compare_values,
    same_bytes,
    statistics,
    values_of,
)
from ckptool.checkpoint import Computed, Data, FileRange, InlineBytes, Storage, TensorEntry, arrays
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.files import Source
from ckptool.errors import Unsupported, UsageError
from tests.support.files import entry_of
from tests.support.looped import examples
from tests.support.object_graphs import DTYPES


def difference(a: torch.Tensor, b: torch.Tensor, atol: float = 0.0, rtol: float = 0.0) -> ValueDifference:
    found = compare_values(entry_of(a), entry_of(b), atol, rtol)
    assert found is not None
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return compare_values(entry_of(a), entry_of(b)) is None


def assert_as_f64_says(a: torch.Tensor, b: torch.Tensor) -> None:
    found = difference(a, b)
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = (t.resolve_conj().resolve_neg().to(wide) for t in (a, b))
    distance, scale = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    relative = torch.where(scale == 0, 0, distance / scale)
    assert found.changed == int((x != y).sum())
    assert found.max_abs == distance.max().item()
    assert found.mean_rel == pytest.approx(relative.mean().item(), rel=1e-6)
    assert found.max_rel == pytest.approx(relative.max().item(), rel=1e-6)
    cosine = torch.vdot(x.flatten(), y.flatten()).real / (torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y))
    assert found.cosine == pytest.approx(cosine.item(), abs=5e-7)
    assert found.first == tuple((x != y).nonzero()[0].tolist())


LATER = torch.zeros(3, 100_000)
LATER[2, 17] = 1


def test_the_same_bytes_are_no_difference() -> None:
    a = torch.tensor([nan, inf, -0.0, 1.0])
    assert same(a, a.clone())
    assert same(torch.empty(0, 3), torch.empty(0, 3))
    assert same(torch.tensor(3), torch.tensor(3))


def test_bytes_differ_where_values_do_not() -> None:
    found = difference(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]))
    assert (found.changed, found.max_abs, found.within_tolerance, found.first) == (1, 0.0, True, (1,))
    quiet, other = (numpy.array([bits], "u4").tobytes() for bits in (0x7FC00000, 0x7FC00001))
    a, b = (TensorEntry(Storage(InlineBytes(raw)), by_name("f32"), (1,), (1,)) for raw in (quiet, other))
    found_nan = compare_values(a, b)
    assert found_nan == ValueDifference(1, 1, 0, None, None, None, True, (0,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(
    ("left", "right", "distance"), [(nan, 1, inf), (inf, -inf, inf), (inf, 1, inf), (nan, inf, inf)]
)
def test_what_is_not_finite(dtype: torch.dtype, left: float, right: float, distance: float) -> None:
    a = torch.tensor([left, 2, nan, inf], dtype=dtype)
    b = torch.tensor([right, 4, nan, inf], dtype=dtype)
    found = difference(a, b, atol=10)
    assert (found.max_abs, found.changed, found.within_tolerance) == (distance, 2, False)
    assert (found.max_rel, found.mean_rel) == (0.5, 0.5)
    assert found.cosine == pytest.approx(1)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1)), min_size=1))
def test_signed_against_unsigned(pairs: list[tuple[int, int]]) -> None:
    left, right = zip(*pairs, strict=True)
    a = TensorEntry(Storage(InlineBytes(numpy.array(left, "i8").tobytes())), by_name("i64"), (len(pairs),), (1,))
    b = TensorEntry(Storage(InlineBytes(numpy.array(right, "u8").tobytes())), by_name("u64"), (len(pairs),), (1,))
    found = compare_values(a, b)
    assert found is not None
    assert found.max_abs == max(abs(x - y) for x, y in pairs)
    assert found.changed == sum(x != y for x, y in pairs)


def test_packed_types_are_only_counted() -> None:
    a, b, c = (
        TensorEntry(Storage(InlineBytes(raw)), by_name("f4_e2m1fn_x2"), (2, 2), (2, 1))
        for raw in (b"abcd", b"abxy", b"abcd")
    )
    assert compare_values(a, b) == ValueDifference(2, 4, None, None, None, None, False, (1, 0))
    assert compare_values(a, c) is None
    with pytest.raises(UsageError, match="packed"):
        compare_values(a, TensorEntry(a.storage, by_name("u8"), (2, 2), (2, 1)))


def test_conjugate_and_negative_bits_count() -> None:
    z = torch.randn(50, dtype=torch.complex64)
    assert same(z.conj(), z.conj().clone())
    assert same(z.conj(), z.conj().resolve_conj())
    assert same(torch._neg_view(z.real.clone()), -z.real)
    assert_as_f64_says(z, z.conj())
    assert_as_f64_says(z.real, torch._neg_view(z.real))


def test_shapes_must_agree() -> None:
    with pytest.raises(UsageError, match=r"\[2\] with shape \[3\]"):
        compare_values(entry_of(torch.zeros(2)), entry_of(torch.zeros(3)))


def kinds_of_data(raw: bytes, path: Path) -> list[Data]:
    path.write_bytes(b"head" + raw)
    return [InlineBytes(raw), FileRange(Source(path), 4, len(raw)), Computed(len(raw), lambda at, n: raw[at : at + n])]


@pytest.mark.parametrize("length", [1, 262_144, 700_001])
def test_same_bytes(length: int, tmp_path: Path) -> None:
    raw = numpy.random.default_rng(0).bytes(length)
    for place in (None, 0, length // 2, length - 1):
        other = bytearray(raw)
        if place is not None:
            other[place] ^= 1
        for a, b in product(kinds_of_data(raw, tmp_path / "a"), kinds_of_data(bytes(other), tmp_path / "b")):
            assert same_bytes(a, b) is (place is None)
    assert not same_bytes(InlineBytes(raw), InlineBytes(raw + b"x"))


# Statistics -----------------------------------------------------------------------------------------------------------
# Statistics, judged by torch and by numpy in f64.


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


# Pictures -------------------------------------------------------------------------------------------------------------
# Histograms, thumbnails and rows of zeros, judged by numpy, over tensors of every type and layout.


def shown_values(tensor: torch.Tensor) -> numpy.ndarray:
    values = tensor.resolve_conj().resolve_neg()
    if values.is_complex():
        values = values.to(torch.complex128).abs()
    exact = values.dtype in (torch.float64, torch.int64, torch.uint64)
    return values.numpy().astype(numpy.float64) if exact else values.double().numpy()


def judge(tensor: torch.Tensor, side: int, values: int) -> None:
    found, picture, dead = values_of(entry_of(tensor), side, values)
    expected = asdict(statistics(entry_of(tensor)))
    for name, value in asdict(found).items():  # parts are cut elsewhere: only sums may differ, in the last bits
        assert value == (
            expected[name] if expected[name] is None else pytest.approx(expected[name], rel=1e-9, abs=1e-12)
        )
    array = shown_values(tensor)
    matrix = array.reshape(array.shape[0], -1) if array.ndim > 1 else array.reshape(1, -1)
    if side:
        judge_means(picture, matrix, side)
    else:
        assert picture.means == ()
    if array.ndim > 1:
        assert dead == int((matrix == 0).all(axis=1).sum())
    else:
        assert dead is None
    judge_histogram(picture, array[numpy.isfinite(array)], values)


def judge_means(picture: TensorPicture, matrix: numpy.ndarray, side: int) -> None:
    tops, lefts = (numpy.linspace(0, size, min(size, side) + 1).astype(int) for size in matrix.shape)
    if not numpy.isfinite(matrix).any():
        return
    assert len(picture.means) == len(tops) - 1 and {len(row) for row in picture.means} == {len(lefts) - 1}
    scale = abs(matrix[numpy.isfinite(matrix)]).max()
    for i, row in enumerate(picture.means):
        for j, mean in enumerate(row):
            block = matrix[starts(matrix.shape[0], side, i), starts(matrix.shape[1], side, j)]
            finite = block[numpy.isfinite(block)]
            assert mean == (pytest.approx(finite.mean(), rel=1e-9, abs=1e-12 * scale) if len(finite) else None)


def starts(size: int, side: int, number: int) -> slice:
    parts = min(size, side)
    return slice(number * size // parts, (number + 1) * size // parts)


def judge_histogram(picture: TensorPicture, finite: numpy.ndarray, values: int) -> None:
    assert sum(picture.counts) == picture.counted <= len(finite) and len(picture.counts) == BINS
    if not len(finite):
        assert picture.quantiles == ()
    elif len(finite) <= values and picture.counted == len(finite):
        low, high = finite.min(), finite.max()
        share = numpy.arange(BINS + 1) / BINS
        edges = low * (1 - share) + high * share
        edges[0], edges[-1] = low, high
        expected = numpy.histogram(finite, edges)[0] if low < high else [len(finite), *[0] * (BINS - 1)]
        assert list(picture.counts) == list(expected)
        assert picture.quantiles == pytest.approx(numpy.quantile(finite, QUANTILES).tolist(), rel=1e-9)


LAYOUTS = ("plain", "permuted", "sliced", "expanded", "negative", "transposed")


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    dtype = draw(st.sampled_from([kind for kind in DTYPES if kind is not torch.complex32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    made = torch.randn(shape, generator=generator, dtype=torch.float64) * draw(st.sampled_from([1, 50]))
    if draw(st.booleans()) and made.ndim > 1:
        made[torch.rand(shape[0], generator=generator) < 0.5] = 0  # rows of zeros
    if dtype.is_floating_point and draw(st.booleans()):
        made[torch.rand(shape, generator=generator) < 0.2] = draw(st.sampled_from([float("nan"), float("inf"), 0.0]))
    if not dtype.is_floating_point and not dtype.is_complex:
        made = made.abs().round() if "u" in str(dtype) else made.round()
    tensor = made.to(dtype)
    return laid_out(tensor, draw(st.sampled_from(LAYOUTS)), draw)


def laid_out(tensor: torch.Tensor, layout: str, draw: st.DrawFn) -> torch.Tensor:
    if layout == "permuted" and tensor.ndim:
        order = draw(st.permutations(range(tensor.ndim)))
        back = [order.index(axis) for axis in range(tensor.ndim)]
        return tensor.permute(order).contiguous().permute(back)
    if layout == "sliced" and tensor.ndim > 1:
        return tensor[:, :: draw(st.integers(1, 3))]
    if layout == "negative" and tensor.is_floating_point() and tensor.itemsize > 2:
        return torch._neg_view(tensor)
    if layout == "transposed" and tensor.ndim == 2:
        return tensor.t().contiguous().t()
    return tensor


@settings(max_examples=examples(400))
@given(tensor=tensors(), side=st.integers(0, 5), chunk=st.sampled_from([7, 16, 64, 1 << 16]))
def test_pictures_are_what_numpy_computes(tensor: torch.Tensor, side: int, chunk: int) -> None:
    with patch.multiple(arrays, CHUNK=chunk):
        judge(tensor, side, 1 << 14)
        judge(tensor, side, 20)


def test_complex_values_of_two_bfloat16_as_torch_saves_them_since_2_14(tmp_path: Path) -> None:
    parts = torch.tensor([3.0, 4.0, 0.5, -1.0, nan, 1.0, 0.25, inf]).bfloat16()
    values = parts.view(torch.float16).view(torch.complex32)  # the torch of the tests has no other type of this size
    torch.save({"w": values, "c": values.conj()}, path := tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes().replace(b"torch\ncomplex32\n", b"torch\nbcomplex32\n"))
    for entry in (ckptool.open(path)[name] for name in "wc"):
        facts = statistics(entry)
        assert (entry.dtype.torch, facts.max, facts.nans, facts.infs) == ("bcomplex32", 5, 1, 1)
    assert len(ckptool.verify(path, finite=True).non_finite or ()) == 2 and ckptool.scan(path).exit() == 0
