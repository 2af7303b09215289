"""Durable replacement: the old file or the new one, whole, under its name, and nothing else left."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptool.checkpoint import Computed, FileRange, InlineBytes
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.plan import Plan
from ckptool.errors import CkptoolError, FileProblem, OutputExists
from ckptool.output import durable
from ckptool.output.durable import replace_file
from tests.support.folder_plans import names
from tests.support.hostile_system import temporaries
from tests.support.processes import python_process

ROOT = Path(__file__).parents[2]


def file_plan(data: bytes = b"new") -> Plan:
    return Plan({"": [InlineBytes(data)]})


HEAD = """
    import os, sys, time
    from pathlib import Path
    from ckptool.checkpoint import Computed, InlineBytes
    from ckptool.checkpoint.plan import Plan
    from ckptool.output.durable import replace_file
    target = Path(sys.argv[1])
    """


def started(code: str, *args: object, **options: Any) -> subprocess.Popen[bytes]:
    """A process that has `target` of `argv[1]` and does what `code` says."""
    return python_process(HEAD, code, *args, **options)


def finished(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, (out + err).decode()


# What there is at the target ------------------------------------------------------------------------------------------


def test_a_new_file(tmp_path: Path) -> None:
    replace_file(file_plan(), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"new" and names(tmp_path) == ["out"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o666 & ~mask
    assert (tmp_path / "out").stat().st_nlink == 1


@pytest.mark.permissions
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_overwriting_keeps_the_mode(mode: int, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    (tmp_path / "out").chmod(mode)
    replace_file(file_plan(), tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == mode


def test_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    replace_file(file_plan(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"


def test_impossible_targets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    targets = ["missing/out", "file/out", ".", "fifo", "loop", "x" * 300, "nul\0"]
    for target in targets:
        with pytest.raises(FileProblem) as caught:
            replace_file(file_plan(), tmp_path / target, overwrite=True)
        assert caught.value.code == "io"
    assert names(tmp_path) == ["fifo", "file", "loop"] and (tmp_path / "file").read_bytes() == b"old"


def test_a_name_as_long_as_the_system_allows(tmp_path: Path) -> None:
    replace_file(file_plan(), tmp_path / ("é" * 127))
    assert names(tmp_path) == ["é" * 127]


def test_a_relative_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    replace_file(file_plan(), "out")
    assert names(tmp_path) == ["out"]


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    replace_file(file_plan(), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"new" and names(tmp_path) == ["out"]
    with pytest.raises(OutputExists):
        replace_file(
            file_plan(), tmp_path / "two", verify=lambda path: (tmp_path / "two").write_bytes(b"theirs") and None
        )
    assert (tmp_path / "two").read_bytes() == b"theirs" and names(tmp_path) == ["out", "two"]


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_everything_is_on_disk_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for name in ("pwrite", "fsync", "link", "replace", "unlink"):
        real = getattr(os, name)

        def seen(*args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            events.append("sync folder" if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode) else name)
            return real(*args, **options)

        monkeypatch.setattr(os, name, seen)
    replace_file(file_plan(), tmp_path / "out")
    assert events == ["pwrite", "fsync", "link", "unlink", "sync folder"]
    events.clear()
    replace_file(file_plan(), tmp_path / "out", overwrite=True)
    assert events == ["pwrite", "fsync", "replace", "sync folder"]


def test_the_output_may_replace_its_own_input(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"0123456789" * 20_000)
    source = Source(target)
    swapped = Plan({"": [FileRange(source, 100_000, 100_000), FileRange(source, 0, 100_000)]})
    replace_file(swapped, target, overwrite=True, inputs=[source])
    assert target.read_bytes() == b"0123456789" * 20_000 and source.read(0, 10) == b"0123456789"
    assert names(tmp_path) == ["file"]


def test_the_limit_on_file_sizes_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    code = """
        from ckptool.errors import DiskFull
        try:
            replace_file(Plan({"": [InlineBytes(b"x" * 100_000), Computed(2_000_000, lambda at, n: b"y" * n)]}), target,
                overwrite=True)
        except DiskFull as error:
            print(error.code, error)
    """
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # noqa: E731
    status, text = finished(started(code, tmp_path / "out", preexec_fn=limit))
    assert status == 0 and text.startswith("disk-full cannot write") and "the limit on file sizes" in text
    assert (tmp_path / "out").read_bytes() == b"old" and names(tmp_path) == ["out"]


# Several at once, and those that were killed --------------------------------------------------------------------------


def waiting(target: Path, mark: Path) -> subprocess.Popen[bytes]:
    """A writer that has its temporary file, and waits in the middle."""
    code = """
        def wait(at, n):
            Path(sys.argv[2]).touch()
            time.sleep(60)
            return b"y" * n
        replace_file(Plan({"": [InlineBytes(b"x" * 2_000_000), Computed(5, wait)]}), target, overwrite=True)
    """
    process = started(code, target, mark)
    deadline = time.monotonic() + 30
    while not mark.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    return process


@pytest.fixture
def live(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = waiting(tmp_path / "out", tmp_path / "mark")
    yield process
    process.kill()
    process.communicate()


def test_the_next_run_sweeps_what_a_killed_one_left(live: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert len(temporaries(tmp_path)) == 1
    live.kill()
    live.wait()
    assert len(temporaries(tmp_path)) == 1 and not (tmp_path / "out").exists()
    replace_file(file_plan(), tmp_path / "another")  # nobody may ever write to "out" again
    assert temporaries(tmp_path) == [] and (tmp_path / "another").read_bytes() == b"new"


def test_a_refused_run_sweeps_too(live: subprocess.Popen[bytes], tmp_path: Path) -> None:
    live.kill()
    live.wait()
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(OutputExists):
        replace_file(file_plan(), tmp_path / "out")
    assert temporaries(tmp_path) == []


def test_a_living_writers_temporary_file_is_left_alone(live: subprocess.Popen[bytes], tmp_path: Path) -> None:
    for name in ("out", "another"):
        replace_file(file_plan(), tmp_path / name)
        assert len(temporaries(tmp_path)) == 1 and (tmp_path / name).read_bytes() == b"new"
    live.kill()
    live.wait()
    replace_file(file_plan(b"newer"), tmp_path / "out", overwrite=True)
    assert temporaries(tmp_path) == [] and (tmp_path / "out").read_bytes() == b"newer"


def test_a_file_that_only_looks_like_ours_is_left_alone(tmp_path: Path) -> None:
    for name in (".ckptool-notes.tmp", ".ckptool-0123456789abcdef-x.tmp", Path(durable.hidden_name("out", "x")).name):
        (tmp_path / name).write_bytes(b"theirs")
    before = names(tmp_path)
    replace_file(file_plan(), tmp_path / "out")
    assert names(tmp_path) == sorted([*before, "out"])


def test_a_new_temporary_file_is_not_taken_for_one_that_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between being made and being locked it is nobody's; another run may sweep it then. Its writer notices, and makes
    another."""
    real, swept = fcntl.flock, []

    def slow(fd: int, operation: int) -> None:
        if not swept:
            swept.append(1)
            durable.sweep_folder(str(tmp_path))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    replace_file(file_plan(), tmp_path / "out")
    assert swept and (tmp_path / "out").read_bytes() == b"new" and names(tmp_path) == ["out"]


