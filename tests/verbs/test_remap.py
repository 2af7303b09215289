"""`remap`: where a file says that its tensors were; a file that says cuda, on a machine without."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

import ckptool
from ckptool.checkpoint.tree import storages
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.support.errors import refused
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


NONSENSE = ["", "gpu", "cuda:", "cuda:-1", "cuda:1000", "cpu:1", "mps:1", "cuda:0,1", "cuda 0", "meta", "cuda:\x1b[m"]
NONSENSE += ["cuda:\u0663", "cuda:0:1", "../x", "cuda\0"]


@looped("device", NONSENSE)
def test_devices_that_do_not_exist(device: str, tmp_path: Path) -> None:
    file = make("dp.pt", tmp_path)
    for way in ({"to": device}, {"moves": {"cpu": device}}):
        call = partial(ckptool.remap, file, tmp_path / "out.pt", **way)
        assert "\x1b" not in str(refused("usage", tmp_path, call, "is not a device"))
