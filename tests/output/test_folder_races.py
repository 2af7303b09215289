"""Several writers of one folder at once, and those that were killed: one complete winner, and nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptool.checkpoint import InlineBytes
from ckptool.checkpoint.plan import Plan
from ckptool.errors import FileProblem, OutputExists
from ckptool.output import durable, folders
from ckptool.output.folders import replace_folder
from tests.support.files import contents
from tests.support.folder_plans import NEW, OLD, names, plan
from tests.support.hostile_system import temporaries
from tests.support.processes import python_process

ROOT = Path(__file__).parents[2]


HEAD = """
    import os, sys, time
    from pathlib import Path
    from ckptool.checkpoint import Computed, InlineBytes
    from ckptool.checkpoint.plan import Plan
    from ckptool.output import folders
    from ckptool.output.folders import replace_folder
    target = Path(sys.argv[1])
    if sys.argv[2] == "put aside":
        folders._exchange = lambda one, other: False
    """


WAITING = """
    def wait(at, n):
        Path(sys.argv[3]).touch()
        time.sleep(60)
        return b"y" * n
    replace_folder(Plan({"a": [InlineBytes(b"a")], "b": [Computed(5, wait)]}), target, overwrite=True)
    """


KILLED = """
    for n in range(int(sys.argv[3]), 100_000):
        data = b"%08d" % n
        shards = {f"{i}-{n % 3}": [InlineBytes(data),
            Computed(40_000, lambda at, size: (data * 5_000)[at : at + size])] for i in range(4)}
        replace_folder(Plan(shards), target, overwrite=True,
            replaceable={f"{i}-{m}" for i in range(4) for m in range(3)})
        print(n, flush=True)
    """


@pytest.fixture
def live(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A writer that has its temporary folder, and waits in the middle."""
    process = python_process(HEAD, WAITING, tmp_path / "out", "exchanged", tmp_path / "mark")
    deadline = time.monotonic() + 30
    while not (tmp_path / "mark").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    yield process
    process.kill()
    process.communicate()


def test_the_next_run_sweeps_what_a_killed_one_left(live: subprocess.Popen[bytes], tmp_path: Path) -> None:
    live.kill()
    live.wait()
    assert len(temporaries(tmp_path)) == 1 and not (tmp_path / "out").exists()
    replace_folder(plan(), tmp_path / "another")  # nobody may ever write to "out" again
    assert temporaries(tmp_path) == [] and contents(tmp_path / "another") == NEW


def test_a_file_of_the_same_name_sweeps_it_too(live: subprocess.Popen[bytes], tmp_path: Path) -> None:
    from ckptool.output import replace_file

    live.kill()
    live.wait()
    replace_file(Plan({"": [InlineBytes(b"new")]}), tmp_path / "out")
    assert temporaries(tmp_path) == [] and (tmp_path / "out").read_bytes() == b"new"


def test_a_living_writers_temporary_folder_is_left_alone(live: subprocess.Popen[bytes], tmp_path: Path) -> None:
    replace_folder(plan(), tmp_path / "out")
    assert len(temporaries(tmp_path)) == 1 and contents(tmp_path / "out") == NEW
    live.kill()
    live.wait()
    replace_folder(plan(OLD), tmp_path / "out", overwrite=True, replaceable=["c"])
    assert temporaries(tmp_path) == [] and contents(tmp_path / "out") == OLD


def test_an_interrupted_process_leaves_nothing_behind(live: subprocess.Popen[bytes], tmp_path: Path) -> None:
    live.send_signal(signal.SIGINT)
    assert live.wait(20) != 0
    assert temporaries(tmp_path) == [] and not (tmp_path / "out").exists()


def kill_folder_writers(folder: Path, times: int, way: str) -> None:
    chosen, target, last = random.Random(times), folder / "out", 0
    for _ in range(times):
        process = python_process(HEAD, KILLED, target, way, last)
        assert process.stdout is not None
        last = int(process.stdout.readline())
        time.sleep(chosen.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        out = process.stdout.read().split()
        process.communicate()
        last = int(out[-1]) if out else last
        if way == "put aside" and not target.exists():
            folders._put_back(str(target))  # what the next run does first
        found = contents(target)
        (data,) = {value[:8] for value in found.values()}
        assert int(data) in (last, last + 1), (data, last)
        assert found == {f"{i}-{int(data) % 3}": data * 5_001 for i in range(4)}
        assert len(names(folder)) <= 3
        last += 1
    replace_folder(plan(), target, overwrite=True, replaceable=[f"{i}-{m}" for i in range(4) for m in range(3)])
    assert names(folder) == ["out"]


@pytest.mark.parametrize("how", ["exchanged", "put aside"])
def test_killed_at_any_time_the_folder_is_old_or_new(how: str, tmp_path: Path) -> None:
    kill_folder_writers(tmp_path, 5, how)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["exchanged", "put aside"])
