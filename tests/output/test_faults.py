"""Every verb that writes, stopped or failing at every file-system event: the old file or the new one, and nothing that
stays.

A sample here; `make soak` goes through all points.
"""

from __future__ import annotations

import errno
import io
import json
import pickle
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch

from ckptool.formats import SHARDED, WRITERS
from tests.support.faults import TEMPORARY, Bench, Ended, FaultPoint, error_points, kill_points, signal_points
from tests.support.files import load
from tests.support.looped import looped
from tests.support.same import assert_same_objects
from tests.support.writing_cases import CASES, OLD, SAME, Case, Files


class Trial:
    """One case in a folder of its own: what was there, what a run without faults makes of it, and what is there after
    one with."""

    def __init__(self, case: Case, bench: Bench, folder: Path) -> None:
        import shlex

        self.case, self.bench, self.folder = case, bench, folder
        self.words = shlex.split(case.words)
        self.before = case.files() | ({case.changes[0]: case.old} if case.old is not None else {})
        self.reset()
        ended = bench.run(folder, self.words, "trace")
        assert ended.code == case.code, ended
        self.events, self.trace = bench.recorded()
        self.after = self.found()
        assert not temporaries_among(self.after) and set(case.changes) <= set(self.after)
        assert self.others(self.after) == self.others(self.before)
        for name, data in [*self.before.items(), *self.after.items()]:
            if data != OLD and (self.case.code == 0 or name != "in.pt"):
                opens(name, data, self.folder)

    def reset(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for name, data in self.before.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(data)
        for name, target in self.case.link.items():
            (self.folder / name).symlink_to(target)

    def found(self) -> Files:
        """What is there, but for links, which must be as they were."""
        for name, target in self.case.link.items():
            assert (self.folder / name).readlink() == Path(target)
        files = [path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}

    def empty_folders(self) -> list[str]:
        """What a run that made a folder may leave only where it is killed."""
        return [str(path) for path in self.folder.rglob("*") if path.is_dir() and not any(path.iterdir())]

    def run(self, point: FaultPoint) -> Ended:
        self.reset()
        return self.bench.run(self.folder, self.words, point.how, point.at, point.number)

    def others(self, files: Files) -> Files:
        """What no run may change."""
        inside = f"{self.case.folder or '?'}/"
        return {
            name: data for name, data in files.items() if name not in self.case.changes and not name.startswith(inside)
        }

    def states(self, files: Files) -> set[str]:
        """Whether each changed file is `old` or `new`; fails where one is neither, or anything else is not as it
        was."""
        kept = {name: data for name, data in files.items() if not is_temporary(name)}
        assert self.others(kept) == self.others(self.before)
        if self.case.folder:
            old, new, now = (
                {n: d for n, d in some.items() if n not in self.others(some)}
                for some in (self.before, self.after, kept)
            )
            assert now in (old, new), f"the folder is neither the old one nor the new one: {list(now)}"
            return {"new" if now == new else "old"}
        return {self.state(name, kept.get(name)) for name in self.case.changes}

    def state(self, name: str, data: bytes | None) -> str:
        if data == self.after[name]:
            return "new"
        if data == self.before.get(name):
            return "old"
        assert data is not None and name in SAME, f"{name} is neither the old file nor the new one"
        found = opens(name, data, self.folder)  # an edit in place that was stopped: readers find one of the two
        for state, whole in (("old", self.before[name]), ("new", self.after[name])):
            if same(found, opens(name, whole, self.folder)):
                return state
        raise AssertionError(f"{name} opens as neither the old file nor the new one")

    def finish(self) -> None:
        """The next run works, and nothing is left over."""
        if self.found() == self.after:
            return
        ended = self.bench.run(self.folder, [*self.words, *self.case.again.split()])
        assert ended.code == self.case.code, ended
        files = self.found()
        assert not temporaries_among(files) and self.states(files) == {"new"}


def is_temporary(name: str) -> bool:
    return any(part.startswith(TEMPORARY) for part in name.split("/"))


def temporaries_among(files: Files) -> set[str]:
    """The temporary files and folders."""
    return {name[: name.find("/", name.index(TEMPORARY)) + 1] or name for name in files if is_temporary(name)}


def opens(name: str, data: bytes, folder: Path) -> Any:
    """What stock torch or safetensors finds in a file of these bytes."""
    if name.endswith((".json", ".npy")):
        return json.loads(data) if name.endswith("n") else numpy.load(io.BytesIO(data))
    if name.endswith(".safetensors"):
        return safetensors.torch.load(data)
    if name.endswith(".metadata"):
        return pickle.loads(data).state_dict_metadata
    if name.endswith(".distcp"):
        return data  # as many zips as the table says, one after the other
    path = folder.with_name("opened.pt")
    path.write_bytes(data)
    return load(path)


def same(a: Any, b: Any) -> bool:
    try:
        assert_same_objects(a, b)
    except AssertionError:
        return False
    return True


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    yield bench
    bench.close()


def killed(trial: Trial, point: FaultPoint) -> None:
    ended = trial.run(point)
    files = trial.found()
    if ended.code == trial.case.code:  # threads of checksums were quicker this time: that event was one too far
        assert trial.states(files) == {"new"}
        return
    assert ended.code == -signal.SIGKILL, ended
    assert len(temporaries_among(files)) <= 1
    trial.states(files)
    trial.finish()


def failed(trial: Trial, point: FaultPoint) -> None:
    ended = trial.run(point)
    files = trial.found()
    states = trial.states(files)
    assert ended.code in (trial.case.code, 2), ended
    if point.how == "error" or "could not be undone" not in ended.err:
        assert states == ({"old"} if ended.code == 2 else {"new"}), (ended, states)
    if point.how == "error":
        events, _ = trial.bench.recorded()  # of this run: sums in threads let it write earlier or later
        event = events[point.at] if point.at < len(events) else point.event
        sweeping = event.startswith(("unlink", "remove", "flock", "listdir", "open TEMPORARY"))
        assert sweeping or not temporaries_among(files), "a temporary file was left"
        # One whose lock another has is swept by that one, as a file is.
        assert event.startswith(("rmdir", "flock")) or not trial.empty_folders(), "a new folder was left"
    assert "Traceback" not in ended.err and "error[bug]" not in ended.err, ended
    if ended.code == 2:
        assert ended.err.startswith("error["), ended
        if point.number in FULL_WORDS and "cannot write" in ended.err:
            assert FULL_WORDS[point.number] in ended.err and (
                " is as it was" in ended.err or "Nothing was written" in ended.err
            )
        trial.finish()


FULL_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your quota is used up",
    errno.EFBIG: "the file size limit was reached",
}