def test_of_many_writers_one_wins_completely(tmp_path: Path) -> None:
    target = tmp_path / "out"
    problems: list[BaseException] = []

    def write(letter: bytes) -> None:
        try:
            for _ in range(5):
                replace_file(
                    Plan({"": [InlineBytes(letter * 50_000), Computed(50_000, lambda at, n: letter * n)]}),
                    target,
                    overwrite=True,
                )
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c", b"d")]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):  # a reader sees one or the other
        if target.exists():
            data = target.read_bytes()
            assert len(data) == 100_000 and len(set(data)) == 1
    assert problems == [] and names(tmp_path) == ["out"]


def test_of_several_first_writers_one_wins(tmp_path: Path) -> None:
    results: list[str] = []

    def write(letter: bytes) -> None:
        try:
            replace_file(file_plan(letter * 1000), tmp_path / "out")
            results.append(letter.decode())
        except OutputExists:
            results.append("refused")

    writers = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    (winner,) = [result for result in results if result != "refused"]
    assert (tmp_path / "out").read_bytes() == winner.encode() * 1000 and names(tmp_path) == ["out"]


KILLED = """
    for n in range(100_000):
        data = Computed(300_000, lambda at, size: (b"%08d" % n * 40_000)[at : at + size])
        replace_file(Plan({"": [InlineBytes(b"%08d" % n), data]}), target, overwrite=True)
        print(n, flush=True)
"""


def kill_file_writers(folder: Path, times: int) -> None:
    import random

    chosen = random.Random(times)
    target = folder / "out"
    for _ in range(times):
        process = started(KILLED, target)
        assert process.stdout is not None
        last = int(process.stdout.readline())
        time.sleep(chosen.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        out = process.stdout.read()  # not communicate(), which misses what readline() has buffered
        process.communicate()
        last = int(out.split()[-1]) if out.split() else last
        data = target.read_bytes()
        assert len(data) == 300_008 and data == data[:8] * 37_501 and int(data[:8]) in (last, last + 1)
        assert len(names(folder)) <= 2
    replace_file(file_plan(), target, overwrite=True)
    assert names(folder) == ["out"]


def test_killed_at_any_time_the_file_is_old_or_new(tmp_path: Path) -> None:
    kill_file_writers(tmp_path, 8)


@pytest.mark.soak
def test_killed_at_any_time_three_hundred_times(tmp_path: Path) -> None:
    kill_file_writers(tmp_path, 300)


def test_an_interrupted_process_leaves_nothing_behind(live: subprocess.Popen[bytes], tmp_path: Path) -> None:
    live.send_signal(signal.SIGINT)
    assert live.wait(20) != 0
    assert temporaries(tmp_path) == [] and not (tmp_path / "out").exists()


def test_an_error_tells_its_three_parts(tmp_path: Path) -> None:
    with pytest.raises(CkptoolError) as caught:
        replace_file(file_plan(), tmp_path / "a/b/out")
    assert caught.value.what.startswith("cannot write") and "mkdir -p" in caught.value.fix
