"""What is written to URLs: the bytes that a local output gets, whole or not at all; and to open files."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import shlex
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import Callback
from fsspec.implementations.memory import MemoryFileSystem

import ckptool
from ckptool.output import uploads
from tests.support.cli import Run
from tests.support.errors import refused
from tests.support.files import load
from tests.support.looped import looped
from tests.support.writing_cases import CASES, OLD, Case, Files

OUTPUTS = ("-o", "-d", "--write-digest")
SENT = {name: case for name, case in CASES.items() if not {"--in-place", "link.pt"} & {*case.words.split()}}


class Elsewhere:
    """Where a case writes to: `local` is its folder here, `url` the same on a file system that is emptied first."""

    def __init__(self, case: Case, folder: Path, scheme: str) -> None:
        self.case, self.local, self.words = case, folder, shlex.split(case.words)
        self.fs, self.place = fsspec.core.url_to_fs(f"{scheme}://{folder}/elsewhere")
        self.url = f"{scheme}://{folder}/elsewhere"
        for name, data in case.files().items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        self.empty()

    def empty(self) -> None:
        """Only what the case begins with is there."""
        if self.fs.exists(self.place):
            self.fs.rm(self.place, recursive=True)
        if self.case.old is not None:
            self.fs.makedirs(self.place, exist_ok=True)
            self.fs.pipe_file(f"{self.place}/{self.case.changes[0]}", OLD)

    def sent(self) -> list[str]:
        """The words, with the URL in the output's place."""
        at = next(at for at, word in enumerate(self.words) if word in OUTPUTS) + 1
        return [*self.words[:at], f"{self.url}/{self.words[at]}", *self.words[at + 1 :]]

    def held(self) -> Files:
        found = self.fs.find(self.place) if self.fs.exists(self.place) else []
        return {name.removeprefix(f"{self.place}/"): self.fs.cat_file(name) for name in found}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, which is empty afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not [*folder.iterdir()]