def test_killed_at_any_time_two_hundred_times(how: str, tmp_path: Path) -> None:
    kill_folder_writers(tmp_path, 200, how)


def test_a_folder_put_aside_by_a_killed_run_is_put_back(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names cannot be exchanged there is an instant without a folder; the next run puts the old one back
    first."""
    aside = Path(durable.hidden_name(str(old), folders.ASIDE))
    old.rename(aside)
    with pytest.raises(OutputExists):
        replace_folder(plan(), old)
    assert contents(old) == OLD and names(old.parent) == ["out"]
    aside.mkdir()
    (aside / "a").write_bytes(b"older")
    replace_folder(plan(), old, overwrite=True, replaceable=["b"])
    assert contents(old) == NEW and names(old.parent) == ["out"]
    aside.mkdir()
    (aside / "a").write_bytes(b"older")
    old.rename(old.parent / "gone")
    old.write_bytes(b"a file")
    with pytest.raises(FileProblem):
        replace_folder(plan(), old, overwrite=True)
    assert contents(aside) == {"a": b"older"}  # it may be the only copy


def test_of_many_writers_one_wins_completely(tmp_path: Path) -> None:
    target, problems = tmp_path / "out", []
    allowed = [f"{letter}{i}" for letter in "abc" for i in range(3)]

    def write(letter: str) -> None:
        data = letter.encode() * 20_000
        try:
            for _ in range(8):
                replace_folder(
                    plan({f"{letter}{i}": data for i in range(3)}), target, overwrite=True, replaceable=allowed
                )
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in "abc"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):  # a reader that lists the folder sees the files of one of them
        if target.exists():
            folder = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
            seen = os.listdir(folder)
            os.close(folder)
            assert len({name[0] for name in seen}) <= 1
    assert problems == [] and names(tmp_path) == ["out"] and len(contents(target)) == 3


def test_a_folder_swept_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is made first and locked then: in between, a second writer takes it for one that was left."""
    target, make, swept = tmp_path / "out", os.mkdir, []

    def mkdir(path: str, *more: int) -> None:
        make(path, *more)
        if not swept:
            durable.sweep_folder(str(tmp_path))
            swept.append(path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    replace_folder(plan(), target)
    assert not os.path.exists(swept[0]) and contents(target) == NEW and names(tmp_path) == ["out"]


def test_two_runs_that_remove_one_folder_leave_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    for name in "abc":
        (folder / name).write_bytes(b"x")
    unlink, listed = os.unlink, os.listdir

    def names_then_one_goes(folder: int) -> list[str]:
        found = listed(folder)
        unlink(found[0], dir_fd=folder)
        return found

    monkeypatch.setattr(os, "listdir", names_then_one_goes)
    durable.remove(str(folder))
    assert not folder.exists()


@pytest.mark.parametrize("removing", ["sweep", "remove"])
@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_folder_that_is_swapped_for_a_link_while_it_is_removed_leads_nowhere(
    removing: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write into the folder above can put a link to another folder in its place at any instant."""
    target, mine = tmp_path / "out", tmp_path / "mine"
    left = Path(durable.hidden_name(str(target)))
    for folder in (left, mine):
        folder.mkdir()
        (folder / "a.bin").write_bytes(b"x")

    def swapped() -> None:
        if not left.is_symlink():
            left.rename(tmp_path / "aside")
            left.symlink_to(mine)

    real = getattr(os, "listdir" if moment == "between" else "lstat")

    def then_swapped(place: Any, *args: Any) -> Any:
        found = real(place, *args)
        if place != str(tmp_path):
            swapped()
        return found

    monkeypatch.setattr(os, "listdir" if moment == "between" else "lstat", then_swapped)
    if removing == "sweep":
        durable.sweep_folder(str(tmp_path))
    else:
        durable.remove(str(left))
    assert (mine / "a.bin").read_bytes() == b"x"


def test_a_folder_that_another_writer_makes_meanwhile_is_one_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, real = tmp_path / "out", folders.check_target

    def meanwhile(path: str, *, overwrite: bool) -> str:
        target.mkdir(exist_ok=True)
        return real(path, overwrite=overwrite)

    monkeypatch.setattr(folders, "check_target", meanwhile)
    assert folders.check_folder(target, overwrite=True) == str(target)
