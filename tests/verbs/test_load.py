"""What torch saved comes back as torch would load it: whole files, one tensor, on the device that was asked for."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckptool
from ckptool import bridge
from ckptool.errors import Corrupt, FileChanged, UnsafeObject, UsageError
from ckptool.formats import read
from fixtures.traps import TRAPS
from tests.support.files import load, saved
from tests.support.live_models import LOADED_IN_ESSENCE, UNKNOWN
from tests.support.looped import looped
from tests.support.same import assert_same_objects

# What can be written but, for now, not made again without pickle.
ONLY_WRITTEN = {"19-numpy-odd-arrays", "20-functions-and-classes", "20-random-states"}


# Torch warns of features in beta and going away; the library adds none.
pytestmark = pytest.mark.filterwarnings("ignore")


# Files to torch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
@looped("name", sorted(TRAPS.keys() - UNKNOWN - ONLY_WRITTEN))
def test_what_torch_saved_is_what_torch_loads(name: str, mmap: bool, tmp_path: Path) -> None:
    path = saved(TRAPS[name](), tmp_path / "x.pt")
    assert_same_objects(load(path, weights_only=False), _native(ckptool.load(path, mmap=mmap)))


def _native(value: Any) -> Any:
    """The same with its arrays in this machine's byte order: numpy turns them when it unpickles, we keep them as they
    were saved."""
    if type(value) is dict and any(isinstance(part, numpy.ndarray) for part in value.values()):
        return {key: _native(part) for key, part in value.items()}
    if isinstance(value, numpy.ndarray) and not value.dtype.fields and not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="), order="K")
    return value


def test_a_jagged_nested_tensor_is_made_of_its_parts(tmp_path: Path) -> None:
    given = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    made = ckptool.load(saved({"n": given}, tmp_path / "x.pt"))["n"]
    assert type(made) is type(given) and made.layout is torch.jagged
    assert all(torch.equal(one, other) for one, other in zip(made.unbind(), given.unbind(), strict=True))


@looped("name", sorted((UNKNOWN | ONLY_WRITTEN) - LOADED_IN_ESSENCE))
def test_what_only_its_own_code_could_make_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = saved(TRAPS[name](), tmp_path / "x.pt")
    with pytest.raises(UnsafeObject, match=" at ") as error:
        ckptool.load(path)
    assert str(path) in error.value.what


def test_what_is_set_on_a_tensor_and_keys_are_refused_with_their_place(tmp_path: Path) -> None:
    noted = torch.ones(2)
    noted.note = [TRAPS["20-unknown-object"]()]  # type: ignore[attr-defined]
    for value in ({"t": noted}, {torch.nn.ReLU(): 1}):
        path = saved({"x": value, "model": {"w": torch.ones(2)}}, tmp_path / "x.pt")
        with pytest.raises(UnsafeObject, match=r" at x") as error:
            ckptool.load(path)
        assert f"ckptool.load('{path}#model')" in error.value.fix


def test_reading_checks_the_checksums(tmp_path: Path) -> None:
    path = saved({"w": torch.arange(1000)}, tmp_path / "x.pt")
    data = read(path).tree["w"].storage.data
    damaged = bytearray(path.read_bytes())
    damaged[data.offset + 8] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(Corrupt, match="checksum"):
        ckptool.load(path, mmap=False)
    ckptool.load(path)  # as torch.load(mmap=True): nothing is read, so nothing can be checked


def test_a_file_that_changed_since_it_was_opened_is_not_mapped(tmp_path: Path) -> None:
    path = saved({"w": torch.arange(1000)}, tmp_path / "x.pt")
    checkpoint = read(path)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(FileChanged):
        bridge.build(checkpoint)


# Devices -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tagged(tmp_path: Path) -> Path:
    """A file whose tensors say that they are on cuda:3."""
    checkpoint = read(saved({"w": torch.arange(3.0), "v": torch.arange(2)}, tmp_path / "x.pt"))
    path: Path = tmp_path / "cuda.pt"
    ckptool.save(
        {
            name: replace(entry, storage=replace(entry.storage, location="cuda:3"))
            for name, entry in checkpoint.tree.items()
        },
        path,
    )
    return path


@pytest.mark.parametrize(
    "place",
    ["cpu", torch.device("cpu"), {"cuda:3": "cpu"}, lambda storage, location: storage],
    ids=["name", "device", "dictionary", "function"],
)
def test_map_location_as_torch_takes_it(tagged: Path, place: Any) -> None:
    assert_same_objects(torch.load(tagged, map_location=place), ckptool.load(tagged, place))


def test_map_location_that_makes_no_sense(tagged: Path) -> None:
    for place in ("nowhere", 7):
        with pytest.raises(UsageError):
            ckptool.load(tagged, place)


# One tensor ----------------------------------------------------------------------------------------------------------


def test_deep_trees_do_not_recurse(tmp_path: Path) -> None:
    tree: Any = torch.ones(1)
    for i in range(900):
        tree = [tree] if i % 2 else (tree,)
    ckptool.save(tree, tmp_path / "x.pt")
    made = ckptool.load(tmp_path / "x.pt")
    while not isinstance(made, torch.Tensor):
        (made,) = made
    assert made.item() == 1


def test_warnings_are_torchs_own(tmp_path: Path) -> None:
    path = saved(TRAPS["17-adam-tensor-lr"](), tmp_path / "x.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = ckptool.load(path)
        ckptool.save(made, path, overwrite=True)
