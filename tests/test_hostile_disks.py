"""Disks that fill, calls that fail late, do half or ask to be tried again."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptool
from ckptool.cli import main
from ckptool.errors import FileProblem
from ckptool.output import sink
from tests.support.files import load, saved
from tests.support.hostile_system import FULL, PROGRAM, ROOT, clean, temporaries, wrapped_state
from tests.support.same import assert_same_objects


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(wrapped_state(), tmp_path / "in.pt")


# Full disks -----------------------------------------------------------------------------------------------------------

FILLED = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from ckptool.cli import main
from ckptool.output import durable
folder, words, free = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
durable.check_space = durable.reserve = lambda *args: None  # somebody else takes the room after it was looked at
import ckptool.output.durable, ckptool.output.folders
ckptool.output.durable.check_space = ckptool.output.folders.check_space = durable.reserve
ckptool.output.folders.reserve = durable.reserve
os.chdir(folder)
data = open(sys.argv[4], "rb").read()
for room in free:
    for name in os.listdir("."):
        os.remove(name)
    for name in ("in.pt", "out.pt"):
        with open(name, "wb") as file:
            file.write(data if name == "in.pt" else b"old")
    left = os.statvfs(".").f_bavail * os.statvfs(".").f_frsize
    with open("ballast", "wb") as file:
        file.write(bytes(max(0, left - room)))
    told = io.StringIO()
    with redirect_stderr(told), redirect_stdout(told):
        code = main(words)
    with open("in.pt", "rb") as file, open("out.pt", "rb") as other:
        same = file.read() == data, other.read() == b"old"
        print(json.dumps([room, code, told.getvalue(), sorted(os.listdir(".")), *same]))
"""


def filled(words: list[str], free: list[int], model: Path) -> list[list[Any]]:
    """What `main(words)` does on a tmpfs with so many bytes free; where there are no user namespaces, with so low a
    limit on files."""
    small = model.parent / "small"
    small.mkdir()
    script, arguments = model.parent / "run.py", [str(small), json.dumps(words), json.dumps(free), str(model)]
    script.write_text(FILLED)
    mount = 'mount -t tmpfs -o size=2m none "$0" && shift 0 && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mount, str(small), sys.executable, str(script), *arguments]
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        command = [sys.executable, "-c", LIMITED, str(script), *arguments]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# Without a file system of its own: the same script, with a limit on the size of files instead of the room on the disk.
LIMITED = """
import builtins, resource, sys
sys.argv = sys.argv[1:]
code = open(sys.argv[0]).read().replace('file.write(bytes(max(0, left - room)))', 'file.write(b"")')
code = code.replace('code = main(words)', 'limit(room); code = main(words); limit(-1)')
exec(code, {"limit": lambda room: resource.setrlimit(resource.RLIMIT_FSIZE, (room, -1))})
"""


@pytest.mark.parametrize("words", FULL, ids=" ".join)
def test_a_full_disk_leaves_everything_as_it_was(words: list[str], model: Path) -> None:
    free = [0, 4096, 8192, 40_960, 65_536, 98_304, 131_072, 200_000, 240_000]
    found = filled(words, free, model)
    refused = [result for result in found if result[1]]
    assert len(found) == len(free) and len(refused) >= 1
    for _, code, told, names, same_input, same_output in refused:
        assert code == 2 and told.startswith("error[disk-full]: cannot write") and "is as it was" in told, told
        assert "the disk is full" in told or "limit on file sizes" in told
        assert same_input and same_output and set(names) <= {"in.pt", "out.pt", "ballast"}


