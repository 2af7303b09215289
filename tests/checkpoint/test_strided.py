"""Strided views in row-major order, judged by torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

from ckptool.checkpoint import Computed, Data, FileRange, Flags, InlineBytes, Storage, TensorEntry, blocks, strided
from ckptool.checkpoint.dtypes import BY_TORCH, by_name
from ckptool.checkpoint.files import Source
from ckptool.errors import BadTensor, LimitExceeded, Unsupported
from tests.support.looped import examples

KINDS = ("literal", "file", "computed")


def data_of(raw: bytes, kind: str, folder: Path) -> Data:
    if kind == "literal":
        return InlineBytes(raw)
    if kind == "computed":
        return Computed(len(raw), lambda offset, n: raw[offset : offset + n])
    path = folder / f"data{len(os.listdir(folder))}"
    path.write_bytes(b"head" + raw + b"tail")
    return FileRange(Source(path), 4, len(raw))


def stored_entry(tensor: torch.Tensor, kind: str, folder: Path) -> TensorEntry:
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
    dtype = BY_TORCH[str(tensor.dtype).removeprefix("torch.")]
    storage = Storage(data_of(raw, kind, folder))
    flags = Flags(conj=tensor.is_conj(), neg=tensor.is_neg())
    return TensorEntry(storage, dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), flags)


def bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = torch.arange(2 * 3 * 4 * 5).to(dtype).reshape(2, 3, 4, 5)
    return {
        "plain": base,
        "transposed": base.permute(3, 2, 1, 0),
        "columns": base[..., 1:3],
        "steps": base[:, ::2, 1::2, ::3],
        "offset": base[1, 2:, 1],
        "expanded": base[:, :1].expand(2, 7, 4, 5),
        "expanded in front": base[0, 0, 0].expand(3, 2, 5),
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "windows": base.flatten().unfold(0, 6, 2),
        "one": base[1, 2, 3, 4],
        "ones": base[:1, :1].transpose(0, 3),
        "empty": base[:, 3:].transpose(0, 2),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64", "complex128"])
def test_row_major_is_what_torch_says(dtype: str, kind: str, tmp_path: Path) -> None:
    for name, view in views(getattr(torch, dtype)).items():
        entry = stored_entry(view, kind, tmp_path)
        data = entry.row_major()
        assert data.length == entry.nbytes, name
        assert entry.bytes() == bytes_of(view), name
        array = entry.numpy()
        assert array.shape == tuple(view.shape), name
        assert array.tobytes() == bytes_of(view), name


def any_view(data: st.DataObject, kind: str, folder: Path) -> tuple[TensorEntry, numpy.ndarray]:
    """A view of any strides, and the same of numpy, whose elements have no type."""
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    stride = [data.draw(st.integers(0, 40)) for _ in shape]
    offset = data.draw(st.integers(0, 3))
    span = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    raw = numpy.random.default_rng(0).bytes(span * itemsize)
    dtype = by_name({1: "u8", 2: "f16", 4: "f32", 8: "i64", 16: "c128"}[itemsize])
    entry = TensorEntry(Storage(data_of(raw, kind, folder)), dtype, tuple(shape), tuple(stride), offset)
    steps = [step * itemsize for step in stride]
    return entry, numpy.ndarray(shape, f"V{itemsize}", raw, offset * itemsize, steps)


@contextmanager
def any_limits(data: st.DataObject) -> Iterator[None]:
    """Blocks and gaps of a few bytes, so that what is small is read as what is large would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided, "_BLOCK", data.draw(st.sampled_from([16, 48, 256, 8 << 20])))
        patch.setattr(strided, "_PACK", data.draw(st.sampled_from([16, 100, 4 << 20])))
        for gap in ("_GAP_FILE", "_GAP_COMPUTED"):
            patch.setattr(strided, gap, data.draw(st.sampled_from([0, 16, 8 << 10])))
        yield


