"""Copies of what is opened, in this process and in others: whatever is done with them, the values are right, and nobody
else's file is closed."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.checkpoint import files
from ckptool.errors import CkptoolError, FileChanged, UsageError
from tests.support.errors import refused
from tests.support.files import saved, weights
from tests.support.looped import looped
from tests.support.object_graphs import saved_graph
from tests.support.same import assert_same_tree

STATE = weights("a", "b")
CONTAINERS = {".pt": None, ".safetensors": None, ".dcp": None, ".npz": None, ".index.json": "sharded"}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "dict": lambda value: copy.deepcopy(dict(value)),
}


@pytest.fixture(autouse=True)
def collect_new_objects_alone() -> Iterator[None]:
    """In a process that ran many tests, each collection would look at a million objects of theirs."""
    gc.freeze()
    yield
    gc.unfreeze()


def written(suffix: str, folder: Path) -> Path:
    path = saved(STATE, folder / "a.pt")
    if suffix == ".pt":
        return path
    out = folder / ("shards" if suffix == ".index.json" else f"b{suffix}")
    ckptool.convert(path, out, container=CONTAINERS[suffix])
    return out


def values(checkpoint: Any) -> dict[str, Any]:
    return {name: entry.torch() for name, entry in checkpoint.items()}


@looped("suffix", CONTAINERS)
def test_copies_read_the_same_and_close_nothing(suffix: str, tmp_path: Path) -> None:
    path = written(suffix, tmp_path)
    checkpoint = ckptool.open(path)
    for make in [*COPIES.values()] * 2:
        duplicate = make(checkpoint)
        own = [os.open(path.parent / "a.pt", os.O_RDONLY) for _ in range(8)]  # the numbers that were free
        assert all(torch.equal(value, STATE[name]) for name, value in values(duplicate).items())
        del duplicate
        gc.collect()
        for fd in own:
            os.close(fd)  # OSError if somebody else closed it
        assert all(torch.equal(value, STATE[name]) for name, value in values(checkpoint).items())


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_entries_and_listings_cross_processes(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(written(suffix, tmp_path)) for suffix in (".pt", ".safetensors")]
    numpy.savez_compressed(tmp_path / "small.npz", **{name: value.numpy() for name, value in STATE.items()})
    paths.append(str(tmp_path / "small.npz"))
    with ProcessPoolExecutor(1, get_context(start)) as pool:
        for path in paths:
            there = pool.submit(values, dict(ckptool.open(path))).result()
            assert all(torch.equal(value, STATE[name]) for name, value in there.items())
            assert pool.submit(ckptool.open, path).result()["b"].torch().equal(STATE["b"])
        listings = ckptool.inspect(paths, jobs=pool)
    own = [os.open(paths[0], os.O_RDONLY) for _ in range(16)]
    listings += ckptool.inspect(paths, jobs=2)
    monkeypatch.chdir("/")
    assert [str(listing) for listing in listings] == 2 * [str(ckptool.inspect(path)) for path in paths]
    assert all(torch.equal(listing.tree["a"].torch(), STATE["a"]) for listing in listings)
    del listings
    gc.collect()
    for fd in own:
        os.close(fd)


def test_a_pickle_never_stands_for_other_values(tmp_path: Path) -> None:
    """Not for those of a new file under the old name; and `torch.save` writes no name in the place of values."""
    path = saved(STATE, tmp_path / "a.pt")
    checkpoint = ckptool.open(path)
    moved = pickle.dumps(checkpoint)
    for value in (checkpoint, dict(checkpoint), checkpoint["a"], ckptool.inspect(path)):
        with pytest.raises(UsageError, match=r"ckptool.save\(tree, PATH\)"):
            torch.save(value, tmp_path / "reference.pt")
    with path.open("rb") as file, pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(ckptool.open(io.BytesIO(file.read())))
    save_file({"a": STATE["a"] + 1}, tmp_path / "other")
    os.replace(tmp_path / "other", path)
    refused(FileChanged, tmp_path, lambda: pickle.loads(moved)["a"].numpy())
    refused(UsageError, tmp_path, lambda: pickle.dumps(checkpoint), "cannot be pickled")
    assert torch.equal(checkpoint["a"].torch(), STATE["a"])
    path.unlink()
    refused(CkptoolError, tmp_path, lambda: pickle.loads(moved)["a"].numpy())


def test_what_only_this_process_can_make_is_not_pickled(tmp_path: Path) -> None:
    """What is in memory, and rows that are computed; a mean is pickled, also one that was read."""
    states = {"a.pt": STATE, "b.pt": weights("b", "a")}
    files = [ckptool.open(saved(state, tmp_path / name)) for name, state in states.items()]
    target = saved({"a": torch.ones(3, 3), "b": STATE["b"]}, tmp_path / "target.pt")
    larger = ckptool.warm_start(files[0], target, resize="a=rows(mean)")
    for value in (ckptool.open(STATE), ckptool.open({"a": numpy.ones(2)}), ckptool.edit(files[0], set=STATE), larger):
        for write in (pickle.dumps, lambda value: torch.save(value, tmp_path / "reference.pt")):
            with pytest.raises(UsageError, match=r"ckptool.save\(tree, PATH\)"):
                write(value)
        assert copy.deepcopy(value)["a"].numpy().shape
    mean = ckptool.average(files)
    expected = ckptool.load(mean)["a"]
    assert torch.equal(pickle.loads(pickle.dumps(mean))["a"].torch(), expected)


def test_copies_of_whatever_people_save_are_the_same(tmp_path: Path) -> None:
    """Objects that are not built are those without a state, or with one, in the copy, too."""
    for graph in filter(None, map(saved_graph, range(12))):
        (tmp_path / "a.pt").write_bytes(graph.data)
        checkpoint = ckptool.open(tmp_path / "a.pt")
        for make in (copy.deepcopy, COPIES["pickle"]):
            assert_same_tree(checkpoint, make(checkpoint))


READERS: dict[str, Callable[[Any], Any]] = {
    "open": ckptool.open,
    "values": lambda file: values(ckptool.open(file)),
    "load": ckptool.load,
    "inspect": lambda file: ckptool.inspect(file, stats=True),
    "verify": lambda file: ckptool.verify(file, digest=True),
    "doctor": ckptool.doctor,
    "report": ckptool.report,
    "diff": lambda file: ckptool.diff(file, STATE),
    "cast": lambda file: ckptool.cast(ckptool.open(file), dtype="bf16"),
    "average": lambda file: ckptool.average([ckptool.open(file), STATE]),
    "edit": lambda file: ckptool.edit(ckptool.open(file), drop="a"),
    "convert": lambda file: ckptool.convert(file, os.devnull + "/no/folder.pt"),
    "warm start": lambda file: ckptool.warm_start(ckptool.open(file), STATE),
    "nothing there": lambda file: ckptool.open(f"{file}#nothing/there"),
}


def open_files(folder: Path) -> list[str]:
    """The files of a folder that are open in this process, and copies in memory of streams."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if str(folder) in link or "memfd:ckptool" in link]


@looped(("suffix", "name"), [*product(CONTAINERS, READERS)][::3], at_once=24)
def test_the_last_use_of_a_file_closes_it(suffix: str, name: str, tmp_path: Path) -> None:
    """Without the garbage collector: it may not come for hours, and a copy of a pipe takes memory."""
    path = written(suffix, tmp_path)
    content = path.read_bytes() if path.is_file() else b""
    inputs: list[Callable[[], Any]] = [lambda: path, *([lambda: io.BytesIO(content)] if content else [])]
    for make in inputs:
        gc.disable()
        before = open_files(tmp_path)  # of other tests
        with suppress(CkptoolError):
            READERS[name](make())
        files.shared.clear()  # those of folders, of which some stay open to be used again
        still = open_files(tmp_path)
        gc.enable()
        assert len(still) <= len(before), still
