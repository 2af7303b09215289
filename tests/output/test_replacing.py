"""What holds of files and folders alike when they are replaced: the old one or the new one, and nothing else left."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptool.checkpoint import Computed, FileRange, InlineBytes
from ckptool.checkpoint.blocks import Checksummed, Crc, Plan, Segment
from ckptool.checkpoint.files import Source
from ckptool.errors import Corrupt, DiskFull, FileChanged, FileProblem, OutputExists, VerifyFailed
from ckptool.output import check_target, durable, folders, replace_file
from ckptool.output.folders import check_folder, replace_folder
from tests.support.errors import refused, three_parts
from tests.support.files import contents
from tests.support.folder_plans import NEW, OLD, free_space, names
from tests.support.hostile_system import temporaries
from tests.support.processes import python_process


@dataclass(frozen=True)
class Target:
    """What is there already, a file or a folder, at `path`; nothing else is in the folder above."""

    path: Path
    kind: str

    @property
    def is_folder(self) -> bool:
        return self.kind != "file"

    def write(
        self,
        *last: Segment,
        path: Path | None = None,
        overwrite: bool = True,
        replaceable: Iterable[str] = ("b",),
        **options: Any,
    ) -> tuple[Any, ...]:
        """Writes the new one with these segments at its end."""
        path = path or self.path
        if not self.is_folder:
            return replace_file(Plan({"": [InlineBytes(b"new"), *last]}), path, overwrite=overwrite, **options)
        files = {name: [InlineBytes(data)] for name, data in NEW.items()}
        files["c"] += last  # type: ignore[arg-type]
        return replace_folder(Plan(files), path, overwrite=overwrite, replaceable=[*replaceable], **options)

    def make(self, data: bytes) -> None:
        """Makes one with these bytes in it."""
        if self.is_folder:
            self.path.mkdir()
        (self.path / "theirs" if self.is_folder else self.path).write_bytes(data)

    def holds(self, path: Path, new: bool) -> bool:
        """Whether that is the new one, or the old one."""
        if self.is_folder:
            return contents(path) == (NEW if new else OLD)
        return path.read_bytes() == (b"new" if new else b"old")

    @property
    def is_untouched(self) -> bool:
        return self.holds(self.path, new=False) and names(self.path.parent) == ["out"]

    def remove(self) -> None:
        if self.is_folder:
            shutil.rmtree(self.path)
        else:
            self.path.unlink()


@pytest.fixture(params=["file", "folder, exchanged", "folder, put aside"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    if request.param == "folder, put aside":  # as where the file system cannot exchange two names
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    found = Target(tmp_path / "in" / "out", request.param)
    found.path.parent.mkdir()
    if found.is_folder:
        found.path.mkdir()
        for name, data in OLD.items():
            (found.path / name).write_bytes(data)
    else:
        found.path.write_bytes(b"old")
    return found


def raising(error: BaseException) -> Computed:
    def read(offset: int, length: int) -> bytes:
        raise error

    return Computed(4, read)


def test_it_is_not_replaced_unasked(target: Target) -> None:
    with pytest.raises(OutputExists, match="already exists") as caught:
        target.write(overwrite=False)
    three_parts(caught.value)
    assert target.is_untouched


def test_the_target_of_a_link_is_replaced(target: Target, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("in/out")
    refused(OutputExists, tmp_path, lambda: target.write(path=tmp_path / "link", overwrite=False))
    target.write(path=tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and target.holds(target.path, new=True)
    assert names(tmp_path / "in") == ["out"] and names(tmp_path) == ["in", "link"]


def test_someone_else_makes_it_meanwhile(target: Target) -> None:
    target.remove()
    with pytest.raises(OutputExists, match="created by another process"):
        target.write(overwrite=False, verify=lambda path: target.make(b"theirs"))
    theirs = target.path / "theirs" if target.is_folder else target.path
    assert theirs.read_bytes() == b"theirs" and names(target.path.parent) == ["out"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt), (SystemExit(143), SystemExit), (Corrupt("no", "why"), Corrupt),
        (MemoryError(), MemoryError), (OSError(errno.EIO, ""), FileProblem), (OSError(errno.ENOSPC, ""), DiskFull),
        (OSError(errno.EDQUOT, ""), DiskFull), (OSError(errno.EFBIG, ""), DiskFull),
    ],
)  # fmt: skip
def test_nothing_is_left_of_a_run_that_failed(
    error: BaseException, expected: type[BaseException], target: Target
) -> None:
    for path in (target.path, target.path.with_name("fresh")):
        with pytest.raises(expected):
            target.write(raising(error), path=path)
        assert target.is_untouched


@pytest.mark.parametrize("call", ["fsync", "open", "pwrite", "link", "replace", "mkdir", "rename"])
def test_a_failing_system_call_leaves_the_old_one(call: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    if call in (("link", "replace") if target.is_folder else ("mkdir", "rename")):
        return
    real, number = (
        getattr(os, call),
        errno.EACCES if call in ("open", "mkdir") else errno.EIO,
    )  # root may write anywhere

    def failing(first: Any, *args: Any, **options: Any) -> Any:
        if call == "open" and not args[0] & os.O_CREAT:
            return real(first, *args, **options)
        raise OSError(number, "broken disk")

    monkeypatch.setattr(os, call, failing)
    if call == "link":
        target.remove()
        target.write(overwrite=False)  # falls back to a rename
        assert target.holds(target.path, new=True) and names(target.path.parent) == ["out"]
        return
    with pytest.raises(FileProblem) as caught:
        target.write()
    assert os.strerror(number) in caught.value.what and f"{target.path} is as it was" in caught.value.why
    assert ("permissions" in caught.value.why) == isinstance(caught.value, PermissionError) == (number == errno.EACCES)
    assert target.is_untouched


def test_a_folder_above_that_cannot_be_synced_is_noted(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    above, real = target.path.parent.stat().st_ino, os.fsync

    def failing(fd: int) -> None:
        if os.fstat(fd).st_ino == above:
            raise OSError(errno.EIO, "broken disk")
        real(fd)

    monkeypatch.setattr(os, "fsync", failing)
    (note,) = target.write()
    assert note.code == "not-synced" and "complete, but may not be durable" in note.message
    assert target.holds(target.path, new=True) and names(target.path.parent) == ["out"]


def test_everything_is_on_disk_before_it_is_visible(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def watched(module: Any, name: str) -> None:
        real = getattr(module, name)

        def seen(*args: Any, **options: Any) -> Any:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            done = real(*args, **options)
            events.append("sync folder" if is_folder else name)
            return done

        monkeypatch.setattr(module, name, seen)

    for name in ("pwrite", "fsync", "link", "replace", "rmdir"):
        watched(os, name)
    watched(folders, "_commit")
    target.write()
    if target.is_folder:
        assert events == ["pwrite", "fsync"] * 2 + ["sync folder", "_commit", "sync folder", "rmdir"]
    else:
        replace_file(b"new", target.path.with_name("other"))
        assert events == ["pwrite", "fsync", "replace", "sync folder", "pwrite", "fsync", "link", "sync folder"]


def test_impossible_targets_are_refused(target: Target) -> None:
    above = target.path.parent
    (above / "file").write_bytes(b"old")
    (above / "loop").symlink_to("loop")
    os.mkfifo(above / "fifo")
    stream = os.pipe()
    (above / "stdout").symlink_to(f"/dev/fd/{stream[1]}")
    check = partial(check_folder, overwrite=True) if target.is_folder else partial(check_target, overwrite=True)
    odd = ("." if not target.is_folder else "file", "x" * 300, "nul\0")
    for name in (*"missing/out file/out fifo stdout loop".split(), *odd):
        for write in (lambda path: target.write(path=path), check):
            with pytest.raises(FileProblem) as caught:
                write(above / name)
            assert caught.value.code == "io" and caught.value.what.startswith(("cannot write", "cannot use")), name
        assert name != "missing/out" or "mkdir -p" in caught.value.fix
    for descriptor in stream:
        os.close(descriptor)
    assert names(above) == ["fifo", "file", "loop", "out", "stdout"] and (above / "file").read_bytes() == b"old"


def test_what_verify_refuses_is_not_put_in_place(target: Target) -> None:
    def refuse(path: str) -> None:
        assert target.holds(Path(path), new=True) and Path(path).parent == target.path.parent
        raise VerifyFailed("differs", "why")

    with pytest.raises(VerifyFailed):
        target.write(verify=refuse)
    assert target.is_untouched


@pytest.mark.parametrize("size", [1, 1000, 3_000_000])
def test_a_checksum_that_does_not_match_on_the_way(size: int, target: Target, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(size))
    for data in (FileRange(Source(tmp_path / "data"), 0, size), InlineBytes(bytes(size))):
        with pytest.raises(Corrupt, match="weights does not match"):
            target.write(Checksummed(data, Crc(expected=1, name="weights")))
        assert target.is_untouched


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, 10),
        lambda path: os.truncate(path, 300_000),
        lambda path: time.sleep(0.01) or path.write_bytes(b"\1" * 200_000),
    ],
    ids=["shorter", "longer", "rewritten"],
)
def test_an_input_that_changes_meanwhile_is_refused(
    change: Callable[[Path], None], target: Target, tmp_path: Path
) -> None:
    (tmp_path / "data").write_bytes(bytes(200_000))
    source = Source(tmp_path / "data")
    with pytest.raises(FileChanged):
        target.write(FileRange(source, 0, 200_000), inputs=[source], verify=lambda _: change(tmp_path / "data"))
    assert target.is_untouched


def test_not_enough_room_is_said_before_anything_is_written(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    free_space(monkeypatch, 1 << 20)
    halves = [Computed(size, raising(AssertionError("asked")).read) for size in (1 << 19, (1 << 19) + 1)]
    with pytest.raises(DiskFull, match=r"bytes, .* are free"):
        target.write(*halves)
    assert target.is_untouched


# Several at once, and those that were killed --------------------------------------------------------------------------

WRITER = """
    import sys, time
    from pathlib import Path
    from ckptool.checkpoint import Computed, InlineBytes
    from ckptool.checkpoint.blocks import Plan
    from ckptool.output import folders, replace_file
    kind, target = sys.argv[1:3]
    if kind == "folder, put aside":
        folders._exchange = lambda one, other: False

    def write(*segments, names="ab"):
        if kind == "file":
            return replace_file(Plan({"": segments}), target, overwrite=True)
        others = {"a", "b", *(f"{i}-{m}" for i in range(4) for m in range(3))}
        return folders.replace_folder(Plan(dict.fromkeys(names, segments)), target, overwrite=True, replaceable=others)
    """
WAITING = """
    def wait(at, n):
        Path(sys.argv[3]).touch()
        time.sleep(60)
        return b"y" * n
    write(InlineBytes(b"x" * 2_000_000), Computed(5, wait))
    """


@pytest.fixture
def live(target: Target, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A writer that has its temporary file or folder, and waits in the middle."""
    process = python_process(WRITER, WAITING, target.kind, target.path, tmp_path / "mark")
    deadline = time.monotonic() + 30
    while not (tmp_path / "mark").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("refused", [False, True])
