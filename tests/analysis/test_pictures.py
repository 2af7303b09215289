"""Histograms, thumbnails and rows of zeros, judged by numpy, over tensors of every type and layout."""

from __future__ import annotations

from dataclasses import asdict
from unittest.mock import patch

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.analysis.values import BINS, QUANTILES, TensorPicture, statistics, values_of
from ckptool.checkpoint import arrays
from tests.support.files import entry_of
from tests.support.looped import examples
from tests.support.object_graphs import DTYPES


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
