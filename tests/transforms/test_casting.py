"""Casts, bit for bit against torch."""

import itertools
import zlib
from functools import cache
from math import inf
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptool.checkpoint import Flags, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import DTYPES, DType, by_name
from ckptool.pickles.reduce import array_entry
from ckptool.transforms.casting import CastTally, cast_storage, conversion, losses
from ckptool.transforms.casting import converted as as_type
from tests.support.looped import looped

FLOATS = [dtype for dtype in DTYPES if dtype.is_float]
PAIRS = [pytest.param(a, b, id=f"{a}-{b}") for a, b in itertools.permutations(FLOATS, 2)]


def torch_of(raw: bytes, dtype: DType) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, dtype.torch))


def values_of(raw: bytes, dtype: DType) -> Any:
    with numpy.errstate(invalid="ignore"):  # signalling NaN
        return numpy.frombuffer(raw, dtype.to_numpy()).astype(numpy.float64)


def storage_of(raw: bytes) -> Storage:
    return Storage(InlineBytes(raw), "cuda:1", zlib.crc32(raw))


def converted(raw: bytes, source: DType, target: DType, tally: CastTally | None = None) -> bytes:
    data = cast_storage(storage_of(raw), source, target, tally).data
    return data.read(0, data.length)


@cache
def patterns(dtype: DType) -> bytes:
    """Every pattern of a small type; of a large one random patterns, and the neighbourhood of every rounding edge."""
    if dtype.itemsize <= 2:
        return numpy.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").tobytes()
    random = numpy.random.default_rng(7)
    bits, real = numpy.dtype(f"u{dtype.itemsize}"), dtype.to_numpy()
    parts = [random.integers(0, 1 << (8 * dtype.itemsize), 1 << 17, dtype=bits, endpoint=False)]
    spread = random.standard_normal(1 << 17) * numpy.exp2(random.uniform(-155, 130, 1 << 17))
    with numpy.errstate(all="ignore"):
        parts.append(spread.astype(real).view(bits))
        for small in FLOATS:
            if small.itemsize <= 2:
                parts.extend(edges(small, real, bits))
        specials = numpy.array([0.0, -0.0, inf, -inf, numpy.nan, 1e-45, 3.4e38, 1e300, -1e300, 5e-324], real)
    return numpy.concatenate([*parts, specials.view(bits)]).tobytes()


def edges(small: DType, real: Any, bits: Any) -> list[Any]:
    every = values_of(patterns(small), small)
    every = numpy.unique(every[numpy.isfinite(every)])
    beyond = every[-1] * numpy.array([1.01, 1.03125, 1.0625, 1.1, 1.5, 2])
    exact = numpy.concatenate([every, (every[1:] + every[:-1]) / 2, beyond, -beyond]).astype(real).view(bits)
    steps = [1] if bits.itemsize == 4 else [1, 1 << 28, 1 << 29]  # half a unit of f32, in f64
    return [exact, *(exact + bits.type(step) for step in steps), *(exact - bits.type(step) for step in steps)]


