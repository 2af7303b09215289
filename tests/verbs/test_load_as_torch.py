"""`ckptool.load` in the place of `torch.load`: its keywords, its open files, its answers."""

from __future__ import annotations

import io
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import Corrupt, Truncated, UnsafeObject, UsageError
from fixtures.make import PRODUCERS, make
from fixtures.torch_tar import tar_bytes, tar_members
from tests.support.files import saved, torch_bytes, written
from tests.support.looped import looped
from tests.support.same import assert_same_objects

pytestmark = pytest.mark.filterwarnings("ignore")

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


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"pickle_module": math}, "pickle_module=math"),
        ({"encoding": "bytes"}, "encoding='bytes'"),
        ({"encoding": "no-such"}, "no-such"),
        ({"encoding": "hex"}, "hex"),
        ({"encodign": "latin1"}, "encodign"),
        ({"map_location": 3}, "map_location=3"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_arguments_that_cannot_be_followed_are_refused_by_name(
    keywords: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = saved(VALUE, tmp_path / "x.pt")
    with pytest.raises(UsageError) as error:
        ckptool.load(path, **keywords)
    assert message in error.value.what
    assert error.value.fix


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


def test_torchs_first_format(tmp_path: Path) -> None:
    path = written(tar_bytes(tar_members({"w": torch.arange(4.0)})), tmp_path / "x.tar")
    expected = torch.load(path, weights_only=False)
    for made in _each_way(path, weights_only=False):
        assert_same_objects(expected, made)


# Open files ----------------------------------------------------------------------------------------------------------


def test_legacy_streams_one_after_the_other_as_torch_reads_them() -> None:
    file = io.BytesIO(b"".join(torch_bytes(value, **LEGACY) for value in (VALUE, [1, 2], {"last": torch.ones(3)})))
    theirs, ours = [], []
    for found, load in ((theirs, torch.load), (ours, ckptool.load)):
        file.seek(0)
        for _ in range(3):
            found.append((load(file), file.tell()))
    assert_same_objects(theirs, ours)
    with pytest.raises(Truncated, match=r"at its end[\s\S]*seek\(0\)"):
        ckptool.load(file)


# Memory --------------------------------------------------------------------------------------------------------------


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


def test_a_file_that_is_cut_short_ends_the_process_as_the_docstring_says(tmp_path: Path) -> None:
    path = saved({"w": torch.arange(1 << 20)}, tmp_path / "x.pt")
    code = f"import ckptool, os; w = ckptool.load({str(path)!r})['w']; os.truncate({str(path)!r}, 0); print(w.sum())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode < 0
    assert "cut short" in " ".join((ckptool.load.__doc__ or "").split())


# Devices -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_such_a_device_the_default_is_the_cpu(tmp_path: Path) -> None:
    path = make("cuda.pt", tmp_path)
    expected = torch.load(path, map_location="cpu", weights_only=True)
    for made in (ckptool.load(path), ckptool.load(path, None)):
        assert_same_objects(expected, made)
