"""What torch holds is written as torch would write it; what no one could open is not saved."""

from __future__ import annotations

import collections
import copy
import datetime
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch

import ckptool
from ckptool import bridge
from ckptool.checkpoint import Computed
from ckptool.errors import Conflict, Unsupported
from ckptool.formats import read
from ckptool.pickles.encode import encode
from fixtures.traps import TRAPS
from tests.support.files import load, saved
from tests.support.live_models import UNKNOWN, compiled
from tests.support.looped import looped
from tests.support.same import assert_same_objects

# Torch warns of features in beta and going away; the library adds none.
pytestmark = pytest.mark.filterwarnings("ignore")


def pickle_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


def canonical(path: Path) -> bytes:
    """The pickle with equal texts written once, which is the one liberty that our encoder takes."""
    keys: dict[int, str] = {}
    return encode(read(path).tree, lambda storage: keys.setdefault(id(storage), str(len(keys))))


@looped("name", sorted(TRAPS.keys() - UNKNOWN), here=1 / 2)
def test_what_is_saved_is_what_torch_saves(name: str, tmp_path: Path) -> None:
    """The pickle is torch's own, but that equal texts are written once; the storages have the same keys and bytes."""
    theirs, ours = saved(TRAPS[name](), tmp_path / "x.pt"), tmp_path / "ours.pt"
    ckptool.save(TRAPS[name](), ours)
    assert pickle_of(ours) == canonical(theirs)
    data_of_theirs, data_of_ours = map(data_of, (theirs, ours))
    assert list(data_of_theirs.items()) == list(data_of_ours.items())
    expected = load(theirs, weights_only=False)
    for mmap in (False, True):
        assert_same_objects(expected, load(ours, mmap=mmap, weights_only=False))


def data_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist() if "/data/" in name}


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_what_no_one_could_open_is_not_saved(name: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=" at ") as error:
        ckptool.save(TRAPS[name](), tmp_path / "x.pt")
    assert error.value.fix
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["11-subclass", "11-masked", "20-dict-subclass", "20-unknown-object", "20-unknown-call"]
)
def test_unknown_objects_are_saved_when_asked_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.pt"
    ckptool.save(TRAPS[name](), path, keep_unknown=True)
    assert pickle_of(path) == canonical(saved(TRAPS[name](), tmp_path / "x.pt"))