@looped("name", SENT, at_once=20)
@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_every_verb_writes_elsewhere_what_it_writes_here(
    scheme: str, name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Elsewhere(SENT[name], tmp_path, scheme)
    monkeypatch.chdir(tmp_path)
    before = there.held()
    assert run(*there.sent(), "-n").code in (there.case.code, 2)
    assert there.held() == before, "with -n"
    ran = run(*there.sent())
    assert ran.code == there.case.code, ran
    found = there.held()
    assert run(*there.words, *there.case.again.split()).code == there.case.code
    assert found == {name: (tmp_path / name).read_bytes() for name in there.case.changes}
    if before == {}:
        assert run(*(word for word in there.sent() if word != "-f")).code == 2 and there.held() == found, "without -f"


@looped(
    "name",
    [name for name in SENT if "shards" in name or "dcp" in name or SENT[name].changes == ("out.pt",)],
    at_once=15,
    here=0.5,
)
@pytest.mark.parametrize("error", [OSError("it failed"), KeyboardInterrupt()], ids=repr)
def test_what_fails_half_way_leaves_what_was_there(
    error: BaseException, name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Elsewhere(SENT[name], tmp_path, "memory")
    monkeypatch.chdir(tmp_path)
    assert run(*there.words, *there.case.again.split()).code == there.case.code
    new = {name: (tmp_path / name).read_bytes() for name in there.case.changes}
    before, left = there.held(), [0]
    for call in ("put_file", "cp_file", "rm_file"):

        def failing(fs: object, real: Callable[..., object], *args: object, **more: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise error
            return real(fs, *args, **more)

        monkeypatch.setattr(MemoryFileSystem, call, partialmethod(failing, getattr(MemoryFileSystem, call)))
    for at in range(1, 30):
        left[0] = at
        ran = run(*there.sent())
        if left[0] > 0:
            break
        assert ran.code == (2 if isinstance(error, OSError) else 130), ran
        assert there.held() in ([before, new] if before else [before]), ran
        there.empty()
    assert at > 2 * len(there.case.changes) and ran.code == there.case.code


@pytest.mark.parametrize("name", ["strip, new", "shards, new"])
def test_what_another_writer_put_there_meanwhile_stays(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file cannot be renamed to a name that is taken."""
    there, real = Elsewhere(SENT[name], tmp_path, "memory"), MemoryFileSystem.put_file
    monkeypatch.chdir(tmp_path)
    place = f"{there.place}/{there.case.changes[-1]}"

    def put(fs: MemoryFileSystem, *words: Any, **more: Any) -> None:
        real(fs, *words, **more)
        fs.pipe_file(place, b"another's")

    def refused(fs: MemoryFileSystem, source: str, target: str) -> None:
        if fs.exists(target):
            raise OSError("the file exists")
        fs.cp_file(source, target)
        fs.rm_file(source)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put)
    monkeypatch.setattr(MemoryFileSystem, "mv", refused)
    ran = run(*there.sent())
    assert ran.code == 2 and "the file exists" in ran.err
    assert there.held() == {there.case.changes[-1]: b"another's"}


def test_a_folder_is_sent_with_its_index_last_and_replaced_by_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, names = Elsewhere(CASES["shards, over others"], tmp_path, "memory"), list[str]()
    monkeypatch.chdir(tmp_path)
    real = MemoryFileSystem.mv
    monkeypatch.setattr(MemoryFileSystem, "mv", lambda fs, a, b: [names.append(os.path.basename(b)), real(fs, a, b)])
    for words in (there.sent(), ["strip-module", "out", "-o", f"{there.url}/copied"]):
        names.clear()
        assert run(*words).code == 0 and len(names) >= 2 and names[-1] == "model.safetensors.index.json", names
    before = there.held()
    ran = run(*there.sent())
    assert ran.code == 2 and "mix of two checkpoints" in ran.err and there.held() == before


def test_what_cannot_be_written_is_refused_before_anything_is_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.pt").write_bytes(CASES["strip, new"].files()["in.pt"])
    fsspec.filesystem("memory").pipe("/full/of.pt", b"")
    for out, said in {
        "https://host/a.pt": "a web server only serves files",
        "memory://full": "it is a folder",
        "memory://new/": "cannot hold state_dict",
        "memory://full/of.pt": "already exists",
        "ftp://user:hidden@127.0.0.1:1/a.pt": "cannot use ftp://127.0.0.1:1/a.pt",
    }.items():
        ran = run("strip-module", tmp_path / "in.pt", "-o", out)
        assert ran.code == 2 and said in ran.err and "hidden" not in ran.err + ran.out, ran
    ran = run("strip-module", "memory://full/of.pt", "--in-place")
    assert ran.code == 2 and "-o OUT" in ran.err
    refused(ckptool.CkptoolError, tmp_path, lambda: ckptool.Run("memory://run"), "a folder on this machine")


def test_a_full_disk_here_is_said_with_the_folder_that_is_full(run: Run, tmp_path: Path, temporary: Path) -> None:
    there = Elsewhere(CASES["strip, new"], tmp_path, "memory")
    left = temporary / f".ckptool-{'0' * 16}-{'1' * 16}.tmp"  # by a run that was killed: it goes, too
    left.mkdir()
    (left / "out.pt").write_bytes(b"half")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        ran = run("strip-module", tmp_path / "in.pt", "-o", there.sent()[-1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ran.code == 2 and str(temporary) in ran.err and "TMPDIR" in ran.err and not there.held(), ran


def test_an_open_file_gets_the_bytes_that_a_path_gets(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3).half()}
    for container, read in {
        "torch-zip": load,
        "safetensors": lambda path: safetensors.torch.load(path.read_bytes()),
    }.items():
        file, path, other = io.BytesIO(b"before"), tmp_path / "path", tmp_path / "other"
        file.seek(0, io.SEEK_END)
        ckptool.save(state, file, container=container)
        ckptool.save(state, path, container=container, overwrite=True)
        with other.open("wb") as opened:
            ckptool.save(state, opened, container=container)
        assert file.getvalue() == b"before" + path.read_bytes() and other.read_bytes() == path.read_bytes()
        assert all(torch.equal(tensor, state[name]) for name, tensor in read(other).items())
    for unfit in (io.StringIO(), (tmp_path / "path").open("rb")):
        with unfit, pytest.raises(ckptool.CkptoolError, match="open\\(PATH, 'wb'\\)"):
            ckptool.save(state, unfit)
    refused(ckptool.CkptoolError, tmp_path, lambda: ckptool.save(state, io.BytesIO(), container="dcp"), "name one")


def test_a_signal_while_sending_begins_waits_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, begin = list[str](), asyncio.run_coroutine_threadsafe

    class Slow(AsyncFileSystem):
        async def _put_file(self, lpath: str, rpath: str, callback: Callback, **_: object) -> None:
            try:
                await asyncio.sleep(0.2)
                callback.relative_update(1)
            finally:
                ended.append(rpath)

    def interrupted(*words: Any) -> Any:
        job = begin(*words)
        signal.raise_signal(signal.SIGINT)
        return job

    monkeypatch.setattr(uploads.asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        uploads._put(Slow(), str(tmp_path), "there", [], lambda _: None, {})
    assert ended == ["there"]
