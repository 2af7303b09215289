"""Folders of more files than a process may have open at a time."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

import ckptool
from ckptool.checkpoint import files, workers
from ckptool.checkpoint.files import Folder, Source
from ckptool.errors import FileChanged, FileProblem
from tests.support.engine_folders import write_index
from tests.support.errors import three_parts
from tests.support.files import saved

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
"""
RANKS = 300


def limited(*words: str | Path) -> str:
    """What the program prints where 128 files may be open, outputs and the interpreter's own included."""
    return limited_code("from ckptool.cli import main; sys.exit(main())", *words)


def limited_code(code: str, *words: str | Path) -> str:
    """What the code prints under the same limit."""
    argv = [sys.executable, "-c", LIMITED + code, *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    return done.stdout


@pytest.mark.soak
def test_two_thousand_shards(tmp_path: Path) -> None:
    places = {}
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(2 * RANKS):
        places[f"w{number}"] = file = f"model-{number + 1:05}-of-{2 * RANKS:05}.safetensors"
        save_file({f"w{number}": torch.tensor([number])}, folder / file)
    write_index(folder, places)
    limited("verify", folder)
    limited("convert", folder, "-o", tmp_path / "out.safetensors")
    assert [int(value) for _, value in sorted(load_file(tmp_path / "out.safetensors").items())] == [
        int(name[1:]) for name in sorted(places)
    ]
    mapped = f"import ckptool; print(sorted(map(int, ckptool.load(sys.argv[1]).values())) == list(range({2 * RANKS})))"
    assert limited_code(mapped, folder) == "True\n"


# The pool ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three files of folders are open."""
    files.shared.clear()
    monkeypatch.setattr(files, "most_shared", lambda: 3)


def numbered(folder: Path, count: int = 12) -> Folder:
    """Files of 64 bytes that each say their number."""
    for number in range(count):
        (folder / str(number)).write_bytes(bytes([number]) * 64)
    return Folder(folder)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("how", ["replaced", "removed", "written", "a folder", "a loop"])
def test_a_file_that_is_another_when_it_is_opened_again(how: str, tmp_path: Path) -> None:
    folder = numbered(tmp_path)
    source, path = folder.open("1"), tmp_path / "1"
    status = path.stat()
    files.shared.clear()
    if how == "written":
        path.write_bytes(bytes(64))
        os.utime(path, ns=(0, status.st_mtime_ns + 1))
    else:
        path.rename(tmp_path / "elsewhere")
    if how == "replaced":  # same size, same time
        path.write_bytes(bytes(64))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    if how == "a folder":
        path.mkdir()
    if how == "a loop":
        path.symlink_to("1")
    with pytest.raises(FileProblem if how == "a loop" else FileChanged) as refused:
        source.read(0, 1)
    assert str(path) in refused.value.what and refused.value.why


@settings(max_examples=5)
@given(limit=st.integers(1, 4), seeds=st.lists(st.integers(0, 99), min_size=4, max_size=6))
def test_threads_that_read_at_once(limit: int, seeds: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every read has the bytes of its own file, whoever closes and opens what meanwhile."""
    folder = numbered(tmp_path_factory.mktemp("files"))
    wrong: list[object] = []

    def read(seed: int) -> None:
        buffer = memoryview(bytearray(16))
        try:
            for turn in range(600):
                number = (turn * (seed + 1) + seed) % 12
                source = folder.open(str(number)) if turn % 3 else Source(folder.path + f"/{number}")
                source.share_descriptors()
                source.read_into(turn % 48, buffer)
                if set(buffer) != {number} or set(source.read(turn % 48, 16)) != {number}:
                    wrong.append(number)
                if turn % 50 == seed % 50:
                    files.shared.clear()
        except (OSError, FileProblem) as error:
            wrong.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "most_shared", lambda: limit)
        threads = [threading.Thread(target=read, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_none_is_closed_that_another_file_has_taken(tmp_path: Path) -> None:
    """The limit is a share of the system's, and files are closed where the rest of the process needs all others."""
    code = f"""
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from ckptool.checkpoint.files import Folder, Source, most_shared, shared
folder = Folder({str(tmp_path)!r})
sources = [folder.open(name) for name in folder.names]
assert most_shared() == 16 >= len(shared) > 0
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
assert Source({str(tmp_path / "1")!r}).read(0, 1) == b"\\1"
assert [int(source.read(0, 1)[0]) for source in sources] == [int(name) for name in folder.names]
"""
    numbered(tmp_path, 40)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 64
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Files that change ----------------------------------------------------------------------------------------------------
# Files that somebody changes while a checkpoint of them is open: never new values for old, nor called damaged.


def content(kind: str, seed: int, rows: int = 64) -> bytes:
    """A file of two tensors, as its own library writes it."""
    numbers, stream = torch.Generator().manual_seed(seed), io.BytesIO()
    state = {"a": torch.randn(rows, 4, generator=numbers), "b": torch.randn(3, generator=numbers)}
    if kind == "safetensors":
        return save(state)
    if kind.startswith("npz"):
        write: Any = numpy.savez_compressed if kind == "npz, compressed" else numpy.savez
        write(stream, **{name: tensor.numpy() for name, tensor in state.items()})
    else:
        torch.save(state, stream, _use_new_zipfile_serialization=kind == "zip")
    return stream.getvalue()


CHANGES: dict[str, Callable[[Path, str], Any]] = {
    "other values": lambda path, kind: path.write_bytes(content(kind, 2)),
    "other shapes": lambda path, kind: path.write_bytes(content(kind, 3, 100)),
    "cut": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "something else": lambda path, _: path.write_bytes(b"something else" * 200),
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.zeros(64, 4)), torch.nn.Parameter(torch.zeros(3))


ZEROS = {"a": torch.zeros(64, 4), "b": torch.zeros(3)}
READS: dict[str, Callable[[Any, Path], Any]] = {
    "numpy": lambda ckpt, _: ckpt["a"].numpy(),
    "bytes": lambda ckpt, _: ckpt["a"].bytes(),
    "torch": lambda ckpt, _: ckpt["a"].torch(),
    "a slice": lambda ckpt, _: ckpt["a"][3:5],
    "a cast": lambda ckpt, _: ckpt["a"].to("bf16")[0],
    "load": lambda ckpt, _: ckptool.load(ckpt),
    "load a copy": lambda ckpt, _: ckptool.load(ckpt, mmap=False),
    "load_into": lambda ckpt, _: ckptool.load_into(Model(), ckpt),
    "save": lambda ckpt, out: ckptool.save(ckpt, out / "o.safetensors"),
    "verify": lambda ckpt, _: ckptool.verify(ckpt, finite=True),
    "diff": lambda ckpt, _: ckptool.diff(ckpt, ZEROS),
    "statistics": lambda ckpt, _: ckptool.inspect(ckpt, stats=True),
    "cast": lambda ckpt, out: ckptool.cast(ckpt, out / "o.pt", dtype="f16", verify=True),
}


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors", "npz", "npz, compressed"])
def test_a_changed_file(kind: str, tmp_path: Path) -> None:
    path, out, wrong = tmp_path / "a.bin", tmp_path / "out", []
    out.mkdir()
    for how, change in CHANGES.items():
        for name, read in READS.items():
            path.write_bytes(content(kind, 1))
            with ckptool.open(path) as ckpt:
                change(path, kind)
                try:
                    wrong.append((how, name, str(read(ckpt, out))[:80]))
                except FileChanged:
                    pass
                except Exception as error:  # noqa: BLE001
                    wrong.append((how, name, repr(error)[:80]))
    assert not wrong and not list(out.iterdir())


def test_a_file_that_lost_its_name_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "a.pt").write_bytes(content("zip", 1))
    expected, ckpt = torch.load(path), ckptool.open(path)
    (new := tmp_path / "b.pt").write_bytes(content("zip", 2))
    new.replace(path)
    assert torch.equal(ckpt["a"].torch(), expected["a"]) and ckptool.verify(ckpt).fine


# Workers --------------------------------------------------------------------------------------------------------------
# Work that workers of somebody else do.


def test_work_is_done_in_the_folder_that_it_was_asked_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker on another machine stands in some folder of its own."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    saved({"a": torch.ones(3)}, tmp_path / "here" / "m.pt")
    monkeypatch.chdir(tmp_path / "there")
    is_done, report = workers._outcome_in(str(tmp_path / "here"), {}, ckptool.verify, "m.pt")
    assert is_done and report.fine and os.getcwd() == str(tmp_path / "there")
    is_done, error = workers._outcome_in(str(tmp_path / "none"), {}, ckptool.verify, "m.pt")
    assert not is_done and "has no folder" in error.what and three_parts(error)
    is_done, report = workers._outcome_in(str(tmp_path / "none"), {}, ckptool.verify, str(tmp_path / "here" / "m.pt"))
    assert is_done and report.fine
    gone = str(tmp_path / "gone")  # while it is worked on there: what comes next is not lost for it
    for _ in range(2):
        os.mkdir(gone)
        assert workers._outcome_in(gone, {}, os.rmdir, gone) == (True, None) and os.getcwd() == str(tmp_path / "there")
