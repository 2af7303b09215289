"""Comparisons of values, exact where numbers are."""

from __future__ import annotations

from itertools import product
from math import inf, nan
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptool.analysis.values import ValueDifference, compare_values, same_bytes
from ckptool.checkpoint import Computed, Data, FileRange, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.files import Source
from ckptool.errors import UsageError
from tests.support.files import entry_of


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
