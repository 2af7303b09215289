"""`average`: the mean that torch computes in f64, whatever the type, and nothing else of the files touched."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.cli import main
from ckptool.errors import Conflict, UsageError
from fixtures.sparse import make_sparse
from tests.support.files import load, torch_bytes, written
from tests.support.memory import LIMIT, peak_of
from tests.support.same import assert_same_objects
from tests.support.zips import rezipped


def numbered_files(folder: Path, trees: list[Any]) -> list[Path]:
    paths = [folder / f"{number}.pt" for number in range(len(trees))]
    for path, tree in zip(paths, trees, strict=True):
        torch.save(tree, path)
    return paths


@given(st.data())
@settings(max_examples=30, derandomize=True)
def test_random_files_and_weights(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("mean")
    count = data.draw(st.integers(2, 4))
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    weights = [data.draw(st.floats(-2, 2)) for _ in range(count)]
    trees = [{"a.weight": torch.randn(shape)} for _ in range(count)]
    ckptool.average(numbered_files(folder, trees), folder / "mean.pt", weights=weights)
    total = np.zeros(shape)
    for tree, weight in zip(trees, weights, strict=True):
        total = total + tree["a.weight"].double().numpy() * weight
    assert np.array_equal(load(folder / "mean.pt")["a.weight"].numpy(), total.astype(np.float32))


def test_deflated_files_are_read_ahead_while_their_sums_are_checked(tmp_path: Path) -> None:
    values = {f"layer{n}.weight": torch.arange(64.0) + n for n in range(24)}
    deflated = rezipped(written(torch_bytes(values), tmp_path / "a.pt"), tmp_path / "b.pt", zipfile.ZIP_DEFLATED)
    for _ in range(20):
        ckptool.average([deflated, deflated], tmp_path / "mean.pt", overwrite=True)
        assert_same_objects(torch.load(tmp_path / "mean.pt"), values)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"a.weight": torch.ones(3)}, "a.weight is"),
        ({"a.weight": torch.ones(2).half()}, "f16"),
        ({"b.weight": torch.ones(2)}, "only in"),
        ({"a.weight": torch.ones(2), "c.weight": torch.ones(1)}, "only in"),
    ],
)  # fmt: skip
def test_files_that_do_not_agree_are_refused(
    tmp_path: Path, other: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = numbered_files(tmp_path, [{"a.weight": torch.ones(2)}, other])
    with pytest.raises(Conflict, match=words):
        ckptool.average(files, tmp_path / "mean.pt")
    assert main(["average", *map(str, files), "-o", str(tmp_path / "mean.pt")]) == 2
    assert "ckptool diff" in capsys.readouterr().err and not (tmp_path / "mean.pt").exists()


def test_bad_requests(tmp_path: Path) -> None:
    files = numbered_files(tmp_path, [{"a.weight": torch.ones(2)}] * 2)
    for given_options in (
        {"weights": [1.0]},
        {"ema": 1.5},
        {"ema": 0.5, "weights": [1.0, 1.0]},
        {"weights": [float("nan"), 1.0]},
    ):
        with pytest.raises(UsageError):
            ckptool.average(files, tmp_path / "mean.pt", **given_options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="two files"):
        ckptool.average(files[:1], tmp_path / "mean.pt")
    assert main(["average", *map(str, files), "--weights", "a,b", "-o", str(tmp_path / "mean.pt")]) == 2


def test_a_damaged_input_is_noticed(tmp_path: Path) -> None:
    files = numbered_files(tmp_path, [{"a.weight": torch.randn(4096)}] * 2)
    raw = bytearray(files[0].read_bytes())
    raw[len(raw) // 2] ^= 1
    files[0].write_bytes(raw)
    with pytest.raises(ckptool.CkptoolError, match="checksum"):
        ckptool.average(files, tmp_path / "mean.pt")
    assert sorted(os.listdir(tmp_path)) == ["0.pt", "1.pt"]


# Memory --------------------------------------------------------------------------------------------------------------

PROGRAM = """
ckptool.average([f"{number}.pt" for number in range(int(sys.argv[1]))], "mean.pt")
"""


def memory(folder: Path, count: int, nbytes: int) -> int:
    """The most memory, in bytes, of a process that averages `count` files of `nbytes`."""
    for number in range(count):
        make_sparse(folder / f"{number}.pt", nbytes)
    peak = peak_of(PROGRAM, folder, str(count))
    assert (folder / "mean.pt").stat().st_size >= nbytes
    (folder / "mean.pt").unlink()
    return peak


@pytest.mark.parametrize(("count", "nbytes"), [(2, 50_000_000), (2, 200_000_000), (24, 10_000_000)])
def test_memory_grows_with_neither_size_nor_number(tmp_path: Path, count: int, nbytes: int) -> None:
    assert memory(tmp_path, count, nbytes) < LIMIT


@pytest.mark.soak
def test_two_gigabytes_stay_below_128_mb(tmp_path: Path) -> None:
    assert memory(tmp_path, 3, 2 << 30) < 128_000_000
