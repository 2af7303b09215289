"""The bridge: what torch saved comes back as torch would load it, and what torch holds is written as torch would write it."""

from __future__ import annotations

import collections
import datetime
import os
import subprocess
import sys
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from numpy.random._pickle import __bit_generator_ctor as bit_generator_ctor
from numpy.random._pickle import __generator_ctor as generator_ctor

import ckptool
from ckptool import bridge
from ckptool.checkpoint import Checkpoint, Computed, FileRange, Literal, Storage, TensorEntry
from ckptool.dtypes import by_name
from ckptool.errors import BadTensor, Conflict, Corrupt, FileChanged, UnsafeObject, Unsupported, UsageError
from ckptool.formats import read, torch_zip
from ckptool.nodes import Global, Object
from ckptool.pickles.encode import encode
from ckptool.tree import find, unknown_calls
from fixtures.traps import TRAPS
from tests.helpers import assert_same_objects, load, torch_bytes, written

# What holds objects of classes or functions that only their own code could make again.
UNKNOWN = {
    "11-subclass",
    "11-subclass-with-attributes",
    "11-subclass-in-a-parameter",
    "11-wrapper-subclass",
    "11-masked",
    "11-nested-jagged",
    "20-defaultdict-of-unknown",
    "20-dict-subclass",
    "20-unknown-object",
    "20-unknown-call",
}
# What can be written but, for now, not made again without pickle.
ONLY_WRITTEN = {"19-numpy-odd-arrays", "20-functions-and-classes", "20-random-states"}

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # torch warns of features in beta and going away; the library adds none


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    return lambda value: written(torch_bytes(value), tmp_path / "x.pt")


def pickle_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


def canonical(path: Path) -> bytes:
    """The pickle with equal texts written once, which is the one liberty that our encoder takes."""
    keys: dict[int, str] = {}
    return encode(read(path).tree, lambda storage: keys.setdefault(id(storage), str(len(keys))))


# Files to torch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("name", sorted(TRAPS.keys() - UNKNOWN - ONLY_WRITTEN))
def test_what_torch_saved_is_what_torch_loads(name: str, mmap: bool, saved: Any) -> None:
    path = saved(TRAPS[name]())
    assert_same_objects(load(path, weights_only=False), ckptool.load(path, mmap=mmap))


@pytest.mark.parametrize("name", sorted(UNKNOWN | ONLY_WRITTEN))
def test_what_only_its_own_code_could_make_is_refused_by_name(name: str, saved: Any) -> None:
    path = saved(TRAPS[name]())
    with pytest.raises(UnsafeObject, match=" at ") as error:
        ckptool.load(path)
    assert str(path) in error.value.what


def test_a_refusal_names_everything_and_a_part_that_can_be_loaded(saved: Any) -> None:
    path = saved({"model": {"w": torch.ones(2)}, "a": TRAPS["20-unknown-object"](), "b": [TRAPS["20-unknown-call"]()]})
    with pytest.raises(UnsafeObject) as error:
        ckptool.load(path)
    assert "fixtures.traps.Plain at a/args" in error.value.what
    assert "fixtures.traps.add_up at b/0/danger" in error.value.what
    assert f"ckptool.load('{path}#model')" in error.value.fix
    assert ckptool.load(f"{path}#model")["w"].tolist() == [1, 1]


def test_numpy_types_that_python_has_no_value_for(saved: Any) -> None:
    values = TRAPS["19-numpy-odd-arrays"]()
    values.pop("object")
    path = saved(values)
    assert_same_objects(load(path, weights_only=False), ckptool.load(path))


def test_mapped_tensors_can_be_written_to_and_the_file_stays(saved: Any) -> None:
    path = saved({"w": torch.arange(5), "x": torch.arange(3.0)})
    before = path.read_bytes()
    loaded = ckptool.load(path)
    loaded["w"] += 1
    assert loaded["w"].tolist() == [1, 2, 3, 4, 5]
    assert path.read_bytes() == before
    path.unlink()
    del loaded["w"]
    assert loaded["x"].tolist() == [0, 1, 2]


def test_reading_checks_the_checksums(saved: Any) -> None:
    path = saved({"w": torch.arange(1000)})
    data = read(path).tree["w"].storage.data
    damaged = bytearray(path.read_bytes())
    damaged[data.offset + 8] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(Corrupt, match="checksum"):
        ckptool.load(path, mmap=False)
    ckptool.load(path)  # as torch.load(mmap=True): nothing is read, so nothing can be checked


def test_a_file_that_changed_since_it_was_opened_is_not_mapped(saved: Any) -> None:
    path = saved({"w": torch.arange(1000)})
    checkpoint = read(path)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(FileChanged):
        bridge.build(checkpoint)


