"""`remap`: where a file says that its tensors were; a file that says cuda, on a machine without."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckptool
from ckptool.checkpoint.tree import storages, tensors
from ckptool.errors import UsageError
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.support.files import load, saved
from tests.support.looped import looped
from tests.support.same import assert_same_tree


def places(file: Path) -> dict[str, int]:
    return dict(Counter(storage.location for storage in storages(ckptool.open(file).tree)))


@looped("name", [name for name in TRAPS if name[:2] in ("09", "11") and name != "11-wrapper-subclass"])
def test_composites_move_with_all_their_parts(name: str, tmp_path: Path) -> None:
    file = saved(TRAPS[name](), tmp_path / "in.pt")
    for before, after, device in (("in.pt", "cuda.pt", "cuda:1"), ("cuda.pt", "back.pt", "cpu")):
        ckptool.remap(tmp_path / before, tmp_path / after, to=device, keep_unknown=True, overwrite=True)
    assert set(places(tmp_path / "cuda.pt")) <= {"cuda:1"}
    assert_same_tree(ckptool.open(file), ckptool.open(tmp_path / "back.pt"))


TAGS = {"cpu": "cpu", "CPU:0": "cpu", "mps": "mps", "mps:0": "mps", "cuda": "cuda:0", " cuda:7 ": "cuda:7"}
TAGS |= {"cuda:01": "cuda:1", "xpu:2": "xpu:2", "hpu": "hpu:0"}


def test_moves_are_counted_by_storages(tmp_path: Path) -> None:
    done = ckptool.remap(make("cuda.pt", tmp_path), tmp_path / "out.pt", moves={"cuda": "cuda:3"})
    assert done.facts["moves"] == [{"from": "cuda:0", "to": "cuda:3", "storages": 9}]
    file = saved(TRAPS["01-full-tie-three-roots"](), tmp_path / "tied.pt")
    done = ckptool.remap(file, tmp_path / "tied-out.pt", to="cuda:1")
    assert (done.facts["changed"], done.facts["storages"]) == (1, 1)
    assert len({id(node.storage) for _, node in tensors(ckptool.open(tmp_path / "tied-out.pt").tree)}) == 1


NONSENSE = ["", "gpu", "cuda:", "cuda:-1", "cuda:1000", "cpu:1", "mps:1", "cuda:0,1", "cuda 0", "meta", "cuda:\x1b[m"]


@looped("device", NONSENSE)
def test_nonsense(device: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a device") as caught:
        ckptool.remap(make("dp.pt", tmp_path), tmp_path / "out.pt", to=device)
    assert caught.value.exit_code == 2 and "\x1b" not in str(caught.value)
    assert not (tmp_path / "out.pt").exists()


class OnDevice:
    """Pickled as a tensor of a device that torch cannot save from is: its values as an array, its device as a text."""

    def __reduce__(self) -> Any:
        array = numpy.arange(3, dtype=numpy.float32)
        return torch._utils._rebuild_device_tensor_from_numpy, (array, torch.float32, "xla:0", False)


def test_devices_that_stand_in_the_call(tmp_path: Path) -> None:
    file = saved({"w": OnDevice(), "v": torch.ones(1), "pair": (1, (OnDevice(),))}, tmp_path / "in.pt")
    done = ckptool.remap(file, tmp_path / "out.pt", to="cpu")
    assert (done.facts["changed"], done.facts["storages"]) == (2, 3)
    assert done.facts["moves"] == [{"from": "xla:0", "to": "cpu", "storages": 2}]
    tree = ckptool.open(tmp_path / "out.pt").tree
    assert tree["w"].made.args[2] == tree["pair"][1][0].made.args[2] == "cpu"
    assert torch.equal(load(tmp_path / "out.pt", weights_only=False)["w"], torch.arange(3.0))
    ckptool.remap(file, tmp_path / "cuda.pt", moves={"xla:0": "cuda:1"})
    assert ckptool.open(tmp_path / "cuda.pt").tree["w"].made.args[2] == "cuda:1"
