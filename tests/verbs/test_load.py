"""What torch saved comes back as torch would load it, on the device that was asked for; `ckptool.load` in the place of
`torch.load`: its keywords, its open files, its answers."""

import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.bridge import tensors
from ckptool.bridge.to_live import build
from ckptool.errors import Corrupt, FileChanged, LimitExceeded, Truncated, UnsafeObject, Unsupported, UsageError
from ckptool.formats import read
from fixtures.make import PRODUCERS, make
from fixtures.traps import TRAPS
from tests.support.errors import refused
from tests.support.files import load, saved, torch_bytes, written
from tests.support.looped import looped
from tests.support.same import assert_same_objects
from tests.support.small_models import LOADED_IN_ESSENCE, UNKNOWN
from tests.support.zips import damaged

# What can be written but, for now, not made again without pickle.
ONLY_WRITTEN = {"19-numpy-odd-arrays", "20-functions-and-classes", "20-random-states"}


# Torch warns of features in beta and going away; the library adds none.
pytestmark = pytest.mark.filterwarnings("ignore")


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
    assert str(path) in refused("unsafe-global", tmp_path, lambda: ckptool.load(path), " at ").what


def test_what_is_set_on_a_tensor_and_keys_are_refused_with_their_place(tmp_path: Path) -> None:
    noted = torch.ones(2)
    noted.note = [TRAPS["20-unknown-object"]()]  # type: ignore[attr-defined]
    for value in ({"t": noted}, {torch.nn.ReLU(): 1}):
        path = saved({"x": value, "model": {"w": torch.ones(2)}}, tmp_path / "x.pt")
        error = refused("unsafe-global", tmp_path, lambda: ckptool.load(path), " at x")  # noqa: B023
        assert f"ckptool.load('{path}#model')" in error.fix


def test_a_refused_part_is_named_with_a_part_that_loads(tmp_path: Path) -> None:
    path = saved({"x": {"bad": TRAPS["20-unknown-object"](), "model": {"w": torch.ones(2)}}}, tmp_path / "x.pt")
    error = refused("unsafe-global", tmp_path, lambda: ckptool.load(f"{path}#x"), " at bad")
    assert f"{path}#x holds" in error.what
    advised = error.fix.partition("ckptool.load('")[2].partition("'")[0]
    assert list(ckptool.load(advised)) == ["w"]


def test_reading_checks_the_checksums(tmp_path: Path) -> None:
    path = damaged(saved({"w": torch.arange(1000)}, tmp_path / "x.pt"), 0)
    refused(Corrupt, tmp_path, lambda: ckptool.load(path, mmap=False), "checksum")
    ckptool.load(path)  # as torch.load(mmap=True): nothing is read, so nothing can be checked


def test_a_file_that_changed_since_it_was_opened_is_not_mapped(tmp_path: Path) -> None:
    path = saved({"w": torch.arange(1000)}, tmp_path / "x.pt")
    checkpoint = read(path)
    with path.open("ab") as file:
        file.write(b"x")
    refused(FileChanged, tmp_path, lambda: build(checkpoint))


@pytest.fixture
def tagged(tmp_path: Path) -> Path:
    """A file whose tensors say that they are on cuda:3."""
    file, out = saved({"w": torch.arange(3.0), "v": torch.arange(2)}, tmp_path / "x.pt"), tmp_path / "cuda.pt"
    ckptool.remap(file, out, to="cuda:3")
    return out


def test_map_location_as_torch_takes_it(tagged: Path) -> None:
    for place in ("cpu", torch.device("cpu"), {"cuda:3": "cpu"}, lambda storage, location: storage):
        assert_same_objects(torch.load(tagged, map_location=place), ckptool.load(tagged, place))
    for place in ("nowhere", 7):
        with pytest.raises(UsageError):
            ckptool.load(tagged, place)
    with pytest.raises(Unsupported, match="map_location asks for cuda:99,"):
        ckptool.load(tagged, {"cuda:3": "cuda:99"})


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


VALUE = {"w": torch.arange(6.0).reshape(2, 3), "empty": torch.zeros(0, 3), "one": torch.tensor(7), "epoch": 3}
TENSORS = {name: value for name, value in VALUE.items() if isinstance(value, torch.Tensor)}
LEGACY = {"_use_new_zipfile_serialization": False}

FILES: dict[str, Callable[[Path], Any]] = {
    "zip": lambda path: saved(VALUE, path),
    "legacy": lambda path: saved(VALUE, path, **LEGACY),
    "safetensors": lambda path: save_file(TENSORS, path.with_suffix(".safetensors")),
}
KEYWORDS: list[dict[str, Any]] = [
    {},
    {"map_location": None},
    {"map_location": "cpu"},
    {"map_location": torch.device("cpu")},
    {"map_location": {"cuda:0": "cpu"}},
    {"map_location": lambda storage, location: storage},
    {"map_location": lambda storage, location: None},
    {"map_location": "meta"},
    {"weights_only": True},
    {"weights_only": False},
    {"weights_only": None},
    {"weights_only": False, "pickle_module": pickle},
    {"weights_only": False, "encoding": "latin1"},
    {"weights_only": False, "encoding": "ascii", "errors": "replace"},
    {"weights_only": False, "fix_imports": True},
    {"mmap": None},
    {"mmap": False},
]


def _each_way(path: Path, **keywords: Any) -> Iterator[Any]:
    """What is loaded of a file by its path, as a text or not, and of the file opened, on the disk or in memory."""
    with path.open("rb") as opened:
        for given in (str(path), path, opened, io.BytesIO(path.read_bytes())):
            yield ckptool.load(given, **keywords)