@looped(("source", "target"), PAIRS)
def test_every_pair_has_torch_s_bits_and_the_tally_is_that_of_f64(source: DType, target: DType) -> None:
    raw, tally, size = patterns(source), CastTally(), source.itemsize
    tensor, to = torch_of(raw, source), getattr(torch, target.torch)
    found = converted(raw, source, target, tally)
    assert_same_but_for_nan_payloads(found, tensor.to(to).view(torch.uint8).numpy().tobytes(), target)
    places = range(0, len(tensor) - 3, max(1, len(tensor) // 60))  # torch has other code for the ends of tensors
    wanted = torch.cat([tensor[at : at + 3].to(to).view(torch.uint8) for at in places]).numpy().tobytes()
    short = b"".join(raw[at * size : (at + 3) * size] for at in places)
    assert_same_but_for_nan_payloads(converted(short, source, target), wanted, target)

    before, after = values_of(raw, source), values_of(found, target)
    finite = numpy.isfinite(before) & numpy.isfinite(after)
    assert tally.elements == len(before)
    assert tally.changed == numpy.count_nonzero((before != after) & ~(numpy.isnan(before) & numpy.isnan(after)))
    assert tally.overflowed == numpy.count_nonzero(numpy.isfinite(before) & ~numpy.isfinite(after))
    assert tally.underflowed == numpy.count_nonzero((before != 0) & (after == 0))
    before, after = before[finite], after[finite]
    error = abs(before - after)
    assert tally.max_abs_error == error.max()
    known = before != 0
    assert tally.max_rel_error == pytest.approx((error[known] / abs(before[known])).max(), rel=1e-6)


def assert_same_but_for_nan_payloads(found: bytes, wanted: bytes, target: DType) -> None:
    assert len(found) == len(wanted)
    a, b = (numpy.frombuffer(raw, f"u{target.itemsize}") for raw in (found, wanted))
    nan = numpy.isnan(values_of(found, target)) & numpy.isnan(values_of(wanted, target))
    assert not numpy.count_nonzero((a != b) & ~nan)


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300)), min_size=1, max_size=8))
def test_reads_in_any_order_give_the_same_bytes_and_count_once(reads: list[tuple[int, int]]) -> None:
    raw = numpy.random.default_rng(0).standard_normal(300).astype("f4").tobytes()
    wanted = converted(raw, by_name("f32"), by_name("bf16"))
    tally = CastTally()
    data = cast_storage(storage_of(raw), by_name("f32"), by_name("bf16"), tally).data
    touched: set[int] = set()
    for offset, length in reads:
        assert data.read(offset, length) == wanted[offset : offset + length]
        touched.update(range(offset // 2, min(300, -(-(offset + length) // 2))))
    assert tally.elements == len(touched)
    data.read(0, data.length)
    assert tally.elements == 300


def test_negative_views_stay_negative_but_for_the_type_without_sign() -> None:
    entry = TensorEntry(storage_of(bytes(8)), by_name("f32"), (2,), (1,), flags=Flags(neg=True))
    assert as_type(entry, by_name("bf16")).flags.neg
    assert not as_type(entry, by_name("f8_e8m0fnu")).flags.neg


def test_what_is_not_cast() -> None:
    entry = TensorEntry(storage_of(bytes(8)), by_name("f32"), (2,), (1,))
    assert as_type(entry, by_name("f32")) is entry
    assert cast_storage(entry.storage, by_name("f32"), by_name("f32")) is entry.storage


@pytest.mark.parametrize("old", [dtype for dtype in DTYPES if dtype.is_float and dtype.itemsize <= 2], ids=str)
def test_exact_is_what_torch_keeps(old: Any) -> None:
    """Every value of the small types, to each floating type and back."""
    patterns = torch.arange(1 << (8 * old.itemsize)).to(torch.uint8 if old.itemsize == 1 else torch.int16)
    values = patterns.view(getattr(torch, old.torch))
    for new in DTYPES:
        if new.is_float and new is not old:
            back = values.to(getattr(torch, new.torch)).double()
            kept = bool(((back == values.double()) | (back.isnan() & values.isnan())).all())
            assert conversion(old, new) == ("exact" if kept else "lossy"), (old, new)


def test_whole_numbers_fit() -> None:
    word = {
        (old, new): conversion(by_name(old), by_name(new))
        for old, new in [("i8", "i16"), ("i16", "i8"), ("u8", "i8"), ("u8", "i16"), ("i8", "u16"), ("bool", "u8"),
                         ("u8", "bool"),
                         ("i32", "f32"), ("i32", "f64"), ("u16", "f32"), ("i64", "f64"), ("f32", "i64"), ("i8", "f16"),
                         ("c64", "f32"),
                         ("c64", "c128")]
    }  # fmt: skip
    assert list(word.values()) == [
        "exact", "lossy", "lossy", "exact", "lossy", "exact", "lossy", "lossy", "exact", "exact", "lossy", None, None,
        None, "exact",
    ]  # fmt: skip


def test_losses_are_counted_once() -> None:
    tally = losses(array_entry(numpy.array([1, 1e6, 0.1], "f4")), by_name("f16"))
    assert (tally.elements, tally.changed, tally.overflowed) == (3, 2, 1)