def test_the_next_run_sweeps_what_a_killed_one_left(
    refused: bool, live: subprocess.Popen[bytes], target: Target
) -> None:
    live.kill()
    live.wait()
    assert len(temporaries(target.path.parent)) == 1 and target.holds(target.path, new=False)
    if refused:
        with pytest.raises(OutputExists):
            target.write(overwrite=False)
        assert target.is_untouched
        return
    another = replace(target, path=target.path.with_name("another"), kind="file" if target.is_folder else "folder")
    another.write()  # nobody may ever write to "out" again, nor anything of its kind
    assert names(target.path.parent) == ["another", "out"] and another.holds(another.path, new=True)


def test_what_a_living_writer_has_is_left_alone(live: subprocess.Popen[bytes], target: Target) -> None:
    for path in (target.path, target.path.with_name("another")):
        target.write(path=path)
        assert len(temporaries(target.path.parent)) == 1 and target.holds(path, new=True)
    live.kill()
    live.wait()
    target.write()
    assert names(target.path.parent) == ["another", "out"]


def test_an_interrupted_process_leaves_nothing_behind(live: subprocess.Popen[bytes], target: Target) -> None:
    live.send_signal(signal.SIGINT)
    assert live.wait(20) != 0 and target.is_untouched


def together(work: Callable[[bytes], object]) -> list[threading.Thread]:
    """Threads that do the work for a letter each."""
    writers = [threading.Thread(target=work, args=(letter,)) for letter in (b"a", b"b", b"c", b"d")]
    for writer in writers:
        writer.start()
    return writers


