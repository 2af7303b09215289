"""`remap`: a file that says cuda, on a machine without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import NoMatch, UsageError
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.support.files import load, saved
from tests.support.same import assert_same_objects


@pytest.mark.parametrize("name", ["cuda.pt", "training_sgd.pt"])
@pytest.mark.parametrize("in_place", [False, True])
def test_to_cpu(name: str, in_place: bool, tmp_path: Path) -> None:
    file = make(name, tmp_path)
    before = load(file)
    out = file if in_place else tmp_path / "out.pt"
    done = ckptool.remap(file, None if in_place else out, to="cpu", in_place=in_place, verify=True)
    assert done.facts["changed"] == done.facts["storages"] > 0
    assert done.details == (f"cuda:0 → cpu: {done.facts['changed']} storages",)
    for mmap in (False, True):
        assert_same_objects(before, torch.load(out, weights_only=True, mmap=mmap))  # no map_location


@pytest.mark.parametrize(
    "name", ["11-sparse-coo", "11-sparse-csr", "09-qint8-per-channel", "11-nested", "11-parameter-with-attributes"]
)
def test_composites_load_where_they_were_sent(name: str, tmp_path: Path) -> None:
    file = saved(TRAPS[name](), tmp_path / "in.pt")
    ckptool.remap(file, tmp_path / "cuda.pt", to="cuda", verify=True)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(tmp_path / "cuda.pt", weights_only=False)
    ckptool.remap(tmp_path / "cuda.pt", tmp_path / "cpu.pt", to="cpu", verify=True)
    assert_same_objects(load(file, weights_only=False), torch.load(tmp_path / "cpu.pt", weights_only=False))


def test_map(tmp_path: Path) -> None:
    file = make("cuda.pt", tmp_path)
    done = ckptool.remap(file, tmp_path / "out.pt", moves={"cuda": "cuda:3"})
    assert done.facts["moves"] == [{"from": "cuda:0", "to": "cuda:3", "storages": 9}]
    with pytest.raises(NoMatch, match="no storage is on cuda:1"):
        ckptool.remap(file, tmp_path / "none.pt", moves={"cuda:1": "cpu"})
    assert not (tmp_path / "none.pt").exists()


def test_already_there(tmp_path: Path) -> None:
    file = make("dp.pt", tmp_path)
    done = ckptool.remap(file, tmp_path / "out.pt", to="cpu")
    assert done.how == "copy" and done.summary == "already clean: every storage is on cpu"
    assert (tmp_path / "out.pt").read_bytes() == file.read_bytes()


def test_usage(tmp_path: Path) -> None:
    file = make("dp.pt", tmp_path)
    with pytest.raises(UsageError, match="remap needs a device"):
        ckptool.remap(file, tmp_path / "out.pt")
    for device in ("gpu", "cuda:-1", "cpu:3"):
        with pytest.raises(UsageError, match="is not a device"):
            ckptool.remap(file, tmp_path / "out.pt", to=device)
    assert not (tmp_path / "out.pt").exists()