@pytest.mark.parametrize("kind", FILES)
@looped("keywords", KEYWORDS, ids=lambda given: "-".join(given) or "none")
def test_every_keyword_gives_what_torch_gives(kind: str, keywords: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / ("x.safetensors" if kind == "safetensors" else "x.pt")
    FILES[kind](path)
    place = keywords.get("map_location")
    expected = load_file(path) if kind == "safetensors" else torch.load(path, **keywords)
    for made in _each_way(path, **keywords):
        if place == "meta":
            found = {name: (made[name].device.type, made[name].shape) for name in TENSORS}
            assert found == {name: ("meta", value.shape) for name, value in TENSORS.items()}
        else:
            assert_same_objects(expected, made)


def test_arguments_may_stand_as_torchs_do(tmp_path: Path) -> None:
    path = saved(VALUE, tmp_path / "x.pt")
    assert_same_objects(torch.load(path, "cpu", None), ckptool.load(path, "cpu", None))
    assert_same_objects(torch.load(f=path, mmap=True), ckptool.load(f=path, mmap=True))


def test_weights_only_false_still_runs_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"

    class Hostile:
        def __reduce__(self) -> Any:
            return exec, (f"open({str(made)!r}, 'w')",)

    path = saved({"w": torch.ones(2), "evil": Hostile()}, tmp_path / "x.pt")
    for wanted in (False, True, None):
        with pytest.raises(UnsafeObject, match="exec"):
            ckptool.load(path, weights_only=wanted)
    assert not made.exists()


@looped(
    ("keywords", "message"),
    [
        ({"pickle_module": math}, "pickle_module=math"),
        ({"encoding": "bytes"}, "encoding='bytes'"),
        ({"encoding": "no-such"}, "no-such"),
        ({"encoding": "hex"}, "hex"),
        ({"encodign": "latin1"}, "encodign"),
        ({"map_location": 3}, "map_location=3"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused_by_name(
    keywords: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = saved(VALUE, tmp_path / "x.pt")
    assert refused("usage", tmp_path, lambda: ckptool.load(path, **keywords), message).fix


def _of_python_2(path: Path) -> Path:
    """A file with the strings `caf\\xe9` (latin-1) and `é` (UTF-8), as Python 2's torch pickled a `str`."""
    data = torch_bytes({"name": "cafe", "utf8": "ee", "w": torch.ones(2)}, **LEGACY)
    for old, new in ((b"cafe", b"caf\xe9"), (b"ee", b"\xc3\xa9")):
        field = b"X" + len(old).to_bytes(4, "little") + old
        assert data.count(field) == 1
        data = data.replace(field, b"U" + bytes([len(new)]) + new)
    return written(data, path)


def test_strings_of_python_2(tmp_path: Path) -> None:
    path = _of_python_2(tmp_path / "x.pt")
    with pytest.raises(UnicodeDecodeError):
        torch.load(path, weights_only=False)
    theirs = torch.load(path, weights_only=False, encoding="latin1")
    ours = ckptool.load(path, weights_only=False, encoding="latin1")
    assert ours["name"] == theirs["name"] == "café"
    assert ours["utf8"] == "é"  # what is UTF-8 is that, whatever was asked for
    assert ckptool.load(path)["name"] == b"caf\xe9"
    assert ckptool.load(path, encoding="ascii", errors="replace")["name"] == "caf\ufffd"
    with pytest.raises(Corrupt, match="not utf-8") as error:
        ckptool.load(path, encoding="utf-8")
    assert "latin1" in error.value.fix


SAME = sorted(name for name in PRODUCERS if name.endswith((".pt", ".pth", ".ckpt", ".bin", ".tar")))


@looped("name", SAME)
def test_the_files_of_programs_as_torch_loads_them(name: str, tmp_path: Path) -> None:
    path = make(name, tmp_path)
    try:
        expected = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):
        pytest.skip("torch does not load it without running it")
    for made in _each_way(path, map_location="cpu", weights_only=True, mmap=False):
        assert_same_objects(expected, made)


def test_of_legacy_streams_one_after_the_other_the_first_is_read() -> None:
    file = io.BytesIO(b"".join(torch_bytes(value, **LEGACY) for value in (VALUE, [1, 2])))
    assert_same_objects(ckptool.load(file), VALUE)
    with pytest.raises(Truncated, match=r"at its end[\s\S]*seek\(0\)"):
        ckptool.load(file)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("mmap", [None, True, False])
def test_changes_stay_in_memory(kind: str, mmap: bool | None, tmp_path: Path) -> None:
    path = tmp_path / ("x.safetensors" if kind == "safetensors" else "x.pt")
    FILES[kind](path)
    before = path.read_bytes()
    with path.open("r+b") as file:
        for made in (ckptool.load(path, mmap=mmap), ckptool.load(file, mmap=mmap)):
            made["w"].fill_(9)
            assert made["w"].untyped_storage().nbytes() == 24
            assert ckptool.load(path)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert path.read_bytes() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_such_a_device_the_default_is_the_cpu(tmp_path: Path) -> None:
    path = make("cuda.pt", tmp_path)
    expected = torch.load(path, map_location="cpu", weights_only=True)
    for made in (ckptool.load(path), ckptool.load(path, None)):
        assert_same_objects(expected, made)


def test_what_does_not_fit_into_memory_is_not_called_malicious(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> Any:
        raise MemoryError

    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    monkeypatch.setattr(tensors.untyped, "UntypedStorage", full)
    with pytest.raises(LimitExceeded) as caught:
        ckptool.load(tmp_path / "a.pt", mmap=False)
    assert "12 bytes does not fit into memory" in caught.value.what and "malicious" not in caught.value.why
