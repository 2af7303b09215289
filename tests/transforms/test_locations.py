"""Location tags: where a file says that its tensors were."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ckptool.checkpoint.tree import storages, tensors
from ckptool.errors import NoMatch, UsageError
from ckptool.formats import read, torch_zip
from ckptool.transforms.locations import parse_device, remap
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.support.files import carry_out, load, opened
from tests.support.looped import looped
from tests.support.same import assert_same_objects, assert_same_tree


def places(tree: Any) -> dict[str, int]:
    return dict(Counter(storage.location for storage in storages(tree)))


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("cpu", "cpu"),
        ("CPU:0", "cpu"),
        ("mps", "mps"),
        ("mps:0", "mps"),
        ("cuda", "cuda:0"),
        (" cuda:7 ", "cuda:7"),
        ("cuda:01", "cuda:1"),
        ("xpu:2", "xpu:2"),
        ("hpu", "hpu:0"),
    ],
)
def test_device(text: str, tag: str) -> None:
    assert parse_device(text) == tag


@pytest.mark.parametrize(
    "text", ["", "gpu", "cuda:", "cuda:-1", "cuda:1000", "cpu:1", "mps:1", "cuda:0,1", "cuda 0", "meta", "cuda:\x1b[m"]
)
def test_nonsense(text: str) -> None:
    with pytest.raises(UsageError, match="is not a device") as caught:
        parse_device(text)
    assert caught.value.exit_code == 2 and "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ["cuda.pt", "training_sgd.pt"])
def test_cuda_to_cpu_loads_without_a_map_location(name: str, tmp_path: Path) -> None:
    path = make(name, tmp_path)
    done = remap(read(path), "cpu")
    assert done.changed == done.total > 0 and done.moves == (("cuda:0", "cpu", done.total),)
    out = carry_out(torch_zip.write(done.checkpoint), tmp_path / "out.pt")
    # `load` maps to the CPU; the result needs no map.
    assert_same_objects(load(path), torch.load(out, weights_only=True))
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path, weights_only=True)


def test_back_again_is_the_identity(tmp_path: Path) -> None:
    checkpoint = read(make("training_sgd.pt", tmp_path))
    away = remap(checkpoint, "cuda:3").checkpoint
    assert set(places(away.tree)) == {"cuda:3"}
    assert_same_tree(checkpoint, remap(away, "cuda:0").checkpoint)


def test_the_whole_file_ties_and_all(tmp_path: Path) -> None:
    checkpoint = opened(TRAPS["01-full-tie-three-roots"](), tmp_path)
    done = remap(checkpoint, "cuda:1")
    assert (done.changed, done.total) == (1, 1)
    assert len({id(node.storage) for _, node in tensors(done.checkpoint.tree)}) == 1


@looped("name", [name for name in TRAPS if name[:2] in ("09", "11") and name != "11-wrapper-subclass"])
def test_composites_move_with_all_their_parts(name: str, tmp_path: Path) -> None:
    checkpoint = opened(TRAPS[name](), tmp_path)
    done = remap(checkpoint, "cuda:1")
    assert set(places(done.checkpoint.tree)) <= {"cuda:1"}
    assert_same_tree(checkpoint, remap(done.checkpoint, "cpu").checkpoint)


def test_map(tmp_path: Path) -> None:
    first = remap(opened({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path), "cuda:1").checkpoint
    mixed = remap(first, moves={"cuda:1": "cuda:0"})
    assert mixed.moves == (("cuda:1", "cuda:0", 2),)
    swapped = remap(mixed.checkpoint, moves={"cuda": "cuda:5"})  # cuda is cuda:0
    assert places(swapped.checkpoint.tree) == {"cuda:5": 2}


def test_map_and_the_rest_to(tmp_path: Path) -> None:
    two = tagged({"a": "cuda:0", "b": "cuda:1", "c": "cpu"}, tmp_path)
    assert places(remap(two, "cuda:7", {"cuda:1": "cpu"}).checkpoint.tree) == {"cuda:7": 2, "cpu": 1}
    assert places(remap(two, moves={"cuda:0": "cuda:1", "cuda:1": "cuda:0"}).checkpoint.tree) == {
        "cuda:1": 1,
        "cuda:0": 1,
        "cpu": 1,
    }


def tagged(where: dict[str, str], folder: Path) -> Any:
    """A checkpoint of one tensor on each of these devices."""
    import dataclasses

    checkpoint = opened({name: torch.ones(2) for name in where}, folder)
    tree = {
        name: dataclasses.replace(node, storage=dataclasses.replace(node.storage, location=where[name]))
        for name, node in checkpoint.tree.items()
    }
    return dataclasses.replace(checkpoint, tree=tree)


def test_a_device_that_is_not_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(NoMatch, match="no storage is on cuda:1") as caught:
        remap(tagged({"a": "cuda:0", "b": "cpu"}, tmp_path), moves={"cuda:0": "cpu", "cuda:1": "cpu"})
    assert caught.value.exit_code == 1 and "cpu, cuda:0" in caught.value.why


def test_an_unnumbered_tag_is_the_first_device(tmp_path: Path) -> None:
    old = tagged({"a": "cuda"}, tmp_path)
    assert places(remap(old, moves={"cuda:0": "cpu"}).checkpoint.tree) == {"cpu": 1}


def test_a_tag_that_is_no_device_can_be_left(tmp_path: Path) -> None:
    odd = tagged({"a": "somewhere:1"}, tmp_path)
    assert places(remap(odd, "cpu").checkpoint.tree) == {"cpu": 1}


def test_nothing_to_do(tmp_path: Path) -> None:
    checkpoint = opened({"a": torch.ones(1)}, tmp_path)
    done = remap(checkpoint, "cpu")
    assert (done.changed, done.total, done.moves) == (0, 1, ())
    assert remap(opened({"a": 1}, tmp_path), "cuda:0").total == 0


class OnDevice:
    """Pickled as a tensor of a device that torch cannot save from is: its values as an array, its device as a text."""

    def __reduce__(self) -> Any:
        array = numpy.arange(3, dtype=numpy.float32)
        return torch._utils._rebuild_device_tensor_from_numpy, (array, torch.float32, "xla:0", False)


def test_devices_that_stand_in_the_call(tmp_path: Path) -> None:
    checkpoint = opened({"w": OnDevice(), "v": torch.ones(1), "pair": (1, (OnDevice(),))}, tmp_path)
    device = lambda done: done.checkpoint.tree["w"].made.args[2]  # noqa: E731
    moved = remap(checkpoint, "cpu")
    assert device(moved) == "cpu" and (moved.changed, moved.total, moved.moves) == (2, 3, (("xla:0", "cpu", 2),))
    assert moved.checkpoint.tree["pair"][1][0].made.args[2] == "cpu"
    assert device(remap(checkpoint, moves={"xla:0": "cuda:1"})) == "cuda:1"
    out = carry_out(torch_zip.write(moved.checkpoint), tmp_path / "out.pt")
    assert torch.equal(load(out, weights_only=False)["w"], torch.arange(3.0))