def test_what_does_not_lie_at_a_multiple_of_its_item_size_is_read(saved: Any) -> None:
    path = saved({"w": torch.arange(10.0)})
    checkpoint = read(path)
    source = checkpoint.source
    assert source is not None
    at = checkpoint.tree["w"].storage.data.offset
    odd = TensorEntry(Storage(FileRange(source, at + 1, 8)), by_name("f32"), (2,), (1,))
    made = bridge.build(replace(checkpoint, tree=odd))
    assert made.data_ptr() % 4 == 0
    assert made.numpy().tobytes() == path.read_bytes()[at + 1 : at + 9]


# Devices -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tagged(saved: Any, tmp_path: Path) -> Path:
    """A file whose tensors say that they are on cuda:3."""
    checkpoint = read(saved({"w": torch.arange(3.0), "v": torch.arange(2)}))
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


@pytest.mark.parametrize(
    "place",
    [None, "cuda:9", {"cpu": "cpu"}, lambda storage, location: None],
    ids=["home", "name", "dictionary", "function"],
)
def test_a_device_that_is_not_there_is_told_in_words(tagged: Path, place: Any) -> None:
    with pytest.raises(Unsupported, match="cuda") as error:
        ckptool.load(tagged, place)
    assert "map_location='cpu'" in error.value.fix


def test_on_meta_nothing_is_read(tagged: Path) -> None:
    made = ckptool.load(tagged, "meta")["w"]
    assert (made.device.type, made.shape) == ("meta", (3,))


def test_map_location_that_makes_no_sense(tagged: Path) -> None:
    for place in ("nowhere", 7):
        with pytest.raises(UsageError):
            ckptool.load(tagged, place)


def test_a_function_sees_each_storage_once(tagged: Path) -> None:
    seen: list[str] = []
    ckptool.load(tagged, lambda storage, location: seen.append(location) or storage)
    assert seen == ["cuda:3", "cuda:3"]


