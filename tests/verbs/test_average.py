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


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_the_mean_is_the_one_of_a_wider_type(tmp_path: Path, dtype: torch.dtype, count: int) -> None:
    made = torch.complex128 if dtype.is_complex else torch.float64
    trees = [{"layer.weight": torch.randn(70, 1001, dtype=made).to(dtype)} for _ in range(count)]
    ckptool.average(numbered_files(tmp_path, trees), tmp_path / "mean.pt")
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.itemsize >= 4 else torch.float32
    total = sum(tree["layer.weight"].to(wide) * (1 / count) for tree in trees)
    found = load(tmp_path / "mean.pt")["layer.weight"]
    assert found.dtype == dtype and torch.equal(found, total.to(dtype))


def test_weights_and_ema(tmp_path: Path) -> None:
    trees = [{"w.weight": torch.full((4,), float(value))} for value in (1, 2, 4)]
    files = numbered_files(tmp_path, trees)
    ckptool.average(files, tmp_path / "a.pt", weights=[0.5, 0.25, 0.25])
    assert load(tmp_path / "a.pt")["w.weight"].tolist() == [2.0] * 4
    done = ckptool.average(files, tmp_path / "b.pt", ema=0.5)  # ((1 + 2) / 2 + 4) / 2
    assert load(tmp_path / "b.pt")["w.weight"].tolist() == [2.75] * 4
    assert done.facts["weights"] == [0.25, 0.25, 0.5] and done.notes == ()
    heavy = ckptool.average(files, tmp_path / "c.pt", weights=[1, 1, 1])
    assert [note.code for note in heavy.notes] == ["weights-sum"]
    assert load(tmp_path / "c.pt")["w.weight"].tolist() == [7.0] * 4


def test_counters_and_booleans_are_the_last_files(tmp_path: Path) -> None:
    trees = [
        {"bn.weight": torch.ones(2) * n, "bn.num_batches_tracked": torch.tensor(n), "mask": torch.tensor([n > 1])}
        for n in (1, 3)
    ]
    done = ckptool.average(numbered_files(tmp_path, trees), tmp_path / "mean.pt")
    found = load(tmp_path / "mean.pt")
    assert (
        found["bn.weight"].tolist() == [2.0, 2.0]
        and found["bn.num_batches_tracked"] == 3
        and found["mask"].tolist() == [True]
    )
    assert sorted(done.facts["kept"]) == ["bn.num_batches_tracked", "mask"]


def test_ties_metadata_and_layout_stay_sane(tmp_path: Path) -> None:
    trees = []
    for value in (1.0, 3.0):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        torch.nn.init.constant_(model[0].weight, value)
        trees.append({"state_dict": model.state_dict(), "epoch": int(value)})
    ckptool.average(numbered_files(tmp_path, trees), tmp_path / "mean.pt")
    found = load(tmp_path / "mean.pt")
    assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert found["0.weight"].data_ptr() == found["1.weight"].data_ptr()
    assert found["0.weight"].eq(2).all() and found._metadata == trees[0]["state_dict"]._metadata


def test_views_of_any_stride_and_conjugates(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    z = torch.view_as_complex(torch.randn(5, 2))
    trees: list[Any] = [
        {"t.weight": base.t(), "s.weight": base[:, ::2], "z.weight": z.conj()},
        {"t.weight": base.t().contiguous() + 2, "s.weight": base[:, :3], "z.weight": z},
    ]
    ckptool.average(numbered_files(tmp_path, trees), tmp_path / "mean.pt")
    found = load(tmp_path / "mean.pt")
    assert torch.equal(found["t.weight"], base.t() + 1)
    assert torch.equal(found["s.weight"], (base[:, ::2] + base[:, :3]) / 2)
    assert torch.allclose(found["z.weight"], torch.complex(z.real, torch.zeros(5)))


def test_one_file_against_itself_is_itself(tmp_path: Path) -> None:
    (path,) = numbered_files(tmp_path, [{"a.weight": torch.randn(33), "b.bias": torch.randn(3).half()}])
    ckptool.average([path, path], tmp_path / "mean.pt")
    assert_same_objects(load(path), load(tmp_path / "mean.pt"))


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


def test_the_command_says_what_was_averaged_and_offers_only_what_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = numbered_files(tmp_path, [{"model": {"a.weight": torch.ones(2)}, "epoch": n} for n in range(2)])
    out = str(tmp_path / "mean.pt")
    assert main(["average", *map(str, files), "-o", out]) == 0
    assert "the mean of 2 files: 1 tensor of model → " in capsys.readouterr().out
    for options in (["--in-place"], ["-d", str(tmp_path / "folder")], ["--in-place", "-o", out]):
        assert main(["average", *map(str, files), *options]) == 2
        assert "average has no option" in capsys.readouterr().err
    assert main(["average", *map(str, files)]) == 2
    assert "--in-place" not in capsys.readouterr().err
    assert main(["average", "--help"]) == 0
    told = capsys.readouterr().out
    assert "--in-place" not in told and "--dir" not in told and "--force" in told


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


def test_the_average_of_equal_files_is_that_file(tmp_path: Path) -> None:
    """Judged by bytes: for every floating type, up to nine files, plain, exponential and weighted means."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3000, dtype=torch.float64, generator=generator) * 10 ** torch.arange(-150, 150, 0.1)
    values[:3] = torch.tensor([torch.inf, -torch.inf, -0.0])
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    state = {str(dtype): values.to(dtype) for dtype in types}
    state["complex"] = torch.complex(values, values.flip(0))
    torch.save(state, tmp_path / "a.pt")
    for count in range(2, 10):
        rising = [(number + 1) * 2 / count / (count + 1) for number in range(count)]
        for how in ({}, {"ema": 0.9}, {"weights": rising}):
            mean = ckptool.average([tmp_path / "a.pt"] * count, tmp_path / "mean.pt", overwrite=True, **how)
            assert mean.facts["averaged"] == len(state)
            found = torch.load(tmp_path / "mean.pt", weights_only=True)
            for name, tensor in state.items():
                assert found[name].view(torch.uint8).equal(tensor.view(torch.uint8)), (name, count, how)