@pytest.mark.parametrize("target", ["file", "folder, exchanged"], indirect=True)
def test_of_many_writers_one_wins_completely(target: Target) -> None:
    target.remove()
    problems, written = list[BaseException](), {letter: [f"{letter}{i}" for i in range(3)] for letter in "abcd"}

    def write(letter: bytes) -> None:
        data = letter * 50_000
        segments = [InlineBytes(data), Computed(50_000, lambda at, n: data[at : at + n])]
        files = dict.fromkeys(written[letter.decode()] if target.is_folder else [""], segments)
        options = {"replaceable": [name for those in written.values() for name in those]} if target.is_folder else {}
        try:
            for _ in range(6):
                (replace_folder if target.is_folder else replace_file)(
                    Plan(files), target.path, overwrite=True, **options
                )
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    writers = together(write)
    while any(writer.is_alive() for writer in writers):  # a reader sees what one of them wrote
        if target.path.exists():
            place = os.open(target.path, os.O_RDONLY)
            seen = (
                "".join(os.listdir(place)).translate({ord(digit): None for digit in "012"}) if target.is_folder else ""
            )
            data = b"" if target.is_folder else os.read(place, 200_000)
            os.close(place)
            assert len(set(seen)) <= 1 and (target.is_folder or (len(data) == 100_000 and len(set(data)) == 1))
    assert problems == [] and names(target.path.parent) == ["out"]
    assert not target.is_folder or [*contents(target.path)] in written.values()


