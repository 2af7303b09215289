"""The folder of a run: its checkpoints, each with a sidecar of facts about it, its history and its metrics.

A checkpoint is a file, `step-N.pt`, or if several processes wrote it, a folder `step-N.dcp` of files, whose sidecar has
the size and the sha256 of each.

Commit order: the checkpoint is written under another name and synced; its sidecar is written, synced and renamed; then
the checkpoint gets its name, which is the commit; the folder is synced; only then old ones are pruned. Resume takes the
newest whole one, by step. No file that the run itself did not write is ever changed or deleted: it is named.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ckptool import formats
from ckptool.checkpoint import Checkpoint, FileRange
from ckptool.checkpoint.blocks import sha256_of
from ckptool.checkpoint.files import Source, json_or_none, open_regular
from ckptool.checkpoint.paths import file_problem
from ckptool.commands import Command, arg, command
from ckptool.errors import CkptoolError, Conflict, Corrupt, FileProblem, NoneValid, counted, listed, printable
from ckptool.output import replace_file
from ckptool.output.folders import NewFolder, remove_folder
from ckptool.training import CHECKPOINTS, HISTORY, METRICS

if TYPE_CHECKING:
    from ckptool.training.parallel import World
    from ckptool.training.run_folder import Lock

_FILE = re.compile(r"step-(\d{8,})\.(pt|dcp|json)")
OTHER_RUN = arg(set="run=OTHER")  # what to type to give a run another folder
LOGGED = "logged_bytes"  # in a sidecar: the size of metrics.jsonl when the checkpoint was taken
_PART = re.compile(r"\.metadata|__\d+_\d+\.distcp")  # a file of torch.distributed.checkpoint


# One checkpoint ------------------------------------------------------------------------------------------------------


def name_of(step: int, ending: str = ".pt") -> str:
    """The name of the file, or folder, of the state after `step` steps."""
    return f"step-{step:08d}{ending}"


def sidecar_of(path: str) -> str:
    return os.path.splitext(path)[0] + ".json"


@dataclass(frozen=True, slots=True)
class SavedState:
    """A checkpoint of a run. sidecar: the facts recorded with it; None if it is missing or damaged."""

    step: int
    path: str
    sidecar: dict[str, Any] | None

    @property
    def metrics(self) -> dict[str, float]:
        metrics = (self.sidecar or {}).get("metrics")
        numbers = metrics.items() if isinstance(metrics, dict) else ()
        return {key: value for key, value in numbers if isinstance(value, (int, float))}

    @property
    def is_stop(self) -> bool:
        """True if it was saved only because the run was asked to stop."""
        return (self.sidecar or {}).get("stop") is True


def commit_file(tree: Any, path: str, sidecar: str, header: dict[str, Any], facts: dict[str, Any]) -> SavedState:
    """Writes a tree, and facts about it in a sidecar, which is renamed first. header: its first facts, with the `step`.

    Raises `DiskFull`, `FileProblem`, or `Unsupported` for what could not be read back; an existing file then stays.
    """
    from ckptool.bridge.from_live import from_torch

    running = StreamingSha256()
    plan = formats.by_name(formats.DEFAULT).write(Checkpoint(from_torch(tree), formats.DEFAULT))
    record = {**header, "bytes": plan.nbytes, **_replaced(path, sidecar)}

    def describe(temporary: str) -> None:
        record.update({"sha256": running.result(temporary), **facts})
        write_json(sidecar, record, sync_folder=False)  # its name is synced with the checkpoint's

    with closing(running):
        replace_file(plan, path, overwrite=True, verify=describe, feed=running.feed)
    return SavedState(header["step"], path, record)


def _replaced(path: str, sidecar: str) -> dict[str, Any]:
    """What the old sidecar says of the old checkpoint, to which the new one belongs, too, until that is replaced."""
    paths = (path, os.path.splitext(path)[0] + ".pt", os.path.splitext(path)[0] + ".dcp")
    old = read_json(sidecar) if any(map(os.path.lexists, paths)) else None
    keys = ("step", "bytes", "sha256", "files", LOGGED)
    return {} if old is None else {"replaces": {key: old[key] for key in keys if key in old}}


def check(saved: SavedState, verify: str = "full") -> SavedState:
    """A checkpoint with the facts that its sidecar has of it. Raises `Corrupt` unless they match it. verify: `full`
    compares its sha256, too, `size` only its size."""
    sidecar = saved.sidecar
    if saved.path.endswith(".pt") and os.path.isdir(saved.path):
        raise Corrupt(f"{saved.path} is a folder", "A checkpoint of that name is a file.")
    if sidecar is None:
        raise Corrupt(f"{saved.path} has no sidecar", "It was not committed, or the sidecar was lost.")
    if sidecar.get("step") != saved.step:
        raise Corrupt(f"the sidecar of {saved.path} belongs to another step", "Files were renamed, or mixed up.")
    # After a kill between the two renames, the checkpoint is still the one that was to be replaced.
    records = [record for record in (sidecar, sidecar.get("replaces")) if isinstance(record, dict)]
    problems = [_damage(saved.path, record, verify) for record in records]
    for record, problem in zip(records, problems, strict=True):
        if not problem:
            return replace(saved, sidecar={**sidecar, **record})
    raise Corrupt(problems[0], "It was truncated, overwritten or damaged after it was saved.")


def is_whole(saved: SavedState, verify: str) -> bool:
    """True for a checkpoint that `check` finds nothing wrong with."""
    with suppress(CkptoolError):
        check(saved, verify)
        return True
    return False


def _damage(path: str, record: dict[str, Any], verify: str) -> str:
    """The first difference between a checkpoint and its sidecar, in words; "" if it is whole. Raises `FileProblem`."""
    paths, files = files_of(path), record.get("files")
    for name, facts in files.items() if isinstance(files, dict) else [("", record)]:
        if (file := paths.get(name)) is None:
            return f"{os.path.join(path, name)} is missing"
        size, expected = Source(file).size, facts.get("bytes") if isinstance(facts, dict) else None
        if size != expected:
            return f"{file} has {size:,} bytes; its sidecar says {expected!s}"
        if verify == "full" and file_digest(file) != facts.get("sha256"):
            return f"{file} does not match its sha256"
    return ""


def newest_whole(
    folder: str,
    checkpoints: list[SavedState],
    say: Callable[[str], Any],
    verify: str = "full",
    note: Callable[..., Any] = lambda event, **facts: None,
) -> SavedState | None:
    """The newest whole one of a folder's checkpoints (oldest first), as `check` returns it; None if there are none.

    say: called with which was skipped, and why.  verify: as in `check`.  note: adds that to a history.
    Raises `NoneValid` if all are damaged.
    """
    for saved in reversed(checkpoints):
        try:
            return check(saved, verify)
        except CkptoolError as error:
            say(f"skipped: {error.within(saved.path).what}")
            note("skip-damaged", step=saved.step, path=saved.path, why=error.what)
    if checkpoints:
        what = f"{folder} holds {counted(len(checkpoints), 'checkpoint')}, and none of them is whole"
        why = "Nothing was deleted, and no training was started over."
        raise NoneValid(what, why, f"See what is wrong with them: {command('scan', folder)}")
    return None


def files_of(path: str) -> dict[str, str]:
    """The files of a checkpoint by their names below its folder; a checkpoint of one file by the name ""."""
    if not os.path.isdir(path):
        return {"": path}
    below = (os.path.join(root, name) for root, _, names in os.walk(path) for name in names)
    return {os.path.relpath(file, path): file for file in sorted(below) if stat.S_ISREG(os.lstat(file).st_mode)}


def size_of(path: str) -> int:
    """The bytes of a checkpoint. Raises `FileProblem`."""
    return sum(Source(file).size for file in files_of(path).values())


def described(files: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The size and the digest of each of these files, by the same names. Raises `FileProblem`."""
    return {name: {"bytes": Source(path).size, "sha256": file_digest(path)} for name, path in files.items()}


