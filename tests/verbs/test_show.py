"""`show`: the values of a tensor, or any other entry."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

import ckptool
from ckptool.checkpoint import TensorEntry
from ckptool.errors import UsageError
from fixtures.traps import TRAPS
from tests.support.files import saved


@pytest.fixture
def file(tmp_path: Path) -> Path:
    value = {
        "model": {
            "a.w": torch.arange(24.0).reshape(4, 6),
            "big": torch.arange(10_000).reshape(100, 100),
            "n": torch.tensor(7),
        },
        "epoch": 3,
        **TRAPS["11-sparse-coo"](),
    }
    return saved(value, tmp_path / "in.pt")


def test_a_tensor(file: Path) -> None:
    for found in (ckptool.show(f"{file}#model/a.w"), ckptool.show(file, at="model/a.w")):
        assert isinstance(found.entry, TensorEntry) and found.address == "model/a.w" and not found.edges
        assert numpy.array_equal(found.values, numpy.arange(24.0).reshape(4, 6))
    scalar = ckptool.show(f"{file}#model/n").values
    assert scalar is not None and scalar.shape == () and scalar == 7


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("0", 0),
        ("-1", -1),
        ("1:3,:", (slice(1, 3), slice(None))),
        ("::2,1", (slice(None, None, 2), 1)),
        ("0,0", (0, 0)),
        (":,-2:", (slice(None), slice(-2, None))),
    ],
)
def test_a_slice(file: Path, text: str, index: object) -> None:
    found = ckptool.show(f"{file}#model/a.w", slice=text)
    assert found.slice == text and numpy.array_equal(found.values, numpy.arange(24.0).reshape(4, 6)[index])


@pytest.mark.parametrize("text", ["4", "x", "0,0,0", "1:2:0", ""])
def test_a_slice_that_does_not_fit(file: Path, text: str) -> None:
    with pytest.raises(UsageError):
        ckptool.show(f"{file}#model/a.w", slice=text)


def test_of_a_big_tensor_only_the_corners(file: Path) -> None:
    found = ckptool.show(f"{file}#model/big")
    whole = numpy.arange(10_000).reshape(100, 100)
    assert found.edges and found.values is not None and found.values.shape == (7, 7)
    kept = [0, 1, 2, 97, 98, 99]
    places = [0, 1, 2, 4, 5, 6]
    assert numpy.array_equal(found.values[numpy.ix_(places, places)], whole[numpy.ix_(kept, kept)])
    everything = ckptool.show(f"{file}#model/big", all=True)
    assert not everything.edges and numpy.array_equal(everything.values, whole)


def test_other_entries(file: Path) -> None:
    assert ckptool.show(f"{file}#epoch").entry == 3 and ckptool.show(f"{file}#epoch").values is None
    assert ckptool.show(file).address == "" and list(ckptool.show(file).entry) == ["model", "epoch", "w"]
    assert ckptool.show(f"{file}#w").entry.kind == "sparse coo"
    for place, says in (("epoch", "of type int"), ("w", "a composite tensor"), ("model", "of type dict")):
        with pytest.raises(UsageError, match=f"cannot be sliced: it is {says}"):
            ckptool.show(f"{file}#{place}", slice="0")
    with pytest.raises(UsageError, match="there is no x in model"):
        ckptool.show(f"{file}#model/x")
