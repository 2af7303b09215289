"""What torch holds is written as torch would write it, and values are what they were in whatever is written of them;
what no one could open is not saved. Torch is the judge."""

import collections
import copy
import datetime
import json
import os
import subprocess
import sys
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import safetensors.torch
import torch

import ckptool
from ckptool.bridge.from_live import from_torch
from ckptool.checkpoint import Computed
from ckptool.errors import Conflict, Unsupported
from ckptool.formats import read
from ckptool.pickles.encode import encode
from fixtures.traps import TRAPS
from tests.support.errors import refused
from tests.support.files import load, saved
from tests.support.looped import looped
from tests.support.same import assert_same_objects
from tests.support.small_models import UNKNOWN, compiled

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


@looped("name", sorted(UNKNOWN))
def test_what_no_one_could_open_is_not_saved_unless_it_is_asked_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.pt"
    assert refused("unsupported", tmp_path, lambda: ckptool.save(TRAPS[name](), path), " at ").fix
    if name in ("11-subclass", "11-masked", "20-dict-subclass", "20-unknown-object", "20-unknown-call"):
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
    made = from_torch({"x": x})["x"]
    x += 1
    assert isinstance(made.storage.data, Computed)
    assert made.numpy()[0] == 1


def test_an_existing_file_is_replaced_only_when_told(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    ckptool.save({"a": 1}, path)
    refused(Conflict, tmp_path, lambda: ckptool.save({"a": 2}, path))
    ckptool.save({**ckptool.open(path).tree, "w": torch.ones(3)}, path, overwrite=True)
    ckptool.save({**ckptool.open(path).tree, "b": 2}, path, overwrite=True)
    assert load(path)["w"].tolist() == [1, 1, 1]


def test_arrays_become_tensors_in_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    base = numpy.arange(12, dtype=">f4").reshape(3, 4)
    given = {"a": base.T, "b": numpy.ones(3, ml_dtypes.bfloat16), "c": torch.ones(2).half(), "d": numpy.float64(2)}
    ckptool.save({**given, "e": numpy.zeros((0, 3))}, path)
    loaded = safetensors.torch.load_file(path)
    assert loaded["a"].tolist() == base.T.tolist() and (loaded["d"].item(), loaded["e"].shape) == (2, (0, 3))
    assert (loaded["b"].dtype, loaded["c"].dtype) == (torch.bfloat16, torch.float16)
    x = torch.ones(4)
    with pytest.raises(Conflict, match="float32 and as int32"):
        ckptool.save({"a": x, "b": x.view(torch.int32)}, tmp_path / "x.pt")
    refused(Unsupported, tmp_path, lambda: ckptool.save({"a": numpy.array([None])}, path, overwrite=True), "object")


def test_the_same_set_is_the_same_bytes(tmp_path: Path) -> None:
    code = "import sys, ckptool; "
    sets = "{'s': {'a', 'bb', 'ccc', 'dddd', 'eeeee'}, 't': {('a',), ('bb', 1), ('bb', 'c'), frozenset('xyz')}}"
    code += f"ckptool.save({sets}, {str(tmp_path)!r} + '/' + sys.argv[1])"
    for seed in "12":
        subprocess.run([sys.executable, "-c", code, seed], check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


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
    assert type(changed) is dict and opened["a"]["list"][1]["y"] == 2
    assert json.loads(json.dumps(opened["a"])) == opened["a"]
    ckptool.save({"a": changed, "state_dict": opened["state_dict"]}, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["a"] == {"x": 0, "list": [1, {"y": 0}]} and found["state_dict"]._metadata == state._metadata


def test_save_for_cpu_of_wrapped_submodules(tmp_path: Path) -> None:
    model = torch.nn.Sequential(compiled(torch.nn.Linear(2, 2)), torch.nn.Module())
    model[1].module = torch.nn.Linear(2, 2)  # one's own name
    ckptool.save_for_cpu(model, tmp_path / "cpu.safetensors")
    assert set(ckptool.load(tmp_path / "cpu.safetensors")) == {"0.weight", "0.bias", "1.module.weight", "1.module.bias"}


# Values that are what they were.
def test_a_warm_start_of_a_file_from_itself_is_that_file(tmp_path: Path) -> None:
    """Views that overlap stay views; a plain tensor tied to a parameter stays plain."""
    flat, weight = torch.arange(10.0), torch.nn.Parameter(torch.randn(2, 2))
    state = {
        "one": flat[:6],
        "two": flat[4:],
        "turned": flat[2:8].reshape(2, 3).t(),
        "weight": weight,
        "tied": weight,
        "plain": weight.detach(),
        "frozen": torch.nn.Parameter(torch.zeros(3), requires_grad=False),
    }
    path = saved(state, tmp_path / "a.pt")
    report = ckptool.warm_start(path, path, tmp_path / "b.pt", strict=True, verify=True)
    assert report.accepted and not report.mismatched, report.refused
    assert_same_objects(dict(load(tmp_path / "b.pt", weights_only=False)), load(path, weights_only=False))


def test_nested_tensors_do_not_fit(tmp_path: Path) -> None:
    for layout in (torch.strided, torch.jagged):
        one, other = ([torch.randn(n, 3) for n in sizes] for sizes in ((2, 4), (3, 3)))
        paths = [
            saved({"w": torch.zeros(2), "n": torch.nested.nested_tensor(parts, layout=layout)}, tmp_path / f"{i}.pt")
            for i, parts in enumerate((one, other))
        ]
        report = ckptool.warm_start(*paths)
        assert [found.target for found in report.mismatched] == ["n"]


EIGHT_BITS = "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split()


@looped(("dtype", "in_place"), product(EIGHT_BITS, [False, True]))
def test_tensors_with_gradients_can_be_cast_to_types_without_a_storage_class(
    dtype: str, in_place: bool, tmp_path: Path
) -> None:
    """Torch's own `save` writes a file of these that its `load` refuses."""
    state = {"plain": torch.rand(4).requires_grad_(), "parameter": torch.nn.Parameter(torch.rand(4))}
    state |= {"x": torch.rand(4)}
    path = saved(state, tmp_path / "a.pt")
    out = path if in_place else tmp_path / "b.pt"
    ckptool.cast(path, None if in_place else out, dtype=dtype, verify=True, in_place=in_place)
    for found in (load(out), load(out, weights_only=False), ckptool.load(out)):
        for key, value in state.items():
            assert type(found[key]) is type(value) and found[key].requires_grad == value.requires_grad
            expected = value.detach().to(getattr(torch, dtype)).view(torch.uint8)
            assert torch.equal(found[key].detach().view(torch.uint8), expected)
    ckptool.save(ckptool.load(out), tmp_path / "c.pt")
    assert_same_objects(load(tmp_path / "c.pt"), load(out))


ORDERS = [
    numpy.arange(4, dtype=">i4"),
    numpy.asfortranarray(numpy.arange(6, dtype=">f8").reshape(2, 3)),
    numpy.array([1 + 2j], ">c16"),
    numpy.array(["2020-01-01"], ">M8[D]"),
    numpy.array(["text"], ">U7"),
    numpy.zeros(2, [("a", ">i4"), ("b", "<f8")]),
    numpy.zeros((0, 3), ">f4"),
    numpy.arange(4, dtype="<i4"),
]


@looped(("given", "protocol"), product(ORDERS, [2, 4, 5]))
def test_arrays_keep_their_byte_order(given: Any, protocol: int, tmp_path: Path) -> None:
    path, out = saved({"a": given, "e": 1}, tmp_path / "a.pt", pickle_protocol=protocol), tmp_path / "b.pt"
    ckptool.save(ckptool.load(path), out)
    ckptool.edit(path, tmp_path / "c.pt", set={"e": 2}, verify=True)
    for file in (path, out, tmp_path / "c.pt"):
        found = ckptool.load(file)["a"]
        assert found.dtype == given.dtype and found.tobytes("A") == given.tobytes("A")
        assert found.flags.f_contiguous == given.flags.f_contiguous
        assert load(file, weights_only=False)["a"].tolist() == given.tolist()


class Made:
    """Pickles itself as a call of numpy's with a state."""

    def __init__(self, args: Any, state: Any) -> None:
        self.answer = (numpy._core.multiarray._reconstruct, args, state)

    def __reduce__(self) -> Any:
        return self.answer


STATES = [
    ((3,), numpy.dtype("f4"), False),
    (),
    ((3,),),
    (1, (3,), numpy.dtype("f4"), False, b"", 1),
    (1, 3, 4, 5),
    (1, (3,), None, False, b"\0" * 12),
    (1, None, numpy.dtype("f4"), False, b"\0" * 12),
]


@pytest.mark.parametrize("state", STATES, ids=repr)
def test_arrays_that_numpy_would_not_write_are_refused_in_words(state: Any, tmp_path: Path) -> None:
    path = saved({"a": Made((numpy.ndarray, (0,), b"b"), state), "w": torch.ones(1)}, tmp_path / "a.pt")
    ckptool.inspect(path)
    refused(ckptool.CkptoolError, tmp_path, lambda: ckptool.load(path))


@pytest.mark.parametrize("legacy", [False, True])
def test_storages_without_bytes_may_be_seen_as_two_types(legacy: bool, tmp_path: Path) -> None:
    shared = torch.UntypedStorage(0)
    kinds = [torch.float32, torch.int64, torch.uint8, torch.float8_e5m2, torch.complex64]
    state = {str(kind): torch.empty(0, dtype=kind).set_(shared, 0, (0, 2), (2, 1)) for kind in kinds}
    path = saved(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    ckptool.convert(path, tmp_path / "b.pt", verify=True)
    ckptool.save(state, tmp_path / "c.pt")
    facts = lambda found: [(key, value.dtype, value.shape) for key, value in found.items()]  # noqa: E731
    for found in (load(tmp_path / "b.pt"), load(tmp_path / "c.pt"), ckptool.load(path)):
        assert facts(found) == facts(state)


def test_under_fake_tensor_mode_nothing_is_loaded(tmp_path: Path) -> None:
    path = saved({"w": torch.ones(2, 3)}, tmp_path / "a.pt")
    with torch._subclasses.fake_tensor.FakeTensorMode(), pytest.raises(ckptool.CkptoolError, match="FakeTensorMode"):
        ckptool.load(path)