# Which of them stay --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retention:
    """The checkpoints to keep: the newest, the `last`, the `best` by a metric, and those at a multiple of `every`.

    A checkpoint that was saved only to stop is kept while it is the newest, and does not count among the others: a run
    that was stopped ends with the checkpoints of one that was not.
    """

    last: int
    best: int
    every: int
    metric: str
    mode: str

    def reasons(self, checkpoints: Iterable[SavedState]) -> dict[int, list[str]]:
        """The steps to keep, in order, each with the names of the rules that keep it."""
        by_step = sorted(checkpoints, key=lambda saved: saved.step)
        regular = [saved for saved in by_step if not saved.is_stop]
        # The best first; 0.0 counts, NaN and missing values never rank, and of equal ones the older comes first.
        sign = 1 if self.mode == "min" else -1
        measured = [saved for saved in regular if not math.isnan(saved.metrics.get(self.metric, math.nan))]
        rules = {
            "newest": by_step[-1:],
            "last": regular[-self.last :] if self.last else [],
            "best": sorted(measured, key=lambda saved: sign * saved.metrics[self.metric])[: self.best],
            "every": [saved for saved in regular if self.every and saved.step % self.every == 0],
        }
        reasons: dict[int, list[str]] = {}
        for name, chosen in rules.items():
            for saved in chosen:
                reasons.setdefault(saved.step, []).append(name)
        return dict(sorted(reasons.items()))

    def divide(self, saves: list[SavedState], verify: str = "size") -> tuple[dict[int, list[str]], list[SavedState]]:
        """The steps to keep, each with its rules, and the whole checkpoints that no rule keeps.

        Damaged ones stay and do not count: they are for a person to look at.
        verify: how `check` looks at those to keep; for one that is damaged, the rules keep another.
        """
        intact, checked = [saved for saved in saves if is_whole(saved, "size")], set[int]()
        if verify == "size":
            checked = {saved.step for saved in intact}
        while new := (reasons := self.reasons(intact)).keys() - checked:  # reading all of one takes long: each once
            intact = [saved for saved in intact if saved.step not in new or is_whole(saved, verify)]
            checked |= new
        unwanted = [saved for saved in intact if saved.step not in reasons]
        paths = {saved.path for saved in intact}
        damaged = {saved.step: ["damaged"] for saved in saves if saved.path not in paths}
        return dict(sorted((damaged | reasons).items())), unwanted