@settings(max_examples=examples(150))
@given(st.data(), st.sampled_from(KINDS))
def test_any_byte_range_of_any_view(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str) -> None:
    entry, elements = any_view(data, kind, tmp_path_factory.getbasetemp())
    wanted = elements.tobytes()
    with any_limits(data):
        found = entry.row_major()
        assert found.read(0, found.length) == entry.numpy().tobytes() == wanted
        for _ in range(5):
            start = data.draw(st.integers(0, len(wanted)))
            count = data.draw(st.integers(0, len(wanted) + 5))
            assert found.read(start, count) == wanted[start : start + count]


@settings(max_examples=examples(100))
@given(st.data(), st.sampled_from(KINDS))
def test_any_part_of_any_view(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str) -> None:
    entry, elements = any_view(data, kind, tmp_path_factory.getbasetemp())
    key = data.draw(basic_indices(elements.shape, max_dims=6, allow_newaxis=True))
    with any_limits(data):
        found, wanted = entry[key], elements[key]
    assert (found.shape, found.tobytes()) == (wanted.shape, wanted.tobytes())


@given(st.data())
def test_a_view_is_contiguous_where_torch_says_so(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), max_size=4))
    stride = [data.draw(st.sampled_from([0, 1, 2, 3, 6, 9])) for _ in shape]
    some, none = torch.zeros(100).as_strided(shape, stride), torch.zeros((*shape, 0, *shape))
    assert stored_entry(some, "literal", Path()).is_contiguous == some.is_contiguous()
    assert stored_entry(none, "literal", Path()).is_contiguous


def test_a_view_outside_of_its_storage_is_refused() -> None:
    entry = TensorEntry(Storage(InlineBytes(bytes(64))), by_name("f32"), (4, 4), (1, 5))
    with pytest.raises(BadTensor):
        entry.row_major()


def test_large_transposed_tensor_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "big"
    base = numpy.random.default_rng(0).integers(0, 1 << 32, (3000, 5000), dtype=numpy.uint32)
    base.tofile(path)
    storage = Storage(FileRange(Source(path), 0, base.nbytes))
    entry = TensorEntry(storage, by_name("f32"), (5000, 3000), (1, 5000))
    blocks._made.clear()
    data = entry.row_major()
    found = b"".join(data.read(place, 1 << 20) for place in range(0, data.length, 1 << 20))
    assert found == base.T.tobytes()
    assert not blocks._made  # nothing stays behind after a reader is through


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_conjugate_and_negative_bits_are_applied(dtype: str, tmp_path: Path) -> None:
    base = torch.randn(4, 6, dtype=getattr(torch, dtype))
    for view in (
        base.conj(),
        base.conj().t()[1:],
        torch._neg_view(base),
        torch._neg_view(base.conj()),
        base.conj().imag,
    ):
        entry = stored_entry(view, "file", tmp_path)
        assert entry.flags.conj or entry.flags.neg
        assert entry.numpy().tobytes() == bytes_of(view)


def test_numpy_of_types_that_numpy_lacks() -> None:
    for name in ("c32", "f4_e2m1fn_x2", "qu4x2", "bits8"):
        entry = TensorEntry(Storage(InlineBytes(bytes(8))), by_name(name), (2,), (1,))
        with pytest.raises(Unsupported, match=r"\.torch\(\)"):
            entry.numpy()
    quantized = TensorEntry(Storage(InlineBytes(bytes([255]))), by_name("qi8"), (), ())
    assert quantized.numpy().dtype == numpy.int8
    assert quantized.numpy().shape == ()


def test_numpy_of_a_bomb_is_refused() -> None:
    entry = TensorEntry(Storage(InlineBytes(bytes(4))), by_name("f32"), (1 << 40, 1 << 20), (0, 0))
    with pytest.raises(LimitExceeded):
        entry.numpy()
    assert entry.narrow(0, 0, 2).narrow(1, 5, 1).numpy().tolist() == [[0], [0]]