def stopped(trial: Trial, point: FaultPoint) -> None:
    ended = trial.run(point)
    files = trial.found()
    (state,) = trial.states(files)
    assert not temporaries_among(files) and not trial.empty_folders() and "Traceback" not in ended.err, ended
    assert ended.code in (128 + point.number, trial.case.code), ended
    if ended.code == trial.case.code:
        assert state == "new"
    elif state == "old":
        assert all(files.get(name) == trial.before.get(name) for name in trial.case.changes), (
            "bytes were left in the file"
        )


KINDS = {"killed": (killed, kill_points), "failed": (failed, error_points), "stopped": (stopped, signal_points)}


def sweep(kind: str, trial: Trial, at_most: int | None = None) -> int:
    """Tries the points of one kind, or so many of them, chosen by a seed; returns how many."""
    check, points_of = KINDS[kind]
    points = points_of(trial.events)
    if trial.case.judges:
        points = [point for point in points if not (point.how == "error" and point.event.startswith("pread"))]
    if at_most is not None:
        points = random.Random(f"{kind} {trial.case.words}").sample(points, at_most)
    for point in points:
        try:
            check(trial, point)
        except AssertionError as error:
            raise AssertionError(f"{trial.case.words}: {point}: {error}") from error
    return len(points)


@looped("case", CASES, here=0.6)
def test_a_fault_at_a_sample_of_points_leaves_old_or_new(case: str, bench: Bench, tmp_path: Path) -> None:
    trial = Trial(CASES[case], bench, tmp_path / "work")
    for kind in KINDS:
        sweep(kind, trial, 1)
    power_lost(trial, 10)
    assert trial.run(FaultPoint("short", -1, "")).code == trial.case.code and trial.found() == trial.after


def test_every_container_that_is_a_folder_is_written_here_with_faults() -> None:
    """A new one, and over another: add its two cases above."""
    for container in (each for each in WRITERS if each.writes_folder):
        asks = {SHARDED: "--shard-size"}.get(container.name, (*container.suffixes, f"--to {container.name}")[0])
        over = {" -f" in case.words for case in CASES.values() if case.folder and asks in case.words}
        assert over == {False, True}, container.name


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_a_fault_at_every_point_leaves_old_or_new(case: str, bench: Bench, tmp_path: Path) -> None:
    """Over all commands some 8,000: a kill at, within and after every event, every error at every event, every
    signal."""
    trial = Trial(CASES[case], bench, tmp_path / "work")
    counts = {kind: sweep(kind, trial) for kind in KINDS}
    power_lost(trial, 500)
    print(f"{case}: {counts}")
    assert counts["killed"] >= 20 and sum(counts.values()) >= 100


def power_lost(trial: Trial, times: int) -> None:
    """Row 157: after a power cut at any operation, with any of what was not synced lost, the file is the old one or the
    new."""
    assert not [operation for operation in trial.trace if operation[0] == "unknown"]
    chosen = random.Random(trial.case.words)
    stops = [*range(len(trial.trace) + 1)]
    names = dict(trial.before)
    for _ in range(times):
        files = after_power_loss(names, trial.trace, chosen.choice(stops), chosen)
        trial.states({name: data for name, data in files.items() if not is_temporary(name)})
    assert trial.states(after_power_loss(names, trial.trace, len(trial.trace), chosen)) == {"new"}, "synced to the end"