# Lines ---------------------------------------------------------------------------------------------------------------


class Lines:
    """A file of JSON lines that only grows, except when a run goes on from an earlier step.

    Each line is one write: readers see it at once, and a kill tears no other.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def add(self, fact: dict[str, Any], *, sync: bool = False) -> None:
        """Adds a line after the last whole one; opens the file anew, as it may have been replaced.

        Raises `FileProblem`, on a full disk too; the next line cuts off what was written of this one.
        """
        line = (json.dumps(_finite(fact), allow_nan=False, default=str) + "\n").encode()
        with _problems(self.path, "write to"):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                end = size = os.fstat(fd).st_size
                while end and os.pread(fd, 1, end - 1) != b"\n":  # rarely more than a few bytes
                    end -= 1
                if end < size:
                    os.ftruncate(fd, end)
                while line:
                    line = line[os.write(fd, line) :]
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)

    def read(self) -> Iterator[dict[str, Any]]:
        """Every whole line."""
        return (fact for _, fact in self._lines() if fact is not None)

    def _lines(self) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Every line with its JSON object; None for a torn line, or one of another kind."""
        if not os.path.lexists(self.path):
            return
        with (
            _problems(self.path, "read"),
            open(open_regular(self.path, "a file of lines"), encoding="utf-8", errors="replace") as file,
        ):
            for line in file:
                fact = None
                with suppress(ValueError, RecursionError):
                    fact = json.loads(line)
                yield line, fact if isinstance(fact, dict) else None

    @property
    def size(self) -> int:
        """Its bytes; 0 where it is not there."""
        return os.path.getsize(self.path) if os.path.exists(self.path) else 0

    def cut_back(self, step: int, size: Any = None) -> None:
        """Cuts off what was logged after a checkpoint: all beyond `size` bytes, which its sidecar has; if that is not
        known or the file is shorter, the lines after its step. The loop will write them again."""
        if type(size) is not int or not 0 <= size <= self.size:
            self.keep(lambda fact: not isinstance(logged := fact.get("step", 0), (int, float)) or logged <= step)
        elif size < self.size:
            with _problems(self.path, "write to"):
                os.truncate(self.path, size)

    def keep(self, is_kept: Callable[[dict[str, Any]], bool]) -> None:
        """Drops all but the whole lines for which `is_kept` is true."""
        lines = list(self._lines())
        remaining = [line for line, fact in lines if fact is not None and line.endswith("\n") and is_kept(fact)]
        if len(remaining) < len(lines):
            write_text(self.path, "".join(remaining))