# One tensor ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in sorted(TRAPS) if name[:2] in ("06", "07", "08", "09", "10")])
def test_one_entry_as_a_tensor(name: str, saved: Any) -> None:
    path = saved(TRAPS[name]())
    expected, tree = load(path), read(path).tree
    for key, tensor in expected.items():
        if isinstance(tensor, torch.Tensor):
            made = tree[key].torch()
            assert (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
            assert (made.is_conj(), made.is_neg(), made.requires_grad) == (
                tensor.is_conj(),
                tensor.is_neg(),
                tensor.requires_grad,
            )
            if not tensor.is_quantized:  # their bytes beyond the span were not read: compared are values
                made, tensor = made.clone(), tensor.clone()
            assert torch_bytes(made) == torch_bytes(tensor)


def test_one_entry_reads_only_its_span(saved: Any) -> None:
    entry = read(saved({"w": torch.arange(1_000_000)[10:12]})).tree["w"]
    made = entry.torch()
    assert made.tolist() == [10, 11]
    assert made.untyped_storage().nbytes() == 16


def test_one_composite_and_one_parameter(saved: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = "kept"  # type: ignore[attr-defined]
    tree = read(saved({"s": torch.eye(3).to_sparse(), "p": parameter})).tree
    assert tree["s"].torch().to_dense().tolist() == torch.eye(3).tolist()
    made = bridge.to_torch(tree["p"], device="meta")
    assert (type(made), made.note, made.device.type) == (torch.nn.Parameter, "kept", "meta")  # type: ignore[attr-defined]


# Hostile files -------------------------------------------------------------------------------------------------------


def entry(values: list[int], dtype: str = "i64") -> TensorEntry:
    raw = numpy.array(values, by_name(dtype).to_numpy()).tobytes()
    return TensorEntry(Storage(Literal(raw)), by_name(dtype), (len(values),), (1,))


def matrix(values: list[list[int]]) -> TensorEntry:
    flat = entry([value for row in values for value in row])
    return replace(flat, shape=(len(values), len(values[0])), stride=(len(values[0]), 1))


def composite(name: str, *args: Any) -> Any:
    from ckptool.pickles.torch_objects import rebuilt

    return rebuilt(Object(Global("torch._utils", name), args))


def built(tree: Any) -> Any:
    return bridge.build(Checkpoint(tree, "test"))


def layout(name: str) -> Object:
    return Object(Global("torch.serialization", "_get_layout"), (f"torch.{name}",))


def test_sparse_indices_that_point_outside_are_refused() -> None:
    tensor = composite("_rebuild_sparse_tensor", layout("sparse_coo"), (matrix([[0, 99]]), entry([1, 2]), (4,)))
    with pytest.raises(Corrupt, match="torch cannot make"):
        built(tensor)
    tensor = composite("_rebuild_sparse_tensor", layout("sparse_csr"), (entry([0, 1]), entry([99]), entry([1]), (1, 2)))
    with pytest.raises(Corrupt, match="torch cannot make"):
        built(tensor)


def test_nested_parts_that_lie_outside_are_refused() -> None:
    for size, stride, offset in (
        ([[9]], [[1]], [0]),
        ([[2]], [[1 << 60]], [0]),
        ([[1]], [[1]], [4]),
        ([[-1]], [[1]], [0]),
    ):
        tensor = composite(
            "_rebuild_nested_tensor", entry([1, 2, 3], "f32"), matrix(size), matrix(stride), entry(offset)
        )
        with pytest.raises(BadTensor):
            built(tensor)


def test_views_that_lie_outside_are_refused() -> None:
    with pytest.raises(BadTensor):
        built(TensorEntry(Storage(Literal(bytes(8))), by_name("f32"), (3,), (1,)))


def test_attributes_that_would_change_the_class_are_refused() -> None:
    inner = entry([1])
    args = (inner.storage, 0, (1,), (1,), False, {})
    from ckptool.checkpoint import StorageRef

    func = Global("torch._utils", "_rebuild_tensor_v2")
    call = (StorageRef(inner.storage, by_name("i64")), *args[1:])
    for state in ({"__class__": Global("torch.nn.parameter", "Parameter")}, (None, {"__dict__": {}})):
        made = Object(Global("torch._tensor", "_rebuild_from_type_v2"), (func, Global("torch", "Tensor"), call, state))
        from ckptool.pickles.torch_objects import rebuilt

        with pytest.raises(Corrupt, match="attributes"):
            built(rebuilt(made))


def test_a_rebuild_call_of_anything_else_is_refused() -> None:
    call = Object(
        Global("torch._tensor", "_rebuild_from_type_v2"),
        (Global("os", "system"), Global("torch", "Tensor"), ("true",), None),
    )
    with pytest.raises(UnsafeObject):
        built([call])
    with pytest.raises(UnsafeObject, match=r"os\.system"):
        built([Object(Global("collections", "defaultdict"), (Global("os", "system"),))])
    with pytest.raises(UnsafeObject, match=r"os\.system"):
        built({"f": Global("os", "system")})


class CanBeCalled:
    """An object of an unknown class, made without a call, that could be called."""

    def __init__(self, x: str) -> None:
        self.x = x


class CallsWhatItIsGiven:
    """Pickled as the call of a known function, which calls an unknown one."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "call",
    [
        (torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, ("true",), None),
        (generator_ctor, "true", os.system),
        (torch._tensor._rebuild_from_type_v2, generator_ctor, torch.Tensor, ("true", os.system), None),
        (bit_generator_ctor, subprocess.Popen),
        (generator_ctor, "true", CanBeCalled("true")),
    ],
    ids=["from-type", "generator", "both", "bit-generator", "callable-object"],
)
def test_a_known_function_that_calls_an_unknown_one_is_unknown(call: Any, saved: Any) -> None:
    checkpoint = read(saved({"x": CallsWhatItIsGiven(*call)}))
    assert [place for place, _ in unknown_calls(checkpoint)] == ["x"]
    with pytest.raises(UnsafeObject):
        torch_zip.write(checkpoint)
    with pytest.raises(UnsafeObject):
        bridge.build(checkpoint)


def test_numpy_arrays_whose_sizes_disagree_are_refused() -> None:
    kind = Object(Global("numpy", "dtype"), ("f8", False, True))
    kind.state = (3, "<", None, None, None, -1, -1, 0)
    array = Object(Global("numpy.core.multiarray", "_reconstruct"), (Global("numpy", "ndarray"), (0,), b"b"))
    array.state = (1, (1 << 40,), kind, False, bytes(8))
    with pytest.raises(Corrupt, match="8 bytes"):
        built({"a": array})


def test_keys_that_become_the_same_are_refused() -> None:
    kind = Object(Global("numpy", "dtype"), ("i8", False, True))
    one = Object(Global("numpy.core.multiarray", "scalar"), (kind, (1).to_bytes(8, "little")))
    with pytest.raises(Conflict):
        built({1: "a", one: "b"})
    with pytest.raises(Corrupt):
        built({(1, Object(Global("argparse", "Namespace"), (), "new")): "b"})


# Torch to files ------------------------------------------------------------------------------------------------------

NOT_SAVED = UNKNOWN


@pytest.mark.parametrize("name", sorted(TRAPS.keys() - NOT_SAVED))
def test_what_is_saved_is_what_torch_saves(name: str, saved: Any, tmp_path: Path) -> None:
    """The pickle is torch's own, but that equal texts are written once; the storages have the same keys and bytes."""
    theirs, ours = saved(TRAPS[name]()), tmp_path / "ours.pt"
    ckptool.save(TRAPS[name](), ours)
    assert pickle_of(ours) == canonical(theirs)
    with zipfile.ZipFile(theirs) as a, zipfile.ZipFile(ours) as b:
        data = [n.partition("/")[2] for n in a.namelist() if "/data/" in n]
        assert data == [n.partition("/")[2] for n in b.namelist() if "/data/" in n]
        root_a, root_b = (z.namelist()[0].partition("/")[0] for z in (a, b))
        assert all(a.read(f"{root_a}/{n}") == b.read(f"{root_b}/{n}") for n in data)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("name", sorted(TRAPS.keys() - NOT_SAVED))
def test_what_is_saved_loads_in_torch(name: str, mmap: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    ckptool.save(TRAPS[name](), path)
    assert_same_objects(
        torch.load(written(torch_bytes(TRAPS[name]()), tmp_path / "y.pt"), weights_only=False),
        load(path, mmap=mmap, weights_only=False),
    )


@pytest.mark.parametrize("name", sorted(NOT_SAVED))
def test_what_no_one_could_open_is_not_saved(name: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=" at ") as error:
        ckptool.save(TRAPS[name](), tmp_path / "x.pt")
    assert error.value.fix
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["11-subclass", "11-masked", "20-dict-subclass", "20-unknown-object", "20-unknown-call"]
)
def test_unknown_objects_are_saved_when_asked_for(name: str, saved: Any, tmp_path: Path) -> None:
    path = tmp_path / "ours.pt"
    ckptool.save(TRAPS[name](), path, keep_unknown=True)
    assert pickle_of(path) == canonical(saved(TRAPS[name]()))


def test_a_module_is_not_saved_and_the_error_says_what_is(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="Linear at the top") as error:
        ckptool.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    assert "state_dict()" in error.value.fix


def test_one_storage_under_two_types_is_refused(tmp_path: Path) -> None:
    x = torch.ones(4)
    with pytest.raises(Conflict, match="float32 and as int32"):
        ckptool.save({"a": x, "b": x.view(torch.int32)}, tmp_path / "x.pt")


def test_saving_an_opened_tree_with_live_parts(saved: Any, tmp_path: Path) -> None:
    checkpoint = ckptool.open(saved({"a": torch.arange(3), "b": [torch.ones(2)]}))
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
    ckptool.save(
        {
            "a": base.T,
            "b": numpy.ones(3, ml_dtypes.bfloat16),
            "c": torch.ones(2).half(),
            "d": numpy.float64(2),
            "e": numpy.zeros((0, 3)),
        },
        path,
    )
    loaded = safetensors.torch.load_file(path)
    assert loaded["a"].tolist() == base.T.tolist()
    assert (loaded["b"].dtype, loaded["c"].dtype, loaded["d"].item(), loaded["e"].shape) == (
        torch.bfloat16,
        torch.float16,
        2,
        (0, 3),
    )
    with pytest.raises(Unsupported, match="object"):
        ckptool.save({"a": numpy.array([None])}, path, overwrite=True)


def test_the_same_set_is_the_same_bytes(tmp_path: Path) -> None:
    code = "import sys, ckptool; "
    code += f"ckptool.save({{'s': {{'a', 'bb', 'ccc', 'dddd', 'eeeee'}}}}, {str(tmp_path)!r} + '/' + sys.argv[1])"
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


def test_a_training_checkpoint_is_torchs_own_to_the_byte(saved: Any, tmp_path: Path) -> None:
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
    assert pickle_of(path) == canonical(saved(state))
    assert_same_objects(load(saved(state)), load(path))


def test_deep_trees_do_not_recurse(tmp_path: Path) -> None:
    tree: Any = torch.ones(1)
    for i in range(900):
        tree = [tree] if i % 2 else (tree,)
    ckptool.save(tree, tmp_path / "x.pt")
    made = ckptool.load(tmp_path / "x.pt")
    while not isinstance(made, torch.Tensor):
        (made,) = made
    assert made.item() == 1


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


def test_warnings_are_torchs_own(saved: Any) -> None:
    path = saved(TRAPS["17-adam-tensor-lr"]())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = ckptool.load(path)
        ckptool.save(made, path, overwrite=True)


def test_an_address_leads_to_a_part(saved: Any) -> None:
    path = saved({"model": {"a.b": torch.ones(1)}})
    assert ckptool.load(f"{path}#model/a.b").item() == 1
    assert find(read(path).tree, "model/a.b")[1].torch().item() == 1