@pytest.mark.parametrize("words", FULL, ids=" ".join)
def test_the_limit_on_file_sizes_leaves_everything_as_it_was(words: list[str], model: Path) -> None:
    """RLIMIT_FSIZE, and the signal SIGXFSZ that comes with it, which Python ignores and we must not make deadly."""
    (model.parent / "out.pt").write_bytes(b"old")
    before = {path.name: path.read_bytes() for path in model.parent.iterdir()}
    size = 1000 if "--in-place" not in words else model.stat().st_size + 100

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    ended = subprocess.run(
        [*PROGRAM, *words], cwd=model.parent, preexec_fn=limit, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2 and "the limit on file sizes was reached" in ended.stderr, ended
    assert {path.name: path.read_bytes() for path in model.parent.iterdir()} == before


# Errors that come late ------------------------------------------------------------------------------------------------


class Calls:
    """Fails at one call of a function of `os` on files of one kind, and remembers the order of all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: str, number: int, folder: bool = False) -> None:
        self.seen: list[str] = []
        for name in ("fsync", "close", "dup", "replace", "link", "unlink"):
            real = getattr(os, name)

            def call(*args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
                self.seen.append(name)
                is_folder = isinstance(args[0], int) and stat.S_ISDIR(os.fstat(args[0]).st_mode)
                if name == failing and is_folder is folder and number:
                    if name == "close":
                        real(*args)  # as it is: the descriptor is gone, and the error told
                    raise OSError(number, os.strerror(number))
                return real(*args, **options)

            monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "close"])
def test_an_error_of_sync_or_close_is_a_failure_and_nothing_is_renamed(
    call: str, number: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.pt").write_bytes(b"old")
    with monkeypatch.context() as patch:
        calls = Calls(patch, call, number)
        with pytest.raises(FileProblem) as caught:
            ckptool.strip_module(model, tmp_path / "out.pt", overwrite=True)
    assert "replace" not in calls.seen and "link" not in calls.seen, "not renamed"
    assert calls.seen.count("fsync") == 1, "not asked again: the second answer would be a lie"
    assert "is as it was" in caught.value.why
    assert (tmp_path / "out.pt").read_bytes() == b"old" and temporaries(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EBUSY, errno.EACCES, errno.ENOSPC])
def test_a_failed_rename_leaves_everything_as_it_was(
    number: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.pt").write_bytes(b"old")
    Calls(monkeypatch, "replace", number)
    with pytest.raises(FileProblem):
        ckptool.strip_module(model, tmp_path / "out.pt", overwrite=True)
    assert (tmp_path / "out.pt").read_bytes() == b"old" and temporaries(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.ENOTSUP])
def test_a_folder_that_cannot_be_synced_is_a_note(
    number: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        Calls(patch, "fsync", number, folder=True)
        assert main(["strip-module", str(model), "-o", str(tmp_path / "out.pt")]) == 0
        told = capsys.readouterr().out
        done = ckptool.add_module(model, tmp_path / "two.pt")
    assert "complete and visible, but its durability is uncertain" in told
    assert [note.code for note in done.notes] == ["not-synced"]
    assert_same_objects(load(tmp_path / "out.pt"), clean())


def test_verify_and_recover_note_a_folder_that_cannot_be_synced(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Calls(patch, "fsync", errno.EIO, folder=True)
        verified = ckptool.verify(model, write_digest=tmp_path / "digests.json")
        recovered = ckptool.recover(model, tmp_path / "whole.pt")
    assert "not-synced" in [note.code for note in verified.notes]
    assert [note.code for note in recovered.notes] == ["not-synced"] and "is uncertain" in str(recovered)


def test_short_and_interrupted_calls_are_completed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "PAUSE", 0.0)
    counts: dict[str, int] = {}

    def odd(name: str, shortened: Callable[..., Any]) -> None:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            if name in ("pwrite", "copy_file_range") and counts[name] % 3 == 0:
                raise BlockingIOError(errno.EAGAIN, "try again")
            return shortened(real, *args)

        monkeypatch.setattr(os, name, call)

    odd("pwrite", lambda real, fd, data, at: real(fd, bytes(data)[:7_777], at))
    odd("copy_file_range", lambda real, a, b, size, *rest: real(a, b, min(size, 10_001), *rest))
    odd("pread", lambda real, fd, size, at: real(fd, min(size, 5_001), at))
    ckptool.strip_module(model, tmp_path / "out.pt", verify=True)
    assert_same_objects(load(tmp_path / "out.pt"), clean())
    assert counts["pwrite"] > 3

    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)  # for ever: an error, not an endless loop
    with pytest.raises(FileProblem):
        ckptool.strip_module(model, tmp_path / "two.pt")
    assert not (tmp_path / "two.pt").exists() and temporaries(tmp_path) == []


def test_signals_do_not_disturb_writing(tmp_path: Path) -> None:
    """EINTR: a timer that fires all the time changes nothing."""
    file = saved(wrapped_state(2_000), tmp_path / "in.pt")
    ticks: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: ticks.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for number in range(5):
            ckptool.strip_module(file, tmp_path / f"{number}.pt", verify=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(ticks) > 5
    assert_same_objects(load(tmp_path / "4.pt"), clean(2_000))