def _finite(value: Any) -> Any:
    """A value with the numbers that JSON cannot have (NaN, infinities) as texts."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


# All of a run --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunFolder:
    """The folder of a run. Only the first process holds the lock and writes; parts of tensors are written by all.

    id: of the run; checkpoints of other runs are ignored.  retention: what `prune` keeps.  by_script: it is one of
    `ckptool.Run`.
    """

    folder: str
    id: str
    retention: Retention = Retention(1, 0, 0, "", "min")
    lock: Lock | None = None
    by_script: bool = False
    history: Lines = field(init=False)
    metrics: Lines = field(init=False)
    _clock: float | None = field(init=False, default=None)
    _before: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.history, self.metrics = (Lines(os.path.join(self.folder, name)) for name in (HISTORY, METRICS))

    @property
    def checkpoints(self) -> str:
        return os.path.join(self.folder, CHECKPOINTS)

    @property
    def elsewhere(self) -> str | Command:
        """What to type for a run in another folder."""
        return "ckptool.Run('OTHER', …)" if self.by_script else OTHER_RUN

    @property
    def way_on(self) -> str:
        """What to do to resume."""
        by_command = f"resume: {command('resume', self.folder)}"
        return "run the script again: it resumes by itself" if self.by_script else by_command

    def close(self) -> None:
        """Releases the lock."""
        if self.lock is not None:
            self.lock.release()

    # Checkpoints

    def commit(self, step: int, tree: Any, facts: dict[str, Any]) -> SavedState:
        """Writes the state after `step` steps, and facts about it (metrics, epoch, environment) in its sidecar.

        Raises `DiskFull`, `FileProblem`, or `Conflict` over a file of something else; older checkpoints stay.
        """
        self.refuse_others(step - 1, step)
        path = os.path.join(self.checkpoints, name_of(step))
        saved = commit_file(tree, path, sidecar_of(path), {"run": self.id, "step": step}, facts)
        _delete(os.path.join(self.checkpoints, name_of(step, ".dcp")))
        return saved

    def commit_together(self, step: int, tree: Any, facts: dict[str, Any], world: World) -> SavedState:
        """Writes the state after `step` steps as a folder, every process its part; all of them call this.

        An error in one is raised in all: those of `commit`, or `RunFailed`.
        """
        from ckptool.training.parallel import write_divided

        new_folders: list[NewFolder] = []

        def begin() -> str:
            self.refuse_others(step - 1, step)
            new_folders.append(NewFolder(os.path.join(self.checkpoints, name_of(step, ".dcp"))))
            new_folders[0].begin()
            return new_folders[0].path

        def commit() -> SavedState:
            if different := sorted(set(files) ^ set(files_of(new_folders[0].path))):
                raise FileProblem(
                    f"{new_folders[0].target}: not all processes see {listed(different, 3)}",
                    "They write to one folder, which all machines have to share.",
                )
            path, sidecar = new_folders[0].target, sidecar_of(new_folders[0].target)
            record = {"run": self.id, "step": step, "bytes": sum(entry["bytes"] for entry in files.values())}
            record |= {**_replaced(path, sidecar), "files": files, "world": world.size, **facts}
            write_json(sidecar, record, sync_folder=False)
            new_folders[0].commit(_PART.fullmatch)
            _delete(os.path.join(self.checkpoints, name_of(step)))
            return SavedState(step, path, record)

        try:
            folder = world.first(begin)
            write_divided(tree, folder, world.group)
            begins = (f"__{world.rank}_", *([".metadata"] if world.is_first else []))  # the first one writes the table
            local_files = {name: path for name, path in files_of(folder).items() if name.startswith(begins)}
            by_rank = world.each(lambda: described(local_files))
            files = {name: entry for part in by_rank for name, entry in part.items()}  # as their writers saw them
            saved: SavedState = world.first(commit)
            return saved
        finally:
            for new_folder in new_folders:
                new_folder.close()

    def all(self) -> list[SavedState]:
        """The checkpoints in the folder, oldest first, whole or not; without those of other runs."""
        candidates = [SavedState(step, path, read_json(sidecar_of(path))) for step, path in checkpoints_in(self.folder)]
        return [saved for saved in candidates if (saved.sidecar or {}).get("run", self.id) == self.id]

    def newest_valid(self, verify: str, say: Callable[[str], Any]) -> SavedState | None:
        """The newest whole checkpoint, None before the first; says which it skipped, and records it.

        verify: see `check`. Raises `NoneValid` where all are damaged, `Conflict` where all are another run's.
        """
        newest = newest_whole(self.checkpoints, self.all(), say, verify, self.note)
        if newest is None and checkpoints_in(self.folder):
            what = f"{self.folder} holds checkpoints, and none of them belongs to this run"
            why = "They belong to the run whose run.yaml was here before. They were left as they are."
            raise Conflict(what, why, f"Put that run.yaml back, or start this run in another folder: {self.elsewhere}")
        if newest is None and any(fact.get("event") == "save" for fact in self.history.read()):
            say(f"{printable(self.folder)} has lost all its checkpoints: it begins again at step 0")
        return newest

    def prune(self) -> list[SavedState]:
        """Deletes the checkpoints that retention does not keep; returns them.

        Sidecars without checkpoints, left by a process that was killed in a save or here, are deleted too.
        """
        checkpoints = self.all()
        _, pruned = self.retention.divide(checkpoints)
        for saved in pruned:
            self.remove(saved)
        sidecars = {sidecar_of(saved.path) for saved in checkpoints}
        for _, path in _files_in(self.folder):
            if path.endswith(".json") and path not in sidecars and (read_json(path) or {}).get("run") == self.id:
                remove_file(path)
        return pruned

    def remove(self, saved: SavedState) -> None:
        """Deletes a checkpoint before its sidecar: a sidecar alone is no checkpoint."""
        _delete(saved.path)
        remove_file(sidecar_of(saved.path))

    # Whose files they are

    def refuse_others(self, after: int, last: int) -> None:
        """Raises `Conflict` if a checkpoint of these steps would overwrite a file that is not this run's."""
        foreign = []
        for step, path in _files_in(self.folder):
            if not after < step <= last:
                continue
            # A file of this run is known by its sidecar, or if that was lost, by the history.
            sidecar = read_json(sidecar_of(path)) or {}
            saves = (fact.get("step") for fact in self.history.read() if fact.get("event") == "save")
            is_ours = sidecar["run"] == self.id if "run" in sidecar else step in saves
            if not is_ours or (os.path.isdir(path) and not path.endswith(".dcp")):
                foreign.append(os.path.basename(path))
        if foreign:
            raise not_ours(self.checkpoints, foreign, self.elsewhere)

    def claim(self, name: str) -> None:
        """Notes another file that the run writes. Raises `Conflict` if it exists and the history does not name it."""
        if any(fact.get("event") == "writes" and fact.get("name") == name for fact in self.history.read()):
            return
        if os.path.lexists(os.path.join(self.folder, name)):
            raise not_ours(self.folder, [name], self.elsewhere)
        self.note("writes", name=name)

    # Its history

    def note(self, event: str, **facts: Any) -> None:
        """Adds an event to the history, synced, with the time of day and the seconds since the run was started or
        resumed, and of all its starts together."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        if event in ("start", "resume"):
            earlier = [fact.get("total_seconds") for fact in self.history.read()]  # of each start up to its last event
            totals = (value for value in reversed(earlier) if isinstance(value, (int, float)))
            self._clock, self._before = time.monotonic(), next(totals, 0.0)
        if self._clock is not None:
            seconds = time.monotonic() - self._clock
            facts |= {"seconds": round(seconds, 3), "total_seconds": round(self._before + seconds, 3)}
        self.history.add({"event": event, **facts, "time": now, "run": self.id}, sync=True)


def checkpoints_in(folder: str) -> list[tuple[int, str]]:
    """The checkpoints of any run in a folder, whole or not, oldest first: step and path. Raises `FileProblem`."""
    return [(step, path) for step, path in _files_in(folder) if not path.endswith(".json")]


def _files_in(folder: str) -> list[tuple[int, str]]:
    """The same with sidecars."""
    root, names = os.path.join(folder, CHECKPOINTS), list[str]()
    with _problems(root, "read"), suppress(FileNotFoundError):
        names = os.listdir(root)
    return sorted((int(match[1]), os.path.join(root, match[0])) for match in map(_FILE.fullmatch, names) if match)


def not_ours(folder: str, names: Sequence[str], elsewhere: str | Command) -> Conflict:
    """The error for files with the names of a run's files that the run did not write."""
    them = "them" if len(names) > 1 else "it"
    return Conflict(
        f"{folder} holds {listed(names, 3)}, which this run did not write",
        f"It would overwrite {them}. Nothing was changed.",
        f"Give the run a folder of its own: {elsewhere}; or move {them} away",
    )