def test_of_a_module_its_state_is_saved_and_never_the_object(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(Unsupported, match="Linear at model") as error:
        ckptool.save({"model": model}, tmp_path / "x.pt")
    assert "state_dict()" in error.value.fix
    ckptool.save(model, tmp_path / "x.pt")
    assert_same_objects(model.state_dict(), load(tmp_path / "x.pt"))


class Own:
    """An object of somebody's own."""


def noted(note: object) -> torch.Tensor:
    made = torch.ones(2)
    made.note = note  # type: ignore[attr-defined]
    return made


def test_what_is_refused_is_named_wherever_it_is(tmp_path: Path) -> None:
    for value in ([Own()], noted(Own()), noted([noted(Own())]), {Own(): 1}, {Own()}):
        with pytest.raises(Unsupported) as error:
            ckptool.save({"x": value}, tmp_path / "x.pt")
        assert error.value.what.removesuffix("/0") == "cannot save a tests.verbs.test_save.Own at x"


def test_one_storage_under_two_types_is_refused(tmp_path: Path) -> None:
    x = torch.ones(4)
    with pytest.raises(Conflict, match="float32 and as int32"):
        ckptool.save({"a": x, "b": x.view(torch.int32)}, tmp_path / "x.pt")


def test_saving_an_opened_tree_with_live_parts(tmp_path: Path) -> None:
    checkpoint = ckptool.open(saved({"a": torch.arange(3), "b": [torch.ones(2)]}, tmp_path / "x.pt"))
    path = tmp_path / "out.pt"
    ckptool.save({**checkpoint.tree, "new": torch.zeros(2), "again": checkpoint["a"], "array": numpy.ones(2)}, path)
    loaded = ckptool.load(path)
    assert list(loaded) == ["a", "b", "new", "again", "array"]
    assert loaded["a"] is loaded["again"]
    assert isinstance(loaded["array"], numpy.ndarray)


def test_saving_does_not_copy_the_tensors(tmp_path: Path) -> None:
    x = torch.zeros(1000)
    made = bridge.from_torch({"x": x})["x"]
    x += 1
    assert isinstance(made.storage.data, Computed)
    assert made.numpy()[0] == 1


def test_an_existing_file_is_replaced_only_when_told(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    ckptool.save({"a": 1}, path)
    with pytest.raises(Conflict):
        ckptool.save({"a": 2}, path)
    ckptool.save({**ckptool.open(path).tree, "w": torch.ones(3)}, path, overwrite=True)
    ckptool.save({**ckptool.open(path).tree, "b": 2}, path, overwrite=True)
    assert load(path)["w"].tolist() == [1, 1, 1]


def test_arrays_become_tensors_in_safetensors(tmp_path: Path) -> None:
    import ml_dtypes
    import safetensors.torch

    path = tmp_path / "x.safetensors"
    base = numpy.arange(12, dtype=">f4").reshape(3, 4)
    given = {"a": base.T, "b": numpy.ones(3, ml_dtypes.bfloat16), "c": torch.ones(2).half(), "d": numpy.float64(2)}
    ckptool.save({**given, "e": numpy.zeros((0, 3))}, path)
    loaded = safetensors.torch.load_file(path)
    assert loaded["a"].tolist() == base.T.tolist() and (loaded["d"].item(), loaded["e"].shape) == (2, (0, 3))
    assert (loaded["b"].dtype, loaded["c"].dtype) == (torch.bfloat16, torch.float16)
    with pytest.raises(Unsupported, match="object"):
        ckptool.save({"a": numpy.array([None])}, path, overwrite=True)


def test_the_same_set_is_the_same_bytes(tmp_path: Path) -> None:
    code = "import sys, ckptool; "
    sets = "{'s': {'a', 'bb', 'ccc', 'dddd', 'eeeee'}, 't': {('a',), ('bb', 1), ('bb', 'c'), frozenset('xyz')}}"
    code += f"ckptool.save({sets}, {str(tmp_path)!r} + '/' + sys.argv[1])"
    for seed in "12":
        subprocess.run([sys.executable, "-c", code, seed], check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_without_torch_the_rest_is_saved_and_loading_says_what_to_install(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None  # what a missing package looks like to an import
import ckptool, numpy
del sys.modules["torch"]
path = {str(tmp_path / "x.pt")!r}
ckptool.save({{"a": numpy.arange(3), "n": 1}}, path)
assert "torch" not in sys.modules
sys.modules["torch"] = None
try:
    ckptool.load(path)
except ckptool.CkptoolError as error:
    print(error.fix)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "pip install 'ckptool[torch]'\n"
    assert load(tmp_path / "x.pt", weights_only=False)["a"].tolist() == [0, 1, 2]


def test_a_training_checkpoint_is_torchs_own_to_the_byte(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": 1,
        "rng": torch.get_rng_state(),
    }
    path = tmp_path / "ours.pt"
    ckptool.save(state, path)
    assert pickle_of(path) == canonical(saved(state, tmp_path / "x.pt"))
    assert_same_objects(load(saved(state, tmp_path / "x.pt")), load(path))


def test_values_that_weights_only_refuses_come_back(tmp_path: Path) -> None:
    values = {
        "when": datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "x")),
        "default": collections.defaultdict(int, a=1),
        "ordered": collections.OrderedDict(b=1, a=2),
    }
    ckptool.save(values, tmp_path / "x.pt")
    loaded = ckptool.load(tmp_path / "x.pt")
    assert loaded == values
    assert loaded["default"].default_factory is int
    assert type(loaded["ordered"]) is collections.OrderedDict


def test_copies_of_what_is_in_a_checkpoint_can_be_changed_and_saved(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    opened = ckptool.open(saved({"a": {"x": 0, "list": [1, {"y": 2}]}, "state_dict": state}, tmp_path / "x.pt"))
    changed = copy.deepcopy(opened["a"])
    changed["list"][1]["y"] = dict(opened["a"])["x"]
    assert (
        type(changed) is dict
        and opened["a"]["list"][1]["y"] == 2
        and json.loads(json.dumps(opened["a"])) == opened["a"]
    )
    ckptool.save({"a": changed, "state_dict": opened["state_dict"]}, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["a"] == {"x": 0, "list": [1, {"y": 0}]} and found["state_dict"]._metadata == state._metadata


def test_save_for_cpu_of_wrapped_submodules(tmp_path: Path) -> None:
    model = torch.nn.Sequential(compiled(torch.nn.Linear(2, 2)), torch.nn.Module())
    model[1].module = torch.nn.Linear(2, 2)  # one's own name
    ckptool.save_for_cpu(model, tmp_path / "cpu.safetensors")
    assert set(ckptool.load(tmp_path / "cpu.safetensors")) == {"0.weight", "0.bias", "1.module.weight", "1.module.bias"}