@pytest.mark.soak
def test_a_thousand_kills_at_random_leave_old_or_new(bench: Bench, tmp_path: Path) -> None:
    chosen = random.Random(1000)
    trials = [Trial(case, bench, tmp_path / f"{number}") for number, case in enumerate(CASES.values())]
    landed = 0
    for number in range(1000):
        trial = trials[number % len(trials)]
        trial.reset()
        ended = bench.run(trial.folder, trial.words, "shot", chosen.uniform(0, 0.06))
        landed += ended.code == -signal.SIGKILL
        assert ended.code in (trial.case.code, -signal.SIGKILL), ended
        files = trial.found()
        assert len(temporaries_among(files)) <= 1
        trial.states(files)
        trial.finish()
    print(f"{landed} of 1000 kills landed before the end")
    assert landed >= 300


# What a disk may hold after the power is lost: any of what was written since the last sync ---------------------------


def after_power_loss(
    before: dict[str, bytes], trace: list[tuple[Any, ...]], stop: int, chosen: random.Random
) -> dict[str, bytes]:
    """What the disk may hold when power is lost before operation `stop`.

    Of the writes to a file since its last sync any may be missing; of the changes of names since the folder's last
    sync, any of the later ones (each folder by itself). A file keeps its contents under whatever names it has.
    """
    files = {number: File(bytearray(data), []) for number, data in enumerate(before.values())}
    now: dict[str, int] = dict(zip(before, files, strict=True))  # name -> file, as processes see it; folders are -1
    now |= {name.rpartition("/")[0]: -1 for name in before if "/" in name}
    safe = dict(now)  # the same on the disk
    changes: dict[str, list[Callable[[dict[str, int]], object]]] = {}  # of the names in a folder, since it was synced
    for kind, name, *about in trace[:stop]:
        waiting = changes.setdefault(name.rpartition("/")[0] or ".", [])
        if kind == "create" and name not in now:
            files[len(files)] = File(bytearray(), [])
            now[name] = len(files) - 1
            waiting.append(partial(_set, name, now[name]))
        elif kind in ("write", "size"):
            files[now[name]].pending.append((kind, *about))
        elif kind == "sync" and now.get(name, -1) >= 0:
            files[now[name]].settle()
        elif kind == "sync":
            for change in changes.pop(name, []):
                change(safe)
        elif kind == "mkdir":
            now[name] = -1
            waiting.append(partial(_set, name, -1))
        elif kind in ("unlink", "rmdir"):
            del now[name]
            waiting.append(partial(_drop, name))
        elif kind == "link":
            now[about[0]] = now[name]
            waiting.append(partial(_set, about[0], now[name]))
        elif kind in ("rename", "exchange"):
            table = {name: about[0]} | ({about[0]: name} if kind == "exchange" else {})
            _move(table, now)
            waiting.append(partial(_move, table))
    for waiting in changes.values():
        for change in waiting[: chosen.randrange(len(waiting) + 1)]:
            change(safe)
    folders = {name for name, number in safe.items() if number == -1} | {""}
    return {
        name: files[number].some(chosen)
        for name, number in safe.items()
        if number >= 0 and name.rpartition("/")[0] in folders
    }


def _set(name: str, number: int, names: dict[str, int]) -> None:
    names[name] = number


def _drop(name: str, names: dict[str, int]) -> None:
    names.pop(name, None)


def _move(table: dict[str, str], names: dict[str, int]) -> None:
    """Renames, all at once, files and folders with what is in them; what had the new names is gone."""
    moved = {}
    for name in list(names):
        for old, new in table.items():
            if name == old or name.startswith(f"{old}/"):
                moved[new + name[len(old) :]] = names.pop(name)
                break
    for name in list(names):
        if any(name == new or name.startswith(f"{new}/") for new in table.values()):
            del names[name]
    names.update(moved)


@dataclass
class File:
    """Bytes that are on the disk, and what was done to them since."""

    data: bytearray
    pending: list[tuple[Any, ...]]

    def settle(self) -> None:
        for operation in self.pending:
            _apply(self.data, operation)
        self.pending.clear()

    def some(self, chosen: random.Random) -> bytes:
        data = bytearray(self.data)
        share = chosen.choice([0, 0.3, 0.7, 1])
        for operation in self.pending:
            if chosen.random() < share:
                _apply(data, operation)
        return bytes(data)


def _apply(data: bytearray, operation: tuple[Any, ...]) -> None:
    if operation[0] == "size":
        del data[operation[1] :]
        data.extend(bytes(operation[1] - len(data)))
    else:
        _, at, new = operation
        data.extend(bytes(max(0, at - len(data))))
        data[at : at + len(new)] = new
