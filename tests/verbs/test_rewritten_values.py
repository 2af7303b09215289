"""Values that are what they were: lazy views, types without a storage class, byte orders, views that overlap. Torch is
the judge."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckptool
from tests.support.files import load, saved, torch_bytes, written
from tests.support.same import assert_same_objects

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of features in beta


def test_a_warm_start_of_a_file_from_itself_is_that_file(tmp_path: Path) -> None:
    """Views that overlap stay views; a plain tensor tied to a parameter stays plain; nested tensors fit."""
    flat, weight = torch.arange(10.0), torch.nn.Parameter(torch.randn(2, 2))
    state = {
        "one": flat[:6],
        "two": flat[4:],
        "turned": flat[2:8].reshape(2, 3).t(),
        "weight": weight,
        "tied": weight,
        "plain": weight.detach(),
        "frozen": torch.nn.Parameter(torch.zeros(3), requires_grad=False),
        "nested": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
        "jagged": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
    }
    path = saved(state, tmp_path / "a.pt")
    report = ckptool.warm_start(path, path, tmp_path / "b.pt", strict=True, verify=True)
    assert report.accepted and not report.mismatched, report.refused
    assert_same_objects(dict(load(tmp_path / "b.pt", weights_only=False)), load(path, weights_only=False))


def test_nested_tensors_of_other_sizes_do_not_fit(tmp_path: Path) -> None:
    for layout in (torch.strided, torch.jagged):
        one, other = ([torch.randn(n, 3) for n in sizes] for sizes in ((2, 4), (3, 3)))
        paths = [
            saved({"w": torch.zeros(2), "n": torch.nested.nested_tensor(parts, layout=layout)}, tmp_path / f"{i}.pt")
            for i, parts in enumerate((one, other))
        ]
        report = ckptool.warm_start(*paths)
        assert [found.target for found in report.mismatched] == ["n"]


EIGHT_BITS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("in_place", [False, True])
def test_tensors_with_gradients_can_be_cast_to_types_without_a_storage_class(
    dtype: str, in_place: bool, tmp_path: Path
) -> None:
    """Torch's own `save` writes a file of these that its `load` refuses."""
    state = {
        "plain": torch.rand(4).requires_grad_(),
        "parameter": torch.nn.Parameter(torch.rand(4)),
        "x": torch.rand(4),
    }
    path = saved(state, tmp_path / "a.pt")
    out = path if in_place else tmp_path / "b.pt"
    ckptool.cast(path, None if in_place else out, dtype=dtype, verify=True, in_place=in_place)
    for found in (load(out), load(out, weights_only=False), ckptool.load(out)):
        for key, value in state.items():
            assert type(found[key]) is type(value) and found[key].requires_grad == value.requires_grad
            expected = value.detach().to(getattr(torch, dtype)).view(torch.uint8)
            assert torch.equal(found[key].detach().view(torch.uint8), expected)
    ckptool.save(ckptool.load(out), tmp_path / "c.pt")
    assert_same_objects(load(tmp_path / "c.pt"), load(out))


ORDERS = [
    numpy.arange(4, dtype=">i4"),
    numpy.asfortranarray(numpy.arange(6, dtype=">f8").reshape(2, 3)),
    numpy.array([1 + 2j], ">c16"),
    numpy.array(["2020-01-01"], ">M8[D]"),
    numpy.array(["text"], ">U7"),
    numpy.zeros(2, [("a", ">i4"), ("b", "<f8")]),
    numpy.zeros((0, 3), ">f4"),
    numpy.arange(4, dtype="<i4"),
]


@pytest.mark.parametrize("given", ORDERS, ids=lambda array: str(array.dtype))
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_keep_their_byte_order(given: Any, protocol: int, tmp_path: Path) -> None:
    path, out = (
        written(torch_bytes({"a": given, "e": 1}, pickle_protocol=protocol), tmp_path / "a.pt"),
        tmp_path / "b.pt",
    )
    ckptool.save(ckptool.load(path), out)
    ckptool.edit(path, tmp_path / "c.pt", set={"e": 2}, verify=True)
    for file in (path, out, tmp_path / "c.pt"):
        found = ckptool.load(file)["a"]
        assert found.dtype == given.dtype and found.tobytes("A") == given.tobytes("A")
        assert found.flags.f_contiguous == given.flags.f_contiguous
        assert load(file, weights_only=False)["a"].tolist() == given.tolist()


class Made:
    """Pickles itself as a call of numpy's with a state."""

    def __init__(self, args: Any, state: Any) -> None:
        self.answer = (numpy._core.multiarray._reconstruct, args, state)

    def __reduce__(self) -> Any:
        return self.answer


STATES = [
    ((3,), numpy.dtype("f4"), False),
    (),
    ((3,),),
    (1, (3,), numpy.dtype("f4"), False, b"", 1),
    (1, 3, 4, 5),
    (1, (3,), None, False, b"\0" * 12),
    (1, None, numpy.dtype("f4"), False, b"\0" * 12),
]


@pytest.mark.parametrize("state", STATES, ids=repr)
def test_arrays_that_numpy_would_not_write_are_refused_in_words(state: Any, tmp_path: Path) -> None:
    path = written(torch_bytes({"a": Made((numpy.ndarray, (0,), b"b"), state), "w": torch.ones(1)}), tmp_path / "a.pt")
    ckptool.inspect(path)
    with pytest.raises(ckptool.CkptoolError) as error:
        ckptool.load(path)
    assert error.value.what


@pytest.mark.parametrize("legacy", [False, True])
def test_storages_without_bytes_may_be_seen_as_two_types(legacy: bool, tmp_path: Path) -> None:
    shared = torch.UntypedStorage(0)
    kinds = [torch.float32, torch.int64, torch.uint8, torch.float8_e5m2, torch.complex64]
    state = {str(kind): torch.empty(0, dtype=kind).set_(shared, 0, (0, 2), (2, 1)) for kind in kinds}
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=not legacy)
    path = written(buffer.getvalue(), tmp_path / "a.pt")
    ckptool.convert(path, tmp_path / "b.pt", verify=True)
    ckptool.save(state, tmp_path / "c.pt")
    for found in (load(tmp_path / "b.pt"), load(tmp_path / "c.pt"), ckptool.load(path)):
        assert [(key, value.dtype, value.shape) for key, value in found.items()] == [
            (key, value.dtype, value.shape) for key, value in state.items()
        ]


def test_under_fake_tensor_mode_nothing_is_loaded(tmp_path: Path) -> None:
    path = saved({"w": torch.ones(2, 3)}, tmp_path / "a.pt")
    with torch._subclasses.fake_tensor.FakeTensorMode(), pytest.raises(ckptool.CkptoolError, match="FakeTensorMode"):
        ckptool.load(path)