@pytest.mark.parametrize("target", ["file", "folder, exchanged"], indirect=True)
def test_of_several_first_writers_one_wins(target: Target) -> None:
    target.remove()
    results: list[bytes] = []

    def write(letter: bytes) -> None:
        try:
            target.write(InlineBytes(letter * 1000), overwrite=False)
            results.append(letter)
        except OutputExists:
            results.append(b"")

    for writer in together(write):
        writer.join()
    (winner,) = filter(None, results)
    file = target.path / "c" if target.is_folder else target.path
    assert len(results) == 4 and file.read_bytes().endswith(winner * 1000) and names(target.path.parent) == ["out"]


# Files ----------------------------------------------------------------------------------------------------------------


def file_plan(data: bytes = b"new") -> Plan:
    return Plan({"": [InlineBytes(data)]})


# What there is at the target ------------------------------------------------------------------------------------------


def test_names_that_are_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("real")  # which leads to nothing yet
    for target in ("link", "é" * 127, "./relative"):
        replace_file(file_plan(), target)
        assert Path(target).read_bytes() == b"new"
    assert Path("link").is_symlink() and names(tmp_path) == ["link", "real", "relative", "é" * 127]


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    replace_file(file_plan(), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"new" and names(tmp_path) == ["out"]
    two = tmp_path / "two"
    with pytest.raises(OutputExists):
        replace_file(file_plan(), two, verify=lambda path: two.write_bytes(b"theirs") and None)
    assert two.read_bytes() == b"theirs" and names(tmp_path) == ["out", "two"]


# What goes wrong ------------------------------------------------------------------------------------------------------


# Temporary files -----------------------------------------------------------------------------------------------------


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
