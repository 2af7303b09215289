"""`remap`: where a file says that its tensors were; a file that says cuda, on a machine without."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckptool
from ckptool.checkpoint.tree import storages, tensors
from ckptool.errors import NoMatch, UsageError
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.support.files import load, opened, saved
from tests.support.looped import looped
from tests.support.same import assert_same_objects, assert_same_tree


def tagged(where: dict[str, str], folder: Path) -> Path:
    """A file of one tensor on each of these devices."""
    checkpoint = opened({name: torch.ones(2) for name in where}, folder)
    tree = {
        name: dataclasses.replace(node, storage=dataclasses.replace(node.storage, location=where[name]))
        for name, node in checkpoint.tree.items()
    }
    ckptool.save(dataclasses.replace(checkpoint, tree=tree), folder / "tagged.pt", overwrite=True)
    return folder / "tagged.pt"


def places(file: Path) -> dict[str, int]:
    return dict(Counter(storage.location for storage in storages(ckptool.open(file).tree)))


@pytest.mark.parametrize("name", ["cuda.pt", "training_sgd.pt"])
@pytest.mark.parametrize("in_place", [False, True])
def test_to_cpu(name: str, in_place: bool, tmp_path: Path) -> None:
    file = make(name, tmp_path)
    before = load(file)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(file, weights_only=True)
    out = file if in_place else tmp_path / "out.pt"
    done = ckptool.remap(file, None if in_place else out, to="cpu", in_place=in_place, verify=True)
    assert done.facts["changed"] == done.facts["storages"] > 0
    assert done.details == (f"cuda:0 → cpu: {done.facts['changed']} storages",)
    for mmap in (False, True):
        assert_same_objects(before, torch.load(out, weights_only=True, mmap=mmap))  # no map_location


def test_back_again_is_the_identity(tmp_path: Path) -> None:
    file = make("training_sgd.pt", tmp_path)
    ckptool.remap(file, tmp_path / "away.pt", to="cuda:3")
    assert set(places(tmp_path / "away.pt")) == {"cuda:3"}
    ckptool.remap(tmp_path / "away.pt", tmp_path / "back.pt", to="cuda:0")
    assert_same_tree(ckptool.open(file), ckptool.open(tmp_path / "back.pt"))


@looped("name", [name for name in TRAPS if name[:2] in ("09", "11") and name != "11-wrapper-subclass"])
def test_composites_move_with_all_their_parts(name: str, tmp_path: Path) -> None:
    file = saved(TRAPS[name](), tmp_path / "in.pt")
    for before, after, device in (("in.pt", "cuda.pt", "cuda:1"), ("cuda.pt", "back.pt", "cpu")):
        ckptool.remap(tmp_path / before, tmp_path / after, to=device, keep_unknown=True, overwrite=True)
    assert set(places(tmp_path / "cuda.pt")) <= {"cuda:1"}
    assert_same_tree(ckptool.open(file), ckptool.open(tmp_path / "back.pt"))


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


TAGS = {"cpu": "cpu", "CPU:0": "cpu", "mps": "mps", "mps:0": "mps", "cuda": "cuda:0", " cuda:7 ": "cuda:7"}
TAGS |= {"cuda:01": "cuda:1", "xpu:2": "xpu:2", "hpu": "hpu:0"}


@looped(
    ("where", "options", "after"),
    [
        (["cuda:1", "cuda:1"], {"moves": {"cuda:1": "cuda:0"}}, {"cuda:0": 2}),
        (["cuda:0", "cuda:1", "cpu"], {"to": "cuda:7", "moves": {"cuda:1": "cpu"}}, {"cuda:7": 2, "cpu": 1}),
        (["cuda:0", "cuda:1"], {"moves": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}}, {"cuda:1": 1, "cuda:0": 1}),
        (["cuda"], {"moves": {"cuda:0": "cpu"}}, {"cpu": 1}),  # one without a number is the first
        (["cuda:0"], {"moves": {"cuda": "cuda:5"}}, {"cuda:5": 1}),
        (["somewhere:1"], {"to": "cpu"}, {"cpu": 1}),
        *((["cuda:4"], {"to": text}, {tag: 1}) for text, tag in TAGS.items()),
    ],
)
def test_devices(where: list[str], options: dict[str, Any], after: dict[str, int], tmp_path: Path) -> None:
    file = tagged(dict(zip("abc", where, strict=False)), tmp_path)
    ckptool.remap(file, tmp_path / "out.pt", overwrite=True, **options)
    assert places(tmp_path / "out.pt") == after


def test_moves_are_counted_by_storages(tmp_path: Path) -> None:
    done = ckptool.remap(make("cuda.pt", tmp_path), tmp_path / "out.pt", moves={"cuda": "cuda:3"})
    assert done.facts["moves"] == [{"from": "cuda:0", "to": "cuda:3", "storages": 9}]
    file = saved(TRAPS["01-full-tie-three-roots"](), tmp_path / "tied.pt")
    done = ckptool.remap(file, tmp_path / "tied-out.pt", to="cuda:1")
    assert (done.facts["changed"], done.facts["storages"]) == (1, 1)
    assert len({id(node.storage) for _, node in tensors(ckptool.open(tmp_path / "tied-out.pt").tree)}) == 1


def test_already_there(tmp_path: Path) -> None:
    file = make("dp.pt", tmp_path)
    done = ckptool.remap(file, tmp_path / "out.pt", to="cpu")
    assert done.how == "copy" and done.summary == "already clean: every storage is on cpu"
    assert (tmp_path / "out.pt").read_bytes() == file.read_bytes()
    assert ckptool.remap({"a": 1}, to="cuda:0", dry_run=True).facts["storages"] == 0


NONSENSE = ["", "gpu", "cuda:", "cuda:-1", "cuda:1000", "cpu:1", "mps:1", "cuda:0,1", "cuda 0", "meta", "cuda:\x1b[m"]


@looped("device", NONSENSE)
def test_nonsense(device: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a device") as caught:
        ckptool.remap(make("dp.pt", tmp_path), tmp_path / "out.pt", to=device)
    assert caught.value.exit_code == 2 and "\x1b" not in str(caught.value)
    assert not (tmp_path / "out.pt").exists()


def test_no_device_and_one_that_is_not_in_the_file(tmp_path: Path) -> None:
    file = tagged({"a": "cuda:0", "b": "cpu"}, tmp_path)
    with pytest.raises(UsageError, match="remap needs a device"):
        ckptool.remap(file, tmp_path / "out.pt")
    with pytest.raises(NoMatch, match="no storage is on cuda:1") as caught:
        ckptool.remap(file, tmp_path / "out.pt", moves={"cuda:0": "cpu", "cuda:1": "cpu"})
    assert caught.value.exit_code == 1 and "cpu, cuda:0" in caught.value.why
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
