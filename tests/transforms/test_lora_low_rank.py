"""Low-rank products of differences and of other products, against numpy's exact SVD."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.checkpoint import InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import by_name
from ckptool.transforms.lora import low_rank
from ckptool.transforms.lora.low_rank import TensorDifference, Truncation
from tests.support.looped import examples, sliced

Array = numpy.ndarray[Any, Any]
F32 = by_name("f32")


def entry(values: Array) -> TensorEntry:
    data = values.astype(numpy.float32)
    return TensorEntry(Storage(InlineBytes(data.tobytes())), F32, data.shape, row_major_strides(data.shape))


def matrix(height: int, width: int, decay: float, seed: int = 0) -> Array:
    """A matrix whose singular values fall as a power."""
    rng = numpy.random.default_rng(seed)
    least = min(height, width)
    sides = [numpy.linalg.qr(rng.standard_normal((size, least)))[0] for size in (height, width)]
    return (sides[0] * numpy.arange(1.0, least + 1) ** -decay) @ sides[1].T


def error_of(values: Array, rank: int) -> float:
    """The error of an approximation as a multiple of the best one's."""
    base = numpy.random.default_rng(9).standard_normal(values.shape).astype(numpy.float32)
    tuned = (base + values).astype(numpy.float32)
    exact = (tuned - base).astype(numpy.float64)
    factors = TensorDifference("x", entry(tuned), entry(base)).factors(rank, F32, ())
    made = factors["B"].numpy().astype(numpy.float64) @ factors["A"].numpy()
    best = math.sqrt((numpy.linalg.svd(exact, compute_uv=False)[rank:] ** 2).sum())
    return float((numpy.linalg.norm(exact - made) - 1e-6 * numpy.linalg.norm(exact)) / max(best, 1e-30))


@settings(max_examples=examples(40))
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60), st.floats(0, 3), st.integers(0, 99))
def test_a_small_difference_is_taken_apart_exactly(height: int, width: int, rank: int, decay: float, seed: int) -> None:
    rank = min(rank, height, width)
    assert error_of(matrix(height, width, decay, seed), rank) <= 1 + 1e-4


@pytest.mark.parametrize(
    ("decay", "shape", "rank", "wide"), sliced(product([0.5, 1], [(200, 400), (400, 200)], [4, 32], [1 << 20, 0]), 6)
)
def test_a_large_one_within_two_percent_of_the_best(
    shape: tuple[int, int], rank: int, decay: float, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "EXACT", 100)
    monkeypatch.setattr(low_rank, "_WIDE", wide)
    assert error_of(matrix(*shape, decay), rank) <= 1.02


def test_the_same_matrix_gives_the_same_bytes_and_another_name_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "EXACT", 10)
    values = matrix(80, 70, 0.3)
    zero = entry(numpy.zeros_like(values))
    made = [TensorDifference(name, entry(values), zero).factors(5, F32, ())["A"].bytes() for name in ("a", "a", "b")]
    assert made[0] == made[1] != made[2]


@settings(max_examples=examples(40))
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_a_product_is_truncated_as_by_the_exact_svd(height: int, width: int, old: int, rank: int, seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    b, a = rng.standard_normal((height, old)), rng.standard_normal((old, width))
    if seed % 3 == 0:
        b[:, 0] = 0  # a dead row
    rank = min(rank, old)
    truncation = Truncation("x", entry(b), entry(a), rank)
    factors = truncation.factors()
    made = factors["B"].numpy().astype(numpy.float64) @ factors["A"].numpy()
    values = numpy.linalg.svd(b.astype("f4").astype("f8") @ a.astype("f4"), compute_uv=False)
    best, norm = math.sqrt((values[rank:] ** 2).sum()), numpy.linalg.norm(values)
    assert numpy.linalg.norm(b.astype("f4").astype("f8") @ a.astype("f4") - made) <= best + 1e-5 * norm
    assert truncation.error == pytest.approx(best / norm if norm else 0, abs=1e-6)