# Small files ---------------------------------------------------------------------------------------------------------


def _delete(path: str) -> None:
    """Deletes a checkpoint, if it is there."""
    if os.path.isdir(path):
        remove_folder(path, _PART.fullmatch)
    else:
        remove_file(path)


def remove_file(path: str) -> None:
    """Deletes a file, if it is there. Raises `FileProblem`."""
    with _problems(path, "delete"), suppress(FileNotFoundError):
        os.unlink(path)


def file_digest(path: str) -> str:
    """The sha256 of a file, in hexadecimal. Raises `FileProblem`."""
    source = Source(path)
    return sha256_of(FileRange(source, 0, source.size)).hexdigest()


AHEAD = 8  # pieces with memory of their own that may wait; a further one holds up the writer


class StreamingSha256:
    """The sha256 of a file as it is written. A file that was not written in order is read again at the end."""

    def __init__(self) -> None:
        self._total = hashlib.sha256()
        self._position = 0  # the bytes summed so far; -1 after a write out of order
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sha256")
        self._pending: deque[Future[None]] = deque()  # of pieces that use memory until they are summed

    def feed(self, at: int, data: bytes | bytearray | memoryview) -> None:
        """Takes the data written at byte `at`, which nobody may change afterwards."""
        if at != self._position:
            self._position = -1
            return
        self._position += len(data)
        if len(self._pending) >= AHEAD:
            self._pending.popleft().result()
        job = self._pool.submit(self._total.update, data)
        if not isinstance(data, memoryview):  # a view of tensors takes no memory, and may wait while the file is synced
            self._pending.append(job)

    def result(self, path: str) -> str:
        """The digest of the file at `path`, in hexadecimal. Raises `FileProblem` where it cannot be read again."""
        self.close()
        return self._total.hexdigest() if self._position == os.stat(path).st_size else file_digest(path)

    def close(self) -> None:
        """Waits for the work in progress; no more data is taken."""
        self._pool.shutdown(wait=True)


@contextmanager
def _problems(path: str, verb: str) -> Iterator[None]:
    """Turns errors of the system into `FileProblem`."""
    try:
        yield
    except CkptoolError:
        raise
    except (OSError, ValueError) as error:
        raise file_problem(error, path, verb) from error


def write_text(path: str, text: str, *, sync_folder: bool = True) -> None:
    """Replaces a small file, durably; with `sync_folder` false, once another name in its folder is synced."""
    replace_file(text.encode(), path, overwrite=True, sync_folder=sync_folder)


def write_json(path: str, value: dict[str, Any], *, sync_folder: bool = True) -> None:
    """Replaces a small JSON file, as `write_text` does; keys in their own order."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False, default=str) + "\n", sync_folder=sync_folder)


def read_json(path: str) -> dict[str, Any] | None:
    """A small JSON object; None where it is missing or damaged."""
    value = json_or_none(path, 1 << 24)
    return value if isinstance(value, dict) else None
