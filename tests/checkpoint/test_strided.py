"""Strided views in row-major order, judged by torch."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices
from numpy._core.multiarray import _reconstruct, scalar

import ckptool
from ckptool.checkpoint import Computed, Data, FileRange, Flags, InlineBytes, Storage, TensorEntry, strided
from ckptool.checkpoint.arrays import TensorValues, computed_rows
from ckptool.checkpoint.dtypes import BY_TORCH, DTYPES, by_name, dtype_of
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.numpy_arrays import array, array_type
from ckptool.errors import BadTensor, Corrupt, LimitExceeded, Unsupported
from ckptool.formats import read
from tests.support.errors import refused
from tests.support.hidden import Call, torch_saved
from tests.support.looped import examples, looped
from tests.support.zips import damaged

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


def any_view(data: st.DataObject, kind: str, folder: Path) -> tuple[TensorEntry, numpy.ndarray]:
    """A view of any strides, and the same of numpy, whose elements have no type."""
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4))
    stride = [data.draw(st.integers(0, 40)) for _ in shape]
    offset = data.draw(st.integers(0, 3))
    span = offset + 1 + sum(max(0, size - 1) * step for size, step in zip(shape, stride, strict=True))
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
    strided._cached.clear()
    data = entry.row_major()
    found = b"".join(data.read(place, 1 << 20) for place in range(0, data.length, 1 << 20))
    assert found == base.T.tobytes()
    assert not strided._cached  # nothing stays behind after a reader is through


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


# Computed tensors -----------------------------------------------------------------------------------------------------


SHAPE = (37, 19)


def transposed(array: numpy.ndarray) -> TensorEntry:
    """An entry whose values are those of the array, stored column by column."""
    return TensorEntry(Storage(InlineBytes(array.T.tobytes())), by_name("f32"), array.shape, (1, array.shape[0]))


def test_inputs_are_checked_and_nothing_is_read_of_an_empty_one() -> None:
    entry = transposed(numpy.ones(SHAPE, "f4"))
    entry.storage.crc = 1
    doubled = computed_rows(entry.dtype, SHAPE, TensorValues(entry).rows, [entry])
    with pytest.raises(Exception, match="checksum"):
        doubled.bytes()
    assert computed_rows(entry.dtype, (0, 3), TensorValues(entry).rows, [entry]).bytes() == b""


# Element types --------------------------------------------------------------------------------------------------------


@looped("dtype", DTYPES, ids=str)
def test_a_type_is_known_by_every_name_and_object_that_stands_for_it(dtype: Any) -> None:
    assert dtype_of(dtype) is dtype_of(dtype.name) is dtype_of(dtype.torch) is dtype_of(f"torch.{dtype.torch}") is dtype
    if hasattr(torch, dtype.torch):
        assert dtype_of(getattr(torch, dtype.torch)) is dtype
    if dtype.numpy and dtype.kind != "quantized":
        assert dtype_of(dtype.to_numpy()) is dtype_of(dtype.to_numpy().type) is dtype


# Pickled arrays and their types, as numpy writes them and as it takes them: judged by numpy ---------------------------


TYPES = tuple(("i1 u1 u2 >i4 f2 f4 >f8 c8 c16 S1 S5 V1 V3 U1 >U2 M8[ns] m8 ?").split())


def any_type(rng: random.Random, depth: int = 0) -> np.dtype[Any]:
    """A type of numbers, texts or dates; of records of these too, with gaps or without, aligned or not."""
    if depth == 2 or rng.random() < 0.7:
        return np.dtype(rng.choice(TYPES))
    fields = [(f"f{number}", any_type(rng, depth + 1)) for number in range(rng.randint(1, 3))]
    return np.dtype(fields, align=rng.random() < 0.5)


def any_array(rng: random.Random, kind: np.dtype[Any]) -> np.ndarray:
    shape = [rng.randint(0, 4) for _ in range(rng.randint(0, 3))]
    many = np.frombuffer(rng.randbytes(kind.itemsize * 64), "u1") % 100 // 97  # what any type can be, texts too
    made = np.resize(many.view(kind), shape)
    return made if rng.random() < 0.5 else np.asfortranarray(made)


@looped("seed", range(60))
def test_arrays_and_scalars_of_any_type(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    given = any_array(rng, any_type(rng))
    one = any_array(rng, np.dtype(rng.choice([text for text in TYPES if not {*"SUV?"} & {*text}]))).flatten()[:1]
    data = pickle.dumps({"a": given, "one": [*one], "kind": given.dtype}, rng.randint(0, 5))
    (tmp_path / "a.pkl").write_bytes(data)
    tree, again = read(tmp_path / "a.pkl").tree, pickle.loads(data)  # our own
    found = array(tree["a"])
    assert (str(found.type), found.shape) == (str(array_type(tree["kind"])), again["a"].shape)
    assert bytes(found.data) == again["a"].tobytes("F" if found.fortran else "C")
    for mine, theirs in zip(tree["one"], again["one"], strict=True):
        assert bytes(array(mine).data) == theirs.tobytes()
    loaded = ckptool.load(tmp_path / "a.pkl")["a"]
    assert (loaded.dtype, loaded.shape, loaded.tobytes()) == (given.dtype, given.shape, given.tobytes())


@pytest.mark.parametrize("name", [text.strip("<>").removesuffix("[ns]") for text in TYPES])
def test_a_type_without_a_state_is_of_this_machine(name: str, tmp_path: Path) -> None:
    kind = np.dtype(name)
    data = bytes(2 * kind.itemsize - 1) + b"\1"
    made = Call(_reconstruct, (np.ndarray, (0,), b"b"), (1, (2,), Call(np.dtype, (name,)), False, data))
    (tmp_path / "a.pt").write_bytes(torch_saved(made))
    found = array(read(tmp_path / "a.pt").tree["x"])
    assert (found.type.itemsize, found.type.order) == (kind.itemsize, kind.byteorder.replace("=", "<"))
    assert ckptool.load(tmp_path / "a.pt")["x"].tobytes() == data


F4 = np.dtype("f4")


@pytest.mark.parametrize(
    ("kind", "data", "fine"), [(F4, bytes(4), True), (F4, bytes(5), False), (F4, "abcd", True), (F4, [1], False)]
)
def test_a_scalar_has_the_bytes_of_its_type_or_is_said(kind: Any, data: Any, fine: bool, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(torch_saved(Call(scalar, (kind, data))))
    assert (not ckptool.scan(tmp_path / "a.pt").findings) == fine


# Checksums ------------------------------------------------------------------------------------------------------------


@looped("view", [lambda x: x, lambda x: x.t(), lambda x: x[:, :32], lambda x: x[:32], lambda x: x[:, None, ::2]])
@pytest.mark.parametrize("suffix", ["safetensors", "npz", "pt"])
def test_what_is_computed_of_any_view_notices_damage(view: Any, suffix: str, tmp_path: Path) -> None:
    torch.save({"w": view(torch.arange(4096.0).reshape(64, 64))}, tmp_path / "a.pt")
    damaged(tmp_path / "a.pt", "a/data/0")
    with pytest.raises(Corrupt, match="does not match its checksum"):
        ckptool.cast(tmp_path / "a.pt", tmp_path / f"out.{suffix}", dtype="f16")
    entry = ckptool.open(tmp_path / "a.pt")["w"]
    with pytest.raises(Corrupt, match="does not match its checksum"):
        ckptool.save({"w": entry.to("f16")}, tmp_path / f"out.{suffix}")
    refused(Corrupt, tmp_path, lambda: entry.T.reshape((entry.numel,)).numpy(), "does not match its checksum")
    assert not (tmp_path / f"out.{suffix}").exists()
